"""BLEU of generated text against reference text, by sacrebleu.

A BLEU score means something only with its settings, so the score never comes
without sacrebleu's signature (Post 2018).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from sacrebleu.metrics import BLEU

from tfdpsq.validation import InputError


@dataclasses.dataclass(frozen=True)
class Bleu:
    """A corpus BLEU score.

    Attributes:
      score: in [0, 100]; papers that print .0984 mean 9.84 here.
      signature: sacrebleu's settings and version, to be written with the score.
    """

    score: float
    signature: str


def corpus_bleu(
    hypotheses: Sequence[str], references: Sequence[str | Sequence[str]]
) -> Bleu:
    """Corpus BLEU at sacrebleu's defaults (13a tokens, exponential smoothing).

    Args:
      hypotheses: generated texts; empty ones count as such.
      references: for each hypothesis its reference, or several of them.

    Returns:
      The score and its signature.

    Raises:
      InputError: no hypothesis, different lengths, or a hypothesis without a
        reference text.
    """
    if isinstance(hypotheses, str) or isinstance(references, str):
        raise InputError("hypotheses and references are lists of texts, not one text.")
    if not len(hypotheses) or len(hypotheses) != len(references):
        raise InputError(
            f"{len(hypotheses)} hypotheses and {len(references)} references; there "
            "must be as many of one as of the other, and at least one."
        )
    each = [[r] if isinstance(r, str) else list(r) for r in references]
    for row, texts in enumerate(each):
        if not texts or not all(text.strip() for text in texts):
            raise InputError(
                f"references[{row}] is {references[row]!r}; every hypothesis needs at "
                "least one reference, and none may be empty."
            )
    # sacrebleu takes one stream per reference number, with None where a row has
    # no further one.
    most = max(len(texts) for texts in each)
    streams = [
        [texts[i] if i < len(texts) else None for texts in each] for i in range(most)
    ]
    metric = BLEU()
    result = metric.corpus_score(list(hypotheses), streams)
    return Bleu(float(result.score), str(metric.get_signature()))


def sentence_bleu(hypothesis: str, reference: str) -> float:
    """BLEU of one text against one, as a share.

    By sacrebleu with effective order, as a text of fewer than four words has no
    4-grams; otherwise at its defaults. See `sentence_bleu_signature`.

    Args:
      hypothesis: a generated text; may be empty.
      reference: what it is compared with; against an empty one, the score is 0.

    Returns:
      A number in [0, 1], which depends on these two texts alone.
    """
    score = _sentence_metric().sentence_score(hypothesis, [reference]).score
    # sacrebleu's 100 can be a rounding error more.
    return min(max(float(score) / 100, 0.0), 1.0)


def sentence_bleu_signature() -> str:
    """Settings and version of sacrebleu that `sentence_bleu` has."""
    metric = _sentence_metric()
    metric.sentence_score("a", ["a"])  # before it, the number of references is unknown
    return str(metric.get_signature())


@functools.lru_cache(maxsize=1)
def _sentence_metric() -> BLEU:
    return BLEU(effective_order=True)
