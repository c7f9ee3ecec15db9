"""The n-gram model, against hand-derived numbers and its own axioms."""

import itertools
import math

import numpy as np
import pytest

from tfdpsq.evaluation import NgramModel
from tfdpsq.validation import InputError


def test_one_word_model_by_hand():
    """Two texts, "a b" and "a": counts a 2, b 1, end 2; 3 types, so 4 with unseen."""
    model = NgramModel(["a b", "a"], order=1)
    # (count + T/4)/(N + T) with N = 5, T = 3.
    for word, count in (("a", 2), ("b", 1), ("never", 0)):
        assert model.probability(word, ()) == pytest.approx((count + 0.75) / 8)
    expected = math.log(2.75 / 8) + math.log(2.75 / 8)  # "a" and the end
    assert model.log_likelihoods(["A!"]) == pytest.approx([expected / 2])


def test_two_word_model_by_hand():
    """After "a": b once and the end once, so (1 + 2·P(b))/(2 + 2)."""
    model = NgramModel(["a b", "a"], order=2)
    b = (1 + 0.75) / 8
    assert model.probability("b", ("a",)) == pytest.approx((1 + 2 * b) / 4)
    # A history that was never seen says nothing.
    assert model.probability("b", ("z",)) == pytest.approx(b)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_probabilities_add_up_to_one(order):
    random = np.random.default_rng(order)
    vocabulary = list("abcde")
    texts = [
        " ".join(random.choice(vocabulary, random.integers(1, 7))) for _ in range(40)
    ]
    model = NgramModel(texts, order)
    for history in itertools.product(["\x02", *vocabulary, "never"], repeat=order - 1):
        total = sum(
            model.probability(word, history) for word in [*vocabulary, "\x03", "never"]
        )
        assert total == pytest.approx(1.0, abs=1e-12), history


def test_bad_input_is_named():
    with pytest.raises(InputError, match="no word"):
        NgramModel(["", "  "])
    with pytest.raises(InputError, match="order"):
        NgramModel(["a"], order=0)
