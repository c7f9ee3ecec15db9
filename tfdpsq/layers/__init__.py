"""Keras layers that other projects can import; they need TF and keras-nlp only."""

from tfdpsq.layers.folded import Folded
from tfdpsq.layers.lora import LoRADense, apply_lora
from tfdpsq.layers.pooling import FirstTokenPooling, MaskedMeanPooling
from tfdpsq.layers.scale import Scale
from tfdpsq.layers.seeded_dropout import (
    SeededDropout,
    dropout_seed,
    kinds_of_rows,
    seed_of_step,
)
from tfdpsq.layers.soft_prompt import SoftPrompt
from tfdpsq.layers.t5 import T5Config
from tfdpsq.layers.t5_backbone import build_backbone, build_encoder, encoder_of
from tfdpsq.layers.trained_part import train_only

__all__ = [
    "FirstTokenPooling",
    "Folded",
    "LoRADense",
    "MaskedMeanPooling",
    "Scale",
    "SeededDropout",
    "SoftPrompt",
    "T5Config",
    "apply_lora",
    "build_backbone",
    "build_encoder",
    "dropout_seed",
    "encoder_of",
    "kinds_of_rows",
    "seed_of_step",
    "train_only",
]
