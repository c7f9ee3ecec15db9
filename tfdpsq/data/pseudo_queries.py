"""Pseudo-queries: sentences cut from public documents, to stand in for queries.

They cost no privacy, since no private query is read. A retriever trained on them
is the control that every differentially private method has to beat.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
import re
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any

import regex

from tfdpsq.data.texts import Document, Pair
from tfdpsq.words import PAIRED, words_of

# A line that starts something new rather than going on with a sentence: code,
# lists, rules, doctest prompts, directives, "name: text" and "name (type): text".
_CODE = re.compile(
    r"\s*(>>>|\.\.\.\s|```|~~~|\.\. |@|#|[-=~^*_+|]{3,}|\||"
    r"import [\w.]+\s*$|from [\w.]+ import )"
)
_BULLET = re.compile(r"\s*(?:[-*+\u2022]|\d+[.)]|\[\d+\])\s+")
# NumPy's "name, name : type", alone on its line; " : " is also French.
_TYPED = re.compile(r"\s*[`*]{0,2}\w[\w.*]*(?:, ?[\w.*]+)*[`*]{0,2} : ")
_ENTRY = re.compile(r"\s*[`*]{0,2}\w[\w.*]*[`*]{0,2}(?:\s*\([^)]*\))?\s?:\s+")
_HEADER = re.compile(r"\s*\w[\w ]{0,30}:\s*$")
# Unicode's ends of sentences and clauses (UAX #29); those of ASCII are also in names.
_TERM, _COMMA = r"[\p{SB=STerm}--[!?]]", r"[\p{SB=SContinue}؛--\p{Pd}]"
_SENTENCE = regex.compile(
    r"(?s)\S.*?(?:[.!?][\"')\]]*(?=\s+[\"'(\[]?(?:[A-Z0-9`]|(?!\p{Ll})[^\x00-\x7f]))"
    rf"|{_TERM}[\p{{Pe}}\p{{Pf}}]*|\Z)",
    regex.V1,
)
# Where nothing parts words, spaces part clauses.
_SPACED = r"[\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]"
_CLAUSE = regex.compile(
    rf"(?s)(?!\s|{_COMMA}).+?(?={_COMMA}|(?<={_SPACED})\s+(?={_SPACED})|\Z)", regex.V1
)
# Returns a text in pieces that end with a line or a sentence.
pieces_of = regex.compile(rf"(?s).*?(?:\n|[.!?]\s+|{_TERM}\s*|$)", regex.V1).findall
# Returns words between white space and marks outside ASCII; where nothing parts words,
# characters.
parts_of = regex.compile(
    rf"[{PAIRED}]\p{{M}}*|[^\s{PAIRED}[\p{{P}}--\p{{ASCII}}]]+", regex.V1
).findall
_PAIR = regex.compile(rf"(?:[{PAIRED}]\p{{M}}*){{2}}")
_JOINT = re.compile("['-]")
_TRAILING = ".,;:!?\"')]"
_EDGES = regex.compile(rf"^[\s.{_COMMA[1:]}+|[\s.。।۔{_COMMA[1:]}+$", regex.V1)
# Of a query, and of a document that a sentence was taken out of.
WORDS = range(3, 26)
_LEAST_LEFT = 15
_CHUNK = 256  # documents whose words are split at once


def pseudo_pairs(
    documents: Iterable[Document], seed: int, per_document: int = 1
) -> Iterator[Pair]:
    """Cuts sentences out of documents and pairs them with what is left.

    Sentences of paragraphs are preferred, then those of list entries (arguments,
    results), then clauses between commas, colons or semicolons; code, types and
    headers are passed over. A document with none of these gives no pair, others
    `per_document` at most. The choice depends on the seed and the document alone, not
    on order or other documents.

    Yields:
      Pairs with the query ids pseudo-0, pseudo-1, ... in the order of the
      documents; `document` is the title and what is left of the text, or the whole of
      a document that would keep fewer than 15 words.
    """
    count, stream = 0, iter(documents)
    while chunk := list(itertools.islice(stream, _CHUNK)):
        cut = []
        spans = _candidates([document.text for document in chunk])
        for document, usable in zip(chunk, spans):
            key = hashlib.sha256(f"{seed}\0{document.id}".encode()).digest()
            draw = random.Random(int.from_bytes(key, "big"))
            for start, end in draw.sample(usable, min(per_document, len(usable))):
                halves = document.text[:start].rstrip(), document.text[end:].lstrip()
                rest = " ".join(halves).strip()
                cut.append((document, document.text[start:end], rest))
        for (document, sentence, rest), size in zip(cut, _sizes(c[2] for c in cut)):
            left = rest if size >= _LEAST_LEFT else document.text.strip()
            content = Document(document.id, document.title, left).content
            yield Pair(f"pseudo-{count}", _clean(sentence), document.id, content)
            count += 1


def _candidates(texts: list[str]) -> list[list[tuple[int, int]]]:
    """Returns where usable text stands: of paragraphs, else list entries, else clauses.

    Of equal sentences, the first counts.
    """
    kinds: list[list[Iterable[Any]]] = []
    for text in texts:
        sentences: tuple[list[Any], list[Any]] = ([], [])
        for start, end, listed in _units(text):
            sentences[listed].extend(_SENTENCE.finditer(text, start, end))
        merged = sorted(itertools.chain(*sentences), key=lambda match: match.start())
        parts = (_CLAUSE.finditer(match.string, *match.span()) for match in merged)
        kinds.append([*sentences, itertools.chain.from_iterable(parts)])
    spans: list[list[tuple[int, int]]] = [[] for _ in texts]
    for kind in range(3):
        more = _usable([() if s else k[kind] for s, k in zip(spans, kinds)])
        spans = [found or others for found, others in zip(spans, more)]
    return spans


def _units(text: str) -> Iterator[tuple[int, int, bool]]:
    """Yields (start, end, is it in a list) of stretches of prose.

    A stretch ends at blank lines, code, headers, and where an entry of a list
    begins; a list entry's name or bullet is left out.
    """
    start: int | None = None
    end = 0  # Stands for nothing until there is a start.
    listed = False
    position = 0
    for line in text.splitlines(keepends=True):
        begin, position = position, position + len(line)
        blank = not line.strip()
        titled = _HEADER.match(line) or _TYPED.match(line)
        apart = blank or titled or _CODE.match(line)
        mark = None if apart else _BULLET.match(line) or _ENTRY.match(line)
        if (apart or mark) and start is not None:
            yield start, end, listed
            start = None
        if titled or mark:
            listed = True
        elif not apart and start is None and not line[0].isspace():
            listed = False  # Back at the margin: the list is over.
        if apart:
            continue
        if start is None:
            start = begin + (mark.end() if mark else 0)
        end = position
    if start is not None:
        yield start, end, listed


def _usable(texts: list[Iterable[Any]]) -> list[list[tuple[int, int]]]:
    spans: list[dict[str, tuple[int, int]]] = [{} for _ in texts]
    for found, matches in zip(spans, texts):
        for match in matches:
            found.setdefault(_clean(match.group()), match.span())
    sizes = _sizes(sentence for found in spans for sentence in found)
    return [
        [
            span
            for sentence, span in found.items()
            if WORDS[0] <= next(sizes) <= WORDS[-1] and _is_prose(parts_of(sentence))
        ]
        for found in spans
    ]


def _sizes(texts: Iterable[str]) -> Iterator[float]:
    """Yields the number of words of each text; a pair of characters is half a word."""
    for words in words_of(texts):
        paired = () if "".join(words).isascii() else filter(_PAIR.match, words)
        yield len(words) - sum(1 for _ in paired) / 2


def _is_prose(parts: list[str]) -> bool:
    # Four fifths of plain words separate prose with a symbol in it from code.
    return sum(map(_is_plain, parts)) >= 0.8 * len(parts) and parts[0][0].isalpha()


def _is_plain(word: str) -> bool:
    """Returns whether a word is letters, with marks as in Hindi, and punctuation."""
    parts = _JOINT.split(word.rstrip(_TRAILING))
    return all(part and all(map(_is_letter, part)) for part in parts)


@functools.cache
def _is_letter(character: str) -> bool:
    if character.isalnum():
        return not character.isdecimal()
    return unicodedata.category(character).startswith(("M", "Cf"))  # Cf joins letters


def _clean(sentence: str) -> str:
    return _EDGES.sub("", " ".join(sentence.split()))
