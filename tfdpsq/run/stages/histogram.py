"""Count private queries by the cluster of their document, with noise.

    tfdpsq histogram --workdir=OUT --config.pairs=BEIR

`synthesize --config.histogram=OUT` writes queries in proportion to these counts;
`finetune --config.histogram=OUT` counts what they cost within its own epsilon, and the
certificate of the generator, and of what it writes, is for both.

**Mechanism.** One step of the engine that trains models: the sum over all units of a
vector that is clipped to L2 norm 1, and Gaussian noise, released once. The vector of a
query, or a pair, has 1 at the cluster of its document and 0 elsewhere; that of a user
is the sum over up to `rows_per_unit` of its queries. Every unit takes part (q = 1), and
one more or less moves the sum by at most 1, as clusters depend on public documents
alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpsq import privacy
from tfdpsq.privacy.plan import MOST_EPSILON
from tfdpsq.run.common import corpus, documents, training
from tfdpsq.run.frame import settings
from tfdpsq.run.frame.runner import Context, Given
from tfdpsq.run.frame.settings import setting
from tfdpsq.validation import InputError

_SENSITIVITY = (
    "Each {unit} has one row, whose gradient is -1 at the cluster of its document and "
    "0 elsewhere, and depends on nothing else. It is clipped to norm 1, so adding or "
    "removing one {unit} moves the sum by at most 1."
)
_OF_USERS = (
    "Each query belongs to one user. The gradients of the queries that are drawn of "
    "one user, each -1 at the cluster of its document and 0 elsewhere, are added up "
    "and clipped to norm 1 together, so adding or removing one user moves the sum by "
    "at most 1."
)


class Histogram(training.Training):
    """Releases noisy counts of private queries."""

    name, strategies = "histogram", ("default",)

    @dataclasses.dataclass(frozen=True)
    class Settings(training.UnitSettings):
        """Settings of `histogram`."""

        epsilon: float = setting(
            0.4,
            gt=0,
            le=MOST_EPSILON,
            help="with a generator of epsilon 8, it costs about .02 of these",
        )
        clusters: int = setting(32, ge=2, le=4096, help="number of counts")
        microbatch_size: int = setting(4096, ge=1, speed=True)
        seed: int = setting(0, ge=0, le=settings.SEED, help="of clusters, not of noise")

    def check(self, s: Settings, given: Given) -> None:
        """Refuses pairs that are not private."""
        if not given["pairs"].raw:
            raise InputError(
                f"pairs is {s.pairs}, a synthetic or public set. Give a BEIR directory."
            )

    def reads(self, s: Settings, given: Given) -> list[tuple[str, str]]:
        """The release is all that anybody sees."""
        return []

    def also(self, c: Context) -> dict[str, str]:
        """`synthesize` compares its corpus with that of the pairs."""
        file = str(c.given["pairs"].beir().corpus_file)
        return {"corpus": corpus.scan(file).fingerprint}

    def plan(self, c: Context) -> training.Planned:
        """See `Training.plan`: one step, in which every unit takes part."""
        s, units = c.settings, training.units_of(c)
        own = {"sampler": "poisson", "batch_size": units.n, "steps": 1}
        spec = training.spec_of(s, units, clip_norm=1.0, **own)
        return s, units, privacy.make_plan(spec)

    def run(self, c: Context) -> dict[str, Any]:
        """Plans, pays, and counts."""
        s, units, plan = self.plan(c)
        beir = c.given["pairs"].beir()
        clusters = documents.DocumentClusters.fit(beir.documents, s.clusters, s.seed)
        sizes = np.zeros([s.clusters], np.int64)
        for _, cluster in clusters.stream(beir.documents()):
            sizes[cluster] += 1

        def rows_of(pairs: list) -> dict[str, np.ndarray]:
            found = clusters.of([pair.document for pair in pairs])
            return {"cluster": found.astype(np.int32)[:, None]}

        training.open_run(c, plan)
        stored = training.stored_rows(c, units.rows.read(), rows_of)
        counts = _noisy_counts(c, plan, units, s.clusters, stored.take)
        documents.Histogram(
            clusters, sizes.tolist(), counts.tolist(), c.inputs["corpus"]
        ).save(c.out)
        argument = _OF_USERS if s.unit == "user" else _SENSITIVITY
        training.certify(
            c,
            plan,
            {"steps_executed": 1},
            {"cells": s.clusters, "engine": "fast"},
            description=f"A histogram: private queries counted by {s.clusters} "
            "clusters of their documents, with noise. It was computed as one step of "
            "DP-SGD, in which the gradient of a row is minus its vector of counts.",
            sensitivity_argument=argument.format(unit=s.unit),
        )
        return {"clusters": s.clusters, "noise_stddev": plan.noise_stddev}


def _noisy_counts(
    c: Context, plan: privacy.PrivacyPlan, units: training.Units, cells: int, take: Any
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
    privacy.train(
        plan,
        lambda batch: -layer(batch["cluster"])[:, 0, 0],
        layer.trainable_variables,
        # Not the new one, whose rate is a float32.
        tf.keras.optimizers.legacy.SGD(float(plan.spec.batch_size)),
        take,
        min(c.settings.microbatch_size, plan.max_rows),
        layers=[layer],
        units=units.count if units.groups is None else units.groups,
        directory=c.place.run,
        data_fingerprint=c.inputs["pairs"],
        save_every=1,
    )
    return layer.get_weights()[0][:, 0]


STAGE = Histogram()
