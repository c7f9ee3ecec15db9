"""What the stages that train on private pairs share: settings, units, run state."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import ml_collections
import numpy as np
import tensorflow as tf

from tfdpsq import privacy, validation
from tfdpsq.data import atomic_write
from tfdpsq.generator import checkpoints
from tfdpsq.generator.schedules import WarmupCosine
from tfdpsq.privacy import certificate as certificates
from tfdpsq.privacy import certificate_files, checkpoint, ledger, reads, workers
from tfdpsq.run.attacks import canary_set
from tfdpsq.run.core import outputs, releases, sources, workdir
from tfdpsq.run.core.progress import LOGS, Progress
from tfdpsq.run.devices import strategy
from tfdpsq.run.training import outcomes

RUNS = workdir.RUNS
RUN_FILE = "run.json"
# Of a run's directory: its pairs, tokenised, while it trains without protection.
ROWS = "rows"
LOSS_READ = {
    "what": "the training loss of every step, averaged over its batch, and how long "
    "the step took",
    "where": "the terminal, and logs/ under private/",
}


@dataclasses.dataclass(frozen=True)
class Units:
    """Who is protected.

    Attributes:
      count: number of units in the data; private unless declared otherwise.
      groups: which pairs are whose, for unit "user".
      private: whether these are private pairs.
    """

    count: int
    groups: privacy.Groups | None
    private: bool


def units_of(config: ml_collections.ConfigDict, source: sources.Source) -> Units:
    """The units of the pairs that are trained on.

    Raises:
      InputError: unit "user" for pairs that are not private.
      DataError: a query without the user field.
    """
    if config.unit != "user" or not source.private:
        return Units(source.count, None, source.private)
    users = sources.open_beir(config.pairs).users(config.split, config.user_field)
    groups = privacy.Groups.of([users[pair.query_id] for pair in source.pairs])
    return Units(len(groups), groups, True)


def spec_of(
    config: ml_collections.ConfigDict, units: Units, **changes: Any
) -> privacy.PrivacySpec:
    """The spec that the settings ask for.

    Args:
      config: the stage's.
      units: of its pairs.
      **changes: fields of the spec that the stage decides itself.

    Raises:
      InputError: n was not declared, or what `PrivacySpec` raises.
    """
    epsilon = float(config.epsilon)
    # Of pairs that are not private, how many there are is no secret either.
    n, public = units.count, True
    if units.private:
        n, public = declared_n(config, units.count)
    fields = {
        "epsilon": epsilon,
        "delta": (config.delta or None) if math.isfinite(epsilon) else None,
        "clip_norm": config.clip_norm,
        "n": n,
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


def declared_n(config: ml_collections.ConfigDict, count: int) -> tuple[int, bool]:
    """The n that may be published, and whether it is the exact number.

    Args:
      config: the stage's.
      count: how many units there are.

    Raises:
      InputError: nothing was declared, both were, or a bound that is exceeded.
    """
    if config.n_is_public:
        if config.n_bound:
            raise validation.InputError(
                f"n_is_public is True and n_bound is {config.n_bound}: declare either "
                "that the exact number of units is public, or a bound on it."
            )
        return count, True
    if not config.n_bound:
        raise validation.InputError(
            f"the number of units is treated as public only when declared, and delta "
            f"and the sampling probability depend on it. Set n_is_public = True if "
            f"the number of {config.unit} units may be published, or n_bound to a "
            "public upper bound on it."
        )
    if count > config.n_bound:
        raise validation.InputError(
            f"n_bound is {config.n_bound}, but the data hold more units than that. "
            "Declare a bound that is not exceeded."
        )
    return config.n_bound, False


def private_directory(
    config: ml_collections.ConfigDict, directory: pathlib.Path
) -> pathlib.Path:
    """Where a stage keeps what must not be released; see `releases`."""
    return releases.private_directory(directory, config.private_directory)


def guarantee_of_training(
    config: ml_collections.ConfigDict, devices: strategy.Devices, protected: bool
) -> str:
    """The guarantee of a trained model; see `releases`.

    Args:
      config: the stage's.
      devices: where it trains. A worker that is not the chief certifies nothing.
      protected: whether private pairs are trained on under a finite ε.

    Raises:
      InputError: pairs and starting weights have guarantees that would add up.
      DataError: the certificate of one of them is damaged.
    """
    if not devices.chief or canary_set.holds_canaries(config.pairs):
        return releases.PRIVATE
    if not sources.is_free(config.pairs):
        return releases.CERTIFIED if protected else releases.PRIVATE
    certificate = certificates.inherited_certificate(
        sources.certificate_of_pairs(config.pairs),
        sources.certificate_of_model(config.init),
    )
    start = checkpoints.locate(config.init) if config.init else ""
    return releases.guarantee_of(certificate, config.pairs, os.fspath(start))


def run_directory(
    config: ml_collections.ConfigDict, directory: pathlib.Path
) -> pathlib.Path:
    """Where secrets, states and ledger of a stage's run are kept."""
    return private_directory(config, directory) / RUNS / directory.name


