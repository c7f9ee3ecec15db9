"""The commands: one module per stage, `pipeline` for all of them, the report."""

__all__ = []
