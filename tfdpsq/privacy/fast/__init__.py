"""Exact per-example clipping in one forward and one backward pass."""

from tfdpsq.privacy.fast.engine import ClippedSum, UncoveredError, check, clipped_sum
from tfdpsq.privacy.fast.factored import sum_to
from tfdpsq.privacy.fast.products import precision_in_words, true_float32
from tfdpsq.privacy.fast.recorder import Recorder, require_distinct
from tfdpsq.privacy.fast.rules import register_rule

__all__ = [
    "ClippedSum",
    "Recorder",
    "UncoveredError",
    "check",
    "clipped_sum",
    "precision_in_words",
    "register_rule",
    "require_distinct",
    "sum_to",
    "true_float32",
]
