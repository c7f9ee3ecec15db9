"""Attacks of an audit: scores of a set, and queries to tell apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from sacrebleu.metrics import CHRF

from tfdpsq import evaluation
from tfdpsq.data import BeirDirectory
from tfdpsq.data.beir import PairTable
from tfdpsq.data.texts import Pair
from tfdpsq.generator import Preprocessor
from tfdpsq.run.common.canary_set import ID_PREFIX, Canary
from tfdpsq.validation import InputError


def require_whole(
    made: Iterable[Canary], documents: Mapping[str, str], preprocessor: Preprocessor
) -> None:
    """Refuses lengths with which training would cut off a canary's secret.

    `documents` maps ids to contents.
    """
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


def set_scores(
    queries: Iterable[tuple[str, str]], pairs: Sequence[Pair]
) -> dict[str, np.ndarray]:
    """Scores each pair's query by its similarity to a set's (document id, query).

    Returns:
      "language_model": [pairs] log-likelihood per word, in nats, under a 3-gram model
      of the whole set; "nearest": [pairs] the largest chrF, 0 to 100, with a query of
      the set for the same document, 0 where there is none.
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
            if not query_id.startswith(ID_PREFIX)
        ]
        return [rows[at] for at in random.permutation(len(rows))[:most]]

    inside = drawn([split])
    outside = drawn(other for other in beir.splits() if other != split)
    count = min(len(inside), len(outside))
    if count < 2:
        raise InputError(
            f"split {split!r} has {len(inside)} queries and the others "
            f"{len(outside)}. Give data with 2 of each."
        )
    members, others = (
        [table[row] for table, row in rows[:count]] for rows in (inside, outside)
    )
    return members, others
