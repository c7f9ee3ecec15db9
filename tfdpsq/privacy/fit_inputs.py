"""Checks of the arguments of `PrivateModel`, made before anything is spent.

Users of Keras give what they give to `compile` and `fit` there: losses, arrays,
callbacks, and arguments that the plan decides here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tfdpsq import validation
from tfdpsq.keras_choice import keras2 as keras
from tfdpsq.privacy import checkpoint
from tfdpsq.privacy.batches import as_bytes
from tfdpsq.privacy.plan import PrivacyPlan
from tfdpsq.privacy.randomness.sampling import Groups

Loss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
_SET_RATES = (
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
)
_ELSEWHERE = {
    "epochs": "The plan has the number of steps: set it in PrivacySpec.",
    "batch_size": "The plan has it: set it in PrivacySpec.",
    "shuffle": "The plan's sampler draws rows: set sampler in PrivacySpec.",
    "validation_split": "Give validation_data, rows that are not trained on.",
    "sample_weight": "Put the weight into the targets and multiply by it in the loss, "
    "so that the weighted gradient is clipped.",
    "class_weight": "Multiply by the weight of the target's class in the loss, so that "
    "the weighted gradient is clipped.",
}
# Rows that a loss is traced for; a prime that no dimension is likely to be.
_SEVERAL = 4099
# Columns of an array whose ends are looked for one by one.
_COLUMNS = 32
_NO_DATASET = """fit got a tf.data.Dataset, whose batches are already drawn, and the \
plan's sampler must draw them itself, from all rows. If the data set has batches of \
(x, y), each row once (no repeat), and fits in memory, these lines do it:
  rows = list(dataset.unbatch().as_numpy_iterator())
  x, y = tf.nest.map_structure(lambda *parts: np.stack(parts), *rows)
  private.fit(x, y)
For data that do not fit in memory use tfdpsq.privacy.train, which asks for rows by \
number."""


class _PerRow(keras.losses.Loss):
    """A loss's values row by row, with targets and predictions of like shape."""

    def __init__(self, function: Loss):
        super().__init__(reduction=keras.losses.Reduction.NONE)
        self._function = function

    def call(self, y_true: Any, y_pred: Any) -> Any:
        if tf.nest.is_nested(y_pred):
            count = len(tf.nest.flatten(y_pred))
            raise validation.InputError(
                f"the model has {count} outputs, and the loss is of one tensor: it "
                f"returns a {type(y_pred).__name__}. Give a model that returns one "
                "tensor, or put the loss of all into the model."
            )
        y_pred = tf.convert_to_tensor(y_pred)
        if isinstance(y_true, (list, tuple)) and len(y_true) == 1:
            (y_true,) = y_true  # as Keras takes the targets of one output
        if tf.nest.is_nested(y_true):
            raise validation.InputError(
                f"the targets are a {type(y_true).__name__} of "
                f"{len(tf.nest.flatten(y_true))} arrays, and the model has one output. "
                "Give one array."
            )
        y_true = tf.convert_to_tensor(y_true)
        # One number per row is one column: [B] against [B, 1] would broadcast to
        # every pair of rows, and [B] against [B] would be averaged over rows.
        if y_pred.shape.rank == 1:
            y_pred = y_pred[:, tf.newaxis]
        if y_true.shape.rank == 1 and y_pred.shape.rank == 2 and y_pred.shape[1] == 1:
            y_true = y_true[:, tf.newaxis]
        return self._function(y_true, y_pred)


def require_type(name: str, value: Any, kind: type) -> None:
    """Refuses a value of another type."""
    if not isinstance(value, kind):
        raise validation.InputError(
            f"{name} is {validation.shown(value)}; give a {kind.__name__}."
        )


def checked_directory(
    directory: Any, callbacks: Any, of_keras: Mapping[str, Any]
) -> str | None:
    """Returns the absolute path of `directory`; refuses what `fit` cannot take.

    Raises:
      InputError: names a directory that is none of this machine, what is no callback,
        or an argument of Keras's `fit` that the plan decides, and where.
    """
    for name in of_keras:
        where = _ELSEWHERE.get(name, "fit has no such argument.")
        raise validation.InputError(f"fit got {name}. {where}")
    for callback in tf.nest.flatten(callbacks or ()):
        if not isinstance(callback, keras.callbacks.Callback):
            raise validation.InputError(
                f"callbacks has {validation.shown(callback)}, which is no Keras "
                "callback. Give instances, such as "
                "[tf.keras.callbacks.TerminateOnNaN()]."
            )
    if directory is None:
        return None
    return checkpoint.run_directory(directory)


def require_options(options: Mapping[str, Any]) -> None:
    """Refuses options of Keras's `compile` that `fit` could not keep to."""
    if options.get("loss_weights") is not None:
        raise validation.InputError(
            f"loss_weights is {validation.shown(options['loss_weights'])}: fit has "
            "one loss, that of a row. Give a loss that weighs its parts itself."
        )
    if options.get("run_eagerly"):
        raise validation.InputError(
            "run_eagerly is True: Python code of layers would see rows, and could keep "
            "them. Leave it out; to look into a layer call the model on public rows."
        )


