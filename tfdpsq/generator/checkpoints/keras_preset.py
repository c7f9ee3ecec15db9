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

import importlib.metadata
import io as memory
import pathlib
from collections.abc import Mapping
from typing import Any

import h5py
import numpy as np
from keras_nlp.src.models.t5.t5_backbone import T5Backbone
from keras_nlp.src.utils import preset_utils

from tfdpsq.data import io
from tfdpsq.generator.checkpoints import tensors
from tfdpsq.generator.checkpoints.tensors import Tensor, reading
from tfdpsq.layers import T5Config

NAMES = tuple(sorted(T5Backbone.presets))
VOCABULARY_FILE = "assets/tokenizer/vocabulary.spm"
_CONFIG, _WEIGHTS, _TOKENIZER = "config.json", "model.weights.h5", "tokenizer.json"
_SIZES = "vocabulary_size num_layers num_heads hidden_dim intermediate_dim".split()
_ACTIVATIONS = {"1.0": "relu", "1.1": "gelu_approximate"}


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
            found[name] = Tensor(file, item.shape, lambda: item[()])

    with reading(file):
        h5py.File(file, "r").visititems(add)
    return read_config(path / _CONFIG, encoder_only), found


def read_config(path: pathlib.Path, encoder_only: bool = False) -> T5Config:
    """Reads the shape; the defaults are those of `T5Backbone`'s arguments."""
    with reading(path):
        outer = tensors.read_json(path)
        values = {"activation": "relu", "key_value_dim": None, **outer["config"]}
        values["activation"] = _name_of(values["activation"])
        values["T5Backbone"] = str(outer["registered_name"]).rpartition(">")[2]
    gated = values["activation"] != "relu"
    wanted: dict[str, Any] = {
        "T5Backbone": ["T5Backbone"],
        "layer_norm_epsilon": [1e-6],
        "activation": _ACTIVATIONS.values(),
        "use_gated_activation": [gated],
        # An encoder has no head.
        "tie_embedding_weights": [True, False] if encoder_only else [not gated],
    }
    defaults = {"use_gated_activation": True, "tie_embedding_weights": True}
    tensors.require(path, {**defaults, **values}, wanted)
    with reading(path):
        width = values["hidden_dim"] // values["num_heads"]
        return T5Config(
            **{key: values[key] for key in _SIZES},
            key_value_dim=values["key_value_dim"] or width,
            version="1.1" if gated else "1.0",
            dropout=values.get("dropout", 0.1),
        )


def write(
    directory: pathlib.Path,
    config: T5Config,
    values: Mapping[str, np.ndarray],
    vocabulary: bytes | None,
) -> None:
    """Writes a preset; see `checkpoint.save`."""
    # In memory first: a disk that is full where HDF5 closes its file ends the process.
    content = memory.BytesIO()
    with h5py.File(content, "w") as file:
        file.create_group("vars")  # Keras asks for the model's own variables.
        for name, value in values.items():
            file[name] = value
    io.atomic_write(directory / _WEIGHTS, content.getvalue())
    if vocabulary is not None:
        io.atomic_write(directory / VOCABULARY_FILE, vocabulary)
        own = {"proto": None, "sequence_length": None, "dtype": "int32"}
        io.write_json(directory / _TOKENIZER, _object("tokenizer", "T5Tokenizer", own))
    names = {"keras_version": "keras", "keras_nlp_version": "keras-nlp"}
    versions = {key: importlib.metadata.version(name) for key, name in names.items()}
    io.write_json(directory / "metadata.json", versions)
    activation = _ACTIVATIONS[config.version]
    function = {
        "module": "builtins",
        "class_name": "function",
        "config": f"keras_nlp>{activation}",
        "registered_name": "function",
    }
    arguments = {
        **{key: getattr(config, key) for key in (*_SIZES, "key_value_dim", "dropout")},
        "activation": activation if activation == "relu" else function,
        "use_gated_activation": not config.tied,
        "layer_norm_epsilon": 1e-6,
        "tie_embedding_weights": config.tied,
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
