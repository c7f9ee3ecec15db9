"""Checks before step 0 that clipping a row bounds what that row can do.

Clipping bounds a row's part in a step only if no other row's loss or gradient reads it,
and if nothing is kept of it but its clipped gradient. Honest code breaks this by batch
normalisation, an in-batch softmax, a statistic of the batch, a guard against NaN over
all rows, or one dropout mask for all rows.

| check | on | finds |
|---|---|---|
| `Rows`, `of_one_shape` | what `take` returns | rows that depend on their company |
| `_check_trace` | the traced loss | states written; draws shared or unrepeatable |
| `fast.check` | a few rows | weights that no rule of engine `fast` covers |
| `_check_sums` | a microbatch | losses and clipped sums that read other rows |

All run before anything is paid, on some rows and the first weights: they find mistakes,
and prove nothing of other rows. Errors quote no value of a row.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging
from tensorflow.python.framework import op_def_registry

from tfdpsq import validation
from tfdpsq.privacy import fast
from tfdpsq.privacy.batches import Take, unquoted_values
from tfdpsq.privacy.fast.engine import flatten, plain_errors
from tfdpsq.privacy.replay import KEYED, Draws, replayable
from tfdpsq.privacy.step import Setup, make_microbatch_sum, rows_of_batch

Arrays = dict[str, np.ndarray]

_MOST = 256  # rows of a microbatch that are tried
_FEW = 4  # units that `take` and the rules of engine "fast" are tried on
_MANY = 1009  # units the loss is traced for: a prime that divides no width of a model

# Operations that draw from a state of the process or of a `tf.random.Generator`, and
# those that draw by a key that they are given.
_DRAWS_FROM_STATE = re.compile(
    r"Random.*|NonDeterministicInts|Multinomial|(Parameterized)?TruncatedNormal"
    r"|Rng\w*Skip|Stateful(?!PartitionedCall)\w+|\w+CandidateSampler"
    r"|SampleDistortedBoundingBox\w*|Fractional(Max|Avg)Pool"
)
_DRAWS_BY_KEY = re.compile(r"Stateless(?!RandomGet|While|If|Case|PartitionedCall).*")
# Operations that only read a resource, or whose resource ends with the step.
_READS = re.compile(
    r"ReadVariable\w+|DisableCopyOnRead|ResourceGather(Nd)?|VariableShape"
    r"|(VarIs|IsVariable)Initialized(Op)?|LookupTable(Find|Size|Export)(V2)?"
    r"|\w*(Sentencepiece|Wordpiece)\w*|Collective\w+|TensorArray\w+"
)
_READS_OTHERS = (
    "So rows read others. Remove batch statistics from the loss (normalisation, "
    "in-batch softmax, a mean, a test for NaN)."
)


def check_setup(setup: Setup, rows: Rows) -> tuple[Setup, Sequence[tf.Variable]]:
    """Checks loss, model and rows before a step is paid for.

    Returns the setup, with engine "rowwise" where "fast" has no rule for a layer, and
    the variables that the loss reads. An engine of the caller's own is only traced.
    """
    rows.require_alone()
    variables = _check_trace(setup, rows.take_some(1))
    if callable(setup.engine):
        return setup, variables
    size = setup.plan.rows_clipped_together
    by_unit = dataclasses.replace(setup, engine="rowwise", microbatch_size=size)
    if setup.engine == "rowwise":
        setup = by_unit
    with unquoted_values(
        "rows tried before the first step, some with NaN or huge inputs, failed",
        "Nothing was spent. Check all rows, and let the model take such inputs.",
    ):
        try:
            _check_sums(setup, rows)
        except fast.UncoveredError as error:
            logging.warning("%s Using engine rowwise, several times slower.", error)
            setup = by_unit
            _check_sums(setup, rows)
    return setup, variables


class Rows(NamedTuple):
    """The data: a function as for `train`, and the numbers of all rows, ascending."""

    take: Take
    numbers: Sequence[int] | np.ndarray
    also_tried: Sequence[int] = ()  # with the largest ids or labels, say

    def take_some(self, wanted: int) -> Arrays:
        """Takes rows spread over the data, with "weights"; repeats them if few."""
        return self.take_those(np.resize(self.spread(wanted), wanted))

    def spread(self, wanted: int) -> np.ndarray:
        """Returns the numbers of at most `wanted` rows, ascending."""
        count = len(self.numbers)
        at = np.linspace(0, count - 1, min(wanted, count)).astype(np.int64)
        return np.array([self.numbers[i] for i in at], np.int64)

    @unquoted_values(
        "the rows tried before the first step could not be taken",
        "Nothing was spent. Check take.",
    )
    def take_those(self, numbers: np.ndarray) -> Arrays:
        """Takes rows by number, with "weights" of 1, if `take` returns arrays."""
        try:
            found: Any = self.take(numbers)
        except IndexError:  # which states the number of rows, which may be private
            raise validation.InputError(
                f"take has no row {numbers.max()}. Pass units, as the data have them."
            ) from None
        if not isinstance(found, Mapping) or not found or "weights" in found:
            raise validation.InputError(
                "take must return a dict of arrays, none of them called 'weights'."
            )
        batch = {name: np.array(values) for name, values in found.items()}
        for name, values in batch.items():
            if values.dtype == object or not values.ndim or len(values) != len(numbers):
                raise validation.InputError(
                    f"take returned {name!r} with shape {values.shape} and type "
                    f"{values.dtype} for {len(numbers)} numbers; return a row for each."
                )
        return {**batch, "weights": np.ones(len(numbers), np.float32)}

    def require_alone(self) -> None:
        """Refuses rows that `take` normalises, pads or orders by their company."""
        numbers = self.spread(_FEW)
        whole, order = self.take_those(numbers), np.arange(len(numbers))
        for own in [order, np.append(order[::-1], 0), *order[:, np.newaxis]]:
            found = self.take_those(numbers[own])
            for name, values in whole.items():
                if name not in found or not _equal(values[own], found[name]):
                    raise validation.InputError(
                        f"take returned another {name!r} for the same rows. Let a row "
                        "follow from its number alone, of fixed length."
                    )


def _head(values: Any) -> tuple[Any, ...]:
    """Returns shape and type of a row; arrays of texts are as wide as the longest."""
    array = np.asarray(values)
    return array.shape[1:], "text" if array.dtype.kind in "SU" else array.dtype


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    if _head(one) != _head(other):
        return False
    both_nan = (one != one) & (other != other)
    return bool(((one == other) | both_nan).all())


def of_one_shape(take: Take, tried: Arrays) -> Take:
    """Returns a `take` that refuses rows of another shape or type than those tried."""
    wanted = {name: _head(v) for name, v in tried.items() if name != "weights"}

    def checked(numbers: np.ndarray) -> Mapping[str, np.ndarray]:
        found = take(numbers)
        given = {name: _head(values) for name, values in found.items()}
        if given != wanted:
            raise validation.InputError(
                f"take returned rows of another shape or type than {wanted}. Pad all "
                "to one fixed length. Nothing was paid for these."
            )
        return found

    return checked


def _check_trace(setup: Setup, batch: Arrays) -> Sequence[tf.Variable]:
    """Traces loss and gradients for many rows; returns the variables that are read.

    Refuses states that are written, draws that are not from the run's secret keys, and
    draws shared by rows (a crop, `Dropout(noise_shape=(1, None))`, noise on a weight):
    these change for a row that moves to the next microbatch.
    """
    rows = _MANY * setup.plan.rows_clipped_together
    if callable(setup.engine):
        rows = rows_of_batch(setup)
    # On several replicas, those of the first: outside of them a variable has no handle.
    local = tf.distribute.get_strategy().experimental_local_results
    variables = [local(variable)[0] for variable in setup.variables]
    draws: Draws = []

    def traced(given: Mapping[str, tf.Tensor]) -> Any:
        key = tf.constant([1, 2], tf.int64)
        if callable(setup.engine):
            own = dataclasses.replace(setup, variables=variables, microbatch_size=rows)
            return make_microbatch_sum(own)(given, key).sums
        with replayable(setup.layers, key, 0, 0, draws), tf.GradientTape() as tape:
            losses = tf.convert_to_tensor(setup.per_example_losses(given))
        if losses.shape.rank != 1 or losses.shape[0] != rows:
            raise validation.InputError(
                f"losses have shape {losses.shape} for {rows} rows. Return one loss "
                "per row (reduction=NONE), of a static number of rows."
            )
        found = [g for g in tape.gradient(losses, variables) if g is not None]
        if not found:
            raise validation.InputError(
                "the loss has no gradient. Compute it without argmax, rounding or "
                "comparisons."
            )
        return losses, found

    specs = {
        name: tf.TensorSpec([rows, *values.shape[1:]], tf.as_dtype(values.dtype))
        for name, values in batch.items()
    }
    try:
        with plain_errors():
            function = tf.function(traced, autograph=False).get_concrete_function(specs)
    except (ValueError, TypeError) as error:
        if isinstance(error, validation.InputError):
            raise
        raise validation.InputError(
            f"the loss, which must take any number of rows, fails for {rows}: {error}"
        ) from error
    graph = function.graph.as_graph_def()
    bodies = [graph.node, *(each.node_def for each in graph.library.function)]
    for node in (node for body in bodies for node in body):
        keyless = _DRAWS_BY_KEY.fullmatch(node.op) and KEYED not in node.name
        if _DRAWS_FROM_STATE.fullmatch(node.op) or keyless:
            raise validation.InputError(
                f"the loss draws random numbers by itself ({node.name}), which a "
                "resumed run cannot repeat. Draw in Keras's random layers, such as "
                "Dropout, and name the model in `layers`."
            )
        known = op_def_registry.get(node.op)  # None for functions: their bodies follow
        inputs = known.input_arg if known is not None else ()
        state = any(one.type == tf.resource.as_datatype_enum for one in inputs)
        if node.op == "PrintV2" or (state and not _READS.fullmatch(node.op)):
            raise validation.InputError(
                f"the model changes a state ({node.name}), which keeps rows unclipped. "
                "Freeze the layer, or remove the metric, table or print."
            )
    for layer, shape in draws:
        if not shape.rank or not shape[0] or shape[0] % rows:
            raise validation.InputError(
                f"layer {layer!r} draws random numbers of shape {shape} for {rows} "
                "rows. Draw with rows as the first, static dimension."
            )
    return function.graph.variables


def _check_sums(setup: Setup, rows: Rows) -> None:
    """Leaves units out of a microbatch, as padding, and looks at losses and sums.

    For the first unit, the last, and the one of the highest loss: its loss must be the
    same among copies of itself and among padding; leaving it out must move the sum by
    what it adds alone, and by at most the stated sensitivity. The latter two must also
    hold where its float inputs are NaN or huge, which shows guards over the batch, and
    the sum must be that of its two halves. Units of finite loss are tried: a few rows
    of NaN end no run.
    """
    spec, size = setup.plan.spec, setup.plan.rows_clipped_together
    count = setup.microbatch_size
    run = _losses_and_sums(setup)
    kinds = {layer.compute_dtype for layer in flatten(setup.layers)}
    coarse = kinds & {"float16", "bfloat16"}
    # Sums were off by 2e-7 in float32, and GPUs may add up in any order.
    of_losses, of_sums = (0.05, 2e-3) if coarse else (1e-4, 1e-3)

    wanted = min(max(count, _FEW * size), len(rows.numbers))
    tried = max(1, min(wanted, _MOST) // size)
    numbers = np.array([*rows.spread(tried * size), *rows.also_tried], np.int64)
    pool = rows.take_those(np.resize(numbers, -(-len(numbers) // count) * count))
    parts = np.arange(len(pool["weights"])).reshape(-1, count)
    losses = np.concatenate([run(_rows(pool, part))[0] for part in parts])
    finite = np.isfinite(losses[: tried * size]).reshape(-1, size).all(1)
    if finite.sum() < min(2, tried):
        raise validation.InputError(
            f"of {tried} units tried, {finite.sum()} had a finite loss. Look for NaN "
            "or infinite values in inputs, targets and weights."
        )
    used = np.flatnonzero(np.repeat(finite, size))
    if setup.engine == "fast":
        few = _rows(pool, np.resize(used, max(_FEW // size, 2) * size))
        fast.check(
            setup.per_example_losses,
            setup.layers,
            setup.variables,
            tolerance=of_losses,
            inputs=[{name: tf.convert_to_tensor(v) for name, v in few.items()}],
        )
    batch = _kept(_rows(pool, np.resize(used, count)), np.arange(count) < len(used))

    def alone(batch: Arrays, own: np.ndarray) -> np.ndarray:
        """Compares the sum with its parts; returns the losses of `own` in padding."""
        whole, rest = run(batch)[1], run(_kept(batch, ~own))[1]
        losses, part = run(_kept(batch, own))
        moved, adds, left, total, off = (
            _norm(*sums) / spec.clip_norm
            for sums in ((whole, rest), (part,), (rest,), (whole,), (whole, rest, part))
        )
        most = spec.sensitivity_multiplier * (1 + of_sums)
        # Relative to the gradients where they are short, since they may grow. Not `>`,
        # which is false of a NaN.
        share = of_sums * min(1.0, max(1e-6, adds, left, total))
        if not off <= share or (own.sum() <= size and not moved <= most):
            raise validation.InputError(
                f"leaving out rows moves the sum by {moved:.3g} clip norms; alone they "
                f"add {adds:.3g}. {_READS_OTHERS}"
            )
        return losses

    before = run(batch)[0]
    allowed = of_losses * np.maximum(np.abs(before), 1e-3)
    units = np.arange(count) // size
    last = units[batch["weights"] > 0].max()
    highest = np.bincount(units, before)[: last + 1].argmax()
    for unit in {0, last, highest}:
        own = units == unit
        copies = run(_rows(batch, np.resize(np.flatnonzero(own), count)))[0]
        for now in (copies, alone(batch, own)):
            if not np.all((np.abs(now - before) <= allowed)[own]):
                raise validation.InputError(
                    f"a row's loss depends on the rows around it. {_READS_OTHERS}"
                )
    alone(batch, units % 2 == 0)
    floats = {n for n, v in batch.items() if tf.as_dtype(v.dtype).is_floating}
    for factor in (np.nan, 1e6) if floats != {"weights"} else ():
        odd = {name: np.array(values) for name, values in batch.items()}
        for name in floats - {"weights"}:
            odd[name][highest * size] = (1 + np.abs(odd[name][highest * size])) * factor
        alone(odd, units == highest)


def _losses_and_sums(
    setup: Setup,
) -> Callable[[Arrays], tuple[np.ndarray, list[tf.Tensor]]]:
    """Returns the step's function of a microbatch, with random numbers held fixed."""
    strategy = tf.distribute.get_strategy()

    @tf.function(autograph=False)
    def on_first(batch: Mapping[str, tf.Tensor]) -> list[tf.Tensor]:
        key = tf.constant([1, 2], tf.int64)
        found = strategy.run(make_microbatch_sum(setup), args=(batch, key))
        local = strategy.experimental_local_results
        return [local(one)[0] for one in (found.losses, *found.sums)]

    def run(batch: Arrays) -> tuple[np.ndarray, list[tf.Tensor]]:
        tensors = {name: tf.convert_to_tensor(v) for name, v in batch.items()}
        with plain_errors(), fast.true_float32():
            losses, *sums = on_first(tensors)
        return np.asarray(losses, np.float64), sums

    return run


def _rows(batch: Arrays, at: np.ndarray) -> Arrays:
    return {name: values[at] for name, values in batch.items()}


def _kept(batch: Arrays, kept: np.ndarray) -> Arrays:
    """Returns the batch with padding in place of all rows that are not kept."""
    padded = {name: np.array(values) for name, values in batch.items()}
    for values in padded.values():
        values[~kept] = 0
    return padded


def _norm(whole: Sequence[tf.Tensor], *parts: Sequence[tf.Tensor]) -> float:
    """Returns the norm of a sum less its parts."""
    square = 0.0
    for one, *others in zip(whole, *parts):
        left = tf.cast(one, tf.float64) - sum(tf.cast(o, tf.float64) for o in others)
        square += float(tf.reduce_sum(left**2))
    return square**0.5
