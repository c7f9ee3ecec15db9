"""`pytorch_model.bin`: read by torch's restricted unpickler, or refused."""

import json
import os
import pathlib
import pickle
import shutil
import sys
import types
import zipfile

import numpy as np
import pytest
import safetensors.numpy

from tfdpsq.generator import checkpoints
from tfdpsq.generator.checkpoints import pickled
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


def test_without_torch_or_with_an_unsafe_one_the_remedy_is_named(
    directory, monkeypatch
):
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InputError, match="not installed. Run pip install 'tfdpsq.tor"):
        checkpoints.open_checkpoint(directory)
    for version, safe in (("2.5.1+cpu", False), ("2.10.0", True), ("dev", False)):
        fake = types.SimpleNamespace(__version__=version)
        monkeypatch.setitem(sys.modules, "torch", fake)
        if safe:
            assert pickled.library(directory) is fake
            continue
        with pytest.raises(InputError, match="2.6 is the first that cannot. Run pip"):
            checkpoints.open_checkpoint(directory)


def test_nothing_but_the_restricted_unpickler_is_asked(directory, monkeypatch):
    """Whatever the file is; its other values are refused by name."""
    asked = []

    def load(path, **options):
        asked.append(options)
        return {"shared.weight": tensor, "epoch": 3}

    tensor = types.SimpleNamespace(
        layout="strided", shape=(2, 3), dtype="torch.float32"
    )
    fake = types.SimpleNamespace(
        __version__="2.6.0", load=load, Tensor=types.SimpleNamespace, strided="strided"
    )
    monkeypatch.setitem(sys.modules, "torch", fake)
    path = directory / "pytorch_model.bin"
    for content in (b"old", None):
        path.write_bytes(content or b"")
        if content is None:
            with zipfile.ZipFile(path, "w") as file:
                file.writestr("data.pkl", b"")
        with pytest.raises(DataError, match="epoch is a int, not a tensor. Give a pyt"):
            checkpoints.open_checkpoint(directory)
    for options, mapped in zip(asked, (False, True)):
        assert options == {"map_location": "cpu", "weights_only": True, "mmap": mapped}


@pytest.mark.parametrize("sharded", [False, True])
def test_a_pickle_gives_what_safetensors_give(directory, sharded):
    """With torch itself, values in bfloat16 and shards included."""
    torch = pytest.importorskip("torch")
    found = {name: torch.tensor(value) for name, value in _tensors().items()}
    found = {n: t.to(torch.bfloat16) if "wi_0" in n else t for n, t in found.items()}
    if sharded:
        names = sorted(found)
        places = {
            name: f"pytorch_model-{row % 2 + 1}.bin" for row, name in enumerate(names)
        }
        for shard in set(places.values()):
            part = {name: found[name] for name in names if places[name] == shard}
            torch.save(part, directory / shard, _use_new_zipfile_serialization=False)
        text = json.dumps({"weight_map": places})
        (directory / "pytorch_model.bin.index.json").write_text(text)
    else:
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


@pytest.mark.parametrize("new", [False, True])
def test_a_pickle_that_would_run_something_does_not(directory, tmp_path, new):
    torch = pytest.importorskip("torch")
    target = tmp_path / "made by the pickle"
    content = {"shared.weight": _Runs(target)}
    path = directory / "pytorch_model.bin"
    if new:
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps(content))
    with pytest.raises(DataError, match="it holds more than tensors, or is damaged"):
        checkpoints.open_checkpoint(directory)
    assert not target.exists()
    path.write_bytes(b"\x80\x02")
    with pytest.raises(DataError, match="pytorch_model.bin: it "):
        checkpoints.open_checkpoint(directory)
    torch.save([torch.zeros(2)], path)
    with pytest.raises(DataError, match="its content is a list, not a tensor"):
        checkpoints.open_checkpoint(directory)
