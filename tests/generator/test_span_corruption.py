"""Span corruption: nothing is lost, and as much is cut out as was asked for."""

import numpy as np
import pytest

from tfdpsq.generator.pretraining import SENTINELS, corrupt_spans

FIRST = 1099  # The sentinels are 1099, 1098, ..., 1000.
EOS = 1


def corrupted(ids, seed=0, input_length=64, target_length=64):
    ids = np.asarray(ids, np.int32)
    return corrupt_spans(
        ids,
        input_length,
        target_length,
        FIRST,
        np.random.default_rng(seed),
    )


def text_of(length, seed=0):
    return np.random.default_rng([seed, length]).integers(3, 1000, length)


def is_sentinel(token):
    return FIRST - SENTINELS < token <= FIRST


def spans_of(target, length):
    """{sentinel: its tokens} of a target, and that it is nothing but these and EOS."""
    assert target[length - 1] == EOS
    spans = {}
    for token in target[: length - 1].tolist():
        if is_sentinel(token):
            assert token not in spans
            spans[token] = []
            last = token
        else:
            spans[last].append(token)
    return spans


def put_back(example):
    source, source_length, target, target_length = example
    spans = spans_of(target, target_length)
    assert source[source_length - 1] == EOS
    text = []
    for token in source[: source_length - 1].tolist():
        text += spans.pop(token) if is_sentinel(token) else [token]
    assert spans == {}
    return text


def cut_out(example):
    """Lengths of the spans."""
    return [len(span) for span in spans_of(example[2], example[3]).values()]


@pytest.mark.parametrize("length", [0, 1, 4, 63, 200])
@pytest.mark.parametrize("target_length", [3, 6, 64])
def test_putting_the_spans_back_gives_the_text(length, target_length):
    ids = text_of(length)
    for seed in range(20):
        example = corrupted(ids, seed, target_length=target_length)
        source, source_length, target, used = example
        # A longer text is cut: 64 with the EOS.
        assert put_back(example) == ids[:63].tolist()
        for row, size, width in ((source, source_length, 64), (target, used, None)):
            assert row.dtype == np.int32
            assert row.shape == (width or target_length,)
            assert not row[size:].any() and row[:size].all()
        sentinels = [t for t in target.tolist() if is_sentinel(t)]
        # Distinct and descending from the first, the same in both.
        assert sentinels == list(range(FIRST, FIRST - len(sentinels), -1))
        assert [t for t in source.tolist() if is_sentinel(t)] == sentinels


def test_density_and_mean_span_are_as_asked():
    # Tokens dropped of 200: 30 in 10 spans, whatever is drawn; and no two spans touch.
    for seed in range(200):
        source = corrupted(text_of(200), seed, input_length=256)[0].tolist()
        lengths = cut_out(corrupted(text_of(200), seed, input_length=256))
        assert (sum(lengths), len(lengths)) == (30, 10)
        assert not any(
            is_sentinel(one) and is_sentinel(two)
            for one, two in zip(source, source[1:])
        )
    # Over texts of 40 to 160 tokens rounding evens out: what is dropped is within half
    # a token of 15 % of a text, of 100 on average; spans within half a span of that by
    # 3, of 5. Both errors are spread evenly, so the means are a tenth as far off.
    random = np.random.default_rng(1)
    tokens = dropped = spans = 0
    for length in random.integers(40, 161, 2000).tolist():
        ids = np.full([length], 3)
        lengths = cut_out(
            corrupt_spans(ids, 256, 256, FIRST, random)  # as a batch draws
        )
        tokens, dropped = tokens + length, dropped + sum(lengths)
        spans += len(lengths)
    assert dropped / tokens == pytest.approx(0.15, abs=0.001)
    assert dropped / spans == pytest.approx(3.0, abs=0.06)


def test_spans_are_drawn_uniformly():
    """9 tokens in 3 spans: 28 ways to cut them, (k, 9 - k ...) each as often.

    The first span has k tokens in 8 - k of the 28 ways, for k = 1 to 7.
    """
    draws = 7000
    firsts = np.zeros([10])
    random = np.random.default_rng(3)
    for _ in range(draws):
        ids = np.full([60], 3)
        firsts[cut_out(corrupt_spans(ids, 64, 64, FIRST, random))[0]] += 1
    expected = draws * np.array([0, 7, 6, 5, 4, 3, 2, 1, 0, 0]) / 28
    # Chi-squared of 6 degrees of freedom: beyond 27.9 once in 10,000.
    chi = np.sum((firsts[1:8] - expected[1:8]) ** 2 / expected[1:8])
    assert firsts.sum() == firsts[1:8].sum() and chi < 27.9


def test_spans_without_room_in_the_target_stay_in_the_text():
    ids = text_of(60)  # 9 tokens in 3 spans: 9 + 3 + EOS = 13 in all
    for seed in range(100):
        full = cut_out(corrupted(ids, seed, target_length=13))
        assert (len(full), sum(full)) == (3, 9)
        short = corrupted(ids, seed, target_length=8)
        kept = []
        for span in full:  # greedily, from the first
            if sum(kept) + len(kept) + span + 2 <= 8:
                kept.append(span)
        assert cut_out(short) == kept
        assert put_back(short) == ids.tolist()


def test_spans_are_reproducible_from_the_generator():
    ids = text_of(60)
    one, same, other = (corrupted(ids, seed) for seed in (5, 5, 6))
    for index in (0, 2):
        np.testing.assert_array_equal(one[index], same[index])
    assert one[0].tolist() != other[0].tolist()
    random = np.random.default_rng(5)
    first = corrupt_spans(ids, 64, 64, FIRST, random)
    second = corrupt_spans(ids, 64, 64, FIRST, random)
    np.testing.assert_array_equal(first[0], one[0])
    assert second[0].tolist() != one[0].tolist()
