"""Finds the process that holds a lock, without trying the lock.

A stage locks what it makes and refuses to start if another process holds that lock.
Trying the lock, even shared and for a moment, could make a stage that starts at that
moment fail, so `/proc/locks` is read instead. It lists the locks of this machine only.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterable

_LOCKS = pathlib.Path("/proc/locks")


def holders(paths: Iterable[str | os.PathLike]) -> list[int]:
    """Returns the ids of local processes with an exclusive `flock` on some files.

    The files may disappear meanwhile. Returns none where there is no `/proc/locks`.
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
    # 3: FLOCK  ADVISORY  WRITE 4711 fe:00:131075 0 EOF; "3: -> FLOCK …" is a waiter
    for fields in map(str.split, lines):
        if len(fields) < 6 or fields[1] != "FLOCK" or fields[3] != "WRITE":
            continue
        process = int(fields[4])
        major, minor, inode = fields[5].split(":")
        for found in wanted.get(int(inode), ()):
            device = os.major(found.st_dev), os.minor(found.st_dev)
            # Some file systems (overlay, btrfs) report two device numbers.
            same = (int(major, 16), int(minor, 16)) == device
            if same or _has_open(process, found):
                processes.add(process)
    return sorted(processes)


def _has_open(process: int, wanted: os.stat_result) -> bool:
    """Returns whether a process has a file open, as far as permissions show."""
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
