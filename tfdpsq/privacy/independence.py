"""Tests on real rows that each row's loss and gradient depend on that row alone.

Clipping per row bounds what one row can do only if its loss and its gradient read no
other row, and only if nothing is kept of a row but its clipped gradient. Batch
normalisation and in-batch softmax read all rows; stateful layers and running means keep
what they saw. Nothing in a vector of losses shows it.

| tried before a run | on | finds |
|---|---|---|
| `require_nothing_kept` | the traced loss | operations that write |
| `check_independence` | four rows | losses that read other rows or their number |
| `check_neighbours` | a microbatch | clipped sums that are not those of their parts |

These are trials on some rows of the data and on the first weights, with the limits that
the functions name: they find mistakes, and prove nothing of other rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging
from tensorflow.python.framework import op_def_registry

from tfdpsq import validation
from tfdpsq.privacy import fast
from tfdpsq.privacy.fast.capture import converted, flatten, plain_errors
from tfdpsq.privacy.loop import REFUSED_VALUES
from tfdpsq.privacy.optimizers import Clipped
from tfdpsq.privacy.randomness.same_draws import same_draws
from tfdpsq.privacy.replay import Node, draws_from_state, nodes_of, replayable
from tfdpsq.privacy.terms import Coupled, Losses, require_losses

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

# Random numbers that all rows are given in turn, until some leave a gradient.
_MASKS = 16

# From rows, "weights" included, to losses; with random numbers held fixed.
Run = Callable[[Mapping[str, np.ndarray]], Any]

_COUPLED = (
    "So a row changes what other rows contribute, and clipping by row bounds nothing. "
    "Common causes are a statistic of the batch in the loss (a mean, a maximum, top_k, "
    "a test for NaN over all rows) and a gradient of your own that reads all rows "
    "(clip_by_norm in tf.custom_gradient). Compute each row's loss and gradient from "
    "that row alone, or declare the sensitivity (sensitivity_multiplier in the spec, "
    "microbatch_size None)."
)


def require_nothing_kept(nodes: Iterable[Node]) -> None:
    """Refuses a loss that could write to a variable, a table, a file or the like."""
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

    Its loss must not move. That finds a dependence on statistics of the batch, on the
    other rows' scores or on their weights where it moves the loss of the first or of
    the last row by more than rounding, in relation to the loss; not one in the gradient
    alone, nor one that needs more rows (see `check_neighbours`). Random numbers are
    held fixed. Running the model must also change none
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
            "own row alone could not be known",
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
        # Only of numbers an entry can be a NaN.
        if not np.array_equal(now, was[key], equal_nan=now.dtype.kind in "fc"):
            raise validation.InputError(
                f"running the model changes its weight {variable.name!r}, which would "
                "keep what it saw of private rows, unclipped and without noise. "
                "Freeze the layer (trainable = False), or replace what writes it."
            )


class Expected(NamedTuple):
    """Values that `check_neighbours` compares with.

    Attributes:
      clip_norm: C, above 0.
      bound: what leaving out one unit may move the sum by, in clip norms.
      rows_per_unit: rows that are clipped together.
      additive: whether the sum must be that of its parts; not where the loss is
        declared to read other rows, and `bound` covers it.
      tolerance: of both, a share.
      draws: whether layers are known to draw random numbers; others may, too.
    """

    clip_norm: float
    bound: float
    rows_per_unit: int
    additive: bool
    tolerance: float
    draws: bool = False


def check_neighbours(
    microbatch_sum: Callable[..., Clipped],
    batch: Mapping[str, np.ndarray],
    expected: Expected,
) -> float:
    """Leaves units out of a microbatch, as padding, and looks at the clipped sum.

    The sum is the step's own. Left out are the first unit, the last, and one between,
    that of the highest loss if it is: none may move the sum by more than `bound`. And
    the sum must be that of its parts, within rounding: of one unit and the others, and
    of every second unit and the others. Both must hold, too, when the float inputs of
    one row are NaN, or huge: such a row costs nobody else. And the sum must not change
    when all units move on by one place, since the units drawn before it decide a unit's
    place; layers that draw from a seed by themselves are not tried for that.

    Units whose loss is not finite as it is are left out throughout. Not found: what
    other rows, other weights or more rows would show; what is below the tolerance.
    Token ids cannot be NaN: data without float inputs are not tried for that.

    Args:
      microbatch_sum: from `make_microbatch_sum`.
      batch: as many rows as `microbatch_sum` takes, whole units, "weights" included.
      expected: what must hold.

    Returns:
      The norm of the clipped sum of the units whose loss is finite.

    Raises:
      InputError: leaving out a unit moved the sum by more than `bound`, or by
        something else than what that unit alone adds; or another place did.
    """
    size = expected.rows_per_unit
    run = _Sums(microbatch_sum, draws=expected.draws)
    real = np.asarray(batch["weights"]) > 0
    batch = _padded(batch, real)
    whole = run(batch, False)
    losses = np.asarray(whole.losses, np.float64)
    finite = np.isfinite(losses) | ~real
    if not finite.all():
        real &= np.repeat(finite.reshape(-1, size).all(1), size)
        batch = _padded(batch, real)
        whole = run(batch, False)
    norm = _norm(whole.sums)
    units = np.flatnonzero(real.reshape(-1, size).any(1))
    if not len(units):
        return norm
    by_unit = np.where(real, losses, 0.0).reshape(-1, size).sum(1)
    ends = units[0], units[-1]
    between = units[np.argmax(by_unit[units])]
    if between in ends:
        between = units[len(units) // 2]
    one = "one row" if size == 1 else f"one unit of {size} rows"
    for unit in sorted({*ends, between}):
        _compare(run, batch, whole, np.array([unit]), one, expected)
    if not expected.additive:
        return norm
    every = "every second row" if size == 1 else "every second unit"
    _compare(run, batch, whole, units[::2], every, expected)
    _move(run, batch, whole, expected)
    for factor, inputs in ((np.nan, "NaN"), (1e6, "huge numbers")):
        odd = _odd(batch, between * size, factor)
        if odd is None:
            break
        what = f"{one} with {inputs} for inputs"
        try:
            _compare(run, odd, run(odd, False), np.array([between]), what, expected)
        except REFUSED_VALUES:  # whose message quotes a value
            logging.warning(
                "%s ends the model with an error: such a row would end a run, and show "
                "that it is there",
                what,
            )
    return norm


class _Sums:
    """The clipped sum of rows, whose units are taken one by one if `apart`."""

    def __init__(
        self,
        microbatch_sum: Callable[..., Clipped],
        units: int = 1,
        draws: bool = False,
    ):
        """With `units`, so many have the same random numbers; 1 changes none."""
        strategy = tf.distribute.get_strategy()
        self.microbatch_sum = microbatch_sum
        self.draws_by_unit = True  # unless a layer draws by itself

        def made(*given: Any) -> Clipped:
            with same_draws(units) as numbers:  # each replica has a thread of its own
                found = microbatch_sum(*given)
            self.draws_by_unit &= numbers.complete
            return found._replace(complete=tf.convert_to_tensor(found.complete))

        def first(*given: Any) -> Clipped:
            if strategy.num_replicas_in_sync == 1:
                return made(*given)
            return tf.nest.map_structure(
                lambda one: strategy.experimental_local_results(one)[0],
                strategy.run(made, args=given),
            )

        self._run = _Repeating(first)
        # Two masks may agree by chance, so known draws need no trial.
        self._draws: bool | None = draws or None

    def draws(self, batch: Mapping[str, np.ndarray]) -> bool:
        """Returns whether the sum depends on random numbers."""
        if self._draws is None:
            one, other = (self(batch, True, key).sums for key in (1, 3))
            self._draws = _norm(one, other) > 1e-6 * _norm(one)
        return self._draws

    def __call__(
        self, values: Mapping[str, np.ndarray], apart: bool, key: int = 1
    ) -> Clipped:
        dropout = tf.constant([key, 2], tf.int64)
        with plain_errors(), fast.true_float32():
            return self._run(_tensors(values), tf.constant(apart), dropout)


def _move(
    run: _Sums, batch: Mapping[str, np.ndarray], together: Clipped, expected: Expected
) -> None:
    """Refuses a sum that depends on the places of units.

    Random numbers are by place: all units get the same, unless layers draw their own.
    """
    size, key = expected.rows_per_unit, 1
    moved = {name: np.roll(values, size, axis=0) for name, values in batch.items()}
    if run.draws(batch):
        if not run.draws_by_unit:
            return
        run = _Sums(run.microbatch_sum, len(batch["weights"]) // size)
        # One mask for all may leave nothing: then another is tried.
        wanted = 0.1 * _norm(together.sums)
        for key in range(1, 2 * _MASKS, 2):
            together = run(batch, False, key)
            if _norm(together.sums) >= wanted:
                break
        else:
            logging.warning(
                "with the same random numbers for all rows the model has hardly a "
                "gradient, so whether a row's place decides its own could not be known"
            )
    found = [together, run(moved, False, key)]
    if not all(bool(one.complete) for one in found):
        found = [run(batch, True, key), run(moved, True, key)]
    here, there = (one.sums for one in found)
    share = expected.tolerance * min(1.0, max(1e-6, _norm(here) / expected.clip_norm))
    off = _norm(here, there) / expected.clip_norm
    if not off <= share:
        raise validation.InputError(
            f"the same rows, each moved on by one place in the batch, have another "
            f"clipped sum, {off:.3g} clip norms away, and the rows drawn before a row "
            f"decide its place. {_COUPLED}"
        )


def _compare(
    run: _Sums,
    batch: Mapping[str, np.ndarray],
    together: Clipped,
    units: np.ndarray,
    what: str,
    expected: Expected,
) -> None:
    """Refuses a sum that leaving out some units moves otherwise than it should."""
    own = np.zeros(len(batch["weights"]) // expected.rows_per_unit, bool)
    own[units] = True
    own = np.repeat(own, expected.rows_per_unit)
    parts = [_padded(batch, ~own)]
    if expected.additive:
        parts.append(_padded(batch, own))
    found = [together, *(run(part, False) for part in parts)]
    whole, rest, *alone = (one.sums for one in found)
    moved = _norm(whole, rest) / expected.clip_norm
    share = expected.tolerance
    # Not `>`, which is false of a NaN.
    if len(units) == 1 and not moved <= expected.bound * (1 + share):
        raise validation.InputError(
            f"leaving out {what} moves the clipped sum by {moved:.3g} clip norms, but "
            f"the noise is made for {expected.bound:g}. {_COUPLED}"
        )
    for own_sum in alone:
        adds = _norm(own_sum) / expected.clip_norm
        off = _norm(whole, rest, own_sum) / expected.clip_norm
        # In relation to the gradients where they are short: they may grow.
        sums = [adds, *(_norm(one) / expected.clip_norm for one in (whole, rest))]
        if not off <= share * min(1.0, max(1e-6, *sums)):
            raise validation.InputError(
                f"leaving out {what} moves the clipped sum by {moved:.3g} clip norms, "
                f"but alone adds {adds:.3g} to padding, {off:.2g} away from it: the "
                f"sum is not that of its parts. {_COUPLED}"
            )


def _padded(batch: Mapping[str, np.ndarray], kept: np.ndarray) -> dict[str, np.ndarray]:
    """The batch with padding in place of all rows that are not kept."""
    padded = {name: np.array(values) for name, values in batch.items()}
    for values in padded.values():
        values[~kept] = 0
    return padded


def _odd(
    batch: Mapping[str, np.ndarray], row: int, factor: float
) -> dict[str, np.ndarray] | None:
    """The batch with one row's float inputs made odd; `None` if it has none."""
    changed = {name: np.array(values) for name, values in batch.items()}
    found = [
        values
        for name, values in changed.items()
        if name != "weights" and tf.as_dtype(values.dtype).is_floating
    ]
    for values in found:
        values[row] = (1 + np.abs(values[row])) * factor
    return changed if found else None


