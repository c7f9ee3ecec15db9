"""Files and directories that appear whole or not at all.

Everything is written under a temporary name next to its destination, flushed to the
device and renamed: a reader never meets half a file, and a run that fails leaves
nothing. One that is killed leaves a `.NAME.<hex>.partial`, which nothing reads. Paths
such as `gs://` go through `tf.io.gfile`; object stores write an object whole anyway.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tfdpsq.validation import DataError, InputError, parse_json

MANIFEST = "manifest.json"
# The device, a quota or a limit refuses the bytes.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_local(path: str | os.PathLike) -> bool:
    """Returns whether a path has no scheme such as `gs://`."""
    return "://" not in os.fspath(path)


def gfile() -> Any:
    """Returns `tf.io.gfile`, which knows every file system; seconds to import."""
    import tensorflow as tf

    return tf.io.gfile


def open_binary(path: str | os.PathLike) -> BinaryIO:
    """Opens a file on any file system for reading; raises FileNotFoundError."""
    if is_local(path):
        return open(path, "rb")
    if not gfile().exists(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    return gfile().GFile(path, "rb")


def copy_tree(source: str, target: str, last: str = "") -> None:
    """Copies a directory between file systems, the file named `last` after all others.

    Raises:
      FileNotFoundError: the directory does not exist.
    """
    source, target = source.rstrip("/"), target.rstrip("/")
    if not gfile().isdir(source):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
    names = [
        f"{folder.rstrip('/')}/{name}"[len(source) + 1 :]
        for folder, _, inside in gfile().walk(source)
        for name in inside
    ]
    for name in sorted(names, key=lambda name: (name == last, name)):
        gfile().makedirs(f"{target}/{name}".rpartition("/")[0])
        gfile().copy(f"{source}/{name}", f"{target}/{name}", overwrite=True)


def sha256_of_file(path: str | os.PathLike) -> str:
    """Returns the SHA-256 of a file's bytes, in hex."""
    digest = hashlib.sha256()
    with open_binary(path) as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


