"""Errors of `import` name a row and repeat nothing of it: it may be a private query."""

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from helpers.import_logs import command, config_of

from tfdpsq.validation import InputError


@pytest.mark.parametrize("end", ["csv", "tsv"])
def test_the_first_row_of_a_log_without_header_is_not_repeated(end, tmp_path):
    """All of it was, a private query and a document of any length, as column names."""
    log = tmp_path / f"log.{end}"
    separator = {"csv": ",", "tsv": "\t"}[end]
    log.write_text(f"is my rash contagious{separator}{'Rashes itch. ' * 900}\n" * 2)
    with pytest.raises(
        InputError, match="no column 'clicked' among the 2 .* header"
    ) as e:
        command.run(config_of(log), tmp_path / "out")
    assert "rash" not in str(e.value).lower() and len(str(e.value)) < 500


def test_a_query_under_the_name_of_an_id_is_not_repeated(tmp_path):
    queries, log = tmp_path / "queries.csv", tmp_path / "log.csv"
    queries.write_text("query_id,query\nis my rash contagious,7\n")
    log.write_text("query_id,clicked\nis my rash contagious,Rashes itch.\n")
    changes = {"columns__query": "", "columns__query_id": "query_id"}
    with pytest.raises(InputError, match="query_id holds white space") as error:
        command.run(
            config_of(log, queries__path=str(queries), **changes), tmp_path / "out"
        )
    assert "rash" not in str(error.value)


def _arrow_of(kind):
    """Returns two values, the second of which Python cannot hold."""
    if kind == "text":
        ends = b"\0\0\0\0\1\0\0\0\2\0\0\0"
        buffers = [None, pyarrow.py_buffer(ends), pyarrow.py_buffer(b"a\xff")]
        return pyarrow.Array.from_buffers(pyarrow.string(), 2, buffers)
    if kind == "binary":
        return pyarrow.array([b"a", "caf\xe9".encode("latin-1")], pyarrow.binary())
    if kind == "zone":
        return pyarrow.array([None, 1], pyarrow.timestamp("us", tz="Mars/Base"))
    return pyarrow.array([0, 2**30], pyarrow.date32())


@pytest.mark.parametrize(
    ("kind", "column", "said"),
    [
        ("text", "asked", "'asked' is not text in UTF-8"),
        ("binary", "asked", "'asked' is not text in UTF-8"),
        ("binary", "clicked", "'clicked' is not text in UTF-8"),
        (
            "zone",
            "when",
            r"'when' is no timestamp\[us, tz=Mars/Base\] that can be read",
        ),
        ("day", "when", r"'when' is no date32\[day\] that can be read"),
    ],
)
def test_a_value_that_python_cannot_hold_is_named_by_its_row(
    kind, column, said, tmp_path
):
    """Arrow checks neither texts nor times; each of these was a traceback."""
    columns = {"asked": ["a", "b"], "clicked": ["c", "d"], column: _arrow_of(kind)}
    table = pyarrow.table(columns)
    log = tmp_path / "log.arrow"
    with pyarrow.ipc.new_stream(str(log), table.schema) as writer:
        writer.write_table(table)
    changes = {"split_by": "time", "columns__time": "when", "test_from": "2026"}
    config = config_of(log, **({} if kind in ("text", "binary") else changes))
    with pytest.raises(InputError, match=f"log.arrow:2: the value of column {said}"):
        command.run(config, tmp_path / "out")


@pytest.mark.parametrize("column", ["asked", "clicked"])
def test_several_values_are_not_one_text(column, tmp_path):
    """A column of lists became queries such as "['my rash']"."""
    columns = {"asked": ["a", "b"], "clicked": ["c", "d"]}
    columns[column] = [["my rash"], []]
    log = tmp_path / "log.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), log)
    with pytest.raises(
        InputError, match=f"log.parquet:1: .* '{column}'. holds several values"
    ) as error:
        command.run(config_of(log), tmp_path / "out")
    assert "rash" not in str(error.value)


def test_a_blank_first_line_does_not_hide_a_missing_column(tmp_path):
    """They were compared with line 1 alone, and the column was read as empty."""
    log = tmp_path / "log.jsonl"
    log.write_text('\n{"question": "a", "clicked": "b"}\n')
    with pytest.raises(InputError, match="log.jsonl has no column 'asked'; it has 'qu"):
        command.run(config_of(log), tmp_path / "out")
