"""Settings, units and run state shared by the stages that train on private pairs."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ml_collections
import numpy as np
import tensorflow as tf

from tfdpsq import privacy, validation
from tfdpsq.data import RowStore, write_rows
from tfdpsq.data.io import write_json
from tfdpsq.data.texts import Pair
from tfdpsq.privacy import batches, checkpoint, optimizers, workers
from tfdpsq.privacy import plan as plans
from tfdpsq.privacy.proof import ledger
from tfdpsq.privacy.randomness import secure
from tfdpsq.privacy.training import digest_of_weights
from tfdpsq.run.core import layout, outputs, records, sources, workdir
from tfdpsq.run.core.progress import Progress
from tfdpsq.run.devices import strategy
from tfdpsq.run.training import outcomes, training_settings

RUN_FILE, ROWS = layout.RUN_FILE, layout.ROWS
# Keras's backups of training without privacy.
BACKUP = "backup"
# In it: the output, from the run's directory.
_OUTPUT = "output"
# Settings that came after version 0.2.0 had paid for runs; "" is what it did.
_LATER = (
    "continues",
    "histogram",
    "noiseless_learning_rate",
)
# Pairs tokenised at a time.
_CHUNK = 1024
LOSS_READ = {
    "what": "the training loss of every step, averaged over its batch, and how long "
    "the step took",
    "where": "the terminal, and logs/ under private/",
}
VALIDATION_READ = {
    "what": "the retriever's hit rate on pairs held out of training",
    "where": "logs/ under private/",
}


@dataclasses.dataclass(frozen=True)
class Units:
    """The units that the guarantee protects.

    Attributes:
      count: number of units in the data; private unless declared otherwise.
      groups: maps pairs to their users, for unit "user".
      private: whether these are private pairs.
    """

    count: int
    groups: privacy.Groups | None
    private: bool


def units_of(source: sources.Source, unit: str, user_field: str) -> Units:
    """Returns the units of the training pairs.

    `user_field` names the metadata field with a query's user, for unit "user".

    Raises:
      InputError: unit "user" for pairs that are not private.
      DataError: a query without the user field.
    """
    if unit != "user" or source.table is None:
        return Units(source.count, None, source.private)
    owners = sources.open_beir(source.path).owners(source.table, user_field)
    groups = privacy.Groups.of(owners)
    return Units(len(groups), groups, True)


def with_steps(config: ml_collections.ConfigDict, n: int) -> ml_collections.ConfigDict:
    """Returns the config with the steps that its epochs take.

    An epoch of shuffled batches leaves out what fills no batch: a step more would cost
    what a whole epoch costs.

    Args:
      config: of a stage that trains.
      n: number of units that may be published, or of pairs that are not private.

    Raises:
      InputError: steps and epochs are both given.
    """
    check_steps(config)
    if not config.epochs:
        return config
    config = config.copy_and_resolve_references()
    epoch = n / config.batch_size
    if config.get("sampler") == "shuffled":
        epoch = n // config.batch_size
    config.steps = max(1, round(config.epochs * epoch))
    config.epochs = 0.0
    return config


def check_steps(
    config: ml_collections.ConfigDict, trains: bool = False, before: str = ""
) -> None:
    """Refuses both steps and epochs; with `trains` also neither.

    `before` is as in `settings.require_values`.
    """
    if trains and not config.epochs and not config.steps:
        raise validation.InputError(
            f"{before}steps is {config.steps} and epochs is {config.epochs}: nothing "
            "would be trained. Set one of them."
        )
    if config.epochs and config.steps:
        raise validation.InputError(
            f"{before}epochs is {config.epochs} and steps {config.steps}: one of them "
            "decides how long to train. Set steps to 0 to train for epochs, or epochs "
            "to 0."
        )


def public_n(config: ml_collections.ConfigDict, count: int, private: bool) -> int:
    """Returns the number of units that may be published; see `declared_n`."""
    if not private:
        return count
    return declared_n(count, config.n_is_public, config.n_bound, config.unit)[0]


def spec_of(
    config: ml_collections.ConfigDict, units: Units, **changes: Any
) -> privacy.PrivacySpec:
    """Returns the spec of the settings.

    `changes` are fields of the spec that the stage sets itself.

    Raises:
      InputError: n was not declared, or what `PrivacySpec` raises.
    """
    if config.secure:
        secure.require()
    epsilon = float(config.epsilon)
    # The number of pairs that are not private is not a secret.
    n, public = units.count, True
    if units.private:
        n, public = declared_n(
            units.count, config.n_is_public, config.n_bound, config.unit
        )
    config = with_steps(config, n)
    fields = {
        "epsilon": epsilon,
        "delta": (config.delta or None) if math.isfinite(epsilon) else None,
        "clip_norm": config.clip_norm,
        "num_units": n,
        "n_is_public": public,
        "batch_size": config.batch_size,
        "steps": config.steps,
        "accountant": config.accountant,
        "sampler": config.sampler,
        "unit": config.unit,
        "rows_per_unit": config.rows_per_unit,
        "secure": config.secure,
    }
    return privacy.PrivacySpec(**{**fields, **changes})


def require_microbatches(
    config: ml_collections.ConfigDict, spec: privacy.PrivacySpec, replicas: int
) -> None:
    """Refuses more replicas than the microbatches of the spec's largest batch."""
    rows = plans.max_batch_size_of(spec) * spec.rows_per_unit
    batches.require_microbatches(rows, config.microbatch_size, replicas)


