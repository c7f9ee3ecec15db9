"""BM25, the reference row of words alone: as bm25s computes it.

Above a number of documents they are read twice for a search, and no index is kept. Both
ways give the same bits.

Scores are Lucene's variant (Kamphuis et al. 2020), for a query q and document d:

  sum over t in q of ln(1 + (N - df + 0.5) / (df + 0.5))
                     * tf / (tf + k1 * (1 - b + b * |d| / mean |d|))

with k1 = 1.5, how late repeated words stop counting, and b = .75, how far scores are
divided by length. A word that comes twice in the query counts twice. Words are those of
`tfdpsq.words` without Lucene's 33 English stop words; no stemming.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import bm25s
import numpy as np
from bm25s.stopwords import STOPWORDS_EN
from tqdm import tqdm

from tfdpsq import words
from tfdpsq.evaluation.measures import ranked
from tfdpsq.validation import InputError, id_text, positive_integer

logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets DEBUG
_K1, _B = 1.5, 0.75
_STOP_WORDS = frozenset(STOPWORDS_EN)
# bm25s takes 5.3 kB a document of 100 words while it builds an index.
_IN_MEMORY = 50_000
# Documents that are scored together where the corpus is streamed.
_CHUNK = 16_384

_Texts = Iterable[tuple[str, str]]
Run = dict[str, dict[str, float]]


class BM25:
    """Documents, searched by BM25."""

    def __init__(
        self,
        documents: Mapping[str, str] | Callable[[], _Texts],
        in_memory: int = _IN_MEMORY,
        chunk: int = _CHUNK,
    ):
        """Indexes the documents, unless there are too many.

        Args:
          documents: {document id: text}; or a function that yields the same (document
            id, text) whenever it is called, for a corpus that memory may not hold.
          in_memory: most documents to index; no result depends on it.
          chunk: documents in memory otherwise; nor on this.
        """
        read = documents if callable(documents) else documents.items
        self._chunk = chunk
        vocabulary: dict[str, int] = {}
        ids, rows = [], []
        for document_id, found in _split(itertools.islice(read(), in_memory + 1)):
            ids.append(document_id)
            rows.append([vocabulary.setdefault(w, len(vocabulary)) for w in found])
        self._index = None
        if len(ids) > in_memory:
            self._documents = read
            return
        if len(set(ids)) < len(ids):
            raise InputError("a document id comes twice; ids must be distinct.")
        if not vocabulary:
            raise _no_words(len(ids))
        self._ids = ids
        self._index = bm25s.BM25(k1=_K1, b=_B, method="lucene")
        self._index.index((rows, vocabulary), show_progress=False)

    @property
    def settings(self) -> dict[str, Any]:
        """Returns what the scores depend on, to be written with them."""
        return {
            "library": f"bm25s {importlib.metadata.version('bm25s')}",
            "variant": "lucene",
            "k1": _K1,
            "b": _B,
            "words": f"{words.RULES}; without {len(_STOP_WORDS)} English stop words; "
            "no stemming",
        }

    def search(
        self, queries: Mapping[str, str], k: int = 10, progress: bool = False
    ) -> Run:
        """The k best documents of each query.

        Args:
          queries: {query id: text}.
          k: documents to return; fewer come back where fewer share a word with the
            query, and a query that shares none with any has no entry.
          progress: whether to show a progress bar.

        Returns:
          A run, query id -> {document id: score above 0}, best first. Ties, at the
          cut too, go by document id, descending, as in trec_eval.
        """
        positive_integer("k", k)
        if self._index is None:
            return self._streamed(queries, k, progress)
        run = {}
        bar = tqdm(queries.items(), desc="BM25", unit="query", disable=not progress)
        for query_id, asked in _split(bar):
            known = self._index.get_tokens_ids(asked)
            if known:
                scores = self._index.get_scores_from_ids(known)
                run[query_id] = dict(ranked(_best(self._ids, scores, k))[:k])
        return run

    def _streamed(self, queries: Mapping[str, str], k: int, progress: bool) -> Run:
        """Counts the documents of each word of the queries, then scores by chunks."""

        def read(what: str) -> Iterator[tuple[str, list[str]]]:
            bar = tqdm(self._documents(), what, unit="document", disable=not progress)
            return _split(bar)

        asked = dict(_split(queries.items()))
        known = dict.fromkeys(itertools.chain(*asked.values()))
        numbers = {word: number for number, word in enumerate(known)}
        counts = np.zeros(len(numbers), np.int64)
        count = total = 0
        for _, found in read("BM25, counting"):
            count += 1
            total += len(found)
            for word in numbers.keys() & found:
                counts[numbers[word]] += 1
        if not total:
            raise _no_words(count)
        idf = np.array(
            [math.log(1 + (count - df + 0.5) / (df + 0.5)) for df in counts.tolist()],
            np.float32,
        )
        wanted = {
            query_id: [n for n in map(numbers.__getitem__, found) if counts[n]]
            for query_id, found in asked.items()
        }
        best: Run = {name: {} for name, numbered in wanted.items() if numbered}
        floor = dict.fromkeys(best, 0.0)  # the k-th best score so far, of k
        stream = read("BM25")
        for _ in range(0, count, self._chunk):
            some = itertools.islice(stream, self._chunk)
            block = _Block(some, numbers, idf, total / count)
            for query_id, hits in best.items():
                scores = block.scores(wanted[query_id])
                new = _best(block.ids, scores, k, floor[query_id])
                if new:
                    best[query_id] = dict(ranked({**hits, **new})[:k])
                    if len(best[query_id]) == k:
                        floor[query_id] = min(best[query_id].values())
        return best


class _Block:
    """Postings of a block of documents: the queries' words, and their gains."""

    def __init__(
        self,
        documents: Iterable[tuple[str, list[str]]],
        numbers: Mapping[str, int],
        idf: np.ndarray,
        mean_length: float,
    ):
        self.ids: list[str] = []
        held: list[int] = []
        places: list[tuple[int, int]] = []  # word and row, for each occurrence
        for row, (document_id, found) in enumerate(documents):
            self.ids.append(document_id)
            held.append(len(found))
            places += [(numbers[word], row) for word in found if word in numbers]
        lengths, size = np.array(held, np.int64), len(held)
        of_word, rows = np.array(places, np.int64).reshape(-1, 2).T
        pairs, tf = np.unique(of_word * size + rows, return_counts=True)
        word, self._rows = pairs // size, pairs % size
        # In float32 where bm25s is.
        norm = _K1 * ((1 - _B) + _B * lengths[self._rows] / mean_length)
        frequency = tf.astype(np.float32)
        self._gain = idf[word] * (frequency / (norm.astype(np.float32) + frequency))
        self._starts = np.asarray(np.searchsorted(word, np.arange(len(numbers) + 1)))

    def scores(self, wanted: Sequence[int]) -> np.ndarray:
        """Returns [documents]; a word that comes twice among `wanted` counts twice."""
        scores = np.zeros(len(self.ids), np.float32)
        for number in wanted:
            part = slice(self._starts[number], self._starts[number + 1])
            scores[self._rows[part]] += self._gain[part]
        return scores


def _best(
    ids: Sequence[str], scores: np.ndarray, k: int, floor: float = 0.0
) -> dict[str, float]:
    """Scores above 0 of the k best, and of every other as good as the k-th."""
    if k < len(scores):
        floor = max(floor, float(np.partition(scores, len(scores) - k)[-k]))
    kept = np.flatnonzero((scores >= floor) & (scores > 0))
    return {ids[row]: float(scores[row]) for row in kept}


def _split(texts: _Texts) -> Iterator[tuple[str, list[str]]]:
    """Yields (id, words) of (id, text), without stop words."""
    named, read = itertools.tee(texts)
    for found in words.words_of(text for _, text in read):
        name = id_text(next(named)[0])
        yield name, [word for word in found if word not in _STOP_WORDS]


def _no_words(count: int) -> InputError:
    return InputError(
        f"none of the {count} documents holds a word; BM25 needs a corpus of text."
    )
