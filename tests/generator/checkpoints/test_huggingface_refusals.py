"""Hugging Face directories that are damaged or no T5: what is wrong is named.

All but broken values is found before a model is built, so nothing is half-loaded.
"""

import numpy as np
import pytest

from tfdpsq.generator.checkpoints import open_checkpoint
from tfdpsq.validation import DataError, InputError

_Q = "encoder.block.0.layer.0.SelfAttention.q.weight"

# Name: keys changed in the config of a T5 1.0, and what the error says.
_BAD_CONFIGS = {
    "other model": (dict(model_type="longt5"), "model_type is 'longt5'"),
    "other activation": (
        dict(feed_forward_proj="gated-silu"),
        "feed_forward_proj is 'gated-silu'; expected 'relu' or 'gated-gelu'",
    ),
    "no size": (dict(d_model=..., d_kv=None), "it lacks d_model, d_kv"),
    "size of zero": (dict(num_heads=0), "num_heads is 0"),
}


@pytest.mark.parametrize("name", _BAD_CONFIGS)
def test_a_config_of_another_model_names_key_and_value(name, copy_of):
    changes, message = _BAD_CONFIGS[name]
    copied = copy_of()
    copied.change_config(**changes)

    with pytest.raises(DataError, match=f"config.json: .*{message}"):
        open_checkpoint(copied.path)


def _cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def _replace(copied, name, change):
    copied.change_tensors(lambda t: t.update({name: change(t[name]).copy()}))


# Name: what is done to a good directory, and what the error says.
_BAD_FILES = {
    "cut": (
        lambda c: _cut(c.weights_file, 20_000),
        "model.safetensors: it is missing, truncated or damaged",
    ),
    "missing tensor": (
        lambda c: c.change_tensors(lambda t: t.pop(_Q)),
        f"theirs: it lacks tensors: {_Q}",
    ),
    "extra tensor": (
        lambda c: c.change_tensors(lambda t: t.update(bias=t[_Q][0].copy())),
        "theirs: it has unknown tensors: bias",
    ),
    "wrong shape": (
        lambda c: _replace(c, _Q, lambda q: q[:16]),
        rf"tensor {_Q} has shape \[16, 16\]; expected \[24, 16\]",
    ),
}


@pytest.mark.parametrize("name", _BAD_FILES)
def test_malformed_directory_is_refused(name, copy_of):
    spoil, message = _BAD_FILES[name]
    copied = copy_of()
    spoil(copied)

    with pytest.raises(DataError, match=message):
        open_checkpoint(copied.path)


def test_nan_weight_is_named(copy_of, read):
    copied = copy_of()

    def spoil(tensors):
        tensors[_Q][5, 2] = np.nan

    copied.change_tensors(spoil)
    with pytest.raises(DataError, match=f"safetensors: tensor {_Q} holds NaN"):
        read(copied.path)


_SECOND = "model-00002-of-00003.safetensors"


def test_missing_shard_is_named(copy_of):
    copied = copy_of()
    copied.shard()
    open_checkpoint(copied.path)
    (copied.path / _SECOND).unlink()
    with pytest.raises(DataError, match=f"{_SECOND}: it is missing"):
        open_checkpoint(copied.path)


def test_place_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(InputError, match="nowhere does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    for content in (None, '{"stage": 1}', "no JSON"):
        if content:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(InputError, match="holds no T5 checkpoint of a known"):
            open_checkpoint(tmp_path)
