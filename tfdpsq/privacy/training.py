"""Training: the call that runs a plan, with its sampler, its noise, its step count.

The loop is given the data as a function from row numbers to arrays, so that it
alone decides which rows a step sees. It pays for every step in the ledger before
taking it, and reports how many steps are paid for, which is what the certificate
is computed from.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

import tfdpsq
from tfdpsq import validation
from tfdpsq.keras_choice import keras2 as keras
from tfdpsq.privacy import checkpoint, checks, fast, optimizers, workers
from tfdpsq.privacy.batches import content
from tfdpsq.privacy.engines import Batch, Engine, require_engine
from tfdpsq.privacy.environment import warning_of_logs
from tfdpsq.privacy.keys import RunKey
from tfdpsq.privacy.loop import Loop, Take, Watch, kept_in
from tfdpsq.privacy.plan import PrivacyPlan
from tfdpsq.privacy.randomness.noise import SCHEME
from tfdpsq.privacy.randomness.sampling import Groups
from tfdpsq.privacy.step import CompiledSteps, Setup


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
    steps_per_loop: int = 1,
    jit_compile: bool = False,
    seed: int | None = None,
    before_step: Callable[[int], None] | None = None,
    on_step: Callable[[int, float], bool | None] | None = None,
    state: Sequence[tf.Variable] = (),
    also_tried: Sequence[int] = (),
) -> int:
    """Runs every step of `plan`.

    With a `directory` the run survives being killed at any point: started again
    with the same arguments it goes on to the same bytes as if it had not been, and
    pays for no step twice. Without one it lives in memory alone.

    Runs under the distribution strategy in whose scope it is called: each replica
    takes its share of a logical batch, and noise is added once. A run may go on with
    other replicas, to the same weights but for the order of floating-point sums. With
    several workers all make the same call; see `workers`.

    Dropout takes part in the mechanism: were its masks known, a row's gradient
    would depend on its place in the batch, and so on who else was drawn. Layers of
    `layers` draw from secret keys, and where ε is finite a loss that draws otherwise is
    refused (see `replay`). `tf.py_function` hides such draws, so the global TensorFlow
    seed is set to fresh secret entropy as well.

    Args:
      plan: sampler, noise scale, number of steps.
      per_example_losses: maps a batch to one loss per row; see `make_logical_step`.
      variables: what is trained.
      optimizer: a new Keras optimizer.
      take: maps row numbers [rows] int64 to a dict of arrays with `rows` leading
        rows, in that order, whatever it is; numbers may repeat. A row must follow from
        its number alone, and so must its shape: draw at random in Keras's layers.
      microbatch_size: rows differentiated at a time on one replica; with the spec's
        num_microbatches, a multiple of a dealt microbatch. An engine of your own gets
        whole batches, padded to a multiple of it.
      layers: the model, or the layers that hold `variables`.
      engine: how clipped sums are computed; see `engines`. Where "fast" has no rule for
        a layer, "rowwise" takes its place, with a warning.
      units: how many units the data have, `None` for the spec's n; for unit "user",
        which rows are whose.
      directory: where secrets, states and ledger are kept (see `checkpoint`); never
        one that is meant for release. A run refuses to go on with other frozen weights
        or another configuration of `layers`. The loss's code is not compared.
      data_fingerprint: any text that identifies the data, needed with `directory`; a
        run refuses to go on with other data.
      save_every: steps between two saved states; what is lost by a kill is redone.
      steps_per_loop: steps taken at once, and paid for before; none goes past a saved
        state. Hooks are called for all of them before and after.
      jit_compile: compile the step with XLA.
      seed: of the run's `RunKey`, secret; `None` takes fresh entropy. Only tests fix
        it, without a `directory`: that keeps a seed of its own.
      before_step: called before each step with the number of steps executed. With
        `state` it may set those variables: what the loss reads besides rows and
        weights, such as negatives from public documents. It must use nothing of the
        private rows but the weights, which are released anyway: then it is
        post-processing, and costs nothing. It is then also called with 0 before
        anything is tried or restored.
      on_step: called after each step with the number of steps executed and the
        mean loss, a private measurement wherever the data are private. If it returns
        `True`, training ends and the whole plan is paid for; if it raises `Preempted`,
        on any worker, the state is saved and the run ends for now. Where ε is finite,
        hooks may change no weight and no setting of the optimizer.
      state: variables that `before_step` sets, kept and restored with the weights.
      also_tried: numbers of rows whose loss is computed before the first step, so that
        bad values, such as the largest ids, fail before anything is paid.

    Returns:
      The number of logical steps paid for: all of the plan.

    Raises:
      Preempted: `on_step` raised it before the last step.
      Diverged: weights were not finite, and there is a `directory`; see `loop`.
      InputError: an optimizer that has taken steps, or has no finite rate; rows, loss
        or model that `checks` refuses; other data, settings or plan than the
        directory's; a damaged ledger or state; with `directory`, too little memory for
        a step. All before a step is paid for; and a later step that finds no memory,
        after it.
    """
    if directory is not None:
        directory = checkpoint.run_directory(directory)
    private, layers, variables = plan.spec.private, list(layers), list(variables)
    if private and (warning := warning_of_logs()):
        logging.log_first_n(logging.WARNING, "%s", 1, warning)
    for name, value in (
        ("microbatch_size", microbatch_size),
        ("save_every", save_every),
        ("steps_per_loop", steps_per_loop),
    ):
        validation.positive_integer(name, value)
    require_engine(engine)
    optimizers.require_new(optimizer, plan.spec.steps)
    fast.require_distinct(variables)
    if not variables:
        raise validation.InputError(
            "there are no variables to train. Build the model first, by calling it "
            "on a batch, and pass its trainable_variables."
        )
    if directory is not None and seed is not None:
        raise validation.InputError(
            "seed is given, and a directory, which keeps a secret one. Leave seed out."
        )
    if state and steps_per_loop != 1:
        raise validation.InputError(
            f"steps_per_loop is {steps_per_loop}, but before_step sets a state before "
            "every step. Set it to 1."
        )
    groups, count = (units, None) if isinstance(units, Groups) else (None, units)
    numbers: Sequence[int] | np.ndarray = range(count or plan.spec.num_units)
    if groups is not None:
        numbers = np.sort(groups.rows)
    rows = checks.Rows(take, numbers)
    if state and before_step is not None:
        before_step(0)  # or what is tried would read what was never set
    read: list[tf.Module | tf.Variable] = [*layers]
    batch = rows.take_some(plan.rows_clipped_together)
    setup = Setup(plan, per_example_losses, variables, layers, microbatch_size, engine)
    if private:
        setup, variables_read = checks.check_setup(setup, rows, also_tried)
        read += variables_read
        take = checks.of_one_shape(take, batch)
    strategy = tf.distribute.get_strategy()
    compiled = jit_compile and strategy.num_replicas_in_sync == 1
    if isinstance(strategy, tf.distribute.TPUStrategy):
        compiled = "by the TPU"
    # With any other, a step that is repeated would be another step.
    settings = {
        "engine": setup.engine if isinstance(setup.engine, str) else "of the caller",
        "optimizer": type(optimizer).__name__,
        "the optimizer's settings": repr(optimizers.settings_of(optimizer)),
        "jit_compile": repr(compiled),
        "variables": repr([(v.shape.as_list(), v.dtype.name) for v in variables]),
        "random_numbers": SCHEME,
        "the version of tfdpsq": tfdpsq.__version__,
        "units": _digest_of([groups.rows, groups.offsets] if groups else [repr(count)]),
    }
    if directory is not None:
        settings["the model's configuration"] = _configuration(layers)
        # A step that is repeated reads them, too.
        settings["frozen weights"] = _digest_of(_held(read, [*variables, *state]))
    settled = _digest_of([plan.fingerprint, repr(settings)])
    workers.require_same(settled.encode(), "the plan, the model or the settings")
    # Only the chief has a directory and pays.
    chiefs = directory if workers.is_chief() else None
    with kept_in(chiefs, plan, data_fingerprint, settings) as kept:
        if private and seed is not None:
            logging.warning(
                "seed was given: epsilon does not hold against anyone who guesses it. "
                "Give it in tests only."
            )
        key = RunKey(plan, kept.secrets.seed if kept is not None else seed)
        if private:
            tf.random.set_seed(key.process)
        slots = optimizers.build(optimizer, variables)
        take_steps = CompiledSteps(setup, optimizer, key, jit_compile)
        take_steps.build(batch)
        restored = [*variables, *slots, *state]
        # The step's own are a schedule's, too.
        watched = _held([*read, *restored, *take_steps.read])
        loop = Loop(
            plan,
            plan.sampler(count, key.sampler, groups),
            take,
            take_steps,
            restored,
            bool(state),
            before_step,
            on_step,
            save_every,
            steps_per_loop,
            kept,
            Watch(optimizer, watched, private),
            batch if private and directory is not None else None,
        )
        return loop.run(ends_if_diverged=directory is not None)


def _digest_of(values: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for value in values:
        digest.update(content(np.array(value)))
    return digest.hexdigest()


def _held(
    layers: Iterable[Any], apart: Sequence[tf.Variable] = ()
) -> list[tf.Variable]:
    """Returns the variables of layers, each once, without metrics' and those `apart`.

    `layers` may also hold single variables, which count in any case: a loss may read
    a metric.
    """
    modules = _modules_of(layers)
    single = [root for root in layers if not isinstance(root, tf.Module)]
    metrics = [m for m in modules if isinstance(m, keras.metrics.Metric)]
    named = {id(copy) for variable in single for copy in _copies(variable)}
    seen = {id(variable) for metric in metrics for variable in metric.variables} - named
    seen.update(id(copy) for variable in apart for copy in _copies(variable))
    found = []
    for variable in [*(v for module in modules for v in module.variables), *single]:
        if id(variable) not in seen:
            seen.update(map(id, _copies(variable)))
            found.append(variable)
    return found


def _configuration(layers: Any) -> str:
    """A digest of the layers' configurations, equal in every process that makes them.

    Names are left out, since Keras numbers them by process.
    """
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
    return _digest_of([re.sub(r'_[0-9]+(?=["_])', "", text)])


def _modules_of(layers: Any) -> list[tf.Module]:
    held = [root for root in layers if isinstance(root, tf.Module)]
    return [module for root in held for module in (root, *root.submodules)]


def _copies(variable: Any) -> tuple:
    """Returns a variable, and those of its replicas, which a trace finds by itself."""
    mirrored = isinstance(variable, tf.distribute.DistributedValues)
    return (variable, *(variable.values if mirrored else ()))