def open_run(directory: pathlib.Path, config: Any, inputs: Mapping[str, str]) -> None:
    """Opens the directory of a run's secrets, states and ledger.

    Args:
      directory: what `run_directory` says; made if it is not there.
      config: what the run's result depends on.
      inputs: fingerprints of what it reads.

    Raises:
      InputError: a run with other settings or data was begun there.
    """
    wanted = {"config": workdir.plain(config), "inputs": dict(inputs)}
    path = directory / RUN_FILE
    paid = directory / ledger.FILE_NAME
    found = workdir.read_json(path) if path.is_file() else {}
    differences = workdir.differences({**found, workdir.MADE_BY: None}, wanted)
    if found and paid.is_file() and ledger.read_ledger(paid).steps_paid:
        if differences:
            raise validation.InputError(
                f"{directory} holds a run that was begun with another config or other "
                f"data ({'; '.join(differences)}).{workdir.other_version(found)} Go on "
                "with the same, or use another directory: a new run spends a budget of "
                "its own, and both add up."
            )
    else:
        # Nothing was paid for, so settings that turned out wrong may be mended.
        if found and differences:
            checkpoint.discard(directory)
        wanted.update(workdir.made_by())
        outputs.open_private(directory)
        with outputs.owner_only():
            atomic_write(path, json.dumps(wanted, indent=2, sort_keys=True) + "\n")


def train(
    devices: strategy.Devices,
    model: tf.keras.Model,
    plan: privacy.PrivacyPlan,
    per_example_losses: Callable,
    optimizer: Any,
    take: Callable,
    microbatch_size: int | None,
    **options: Any,
) -> outcomes.Outcome:
    """`privacy.train` on a stage's devices; a run that diverged has an outcome, too.

    Args:
      devices: in whose scope model and optimizer were made.
      model: whose trainable weights are trained.
      plan: see `privacy.train` for this and all others.
      per_example_losses: its loss.
      optimizer: of the plan.
      take: the rows.
      microbatch_size: rows at a time.
      **options: passed on.

    Returns:
      What was paid, and whether the model holds the weights of an earlier step.

    Raises:
      Preempted: the process, or another worker, was asked to end.
      InputError: what `privacy.train` raises.
    """
    with devices.scope(), devices.notice.training() as asked:
        # What is not trained, too: others may have other files at the same path.
        workers.copy_from_chief(model.variables)
        try:
            paid = privacy.train(
                plan,
                per_example_losses,
                model.trainable_variables,
                optimizer,
                take,
                microbatch_size,
                steps_per_loop=devices.steps_per_loop,
                preempted=asked,
                **options,
            )
        except privacy.Diverged as error:
            return outcomes.Outcome(error.paid, error.diverged_at, error.weights_of)
        return outcomes.Outcome(paid)


def close_run(directory: pathlib.Path) -> None:
    """Removes a finished run's seeds, states and rows; its ledger stays."""
    checkpoint.discard(directory)
    shutil.rmtree(directory / ROWS, ignore_errors=True)


def ledger_head(directory: pathlib.Path) -> str:
    """What stands in a certificate for all lines of the run's ledger."""
    return ledger.read_ledger(directory / ledger.FILE_NAME).head


def reads_of(
    config: ml_collections.ConfigDict, private: pathlib.Path
) -> privacy.PrivateReads:
    """The workdir's list of private reads outside the budget."""
    if not config.strict:
        outputs.open_private(private)
    return privacy.PrivateReads(private / reads.FILE_NAME, strict=config.strict)


def progress_of(
    config: ml_collections.ConfigDict,
    name: str,
    private: pathlib.Path,
    devices: strategy.Devices,
) -> Progress:
    """The bar and log of a run, with all that strict mode does not leave out.

    Args:
      config: the stage's.
      name: the run's.
      private: the private directory.
      devices: where the stage trains.
    """
    return Progress(
        private / LOGS / name,
        config.steps,
        measured=not config.strict,
        examples=config.batch_size,
        tokens=config.batch_size * (config.document_length + config.query_length),
        save_every=config.save_every,
        steps_per_loop=devices.steps_per_loop,
    )


def record_losses(
    config: ml_collections.ConfigDict, private: pathlib.Path
) -> list[dict[str, str]]:
    """Notes that losses and times are read, unless strict mode leaves them out.

    Returns:
      All private reads of the workdir so far, for the certificate: what was seen
      before may have decided how this run was set up.
    """
    taken = reads_of(config, private)
    if not config.strict:
        taken.record(**LOSS_READ)
    return taken.entries


def write_certificate(
    directory: pathlib.Path, certificate: Mapping[str, Any] | None
) -> None:
    """Writes `certificate.json`, and its digest into the configs of models beside it.

    Args:
      directory: of a model, or of what was made by one; finished but for this.
      certificate: `None`, where no private query had a part, writes nothing.
    """
    if certificate is None:
        return
    for path in (directory / name for name in certificate_files.CONFIGS):
        if path.is_file():
            marked = {certificate_files.MARK: certificate["digest"]}
            _write_json(path, {**workdir.read_json(path), **marked})
    _write_json(directory / certificates.FILE_NAME, certificate)


def _write_json(path: pathlib.Path, values: Mapping[str, Any]) -> None:
    text = json.dumps(values, indent=2, sort_keys=True, allow_nan=False)
    atomic_write(path, text + "\n")


def learning_rate(
    config: ml_collections.ConfigDict,
) -> float | tf.keras.optimizers.schedules.LearningRateSchedule:
    """What the optimizer takes: the rate, or its course over all steps.

    Schedule "cosine" rises over the first tenth of the steps and falls to a twentieth.
    """
    if config.schedule == "constant":
        return config.learning_rate
    return WarmupCosine(config.learning_rate, config.steps // 10, config.steps)


def training_facts(
    config: ml_collections.ConfigDict, model: tf.keras.Model
) -> dict[str, Any]:
    """What the certificate records of the training, apart from privacy."""
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
