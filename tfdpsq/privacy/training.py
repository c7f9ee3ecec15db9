"""Training: the call that runs a plan, to its end or until it is asked to stop.

A step's rows come from the plan's sampler alone; the ledger holds its payment, synced
to disk, before it runs; a state is saved after it. A kill between any two of these
loses work, never a payment.

*Divergence.* Once a weight is NaN or infinite no later step can mend it: the run ends,
and the weights are set back to those of the last step after which all were finite.
Which step that is follows from what the mechanism releases, so giving out its weights
is post-processing of the whole plan's output (imagine the remaining steps taken and
thrown away). An ε of fewer steps would not cover that choice. So all steps of the plan
are paid for in the ledger, taken or not, and likewise where `on_step` stops a run.

*Repeated steps.* From the last saved state on, steps are taken again with their rows,
noise and dropout: two different clipped sums under one noise would reveal their
difference. So draws that cannot be repeated are refused (see `checks`). Sums are
repeated up to rounding alone where a GPU adds in any order (until
`tf.config.experimental.enable_op_determinism`) or the number of replicas changed; of
the first try nothing leaves the private directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import numbers
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging

import tfdpsq
from tfdpsq import validation
from tfdpsq.keras_choice import keras2 as keras
from tfdpsq.privacy import checkpoint, checks, optimizers, workers
from tfdpsq.privacy.batches import (
    Take,
    batch_of,
    digest_of,
    require_same_rows,
    unquoted_values,
)
from tfdpsq.privacy.engines import Batch, Engine
from tfdpsq.privacy.fast.engine import converted
from tfdpsq.privacy.keys import RunKey
from tfdpsq.privacy.plan import PrivacyPlan
from tfdpsq.privacy.proof.ledger import FILE_NAME as LEDGER
from tfdpsq.privacy.proof.ledger import Ledger
from tfdpsq.privacy.randomness.noise import SCHEME
from tfdpsq.privacy.randomness.sampling import Groups, Sampler
from tfdpsq.privacy.step import CompiledStep, Setup

# TensorFlow read it when it was imported.
LOG_LEVEL = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "0")
_BITS = {2: tf.int16, 4: tf.int32, 8: tf.int64}


class Preempted(Exception):
    """Training ended early after `executed` steps; the same call goes on from there."""

    def __init__(self, executed: int):
        """Takes the number of logical steps executed, whose state is saved."""
        super().__init__(f"training was asked to end, after step {executed}")
        self.executed = executed


class Diverged(validation.InputError):
    """Training diverged; the variables hold finite weights from before it did.

    Attributes:
      paid: steps paid for: all of the plan.
      diverged_at: the step after which some weight was NaN or infinite.
      weights_of: the step whose weights the variables hold.
    """

    def __init__(self, paid: int, diverged_at: int, weights_of: int):
        """Sets the attributes."""
        super().__init__(
            f"training diverged after step {diverged_at}. The weights kept are of step "
            f"{weights_of}; {paid} steps are paid for. Lower the learning rate."
        )
        self.paid, self.diverged_at, self.weights_of = paid, diverged_at, weights_of


def train(
    plan: PrivacyPlan,
    per_example_losses: Callable[[Batch], tf.Tensor],
    variables: Sequence[tf.Variable],
    optimizer: Any,
    take: Take,
    microbatch_size: int,
    layers: Iterable[tf.Module] = (),
    engine: Engine = "fast",
    units: int | Groups | None = None,
    directory: str | os.PathLike | None = None,
    data_fingerprint: str = "",
    save_every: int = 50,
    jit_compile: bool = False,
    seed: int | None = None,
    before_step: Callable[[int], None] | None = None,
    on_step: Callable[[int, float], bool | None] | None = None,
    state: Sequence[tf.Variable] = (),
    also_tried: Sequence[int] = (),
    facts: dict[str, Any] | None = None,
) -> int:
    """Runs every step of `plan`.

    With a `directory` a killed run, started again with the same arguments, ends with
    the same weights and pays for no step twice.

    Under a distribution strategy each replica takes its share of a logical batch, and
    noise is added once; a run may go on with other replicas. Several workers all make
    the same call; see `workers`. Dropout of `layers` draws from secret keys (see
    `replay`); where ε is finite a loss that draws otherwise is refused.

    Args:
      plan: sampler, noise scale, number of steps.
      per_example_losses: maps a batch to one loss per row; see `make_logical_step`.
      variables: what is trained.
      optimizer: a new Keras optimizer.
      take: maps row numbers [rows] int64, in any order and repeated, to a dict of
        arrays with `rows` leading rows. A row and its shape must follow from its number
        alone.
      microbatch_size: rows differentiated at a time on one replica; with the spec's
        num_microbatches, a multiple of a dealt microbatch. An engine of your own gets
        whole batches, padded to a multiple of it.
      layers: the model, or the layers that hold `variables`.
      engine: see `engines`. Where "fast" has no rule for a layer, "rowwise" takes its
        place, with a warning.
      units: how many units the data have, `None` for the spec's n; for unit "user",
        which rows are whose.
      directory: private, for seeds, states and ledger (see `checkpoint`). A run refuses
        to go on with other frozen weights or another configuration of `layers`; the
        loss's code is not compared.
      data_fingerprint: any text that identifies the data, needed with `directory`.
      save_every: steps between two saved states; what is lost by a kill is redone.
      jit_compile: compile the step with XLA.
      seed: of the run's `RunKey`, secret. Only tests fix it, without a `directory`.
      before_step: called before each step with the number of steps executed. It may set
        the variables of `state`, such as negatives from public documents, and is then
        also called with 0 before anything is tried or restored. It must use nothing of
        the private rows but the weights: then it is post-processing.
      on_step: called after each step with the number of steps executed and the mean
        loss, a private measurement. If it returns `True`, training ends and the whole
        plan is paid for; if it raises `Preempted`, on any worker, the state is saved
        and the run ends for now. Where ε is finite, hooks may change no weight and no
        setting of the optimizer.
      state: variables that `before_step` sets, kept and restored with the weights.
      also_tried: numbers of rows to evaluate before step 0, so that bad values, such as
        the largest ids, fail before anything is paid.
      facts: gets the "engine" that runs.

    Returns:
      The number of logical steps paid for: all of the plan.

    Raises:
      Preempted: `on_step` raised it before the last step.
      Diverged: weights were not finite, and there is a `directory`.
      InputError: before a step is paid for: an optimizer that has taken steps, or has
        no finite rate; rows, loss or model that `checks` refuses; other data, settings
        or plan than the directory's; a damaged ledger or state; too little memory.
    """
    if directory is not None:
        directory = checkpoint.run_directory(directory)
    private, layers, variables = plan.spec.private, list(layers), list(variables)
    if private and LOG_LEVEL not in ("2", "3"):
        warning = (
            "TF_CPP_MIN_LOG_LEVEL is %s, so an operation that fails may log private "
            "rows. Set it to 2 before TensorFlow is imported."
        )
        logging.log_first_n(logging.WARNING, warning, 1, LOG_LEVEL)
    at_once = validation.positive_integer("microbatch_size", microbatch_size)
    losses, at_once = converted(per_example_losses), min(at_once, plan.max_rows)
    setup = Setup(plan, losses, variables, layers, at_once, engine)
    validation.positive_integer("save_every", save_every)
    optimizers.require_new(optimizer, plan.spec.steps)
    if directory is not None and seed is not None:
        raise validation.InputError("directory keeps a seed of its own. Drop seed.")
    if not isinstance(units, (Groups, numbers.Integral, type(None))):
        raise validation.InputError(
            f"units is a {type(units).__name__}. Give a number, or Groups.of(labels)."
        )
    groups, count = (units, None) if isinstance(units, Groups) else (None, units)
    at = range(count or plan.spec.num_units) if groups is None else np.sort(groups.rows)
    rows = checks.Rows(take, at, also_tried)
    if state and before_step is not None:
        before_step(0)  # or what is tried would read what was never set
    read: list[tf.Module | tf.Variable] = [*layers]
    batch = rows.take_some(plan.rows_clipped_together)
    if private:
        setup, variables_read = checks.check_setup(setup, rows)
        read += variables_read
        take = checks.of_one_shape(take, batch)
    strategy = tf.distribute.get_strategy()
    tpu = isinstance(strategy, tf.distribute.TPUStrategy)
    # Several replicas compile, or not, as their strategy does.
    jit = jit_compile and strategy.num_replicas_in_sync == 1 and not tpu
    # With any other, a step that is repeated would be another step.
    settings = {
        "engine": setup.engine if isinstance(setup.engine, str) else "of the caller",
        "optimizer": type(optimizer).__name__,
        "the optimizer's settings": repr(optimizers.settings_of(optimizer)),
        "jit_compile": repr("by the TPU" if tpu else jit),
        "variables": repr([(v.shape.as_list(), v.dtype.name) for v in variables]),
        "random_numbers": SCHEME,
        "the version of tfdpsq": tfdpsq.__version__,
        "units": digest_of([groups.rows, groups.offsets] if groups else [repr(count)]),
    }
    if facts is not None:
        facts["engine"] = settings["engine"]
    if directory is not None:
        settings["the model's configuration"] = _configuration(layers)
        # A step that is repeated reads them, too.
        settings["frozen weights"] = digest_of(_held(read, [*variables, *state]))
    settled = digest_of([plan.fingerprint, repr(settings)])
    workers.require_same(settled.encode(), "the plan, the model or the settings")
    kept = None
    with contextlib.ExitStack() as stack:
        if directory is not None and workers.is_chief():
            kept = _open_kept(stack, directory, plan, data_fingerprint, settings)
        if private and seed is not None:
            logging.warning("epsilon does not hold against anyone who guesses seed")
        key = RunKey(plan, kept.secrets.seed if kept is not None else seed)
        if private:  # `tf.py_function` hides draws from `checks`
            tf.random.set_seed(key.process)
        slots = optimizers.build(optimizer, variables)
        take_step = CompiledStep(setup, optimizer, key, jit or None, batch)
        restored = [*variables, *slots, *state]
        # The step's own are a schedule's, too.
        watched = _held([*read, *restored, *take_step.read])
        run = _Run(
            plan,
            plan.sampler(count, key.sampler, groups),
            take,
            take_step,
            restored,
            bool(state),
            before_step,
            on_step,
            save_every,
            kept,
            Watch(optimizer, watched, private),
        )
        return run.execute(batch, directory is not None)


# -- The loop -------------------------------------------------------------------------


class Kept(NamedTuple):
    """A run's private directory, with its ledger and seeds."""

    directory: str
    ledger: Ledger
    secrets: checkpoint.Secrets


