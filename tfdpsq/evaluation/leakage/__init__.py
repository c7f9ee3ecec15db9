"""Leakage: canaries, audits and membership inference."""
