"""Searching a corpus with the systems that are measured."""
