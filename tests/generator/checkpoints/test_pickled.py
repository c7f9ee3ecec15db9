"""`pytorch_model.bin`: read by torch's restricted unpickler, or refused."""

import os
import pathlib
import pickle
import shutil
import sys
import types

import numpy as np
import pytest
import safetensors.numpy

from tfdpsq.generator import checkpoints
from tfdpsq.validation import DataError, InputError

_FIXTURES = pathlib.Path(__file__).parent / "fixtures"


@pytest.fixture
def directory(tmp_path):
    """Hugging Face's T5 1.1 without its safetensors."""
    copied = tmp_path / "theirs"
    shutil.copytree(_FIXTURES / "t5_1.1", copied)
    (copied / "model.safetensors").unlink()
    return copied


def _tensors():
    return safetensors.numpy.load_file(_FIXTURES / "t5_1.1" / "model.safetensors")


class _Runs:
    """What a pickle can hold instead of weights."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_missing_or_unsafe_torch_names_the_remedy(directory, monkeypatch):
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InputError, match="pip install 'tfdpsq.torch"):
        checkpoints.open_checkpoint(directory)
    unsafe = types.SimpleNamespace(__version__="2.5.1+cpu")
    monkeypatch.setitem(sys.modules, "torch", unsafe)
    with pytest.raises(InputError, match="2.6.*Run pip"):
        checkpoints.open_checkpoint(directory)


def test_a_pickle_gives_what_safetensors_give(directory):
    """With torch itself; values in bfloat16 included."""
    torch = pytest.importorskip("torch")
    found = {name: torch.tensor(value) for name, value in _tensors().items()}
    found = {n: t.to(torch.bfloat16) if "wi_0" in n else t for n, t in found.items()}
    torch.save(found, directory / "pytorch_model.bin")
    config, backbone = checkpoints.load(directory)
    expected, theirs = checkpoints.load(_FIXTURES / "t5_1.1")
    assert config == expected
    rounded = 0
    for ours, other in zip(backbone.weights, theirs.weights):
        values = other.numpy()
        if not np.array_equal(ours.numpy(), values):
            rounded += 1
            values = torch.tensor(values).to(torch.bfloat16).float().numpy()
        np.testing.assert_array_equal(ours.numpy(), values)
    # The gate's partner in each of the encoder's and decoder's layers.
    assert rounded == sum("wi_0" in name for name in found)


def test_pickle_with_code_or_damage_is_refused_unrun(directory, tmp_path):
    torch = pytest.importorskip("torch")
    target = tmp_path / "made by the pickle"
    content = {"shared.weight": _Runs(target)}
    path = directory / "pytorch_model.bin"
    torch.save(content, path)
    with pytest.raises(DataError, match="pytorch_model.bin: it is .* damaged"):
        checkpoints.open_checkpoint(directory)
    assert not target.exists()
    path.write_bytes(b"\x80\x02")
    with pytest.raises(DataError, match="pytorch_model.bin: it "):
        checkpoints.open_checkpoint(directory)