def try_model(
    model: keras.Model, row: Any, targets: Any, loss: Loss, together: int
) -> None:
    """Calls a model on a row of zeros, so that it has all weights; traces the loss.

    `together` is the number of rows that are clipped as one.

    Raises:
      InputError: the model takes no such rows, or the loss no such targets.
    """
    if type(model).train_step is not keras.Model.train_step:
        logging.log_first_n(
            logging.WARNING,
            "The train_step of %s is not called: fit takes the loss given to compile.",
            1,
            type(model).__name__,
        )
    try:
        row = tf.nest.map_structure(tf.convert_to_tensor, row)
        # Traced, not run: eagerly a layer may refuse zeros, such as a text of padding.
        traced = tf.function(lambda zeros: model(zeros, training=False))
        outputs = traced.get_concrete_function(row).structured_outputs
    except validation.InputError:
        raise
    except (ValueError, TypeError, tf.errors.OpError) as error:
        raise validation.InputError(  # of zeros, so the message quotes no row
            f"{model.name} could not be called on rows of x ({type(error).__name__}: "
            f"{validation.shown(str(error))}). Nothing was spent. Compare shapes and "
            "types with what the model takes."
        ) from None
    try:
        targets = tf.nest.map_structure(tf.convert_to_tensor, targets)
        # Not computed: zeros may be no target. One row would broadcast to any shape.
        several = [
            tf.nest.map_structure(
                lambda t: tf.TensorSpec([_SEVERAL * together, *t.shape[1:]], t.dtype),
                each,
            )
            for each in (targets, outputs)
        ]
        tf.function(loss).get_concrete_function(*several)
    except validation.InputError:
        raise
    except Exception as error:  # of the caller's own code
        said = str(error).strip().splitlines()[-1:]
        of, out = (tf.nest.flatten(each)[0].shape[1:] for each in (targets, outputs))
        raise validation.InputError(
            f"the loss could not be computed of targets with rows of shape {of} and "
            f"outputs of shape {out} "
            f"({type(error).__name__}: {validation.shown(''.join(said).strip())}). "
            "Nothing was spent. Give targets as the loss takes them."
        ) from None


def row_loss(loss: Loss | str) -> keras.losses.Loss:
    """Returns a loss of Keras's without reduction, of any that `compile` takes.

    Raises:
      InputError: no loss, a name that Keras does not know, or one that reduces.
    """
    if isinstance(loss, str):
        try:
            loss = keras.losses.get(loss)
        except ValueError:
            raise validation.InputError(
                f"loss is {validation.shown(loss)}, which Keras does not know. Give a "
                "name from tf.keras.losses, a loss, or a function."
            ) from None
    if not isinstance(loss, keras.losses.Loss):
        if not callable(loss):
            raise validation.InputError(
                f"loss is {validation.shown(loss)}; give a Keras loss or a function "
                "of (targets, predictions)."
            )
        return _PerRow(loss)
    if loss.reduction != keras.losses.Reduction.NONE:
        raise validation.InputError(
            f"loss {loss.name!r} has reduction {loss.reduction!r}, which adds up rows "
            "before they are clipped. Make it with "
            "reduction=keras.losses.Reduction.NONE."
        )
    return _PerRow(loss)


def rows_of(x: Any, y: Any) -> Any:
    """Returns the data as nested arrays, all with the same number of rows.

    Raises:
      InputError: a data set, what is no array, no targets, or other numbers of rows.
    """

    def as_array(values: Any) -> np.ndarray:
        if isinstance(values, tf.data.Dataset):
            raise validation.InputError(_NO_DATASET)
        if not hasattr(values, "__len__"):
            raise validation.InputError(
                f"fit got a {type(values).__name__}. Give arrays with one row per "
                "example (np.array makes one of a list): the plan's sampler must draw "
                "the batches itself. For data "
                "that do not fit in memory use tfdpsq.privacy.train."
            )
        if isinstance(values, np.ma.MaskedArray):
            raise validation.InputError(
                "an array given to fit is masked, and its mask would be dropped. Give "
                "its rows without gaps, and what the mask says as an input of its own."
            )
        array = np.asarray(values)
        if not array.ndim:
            raise validation.InputError(
                f"fit got {validation.shown(values)}, which has no rows. Give arrays "
                "with one row per example."
            )
        if 0 in array.shape:
            raise validation.InputError(
                f"fit got an array of shape {array.shape}, which holds nothing. Give "
                "arrays with one row per example."
            )
        if array.dtype == object:
            if not all(isinstance(each, str) for each in array.flat):
                kinds = sorted({type(each).__name__ for each in array.flat})
                raise validation.InputError(
                    "an array given to fit holds Python objects "
                    f"({', '.join(kinds[:3])}). Give arrays of numbers or of texts, "
                    "such as x.astype(np.float32) or x.astype(str)."
                )
            array = array.astype(str)
        if array.dtype.kind == "U":
            as_bytes("one of the arrays of fit", array)  # every row can be drawn
        return array

    x = tf.nest.map_structure(as_array, x)
    if y is None:
        raise validation.InputError("fit got no targets. Give arrays: fit(x, y).")
    arrays = {"x": x, "y": tf.nest.map_structure(as_array, y)}
    counts = {len(values) for values in tf.nest.flatten(arrays)}
    if len(counts) > 1:
        raise validation.InputError(
            f"inputs and targets have {sorted(counts)} rows; give as many of each."
        )
    return arrays


