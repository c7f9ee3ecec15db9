"""Sentence encoders on a T5, as sentence-transformers lays them out.

Sentence-T5 and GTR are published so: `modules.json` names a chain of modules,

    (the directory itself)   a T5 encoder in Hugging Face's layout
    1_Pooling/               mean over real tokens, or the first token
    2_Dense/                 projection without bias or activation; may be missing
    3_Normalize/             unit length

which is a tower of our retriever. Anything else in the chain is refused: a similar
encoder would give plausible and wrong embeddings.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any, NamedTuple

import numpy as np

from tfdpsq.data import io
from tfdpsq.generator.checkpoints import huggingface, tensors
from tfdpsq.generator.checkpoints.tensors import not_t5, read_json, reading, require

MODULES_FILE = "modules.json"
_TYPES = "sentence_transformers.models"
# The modules, in their order, and their directories.
_CHAIN = {
    "Transformer": "",
    "Pooling": "1_Pooling",
    "Dense": "2_Dense",
    "Normalize": "3_Normalize",
}
_LINEAR = "linear.weight"
_IDENTITY = "torch.nn.modules.linear.Identity"
_DENSE = {"bias": False, "activation_function": _IDENTITY}
# Ours: the library's, a key of older configs and a value in newer ones.
_POOLINGS = {
    "mean": (["pooling_mode_mean_tokens"], ["mean"]),
    "first": (["pooling_mode_cls_token"], ["cls"]),
}


class SentenceEncoder(NamedTuple):
    """The layers that a sentence encoder adds to its T5."""

    pooling: str  # "mean" over real tokens, or the "first" token
    projection: np.ndarray | None  # [hidden, D] float32


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
        modules = {m["type"].rpartition(".")[2]: m["path"] for m in read_json(file)}
    wanted = [kind for kind in _CHAIN if kind != "Dense" or kind in modules]
    if list(modules) != wanted or modules["Transformer"]:
        raise not_t5(file, f"its modules are {modules}")
    own = path / "sentence_bert_config.json"
    if own.is_file():
        require(own, read_json(own), {"do_lower_case": [None, False]})
    file = path / modules["Pooling"] / "config.json"
    config = read_json(file)
    on = [key for key, value in config.items() if "pooling_mode_" in key and value]
    given = np.atleast_1d(config.get("pooling_mode", on)).tolist()
    poolings = [ours for ours, names in _POOLINGS.items() if given in names]
    if not poolings:
        raise not_t5(file, f"it pools by {given}")
    dense = path / modules["Dense"] if "Dense" in modules else None
    return SentenceEncoder(poolings[0], _projection(dense) if dense else None)


def _projection(path: pathlib.Path) -> np.ndarray:
    """Reads the matrix [hidden, D] of a module."""
    config = path / "config.json"
    require(config, read_json(config), {key: [v] for key, v in _DENSE.items()})
    found = huggingface.tensors_in(path)
    if list(found) != [_LINEAR] or len(found[_LINEAR].shape) != 2:
        raise not_t5(path, f"it holds {list(found)}, not the matrix {_LINEAR} alone")
    return found[_LINEAR].value(_LINEAR).T


def save(
    directory: str | os.PathLike, pooling: str, projection: np.ndarray, length: int
) -> None:
    """Writes the modules next to an encoder that `checkpoints.save` wrote.

    See `SentenceEncoder`; `length` is of a text in tokens at most, EOS included.
    """
    directory = pathlib.Path(directory)
    hidden, width = projection.shape
    for name in _CHAIN.values():
        (directory / name).mkdir(exist_ok=True)
    modes = {old: mode == pooling for mode, ((old,), _) in _POOLINGS.items()}
    modes.update(pooling_mode_max_tokens=False, pooling_mode_mean_sqrt_len_tokens=False)
    files: dict[str, Any] = {
        "1_Pooling/config.json": {"word_embedding_dimension": hidden, **modes},
        "2_Dense/config.json": {"in_features": hidden, "out_features": width, **_DENSE},
        "sentence_bert_config.json": {"max_seq_length": length, "do_lower_case": False},
        MODULES_FILE: [
            {"idx": i, "name": str(i), "path": path, "type": f"{_TYPES}.{kind}"}
            for i, (kind, path) in enumerate(_CHAIN.items())
        ],
    }
    matrix = np.ascontiguousarray(projection.T, np.float32)
    file = directory / "2_Dense" / huggingface.WEIGHTS_FILE
    tensors.write_tensors(file, {_LINEAR: matrix})
    for name, content in files.items():
        io.write_json(directory / name, content)
