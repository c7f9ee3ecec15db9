"""Trials of model and loss on a few rows, before a step is paid for.

Reports quote no value of a row, and nothing else is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.privacy import fast, replay
from tfdpsq.privacy.batches import content, padded_rows, rows_at_once
from tfdpsq.privacy.fast.capture import converted
from tfdpsq.privacy.independence import (
    Expected,
    check_independence,
    check_neighbours,
    computes_in_16_bits,
    finite_rows,
    require_nothing_kept,
    run_of,
)
from tfdpsq.privacy.loop import Take, unquoted_values
from tfdpsq.privacy.step import Setup, make_microbatch_sum

# Rows on which rules and independence are tried, and how often others are looked for
# where losses are not finite.
_TRIED = 4
_LOOKS = 8
_NOT_TAKEN = (
    "the rows tried before the first step could not be taken",
    "Nothing was spent. Check take.",
)
# Rows at most of the microbatch of which some are left out.
_NEIGHBOURS = 256


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of the data that no draw decides, for trials.

    Attributes:
      take: as for `train`.
      count: how many there are.
      together: rows that are clipped together in groups, else 1.
      numbers: those of the rows, ascending; `None` if they are 0, 1, 2, …
    """

    take: Take
    count: int
    together: int
    numbers: np.ndarray | None = None

    @unquoted_values(*_NOT_TAKEN)
    def few(self, look: int = 0, wanted: int = 0) -> dict[str, np.ndarray]:
        """Takes a few rows, with their "weights".

        Two groups of them where rows are clipped together in groups; or as many as are
        `wanted`, if there are. `look` after the first they are others.

        Raises:
          InputError: `take` has no such rows, or returns no array of them.
        """
        at = self.first_numbers(look, wanted)
        try:
            found = self.take(at)
            _require_named(found)
            batch = _copied(found)
        except IndexError:
            # Numpy's own message has the number of rows, which may be private.
            raise validation.InputError(
                f"take has no row {at.max()}. "
                + (
                    "Pass units, the number of units that the data have."
                    if self.numbers is None
                    else "Give groups of the rows that the data have."
                )
            ) from None
        for name, values in batch.items():
            if values.ndim == 0 or len(values) != len(at):
                rows = len(values) if values.ndim else "no"
                raise validation.InputError(
                    f"take returned {rows} rows of {name!r} for {len(at)} row "
                    "numbers; it must return one row for each."
                )
            if values.dtype == object:
                raise validation.InputError(
                    f"take returned {name!r} as Python objects. Give arrays of "
                    "numbers, of bytes or of booleans, all rows of one shape."
                )
        batch["weights"] = np.ones(len(at), np.float32)
        return batch

    def first_numbers(self, look: int = 0, wanted: int = 0) -> np.ndarray:
        """Returns the row numbers that `few` takes, ascending."""
        if self.together == 1:
            tried = min(wanted or _TRIED, self.count)
        else:
            tried = wanted or 2 * self.together
        # Spread, as neighbours are often similar; the last one, as it may not exist.
        at = np.linspace(0, self.count - 1, tried).astype(np.int64)
        at = (at + look) % self.count
        at = np.unique(at) if self.together == 1 else at
        return at if self.numbers is None else self.numbers[at]


