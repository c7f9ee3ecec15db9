"""Count private queries by the cluster of their document, with noise.

    python -m tfdpsq.run.histogram --workdir=OUT --config.pairs=BEIR

Queries are of some documents more than of others, and a generator that writes one for
every document does not know. `synthesize --config.histogram=OUT` writes in proportion
to these counts; `finetune --config.histogram=OUT` counts what they cost within its own
epsilon, and the certificate of the generator, and of what it writes, is for both.

**Mechanism.** One step of the engine that trains models: the sum over all units of a
vector that is clipped to L2 norm 1, and Gaussian noise, released once. The vector of a
query, or a pair, has 1 at the cluster of its document and 0 elsewhere; that of a user
is the sum over up to `rows_per_unit` of its queries. Every unit takes part (q = 1).
**Sensitivity.** Adding or removing a unit adds or takes away its vector, of norm at
most 1, and leaves all others as they are: the clusters depend on the documents alone,
which are public. So the sum moves by at most 1 in L2.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import ml_collections
import numpy as np
import tensorflow as tf

from tfdpsq import privacy, validation
from tfdpsq.data import Pair
from tfdpsq.privacy.proof import budget
from tfdpsq.run.attacks import canary_set
from tfdpsq.run.core import (
    acting,
    command,
    records,
    releases,
    settings,
    sources,
    spending,
    workdir,
)
from tfdpsq.run.devices import strategy
from tfdpsq.run.passes import document_rates
from tfdpsq.run.passes.clusters import DocumentClusters
from tfdpsq.run.passes.document_rates import Histogram
from tfdpsq.run.training import context as contexts
from tfdpsq.run.training import private_training, training_settings

_SENSITIVITY = {
    "query": "Each query has one row, whose gradient is -1 at the cluster of its "
    "document and 0 elsewhere, and depends on nothing else. It is clipped to norm 1, "
    "so adding or removing one query moves the sum by at most 1.",
    "pair": "Each pair has one row, whose gradient is -1 at the cluster of its "
    "document and 0 elsewhere, and depends on nothing else. It is clipped to norm 1, "
    "so adding or removing one pair moves the sum by at most 1.",
    "user": "Each query belongs to one user. The gradients of the queries that are "
    "drawn of one user, each -1 at the cluster of its document and 0 elsewhere, are "
    "added up and clipped to norm 1 together, so adding or removing one user moves the "
    "sum by at most 1.",
}
# Settings of private training that this has, too.
_SHARED = (
    "delta",
    "accountant",
    "unit",
    "user_field",
    "rows_per_unit",
    "n_is_public",
    "n_bound",
    "secure",
    "strict",
    "private_directory",
)
_OF_TRAINING = training_settings.privacy_settings()
SETTINGS: settings.Declaration = {
    "pairs": settings.Text(sources.PYDOCS, required=True),
    "split": settings.Text("train", required=True),
    "clusters": settings.Integer(32, 2, 4096),
    # With a generator of epsilon 8, it costs about .02 of these.
    "epsilon": settings.Number(
        0.4, 0, training_settings.MOST_EPSILON, low_open=True, infinite=False
    ),
    **{name: _OF_TRAINING[name] for name in _SHARED},
    "microbatch_size": settings.Integer(4096),
    "seed": settings.Integer(0, 0, settings.SEED),
}
ACTING = (acting.Only("user_field rows_per_unit", "unit", ("user",)),)


def default_config() -> ml_collections.ConfigDict:
    """Returns the stage's settings.

    `clusters` is the number of counts. `seed` is that of the clusters, not of noise.
    For those that affect privacy see `training_settings.privacy_settings`.
    """
    return settings.default_config(SETTINGS)


def run(config: ml_collections.ConfigDict, directory: pathlib.Path) -> dict[str, Any]:
    """Runs the stage into `directory` unless it is finished there.

    Raises:
      InputError: bad settings, or pairs that are not private; before any budget is
        spent.
      DataError: malformed data.
    """
    acting.check(config, SETTINGS, ACTING)
    if sources.is_free(config.pairs):
        raise validation.InputError(
            f"pairs is {config.pairs}, a synthetic or public set: counts of it need no "
            "noise, and say nothing of private queries. Give a BEIR directory."
        )
    private = releases.private_directory(directory, config.private_directory)
    canary_set.require_private_output(config.pairs, private, directory)
    output = releases.Output(
        directory,
        contexts.guarantee_of_training(config.pairs, "", None, True, True),
        "counts of private queries",
        config.private_directory,
    )
    inputs = {
        "pairs": sources.source_fingerprint(config.pairs, private),
        "corpus": sources.corpus_fingerprint(config.pairs),
    }
    run_dir = private / workdir.RUNS / directory.name
    stage = workdir.run_stage(
        output, config, inputs, lambda out: _make(config, run_dir, output, inputs, out)
    )
    private_training.close_run(run_dir, directory)
    return stage


def _make(
    config: ml_collections.ConfigDict,
    run_dir: pathlib.Path,
    output: releases.Output,
    inputs: dict[str, str],
    out: pathlib.Path,
) -> dict[str, Any]:
    source = sources.load_source(config.pairs, config.split, config.unit)
    units = private_training.units_of(source, config.unit, config.user_field)
    plan = privacy.make_plan(private_training.counting_spec(config, units))
    if not canary_set.holds_canaries(config.pairs):
        spending.require_within(
            [budget.Run(run_dir.name, plan, plan.spec.steps, inputs["pairs"])]
        )
    reads = records.all_private_reads(run_dir.parents[1])
    beir = sources.open_beir(config.pairs)
    clusters = DocumentClusters.fit(beir.documents, config.clusters, config.seed)
    documents = np.zeros([clusters.count], np.int64)
    for _, cluster in clusters.stream(beir.documents()):
        documents[cluster] += 1
    with private_training.open_run(run_dir, config, inputs, output.directory):
        rows = private_training.stored_rows(
            run_dir, source.read(), lambda pairs: _rows(clusters, pairs)
        )
        counts = _noisy_counts(
            plan,
            units,
            clusters.count,
            rows.take,
            config.microbatch_size,
            directory=run_dir,
            data_fingerprint=inputs["pairs"],
        )
    Histogram(
        clusters,
        tuple(documents.tolist()),
        tuple(counts.tolist()),
        inputs["corpus"],
    ).save(out)
    released = document_rates.fingerprint(out)
    certificate = privacy.make_certificate(
        plan,
        1,
        description=f"A histogram: private queries counted by {clusters.count} "
        "clusters of their documents, with noise. It was computed as one step of "
        "DP-SGD, in which the gradient of a row is minus its vector of counts.",
        sensitivity_argument=_SENSITIVITY[config.unit],
        training={"cells": clusters.count, "engine": "fast"},
        fingerprints={
            **inputs,
            "histogram": released,
            "code": privacy.code_fingerprint(),
        },
        private_reads=reads,
        run_id=private_training.run_id(run_dir),
    )
    records.write_certificate(out, certificate)
    return {"clusters": clusters.count, "noise_stddev": plan.noise_stddev}


def _rows(clusters: DocumentClusters, pairs: Sequence[Pair]) -> dict[str, np.ndarray]:
    found = clusters.of([pair.document for pair in pairs])
    return {"cluster": found.astype(np.int32)[:, None]}


def _noisy_counts(
    plan: privacy.PrivacyPlan,
    units: private_training.Units,
    cells: int,
    take: Any,
    microbatch_size: int,
    **kept: Any,
) -> np.ndarray:
    """Takes the step: the loss of a row is minus the weight of its cluster.

    The engine divides the noised sum by the expected batch, n, and the learning rate is
    n: from weights of 0, one step goes to the sum itself.
    """
    # In float64, as rounding would move other counts, too.
    layer = tf.keras.layers.Embedding(
        cells, 1, embeddings_initializer="zeros", dtype="float64"
    )
    layer.build([None, 1])
    rate = float(plan.spec.batch_size)
    private_training.train(
        strategy.DEFAULT,
        layer,
        plan,
        lambda batch: -layer(batch["cluster"])[:, 0, 0],
        # Not the new one, whose rate is a float32.
        tf.keras.optimizers.legacy.SGD(rate),
        take,
        min(microbatch_size, plan.max_rows),
        layers=[layer],
        units=units,
        save_every=1,
        **kept,
    )
    return layer.get_weights()[0][:, 0]


if __name__ == "__main__":
    command.main(run, spends=True)