def _norm(whole: Sequence[tf.Tensor], *parts: Sequence[tf.Tensor]) -> float:
    """The norm of a sum less its parts."""
    left = [tf.convert_to_tensor(one) for one in whole]
    for part in parts:
        left = [one - tf.convert_to_tensor(other) for one, other in zip(left, part)]
    return float(tf.linalg.global_norm([tf.cast(one, tf.float64) for one in left]))


def finite_rows(run: Run, batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """[rows] bool: where losses are finite, as they must be on rows for trials."""
    return np.isfinite(np.asarray(run(batch), np.float64))


def run_of(
    per_example_losses: Callable[[Mapping[str, tf.Tensor]], Losses],
    layers: Iterable[tf.Module] = (),
) -> Run:
    """A function from rows to losses, always with the same random numbers.

    Traced, once for all that is tried: run eagerly, a model that keeps its inputs in a
    list would keep rows.
    """
    layers = list(layers)
    of_caller = converted(per_example_losses)

    def losses(tensors: Mapping[str, tf.Tensor]) -> Losses:
        with replayable(layers, tf.constant([1, 2], tf.int64), 0, 0):
            found = of_caller(tensors)
        # Coupled losses hold functions, which no traced function can return.
        return require_losses(found) if isinstance(found, Coupled) else found

    run = _Repeating(losses)
    return lambda values: run(_tensors(values))


class _Repeating:
    """A function that is traced, and draws the same random numbers in every call."""

    def __init__(self, function: Callable[..., Any]):
        self._traced = tf.function(function, autograph=False)
        self._draws: dict[int, bool] = {}  # by graph, which `_traced` keeps

    def __call__(self, *tensors: Any) -> Any:
        graph = self._traced.get_concrete_function(*tensors).graph
        if id(graph) not in self._draws:
            self._draws[id(graph)] = any(map(_may_draw, nodes_of(graph)))
        # It makes TensorFlow prepare all functions again, which takes longer than a
        # small one.
        if self._draws[id(graph)]:
            tf.random.set_seed(1)
        return self._traced(*tensors)


def _may_draw(node: Node) -> bool:
    """Returns whether it draws numbers by itself, or might, in Python."""
    return draws_from_state(node.op) or "PyFunc" in node.op


def _tensors(values: Mapping[str, np.ndarray]) -> dict[str, tf.Tensor]:
    return {name: tf.convert_to_tensor(value) for name, value in values.items()}


def computes_in_16_bits(layers: Iterable[tf.Module]) -> bool:
    """Returns whether any of the layers computes in float16 or bfloat16."""
    return any(
        layer.compute_dtype in ("float16", "bfloat16") for layer in flatten(layers)
    )
