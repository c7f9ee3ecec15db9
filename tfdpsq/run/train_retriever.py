r"""Train a two-tower retriever on pairs, with differential privacy if they are private.

    python -m tfdpsq.run.train_retriever --workdir=OUT --config.pairs=SET \
        --config.vocabulary=SPIECE_MODEL

`method = "plain"` is ordinary training: free of privacy cost on synthetic and public
pairs, and without any guarantee on private ones. The other methods train directly on
private pairs by DP-SGD: "naive", "microbatch" and "public_negatives"; see
`tfdpsq.retriever.direct_dp`. `steps = 0` without `epochs` writes the untrained model.

All methods stream their pairs, tokenised, to disk, four bytes for each of a row's
`query_length + document_length` tokens, and read them a batch at a time: sets may have
any size.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Any

import ml_collections
import numpy as np
import tensorflow as tf

from tfdpsq import privacy, retriever, validation
from tfdpsq.data import Tokenizer
from tfdpsq.layers import T5Config, train_only
from tfdpsq.privacy.proof import certificate as certificates
from tfdpsq.run.core import (
    acting,
    command,
    layout,
    records,
    settings,
    sources,
    workdir,
)
from tfdpsq.run.devices import strategy
from tfdpsq.run.training import context as contexts
from tfdpsq.run.training import (
    continuing,
    direct_training,
    hard_negatives,
    outcomes,
    plain_training,
    private_training,
    training_settings,
)

METHODS = ("plain", *retriever.METHODS)


SETTINGS: settings.Declaration = {
    "pairs": settings.Text(sources.PYDOCS, required=True),
    "split": settings.Text("train", required=True),
    # By default the one next to the weights in `init`.
    "vocabulary": settings.Text(""),
    # The encoder's starting weights: a T5 in any format that `convert` reads, a
    # preset's name, or an output of this stage; `t5` is then ignored. "" starts
    # from random weights.
    "init": settings.Text(""),
    **continuing.declared(),
    # Trained weights, as patterns of their paths (`train_only`): "*layer_norm*",
    # "*projection/kernel", "*transformer_encoder_layer_2*". ("query_tower/*",)
    # with shared = False freezes the documents' embeddings: an index of them stays
    # valid.
    "trained": settings.Several(("*",), settings.Text(""), 1),
    "method": settings.Text("plain", METHODS),
    "t5": training_settings.t5_settings(32128, 12, 12, 768, 2048, 64),
    "embedding_dim": settings.Integer(768, 1, settings.WIDTH),
    "scale": settings.Number(20.0, 0, 1e6, low_open=True),
    "learned_scale": settings.Flag(False),
    "shared": settings.Flag(True),
    "pooling": settings.Text("mean", ("mean", "first")),
    "bidirectional": settings.Flag(False),
    # Count equal documents, and a query's other known answers, as negatives, as
    # equation (1) of the paper does.
    "false_negatives": settings.Flag(False),
    **training_settings.length_settings(384, 128),
    "batch_size": settings.Integer(32),
    **training_settings.steps_settings(0),
    **training_settings.optimizer_settings(1e-3),
    **training_settings.dtype_settings(),
    # Method "plain": rows embedded at a time where a batch exceeds memory; 0
    # embeds all at once.
    "rows_at_a_time": settings.Integer(0, 0),
    # Method "plain": pairs held out of training, at most a twentieth of all, whose
    # documents are searched for every `save_every` steps (`retriever.HitRate`). Of
    # private pairs that is a private read.
    "validation_pairs": settings.Integer(128, 0),
    **hard_negatives.declared(),
    "seed": settings.Integer(0, 0, settings.SEED),
    "jit_compile": settings.Flag(False),
    **settings.with_defaults(training_settings.privacy_settings(), epsilon=math.inf),
    **direct_training.declared(),
}


# Those of `retriever.RetrieverConfig`, besides the shape of the T5.
_OF_MODEL = (
    "embedding_dim scale learned_scale shared pooling bidirectional false_negatives "
    "query_length document_length"
).split()
_UNITS_AND_NOISE = (
    "delta clip_norm accountant sampler n_bound secure rows_per_unit user_field"
)
_NEGATIVES = ("public_negatives",)
ACTING = (
    acting.Only("rows_at_a_time validation_pairs", "method", ("plain",)),
    acting.Only("false_negatives", "method", ("plain", "naive", "microbatch")),
    acting.Only("microbatch_size", "method", retriever.METHODS),
    acting.Only("num_microbatches", "method", ("microbatch",)),
    acting.Only("negatives refresh_every most_documents", "method", _NEGATIVES),
    # "naive" differentiates itself, and "microbatch" has its engine.
    acting.Only("engine", "method", _NEGATIVES),
    acting.Only("hard_negatives.*", "hard_negatives.run"),
    acting.Only(_UNITS_AND_NOISE, "method", retriever.METHODS),
    acting.Only("continues", "method", retriever.METHODS),
    # No method's sensitivity is derived for users.
    acting.Only("rows_per_unit user_field", "unit", ("user",)),
    *training_settings.OPTIMIZER_ACTING,
)


def default_config() -> ml_collections.ConfigDict:
    """Returns the stage's settings: the paper's values for a full-size T5."""
    return settings.default_config(SETTINGS)


def run(
    config: ml_collections.ConfigDict,
    directory: pathlib.Path,
    devices: strategy.Devices = strategy.DEFAULT,
) -> dict:
    """Runs the stage into `directory` unless it is finished there.

    Raises:
      InputError: bad settings or data, before any budget is spent.
      DivergedError: training diverged. The retriever of the last good step is in
        `directory`, with the certificate of all that was paid.
    """
    acting.check(config, SETTINGS, ACTING)
    if config.method == "plain" and math.isfinite(float(config.epsilon)):
        raise validation.InputError(
            f"epsilon is {config.epsilon} but method 'plain' adds no noise. Set "
            f'epsilon to "inf", or method to one of {retriever.METHODS}.'
        )
    private_training.check_steps(config)
    if config.method == "plain" and config.unit == "user":
        raise validation.InputError(
            "unit is 'user', but method 'plain' protects nobody. Set unit to 'query' "
            "or 'pair'."
        )
    # Negatives mined for each private query by itself are part of its row, which a
    # finite epsilon covers; `hard_negatives` checks their origin.
    context = contexts.resolve(
        config,
        directory,
        devices,
        "a retriever trained on private queries",
        method_protects=config.method != "plain",
        trains=bool(config.steps or config.epochs),
        covered=("hard_negatives.run",),
    )
    sources.require_own_vocabulary(
        "vocabulary", context.vocabulary, context.tokenizer, config.init
    )
    mined = hard_negatives.inputs(config.hard_negatives, config.pairs, context.private)
    context = dataclasses.replace(context, inputs={**context.inputs, **mined})
    stage = workdir.run_stage(
        context.output,
        config,
        context.inputs,
        lambda out: _make(config, context, out),
    )
    private_training.close_run(context.run_dir, directory)
    outcomes.require_converged(stage, directory, config.learning_rate)
    return stage


def try_model(
    config: ml_collections.ConfigDict,
    vocabulary: str,
    init: str,
    devices: strategy.Devices = strategy.DEFAULT,
) -> None:
    """Builds the retriever to start from, and drops it: a job pays for others first.

    Raises:
      InputError: settings that do not fit each other, the weights or the vocabulary.
    """
    config = config.copy_and_resolve_references()
    config.vocabulary, config.init = vocabulary, init
    tokenizer = Tokenizer(vocabulary)
    sources.require_own_vocabulary("vocabulary", vocabulary, tokenizer, init)
    model = _untrained(config, tokenizer)
    tokenizer.require_embeddings(model.config.t5.vocabulary_size, bool(config.init))
    if config.method == "plain":
        plain_training.check_rows(
            config.rows_at_a_time, config.batch_size // devices.replicas
        )
    tf.keras.backend.clear_session()


def _make(
    config: ml_collections.ConfigDict,
    context: contexts.Context,
    out: pathlib.Path,
) -> dict:
    devices, parent, tokenizer = context.devices, context.parent, context.tokenizer
    if config.method != "plain":
        continuing.require_continuable(config, parent)
    with devices.scope():
        model = _untrained(config, tokenizer)
    tokenizer.require_embeddings(model.config.t5.vocabulary_size, bool(config.init))
    outcome = outcomes.Outcome(0)
    certificate = parent
    if config.steps or config.epochs:
        source = sources.load_source(config.pairs, config.split, config.unit)
        if source.private and config.method == "plain" and not config.n_is_public:
            raise validation.InputError(
                "method is 'plain' and the pairs are private: the certificate, which "
                "says that nothing is protected, states their exact number. Set "
                "n_is_public = True."
            )
        config = private_training.with_steps(
            config, private_training.public_n(config, source.count, source.private)
        )
        mined = hard_negatives.origin(
            config.hard_negatives, source, context.inputs["pairs"]
        )
        if not source.private:  # by post-processing; before any training
            certificate = certificates.inherited_certificate(source.certificate, parent)
        plan = None
        if config.method != "plain":
            units, plan = direct_training.planned(config, context, source)
        reads = private_training.record_losses(
            context.private,
            source,
            config.strict,
            plan is None and config.validation_pairs > 0,
        )
        with private_training.progress_of(
            context.run_dir,
            steps=config.steps,
            batch_size=config.batch_size,
            tokens=config.query_length + config.document_length,
            save_every=config.save_every,
            strict=config.strict,
        ) as progress:
            if plan is None:
                if source.private:
                    progress.epsilon = lambda step: math.inf
                with private_training.locked(context.run_dir):
                    plain_training.train(config, context, model, source, progress)
                outcome = outcomes.Outcome(config.steps)
            else:
                with private_training.open_run(
                    context.run_dir, config, context.inputs, context.output.directory
                ):
                    given = (config, context, model, source, progress)
                    outcome = direct_training.train(*given, units, plan)
        if plan is not None and not devices.chief:
            return {}
        if source.private:
            facts = _facts(config, model, context.inputs, reads, mined, outcome)
            certificate = (
                _unprotected(config, source.count, facts)
                if plan is None
                else _protected(config, context, plan, outcome.paid, facts)
            )
    if not all(np.isfinite(v.numpy()).all() for v in model.trainable_variables):
        raise validation.InputError(
            "training diverged: the weights hold NaN or infinity. Lower "
            f"learning_rate (now {config.learning_rate})."
        )
    retriever.save(model, out / layout.RETRIEVER_MODEL)
    records.write_certificate(out, certificate)
    return {"steps_executed": outcome.paid, **outcome.recorded()}


def _untrained(config: Any, tokenizer: Tokenizer) -> retriever.TwoTower:
    """Returns the retriever to start from: of `init`, or random by `t5`."""
    tf.keras.utils.set_random_seed(config.seed)
    own = {name: config[name] for name in _OF_MODEL}
    if config.init:
        trained = pathlib.Path(config.init) / layout.RETRIEVER_MODEL
        start = trained if trained.is_dir() else config.init
        model = retriever.TwoTower.from_preset(start, tokenizer, config.dtype, **own)
    else:
        shape = retriever.RetrieverConfig(T5Config(**config.t5), **own)
        model = retriever.TwoTower(shape, tokenizer, config.dtype)
    acting.require_shape(config, SETTINGS["t5"], model.config.t5)
    train_only(model, list(config.trained))
    if config.learned_scale and not model.scaled.trainable_weights:
        raise validation.InputError(
            f"learned_scale is True, but trained is {list(config.trained)}, without "
            "the scale. Add 'scale/*', or set learned_scale to False."
        )
    return model


def _unprotected(
    config: ml_collections.ConfigDict, n: int, facts: dict[str, Any]
) -> dict:
    """Returns a certificate of ordinary training on private pairs: no guarantee."""
    plan = privacy.make_plan(
        privacy.PrivacySpec(
            epsilon=math.inf,
            clip_norm=config.clip_norm,
            num_units=n,
            n_is_public=True,
            batch_size=config.batch_size,
            steps=config.steps,
            unit="pair" if config.unit == "pair" else "query",
            sampler="shuffled",
        )
    )
    return privacy.make_certificate(
        plan,
        config.steps,
        description="A two-tower retriever trained on private pairs, unprotected.",
        sensitivity_argument="None: nothing is clipped and no noise is added.",
        **facts,
    )


def _protected(
    config: ml_collections.ConfigDict,
    context: contexts.Context,
    plan: privacy.PrivacyPlan,
    steps: int,
    facts: dict[str, Any],
) -> dict:
    """Returns the certificate of direct training, for the steps that were paid."""
    return continuing.certificate_of(
        config,
        context,
        plan,
        steps,
        description="A two-tower retriever trained directly on private pairs.",
        sensitivity_argument=direct_training.ARGUMENTS[config.method].format(
            unit=config.unit
        ),
        **facts,
    )


def _facts(
    config: Any,
    model: Any,
    inputs: dict[str, str],
    reads: list,
    mined: str,
    outcome: outcomes.Outcome,
) -> dict[str, Any]:
    training = private_training.training_facts(config, model)
    if config.method == "plain":
        training.update(engine="none: one gradient of the mean loss")
    return {
        "training": {
            **training,
            **direct_training.facts(config, model),
            "hard_negatives": mined,
            **outcome.recorded(),
        },
        "fingerprints": {**inputs, "code": privacy.code_fingerprint()},
        "private_reads": reads,
    }


if __name__ == "__main__":
    command.main(run, strategy.STRATEGIES, spends=True)
