"""Values of weights from a checkpoint into a model and back, whatever the format.

A format says where its files keep each weight (`slots.Slot`) and how to read them
(`Source`); `check` and then `load_into` do the rest, the same for all:

| in the checkpoint                    | what happens                               |
|--------------------------------------|--------------------------------------------|
| a tensor lacks, or is one too many   | an error names it, before anything is read |
| a shape is another, or no floats     | the same, with both shapes                 |
| a value is NaN or infinite           | an error names its tensor                  |
| a second copy of a tensor            | must equal it, or is named as an error     |
| float16 or bfloat16 values           | become float32, exactly                    |

A model that `load_into` failed on holds part of the new weights, so loaders build
their own and hand it over only when it is complete. Tensors pass in blocks of rows,
so that reading or writing needs little more memory than the model itself.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import safetensors.numpy
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.generator.checkpoints.slots import Slot, value_of, variable_of

DTYPES = ("float32", "float16", "bfloat16")
_BLOCK_BYTES = 16 << 20
_NAMED_AT_MOST = 5


class Entry(NamedTuple):
    """A tensor in a checkpoint, as its header describes it.

    Attributes:
      shape: as stored.
      dtype: NumPy's name for it, such as "float32" or "bfloat16".
      file: the file that holds it.
    """

    shape: tuple[int, ...]
    dtype: str
    file: str | os.PathLike


class Source(Protocol):
    """A checkpoint whose headers have been read, of any format."""

    @property
    def path(self) -> str | os.PathLike:
        """The checkpoint, for messages about it as a whole."""
        ...

    @property
    def tensors(self) -> Mapping[str, Entry]:
        """Returns the tensors by their stored names."""
        ...

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of a tensor's first axis, in its stored dtype.

        Raises:
          DataError: the file is damaged.
        """
        ...


def check(
    wanted: Sequence[Slot],
    source: Source,
    copies: Mapping[str, str] | None = None,
    ignored: Collection[str] = (),
) -> None:
    """Compares a checkpoint's headers with what a model needs; reads no values.

    Args:
      wanted: the model's weights.
      source: the checkpoint.
      copies: tensors it may hold a second time: {copy: the stored name it equals}.
      ignored: stored names that are no weights of the model, and may be there.

    Raises:
      DataError: a tensor is missing, unknown, of another shape, or not of floats.
    """
    copies = copies or {}
    shapes = {slot.stored: slot.stored_shape for slot in wanted}
    _name_all(source, "lacks", [n for n in shapes if n not in source.tensors])
    known = shapes.keys() | copies.keys() | set(ignored)
    _name_all(source, "has", [n for n in source.tensors if n not in known], "unknown ")
    shapes.update({copy: shapes[name] for copy, name in copies.items()})
    for name, shape in shapes.items():
        if name not in source.tensors:
            continue  # a copy that is not there
        entry = source.tensors[name]
        if tuple(entry.shape) != tuple(shape):
            raise validation.DataError(
                entry.file,
                f"tensor {name} has shape {list(entry.shape)}, the model's config "
                f"makes it {list(shape)}",
                "Use the config that belongs to these weights.",
            )
        if entry.dtype not in DTYPES:
            raise validation.DataError(
                entry.file,
                f"tensor {name} holds {entry.dtype}",
                f"Weights must be {', '.join(DTYPES[:-1])} or {DTYPES[-1]}.",
            )


def load_into(
    model: tf.keras.Model,
    wanted: Sequence[Slot],
    source: Source,
    copies: Mapping[str, str] | None = None,
) -> None:
    """Assigns a checkpoint's values to a model's weights, all of them.

    Args:
      model: a backbone, or an encoder if `wanted` names an encoder's weights.
      wanted: the model's weights and where the checkpoint has them.
      source: the checkpoint, whose headers `check` has found right.
      copies: see `check`.

    Raises:
      DataError: a value is NaN or infinite, a copy differs, or a file is damaged,
        after which the model must not be used.
      InputError: the model has LoRA layers.
    """
    for slot in wanted:
        variable = variable_of(model, slot)
        rows = slot.stored_shape[0]
        # Of replicated variables only the whole can be assigned.
        replicated = isinstance(variable, tf.distribute.DistributedValues)
        step = rows if replicated else _rows_per_block(slot.stored_shape)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            block = _finite_block(source, slot.stored, start, stop)
            block = block.T if slot.transposed else block
            block = tf.constant(block, variable.dtype)
            if stop - start == rows:
                variable.assign(block)
            else:
                _assign_slice(variable, block, start, stop, int(slot.transposed))
    check_copies(source, copies or {})


def require_readable(path: str | os.PathLike) -> None:
    """Says why a file cannot be opened, which safetensors takes for one that is gone.

    Raises:
      DataError: gives the operating system's reason.
    """
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise validation.DataError(
            path, f"cannot be read ({error.strerror})", "Change its permissions"
        ) from error


