"""The commands: one module per stage, `pipeline` for all of them, and tools."""

__all__ = []
