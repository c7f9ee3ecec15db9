"""Hashes of runs of words, what filters them, and what a text is looked for by."""

import numpy as np

from tfdpsq.evaluation.overlap import span_hashes
from tfdpsq.evaluation.overlap.sample_index import SampleIndex


def test_hashes_are_those_of_the_bytes_wherever_they_stand():
    stream = b"\x01 ab c ab c d \x01"
    words = span_hashes.HashedWords(stream, span_hashes.Powers(len(stream)))
    base, spread = span_hashes._BASE, span_hashes._SPREAD

    def expected(text):
        return spread * sum(c * base**k for k, c in enumerate(text)) % 2**64

    assert len(words) == 7
    assert words.all_hashes(2).tolist() == [
        expected(text)
        for text in (b"\x01 ab", b"ab c", b"c ab", b"ab c", b"c d", b"d \x01")
    ]
    some = words.hashes(np.array([1, 3, 2]), np.array([2, 1, 4]))
    assert some.tolist() == [expected(b"ab c"), expected(b"ab"), expected(b"c ab c d")]
    assert len(words.all_hashes(8)) == 0


def test_a_filter_never_misses_and_seldom_passes_others():
    random = np.random.default_rng(0)
    marked = random.integers(0, 2**64, 30_000, dtype=np.uint64)
    others = random.integers(0, 2**64, 30_000, dtype=np.uint64)
    likely = span_hashes.HashFilter(marked)
    assert likely.passing(marked).tolist() == list(range(30_000))
    # 30,000 of 2^17 places in each of three tables: 0.205^3 = 0.9 %.
    assert len(likely.passing(others)) < 0.012 * 30_000


def test_the_rarest_n_gram_of_a_text_is_its_anchor():
    index = SampleIndex([b"a b c", b"a b d", b"b d"], 2, 100)
    # "b c" stands once in the sample; of "a b" and "b d", twice each, the first.
    assert index._anchor_place.tolist() == [1, 0, 0]
