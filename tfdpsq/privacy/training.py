"""The training loop that runs a plan: its sampler, its noise, its step count.

The loop is given the data as a function from row numbers to arrays, so that it
alone decides which rows a step sees. It pays for every step in the ledger before
taking it, and reports how many steps were executed, which is what the certificate
is computed from.
"""

from __future__ import annotations

import contextlib
import functools
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
from tfdpsq.privacy import coupled as coupled_rows
from tfdpsq.privacy.batches import content
from tfdpsq.privacy.compiled import CompiledSteps
from tfdpsq.privacy.engines import require_engine
from tfdpsq.privacy.environment import warning_of_logs
from tfdpsq.privacy.keys import RunKey
from tfdpsq.privacy.loop import Hooks, Kept, Loop, Pace, Take, Watch, kept_in
from tfdpsq.privacy.plan import PrivacyPlan
from tfdpsq.privacy.randomness.noise import SCHEME
from tfdpsq.privacy.randomness.sampling import Groups
from tfdpsq.privacy.step import Batch, Setup
from tfdpsq.privacy.terms import Losses


def train(
    plan: PrivacyPlan,
    per_example_losses: Callable[[Batch], Losses],
    variables: Sequence[tf.Variable],
    optimizer: Any,
    take: Take,
    microbatch_size: int,
    layers: Iterable[tf.Module] = (),
    engine: str = "fast",
    units: int | None = None,
    groups: Groups | None = None,
    directory: str | os.PathLike | None = None,
    data_fingerprint: str = "",
    save_every: int = 50,
    seed: int | None = None,
    on_step: Callable[[int, float], bool | None] | None = None,
    jit_compile: bool = False,
    before_step: Callable[[int], None] | None = None,
    state: Sequence[tf.Variable] = (),
    steps_per_loop: int = 1,
    preempted: Callable[[], bool] | None = None,
    pause_every: int | None = None,
    coupled: bool = False,
    before_call: Callable[[range], None] | None = None,
    also_tried: Sequence[int] = (),
) -> int:
    """Runs every step of `plan`.

    With a `directory` the run survives being killed at any point: started again
    with the same arguments it goes on to the same bytes as if it had not been, and
    pays for no step twice. Without one it lives in memory alone.

    Runs under the distribution strategy in whose scope it is called: each replica
    takes its share of a logical batch, and noise is added once. A run may go on under
    another strategy, with other replicas, to the same weights but for the order of
    floating-point sums. With several workers all make the same call, and the chief
    alone uses `directory`; see `workers`.

    Args:
      plan: sampler, noise scale, number of steps.
      per_example_losses: maps a batch to one loss per row; see
        `make_logical_step`.
      variables: what is trained.
      optimizer: a new Keras optimizer.
      take: maps row numbers [rows] int64 to a dict of arrays with `rows` leading
        rows, in that order, whatever it is; numbers may repeat. A row must not depend
        on the others taken with it, nor must its shape, and a number must always give
        the same row: draw at random in Keras's layers.
      microbatch_size: rows differentiated at a time on one replica. Where rows depend
        on those that they are clipped together with (the spec's clip_groups), a
        multiple of a group.
      layers: the model, or the layers that hold `variables`; engine "fast" needs
        them, and so does dropout that a resumed run repeats.
      engine: how clipped sums are computed; see `engines`. Where "fast" has no rule for
        a layer, "rowwise" takes its place, with a warning.
      units: how many units the data have; `None` takes the spec's n.
      groups: for unit "user", which rows are whose.
      directory: where secrets, states and ledger are kept (see `checkpoint`); never
        one that is meant for release. Weights of `layers` that are not trained are not
        kept: a run refuses to go on with others, or with layers that have another
        configuration. The loss's code is not compared.
      data_fingerprint: any text that identifies the data, needed with `directory`; a
        run refuses to go on with other data.
      save_every: steps between two saved states; what is lost by a kill is redone.
      seed: of the run's `RunKey`, secret; `None` takes fresh entropy. Only tests fix
        it, without a `directory`: that keeps a seed of its own.
      on_step: called after each step with the number of steps executed and the
        mean loss, a private measurement wherever the data are private. Training
        stops early if it returns `True`.
      jit_compile: compile the step with XLA.
      before_step: called before each step with the number of steps executed, once
        variables and `state` are what they are to be in it; and with 0 before anything
        is tried or restored. It may set what the loss reads besides rows and weights,
        such as negatives from public documents. It must use nothing of the private
        rows but the weights, which are released anyway: then it is post-processing,
        and costs nothing.
      state: variables that `before_step` sets, kept and restored with the weights.
      steps_per_loop: steps taken in one compiled call, paid for before it. What is
        called after a step is called for each of them when all are taken.
      preempted: asked after every call, on any worker, whether to end: the state is
        then saved, and `Preempted` raised.
      pause_every: steps between two that no loop goes past, besides those whose state
        is saved: what is called after such a step finds its weights.
      coupled: the loss returns `Coupled`: rows that read each other, clipped one by
        one. It decides itself how many rows it runs at a time; batches are padded to a
        multiple of `microbatch_size`, and every replica takes the whole batch.
      before_call: called before each compiled call with the numbers of its steps, from
        0. Where ε is finite neither it nor `on_step` may change a weight or a setting
        of the optimizer: they may have seen losses.
      also_tried: numbers of rows whose loss is computed once before the first step, as
        it must be possible of all: those with the largest ids or labels, say.

    Dropout takes part in the mechanism: were its masks known, a row's gradient
    would depend on its place in the batch, and so on who else was drawn. Layers of
    `layers` draw from secret keys. Where ε is finite a loss that draws from
    TensorFlow's own state is refused: its seed has 31 bits and is stored in the graph,
    and a resumed run could not repeat the step (see `replay`). `tf.py_function` hides
    such draws, so the global TensorFlow seed is set to fresh secret entropy as well.
    Without noise all may draw, and a resumed run draws other numbers.

    Returns:
      The number of logical steps executed, those before an interruption included;
      with a `directory`, those paid for.

    Raises:
      Preempted: `preempted` said so before the last step.
      Diverged: weights were not finite, and there is a `directory`; see `endings`.
      InputError: an optimizer that has taken steps, or has no finite rate; `take`
        returns too few rows;
        a loss that writes a state, depends on other rows, or draws random numbers that
        cannot be repeated; a weight that no rule covers; other data or another plan
        than the directory's; a damaged ledger or state; with `directory`, too little
        memory for a step. All before a step is paid for; and a later step that finds
        no memory, after it.
    """
    if directory is not None:
        directory = checkpoint.run_directory(directory)
    groups = _own_groups(groups)
    layers, variables = list(layers), list(variables)
    if plan.spec.private and (warning := warning_of_logs()):
        logging.log_first_n(logging.WARNING, "%s", 1, warning)
    validation.positive_integer("microbatch_size", microbatch_size)
    setup = Setup(
        plan, per_example_losses, variables, layers, microbatch_size, engine, coupled
    )
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
    pace = Pace(save_every, pause_every or save_every, steps_per_loop)
    hooks = Hooks(before_step, before_call, on_step, preempted)
    hooks.require_pace(pace)
    if coupled:
        coupled_rows.require_covered(plan)
    count = len(groups.rows) if groups is not None else units or plan.spec.num_units
    numbers = None if groups is None else np.sort(groups.rows)
    rows = checks.Rows(take, count, numbers)
    if before_step is not None:
        before_step(0)  # or what is tried would read what was never set
    repeats = directory is not None
    read: list[tf.Module | tf.Variable] = [*layers]
    batch = rows.take_some(plan.rows_clipped_together)
    by_microbatch = False
    if plan.spec.private:
        setup, variables_read, by_microbatch = checks.check_setup(
            setup, rows, also_tried
        )
        read += variables_read
        take = checks.of_one_shape(take, batch)
    settings = {
        "engine": setup.engine,
        "optimizer": type(optimizer).__name__,
        "the optimizer's settings": repr(optimizers.settings_of(optimizer)),
        "jit_compile": repr(_compiled_by_xla(jit_compile)),
        "variables": repr([(v.shape.as_list(), v.dtype.name) for v in variables]),
        "random_numbers": SCHEME,
        "the version of tfdpsq": tfdpsq.__version__,
    }
    if by_microbatch:  # else a step is the same whatever its microbatches
        settings["microbatch_size"] = repr(microbatch_size)
    if repeats:
        settings["the model's configuration"] = _configuration(layers)
        settings["frozen weights"] = _not_trained(read, [*variables, *state])
    data_fingerprint = _with_units(data_fingerprint, units, groups)
    _require_same_settings(plan, settings, units, groups)
    # Only the chief has a directory and pays.
    chiefs = directory if workers.is_chief() else None
    with kept_in(chiefs, plan, data_fingerprint, settings) as kept:
        key = _key_of(plan, kept, seed)
        slots = optimizers.build(optimizer, variables)
        take_steps = CompiledSteps(setup, optimizer, key, jit_compile, steps_per_loop)
        take_steps.build(batch)
        state = [*variables, *slots, *state]
        # The step's own are a schedule's, too.
        watched = _held([*read, *state, *take_steps.read])
        watch = Watch(optimizer, watched, plan.spec.private)
        sampler = plan.sampler(units, key.sampler, groups)
        loop = Loop(plan, sampler, take, take_steps, state, pace, hooks, kept, watch)
        if repeats and plan.spec.private:
            loop.rehearse = functools.partial(take_steps.rehearse, batch)
        return loop.run(ends_if_diverged=repeats)


