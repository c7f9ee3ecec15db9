"""Arrays and strings in, numbers out: what a run, or a set of queries, is worth."""

from tfdpsq.evaluation.auditing import OneRunAudit, audit_one_run, one_run_p_value
from tfdpsq.evaluation.bm25 import BM25
from tfdpsq.evaluation.overlap import (
    DrawnShare,
    Overlap,
    OverlapScan,
    draw_samples,
    share_in_draws,
)
from tfdpsq.evaluation.ranking import (
    RankingResult,
    evaluate_run,
    ranked,
    read_trec_qrels,
    read_trec_run,
    rules,
    write_trec_qrels,
    write_trec_run,
)
from tfdpsq.evaluation.significance import (
    Difference,
    Interval,
    bootstrap_interval,
    paired_bootstrap,
)
from tfdpsq.evaluation.similarity import Bleu, corpus_bleu
from tfdpsq.evaluation.two_hypotheses import (
    TwoHypothesesAudit,
    audit_two_hypotheses,
    gaussian_dp_epsilon,
)
from tfdpsq.evaluation.word_stream import NORMALISATION

__all__ = [
    "BM25",
    "NORMALISATION",
    "Bleu",
    "Difference",
    "DrawnShare",
    "Interval",
    "OneRunAudit",
    "Overlap",
    "OverlapScan",
    "RankingResult",
    "TwoHypothesesAudit",
    "audit_one_run",
    "audit_two_hypotheses",
    "bootstrap_interval",
    "corpus_bleu",
    "draw_samples",
    "evaluate_run",
    "gaussian_dp_epsilon",
    "one_run_p_value",
    "paired_bootstrap",
    "ranked",
    "read_trec_qrels",
    "read_trec_run",
    "rules",
    "share_in_draws",
    "write_trec_qrels",
    "write_trec_run",
]
