"""Rows of others' tables: Parquet, Arrow, TSV, CSV, JSONL, `tfds` and `ir_datasets`.

A table is a file, a directory whose files are its parts (such as a Hugging Face data
set on disk), a pattern of files, `ir_datasets:NAME`, or `tfds:NAME#SPLIT`, a split of a
prepared TensorFlow data set. Rows are read in pieces, so memory does not grow with the
table. Files may be `gs://` ones.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import gzip
import importlib
import math
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.data import any_files
from tfdpsq.data.beir_lines import decoded
from tfdpsq.validation import DataError, InputError, parse_json, shown

IR_DATASETS, TFDS = NAMED = ("ir_datasets:", "tfds:")
# The parts of a table that `ir_datasets` names.
PAIRS, QUERIES, CORPUS = "pairs", "queries", "corpus"
# In the schema of a file that `export` wrote, and what it is of.
MARKED, MARK = "tfdpsq.part_of", "a set of queries"
_BATCH = 4096
_BUFFER = 1 << 20
_COMPRESSED = ".gz"
# Longer than any document; the default of 128 KiB is not.
_FIELD = 1 << 30

Row = Mapping[str, Any]


def read_rows(
    table: str, columns: Sequence[str], header: bool = True, part: str = PAIRS
) -> Iterator[tuple[str, int, list[Any]]]:
    """Reads the named columns of a table.

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
    for path in files_of(table):
        for number, row in _reader_of(path, header)(path, columns):
            yield path, number, row


def files_of(table: str) -> list[str]:
    """Returns a table's files, sorted; of a prepared data set, those of all splits.

    Raises:
      InputError: there is none, or they are of several formats.
    """
    if table.startswith(TFDS):
        folder = os.fspath(_tfds_builder(table).data_path)
        names = sorted(tf.io.gfile.listdir(folder))
        return [os.path.join(folder, name) for name in names]
    if tf.io.gfile.isdir(table):
        splits = os.path.join(table, "dataset_dict.json")
        if any_files.exists(splits):  # of Hugging Face `datasets`
            raise InputError(
                f"{splits} lists the splits of a set. Give one of them, such as "
                f"{os.path.join(table, 'train')}."
            )
        found = [
            os.path.join(folder, name)
            for folder, _, names in tf.io.gfile.walk(table)
            for name in names
            if _format_of(name) and not name.startswith((".", "_"))
        ]
        # Which describes itself in JSON next to its Arrow files, and has caches there.
        found = _of_hugging_face(table) or found
    elif any_files.exists(table):
        found = [table]
    else:
        found = tf.io.gfile.glob(table)
    formats = {_format_of(path) or "" for path in found}
    if not found or "" in formats:
        raise InputError(
            f"{table} is not a table. Give a file, a directory or a pattern of "
            f"files that end in {', '.join(_READERS)} (text also with .gz), "
            f"{IR_DATASETS}NAME or {TFDS}NAME."
        )
    if len(formats) > 1:
        raise InputError(
            f"{table} has files of several formats, {', '.join(sorted(formats))}"
            ". Give a pattern of one, such as DIRECTORY/*.parquet."
        )
    return sorted(found)


def _of_hugging_face(folder: str) -> list[str]:
    """Returns the files that a set of `datasets` on disk calls its own, if it is one.

    Next to them are caches of `map` and `filter`: the same rows, changed.

    Raises:
      DataError: its record is damaged, or lists a file that is not there.
    """
    state = os.path.join(folder, "state.json")
    if not any_files.exists(state):
        return []
    try:
        with any_files.open_binary(state) as file:
            listed = parse_json(file.read()).get("_data_files", [])
        files = [os.path.join(folder, each["filename"]) for each in listed]
        # A name that no file system holds is an error of its own.
        missing = [path for path in files if not any_files.exists(path)]
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise DataError(
            state, f"it is damaged ({error!r})", "Save the set again"
        ) from error
    for path in missing:
        raise DataError(
            state,
            f"it lists {shown(os.path.basename(path))}, which is not there",
            "Copy the whole directory, or save the set again",
        )
    return files


def is_marked(path: str) -> bool:
    """Returns whether a Parquet or Arrow file says that it is of a set of queries.

    Raises:
      InputError: the library is missing.
      DataError: the file is malformed.
    """
    form = _format_of(path)
    if form == ".parquet":
        parquet = library("pyarrow.parquet")
        with any_files.open_binary(path) as raw, _damaged(path):
            schema = parquet.ParquetFile(raw, pre_buffer=False).schema_arrow
    elif form == ".arrow":
        with any_files.open_binary(path) as raw, _damaged(path):
            schema = _opened_arrow(raw)[0].schema
    else:
        return False
    return MARKED.encode() in (schema.metadata or {})


