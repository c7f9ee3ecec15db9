"""Rows of others' tables: Parquet, CSV, TSV, JSON lines, TFDS and `ir_datasets`.

A table is a file, a directory whose files are its parts, a pattern of files,
`ir_datasets:NAME`, or `tfds:NAME#SPLIT`, a split of a prepared TensorFlow data set.
Rows are streamed. Values of text files stay text: a library that guesses types turns
the user 49018e16 into a number, and drops columns that the first rows do not have.
"""

from __future__ import annotations

import csv
import dataclasses
import glob
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tfdpsq import validation
from tfdpsq.data import io, sets
from tfdpsq.data.texts import text_of
from tfdpsq.validation import DataError, InputError, shown

IR_DATASETS, TFDS = NAMED = ("ir_datasets:", "tfds:")
# The parts of a table that `ir_datasets` names, and what it calls them.
PAIRS, QUERIES, CORPUS = "pairs", "queries", "corpus"
_KINDS = {PAIRS: "qrels", QUERIES: "queries", CORPUS: "docs"}
FORMATS = (".parquet", ".tsv", ".csv", ".jsonl", ".ndjson", ".json")
_BATCH = 4096
# Longer than any document; the default of 128 KiB is not.
_FIELD = 1 << 30
_BEFORE_QUOTE = re.compile(r'\\*"')
# How text files quote: with "" for a quote inside, with a backslash before it, as Spark
# does, or never; "" is doubled for CSV, none for TSV, where queries hold stray quotes.
QUOTES = ("", "doubled", "backslash", "none")

Row = tuple[str, int, list[Any]]


@dataclasses.dataclass(frozen=True)
class Table:
    """A table, and which of its columns hold what."""

    path: str  # path, pattern, `ir_datasets:NAME` or `tfds:NAME#SPLIT`
    columns: Mapping[str, str]  # what -> name, or number from "0" without a header
    header: bool = True  # whether the first line of text files names the columns
    part: str = PAIRS  # of an `ir_datasets` name: its pairs, queries or corpus
    quotes: str = ""  # one of `QUOTES`

    def rows(self) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Streams the rows.

        Yields the file, the row's number in it (a line in a text file, else from 1),
        and what -> value; `None` where there is none, but of a text "". Raises
        InputError for what is missing, DataError for what is malformed.
        """
        for path, number, values in self._read(list(self.columns.values())):
            found = dict(zip(self.columns, values))
            for what in {"query", "document", "title"} & found.keys():
                try:
                    found[what] = text_of(found[what])
                except ValueError:
                    problem = f"column {shown(self.columns[what])} holds no single text"
                    remedy = f"The {what} must be one: name another column"
                    raise DataError(path, problem, remedy, number) from None
            yield path, number, found

    def _read(self, columns: list[str]) -> Iterator[Row]:
        if self.path.startswith(IR_DATASETS):
            yield from _of_ir_datasets(self.path, columns, self.part)
            return
        if self.path.startswith(TFDS):
            yield from _of_tfds(self.path, columns)
            return
        seen = None
        for path in files_of(self.path):
            form = format_of(path)
            if form == ".parquet":
                yield from _of_parquet(path, columns)
            elif form in (".tsv", ".csv"):
                yield from _of_csv(path, columns, self.header, self.quotes)
            else:
                seen = seen or set[str]()
                for line, _, record in io.read_objects(path):
                    seen.update(record)
                    yield path, line, [record.get(column) for column in columns]
        if seen is not None:  # any row of any file may be the first to have a column
            _require(self.path, columns, seen)


def format_of(name: str) -> str | None:
    """Returns the entry of `FORMATS` that a file's name, or NAME.gz, ends in."""
    plain = name.removesuffix(".gz")
    return next((end for end in FORMATS if plain.endswith(end)), None)


