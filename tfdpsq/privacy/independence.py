"""Tests on real rows that each row's loss depends on that row alone.

Clipping per row bounds what one row can do only if its loss reads no other row, and
only if nothing is kept of a row but its clipped gradient. Batch normalisation and
in-batch softmax read all rows; stateful layers and running means keep what they saw.
Nothing in a vector of losses shows it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging
from tensorflow.python.framework import op_def_registry

from tfdpsq import validation
from tfdpsq.privacy.fast.capture import flatten
from tfdpsq.privacy.replay import Node, draws_from_state, replayable
from tfdpsq.privacy.terms import Coupled, Losses, Terms, require_losses

# Operations on a resource that only read it, and those on containers that live no
# longer than the step. All others write: also such as are not known here.
_READS = re.compile(
    r"ReadVariable\w+|DisableCopyOnRead|ResourceGather(Nd)?|VariableShape"
    r"|(VarIs|IsVariable)Initialized(Op)?|LookupTable(Find|Size|Export)(V2)?"
    r"|\w*(Sentencepiece|Wordpiece)\w*|Collective\w+|TensorArray\w+|Stack(Push|Pop|Close)(V2)?"
)
# Operations that keep what they get outside any resource.
_KEEPS = re.compile(
    r"Stage|(Ordered)?MapStage|Add(Many)?SparseToTensorsMap|GetSessionHandle(V2)?"
    r"|WriteFile|Save\w*|(Experimental)?DatasetToTFRecord|Print(V2)?|Debug\w+"
    r"|\w*Snapshot\w*|CacheDataset\w*"
)

# A loss on rows, "weights" included.
Run = Callable[[Mapping[str, np.ndarray]], Any]


def require_nothing_kept(nodes: Iterable[Node]) -> None:
    """Refuses a loss that could write to a variable, a table, a file or the like.

    Args:
      nodes: what `replay.traced` returned.

    Raises:
      InputError: it writes a variable, a table, a queue, a file or the like.
    """
    found = sorted({node.name for node in nodes if _writes(node.op)})
    if found:
        raise validation.InputError(
            f"running the model changes a state ({found[0]}), or may, which would "
            "keep what it saw of private rows, unclipped and without noise. Freeze the "
            "layer (trainable = False; batch normalisation then stops), or remove what "
            "writes: a running mean, a metric, a table, a print."
        )


def _writes(operation: str) -> bool:
    if _KEEPS.fullmatch(operation):
        return True
    if _READS.fullmatch(operation) or draws_from_state(operation):
        return False
    known = op_def_registry.get(operation)  # of functions there is none: looked into
    return known is not None and any(
        given.type == tf.resource.as_datatype_enum or given.is_ref
        for given in known.input_arg
    )


def check_independence(
    run: Run,
    batch: Mapping[str, np.ndarray],
    layers: Iterable[tf.Module] = (),
    rows_per_unit: int = 1,
) -> None:
    """Replaces all rows but one by copies of that one, then by padding.

    Its loss must not move. That finds every dependence on statistics of the batch, on
    the other rows' scores and on their weights, as far as the rows given differ from
    each other. Random numbers are held fixed. Running the model must also change none
    of its weights. It is traced, so that what it keeps in Python attributes holds no
    row.

    Args:
      run: the loss; see `run_of`.
      batch: at least two rows, "weights" included, all of which are `finite_rows`.
      layers: the model, for its weights.
      rows_per_unit: rows that are clipped together; they may depend on each other,
        and not on those of other units.

    Raises:
      InputError: a loss changed; a weight changed; the same rows gave other losses;
        or the losses are not one per row.
    """
    layers = list(layers)
    rows = len(batch["weights"])

    def losses(values: Mapping[str, np.ndarray]) -> np.ndarray:
        found = run(values)
        if isinstance(found, Terms):
            raise validation.InputError(
                "the loss is made of terms, of which it cannot be told by row what "
                "they depend on. Declare their sensitivity (sensitivity_multiplier in "
                "the spec, above 1) and set microbatch_size to None."
            )
        require_losses(found)
        if found.shape[0] != rows:
            raise validation.InputError(
                f"there are {found.shape[0]} losses for {rows} rows. Return exactly "
                "one loss per row."
            )
        return np.asarray(found, np.float64)

    losses(batch)  # builds what is not built yet
    kept = {id(v): v for layer in flatten(layers) for v in layer.variables}
    was = {key: np.array(variable) for key, variable in kept.items()}
    before = losses(batch)
    # Summation order may differ by rounding, and in 16 bits by more.
    tolerance = 0.05 if computes_in_16_bits(layers) else 1e-4
    allowed = tolerance * np.maximum(np.abs(before), 1e-3)
    if not np.all(np.abs(losses(batch) - before) <= allowed):
        raise validation.InputError(
            "the same rows give other losses the second time, so the model keeps a "
            "state between batches, or draws random numbers that cannot be held "
            "fixed. Name the model in `layers`, use Keras layers for randomness, and "
            "leave out stateful ones."
        )
    if all(len(np.unique(np.asarray(v), axis=0)) == 1 for v in batch.values()):
        logging.warning(
            "the %d rows tried are all the same, so whether each loss depends on its "
            "own row alone could not be told",
            rows,
        )
    for row in sorted({0, rows - 1}):
        first = row - row % rows_per_unit
        unit = slice(first, first + rows_per_unit)
        copies, padding = {}, {}
        for name, value in batch.items():
            own = np.asarray(value)[unit]
            copies[name] = np.concatenate([own] * (rows // rows_per_unit))
            padding[name] = np.zeros_like(value)
            padding[name][unit] = own
        # Not `>`, which is false of a NaN.
        if not abs(losses(copies)[row] - before[row]) <= allowed[row]:
            raise validation.InputError(
                "the loss of a row is another one among other rows than among copies "
                "of itself, so it depends on them and clipping by row bounds nothing. "
                "Common causes are batch normalisation (use LayerNormalization, or "
                "freeze it) and an in-batch softmax (declare its sensitivity: "
                "sensitivity_multiplier in the spec, microbatch_size None)."
            )
        if not abs(losses(padding)[row] - before[row]) <= allowed[row]:
            raise validation.InputError(
                "the loss of a row is another one among padding, so it depends on how "
                "many rows were drawn and clipping by row bounds nothing. A common "
                'cause is a division by the sum of batch["weights"]: return the loss '
                "of each row as it is. The step divides by the expected batch size."
            )
    for key, variable in kept.items():
        now = np.array(variable)
        # Of texts, and of tables' content, no entry is a NaN.
        if not np.array_equal(now, was[key], equal_nan=now.dtype != object):
            raise validation.InputError(
                f"running the model changes its weight {variable.name!r}, which would "
                "keep what it saw of private rows, unclipped and without noise. "
                "Freeze the layer (trainable = False), or replace what writes it."
            )


def finite_rows(run: Run, batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """[rows] bool: where losses are finite, as rows must be that things are tried on.

    Args:
      run: the loss; see `run_of`.
      batch: "weights" included.
    """
    found = run(batch)
    losses = found.losses if isinstance(found, Terms) else found
    return np.isfinite(np.asarray(losses, np.float64))


def run_of(
    per_example_losses: Callable[[Mapping[str, tf.Tensor]], Losses],
    layers: Iterable[tf.Module] = (),
) -> Run:
    """A function from rows to losses, always with the same random numbers.

    Traced, once for all that is tried: run eagerly, a model that keeps its inputs in a
    list would keep rows.

    Args:
      per_example_losses: as for `make_logical_step`.
      layers: the model, for its random layers.
    """
    layers = list(layers)
    of_caller = tf.__internal__.autograph.tf_convert(
        per_example_losses, tf.__internal__.autograph.control_status_ctx()
    )

    def losses(tensors: Mapping[str, tf.Tensor]) -> Losses:
        with replayable(layers, tf.constant([1, 2], tf.int64), 0, 0):
            found = of_caller(tensors)
        # Coupled losses hold functions, which no traced function can return.
        return require_losses(found) if isinstance(found, Coupled) else found

    traced = tf.function(losses, autograph=False)

    def run(values: Mapping[str, np.ndarray]) -> Any:
        tensors = {name: tf.convert_to_tensor(value) for name, value in values.items()}
        tf.random.set_seed(1)  # for random numbers that a model draws by itself
        return traced(tensors)

    return run


def computes_in_16_bits(layers: Iterable[tf.Module]) -> bool:
    """Returns whether any of the layers computes in float16 or bfloat16."""
    return any(
        layer.compute_dtype in ("float16", "bfloat16") for layer in flatten(layers)
    )
