"""Checks before step 0 that clipping a row bounds what that row can do.

Clipping bounds a row's part in a step only if no other row's loss or gradient reads it,
and if nothing is kept of it but its clipped gradient. Honest code breaks this in ways
that no vector of losses shows: batch normalisation, an in-batch softmax, a statistic of
the batch, a guard against NaN over all rows, one dropout mask for all rows.

| check | on | finds |
|---|---|---|
| `Rows`, `of_one_shape` | what `take` returns | rows that depend on their company |
| `_check_graph` | the traced loss | states written, draws not from the run's keys |
| `_check_draws` | the loss of many rows | random numbers that rows share |
| `_check_sum` | a microbatch | losses and clipped sums that read other rows |
| `fast.check` | a few rows | weights that no rule of engine `fast` covers |

Nothing is paid for before all have passed. They run on some rows and the first weights:
they find mistakes, and prove nothing of other rows. Errors quote no value of a row.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging
from tensorflow.core.framework.node_def_pb2 import NodeDef as Node
from tensorflow.python.framework import op_def_registry

from tfdpsq import validation
from tfdpsq.privacy import fast
from tfdpsq.privacy.batches import content, padded_rows, rows_at_once
from tfdpsq.privacy.engines import Clipped
from tfdpsq.privacy.fast.capture import converted, flatten, plain_errors
from tfdpsq.privacy.loop import REFUSED_VALUES, Take, unquoted_values
from tfdpsq.privacy.replay import DRAWN_BY_KEY, KEYED, SEED, Draw, replayable
from tfdpsq.privacy.step import Setup, make_microbatch_sum
from tfdpsq.privacy.terms import Coupled

Arrays = dict[str, np.ndarray]

# Rows at most of the microbatch that is tried.
_MOST = 256
# Rows on which the rules of engine "fast" are tried, and `take`.
_FEW = 4
# As many times more rows are looked at for finite losses.
_LOOKS = 8
# Units of a loss that is traced for its draws: of about a thousand rows, of which no
# width of a model is a multiple.
_PRIMES = (3, 5, 11, 31, 101, 331, 1009)
_MANY = 1000
_SEED = (1, 2)  # no tensor: that would start TensorFlow's devices

# TensorFlow's operations whose random numbers follow from a state of the process or of
# a `tf.random.Generator`.
_DRAWN_FROM_STATE = re.compile(
    r"Random(?!Shuffle(Queue|Dataset)|.*Grad$).*|NonDeterministicInts|Multinomial"
    r"|(Parameterized)?TruncatedNormal|Rng(ReadAndSkip|Skip)|\w+CandidateSampler"
    r"|Stateful(Uniform|StandardNormal|TruncatedNormal|RandomBinomial)\w*"
    r"|SampleDistortedBoundingBox\w*|Fractional(Max|Avg)Pool"
)
# Operations on a resource that only read it, and those on containers that live no
# longer than the step. All others write: also those that are not known here.
_READS = re.compile(
    r"ReadVariable\w+|DisableCopyOnRead|ResourceGather(Nd)?|VariableShape"
    r"|(VarIs|IsVariable)Initialized(Op)?|LookupTable(Find|Size|Export)(V2)?"
    r"|\w*(Sentencepiece|Wordpiece)\w*|Collective\w+|TensorArray\w+"
    r"|Stack(Push|Pop|Close)(V2)?"
)
# Operations that keep what they get outside any resource.
_KEEPS = re.compile(
    r"Stage|(Ordered)?MapStage|Add(Many)?SparseToTensorsMap|GetSessionHandle(V2)?"
    r"|WriteFile|Save\w*|(Experimental)?DatasetToTFRecord|Print(V2)?|Debug\w+"
    r"|\w*Snapshot\w*|CacheDataset\w*"
)
_READS_OTHERS = (
    "So a row changes what other rows contribute, and clipping by row bounds nothing. "
    "Common causes are batch normalisation (use LayerNormalization, or freeze it), an "
    "in-batch softmax, a statistic of the batch in the loss (a mean, a maximum, a test "
    "for NaN over all rows), a division by the sum of the weights, and a gradient of "
    "your own that reads all rows. Compute each row's loss from that row alone."
)
_NOT_TAKEN = (
    "the rows tried before the first step could not be taken",
    "Nothing was spent. Check take.",
)
_NOT_COMPUTED = (
    "the rows tried before the first step could not be computed",
    "Nothing was spent. Check all rows.",
)


def check_setup(
    setup: Setup, rows: Rows, also_tried: Sequence[int] = ()
) -> tuple[Setup, Sequence[tf.Variable], bool]:
    """Checks loss, model and rows before a step is paid for.

    Args:
      setup: what `train` was given. Nothing of it is changed.
      rows: the data.
      also_tried: numbers of rows whose loss is computed, too.

    Returns:
      The same, with engine "rowwise" where "fast" has no rule for a layer; the
      variables that the loss reads; and whether layers draw random numbers from a seed
      by themselves, for a whole microbatch.

    Raises:
      InputError: names what is wrong, and what to do.
    """
    if tf.config.functions_run_eagerly():
        raise validation.InputError(
            "tf.config.run_functions_eagerly(True) is set: Python code of layers would "
            "see rows, and could keep them. Set it to False; to look into a layer call "
            "the model on public rows."
        )
    rows.require_alone()
    plan, coupled = setup.plan, setup.coupled
    together = plan.rows_clipped_together
    few = rows.take_some(max(_FEW, 2 * together) // together * together)
    # First of all: nothing runs, so nothing is kept.
    size = padded_rows(plan, setup.microbatch_size, True) if coupled else None
    function, draws = _traced(setup, few, size)
    _check_graph(function.graph, coupled)
    if draws and not coupled:
        _check_draws(setup, few, together)
    if not coupled:
        with unquoted_values(*_NOT_COMPUTED):
            few = _finite(setup, rows, few)
            setup = _covered(setup, few)
            _compute(setup, rows, also_tried, len(few["weights"]))
        if rows.count > 1:
            _check_sum(setup, rows)
    by_microbatch = any(draw.own for draw in draws)
    return setup, function.graph.variables, by_microbatch


# -- What `take` returns -----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rows:
    """The data by row number.

    Attributes:
      take: as for `train`.
      count: how many rows there are.
      numbers: those of the rows, ascending; `None` if they are 0, 1, 2, …
    """

    take: Take
    count: int
    numbers: np.ndarray | None = None

    @unquoted_values(*_NOT_TAKEN)
    def take_some(self, wanted: int) -> Arrays:
        """Takes rows spread over the data, with their "weights".

        Args:
          wanted: how many; where there are fewer, some are taken again.

        Raises:
          InputError: `take` has no such rows, or returns no array of them.
        """
        at = np.linspace(0, self.count - 1, min(wanted, self.count)).astype(np.int64)
        at = np.resize(at, wanted)
        batch = self._taken(at if self.numbers is None else self.numbers[at])
        batch["weights"] = np.ones(wanted, np.float32)
        return batch

    def _taken(self, numbers: np.ndarray) -> Arrays:
        try:
            found: Any = self.take(numbers)
        except IndexError:
            # Numpy's own message has the number of rows, which may be private.
            raise validation.InputError(
                f"take has no row {numbers.max()}. Pass units, the number of units "
                "that the data have, or groups of the rows that there are."
            ) from None
        if not isinstance(found, Mapping) or not found or "weights" in found:
            raise validation.InputError(
                f"take returned {type(found).__name__}; it must return a dict of "
                "arrays by name, with one row for each row number, and none called "
                "'weights', the name of what tells rows from padding."
            )
        batch = {name: np.array(values) for name, values in found.items()}
        for name, values in batch.items():
            if values.dtype == object or not values.ndim or len(values) != len(numbers):
                raise validation.InputError(
                    f"take returned {name!r} with shape {values.shape} and type "
                    f"{values.dtype} for {len(numbers)} row numbers; it must return "
                    "one row of numbers, bytes or booleans for each."
                )
        return batch

    @unquoted_values(*_NOT_TAKEN)
    def require_alone(self) -> None:
        """Refuses rows that depend on the rows they are taken with.

        A row that `take` normalises or pads by its company is clipped with what they
        say. And `take` gets numbers in any order, 0 again and again for padding: one
        that sorts them exchanges rows. So a few rows are taken twice, in falling order
        with one repeated, and each by itself.
        """
        at = np.unique(np.linspace(0, self.count - 1, _FEW).astype(np.int64))
        at = at if self.numbers is None else self.numbers[at]
        whole, again = self._taken(at), self._taken(at)
        for name, values in whole.items():
            if name not in again or content(values) != content(again[name]):
                raise validation.InputError(
                    f"take returned another {name!r} for the same row numbers the "
                    "second time, which a killed run could not repeat: its noise would "
                    "be used twice, on two different sums. Let rows follow from their "
                    "numbers alone, and draw at random in Keras's layers."
                )
        falling = np.append(np.arange(len(at))[::-1], 0)
        for own in [falling, *np.arange(len(at))[:, np.newaxis]]:
            found = self._taken(at[own])
            for name, values in whole.items():
                if not _alike(values[own], found.get(name)):
                    raise validation.InputError(
                        f"take returned another {name!r} for the same rows among other "
                        "rows, or not in the order of their numbers. So one row, drawn "
                        "or not, changes others, and clipping by row bounds nothing. "
                        "Return each row as it is by itself, padded to a fixed length, "
                        "in the order of the numbers."
                    )


def _alike(one: np.ndarray, other: np.ndarray | None) -> bool:
    """Returns whether rows agree in shape and type, and within rounding in values."""
    if other is None or one.shape != other.shape or one.dtype.kind != other.dtype.kind:
        return False
    if one.dtype.kind in "SU":  # as wide as the longest text
        return bool((one == other).all())
    if one.dtype != other.dtype:
        return False
    if not tf.as_dtype(one.dtype).is_floating:
        return bool((one == other).all())
    # What a model computes in `take` may differ by the size of its batch.
    one, other = one.astype(np.float64), other.astype(np.float64)
    return np.allclose(one, other, rtol=1e-3, atol=1e-6, equal_nan=True)


def of_one_shape(take: Take, tried: Mapping[str, np.ndarray]) -> Take:
    """Returns `take`, which refuses rows of another shape or type than those tried.

    Rows as wide as the longest of a batch would tell each of them of the others.
    """

    def head(values: Any) -> tuple[Any, ...]:
        array = np.asarray(values)
        kind = "text" if array.dtype.kind in "SU" else array.dtype
        return array.shape[1:], kind

    wanted = {name: head(values) for name, values in tried.items() if name != "weights"}

    def of(numbers: np.ndarray) -> Mapping[str, np.ndarray]:
        found = take(numbers)
        given = {name: head(values) for name, values in found.items()}
        for name in sorted({*given, *wanted}, key=str):
            if given.get(name) != wanted.get(name):
                raise validation.InputError(
                    f"take returned {name!r} for some rows only, or in another shape "
                    "or type than for the rows tried before the first step, so one "
                    "row decides the shape of others. Give all rows the same fields, "
                    "padded to one fixed length. No step was paid for these rows."
                )
        return found

    return of


# -- The traced loss ---------------------------------------------------------------


def _key() -> tf.Tensor:
    return tf.constant(_SEED, tf.int64)


def _traced(
    setup: Setup, batch: Arrays, rows: int | None = None
) -> tuple[Any, list[Draw]]:
    """Traces the loss, and its gradient, for some number of rows; nothing runs."""
    rows = rows or len(batch["weights"])
    # On several replicas, those of the first: outside of them a variable has no handle.
    local = tf.distribute.get_strategy().experimental_local_results
    variables = [local(variable)[0] for variable in setup.variables]
    of_caller = converted(setup.per_example_losses)
    draws: list[Draw] = []

    def losses(tensors: Mapping[str, tf.Tensor]) -> list[tf.Tensor]:
        with replayable(setup.layers, _key(), 0, 0, draws):
            with tf.GradientTape() as tape:
                found = of_caller(tensors)
            if isinstance(found, Coupled):
                made = [found.losses, *found.gradient(tf.one_hot(0, rows), variables)]
            else:
                made = [found, *tape.gradient(found, variables)]
        flat = tf.nest.flatten(made, expand_composites=True)
        return [value for value in flat if tf.is_tensor(value)]

    tensors = {name: tf.convert_to_tensor(values) for name, values in batch.items()}
    given = {
        name: tf.TensorSpec([rows, *tensor.shape[1:]], tensor.dtype)
        for name, tensor in tensors.items()
    }
    made = tf.function(losses, autograph=False)
    with plain_errors():
        try:
            function = made.get_concrete_function(given)
        except TypeError as error:
            if "out of scope" not in str(error):
                raise
            raise validation.InputError(
                "a tf.function inside the model or the loss keeps the random numbers "
                "that it was traced with. Leave @tf.function out there: the step is "
                "compiled as a whole."
            ) from None
    operations = function.graph.get_operations()
    shapes = {op.name: op.outputs[0].shape for op in operations if op.outputs}
    for node in nodes_of(function.graph):
        if DRAWN_BY_KEY.fullmatch(node.op) and KEYED not in node.name:
            # Of unknown shape inside of a loop, a branch or a function.
            shape = shapes.get(node.name, tf.TensorShape(None))
            draws.append(Draw(node.name, shape, own=True))
    return function, draws


def nodes_of(graph: tf.Graph) -> list[Node]:
    """Returns the nodes of a graph and of all functions in it."""
    made = graph.as_graph_def()
    return [*made.node, *(n for f in made.library.function for n in f.node_def)]


def require_nothing_kept(nodes: Iterable[Node]) -> None:
    """Refuses a loss that could write to a variable, a table, a file or the like."""
    for node in nodes:
        if _writes(node.op):
            raise validation.InputError(
                f"running the model changes a state ({node.name}), or may, which would "
                "keep what it saw of private rows, unclipped and without noise. Freeze "
                "the layer (trainable = False; batch normalisation then stops), or "
                "remove what writes: a running mean, a metric, a table, a print."
            )


def _writes(operation: str) -> bool:
    if _KEEPS.fullmatch(operation):
        return True
    if _READS.fullmatch(operation) or _DRAWN_FROM_STATE.fullmatch(operation):
        return False
    known = op_def_registry.get(operation)  # of functions there is none: looked into
    return known is not None and any(
        given.type == tf.resource.as_datatype_enum or given.is_ref
        for given in known.input_arg
    )


def _check_graph(graph: tf.Graph, coupled: bool) -> None:
    """Refuses states that the loss writes, and draws without the run's secret keys."""
    nodes = nodes_of(graph)
    require_nothing_kept(nodes)
    for node in nodes:
        if _DRAWN_FROM_STATE.fullmatch(node.op):
            raise validation.InputError(
                f"the loss draws random numbers from TensorFlow's own state "
                f"({node.name}). Their seed is 31 bits that are stored in the graph, "
                "and a resumed run cannot repeat them. Draw them in Keras's random "
                "layers, and name the model in `layers`."
            )
    if coupled:  # one batch, of which the sensitivity covers every row's change
        return
    operations = graph.get_operations()
    secret = {op.name for op in operations if SEED in op.name.split("/")[:-1]}
    for op in operations:  # inputs come before what takes them
        if any(value.op.name in secret for value in op.inputs):
            secret.add(op.name)
        elif DRAWN_BY_KEY.fullmatch(op.type) and KEYED not in op.name:
            raise validation.InputError(
                f"the loss draws random numbers from a seed of its own ({op.name}), "
                "which are the same in every step: those of a row follow from its "
                "place, and the rows drawn before it decide that. Draw in Keras's "
                "random layers, or from make_seed_for_stateless_op of their generator."
            )


