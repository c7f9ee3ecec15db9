"""Measures of runs and of sets of queries: arrays and strings in, numbers out.

Input that cannot be used raises `InputError`, which names the value and the remedy.
"""

import tfdpsq.stack  # noqa: F401  checks the environment first

# isort: split
from typing import TYPE_CHECKING

from tfdpsq import lazy

if TYPE_CHECKING:
    from tfdpsq.evaluation.auditing import audit_one_run
    from tfdpsq.evaluation.bleu import corpus_bleu
    from tfdpsq.evaluation.bm25 import BM25
    from tfdpsq.evaluation.copies import (
        closeness,
        exact_copies,
        gram_vectors,
        nearest_by_cosine,
    )
    from tfdpsq.evaluation.diversity import describe, diversity_difference, diversity_of
    from tfdpsq.evaluation.fusion import fuse
    from tfdpsq.evaluation.mauve import mauve_of_features
    from tfdpsq.evaluation.measures import (
        RankingResult,
        evaluate_run,
        ranked,
        read_trec_qrels,
        read_trec_run,
        rules,
        write_trec_qrels,
        write_trec_run,
    )
    from tfdpsq.evaluation.membership import attack_membership
    from tfdpsq.evaluation.memorization import (
        canary_ranks,
        exposure,
        leaked_secrets,
        pure_epsilon_bound,
        rank_p_value,
    )
    from tfdpsq.evaluation.ngrams import NgramModel
    from tfdpsq.evaluation.overlap import (
        OverlapScan,
        draw_samples,
        share_in_draws,
    )
    from tfdpsq.evaluation.significance import (
        Interval,
        bootstrap_interval,
        macro_interval,
        paired_bootstrap,
    )
    from tfdpsq.evaluation.two_hypotheses import audit_two_hypotheses
else:
    __getattr__, __dir__ = lazy.package(__name__)

__all__ = [
    "BM25",
    "Interval",
    "NgramModel",
    "OverlapScan",
    "RankingResult",
    "attack_membership",
    "audit_one_run",
    "audit_two_hypotheses",
    "bootstrap_interval",
    "canary_ranks",
    "closeness",
    "corpus_bleu",
    "describe",
    "diversity_of",
    "diversity_difference",
    "draw_samples",
    "evaluate_run",
    "exact_copies",
    "exposure",
    "fuse",
    "gram_vectors",
    "leaked_secrets",
    "macro_interval",
    "mauve_of_features",
    "nearest_by_cosine",
    "paired_bootstrap",
    "pure_epsilon_bound",
    "rank_p_value",
    "ranked",
    "read_trec_qrels",
    "read_trec_run",
    "rules",
    "share_in_draws",
    "write_trec_qrels",
    "write_trec_run",
]
