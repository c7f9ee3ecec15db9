"""An n-gram model of texts, which any recipient of a synthetic set can train.

A small language model of a released set scores any text by how much the set sounds
like it: canaries, or members, that it sounds more like than by chance have left a trace
(cf. Meeus et al. 2025, arXiv:2502.14921).
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable

import numpy as np

from tfdpsq.validation import InputError, positive_integer
from tfdpsq.words import words_of

_START = "\x02"
_END = "\x03"


class NgramModel:
    """Interpolated n-gram probabilities with Witten and Bell's weights.

    A history h of k words that was followed by N(h) words, T(h) of them different,
    trusts its own counts with weight N/(N + T) and the history without its first word
    with the rest (Witten and Bell 1991; Chen and Goodman 1999, section 2.6). Below
    single words is the uniform distribution over all words seen, the end, and one
    more for every word not seen.
    """

    def __init__(self, texts: Iterable[str], order: int = 3):
        """Counts the n-grams of texts, read once; `order` is n, at least 1."""
        self.order = positive_integer("order", order)
        self._follow: dict[tuple[str, ...], collections.Counter[str]] = {}
        for found in filter(None, words_of(texts)):
            padded = self._padded(found)
            for end in range(order - 1, len(padded)):
                for length in range(order):
                    history = tuple(padded[end - length : end])
                    counts = self._follow.setdefault(history, collections.Counter())
                    counts[padded[end]] += 1
        if not self._follow:
            raise InputError("texts hold no word; there is nothing to learn from.")
        # All that can follow the empty history, and what was never seen.
        self._types = len(self._follow[()]) + 1
        self._totals = {h: sum(each.values()) for h, each in self._follow.items()}

    def probability(self, word: str, history: tuple[str, ...]) -> float:
        """Returns the probability of a word after a history's last order - 1 words."""
        found = 1 / self._types
        history = history[max(0, len(history) - self.order + 1) :]
        for length in range(len(history) + 1):
            known = history[len(history) - length :]
            counts = self._follow.get(known)
            if counts is None:  # no longer history is known either
                break
            total, different = self._totals[known], len(counts)
            found = (counts[word] + different * found) / (total + different)
        return found

    def log_likelihoods(self, texts: Iterable[str]) -> np.ndarray:
        """Returns the log-likelihood of each text and its end, in nats per word."""
        found = []
        for words in words_of(texts):
            padded, before = self._padded(words), self.order - 1
            logs = (
                math.log(self.probability(word, tuple(padded[end : end + before])))
                for end, word in enumerate(padded[before:])
            )
            found.append(sum(logs) / (len(words) + 1))
        return np.array(found)

    def _padded(self, words: list[str]) -> list[str]:
        return [_START] * (self.order - 1) + words + [_END]
