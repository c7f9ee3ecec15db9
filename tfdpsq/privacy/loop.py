"""The loop of a run: draw, pay, take, save, and end early if asked or diverged.

Order is what the guarantee rests on. A step's rows come from the plan's sampler alone;
the ledger holds its payment, synced to disk, before it runs; a state is saved after it.
A kill between any two of these loses work, never a payment.

Divergence: after every call of steps a run's weights are compared with infinity and
NaN. Where they are not finite any more the run is over, as no later step can mend them,
and the weights are set back to those of the last call after which all were finite.

Privacy: which step that is follows from the iterates alone, that is from what the
mechanism releases in each step. Choosing it, and giving out that step's weights, is
post-processing of the whole plan's output: imagine that the remaining steps are taken
and their output is thrown away. So the guarantee of the whole plan holds, and no
smaller one is claimed: that training ended at step k was decided by looking at noised
weights, which an ε of k steps does not cover. All steps of the plan are therefore paid
for in the ledger, taken or not, and the certificate counts what is paid. The same holds
where `on_step` stops a run.

Steps between the last saved state and that call are taken again, with their rows, noise
and dropout. They have to be the same steps, or the weights given out would be those of
a second try, and that the first diverged would say more of the same noise; so a step
that draws what cannot be repeated is refused (see `checks`). Two things are repeated
only up to rounding: sums that a GPU adds up in any order (until
`tf.config.experimental.enable_op_determinism`), and sums over another number of
replicas. Of a first try that a kill ended, nothing leaves the private directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from tfdpsq.privacy.plan import PrivacyPlan
from tfdpsq.privacy.proof.ledger import FILE_NAME as LEDGER
from tfdpsq.privacy.proof.ledger import Ledger
from tfdpsq.privacy.randomness.sampling import Sampler
from tfdpsq.privacy.step import CompiledSteps

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
_NO_MEMORY = (tf.errors.ResourceExhaustedError, MemoryError)
_BITS = {2: tf.int16, 4: tf.int32, 8: tf.int64}


class Preempted(Exception):
    """Asks for a run to end before its time, and tells that it did.

    Attributes:
      executed: logical steps executed. With a directory their state is saved, and
        the same call goes on from there.
    """

    def __init__(self, executed: int):
        """Takes how far the run came."""
        super().__init__(f"training was asked to end, after step {executed}")
        self.executed = executed


class Diverged(validation.InputError):
    """Training diverged; the variables hold weights from before it did.

    Attributes:
      paid: steps paid for: all of the plan.
      diverged_at: the step after which some weight was NaN or infinite.
      weights_of: the step whose weights the variables hold; all of them are finite.
    """

    def __init__(self, paid: int, diverged_at: int, weights_of: int):
        """Takes what was paid, and which steps."""
        super().__init__(
            f"training diverged: after step {diverged_at} the weights hold NaN or "
            f"infinity. Those kept are of step {weights_of}; {paid} steps are paid "
            "for. Lower the learning rate."
        )
        self.paid, self.diverged_at, self.weights_of = paid, diverged_at, weights_of


class Kept(NamedTuple):
    """A run's private directory, with its ledger and seeds."""

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
        """If `enforce` is False (ε = ∞), hooks may change anything."""
        self._optimizer, self._enforce = optimizer, enforce
        self._checksums = _checksums(variables)
        self._known: dict[str, Any] | None = None

    def forget(self) -> None:
        """Expects changes, by a step that was taken."""
        self._known = None

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
        before = self._known or self._state()
        yield
        self._known = self._state()
        for name, value in before.items():
            if self._known[name] != value:
                raise validation.InputError(
                    f"{name} changed {after}, set by on_step, before_step or a "
                    "callback, which may have seen losses of private rows, and ε does "
                    "not cover that. Do not release these weights; remove what sets it "
                    "(for a rate give a LearningRateSchedule), and run again: with a "
                    "directory, from its last saved state."
                )

    def _state(self) -> dict[str, Any]:
        found: dict[str, Any] = dict(optimizers.settings_of(self._optimizer))
        found["iterations"] = int(tf.convert_to_tensor(self._optimizer.iterations))
        found["a weight"] = [int(one) for one in self._checksums()]
        return found


