"""Scores of attacks: how well a generator, or a synthetic set, predicts queries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from sacrebleu.metrics import CHRF

from tfdpsq import evaluation, validation
from tfdpsq.data.texts import Document, Pair
from tfdpsq.generator import Preprocessor, QueryLikelihood
from tfdpsq.run.attacks import canary_set


class LikelihoodScorer(QueryLikelihood):
    """Log-likelihood of pairs under a generator, whose queries are whole or refused."""

    def __call__(self, pairs: Sequence[Pair], cut: bool = False) -> np.ndarray:
        """Scores queries with their documents.

        With `cut` an overlong query is scored by its first tokens, as in training.

        Returns:
          [pairs] float64, log-likelihood of the query's tokens and its end, in nats.

        Raises:
          InputError: a query with too many tokens, unless `cut`.
        """
        for start in range(0, 0 if cut else len(pairs), self.batch_size):
            part = pairs[start : start + self.batch_size]
            _require_whole(part, self.preprocessor)
        texts = ((pair.document, pair.query) for pair in pairs)
        return np.fromiter(self.scores(texts), np.float64, len(pairs))


def require_whole_canaries(
    made: Sequence[canary_set.Canary],
    documents: Iterable[Document],
    own: Preprocessor,
) -> None:
    """Refuses lengths with which training would cut off a canary's secret.

    `documents` are read once, where a canary's secret is in its document.
    """
    if not made:
        return
    # The secret is at the end of the query, or of the document.
    in_query = [
        Pair("", each.query(), each.document_id, "")
        for each in made
        if not each.in_document
    ]
    if in_query:
        _require_whole(in_query, own)
    in_document = {each.document_id: each for each in made if each.in_document}
    for document in documents if in_document else ():
        if document.id not in in_document:
            continue
        text = own.prompt + in_document[document.id].document(document.content)
        if len(own.tokenizer.pieces([text])[0]) + 1 > own.document_length:
            raise validation.InputError(
                f"document {document.id!r} with a canary's secret has more than "
                f"document_length = {own.document_length} tokens, so that the secret "
                "at its end is never trained on. Lower document_characters of the "
                "canaries, or train a generator with a larger document_length."
            )


def _require_whole(pairs: Sequence[Pair], own: Preprocessor) -> None:
    query_length = own.query_length
    # One extra token shows which queries would lose some.
    _, lengths = own.tokenizer.encode([pair.query for pair in pairs], query_length + 1)
    overlong = np.asarray(lengths) > query_length
    if overlong.any():
        raise validation.InputError(
            f"a query of document {pairs[int(np.argmax(overlong))].document_id!r} has "
            f"more than query_length = {query_length} tokens, so that its end is never "
            "trained on. Train a generator with a larger query_length."
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
    texts = []
    of_document: dict[str, list[str]] = {}
    wanted = {pair.document_id for pair in pairs}
    for document_id, query in queries:
        texts.append(query)
        if document_id in wanted:
            of_document.setdefault(document_id, []).append(query)
    model = evaluation.NgramModel(texts, order)
    chrf = CHRF()
    nearest = []
    for pair in pairs:
        others = of_document.get(pair.document_id, [])
        nearest.append(
            max(
                (chrf.sentence_score(other, [pair.query]).score for other in others),
                default=0.0,
            )
        )
    likelihood = model.log_likelihoods(pair.query for pair in pairs)
    return {"language_model": likelihood, "nearest": np.array(nearest)}
