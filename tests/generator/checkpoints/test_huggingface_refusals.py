"""Hugging Face directories that are damaged or no T5: what is wrong is named.

All but broken values is found before a model is built, so nothing is half-loaded.
"""

import json

import numpy as np
import pytest

from tfdpsq.generator.checkpoints import open_checkpoint
from tfdpsq.validation import DataError, InputError

_Q = "encoder.block.0.layer.0.SelfAttention.q.weight"

# Name: keys changed in the config of a T5 1.0, and what the error says.
_BAD_CONFIGS = {
    "other model": (dict(model_type="longt5"), "model_type is 'longt5'"),
    "umt5": (dict(model_type="umt5"), "model_type is 'umt5'"),
    "other head": (
        dict(architectures=["T5ForQuestionAnswering"]),
        "architectures is 'T5ForQuestionAnswering'",
    ),
    "other activation": (
        dict(feed_forward_proj="gated-silu"),
        "feed_forward_proj is 'gated-silu', not 'relu' or 'gated-gelu'",
    ),
    "other gelu": (dict(dense_act_fn="gelu"), "dense_act_fn is 'gelu', not 'relu'"),
    "buckets": (
        dict(relative_attention_num_buckets=64),
        "relative_attention_num_buckets is 64, not 32",
    ),
    "distance": (
        dict(relative_attention_max_distance=256),
        "relative_attention_max_distance is 256, not 128",
    ),
    "epsilon": (dict(layer_norm_epsilon=1e-5), "layer_norm_epsilon is 1e-05"),
    "no decoder": (dict(is_encoder_decoder=False), "is_encoder_decoder is False"),
    "fewer layers": (
        dict(num_decoder_layers=1),
        "num_decoder_layers is 1, not num_layers, 2",
    ),
    "padding": (dict(pad_token_id=1), "pad_token_id is 1, not 0"),
    "start": (dict(decoder_start_token_id=1), "decoder_start_token_id is 1, not 0"),
    "untied relu": (
        dict(tie_word_embeddings=False, scale_decoder_outputs=...),
        "tie_word_embeddings is False, not True, as feed_forward_proj is 'relu'",
    ),
    "unscaled relu": (
        dict(scale_decoder_outputs=False),
        "scale_decoder_outputs is False, not True",
    ),
    "relu mt5": (
        dict(model_type="mt5", architectures=None),
        "feed_forward_proj is 'relu'",
    ),
    "no size": (dict(d_model=..., d_kv=None), "it lacks d_model, d_kv"),
    "a size of zero": (dict(num_heads=0), "num_heads is 0"),
    "a size in words": (dict(d_ff="large"), "intermediate_dim is 'large'"),
    "a list for a name": (dict(feed_forward_proj=["relu"]), "feed_forward_proj is "),
    "a name for a list": (dict(architectures="T5"), "architectures is 'T5', not"),
}


@pytest.mark.parametrize("name", _BAD_CONFIGS)
def test_a_config_of_another_model_names_key_and_value(name, copy_of):
    changes, message = _BAD_CONFIGS[name]
    copied = copy_of()
    copied.change_config(**changes)

    with pytest.raises(DataError, match=f"config.json: .*{message}"):
        open_checkpoint(copied.path)


def test_a_gated_model_with_a_tied_head_is_refused(copy_of):
    copied = copy_of("1.1")
    copied.change_config(tie_word_embeddings=True, scale_decoder_outputs=...)

    with pytest.raises(DataError, match="tie_word_embeddings is True, not False, as"):
        open_checkpoint(copied.path)
    # A config without the key means a tied head.
    copied.change_config(tie_word_embeddings=...)
    with pytest.raises(DataError, match="tie_word_embeddings is 'absent', not False"):
        open_checkpoint(copied.path)


def _cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def _replace(copied, name, change):
    copied.change_tensors(lambda t: t.update({name: change(t[name]).copy()}))


