"""The loop of a run: draw, pay, take, save, and end as asked or diverged.

Order is what the guarantee rests on. A step's rows come from the plan's sampler alone;
the ledger holds its payment, synced to disk, before it runs; a state is saved after it.
A kill between any two of these loses work, never a payment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging

from tfdpsq import validation
from tfdpsq.privacy import checkpoint, optimizers, workers
from tfdpsq.privacy.batches import batch_of, content
from tfdpsq.privacy.compiled import CompiledSteps
from tfdpsq.privacy.endings import Diverged, Preempted, finite_check
from tfdpsq.privacy.plan import PrivacyPlan
from tfdpsq.privacy.proof.ledger import FILE_NAME as LEDGER
from tfdpsq.privacy.proof.ledger import Ledger
from tfdpsq.privacy.randomness.sampling import Sampler

Take = Callable[[np.ndarray], Mapping[str, np.ndarray]]

# By operations that refuse a value or look it up, as a file's name, and by Python code
# of `tf.py_function`, of which an error of any kind may quote a row.
REFUSED_VALUES = (
    tf.errors.AlreadyExistsError,
    tf.errors.DataLossError,
    tf.errors.FailedPreconditionError,
    tf.errors.InvalidArgumentError,
    tf.errors.NotFoundError,
    tf.errors.OutOfRangeError,
    tf.errors.PermissionDeniedError,
    tf.errors.UnimplementedError,
    tf.errors.UnknownError,
)
# Of `tf.py_function`, too, whose message may quote a row.
_NO_MEMORY = (tf.errors.ResourceExhaustedError, MemoryError)


class Kept(NamedTuple):
    """A run's private directory, with the ledger and the seeds in it."""

    directory: str | os.PathLike
    ledger: Ledger
    secrets: checkpoint.Secrets


class Watch:
    """A check that hooks change nothing that later steps depend on.

    Callbacks and `on_step` get losses of private rows without noise. Were one of them
    to set a weight or the learning rate by these, the weights would tell of the rows
    beyond ε; and a killed run could not repeat its steps.
    """

    def __init__(
        self, optimizer: Any, variables: Sequence[tf.Variable], enforce: bool = True
    ):
        """Takes the optimizer, and all variables that a hook might set.

        If `enforce` is False (ε = ∞), hooks may change anything.
        """
        self._optimizer, self._enforce = optimizer, enforce
        self._checksums = _checksums(variables)

    @contextlib.contextmanager
    def unchanged(self, after: str) -> Iterator[None]:
        """Compares what the block left with what it found.

        Args:
          after: what was done before, for the error.

        Raises:
          InputError: the block changed a weight, or a setting of the optimizer.
        """
        if not self._enforce:
            yield
            return
        before = self._state()
        yield
        now = self._state()
        for name, value in before.items():
            if now[name] != value:
                raise validation.InputError(
                    f"{name} changed {after}, set by on_step, before_call or a "
                    "callback, which ε does not cover: who sets it may have seen "
                    "losses of private rows, and a killed run could not repeat it. Do "
                    "not release these weights. Remove what sets it (for a rate give a "
                    "keras.optimizers.schedules.LearningRateSchedule), and run again: "
                    "with a directory, from its last saved state."
                )

    def _state(self) -> dict[str, Any]:
        found: dict[str, Any] = dict(optimizers.settings_of(self._optimizer))
        found["iterations"] = int(tf.convert_to_tensor(self._optimizer.iterations))
        found["a weight"] = self._checksums()
        return found


def _checksums(variables: Sequence[tf.Variable]) -> Callable[[], list[int]]:
    """Returns a function that sums the bits of each variable, on its device."""

    @tf.function
    def sums() -> list[tf.Tensor]:
        found = []
        for variable in variables:
            value = tf.convert_to_tensor(variable)
            if value.dtype == tf.string:
                bits = tf.strings.to_hash_bucket_fast(value, 1 << 31)
            elif value.dtype == tf.bool:
                bits = tf.cast(value, tf.int64)
            else:
                bits = tf.bitcast(value, _BITS[value.dtype.size])
            found.append(tf.reduce_sum(tf.cast(bits, tf.int64)))
        return found

    return lambda: [int(one) for one in sums()]


_BITS = {1: tf.uint8, 2: tf.int16, 4: tf.int32, 8: tf.int64, 16: tf.int64}


def value_of(variable: tf.Variable) -> np.ndarray:
    """Returns a variable's value, also of one on several replicas."""
    return np.asarray(tf.convert_to_tensor(variable).numpy())


def digest_of_weights(weights: Iterable[tf.Variable]) -> str:
    """Returns the SHA-256 of a model's weights, for its certificate.

    A directory that was copied may be continued twice on other devices, with the same
    noise and other roundings. Certificates of both then differ by it, and their costs
    are not taken for those of one run.
    """
    digest = hashlib.sha256()
    for variable in weights:
        digest.update(content(value_of(variable)))
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class Pace:
    """Steps between two saved states, between two pauses, and in one compiled call."""

    save_every: int
    pause_every: int
    steps_per_loop: int

    def __post_init__(self) -> None:
        """Checks that all are positive."""
        for field in dataclasses.fields(self):
            validation.positive_integer(field.name, getattr(self, field.name))

    def after(self, done: int, end: int) -> range:
        """The steps of the next call: none of them goes past a save or a pause."""
        left = (every - done % every for every in (self.save_every, self.pause_every))
        return range(done, min(done + min(self.steps_per_loop, *left), end))


