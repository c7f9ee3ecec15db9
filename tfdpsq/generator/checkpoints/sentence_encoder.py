"""Sentence encoders on a T5, as sentence-transformers lays them out.

Sentence-T5 and GTR are published so: `modules.json` names a chain of modules,

    (the directory itself)   a T5 encoder in Hugging Face's layout
    1_Pooling/               mean over real tokens, or the first token
    2_Dense/                 projection without bias or activation; may be missing
    3_Normalize/             unit length

which is a tower of our retriever. Anything else in the chain is refused: a similar
encoder would give plausible and wrong embeddings.

Source: github.com/UKPLab/sentence-transformers, base/modules.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.numpy

from tfdpsq import validation
from tfdpsq.data import files
from tfdpsq.data.tokenization import VOCABULARY_FILE
from tfdpsq.generator.checkpoints import fast_tokenizer, huggingface, pickled
from tfdpsq.generator.checkpoints.checkpoint import read_json
from tfdpsq.generator.checkpoints.weights import read_tensors

MODULES_FILE = "modules.json"
_TYPES = "sentence_transformers.models"
_CHAIN = ("Transformer", "Pooling", "Dense", "Normalize")
_LINEAR = "linear.weight"
_IDENTITY = "torch.nn.modules.linear.Identity"
# Ours: the library's, in its older configs and in newer ones.
_POOLINGS = {
    "mean": ("pooling_mode_mean_tokens", "mean"),
    "first": ("pooling_mode_cls_token", "cls"),
}
_ONLY = (
    "Only a T5 encoder with mean or first-token pooling, at most one projection "
    "without bias, and unit length can be loaded"
)


@dataclasses.dataclass(frozen=True)
class SentenceEncoder:
    """All that a sentence encoder adds to its T5.

    Attributes:
      pooling: "mean" over real tokens, or the "first" token.
      projection: [hidden, D] float32; `None` for none.
    """

    pooling: str
    projection: np.ndarray | None


def read_sentence_encoder(path: str | os.PathLike) -> SentenceEncoder | None:
    """Reads the modules of a directory.

    Returns:
      The modules after the T5; `None` where there are none.

    Raises:
      InputError: the projection is a pickle, and torch is not installed.
      DataError: a file is missing or damaged, or a module is not one of the above.
    """
    path = pathlib.Path(path)
    file = path / MODULES_FILE
    if not file.is_file():
        return None
    modules = _read(file, list)
    kinds = [str(_field(file, each, "type")).rpartition(".")[2] for each in modules]
    wanted = [kind for kind in _CHAIN if kind != "Dense" or "Dense" in kinds]
    if kinds != wanted:
        raise validation.DataError(
            file, f"its modules are {', '.join(kinds)}, not {', '.join(wanted)}", _ONLY
        )
    places = {k: str(_field(file, m, "path")) for k, m in zip(kinds, modules)}
    if places["Transformer"]:
        raise validation.DataError(
            file,
            f"its T5 is in {places['Transformer']}, not in the directory itself",
            "Load and save it with sentence-transformers 2 or later",
        )
    own = path / "sentence_bert_config.json"
    if own.is_file() and _read(own, dict).get("do_lower_case"):
        raise validation.DataError(own, "do_lower_case is true", _ONLY)
    projection = None
    if "Dense" in places:
        projection = _projection(path / places["Dense"])
    return SentenceEncoder(_pooling(path / places["Pooling"]), projection)


def save(
    directory: str | os.PathLike, pooling: str, projection: np.ndarray, length: int
) -> None:
    """Writes the modules next to an encoder that `huggingface.save` wrote.

    Args:
      directory: holds the encoder and its vocabulary.
      pooling: see `SentenceEncoder`.
      projection: [hidden, D] float32.
      length: most tokens of a text, EOS included.
    """
    directory = pathlib.Path(directory)
    hidden, width = projection.shape
    names = ["", "1_Pooling", "2_Dense", "3_Normalize"]
    for name in names[1:]:
        (directory / name).mkdir()
    files.write_json(
        directory / "1_Pooling" / "config.json",
        {
            "word_embedding_dimension": hidden,
            **{old: mode == pooling for mode, (old, _) in _POOLINGS.items()},
            "pooling_mode_max_tokens": False,
            "pooling_mode_mean_sqrt_len_tokens": False,
        },
    )
    dense = {"in_features": hidden, "out_features": width, "bias": False}
    files.write_json(
        directory / "2_Dense" / "config.json",
        {**dense, "activation_function": _IDENTITY},
    )
    safetensors.numpy.save_file(
        {_LINEAR: np.ascontiguousarray(projection.T, np.float32)},
        directory / "2_Dense" / huggingface.WEIGHTS_FILE,
    )
    files.write_json(
        directory / "sentence_bert_config.json",
        {"max_seq_length": length, "do_lower_case": False},
    )
    files.write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": length,
            "pad_token": "<pad>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
        },
    )
    text = fast_tokenizer.tokenizer_json(directory / VOCABULARY_FILE)
    files.atomic_write(directory / fast_tokenizer.TOKENIZER_FILE, text)
    chain = [
        {"idx": place, "name": str(place), "path": name, "type": f"{_TYPES}.{kind}"}
        for place, (name, kind) in enumerate(zip(names, _CHAIN))
    ]
    text = json.dumps(chain, indent=2)
    files.atomic_write(directory / MODULES_FILE, text + "\n")


def _pooling(path: pathlib.Path) -> str:
    """Returns the pooling that a module's config states."""
    file = path / "config.json"
    config = _read(file, dict)
    on = sorted(k for k, v in config.items() if k.startswith("pooling_mode_") and v)
    given = config.get("pooling_mode", on)
    given = [given] if isinstance(given, str) else list(given)
    for ours, names in _POOLINGS.items():
        if len(given) == 1 and given[0] in names:
            return ours
    raise validation.DataError(
        file, f"it pools by {', '.join(map(str, given)) or 'nothing'}", _ONLY
    )


