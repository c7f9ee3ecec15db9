"""T5 in Hugging Face's layout: `config.json` and its weights, read and written.

Weights are safetensors, or, where a directory has nothing else, PyTorch's pickles or
TensorFlow's HDF5.

It is also how this project keeps its own generators, so that one trained here, with
or without privacy, can be used unchanged in any other stack.

Read are T5 1.0, T5 1.1, FLAN-T5 and mT5, whole or encoder only, in one file or in
shards. What decides the model is checked key by key, since a T5 that is merely
similar gives fluent and wrong text: an unknown value is an error, not a guess.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import safetensors
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.data import files
from tfdpsq.data.tokenization import VOCABULARY_FILE, Tokenizer
from tfdpsq.generator.checkpoints import hdf5, pickled, prompt_file, weights
from tfdpsq.generator.checkpoints import slots as t5_slots
from tfdpsq.generator.checkpoints.checkpoint import (
    NOT_T5,
    Checkpoint,
    config_has,
    read_json,
    unlike_t5,
)
from tfdpsq.layers import T5Config

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_VERSIONS = {"relu": "1.0", "gated-gelu": "1.1"}
_ACTIVATIONS = {"1.0": "relu", "1.1": "gelu_new"}
_ARCHITECTURES = (
    "ForConditionalGeneration",
    "EncoderModel",
    "Model",
    "WithLMHeadModel",  # in configs of 2019
)
# Our names of the sizes that every config states.
_SIZES = {
    "vocabulary_size": "vocab_size",
    "num_layers": "num_layers",
    "num_heads": "num_heads",
    "hidden_dim": "d_model",
    "intermediate_dim": "d_ff",
    "key_value_dim": "d_kv",
}
# What is the same in every T5, and what may be left out of a config.
_FIXED: dict[str, Any] = {
    "relative_attention_num_buckets": t5_slots.BUCKETS,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "is_decoder": False,
    "pad_token_id": 0,
}
_FIXED_WHOLE = {"is_encoder_decoder": True, "decoder_start_token_id": 0}
# Second copies of the embedding, which some versions of the library write.
_EMBEDDINGS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# A weight that old checkpoints hold and no T5 ever used.
_UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
_DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def matches(path: pathlib.Path) -> bool:
    """Returns whether a directory has Hugging Face's layout, complete or not."""
    files = (
        *(WEIGHTS_FILE, INDEX_FILE, pickled.WEIGHTS_FILE, pickled.INDEX_FILE),
        *(hdf5.TF_WEIGHTS_FILE, hdf5.TF_INDEX_FILE),
    )
    known = any((path / name).is_file() for name in files)
    return known or config_has(path / CONFIG_FILE, "model_type")


def open_checkpoint(path: str | os.PathLike, encoder_only: bool = False) -> Checkpoint:
    """Reads a directory's config and the headers of its weights.

    Args:
      path: holds `config.json` and `model.safetensors` or `pytorch_model.bin`, or
        shards of one of them and their index; or `tf_model.h5`.
      encoder_only: whether only the encoder is wanted.

    Returns:
      The checkpoint; everything it needs was found in it.

    Raises:
      InputError: there are pickles alone, and torch is not installed.
      DataError: a file is missing or damaged, the config is not that of a T5 this
        project builds, or tensors and config do not fit together.
    """
    path = pathlib.Path(path)
    source = _source(path)
    tensors = source.tensors
    whole = any(name.startswith("decoder.") for name in tensors)
    if not (whole or encoder_only):
        raise validation.DataError(
            path,
            "it holds an encoder only",
            "A generator needs a whole T5; an encoder alone is read by load_encoder",
        )
    config = read_config(path / CONFIG_FILE, encoder_only)
    copies = dict.fromkeys(_EMBEDDINGS, "shared.weight")
    if config.tied:
        copies["lm_head.weight"] = "shared.weight"
    ignored = [_UNUSED]
    if encoder_only:
        ignored += [n for n in tensors if n.startswith(("decoder.", "lm_head."))]
        copies = {n: of for n, of in copies.items() if n not in ignored}
    # The library keeps one of several copies, not always the same.
    kept = next((n for n in ("shared.weight", *copies) if n in tensors), None)
    slots = _slots(config, encoder_only)
    if isinstance(source, hdf5.Datasets):  # TensorFlow's kernels are as ours
        slots = [dataclasses.replace(slot, transposed=False) for slot in slots]
    if kept not in (None, "shared.weight"):
        slots[0] = dataclasses.replace(slots[0], stored=kept)
        copies = {name: kept for name in copies if name != kept}
    return Checkpoint("huggingface", config, source, slots, copies, ignored)


