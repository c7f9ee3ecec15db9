"""Keras layers that other projects can import.

T5's need keras-nlp, and are imported when they are first used; the others need
TensorFlow alone. `keras_choice` says on which Keras.
"""

from typing import TYPE_CHECKING

from tfdpsq import lazy
from tfdpsq.keras_choice import keras  # noqa: F401  first: it says what is missing
from tfdpsq.layers.folded import Folded
from tfdpsq.layers.lora import LoRADense, apply_lora, merge_lora
from tfdpsq.layers.pooling import FirstTokenPooling, MaskedMeanPooling
from tfdpsq.layers.query_adapter import QueryAdapter, sampled_softmax
from tfdpsq.layers.scale import Scale
from tfdpsq.layers.seeded_dropout import SeededDropout, dropout_seed
from tfdpsq.layers.soft_prompt import SoftPrompt
from tfdpsq.layers.trained_part import train_only

if TYPE_CHECKING:
    from tfdpsq.layers.t5 import (
        T5Backbone,
        T5Config,
        T5TransformerLayer,
        build_encoder,
        encoder_of,
    )
else:
    __getattr__, __dir__ = lazy.package(__name__)

__all__ = [
    "FirstTokenPooling",
    "Folded",
    "LoRADense",
    "MaskedMeanPooling",
    "QueryAdapter",
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
    "sampled_softmax",
    "train_only",
]
