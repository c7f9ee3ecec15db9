"""The words of a text, in any script: one TensorFlow graph, for Python and for serving.

BM25, overlap, copies, diversity, filters and pseudo-queries all split texts here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import tensorflow as tf
import tensorflow_text

RULES = (
    "NFKC and case folding without invisible characters; runs of letters, numbers, "
    "underscores and their combining marks; of Han, Hiragana, Katakana, Hangul, Thai, "
    "Lao, Khmer and Myanmar pairs of adjacent characters"
)

# Words with nothing between them, or with endings (Hangul); "ー" is of no script.
PAIRED = (
    r"\p{Han}\p{Hiragana}\p{Katakana}ー\p{Hangul}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
)
_UNSPACED = rf"[{PAIRED}]\pM*"
# A mark on a character that is not a letter goes with it.
_BETWEEN = r"^\pM+|[^\pL\pN\pM_]+\pM*"
_BATCH = 1024
_BUCKETS = 2**63 - 1


def split_words(texts: tf.Tensor) -> tf.RaggedTensor:
    """Splits texts into words by `RULES`, inside a graph or outside.

    Returns:
      [N, words] string of [N] UTF-8. "Don't" has the words don and t; 東京都, 東京 and
      京都; a single such character is a word.
    """
    folded = tensorflow_text.case_fold_utf8(texts)
    spaced = tf.strings.regex_replace(folded, _BETWEEN, " ")
    # Runs: a word, or a stretch of characters written without spaces.
    spaced = tf.strings.regex_replace(spaced, f"((?:{_UNSPACED})+)", r" \1 ")
    runs = tf.strings.split(spaced)
    apart = tf.strings.regex_replace(runs.values, f"({_UNSPACED})", r"\1 ")
    parts = tf.strings.split(apart)
    run = parts.value_rowids()
    goes_on = tf.equal(run, tf.concat([run, [-1]], 0)[1:])
    following = tf.where(goes_on, tf.concat([parts.values, [""]], 0)[1:], "")
    kept = goes_on | tf.equal(tf.gather(parts.row_lengths(), run), 1)
    words = tf.strings.join([parts.values, following])
    return tf.RaggedTensor.from_value_rowids(
        tf.boolean_mask(words, kept),
        tf.boolean_mask(tf.gather(runs.value_rowids(), run), kept),
        nrows=runs.nrows(),
    )


def words_of(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yields the words of each text, reading a thousand texts ahead."""
    for split in _batches(texts):
        for words in split.to_list():
            yield [word.decode() for word in words]


def word_hashes(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns [W] int64, a 63-bit hash of every word of N texts, one after the other.

    And [N + 1] int64: text i has the hashes from its i-th place to the next.
    """
    hashes, lengths = [np.empty(0, np.int64)], [np.zeros(1, np.int64)]
    for split in _batches(texts):
        hashes.append(_hashed(split.values).numpy())
        lengths.append(split.row_lengths().numpy())
    return np.concatenate(hashes), np.cumsum(np.concatenate(lengths))


def text_hashes(texts: Iterable[str]) -> Iterator[int]:
    """Yields a 63-bit hash of each text: equal for the same words in the same order."""
    for split in _batches(texts):
        joined = tf.strings.reduce_join(split, axis=-1, separator=" ")
        yield from _hashed(joined).numpy().tolist()


def _batches(texts: Iterable[str]) -> Iterator[tf.RaggedTensor]:
    stream = iter(texts)
    while batch := list(itertools.islice(stream, _BATCH)):
        # Half a surrogate pair has no UTF-8; it becomes a question mark.
        yield _split(tf.constant([t.encode("utf-8", "replace") for t in batch]))


def _hashed(strings: tf.Tensor) -> tf.Tensor:
    return tf.strings.to_hash_bucket_fast(strings, _BUCKETS)


_split = tf.function(split_words, [tf.TensorSpec([None], tf.string)], autograph=False)
