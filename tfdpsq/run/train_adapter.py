r"""Train a map of query embeddings on private pairs, for any public encoder.

    python -m tfdpsq.run.train_adapter --workdir=OUT --config.pairs=BEIR \
        --config.documents=EMBEDDINGS --config.queries=EMBEDDINGS

A strong encoder that anybody can download knows nothing of your queries. Here a matrix
on its query embeddings learns from them; the encoder does not run, and embeddings of
documents, with any index of them, stay as they are. `documents` and `queries` are what
`encode` wrote, or embeddings by an encoder of your own (see `passes.given_embeddings`).
Writes `adapter.npy`, [D, D] float32: search with `queries @ adapter`, scaled to unit
length. `evaluate` takes the output as a system.

**Sensitivity.** A row's loss is a softmax over its own document, its hard negatives and
documents drawn from the whole corpus, without looking at the pairs (see
`layers.sampled_softmax`). It reads no other row. So adding or removing a unit moves the
sum of clipped gradients by the clip norm C at most, whatever the batch. It holds if the
embedding of a query follows from that query and public data alone: the encoder must not
have been trained on the pairs. Where an encoder embeds several queries at a time, the
last bit of one can depend on the others; such rounding is not covered.
"""

from __future__ import annotations

import functools
import itertools
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import ml_collections
import numpy as np
import tensorflow as tf

from tfdpsq import layers, privacy, validation
from tfdpsq.data import Pair, RowStore
from tfdpsq.privacy.proof import budget
from tfdpsq.privacy.training import digest_of_weights
from tfdpsq.run.attacks import canary_set
from tfdpsq.run.core import (
    acting,
    command,
    layout,
    records,
    releases,
    settings,
    sources,
    spending,
    workdir,
)
from tfdpsq.run.devices import strategy
from tfdpsq.run.passes import given_embeddings
from tfdpsq.run.training import (
    adapter_training,
    hard_negatives,
    outcomes,
    private_training,
    training_settings,
)
from tfdpsq.run.training import context as contexts

_ARGUMENT = (
    "Each {unit} has rows of its own. A row's loss is a softmax over its own document, "
    "its hard negatives, which follow from its query and public data, and documents "
    "drawn from the public corpus without looking at the pairs. It reads no other row. "
    "The gradient of a {unit} is clipped to the clip norm, so adding or removing one "
    "moves the sum by at most the clip norm."
)
SETTINGS: settings.Declaration = {
    "pairs": settings.Text(sources.PYDOCS, required=True),
    "split": settings.Text("train", required=True),
    # Directories with `documents/` of the whole corpus, and with `queries/`.
    "documents": settings.Text(""),
    "queries": settings.Text(""),
    # Declares that no private query had a part in the weights of an encoder that
    # `encode` did not run.
    "encoder_is_public": settings.Flag(False),
    **hard_negatives.declared(),
    # Documents drawn from the corpus, the same for all rows and steps.
    "negatives": settings.Integer(16_384, 1, 10**6),
    # The inverse of the softmax's temperature.
    "scale": settings.Number(20.0, 1e-3, 1e4),
    **settings.with_defaults(training_settings.privacy_settings(), clip_norm=1.0),
    # Share of the units in a step; the expected batch is this times their number.
    "sampling_probability": settings.Number(0.5, 0, 1, low_open=True),
    "microbatch_size": settings.Integer(512),
    # 0 takes 40 with a finite epsilon, 80 without.
    "steps": settings.Integer(0, 0, settings.STEPS),
    # Gradient descent; the rate falls to 0 along a cosine. 0 takes 2 with a finite
    # epsilon, and 0.3 without, where gradients are not clipped.
    "learning_rate": settings.Number(0.0, 0, 1e3),
    "momentum": settings.Number(0.9, 0, 1, high_open=True),
    "jit_compile": settings.Flag(False),
    # Of the negatives that are drawn, not of noise.
    "seed": settings.Integer(0, 0, settings.SEED),
}
ACTING = (
    acting.Only("hard_negatives.*", "hard_negatives.run"),
    acting.Only("user_field", "unit", ("user",)),
)


def default_config() -> ml_collections.ConfigDict:
    """Returns the stage's settings.

    For those that affect privacy see `training_settings.privacy_settings`.
    """
    return settings.default_config(SETTINGS)


