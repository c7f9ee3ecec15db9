"""Reads text files line by line; every error names its line.

It never repeats the line: that may be a private query, and errors end up in logs.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator

from tfdpsq.data import io
from tfdpsq.validation import DataError, parse_json


def raw_lines(
    path: str | os.PathLike, offset: int = 0, line: int = 0
) -> Iterator[tuple[int, bytes]]:
    """Yields (line number, bytes with their line end) of all lines from a place on.

    Args:
      path: the file, local or remote; ".gz" is read uncompressed.
      offset: bytes before the first line wanted, uncompressed.
      line: lines before it.

    Raises:
      DataError: a broken gzip file.
    """
    try:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(io.open_binary(path))
            packed = os.fspath(path).endswith(".gz")
            lines = stack.enter_context(gzip.open(file)) if packed else file
            lines.seek(offset)  # of a compressed file, by reading all before it
            for raw in lines:
                line += 1
                yield line, raw
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            path, f"broken gzip file ({error})", "Copy or write it again", line + 1
        ) from error


def text_lines(
    path: str | os.PathLike, raw: Iterable[tuple[int, bytes]] | None = None
) -> Iterator[tuple[int, str]]:
    """Yields (line number from 1, text with its line end) of all lines.

    A byte order mark at the beginning, which some editors write, is not part of it.

    Args:
      path: the file.
      raw: what `raw_lines` gives of it, or a part of that; `None` for all.

    Raises:
      DataError: bytes that are not UTF-8, or a broken gzip file.
    """
    for line, data in raw_lines(path) if raw is None else raw:
        if line == 1:
            data = data.removeprefix(codecs.BOM_UTF8)
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                path,
                f"byte {error.start + 1} of the line is "
                f"0x{data[error.start]:02x}, which is not UTF-8",
                "Convert the file to UTF-8, e.g. with iconv",
                line,
            ) from error
        yield line, text


def read_lines(
    path: str | os.PathLike, raw: Iterable[tuple[int, bytes]] | None = None
) -> Iterator[tuple[int, str]]:
    """Yields the lines of `text_lines` that are not blank, without their line ends."""
    for line, text in text_lines(path, raw):
        if text.strip():
            yield line, text.rstrip("\r\n")


def read_objects(
    path: str | os.PathLike, raw: Iterable[tuple[int, bytes]] | None = None
) -> Iterator[tuple[int, dict]]:
    """Yields (line number, object) of a JSON-lines file; arguments as `text_lines`.

    Raises:
      DataError: a line that is not a JSON object.
    """
    for line, text in read_lines(path, raw):
        try:
            record = parse_json(text)
        except ValueError as error:
            where = str(error)
            if isinstance(error, json.JSONDecodeError):
                where = f"{error.msg}, column {error.colno}"
            raise DataError(
                path, f"not JSON ({where})", "Write one JSON object a line", line
            ) from error
        if not isinstance(record, dict):
            raise DataError(
                path, "not a JSON object", "Write one JSON object a line", line
            )
        yield line, record