def _projection(path: pathlib.Path) -> np.ndarray:
    """Returns the matrix [hidden, D] of a module."""
    file = path / "config.json"
    config = _read(file, dict)
    for key, value in (("bias", False), ("activation_function", _IDENTITY)):
        if config.get(key) != value:
            raise validation.DataError(
                file, f"{key} is {config.get(key)!r}, not {value!r}", _ONLY
            )
    if (path / huggingface.WEIGHTS_FILE).is_file():
        weights = path / huggingface.WEIGHTS_FILE
        tensors = read_tensors(weights)
    else:
        weights = path / pickled.WEIGHTS_FILE
        if not weights.is_file():
            raise validation.DataError(path, "it has no weights", "Copy it again")
        found = pickled.tensors_of(weights)
        tensors = {name: pickled.rows(t, 0, len(t)) for name, t in found.items()}
    shape = [config.get("out_features"), config.get("in_features")]
    matrix = tensors.get(_LINEAR)
    if set(tensors) != {_LINEAR} or list(np.shape(matrix)) != shape:
        found_shapes = {name: list(value.shape) for name, value in tensors.items()}
        raise validation.DataError(
            weights,
            f"it holds {found_shapes}, not {_LINEAR} of shape {shape}",
            "Copy all files of one model",
        )
    matrix = np.asarray(matrix, np.float32)
    if not np.isfinite(matrix).all():
        raise validation.DataError(
            weights, f"tensor {_LINEAR} holds NaN or infinity", "Copy it again"
        )
    return matrix.T


def _field(file: pathlib.Path, module: Any, name: str) -> Any:
    if not isinstance(module, Mapping) or not isinstance(module.get(name), str):
        raise validation.DataError(
            file, f"a module has no {name}", "Copy the file again"
        )
    return module[name]


def _read(file: pathlib.Path, kind: type) -> Any:
    return read_json(file, kind, kind.__name__, "model")
