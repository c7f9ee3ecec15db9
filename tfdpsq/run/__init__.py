"""The command line: `stages` says what each command does, `frame` runs them."""

import tfdpsq.stack  # noqa: F401  checks the environment first

# isort: split
import tfdpsq.run.process  # noqa: F401  handles Ctrl-C from here on

__all__ = []
