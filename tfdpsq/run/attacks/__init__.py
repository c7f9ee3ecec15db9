"""Attacks on trained models: subjects, canaries and scores."""
