"""Arrays and strings in, numbers out: what a run, or a set of queries, is worth."""

from tfdpsq.evaluation.auditing import OneRunAudit, audit_one_run, one_run_p_value
from tfdpsq.evaluation.bm25 import BM25
from tfdpsq.evaluation.comparisons import (
    Comparison,
    Randomization,
    compare_systems,
    holm,
    paired_randomization,
)
from tfdpsq.evaluation.membership import (
    MembershipAttack,
    attack_membership,
    likelihood_ratio_scores,
)
from tfdpsq.evaluation.memorization import (
    Leaked,
    RankTest,
    canary_ranks,
    exposure,
    extrapolated_exposure,
    leaked_secrets,
    pure_epsilon_bound,
    rank_test,
)
from tfdpsq.evaluation.ngrams import NgramModel
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
    macro_interval,
    paired_bootstrap,
)
from tfdpsq.evaluation.similarity import Bleu, corpus_bleu
from tfdpsq.evaluation.two_hypotheses import (
    TwoHypothesesAudit,
    audit_two_hypotheses,
    gaussian_dp_epsilon,
)

__all__ = [
    "BM25",
    "Bleu",
    "Comparison",
    "Difference",
    "Interval",
    "Leaked",
    "MembershipAttack",
    "NgramModel",
    "OneRunAudit",
    "Randomization",
    "RankTest",
    "RankingResult",
    "TwoHypothesesAudit",
    "attack_membership",
    "audit_one_run",
    "audit_two_hypotheses",
    "bootstrap_interval",
    "canary_ranks",
    "compare_systems",
    "corpus_bleu",
    "evaluate_run",
    "exposure",
    "extrapolated_exposure",
    "gaussian_dp_epsilon",
    "holm",
    "leaked_secrets",
    "likelihood_ratio_scores",
    "macro_interval",
    "one_run_p_value",
    "paired_bootstrap",
    "paired_randomization",
    "pure_epsilon_bound",
    "rank_test",
    "ranked",
    "read_trec_qrels",
    "read_trec_run",
    "rules",
    "write_trec_qrels",
    "write_trec_run",
]
