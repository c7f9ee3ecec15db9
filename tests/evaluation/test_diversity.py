"""Diversity of texts: figures worked out by hand."""

import math
from collections import Counter

import pytest
import scipy.spatial.distance

from tfdpsq.evaluation import (
    describe,
    diversity_difference,
    diversity_of,
)
from tfdpsq.validation import InputError

TEXTS = ["the cat sat", "The cat, the cat!", "sat"]


def test_distinct_n_by_hand():
    # Words: the cat sat / the cat the cat / sat.
    # 1: {the, cat, sat} of 8. 2: the-cat, cat-sat / the-cat, cat-the, the-cat: 3 of 5.
    # 3: the-cat-sat / the-cat-the, cat-the-cat: 3 of 3. 4: the second text: 1 of 1.
    found = diversity_of(TEXTS)["distinct"]
    assert found == {1: 3 / 8, 2: 3 / 5, 3: 1.0, 4: 1.0}
    assert diversity_of(["a b", "a b"])["distinct"][2] == 1 / 2  # none crosses texts
    found = diversity_of(["a b", "b"])["distinct"]
    assert found == {1: 2 / 3, 2: 1.0, 3: None, 4: None}


def test_lengths_and_quantiles():
    found = diversity_of(TEXTS)["lengths"]
    assert (found["count"], found["mean"]) == (3, pytest.approx(8 / 3))
    # Lengths 3, 4 and 1.
    deviation = math.sqrt(((1 / 3) ** 2 + (4 / 3) ** 2 + (5 / 3) ** 2) / 3)
    assert found["deviation"] == pytest.approx(deviation)
    # Sorted 1, 3, 4 at 0, 1/2, 1: 0.05 lies a tenth of the way from 1 to 3.
    assert found["quantiles"] == pytest.approx(
        {"0": 1, "0.05": 1.2, "0.25": 2, "0.5": 3, "0.75": 3.5, "0.95": 3.9, "1": 4}
    )


def length_difference(first, second):
    return diversity_difference(first, second)["lengths"]["total_variation"]


def test_length_difference_by_hand():
    # Lengths 1, 1, 2 against 2, 2, 3, 3: shares 2/3 1/3 0 against 0 1/2 1/2.
    first, second = ["a", "b", "a b"], ["a b", "b a", "a b c", "a a a"]
    expected = (2 / 3 + 1 / 6 + 1 / 2) / 2
    assert length_difference(first, second) == pytest.approx(expected)
    assert length_difference(second, first) == pytest.approx(expected)
    assert length_difference(first, first[::-1]) == 0
    assert length_difference(["a"], ["a b"]) == 1


def test_vocabulary_by_hand():
    # the 3, cat 3, sat 2 of 8.
    found = diversity_of(TEXTS)["vocabulary"]
    expected = 2 * 3 / 8 * math.log2(8 / 3) + 2 / 8 * math.log2(4)
    assert found == {"tokens": 8, "types": 3, "entropy": pytest.approx(expected)}
    eight = diversity_of(["a b c d e f g h"])["vocabulary"]
    assert eight["entropy"] == pytest.approx(3)
    nothing = diversity_of(["?", "!"])["vocabulary"]
    assert nothing == {"tokens": 0, "types": 0, "entropy": 0}


def test_vocabulary_difference_equals_scipys():
    other = ["the dog sat", "a dog"]
    found = diversity_difference(TEXTS, other)["vocabulary"]
    counts = [
        Counter(w for t in texts for w in t.lower().replace(",", "").strip("!").split())
        for texts in ([t.replace("!", "") for t in TEXTS], other)
    ]
    words = sorted(set(counts[0]) | set(counts[1]))
    expected = scipy.spatial.distance.jensenshannon(
        *([c[word] for word in words] for c in counts), base=2
    )
    # Of the, cat and sat the others have the and sat: 5 of 8 words.
    assert found == {
        "jensen_shannon": pytest.approx(expected),
        "types_seen": 2 / 3,
        "tokens_seen": 5 / 8,
    }
    back = diversity_difference(other, TEXTS)["vocabulary"]
    assert (back["types_seen"], back["tokens_seen"]) == (2 / 4, 2 / 5)
    assert diversity_difference(TEXTS, ["?"])["vocabulary"] == {}


def test_bad_input_is_refused():
    with pytest.raises(InputError, match="at least one number"):
        diversity_of([])
    with pytest.raises(InputError, match="finite"):
        describe([1, math.nan])
