"""Corpus BLEU is sacrebleu's, whatever the number of references."""

import pytest
import sacrebleu

from tfdpsq.evaluation import corpus_bleu
from tfdpsq.validation import InputError

HYPOTHESES = ["the cat sat on the mat today", "returns the sum of all its inputs"]
REFERENCES = [
    ["the cat sat on the red mat", "a cat sat on the mat today"],
    ["computes the sum of all its inputs now"],
]


def test_references_are_given_to_sacrebleu_by_number():
    got, signature = corpus_bleu(HYPOTHESES, REFERENCES)
    streams = [[r[0] for r in REFERENCES], [REFERENCES[0][1], None]]
    assert got == sacrebleu.corpus_bleu(HYPOTHESES, streams).score
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
