"""Measures of runs and of sets of queries: arrays and strings in, numbers out."""

import tfdpsq.stack  # noqa: F401  checks the environment first

# isort: split
from typing import TYPE_CHECKING

from tfdpsq import lazy

if TYPE_CHECKING:
    from tfdpsq.evaluation.leakage.auditing import (
        OneRunAudit,
        audit_one_run,
        one_run_p_value,
    )
    from tfdpsq.evaluation.leakage.membership import (
        MembershipAttack,
        attack_membership,
        likelihood_ratio_scores,
    )
    from tfdpsq.evaluation.leakage.memorization import (
        Leaked,
        RankTest,
        canary_ranks,
        exposure,
        extrapolated_exposure,
        leaked_secrets,
        least_mean_rank,
        pure_epsilon_bound,
        rank_test,
    )
    from tfdpsq.evaluation.leakage.two_hypotheses import (
        TwoHypothesesAudit,
        audit_two_hypotheses,
        gaussian_dp_epsilon,
    )
    from tfdpsq.evaluation.overlap.scan import (
        DrawnShare,
        Overlap,
        OverlapScan,
        draw_samples,
        share_in_draws,
    )
    from tfdpsq.evaluation.overlap.word_stream import OVERLAP_NORMALIZATION
    from tfdpsq.evaluation.ranking.bm25 import BM25, Postings, bm25_streamed
    from tfdpsq.evaluation.ranking.comparisons import (
        Comparison,
        Randomization,
        compare_systems,
        holm,
        paired_randomization,
    )
    from tfdpsq.evaluation.ranking.fusion import FittedWeight, fit_weight, fuse
    from tfdpsq.evaluation.ranking.measures import (
        RankingResult,
        evaluate_run,
        ranked,
        read_trec_qrels,
        read_trec_run,
        rules,
        write_trec_qrels,
        write_trec_run,
    )
    from tfdpsq.evaluation.ranking.significance import (
        Difference,
        Interval,
        bootstrap_interval,
        macro_interval,
        paired_bootstrap,
    )
    from tfdpsq.evaluation.text.copies import (
        Closeness,
        ExactCopies,
        GramIndex,
        closeness,
        exact_copies,
        nearest_by_cosine,
    )
    from tfdpsq.evaluation.text.distribution import (
        Distribution,
        describe,
        total_variation,
    )
    from tfdpsq.evaluation.text.diversity import (
        Vocabulary,
        VocabularyDifference,
        distinct_n,
        length_difference,
        text_lengths,
        vocabulary,
        vocabulary_difference,
    )
    from tfdpsq.evaluation.text.mauve import (
        Mauve,
        divergence_curve,
        mauve_of_features,
        mauve_of_histograms,
    )
    from tfdpsq.evaluation.text.ngrams import NgramModel
    from tfdpsq.evaluation.text.normalization import (
        TEXT_NORMALIZATION,
        WORDS,
        normalized,
        words_of,
    )
    from tfdpsq.evaluation.text.similarity import (
        Bleu,
        corpus_bleu,
        sentence_bleu,
        sentence_bleu_signature,
    )
else:
    __getattr__, __dir__ = lazy.package(__name__)

__all__ = [
    "BM25",
    "OVERLAP_NORMALIZATION",
    "TEXT_NORMALIZATION",
    "WORDS",
    "Bleu",
    "Closeness",
    "Comparison",
    "Difference",
    "Distribution",
    "DrawnShare",
    "ExactCopies",
    "FittedWeight",
    "GramIndex",
    "Interval",
    "Leaked",
    "Mauve",
    "MembershipAttack",
    "NgramModel",
    "OneRunAudit",
    "Overlap",
    "OverlapScan",
    "Postings",
    "Randomization",
    "RankTest",
    "RankingResult",
    "TwoHypothesesAudit",
    "Vocabulary",
    "VocabularyDifference",
    "attack_membership",
    "audit_one_run",
    "audit_two_hypotheses",
    "bm25_streamed",
    "bootstrap_interval",
    "canary_ranks",
    "closeness",
    "compare_systems",
    "corpus_bleu",
    "describe",
    "distinct_n",
    "divergence_curve",
    "draw_samples",
    "evaluate_run",
    "exact_copies",
    "exposure",
    "extrapolated_exposure",
    "fit_weight",
    "fuse",
    "gaussian_dp_epsilon",
    "holm",
    "leaked_secrets",
    "least_mean_rank",
    "length_difference",
    "likelihood_ratio_scores",
    "macro_interval",
    "mauve_of_features",
    "mauve_of_histograms",
    "nearest_by_cosine",
    "normalized",
    "one_run_p_value",
    "paired_bootstrap",
    "paired_randomization",
    "pure_epsilon_bound",
    "rank_test",
    "ranked",
    "read_trec_qrels",
    "read_trec_run",
    "rules",
    "sentence_bleu",
    "sentence_bleu_signature",
    "share_in_draws",
    "text_lengths",
    "total_variation",
    "vocabulary",
    "vocabulary_difference",
    "words_of",
    "write_trec_qrels",
    "write_trec_run",
]
