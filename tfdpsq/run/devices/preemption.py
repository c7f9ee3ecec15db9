"""Graceful preemption: training polls for SIGTERM and SIGINT between steps.

`tfdpsq.run` imports this first: it imports nothing heavy, and handles SIGINT from then
on, if the process is a command.

| when                | SIGTERM                            | SIGINT (Ctrl-C)      |
|---------------------|------------------------------------|----------------------|
| training            | finishes the step, or the loop of steps, saves its state and   |
|                     | ends with status 75                                            |
| before and after it | ends at once with status 75, as do stages that do not train    |
| a second signal     | ends at once, by the system's default                          |

Status 75 (`EX_TEMPFAIL` of sysexits.h) means: start the same command again. It goes on
from the saved state; a training that keeps none (`train_retriever` with method "plain")
starts from the beginning. No signal loses more than `kill -9` would, and no step is
paid for twice.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from tfdpsq.run.core import streams

RESTART = 75
_PROCESS = os.getpid()
_DEFAULTS: dict[int, Any] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}


AGAIN = "Start the same command again to go on."
ASKED = f"\nthe command was asked to end. {AGAIN}\n"


def _while_importing() -> None:
    """Ends with status 75 on a signal until `imported`, if this process is a command.

    Importing TensorFlow takes seconds, in which the default is a long traceback, or no
    word. A program that imports a stage keeps its own handlers, as does one started
    with `&`.
    """
    # What `python -m` has there until it has found the module.
    started = sys.argv[0] if sys.argv else ""
    if started != "-m" and os.path.basename(started) != "tfdpsq":
        return
    streams.guard()
    for number, default in _DEFAULTS.items():
        if signal.getsignal(number) is default:
            signal.signal(number, _end)


def imported() -> None:
    """Ends what `_while_importing` began, where `KeyboardInterrupt` is handled."""
    _end_in_finalisers()
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_in_finalisers() -> None:
    """Ends the process where a signal comes while an object is finalised.

    Python prints what `__del__` and callbacks of weak references raise, and goes on:
    the command would train, and pay, after it was asked to end.
    """
    usual = sys.unraisablehook
    if getattr(usual, "ends", False):
        return

    def hook(raised: Any) -> None:
        asked = isinstance(raised.exc_value, KeyboardInterrupt) or (
            isinstance(raised.exc_value, SystemExit)
            and raised.exc_value.code == RESTART
        )
        if asked and os.getpid() == _PROCESS:
            os.write(2, ASKED.encode())
            os._exit(RESTART)
        usual(raised)

    hook.ends = True  # type: ignore[attr-defined]
    sys.unraisablehook = hook


def finished() -> None:
    """Ignores both signals: all is written, and the status must say so."""
    for number in _DEFAULTS:
        signal.signal(number, signal.SIG_IGN)


def _end(number: int, frame: FrameType | None) -> None:
    if os.getpid() != _PROCESS:  # a forked worker that its pool ends
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    # No exception: a module that is half imported may catch it. Nothing has begun.
    os.write(2, ASKED.encode())
    os._exit(RESTART)


class Notice:
    """Notes that the process should end, once `listen` was called."""

    def __init__(self) -> None:
        """Installs nothing: a program that imports a stage keeps its own handlers."""
        self._listens = self._training = self._asked = False
        self._process = os.getpid()

    def listen(self) -> None:
        """Handles both signals from now on; call it in the main thread."""
        self._listens, self._process = True, os.getpid()
        _end_in_finalisers()
        for number in _DEFAULTS:
            signal.signal(number, self._noted)

    @contextlib.contextmanager
    def training(self) -> Iterator[Callable[[], bool]]:
        """Only notes signals inside the block.

        Yields:
          A function that returns whether there was one.

        Raises:
          SystemExit: there was one in the last step of a training before.
        """
        self.end_if_asked()
        if self._listens and not self._asked:
            # Again: a strategy of several workers has replaced our handler.
            self.listen()
        self._training = True
        try:
            yield lambda: self._asked
        finally:
            self._training = False

    def end_if_asked(self) -> None:
        """Ends the process where a signal came in the last step of a training.

        That training is finished, and its output is to be safe by now.

        Raises:
          SystemExit: with `RESTART`, as the same command goes on.
        """
        if self._asked:
            raise SystemExit(RESTART)

    def _noted(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked child, not the one to end
            signal.signal(number, _DEFAULTS[number])
            os.kill(os.getpid(), number)
            return
        if not self._training:
            if number == signal.SIGTERM:
                raise SystemExit(RESTART)
            signal.default_int_handler(number, frame)
        self._asked = True
        for each, handler in _DEFAULTS.items():
            signal.signal(each, handler)
        # Not through a logger: this very thread may hold its lock.
        os.write(2, b"\nasked to end: after this step (once more to end at once)\n")


_while_importing()
