"""Diversity of texts: figures worked out by hand, and what words are."""

import math
from collections import Counter

import numpy as np
import pytest
import scipy.spatial.distance

from tfdpsq.evaluation import (
    describe,
    distinct_n,
    length_difference,
    normalized,
    text_lengths,
    total_variation,
    vocabulary,
    vocabulary_difference,
    words_of,
)
from tfdpsq.validation import InputError

TEXTS = ["the cat sat", "The cat, the cat!", "sat"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  Sort \t a\nLIST ", "sort a list"),
        ("ﬁle ①", "file 1"),  # compatibility forms
        ("STRASSE", "strasse"),
        ("Straße", "strasse"),
        ("e\u0301", "\u00e9"),  # letter and accent are one character
        ("\u3392", "mhz"),  # one character that is the three of MHz
        ("\u0390", "\u0390"),  # which folding takes apart into three
        ("a\u00a0b", "a b"),
        ("", ""),
    ],
)
def test_equal_texts_are_those_that_look_alike(text, expected):
    assert normalized(text) == expected
    assert normalized(expected) == expected


def test_words_are_runs_of_letters_digits_and_underscores():
    assert words_of("Don't re-use my_list[2]!") == [
        "don",
        "t",
        "re",
        "use",
        "my_list",
        "2",
    ]
    assert words_of("?! --") == []


def test_distinct_n_by_hand():
    # Words: the cat sat / the cat the cat / sat.
    # 1: {the, cat, sat} of 8. 2: the-cat, cat-sat / the-cat, cat-the, the-cat: 3 of 5.
    # 3: the-cat-sat / the-cat-the, cat-the-cat: 3 of 3. 4: the second text: 1 of 1.
    assert distinct_n(TEXTS) == {1: 3 / 8, 2: 3 / 5, 3: 1.0, 4: 1.0}
    assert distinct_n(["a b", "b"], most=3) == {1: 2 / 3, 2: 1.0, 3: None}


def test_n_grams_do_not_cross_texts():
    assert distinct_n(["a b", "a b"], most=2)[2] == 1 / 2
    assert distinct_n(["a b a b"], most=2)[2] == 2 / 3


def test_lengths_and_quantiles():
    found = text_lengths(TEXTS)
    assert (found.count, found.mean) == (3, pytest.approx(8 / 3))
    # Lengths 3, 4 and 1.
    deviation = math.sqrt(((1 / 3) ** 2 + (4 / 3) ** 2 + (5 / 3) ** 2) / 3)
    assert found.deviation == pytest.approx(deviation)
    # Sorted 1, 3, 4 at 0, 1/2, 1: 0.05 lies a tenth of the way from 1 to 3.
    assert found.quantiles == pytest.approx(
        {"0": 1, "0.05": 1.2, "0.25": 2, "0.5": 3, "0.75": 3.5, "0.95": 3.9, "1": 4}
    )


def test_length_difference_by_hand():
    # Lengths 1, 1, 2 against 2, 2, 3, 3: shares 2/3 1/3 0 against 0 1/2 1/2.
    first, second = ["a", "b", "a b"], ["a b", "b a", "a b c", "a a a"]
    expected = (2 / 3 + 1 / 6 + 1 / 2) / 2
    assert length_difference(first, second) == pytest.approx(expected)
    assert length_difference(second, first) == pytest.approx(expected)
    assert length_difference(first, first[::-1]) == 0
    assert length_difference(["a"], ["a b"]) == 1


def test_total_variation_of_samples_is_what_its_docstring_says():
    random = np.random.default_rng(0)
    n, k = 2000, 20
    found = [total_variation(*random.integers(0, k, [2, n])) for _ in range(200)]
    assert np.mean(found) == pytest.approx(math.sqrt(k / (math.pi * n)), rel=0.05)


def test_vocabulary_by_hand():
    # the 3, cat 3, sat 2 of 8.
    found = vocabulary(TEXTS)
    assert (found.tokens, found.types) == (8, 3)
    expected = 2 * 3 / 8 * math.log2(8 / 3) + 2 / 8 * math.log2(4)
    assert found.entropy == pytest.approx(expected)
    assert vocabulary(["a b c d e f g h"]).entropy == pytest.approx(3)
    nothing = vocabulary(["?", "!"])
    assert (nothing.tokens, nothing.types, nothing.entropy) == (0, 0, 0)


def test_vocabulary_difference_equals_scipys():
    other = ["the dog sat", "a dog"]
    found = vocabulary_difference(TEXTS, other)
    counts = [
        Counter(w for t in texts for w in words_of(t)) for texts in (TEXTS, other)
    ]
    words = sorted(set(counts[0]) | set(counts[1]))
    expected = scipy.spatial.distance.jensenshannon(
        *([c[word] for word in words] for c in counts), base=2
    )
    assert found.jensen_shannon == pytest.approx(expected)
    # Of the, cat and sat the others have the and sat: 5 of 8 words.
    assert (found.types_seen, found.tokens_seen) == (2 / 3, 5 / 8)
    back = vocabulary_difference(other, TEXTS)
    assert back.jensen_shannon == pytest.approx(expected)
    assert (back.types_seen, back.tokens_seen) == (2 / 4, 2 / 5)


def test_vocabulary_difference_at_its_ends():
    equal = vocabulary_difference(TEXTS, TEXTS[::-1] * 3)
    assert equal.jensen_shannon == pytest.approx(0, abs=1e-7)
    assert (equal.types_seen, equal.tokens_seen) == (1, 1)
    apart = vocabulary_difference(["a b"], ["c"])
    assert apart.jensen_shannon == pytest.approx(1)
    assert (apart.types_seen, apart.tokens_seen) == (0, 0)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (distinct_n, ("a b",), "texts is one text"),
        (distinct_n, ([],), "texts is empty"),
        (distinct_n, (["a"], 0), "most is 0"),
        (text_lengths, ([],), "texts is empty"),
        (length_difference, (["a"], []), "second is empty"),
        (length_difference, ("a", ["a"]), "first is one text"),
        (vocabulary, ("a",), "texts is one text"),
        (vocabulary_difference, (["a"], ["?", "!"]), "none of the 2 texts of second"),
        (total_variation, ([1], []), "at least one value each"),
        (describe, ([],), r"shape \(0,\)"),
        (describe, ([1, math.nan],), "finite"),
        (describe, ([[1]],), r"shape \(1, 1\)"),
    ],
)
def test_bad_input_is_refused(function, arguments, message):
    with pytest.raises(InputError, match=message):
        function(*arguments)
