"""BM25 inside a graph, and its fusion with another ranking, for serving.

A search engine seldom deploys a neural ranking alone. `WordSearch` scores documents by
an index of words that was computed elsewhere, such as `evaluation.BM25.postings`, with
TensorFlow's operations only, so that it can be part of a SavedModel. `fused_rows` ranks
by both, as `evaluation.fuse` does by scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdpsq.validation import InputError

# What stands between words: all but letters, digits and underscores.
_BETWEEN = r"[^\pL\pN_]+"


class Found(NamedTuple):
    """The best documents of Q queries, best first.

    Attributes:
      rows: [Q, d] integers.
      scores: [Q, d].
      there: [Q, d] bool; where `False`, the query has fewer than d documents.
    """

    rows: tf.Tensor
    scores: tf.Tensor
    there: tf.Tensor


class WordSearch(tf.Module):
    """Scores of documents by the words of a query, added up from an index.

    Texts become words as in `evaluation.BM25`: runs of letters, digits and underscores
    in lower case. (A process whose locale is Turkish, Azeri or Lithuanian writes a few
    letters outside ASCII otherwise.) Stop words and words of one letter are not in the
    index, and so count nothing.
    """

    def __init__(
        self,
        words: Sequence[str],
        starts: np.ndarray,
        rows: np.ndarray,
        gains: np.ndarray,
        num_documents: int,
    ):
        """Takes the index.

        Args:
          words: W distinct words.
          starts: [W + 1]; entries starts[w] to starts[w + 1] are those of word w.
          rows: [entries] document numbers.
          gains: [entries] float32: what the word adds to the document's score.
          num_documents: N.

        Raises:
          InputError: arrays that do not fit each other.
        """
        super().__init__(name="word_search")
        starts, rows = np.asarray(starts, np.int64), np.asarray(rows, np.int64)
        if not (
            len(starts) == len(words) + 1
            and len(rows) == len(gains) == starts[-1]
            and (np.diff(starts) >= 0).all()
            and (not len(rows) or 0 <= rows.min() <= rows.max() < num_documents)
        ):
            raise InputError(
                f"{len(words)} words, {len(starts)} starts, {len(rows)} rows and "
                f"{len(gains)} gains do not make an index of {num_documents} "
                "documents. Give what evaluation.BM25.postings returns."
            )
        self._size = num_documents
        # An unknown word has the number W, and no entries.
        table = tf.lookup.experimental.MutableHashTable(
            tf.string, tf.int64, default_value=len(words)
        )
        table.insert(
            tf.constant(list(words), tf.string), tf.range(len(words), dtype=tf.int64)
        )
        self._numbers = table
        self._starts = tf.Variable(np.append(starts, starts[-1]), trainable=False)
        self._rows = tf.Variable(rows.astype(np.int32), trainable=False)
        self._gains = tf.Variable(np.asarray(gains, np.float32), trainable=False)

    @classmethod
    def from_postings(cls, postings: Any, ids: Sequence[str]) -> WordSearch:
        """Makes the search of an index, with documents numbered by their place in ids.

        Args:
          postings: what `evaluation.BM25.postings` returns.
          ids: N document ids, the same in any order.

        Raises:
          InputError: other documents; names one.
        """
        rows = _rows_by_id(postings, ids)
        return cls(postings.words, postings.starts, rows, postings.gains, len(ids))

    def scores(self, texts: tf.Tensor) -> tf.Tensor:
        """Returns [Q, N] float32 scores of texts [Q] string; 0 without a common word.

        A word that comes twice in a text counts twice.
        """
        # ASCII first: with a Turkish locale, "I" would become a dotless i.
        lower = tf.strings.lower(tf.strings.lower(texts), "utf-8")
        found = tf.strings.split(tf.strings.regex_replace(lower, _BETWEEN, " "))
        numbers = self._numbers.lookup(found.values)
        entries = tf.ragged.range(
            tf.gather(self._starts, numbers), tf.gather(self._starts, numbers + 1)
        )
        query = tf.gather(found.value_rowids(), entries.value_rowids())
        rows = tf.cast(tf.gather(self._rows, entries.values), tf.int64)
        queries = tf.shape(texts, tf.int64)[0]
        totals = tf.math.unsorted_segment_sum(
            tf.gather(self._gains, entries.values),
            query * self._size + rows,
            queries * self._size,
        )
        return tf.reshape(totals, [queries, self._size])


def best_of(scores: tf.Tensor, depth: int | tf.Tensor) -> Found:
    """Returns the `depth` documents of the best scores [Q, N] above 0."""
    best, rows = tf.math.top_k(scores, depth)
    return Found(rows, best, best > 0)


def fused_rows(first: Found, second: Found, weight: float, k: tf.Tensor) -> Found:
    """Ranks by two rankings, as `evaluation.fuse` does by scores.

    Each query's scores are scaled to [0, 1] within each ranking, in float64, and the
    weighted sum ranks. Ties go to the smaller row.

    Args:
      first: d documents of each query, such as BM25's.
      second: as many of a retriever.
      weight: of the second; the first has 1 - weight.
      k: [] int32, documents to return, at most 2d.
    """
    one, two = (1 - weight) * _scaled(first), weight * _scaled(second)
    same = tf.equal(first.rows[:, :, None], second.rows[:, None, :])
    same &= first.there[:, :, None] & second.there[:, None, :]
    both = tf.reduce_sum(tf.where(same, two[:, None, :], 0.0), axis=2)
    lowest = tf.constant(-np.inf, tf.float64)
    alone = second.there & ~tf.reduce_any(same, axis=1)
    totals = [
        tf.where(first.there, one + both, lowest),
        tf.where(alone, two, lowest),
    ]
    rows = tf.concat([first.rows, second.rows], axis=1)
    # Of equal scores `top_k` takes the first.
    order = tf.argsort(rows, axis=1, stable=True)
    ordered = tf.gather(tf.concat(totals, axis=1), order, batch_dims=1)
    best, places = tf.math.top_k(ordered, k)
    rows = tf.gather(tf.gather(rows, order, batch_dims=1), places, batch_dims=1)
    return Found(rows, best, tf.math.is_finite(best))


def named(found: Found, ids: tf.Variable) -> dict[str, tf.Tensor]:
    """Returns what a signature gives: "ids", and "scores" in float32.

    Places that are not `there` have the id "" and the score -inf.
    """
    names = tf.gather(ids, tf.where(found.there, found.rows, 0))
    scores = tf.cast(found.scores, tf.float32)
    return {
        "ids": tf.where(found.there, names, ""),
        "scores": tf.where(found.there, scores, -np.inf),
    }


def _scaled(found: Found) -> tf.Tensor:
    """Returns scores scaled to [0, 1] in float64; 1 where all of a query are equal."""
    scores = tf.cast(found.scores, tf.float64)
    infinite = tf.constant(np.inf, tf.float64)
    least = tf.reduce_min(
        tf.where(found.there, scores, infinite), axis=1, keepdims=True
    )
    most = tf.reduce_max(
        tf.where(found.there, scores, -infinite), axis=1, keepdims=True
    )
    scaled = tf.math.divide_no_nan(scores - least, most - least)
    scaled = tf.where(tf.equal(most, least), tf.ones_like(scores), scaled)
    return tf.where(found.there, scaled, 0.0)


def _rows_by_id(postings: Any, ids: Sequence[str]) -> np.ndarray:
    """Returns an index's document numbers as places in `ids`."""
    places = {name: place for place, name in enumerate(ids)}
    odd = set(places).symmetric_difference(postings.ids)
    if odd:
        raise InputError(
            f"document {min(odd)!r} is in the index of words or among the documents to "
            "search, but not in both. Make both from the same documents."
        )
    return np.array([places[name] for name in postings.ids], np.int64)[postings.rows]


def by_id(ids: Sequence[str]) -> list[int]:
    """Returns places of ids, the largest first.

    Rows in this order give TREC's rule for equal scores, and that of `evaluation.fuse`:
    the larger id comes first.
    """
    return sorted(range(len(ids)), key=ids.__getitem__, reverse=True)
