"""Logs in every format, imported by the stage, read back as a BEIR directory."""

import collections
import datetime
import gzip
import importlib
import json
import re
import shutil
import stat
import sys
import types

import pyarrow
import pyarrow.parquet
import pytest
from helpers import framed, tiny

from tfdpsq.data import BeirDirectory, importing, texts
from tfdpsq.run.frame import records
from tfdpsq.run.frame.artefacts import MARK_FILE
from tfdpsq.run.frame.places import Place
from tfdpsq.validation import InputError

STAGE = importlib.import_module("tfdpsq.run.stages.import").STAGE

# The third row repeats the first; the fourth is another user's, with the same text.
ROWS = [
    ("how to knit a sock", "Socks are knitted in the round.", "ann", "2026-01-05"),
    ("boil an egg", "Eggs take six minutes.\nSeven, if cold.", "bob", "2026-02-01"),
    ("how to knit a sock", "Socks are knitted in the round.", "ann", "2026-03-01"),
    ("how to knit a sock", 'Wool "of sheep", spun.', "bob", "2026-04-01"),
    ("  ", "Eggs take six minutes.", "cat", "2026-01-01"),
    ("grüne Erbsen", "Peas are green.", "cat", "2026-05-01"),
]
NAMES = ("asked", "clicked", "who", "when")
TRAIN_ALONE = {"dev_share": 0.0, "test_share": 0.0}


def dicts(rows=ROWS):
    """Returns the log's rows by column."""
    return [dict(zip(NAMES, row)) for row in rows]


def run(out, log, **changes):
    """Imports a log, with `__` for dots in `changes`; returns its counts."""
    settings = {}
    usual = {"columns__query": "asked", "columns__document": "clicked"}
    usual |= {"logs__train": str(log), "log_documents_are_public": True}
    for name, value in {**usual, **changes}.items():
        *path, last = name.split("__")
        node = settings
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    framed.run(STAGE, out, **settings)
    return records.read_private(Place.of(out))["counts"]


def _write_text(path, separator, quote):
    def cell(text):
        return '"' + text.replace('"', '""') + '"' if quote else text.replace("\n", " ")

    lines = [separator.join(NAMES), *(separator.join(map(cell, row)) for row in ROWS)]
    # A byte order mark, as spreadsheets write it.
    path.write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode())


def _write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _write_log(folder, kind):
    path = folder / f"log.{kind}"
    table = pyarrow.Table.from_pylist(dicts())
    if kind in ("csv", "tsv"):
        _write_text(path, "," if kind == "csv" else "\t", quote=kind == "csv")
    elif kind == "jsonl":
        _write_lines(path, dicts())
    elif kind == "jsonl.gz":
        text = _write_lines(folder / "lines", dicts()).read_bytes()
        path.write_bytes(gzip.compress(text))
    elif kind == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=2)
    else:  # a directory of Parquet files
        path.mkdir()
        for part in range(2):
            rows = table.slice(part * 3, 3)
            pyarrow.parquet.write_table(rows, path / f"{part}.parquet")
    return path


def _users(out):
    return BeirDirectory(out).users(field=importing.USER_FIELD)


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl.gz", "parquet", "parts"])
def test_every_format_gives_the_same_pairs(kind, tmp_path):
    log, out = _write_log(tmp_path, kind), tmp_path / "private" / "pairs"
    result = run(out, log, columns__user="who", **TRAIN_ALONE)
    # Six rows: one repeats another, one has no query.
    assert result["rows"] == 6 and result["pairs"] == {"train": 4}
    assert [*result["dropped"].values()] == [1, 1]
    users = _users(out)
    found = collections.Counter(
        (pair.query, pair.document.replace("\n", " "), users[pair.query_id])
        for pair in BeirDirectory(out).all_pairs("train")
    )
    wanted = {
        (query, document.replace("\n", " "), user)
        for query, document, user, _ in ROWS
        if query.strip()
    }
    assert found == collections.Counter(wanted)
    # 96 bits: a shared id would drop one user's row because of another's.
    assert all(re.fullmatch("q[0-9a-f]{24,}", each) for each in users)
    # Of the owner alone, the database gone.
    assert {p.name for p in out.iterdir()} == {
        *("corpus.jsonl", "queries.jsonl", "qrels", "stage.json", "dropped.tsv")
    }
    assert all(not stat.S_IMODE(p.stat().st_mode) & 0o077 for p in out.rglob("*"))


