"""Finds sentences again in other texts: what a benchmark's public half must not hold.

Where queries play the private part and public text trains a model, a query that also
stands in that text is not private any more. The embedded benchmark removes such
sentences while it is built. On anyone's own data filtering public text by private
queries would itself be a private read: there they may be counted, and no more.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable

from tfdpsq.data.lines import read_objects
from tfdpsq.validation import DataError

_WORD = re.compile(r"\S+")
_LINE_BREAK = re.compile("[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
# What may close a sentence after its full stop, or open one before its first word.
_CLOSERS = "\"')]}`*_\u2019\u201d"
_OPENERS = "\"'([{`*_\u2018\u201c"
_STOPS = ".!?:;"


class Sentences:
    """A set of sentences to look for, whatever their case and white space.

    A sentence is found where it stands as one: it begins at the text's beginning, at a
    line's beginning, after a word that ends in one of .!?:; or after one without
    letters, such as a list's bullet; and it ends at one of .!?:; or at a line's end.
    Marks around it, such as quotes, do not count, nor does its final stop; they may
    stand apart.
    """

    def __init__(self, sentences: Iterable[str]):
        """Takes any number; those without a letter or digit are passed over."""
        keys = (_key(sentence.split()) for sentence in sentences)
        self._keys = {key for key in keys if re.search(r"\w", key)}
        self._longest = max((len(key.split(" ")) for key in self._keys), default=0)
        # Nearly all words of a text begin none of them.
        self._first = {_bare(key.split(" ")[0]) for key in self._keys}

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Returns (start, end) of each sentence in a text, in order.

        None overlaps another; where several begin at the same word, it is the longest.
        """
        words: list[str] = []
        line_starts = set()
        for line in _LINE_BREAK.split(text):
            line_starts.add(len(words))
            words += line.split()
        line_starts.add(len(words))
        matched = []
        after = 0
        for number, word in enumerate(words):
            if number < after or _bare(word) not in self._first:
                continue
            if _begins(words, line_starts, number):
                last = self._match(words, line_starts, number)
                if last is not None:
                    matched.append((number, last))
                    after = last + 1
        if not matched:
            return []
        places = [word.span() for word in _WORD.finditer(text)]
        return [(places[first][0], places[last][1]) for first, last in matched]

    def without(self, text: str) -> str:
        """Returns a text without these sentences.

        What is left may bring two halves of one together, so it is looked at again
        until there is none.
        """
        while spans := self.spans(text):
            parts, position = [], 0
            for start, end in spans:
                parts.append(text[position:start])
                position = end
            text = "".join([*parts, text[position:]])
        return text

    def _match(self, words: list[str], line_starts: set[int], first: int) -> int | None:
        """The last word of the longest sentence that begins at a word."""
        best, best_key = None, ""
        for number in range(first, min(len(words), first + self._longest)):
            if _ends(words[number]) or number + 1 in line_starts:
                key = _key(words[first : number + 1])
                # What follows without a letter, a rule or a bullet, is none of it.
                if key in self._keys and key != best_key:
                    best, best_key = number, key
        return best


def refuse_recurring(path: str | os.PathLike, sentences: Sentences) -> None:
    """Checks that a JSON Lines file of documents holds none of the sentences.

    Args:
      path: one object a line, whose "title" and "text" are looked at.
      sentences: what must not be there.

    Raises:
      DataError: the first line that holds one, or is no such object; names file,
        line and sentence.
    """
    for line, record in read_objects(path):
        for name in ("title", "text"):
            text = record.get(name) or ""
            for start, end in sentences.spans(text):
                raise DataError(
                    path,
                    f"its {name} holds the query {text[start:end]!r} of the benchmark",
                    "A model trained on it would know what the benchmark takes for "
                    "private: leave such sentences out of public text",
                    line,
                )


def _begins(words: list[str], line_starts: set[int], number: int) -> bool:
    return (
        number in line_starts
        or _ends(words[number - 1])
        # A list's bullet or number is not a part of the sentence behind it.
        or not re.search(r"[^\W\d]", words[number - 1])
    )


def _ends(word: str) -> bool:
    return word.rstrip(_CLOSERS).endswith(tuple(_STOPS))


@functools.lru_cache(1_000_000)  # a text repeats the same few words
def _bare(word: str) -> str:
    """A word without what may stand around it."""
    return word.casefold().lstrip(_OPENERS + " ").rstrip(_STOPS + _CLOSERS + " ")


def _key(words: list[str]) -> str:
    return _bare(" ".join(words))
