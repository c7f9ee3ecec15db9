"""Keras layers that other projects can import; they need TF and keras-nlp only."""

from tfdpsq.layers.lora import LoRADense, apply_lora
from tfdpsq.layers.pooling import MaskedMeanPooling
from tfdpsq.layers.t5 import T5Config
from tfdpsq.layers.t5_backbone import build_backbone, build_encoder, encoder_of

__all__ = [
    "LoRADense",
    "MaskedMeanPooling",
    "T5Config",
    "apply_lora",
    "build_backbone",
    "build_encoder",
    "encoder_of",
]
