"""T5 in Hugging Face's layout: `config.json`, weights and tokenizer.

Read are T5 1.0, T5 1.1, FLAN-T5 and mT5, whole or encoder only, from safetensors or
PyTorch's pickles, in one file or in shards. What decides the model is checked key by
key, since a T5 that is merely similar gives fluent and wrong text: an unknown value is
an error, not a guess.
"""

from __future__ import annotations

import functools
import os
import pathlib
import shutil
import zipfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import safetensors
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.data import io
from tfdpsq.data.tokenization import VOCABULARY_FILE, Tokenizer
from tfdpsq.generator.checkpoints import fast_tokenizer, tensors, weights
from tfdpsq.generator.checkpoints.tensors import Tensor, not_t5, reading
from tfdpsq.layers import T5Config

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
PICKLE_FILE = "pytorch_model.bin"

_PROJECTIONS = {"1.0": "relu", "1.1": "gated-gelu"}  # feed_forward_proj by version
# Our names of the sizes that every config states.
_SIZES = {
    "vocabulary_size": "vocab_size",
    "num_layers": "num_layers",
    "num_heads": "num_heads",
    "hidden_dim": "d_model",
    "intermediate_dim": "d_ff",
    "key_value_dim": "d_kv",
}
# The same in every T5; may be left out of a config.
_FIXED: dict[str, Any] = {
    "relative_attention_num_buckets": weights.BUCKETS,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "is_decoder": False,
    "pad_token_id": 0,
}
_FIXED_WHOLE = {"is_encoder_decoder": True, "decoder_start_token_id": 0}
_EMBEDDINGS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# A weight that old checkpoints hold and no T5 ever used.
_UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def matches(path: pathlib.Path) -> bool:
    """Returns whether a directory has Hugging Face's layout, complete or not."""
    return tensors.has_key(path / CONFIG_FILE, "model_type")


def open_checkpoint(
    path: pathlib.Path, encoder_only: bool
) -> tuple[T5Config, dict[str, Tensor]]:
    """Reads a directory's config and the headers of its weights.

    Raises:
      InputError: there are pickles alone, and torch is not installed.
      DataError: a file is missing or damaged, or the config is of another model.
    """
    config = read_config(path / CONFIG_FILE, encoder_only)
    found = tensors_in(path)
    found.pop(_UNUSED, None)
    # Some versions of the library write the embedding several times, tied or not.
    names = ["shared.weight", *_EMBEDDINGS, *(["lm_head.weight"] * config.tied)]
    copies = [found.pop(name) for name in names if name in found]
    return config, {**found, "shared.weight": copies[0]} if copies else found


def read_config(path: pathlib.Path, encoder_only: bool) -> T5Config:
    """Reads the shape in a `config.json`, as `open_checkpoint` does."""
    values = tensors.read_json(path)
    kind = values.get("model_type")
    versions = {name: version for version, name in _PROJECTIONS.items()}
    version = versions.get(values.get("feed_forward_proj", "relu"), "")
    checks: dict[str, tuple[Any, ...]] = {
        "model_type": ("t5", "mt5"),
        "feed_forward_proj": (None, *(["relu"] * (kind == "t5")), "gated-gelu"),
        **{key: (None, value) for key, value in _FIXED.items()},
    }
    if not encoder_only:
        checks.update({key: (None, value) for key, value in _FIXED_WHOLE.items()})
        tied = version == "1.0"
        # transformers 5 writes true in every T5's first key, and the truth in this one.
        if "scale_decoder_outputs" in values:
            checks["scale_decoder_outputs"] = (tied,)
        elif kind == "t5":
            checks["tie_word_embeddings"] = (None, True) if tied else (False,)
    for key, choices in checks.items():
        if values.get(key) not in choices:
            wanted = " or ".join(repr(c) for c in choices if c is not None)
            raise not_t5(path, f"{key} is {values.get(key)!r}; expected {wanted}")
    missing = [key for key in _SIZES.values() if values.get(key) is None]
    if missing:
        raise not_t5(path, f"it lacks {', '.join(missing)}")
    try:
        return T5Config(
            **{ours: values[theirs] for ours, theirs in _SIZES.items()},
            version=version,
            dropout=values.get("dropout_rate", 0.1),
        )
    except validation.InputError as error:
        raise not_t5(path, str(error).rstrip(".")) from error


