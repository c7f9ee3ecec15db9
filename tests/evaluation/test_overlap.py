"""Overlap with a corpus against a naive search, and what must not change it."""

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdpsq.evaluation import OverlapScan, draw_samples, share_in_draws
from tfdpsq.validation import InputError
from tfdpsq.words import words_of

# Few words, so that runs of them come back.
_WORDS = ["a", "b", "Cat", "dog!", "é", "x-y", "中文", "", "."]
_text = st.lists(st.sampled_from(_WORDS), max_size=25).map(" ".join)


def naive(texts, records):
    """(equal, contained) of each text, by Python's own `==`."""
    corpus = list(words_of(records))
    found = []
    for own in words_of(texts):
        contained = any(
            record[at : at + len(own)] == own
            for record in corpus
            for at in range(len(record) - len(own) + 1)
        )
        found.append((bool(own) and own in corpus, bool(own) and contained))
    return found


@settings(max_examples=100, deadline=None)
@given(st.lists(_text, min_size=1, max_size=12), st.lists(_text, max_size=6), st.data())
def test_scan_equals_a_naive_search(records, texts, data):
    record = data.draw(st.sampled_from(records)).split(" ")
    first = data.draw(st.integers(0, len(record)))
    part = record[first : first + data.draw(st.integers(0, 16))]
    texts = [*texts, *records[:2], " ".join(part).upper(), "cat"]
    scan = OverlapScan(texts)
    scan.scan(iter(records))
    rows = zip(scan.equal.tolist(), scan.contained.tolist())
    assert list(rows) == naive(texts, records)
    assert scan.records == len(records)
    assert scan.corpus_bytes == sum(len(record.encode()) for record in records)


def test_matches_in_later_batches_and_parts_count():
    """A text of twelve words that differs in the last is not there."""
    long = "one two three four five six seven eight nine ten eleven twelve"
    records = ["nothing"] * 3000
    records[1500] = long.replace("twelve", "other")
    scan = OverlapScan([long, "nothing", "eleven twelve"])
    scan.scan(["first"])
    scan.scan(records)
    assert scan.contained.tolist() == [False, True, False]
    scan.scan([f"so {long}"])
    assert scan.contained.tolist() == [True, True, True]
    assert scan.equal.tolist() == [False, True, False]


def test_empty_samples_and_draws_are_refused():
    with pytest.raises(InputError, match="none of the 2 texts of the sample holds"):
        OverlapScan(["", "?"])
    with pytest.raises(InputError, match="size is 0"):
        draw_samples(5, 0, 1, 0)
    with pytest.raises(InputError, match="a draw is missing or empty"):
        share_in_draws([np.ones(3, bool), np.zeros(0, bool)])


# -- Draws and shares -------------------------------------------------------------


def test_shares_have_clopper_pearson_intervals():
    flags = [np.arange(100) < hits for hits in (3, 5, 10)]
    share = share_in_draws(flags, 0.9)
    assert share["share"] == pytest.approx(18 / 300)
    assert share["by_draw"] == pytest.approx([0.03, 0.05, 0.10])
    # Their mean is 0.06: squares of 0.03, 0.01 and 0.04 sum to 0.0026, over 2.
    assert share["deviation"] == pytest.approx(0.0013**0.5)
    # Clopper and Pearson's definition: what makes 18 or more, or fewer, a 5 % chance.
    assert scipy.stats.binom.sf(17, 300, share["low"]) == pytest.approx(0.05)
    assert scipy.stats.binom.cdf(18, 300, share["high"]) == pytest.approx(0.05)
    assert share["confidence"] == 0.9