# Name: what is done to a good directory, and what the error says.
_BAD_FILES = {
    "no config": (
        lambda c: c.config_file.unlink(),
        "config.json: cannot be read .*No such file",
    ),
    "no JSON": (
        lambda c: _cut(c.config_file, 100),
        "config.json: it is not valid JSON",
    ),
    "a list": (
        lambda c: c.config_file.write_text("[1]"),
        "config.json: it holds no JSON object",
    ),
    "no weights": (lambda c: c.weights_file.unlink(), "theirs: it has no weights"),
    "cut in the values": (
        lambda c: _cut(c.weights_file, 20_000),
        "model.safetensors: it is truncated or damaged",
    ),
    "cut in the header": (
        lambda c: _cut(c.weights_file, 1000),
        "model.safetensors: it is truncated or damaged",
    ),
    "empty": (
        lambda c: _cut(c.weights_file, 0),
        "model.safetensors: it is truncated or damaged",
    ),
    "missing tensor": (
        lambda c: c.change_tensors(lambda t: t.pop(_Q)),
        f"theirs: it lacks 1 tensor: {_Q}",
    ),
    "extra tensor": (
        lambda c: c.change_tensors(lambda t: t.update(bias=t[_Q][0].copy())),
        "model.safetensors: it has 1 unknown tensor: bias",
    ),
    "wrong shape": (
        lambda c: _replace(c, _Q, lambda q: q[:16]),
        rf"model.safetensors: tensor {_Q} has shape \[16, 16\], .* \[24, 16\]",
    ),
    "wrong vocabulary": (
        lambda c: c.change_config(vocab_size=61),
        r"tensor shared.weight has shape \[60, 16\], .* makes it \[61, 16\]",
    ),
    "wrong type": (
        lambda c: _replace(c, _Q, lambda q: q.astype("int8")),
        f"tensor {_Q} holds I8. Weights must be float32, float16 or bfloat16",
    ),
    "the other version": (
        lambda c: c.change_config(
            feed_forward_proj="gated-gelu",
            dense_act_fn=...,
            scale_decoder_outputs=False,
        ),
        # wi_0 and wi_1 of four layers, and the head.
        "theirs: it lacks 9 tensors: .*wi_0",
    ),
}


@pytest.mark.parametrize("name", _BAD_FILES)
def test_what_is_missing_or_wrong_is_named(name, copy_of):
    spoil, message = _BAD_FILES[name]
    copied = copy_of()
    spoil(copied)

    with pytest.raises(DataError, match=message):
        open_checkpoint(copied.path)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "pytorch_model.bin", "tf_model.h5"]
)
def test_weights_that_may_not_be_read_are_not_called_damaged(
    name, copy_of, monkeypatch
):
    if name.endswith(".bin"):
        pytest.importorskip("torch")
    copied, opened = copy_of(), open
    (copied.path / "model.safetensors").rename(copied.path / name)

    def refuse(path, *rest, **options):
        if str(path).endswith(name):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *rest, **options)

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(DataError, match=rf"{name}: cannot be read \(Permission"):
        open_checkpoint(copied.path)


def test_a_broken_weight_is_named(copy_of, read):
    copied = copy_of()

    def spoil(tensors):
        tensors[_Q][5, 2] = np.nan

    copied.change_tensors(spoil)
    with pytest.raises(DataError, match=f"safetensors: tensor {_Q} holds NaN .* row 5"):
        read(copied.path)


def test_a_file_cut_while_it_is_read_is_named(copy_of):
    copied = copy_of()
    checkpoint = open_checkpoint(copied.path)
    _cut(copied.weights_file, 20_000)

    with pytest.raises(DataError, match="safetensors: it is truncated or damaged"):
        checkpoint.source.read(_Q, 0, 1)


_SECOND = "model-00002-of-00003.safetensors"


def _first(index):
    return min(index["weight_map"])


# Name: what is done to the index and to the directory, and what the error says.
_BAD_SHARDS = {
    "missing shard": (
        lambda c, index: (c.path / _SECOND).unlink(),
        f"index.json: the shard it names is not there: {_SECOND}",
    ),
    "shard elsewhere": (
        lambda c, index: index["weight_map"].update({_first(index): f"../x/{_SECOND}"}),
        "index.json: the shard it names is not there: ../x/",
    ),
    "cut shard": (
        lambda c, index: _cut(c.path / _SECOND, 3000),
        f"{_SECOND}: it is truncated or damaged",
    ),
    "wrong shard": (
        lambda c, index: index["weight_map"].update({_first(index): _SECOND}),
        "tensor decoder.* is in model-00001-of-00003.safetensors, not in model.safe",
    ),
    "named, not there": (
        lambda c, index: index["weight_map"].update(more=_SECOND),
        f"tensor more is in model.safetensors.index.json, not in {_SECOND}",
    ),
    "no map": (lambda c, index: index.clear(), "index.json: it has no weight_map"),
}


@pytest.mark.parametrize("name", _BAD_SHARDS)
def test_shards_that_do_not_fit_together_are_named(name, copy_of):
    spoil, message = _BAD_SHARDS[name]
    copied = copy_of()
    index = copied.shard()
    open_checkpoint(copied.path)
    spoil(copied, index)
    copied.index_file.write_text(json.dumps(index))

    with pytest.raises(DataError, match=message):
        open_checkpoint(copied.path)


def test_places_without_a_checkpoint_are_told_so(tmp_path):
    with pytest.raises(InputError, match="nowhere does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    for content in (None, '{"stage": 1}', "no JSON"):
        if content:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(InputError, match="holds no T5 checkpoint of a known"):
            open_checkpoint(tmp_path)
