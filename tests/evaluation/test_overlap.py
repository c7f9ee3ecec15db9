"""Overlap with a corpus against a naive count, and what must not change it."""

import dataclasses

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdpsq.evaluation import (
    OverlapScan,
    draw_samples,
    share_in_draws,
)
from tfdpsq.evaluation.overlap import span_hashes
from tfdpsq.evaluation.overlap.word_stream import words_of
from tfdpsq.validation import InputError

# Few words, so that runs of them come back; one longer than the smallest blocks.
_WORDS = [
    "a",
    "b",
    "Cat",
    "dog!",
    "é",
    "x-y",
    "中文",
    "",
    ".",
    "\x01",
    "verylongword" * 4,
]
_text = st.lists(st.sampled_from(_WORDS), max_size=25).map(" ".join)
_short = st.lists(st.sampled_from(_WORDS[:-1]), max_size=4).map(" ".join)
_long = st.lists(st.sampled_from(_WORDS), max_size=60).map(" ".join)


def naive(texts, records, n):
    """(equal, contained, containment, coverage, record) of each text, from the rules.

    Lists of words and Python's own `==` and `in`.
    """
    corpus = [words.decode().split() for words in words_of(records)]
    found = []
    for text in words_of(texts):
        words = text.decode().split()
        if not words:
            found.append((False, False, 0.0, 0.0, -1))
            continue
        size = min(n, len(words))
        grams = {
            tuple(record[at : at + size])
            for record in corpus
            for at in range(len(record) - size + 1)
        }
        here = [
            tuple(words[at : at + size]) in grams for at in range(len(words) - size + 1)
        ]
        covered = {at + k for at, hit in enumerate(here) if hit for k in range(size)}
        equal = [number for number, record in enumerate(corpus) if record == words]
        contained = [
            number
            for number, record in enumerate(corpus)
            if any(
                record[at : at + len(words)] == words
                for at in range(len(record) - len(words) + 1)
            )
        ]
        found.append(
            (
                bool(equal),
                bool(contained),
                sum(here) / len(here),
                len(covered) / len(words),
                (equal or contained or [-1])[0],
            )
        )
    return found


def scanned(texts, records, n=8, **settings):
    """The same from a scan; and its result."""
    scan = OverlapScan(texts, n, **settings)
    scan.scan(iter(records))
    result = scan.result()
    rows = zip(
        result.equal.tolist(),
        result.contained.tolist(),
        result.containment.tolist(),
        result.coverage.tolist(),
        result.place[:, 1].tolist(),
    )
    return list(rows), result


@settings(max_examples=100, deadline=None)
@given(
    st.lists(_text, min_size=1, max_size=12),
    st.lists(_text, max_size=6),
    st.integers(1, 9),
    st.integers(1, 60),
    st.integers(1, 3),
    st.data(),
)
def test_all_is_as_counted_naively_however_the_corpus_is_cut(
    records, texts, n, block, threads, data
):
    record = data.draw(st.sampled_from(records)).split(" ")
    first = data.draw(st.integers(0, len(record)))
    part = record[first : first + data.draw(st.integers(0, 12))]
    texts = [*texts, *records[:2], " ".join(part).upper(), "cat"]
    found, result = scanned(texts, records, n, block=block, threads=threads)
    assert found == naive(texts, records, n)
    assert result.records == len(records)
    assert result.corpus_bytes == sum(len(record.encode()) for record in records)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.one_of(_long, _short), min_size=1, max_size=6),
    st.lists(_short, min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(1, 60),
)
def test_short_texts_are_found_in_long_records_cut_many_times(records, texts, n, block):
    found, _ = scanned([*texts, "cat"], records, n, block=block)
    assert found == naive([*texts, "cat"], records, n)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 13])