def _own_groups(groups: object) -> Groups | None:
    """Returns a copy of the groups, since a hook may hold the arrays of those given."""
    if groups is not None and not isinstance(groups, Groups):
        raise validation.InputError(
            f"groups is a {type(groups).__name__}. Give Groups.of(labels), where label "
            "i names the unit that has row i."
        )
    if groups is None:
        return None
    return Groups(np.array(groups.rows), np.array(groups.offsets))


def _with_units(fingerprint: str, units: int | None, groups: Groups | None) -> str:
    """The data's fingerprint with whose rows are whose, where that was said."""
    if units is None and groups is None:
        return fingerprint
    digest = hashlib.sha256(repr(units).encode())
    if groups is not None:
        for values in (groups.rows, groups.offsets):
            digest.update(np.ascontiguousarray(values).tobytes())
    return fingerprint and f"{fingerprint} {digest.hexdigest()}"


def _key_of(plan: PrivacyPlan, kept: Kept | None, seed: int | None) -> RunKey:
    """The key of a run, which TensorFlow's own generators are seeded from as well."""
    if plan.spec.private and seed is not None:
        logging.warning(
            "seed was given: epsilon does not hold against anyone who guesses it. Give "
            "it in tests only."
        )
    key = RunKey(plan, kept.secrets.seed if kept is not None else seed)
    if plan.spec.private:
        tf.random.set_seed(key.process)
    return key


