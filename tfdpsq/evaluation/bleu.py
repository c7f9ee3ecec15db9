"""BLEU of generated text against reference text, by sacrebleu.

A BLEU score means something only with its settings, so the score never comes
without sacrebleu's signature (Post 2018).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from sacrebleu.metrics import BLEU

from tfdpsq.validation import InputError


def corpus_bleu(
    hypotheses: Sequence[str], references: Sequence[str | Sequence[str]]
) -> tuple[float, str]:
    """Corpus BLEU at sacrebleu's defaults (13a tokens, exponential smoothing).

    Args:
      hypotheses: generated texts; empty ones count as such.
      references: for each hypothesis its reference, or several of them.

    Returns:
      The score, in [0, 100] (papers that print .0984 mean 9.84 here), and sacrebleu's
      settings and version, to be written with it.
    """
    if not len(hypotheses) or len(hypotheses) != len(references):
        raise InputError(
            f"{len(hypotheses)} hypotheses and {len(references)} references; there "
            "must be as many of one as of the other, and at least one."
        )
    each = [[r] if isinstance(r, str) else list(r) for r in references]
    for row, texts in enumerate(each):
        if not texts or not all(text.strip() for text in texts):
            raise InputError(
                f"references[{row}] is empty; every hypothesis needs a reference text."
            )
    # sacrebleu takes one stream per reference number, with None where a row has
    # no further one.
    metric = BLEU()
    result = metric.corpus_score(list(hypotheses), list(itertools.zip_longest(*each)))
    return float(result.score), str(metric.get_signature())
