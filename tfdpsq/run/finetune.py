"""Fine-tune a T5 query generator with differential privacy.

    python -m tfdpsq.run.finetune --config=configs/finetune.py --workdir=DIR

A finite `epsilon` trains by DP-SGD; `epsilon = inf` takes the same steps without
clipping and noise. Writes the model, and `certificate.json` where private pairs were
read. What must never be released (training curves, the key of the data's fingerprint)
goes to `private_directory`, by default `private` next to the output.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable
from typing import Any

import ml_collections
import numpy as np
import tensorflow as tf

from tfdpsq import privacy, validation
from tfdpsq.data import Tokenizer
from tfdpsq.generator import Preprocessor
from tfdpsq.privacy.proof import certificate as certificates
from tfdpsq.run.attacks import canary_set
from tfdpsq.run.core import (
    acting,
    command,
    records,
    settings,
    sources,
    spending,
    workdir,
)
from tfdpsq.run.devices import strategy as strategies
from tfdpsq.run.training import context as contexts
from tfdpsq.run.training import (
    continuing,
    outcomes,
    private_training,
    starting_model,
    training_settings,
)

SENSITIVITY_ARGUMENTS = {
    "query": (
        "Each example is one query with its document, each query owns exactly one "
        "example, and an example's loss depends on that example alone. Its gradient "
        "is clipped to the clip norm, so adding or removing one query moves the sum "
        "by at most the clip norm."
    ),
    "pair": (
        "Each example is one pair, a query with one of its documents, and an example's "
        "loss depends on that example alone. Its gradient is clipped to the clip norm, "
        "so adding or removing one pair moves the sum by at most the clip norm, and "
        "adding or removing a query of k pairs by at most k clip norms."
    ),
    "user": (
        "Each query belongs to one user, and an example's loss depends on that "
        "example alone. The gradients of all examples that a step draws of one user "
        "are added up and clipped to the clip norm together, so adding or removing "
        "one user moves the sum by at most the clip norm."
    ),
}


DivergedError = outcomes.DivergedError

SETTINGS: settings.Declaration = {
    "pairs": settings.Text(sources.PYDOCS, required=True),
    "split": settings.Text("train", required=True),
    # By default the one next to the weights in `init`.
    "vocabulary": settings.Text(""),
    # A directory in any format that `convert` reads, or a preset's name, such
    # as "t5_tiny_pydocs"; "" starts from random weights.
    "init": settings.Text(""),
    **continuing.declared(),
    # The output of `histogram` of these pairs, to synthesize by: what it cost counts
    # within `epsilon`.
    "histogram": settings.Text(""),
    "t5": starting_model.T5,
    # Train a low-rank update only, on the Dense layers that `targets` match
    # (see `layers.apply_lora`); rank 0 trains all weights.
    "lora": {
        "rank": settings.Integer(0, 0, settings.WIDTH),
        "alpha": settings.Number(16.0, 0, 1e6, low_open=True),
        "targets": settings.Several(
            ("*/query_projector", "*/value_projector"), settings.Text(""), 1
        ),
    },
    # Train only so many vectors, placed before every document (prompt tuning,
    # see `layers.SoftPrompt`); 0 has none. Its authors used 20 to 100 and a
    # learning rate of 0.3 with Adafactor.
    "soft_prompt": {"length": settings.Integer(0, 0, settings.TOKENS)},
    # Trained weights if both are off, as patterns of their paths (see
    # `layers.train_only`): "*decoder*" is the decoder, "*layer_norm*" and
    # "*self_attention/embeddings" are all norms and position biases.
    "trained": settings.Several(("*",), settings.Text(""), 1),
    **training_settings.dtype_settings(),
    # Less memory, about a third more time.
    "rematerialize": settings.Flag(False),
    **training_settings.prompt_settings(),
    **training_settings.length_settings(384, 128),
    **training_settings.privacy_settings(),
    # Clip each variable by itself, to its share of the clip norm.
    "batch_size": settings.Integer(1024),
    "microbatch_size": settings.Integer(16),
    **training_settings.steps_settings(1),
    **training_settings.optimizer_settings(1e-3),
    # The rate without noise, where epsilon is infinite; 0: `learning_rate`.
    "noiseless_learning_rate": settings.Number(0.0, 0, 1e3),
    "jit_compile": settings.Flag(False),
    "seed": settings.Integer(0, 0, settings.SEED),
}


ACTING = (
    acting.Only("lora.alpha lora.targets", "lora.rank"),
    acting.Only("user_field", "unit", ("user",)),
    acting.Only("continues", "init"),
    *training_settings.OPTIMIZER_ACTING,
)


def default_config() -> ml_collections.ConfigDict:
    """Returns the stage's settings: the paper's values for a full-size T5.

    See `training_settings.privacy_settings` for those that affect privacy, and its
    `learning_rate` for `schedule`.
    """
    return settings.default_config(SETTINGS)


def run(
    config: ml_collections.ConfigDict,
    directory: pathlib.Path,
    devices: strategies.Devices = strategies.DEFAULT,
    *,
    stays_private: bool = False,
) -> dict:
    """Runs the stage into `directory` unless it is finished there.

    `stays_private` is for one of several runs, whose ε together is no single one's.

    Raises:
      InputError: bad settings or data, before any budget is spent.
      DivergedError: training diverged. The generator of the last good step is in
        `directory`, with the certificate of all that was paid.
    """
    settings.check(config, SETTINGS)
    private_training.check_steps(config, trains=True)
    acting.require_acting(config, SETTINGS, ACTING)
    devices.require_share(config.batch_size)
    context = contexts.resolve(
        config,
        directory,
        devices,
        "a generator trained on private queries",
        stays_private=stays_private,
    )
    stage = workdir.run_stage(
        context.output, config, context.inputs, lambda out: _make(config, context, out)
    )
    # Only now is the result safe, and the seeds of its noise have no further use.
    private_training.close_run(context.run_dir, directory)
    setting = _rate_setting(config)
    outcomes.require_converged(stage, directory, config[setting], setting)
    return stage


def _rate_setting(config: ml_collections.ConfigDict) -> str:
    """Returns the name of the setting that has this run's rate."""
    own = "noiseless_learning_rate"
    if config[own] and math.isinf(float(config.epsilon)):
        return own
    return "learning_rate"