def _units(out):
    """All that was written, by user: what DP calls a unit's contribution."""
    beir, users, found = BeirDirectory(out), _users(out), {}
    for split in beir.splits():
        for pair in beir.all_pairs(split):
            row = (split, pair.query_id, pair.document_id, pair.query, pair.document)
            found.setdefault(users[pair.query_id], set()).add(row)
    return found


# As in MS MARCO, an id can name a text, in the log or in a table of queries.
@pytest.mark.parametrize(("split_by", "ids"), [("query", True), ("user", False)])
def test_a_user_more_changes_no_other_users_rows(split_by, ids, tmp_path):
    changes = {"columns__user": "who", "split_by": split_by}
    changes.update(dev_share=0.3, test_share=0.3)
    words = [(f"query {i % 7}", f"text {i % 5}", f"user{i % 6}") for i in range(60)]
    rows = [(*row, "") for row in words] + ROWS
    texts = sorted({row[0] for row in rows})
    if ids:
        table = [{"text_id": str(i), "text": text} for i, text in enumerate(texts)]
        table = [row for row in table if row["text"].strip()]
        path = _write_lines(tmp_path / "texts.jsonl", table)
        changes.update(queries__path=str(path), queries__query="text")
        changes.update(queries__query_id="text_id", columns__query="")
        changes.update(columns__query_id="text_id")

    def imported(name, rows):
        lines = [
            {**row, "text_id": str(texts.index(row["asked"]))} for row in dicts(rows)
        ]
        out = tmp_path / "private" / name
        run(out, _write_lines(tmp_path / f"{name}.jsonl", lines), **changes)
        return _units(out)

    everybody = imported("all", rows)
    assert len({row[0] for rows in everybody.values() for row in rows}) == 3
    assert imported("reversed", rows[::-1]) == everybody
    for user in ("ann", "user3"):
        others = imported(f"without-{user}", [row for row in rows if row[2] != user])
        assert others == {key: v for key, v in everybody.items() if key != user}
    if split_by == "user":
        assert all(len({row[0] for row in rows}) == 1 for rows in everybody.values())


def test_tables_that_refer_to_each_other_by_id_as_ms_marco(tmp_path):
    (tmp_path / "collection.tsv").write_text('0\tA "cup of tea.\n1\tRain.\n2\tSnow.\n')
    (tmp_path / "queries.train.tsv").write_text("7\twhat is tea\n8\twhat falls\n")
    (tmp_path / "queries.dev.tsv").write_text("9\tis it cold\n")
    (tmp_path / "qrels.train.tsv").write_text("7\t0\t0\t1\n8\t0\t1\t1\n8\t0\t5\t1\n")
    (tmp_path / "qrels.dev.tsv").write_text("9\t0\t2\t1\n")
    out, columns = tmp_path / "private" / "out", {"query": "", "document": ""}
    changes = {
        "header": False,
        "logs__dev": f"{tmp_path}/qrels.dev.tsv",
        "columns": {**columns, "query_id": "0", "document_id": "2", "score": "3"},
        "queries": {"path": f"{tmp_path}/queries.*.tsv", "query_id": "0", "query": "1"},
        "corpus__path": f"{tmp_path}/collection.tsv",
        "corpus__document_id": "0",
        "corpus__document": "1",
    }
    result = run(out, f"{tmp_path}/qrels.train.tsv", **changes)
    assert [*result["dropped"].values()] == [1]
    beir = BeirDirectory(out)
    assert [d.content for d in beir.documents()] == ['A "cup of tea.', "Rain.", "Snow."]
    assert beir.qrels("train") == {"7": {"0": 1}, "8": {"1": 1}}
    assert beir.qrels("dev") == {"9": {"2": 1}}
    with pytest.raises(InputError, match="is under release/"):
        run(tmp_path / "release" / "pairs", f"{tmp_path}/qrels.train.tsv", **changes)