def is_table_name(path: str) -> bool:
    """Returns whether a file's name ends as that of a table."""
    return _format_of(path) is not None


def has_lines(table: str) -> bool:
    """Returns whether a table is of TSV or CSV files, which may name columns in a line.

    Raises:
      InputError: there is no such table.
    """
    if table.startswith(NAMED):
        return False
    return _READERS[_format_of(files_of(table)[0]) or ""] is _of_text


def seconds_of(value: Any) -> float | None:
    """Returns a time in seconds since 1970, or `None` if it is none.

    Takes numbers of seconds, dates and times, and ISO 8601 texts; without a time zone
    they are of UTC. Text of eight digits is a date, as in 20260131, where it is one.
    """
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, str):
        text = value.strip()
        if re.fullmatch(r"(19|20)\d{6}", text):  # as seconds it would be of 1970
            with contextlib.suppress(ValueError):
                date = datetime.datetime.strptime(text, "%Y%m%d")
                return date.replace(tzinfo=datetime.timezone.utc).timestamp()
        try:
            return _finite(float(text))
        except ValueError:
            pass
        try:
            value = datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
        except ValueError:
            return None
    if isinstance(value, datetime.date) and not isinstance(value, datetime.datetime):
        value = datetime.datetime(value.year, value.month, value.day)
    if isinstance(value, datetime.datetime):
        zone = value.tzinfo or datetime.timezone.utc
        return value.replace(tzinfo=zone).timestamp()
    if isinstance(value, (int, float)):
        return _finite(value)
    return None


def _finite(value: float) -> float | None:
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer of hundreds of digits
        return None


def _format_of(path: str) -> str | None:
    name = path[: -len(_COMPRESSED)] if path.endswith(_COMPRESSED) else path
    return next((end for end in _READERS if name.endswith(end)), None)


def _reader_of(path: str, header: bool) -> Callable:
    read = _READERS[_format_of(path) or ""]
    if read is _of_text:
        return lambda path, columns: _of_text(path, columns, header)
    return read


def _require(
    path: str, columns: Sequence[str], there: Sequence[str], of_line: bool = False
) -> None:
    """Refuses columns that are missing, or there twice.

    `of_line` says that the names are the first line of a text file. It is not repeated:
    without a header it is a row, with a private query.
    """
    missing = [column for column in columns if column not in there]
    if missing and of_line:
        raise InputError(
            f"{path} has no column {shown(missing[0])} among the {len(there)} that its "
            'first line names. Correct the name, or "" for none; if the first line is '
            "a row, set header to False and name columns by number, from 0."
        )
    if missing:
        listed = ", ".join(map(shown, list(there)[:20]))
        raise InputError(
            f"{path} has no column {shown(missing[0])}; it has {listed}. Name a column "
            'that is there, or "" for none.'
        )
    for column in columns:
        if list(there).count(column) > 1:
            raise InputError(
                f"{path} has {list(there).count(column)} columns {column!r}, and "
                "nothing says which is meant. Rename all but one."
            )


def _lines(path: str) -> Iterator[str]:
    """Yields a file's lines, with their line ends."""
    with any_files.open_binary(path) as raw:
        try:
            lines = gzip.open(raw) if path.endswith(_COMPRESSED) else raw
            tool = "such as by iconv, each part from the encoding that it has"
            for number, line in enumerate(lines, 1):
                yield decoded(path, number, line, tool)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(
                path, f"it cannot be unpacked: {error}", "Restore the file"
            ) from error


def _of_text(
    path: str, columns: Sequence[str], header: bool
) -> Iterator[tuple[int, list[Any]]]:
    """Reads CSV with quotes, or TSV without: queries in TSV hold stray quotes."""
    tabs = _format_of(path) == ".tsv"
    csv.field_size_limit(_FIELD)
    rows = csv.reader(
        _lines(path),
        delimiter="\t" if tabs else ",",
        quoting=csv.QUOTE_NONE if tabs else csv.QUOTE_MINIMAL,
        strict=not tabs,
    )
    places: list[int] | None = None
    width = 0
    try:
        for row in rows:
            if places is None:
                names = row if header else list(map(str, range(len(row))))
                _require(path, columns, names, of_line=header)
                places, width = [names.index(each) for each in columns], len(row)
                if header:
                    continue
            if not row:
                continue
            if len(row) != width:
                raise DataError(
                    path,
                    f"{len(row)} columns, and the first line has {width}",
                    "Quote the separators inside texts, or write JSONL or Parquet",
                    rows.line_num,
                )
            yield rows.line_num, [row[place] for place in places]
    except csv.Error as error:
        raise DataError(
            path, f"malformed: {error}", "Correct the line", rows.line_num
        ) from error