def try_setup(
    setup: Setup,
    rows: Rows,
    batch: dict[str, np.ndarray],
    declared: bool,
    repeats: bool,
    also_tried: Sequence[int] = (),
) -> replay.Traced:
    """Tries whether the noise covers what a row changes, before a step is paid for.

    Where rows are `declared` to depend on each other, independence is not tried, but
    engine "fast" must find every loss on copies of its own. `repeats` says whether a
    killed run repeats steps. Of the rows numbered `also_tried` the loss is computed,
    too. Nothing of `setup` is changed.

    Returns:
      What the loss computes.

    Raises:
      InputError: functions that run eagerly, rows that change, a loss that writes a
        state, or draws numbers that cannot be repeated or that rows share; what
        `check_independence`, `check_neighbours` and `fast.check` raise; hardly a row
        with a finite loss; a value that the model refuses.
    """
    if tf.config.functions_run_eagerly():
        raise validation.InputError(
            "tf.config.run_functions_eagerly(True) is set: Python code of layers would "
            "see rows, and could keep them. Set it to False; to look into a layer call "
            "the model on public rows."
        )
    if repeats:
        require_same_rows(batch, rows.few())
    require_own_rows(rows)
    losses, variables, layers, optimizer, microbatch_size, coupled = setup
    # First of all, and whatever is declared: nothing runs, so nothing is kept.
    size = padded_rows(optimizer.plan, 1, microbatch_size, True) if coupled else None
    traced = replay.traced(losses, batch, layers, variables, size)
    require_nothing_kept(traced.nodes)
    replay.require_repeatable(traced.nodes)
    if not coupled and not declared:
        replay.require_seeds_draw(traced.function.graph)
        replay.require_secret_seeds(traced.function.graph)
    if traced.draws and not coupled and not declared:
        replay.require_draws_of_rows(losses, batch, layers, rows.together)
    # Coupled rows are differentiated without an engine, and their bound needs nothing
    # of the loss.
    if rows.count > 1 and not coupled:
        _try_rows(setup, rows, batch, declared, bool(traced.draws))
        _try_values(setup, rows, also_tried, len(batch["weights"]))
    return traced


@unquoted_values(
    "rows with the smallest or largest values could not be computed",
    "Nothing was spent. Check all rows.",
)
def _try_values(setup: Setup, rows: Rows, numbers: Sequence[int], at_once: int) -> None:
    """Computes the loss of rows, a few at a time; an error names the value refused.

    A row that is met by a step only would end the run after it has been paid for.
    """
    run = run_of(setup.per_example_losses, setup.layers)
    for begin in range(0, len(numbers), at_once):
        at = np.resize(numbers[begin : begin + at_once], at_once)
        batch = _copied(rows.take(at))
        finite_rows(run, {**batch, "weights": np.ones(len(at), np.float32)})


@unquoted_values(
    "the rows tried before the first step could not be computed",
    "Nothing was spent. Check all rows.",
)
def _try_rows(
    setup: Setup,
    rows: Rows,
    batch: dict[str, np.ndarray],
    declared: bool,
    draws: bool,
) -> None:
    """Tries whether rows are clipped one by one, as the noise presumes."""
    run = run_of(setup.per_example_losses, setup.layers)
    tried = _finite_rows(run, batch, rows)
    if not declared:
        check_independence(run, tried, setup.layers, rows.together)
    if draws and not declared:
        replay.require_own_draws(
            setup.per_example_losses,
            tried,
            setup.layers,
            rows.together,
            0.05 if computes_in_16_bits(setup.layers) else 1e-4,
        )
    _try_rules(setup, tried, rows.together)
    _leave_rows_out(setup, rows, declared, draws)


@unquoted_values(
    *_NOT_TAKEN,
)
def require_own_rows(rows: Rows) -> None:
    """Refuses rows that are others in the company of other rows.

    A row that `take` normalises by those taken with it is clipped with what they say.
    And `take` gets numbers in any order, 0 again and again for padding: one that sorts
    them puts row 0, drawn or not, in the places of those that were drawn. So a few rows
    are taken in falling order, the smallest twice, and each by itself. Rows that are
    drawn at random, or that follow from those taken before, could not be compared.
    """
    at = np.unique(rows.first_numbers())[-_TRIED:]
    whole, again = _copied(rows.take(at)), rows.take(at)
    for name, values in whole.items():
        if not _alike(values, again.get(name)):
            raise validation.InputError(
                f"take returned another {name!r} for the same row numbers the second "
                "time. Drawn at random, or from a statistic that goes on, rows could "
                "follow from each other, and clipping by row would bound nothing. Let "
                "rows follow from their numbers alone, and draw at random in Keras's "
                "layers."
            )
    places = [np.append(np.arange(len(at))[::-1], 0)]
    places += [np.array([place]) for place in range(len(at))]
    for own in places:
        found = rows.take(at[own])
        for name, values in whole.items():
            if not _alike(values[own], found.get(name)):
                raise validation.InputError(
                    f"take returned another {name!r} for the same rows among other "
                    "rows, or not in the order of their numbers, which come in any "
                    "order, some of them repeated. So one row, drawn or not, changes "
                    "what others contribute, and clipping by row bounds nothing. "
                    "Common causes are a statistic of the rows taken (their mean, "
                    "their longest text) and sorted row numbers. Return each row as "
                    "it is by itself, padded to a fixed length, in the order of the "
                    "numbers."
                )