def test_synthetic_sets_and_canaries_are_not_imported_as_logs(tmp_path):
    """A synthetic set became raw private pairs, and canaries pairs without a mark."""
    tiny.write_set(tmp_path / "set", [("a sock", "d", "wool")])
    made = [tmp_path / "set" / "beir", tmp_path / "copy", tmp_path / "canaries"]
    shutil.copytree(made[0], made[1])  # without the manifest
    tiny.write_pairs(made[2], train=4, dev=2, test=2)
    raw = shutil.copytree(made[2], tmp_path / "raw")
    (made[2] / MARK_FILE).write_text('{"guarantee": "private"}')

    def imported(beir):
        return run(
            tmp_path / "private" / "pairs",
            beir / "qrels" / "train.tsv",
            columns={
                **{"query": "", "query_id": "query-id"},
                **{"document": "", "document_id": "corpus-id"},
            },
            queries__path=str(beir / "queries.jsonl"),
            queries__query_id="_id",
            queries__query="text",
            corpus__path=str(beir / "corpus.jsonl"),
            corpus__document_id="_id",
            corpus__document="text",
            log_documents_are_public=False,
            **TRAIN_ALONE,
        )

    for beir in made:
        with pytest.raises(InputError, match="Give the log as it was collected"):
            imported(beir)
    assert not (tmp_path / "private" / "pairs").exists()
    assert imported(raw)["pairs"] == {"train": 4}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logs__train": "@/ragged.tsv"}, "ragged.tsv:2: 3 columns"),
        ({"logs__train": "@/bad.jsonl"}, "bad.jsonl:2: not JSON"),
        ({"logs__train": "@/cut.parquet"}, "cut.parquet: "),
        ({"log_documents_are_public": False}, "which tell what people looked for"),
        ({"split_by": "user"}, "columns.user ''. Name it"),
        ({"columns__query": ""}, "rows have a query, or its id"),
        ({"columns__score": "who"}, "log.jsonl:1: score"),
        ({"columns__document_id": "who"}, "log.jsonl:4: document_id 'bob'"),
        ({"logs__train": "tfds:mnist#train"}, "mnist#train: not prepared"),
        # What a row holds is not repeated: a first row as a header, a list as a text.
        ({"logs__train": "@/private.csv"}, "no column 'asked'; .*header"),
        ({"logs__train": "@/lists.parquet"}, "lists.parquet:1: .*'asked'"),
    ],
)
def test_bad_input_is_refused_with_its_place(changes, message, tmp_path):
    log = _write_log(tmp_path, "jsonl")
    (tmp_path / "ragged.tsv").write_text("asked\tclicked\na\tb\tc\n")
    (tmp_path / "bad.jsonl").write_text('{"asked": "a", "clicked": "b"}\n{"asked"\n')
    (tmp_path / "private.csv").write_text("is my rash bad,Rashes itch.\n" * 2)
    table = pyarrow.table({"asked": [["my rash"], []], "clicked": ["c", "d"]})
    pyarrow.parquet.write_table(table, tmp_path / "lists.parquet")
    whole = (tmp_path / "lists.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    changes = {
        key: value.replace("@", str(tmp_path)) if isinstance(value, str) else value
        for key, value in changes.items()
    }
    with pytest.raises(InputError, match=message) as error:
        run(tmp_path / "private" / "out", log, **changes)
    assert "rash" not in str(error.value).lower()
    assert not (tmp_path / "private" / "out").exists()


# -- Times -------------------------------------------------------------------------

_SECONDS = 1769902200  # 2026-01-31 23:30 UTC
_AT = datetime.datetime(2026, 1, 31, 23, 30)


@pytest.mark.parametrize(
    ("value", "day"),
    [
        (_SECONDS, "2026-01-31"),
        *((_SECONDS * 1000**n, "2026-01-31") for n in (1, 2, 3)),
        (1.7699022e12, "2026-01-31"),  # floats of pandas, next to a missing one
        (20260131, "2026-01-31"),
        ("20260131.0", "2026-01-31"),
        (20260131233000, "2026-01-31"),
        (_AT, "2026-01-31"),
        ("2026-01-31T23:30:00+01:00", "2026-01-31"),
        (46053, ""),  # days of a spreadsheet: not 1970
        ("31/01/2026", ""),
        (20261331, ""),
        (float("nan"), ""),
    ],
)
def test_times_are_days_whatever_their_unit(value, day):
    """Milliseconds were the year 58,000, and 20260131 was in 1970, silently."""
    assert texts.day_of(value) == day


def test_a_log_is_cut_at_days(tmp_path):
    """In milliseconds, as pandas' to_json writes them; one row has none."""
    times = [_SECONDS * 1000 + n * 86_400_000 for n in range(4)]
    rows = [dict(zip(NAMES, (f"q {t}", "d", "ann", t))) for t in [*times, None]]
    log, out = _write_lines(tmp_path / "log.jsonl", rows), tmp_path / "private" / "out"
    days = {"split_by": "time", "columns__time": "when", "test_from": "2026-02-02"}
    result = run(out, log, dev_from="2026-02-01", **days)
    assert result["pairs"] == {"dev": 1, "test": 2, "train": 1}
    assert result["dropped"] == {"it has no time that can be read": 1}
    for dev_from in ("2026-02-03", "tomorrow"):
        with pytest.raises(InputError, match="give days as 2026-01-31, in order"):
            run(tmp_path / "private" / "other", log, dev_from=dev_from, **days)


