"""Corpus BLEU against the definition, and their ends."""

import collections
import math

import pytest

from tfdpsq.evaluation import corpus_bleu
from tfdpsq.validation import InputError


def _naive_bleu(hypotheses, references):
    """BLEU-4 of Papineni et al. 2002 on lower-risk text: words by white space."""
    matched, total = [0] * 4, [0] * 4
    length = closest = 0
    for hypothesis, several in zip(hypotheses, references):
        words = hypothesis.split()
        length += len(words)
        closest += min(
            (len(r.split()) for r in several), key=lambda n: (abs(n - len(words)), n)
        )
        for n in range(1, 5):

            def grams(text, n=n):
                t = text.split()
                return collections.Counter(zip(*(t[i:] for i in range(n))))

            best = collections.Counter()
            for reference in several:
                best |= grams(reference)
            matched[n - 1] += sum((grams(hypothesis) & best).values())
            total[n - 1] += max(len(words) - n + 1, 0)
    logs = sum(math.log(m / t) for m, t in zip(matched, total)) / 4
    return 100 * math.exp(min(0, 1 - closest / length) + logs)


HYPOTHESES = ["the cat sat on the mat today", "returns the sum of all its inputs"]
REFERENCES = [
    ["the cat sat on the red mat", "a cat sat on the mat today"],
    ["computes the sum of all its inputs now"],
]


def test_equals_the_definition_with_several_references():
    got, signature = corpus_bleu(HYPOTHESES, REFERENCES)
    assert got == pytest.approx(_naive_bleu(HYPOTHESES, REFERENCES), abs=1e-9)
    assert "nrefs:var" in signature


def test_exact_copies_score_100_and_empty_output_0():
    assert corpus_bleu(HYPOTHESES, HYPOTHESES)[0] == pytest.approx(100)
    assert corpus_bleu(["", ""], HYPOTHESES)[0] == 0


@pytest.mark.parametrize(
    ("hypotheses", "references", "message"),
    [
        (["a"], ["a", "b"], "1 hypotheses and 2 references"),
        (["a"], [[]], r"references\[0\]"),
        (["a"], [["a", " "]], r"references\[0\] is empty"),
    ],
)
def test_bad_input_is_refused(hypotheses, references, message):
    with pytest.raises(InputError, match=message):
        corpus_bleu(hypotheses, references)
