"""Opens a T5 checkpoint of any format, loads it into a model, and writes it.

A tensor that is missing, unknown or of another shape is an error that names it, before
any value is read; so is NaN or infinity. Values of half precision become float32.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pathlib
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.data import io
from tfdpsq.data.tokenization import VOCABULARY_FILE, Tokenizer
from tfdpsq.generator.checkpoints import huggingface, keras_preset, t5x
from tfdpsq.generator.checkpoints.tensors import Tensor, read_json
from tfdpsq.generator.checkpoints.weights import (
    DTYPES,
    SOFT_PROMPT,
    Weight,
    stored_values,
    variable_of,
    weights_of,
)
from tfdpsq.layers import T5Backbone, T5Config, build_encoder

_FORMATS = {"huggingface": huggingface, "keras": keras_preset, "t5x": t5x}
# What a format's config.json has.
_KEYS = {"huggingface": "model_type", "keras": "registered_name"}
_SHIPPED = pathlib.Path(__file__).parents[1] / "presets"
# Names that must be an encoder's; all others are passed over for an encoder alone.
_ENCODERS = ("encoder.", "target/encoder/")
_ONE_MODEL = "Use the weights and the config of one model"


class Checkpoint(NamedTuple):
    """A T5 on disk, found complete by its headers."""

    format: str  # "huggingface", "keras" or "t5x"
    config: T5Config
    weights: Sequence[Weight]  # to load
    tensors: Mapping[str, Tensor]  # by their names in the format

    def load_into(self, model: tf.keras.Model) -> None:
        """Assigns all values to a backbone (or an encoder) of `config`.

        A soft prompt of the model's that the checkpoint lacks stays as it is.

        Raises:
          InputError: the checkpoint has a soft prompt, the model none of its length.
          DataError: a value is NaN or infinite, or a file is damaged. The model must
            then not be used.
        """
        prompt = getattr(model, "soft_prompt", None)
        if self.soft_prompt and getattr(prompt, "length", 0) != self.soft_prompt:
            raise validation.InputError(
                f"the checkpoint has a soft prompt of {self.soft_prompt} vectors. Set "
                f"the soft prompt's length to {self.soft_prompt}, or start from the "
                "model that it was tuned for."
            )
        for weight in self.weights:
            name = getattr(weight, self.format)
            value = self.tensors[name].value(name)
            value = value.T if weight.transposed(self.format) else value
            variable_of(model, weight).assign(value)

    @property
    def soft_prompt(self) -> int:
        """Length of the soft prompt, 0 for none."""
        found = self.tensors.get(SOFT_PROMPT)
        return 0 if found is None else found.shape[0]


def locate(path: str | os.PathLike) -> pathlib.Path:
    """Returns a checkpoint's directory, downloaded if it is elsewhere.

    Raises InputError if there is none; see `open_checkpoint` for the path.
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
    """Copies a remote checkpoint once per process."""
    folder = tempfile.mkdtemp(prefix="tfdpsq-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    target = pathlib.Path(folder, url.rpartition("/")[2])
    io.copy_tree(url, str(target))
    return target


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
      encoder_only: whether to read the encoder alone; the rest may be missing.

    Raises:
      InputError: nothing there, or of no known format; or see `locate`.
      DataError: not a T5 that this project builds, or not complete; names file, key or
        tensor. Or an encoder alone is wanted of a model with a soft prompt.
    """
    path = locate(path)
    form = _format_of(path)
    config, tensors = _FORMATS[form].open_checkpoint(path, encoder_only)
    found = Checkpoint(form, config, [], tensors)
    if encoder_only and found.soft_prompt:
        problem = "an encoder alone has no place for its soft prompt"
        remedy = "Give the T5 that the prompt was tuned for"
        raise validation.DataError(path, problem, remedy)
    wanted = weights_of(config, encoder_only, found.soft_prompt)
    found = found._replace(weights=wanted)
    _check(path, found, encoder_only)
    return found


def _format_of(path: pathlib.Path) -> str:
    keys: set[str] = set()
    with contextlib.suppress(validation.DataError, TypeError):
        keys.update(read_json(path / huggingface.CONFIG_FILE))
    for form, key in _KEYS.items():
        if key in keys:
            return form
    if (path / t5x.CHECKPOINT_FILE).is_file():
        return "t5x"
    raise validation.InputError(
        f"{path} holds no T5 checkpoint of a known format. Give a directory with "
        "config.json and model.safetensors (Hugging Face), with config.json and "
        "model.weights.h5 (keras-nlp), or with a file named checkpoint (T5X)."
    )


def _check(path: pathlib.Path, found: Checkpoint, encoder_only: bool) -> None:
    """Raises DataError if a tensor is missing, unknown, or of another shape."""
    wanted = {getattr(weight, found.format): weight for weight in found.weights}
    lacking = [name for name in wanted if name not in found.tensors]
    extra = [name for name in found.tensors if name not in wanted]
    if encoder_only:
        extra = [name for name in extra if name.startswith(_ENCODERS)]
    for verb, names in (("lacks", lacking), ("has unknown", extra)):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            problem = f"it {verb} tensors: {', '.join(names[:5])}{more}"
            raise validation.DataError(path, problem, _ONE_MODEL)
    for name, weight in wanted.items():
        turned = weight.transposed(found.format)
        shape = weight.shape[::-1] if turned else weight.shape
        file, given, _ = found.tensors[name]
        if given != shape:
            problem = f"tensor {name} has shape {list(given)}; expected {list(shape)}"
            raise validation.DataError(file, problem, _ONE_MODEL)


def load(
    path: str | os.PathLike, dtype: str | None = None, encoder_only: bool = False
) -> tuple[T5Config, tf.keras.Model]:
    """Loads a T5: its config, and the `T5Backbone`; see `open_checkpoint`.

    Or its encoder alone, as `layers.build_encoder` makes it, also from a checkpoint of
    an encoder. `dtype` is the policy to compute in, such as "mixed_bfloat16"; weights
    are float32.
    """
    checkpoint = open_checkpoint(path, encoder_only)
    if encoder_only:
        model = build_encoder(checkpoint.config, dtype=dtype)
    else:
        length = checkpoint.soft_prompt
        model = T5Backbone(checkpoint.config, dtype, soft_prompt=length)
    checkpoint.load_into(model)
    return checkpoint.config, model


load_encoder = functools.partial(load, encoder_only=True)


def save(
    directory: str | os.PathLike,
    config: T5Config,
    model: tf.keras.Model,
    form: str = "huggingface",
    dtype: str = "float32",
    vocabulary: Tokenizer | str | os.PathLike | None = None,
    encoder_only: bool = False,
) -> None:
    """Writes a model for `open_checkpoint`, and for `transformers` or keras-nlp.

    The config is written last: without it, the directory is not a checkpoint. keras-nlp
    has no language-model head: a model of T5 1.0 loaded there needs the factor
    hidden_dim^-0.5 before the tied one (see `T5QueryGenerator`).

    Args:
      directory: an existing directory; files of these names in it are replaced.
      config: the model's shape.
      model: its backbone (or encoder), whose LoRA updates are added in.
      form: "huggingface" or "keras".
      dtype: one of `weights.DTYPES`, to which values are rounded; float32 for "keras".
      vocabulary: the tokenizer, or path of a SentencePiece model, to write into the
        directory, for Hugging Face also as `tokenizer.json`.
      encoder_only: whether to write the encoder alone, for Hugging Face.

    Raises:
      InputError: a weight is not finite in `dtype`, the disk is full, or the vocabulary
        has more pieces than the model embeddings.
    """
    directory = pathlib.Path(directory)
    validation.one_of("dtype", dtype, DTYPES)
    pieces = None
    if vocabulary is not None:
        if not isinstance(vocabulary, Tokenizer):
            vocabulary = Tokenizer(vocabulary)
        vocabulary.require_embeddings(config.vocabulary_size)
        pieces = vocabulary.model
    values = dict(stored_values(model, config, form, dtype, encoder_only))
    if form == "keras":
        keras_preset.write(directory, config, values, pieces)
    else:
        huggingface.write(directory, config, values, pieces, dtype, encoder_only)