def test_n_grams_of_any_length_are_found_in_text_of_realistic_size(n):
    random = np.random.default_rng(n)
    vocabulary = [f"w{number}" for number in range(40)]
    records = [" ".join(random.choice(vocabulary, 60)) for _ in range(40)]
    texts = [" ".join(random.choice(vocabulary, length)) for length in range(1, 30)]
    texts += [records[7], " ".join(records[9].split()[5:30])]
    found, _ = scanned(texts, records, n, block=500)
    assert found == naive(texts, records, n)


@pytest.mark.parametrize("block", [1, 7, 50, 4096])
def test_a_text_is_found_wherever_a_long_record_is_cut(block):
    text = "the one that is looked for in here"
    filler = "some other words which fill the record up before it comes "
    for before in range(0, len(filler)):
        record = filler * 2 + filler[:before] + " " + text + " " + filler * 3
        scan = OverlapScan([text], block=block)
        scan.scan(["first", record, "last"])
        result = scan.result()
        assert result.place.tolist() == [[0, 1]] and not result.equal.any()
        assert result.containment.tolist() == [1.0]


def test_no_match_reaches_from_one_record_into_the_next():
    found, _ = scanned(["a b c", "b c"], ["x a b", "c y", "b", "c"], n=2)
    assert found[0] == (False, False, 0.5, 2 / 3, -1)
    assert found[1] == (False, False, 0.0, 0.0, -1)


def test_what_one_changed_word_in_twenty_leaves():
    words = [f"word{number}" for number in range(40)]
    record = " ".join(words)
    words[10] = words[30] = "changed"
    # Runs of 10, 19 and 9 words are left: of 33 8-grams 3 + 12 + 2, of 40 words 38.
    found, result = scanned([" ".join(words)], [record])
    assert found == [(False, False, 17 / 33, 38 / 40, -1)]
    assert result.near().all() and result.near(0.95).all()
    assert not result.near(0.951).any()


def test_equal_implies_contained_and_contained_near():
    texts = ["a b", "b c", "a x", "a b c d"]
    result = scanned(texts, ["a b c", "A, B!"])[1]
    assert result.equal.tolist() == [True, False, False, False]
    assert result.contained.tolist() == [True, True, False, False]
    assert result.near(1.0).tolist() == [True, True, False, False]
    # An equal record goes before one that was met earlier.
    assert result.place.tolist() == [[0, 1], [0, 0], [-1, -1], [-1, -1]]


def test_texts_with_the_same_words_share_what_is_found():
    texts = ["A b!", "nothing", "a, B", "a b"]
    result = scanned(texts, ["x a b"])[1]
    assert result.contained.tolist() == [True, False, True, True]


def test_a_text_without_words_matches_nothing():
    found, _ = scanned(["", "—", "a"], ["", "a"])
    assert found == [(False, False, 0.0, 0.0, -1)] * 2 + [(True, True, 1.0, 1.0, 1)]


