"""Texts as words that can be compared byte by byte: normalisation, and fast.

Two texts are the same here if they have the same words in the same order. What a word
is has to be decided by each character alone, as a corpus is cut into blocks anywhere;
ASCII, nearly all of English text, is then one table of 256 bytes.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Sequence

import numpy as np

OVERLAP_NORMALIZATION = (
    "each character by itself: NFKD and case folded; accents (U+0300 to U+036F), the "
    "voicing marks of kana (U+3099, U+309A) and invisible characters (category Cf, "
    "but for the zero-width space) are dropped; letters, numbers and other marks make "
    "words; an ideograph or kana is a word of its own; all else separates words"
)

# Separates records, before the first and after the last, too: a word that no
# text can hold.
BOUNDARY = "\x01"
SPACE = ord(" ")

_ASCII_RUN = re.compile("([\x00-\x7f]+)")
_ZERO_WIDTH_SPACE = "\u200b"
_DROPPED = ((0x0300, 0x036F), (0x3099, 0x309A))
_IDEOGRAPHS = (
    (0x3041, 0x30FF),
    (0x31F0, 0x31FF),
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0x20000, 0x3FFFF),
)


def word_stream(records: Sequence[str]) -> bytes:
    r"""The words of some records, in UTF-8, one space between two.

    Args:
      records: texts of any kind.

    Returns:
      For "Don't!" and "go": b"\x01 don t \x01 go \x01", where \x01 is `BOUNDARY`. No
      text yields that byte, so it tells where records begin and end.
    """
    plain = [r if r.isascii() else _without_characters(r) for r in records]
    joined = f" {BOUNDARY} ".join(["", *plain, ""]).strip(" ")
    if joined.count(BOUNDARY) != len(records) + 1:
        plain = [record.replace(BOUNDARY, " ") for record in plain]
        joined = f" {BOUNDARY} ".join(["", *plain, ""]).strip(" ")
    codes = np.frombuffer(joined.encode().translate(_BYTES), np.uint8)
    space = codes == SPACE
    kept = np.ones(len(codes), bool)
    np.logical_not(space[1:] & space[:-1], out=kept[1:])
    return codes[kept].tobytes()


def words_of(texts: Sequence[str]) -> list[bytes]:
    """Each text's words in UTF-8, one space between two; b"" for a text without."""
    parts = word_stream(texts).split(BOUNDARY.encode())
    return [part.strip(b" ") for part in parts[1:-1]]


def _without_characters(text: str) -> str:
    """Replaces what is not ASCII by what it is compared as."""
    parts = _ASCII_RUN.split(text)
    parts[::2] = [part and _rewritten(part) for part in parts[::2]]
    return "".join(parts)


@functools.lru_cache(maxsize=1 << 16)
def _rewritten(run: str) -> str:
    return "".join([_character(character) for character in run])


@functools.lru_cache(maxsize=1 << 16)
def _character(character: str) -> str:
    """Returns the form in which a character is compared; `_BYTES` lowers ASCII."""
    folded = unicodedata.normalize("NFKD", character).casefold()
    found = ""
    for part in unicodedata.normalize("NFKD", folded):
        code, kind = ord(part), unicodedata.category(part)
        if any(first <= code <= last for first, last in _DROPPED):
            continue
        if kind == "Cf" and part != _ZERO_WIDTH_SPACE:
            continue
        if any(first <= code <= last for first, last in _IDEOGRAPHS):
            part = f" {part} "
        found += part if part.strip().isalnum() or kind.startswith("M") else " "
    return found


def _byte(code: int) -> int:
    """Maps a byte of UTF-8 to itself, its lower case, or a space."""
    if code >= 0x80 or code == ord(BOUNDARY) or chr(code).isalnum():
        return ord(chr(code).lower()) if code < 0x80 else code
    return SPACE


_BYTES = bytes(_byte(code) for code in range(256))
