"""T5 as a keras-nlp preset: a directory that `T5Backbone.from_preset` reads.

    config.json                      the class and its arguments
    metadata.json                    versions of Keras and keras-nlp
    model.weights.h5                 the weights
    tokenizer.json                   and assets/tokenizer/vocabulary.spm

keras-nlp 0.12 and keras-hub, on Keras 2 and on Keras 3, have the same layout, that
of the published presets. Their config may describe mixtures of the versions of T5,
whose head is then neither's; such are refused.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import os
import pathlib
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import h5py
import tensorflow as tf
from keras_nlp.src.models.t5.t5_backbone import T5Backbone
from keras_nlp.src.utils import preset_utils

from tfdpsq import validation
from tfdpsq.data import files
from tfdpsq.generator.checkpoints import hdf5, prompt_file, weights
from tfdpsq.generator.checkpoints import slots as t5_slots
from tfdpsq.generator.checkpoints.checkpoint import (
    NOT_T5,
    Checkpoint,
    config_has,
    unlike_t5,
)
from tfdpsq.layers import T5Config

CONFIG_FILE = "config.json"
METADATA_FILE = "metadata.json"
WEIGHTS_FILE = "model.weights.h5"
TOKENIZER_FILE = "tokenizer.json"
VOCABULARY_FILE = "assets/tokenizer/vocabulary.spm"

_COPY = "Copy the whole preset again"
_RECORDS = 1 << 20  # bytes of an HDF5 file besides its numbers, at most
_SIZES = (
    "vocabulary_size",
    "num_layers",
    "num_heads",
    "hidden_dim",
    "intermediate_dim",
)
# What decides the version: activation, gating, and a head tied to the embedding.
_VERSIONS = {("relu", False, True): "1.0", ("gelu_approximate", True, False): "1.1"}
_HUBS = ("kaggle://", "hf://", "gs://")


def matches(path: pathlib.Path) -> bool:
    """Returns whether a directory has a preset's layout, complete or not."""
    named = config_has(path / CONFIG_FILE, "registered_name")
    return named or (path / WEIGHTS_FILE).is_file()


def names() -> list[str]:
    """Lists the presets of T5 that this keras-nlp knows."""
    return sorted(T5Backbone.presets)


def is_name(text: str) -> bool:
    """Returns whether a text names a preset, as "t5_small_multi", "kaggle://..."."""
    return text.startswith(_HUBS) or text in T5Backbone.presets


def download(name: str) -> pathlib.Path:
    """Downloads a preset by keras-nlp, which caches it.

    Args:
      name: one that `is_name` accepts.

    Returns:
      Its directory.

    Raises:
      InputError: it cannot be got; without a network, only what was got before is
        there.
    """
    try:
        directory = pathlib.Path(preset_utils.get_file(name, CONFIG_FILE)).parent
        for file in (WEIGHTS_FILE, TOKENIZER_FILE, VOCABULARY_FILE):
            preset_utils.get_file(name, file)
    except Exception as error:  # each hub's client has errors of its own
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise validation.InputError(
            f"preset {name} cannot be downloaded ({reason}). Connect to the network, "
            "or give a directory that holds the preset."
        ) from error
    return directory


def open_checkpoint(path: str | os.PathLike, encoder_only: bool = False) -> Checkpoint:
    """Reads a preset's config and headers, as `huggingface.open_checkpoint` does."""
    path = pathlib.Path(path)
    config = read_config(path / CONFIG_FILE, encoder_only)
    source = hdf5.Datasets(path / WEIGHTS_FILE)
    slots = _slots(config, encoder_only)
    ignored: list[str] = []
    if encoder_only:
        needed = {slot.stored for slot in slots}
        whole = {slot.stored for slot in _slots(config, False)}
        whole.add(
            f"{_EMBEDDING}/1"
        )  # of a head, where other tensors determine the version
        ignored = sorted(whole - needed)
    return Checkpoint("keras", config, source, slots, ignored=ignored)