def try_model(config: ml_collections.ConfigDict, vocabulary: str, init: str) -> None:
    """Builds the generator to start from, and drops it: a job pays for others first.

    Raises:
      InputError: settings that do not fit each other, the weights or the vocabulary.
    """
    config = config.copy_and_resolve_references()
    config.vocabulary, config.init = vocabulary, init
    starting_model.load_generator(config, Tokenizer(vocabulary))
    tf.keras.backend.clear_session()


def _make(
    config: ml_collections.ConfigDict, context: contexts.Context, out: pathlib.Path
) -> dict:
    devices = context.devices
    source = sources.load_source(config.pairs, config.split, config.unit)
    _check_lineage(source, config, context.parent)
    units = private_training.units_of(source, config.unit, config.user_field)
    # Epochs are of the units found; from here on their steps.
    written = config
    config = private_training.with_steps(
        config, private_training.public_n(config, units.count, units.private)
    ).copy_and_resolve_references()
    setting = _rate_setting(config)
    config.learning_rate = config[setting]
    spec = private_training.spec_of(config, units)
    plan = continuing.make_plan(config, context, spec)
    planned = continuing.planned_runs(config, context, plan)
    if devices.chief and not canary_set.holds_canaries(config.pairs):
        spending.require_within(planned)
    with devices.scope():
        model = starting_model.load_generator(config, context.tokenizer)
        optimizer = private_training.make_optimizer(config)
    with private_training.open_run(
        context.run_dir, written, context.inputs, context.output.directory
    ):
        rows = private_training.stored_rows(
            context.run_dir, source.read(), _encoding(config, context.tokenizer)
        )
        reads = private_training.record_losses(context.private, source, config.strict)
        with private_training.progress_of(
            context.run_dir,
            steps=config.steps,
            batch_size=config.batch_size,
            tokens=config.query_length + config.document_length,
            save_every=config.save_every,
            strict=config.strict,
        ) as progress:
            if source.private:
                progress.epsilon = plan.epsilon_so_far
            outcome = private_training.train(
                devices,
                model,
                plan,
                lambda batch: model.per_example_losses(batch, training=True),
                optimizer,
                rows.take,
                config.microbatch_size,
                layers=[model],
                engine=config.engine,
                units=units,
                directory=context.run_dir,
                data_fingerprint=context.inputs["pairs"],
                save_every=config.save_every,
                on_step=progress,
                jit_compile=config.jit_compile,
            )
    if not devices.chief:
        return {}
    certificate = certificates.inherited_certificate(source.certificate, context.parent)
    if source.private:
        facts = {**private_training.training_facts(config, model), **outcome.recorded()}
        certificate = _certificate(config, context, plan, outcome.paid, facts, reads)
    if not all(np.isfinite(v.numpy()).all() for v in model.trainable_variables):
        raise DivergedError(
            "training diverged: the weights hold NaN or infinity. Lower "
            f"{setting} (now {config[setting]}).",
            certificate,
        )
    model.preprocessor = Preprocessor(
        context.vocabulary, config.prompt, config.document_length, config.query_length
    )
    model.save_to_huggingface(out)
    records.write_certificate(out, certificate)
    return {"steps_executed": outcome.paid, **outcome.recorded()}


