"""Attacks on what was trained: what is attacked, and the scores."""
