"""The process of a command: late imports, and signals.

`tfdpsq.run` imports this first. It imports nothing heavy itself, and defers what takes
seconds: a command that verifies, lists or refuses needs none of that.

| when                | SIGTERM                            | SIGINT (Ctrl-C)      |
|---------------------|------------------------------------|----------------------|
| training            | finishes the step, saves its state, ends with status 75   |
| before and after it | ends at once with status 75                               |
| a second signal     | ends at once, by the system's default                     |

Status 75 (`EX_TEMPFAIL` of sysexits.h) means: start the same command again. No signal
loses more than `kill -9` would, and no step is paid for twice.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import signal
import sys
import types
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

RESTART = 75
AGAIN = "Start the same command again to go on."
ASKED = f"\nthe command was asked to end. {AGAIN}\n"
_DEFAULTS: dict[int, Any] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}


class _Deferred(types.ModuleType):
    """A module that is imported when an attribute of it is read.

    `importlib.util.LazyLoader` does not do: the second `import` of a module reads its
    `__spec__`.
    """

    def __getattr__(self, attribute: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
            if sys.stderr.isatty():  # somebody waits
                sys.stderr.write(f"loading {self.__name__}\n")
        return getattr(importlib.import_module(self.__name__), attribute)


def _defer(*names: str) -> None:
    # TensorFlow's warnings quote values of private rows.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    for name in names:
        spec = None if name in sys.modules else importlib.util.find_spec(name)
        if spec is not None:
            sys.modules[name] = _Deferred(name)
            sys.modules[name].__spec__, sys.modules[name].__file__ = spec, spec.origin


def say(text: str) -> bool:
    """Writes to standard output; returns whether it got there (not with `| head`)."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
        return False
    return True


def end_at_once(number: int, frame: FrameType | None) -> None:
    """Ends with status 75: the handler of SIGTERM outside of training."""
    # No exception: a module that is half imported may catch it.
    os.write(2, ASKED.encode())
    os._exit(RESTART)


class Notice:
    """Notes that the process should end, once `listen` was called.

    Until then it installs nothing: a program that imports a stage keeps its handlers.
    """

    def __init__(self) -> None:
        """Takes nothing."""
        self._listens = self._training = self._asked = False

    def listen(self) -> None:
        """Handles both signals from now on; call it in the main thread."""
        self._listens = True
        for number in _DEFAULTS:
            signal.signal(number, self._noted)

    @contextlib.contextmanager
    def training(self) -> Iterator[Callable[[], bool]]:
        """Only notes signals inside the block; yields whether there was one.

        Raises:
          SystemExit: there was one before.
        """
        self.end_if_asked()
        if self._listens:  # a strategy of several workers replaces our handler
            self.listen()
        self._training = True
        try:
            yield lambda: self._asked
        finally:
            self._training = False

    def end_if_asked(self) -> None:
        """Ends after a signal in the last step, or in `__del__`, where it is lost."""
        if self._asked:
            os.write(2, ASKED.encode())
            raise SystemExit(RESTART)

    def _noted(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        if not self._training:
            if number == signal.SIGTERM:
                self.end_if_asked()
            signal.default_int_handler(number, frame)
        for each, handler in _DEFAULTS.items():
            signal.signal(each, handler)
        # Not through a logger: this very thread may hold its lock.
        os.write(2, b"\nasked to end: after this step (once more to end at once)\n")


_defer("tensorflow", "tensorflow_text", "dp_accounting")