def files_of(table: str, more: tuple[str, ...] = ()) -> list[str]:
    """Returns a table's files, sorted; of a prepared data set, those of all splits.

    Their names end in one of `FORMATS` or of `more`; raises InputError if none does.
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
    else:
        local = io.is_local(table)
        found = glob.glob(table, recursive=True) if local else gfile.glob(table)
    ends = (*FORMATS, *more)
    known = [path for path in found if path.removesuffix(".gz").endswith(ends)]
    if not known:
        raise InputError(
            f"{table} is not a table. Give a file, directory or pattern of files that "
            f"end in {', '.join(ends)} (perhaps .gz), {IR_DATASETS}NAME or {TFDS}NAME."
        )
    return sorted(known)


def ir_columns(table: str, part: str) -> tuple[str, ...]:
    """Returns the columns of a part of an `ir_datasets` set.

    "default_text" is what the set's authors join where there is no "text".
    """
    row = getattr(_ir_datasets(table), f"{_KINDS[part]}_cls")()
    return (*row._fields, *(name for name in ("default_text",) if hasattr(row, name)))


def tfds_split(table: str) -> tuple[Any, str]:
    """Returns the builder and the split of `tfds:NAME#SPLIT`; nothing is downloaded.

    NAME may also be the directory of a prepared set. Raises InputError if it was not
    prepared, or no split of it is named.
    """
    import tensorflow_datasets as tfds

    name, _, split = table.removeprefix(TFDS).partition("#")
    problem, splits = "not prepared", None
    try:
        if os.path.exists(os.path.join(name, "dataset_info.json")):
            builder = tfds.builder_from_directory(name)
        else:
            builder = tfds.builder(name, data_dir=os.environ.get("TFDS_DATA_DIR"))
        splits = builder.info.splits
    except (ValueError, AssertionError, OSError) as error:
        problem = str(error).strip().partition("\n")[0][:200]
    if not splits:
        raise InputError(
            f"{table}: {problem}. Prepare it (tfds build), and set TFDS_DATA_DIR."
        )
    there = sorted(splits)
    split = split or (there[0] if len(there) == 1 else "")
    try:
        splits[split]
    except (KeyError, ValueError):
        raise InputError(
            f"{table}: give one of its splits, {TFDS}{name}#SPLIT: {', '.join(there)}."
        ) from None
    return builder, split


def _require(
    path: str, columns: Sequence[str], there: Iterable[str], shows: bool = True
) -> None:
    """Checks that a table has each column once.

    `shows` is whether the message lists what is there: not a row, which is private.
    """
    there = list(there)
    for column in columns:
        if there.count(column) > 1:
            raise InputError(f"{path} has two columns {shown(column)}. Rename one.")
        if column not in there:
            listed = ", ".join(map(shown, sorted(there)[:20])) if shows else "others"
            raise InputError(
                f"{path} has no column {shown(column)}; it has {listed or 'none'}. Set "
                "columns to what is there; without a header, set header to False, and "
                "name columns by number, from 0."
            )


def _of_csv(
    path: str, columns: Sequence[str], header: bool, quotes: str
) -> Iterator[Row]:
    tabs = format_of(path) == ".tsv"
    quotes = quotes or ("none" if tabs else "doubled")
    csv.field_size_limit(_FIELD)
    lines = (text for _, _, text in io.text_lines(path))
    if quotes == "backslash":
        lines = (_BEFORE_QUOTE.sub(_doubled, text) for text in lines)
    rows = csv.reader(
        lines,
        delimiter="\t" if tabs else ",",
        quoting=csv.QUOTE_NONE if quotes == "none" else csv.QUOTE_MINIMAL,
        strict=True,
    )
    remedy = (
        f"Quotes inside values are read as {quotes!r}: set quotes to another of "
        f"{', '.join(QUOTES[1:])} (Spark writes backslash), or write JSONL or Parquet"
    )
    try:
        first = next(filter(None, rows), None)
        if first is None:
            return
        names = first if header else list(map(str, range(len(first))))
        _require(path, columns, names, shows=not header)
        places = [names.index(each) for each in columns]
        for row in rows if header else itertools.chain([first], rows):
            if row and len(row) != len(names):
                raise DataError(
                    path,
                    f"{len(row)} columns, and the first line has {len(names)}",
                    remedy,
                    rows.line_num,
                )
            if row:
                yield path, rows.line_num, [row[place] for place in places]
    except csv.Error as error:
        problem = f"malformed: {error}"
        raise DataError(path, problem, remedy, rows.line_num) from error


def _doubled(found: re.Match) -> str:
    """Returns backslashes and a quote as they are where quotes are doubled."""
    pairs, escaped = divmod(len(found[0]) - 1, 2)
    return "\\" * pairs + '"' * (1 + escaped)


def _of_parquet(path: str, columns: Sequence[str]) -> Iterator[Row]:
    file = sets.parquet_file(path)
    _require(path, columns, file.schema_arrow.names)
    number = 0
    for batch in file.iter_batches(_BATCH, columns=list(dict.fromkeys(columns))):
        try:
            values = [batch.column(name).to_pylist() for name in columns]
        except (ValueError, ArithmeticError, LookupError) as error:
            # Not UTF-8, a time beyond the year 9999, an unknown time zone.
            problem = f"a value of rows {number + 1} to {number + len(batch)} cannot be"
            problem += f" read ({type(error).__name__})"
            remedy = "Correct it, or leave out its column"
            raise DataError(path, problem, remedy) from None
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
    source, kind = _ir_datasets(table), _KINDS[part]
    if not getattr(source, f"has_{kind}")():
        raise InputError(
            f"{table} has no {kind}. Name a part that has, such as NAME/train."
        )
    _require(table, columns, ir_columns(table, part))
    for number, row in enumerate(getattr(source, f"{kind}_iter")(), 1):
        values = [getattr(row, column) for column in columns]
        yield table, number, [v() if callable(v) else v for v in values]


def _of_tfds(table: str, columns: Sequence[str]) -> Iterator[Row]:
    import tensorflow as tf
    import tensorflow_datasets as tfds

    builder, split = tfds_split(table)
    _require(table, columns, builder.info.features)
    rows = builder.as_dataset(
        split=split,
        decoders=tfds.decode.PartialDecoding(dict.fromkeys(columns, True)),
        # In the order of the files, whatever the number of cores.
        read_config=tfds.ReadConfig(interleave_cycle_length=1),
    )
    number = 0
    try:
        for number, row in enumerate(rows.as_numpy_iterator(), 1):
            values = [row[column] for column in columns]
            yield (
                table,
                number,
                [v.decode() if isinstance(v, bytes) else v.tolist() for v in values],
            )
    except (tf.errors.OpError, UnicodeDecodeError) as error:
        # The error's text goes on with the row.
        problem = f"it cannot be read ({type(error).__name__})"
        remedy = "Prepare it again, with texts in UTF-8"
        raise DataError(table, problem, remedy, number + 1) from None