def read_config(path: str | os.PathLike, encoder_only: bool = False) -> T5Config:
    """The model that a `config.json` describes.

    Args:
      path: the file.
      encoder_only: whether keys that concern the decoder and the head alone are of no
        importance.

    Raises:
      DataError: the file is missing or no JSON object, lacks a size, or describes a
        model that is no T5 of a known version; it names key and value.
    """
    values = read_json(pathlib.Path(path))
    kind = values.get("model_type")
    if kind not in ("t5", "mt5"):
        raise unlike_t5(path, "model_type", kind, "'t5' or 'mt5'")
    names = values.get("architectures") or []
    known = [f"{kind.upper()}{suffix}" for suffix in _ARCHITECTURES]
    for name in names if isinstance(names, list) else [names]:
        if name not in known:
            raise unlike_t5(
                path, "architectures", name, "a T5 with or without its head"
            )
    fixed = _FIXED if encoder_only else {**_FIXED, **_FIXED_WHOLE}
    for key, value in fixed.items():
        # Left out, null, and the value itself all mean the same.
        if values.get(key) not in (None, value):
            raise unlike_t5(path, key, values[key], repr(value))
    projection = values.get("feed_forward_proj", "relu")
    version = _VERSIONS.get(str(projection))
    if version is None or (kind == "mt5" and version != "1.1"):
        raise unlike_t5(path, "feed_forward_proj", projection, "'relu' or 'gated-gelu'")
    activation = _ACTIVATIONS[version]
    if values.get("dense_act_fn") not in (None, activation):
        raise unlike_t5(path, "dense_act_fn", values["dense_act_fn"], repr(activation))
    if not encoder_only:
        _check_head(path, values, version)
    missing = [key for key in _SIZES.values() if values.get(key) is None]
    if missing:
        raise validation.DataError(path, f"it lacks {', '.join(missing)}", NOT_T5)
    if not encoder_only and values.get("num_decoder_layers") is not None:
        if values["num_decoder_layers"] != values["num_layers"]:
            wanted = f"num_layers, {values['num_layers']}"
            raise unlike_t5(
                path, "num_decoder_layers", values["num_decoder_layers"], wanted
            )
    try:
        return T5Config(
            **{ours: values[theirs] for ours, theirs in _SIZES.items()},
            version=version,
            dropout=values.get("dropout_rate", 0.1),
        )
    except validation.InputError as error:
        raise validation.DataError(path, str(error).rstrip("."), NOT_T5) from error


