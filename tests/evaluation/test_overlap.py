"""Overlap with a corpus against a naive count, and what must not change it."""

import dataclasses

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdpsq.evaluation import OverlapScan, draw_samples, share_in_draws
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


@settings(max_examples=60, deadline=None)
@given(
    st.lists(_text, min_size=1, max_size=12),
    st.lists(_text, max_size=6),
    st.integers(1, 9),
    st.integers(1, 60),
    st.integers(1, 3),
    st.data(),
)
def test_scan_equals_a_naive_count_at_any_block_size(
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


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.one_of(_long, _short), min_size=1, max_size=6),
    st.lists(_short, min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(1, 60),
)
def test_short_texts_are_found_in_long_records_cut_many_times(records, texts, n, block):
    found, _ = scanned([*texts, "cat"], records, n, block=block)
    assert found == naive([*texts, "cat"], records, n)


def test_one_changed_word_in_twenty_is_near():
    words = [f"word{number}" for number in range(40)]
    record = " ".join(words)
    words[10] = words[30] = "changed"
    # Runs of 10, 19 and 9 words are left: of 33 8-grams 3 + 12 + 2, of 40 words 38.
    found, result = scanned([" ".join(words)], [record])
    assert found == [(False, False, 17 / 33, 38 / 40, -1)]
    assert result.near().all() and result.near(0.95).all()
    assert not result.near(0.951).any()


@pytest.mark.parametrize("cuts", [(0, 0), (1, 2), (3, 5), (6, 6)])
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


def test_empty_samples_corpora_and_draws_are_refused():
    with pytest.raises(InputError, match="none of the 2 texts of the sample holds"):
        OverlapScan(["", "?"])
    with pytest.raises(InputError, match="n is 0"):
        OverlapScan(["a"], n=0)
    scan = OverlapScan(["a"])
    scan.scan([])
    with pytest.raises(InputError, match="the corpus holds no record"):
        scan.result()
    with pytest.raises(InputError, match="size is 0"):
        draw_samples(5, 0, 1, 0)
    with pytest.raises(InputError, match="a draw is missing or empty"):
        share_in_draws([np.ones(3, bool), np.zeros(0, bool)])


# -- Draws and shares -------------------------------------------------------------


def test_draws_are_without_replacement_and_follow_the_seed():
    draws = draw_samples(1000, 100, 3, seed=5)
    assert [len(np.unique(each)) for each in draws] == [100] * 3
    assert all((np.diff(each) > 0).all() and each[-1] < 1000 for each in draws)
    again = draw_samples(1000, 100, 2, seed=5)
    assert all(np.array_equal(a, b) for a, b in zip(again, draws))
    assert not np.array_equal(draws[0], draws[1])
    assert not np.array_equal(draws[0], draw_samples(1000, 100, 1, seed=6)[0])


def test_draws_are_uniform():
    draws = draw_samples(50, 10, 2000, seed=0)
    counts = np.bincount(np.concatenate(draws), minlength=50)
    assert scipy.stats.chisquare(counts).pvalue > 1e-3


def test_shares_have_clopper_pearson_intervals():
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


def test_intervals_of_no_and_all_matches():
    none = share_in_draws([np.zeros(50, bool)])
    assert (none.share, none.low, none.deviation) == (0.0, 0.0, None)
    assert none.high == pytest.approx(1 - 0.025 ** (1 / 50))
    assert share_in_draws([np.ones(50, bool)]).high == 1.0
