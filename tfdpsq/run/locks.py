"""Who holds a lock, without asking for it.

A stage holds a lock on what it is making and refuses to start where another process
does. Whoever tried that lock, if only for a moment and only shared, could make a stage
that starts in this moment fail. So the operating system's list of locks is read
instead, `/proc/locks`, which disturbs nobody. It knows the locks of this machine.
"""

from __future__ import annotations

import os
import pathlib

_LOCKS = pathlib.Path("/proc/locks")


def holder(path: str | os.PathLike) -> int | None:
    """The process that holds an exclusive `flock` on a file or directory.

    Args:
      path: what is locked; it may vanish meanwhile.

    Returns:
      Its number, or `None` where none on this machine does, or the system does not
      tell.
    """
    try:
        wanted = os.stat(path)
        lines = _LOCKS.read_text().splitlines()
    except OSError:
        return None
    # 3: FLOCK  ADVISORY  WRITE 4711 fe:00:131075 0 EOF; "3: -> FLOCK …" only waits
    for fields in map(str.split, lines):
        if len(fields) < 6 or fields[1] != "FLOCK" or fields[3] != "WRITE":
            continue
        process = int(fields[4])
        major, minor, inode = fields[5].split(":")
        if int(inode) != wanted.st_ino:
            continue
        device = os.major(wanted.st_dev), os.minor(wanted.st_dev)
        # Some file systems (overlay, btrfs) have two numbers for a device.
        if (int(major, 16), int(minor, 16)) == device or _has_open(process, wanted):
            return process
    return None


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
