"""Loads any T5 checkpoint: detects the format by the files in a directory."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.data import any_files
from tfdpsq.data.tokenization import VOCABULARY_FILE
from tfdpsq.generator.checkpoints import (
    huggingface,
    keras_preset,
    presets,
    prompt_file,
    remote,
    t5x,
)
from tfdpsq.generator.checkpoints.checkpoint import Checkpoint
from tfdpsq.layers import T5Backbone, T5Config, build_encoder

# Each has `matches(path)` and `open_checkpoint(path, encoder_only)`.
_FORMATS = (huggingface, keras_preset, t5x)
_VOCABULARIES = (VOCABULARY_FILE, keras_preset.VOCABULARY_FILE)


def locate(path: str | os.PathLike) -> pathlib.Path:
    """Returns a checkpoint's directory, downloaded if it is a preset or elsewhere.

    Args:
      path: see `open_checkpoint`.

    Raises:
      InputError: the directory does not exist, or cannot be downloaded.
      PermissionError: it cannot be looked at.
    """
    text = any_files.without_scheme(path)
    if not any_files.is_local(text):
        return remote.local_copy(text.rstrip("/"))
    if not _exists(text):
        if shipped := presets.directory_of(text):
            return shipped
        if keras_preset.is_name(text):
            return keras_preset.download(text)
        names = ", ".join([*presets.names(), *keras_preset.names()])
        raise validation.InputError(
            f"{text} does not exist. Give a directory with a T5 checkpoint, or the "
            f"name of a preset ({names})."
        )
    return pathlib.Path(text)


def _exists(path: str) -> bool:
    """Returns whether a path leads anywhere.

    Raises:
      PermissionError: nobody may look, which `os.path.exists` takes for "no".
    """
    try:
        os.stat(path)
    except PermissionError:
        raise
    except (OSError, ValueError):
        return False
    return True


def vocabulary_in(directory: str | os.PathLike) -> pathlib.Path | None:
    """Finds the SentencePiece model stored with a checkpoint's weights, if any.

    Args:
      directory: of any format.
    """
    found = [pathlib.Path(directory, name) for name in _VOCABULARIES]
    return next((path for path in found if path.is_file()), None)


def open_checkpoint(
    path: str | os.PathLike, encoder_only: bool = False, ignore: Sequence[str] = ()
) -> Checkpoint:
    """Reads a checkpoint's config and headers, not yet its weights.

    Args:
      path: a directory of Hugging Face's, a keras-nlp preset, or a T5X checkpoint;
        or a name: "t5_tiny_pydocs", which comes with this package, or that of a preset
        for keras-nlp to download, such as "t5_small_multi". Or a URL of such a
        directory, such as "gs://bucket/checkpoint_1000000".
      encoder_only: whether the decoder and the head are to be left out, or are not
        there at all.
      ignore: see `t5x.open_checkpoint`; empty for the other formats.

    Returns:
      The checkpoint; everything it needs was found in it.

    Raises:
      InputError: nothing there, or of no known format; or see `locate`.
      DataError: not a T5 that this project builds, or not complete; the message
        names file, key or tensor, and both values or shapes. Or an encoder alone is
        wanted of a model with a soft prompt.
    """
    path = locate(path)
    checkpoint = _open_weights(path, encoder_only, ignore)
    prompt = prompt_file.read(path, checkpoint.config)
    if prompt is None:
        return checkpoint
    if encoder_only:
        raise validation.DataError(
            prompt.path,
            f"the model has a soft prompt of {prompt.length} vectors, which an encoder "
            "alone has no place for",
            "Give the T5 that the prompt was tuned for, which is a copy of this "
            "directory without the file",
        )
    return dataclasses.replace(checkpoint, soft_prompt=prompt)


def _open_weights(
    path: pathlib.Path, encoder_only: bool, ignore: Sequence[str]
) -> Checkpoint:
    found = [form for form in _FORMATS if form.matches(path)]
    if not found:
        raise validation.InputError(
            f"{path} holds no T5 checkpoint of a known format. Give a directory with "
            "config.json and model.safetensors (Hugging Face), with config.json and "
            "model.weights.h5 (keras-nlp), or with a file named checkpoint (T5X)."
        )
    if found[0] is t5x:
        return t5x.open_checkpoint(path, encoder_only, ignore)
    if ignore:
        raise validation.InputError(
            f"ignore is {list(ignore)}, and {path} is no T5X checkpoint. Only those "
            "may hold weights that are to be ignored."
        )
    return found[0].open_checkpoint(path, encoder_only)


def load(
    path: str | os.PathLike, dtype: str | None = None
) -> tuple[T5Config, tf.keras.Model]:
    """Loads a T5.

    Args:
      path: see `open_checkpoint`.
      dtype: the policy to compute in, such as "mixed_bfloat16"; weights are float32.

    Returns:
      Its config, and the `T5Backbone`.

    Raises:
      InputError: see `open_checkpoint`.
      DataError: see there and `weights.load_into`.
    """
    checkpoint = open_checkpoint(path)
    backbone = T5Backbone(
        checkpoint.config, dtype, soft_prompt=checkpoint.soft_prompt_length()
    )
    checkpoint.load_into(backbone)
    return checkpoint.config, backbone


def load_encoder(
    path: str | os.PathLike, dtype: str | None = None
) -> tuple[T5Config, tf.keras.Model]:
    """Loads the encoder of a T5, from a whole checkpoint or one of an encoder only.

    Args:
      path: see `open_checkpoint`.
      dtype: see `load`.

    Returns:
      Its config, and the encoder as `layers.build_encoder` makes it.

    Raises:
      InputError: see `open_checkpoint`.
      DataError: see there and `weights.load_into`.
    """
    checkpoint = open_checkpoint(path, encoder_only=True)
    encoder = build_encoder(checkpoint.config, dtype=dtype)
    checkpoint.load_into(encoder)
    return checkpoint.config, encoder