def counting_spec(
    config: ml_collections.ConfigDict, units: Units
) -> privacy.PrivacySpec:
    """Returns the spec of `histogram`: one release in which every unit takes part.

    Raises:
      InputError: n was not declared, or what `PrivacySpec` raises.
    """
    whole = config.copy_and_resolve_references()
    with whole.unlocked():
        n, _ = declared_n(units.count, config.n_is_public, config.n_bound, config.unit)
        whole.update(
            clip_norm=1.0, batch_size=n, steps=1, epochs=0.0, sampler="poisson"
        )
    return spec_of(whole, units)


def declared_n(
    count: int, n_is_public: bool, n_bound: int, unit: str
) -> tuple[int, bool]:
    """Returns the n that may be published, and whether it is the exact number.

    Raises:
      InputError: nothing was declared, both were, or `count` exceeds the bound.
    """
    if n_is_public:
        if n_bound:
            raise validation.InputError(
                f"n_is_public is True and n_bound is {n_bound}: declare either "
                "that the exact number of units is public, or a bound on it."
            )
        return count, True
    if not n_bound:
        raise validation.InputError(
            f"the number of units is treated as public only when declared, and delta "
            f"and the sampling probability depend on it. Set n_is_public = True if "
            f"the number of {unit} units may be published, or n_bound to a "
            "public upper bound on it."
        )
    if count > n_bound:
        raise validation.InputError(
            f"n_bound is {n_bound}, but the data hold more units than that. "
            "Declare a larger bound."
        )
    return n_bound, False


@contextlib.contextmanager
def open_run(
    directory: pathlib.Path,
    config: Any,
    inputs: Mapping[str, str],
    output: pathlib.Path,
) -> Iterator[None]:
    """Opens the directory of a run's secrets, states and ledger, and keeps it locked.

    Creates it if it is missing. `config` and `inputs` are what the result depends on.
    Outputs with one name can share the directory (`release/NAME` and `NAME`), so it
    belongs to the `output` whose run paid for a step.

    Raises:
      InputError: another process uses it; or a run with other settings or data, or of
        another output, was begun there.
    """
    with locked(directory):
        _begin(directory, config, inputs, output)
        yield


def recorded(config: Mapping[str, Any], found: Any) -> dict[str, Any]:
    """Returns a config without settings that an older record lacks and that are off."""
    known = found if isinstance(found, Mapping) else {}
    later = {name for name in _LATER if name not in known and not config.get(name)}
    return {name: value for name, value in config.items() if name not in later}