@dataclasses.dataclass(frozen=True)
class Hooks:
    """Functions that the loop calls; see `train`."""

    before_step: Callable[[int], None] | None
    before_call: Callable[[range], None] | None
    on_step: Callable[[int, float], bool | None] | None
    preempted: Callable[[], bool] | None

    def require_pace(self, pace: Pace) -> None:
        """Refuses several steps in one call if each has to be prepared."""
        if self.before_step is not None and pace.steps_per_loop != 1:
            raise validation.InputError(
                f"steps_per_loop is {pace.steps_per_loop}, but something has to be set "
                "before every step (before_step). Set it to 1."
            )


@dataclasses.dataclass
class Loop:
    """A run of a plan on this worker; `kept` is the chief's alone."""

    plan: PrivacyPlan
    sampler: Sampler
    take: Take
    take_steps: CompiledSteps
    state: Sequence[tf.Variable]
    pace: Pace
    hooks: Hooks
    kept: Kept | None
    watch: Watch
    # Takes a step that does not count; `None` where nothing is kept, or spent.
    rehearse: Callable[[], None] | None = None

    def run(self, ends_if_diverged: bool) -> int:
        """Takes the plan's steps and returns how many are paid for.

        Raises:
          Preempted: asked to end before the last step.
          Diverged: weights were not finite, with `ends_if_diverged`.
        """
        is_finite = finite_check(self.take_steps.variables)
        done = self._restored()
        if self.rehearse is not None:
            self._rehearsed(self.rehearse)
        stop, asked = False, False
        end, diverged_at = self.plan.spec.steps, 0  # both change if the run diverges
        while done < end and not (stop or asked):
            if self.hooks.before_step is not None:
                self.hooks.before_step(done)
            now = self.pace.after(done, end)
            if self.hooks.before_call is not None and not diverged_at:
                before = functools.partial(self.hooks.before_call, now)
                self._watched(before, done)
            losses = self._take(now)
            done = now.stop
            broken = ends_if_diverged and not diverged_at and not is_finite()
            if self.hooks.on_step is not None and not diverged_at:
                told = functools.partial(_told, self.hooks.on_step, now, losses)
                stop = self._watched(told, done)
            if (preempted := self.hooks.preempted) is not None:
                asked = self._watched(preempted, done)
            stop, asked, broken = workers.any_of(stop, asked, broken)
            if broken:
                # Back to the last saved state, then on to the last finite step.
                diverged_at, end, stop = done, now.start, False
                if self.kept is not None:
                    for number in range(done, self.plan.spec.steps):
                        self.kept.ledger.pay(number)  # see `endings`
                done = self._restored()
                continue
            due = done == end or stop or asked or done % self.pace.save_every == 0
            if self.kept is not None and due:
                self._save(self.kept, done)
        if asked and not stop and done < end:
            raise Preempted(done)
        if diverged_at:
            raise Diverged(self.plan.spec.steps, diverged_at, done)
        kept = self.kept
        # Steps beyond, lost to a kill and not repeated, are paid for as well.
        executed = done if kept is None else max(done, kept.ledger.steps_paid)
        return workers.chiefs_number(executed)

    def _watched(self, hooks: Callable[[], Any], done: int) -> bool:
        """Calls hooks, which may look at all and set nothing.

        Returns whether they ask the run to end.
        """
        with self.watch.unchanged(f"after step {done}"):
            return bool(hooks())

    def _take(self, now: range) -> Sequence[float]:
        """Draws the rows of these steps, pays for the steps, and takes them."""
        draws = [self.sampler.draw(number) for number in now]
        with unquoted_values(
            f"the rows of {_named(now)} could not be taken",
            "Check take. Nothing was paid for these rows.",
        ):
            drawn = [
                batch_of(
                    self.take,
                    draw,
                    self.take_steps.rows,
                    self.plan.spec.private,
                )
                for draw in draws
            ]
        noise = [self.take_steps.secure_noise(number) for number in now]
        workers.require_same_rows(drawn)
        if self.kept is not None:
            for number in now:
                self.kept.ledger.pay(number)
        counts = [draw.count for draw in draws]
        with unquoted_values(
            f"{_named(now)} could not be computed",
            "Check all rows, and train in a new directory; do not release these "
            f"weights, as where training ended tells of the rows. {_spent(now)}",
        ):
            try:
                losses = self.take_steps(drawn, counts, noise, now.start)
            except _NO_MEMORY:
                raise self._without_memory(now) from None
        return losses

    def _rehearsed(self, rehearse: Callable[[], None]) -> None:
        """Takes a step that does not count, before the first one is paid for.

        Too little memory is what most first steps fail for. Where the system ends the
        process for it, nothing was paid either, and `microbatch_size` can be lowered.

        Raises:
          InputError: the step found too little memory, or refused a value.
        """
        paid = 0 if self.kept is None else self.kept.ledger.steps_paid
        if workers.chiefs_number(paid):
            return
        try:
            with unquoted_values(
                "a step could not be tried", "Nothing was paid for these rows."
            ):
                rehearse()
        except BaseException:
            if not workers.several():  # others may still wait for the step's sums
                self._restored()
            raise
        self._restored()

    def _without_memory(self, now: range) -> validation.InputError:
        size = self.take_steps.microbatch_size
        given = f"microbatch_size (now {size})"
        return validation.InputError(
            f"{_named(now)} found too little memory. Set a smaller {given} in a new "
            "workdir or directory, or go on in this one where more memory is free. "
            + _spent(now)
        )

    def _restored(self) -> int:
        """The step to go on from, with the state set to what it was before it."""
        start = 0
        if self.kept is not None:
            start = self._restored_by_the_chief(self.kept)
        workers.copy_from_chief(self.state)
        return workers.chiefs_number(start)

    def _restored_by_the_chief(self, kept: Kept) -> int:
        ledger = kept.ledger
        trained = self.take_steps.variables  # the first of the state
        start = checkpoint.restore(
            kept.directory, self.state, ledger.steps_paid, ledger.run, len(trained)
        )
        if start is None:
            if not finite_check(trained)():
                raise validation.InputError(
                    "the weights hold NaN or infinite values before the first step. "
                    "Start from others. Nothing was paid."
                )
            # Also the beginning must be repeated exactly: initial weights are random.
            self._save(kept, 0)
            return 0
        if start:
            logging.info(
                "going on after step %d of %d (%d paid for)",
                start,
                ledger.steps_allowed,
                ledger.steps_paid,
            )
        return start

    def _save(self, kept: Kept, done: int) -> None:
        checkpoint.save(kept.directory, done, self.state, kept.ledger.run)


