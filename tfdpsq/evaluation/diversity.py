"""Diversity of texts: distinct n-grams, lengths, vocabulary.

Words are those of `tfdpsq.words`. Most figures depend on how many texts there are: more
texts repeat more n-grams, and hold more words. So two sets are compared at one size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy.spatial.distance
import scipy.stats

from tfdpsq.evaluation.significance import checked_values
from tfdpsq.words import words_of

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


def describe(values: Sequence[float] | np.ndarray) -> dict[str, Any]:
    """Describes a sample of a number, such as a length or a distance.

    Args:
      values: at least one, all finite.

    Returns:
      "count", "mean", "deviation" (divided by the count) and "quantiles", those of
      `QUANTILES` by their names, such as "0.05", linear between values.
    """
    array = checked_values("values", values)
    found = np.quantile(array, QUANTILES).tolist()
    return {
        "count": len(array),
        "mean": float(array.mean()),
        "deviation": float(array.std()),
        "quantiles": {f"{level:g}": each for level, each in zip(QUANTILES, found)},
    }


def diversity_of(texts: Sequence[str]) -> dict[str, dict[Any, Any]]:
    """Describes one set of at least one text.

    Returns:
      "distinct": for n from 1 to 4 the different n-grams as a share of all, over the
      whole set (Li et al. 2016), `None` where no text has n words; an n-gram is within
      one text. "lengths": in words, by `describe`. "vocabulary": "tokens", all words;
      "types", the different ones; and the "entropy" of a word drawn from them, in bits,
      as counted, which is below that of what the texts were drawn from.
    """
    words = list(words_of(texts))
    distinct: dict[int, float | None] = {}
    for n in range(1, 5):
        grams = [gram for text in words for gram in zip(*(text[i:] for i in range(n)))]
        distinct[n] = len(set(grams)) / len(grams) if grams else None
    counts = Counter(word for text in words for word in text)
    entropy = scipy.stats.entropy(list(counts.values()), base=2) if counts else 0.0
    return {
        "distinct": distinct,
        "lengths": describe([len(text) for text in words]),
        "vocabulary": {
            "tokens": sum(counts.values()),
            "types": len(counts),
            "entropy": float(entropy),
        },
    }


def diversity_difference(
    first: Sequence[str], second: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Compares two sets of texts by their lengths and words.

    Returns:
      "lengths": the "total_variation" distance of the numbers of words, in [0, 1], for
      n texts each of k about equally frequent lengths √(k / (π·n)) by chance alone.
      "vocabulary", empty if a set holds no word: "jensen_shannon", the distance of the
      two distributions of words, the root of their divergence in bits, 1 for sets
      without a common word; "types_seen", the share of the first set's different words
      that the second has; "tokens_seen", the same of its words with repetitions.
    """
    words = [list(words_of(texts)) for texts in (first, second)]
    p, q = _shares(*(Counter(map(len, texts)) for texts in words))
    one, other = (Counter(word for text in texts for word in text) for texts in words)
    seen = [word for word in one if word in other]
    vocabulary = {}
    if one and other:
        distance = scipy.spatial.distance.jensenshannon(*_shares(one, other), base=2)
        vocabulary = {
            "jensen_shannon": float(distance),
            "types_seen": len(seen) / len(one),
            "tokens_seen": sum(one[word] for word in seen) / sum(one.values()),
        }
    lengths = {"total_variation": float(np.abs(p - q).sum() / 2)}
    return {"lengths": lengths, "vocabulary": vocabulary}


def _shares(*counts: Mapping[Any, int]) -> list[np.ndarray]:
    """The share of all that falls to each key that one of them has."""
    keys = list(dict.fromkeys(key for each in counts for key in each))
    return [
        np.array([each.get(key, 0) for key in keys]) / sum(each.values())
        for each in counts
    ]
