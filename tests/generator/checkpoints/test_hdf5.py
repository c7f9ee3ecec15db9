"""`tf_model.h5`, as transformers 4.41 writes it from TensorFlow.

The layout is that of the files that TFT5ForConditionalGeneration and TFT5EncoderModel
saved on TensorFlow 2.15; those of 2020 name the embedding "weight".
"""

import pathlib
import re
import shutil

import h5py
import numpy as np
import pytest
import safetensors.numpy

from tfdpsq.generator import checkpoints
from tfdpsq.validation import DataError

_FIXTURES = pathlib.Path(__file__).parent / "fixtures"
_MODEL = "tft5_for_conditional_generation_1"
_BLOCK = "block_._1/layer_._0"


def _dataset(name, embedding):
    """Where a tensor of PyTorch's name is; and whether it is the transpose."""
    if name == "shared.weight":
        return f"shared/shared/shared/{embedding}:0", False
    if name == "lm_head.weight":
        return f"lm_head/{_MODEL}/lm_head/kernel:0", True
    stack, *parts, _ = name.split(".")
    leaf = "kernel"
    if parts[-1].endswith("norm"):
        leaf = "weight"
    elif parts[-1] == "relative_attention_bias":
        leaf = "embeddings"
    path = "/".join(parts)
    path = re.sub(r"(block|layer)/(\d+)", r"\1_._\2", path)
    return f"{stack}/{_MODEL}/{stack}/{path}/{leaf}:0", leaf == "kernel"


def _written(directory, version, embedding="embeddings", copies=True, change=None):
    """A directory of Hugging Face's with `tf_model.h5` alone."""
    shutil.copytree(_FIXTURES / f"t5_{version}", directory)
    source = directory / "model.safetensors"
    tensors = safetensors.numpy.load_file(source)
    source.unlink()
    with h5py.File(directory / "tf_model.h5", "w") as file:
        file.attrs["layer_names"] = ["shared", "encoder", "decoder"]
        file.create_group("top_level_model_weights").attrs["weight_names"] = []
        for name, value in tensors.items():
            place, turned = _dataset(name, embedding)
            file[place] = value.T if turned else value
        if copies:
            for stack in ("encoder", "decoder"):
                file[f"{stack}/shared/shared/embeddings:0"] = tensors["shared.weight"]
        if change:
            change(file)
    return directory


@pytest.mark.parametrize(
    "version, embedding, copies",
    [
        pytest.param("1.0", "embeddings", True, marks=pytest.mark.slow),
        ("1.1", "weight", False),
    ],
)
def test_hdf5_gives_what_safetensors_give(tmp_path, version, embedding, copies):
    directory = _written(tmp_path / "theirs", version, embedding, copies)
    config, backbone = checkpoints.load(directory)
    expected, theirs = checkpoints.load(_FIXTURES / f"t5_{version}")
    assert config == expected and len(backbone.weights) == len(theirs.weights)
    for ours, other in zip(backbone.weights, theirs.weights):
        np.testing.assert_array_equal(ours.numpy(), other.numpy())
    _, encoder = checkpoints.load_encoder(directory)
    _, theirs = checkpoints.load_encoder(_FIXTURES / f"t5_{version}")
    for ours, other in zip(encoder.weights, theirs.weights):
        np.testing.assert_array_equal(ours.numpy(), other.numpy())


_QUERY = f"encoder/{_MODEL}/encoder/{_BLOCK}/SelfAttention/q/kernel:0"


def _not_finite(file):
    file[_QUERY][0, 0] = np.nan


def _cut(file):
    del file[_QUERY]


@pytest.mark.parametrize(
    "change, message",
    [
        (_not_finite, "encoder.block.1.layer.0.SelfAttention.q.weight"),
        (_cut, "lacks .*encoder.block.1.layer.0.SelfAttention.q.weight"),
    ],
)
def test_malformed_file_is_refused_by_tensor(tmp_path, change, message):
    directory = _written(tmp_path / "theirs", "1.1", change=change)
    with pytest.raises(DataError, match=message) as refused:
        checkpoints.load(directory)
    assert "tf_model.h5" in str(refused.value)


def test_truncated_file_is_refused(tmp_path):
    directory = _written(tmp_path / "theirs", "1.0")
    file = directory / "tf_model.h5"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(DataError, match=r"tf_model.h5: it is truncated or damaged"):
        checkpoints.load(directory)
