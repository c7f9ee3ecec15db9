"""Keras layers that other projects can import.

Those of T5 need keras-nlp, and are imported when they are first used; the others need
TensorFlow alone. `keras_choice` says on which Keras.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tfdpsq.layers.folded import Folded
from tfdpsq.layers.lora import (
    LoRADense,
    LoRAEinsumDense,
    apply_lora,
    merge_lora,
    with_lora,
)
from tfdpsq.layers.pooling import FirstTokenPooling, MaskedMeanPooling
from tfdpsq.layers.scale import Scale
from tfdpsq.layers.seeded_dropout import SeededDropout, dropout_seed
from tfdpsq.layers.soft_prompt import SoftPrompt
from tfdpsq.layers.t5 import T5Config
from tfdpsq.layers.trained_part import train_only

if TYPE_CHECKING:
    from tfdpsq.layers.t5_backbone import T5Backbone, build_encoder, encoder_of
    from tfdpsq.layers.t5_layers import T5TransformerLayer

__all__ = [
    "FirstTokenPooling",
    "Folded",
    "LoRADense",
    "LoRAEinsumDense",
    "MaskedMeanPooling",
    "Scale",
    "SeededDropout",
    "SoftPrompt",
    "T5Backbone",
    "T5Config",
    "T5TransformerLayer",
    "apply_lora",
    "build_encoder",
    "dropout_seed",
    "encoder_of",
    "merge_lora",
    "train_only",
    "with_lora",
]

_OF_T5 = {
    "T5Backbone": "t5_backbone",
    "T5TransformerLayer": "t5_layers",
    "build_encoder": "t5_backbone",
    "encoder_of": "t5_backbone",
}


def __getattr__(name: str) -> Any:
    """Imports what needs keras-nlp."""
    if name not in _OF_T5:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_OF_T5[name]}")
    except Exception as error:  # on another stack it fails in several ways
        raise ImportError(
            f"tfdpsq.layers.{name} is made of keras-nlp 0.12's layers, which do not "
            f"import here ({type(error).__name__}: {error}). Install the pinned stack: "
            "python3.11 -m pip install -c constraints.txt '.[stack]', from a clone."
        ) from error
    return getattr(module, name)