def _of_jsonl(path: str, columns: Sequence[str]) -> Iterator[tuple[int, list[Any]]]:
    checked = False
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            record = parse_json(line)
        except ValueError as error:
            raise DataError(
                path, f"not JSON: {error}", "Correct the line", number
            ) from error
        if not isinstance(record, dict):
            raise DataError(path, "not a JSON object", "Write {column: value}", number)
        if not checked:
            _require(path, columns, list(record))
            checked = True
        yield number, [record.get(column) for column in columns]


def _of_parquet(path: str, columns: Sequence[str]) -> Iterator[tuple[int, list[Any]]]:
    pyarrow = library("pyarrow.parquet")
    with any_files.open_binary(path) as raw, _damaged(path):
        file = pyarrow.ParquetFile(raw, pre_buffer=False, buffer_size=_BUFFER)
        _require(path, columns, file.schema_arrow.names)
        batches = file.iter_batches(_BATCH, columns=list(dict.fromkeys(columns)))
        yield from _of_batches(path, batches, columns)


def _of_arrow(path: str, columns: Sequence[str]) -> Iterator[tuple[int, list[Any]]]:
    """Reads an Arrow stream, as Hugging Face `datasets` writes it, or an Arrow file."""
    library("pyarrow.ipc")
    with any_files.open_binary(path) as raw, _damaged(path):
        opened, is_file = _opened_arrow(raw)
        _require(path, columns, opened.schema.names)
        numbers = range(opened.num_record_batches) if is_file else None
        batches = map(opened.get_batch, numbers) if numbers is not None else opened
        yield from _of_batches(path, batches, columns)


def _opened_arrow(raw: Any) -> tuple[Any, bool]:
    """Opens an Arrow stream or file; returns whether it is a file, too."""
    ipc = library("pyarrow.ipc")
    is_file = raw.read(6) == b"ARROW1"
    raw.seek(0)
    return (ipc.open_file(raw) if is_file else ipc.open_stream(raw)), is_file


def _of_batches(
    path: str, batches: Any, columns: Sequence[str]
) -> Iterator[tuple[int, list]]:
    number = 0
    for batch in batches:
        values = [batch.column(batch.schema.get_field_index(name)) for name in columns]
        lists = [_values(path, number, *each) for each in zip(columns, values)]
        for row in zip(*lists):
            number += 1
            yield number, list(row)


def _values(path: str, before: int, name: str, column: Any) -> list[Any]:
    """Returns a column's values in Python; Arrow checks neither texts nor times.

    `before` counts the rows of the file before this batch.

    Raises:
      DataError: Python has no such value: a text that is not UTF-8, a time beyond the
        year 9999, or one of an unknown zone.
    """
    # Of a zone it is a KeyError, of a time an OverflowError.
    broken = (ValueError, ArithmeticError, LookupError)
    try:
        return column.to_pylist()
    except broken as error:
        number = before
        for value in column:
            number += 1
            try:
                value.as_py()
            except broken:
                break
        problem = f"is no {column.type} that can be read"
        if isinstance(error, UnicodeDecodeError):
            problem = "is not text in UTF-8"
        raise DataError(
            path,
            f"the value of column {shown(name)} {problem}",
            "Correct it, or leave out the column",
            number,
        ) from None


@contextlib.contextmanager
def _damaged(path: str) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        first = str(error).partition("\n")[0]
        raise DataError(
            path, f"it cannot be read: {first[:200]}", "Restore the file"
        ) from error


def fields_of(table: str, part: str) -> tuple[str, ...]:
    """Returns the columns of a part of an `ir_datasets` set.

    Raises:
      InputError: the library is missing, or there is no such set or part.
    """
    source, kind = _ir_datasets_part(table, part)
    return getattr(source, f"{kind}_cls")()._fields


def _ir_datasets_part(table: str, part: str) -> tuple[Any, str]:
    """Returns a set of `ir_datasets`, and what that calls the part."""
    datasets = library("ir_datasets", "ir_datasets")
    name = table[len(IR_DATASETS) :]
    try:
        source = datasets.load(name)
    except KeyError as error:
        raise InputError(
            f"ir_datasets has no data set {name!r}. `ir_datasets list` lists them."
        ) from error
    kind = {PAIRS: "qrels", QUERIES: "queries", CORPUS: "docs"}[part]
    if not getattr(source, f"has_{kind}")():
        raise InputError(
            f"{table} has no {kind}. Name the part of the set that has, such as "
            f"{table}/train."
        )
    return source, kind