def _open_kept(
    stack: contextlib.ExitStack,
    directory: str,
    plan: PrivacyPlan,
    data_fingerprint: str,
    settings: Mapping[str, str],
) -> Kept:
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
    stack.enter_context(ledger)
    secrets = checkpoint.open_secrets(
        directory, ledger.run, ledger.steps_paid, settings, plan.spec.secure
    )
    return Kept(directory, ledger, secrets)


class Watch:
    """A check that hooks change nothing that later steps depend on.

    They get losses of private rows without noise: weights or rates set by these would
    tell of the rows beyond ε, and a killed run could not repeat its steps.
    """

    def __init__(
        self, optimizer: Any, variables: Sequence[tf.Variable], enforce: bool = True
    ):
        """If `enforce` is False (ε = ∞), hooks may change anything."""
        self._optimizer, self._enforce = optimizer, enforce
        self._checksums = tf.function(lambda: [_sum_of_bits(v) for v in variables])

    @contextlib.contextmanager
    def unchanged(self, after: str) -> Iterator[None]:
        """Raises an InputError if the block changes a weight or the optimizer."""
        before = self._state() if self._enforce else {}
        yield
        now = self._state() if self._enforce else {}
        for name, value in before.items():
            if now[name] != value:
                raise validation.InputError(
                    f"{name} changed {after}, by a hook or callback, which ε does not "
                    "cover. Do not release these weights; remove what sets it (for a "
                    "rate give a LearningRateSchedule), and run again."
                )

    def _state(self) -> dict[str, Any]:
        iterations = int(tf.convert_to_tensor(self._optimizer.iterations))
        sums = [int(one) for one in self._checksums()]
        settings = optimizers.settings_of(self._optimizer)
        return {**settings, "iterations": iterations, "a weight": sums}