# -- Logs as people have them ------------------------------------------------------


def _asked(out):
    return sorted(pair.query for pair in BeirDirectory(out).all_pairs("train"))


def test_a_key_may_be_missing_in_the_first_rows_and_in_whole_parts(tmp_path):
    """Spark leaves out keys without a value, and writes parts without a row."""
    folder, out = tmp_path / "log", tmp_path / "private" / "out"
    folder.mkdir()
    _write_lines(folder / "0.jsonl", [])
    _write_lines(folder / "1.jsonl", [{"asked": "a", "clicked": "b"}] * 3)
    _write_lines(folder / "2.jsonl", dicts())
    result = run(out, folder, columns__user="who", **TRAIN_ALONE)
    assert result["pairs"] == {"train": 4} and result["dropped"]["it has no user"] == 3
    # All of what is left out, by its place.
    lines = (out / importing.DROPPED_FILE).read_text().splitlines()
    assert len(lines) == 5 and f"{folder}/1.jsonl\t1\tit has no user" in lines
    with pytest.raises(InputError, match="log has no column 'whom'; it has 'asked'"):
        run(tmp_path / "private" / "other", folder, columns__user="whom")


def test_quotes_as_spark_escapes_them_are_an_option_that_the_error_names(tmp_path):
    log, out = tmp_path / "log.csv", tmp_path / "private" / "out"
    # What Spark writes: \\" for a quote, \\\\ before one; line breaks inside quotes.
    cells = (r"6\" nails", "two\nlines, one query", r"C:\dir\new", r"a \"C:\\\" drive")
    rows = "".join(f'"{cell}","found {n}"\n' for n, cell in enumerate(cells))
    log.write_text(f"asked,clicked\n{rows}")
    with pytest.raises(InputError, match=r"log.csv:2: .*set quotes to .*backslash"):
        run(out, log, **TRAIN_ALONE)
    run(out, log, quotes="backslash", **TRAIN_ALONE)
    wanted = ['6" nails', r'a "C:\" drive', "two\nlines, one query", r"C:\dir\new"]
    assert _asked(out) == sorted(wanted)
    # Quotes in TSV are text, unless they are said to be quotes.
    log = tmp_path / "log.tsv"
    log.write_text('asked\tclicked\n"two\nlines"\tfound\n')
    with pytest.raises(InputError, match=r"log.tsv:2: 1 columns.*set quotes to"):
        run(tmp_path / "private" / "tabs", log, **TRAIN_ALONE)
    run(tmp_path / "private" / "tabs", log, quotes="doubled", **TRAIN_ALONE)
    assert _asked(tmp_path / "private" / "tabs") == ["two\nlines"]


def test_flawed_tables_of_queries_and_documents_lose_rows_by_kind(tmp_path):
    """Ids are integers, scores floats, documents twice; judged ones are missing."""
    out = tmp_path / "private" / "out"
    queries = [{"id": 1, "text": "a"}, {"id": 2, "text": None}, {"id": 3, "text": "c"}]
    texts = ["one", "one", "", "two", "two"]
    documents = [{"id": n, "text": text} for n, text in enumerate([*texts, "x"])]
    judged = [(1, 0), (1, 1), (1, 0), (2, 3), (3, 2), (3, 4), (4, 4)]
    rows = [{"q": q, "d": d, "score": "1.0"} for q, d in judged]
    changes = {
        "columns": {"query": "", "query_id": "q", "document": "", "document_id": "d"},
        "queries__path": str(_write_lines(tmp_path / "queries.jsonl", queries)),
        "queries__query_id": "id",
        "queries__query": "text",
        "corpus__document_id": "id",
        "corpus__document": "text",
        "columns__score": "score",
    }
    corpus = _write_lines(tmp_path / "corpus.jsonl", documents + documents[-1:])
    log = _write_lines(tmp_path / "log.jsonl", rows)
    result = run(out, log, corpus__path=str(corpus), **changes, **TRAIN_ALONE)
    assert result["dropped"] == {
        "in the table of document: it has no text": 1,
        "in the table of document: the same row was there before": 1,
        "in the table of query: it has no text": 1,
        "its document_id is not in the corpus": 1,
        "its query_id is not in the table of queries": 2,
        "the same pair was there before": 1,
    }
    assert result["rows"] == 7 and result["pairs"] == {"train": 3}
    # The query "a" has two answers with one text.
    assert result["equal_answers"] == 1
    documents.append({"id": 5, "text": "another"})
    corpus = _write_lines(tmp_path / "corpus.jsonl", documents)
    with pytest.raises(InputError, match="jsonl:7: its document_id had another text"):
        run(tmp_path / "private" / "b", log, corpus__path=str(corpus), **changes)


