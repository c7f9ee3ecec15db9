"""T5X checkpoints, read and written: a msgpack file and zarr directories.

T5X keeps a train state as flax does, in a msgpack file `checkpoint`, small arrays
inside it; in place of each other array it has the name of a zarr (version 2)
directory next to it. Weights are under `target`; all else (the optimizer's state, the
step) is passed over. Kernels are `[in, out]` as in Keras. T5X folds attention's
1/sqrt(key/value size) into how it initialises queries, and scales tied logits by
hidden_dim^-0.5, so that its weights mean here what they mean there.

A checkpoint holds no config: sizes follow from the shapes, the version from whether
the feed-forward layer is gated. Its activation is recorded nowhere; it is taken to be
that of the version (relu, or tanh-gelu), as in every T5 that was published so.

Source: github.com/google-research/t5x, checkpoints.py and examples/t5.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import pathlib
import re
import shutil
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.data.tokenization import VOCABULARY_FILE
from tfdpsq.generator.checkpoints import prompt_file, t5x_arrays, weights
from tfdpsq.generator.checkpoints import slots as t5_slots
from tfdpsq.generator.checkpoints.checkpoint import NOT_T5, Checkpoint
from tfdpsq.generator.checkpoints.t5x_arrays import CHECKPOINT_FILE
from tfdpsq.layers import T5Config

_FEED_FORWARD = {
    "input_projector": "wi_0",  # the activated one, `wi` if it is the only one
    "gate_projector": "wi_1",
    "output_projector": "wo",
}
_PROJECTIONS = {
    "query_projector": "query",
    "key_projector": "key",
    "value_projector": "value",
    "output_projector": "out",
}
_ATTENTIONS = {
    ("encoder", "self_attention"): ("attention", "pre_attention_layer_norm"),
    ("decoder", "self_attention"): ("self_attention", "pre_self_attention_layer_norm"),
    ("decoder", "cross_attention"): (
        "encoder_decoder_attention",
        "pre_cross_attention_layer_norm",
    ),
}


def matches(path: pathlib.Path) -> bool:
    """Returns whether a directory is a T5X checkpoint, or has several of them."""
    file = path / CHECKPOINT_FILE
    if file.is_file():
        with open(file, "rb") as stream:  # TensorFlow has text files of this name.
            return not stream.read(32).startswith(b"model_checkpoint_path")
    return bool(_checkpoints_in(path))


def open_checkpoint(
    path: str | os.PathLike, encoder_only: bool = False, ignore: Sequence[str] = ()
) -> Checkpoint:
    """Reads what a T5X checkpoint holds, not yet the values.

    Args:
      path: the directory that holds the file `checkpoint`.
      encoder_only: whether only the encoder is wanted.
      ignore: shell patterns of weights that are no T5's and to be passed over, such
        as "target/projection_layer/*" of a dual encoder.

    Returns:
      The checkpoint; everything it needs was found in it.

    Raises:
      InputError: msgpack is not installed; or a pattern matches nothing, or a weight
        that the model needs.
      DataError: a file is missing or damaged, a weight is missing, unknown or of
        another shape, or the model is not a T5 that this project builds.
    """
    path = pathlib.Path(path)
    if not (path / CHECKPOINT_FILE).is_file():
        inside = _checkpoints_in(path)
        raise validation.InputError(
            f"{path} holds {len(inside)} checkpoints. Give one of them, for example "
            f"{inside[-1]}."
            if inside
            else f"{path} has no file {CHECKPOINT_FILE}. Give a T5X checkpoint."
        )
    source = t5x_arrays.Arrays(path)
    tensors = source.tensors
    config = _read_config(path, tensors, encoder_only)
    slots = _slots(config, encoder_only)
    needed = {slot.stored for slot in slots}
    ignored = set()
    for pattern in ignore:
        found = set(fnmatch.filter(tensors, pattern))
        if not found or found & needed:
            what = f"weights of the model ({min(found & needed)})" if found else "none"
            raise validation.InputError(
                f"{path}: of its weights, {pattern!r} matches {what}. Name only such "
                "as are there and no T5 has."
            )
        ignored |= found
    if encoder_only:
        ignored |= {name for name in tensors if name.startswith("target/decoder/")}
    extra = sorted(tensors.keys() - needed - ignored)
    if extra:
        raise validation.DataError(
            path / CHECKPOINT_FILE,
            "it has weights that a T5 of this shape has not: "
            + ", ".join(extra[:5])
            + (f" and {len(extra) - 5} more" if len(extra) > 5 else ""),
            "To go without them, give their names or a pattern as `ignore` "
            f"(--ignore={extra[0]})",
        )
    return Checkpoint("t5x", config, source, slots, ignored=sorted(ignored))


def save(
    directory: str | os.PathLike,
    config: T5Config,
    model: tf.keras.Model,
    dtype: str = "float32",
    vocabulary: str | os.PathLike | None = None,
    encoder_only: bool = False,
) -> None:
    """Writes a model so that T5X (as weights to start from) and this module read it.

    The same weights give the same bytes. The file `checkpoint` is written last.
    Arguments are those of `huggingface.save`; T5X needs the shape again, in its gin
    file.

    Raises:
      InputError: a weight is not finite in `dtype`, msgpack is not installed, or the
        model has a soft prompt.
    """
    check_options(dtype, encoder_only)
    prompt_file.refuse(model, "a T5X checkpoint")
    directory = pathlib.Path(directory)
    inline = (t5_slots.NORM, t5_slots.POSITIONS)  # as T5X has them
    arrays = (
        (
            slot.stored,
            slot.stored_shape,
            slot.kind in inline,
            weights.stored_blocks(model, slot, dtype),
        )
        for slot in _slots(config, encoder_only)
    )
    if vocabulary is not None:
        shutil.copyfile(vocabulary, directory / VOCABULARY_FILE)
    t5x_arrays.save(directory, arrays, dtype)


def check_options(dtype: str, encoder_only: bool) -> None:
    """Refuses what `save` cannot write.

    Raises:
      InputError: an unknown dtype, or msgpack is not installed.
    """
    validation.one_of("dtype", dtype, weights.DTYPES)
    t5x_arrays.library()


def _slots(config: T5Config, encoder_only: bool) -> list[t5_slots.Slot]:
    return [
        dataclasses.replace(
            slot,
            stored=f"target/{_stored_name(slot.path, config.version)}",
            transposed=slot.kind == t5_slots.POSITIONS,
        )
        for slot in t5_slots.slots(config, encoder_only)
    ]


def _stored_name(path: Sequence[str | int], version: str) -> str:
    """T5X's name, below `target`, of the weight that the model has at `path`."""
    first, *rest = path
    if first == "token_embedding":
        head = rest[0] == "reverse_embeddings"
        return "decoder/logits_dense/kernel" if head else "token_embedder/embedding"
    side = str(first).partition("_")[0]
    if len(rest) == 1:
        return f"{side}/{side}_norm/scale"
    number, part, *last = map(str, rest)
    layer = f"{side}/layers_{number}"
    if part in _FEED_FORWARD:
        name = _FEED_FORWARD[part]
        if version == "1.0" and name == "wi_0":
            name = "wi"
        return f"{layer}/mlp/{name}/kernel"
    if part == "layer_norm":
        return f"{layer}/pre_mlp_layer_norm/scale"
    attention, norm = _ATTENTIONS[side, part.replace("_layer_norm", "")]
    if last == ["relative_attention_bias"]:
        return f"{side}/relpos_bias/rel_embedding"
    if last == ["weight"]:
        return f"{layer}/{norm}/scale"
    return f"{layer}/{attention}/{_PROJECTIONS[last[0]]}/kernel"


