"""Checks that there is a Keras 2 to train, when `tfdpsq.privacy` is imported.

Where `tfdpsq.stack` was imported there is one, and TensorFlow, which takes seconds, is
not imported yet.
"""

from __future__ import annotations

import os
import sys

from tfdpsq import lazy

_VARIABLE = "TF_CPP_MIN_LOG_LEVEL"
# TensorFlow reads it once. `None`: it has not been imported yet.
_LEVEL = os.environ.get(_VARIABLE, "0") if lazy.is_loaded("tensorflow") else None

if "tfdpsq.stack" not in sys.modules:
    from tfdpsq.keras_choice import keras2  # noqa: F401


def warning_of_logs() -> str | None:
    """Returns why TensorFlow may log values of rows, or `None` if it does not."""
    level = os.environ.get(_VARIABLE, "0") if _LEVEL is None else _LEVEL
    if level.isdigit() and int(level) >= 2:
        return None
    return (
        f"{_VARIABLE} is {level}, so an operation that refuses a value logs values of "
        "private rows to stderr. Set it to 2 before TensorFlow is imported."
    )
