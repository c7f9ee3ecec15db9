"""T5 checkpoints in and out: Hugging Face, keras-nlp presets, T5X, sentence-T5."""

from tfdpsq.generator.checkpoints.checkpoint import (
    load,
    load_encoder,
    locate,
    open_checkpoint,
    save,
    vocabulary_in,
)
from tfdpsq.generator.checkpoints.sentence_encoder import read_sentence_encoder

__all__ = [
    "load",
    "load_encoder",
    "locate",
    "open_checkpoint",
    "read_sentence_encoder",
    "save",
    "vocabulary_in",
]
