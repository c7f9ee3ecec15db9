"""Being asked to end: SIGTERM and SIGINT, of which training takes note in good time.

| when                | SIGTERM                            | SIGINT (Ctrl-C)      |
|---------------------|------------------------------------|----------------------|
| training            | the step, or the loop of steps, is finished, its state saved, |
|                     | and the program ends with status 75                           |
| before and after it | ends at once with status 75, as do stages that do not train    |
| a second one        | ends at once, as if nobody had listened                       |

Status 75 (`EX_TEMPFAIL` of sysexits.h) says: start the same command again. It goes on
from the state that was saved; where a training keeps none (`train_retriever` with
method "plain") it starts that training anew. Whatever the moment, nothing is lost that
`kill -9` would not lose as well, and no step is paid for twice.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

RESTART = 75
_DEFAULTS: dict[int, Any] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}


class Notice:
    """Whether the process was asked to end; it listens once `listen` was called."""

    def __init__(self) -> None:
        """Installs nothing: whoever imports a stage keeps the signals' handlers."""
        self._listens = self._training = self._asked = False
        self._process = os.getpid()

    def listen(self) -> None:
        """Handles both signals from now on; to be called in the main thread."""
        self._listens, self._process = True, os.getpid()
        for number in _DEFAULTS:
            signal.signal(number, self._noted)

    @contextlib.contextmanager
    def training(self) -> Iterator[Callable[[], bool]]:
        """While inside, a signal is noted and nothing else.

        Yields:
          A function that says whether there was one.
        """
        if self._listens and not self._asked:
            # Again: a strategy of several workers has put a handler of its own there.
            self.listen()
        self._training = True
        try:
            yield lambda: self._asked
        finally:
            self._training = False

    def _noted(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # forked: not what was asked to end
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
        # Not through a logger, whose lock this very thread may hold.
        os.write(2, b"\nasked to end: after this step (once more to end at once)\n")
