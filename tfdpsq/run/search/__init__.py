"""Searches of a corpus by the systems that are measured."""
