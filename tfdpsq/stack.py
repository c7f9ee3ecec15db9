"""Checks that this environment has the Python and the TensorFlow that tfdpsq needs.

Importing this module runs the check; every package begins with that, but for `tfdpsq`
itself, `tfdpsq.results`, `tfdpsq.layers` and `tfdpsq.privacy`. It imports nothing heavy
and sets nothing global. Its syntax is kept plain so that the message also reaches the
Pythons that the rest of the project cannot be parsed by.
"""

import sys
from typing import Any

_INSTALL = (
    "From a clone of the project:\n"
    "  python3.11 -m venv .venv\n"
    "  .venv/bin/pip install -c constraints.txt '.[stack]'\n"
    "tfdpsq.results reads finished workdirs without it, and tfdpsq.layers and "
    "tfdpsq.privacy work on other versions."
)


def _check_python() -> None:
    found = tuple(sys.version_info[:2])
    if not (3, 9) <= found <= (3, 11):
        raise ImportError(
            "This part of tfdpsq works on Python 3.9 to 3.11, and this is Python "
            f"{found[0]}.{found[1]}: tensorflow-privacy and TensorFlow 2.15 install on "
            f"no other. Use Python 3.11. {_INSTALL}"
        )


def _tensorflow_version() -> Any:
    """Returns the installed version, without importing TensorFlow; or None."""
    from importlib import metadata

    # The same package goes by these names, by platform and build.
    for name in ("tensorflow", "tensorflow-cpu", "tensorflow-macos", "tf-nightly"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _check_tensorflow() -> None:
    found = _tensorflow_version()
    if found is None:
        raise ImportError(
            "This part of tfdpsq needs TensorFlow 2.15, and finds none. " + _INSTALL
        )
    if found.split(".")[:2] != ["2", "15"]:
        raise ImportError(
            f"This part of tfdpsq works on TensorFlow 2.15, and here is {found}: "
            "tensorflow-privacy does not import on 2.16 or later (the estimator "
            "is gone), and scann and tensorflow-text are built for 2.15. Either "
            f"`{sys.executable} -m pip install tensorflow==2.15.1 "
            f"tensorflow-text==2.15.0`, or start afresh. {_INSTALL}"
        )


_check_python()
_check_tensorflow()