def save(
    directory: str | os.PathLike,
    config: T5Config,
    model: tf.keras.Model,
    dtype: str = "float32",
    vocabulary: str | os.PathLike | None = None,
    encoder_only: bool = False,
) -> None:
    """Writes a model so that `transformers` and `open_checkpoint` read it.

    The same weights give the same bytes. Values pass a block at a time. The config
    is written last: without it, the directory is not a checkpoint. A soft prompt gets a
    file of its own, which `transformers` does not read.

    Args:
      directory: an existing directory; files of these names in it are replaced.
      config: the model's shape.
      model: its backbone (or encoder), whose LoRA updates are added in; or a
        `Checkpoint` to copy.
      dtype: "float32", or "bfloat16" or "float16", to which values are rounded.
      vocabulary: a SentencePiece model to copy into the directory.
      encoder_only: whether to write the encoder alone.

    Raises:
      InputError: a weight is not finite in `dtype`; or the vocabulary has more
        pieces than the model embeddings; or an encoder alone has a soft prompt.
      DataError: `vocabulary` is no SentencePiece model of a T5.
    """
    directory = pathlib.Path(directory)
    validation.one_of("dtype", dtype, weights.DTYPES)
    if encoder_only:
        prompt_file.refuse(model, "an encoder alone")
    eos_id = 1
    if vocabulary is not None:
        tokenizer = Tokenizer(vocabulary)
        tokenizer.require_embeddings(config.vocabulary_size)
        eos_id = tokenizer.eos_id
    slots = sorted(_slots(config, encoder_only), key=lambda slot: slot.stored)
    _write_safetensors(directory / WEIGHTS_FILE, slots, model, dtype)
    prompt_file.write(directory, model)
    if vocabulary is not None:
        target = directory / VOCABULARY_FILE
        if not (target.exists() and target.samefile(vocabulary)):
            shutil.copyfile(vocabulary, target)
    values = {
        **_FIXED,
        **{theirs: getattr(config, ours) for ours, theirs in _SIZES.items()},
        "architectures": [
            "T5EncoderModel" if encoder_only else "T5ForConditionalGeneration"
        ],
        "decoder_start_token_id": 0,
        "dropout_rate": config.dropout,
        "eos_token_id": eos_id,
        "feed_forward_proj": {v: k for k, v in _VERSIONS.items()}[config.version],
        "is_encoder_decoder": not encoder_only,
        "model_type": "t5",
        "num_decoder_layers": config.num_layers,
        "tie_word_embeddings": config.tied,
        "torch_dtype": dtype,
        "use_cache": not encoder_only,
    }
    files.write_json(directory / CONFIG_FILE, values)


class _Safetensors(NamedTuple):
    """A `weights.Source`."""

    path: pathlib.Path
    tensors: Mapping[str, weights.Entry]

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        # Opened again each time: data once read stays mapped, and counts as memory.
        with _opened(pathlib.Path(self.tensors[name].file)) as file:
            return file.get_slice(name)[start:stop]


class _Pickles(NamedTuple):
    """A `weights.Source` of files that torch reads.

    Attributes:
      path: the directory.
      tensors: header of every tensor.
      values: the tensors themselves, most of them still on disk.
    """

    path: pathlib.Path
    tensors: dict[str, weights.Entry]
    values: dict[str, Any]

    def header(self, file: pathlib.Path) -> dict[str, weights.Entry]:
        """Opens one file; returns the headers of its tensors."""
        found = pickled.tensors_of(file)
        self.values.update(found)
        return {name: pickled.entry(tensor, file) for name, tensor in found.items()}

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        return pickled.rows(self.values[name], start, stop)


def _slots(config: T5Config, encoder_only: bool) -> list[t5_slots.Slot]:
    turned = (t5_slots.KERNEL, t5_slots.HEAD)  # PyTorch multiplies by the transpose
    return [
        dataclasses.replace(slot, transposed=slot.kind in turned)
        for slot in t5_slots.slots(config, encoder_only)
    ]


def _check_head(
    path: str | os.PathLike, values: Mapping[str, Any], version: str
) -> None:
    """Refuses a head that is tied and scaled otherwise than the version has it."""
    tied = version == "1.0"
    key = "tie_word_embeddings"
    # transformers 5 writes `true` for every T5, and the truth here.
    if "scale_decoder_outputs" in values:
        key = "scale_decoder_outputs"
    elif values["model_type"] == "mt5":
        return
    if values.get(key, True) != tied:
        projection = {v: k for k, v in _VERSIONS.items()}[version]
        wanted = f"{tied}, as feed_forward_proj is {projection!r}"
        raise unlike_t5(path, key, values.get(key, "absent"), wanted)


