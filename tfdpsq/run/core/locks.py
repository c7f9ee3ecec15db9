"""Who holds a lock, without asking for it.

A stage holds a lock on what it is making and refuses to start where another process
does. Whoever tried that lock, if only for a moment and only shared, could make a stage
that starts in this moment fail. So the operating system's list of locks is read
instead, `/proc/locks`, which disturbs nobody. It knows the locks of this machine.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterable

_LOCKS = pathlib.Path("/proc/locks")


def holders(paths: Iterable[str | os.PathLike]) -> list[int]:
    """The processes that hold an exclusive `flock` on any of some files.

    Args:
      paths: files or directories; they may vanish meanwhile.

    Returns:
      Their numbers, each once; those of this machine, where the system tells.
    """
    wanted: dict[int, list[os.stat_result]] = {}
    for path in paths:
        with contextlib.suppress(OSError):
            found = os.stat(path)
            wanted.setdefault(found.st_ino, []).append(found)
    try:
        lines = _LOCKS.read_text().splitlines()
    except OSError:
        return []
    processes = set()
    # 3: FLOCK  ADVISORY  WRITE 4711 fe:00:131075 0 EOF; "3: -> FLOCK …" only waits
    for fields in map(str.split, lines):
        if len(fields) < 6 or fields[1] != "FLOCK" or fields[3] != "WRITE":
            continue
        process = int(fields[4])
        major, minor, inode = fields[5].split(":")
        for found in wanted.get(int(inode), ()):
            device = os.major(found.st_dev), os.minor(found.st_dev)
            # Some file systems (overlay, btrfs) have two numbers for a device.
            same = (int(major, 16), int(minor, 16)) == device
            if same or _has_open(process, found):
                processes.add(process)
    return sorted(processes)


def _has_open(process: int, wanted: os.stat_result) -> bool:
    """Whether a process has a file open, as far as one may see."""
    try:
        descriptors = list(pathlib.Path(f"/proc/{process}/fd").iterdir())
    except OSError:
        return False
    for descriptor in descriptors:
        try:
            if os.path.samestat(descriptor.stat(), wanted):
                return True
        except OSError:  # closed meanwhile
            continue
    return False
