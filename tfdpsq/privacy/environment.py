"""Checks that there is a Keras 2 to train, when `tfdpsq.privacy` is imported.

The other packages have `tfdpsq.stack`, which looks at versions alone. Where that was
imported there is one, and TensorFlow, which takes seconds, is not imported yet.

An operation that refuses a value, such as a label beyond the number of classes, logs
values of its whole batch as a warning, whatever becomes of the exception. TensorFlow
reads how much it logs once, at its first message, so warnings are turned off here,
before it is imported. (A command that only defers the import has not loaded it.)
"""

from __future__ import annotations

import os
import sys

from tfdpsq import lazy

_VARIABLE = "TF_CPP_MIN_LOG_LEVEL"
if not lazy.is_loaded("tensorflow"):
    os.environ.setdefault(_VARIABLE, "2")
# As TensorFlow has read it, or will.
_LEVEL = os.environ.get(_VARIABLE, "0")

if "tfdpsq.stack" not in sys.modules:
    from tfdpsq.keras_choice import keras2  # noqa: F401


def warning_of_logs() -> str | None:
    """Returns why TensorFlow may log values of rows, or `None` if it does not."""
    if _LEVEL.isdigit() and int(_LEVEL) >= 2:
        return None
    return (
        f"TensorFlow was imported with {_VARIABLE}={_LEVEL}, so that an operation that "
        "refuses a value logs values of private rows to stderr. Set it to 2 before "
        "TensorFlow is imported, or import tfdpsq.privacy first"
    )