def run(config: ml_collections.ConfigDict, directory: pathlib.Path) -> dict[str, Any]:
    """Runs the stage into `directory` unless it is finished there.

    Raises:
      InputError: bad settings, pairs that are not private, or embeddings that do not
        fit them; before any budget is spent.
      DataError: malformed data.
      DivergedError: training diverged. The adapter of the last good step is in
        `directory`, with the certificate of all that was paid.
    """
    acting.check(config, SETTINGS, ACTING)
    config = adapter_training.resolved(config)
    if sources.is_free(config.pairs):
        raise validation.InputError(
            f"pairs is {config.pairs}, a synthetic or public set; this stage learns "
            "from private pairs. Give a BEIR directory."
        )
    hard_negatives.require_unit(config.hard_negatives.run, config.unit)
    private = releases.private_directory(directory, config.private_directory)
    canary_set.require_private_output(config.pairs, private, directory)
    protected = math.isfinite(float(config.epsilon))
    output = releases.Output(
        directory,
        contexts.guarantee_of_training(config.pairs, "", None, True, protected),
        "a map of query embeddings that learnt from private queries",
        config.private_directory,
        # They are private queries in another form, which a finite epsilon protects.
        unused=("queries", "hard_negatives.run") if protected else (),
    )
    given = given_embeddings.open_both(
        config.documents, config.queries, config.encoder_is_public
    )
    documents, queries = given
    inputs = {
        "pairs": sources.source_fingerprint(config.pairs, private),
        "corpus": sources.corpus_fingerprint(config.pairs),
        "documents": documents.store.fingerprint,
        "queries": sources.keyed_fingerprint(queries.store.fingerprint, private),
        **hard_negatives.inputs(config.hard_negatives, config.pairs, private),
    }
    documents.require_corpus(inputs["corpus"])
    if inputs.get("hard_negatives_corpus", inputs["corpus"]) != inputs["corpus"]:
        raise validation.InputError(
            f"hard_negatives.corpus is {config.hard_negatives.corpus!r}, with other "
            f"documents than {config.pairs}, whose embeddings are read by id. Mine in "
            "the pairs' own corpus, and leave hard_negatives.corpus at ''."
        )
    queries.require_queries(config.pairs, config.split, private)
    run_dir = private / workdir.RUNS / directory.name
    make = functools.partial(_make, config, run_dir, output, inputs, given)
    stage = workdir.run_stage(output, config, inputs, make)
    private_training.close_run(run_dir, directory)
    outcomes.require_converged(stage, directory, config.learning_rate)
    return stage


def _make(
    config: ml_collections.ConfigDict,
    run_dir: pathlib.Path,
    output: releases.Output,
    inputs: dict[str, str],
    given: tuple[given_embeddings.Embeddings, given_embeddings.Embeddings],
    out: pathlib.Path,
) -> dict[str, Any]:
    source = sources.load_source(config.pairs, config.split, config.unit)
    mined = hard_negatives.origin(config.hard_negatives, source, inputs["pairs"])
    units = private_training.units_of(source, config.unit, config.user_field)
    plan = privacy.make_plan(adapter_training.spec_of(config, units))
    if not canary_set.holds_canaries(config.pairs):
        spending.require_within(
            [budget.Run(run_dir.name, plan, plan.spec.steps, inputs["pairs"])]
        )
    documents, queries = (embeddings.places() for embeddings in given)
    documents.require_all(sources.open_beir(config.pairs).documents(), config.pairs)
    width = given[0].store.width
    inner = tf.keras.Input([width])
    model = tf.keras.Model(inner, layers.QueryAdapter()(inner))
    loss = layers.sampled_softmax(_drawn(config, given[0]), config.scale)
    with private_training.open_run(run_dir, config, inputs, output.directory):
        encode = _encoding(documents, queries, config.hard_negatives, source, width)
        rows = private_training.stored_rows(run_dir, source.read(), encode)
        reads = private_training.record_losses(
            run_dir.parents[1], source, config.strict
        )
        outcome = _trained(config, run_dir, inputs, plan, units, (model, loss), rows)
    (matrix,) = model.get_weights()
    np.save(out / layout.ADAPTER_FILE, matrix)
    facts = {
        "encoder": given[0].encoder,
        "encoder_is_public": "by its record" if given[0].stage else "declared",
        "trained_parameters": int(matrix.size),
        "weights": digest_of_weights(model.weights),
        "hard_negatives": mined,
        **outcome.recorded(),
    }
    certificate = privacy.make_certificate(
        plan,
        outcome.paid,
        description="A linear map of an encoder's query embeddings.",
        sensitivity_argument=_ARGUMENT.format(unit=config.unit),
        training={**facts, **_of_training(config)},
        fingerprints={**inputs, "code": privacy.code_fingerprint()},
        private_reads=reads,
        run_id=private_training.run_id(run_dir),
    )
    records.write_certificate(out, certificate)
    return {
        "steps_executed": outcome.paid,
        "encoder": given[0].encoder,
        **outcome.recorded(),
    }


