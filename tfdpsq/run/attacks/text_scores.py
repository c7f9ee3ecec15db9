"""What a generator, or a synthetic set, thinks of queries: the scores of attacks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import tensorflow as tf
from sacrebleu.metrics import CHRF

from tfdpsq import evaluation, validation
from tfdpsq.data import Tokenizer
from tfdpsq.data.texts import Pair
from tfdpsq.generator import T5QueryGenerator, encode_pairs


class LikelihoodScorer:
    """How likely a generator is to write queries for their documents."""

    def __init__(
        self,
        model: T5QueryGenerator,
        tokenizer: Tokenizer,
        document_length: int,
        query_length: int,
        batch_size: int = 64,
    ):
        """Takes the model; nothing is run.

        Args:
          model: the generator.
          tokenizer: its vocabulary.
          document_length: tokens kept of prompt and document.
          query_length: tokens kept of the query.
          batch_size: rows at a time; the last batch is filled up.
        """
        self._tokenizer = tokenizer
        self._lengths = (document_length, query_length)
        self._batch_size = batch_size
        self._losses = tf.function(lambda batch: model.per_example_losses(batch))

    def __call__(self, pairs: Sequence[Pair], cut: bool = False) -> np.ndarray:
        """Scores queries with their documents.

        Args:
          pairs: what to score.
          cut: whether a query that is too long is scored by its first tokens, as it
            was trained on, or refused.

        Returns:
          [pairs] float64, log-likelihood of the query's tokens and its end, in nats.

        Raises:
          InputError: a query with too many tokens, unless `cut`.
        """
        found = [np.zeros(0)]
        for start in range(0, len(pairs), self._batch_size):
            part = list(pairs[start : start + self._batch_size])
            real = len(part)
            part += [part[-1]] * (self._batch_size - real)
            batch = self._encoded(part, cut)
            losses = self._losses(batch).numpy().astype(np.float64)
            found.append((-losses * batch["query_lengths"])[:real])
        return np.concatenate(found)

    def _encoded(self, pairs: list[Pair], cut: bool) -> dict[str, np.ndarray]:
        documents, queries = self._lengths
        # One token more than is kept shows which queries would lose some; of the same
        # shape without it, so that the model is traced once.
        batch = encode_pairs(
            pairs,
            self._tokenizer,
            query_length=queries + (not cut),
            document_length=documents,
        )
        if cut:
            batch["query_ids"] = np.pad(batch["query_ids"], [(0, 0), (0, 1)])
        elif (batch["query_lengths"] > queries).any():
            row = int(np.argmax(batch["query_lengths"] > queries))
            raise validation.InputError(
                f"a query of document {pairs[row].document_id!r} has more than "
                f"query_length = {queries} tokens, so that its end was never trained "
                "on. Train a generator with a larger query_length."
            )
        return batch


def set_scores(
    queries: Iterable[tuple[str, str]], pairs: Sequence[Pair], order: int = 3
) -> dict[str, np.ndarray]:
    """How much a set of queries sounds like each pair's query: a receiver's view.

    Args:
      queries: (document id, query) of the set, read once.
      pairs: what to score.
      order: of the language model.

    Returns:
      "language_model": [pairs] log-likelihood for each word, in nats, under an n-gram
      model of the whole set; "nearest": [pairs] the largest chrF, 0 to 100, with a
      query that the set holds for the same document, 0 where it holds none.
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
    likelihood, nearest = [], []
    for pair in pairs:
        likelihood.append(model.log_likelihood(pair.query))
        others = of_document.get(pair.document_id, [])
        nearest.append(
            max(
                (chrf.sentence_score(other, [pair.query]).score for other in others),
                default=0.0,
            )
        )
    return {"language_model": np.array(likelihood), "nearest": np.array(nearest)}
