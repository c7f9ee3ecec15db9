"""Rows of others' tables: Parquet, CSV, TSV, JSON lines, TFDS and `ir_datasets`.

A table is a file, a directory whose files are its parts, a pattern of files,
`ir_datasets:NAME`, or `tfds:NAME#SPLIT`, a split of a prepared TensorFlow data set.
Rows are streamed. Values of text files stay text: a library that guesses types turns
the user 49018e16 into a number, and drops columns that the first rows do not have.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import glob
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfdpsq import validation
from tfdpsq.data import io, sets
from tfdpsq.data.lines import raw_lines, read_objects, text_lines
from tfdpsq.validation import DataError, InputError, shown

IR_DATASETS, TFDS = NAMED = ("ir_datasets:", "tfds:")
# The parts of a table that `ir_datasets` names, and what it calls them.
PAIRS, QUERIES, CORPUS = "pairs", "queries", "corpus"
_KINDS = {PAIRS: "qrels", QUERIES: "queries", CORPUS: "docs"}
FORMATS = (".parquet", ".tsv", ".csv", ".jsonl", ".ndjson", ".json")
_BATCH = 4096
# Longer than any document; the default of 128 KiB is not.
_FIELD = 1 << 30
# A closing quote is followed by a comma: this is an escaped one, as Spark writes it.
_SPARK = re.compile(rb'\\"[^,"\r\n]')
# As seconds, the year 5138; as milliseconds, 1973.
_MILLISECONDS = 1e11

Row = tuple[str, int, list[Any]]


def read_rows(
    table: str, columns: Sequence[str], header: bool = True, part: str = PAIRS
) -> Iterator[Row]:
    """Streams the named columns of a table.

    Args:
      table: path, pattern, `ir_datasets:NAME` or `tfds:NAME#SPLIT`.
      columns: their names; for TSV and CSV without a header their numbers, from "0".
      header: whether the first line of TSV and CSV files names the columns.
      part: what an `ir_datasets` name stands for: its judgements, queries or documents.

    Yields:
      The file, the row's number in it (a line in a text file, else from 1), and the
      columns' values, `None` where there is none.

    Raises:
      InputError: there is no such table or column, or a library is missing.
      DataError: a file is malformed, with its line.
    """
    if table.startswith(IR_DATASETS):
        yield from _of_ir_datasets(table, columns, part)
        return
    if table.startswith(TFDS):
        yield from _of_tfds(table, columns)
        return
    seen: set[str] = set()
    for path in files_of(table):
        form = format_of(path)
        if form == ".parquet":
            yield from _of_parquet(path, columns)
        elif form in (".tsv", ".csv"):
            yield from _of_csv(path, columns, header)
        else:
            for line, record in read_objects(path):
                seen.update(record)
                yield path, line, [record.get(column) for column in columns]
            # Any row may be the first to have a column.
            _require(path, columns, seen)


def format_of(name: str) -> str | None:
    """Returns the entry of `FORMATS` that a file's name, or NAME.gz, ends in."""
    plain = name.removesuffix(".gz")
    return next((end for end in FORMATS if plain.endswith(end)), None)


def files_of(table: str, more: tuple[str, ...] = ()) -> list[str]:
    """Returns a table's files, sorted; of a prepared data set, those of all splits.

    Args:
      table: path, pattern or `tfds:NAME`.
      more: ends of names that are files of it, besides `FORMATS`.

    Raises:
      InputError: there is none.
    """
    if table.startswith(TFDS):
        return sorted(map(os.fspath, tfds_split(table)[0].data_path.iterdir()))
    gfile = io.gfile()
    if gfile.isdir(table):
        found = [
            os.path.join(folder, name)
            for folder, _, names in gfile.walk(table)
            for name in names
            if not name.startswith((".", "_"))
        ]
    elif gfile.exists(table):
        found = [table]
    elif io.is_local(table):
        found = glob.glob(table, recursive=True)
    else:
        found = gfile.glob(table)
    known = [
        path
        for path in found
        if format_of(path) or path.removesuffix(".gz").endswith(more or ("\0",))
    ]
    if not known:
        raise InputError(
            f"{table} is no table. Give a file, directory or pattern of files that end "
            f"in {', '.join((*FORMATS, *more))} (perhaps .gz), {IR_DATASETS}NAME or "
            f"{TFDS}NAME."
        )
    return sorted(known)


