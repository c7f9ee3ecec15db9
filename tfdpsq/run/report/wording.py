"""Numbers and durations as reports print them."""

from __future__ import annotations

import decimal
import math
from typing import Any

MISSING = "–"


def row_part(epsilon: float) -> str:
    """Returns the part of a row's name for an ε: "inf", "eps8" or "eps0_5"."""
    return step_part(epsilon).replace(".", "_")


def step_part(epsilon: float) -> str:
    """Returns the part of a step's name for an ε: "inf", "eps8" or "eps0.5"."""
    return "inf" if math.isinf(epsilon) else f"eps{epsilon:g}"


def epsilon_text(value: float | str | None) -> str:
    """Returns a spent ε with three digits, rounded up; a dash where none was spent."""
    if value is None:
        return MISSING
    return most_text(value) if math.isfinite(float(value)) else "∞"


def most_text(value: float | str, digits: int = 3) -> str:
    """Returns an upper bound with this many digits, rounded up."""
    context = decimal.Context(digits, decimal.ROUND_CEILING)
    return f"{float(context.create_decimal(repr(float(value)))):.{digits}g}"


def factor_text(epsilon: float) -> str:
    """Returns e^ε with four digits, rounded up."""
    return f"{float(most_text(math.exp(min(epsilon, 700.0)), 4)):,.4g}"


def least_text(value: float, places: int) -> str:
    """Returns a lower bound with this many decimal places, rounded down."""
    unit = decimal.Decimal(1).scaleb(-places)
    exact = decimal.Decimal(repr(float(value)))
    return str(exact.quantize(unit, decimal.ROUND_FLOOR))


def number_text(value: Any) -> str:
    """Returns a number with four digits, or any other value as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def duration_text(seconds: float) -> str:
    """Returns a duration in seconds, minutes or hours."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, left = divmod(minutes, 60)
    return f"{hours} h {left} min" if hours else f"{minutes} min {rest} s"