def tensors_in(path: pathlib.Path) -> dict[str, Tensor]:
    """Reads the headers of a directory's safetensors, or else of its pickles."""
    for name, opened in ((WEIGHTS_FILE, _safetensors), (PICKLE_FILE, _pickled)):
        index = path / f"{name}.index.json"
        if index.is_file():
            with reading(index):
                shards = sorted(set(tensors.read_json(index)["weight_map"].values()))
            return dict(pair for shard in shards for pair in opened(path / shard))
        if (path / name).is_file():
            return dict(opened(path / name))
    raise validation.DataError(
        path, "it has no weights", f"Give a directory with {WEIGHTS_FILE}"
    )


def save(
    directory: str | os.PathLike,
    config: T5Config,
    model: tf.keras.Model,
    dtype: str = "float32",
    vocabulary: str | os.PathLike | None = None,
    encoder_only: bool = False,
) -> None:
    """Writes a model so that `transformers` and `open_checkpoint` read it.

    The config is written last: without it, the directory is not a checkpoint.

    Args:
      directory: an existing directory; files of these names in it are replaced.
      config: the model's shape.
      model: its backbone (or encoder), whose LoRA updates are added in.
      dtype: one of `weights.DTYPES`, to which values are rounded.
      vocabulary: a SentencePiece model to copy into the directory, also as
        `tokenizer.json`.
      encoder_only: whether to write the encoder alone.

    Raises:
      InputError: a weight is not finite in `dtype`, the disk is full, or the vocabulary
        has more pieces than the model embeddings.
      DataError: `vocabulary` is no SentencePiece model of a T5.
    """
    directory = pathlib.Path(directory)
    validation.one_of("dtype", dtype, weights.DTYPES)
    if vocabulary is not None:
        Tokenizer(vocabulary).require_embeddings(config.vocabulary_size)
    values = dict(
        weights.stored_values(model, config, "huggingface", dtype, encoder_only)
    )
    tensors.write_tensors(directory / WEIGHTS_FILE, values)
    if vocabulary is not None:
        fast_tokenizer.save(directory, vocabulary)
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
        "eos_token_id": 1,
        "feed_forward_proj": _PROJECTIONS[config.version],
        "is_encoder_decoder": not encoder_only,
        "model_type": "t5",
        "num_decoder_layers": config.num_layers,
        "tie_word_embeddings": config.tied,
        "torch_dtype": dtype,
        "use_cache": not encoder_only,
    }
    io.write_json(directory / CONFIG_FILE, values)


def _safetensors(path: pathlib.Path) -> Iterator[tuple[str, Tensor]]:
    with reading(path), safetensors.safe_open(path, "np") as file:
        for name in file.keys():  # noqa: SIM118 - no mapping
            part = file.get_slice(name)
            kind = part.get_dtype()
            read = functools.partial(_safetensor, path, name)
            shape = tuple(part.get_shape())
            yield name, Tensor(path, shape, _DTYPES.get(kind, kind), read)


def _safetensor(path: pathlib.Path, name: str) -> np.ndarray:
    # Opened again each time: data once read stays mapped, and counts as memory.
    with safetensors.safe_open(path, "np") as file:
        return file.get_tensor(name)


def _pickled(path: pathlib.Path) -> Iterator[tuple[str, Tensor]]:
    """Reads a pickle by the unpickler of torch that builds nothing but tensors."""
    remedy = "Run pip install 'tfdpsq[torch]', or save it as safetensors."
    torch = validation.library("torch", f"{path} needs torch to be read. {remedy}")
    if torch.__version__ < "2.6":  # could be made to run code: CVE-2025-32434
        raise validation.InputError(
            f"{path} is a pickle, which torch {torch.__version__} does not read "
            f"safely; 2.6 does. {remedy}"
        )
    with reading(path):
        found = torch.load(
            path,
            map_location="cpu",
            weights_only=True,
            mmap=zipfile.is_zipfile(path),  # older files are read whole
        )
        for name, value in found.items():
            dtype = str(value.dtype).partition(".")[2]
            read = functools.partial(_from_torch, value)
            yield name, Tensor(path, tuple(value.shape), dtype, read)


def _from_torch(value: Any) -> np.ndarray:
    return value.detach().float().numpy()
