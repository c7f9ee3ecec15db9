"""T5 as a keras-nlp preset: a directory that `keras_nlp.models.Backbone` reads.

    config.json                      the class and its arguments
    metadata.json                    versions of Keras and keras-nlp
    model.weights.h5                 the weights
    tokenizer.json                   and assets/tokenizer/vocabulary.spm

keras-nlp 0.12 and keras-hub, on Keras 2 and on Keras 3, have the same layout, that of
the published presets; 0.12's own `save_to_preset` needs Keras 3. Configs may describe
mixtures of the versions of T5, which are refused.
"""

from __future__ import annotations

import functools
import importlib.metadata
import io as memory
import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import h5py
import numpy as np
import tensorflow as tf
from keras_nlp.src.models.t5.t5_backbone import T5Backbone
from keras_nlp.src.utils import preset_utils

from tfdpsq.data import io
from tfdpsq.data.tokenization import Tokenizer
from tfdpsq.generator.checkpoints import tensors, weights
from tfdpsq.generator.checkpoints.tensors import Tensor, not_t5, reading
from tfdpsq.layers import T5Config

NAMES = tuple(sorted(T5Backbone.presets))
VOCABULARY_FILE = "assets/tokenizer/vocabulary.spm"
_CONFIG, _WEIGHTS, _TOKENIZER = "config.json", "model.weights.h5", "tokenizer.json"
_SIZES = (
    "vocabulary_size",
    "num_layers",
    "num_heads",
    "hidden_dim",
    "intermediate_dim",
)
# What decides the version: activation, gating, and a head tied to the embedding.
_VERSIONS = {("relu", False, True): "1.0", ("gelu_approximate", True, False): "1.1"}


def matches(path: pathlib.Path) -> bool:
    """Returns whether a directory has a preset's layout, complete or not."""
    return tensors.has_key(path / _CONFIG, "registered_name")


def download(name: str) -> pathlib.Path:
    """Downloads a preset by keras-nlp, which caches it; returns its directory."""
    for file in (_WEIGHTS, _TOKENIZER, VOCABULARY_FILE):
        preset_utils.get_file(name, file)
    return pathlib.Path(preset_utils.get_file(name, _CONFIG)).parent


def open_checkpoint(
    path: pathlib.Path, encoder_only: bool
) -> tuple[T5Config, dict[str, Tensor]]:
    """Reads a preset's config and headers; see `huggingface.open_checkpoint`."""
    found: dict[str, Tensor] = {}
    file = path / _WEIGHTS

    def add(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            read = functools.partial(_dataset, file, name)
            found[name] = Tensor(file, item.shape, item.dtype.name, read)

    with reading(file), h5py.File(file, "r") as opened:
        opened.visititems(add)
    return read_config(path / _CONFIG, encoder_only), found


def _dataset(path: pathlib.Path, name: str) -> np.ndarray:
    with h5py.File(path, "r") as file:
        return file[name][()]


def read_config(path: pathlib.Path, encoder_only: bool = False) -> T5Config:
    """Reads the shape in a preset's `config.json`, as `open_checkpoint` does."""
    with reading(path):
        outer = tensors.read_json(path)
        kind, values = str(outer["registered_name"]), dict(outer["config"])
    if not kind.endswith("T5Backbone") or values.get("layer_norm_epsilon") != 1e-6:
        epsilon = values.get("layer_norm_epsilon")
        raise not_t5(path, f"it is a {kind} with layer_norm_epsilon {epsilon}")
    # The defaults are those of T5Backbone's arguments.
    activation = _name_of(values.get("activation", "relu"))
    gated = bool(values.get("use_gated_activation", True))
    tied = bool(values.get("tie_embedding_weights", True))
    if encoder_only:  # which has no head
        tied = not gated
    version = _VERSIONS.get((activation, gated, tied))
    if version is None:
        raise not_t5(
            path,
            f"activation {activation!r} with use_gated_activation {gated} and "
            f"tie_embedding_weights {tied} is not a published T5",
        )
    with reading(path):
        width = values["hidden_dim"] // values["num_heads"]
        return T5Config(
            **{key: values[key] for key in _SIZES},
            key_value_dim=values.get("key_value_dim") or width,
            version=version,
            dropout=values.get("dropout", 0.1),
        )


def save(
    directory: str | os.PathLike,
    config: T5Config,
    model: tf.keras.Model,
    vocabulary: str | os.PathLike | None = None,
) -> None:
    """Writes a model as a preset, for keras-nlp, keras-hub and `open_checkpoint`.

    The config is written last. keras-nlp has no language-model head: a model of T5 1.0
    loaded there needs the factor hidden_dim^-0.5 before the tied one (see
    `T5QueryGenerator`).

    Args:
      directory: an existing directory; files of these names in it are replaced.
      config: the model's shape.
      model: its backbone, whose LoRA updates are added in.
      vocabulary: a SentencePiece model to copy into the directory.

    Raises:
      InputError: a weight is not finite, the disk is full, or the vocabulary has more
        pieces than the model embeddings.
      DataError: `vocabulary` is no SentencePiece model of a T5.
    """
    directory = pathlib.Path(directory)
    if vocabulary is not None:
        Tokenizer(vocabulary).require_embeddings(config.vocabulary_size)
    # In memory first: a disk that is full where HDF5 closes its file ends the process.
    content = memory.BytesIO()
    with h5py.File(content, "w") as file:
        file.create_group("vars")  # Keras asks for the model's own variables.
        for name, value in weights.stored_values(model, config, "keras"):
            file[name] = value
    with io.atomic_file(directory / _WEIGHTS) as partial:
        partial.write_bytes(content.getbuffer())
    if vocabulary is not None:
        (directory / VOCABULARY_FILE).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(vocabulary, directory / VOCABULARY_FILE)
        own = {"proto": None, "sequence_length": None, "dtype": "int32"}
        io.write_json(directory / _TOKENIZER, _object("tokenizer", "T5Tokenizer", own))
    metadata = {
        "keras_version": importlib.metadata.version("keras"),
        "keras_nlp_version": importlib.metadata.version("keras-nlp"),
    }
    io.write_json(directory / "metadata.json", metadata)
    activation, gated, tied = {v: key for key, v in _VERSIONS.items()}[config.version]
    function = {
        "module": "builtins",
        "class_name": "function",
        "config": f"keras_nlp>{activation}",
        "registered_name": "function",
    }
    arguments = {
        **{key: getattr(config, key) for key in (*_SIZES, "key_value_dim", "dropout")},
        "activation": activation if activation == "relu" else function,
        "use_gated_activation": gated,
        "layer_norm_epsilon": 1e-6,
        "tie_embedding_weights": tied,
    }
    io.write_json(directory / _CONFIG, _object("backbone", "T5Backbone", arguments))


def _object(part: str, name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a Keras object as JSON."""
    return {
        "module": f"keras_nlp.src.models.t5.t5_{part}",
        "class_name": name,
        "config": {"name": f"t5_{part}", "trainable": True, **config},
        "registered_name": f"keras_nlp>{name}",
    }


def _name_of(function: Any) -> str:
    """Returns a function's name without its package; Keras writes it in two ways."""
    if isinstance(function, Mapping):
        function = function.get("config")
    return str(function).rpartition(">")[2]