def _of_ir_datasets(
    table: str, columns: Sequence[str], part: str
) -> Iterator[tuple[str, int, list[Any]]]:
    source, kind = _ir_datasets_part(table, part)
    _require(table, columns, fields_of(table, part))
    try:
        for number, row in enumerate(getattr(source, f"{kind}_iter")(), 1):
            yield table, number, [getattr(row, column) for column in columns]
    except OSError as error:  # requests' errors, too
        raise InputError(
            f"ir_datasets could not get {table[len(IR_DATASETS) :]}: "
            f"{str(error)[:200]}. Where there is no network, put its files where "
            "IR_DATASETS_HOME points to."
        ) from error


def _of_tfds(table: str, columns: Sequence[str]) -> Iterator[tuple[str, int, list]]:
    builder = _tfds_builder(table)
    split = table.partition("#")[2]
    there = sorted(builder.info.splits)
    if not split and len(there) != 1:
        raise InputError(
            f"{table} has the splits {', '.join(there)}. Name one, such as "
            f"{table}#{there[-1] if there else 'train'}."
        )
    features = builder.info.features
    _require(table, columns, list(features))
    for column in columns:
        if features[column].shape != ():
            raise InputError(
                f"column {column!r} of {table} is {features[column]}, several values a "
                "row. Name a column of one text or number, or write the set as Parquet."
            )
    import tensorflow_datasets as tfds

    try:
        rows = builder.as_dataset(
            split=split or there[0],
            decoders=tfds.decode.PartialDecoding(dict.fromkeys(columns, True)),
            # In the order of the files, whatever the number of cores.
            read_config=tfds.ReadConfig(interleave_cycle_length=1),
        )
    except ValueError as error:
        raise InputError(
            f"{table}: {str(error)[:200]} Its splits are {', '.join(there)}."
        ) from error
    try:
        for number, row in enumerate(rows.as_numpy_iterator(), 1):
            values = (row[column] for column in columns)
            yield table, number, [_plain(table, number, value) for value in values]
    except tf.errors.OpError as error:
        first = str(error.message).partition("\n")[0]
        first = first.partition(", value:")[0]  # of a row, which follows as it is
        raise DataError(
            table, f"it cannot be read: {first[:200]}", "Prepare it again"
        ) from error


def _plain(table: str, number: int, value: Any) -> Any:
    """Returns a scalar of NumPy as text or number."""
    if not isinstance(value, bytes):
        return value.item()
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            table,
            f"byte {error.start + 1} of a text is not UTF-8",
            "Prepare the set with texts in UTF-8",
            number,
        ) from error


def _tfds_builder(table: str) -> Any:
    """Returns a data set that was prepared before; nothing is downloaded."""
    tfds = library("tensorflow_datasets", "tensorflow-datasets")
    name = table[len(TFDS) :].partition("#")[0]
    if any_files.exists(os.path.join(name, "dataset_info.json")):
        return tfds.builder_from_directory(name)
    folder = os.environ.get("TFDS_DATA_DIR") or tfds.core.constants.DATA_DIR
    folder = os.path.expanduser(folder)
    try:
        module = importlib.import_module("tensorflow_datasets.core.read_only_builder")
        return module.builder_from_files(name, data_dir=folder)
    except (ValueError, OSError) as error:
        raise InputError(
            f"{TFDS}{name} is not prepared in {folder}, and nothing is downloaded here."
            ' Where there is a network, run: python -c "import tensorflow_datasets as '
            f"tfds; tfds.builder('{name}', data_dir='{folder}').download_and_prepare()"
            '"; or set TFDS_DATA_DIR to the folder that has it, and name its config if '
            f"it has one ({TFDS}NAME/CONFIG)."
        ) from error


def library(module: str, package: str = "pyarrow") -> Any:
    """Returns a module of a package that only some tables need.

    Raises:
      InputError: the package is not installed.
    """
    return validation.library(
        module,
        f"{package} is needed for this table. Run: pip install "
        f"'tfdpsq[import]', or pip install {package}.",
    )


_READERS: dict[str, Callable] = {
    ".parquet": _of_parquet,
    ".arrow": _of_arrow,
    ".tsv": _of_text,
    ".csv": _of_text,
    ".jsonl": _of_jsonl,
}