def test_ir_datasets_without_a_text_are_read_by_their_default_text(
    tmp_path, monkeypatch
):
    """CORD-19 and the topics of TREC have other columns instead."""
    document = collections.namedtuple("Document", "doc_id title abstract")
    document.default_text = lambda row: f"{row.title} {row.abstract}"
    query = collections.namedtuple("Query", "query_id text")
    qrel = collections.namedtuple("Qrel", "query_id doc_id relevance iteration")
    parts = {
        "docs": [document("d1", "Masks", "They help."), document("d2", "", "Rain.")],
        "queries": [query("1", "do masks help")],
        "qrels": [qrel("1", "d1", 2, "0")],
    }
    found = types.SimpleNamespace()
    for kind, rows in parts.items():
        setattr(found, f"has_{kind}", lambda: True)
        setattr(found, f"{kind}_cls", lambda rows=rows: type(rows[0]))
        setattr(found, f"{kind}_iter", lambda rows=rows: iter(rows))
    module = types.SimpleNamespace(load=lambda name: found)
    monkeypatch.setitem(sys.modules, "ir_datasets", module)
    out = tmp_path / "private" / "out"
    framed.run(STAGE, out, logs={"train": "ir_datasets:cord19"}, **TRAIN_ALONE)
    (pair,) = BeirDirectory(out).all_pairs("train")
    assert (pair.query, pair.document) == ("do masks help", "Masks They help.")


# -- A person, query or document has one id, however it is spelled ---------------


def test_a_person_is_one_user_in_whatever_type_the_id_is(tmp_path):
    """Two users of one person would each have the whole epsilon."""
    # As pandas writes them: 64-bit integers, floats where one is missing, and texts.
    numbers = [" 7", "7.0", "7.00", "7.", "+7", "8 ", "7.5", "007", "007.0", "-0", "0."]
    files = ([7, 8], [7.0, float("nan"), None], numbers)
    objects = ([1.5], [2.0**53, float("inf")], [True], [{"id": 7}], [[7]])
    for name, columns in {"numbers": files, "objects": (["ann"], *objects)}.items():
        folder = tmp_path / name
        folder.mkdir()
        for part, users in enumerate(columns):
            asked = {"asked": ["a"] * len(users), "clicked": ["b"] * len(users)}
            table = pyarrow.table({**asked, "who": users})
            pyarrow.parquet.write_table(table, folder / f"{part}.parquet")
        run(tmp_path / "private" / name, folder, columns__user="who", **TRAIN_ALONE)
    found = sorted(_users(tmp_path / "private" / "numbers").values())
    assert found == ["0", "007", "7", "7.5", "8"]
    assert [*_users(tmp_path / "private" / "objects").values()] == ["ann"]


@pytest.mark.parametrize(
    ("text", "of_query", "of_user"),
    [
        ("9007199254740991.0", "9007199254740991", "9007199254740991"),
        ("9007199254740992.0", None, None),
        ("1.23456789E9", None, None),  # as Spark writes 1234567890
        ("49018e16", "=", "="),  # hexadecimal digits: no number is written so
        ("+49", "49", "49"),
        ("-0.0", "0", "0"),
        (" \u00a07 ", "=", "7"),
        ("e\u0301", "=", "\u00e9"),
        ("nan", "=", ""),
        (b"\x81", None, None),  # of two users, it was one
        ("9" * 5000, "=", "="),
    ],
)
def test_spellings_of_a_number(text, of_query, of_user):
    for expected, flag in ((of_query, False), (of_user, True)):
        if expected is None:
            with pytest.raises(ValueError):
                texts.id_of(text, flag)
        else:
            found = texts.id_of(text, flag)
            assert found == (text if expected == "=" else expected)
