"""Overlap of texts with a corpus that a model was pretrained on."""
