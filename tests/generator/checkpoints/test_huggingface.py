"""Hugging Face directories: read whole, and written again to the same bytes.

The directories under fixtures/ were written by `transformers`; see hf_fixtures.py.
"""

import json

import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import load_file

from tfdpsq.generator import checkpoints
from tfdpsq.generator.checkpoints import load, load_encoder, open_checkpoint
from tfdpsq.generator.checkpoints.weights import variable_of, weights_of
from tfdpsq.validation import DataError, InputError

_FILES = ("config.json", "model.safetensors")


def _values(model, config, encoder_only=False):
    return {
        weight.huggingface: variable_of(model, weight).numpy()
        for weight in weights_of(config, encoder_only)
    }


def _assert_same(model, other, config, encoder_only=False):
    first = _values(model, config, encoder_only)
    second = _values(other, config, encoder_only)
    for name, values in first.items():
        np.testing.assert_array_equal(values, second[name], err_msg=name)


def test_checkpoint_of_transformers_is_written_again_byte_for_byte(loaded, tmp_path):
    directory, config, backbone = loaded
    checkpoints.save(tmp_path, config, backbone)

    ours, theirs = tmp_path / "model.safetensors", directory / "model.safetensors"
    assert ours.read_bytes() == theirs.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == list(_FILES)
    # Of what decides the model, the config says the same; of the rest, nothing.
    written = json.loads((tmp_path / "config.json").read_text())
    given = json.loads((directory / "config.json").read_text())
    differing = {key for key in written if written[key] != given.get(key)}
    # transformers 5 writes `true` into the first and renamed the second.
    assert differing <= {"tie_word_embeddings", "torch_dtype"}
    assert written["tie_word_embeddings"] == given["scale_decoder_outputs"]
    assert written["torch_dtype"] == given["dtype"]


def test_half_precision_is_rounded_once_and_then_exact(models, read, tmp_path):
    dtype = "bfloat16"
    first, second = tmp_path / "first", tmp_path / "second"
    for directory in (first, second):
        directory.mkdir()
    checkpoints.save(first, *models["1.0"], dtype=dtype)
    checkpoints.save(second, *read(first), dtype=dtype)

    for name in _FILES:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    assert json.loads((first / "config.json").read_text())["torch_dtype"] == dtype
    stored = load_file(first / "model.safetensors")
    config, backbone = models["1.0"]
    exact = backbone.token_embedding.embeddings
    np.testing.assert_array_equal(stored["shared.weight"], tf.cast(exact, dtype))


def test_shards_are_read_as_one_file_is(copy_of, models, read):
    version = "1.1"
    copied = copy_of(version)
    copied.shard()

    config, backbone = read(copied.path)
    assert config == models[version][0]
    _assert_same(backbone, models[version][1], config)


def test_an_encoder_alone_is_written_and_read(models, tmp_path):
    config, backbone = models["1.0"]
    checkpoints.save(tmp_path, config, backbone, encoder_only=True)

    written = load_file(tmp_path / "model.safetensors")
    assert not [name for name in written if name.startswith(("decoder", "lm_head"))]
    found, encoder = load_encoder(tmp_path)
    assert found == config
    _assert_same(encoder, backbone, config, encoder_only=True)
    with pytest.raises(DataError, match="is_encoder_decoder is False"):
        load(tmp_path)


def test_failed_save_keeps_the_old_checkpoint(copy_of, read, tmp_path):
    copied = copy_of()
    config, backbone = read(copied.path)
    before = copied.weights_file.read_bytes()
    backbone.decoder_layer_norm.weight.assign(tf.fill([16], np.nan))
    (tmp_path / "new").mkdir()

    for target in (copied.path, tmp_path / "new"):
        with pytest.raises(InputError, match="decoder.final_layer_norm.weight is"):
            checkpoints.save(target, config, backbone)
    assert copied.weights_file.read_bytes() == before
    assert len(list(copied.path.iterdir())) == 2
    assert list((tmp_path / "new").iterdir()) == []


# -- What other versions of the library write ------------------------------------


def test_copies_of_the_embedding_are_one_weight(copy_of, models, read):
    copied = copy_of()
    config, backbone = models["1.0"]
    names = ("lm_head", "encoder.embed_tokens", "decoder.embed_tokens")

    def add(tensors):
        for name in names:
            tensors[f"{name}.weight"] = tensors["shared.weight"].copy()

    copied.change_tensors(add)
    _assert_same(read(copied.path)[1], backbone, config)

    def keep_another(tensors):
        for name in ("shared", *names[:2]):
            tensors.pop(f"{name}.weight")

    copied.change_tensors(keep_another)
    _assert_same(read(copied.path)[1], backbone, config)


# Configs as they are published: t5-small's of 2019, google/t5-v1_1-small's and
# google/flan-t5-small's, and google/mt5-small's: keys that they lack, and others.
_GATED = "dense_act_fn is_gated_act scale_decoder_outputs"
_OF_2019 = "feed_forward_proj relative_attention_max_distance num_decoder_layers "
_OF_2019 += f"is_decoder tie_word_embeddings {_GATED}"
_OLD = {"architectures": ["T5WithLMHeadModel"], "n_positions": 512}
_MT5 = {"model_type": "mt5", "architectures": ["MT5ForConditionalGeneration"]}
_PUBLISHED = {
    "t5": ("1.0", _OF_2019, _OLD),
    "t5 1.1": ("1.1", _GATED, {"tie_word_embeddings": False}),
    "mt5": ("1.1", "scale_decoder_outputs", {**_MT5, "tie_word_embeddings": False}),
}


@pytest.mark.parametrize("name", _PUBLISHED)
def test_published_configs_are_understood(name, copy_of):
    version, lacking, changes = _PUBLISHED[name]
    copied = copy_of(version)
    expected = open_checkpoint(copied.path).config
    copied.change_config(**changes, **dict.fromkeys(lacking.split(), ...))

    assert open_checkpoint(copied.path).config == expected
    assert expected.version == version
    assert (expected.hidden_dim, expected.key_value_dim) == (16, 8)
