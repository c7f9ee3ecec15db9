"""Opens a T5 checkpoint of any format, and loads it into a model.

| in the checkpoint                    | what happens                               |
|--------------------------------------|--------------------------------------------|
| a tensor lacks, or is one too many   | an error names it, before values are read  |
| a shape is another, or no floats     | the same, with both shapes                 |
| a value is NaN or infinite           | an error names its tensor                  |
| float16 or bfloat16 values           | become float32, exactly                    |
"""

from __future__ import annotations

import atexit
import functools
import os
import pathlib
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.data.tokenization import VOCABULARY_FILE
from tfdpsq.generator.checkpoints import huggingface, keras_preset, t5x
from tfdpsq.generator.checkpoints.tensors import Tensor, finite_value
from tfdpsq.generator.checkpoints.weights import (
    DTYPES,
    SOFT_PROMPT,
    Weight,
    variable_of,
    weights_of,
)
from tfdpsq.layers import T5Backbone, T5Config, build_encoder

_FORMATS = {"huggingface": huggingface, "keras": keras_preset, "t5x": t5x}
_SHIPPED = pathlib.Path(__file__).parents[1] / "presets"
# Names that must be an encoder's; all others are passed over for an encoder alone.
_ENCODERS = ("encoder.", "target/encoder/")
_STATE = "state."  # T5X's arrays of the optimizer, twice as large as the weights
_ONE_MODEL = "Use the weights and the config of one model"


class Checkpoint(NamedTuple):
    """A T5 on disk, found complete by its headers.

    Attributes:
      format: "huggingface", "keras" or "t5x".
      config: the model's shape.
      weights: the weights to load.
      tensors: where they are, by their names in the format.
    """

    format: str
    config: T5Config
    weights: Sequence[Weight]
    tensors: Mapping[str, Tensor]

    def load_into(self, model: tf.keras.Model) -> None:
        """Assigns all values to a backbone (or an encoder) of `config`.

        A soft prompt of the model's that the checkpoint lacks stays as it is.

        Raises:
          InputError: the checkpoint has a soft prompt, the model none of its length; or
            the model has LoRA layers.
          DataError: a value is NaN or infinite, or a file is damaged. The model must
            then not be used.
        """
        prompt = getattr(model, "soft_prompt", None)
        self.soft_prompt_length(0 if prompt is None else prompt.length)
        for weight in self.weights:
            name = getattr(weight, self.format)
            value = finite_value(self.tensors[name], name)
            value = value.T if weight.transposed(self.format) else value
            variable_of(model, weight).assign(value)

    def soft_prompt_length(self, wanted: int | None = None) -> int:
        """Returns the length of the soft prompt of a model to load this into.

        Args:
          wanted: the length, 0 for no soft prompt; `None` is the checkpoint's own.

        Raises:
          InputError: the checkpoint has a soft prompt of another length.
        """
        found = _length(self.tensors)
        if found and wanted not in (None, found):
            raise validation.InputError(
                f"the checkpoint has a soft prompt of {found} vectors, not {wanted}. "
                f"Set the soft prompt's length to {found}, or start from the model "
                "that it was tuned for."
            )
        return found if wanted is None else wanted


def _length(tensors: Mapping[str, Tensor]) -> int:
    return tensors[SOFT_PROMPT].shape[0] if SOFT_PROMPT in tensors else 0


def locate(path: str | os.PathLike) -> pathlib.Path:
    """Returns a checkpoint's directory, downloaded if it is elsewhere.

    Args:
      path: see `open_checkpoint`.

    Raises:
      InputError: the directory does not exist, or cannot be downloaded.
    """
    text = os.fspath(path)
    shipped = sorted(file.parent.name for file in _SHIPPED.glob("*/config.json"))
    if pathlib.Path(text).exists():
        return pathlib.Path(text)
    if text in shipped:
        return _SHIPPED / text
    try:
        if text.startswith(("kaggle://", "hf://")) or text in keras_preset.NAMES:
            return keras_preset.download(text)
        if "://" in text:
            return _copied(text.rstrip("/"))
    except Exception as error:  # each file system and hub has errors of its own
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise validation.InputError(
            f"{text} cannot be read ({reason[:200]}). Check the name, the network "
            "and your rights, or give a local directory."
        ) from error
    names = ", ".join([*shipped, *keras_preset.NAMES])
    raise validation.InputError(
        f"{text} does not exist. Give a directory with a T5 checkpoint, or the name of "
        f"a preset ({names})."
    )


