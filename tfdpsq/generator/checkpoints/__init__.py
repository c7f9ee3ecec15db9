"""T5 checkpoints in and out: Hugging Face, keras-nlp presets, T5X, sentence-T5."""

from tfdpsq.generator.checkpoints.checkpoint import (
    Checkpoint,
    load,
    load_encoder,
    locate,
    open_checkpoint,
    vocabulary_in,
)
from tfdpsq.generator.checkpoints.sentence_encoder import (
    SentenceEncoder,
    read_sentence_encoder,
)

__all__ = [
    "Checkpoint",
    "SentenceEncoder",
    "load",
    "load_encoder",
    "locate",
    "open_checkpoint",
    "read_sentence_encoder",
    "vocabulary_in",
]
