r"""Train a map of query embeddings on private pairs, for any public encoder.

    tfdpsq train_adapter --workdir=OUT --config.pairs=BEIR \
        --config.documents=EMBEDDINGS --config.queries=EMBEDDINGS

A matrix on an encoder's query embeddings learns from private queries; embeddings of
documents, with any index of them, stay as they are. `documents` and `queries` are what
`embed` wrote, or embeddings by an encoder of your own (see `common.embeddings`). Writes
`adapter.npy`, [D, D] float32: search with `queries @ adapter`, scaled to unit length.
`evaluate` takes the output as a system.

**Sensitivity.** One unit more or less moves the sum of clipped gradients by the clip
norm at most, whatever the batch (see `_ARGUMENT`), if the embedding of a query follows
from that query and public data alone: the encoder must not have been trained on the
pairs. Where an encoder embeds several queries at a time, the last bit of one can depend
on the others; such rounding is not covered.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpsq import layers, privacy
from tfdpsq.data import Pair
from tfdpsq.privacy.training import digest_of_weights
from tfdpsq.run.common import corpus, embeddings, hard_negatives, kinds, training
from tfdpsq.run.common.kinds import ADAPTER_FILE
from tfdpsq.run.frame.places import Privacy
from tfdpsq.run.frame.runner import Context, Given
from tfdpsq.run.frame.settings import nested, path, setting
from tfdpsq.validation import DataError, InputError

_ARGUMENT = (
    "Each {unit} has rows of its own. A row's loss is a softmax over its own document, "
    "its hard negatives, which follow from its query and public data, and documents "
    "drawn from the public corpus without looking at the pairs. It reads no other row. "
    "The gradient of a {unit} is clipped to the clip norm, so adding or removing one "
    "moves the sum by at most the clip norm."
)
# (learning rate, steps) where gradients are clipped, and without epsilon.
_CLIPPED, _UNCLIPPED = (2.0, 40), (0.3, 80)
_MOMENTUM = 0.9


class TrainAdapter(training.Training):
    """Trains a matrix on query embeddings."""

    name, strategies = "train_adapter", ("default",)

    @dataclasses.dataclass(frozen=True)
    class Settings(training.PrivacySettings):
        """Settings of `train_adapter`; `seed` is of the negatives drawn."""

        clip_norm: float = setting(1.0, gt=0, le=1e6)
        documents: str = path(kinds.Embeddings, help="of the whole corpus")
        queries: str = path(kinds.Embeddings)
        encoder_is_public: bool = setting(
            False,
            help="declares that no private query had a part in the weights of an "
            "encoder that embed did not run",
        )
        hard_negatives: Any = nested(hard_negatives.HardNegativesSettings)
        negatives: int = setting(
            16_384, ge=1, le=10**6, help="drawn from the corpus, for all rows and steps"
        )
        scale: float = setting(20.0, ge=1e-3, le=1e4, help="of cosines")
        sampling_probability: float = setting(
            0.5, gt=0, le=1, help="share of the units that a step draws"
        )
        microbatch_size: int = setting(512, ge=1, speed=True)
        steps: int = setting(
            0, ge=0, le=10**9, help="0 is 40 with a finite epsilon, 80 without"
        )
        learning_rate: float = setting(
            0.0, ge=0, le=1e3, help="falls to 0; 0 is 2 with a finite epsilon, else 0.3"
        )

    def check(self, s: Settings, given: Given) -> None:
        """Refuses what no ε would cover."""
        if not given["pairs"].raw:
            raise InputError(
                f"pairs is {s.pairs}, a synthetic or public set. Give a BEIR directory."
            )
        hard_negatives.check(s, given)
        if s.hard_negatives.corpus:
            raise InputError(
                f"hard_negatives.corpus is {s.hard_negatives.corpus!r}, but embeddings "
                f"are of {s.pairs}. Leave it at ''."
            )
        documents = given["documents"]
        if documents.privacy > Privacy.PUBLIC:
            raise InputError(
                f"documents is {s.documents}, which private queries had a part in: its "
                f"class is {documents.privacy.word}. Embed by a public encoder."
            )

    def also(self, c: Context) -> dict[str, str]:
        """Documents are public, and named by the fingerprint that `embed` compares."""
        file = str(c.given["pairs"].beir().corpus_file)
        return {"corpus": corpus.scan(file).fingerprint}

    def plan(self, c: Context) -> training.Planned:
        """See `Training.plan`; a rate and steps of 0 are replaced."""
        s, units = c.settings, training.units_of(c)
        rate, steps = _CLIPPED if math.isfinite(s.epsilon) else _UNCLIPPED
        s = dataclasses.replace(
            s, learning_rate=s.learning_rate or rate, steps=s.steps or steps
        )
        batch = max(1, round(s.sampling_probability * units.n))
        spec = training.spec_of(s, units, batch_size=batch)
        return s, units, privacy.make_plan(spec)

    def run(self, c: Context) -> dict[str, Any]:
        """Plans, pays, trains, and writes the matrix."""
        documents, queries = _opened(c)
        mined = hard_negatives.origin(c)
        planned = s, units, plan = self.plan(c)
        beir = c.given["pairs"].beir()
        documents.require((d.id for d in beir.documents()), s.pairs)
        inner = tf.keras.Input([documents.store.width])
        model = tf.keras.Model(inner, layers.QueryAdapter()(inner))
        loss = layers.sampled_softmax(_drawn(s, documents), s.scale)
        rate = tf.keras.optimizers.schedules.CosineDecay(s.learning_rate, s.steps)
        training.open_run(c, plan)
        encode = _encoding(c, documents, queries)
        result = training.train(
            c,
            planned,
            model,
            lambda batch: loss(batch["documents"], model(batch["query"])),
            tf.keras.optimizers.SGD(rate, momentum=_MOMENTUM),
            training.stored_rows(c, units.rows.read(), encode).take,
            min(s.microbatch_size, plan.max_rows),
            layers=[model],
            engine=s.engine,
        )
        (matrix,) = model.get_weights()
        np.save(c.out / ADAPTER_FILE, matrix)
        names = ("engine", "learning_rate", "scale", "negatives")
        facts = {
            "encoder": documents.encoder,
            "encoder_is_public": "by its record" if documents.by_embed else "declared",
            "trained_parameters": int(matrix.size),
            "weights": digest_of_weights(model.weights),
            "hard_negatives": mined,
            "optimizer": f"sgd with momentum {_MOMENTUM}",
            "schedule": "cosine",
            **{name: getattr(s, name) for name in names},
        }
        training.certify(
            c,
            plan,
            result,
            facts,
            description="A linear map of an encoder's query embeddings.",
            sensitivity_argument=_ARGUMENT.format(unit=s.unit),
        )
        return {**result, "encoder": documents.encoder}


def _opened(c: Context) -> tuple[embeddings.Embeddings, embeddings.Embeddings]:
    """Opens the embeddings of documents and of queries, which fit the pairs."""
    s, given = c.settings, c.given
    documents, queries = (
        embeddings.Embeddings(given[name], name, name)
        for name in (embeddings.DOCUMENTS, embeddings.QUERIES)
    )
    embeddings.require_one_encoder(documents, queries)
    if not documents.by_embed and not s.encoder_is_public:
        raise InputError(
            f"documents is {s.documents}, by {documents.encoder!r}, not run by embed. "
            "Set encoder_is_public to True if no private query had a part in it."
        )
    documents.require_made_of(c.inputs["corpus"], s.pairs)
    queries.require_made_of(c.inputs["pairs"], s.pairs, s.split)
    return documents, queries


def _drawn(s: Any, documents: embeddings.Embeddings) -> np.ndarray:
    """Returns embeddings of documents, drawn by a public seed from the corpus alone.

    Those of all zeros, which have no direction, are left out.
    """
    size = documents.store.size
    random = np.random.default_rng(s.seed)
    places = random.choice(size, min(s.negatives, size), replace=False)
    vectors = documents.store.vectors[np.sort(places)]
    vectors = vectors[vectors.any(axis=1)]
    if not len(vectors) or not np.isfinite(vectors).all():
        problem = "documents hold NaN or infinity, or are all zeros"
        raise DataError(s.documents, problem, "Embed them again.")
    return vectors


def _encoding(
    c: Context, documents: embeddings.Embeddings, queries: embeddings.Embeddings
) -> Callable[[Sequence[Pair]], dict[str, np.ndarray]]:
    """Returns what makes rows of pairs, each from its own pair and public data.

    "query" is [B, D]; "documents" [B, 1 + H, D], its own, hard negatives, and zeros.
    """
    mined = c.given[hard_negatives.RUN] is not None
    find = hard_negatives.NegativeTable(c).find if mined else lambda query: []
    count = 1 + (c.settings.hard_negatives.count if mined else 0)

    def encode(pairs: Sequence[Pair]) -> dict[str, np.ndarray]:
        names = [[p.document_id, *(d for d, _ in find(p.query_id))] for p in pairs]
        found = np.zeros([len(pairs), count, documents.store.width], np.float32)
        places = [(row, at) for row, own in enumerate(names) for at in range(len(own))]
        found[tuple(zip(*places))] = documents.take(list(itertools.chain(*names)))
        asked = queries.take([pair.query_id for pair in pairs])
        return {"query": asked, "documents": found}

    return encode


STAGE = TrainAdapter()
