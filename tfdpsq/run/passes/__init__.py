"""Passes over a corpus: shards, their workers and their progress."""
