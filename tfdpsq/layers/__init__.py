"""Keras layers that other projects can import; they need TF and keras-nlp only."""

import tfdpsq.stack  # noqa: F401  checks the environment first
from tfdpsq.layers.folded import Folded
from tfdpsq.layers.lora import LoRADense, apply_lora
from tfdpsq.layers.pooling import FirstTokenPooling, MaskedMeanPooling
from tfdpsq.layers.scale import Scale
from tfdpsq.layers.seeded_dropout import SeededDropout, dropout_seed
from tfdpsq.layers.soft_prompt import SoftPrompt
from tfdpsq.layers.t5 import T5Config
from tfdpsq.layers.t5_backbone import T5Backbone, build_encoder, encoder_of
from tfdpsq.layers.t5_layers import T5TransformerLayer
from tfdpsq.layers.trained_part import train_only

__all__ = [
    "FirstTokenPooling",
    "Folded",
    "LoRADense",
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
    "train_only",
]