def _trained(
    config: ml_collections.ConfigDict,
    run_dir: pathlib.Path,
    inputs: dict[str, str],
    plan: privacy.PrivacyPlan,
    units: private_training.Units,
    model_and_loss: tuple[tf.keras.Model, Callable[..., tf.Tensor]],
    rows: RowStore,
) -> outcomes.Outcome:
    model, loss = model_and_loss
    rate = tf.keras.optimizers.schedules.CosineDecay(config.learning_rate, config.steps)
    optimizer = tf.keras.optimizers.SGD(rate, momentum=config.momentum)
    with private_training.progress_of(
        run_dir,
        steps=config.steps,
        batch_size=plan.spec.batch_size,
        tokens=0,
        save_every=config.save_every,
        strict=config.strict,
    ) as progress:
        progress.epsilon = plan.epsilon_so_far
        return private_training.train(
            strategy.this_one(),
            model,
            plan,
            lambda batch: loss(batch["documents"], model(batch["query"])),
            optimizer,
            rows.take,
            min(config.microbatch_size, plan.max_rows),
            layers=[model],
            engine=config.engine,
            units=units,
            directory=run_dir,
            data_fingerprint=inputs["pairs"],
            save_every=config.save_every,
            on_step=progress,
            jit_compile=config.jit_compile,
        )


def _of_training(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Returns the settings that a certificate tells of the training."""
    names = ("engine", "learning_rate", "scale", "negatives")
    return {
        "optimizer": f"sgd with momentum {config.momentum}",
        "schedule": "cosine",
        **{name: config[name] for name in names},
    }


def _drawn(
    config: ml_collections.ConfigDict, documents: given_embeddings.Embeddings
) -> np.ndarray:
    """Returns embeddings of documents of the corpus, drawn by a public seed.

    Neither pairs nor queries have a part in it. Those of all zeros, which have no
    direction, are left out.

    Raises:
      InputError: all are.
    """
    size = documents.store.size
    random = np.random.default_rng(config.seed)
    places = random.choice(size, min(config.negatives, size), replace=False)
    vectors = documents.store.vectors[np.sort(places)]
    vectors = vectors[vectors.any(axis=1)]
    if not np.isfinite(vectors).all():
        raise validation.DataError(
            documents.path, "documents hold NaN or infinity", "Embed them again."
        )
    if not len(vectors):
        raise validation.InputError(
            f"documents is {documents.path}, of which {len(places)} were drawn, and "
            "their embeddings are all zeros. Embed them again."
        )
    return vectors


def _encoding(
    documents: given_embeddings.Places,
    queries: given_embeddings.Places,
    negatives: ml_collections.ConfigDict,
    source: sources.Source,
    width: int,
) -> Callable[[Sequence[Pair]], dict[str, np.ndarray]]:
    """Returns what makes rows of pairs, each from its own pair and public data.

    The rows are "query" [B, D] and "documents" [B, 1 + H, D]: the pair's own document,
    then its hard negatives, zeros for none.
    """
    table = hard_negatives.NegativeTable(negatives, source) if negatives.run else None
    count = 1 + (negatives.count if table else 0)

    def encode(pairs: Sequence[Pair]) -> dict[str, np.ndarray]:
        names = [
            [pair.document_id, *(table.ids(pair.query_id) if table else ())][:count]
            for pair in pairs
        ]
        found = np.zeros([len(pairs), count, width], np.float32)
        places = [(row, at) for row, own in enumerate(names) for at in range(len(own))]
        found[tuple(zip(*places))] = documents.take(list(itertools.chain(*names)))
        asked = queries.take([pair.query_id for pair in pairs])
        return {"query": asked, "documents": found}

    return encode


if __name__ == "__main__":
    command.main(run, spends=True)
