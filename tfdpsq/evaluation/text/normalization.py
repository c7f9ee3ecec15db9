"""Normalisation: when texts are equal, and what a word is, for all text measures."""

from __future__ import annotations

import re
import unicodedata

TEXT_NORMALIZATION = (
    "NFKC, case folding, NFKC, runs of white space as one blank, trimmed"
)
WORDS = "normalised, then split into runs of letters, digits and underscores"

_WORD = re.compile(r"\w+")


def normalized(text: str) -> str:
    """The text as `TEXT_NORMALIZATION` says; NFKC twice, as folding may undo it."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(unicodedata.normalize("NFKC", folded).split())


def words_of(text: str) -> list[str]:
    """The words of a text as `WORDS` says; punctuation alone has none."""
    return _WORD.findall(normalized(text))