def _sum_of_bits(variable: tf.Variable) -> tf.Tensor:
    value = tf.convert_to_tensor(variable)
    if value.dtype.is_floating:
        value = tf.bitcast(value, _BITS[value.dtype.size])
    return tf.reduce_sum(tf.cast(value, tf.int64))


@dataclasses.dataclass
class _Run:
    """A run of a plan on this worker; see `train`."""

    plan: PrivacyPlan
    sampler: Sampler
    take: Take
    take_step: CompiledStep
    state: Sequence[tf.Variable]  # what is saved and restored
    sets_state: bool  # `before_step` does
    before_step: Callable[[int], None] | None
    on_step: Callable[[int, float], bool | None] | None
    save_every: int
    kept: Kept | None  # the chief's alone
    watch: Watch

    def execute(self, tried: Mapping[str, np.ndarray], kept: bool) -> int:
        """Takes the plan's steps; returns how many are paid for.

        Rows `tried` rehearse a step. `kept`: whether the chief has a directory.
        """
        steps, done = self.plan.spec.steps, self._restored()
        if kept and self.plan.spec.private:
            self._rehearse(tried)
        end, diverged_at = steps, 0  # both change if the run diverges
        while done < end:
            self._prepare(done, bool(diverged_at))
            loss = self._take(done)
            done += 1
            broken = kept and not diverged_at and not self.take_step.weights_finite()
            stop, asked = (False, False) if diverged_at else self._told(done, loss)
            stop, asked, broken = workers.any_of(stop, asked, broken)
            if broken:
                # Back to the last saved state, then on to the last finite step.
                diverged_at, end = done, done - 1
                self._pay(range(done, steps))
                done = self._restored()
                continue
            if done == end or stop or asked or done % self.save_every == 0:
                self._save(done)
            if stop:
                self._pay(range(done, steps))
                break
            if asked and done < end:
                raise Preempted(done)
        if diverged_at:
            raise Diverged(steps, diverged_at, done)
        return steps

    def _prepare(self, done: int, repeats: bool) -> None:
        """Calls `before_step`; for a step that is repeated, to set its state alone."""
        if self.before_step is None:
            return
        if self.sets_state:
            self.before_step(done)
        elif not repeats:
            with self.watch.unchanged(f"after step {done}"):
                self.before_step(done)

    def _told(self, done: int, loss: float) -> tuple[bool, bool]:
        """Calls `on_step`; returns whether it stops the run, or asks it to end."""
        if self.on_step is None:
            return False, False
        with self.watch.unchanged(f"after step {done}"):
            try:
                return self.on_step(done, loss) is True, False
            except Preempted:
                return False, True

    def _pay(self, steps: range) -> None:
        if self.kept is not None:
            for number in steps:
                self.kept.ledger.pay(number)

    def _take(self, number: int) -> float:
        """Draws the rows of a step, pays for it, and takes it; returns its loss."""
        draw, named = self.sampler.draw(number), f"step {number + 1}"
        with unquoted_values(
            f"the rows of {named} could not be taken",
            "Check take. Nothing was paid for these rows.",
        ):
            rows, private = self.take_step.rows, self.plan.spec.private
            batch = batch_of(self.take, draw, rows, private)
        require_same_rows(batch)
        self._pay(range(number, number + 1))
        spent = f"Count {number + 1} steps of this run as spent."
        with unquoted_values(
            f"{named} could not be computed",
            "Check all rows, and train in a new directory; do not release these "
            f"weights, as where training ended tells of the rows. {spent}",
            f"Free some, or lower microbatch_size, and go on. {spent}",
        ):
            return self.take_step(batch, draw.count, number)

    def _rehearse(self, tried: Mapping[str, np.ndarray]) -> None:
        """Takes a step before the first is paid for, which finds too little memory."""
        paid = 0 if self.kept is None else self.kept.ledger.steps_paid
        if workers.chiefs_number(paid):
            return
        try:
            with unquoted_values(
                "a step could not be tried", "Nothing was paid for these rows."
            ):
                self.take_step.rehearse(tried)
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
            start = checkpoint.restore(
                directory, self.state, ledger.steps_paid, ledger.run
            )
            if start is None:
                # The beginning must be repeated, too: initial weights are random.
                self._save(0)
            elif start:
                logging.info("going on after step %d", start)
        workers.copy_from_chief(self.state)
        return workers.chiefs_number(start or 0)

    def _save(self, done: int) -> None:
        if self.kept is not None:
            directory, ledger, _ = self.kept
            checkpoint.save(directory, done, self.state, ledger.run)


