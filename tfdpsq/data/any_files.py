"""Files of any file system that TensorFlow knows: local, `gs://`, and others.

`files` is for local paths, and renames whole directories; object stores have none to
rename. Here single files are written under another name and renamed when they are
whole, all through `tf.io.gfile`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import tensorflow as tf
from absl import logging

from tfdpsq import validation
from tfdpsq.data import files

_SEAL = "seal"
_FILE_SCHEME = "file://"
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def gone() -> tuple[type[Exception], ...]:
    """Returns the errors that are raised where a file does not exist."""
    return FileNotFoundError, tf.errors.NotFoundError


def is_local(path: str | os.PathLike) -> bool:
    """Returns whether a path is on this machine's file systems: it has no scheme."""
    return "://" not in os.fspath(path)


def without_scheme(path: str | os.PathLike) -> str:
    """Returns the path of a `file://` URL, which is on this machine; others as given.

    TensorFlow ignores what such a URL names as host.
    """
    name = os.fspath(path)
    if not name.startswith(_FILE_SCHEME):
        return name
    _, slash, rest = name[len(_FILE_SCHEME) :].partition("/")
    return slash + rest


def exists(path: str | os.PathLike) -> bool:
    """Returns whether a file or directory of this name exists."""
    return tf.io.gfile.exists(os.fspath(path))


def open_binary(path: str | os.PathLike) -> BinaryIO:
    """Opens a file for reading, to be closed by the caller.

    Raises:
      FileNotFoundError, tf.errors.NotFoundError: the file does not exist.
    """
    if is_local(path):
        return open(path, "rb")  # TensorFlow's reads lines at half the speed
    return tf.io.gfile.GFile(os.fspath(path), "rb")


def sha256(path: str) -> str:
    """SHA-256 of a file's bytes, in hex, read in pieces; raises as `open_binary`."""
    with open_binary(path) as file:
        return files.sha256_of(file)


def size(path: str) -> int:
    """Bytes of a file.

    Raises:
      tf.errors.NotFoundError: the file does not exist.
    """
    return tf.io.gfile.stat(path).length


def partial_name(path: str) -> str:
    """Returns a unique name next to a file's, to write it under."""
    folder, _, name = path.rpartition("/")
    hidden = files.partial_name(name)
    return f"{folder}/{hidden}" if folder or path.startswith("/") else hidden


def put(partial: str, path: str) -> None:
    """Renames a finished file over an older one; on the device first, if it is local.

    The new entry of a local directory is flushed by `flush`, once for several files.
    """
    flush(partial)
    tf.io.gfile.rename(partial, path, overwrite=True)


def copy_tree(source: str, target: str, last: str = "") -> None:
    """Copies a directory with all in it, file by file.

    Args:
      source: the directory.
      target: where its files go; older ones are written over.
      last: name of the file to be copied after all others.

    Raises:
      tf.errors.NotFoundError: the directory does not exist.
    """
    source, target = source.rstrip("/"), target.rstrip("/")
    if not tf.io.gfile.isdir(source):
        raise tf.errors.NotFoundError(None, None, f"{source}: no such directory")
    names = [
        f"{folder.rstrip('/')}/{name}"[len(source) + 1 :]
        for folder, _, inside in tf.io.gfile.walk(source)
        for name in inside
    ]
    for name in sorted(names, key=lambda name: (name == last, name)):
        path = f"{target}/{name}"
        tf.io.gfile.makedirs(path.rpartition("/")[0])
        partial = partial_name(path)
        tf.io.gfile.copy(f"{source}/{name}", partial)
        put(partial, path)


def discard(path: str) -> None:
    """Removes a file, which may be gone already."""
    with contextlib.suppress(*gone()):
        tf.io.gfile.remove(path)


def flush(path: str) -> None:
    """Forces a local file, or a directory's entries, to the device.

    Closing a file in TensorFlow does not. Elsewhere what is closed is the service's.
    """
    if is_local(path):
        files.flush(path or ".")


def seal_of(value: Mapping[str, Any]) -> str:
    """SHA-256, in hex, of JSON values; the order of their keys is none of theirs."""
    text = json.dumps(value, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def write_sealed(path: str, value: Mapping[str, Any]) -> None:
    """Writes a JSON object under a seal that shows edits, whole or not at all."""
    sealed = {**value, _SEAL: seal_of(value)}
    text = json.dumps(sealed, indent=1, sort_keys=True, allow_nan=False) + "\n"
    partial = partial_name(path)
    try:
        with tf.io.gfile.GFile(partial, "wb") as file:
            file.write(text.encode())
        put(partial, path)
        flush(path.rpartition("/")[0])
    except BaseException:
        with contextlib.suppress(tf.errors.OpError):
            discard(partial)
        raise


def read_sealed(path: str) -> dict[str, Any]:
    """Reads what `write_sealed` wrote.

    Raises:
      ValueError: it is no JSON object, or was edited.
      FileNotFoundError, tf.errors.NotFoundError: the file does not exist.
    """
    with open_binary(path) as file:
        data = file.read()
    try:
        value = validation.parse_json(data)
    except ValueError as error:
        raise ValueError(f"is no JSON ({error})") from error
    seal = value.pop(_SEAL, None) if isinstance(value, dict) else None
    if seal is None or seal != seal_of(value):
        raise ValueError("was edited: its seal is not that of its content")
    return value


def read_or_warn(path: str) -> dict[str, Any] | None:
    """Reads what `write_sealed` wrote; `None` if it is not there.

    Nor is what is damaged or was edited, of which the log then tells.
    """
    try:
        return read_sealed(path)
    except gone():
        return None
    except ValueError as error:
        logging.warning("%s: %s. It is made again.", path, error)
        return None


@contextlib.contextmanager
def locked(path: str, wait: bool) -> Iterator[bool]:
    """Keeps other processes of this machine from what a local file guards.

    The lock is the operating system's and ends with its process, however that dies.

    Args:
      path: the file, which is made if it is not there. It is never removed: another
        process may just have opened it.
      wait: until another process lets go of it.

    Yields:
      Whether it is held now. On a file system without locks, always.

    Raises:
      FileNotFoundError: its directory is not there, or was removed meanwhile.
    """
    if not is_local(path):
        yield True
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        held = _flock(descriptor, wait)
        if held and not _is_at(path, descriptor):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        yield held
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def explained(place: str, consequence: str) -> Iterator[None]:
    """Turns the errors of a full or closed disk into one with a remedy.

    Args:
      place: what was to be written.
      consequence: what becomes of what is there, and what to do then.

    Raises:
      InputError: the disk is full, or may not be written to.
    """
    try:
        with files.full_disk_as_os_error():
            yield
    except (OSError, tf.errors.PermissionDeniedError) as error:
        if isinstance(error, OSError) and error.errno in files.FULL:
            reason, remedy = error.strerror, "Free space there (or lift the quota)"
        elif isinstance(error, (PermissionError, tf.errors.PermissionDeniedError)):
            reason = "permission denied"
            remedy = "Change its permissions, or choose another directory"
        else:
            raise
        raise validation.InputError(
            f"{place}: cannot be written ({reason}). {remedy}, {consequence}"
        ) from error


def _flock(descriptor: int, wait: bool) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def is_locked(path: str) -> bool:
    """Returns whether a process holds the lock of `locked`; False without locks."""
    if not is_local(path):
        return False
    descriptor = os.open(path, os.O_RDWR)
    try:
        return not _flock(descriptor, wait=False)
    finally:
        os.close(descriptor)


def _is_at(path: str, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
