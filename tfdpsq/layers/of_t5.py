"""Imports the layers that need keras-nlp when they are first used.

`tfdpsq.layers` takes its `__getattr__` from here (PEP 562): importing the package needs
TensorFlow alone.
"""

from __future__ import annotations

import importlib
from typing import Any

_OF_T5 = {
    "T5Backbone": "t5_backbone",
    "T5TransformerLayer": "t5_layers",
    "build_encoder": "t5_backbone",
    "encoder_of": "t5_backbone",
}


def __getattr__(name: str) -> Any:
    """Imports what needs keras-nlp."""
    if name not in _OF_T5:
        raise AttributeError(f"module 'tfdpsq.layers' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"tfdpsq.layers.{_OF_T5[name]}")
    except Exception as error:  # on another stack it fails in several ways
        raise ImportError(
            f"tfdpsq.layers.{name} is made of keras-nlp 0.12's layers, which do not "
            f"import here ({type(error).__name__}: {error}). Install the pinned stack: "
            "python3.11 -m pip install -c constraints.txt '.[stack]', from a clone."
        ) from error
    return getattr(module, name)