def _read_config(
    path: pathlib.Path, tensors: Mapping[str, weights.Entry], encoder_only: bool
) -> T5Config:
    """The sizes that the shapes of the weights make it."""
    file = path / CHECKPOINT_FILE

    def refuse(problem: str) -> Exception:
        return validation.DataError(file, problem, NOT_T5)

    def shape(name: str) -> tuple[int, int]:
        name = f"target/{name}"
        if name not in tensors:
            raise validation.DataError(file, f"it lacks the weight {name}", NOT_T5)
        found = tensors[name].shape
        if len(found) != 2:
            raise refuse(f"weight {name} has shape {list(found)}, not [rows, columns]")
        return found[0], found[1]

    layers = {
        side: {
            match[1]
            for name in tensors
            if (match := re.match(rf"target/{side}/layers_(\d+)/", name))
        }
        for side in ("encoder", "decoder")
    }
    if not layers["encoder"] and any("encoder/encoder/" in name for name in tensors):
        raise validation.DataError(
            file,
            "it has one array for all layers (scan_layers=True)",
            "Unstack them to layers_0, layers_1, ... in T5X first",
        )
    if not layers["decoder"] and not encoder_only:
        raise validation.DataError(
            file,
            "it holds an encoder only",
            "A generator needs a whole T5; an encoder alone is read by load_encoder",
        )
    vocabulary, hidden = shape("token_embedder/embedding")
    heads, buckets = shape("encoder/relpos_bias/rel_embedding")
    if buckets != t5_slots.BUCKETS:
        raise refuse(
            f"weight target/encoder/relpos_bias/rel_embedding has shape "
            f"{[heads, buckets]}, not {[heads, t5_slots.BUCKETS]} as in every T5"
        )
    inner = shape("encoder/layers_0/attention/query/kernel")[1]
    if inner % heads:
        raise refuse(f"{inner} columns of the queries are not {heads} equal heads")
    gated = "target/encoder/layers_0/mlp/wi_0/kernel" in tensors
    head = "target/decoder/logits_dense/kernel" in tensors
    if not encoder_only:
        if len(layers["decoder"]) != len(layers["encoder"]):
            raise refuse(
                f"it has {len(layers['encoder'])} layers in the encoder and "
                f"{len(layers['decoder'])} in the decoder"
            )
        if gated != head:
            words = {True: "has", False: "has not"}
            raise refuse(
                f"it {words[gated]} a gated feed-forward layer (mlp/wi_0) and "
                f"{words[head]} a head of its own (decoder/logits_dense)"
            )
    wide = shape(f"encoder/layers_0/mlp/{'wi_0' if gated else 'wi'}/kernel")[1]
    return T5Config(
        vocabulary_size=vocabulary,
        num_layers=len(layers["encoder"]),
        num_heads=heads,
        hidden_dim=hidden,
        intermediate_dim=wide,
        key_value_dim=inner // heads,
        version="1.1" if gated else "1.0",
    )


def _checkpoints_in(path: pathlib.Path) -> list[pathlib.Path]:
    found = [file.parent for file in path.glob(f"checkpoint_*/{CHECKPOINT_FILE}")]
    return sorted(found, key=lambda directory: (len(directory.name), directory.name))
