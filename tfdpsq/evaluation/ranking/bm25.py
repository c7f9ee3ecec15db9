"""BM25, the reference row of words alone: as bm25s computes it.

`BM25` holds an index by that library in memory, for any number of searches.
`bm25_streamed` searches for queries that are all known, reads the documents twice and
keeps none; its scores are the library's to the last bit.

Scores are Lucene's variant (Kamphuis et al. 2020), for a query q and document d:

  sum over t in q of ln(1 + (N - df + 0.5) / (df + 0.5))
                     * tf / (tf + k1 * (1 - b + b * |d| / mean |d|))

A word that comes twice in the query counts twice. Words are runs of two or more
letters, digits or underscores, in lower case, without Lucene's 33 English stop
words; no stemming.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import bm25s
import numpy as np
from bm25s.stopwords import STOPWORDS_EN
from tqdm import tqdm

from tfdpsq.evaluation.ranking.trec import ranked
from tfdpsq.validation import InputError, in_range, positive, positive_integer

_WORD = re.compile(r"(?u)\b\w\w+\b")
_STOP_WORDS = frozenset(STOPWORDS_EN)
_VERSION = importlib.metadata.version("bm25s")
# Documents that are scored together.
_CHUNK = 16_384


class Postings(NamedTuple):
    """An index of words as arrays, for another program that searches; see `BM25`.

    Attributes:
      ids: N document ids.
      words: W words.
      starts: [W + 1]; entries starts[w] to starts[w + 1] are those of word w.
      rows: [entries] places in `ids`.
      gains: [entries] float32; a document's score is the sum over a query's words.
    """

    ids: list[str]
    words: list[str]
    starts: np.ndarray
    rows: np.ndarray
    gains: np.ndarray


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
        """Returns the settings that the scores depend on, to be written with them."""
        return _settings(self.k1, self.b)

    def postings(self) -> Postings:
        """Returns the index as arrays, not copied."""
        held, numbers = self._index.scores, self._index.vocab_dict
        # The library adds "" as the last word; no document has it.
        words = sorted((word for word in numbers if word), key=numbers.__getitem__)
        starts = held["indptr"][: len(words) + 1]
        return Postings(self._ids, words, starts, held["indices"], held["data"])

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


def bm25_streamed(
    documents: Callable[[], Iterable[tuple[str, str]]],
    queries: Mapping[str, str],
    k: int = 10,
    k1: float = 1.5,
    b: float = 0.75,
    progress: bool = False,
    chunk: int = _CHUNK,
) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    """The k best documents of each query, in memory that no corpus makes grow.

    The first reading counts how many documents hold each word of the queries, and how
    long they are; the second scores them, a chunk at a time.

    Args:
      documents: called twice; (document id, text) pairs, the ids distinct, the same
        both times.
      queries: {query id: text}.
      k: documents to return, as `BM25.search` does.
      k1: as for `BM25`.
      b: as for `BM25`.
      progress: whether to show a progress bar.
      chunk: documents in memory at a time; the result does not depend on it.

    Returns:
      The run that `BM25(documents(), k1, b).search(queries, k)` gives, the same floats
      in the same order, and what its scores depend on: `BM25.settings`.

    Raises:
      InputError: no document, none with a word in it, or a setting out of range.
    """
    positive("k1", k1)
    in_range("b", b, 0, 1)
    positive_integer("k", k)
    positive_integer("chunk", chunk)
    asked = {query_id: words(text) for query_id, text in queries.items()}
    numbers = {
        word: number
        for number, word in enumerate(dict.fromkeys(itertools.chain(*asked.values())))
    }
    counts = np.zeros(len(numbers), np.int64)
    count = total = 0
    for _, text in tqdm(
        documents(), desc="BM25, counting", unit="document", disable=not progress
    ):
        found = words(text)
        count += 1
        total += len(found)
        for word in numbers.keys() & found:
            counts[numbers[word]] += 1
    if not total:
        raise InputError(
            f"none of the {count} documents holds a word; BM25 needs a corpus of text."
        )
    idf = np.array(
        [math.log(1 + (count - df + 0.5) / (df + 0.5)) for df in counts.tolist()],
        np.float32,
    )
    wanted = {
        query_id: [n for n in map(numbers.__getitem__, found) if counts[n]]
        for query_id, found in asked.items()
    }
    best: dict[str, dict[str, float]] = {name: {} for name, w in wanted.items() if w}
    floor = dict.fromkeys(best, 0.0)  # the k-th best score so far, of k
    stream = iter(
        tqdm(
            documents(), desc="BM25", unit="document", total=count, disable=not progress
        )
    )
    while part := list(itertools.islice(stream, chunk)):
        postings = _Postings(part, numbers, idf, total / count, k1, b)
        for query_id, hits in best.items():
            new = postings.best(wanted[query_id], k, floor[query_id])
            if new:
                best[query_id] = dict(ranked({**hits, **new})[:k])
                if len(best[query_id]) == k:
                    floor[query_id] = min(best[query_id].values())
    return best, _settings(k1, b)


class _Postings:
    """Postings of a block of documents: words, and their share of each score."""

    def __init__(
        self,
        documents: Sequence[tuple[str, str]],
        numbers: Mapping[str, int],
        idf: np.ndarray,
        mean_length: float,
        k1: float,
        b: float,
    ):
        self._ids = [document_id for document_id, _ in documents]
        size = len(documents)
        lengths = np.zeros(size, np.int64)
        keys: list[int] = []  # word number * size + row, once for each occurrence
        for row, (_, text) in enumerate(documents):
            found = words(text)
            lengths[row] = len(found)
            keys.extend(numbers[word] * size + row for word in found if word in numbers)
        pairs, tf = np.unique(np.array(keys, np.int64), return_counts=True)
        word, self._rows = pairs // size, pairs % size
        # In float32 where bm25s is.
        norm = k1 * ((1 - b) + b * lengths[self._rows] / mean_length)
        frequency = tf.astype(np.float32)
        self._gain = idf[word] * (frequency / (norm.astype(np.float32) + frequency))
        self._starts = np.asarray(np.searchsorted(word, np.arange(len(numbers) + 1)))

    def best(self, wanted: Sequence[int], k: int, floor: float) -> dict[str, float]:
        """Scores above 0 of the k best documents, and of all that equal the last.

        Args:
          wanted: numbers of a query's words, one twice if it comes twice.
          k: how many.
          floor: scores below are of no interest.
        """
        scores = np.zeros(len(self._ids), np.float32)
        for number in wanted:
            part = slice(self._starts[number], self._starts[number + 1])
            scores[self._rows[part]] += self._gain[part]
        kept = np.flatnonzero((scores > 0) & (scores >= floor))
        if len(kept) > k:
            held = scores[kept]
            least = np.partition(held, len(held) - k)[len(held) - k]
            kept = kept[held >= least]
        return {self._ids[row]: float(scores[row]) for row in kept}


def _settings(k1: float, b: float) -> dict[str, Any]:
    return {
        # The scores of both ways, to the last bit.
        "library": f"bm25s {_VERSION}",
        "variant": "lucene",
        "k1": k1,
        "b": b,
        "words": f"{_WORD.pattern}, lower case, {len(_STOP_WORDS)} stop words, "
        "no stemming",
    }


def words(text: str) -> list[str]:
    """The words of a text as BM25 here sees them."""
    return [word for word in _WORD.findall(text.lower()) if word not in _STOP_WORDS]
