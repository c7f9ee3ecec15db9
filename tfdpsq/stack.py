"""Checks, when imported, that this environment has the pinned stack's TensorFlow.

Every package begins with it, but for `tfdpsq.results`, `tfdpsq.layers` and
`tfdpsq.privacy`, which work on others. It imports nothing heavy.
"""

import sys
from importlib import metadata

_found = "none"
for _name in ("tensorflow", "tensorflow-cpu", "tensorflow-macos", "tf-nightly"):
    try:
        _found = metadata.version(_name)
        break
    except metadata.PackageNotFoundError:
        continue
if not (3, 9) <= sys.version_info[:2] <= (3, 11) or not _found.startswith("2.15."):
    raise ImportError(
        "This part of tfdpsq works on Python 3.9 to 3.11 with TensorFlow 2.15; this is "
        f"Python {sys.version_info[0]}.{sys.version_info[1]} with TensorFlow {_found}. "
        "From a clone: python3.11 -m venv .venv; .venv/bin/pip install -c "
        "constraints.txt '.[stack]'. Its results, layers and privacy work on others."
    )