def _source(path: pathlib.Path) -> weights.Source:
    """Opens a directory's weights: the first kind that it has."""
    if (path / WEIGHTS_FILE).is_file():
        return _Safetensors(path, _header(path / WEIGHTS_FILE))
    if (path / INDEX_FILE).is_file():
        return _Safetensors(path, _of_shards(path / INDEX_FILE, _header))
    source = _Pickles(path, {}, {})
    if (path / pickled.WEIGHTS_FILE).is_file():
        source.tensors.update(source.header(path / pickled.WEIGHTS_FILE))
    elif (path / pickled.INDEX_FILE).is_file():
        source.tensors.update(_of_shards(path / pickled.INDEX_FILE, source.header))
    elif (path / hdf5.TF_WEIGHTS_FILE).is_file():
        return hdf5.Datasets(path / hdf5.TF_WEIGHTS_FILE, hdf5.torch_name)
    else:
        sharded = (path / hdf5.TF_INDEX_FILE).is_file()
        raise validation.DataError(
            path,
            f"it has shards of {hdf5.TF_WEIGHTS_FILE} alone, which are not read"
            if sharded
            else "it has no weights",
            f"Give a directory with {WEIGHTS_FILE}, {pickled.WEIGHTS_FILE} or the "
            f"index of their shards, or {hdf5.TF_WEIGHTS_FILE}; save_pretrained of "
            "transformers writes one",
        )
    return source


def _of_shards(
    index: pathlib.Path,
    read_header: Callable[[pathlib.Path], Mapping[str, weights.Entry]],
) -> dict[str, weights.Entry]:
    """The tensors of all shards that an index names, by their names."""
    path = index.parent
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict):
        raise validation.DataError(index, "it has no weight_map", "Copy it again")
    found: dict[str, weights.Entry] = {}
    for shard in sorted(set(map(str, places.values()))):
        if pathlib.PurePath(shard).name != shard or not (path / shard).is_file():
            raise validation.DataError(
                index, f"the shard it names is not there: {shard}", "Copy it again"
            )
        header = read_header(path / shard)
        named = {name for name, place in places.items() if place == shard}
        for name in sorted(named ^ header.keys()):
            has, lacks = (index, shard) if name in named else (shard, index.name)
            raise validation.DataError(
                index,
                f"tensor {name} is in {os.path.basename(has)}, not in {lacks}",
                "Copy all files of one checkpoint",
            )
        found.update(header)
    return found


def _header(path: pathlib.Path) -> dict[str, weights.Entry]:
    with _opened(path) as file:
        entries = {}
        for name in file.keys():  # noqa: SIM118 - no mapping
            part = file.get_slice(name)
            kind = part.get_dtype()
            dtype = _DTYPE_NAMES.get(kind, kind)
            entries[name] = weights.Entry(tuple(part.get_shape()), dtype, path)
        return entries


@contextlib.contextmanager
def _opened(path: pathlib.Path) -> Iterator[Any]:
    weights.require_readable(path)
    try:
        with safetensors.safe_open(path, "np") as file:
            yield file
    except (safetensors.SafetensorError, OSError) as error:
        raise validation.DataError(
            path, f"it is truncated or damaged ({error})", "Copy it again"
        ) from error


def _write_safetensors(
    path: pathlib.Path,
    slots: Sequence[t5_slots.Slot],
    model: tf.keras.Model,
    dtype: str,
) -> None:
    """Writes the file as the library would, without having it all in memory."""
    kind = {name: code for code, name in _DTYPE_NAMES.items()}[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for slot in slots:
        start, end = end, end + int(np.prod(slot.shape)) * tf.as_dtype(dtype).size
        header[slot.stored] = {
            "dtype": kind,
            "shape": list(slot.stored_shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with files.atomic_file(path) as partial, open(partial, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for slot in slots:
            for block in weights.stored_blocks(model, slot, dtype):
                file.write(block.tobytes())
