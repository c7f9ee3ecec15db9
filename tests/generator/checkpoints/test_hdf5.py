"""`tf_model.h5`, as transformers 4.41 writes it from TensorFlow; what else is refused.

The layout is that of the files that TFT5ForConditionalGeneration and TFT5EncoderModel
saved on TensorFlow 2.15; those of 2020 name the embedding "weight".
"""

import json
import pathlib
import re
import shutil

import h5py
import numpy as np
import pytest
import safetensors.numpy

from tfdpsq.generator import T5QueryGenerator, checkpoints
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
        ("1.0", "embeddings", True),
        ("1.1", "embeddings", True),
        ("1.1", "weight", False),
    ],
)
def test_it_gives_what_safetensors_give(tmp_path, version, embedding, copies):
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
    # What is saved again has Hugging Face's layout, with PyTorch's transposes.
    again = tmp_path / "again"
    again.mkdir()
    T5QueryGenerator.from_preset(directory).save_to_preset(again)
    found, wanted = (
        safetensors.numpy.load_file(place / "model.safetensors")
        for place in (again, _FIXTURES / f"t5_{version}")
    )
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value)


def test_an_encoder_alone(tmp_path):
    def cut(file):
        del file["decoder"], file["lm_head"]

    directory = _written(tmp_path / "theirs", "1.1", change=cut)
    _, encoder = checkpoints.load_encoder(directory)
    _, theirs = checkpoints.load_encoder(_FIXTURES / "t5_1.1")
    for ours, other in zip(encoder.weights, theirs.weights):
        np.testing.assert_array_equal(ours.numpy(), other.numpy())
    with pytest.raises(DataError, match="it holds an encoder only"):
        checkpoints.load(directory)


_QUERY = f"encoder/{_MODEL}/encoder/{_BLOCK}/SelfAttention/q/kernel:0"


def _moved(file):
    file["encoder/elsewhere/block_._1/layer_._0/q/kernel:0"] = file[_QUERY][()]


def _pickled(file):
    file["optimizer"] = np.void(b"\x80\x04")


def _twice(file):
    file[f"encoder/other/encoder/{_BLOCK}/SelfAttention/q/kernel:0"] = file[_QUERY][()]


def _other_copy(file):
    file["decoder/shared/shared/embeddings:0"][0, 0] += 1


def _not_finite(file):
    file[_QUERY][0, 0] = np.nan


def _cut(file):
    del file[_QUERY]


def _turned(file):
    value = file[_QUERY][()]
    del file[_QUERY]
    file[_QUERY] = value.T


def _text(file):
    del file[_QUERY]
    file.create_dataset(_QUERY, (16, 24), h5py.string_dtype())


def _elsewhere(file):
    shape, kind = file[_QUERY].shape, file[_QUERY].dtype
    del file[_QUERY]
    outside = [("/etc/hostname", 0, h5py.h5f.UNLIMITED)]
    file.create_dataset(_QUERY, shape, kind, external=outside)


def _linked(file):
    del file[_QUERY]
    file[_QUERY] = h5py.ExternalLink("other.h5", "/q")


@pytest.mark.parametrize(
    "change, message",
    [
        (_moved, "unknown .*encoder/elsewhere/block_._1/layer_._0/q/kernel:0"),
        (_pickled, "unknown .*optimizer"),
        (_twice, r"q/kernel:0 and .*q/kernel:0 are both encoder.block.1.layer.0.Self"),
        (_other_copy, "decoder.embed_tokens.weight"),
        (_not_finite, "encoder.block.1.layer.0.SelfAttention.q.weight"),
        (_cut, "lacks .*encoder.block.1.layer.0.SelfAttention.q.weight"),
        (_turned, r"q.weight has shape \[24, 16\], .* makes it \[16, 24\]"),
        (_text, "q.weight holds object"),
        (_elsewhere, "q/kernel:0 keeps its values in another file"),
        (_linked, "lacks .*encoder.block.1.layer.0.SelfAttention.q.weight"),
    ],
)
def test_anything_else_is_refused_by_name(tmp_path, change, message):
    directory = _written(tmp_path / "theirs", "1.1", change=change)
    with pytest.raises(DataError, match=message) as refused:
        checkpoints.load(directory)
    assert "tf_model.h5" in str(refused.value)


def test_damaged_files_and_shards_are_refused(tmp_path):
    directory = _written(tmp_path / "theirs", "1.0")
    file = directory / "tf_model.h5"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(DataError, match=r"tf_model.h5: it is truncated or damaged"):
        checkpoints.load(directory)
    file.unlink()
    index = {"weight_map": {"shared/shared/embeddings:0": "tf_model-00001-of-2.h5"}}
    (directory / "tf_model.h5.index.json").write_text(json.dumps(index))
    with pytest.raises(
        DataError, match="shards of tf_model.h5 alone, which are not re"
    ):
        checkpoints.load(directory)