def test_parts_add_up_to_the_whole_corpus():
    random = np.random.default_rng(0)
    records = [" ".join(random.choice(list("abcdef"), 9)) for _ in range(60)]
    texts = [
        *records[50:],
        *(" ".join(random.choice(list("abcdef"), 5)) for _ in "a" * 9),
    ]
    whole = scanned(texts, records, n=3)[1]
    scan = OverlapScan(texts, n=3)
    for first in range(0, 60, 20):
        scan.scan(records[first : first + 20])
    parts = scan.result()
    places = whole.place[:, 1]
    for name in ("equal", "contained", "containment", "coverage"):
        assert getattr(parts, name).tolist() == getattr(whole, name).tolist()
    there = places >= 0
    assert parts.place[there].tolist() == [[p // 20, p % 20] for p in places[there]]
    assert (parts.records, parts.corpus_bytes) == (60, whole.corpus_bytes)


def test_a_scan_goes_on_from_its_state():
    texts, parts = ["a b", "b c d", "x y"], [["a b c"], ["b, c d."], ["x", "x y z"]]
    whole = OverlapScan(texts, n=2)
    for part in parts:
        whole.scan(part)
    first = OverlapScan(texts, n=2)
    first.scan(parts[0])
    first.scan(parts[1])
    later = OverlapScan(texts, n=2)
    later.restore(first.state())
    assert later.scans == 2
    later.scan(parts[2])
    for field in dataclasses.fields(whole.result()):
        a, b = (getattr(scan.result(), field.name) for scan in (whole, later))
        assert np.array_equal(a, b), field.name
    for other in (OverlapScan(texts, n=3), OverlapScan([*texts[:2], "x z"], n=2)):
        with pytest.raises(InputError, match="another sample or another n"):
            other.restore(first.state())


@pytest.mark.parametrize("cuts", [(0, 0), (1, 2), (3, 5), (2, 6), (6, 6)])
def test_scans_of_parts_merged_are_one_scan(cuts):
    """Of the parts before, between and behind two cuts, each with its own scan."""
    texts = ["a b", "b c d", "x y", "a b", "never", "z", "b c"]
    parts = [["a b c"], ["b, c d."], ["x", "x y z"], ["a b"], ["b c", "x y"], ["z"]]
    whole = OverlapScan(texts, n=2)
    for part in parts:
        whole.scan(part)
    merged = OverlapScan(texts, n=2)
    for start, end in zip((0, *cuts), (*cuts, len(parts))):
        own = OverlapScan(texts, n=2)
        for part in parts[start:end]:
            own.scan(part)
        merged.merge(own.state())
    assert merged.scans == len(parts)
    for field in dataclasses.fields(whole.result()):
        a, b = (getattr(scan.result(), field.name) for scan in (whole, merged))
        assert np.array_equal(a, b), field.name
    with pytest.raises(InputError, match="another sample or another n"):
        merged.merge(OverlapScan(texts, n=3).state())


def test_texts_of_one_hash_are_told_apart_by_their_words(monkeypatch):
    """With R = 1 a hash only adds up bytes: words in any order have the same."""
    monkeypatch.setattr(span_hashes, "_BASE", 1)
    texts = ["a b c d e f g h i j", "on eat", "one at", "kayak", "ab cd"]
    records = ["j i h g f e d c b a", "ate no", "one at", "o neat", "ad cb"]
    found, result = scanned(texts, records)
    assert [row[:2] for row in found] == [row[:2] for row in naive(texts, records, 8)]
    assert result.contained.tolist() == [False, False, True, False, False]
    # That the hash was as weak as meant: n-grams go by hashes alone.
    assert result.containment.tolist() == [1.0, 1.0, 1.0, 0.0, 1.0]


def test_a_false_candidate_does_not_hide_the_text_behind_it(monkeypatch):
    monkeypatch.setattr(span_hashes, "_BASE", 1)
    found, _ = scanned(["on eat"], ["ate no ate no on eat", "ate no", "on eat"])
    assert found == [(True, True, 1.0, 1.0, 2)]


def test_memory_does_not_grow_with_the_corpus():
    """A generator is asked for no more than the threads can hold."""
    ahead = []
    scan = OverlapScan(["a b"], threads=2, block=10)
    look_at = scan._look_at

    def slow(batch):
        ahead.append(given_out)
        return look_at(batch)

    given_out = 0

    def records():
        nonlocal given_out
        for _ in range(200):
            given_out += 1
            yield "some text"

    scan._look_at = slow
    scan.scan(records())
    assert scan.result().records == 200
    # A record is a batch here: those looked at, and the few that wait.
    assert max(asked - done for done, asked in enumerate(ahead)) <= 6


def test_an_error_of_the_corpus_comes_through():
    def records():
        yield "a"
        raise InputError("broken here")

    with pytest.raises(InputError, match="broken here"):
        OverlapScan(["a"]).scan(records())


@pytest.mark.parametrize(
    ("texts", "settings", "message"),
    [
        ([], {}, "none of the 0 texts of the sample holds a word"),
        (["", "?"], {}, "none of the 2 texts of the sample holds a word"),
        ("text", {}, "texts is a list of texts, not one text"),
        (["a"], {"n": 0}, "n is 0; it must be an integer of at least 1"),
        (["a"], {"threads": 0}, "threads is 0"),
        (["a"], {"block": 0}, "block is 0"),
    ],
)
def test_bad_samples_and_settings_are_named(texts, settings, message):
    with pytest.raises(InputError, match=message):
        OverlapScan(texts, **settings)


def test_an_empty_corpus_is_an_error_and_no_zero():
    scan = OverlapScan(["a"])
    scan.scan([])
    with pytest.raises(InputError, match="the corpus holds no record"):
        scan.result()


@pytest.mark.parametrize("threshold", [0, 1.01, float("nan")])
def test_a_threshold_out_of_range_is_named(threshold):
    result = scanned(["a"], ["a"])[1]
    with pytest.raises(InputError, match="threshold is .*; it must lie in"):
        result.near(threshold)


# -- Draws and shares -------------------------------------------------------------


def test_draws_are_without_replacement_and_by_their_seeds():
    draws = draw_samples(1000, 100, 3, seed=5)
    assert [len(np.unique(each)) for each in draws] == [100] * 3
    assert all((np.diff(each) > 0).all() and each[-1] < 1000 for each in draws)
    again = draw_samples(1000, 100, 2, seed=5)
    assert all(np.array_equal(a, b) for a, b in zip(again, draws))
    assert not np.array_equal(draws[0], draws[1])
    assert not np.array_equal(draws[0], draw_samples(1000, 100, 1, seed=6)[0])


def test_every_number_is_as_likely_to_be_drawn():
    draws = draw_samples(50, 10, 2000, seed=0)
    counts = np.bincount(np.concatenate(draws), minlength=50)
    assert scipy.stats.chisquare(counts).pvalue > 1e-3


def test_of_fewer_than_asked_for_all_are_taken_once():
    (only,) = draw_samples(10, 10, 3, seed=0)
    assert only.tolist() == list(range(10))


def test_shares_and_their_interval():
    flags = [np.arange(100) < hits for hits in (3, 5, 10)]
    share = share_in_draws(flags, 0.9)
    assert share.share == pytest.approx(18 / 300)
    assert share.by_draw == pytest.approx((0.03, 0.05, 0.10))
    # Their mean is 0.06: squares of 0.03, 0.01 and 0.04 sum to 0.0026, over 2.
    assert share.deviation == pytest.approx(0.0013**0.5)
    # Clopper and Pearson's definition: what makes 18 or more, or fewer, a 5 % chance.
    assert scipy.stats.binom.sf(17, 300, share.low) == pytest.approx(0.05)
    assert scipy.stats.binom.cdf(18, 300, share.high) == pytest.approx(0.05)
    assert share.confidence == 0.9


def test_a_share_of_nothing_and_of_all():
    none = share_in_draws([np.zeros(50, bool)])
    assert (none.share, none.low, none.deviation) == (0.0, 0.0, None)
    assert none.high == pytest.approx(1 - 0.025 ** (1 / 50))
    assert share_in_draws([np.ones(50, bool)]).high == 1.0


def test_bad_draws_are_named():
    with pytest.raises(InputError, match="population is 0"):
        draw_samples(0, 1, 1, 0)
    with pytest.raises(InputError, match="size is 0"):
        draw_samples(5, 0, 1, 0)
    with pytest.raises(InputError, match="draws is 0"):
        draw_samples(5, 1, 0, 0)
    for flags in ([], [np.zeros(0, bool)], [np.ones(3, bool), np.zeros(0, bool)]):
        with pytest.raises(InputError, match="a draw is missing or empty"):
            share_in_draws(flags)
    with pytest.raises(InputError, match="confidence is 1"):
        share_in_draws([np.ones(3, bool)], 1.0)
