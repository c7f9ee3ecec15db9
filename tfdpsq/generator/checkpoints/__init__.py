"""T5 checkpoints in and out: Hugging Face, keras-nlp presets, T5X."""

from tfdpsq.generator.checkpoints.checkpoint import Checkpoint
from tfdpsq.generator.checkpoints.formats import (
    load,
    load_encoder,
    locate,
    open_checkpoint,
    vocabulary_in,
)

__all__ = [
    "Checkpoint",
    "load",
    "load_encoder",
    "locate",
    "open_checkpoint",
    "vocabulary_in",
]
