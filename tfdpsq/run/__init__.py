"""The commands: one module per stage, `pipeline` for all of them, and tools."""

import tfdpsq.stack  # noqa: F401  checks the environment first

# isort: split
import tfdpsq.run.core.deferred
import tfdpsq.run.devices.preemption  # noqa: F401  handles Ctrl-C from here on

__all__ = []
