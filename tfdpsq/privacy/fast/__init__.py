"""Exact per-example clipping in one forward and one backward pass."""

from tfdpsq.privacy.fast.engine import check, clipped_sum
from tfdpsq.privacy.fast.factored import sum_to, true_float32
from tfdpsq.privacy.fast.gradient_norms import precision_in_words
from tfdpsq.privacy.fast.recorder import UncoveredError, require_distinct
from tfdpsq.privacy.fast.rules import register_rule

__all__ = [
    "UncoveredError",
    "check",
    "clipped_sum",
    "precision_in_words",
    "register_rule",
    "require_distinct",
    "sum_to",
    "true_float32",
]