def extreme_rows(arrays: Sequence[np.ndarray], groups: Any = None) -> list[int]:
    """Returns numbers of rows with the smallest and largest values of some arrays.

    With `groups` only rows that a unit owns count.

    An id that an embedding does not have, or a label beyond the number of classes, is
    among them. Of arrays with many columns they are those of all columns together.
    """
    found = set()
    rows = np.arange(len(arrays[0]))
    if isinstance(groups, Groups):  # `train` refuses what is not
        rows = np.sort(groups.rows)
    rows = rows[rows < len(arrays[0])]  # others are refused where rows are taken
    for values in arrays:
        if values.dtype.kind not in "iuf":
            continue
        columns = values[rows].reshape(len(rows), -1)
        if columns.shape[1] > _COLUMNS:
            ends = [columns.min(axis=1), columns.max(axis=1)]
        else:
            ends = list(columns.T)
        for each in map(np.nan_to_num, ends):
            found |= {int(rows[each.argmin()]), int(rows[each.argmax()])}
    return sorted(found)


def fingerprint(arrays: Sequence[np.ndarray]) -> str:
    """Returns a hash of types, shapes and values."""
    digest = hashlib.sha256()
    for values in arrays:
        digest.update(f"{values.dtype} {values.shape} ".encode())
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()


def require_watching_callbacks(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Refuses callbacks known to set what steps depend on, or the weights.

    They get losses of private rows without noise. What they set by these ε would not
    cover, and a killed run could not repeat it under the noise that it repeats.
    """
    for callback in tf.nest.flatten(callbacks):
        name = type(callback).__name__
        if isinstance(callback, _SET_RATES):
            reads = isinstance(callback, keras.callbacks.ReduceLROnPlateau)
            raise validation.InputError(
                f"callbacks has a {name}, whose learning rates a killed run could not "
                "repeat under the noise that it repeats"
                + (", and which follow from the private loss" if reads else "")
                + ". Give the optimizer a "
                "keras.optimizers.schedules.LearningRateSchedule."
            )
        if getattr(callback, "restore_best_weights", False):
            raise validation.InputError(
                f"callbacks has a {name} with restore_best_weights, which would choose "
                "weights by a private loss or metric; no ε covers that choice. Set "
                "restore_best_weights to False."
            )


def adapted_layers(model: keras.Model, plan: PrivacyPlan, declared: str) -> str:
    """Names the layers of a model that keep statistics or words of data.

    Those that were given them when they were made, or loaded, cannot be distinguished
    from others.

    `declared` is "public" or "private", as the data are, or "" if nobody said it. Of a
    plan without a guarantee nothing is named.

    Raises:
      InputError: there are such layers, and nobody said whose data these are.
    """
    if not plan.spec.private:
        return ""
    found = ", ".join(
        layer.name
        for layer in model._flatten_layers(include_self=False)
        if getattr(layer, "_is_adapted", False)  # of Keras's preprocessing layers
    )
    if found and not declared:
        raise validation.InputError(
            f"adapt() was called on {found}: statistics or words of those data are "
            "released with the model, without noise. Give PrivateModel "
            "adapted_to='public' if the data were public; 'private' states in the "
            "certificate that epsilon does not cover them."
        )
    return found


def require_validation(given: Any) -> None:
    """Refuses validation data that Keras would refuse after steps are paid."""
    if not isinstance(given, (list, tuple)) or len(given) not in (2, 3):
        raise validation.InputError(
            f"validation_data is a {type(given).__name__}; give (x, y) as arrays."
        )
    counts = {
        len(values) if hasattr(values, "__len__") else 0
        for values in tf.nest.flatten(list(given))
        if values is not None
    }
    if len(counts) != 1 or not min(counts):
        raise validation.InputError(
            f"the arrays of validation_data have {sorted(counts)} rows; give as many "
            "of each, and at least one."
        )


def blank_row(values: np.ndarray) -> np.ndarray:
    """Returns a row of zeros, or of an empty text."""
    zero = "" if values.dtype == object else 0
    return np.full_like(values[:1], zero)


def first_row(values: Any) -> Any:
    """Returns the first row; `None` of `None`."""
    return None if values is None else np.asarray(values)[:1]