@functools.cache
def _copied(url: str) -> pathlib.Path:
    """Copies a remote checkpoint, without the optimizer's state, once per process."""
    from etils import epath

    source = epath.Path(url)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="tfdpsq-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _copy(source, folder / source.name)
    return folder / source.name


def _copy(source: Any, target: pathlib.Path) -> None:
    target.mkdir()
    for each in source.iterdir():
        if each.is_dir() and not each.name.startswith(_STATE):
            _copy(each, target / each.name)
        elif each.is_file():
            each.copy(target / each.name)


def vocabulary_in(directory: str | os.PathLike) -> pathlib.Path | None:
    """Finds the SentencePiece model stored with a checkpoint's weights, if any."""
    names = (VOCABULARY_FILE, keras_preset.VOCABULARY_FILE)
    found = [pathlib.Path(directory, name) for name in names]
    return next((path for path in found if path.is_file()), None)


def open_checkpoint(path: str | os.PathLike, encoder_only: bool = False) -> Checkpoint:
    """Reads a checkpoint's config and headers, not yet its weights.

    Args:
      path: a directory of Hugging Face's, a keras-nlp preset, or a T5X checkpoint; or
        a name: "t5_tiny_pydocs", which comes with this package, or that of a preset
        for keras-nlp to download, such as "t5_small_multi". Or a URL of such a
        directory, such as "gs://bucket/checkpoint_1000000".
      encoder_only: whether the decoder, the head and whatever else is no encoder's are
        to be left out, or are not there at all.

    Returns:
      The checkpoint; everything it needs was found in it.

    Raises:
      InputError: nothing there, or of no known format; or see `locate`.
      DataError: not a T5 that this project builds, or not complete; names file, key or
        tensor. Or an encoder alone is wanted of a model with a soft prompt.
    """
    path = locate(path)
    form = next((name for name, each in _FORMATS.items() if each.matches(path)), None)
    if form is None:
        raise validation.InputError(
            f"{path} holds no T5 checkpoint of a known format. Give a directory with "
            "config.json and model.safetensors (Hugging Face), with config.json and "
            "model.weights.h5 (keras-nlp), or with a file named checkpoint (T5X)."
        )
    config, tensors = _FORMATS[form].open_checkpoint(path, encoder_only)
    length = _length(tensors)
    if encoder_only and length:
        raise validation.DataError(
            path,
            "an encoder alone has no place for its soft prompt",
            "Give the T5 that the prompt was tuned for",
        )
    found = Checkpoint(form, config, weights_of(config, encoder_only, length), tensors)
    _check(path, found, encoder_only)
    return found


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
      InputError, DataError: see `open_checkpoint` and `Checkpoint.load_into`.
    """
    checkpoint = open_checkpoint(path)
    length = checkpoint.soft_prompt_length()
    backbone = T5Backbone(checkpoint.config, dtype, soft_prompt=length)
    checkpoint.load_into(backbone)
    return checkpoint.config, backbone


def load_encoder(
    path: str | os.PathLike, dtype: str | None = None
) -> tuple[T5Config, tf.keras.Model]:
    """Loads the encoder of a T5, from a whole checkpoint or one of an encoder only.

    Returns:
      Its config, and the encoder as `layers.build_encoder` makes it; see `load`.
    """
    checkpoint = open_checkpoint(path, encoder_only=True)
    encoder = build_encoder(checkpoint.config, dtype=dtype)
    checkpoint.load_into(encoder)
    return checkpoint.config, encoder


def _check(path: pathlib.Path, found: Checkpoint, encoder_only: bool) -> None:
    """Compares a checkpoint's headers with what a model needs.

    Raises:
      DataError: a tensor is missing, unknown, of another shape, or not of floats.
    """
    wanted = {getattr(weight, found.format): weight for weight in found.weights}
    lacking = [name for name in wanted if name not in found.tensors]
    extra = [name for name in found.tensors if name not in wanted]
    if encoder_only:
        extra = [name for name in extra if name.startswith(_ENCODERS)]
    for verb, names in (("lacks", lacking), ("has unknown", extra)):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            listed = ", ".join(names[:5]) + more
            problem = f"it {verb} tensors: {listed}"
            raise validation.DataError(path, problem, _ONE_MODEL)
    for name, weight in wanted.items():
        tensor = found.tensors[name]
        turned = weight.transposed(found.format)
        shape = weight.shape[::-1] if turned else weight.shape
        if tuple(tensor.shape) != shape or tensor.dtype not in DTYPES:
            raise validation.DataError(
                tensor.file,
                f"tensor {name} is {tensor.dtype} of shape {list(tensor.shape)}; "
                f"expected floats of shape {list(shape)}",
                _ONE_MODEL,
            )