def _begin(
    directory: pathlib.Path,
    config: Any,
    inputs: Mapping[str, str],
    output: pathlib.Path,
) -> None:
    wanted = {"config": workdir.plain(config), "inputs": dict(inputs)}
    path = directory / RUN_FILE
    paid = directory / ledger.FILE_NAME
    found = workdir.read_json(path) if path.is_file() else {}
    not_compared = {workdir.MADE_BY: None, _OUTPUT: None}
    compared = {**wanted, "config": recorded(wanted["config"], found.get("config"))}
    differences = workdir.differences({**found, **not_compared}, compared, directory)
    # A state after some steps: then the ledger is damaged, and nothing is deleted.
    begun = paid.is_file() and ledger.read_ledger(paid).steps_paid
    if begun or checkpoint.steps_taken(directory):
        if not found:
            raise validation.DataError(
                path,
                f"it is missing or empty, but steps of a run are paid in {directory}, "
                "of which nobody can then say whether settings and data are the same",
                "Restore it from a backup, or use another directory: a new run spends "
                "a budget of its own, and both add up.",
            )
        if not _is_of(directory, output):
            of = os.path.normpath(os.path.join(directory, found[_OUTPUT]))
            raise validation.InputError(
                f"{directory} holds the run of {of}, which was begun and has the same "
                f"name as {output}. Go on with {of}, or use another name for the new "
                "output."
            )
        if differences:
            raise validation.InputError(
                f"{directory} holds a run that was begun with another config or other "
                f"data ({'; '.join(differences)}).{workdir.other_version(found)} Go on "
                "with the same, or use another directory: a new run spends a budget of "
                "its own, and both add up."
            )
    else:
        # Nothing was paid for, so wrong settings may be corrected.
        if found and differences:
            checkpoint.discard(directory)
        wanted.update({**workdir.made_by(), **workdir.written_in(directory)})
        with outputs.owner_only():
            write_json(path, {**wanted, _OUTPUT: _relative(directory, output)})


def locked(directory: pathlib.Path) -> contextlib.AbstractContextManager[None]:
    """Opens a run's directory in its private one, and locks it against others.

    Raises:
      Held: another process uses it.
    """
    # First, as what is made above a directory is open, unless it is called private.
    if directory.parent.name == workdir.RUNS:
        outputs.open_private(directory.parents[1])
        outputs.open_private(directory.parent)
    return workdir.held(
        outputs.open_private(directory),
        f"{directory} is in use by another process, for this output or for one of the "
        "same name. Wait until it ends, stop it, or use another name.",
    )


def _is_of(directory: pathlib.Path, output: pathlib.Path) -> bool:
    """Returns whether a run is of an output; also where an older version began it."""
    path = directory / RUN_FILE
    of = workdir.read_json(path).get(_OUTPUT) if path.is_file() else None
    return of in (None, _relative(directory, output))


def _relative(directory: pathlib.Path, output: pathlib.Path) -> str:
    # Still true where the workdir is moved or copied.
    return os.path.relpath(os.path.realpath(output), os.path.realpath(directory))


def train(
    devices: strategy.Devices,
    model: tf.keras.Model,
    plan: privacy.PrivacyPlan,
    per_example_losses: Callable,
    optimizer: Any,
    take: Callable,
    microbatch_size: int,
    units: Units,
    on_step: Callable[[int, float], None] | None = None,
    **options: Any,
) -> outcomes.Outcome:
    """Calls `privacy.train` on a stage's devices; divergence has an outcome, too.

    Model and optimizer were made in the devices' scope; further arguments are those of
    `privacy.train`.

    Raises:
      Preempted: the process, or another worker, received a signal to end.
      InputError: what `privacy.train` raises.
    """
    with devices.scope(), devices.notice.training() as asked:
        # Also variables that are not trained: workers may have different files.
        workers.copy_from_chief(model.variables)

        def told(step: int, loss: float) -> None:
            if on_step is not None:
                on_step(step, loss)
            if asked():
                raise privacy.Preempted(step)

        try:
            paid = privacy.train(
                plan,
                per_example_losses,
                model.trainable_variables,
                optimizer,
                take,
                microbatch_size,
                units=units.count if units.groups is None else units.groups,
                on_step=told,
                **options,
            )
        except privacy.Diverged as error:
            return outcomes.Outcome(error.paid, error.diverged_at, error.weights_of)
        return outcomes.Outcome(paid)


def stored_rows(
    run_dir: pathlib.Path,
    pairs: Iterator[Pair],
    encode: Callable[[list[Pair]], Mapping[str, np.ndarray]],
) -> RowStore:
    """Returns the pairs as rows on disk; training reads one batch at a time.

    `encode` tokenises some pairs; field -> [pairs, ...].
    """
    path = run_dir / checkpoint.STATE / "rows"
    if path.is_dir():  # left by a run that was killed
        store = RowStore(path)
        store.verify()
        return store
    chunks = iter(lambda: list(itertools.islice(pairs, _CHUNK)), [])
    return write_rows(path, map(encode, chunks))


