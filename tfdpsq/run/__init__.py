"""The commands: one module per stage, `pipeline` for all of them, and tools."""

import tfdpsq.stack  # noqa: F401  checks the environment first

__all__ = []
