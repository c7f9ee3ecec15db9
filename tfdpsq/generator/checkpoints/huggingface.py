"""T5 in Hugging Face's layout: `config.json`, weights and tokenizer.

Read are T5 1.0, T5 1.1, FLAN-T5 and mT5, whole or encoder only, from safetensors or
PyTorch's pickles, in one file or in shards. What decides the model is checked key by
key, since a T5 that is merely similar gives fluent and wrong text: an unknown value is
an error, not a guess.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import safetensors

from tfdpsq import validation
from tfdpsq.data import io
from tfdpsq.data.tokenization import VOCABULARY_FILE
from tfdpsq.generator.checkpoints import fast_tokenizer, tensors, weights
from tfdpsq.generator.checkpoints.tensors import Tensor, not_t5, reading
from tfdpsq.layers import T5Config

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"

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
# The same in every T5; may be left out of a config. The second ones are not an
# encoder's.
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


def open_checkpoint(
    path: pathlib.Path, encoder_only: bool
) -> tuple[T5Config, dict[str, Tensor]]:
    """Reads config and headers; raises DataError if they are no T5's.

    Or InputError, if there are pickles alone and torch is not installed.
    """
    config = _read_config(path / CONFIG_FILE, encoder_only)
    found = tensors_in(path)
    found.pop(_UNUSED, None)
    # Some versions of the library write the embedding several times, tied or not.
    names = ["shared.weight", *_EMBEDDINGS, *(["lm_head.weight"] * config.tied)]
    copies = [found.pop(name) for name in names if name in found]
    return config, {**found, "shared.weight": copies[0]} if copies else found


def _read_config(path: pathlib.Path, encoder_only: bool) -> T5Config:
    values = {key: v for key, v in tensors.read_json(path).items() if v is not None}
    published = list(_PROJECTIONS.values())[values.get("model_type") == "mt5" :]
    activation = values.setdefault("feed_forward_proj", published[0])
    tied, fixed = activation == _PROJECTIONS["1.0"], {**_FIXED}
    wanted: dict[str, Any] = {
        "model_type": ["t5", "mt5"],
        "feed_forward_proj": published,
    }
    if not encoder_only:
        fixed.update(_FIXED_WHOLE)
        # transformers 5 writes true in every T5's second key, and the truth in the
        # first; mT5 has it in neither.
        if "scale_decoder_outputs" in values:
            wanted["scale_decoder_outputs"] = [tied]
        elif values.get("model_type") == "t5":
            wanted["tie_word_embeddings"] = [tied]
            values.setdefault("tie_word_embeddings", True)
    wanted.update({key: [value] for key, value in fixed.items()})
    tensors.require(path, {**fixed, **values}, wanted)
    missing = [key for key in _SIZES.values() if key not in values]
    if missing:
        raise not_t5(path, f"it lacks {', '.join(missing)}")
    try:
        return T5Config(
            **{ours: values[theirs] for ours, theirs in _SIZES.items()},
            version="1.0" if tied else "1.1",
            dropout=values.get("dropout_rate", 0.1),
        )
    except validation.InputError as error:
        raise not_t5(path, str(error).rstrip(".")) from error


def tensors_in(path: pathlib.Path) -> dict[str, Tensor]:
    """Reads the headers of a directory's safetensors, or else of its pickles."""
    for name, opened in ((WEIGHTS_FILE, _safetensors), ("pytorch_model.bin", _pickled)):
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


def _safetensors(path: pathlib.Path) -> Iterator[tuple[str, Tensor]]:
    with reading(path):
        file = safetensors.safe_open(path, "np")
        for name in file.keys():  # noqa: SIM118 - no mapping
            shape = tuple(file.get_slice(name).get_shape())
            yield name, Tensor(path, shape, functools.partial(file.get_tensor, name))


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
        for name, value in torch.load(path, "cpu", weights_only=True).items():
            read = lambda value=value: value.float().numpy()  # noqa: E731
            yield name, Tensor(path, tuple(value.shape), read)


def write(
    directory: pathlib.Path,
    config: T5Config,
    values: Mapping[str, np.ndarray],
    vocabulary: bytes | None,
    dtype: str,
    encoder_only: bool,
) -> None:
    """Writes a checkpoint; see `checkpoint.save`."""
    tensors.write_tensors(directory / WEIGHTS_FILE, values)
    if vocabulary is not None:
        fast_tokenizer.save(directory, vocabulary)
        io.atomic_write(directory / VOCABULARY_FILE, vocabulary)
    kind = "T5EncoderModel" if encoder_only else "T5ForConditionalGeneration"
    about = {
        **_FIXED,
        **{theirs: getattr(config, ours) for ours, theirs in _SIZES.items()},
        "architectures": [kind],
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
    io.write_json(directory / CONFIG_FILE, about)