def _check_draws(setup: Setup, batch: Arrays, together: int) -> None:
    """Refuses random numbers of which not every row has its own.

    One draw for all rows of a microbatch (a crop, `Dropout(noise_shape=(1, None))`,
    noise on a weight) changes for a row that moves to the next microbatch, so that the
    sum can move by more than one clip norm.
    """
    rows = together * next(p for p in _PRIMES if p * together >= _MANY)
    try:
        _, draws = _traced(setup, batch, rows)
    except (ValueError, TypeError, OverflowError, tf.errors.OpError) as error:
        if isinstance(error, validation.InputError):
            raise
        raise validation.InputError(
            f"the loss could not be traced for {rows} rows ({type(error).__name__}), "
            "so it cannot be seen whether rows share random numbers. Let it take any "
            "number of rows, or train without random layers."
        ) from None
    for draw in draws:
        first = draw.shape[0] if draw.shape.rank else None
        if not first or first % rows:
            raise validation.InputError(
                f"{draw.layer} draws random numbers of shape {draw.shape} for {rows} "
                "rows, so not every row has its own, and a row more could change the "
                "numbers of others. Draw them with the rows as first dimension, and of "
                "a known shape, as Dropout without noise_shape does, or prepare the "
                "rows before training."
            )


# -- One microbatch ----------------------------------------------------------------


