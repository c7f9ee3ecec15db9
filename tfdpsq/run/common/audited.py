"""The models, texts and scores that `audit` attacks a generator with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from sacrebleu.metrics import CHRF

from tfdpsq import evaluation
from tfdpsq.data import BeirDirectory, read_synthetic
from tfdpsq.data.beir import PairTable
from tfdpsq.data.texts import Pair
from tfdpsq.generator import Preprocessor, QueryLikelihood, T5QueryGenerator
from tfdpsq.run.common import canary_set
from tfdpsq.run.common.canary_set import Canary
from tfdpsq.run.frame.runner import Context
from tfdpsq.validation import InputError


class Subject:
    """The generator under audit, the weights it started from, and its set."""

    def __init__(self, c: Context):
        """Loads models and texts; raises InputError if training cut secrets off."""
        self.settings, canaries = c.settings, c.given["canaries"].path
        self.made = canary_set.read_canaries(canaries)
        self.pairs = BeirDirectory(f"{canaries}/{canary_set.DATA}")
        self.generator = generator = c.given["generator"]
        with c.scope():
            model = T5QueryGenerator.from_preset(generator.path)
            start = T5QueryGenerator.from_preset(generator.facts["init"])
            own: Any = model.preprocessor
            size = c.settings.batch_size
            self._own = QueryLikelihood(model, own, size)
            self._start = QueryLikelihood(start, own, size)
        wanted = {canary.document_id for canary in self.made}
        documents = self.pairs.documents()
        self.documents = {d.id: d.content for d in documents if d.id in wanted}
        require_whole(self.made, self.documents, own)
        self.preprocessor = own
        self.queries: list[tuple[str, str]] | None = None
        if c.given["synthetic"] is not None:
            # Of documents that end with a secret, queries were written with it in view.
            self.queries = [
                (row.document_id, row.query)
                for row in read_synthetic(c.given["synthetic"].path)
                if not row.document_id.startswith(canary_set.ID_PREFIX)
            ]

    def scores(self, pairs: Sequence[Pair], start: bool = False) -> np.ndarray:
        """Returns [pairs] log-likelihoods in nats, under either model."""
        texts = ((pair.document, pair.query) for pair in pairs)
        found = (self._start if start else self._own).scores(texts)
        return np.fromiter(found, np.float64, len(pairs))

    def attacked(
        self, pairs: Sequence[Pair], ratio: str, scores: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Returns [pairs] scores: of the ratio to the first weights, and of the set."""
        found = {ratio: scores - self.scores(pairs, start=True)}
        if self.queries is None:
            return found
        of_set = _set_scores(self.queries, pairs)
        return {**found, **{f"set_{name}": each for name, each in of_set.items()}}

    def pair(self, canary: Canary, secret: str | None = None) -> Pair:
        """Returns a canary, or one of its candidates, as a pair."""
        text = canary.document(self.documents[canary.document_id], secret)
        return Pair("", canary.query(secret), canary.document_id, text)


def require_whole(
    made: Iterable[Canary], documents: Mapping[str, str], preprocessor: Preprocessor
) -> None:
    """Refuses lengths that cut off a secret; `documents` maps ids to contents."""
    encode = preprocessor.tokenizer.encode
    for canary in made:
        if canary.in_document:
            text = canary.document(documents[canary.document_id])
            text, name = preprocessor.prompt + text, "document_length"
        else:
            text, name = canary.query(), "query_length"
        most = getattr(preprocessor, name)
        # One more token shows what would be cut.
        if encode([text], most + 1)[1][0] > most:
            raise InputError(
                f"a canary has more than {name} = {most} tokens, which cuts its secret "
                f"off. Lower document_characters or query_characters, or raise {name}."
            )


def _set_scores(
    queries: Iterable[tuple[str, str]], pairs: Sequence[Pair]
) -> dict[str, np.ndarray]:
    """Scores each pair's query by its similarity to a set's (document id, query).

    "language_model" is the log-likelihood per word under a 3-gram model of the set;
    "nearest" the largest chrF with a query of the set for the same document, or 0.
    """
    texts: list[str] = []
    of_document: dict[str, list[str]] = {pair.document_id: [] for pair in pairs}
    for document_id, query in queries:
        texts.append(query)
        if document_id in of_document:
            of_document[document_id].append(query)
    chrf = CHRF()

    def nearest(pair: Pair) -> float:
        others = of_document[pair.document_id]
        found = (chrf.sentence_score(other, [pair.query]).score for other in others)
        return max(found, default=0.0)

    model = evaluation.NgramModel(texts, 3)
    return {
        "language_model": model.log_likelihoods(pair.query for pair in pairs),
        "nearest": np.array([nearest(pair) for pair in pairs]),
    }


def members_of(
    beir: BeirDirectory, split: str, most: int, seed: int
) -> tuple[list[Pair], list[Pair]]:
    """Draws queries of a split, and as many of the others, without canaries."""
    random = np.random.default_rng(seed)

    def drawn(splits: Iterable[str]) -> list[tuple[PairTable, int]]:
        rows = [
            (table, row)
            for table in map(beir.pairs, splits)
            for row, (query_id, _) in enumerate(table.ids())
            if not query_id.startswith(canary_set.ID_PREFIX)
        ]
        return [rows[at] for at in random.permutation(len(rows))[:most]]

    both = drawn([split]), drawn(other for other in beir.splits() if other != split)
    sizes = [len(rows) for rows in both]
    if min(sizes) < 2:
        raise InputError(
            f"split {split!r} has {sizes[0]} queries and the others {sizes[1]}. Give "
            "data with 2 of each."
        )
    members, others = ([table[n] for table, n in rows[: min(sizes)]] for rows in both)
    return members, others
