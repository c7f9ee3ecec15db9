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

import os
import pathlib
from typing import Any, NamedTuple

import numpy as np

from tfdpsq import validation
from tfdpsq.data import io
from tfdpsq.generator.checkpoints import huggingface, tensors
from tfdpsq.generator.checkpoints.tensors import read_json, reading

MODULES_FILE = "modules.json"
_TYPES = "sentence_transformers.models"
_CHAIN = ("Transformer", "Pooling", "Dense", "Normalize")
_PLACES = ("", "1_Pooling", "2_Dense", "3_Normalize")
_LINEAR = "linear.weight"
_IDENTITY = "torch.nn.modules.linear.Identity"
# Ours: the library's, in its older configs and in newer ones.
_POOLINGS = {
    "mean": (["pooling_mode_mean_tokens"], ["mean"]),
    "first": (["pooling_mode_cls_token"], ["cls"]),
}


class SentenceEncoder(NamedTuple):
    """The layers that a sentence encoder adds to its T5.

    Attributes:
      pooling: "mean" over real tokens, or the "first" token.
      projection: [hidden, D] float32; `None` for none.
    """

    pooling: str
    projection: np.ndarray | None


def read_sentence_encoder(path: str | os.PathLike) -> SentenceEncoder | None:
    """Reads the modules of a directory; `None` where there are none.

    Raises:
      InputError: the projection is a pickle, and torch is not installed.
      DataError: a file is missing or damaged, or a module is not one of the above.
    """
    path = pathlib.Path(path)
    file = path / MODULES_FILE
    if not file.is_file():
        return None
    with reading(file):
        modules = [(m["type"].rpartition(".")[2], m["path"]) for m in read_json(file)]
    dense = [path / place for kind, place in modules if kind == "Dense"]
    wanted = [kind for kind in _CHAIN if kind != "Dense" or dense]
    if [kind for kind, _ in modules] != wanted or modules[0][1]:
        raise _other(file, f"its modules are {modules}")
    own = path / "sentence_bert_config.json"
    if own.is_file():
        _require(own, do_lower_case=(None, False))
    file = path / modules[1][1] / "config.json"
    config = read_json(file)
    on = [key for key, value in config.items() if "pooling_mode_" in key and value]
    given = np.atleast_1d(config.get("pooling_mode", on)).tolist()
    poolings = [ours for ours, names in _POOLINGS.items() if given in names]
    if not poolings:
        raise _other(file, f"it pools by {given}")
    return SentenceEncoder(poolings[0], _projection(dense[0]) if dense else None)


def _projection(path: pathlib.Path) -> np.ndarray:
    """Reads the matrix [hidden, D] of a module."""
    config = path / "config.json"
    _require(config, bias=(False,), activation_function=(_IDENTITY,))
    found = huggingface.tensors_in(path)
    if list(found) != [_LINEAR] or len(found[_LINEAR].shape) != 2:
        raise _other(path, f"it holds {list(found)}, not the matrix {_LINEAR} alone")
    return tensors.finite_value(found[_LINEAR], _LINEAR).T


def _require(file: pathlib.Path, **wanted: tuple[Any, ...]) -> None:
    config = read_json(file)
    for key, choices in wanted.items():
        if config.get(key) not in choices:
            raise _other(file, f"{key} is {config.get(key)!r}, not {choices[-1]!r}")


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
    for name in _PLACES[1:]:
        (directory / name).mkdir(exist_ok=True)
    modes = {old: mode == pooling for mode, ((old,), _) in _POOLINGS.items()}
    modes.update(pooling_mode_max_tokens=False, pooling_mode_mean_sqrt_len_tokens=False)
    chain = [
        {"idx": i, "name": str(i), "path": name, "type": f"{_TYPES}.{kind}"}
        for i, (name, kind) in enumerate(zip(_PLACES, _CHAIN))
    ]
    files: dict[str, Any] = {
        "1_Pooling/config.json": {"word_embedding_dimension": hidden, **modes},
        "2_Dense/config.json": {
            "in_features": hidden,
            "out_features": width,
            "bias": False,
            "activation_function": _IDENTITY,
        },
        "sentence_bert_config.json": {"max_seq_length": length, "do_lower_case": False},
        MODULES_FILE: chain,
    }
    matrix = np.ascontiguousarray(projection.T, np.float32)
    file = directory / "2_Dense" / huggingface.WEIGHTS_FILE
    tensors.write_tensors(file, {_LINEAR: matrix})
    for name, content in files.items():
        io.write_json(directory / name, content)


def _other(path: pathlib.Path, problem: str) -> validation.DataError:
    return validation.DataError(
        path,
        problem,
        "Only a T5 encoder with mean or first-token pooling, at most one projection "
        "without bias, and unit length can be loaded",
    )
