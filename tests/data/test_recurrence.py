"""Queries that stand in public text again: where they are found, and taken out."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdpsq.data.recurrence import Sentences
from tfdpsq.words import words_of

QUERY = "Return the value of x."


def found(text, *sentences):
    """What is found in a text of some sentences, as it stands there."""
    (spans,) = Sentences(sentences or [QUERY]).spans([text])
    return [text[start:end] for start, end in spans]


@pytest.mark.parametrize(
    "text, there",
    [
        # Beginnings: of the text, of a line, of a sentence.
        ("Return the value of x. Not y.", "Return the value of x."),
        ("It counts\n  Return the value of x\nNot y.", "Return the value of x"),
        ("Why? return the value of x!", "return the value of x!"),
        # Line breaks, of any kind, and other white space.
        ("Return the\n    value\tof\u00a0x.", "Return the\n    value\tof\u00a0x."),
        ("Here\u2028Return the value of x\x0cnow", "Return the value of x"),
        # Case, final stops, and marks around it.
        ("RETURN THE VALUE OF X", "RETURN THE VALUE OF X"),
        (
            "\u201cReturn the value of x\u201d. End",
            "\u201cReturn the value of x\u201d.",
        ),
        # Bullets and numbers of lists.
        ("Steps - Return the value of x.", "Return the value of x."),
        ("Steps\n 2) Return the value of x\n 3) Stop", "Return the value of x"),
        # Other punctuation, and several sentences.
        ("Return `the` value-of x.", "Return `the` value-of x."),
        ("Return the value. Of x.", "Return the value. Of x."),
    ],
)
def test_sentences_are_found(text, there):
    assert found(text) == [there]


@pytest.mark.parametrize(
    "text",
    [
        "To return the value of x.",
        "Return the value of x now.",
        "Return the value of xs.",
        "Return the\nbest value of x.",
        " \n ",
    ],
)
def test_parts_of_longer_sentences_are_not_found(text):
    assert found(text) == []
    assert list(Sentences([QUERY]).without([text])) == [text]


def test_sentences_joined_by_a_removal_are_removed_too():
    (left,) = Sentences(["x y", "a b c."]).without(["K. A\nx y\nb c. D."])
    assert left.split() == ["K.", "D."]


# A naive checker, which knows nothing of `recurrence`: it cuts texts at stops and at
# line ends, and compares whole sentences.


def plain(sentence):
    """Lower case, white space collapsed, no marks around it."""
    text = " ".join(sentence.lower().split()).lstrip("\"'([{`*_ ")
    return text.rstrip(".!?:;\"')]}`*_ ")


def sentences_of(text):
    for unit in [text, *text.split("\n\n"), *text.splitlines()]:
        for sentence in re.split(r"(?<=[.!?:;])\s+", unit):
            yield plain(sentence)


def joined(words, gaps):
    pairs = st.tuples(st.sampled_from(words), st.sampled_from(gaps))
    return st.lists(pairs, max_size=14).map(
        lambda parts: "".join(word + gap for word, gap in parts)
    )


_WORDS = ["a", "A", "b", "c", "a.", "b!", "b:", '"a', "(b", "c)", "c.'", "-", "1.", "."]
_TEXTS = joined(_WORDS, [" ", " ", "  ", "\n", "\n\n", "\t"])
_QUERIES = st.lists(joined(_WORDS, [" ", " ", "\n"]), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(_TEXTS, _QUERIES)
def test_naive_checker_finds_nothing_left(text, queries):
    sentences = Sentences(queries)
    (left,) = sentences.without([text])
    unwanted = {plain(query) for query in queries if re.search(r"\w", plain(query))}
    assert not unwanted & set(sentences_of(left))
    assert sentences.spans([left]) == [[]]
    # What is left is what was there, in its order; a text without any is unchanged.
    letters = iter(text)
    assert all(letter in letters for letter in left)
    (spans,) = sentences.spans([text])
    if not spans:
        assert left == text
    asked = list(words_of(queries))
    assert all(words in asked for words in words_of(text[a:b] for a, b in spans))
