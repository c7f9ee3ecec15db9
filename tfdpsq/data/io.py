"""Files that appear whole or not at all, and text files read line by line.

Everything is written under a temporary name next to its destination, flushed to the
device and renamed: a reader never meets half a file, and a run that fails leaves
nothing. A killed one leaves a `.NAME.<hex>.partial`, which nothing reads. What is read
may lie at a URL such as `gs://`, by `tf.io.gfile`.

Errors of readers name file and line and never repeat the line, which may be a private
query.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import json
import os
import secrets
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator
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


def copy_tree(source: str, target: str) -> None:
    """Copies a directory between file systems."""
    source, target = source.rstrip("/"), target.rstrip("/")
    names = [
        f"{folder.rstrip('/')}/{name}"[len(source) + 1 :]
        for folder, _, inside in gfile().walk(source)
        for name in inside
    ]
    for name in names:
        gfile().makedirs(f"{target}/{name}".rpartition("/")[0])
        gfile().copy(f"{source}/{name}", f"{target}/{name}", overwrite=True)


def text_lines(
    path: str | os.PathLike, offset: int = 0, line: int = 0
) -> Iterator[tuple[int, int, str]]:
    """Yields (number from 1, offset, text with its end) of the lines of a text file.

    The file is UTF-8, local or remote, perhaps `.gz`. Reading begins after `offset`
    uncompressed bytes, which hold `line` lines. A byte order mark is left out.

    Raises DataError for bytes that are not UTF-8, or a broken gzip file.
    """
    try:
        with contextlib.ExitStack() as stack:
            file: Any = stack.enter_context(open_binary(path))
            if os.fspath(path).endswith(".gz"):
                file = stack.enter_context(gzip.open(file))
            file.seek(offset)
            for data in file:
                line += 1
                yield line, offset, data.decode("utf-8-sig" if line == 1 else "utf-8")
                offset += len(data)
    except UnicodeDecodeError as error:
        problem = f"byte {error.start + 1} of the line is 0x{data[error.start]:02x}"
        remedy = "Convert it, or its part that is not, e.g. with iconv"
        raise DataError(path, f"{problem}, which is not UTF-8", remedy, line) from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        problem = f"broken gzip file ({error})"
        raise DataError(path, problem, "Copy or write it again", line + 1) from error


def read_lines(
    path: str | os.PathLike, offset: int = 0, line: int = 0
) -> Iterator[tuple[int, int, str]]:
    """Yields the lines of `text_lines` that are not blank, without their line ends."""
    for number, place, text in text_lines(path, offset, line):
        if text.strip():
            yield number, place, text.rstrip("\r\n")


def read_objects(
    path: str | os.PathLike, offset: int = 0, line: int = 0
) -> Iterator[tuple[int, int, dict]]:
    """Yields (line number, offset, object) of a JSON Lines file, see `text_lines`."""
    for number, place, text in read_lines(path, offset, line):
        yield number, place, _object(path, text, "Write an object a line", number)


def read_json(path: str | os.PathLike, remedy: str) -> dict[str, Any]:
    """Returns the JSON object in a file; raises DataError with `remedy`."""
    try:
        with open_binary(path) as file:
            return _object(path, file.read(), remedy)
    except OSError as error:
        raise DataError(path, f"cannot be read ({error.strerror})", remedy) from error


def _object(path: Any, data: str | bytes, remedy: str, line: int | None = None) -> dict:
    try:
        value = parse_json(data)
    except ValueError as error:
        raise DataError(path, f"not JSON ({error})", remedy, line) from error
    if not isinstance(value, dict):
        raise DataError(path, "not a JSON object", remedy, line)
    return value


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

    Raises InputError if `path` exists and is not an empty directory, it cannot be
    written, or the disk is full. Nothing is left then, nor if the body raises.
    """
    target = Path(os.path.abspath(path))
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise InputError(
            f"{target}: already exists, and is not an empty directory. Choose another."
        )
    with _renamed(target, Path.mkdir) as partial:
        if target.is_dir():
            shutil.copymode(target, partial)
        yield partial


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[Path]:
    """Yields a temporary path to write, which then replaces the local file `path`.

    An older file stays as it is if the body raises, or for an InputError: the place
    cannot be written, or the disk is full.
    """
    with _renamed(Path(os.path.abspath(path)), Path.touch) as partial:
        yield partial


@contextlib.contextmanager
def _renamed(target: Path, create: Callable[[Path], None]) -> Iterator[Path]:
    partial = target.with_name(partial_name(target.name))
    with explained(target, any_error=True):
        target.parent.mkdir(parents=True, exist_ok=True)
        create(partial)
    try:
        with explained(target):
            yield partial
        with explained(target, any_error=True):
            for each in (*partial.rglob("*"), partial):
                flush(each)
            os.replace(partial, target)  # also an empty directory
            flush(target.parent)
    except BaseException:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)
        raise


def atomic_write(path: str | os.PathLike, content: bytes | str) -> None:
    """Writes a file (text as UTF-8) that is seen either old or new, never between."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    with atomic_file(path) as partial:
        partial.write_bytes(data)


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Writes JSON, without NaN, as `atomic_write` does; equal values, equal bytes."""
    text = json.dumps(value, indent=2, sort_keys=True, allow_nan=False)
    atomic_write(path, text + "\n")


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


def partial_name(name: str) -> str:
    """Returns a unique name for a file or directory while it is being written."""
    return f".{name}.{secrets.token_hex(6)}.partial"


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

    `remains` says what becomes of what is there. With `any_error`, all errors of the
    system are about `target`; in a caller's block some are of files it only reads, and
    only those of a full disk are turned.
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
        tensorflow = sys.modules.get("tensorflow")
        if tensorflow is not None and isinstance(error, tensorflow.errors.OpError):
            for number in FULL:
                if os.strerror(number).lower() in str(error).lower():
                    raise OSError(number, os.strerror(number)) from error
        raise
