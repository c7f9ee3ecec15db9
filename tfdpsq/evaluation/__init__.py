"""Arrays and strings in, numbers out: what a run, or a set of queries, is worth."""

from tfdpsq.evaluation.auditing import OneRunAudit, audit_one_run, one_run_p_value
from tfdpsq.evaluation.bm25 import BM25
from tfdpsq.evaluation.copies import (
    Closeness,
    ExactCopies,
    GramIndex,
    closeness,
    exact_copies,
    nearest_by_cosine,
)
from tfdpsq.evaluation.distribution import Distribution, describe, total_variation
from tfdpsq.evaluation.diversity import (
    Vocabulary,
    VocabularyDifference,
    distinct_n,
    length_difference,
    text_lengths,
    vocabulary,
    vocabulary_difference,
)
from tfdpsq.evaluation.mauve import (
    Mauve,
    divergence_curve,
    mauve_of_features,
    mauve_of_histograms,
)
from tfdpsq.evaluation.normalization import NORMALIZATION, WORDS, normalized, words_of
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

__all__ = [
    "BM25",
    "Bleu",
    "Closeness",
    "Difference",
    "Distribution",
    "ExactCopies",
    "GramIndex",
    "Interval",
    "Mauve",
    "NORMALIZATION",
    "OneRunAudit",
    "RankingResult",
    "TwoHypothesesAudit",
    "Vocabulary",
    "VocabularyDifference",
    "WORDS",
    "audit_one_run",
    "audit_two_hypotheses",
    "bootstrap_interval",
    "closeness",
    "corpus_bleu",
    "describe",
    "distinct_n",
    "divergence_curve",
    "evaluate_run",
    "exact_copies",
    "gaussian_dp_epsilon",
    "length_difference",
    "mauve_of_features",
    "mauve_of_histograms",
    "nearest_by_cosine",
    "normalized",
    "one_run_p_value",
    "paired_bootstrap",
    "ranked",
    "read_trec_qrels",
    "read_trec_run",
    "rules",
    "text_lengths",
    "total_variation",
    "vocabulary",
    "vocabulary_difference",
    "words_of",
    "write_trec_qrels",
    "write_trec_run",
]