def seconds_of(value: Any) -> float | None:
    """Returns a time in seconds since 1970, or `None` if it is none.

    Takes numbers of seconds, and of milli-, micro- and nanoseconds as pandas and Spark
    write them, dates and times, and ISO 8601 texts; without a time zone they are of
    UTC. Text of eight digits is a date, as in 20260131, where it is one.
    """
    if isinstance(value, str):
        value = _time_of(value.strip())
    if isinstance(value, datetime.date) and not isinstance(value, datetime.datetime):
        value = datetime.datetime(value.year, value.month, value.day)
    if isinstance(value, datetime.datetime):
        zone = value.tzinfo or datetime.timezone.utc
        return value.replace(tzinfo=zone).timestamp()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if not abs(value) < 1e21:  # nor NaN
        return None
    seconds = float(value)
    while abs(seconds) >= _MILLISECONDS:
        seconds /= 1000
    return seconds


def _time_of(text: str) -> float | datetime.datetime | None:
    readers: list[Callable[[str], float | datetime.datetime]] = [
        float,
        lambda text: datetime.datetime.fromisoformat(text.replace("Z", "+00:00")),
    ]
    if re.fullmatch(r"(19|20)\d{6}", text):  # as seconds it would be of 1970
        readers.insert(0, lambda text: datetime.datetime.strptime(text, "%Y%m%d"))
    for read in readers:
        with contextlib.suppress(ValueError):
            return read(text)
    return None


def ir_columns(table: str, part: str) -> tuple[str, ...]:
    """Returns the columns of a part of an `ir_datasets` set."""
    source = _ir_datasets(table)
    return getattr(source, f"{_KINDS[part]}_cls")()._fields


def tfds_split(table: str) -> tuple[Any, str]:
    """Returns the builder and the split of `tfds:NAME#SPLIT`; nothing is downloaded.

    NAME may also be the directory of a prepared set.

    Raises:
      InputError: it was not prepared, or no split of it is named.
    """
    tfds = validation.library(
        "tensorflow_datasets",
        f"{table} needs TensorFlow Datasets: pip install tensorflow-datasets==4.9.10.",
    )
    name, _, split = table.removeprefix(TFDS).partition("#")
    problem = "not prepared"
    builder = None
    try:
        if os.path.exists(os.path.join(name, "dataset_info.json")):
            builder = tfds.builder_from_directory(name)
        else:
            builder = tfds.builder(name, data_dir=os.environ.get("TFDS_DATA_DIR"))
    except (ValueError, AssertionError, OSError) as error:
        problem = str(error).strip().partition("\n")[0][:200]
    splits = builder.info.splits if builder is not None else None
    if not splits:
        raise InputError(
            f"{table}: {problem}. Prepare it (tfds build), and set TFDS_DATA_DIR."
        )
    there = sorted(splits)
    split = split or (there[0] if len(there) == 1 else "")
    try:
        splits[split]
    except (ValueError, KeyError) as error:
        raise InputError(
            f"{table}: name one of its splits, such as tfds:{name}#{there[-1]}. They "
            f"are {', '.join(there)}."
        ) from error
    return builder, split


def _require(path: str, columns: Sequence[str], there: Any, shows: bool = True) -> None:
    """Refuses columns that are missing, or there twice.

    `shows` is False for the first line of a text file: without a header it is a row,
    with a private query.
    """
    for column in columns:
        if column not in there:
            listed = ", ".join(map(shown, sorted(there)[:20])) if shows else "others"
            raise InputError(
                f"{path} has no column {shown(column)}; it has {listed}. Correct the "
                'name, or "" for none; for a text file without a header set header to '
                "False and name columns by number, from 0."
            )
        if list(there).count(column) > 1:
            raise InputError(f"{path} has two columns {shown(column)}. Rename one.")


