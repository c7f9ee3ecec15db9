"""Pseudo-queries: sentences cut from public documents, to stand in for queries.

They cost no privacy, since no private query is read. A retriever trained on them
is the control that every differentially private method has to beat.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterable, Iterator

from tfdpsq.data.texts import Document, Pair
from tfdpsq.validation import InputError, positive_integer

# A line that starts something new rather than going on with a sentence: code,
# lists, rules, doctest prompts, directives, "name: text" and "name (type): text".
_CODE = re.compile(
    r"\s*(>>>|\.\.\.\s|```|~~~|\.\. |@|#|[-=~^*_+|]{3,}|\||"
    r"import [\w.]+\s*$|from [\w.]+ import )"
)
_BULLET = re.compile(r"\s*(?:[-*+\u2022]|\d+[.)]|\[\d+\])\s+")
# NumPy's "name : type", alone on its line.
_TYPED = re.compile(r"\s*[`*]{0,2}\w[\w.,* ]*[`*]{0,2} : ")
_ENTRY = re.compile(r"\s*[`*]{0,2}\w[\w.*]*[`*]{0,2}(?:\s*\([^)]*\))?\s?:\s+")
_HEADER = re.compile(r"\s*\w[\w ]{0,30}:\s*$")
_SENTENCE = re.compile(
    r"\S.*?(?:[.!?][\"')\]]*(?=\s+[\"'(\[]?[A-Z0-9`])|\Z)", re.DOTALL
)
_CLAUSE = re.compile(r"[^,;:]*[^,;:\s][^,;:]*")
_WORD = re.compile(r"[^\W\d_]+(?:['\u2019-][^\W\d_]+)*[.,;:!?\"')\]]*")
_EDGE = " \t\n.,;:"
# Words of a query.
LEAST_WORDS, MOST_WORDS = 3, 25


def pseudo_pairs(
    documents: Iterable[Document],
    seed: int,
    per_document: int = 1,
    *,
    least_words: int = LEAST_WORDS,
    most_words: int = MOST_WORDS,
    least_left: int = 15,
) -> Iterator[Pair]:
    """Cuts sentences out of documents and pairs them with what is left.

    Sentences of paragraphs are preferred, then those of list entries (arguments,
    results), then clauses between commas, colons or semicolons; code, types and
    headers are passed over. A document with none of these gives no pair. The choice
    depends on the seed and the document alone, not on order or other documents.

    Args:
      documents: public documents, streamed.
      seed: any integer.
      per_document: pairs a document at most, each of another sentence.
      least_words: words of a query at least.
      most_words: words of a query at most.
      least_left: words the document must keep for the sentence to be taken out of
        it; a shorter document is given whole.

    Yields:
      Pairs with the query ids pseudo-0, pseudo-1, ... in the order of the
      documents; `document` is the title and what is left of the text.

    Raises:
      InputError: a number is not a positive integer, or the bounds are crossed.
    """
    positive_integer("per_document", per_document)
    positive_integer("least_words", least_words)
    positive_integer("most_words", most_words)
    positive_integer("least_left", least_left)
    if least_words > most_words:
        raise InputError(
            f"least_words is {least_words} and most_words {most_words}; the first "
            "must not exceed the second."
        )
    return _pairs(
        documents, seed, per_document, range(least_words, most_words + 1), least_left
    )


def _pairs(
    documents: Iterable[Document],
    seed: int,
    per_document: int,
    allowed: range,
    least_left: int,
) -> Iterator[Pair]:
    count = 0
    for document in documents:
        spans = _candidates(document.text, allowed)
        key = hashlib.sha256(f"{seed}\0{document.id}".encode()).digest()
        draw = random.Random(int.from_bytes(key, "big"))
        for start, end in draw.sample(spans, min(per_document, len(spans))):
            query = _clean(document.text[start:end])
            rest = f"{document.text[:start].rstrip()} {document.text[end:].lstrip()}"
            if len(rest.split()) < least_left:
                rest = document.text
            content = Document(document.id, document.title, rest.strip()).content
            yield Pair(f"pseudo-{count}", query, document.id, content)
            count += 1


def _candidates(text: str, allowed: range) -> list[tuple[int, int]]:
    """Returns where the best kind of usable text stands: the first that occurs.

    The kinds: sentences of paragraphs, sentences of list entries, clauses.
    """
    paragraphs: dict[str, tuple[int, int]] = {}
    entries: dict[str, tuple[int, int]] = {}
    clauses: dict[str, tuple[int, int]] = {}
    for start, end, listed in _units(text):
        sentences = entries if listed else paragraphs
        for match in _SENTENCE.finditer(text, start, end):
            if _usable(match.group(), allowed):
                sentences.setdefault(_clean(match.group()), match.span())
                continue
            for part in _CLAUSE.finditer(text, match.start(), match.end()):
                if _usable(part.group(), allowed):
                    clauses.setdefault(_clean(part.group()), part.span())
    return list((paragraphs or entries or clauses).values())


def _units(text: str) -> Iterator[tuple[int, int, bool]]:
    """Yields the stretches of a text that are prose, broken where sentences are.

    A stretch ends at blank lines, code, headers, and where an entry of a list
    begins; a list entry's name or bullet is left out.

    Yields:
      Start, end, and whether it belongs to a list (of arguments, of results).
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


def _usable(sentence: str, allowed: range) -> bool:
    words = _clean(sentence).split()
    if len(words) not in allowed:
        return False
    plain = sum(bool(_WORD.fullmatch(word)) for word in words)
    # Four fifths of plain words separate prose with a symbol in it from code.
    return plain >= 0.8 * len(words) and words[0][0].isalpha()


def _clean(sentence: str) -> str:
    return " ".join(sentence.split()).strip(_EDGE)