@contextlib.contextmanager
def atomic_directory(path: str | os.PathLike) -> Iterator[Path]:
    """Yields a temporary directory to fill, which then gets the name `path`.

    Raises:
      InputError: `path` exists and is not an empty directory (before the body runs, or
        meanwhile), it cannot be written, or the disk is full. Nothing is left then, nor
        if the body raises.
    """
    target = Path(os.path.abspath(path))
    _refuse_taken(target)
    partial = target.with_name(partial_name(target.name))
    with explained(target, any_error=True):
        partial.mkdir(parents=True)
        if target.is_dir():
            shutil.copymode(target, partial)
    try:
        with explained(target):
            yield partial
            for folder, _, names in os.walk(partial):
                for name in (*names, ""):
                    flush(os.path.join(folder, name))
        _refuse_taken(target)
        with explained(target, any_error=True):
            os.rename(partial, target)  # Also replaces an empty directory.
            flush(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[Path]:
    """Yields a temporary path to write, which then replaces the local file `path`.

    Raises:
      InputError: the place cannot be written, or the disk is full. An older file is
        then still there, whole, as it is if the body raises.
    """
    target = Path(os.path.abspath(path))
    partial = target.with_name(partial_name(target.name))
    with explained(target, any_error=True):
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()
    try:
        with explained(target):
            yield partial
        with explained(target, any_error=True):
            flush(partial)
            os.replace(partial, target)
            flush(target.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def atomic_write(path: str | os.PathLike, content: bytes | str) -> None:
    """Writes a file (text as UTF-8) that is seen either old or new, never between."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    if is_local(path):
        with atomic_file(path) as partial:
            partial.write_bytes(data)
    else:
        folder, slash, name = os.fspath(path).rpartition("/")
        partial_path = f"{folder}{slash}{partial_name(name)}"
        with gfile().GFile(partial_path, "wb") as file:
            file.write(data)
        gfile().rename(partial_path, path, overwrite=True)


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Writes a JSON value as `atomic_write` does; equal values give equal bytes.

    Raises:
      TypeError, ValueError: `value` is not JSON, or holds NaN or an infinity.
    """
    text = json.dumps(value, indent=2, sort_keys=True, allow_nan=False)
    atomic_write(path, text + "\n")


def read_json(path: str | os.PathLike, remedy: str) -> dict[str, Any]:
    """Returns the JSON object in a file; raises DataError with `remedy`."""
    try:
        with open_binary(path) as file:
            value = parse_json(file.read())
    except OSError as error:
        raise DataError(path, f"cannot be read ({error.strerror})", remedy) from error
    except ValueError as error:
        raise DataError(path, f"not JSON ({error})", remedy) from error
    if not isinstance(value, dict):
        raise DataError(path, "not a JSON object", remedy)
    return value


def write_manifest(directory: Path, entries: dict[str, Any]) -> dict[str, Any]:
    """Writes `manifest.json`: the entries, and the SHA-256 of every other file."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    files = {str(path.relative_to(directory)): sha256_of_file(path) for path in paths}
    manifest = {**entries, "files": files}
    write_json(directory / MANIFEST, manifest)
    return manifest


def verify_manifest(directory: Path, manifest: dict[str, Any], remedy: str) -> None:
    """Raises DataError for a file that is missing, or differs from its checksum."""
    for name, expected in manifest["files"].items():
        path = directory / name
        if not path.is_file():
            raise DataError(path, "missing", remedy)
        if sha256_of_file(path) != expected:
            raise DataError(path, "SHA-256 is not that of the manifest", remedy)


def check_writable(directory: str | os.PathLike) -> Path:
    """Creates a directory and proves, before hours of work, that it can be written.

    Raises:
      InputError: it cannot be created or written, or the disk is full.
    """
    target = Path(os.path.abspath(directory))
    with explained(target, any_error=True):
        target.mkdir(parents=True, exist_ok=True)
        probe = target / partial_name("probe")
        try:
            probe.write_bytes(bytes(1 << 16))
            flush(probe)
        finally:
            probe.unlink(missing_ok=True)
    return target


def partial_name(name: str) -> str:
    """Returns a unique name for a file or directory while it is being written."""
    return f".{name}.{secrets.token_hex(6)}.partial"


def partial_pattern(name: str) -> str:
    """Returns the glob of a file's temporary names; it matches no other file's."""
    return f".{glob.escape(name)}.{'[0-9a-f]' * 12}.partial"


def flush(path: str | os.PathLike) -> None:
    """Forces a local file or a directory's entries to the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot flush a directory; the rest is an error.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not os.path.isdir(path):
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def explained(
    target: str | os.PathLike,
    remains: str = "Nothing half-written was left.",
    any_error: bool = False,
) -> Iterator[None]:
    """Turns the errors of a full or closed disk into an InputError with a remedy.

    Args:
      target: what is written.
      remains: what becomes of what is there.
      any_error: whether every error of the system is about `target`. Inside a caller's
        block it may be about a file that is only read, and passes unchanged.
    """
    try:
        with full_disk_as_os_error():
            yield
    except OSError as error:
        if error.errno not in FULL and not any_error:
            raise
        remedy = "Choose a directory you may write to, or change its permissions"
        if error.errno in FULL:
            remedy = "Free space there (or lift the quota), or choose another disk"
        raise InputError(
            f"{target}: cannot be written ({error.strerror}). {remedy}. {remains}"
        ) from error


@contextlib.contextmanager
def full_disk_as_os_error() -> Iterator[None]:
    """Gives TensorFlow's errors of a full disk the type that Python's have."""
    try:
        yield
    except Exception as error:
        errors = getattr(sys.modules.get("tensorflow"), "errors", None)
        if errors is not None and isinstance(error, errors.OpError):
            for number in FULL:
                if os.strerror(number).lower() in str(error).lower():
                    raise OSError(number, os.strerror(number)) from error
        raise


def _refuse_taken(target: Path) -> None:
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise InputError(
            f"{target}: already exists, and is not an empty directory. Choose another."
        )