def _require_named(found: Any) -> None:
    """Refuses what is not a mapping from names to rows.

    Raises:
      InputError: says what it is, or which name is taken.
    """
    if (
        not isinstance(found, Mapping)
        or not found
        or not all(isinstance(name, str) for name in found)
    ):
        raise validation.InputError(
            f"take returned {type(found).__name__} without named rows. Return a dict "
            "of arrays by name, with one row for each row number."
        )
    if "weights" in found:
        raise validation.InputError(
            "take returned 'weights', the name of what tells real rows from padding. "
            "Give yours another name."
        )


def _copied(rows: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Copies rows, as `take` may fill the same arrays each time."""
    return {name: np.array(values) for name, values in rows.items()}


def _alike(one: Any, other: Any) -> bool:
    """Returns whether rows agree in shape and type, and within rounding in values."""
    one, other = np.asarray(one), np.asarray(other)
    texts = one.dtype.kind in "SU"  # as wide as the longest of them
    same = one.dtype.kind == other.dtype.kind if texts else one.dtype == other.dtype
    if one.shape != other.shape or not same:
        return False
    if one.dtype.kind != "f" and one.dtype != tf.bfloat16.as_numpy_dtype:
        return bool((one == other).all())
    # What a model computes in `take` may differ by the size of its batch. By column:
    # a large one, such as a time, would hide what changes in the others.
    one, other = (part.astype(np.float64) for part in (one, other))
    size = np.max(np.abs(one), axis=0, initial=0.0, where=np.isfinite(one))
    least = 1e-6 * min(1.0, np.max(size, initial=0.0))
    with np.errstate(invalid="ignore"):
        close = np.abs(one - other) <= 1e-3 * size + least + 1e-3 * np.abs(other)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    return bool((same | (close & np.isfinite(one) & np.isfinite(other))).all())


def _head(values: Any) -> np.ndarray:
    """Returns no rows, of the shape and type of those given."""
    array = np.asarray(values)
    return array[:0] if array.ndim else array


def of_one_shape(take: Take, tried: Mapping[str, np.ndarray]) -> Take:
    """Returns `take`, which refuses rows of another shape or type than those tried.

    Rows as wide as the longest of a batch would tell each of them of the others.

    Raises:
      InputError: by what is returned, before the step is paid for.
    """

    def of(numbers: np.ndarray) -> Mapping[str, np.ndarray]:
        found = take(numbers)
        names = tried.keys() - {"weights"}
        for name in sorted({*found, *names}, key=str):
            there = name in found and name in names
            if not there or not _alike(_head(found[name]), _head(tried[name])):
                raise validation.InputError(
                    f"take returned {name!r} for some rows only, or in another shape "
                    "or type than for the rows tried before the first step, so one "
                    "row decides the shape of others. Give all rows the same fields, "
                    "padded to one fixed length. No step was paid for these rows."
                )
        return found

    return of


def require_same_rows(
    once: Mapping[str, np.ndarray], again: Mapping[str, np.ndarray]
) -> None:
    """Refuses rows that change when they are taken a second time."""
    for name, values in once.items():
        other = again.get(name)
        if other is None or content(values) != content(other):
            raise validation.InputError(
                f"take returned another {name!r} for the same row numbers the second "
                "time, which a killed run could not repeat: its noise would be used "
                "twice, on two different sums. Let rows follow from their numbers "
                "alone, and draw at random in Keras's layers."
            )


def _finite_rows(run: Any, batch: Any, rows: Rows) -> dict[str, np.ndarray]:
    """The rows of a batch, or others where a loss is not finite, which tells nothing.

    A row with a NaN is nothing that training minds: it contributes nothing.

    Raises:
      InputError: hardly any loss was finite.
    """
    wanted = len(batch["weights"])
    found: list[dict[str, np.ndarray]] = []
    for look in range(min(_LOOKS, rows.count)):
        batch = rows.few(look) if look else batch
        finite = np.flatnonzero(finite_rows(run, batch))
        if len(finite) == wanted:
            return batch
        found += [{name: v[i] for name, v in batch.items()} for i in finite]
        if len(found) >= wanted:
            break
    if len(found) < (2 if rows.together == 1 else wanted):
        raise validation.InputError(
            f"of all rows tried, {len(found)} had a finite loss: what the model makes "
            "of the data is NaN or infinite. Look for such values in inputs, targets "
            "and weights."
        )
    found = found[:wanted]
    return {name: np.stack([one[name] for one in found]) for name in batch}


def _try_rules(setup: Setup, batch: Any, together: int) -> None:
    """Tries the rules of engine "fast"; nothing of it leaves but an error."""
    if setup.optimizer.engine == "fast" and setup.layers:
        tensors = {name: tf.convert_to_tensor(value) for name, value in batch.items()}
        fast.check(
            setup.per_example_losses,
            setup.layers,
            setup.variables,
            tolerance=0.05 if computes_in_16_bits(setup.layers) else 1e-4,
            rows_per_unit=together,
            inputs=[tensors],
        )


def _leave_rows_out(setup: Setup, rows: Rows, declared: bool, draws: bool) -> None:
    """Tries whether one row moves the step's sums as the noise presumes.

    On a microbatch, as that many rows may read each other: of different rows, 256 at
    most, and padding.
    """
    losses, variables, layers, optimizer, microbatch_size, _ = setup
    plan = optimizer.plan
    together = plan.rows_clipped_together
    most = rows_at_once(plan, microbatch_size or plan.max_rows)
    batch = rows.few(wanted=max(1, min(most, _NEIGHBOURS) // together) * together)
    count = len(batch["weights"])
    size = most if microbatch_size else padded_rows(plan, count, None)
    for name, values in batch.items():
        batch[name] = np.resize(values, [size, *values.shape[1:]])
    batch["weights"][count:] = 0
    of_caller = converted(losses)
    norm = check_neighbours(
        make_microbatch_sum(
            of_caller, variables, optimizer, size, layers, not declared
        ),
        batch,
        Expected(
            plan.spec.clip_norm,
            plan.spec.sensitivity_multiplier,
            together,
            additive=not declared,
            # Sums were off by 2e-7, in bfloat16, too; GPUs may add up in any order.
            tolerance=2e-3 if computes_in_16_bits(layers) else 1e-3,
            draws=draws,
        ),
    )
    if not norm and not _is_reached(setup, batch):
        raise validation.InputError(
            f"the loss has no gradient in any of the {len(variables)} variables that "
            "are trained: every step would add noise alone. Nothing was spent. Compute "
            "the loss from the model's outputs, by operations that can be "
            "differentiated (argmax, rounding and comparisons cannot)."
        )


def _is_reached(setup: Setup, batch: Mapping[str, np.ndarray]) -> bool:
    """Returns whether the loss has a gradient in a variable; traces, and runs nothing.

    Gradients may be zero and grow, as where all weights begin at zero.
    """
    gradients: list[Any] = []

    def find(tensors: Mapping[str, tf.Tensor]) -> None:
        with replay.replayable(setup.layers, tf.constant([1, 2], tf.int64), 0, 0):
            with tf.GradientTape() as tape:
                found = setup.per_example_losses(tensors)
        gradients.extend(tape.gradient(found, list(setup.variables)))

    tensors = {name: tf.convert_to_tensor(values) for name, values in batch.items()}
    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync == 1:
        tf.function(find).get_concrete_function(tensors)
    else:  # whose variables are one to each replica
        on_all = tf.function(lambda given: strategy.run(find, args=(given,)))
        on_all.get_concrete_function(tensors)
    return any(gradient is not None for gradient in gradients)
