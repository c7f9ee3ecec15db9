"""Words of texts, normalised: what counts as the same, and where records end."""

import re
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
        ("  a,b;\n\tc_d  e-f ", "a b c d e f"),
        ("x1 2.5 3,000", "x1 2 5 3 000"),
        ("“Quotes” — dashes… and\u00a0spaces", "quotes dashes and spaces"),
        # Composed and decomposed, with accents and without.
        ("caf\u00e9 cafe\u0301 CAFÉ", "cafe cafe cafe"),
        ("Straße ﬁn İ ſ", "strasse fin i s"),
        ("ｆｕｌｌ ２", "full 2"),
        # Invisible: a soft hyphen, a joiner; the zero-width space separates.
        ("co\u00adop zero\u200dwidth a\u200bb", "coop zerowidth a b"),
        ("ещё ЕЩЁ", "еще еще"),
        # An ideograph is a word; so is a kana, voiced or not, of any width.
        ("中文abc がく ㍿x", "中 文 abc か く 株 式 会 社 x"),
        ("ガ カ\u3099 ｶﾞ", "カ カ カ"),
        # Other marks belong to the letters they stand on.
        ("कि कु", "कि कु"),
        ("\ud83d emoji 😀 \x01 \x00 done", "emoji done"),
        ("", ""),
        (" \n—", ""),
    ],
)
def test_words(text, expected):
    assert " ".join(words(text)) == expected


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(max_codepoint=127)))
def test_ascii_goes_by_runs_of_letters_and_digits(text):
    assert words(text) == re.findall("[a-z0-9]+", text.lower())


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


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(max_codepoint=0x5FF), max_size=30))
def test_character_by_character_is_as_the_whole_text_at_once(text):
    # Marks in an order of their own are put in another by NFKD, if all are there.
    assert sorted("".join(words(text))) == sorted("".join(_whole_text(text)))
    assert len(words(text)) == len(_whole_text(text))


def test_words_are_their_own_words():
    for first in (0, 1 << 16):  # all characters of the first two planes
        text = " ".join(map(chr, range(first, first + (1 << 16))))
        once = words_of([text])[0]
        assert words_of([once.decode()])[0] == once


def test_the_stream_says_where_records_begin_and_end():
    assert word_stream(["Don't!", "go"]) == b"\x01 don t \x01 go \x01"
    assert word_stream(["", "...", "a"]) == b"\x01 \x01 \x01 a \x01"
    assert word_stream([]) == b"\x01"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(st.sampled_from("aB \x01\x00é—中\n"), max_size=8)))
def test_records_stay_apart_whatever_they_hold(texts):
    assert words_of(texts) == [words_of([text])[0] for text in texts]
    stream = word_stream(texts)
    assert stream.count(b"\x01") == len(texts) + 1
    assert b"  " not in stream and stream == stream.strip(b" ")