def _checksums(variables: Sequence[tf.Variable]) -> Callable[[], list[tf.Tensor]]:
    """Returns a function that sums the bits of each variable, on its device."""

    @tf.function
    def sums() -> list[tf.Tensor]:
        found = []
        for variable in variables:
            value = tf.convert_to_tensor(variable)
            if value.dtype.is_floating:
                value = tf.bitcast(value, _BITS[value.dtype.size])
            found.append(tf.reduce_sum(tf.cast(value, tf.int64)))
        return found

    return sums


def _finite_check(variables: Sequence[tf.Variable]) -> Callable[[], tf.Tensor]:
    """Returns a function that says whether all values of the variables are finite."""

    @tf.function
    def all_finite() -> tf.Tensor:
        each = [tf.reduce_all(tf.math.is_finite(v)) for v in variables]
        return tf.reduce_all(tf.stack(each))

    return all_finite


def digest_of_weights(weights: Iterable[tf.Variable]) -> str:
    """Returns the SHA-256 of a model's weights, for its certificate."""
    digest = hashlib.sha256()
    for variable in weights:
        digest.update(content(np.asarray(tf.convert_to_tensor(variable))))
    return digest.hexdigest()


@dataclasses.dataclass
class Loop:
    """A run of a plan on this worker; see `train`.

    Attributes:
      state: all variables that a saved state restores, the trained ones first.
      sets_state: whether `before_step` sets some of them.
      kept: the chief's alone.
      tried: rows to rehearse a step with; `None` where nothing is kept, or spent.
    """

    plan: PrivacyPlan
    sampler: Sampler
    take: Take
    take_steps: CompiledSteps
    state: Sequence[tf.Variable]
    sets_state: bool
    before_step: Callable[[int], None] | None
    on_step: Callable[[int, float], bool | None] | None
    save_every: int
    steps_per_loop: int
    kept: Kept | None
    watch: Watch
    tried: Mapping[str, np.ndarray] | None

    def run(self, ends_if_diverged: bool) -> int:
        """Takes the plan's steps and returns how many are paid for.

        Raises:
          Preempted: asked to end before the last step.
          Diverged: weights were not finite, with `ends_if_diverged`.
        """
        is_finite = _finite_check(self.take_steps.variables)
        done = self._restored()
        if self.tried is not None:
            self._rehearse(self.tried)
        end, diverged_at = self.plan.spec.steps, 0  # both change if the run diverges
        while done < end:
            left = self.save_every - done % self.save_every  # no call goes past a save
            now = range(done, min(done + min(self.steps_per_loop, left), end))
            self._prepare(now, not diverged_at)
            losses = self._take(now)
            done = now.stop
            self.watch.forget()
            broken = ends_if_diverged and not diverged_at and not bool(is_finite())
            stop, asked = self._told(now, losses) if not diverged_at else (False, False)
            stop, asked, broken = workers.any_of(stop, asked, broken)
            if broken:
                # Back to the last saved state, then on to the last finite step.
                diverged_at, end = done, now.start
                self._pay(range(done, self.plan.spec.steps))
                done = self._restored()
                continue
            if done == end or stop or asked or done % self.save_every == 0:
                self._save(done)
            if stop:
                self._pay(range(done, self.plan.spec.steps))
                break
            if asked and done < end:
                raise Preempted(done)
        if diverged_at:
            raise Diverged(self.plan.spec.steps, diverged_at, done)
        return self.plan.spec.steps

    def _prepare(self, now: range, tells: bool) -> None:
        """Calls `before_step` for the steps of a call."""
        if self.before_step is None:
            return
        if self.sets_state:
            self.before_step(now.start)
            self.watch.forget()
        elif tells:
            with self.watch.unchanged(f"after step {now.start}"):
                for step in now:
                    self.before_step(step)

    def _told(self, now: range, losses: Sequence[float]) -> tuple[bool, bool]:
        """Calls `on_step`; returns whether it stops the run, or asks it to end."""
        stop = asked = False
        if self.on_step is not None:
            with self.watch.unchanged(f"after step {now.stop}"):
                for step, loss in zip(now, losses):
                    try:
                        stop |= self.on_step(step + 1, loss) is True
                    except Preempted:
                        asked = True
        return stop, asked

    def _pay(self, steps: range) -> None:
        if self.kept is not None:
            for number in steps:
                self.kept.ledger.pay(number)

    def _take(self, now: range) -> Sequence[float]:
        """Draws the rows of these steps, pays for the steps, and takes them."""
        draws = [self.sampler.draw(number) for number in now]
        named = f"step {now.stop}"
        if len(now) > 1:
            named = f"one of steps {now.start + 1} to {now.stop}, taken in one call,"
        with unquoted_values(
            f"the rows of {named} could not be taken",
            "Check take. Nothing was paid for these rows.",
        ):
            rows, private = self.take_steps.rows, self.plan.spec.private
            drawn = [batch_of(self.take, draw, rows, private) for draw in draws]
        workers.require_same_rows(drawn)
        self._pay(now)
        counts = [draw.count for draw in draws]
        spent = f"Count {now.stop} steps of this run as spent."
        with unquoted_values(
            f"{named} could not be computed",
            "Check all rows, and train in a new directory; do not release these "
            f"weights, as where training ended tells of the rows. {spent}",
            "Free some, or lower microbatch_size (now "
            f"{self.take_steps.microbatch_size}), and go on. {spent}",
        ):
            return self.take_steps(drawn, counts, now.start)

    def _rehearse(self, tried: Mapping[str, np.ndarray]) -> None:
        """Takes a step that does not count, before the first one is paid for.

        Too little memory is what most first steps fail for.
        """
        paid = 0 if self.kept is None else self.kept.ledger.steps_paid
        if workers.chiefs_number(paid):
            return
        try:
            with unquoted_values(
                "a step could not be tried", "Nothing was paid for these rows."
            ):
                self.take_steps.rehearse(tried)
        except BaseException:
            if not workers.several():  # others may still wait for the step's sums
                self._restored()
            raise
        self._restored()

    def _restored(self) -> int:
        """The step to go on from, with the state set to what it was before it."""
        start: int | None = 0
        if self.kept is not None:
            directory, ledger, _ = self.kept
            trained = self.take_steps.variables
            start = checkpoint.restore(
                directory, self.state, ledger.steps_paid, ledger.run
            )
            if start is None:
                if not bool(_finite_check(trained)()):
                    raise validation.InputError(
                        "the weights hold NaN or infinite values before the first "
                        "step. Start from others. Nothing was paid."
                    )
                # The beginning must be repeated, too: initial weights are random.
                self._save(0)
            elif start:
                logging.info("going on after step %d", start)
        workers.copy_from_chief(self.state)
        self.watch.forget()
        return workers.chiefs_number(start or 0)

    def _save(self, done: int) -> None:
        if self.kept is not None:
            directory, ledger, _ = self.kept
            checkpoint.save(directory, done, self.state, ledger.run)