def digest_of_weights(weights: Iterable[tf.Variable]) -> str:
    """Returns the SHA-256 of a model's weights, for its certificate."""
    return digest_of(map(tf.convert_to_tensor, weights))


def _held(roots: Iterable[Any], apart: Iterable[Any] = ()) -> list[tf.Variable]:
    """Returns variables of modules, but for metrics', and single ones, each once."""
    modules = _modules_of(roots)
    metrics = [m for m in modules if isinstance(m, keras.metrics.Metric)]
    skipped = {id(v) for metric in metrics for v in metric.variables}
    named = [v for m in modules for v in m.variables if id(v) not in skipped]
    # A trace finds a variable's copies on the replicas.
    copies = tf.distribute.get_strategy().experimental_local_results
    seen = {id(copy) for variable in apart for copy in copies(variable)}
    found = []
    for variable in [*named, *(v for v in roots if not isinstance(v, tf.Module))]:
        if id(copies(variable)[0]) not in seen:
            seen.update(map(id, copies(variable)))
            found.append(variable)
    return found


def _configuration(layers: Iterable[Any]) -> str:
    """A digest of the layers' configurations, but for Keras's numbers in names."""
    found = []
    for module in _modules_of(layers):
        config: Any = {}
        if isinstance(module, keras.layers.Layer):
            with contextlib.suppress(NotImplementedError), warnings.catch_warnings():
                # keras-nlp's layers hold functions as initializers: Keras warns.
                warnings.simplefilter("ignore", UserWarning)
                config = module.get_config()  # without it, its layers have theirs
        found.append([type(module).__qualname__, config])
    text = json.dumps(found, sort_keys=True, default=lambda v: type(v).__qualname__)
    return digest_of([re.sub(r'_[0-9]+(?=["_])', "", text)])


def _modules_of(roots: Iterable[Any]) -> list[tf.Module]:
    held = [root for root in roots if isinstance(root, tf.Module)]
    return [module for root in held for module in (root, *root.submodules)]
