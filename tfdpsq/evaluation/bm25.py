"""BM25, the reference row of words alone, through the library bm25s.

Scores are Lucene's variant (Kamphuis et al. 2020), for a query q and document d:

  sum over t in q of ln(1 + (N - df + 0.5) / (df + 0.5))
                     * tf / (tf + k1 * (1 - b + b * |d| / mean |d|))

A word that comes twice in the query counts twice. Words are runs of two or more
letters, digits or underscores, in lower case, without Lucene's 33 English stop
words; there is no stemming.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable, Mapping
from typing import Any

import bm25s
import numpy as np
from bm25s.stopwords import STOPWORDS_EN
from tqdm import tqdm

from tfdpsq.evaluation.trec import ranked
from tfdpsq.validation import InputError, in_range, positive, positive_integer

_WORD = re.compile(r"(?u)\b\w\w+\b")
_STOP_WORDS = frozenset(STOPWORDS_EN)


class BM25:
    """An index of documents, searched by BM25."""

    def __init__(
        self,
        documents: Mapping[str, str] | Iterable[tuple[str, str]],
        k1: float = 1.5,
        b: float = 0.75,
    ):
        """Indexes the documents.

        Args:
          documents: {document id: text}, or (document id, text) pairs.
          k1: how soon repeated words stop counting; above 0.
          b: how far scores are divided by length, in [0, 1].

        Raises:
          InputError: no document, none with a word in it, an id that comes twice, or
            a setting out of range.
        """
        self.k1 = positive("k1", k1)
        self.b = in_range("b", b, 0, 1)
        pairs = documents.items() if isinstance(documents, Mapping) else documents
        ids: dict[str, None] = {}
        vocabulary: dict[str, int] = {}
        rows: list[list[int]] = []
        for document_id, text in pairs:
            if document_id in ids:
                raise InputError(
                    f"document id {document_id!r} comes twice; ids must be distinct."
                )
            ids[document_id] = None
            rows.append(
                [vocabulary.setdefault(word, len(vocabulary)) for word in words(text)]
            )
        if not vocabulary:
            raise InputError(
                f"none of the {len(ids)} documents holds a word; BM25 needs a corpus "
                "of text."
            )
        self._ids = list(ids)
        self._index = bm25s.BM25(k1=k1, b=b, method="lucene")
        self._index.index((rows, vocabulary), show_progress=False)

    @property
    def settings(self) -> dict[str, Any]:
        """What the scores depend on, to be written beside them."""
        return {
            "library": f"bm25s {importlib.metadata.version('bm25s')}",
            "variant": "lucene",
            "k1": self.k1,
            "b": self.b,
            "words": f"{_WORD.pattern}, lower case, {len(_STOP_WORDS)} stop words, "
            "no stemming",
        }

    def search(
        self, queries: Mapping[str, str], k: int = 10, progress: bool = False
    ) -> dict[str, dict[str, float]]:
        """The k best documents of each query.

        Args:
          queries: {query id: text}.
          k: documents to return; fewer come back where fewer share a word with the
            query, and a query that shares none with any has no entry.
          progress: whether to show a progress bar.

        Returns:
          A run, query id -> {document id: score above 0}, best first. Ties, at the
          cut too, go by document id, descending, as in trec_eval.

        Raises:
          InputError: k below 1.
        """
        positive_integer("k", k)
        run = {}
        for query_id, text in tqdm(
            queries.items(), desc="BM25", unit="query", disable=not progress
        ):
            known = self._index.get_tokens_ids(words(text))
            if not known:
                continue
            scores = self._index.get_scores_from_ids(known)
            least = 0.0
            if k < len(scores):
                least = float(np.partition(scores, len(scores) - k)[len(scores) - k])
            # Every document as good as the k-th, so that its ties are cut by id.
            kept = np.flatnonzero((scores >= least) & (scores > 0))
            hits = {self._ids[row]: float(scores[row]) for row in kept}
            run[query_id] = dict(ranked(hits)[:k])
        return run


def words(text: str) -> list[str]:
    """The words of a text as BM25 here sees them."""
    return [word for word in _WORD.findall(text.lower()) if word not in _STOP_WORDS]