@contextlib.contextmanager
def unquoted_values(problem: str, remedy: str) -> Iterator[None]:
    """While inside, errors of operations come without the value that they refuse.

    TensorFlow's message quotes it, and it is a row's.

    Args:
      problem: what could not be done, and where.
      remedy: sentences that say what to do.

    Raises:
      InputError: an operation refused a value, or found too little memory.
      FailedPreconditionError: several workers train, and one may have restarted; the
        original message is dropped.
    """
    try:
        yield
    except REFUSED_VALUES as error:
        kind = tf.errors.FailedPreconditionError
        if isinstance(error, kind) and workers.several():
            raise kind(None, None, "a worker or an operation was not ready") from None
        raise validation.InputError(
            f"{problem} ({type(error).__name__}): an operation of the model refused a "
            "value of the rows, such as an id that an embedding does not have, or a "
            f"label beyond the number of classes. {remedy}"
        ) from None
    except _NO_MEMORY:
        raise validation.InputError(
            f"{problem}: there was too little memory. Free some, or take fewer rows at "
            f"a time, by a smaller microbatch_size or batch_size. {remedy}"
        ) from None


def _told(
    on_step: Callable[[int, float], bool | None], now: range, losses: Sequence[float]
) -> bool:
    """Tells `on_step` of the steps of a call; returns whether the run is to stop."""
    return any([on_step(at + 1, loss) is True for at, loss in zip(now, losses)])


def _named(now: range) -> str:
    """Names the steps of one call in a message, from 1."""
    if len(now) == 1:
        return f"step {now.stop}"
    return f"one of steps {now.start + 1} to {now.stop}, taken in one call,"


def _spent(now: range) -> str:
    """States what a run has spent at most whose call for these steps failed."""
    return (
        f"Count {now.stop} steps of this run as spent: the weights may be those after "
        f"any of steps {now.start} to {now.stop}."
    )


@contextlib.contextmanager
def kept_in(
    directory: str | os.PathLike | None,
    plan: PrivacyPlan,
    data_fingerprint: str,
    settings: Mapping[str, str],
) -> Iterator[Kept | None]:
    """Opens the ledger and the seeds in a directory; gives `None` without one.

    Until a step is paid for, both are made again each time, the ledger first, and the
    seeds name it. So a ledger's head and its seeds belong to one run, even if somebody
    copied the directory before, or puts seeds back that were kept elsewhere.

    Raises:
      InputError: they are of another plan, other data or settings, not of one run, or
        damaged.
    """
    if directory is None:
        yield None
        return
    # The ledger's size and times tell when steps were paid for.
    os.makedirs(directory, mode=0o700, exist_ok=True)
    path = os.path.join(directory, LEDGER)
    # Without a guarantee nothing is spent: a finished run may simply be done again.
    repeats = not plan.spec.private and not checkpoint.is_open(directory)
    ledger = Ledger(
        path,
        plan.fingerprint,
        data_fingerprint,
        plan.spec.steps,
        checkpoint.steps_taken(directory),
        repeats,
    )
    try:
        secrets = checkpoint.open_secrets(
            directory, ledger.run, ledger.steps_paid, settings, plan.spec.secure
        )
        yield Kept(directory, ledger, secrets)
    finally:
        ledger.close()