@contextlib.contextmanager
def unquoted_values(
    problem: str, remedy: str, memory: str | None = None
) -> Iterator[None]:
    """Drops the value of a row that TensorFlow quotes where an operation refuses it.

    Args:
      problem: what could not be done, and where.
      remedy: sentences that say what to do.
      memory: the remedy for too little memory; `None` names the usual one.

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
        memory = memory or f"Lower microbatch_size or batch_size. {remedy}"
        raise validation.InputError(
            f"{problem}: there was too little memory. {memory}"
        ) from None


@contextlib.contextmanager
def kept_in(
    directory: str | os.PathLike | None,
    plan: PrivacyPlan,
    data_fingerprint: str,
    settings: Mapping[str, str],
) -> Iterator[Kept | None]:
    """Opens the ledger and the seeds in a directory; gives `None` without one.

    Until a step is paid for, both are made again each time, the ledger first, and the
    seeds name it. So a ledger's head and its seeds belong to one run.
    """
    if directory is None:
        yield None
        return
    os.makedirs(directory, mode=0o700, exist_ok=True)
    # Without a guarantee nothing is spent: a finished run may simply be done again.
    repeats = not plan.spec.private and not checkpoint.is_open(directory)
    ledger = Ledger(
        os.path.join(directory, LEDGER),
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
