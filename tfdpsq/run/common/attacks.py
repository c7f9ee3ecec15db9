"""Scores of attacks: how well a generator, or a synthetic set, predicts queries."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from sacrebleu.metrics import CHRF

from tfdpsq import evaluation
from tfdpsq.data import BeirDirectory
from tfdpsq.data.texts import Pair
from tfdpsq.generator import Preprocessor, QueryLikelihood
from tfdpsq.run.common.canary_set import ID_PREFIX, Canary
from tfdpsq.validation import InputError


def log_likelihoods(scorer: QueryLikelihood, pairs: Sequence[Pair]) -> np.ndarray:
    """Returns [pairs] float64, in nats, of queries cut as in training."""
    texts = ((pair.document, pair.query) for pair in pairs)
    return np.fromiter(scorer.scores(texts), np.float64, len(pairs))


def require_whole(
    made: Iterable[Canary], documents: Mapping[str, str], preprocessor: Preprocessor
) -> None:
    """Refuses lengths with which training would cut off a canary's secret.

    The secret ends its query, or its document: `documents` maps ids to contents.
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
                f"the canary of document {canary.document_id!r} has more than {name} = "
                f"{most} tokens, so that the secret at its end is never trained on. "
                f"Lower document_characters or query_characters of the canaries, or "
                f"train a generator with a larger {name}."
            )


def set_scores(
    queries: Iterable[tuple[str, str]], pairs: Sequence[Pair], order: int = 3
) -> dict[str, np.ndarray]:
    """Scores each pair's query by its similarity to a set of queries.

    `queries` are (document id, query) of the set, read once; `order` is that of the
    language model.

    Returns:
      "language_model": [pairs] log-likelihood per word, in nats, under an n-gram model
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

    model = evaluation.NgramModel(texts, order)
    return {
        "language_model": model.log_likelihoods(pair.query for pair in pairs),
        "nearest": np.array([nearest(pair) for pair in pairs]),
    }


def members_of(
    beir: BeirDirectory, split: str, other_splits: Sequence[str], most: int, seed: int
) -> tuple[list[Pair], list[Pair]]:
    """Draws training queries and held-out ones at random, without canaries.

    Raises:
      InputError: fewer than 2 of each.
    """
    random = np.random.default_rng(seed)
    trained = beir.pairs(split)
    names = enumerate(trained.query_ids())
    inside = [(trained, row) for row, name in names if not name.startswith(ID_PREFIX)]
    there = [other for other in other_splits if other in beir.splits()]
    tables = [beir.pairs(other) for other in there if other != split]
    outside = [(table, row) for table in tables for row in range(len(table))]
    count = min(most, len(inside), len(outside))
    if count < 2:
        raise InputError(
            f"there are {len(inside)} training queries and {len(outside)} in splits "
            f"{tuple(other_splits)}; a comparison takes 2 of each. Train on more, or "
            "name other splits with queries that were not trained on."
        )

    def drawn(rows: list[Any]) -> list[Pair]:
        chosen = (rows[at] for at in random.permutation(len(rows))[:count])
        return [table[row] for table, row in chosen]

    return drawn(inside), drawn(outside)


def guesses_of(guesses: Sequence[Any], coins: int) -> list[tuple[int, int]]:
    """Returns how many canaries with a coin are guessed in, and out, by each pair.

    Args:
      guesses: pairs of shares to guess in and out, each in [0, 1].
      coins: number of canaries with a coin; with 0, the shares alone are checked.

    Raises:
      InputError: no pair, or shares that give more guesses than there are.
    """
    if coins and not guesses:
        raise InputError(
            "guesses is empty, but there are canaries with a coin. Declare at least "
            "one pair of shares to guess in and out, such as ((0.2, 0.2),)."
        )
    found = []
    for pair in guesses:
        real = isinstance(pair, tuple) and all(
            isinstance(x, numbers.Real) for x in pair
        )
        if not real or len(pair) != 2 or min(pair) < 0 or sum(pair) > 1:
            raise InputError(
                f"guesses holds {pair!r}; nothing can be guessed both in and out. Give "
                "pairs of shares that add up to at most 1."
            )
        found.append(tuple(max(1, round(share * coins)) for share in pair))
        if coins and sum(found[-1]) > coins:
            raise InputError(
                f"guesses holds {pair}, which are {found[-1]} of the {coins} canaries "
                "with a coin: one at least of each. Lower one of the shares."
            )
    return found