def _of_csv(path: str, columns: Sequence[str], header: bool) -> Iterator[Row]:
    """Reads CSV with quotes, or TSV without: queries in TSV hold stray quotes."""
    tabs = format_of(path) == ".tsv"
    csv.field_size_limit(_FIELD)
    lines = (text for _, text in text_lines(path))
    if not tabs and any(_SPARK.search(line) for _, line in raw_lines(path)):
        lines = (line.replace('\\"', '""') for line in lines)
    rows = csv.reader(
        lines,
        delimiter="\t" if tabs else ",",
        quoting=csv.QUOTE_NONE if tabs else csv.QUOTE_MINIMAL,
        strict=not tabs,
    )
    places: list[int] = []
    width = 0
    try:
        for row in rows:
            if not width:
                names = row if header else list(map(str, range(len(row))))
                _require(path, columns, names, shows=not header)
                places, width = [names.index(each) for each in columns], len(row)
                if header:
                    continue
            if row and len(row) != width:
                raise DataError(
                    path,
                    f"{len(row)} columns, and the first line has {width}",
                    "Quote the separators inside texts, or write JSONL or Parquet",
                    rows.line_num,
                )
            if row:
                yield path, rows.line_num, [row[place] for place in places]
    except csv.Error as error:
        raise DataError(
            path, f"malformed: {error}", "Correct the line", rows.line_num
        ) from error


def _of_parquet(path: str, columns: Sequence[str]) -> Iterator[Row]:
    file = sets.parquet_file(path)
    _require(path, columns, file.schema_arrow.names)
    number = 0
    for batch in file.iter_batches(_BATCH, columns=list(dict.fromkeys(columns))):
        try:
            values = [batch.column(name).to_pylist() for name in columns]
        except (ValueError, ArithmeticError, LookupError) as error:
            # Not UTF-8, a time beyond the year 9999, an unknown time zone.
            raise DataError(
                path,
                f"a value of rows {number + 1} to {number + len(batch)} cannot be read "
                f"({type(error).__name__})",
                "Correct it, or leave out its column",
            ) from None
        for row in zip(*values):
            number += 1
            yield path, number, list(row)


def _ir_datasets(table: str) -> Any:
    remedy = f"{table} needs ir_datasets: pip install ir_datasets."
    try:
        datasets = validation.library("ir_datasets", remedy)
        return datasets.load(table.removeprefix(IR_DATASETS))
    except KeyError as error:
        raise InputError(
            f"{table} is not known. `ir_datasets list` lists the names."
        ) from error


def _of_ir_datasets(table: str, columns: Sequence[str], part: str) -> Iterator[Row]:
    source = _ir_datasets(table)
    if not getattr(source, f"has_{_KINDS[part]}")():
        raise InputError(
            f"{table} has no {_KINDS[part]}. Name a part that has, such as NAME/train."
        )
    _require(table, columns, ir_columns(table, part))
    for number, row in enumerate(getattr(source, f"{_KINDS[part]}_iter")(), 1):
        yield table, number, [getattr(row, column) for column in columns]


def _of_tfds(table: str, columns: Sequence[str]) -> Iterator[Row]:
    import tensorflow as tf
    import tensorflow_datasets as tfds

    builder, split = tfds_split(table)
    features = builder.info.features
    _require(table, columns, list(features))
    for column in columns:
        if features[column].shape != ():
            raise InputError(
                f"column {column!r} of {table} holds several values a row. Name "
                "another, or write the set as Parquet."
            )
    rows = builder.as_dataset(
        split=split,
        decoders=tfds.decode.PartialDecoding(dict.fromkeys(columns, True)),
        # In the order of the files, whatever the number of cores.
        read_config=tfds.ReadConfig(interleave_cycle_length=1),
    )
    number = 0
    try:
        for row in rows.as_numpy_iterator():
            number += 1
            values = [row[column] for column in columns]
            yield (
                table,
                number,
                [v.decode() if isinstance(v, bytes) else v.item() for v in values],
            )
    except (tf.errors.OpError, UnicodeDecodeError) as error:
        # The error's text goes on with the row.
        raise DataError(
            table,
            f"it cannot be read ({type(error).__name__})",
            "Prepare it again, with texts in UTF-8",
            number + 1,
        ) from None