def close_run(directory: pathlib.Path, output: pathlib.Path) -> None:
    """Removes a finished run's seeds, states and rows; its ledger stays.

    A run of another output that has the directory is left as it is.
    """
    if not directory.is_dir():
        return
    busy = f"{directory} is in use by another process, which removes them itself."
    with contextlib.suppress(workdir.Held), workdir.held(directory, busy):
        if _is_of(directory, output):
            checkpoint.discard(directory)
        shutil.rmtree(directory / ROWS, ignore_errors=True)
        shutil.rmtree(directory / BACKUP, ignore_errors=True)


def run_id(directory: pathlib.Path) -> str:
    """Returns the random name of a run, from its ledger."""
    return ledger.read_ledger(directory / ledger.FILE_NAME).run


def progress_of(
    run_dir: pathlib.Path,
    *,
    steps: int,
    batch_size: int,
    tokens: int,
    save_every: int,
    strict: bool,
) -> Progress:
    """Returns the bar and log of a run, without what strict mode leaves out.

    `tokens` are those of one example, query and document.
    """
    return Progress(
        run_dir.parents[1] / layout.LOGS / run_dir.name,
        steps,
        measured=not strict,
        examples=batch_size,
        tokens=batch_size * tokens,
        save_every=save_every,
    )


def record_losses(
    private: pathlib.Path,
    source: sources.Source,
    strict: bool,
    validated: bool = False,
) -> list[dict[str, str]]:
    """Records that losses and times are read, unless strict mode leaves them out.

    `validated` says whether the hit rate on held-out pairs is, too.

    Returns:
      All private reads of the workdir so far, for the certificate: earlier ones may
      have influenced this run's settings. Nothing for pairs that are not private.
    """
    if not source.private:
        return []
    if not strict:
        records.private_reads(private, strict).record(**LOSS_READ)
        if validated:
            records.private_reads(private, strict).record(**VALIDATION_READ)
    return records.all_private_reads(private)


def learning_rate(
    peak: float, schedule: str, steps: int
) -> float | tf.keras.optimizers.schedules.LearningRateSchedule:
    """Returns the rate, or its schedule over all steps.

    Schedule "cosine" rises over the first tenth of the steps and falls to a twentieth.
    """
    if schedule == "constant":
        return peak
    return cosine_decay(peak, steps // 10, steps)


def cosine_decay(
    peak: float, warmup: int, steps: int
) -> tf.keras.optimizers.schedules.LearningRateSchedule:
    """Returns a rate that rises for `warmup` steps, and falls to a twentieth."""
    return tf.keras.optimizers.schedules.CosineDecay(
        # The first step counts, too.
        peak / max(1, warmup),
        max(1, steps - warmup),
        alpha=0.05,
        warmup_target=peak,
        warmup_steps=warmup,
    )


def make_optimizer(config: ml_collections.ConfigDict) -> Any:
    """Returns the Keras optimizer of a stage's settings."""
    return optimizers.OPTIMIZERS[config.optimizer](
        learning_rate(config.learning_rate, config.schedule, config.steps),
        **training_settings.optimizer_options(config),
    )


def training_facts(
    config: ml_collections.ConfigDict, model: tf.keras.Model
) -> dict[str, Any]:
    """Returns the certificate's record of the training, apart from privacy."""
    lora = config.get("lora", {}).get("rank")
    soft_prompt = config.get("soft_prompt", {}).get("length")
    return {
        "optimizer": config.optimizer,
        "learning_rate": config.learning_rate,
        "schedule": config.get("schedule", "constant"),
        "engine": config.engine,
        "microbatch_size": config.get("microbatch_size", "the whole batch"),
        "trained_parameters": int(
            sum(np.prod(v.shape) for v in model.trainable_variables)
        ),
        "starting_weights": config.get("init") or "random",
        "weights": digest_of_weights(model.weights),
        "trained": "only the lora or soft_prompt named here"
        if lora or soft_prompt
        else list(config.get("trained", ["*"])),
        "lora": dict(config.lora) if lora else "none",
        "soft_prompt": soft_prompt or "none",
        "computed_in": config.get("dtype", "float32"),
        "products_of_clipping": privacy.fast.precision_in_words(
            config.get("jit_compile", False)
        )
        if config.engine == "fast"
        else "as in tensorflow-privacy",
    }