class _Sums:
    """The step's own clipped sum of a microbatch, with random numbers held fixed."""

    def __init__(self, setup: Setup, size: int):
        strategy = tf.distribute.get_strategy()
        losses = converted(setup.per_example_losses)
        of_microbatch = make_microbatch_sum(
            setup._replace(per_example_losses=losses, microbatch_size=size)
        )

        def made(batch: Mapping[str, tf.Tensor]) -> Clipped:
            found = of_microbatch(batch, _key())
            return found._replace(complete=tf.convert_to_tensor(found.complete))

        def first(batch: Mapping[str, tf.Tensor]) -> Clipped:
            if strategy.num_replicas_in_sync == 1:
                return made(batch)
            return tf.nest.map_structure(
                lambda one: strategy.experimental_local_results(one)[0],
                strategy.run(made, args=(batch,)),
            )

        self._run = tf.function(first, autograph=False)

    def __call__(self, batch: Mapping[str, np.ndarray]) -> Clipped:
        tensors = {name: tf.convert_to_tensor(v) for name, v in batch.items()}
        with plain_errors(), fast.true_float32():
            return self._run(tensors)


@unquoted_values(*_NOT_COMPUTED)
def _check_sum(setup: Setup, rows: Rows) -> None:
    """Leaves units out of a microbatch, as padding, and looks at losses and sums.

    For the first unit, the last, and the one of the highest loss: its loss must be the
    same among copies of itself and among padding; leaving it out must move the sum by
    what it adds alone, and by at most the stated sensitivity. The latter two must also
    hold where its float inputs are NaN or huge, which shows guards over the batch, and
    the sum must be that of its two halves.

    Raises:
      InputError: as above; hardly any loss is finite, or no weight has a gradient.
    """
    plan, size = setup.plan, setup.plan.rows_clipped_together
    count = rows_at_once(plan, setup.microbatch_size)
    batch = rows.take_some(count)
    used = min(max(_MOST // size, 1), max(count // size, 1), max(rows.count // size, 1))
    batch["weights"][used * size :] = 0
    batch = _kept(batch, batch["weights"] > 0)
    sums = _Sums(setup, count)
    losses = np.asarray(sums(batch).losses, np.float64)
    finite = np.isfinite(losses).reshape(-1, size).all(1) & (
        batch["weights"].reshape(-1, size) > 0
    ).any(1)
    units = np.flatnonzero(finite)
    _require_finite(len(units), min(2, used), used)
    batch = _kept(batch, np.repeat(finite, size))
    whole = sums(batch)
    if not _norm(whole.sums) and not _is_reached(setup, batch):
        raise validation.InputError(
            f"the loss has no gradient in any of the {len(setup.variables)} variables "
            "that are trained: every step would add noise alone. Compute the loss from "
            "the model's outputs, by operations that can be differentiated (argmax, "
            "rounding and comparisons cannot)."
        )
    # Sums were off by 2e-7 in float32, and GPUs may add up in any order.
    coarse = computes_in_16_bits(setup.layers)
    tolerance = 2e-3 if coarse else 1e-3
    before = np.asarray(whole.losses, np.float64)
    allowed = (0.05 if coarse else 1e-4) * np.maximum(np.abs(before), 1e-3)
    highest = units[np.argmax(losses.reshape(-1, size).sum(1)[units])]
    for unit in sorted({units[0], units[-1], highest}):
        own = np.repeat(np.arange(len(finite)) == unit, size)
        alone = sums(_kept(batch, own))
        copies = {
            name: np.concatenate([values[own]] * (count // size))
            for name, values in batch.items()
        }
        among_copies = np.asarray(sums(copies).losses, np.float64)
        among_padding = np.asarray(alone.losses, np.float64)
        for now, company in (
            (among_copies, "copies of itself"),
            (among_padding, "padding"),
        ):
            if not np.all((np.abs(now - before) <= allowed)[own]):
                raise validation.InputError(
                    "the loss of a row is another one among other rows than among "
                    f"{company}. {_READS_OTHERS}"
                )
        _compare(sums, batch, own, setup, tolerance)
    half = np.repeat(np.arange(len(finite)) % 2 == 0, size)
    _compare(sums, batch, half, setup, tolerance)
    own = np.repeat(np.arange(len(finite)) == highest, size)
    for factor in (np.nan, 1e6):
        odd = _odd(batch, int(highest) * size, factor)
        if odd is None:
            break
        try:
            _compare(sums, odd, own, setup, tolerance)
        except REFUSED_VALUES:  # whose message quotes a value
            raise validation.InputError(
                "a row with NaN or huge inputs ends the model with an error: such a "
                "row would end a run, and show that it is there. Remove the check."
            ) from None


def _compare(
    sums: _Sums, batch: Arrays, own: np.ndarray, setup: Setup, tolerance: float
) -> None:
    """Refuses a clipped sum that is not that of its parts."""
    spec = setup.plan.spec
    whole, rest, alone = (
        sums(part).sums for part in (batch, _kept(batch, ~own), _kept(batch, own))
    )
    moved, adds, left, all_of_it = (
        _norm(*parts) / spec.clip_norm
        for parts in ((whole, rest), (alone,), (rest,), (whole,))
    )
    off = _norm(whole, rest, alone) / spec.clip_norm
    one_unit = own.sum() <= setup.plan.rows_clipped_together
    most = spec.sensitivity_multiplier * (1 + tolerance)
    # In relation to the gradients where they are short, since they may grow. Not `>`,
    # which is false of a NaN.
    share = tolerance * min(1.0, max(1e-6, adds, left, all_of_it))
    if not off <= share or (one_unit and not moved <= most):
        raise validation.InputError(
            f"leaving out some rows moves the clipped sum by {moved:.3g} clip norms; "
            f"alone they add {adds:.3g}, and the noise is made for "
            f"{spec.sensitivity_multiplier:g} a unit. {_READS_OTHERS}"
        )


def _kept(batch: Arrays, kept: np.ndarray) -> Arrays:
    """The batch with padding in place of all rows that are not kept."""
    padded = {name: np.array(values) for name, values in batch.items()}
    for values in padded.values():
        values[~kept] = 0
    return padded


def _odd(batch: Arrays, row: int, factor: float) -> Arrays | None:
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


def _is_reached(setup: Setup, batch: Arrays) -> bool:
    """Returns whether the loss has a gradient in a variable, which may be zero."""
    found: list[Any] = []

    def find(tensors: Mapping[str, tf.Tensor]) -> None:
        with replayable(setup.layers, _key(), 0, 0), tf.GradientTape() as tape:
            losses = setup.per_example_losses(tensors)
        found.extend(tape.gradient(losses, list(setup.variables)))

    tensors = {name: tf.convert_to_tensor(values) for name, values in batch.items()}
    strategy = tf.distribute.get_strategy()
    run = find
    if strategy.num_replicas_in_sync > 1:  # each of which has variables of its own

        def run(tensors: Mapping[str, tf.Tensor]) -> None:
            strategy.run(find, args=(tensors,))

    tf.function(run).get_concrete_function(tensors)
    return any(gradient is not None for gradient in found)


# -- Rules and single rows ---------------------------------------------------------


def _finite(setup: Setup, rows: Rows, few: Arrays) -> Arrays:
    """Returns as many rows, of units whose losses are finite.

    A few rows of NaN, which clipping leaves out of every sum, are to end no run.
    """
    together, count = setup.plan.rows_clipped_together, len(few["weights"])
    run = _losses_of(setup)

    def finite_rows(batch: Arrays) -> Arrays:
        losses = np.asarray(run(batch), np.float64)
        if losses.shape != (count,):
            raise validation.InputError(
                f"there are losses of shape {losses.shape} for {count} rows. Return "
                "exactly one loss per row."
            )
        kept = np.isfinite(losses).reshape(-1, together).all(1).repeat(together)
        return {name: values[kept] for name, values in batch.items()}

    found = finite_rows(few)
    if len(found["weights"]) < count:
        more = rows.take_some(_LOOKS * count)
        parts = [found] + [
            finite_rows(
                {name: values[at : at + count] for name, values in more.items()}
            )
            for at in range(0, _LOOKS * count, count)
        ]
        found = {name: np.concatenate([part[name] for part in parts]) for name in few}
    units = len(found["weights"]) // together
    _require_finite(units, 1, (_LOOKS + 1) * count // together)
    at = np.resize(np.arange(units * together), count)
    return {name: values[at] for name, values in found.items()}


def _require_finite(found: int, wanted: int, tried: int) -> None:
    if found < wanted:
        raise validation.InputError(
            f"of {tried} units tried, {found} had a finite loss: what the model makes "
            "of the data is NaN or infinite. Look for such values in inputs, targets "
            "and weights."
        )


def _covered(setup: Setup, batch: Arrays) -> Setup:
    """Compares the rules of engine "fast" with the tape.

    Returns:
      The setup; where a layer has no rule, with engine "rowwise".
    """
    if setup.engine == "fast":
        try:
            fast.check(
                setup.per_example_losses,
                setup.layers,
                setup.variables,
                tolerance=0.05 if computes_in_16_bits(setup.layers) else 1e-4,
                rows_per_unit=setup.plan.rows_clipped_together,
                inputs=[{n: tf.convert_to_tensor(v) for n, v in batch.items()}],
            )
        except fast.UncoveredError as error:
            logging.warning(
                "%s Gradients are computed one unit at a time instead (engine "
                "rowwise): expect steps several times as long.",
                error,
            )
            setup = setup._replace(engine="rowwise")
    if setup.engine == "rowwise":
        setup = setup._replace(microbatch_size=setup.plan.rows_clipped_together)
    return setup


def _compute(setup: Setup, rows: Rows, numbers: Sequence[int], count: int) -> None:
    """Computes the loss of single rows: those with the largest ids or labels, say.

    A row that only a step meets would end the run after it has been paid for. They are
    run `count` at a time.
    """
    run = _losses_of(setup)
    for begin in range(0, len(numbers), count):
        at = np.resize(numbers[begin : begin + count], count)
        run({**rows.take(at), "weights": np.ones(count, np.float32)})


def _losses_of(setup: Setup) -> Callable[[Mapping[str, np.ndarray]], tf.Tensor]:
    """Returns the loss as a compiled function of arrays."""
    of_caller = converted(setup.per_example_losses)

    @tf.function(autograph=False)
    def losses(tensors: Mapping[str, tf.Tensor]) -> tf.Tensor:
        with replayable(setup.layers, _key(), 0, 0):
            return of_caller(tensors)

    def run(batch: Mapping[str, np.ndarray]) -> tf.Tensor:
        with plain_errors():
            return losses({k: tf.convert_to_tensor(v) for k, v in batch.items()})

    return run


def computes_in_16_bits(layers: Iterable[tf.Module]) -> bool:
    """Returns whether any of the layers computes in float16 or bfloat16."""
    return any(
        layer.compute_dtype in ("float16", "bfloat16") for layer in flatten(layers)
    )
