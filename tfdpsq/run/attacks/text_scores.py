"""Scores of attacks: how well a generator, or a synthetic set, predicts queries."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from sacrebleu.metrics import CHRF

from tfdpsq import evaluation, validation
from tfdpsq.data import Tokenizer
from tfdpsq.data.texts import Document, Pair
from tfdpsq.data.tokenization import PROMPT
from tfdpsq.generator import T5QueryGenerator, encode_pairs
from tfdpsq.layers.replicated import Replicated
from tfdpsq.run.attacks import canary_set


class LikelihoodScorer:
    """Log-likelihood of queries, given their documents, under a generator."""

    def __init__(
        self,
        model: T5QueryGenerator,
        tokenizer: Tokenizer,
        document_length: int,
        query_length: int,
        batch_size: int = 64,
        prompt: str = PROMPT,
    ):
        """Stores the arguments; runs nothing.

        In a strategy's scope, which the model was made in, each replica scores batches
        of its own.

        Args:
          model: the generator.
          tokenizer: its vocabulary.
          document_length: tokens kept of prompt and document.
          query_length: tokens kept of the query.
          batch_size: rows at a time; the last batch is padded.
          prompt: text before the document.
        """
        self._tokenizer = tokenizer
        self._lengths = (document_length, query_length)
        self._prompt = prompt
        self._batch_size = batch_size
        self._columns: tuple[str, ...] = ()
        self._losses = Replicated(
            lambda *values: model.per_example_losses(dict(zip(self._columns, values)))
        )

    def __call__(self, pairs: Sequence[Pair], cut: bool = False) -> np.ndarray:
        """Scores queries with their documents.

        Args:
          pairs: queries and documents.
          cut: whether to score an overlong query by its first tokens, as in training,
            or to refuse it.

        Returns:
          [pairs] float64, log-likelihood of the query's tokens and its end, in nats.

        Raises:
          InputError: a query with too many tokens, unless `cut`.
        """
        found = [np.zeros(0)]
        starts = iter(range(0, len(pairs), self._batch_size))
        while together := list(itertools.islice(starts, self._losses.at_a_time)):
            batches = []
            for start in together:
                part = list(pairs[start : start + self._batch_size])
                part += [part[-1]] * (self._batch_size - len(part))
                batches.append(self._encoded(part, cut))
            self._columns = tuple(batches[0])
            results = self._losses([tuple(batch.values()) for batch in batches])
            for batch, losses in zip(batches, results):
                nats = losses.numpy().astype(np.float64)
                found.append(-nats * batch["query_lengths"])
        return np.concatenate(found)[: len(pairs)]

    def _encoded(self, pairs: Sequence[Pair], cut: bool) -> dict[str, np.ndarray]:
        documents, queries = self._lengths
        # One extra token shows which queries would lose some. The batch without it has
        # the same shape, so that the model is traced once.
        batch = encode_pairs(
            pairs,
            self._tokenizer,
            query_length=queries + (not cut),
            document_length=documents,
            prompt=self._prompt,
        )
        if cut:
            batch["query_ids"] = np.pad(batch["query_ids"], [(0, 0), (0, 1)])
        else:
            _require_whole(pairs, batch, queries)
        return batch


def require_whole_canaries(
    made: Sequence[canary_set.Canary],
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    query_length: int,
    document_length: int,
    prompt: str = PROMPT,
) -> None:
    """Refuses lengths with which training would cut off a canary's secret.

    Args:
      made: the canaries.
      documents: read once, where a canary's secret is in its document.
      tokenizer: of the generator.
      query_length: tokens kept of a query, EOS included.
      document_length: tokens kept of prompt and document, EOS included.
      prompt: text before the document.

    Raises:
      InputError: names the canary's document, the length and the remedy.
    """
    if not made:
        return
    pairs = [Pair("", each.query(), each.document_id, "") for each in made]
    batch = encode_pairs(
        pairs, tokenizer, query_length=query_length + 1, document_length=1
    )
    # The secret is at the end of the query, or of the document.
    in_query = [row for row, each in enumerate(made) if not each.in_document]
    if in_query:
        lengths = {"query_lengths": batch["query_lengths"][in_query]}
        _require_whole([pairs[row] for row in in_query], lengths, query_length)
    own = {each.document_id: each for each in made if each.in_document}
    for document in documents if own else ():
        if document.id not in own:
            continue
        text = prompt + own[document.id].document(document.content)
        if len(tokenizer.pieces([text])[0]) + 1 > document_length:
            raise validation.InputError(
                f"document {document.id!r} with a canary's secret has more than "
                f"document_length = {document_length} tokens, so that the secret at "
                "its end is never trained on. Lower document_characters of the "
                "canaries, or train a generator with a larger document_length."
            )


def _require_whole(
    pairs: Sequence[Pair], batch: Mapping[str, np.ndarray], query_length: int
) -> None:
    cut = batch["query_lengths"] > query_length
    if cut.any():
        raise validation.InputError(
            f"a query of document {pairs[int(np.argmax(cut))].document_id!r} has more "
            f"than query_length = {query_length} tokens, so that its end is never "
            "trained on. Train a generator with a larger query_length."
        )


def set_scores(
    queries: Iterable[tuple[str, str]], pairs: Sequence[Pair], order: int = 3
) -> dict[str, np.ndarray]:
    """Scores each pair's query by its similarity to a set of queries.

    Args:
      queries: (document id, query) of the set, read once.
      pairs: pairs to score.
      order: of the language model.

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