def _certificate(
    config: ml_collections.ConfigDict,
    context: contexts.Context,
    plan: privacy.PrivacyPlan,
    steps: int,
    facts: dict[str, Any],
    reads: list[dict[str, str]],
) -> dict:
    """Returns the certificate of a generator trained on private pairs."""
    return continuing.certificate_of(
        config,
        context,
        plan,
        steps,
        description="A T5 generator fine-tuned to write queries from documents.",
        sensitivity_argument=SENSITIVITY_ARGUMENTS[plan.spec.unit],
        training=facts,
        fingerprints={**context.inputs, "code": privacy.code_fingerprint()},
        private_reads=reads,
    )


def _encoding(config: ml_collections.ConfigDict, tokenizer: Tokenizer) -> Callable:
    """Returns the function that makes rows of pairs, by the stage's settings.

    Raises:
      InputError: the prompt leaves no token to any document.
    """
    _, (tokens,) = tokenizer.encode([config.prompt], config.document_length)
    if tokens >= config.document_length:
        raise validation.InputError(
            f"document_length is {config.document_length} tokens, which the prompt "
            f"{validation.shown(config.prompt)} and the end of the text fill: nothing "
            "of any document would be read. Raise document_length, or shorten prompt."
        )
    return Preprocessor(
        tokenizer, config.prompt, config.document_length, config.query_length
    ).arrays


def _check_lineage(
    source: sources.Source, config: ml_collections.ConfigDict, parent: dict | None
) -> None:
    """Refuses training that could not be certified correctly.

    Raises:
      InputError: finite ε on pairs that are not private themselves, or starting weights
        that do not fit `continues`.
    """
    epsilon = config.epsilon
    if config.continues or config.histogram:
        continuing.require_continuable(config, parent)
    if not math.isfinite(float(epsilon)):
        certificates.inherited_certificate(source.certificate, parent)
        return
    if not source.private:
        raise validation.InputError(
            f"{source.path} is a synthetic or public set, yet epsilon is "
            f"{epsilon}. One private query can have had a part in all of its "
            'rows, so noise now would certify nothing: set epsilon to "inf". The '
            "result has the guarantee of the set."
        )
    continuing.require_continuable(config, parent)


if __name__ == "__main__":
    command.main(run, strategies.STRATEGIES, spends=True)
