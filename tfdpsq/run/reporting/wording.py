"""Labels, numbers and durations as the reports print them."""

from __future__ import annotations

import decimal
import math
import re
from typing import Any

MISSING = "–"

# Stage directory without its ε: (label, what the stage does).
_KINDS = {
    "audited_synthetic": ("Set for the audit", "its generator writes queries"),
    "retriever_synthetic": (
        "Retriever, synthetic",
        "the search model is trained on what the generator wrote",
    ),
    "retriever_public_only": (
        "Retriever, public-only",
        "the search model is trained on sentences of public documents",
    ),
    "retriever_untrained": (
        "Retriever, untrained",
        "the search model as it is before training",
    ),
    "retriever_original": (
        "Retriever, original pairs",
        "the search model is trained on the private pairs, unprotected",
    ),
    "retriever_direct": (
        "Retriever, direct DP",
        "the search model is trained on the private pairs, under noise",
    ),
    "mined": ("Hard negatives", "BM25 ranks documents for the private queries"),
    "adapter": (
        "Adapter",
        "a matrix on a public encoder's query embeddings learns from private pairs",
    ),
    "public_model": ("Public T5", "the language model reads the public documents"),
    "histogram": ("Histogram", "queries are counted by what they ask about"),
    "generator": ("Generator", "the language model learns to write queries"),
    "synthetic": ("Synthetic set", "the generator writes queries for documents"),
    "evaluation": ("Evaluation", "all retrievers search for the test queries"),
    "canaries": ("Canaries", "secrets are put among private pairs, for the audit"),
    "audited": (
        "Audited generator",
        "one more is trained, on pairs with planted secrets",
    ),
    "pairs": ("Private pairs", "the log is imported"),
    "prepare": ("Public pairs", "sentences are cut from public documents"),
    "audit": ("Audit", "attacks on that generator, and on what it wrote"),
}
_EPSILON = re.compile(r"_(?:eps([0-9._e+-]+)|(inf))$")


def run_label(name: str) -> str:
    """Returns a stage's label: "Generator, ε = 8" for "generator_eps8".

    Names that are not stages of the pipeline are returned unchanged.
    """
    kind = _KINDS.get(_EPSILON.sub("", name))
    return name if kind is None else kind[0] + _epsilon_suffix(name)


def run_note(name: str) -> str:
    """Returns what a stage does, or "" for one that is not in the pipeline."""
    return _KINDS.get(_EPSILON.sub("", name), ("", ""))[1]


def set_label(name: str) -> str:
    """Returns a synthetic set's label: "Synthetic, ε = 8" for "eps8"."""
    suffix = _epsilon_suffix(f"_{name}")
    return f"Synthetic{suffix}" if suffix else name


def epsilon_symbol(epsilon: float) -> str:
    """Returns a target ε: "∞", or the number without trailing zeros."""
    return "∞" if math.isinf(epsilon) else f"{epsilon:g}"


def epsilon_text(value: float | str | None) -> str:
    """Returns a spent ε with three digits, ∞, or a dash where none was spent.

    It is a promise, so it is rounded up.
    """
    if value is None:
        return MISSING
    value = float(value)
    return "∞" if math.isinf(value) else most_text(value)


def most_text(value: float, digits: int = 3) -> str:
    """Returns an upper bound with so many digits, rounded up."""
    context = decimal.Context(digits, decimal.ROUND_CEILING)
    return f"{float(context.create_decimal(repr(float(value)))):.{digits}g}"


def least_text(value: float, places: int) -> str:
    """Returns a lower bound with so many decimal places, rounded down."""
    unit = decimal.Decimal(1).scaleb(-places)
    exact = decimal.Decimal(repr(float(value)))
    return str(exact.quantize(unit, decimal.ROUND_FLOOR))


def number_text(value: Any) -> str:
    """Returns a number with four digits, or any other value as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if math.isfinite(value) else epsilon_text(value)


def duration_text(seconds: float) -> str:
    """Returns a duration in seconds, minutes or hours."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def shorten(text: str, most: int) -> str:
    """Returns at most `most` characters, and "[…]" where text was cut."""
    return text if len(text) <= most else text[:most].rstrip() + " […]"


def _epsilon_suffix(name: str) -> str:
    found = _EPSILON.search(name)
    if found is None:
        return ""
    return f", ε = {epsilon_symbol(float((found[1] or 'inf').replace('_', '.')))}"
