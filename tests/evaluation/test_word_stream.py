"""Words of texts, normalized: what counts as the same, and where records end."""

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdpsq.evaluation.overlap.word_stream import word_stream, words_of


def words(text):
    return words_of([text])[0].decode().split()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don't PANIC!", "don t panic"),
        ("x1 2.5 3,000", "x1 2 5 3 000"),
        ("“Quotes” — dashes… and\u00a0spaces", "quotes dashes and spaces"),
        # Composed and decomposed, with accents and without.
        ("caf\u00e9 cafe\u0301 CAFÉ", "cafe cafe cafe"),
        ("Straße ﬁn İ ſ", "strasse fin i s"),
        ("ｆｕｌｌ ２", "full 2"),
        ("ещё ЕЩЁ", "еще еще"),
        ("ガ カ\u3099 ｶﾞ", "カ カ カ"),
        # Other marks belong to the letters they stand on.
        ("कि कु", "कि कु"),
    ],
)
def test_words(text, expected):
    assert " ".join(words(text)) == expected


def _whole_text(text):
    """The rule applied to a whole text at once; no ideographs."""
    text = unicodedata.normalize("NFKD", text).casefold()
    kept = ""
    for c in unicodedata.normalize("NFKD", text):
        if unicodedata.category(c) == "Cf" and c != "\u200b":
            continue
        if not 0x300 <= ord(c) <= 0x36F:
            mark = unicodedata.category(c)[0] == "M"
            kept += c if c.isalnum() or mark else " "
    return kept.split()


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(max_codepoint=0x5FF), max_size=30))
def test_words_equal_whole_text_normalization(text):
    # Marks in an order of their own are put in another by NFKD, if all are there.
    assert sorted("".join(words(text))) == sorted("".join(_whole_text(text)))
    assert len(words(text)) == len(_whole_text(text))


def test_normalization_is_idempotent():
    for first in (0, 1 << 16):  # all characters of the first two planes
        text = " ".join(map(chr, range(first, first + (1 << 16))))
        once = words_of([text])[0]
        assert words_of([once.decode()])[0] == once


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.sampled_from("aB \x01\x00é—中\n"), max_size=8)))
def test_records_stay_apart(texts):
    assert words_of(texts) == [words_of([text])[0] for text in texts]
    stream = word_stream(texts)
    assert stream.count(b"\x01") == len(texts) + 1
    assert b"  " not in stream and stream == stream.strip(b" ")
