"""Shared by every command: command line, workdir, sources of pairs, progress."""
