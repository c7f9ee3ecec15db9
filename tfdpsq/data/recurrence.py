"""Finds sentences again in other texts: what a benchmark's public half must not hold.

Where queries play the private part and public text trains a model, a query that also
stands in that text is not private any more. The embedded benchmark removes such
sentences while it is built. On anyone's own data filtering public text by private
queries would itself be a private read: there they may be counted, and no more.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from tfdpsq.words import words_of

_TOKEN = re.compile(r"\S+")
_LINE_BREAK = re.compile("[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
# The end of a sentence, and what may close it; or no letters, such as a list's bullet.
_ENDS = re.compile("[.!?:;][\"')\\]}`*_\u2019\u201d]*$|^[\\W\\d_]+$")
_BATCH = 1000


class Sentences:
    """A set of sentences to look for, by their words (see `words.RULES`).

    A sentence is found where it stands as one or several: between beginnings and ends
    of lines, words that end in one of .!?:; and words without letters.
    """

    def __init__(self, sentences: Iterable[str]):
        """Takes any number; those without a word are passed over."""
        self._keys = set(map(tuple, words_of(sentences))) - {()}
        self._longest = max(map(len, self._keys), default=0)

    def spans(self, texts: Sequence[str]) -> list[list[tuple[int, int]]]:
        """Returns (start, end) of sentences in each text, the longest at a place."""
        parts = [_parts(text) for text in texts]
        words = words_of(
            text[start:end] for text, found in zip(texts, parts) for start, end in found
        )
        return [
            list(self._matches(found, list(itertools.islice(words, len(found)))))
            for found in parts
        ]

    def without(self, texts: Iterable[str]) -> Iterator[str]:
        """Yields each text without these sentences.

        What is left may bring two halves of one together, so it is looked at again
        until there is none.
        """
        texts = iter(texts)
        while batch := list(itertools.islice(texts, _BATCH)):
            changed = list(range(len(batch)))
            while changed:
                found = dict(zip(changed, self.spans([batch[n] for n in changed])))
                changed = [n for n in changed if found[n]]
                for n in changed:
                    for start, end in reversed(found[n]):
                        batch[n] = batch[n][:start] + batch[n][end:]
            yield from batch

    def _matches(
        self, parts: list[tuple[int, int]], words: list[list[str]]
    ) -> Iterator[tuple[int, int]]:
        first = 0
        while first < len(parts):
            key: tuple[str, ...] = ()
            last = None
            for n in range(first, len(parts)):
                key += tuple(words[n])
                if len(key) > self._longest:
                    break
                if words[n] and key in self._keys:
                    last = n
            if words[first] and last is not None:
                yield parts[first][0], parts[last][1]
                first = last
            first += 1


def _parts(text: str) -> list[tuple[int, int]]:
    """Returns (start, end) of the shortest stretches that may be a sentence."""
    found: list[tuple[int, int]] = []
    goes_on = False
    for token in _TOKEN.finditer(text):
        start, end = token.span()
        if goes_on and not _LINE_BREAK.search(text, found[-1][1], start):
            start = found.pop()[0]
        found.append((start, end))
        goes_on = _ENDS.search(token.group()) is None
    return found
