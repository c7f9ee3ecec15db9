"""The commands: one module per stage, `pipeline` for all of them, and tools."""

from tfdpsq.run.devices import preemption

preemption.while_importing()

import tfdpsq.stack  # noqa: E402, F401  checks the environment before other modules

__all__ = []
