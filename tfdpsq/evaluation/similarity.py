"""How close generated text is to reference text: BLEU, by sacrebleu.

A BLEU score means something only with its settings, so the score never comes
without sacrebleu's signature (Post 2018).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sacrebleu.metrics import BLEU

from tfdpsq.validation import InputError


@dataclasses.dataclass(frozen=True)
class Bleu:
    """A corpus BLEU score.

    Attributes:
      score: in [0, 100]; papers that print .0984 mean 9.84 here.
      signature: sacrebleu's settings and version, to be written beside the score.
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