def read_config(path: str | os.PathLike, encoder_only: bool = False) -> T5Config:
    """The model that a preset's `config.json` describes.

    Args:
      path: the file.
      encoder_only: whether the head is of no importance.

    Raises:
      DataError: the file is missing or damaged, lacks a size, or describes a model
        that is no T5 of a known version; it names key and value.
    """
    try:
        outer = validation.parse_json(pathlib.Path(path).read_text("utf-8"))
        kind, values = outer["registered_name"], dict(outer["config"])
    except OSError as error:
        raise validation.DataError(
            path, f"cannot be read ({error.strerror})", _COPY
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        raise validation.DataError(
            path, f"it is not a config of a Keras object ({error!r})", _COPY
        ) from error
    if str(kind).rpartition(">")[2] != "T5Backbone":
        raise unlike_t5(path, "registered_name", kind, "that of a T5Backbone")
    missing = [key for key in _SIZES if values.get(key) is None]
    if missing:
        raise validation.DataError(path, f"it lacks {', '.join(missing)}", NOT_T5)
    if values.get("layer_norm_epsilon", 1e-6) != 1e-6:
        raise unlike_t5(
            path, "layer_norm_epsilon", values["layer_norm_epsilon"], "1e-06"
        )
    # The defaults are those of T5Backbone's arguments.
    activation = _name_of(values.get("activation", "relu"))
    gated = bool(values.get("use_gated_activation", True))
    tied = bool(values.get("tie_embedding_weights", True))
    choices = {key[:2] if encoder_only else key: of for key, of in _VERSIONS.items()}
    found = (activation, gated) if encoder_only else (activation, gated, tied)
    if found not in choices:
        raise validation.DataError(
            path,
            f"activation {activation!r} with use_gated_activation {gated} and "
            f"tie_embedding_weights {tied} is not a published T5 (1.0: 'relu', False, "
            "True; 1.1: 'gelu_approximate', True, False)",
            NOT_T5,
        )
    try:
        heads = validation.positive_integer("num_heads", values["num_heads"])
        return T5Config(
            **{key: values[key] for key in _SIZES},
            key_value_dim=values.get("key_value_dim") or values["hidden_dim"] // heads,
            version=choices[found],
            dropout=values.get("dropout", 0.1),
        )
    except (validation.InputError, TypeError) as error:
        raise validation.DataError(path, str(error).rstrip("."), NOT_T5) from error


def save(
    directory: str | os.PathLike,
    config: T5Config,
    model: tf.keras.Model,
    dtype: str = "float32",
    vocabulary: str | os.PathLike | None = None,
    encoder_only: bool = False,
) -> None:
    """Writes a model as a preset, for keras-nlp, keras-hub and `open_checkpoint`.

    The same weights give the same bytes. The config is written last. keras-nlp has no
    language-model head: what it loads from T5 1.0 still needs the factor
    hidden_dim^-0.5 before the tied one (see `T5QueryGenerator`). Arguments are those
    of `huggingface.save`, of which a preset takes float32 and whole models alone.

    Raises:
      InputError: a weight is not finite, another dtype, an encoder only, or the model
        has a soft prompt.
    """
    check_options(dtype, encoder_only)
    prompt_file.refuse(model, "a keras-nlp preset")
    directory = pathlib.Path(directory)
    slots = _slots(config, False)
    _write_weights(directory / WEIGHTS_FILE, slots, model)
    if vocabulary is not None:
        target = directory / VOCABULARY_FILE
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(vocabulary, target)
        own = {"proto": None, "sequence_length": None, "dtype": "int32"}
        _write_json(
            directory / TOKENIZER_FILE, _object("tokenizer", "T5Tokenizer", own)
        )
    metadata = {
        "keras_version": importlib.metadata.version("keras"),
        "keras_nlp_version": importlib.metadata.version("keras-nlp"),
        "parameter_count": sum(math.prod(slot.shape) for slot in slots),
    }
    _write_json(directory / METADATA_FILE, metadata)
    activation, gated, tied = {v: key for key, v in _VERSIONS.items()}[config.version]
    arguments = {
        **{key: getattr(config, key) for key in (*_SIZES, "key_value_dim", "dropout")},
        "activation": activation if activation == "relu" else _function(activation),
        "use_gated_activation": gated,
        "layer_norm_epsilon": 1e-6,
        "tie_embedding_weights": tied,
    }
    content = _object("backbone", "T5Backbone", arguments)
    _write_json(directory / CONFIG_FILE, content)


def check_options(dtype: str, encoder_only: bool) -> None:
    """Refuses what `save` cannot write.

    Raises:
      InputError: another dtype than float32, or an encoder only.
    """
    if dtype != "float32" or encoder_only:
        what = "an encoder alone" if encoder_only else f"in {dtype}"
        raise validation.InputError(
            f"a keras-nlp preset cannot be {what}: it is a whole T5 in float32. Use "
            "the format huggingface or t5x."
        )


_EMBEDDING = "layers/reversible_embedding/vars"


def _slots(config: T5Config, encoder_only: bool) -> list[t5_slots.Slot]:
    return [
        dataclasses.replace(slot, stored=_stored_name(slot.path, config.num_layers))
        for slot in t5_slots.slots(config, encoder_only)
    ]


def _stored_name(path: Sequence[str | int], num_layers: int) -> str:
    """The dataset of the weight that the model has at `path`.

    Keras counts layers of one class, in the order in which the model calls them.
    """
    first, *rest = path
    if first == "token_embedding":
        return f"{_EMBEDDING}/{int(rest[0] == 'reverse_embeddings')}"
    after = num_layers if str(first).startswith("decoder") else 0
    if len(rest) == 1:
        return f"layers/t5_layer_norm{'_1' if after else ''}/vars/0"
    number = int(rest[0]) + after
    # A variable is its layer's only one.
    owners = [
        str(p) for p in rest[1:] if p not in ("weight", "relative_attention_bias")
    ]
    layer = f"layers/t5_transformer_layer{f'_{number}' if number else ''}"
    return "/".join([layer, *owners, "vars/0"])


def _write_weights(
    path: pathlib.Path, slots: Sequence[t5_slots.Slot], model: tf.keras.Model
) -> None:
    size = 4 * sum(math.prod(slot.shape) for slot in slots)
    unlocked = files.atomic_file(path, locked=False)
    with unlocked as partial:
        _require_room(partial.parent, size)
        _write_hdf5(partial, slots, model)


def _write_hdf5(
    path: pathlib.Path, slots: Sequence[t5_slots.Slot], model: tf.keras.Model
) -> None:
    with h5py.File(path, "w") as file:
        file.create_group("vars")  # Keras asks for the model's own variables.
        for slot in slots:
            data = file.create_dataset(slot.stored, slot.shape, "float32")
            start = 0
            for block in weights.stored_blocks(model, slot):
                data[start : start + len(block)] = block
                start += len(block)


def _require_room(directory: pathlib.Path, size: int) -> None:
    """Raises where a disk has no room for a file, and for HDF5's own records.

    HDF5 closes files wherever Python collects them, and a full disk would end the
    process there.
    """
    with tempfile.TemporaryFile(dir=directory) as file:
        os.posix_fallocate(file.fileno(), 0, size + _RECORDS)


def _write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    files.atomic_write(path, json.dumps(value, indent=4) + "\n")


def _object(part: str, name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """A Keras object as JSON."""
    return {
        "module": f"keras_nlp.src.models.t5.t5_{part}",
        "class_name": name,
        "config": {"name": f"t5_{part}", "trainable": True, **config},
        "registered_name": f"keras_nlp>{name}",
    }


def _function(name: str) -> dict[str, Any]:
    return {
        "module": "builtins",
        "class_name": "function",
        "config": f"keras_nlp>{name}",
        "registered_name": "function",
    }


def _name_of(function: Any) -> str:
    """A function's name without its package, which Keras writes in several ways."""
    if isinstance(function, Mapping):
        function = function.get("config")
    return str(function).rpartition(">")[2]