def read_tensors(
    path: str | os.PathLike, remedy: str = "Copy it again"
) -> dict[str, np.ndarray]:
    """Reads all tensors of a safetensors file.

    Raises:
      DataError: it cannot be read, is damaged, or holds what NumPy has no type for.
    """
    require_readable(path)
    try:
        return safetensors.numpy.load_file(path)
    except (safetensors.SafetensorError, OSError, KeyError) as error:
        raise validation.DataError(
            path, f"it is truncated or damaged ({error})", remedy
        ) from error


def check_copies(source: Source, copies: Mapping[str, str]) -> None:
    """Reads the second copies of tensors and compares them with the first.

    Args:
      source: the checkpoint.
      copies: see `check`.

    Raises:
      DataError: a copy differs, or a file is damaged.
    """
    for copy, name in copies.items():
        if copy in source.tensors:
            _check_copy(source, copy, name)


def read_value(source: Source, slot: Slot) -> np.ndarray:
    """Reads all of one weight.

    Args:
      source: the checkpoint, whose headers `check` has found right.
      slot: the weight, and where this checkpoint has it.

    Returns:
      [*slot.shape] float32, in the model's layout.

    Raises:
      DataError: a value is NaN or infinite, or the file is damaged.
    """
    value = _finite_block(source, slot.stored, 0, slot.stored_shape[0])
    return value.T if slot.transposed else value


def stored_blocks(
    model: tf.keras.Model, slot: Slot, dtype: str = "float32"
) -> Iterator[np.ndarray]:
    """A weight as a checkpoint stores it, a block of rows at a time.

    Args:
      model: a backbone, or an encoder; or a `Checkpoint`, which is then read a
        weight at a time.
      slot: the weight.
      dtype: one of `DTYPES`; values are rounded to the nearest.

    Yields:
      Consecutive rows of the stored layout, contiguous arrays of `dtype`.

    Raises:
      InputError: a value is NaN or infinite, or becomes so in `dtype`.
    """
    validation.one_of("dtype", dtype, DTYPES)
    if hasattr(model, "read_value"):
        value = model.read_value(slot)
    else:
        value = tf.convert_to_tensor(value_of(model, slot))
    rows, step = slot.stored_shape[0], _rows_per_block(slot.stored_shape)
    for start in range(0, rows, step):
        if slot.transposed:
            block = tf.transpose(value[:, start : start + step])
        else:
            block = value[start : start + step]
        cast = tf.cast(block, dtype)
        if not tf.reduce_all(tf.math.is_finite(cast)):
            raise validation.InputError(
                f"weight {slot.name} holds values that are not finite in {dtype}. "
                + ("" if dtype == "float32" else "Use float32 or bfloat16, or ")
                + "use weights from before training diverged."
            )
        yield cast.numpy()


def _rows_per_block(shape: Sequence[int]) -> int:
    return max(1, _BLOCK_BYTES // (4 * math.prod(shape[1:])))


def _finite_block(source: Source, name: str, start: int, stop: int) -> np.ndarray:
    block = np.asarray(source.read(name, start, stop), np.float32)
    if not np.isfinite(block).all():
        row = start + int(np.argmin(np.isfinite(block).reshape(len(block), -1).all(1)))
        raise validation.DataError(
            source.tensors[name].file,
            f"tensor {name} holds NaN or infinity in row {row}",
            "These weights are broken: use a checkpoint from before they were.",
        )
    return block


def _assign_slice(
    variable: tf.Variable, block: tf.Tensor, start: int, stop: int, axis: int
) -> None:
    """Assigns [start, stop) of an axis of a matrix in place."""
    begin, end = [0, 0], list(variable.shape)
    begin[axis], end[axis] = start, stop
    tf.raw_ops.ResourceStridedSliceAssign(
        ref=variable.handle, begin=begin, end=end, strides=[1, 1], value=block
    )


def _check_copy(source: Source, copy: str, name: str) -> None:
    shape = source.tensors[name].shape
    step = _rows_per_block(shape)
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        values = _finite_block(source, copy, start, stop)
        if not np.array_equal(values, _finite_block(source, name, start, stop)):
            raise validation.DataError(
                source.tensors[copy].file,
                f"tensor {copy} differs from {name}, though the model's config makes "
                "them one",
                "Use the config that belongs to these weights.",
            )


def _name_all(source: Source, verb: str, names: Sequence[str], what: str = "") -> None:
    if names:
        shown = ", ".join(names[:_NAMED_AT_MOST])
        more = len(names) - _NAMED_AT_MOST
        files = {str(source.tensors[n].file) for n in names if n in source.tensors}
        tensors = f"{len(names)} {what}tensor{'s' if len(names) > 1 else ''}"
        raise validation.DataError(
            files.pop() if len(files) == 1 else source.path,
            f"it {verb} {tensors}: {shown}" + (f" and {more} more" if more > 0 else ""),
            "Use the weights and the config of one model.",
        )