def _not_trained(layers: Any, restored: Any) -> str:
    """A digest of what the layers hold besides the variables that a state restores.

    A step that is repeated reads them, too. Metrics are left out: a loss does not.
    `layers` may also hold single variables.
    """
    digest = hashlib.sha256()
    for variable in _held(layers, restored):
        digest.update(content(np.array(variable)))
    return digest.hexdigest()


def _held(layers: Any, apart: Sequence[tf.Variable] = ()) -> list[tf.Variable]:
    """Returns the variables of layers, each once, without metrics' and those `apart`.

    `layers` may also hold single variables, which count in any case: a loss may read
    a metric.
    """
    modules = _modules_of(layers)
    metrics = [m for m in modules if isinstance(m, keras.metrics.Metric)]
    single = [root for root in layers if not isinstance(root, tf.Module)]
    named = {id(copy) for variable in single for copy in _copies(variable)}
    seen = {id(variable) for metric in metrics for variable in metric.variables} - named
    seen.update(id(copy) for variable in apart for copy in _copies(variable))
    found = []
    for variable in (
        *(variable for module in modules for variable in module.variables),
        *single,
    ):
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
                # keras-nlp's layers hold functions as initializers, of which Keras warns.
                warnings.simplefilter("ignore", UserWarning)
                config = module.get_config()  # without it, its layers have theirs
        found.append([type(module).__qualname__, config])
    text = json.dumps(found, sort_keys=True, default=lambda v: type(v).__qualname__)
    unnumbered = re.sub(r'_[0-9]+(?=["_])', "", text)
    return hashlib.sha256(unnumbered.encode()).hexdigest()


def _modules_of(layers: Any) -> list[tf.Module]:
    held = [root for root in layers if isinstance(root, tf.Module)]
    return [module for root in held for module in (root, *root.submodules)]


def _copies(variable: Any) -> tuple:
    """Returns a variable, and those of its replicas, which a trace finds by itself."""
    mirrored = isinstance(variable, tf.distribute.DistributedValues)
    return (variable, *(variable.values if mirrored else ()))


def _compiled_by_xla(jit_compile: bool) -> bool | str:
    """Returns whether the step runs compiled: its random draws depend on that."""
    strategy = tf.distribute.get_strategy()
    if isinstance(strategy, tf.distribute.TPUStrategy):
        return "by the TPU"
    return jit_compile and strategy.num_replicas_in_sync == 1


def _require_same_settings(plan: Any, settings: Any, units: Any, groups: Any) -> None:
    """Refuses workers that would run something else than the chief."""
    settled = repr((plan.fingerprint, sorted(settings.items())))
    settled += _with_units("units", units, groups)
    workers.require_same(
        hashlib.sha256(settled.encode()).digest(), "the plan, the model or the settings"
    )
