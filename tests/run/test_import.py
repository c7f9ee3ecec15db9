"""Logs in every format, imported by the command, read back as a BEIR directory."""

import collections
import gzip
import json
import re
import shutil
import stat

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from helpers.import_logs import NAMES, ROWS, command, config_of, dicts

from tfdpsq.data import BeirDirectory, importing, sets, tables, texts
from tfdpsq.run.core import releases
from tfdpsq.validation import DataError, InputError


def _write_text(path, separator, quote):
    def cell(text):
        return '"' + text.replace('"', '""') + '"' if quote else text.replace("\n", " ")

    lines = [separator.join(NAMES), *(separator.join(map(cell, row)) for row in ROWS)]
    # A byte order mark, as spreadsheets write it.
    path.write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode())


def _write_log(folder, kind):
    path = folder / f"log.{kind}"
    table = pyarrow.Table.from_pylist(dicts())
    if kind == "csv":
        _write_text(path, ",", quote=True)
    elif kind == "tsv":
        _write_text(path, "\t", quote=False)
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in dicts()))
    elif kind == "jsonl.gz":
        text = "".join(json.dumps(row) + "\n" for row in dicts())
        path.write_bytes(gzip.compress(text.encode()))
    elif kind == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=2)
    else:  # a directory of Parquet files
        path.mkdir()
        for part in range(2):
            rows = table.slice(part * 3, 3)
            pyarrow.parquet.write_table(rows, path / f"{part}.parquet")
    return path


@pytest.mark.parametrize(
    "kind", ["csv", "tsv", "jsonl", "jsonl.gz", "parquet", "parts"]
)
def test_every_format_gives_the_same_pairs(kind, tmp_path):
    log, out = _write_log(tmp_path, kind), tmp_path / "private" / "pairs"
    config = config_of(log, columns__user="who", dev_share=0.0, test_share=0.0)
    result = command.run(config, out)["result"]
    # Six rows: one repeats another, one has no query.
    assert result["rows"] == 6 and result["pairs"] == {"train": 4}
    assert [*result["dropped"].values()] == [1, 1]
    beir = BeirDirectory(out)
    beir.validate(("train",))
    users = beir.users(field=importing.USER_FIELD)
    found = collections.Counter(
        (pair.query, pair.document.replace("\n", " "), users[pair.query_id])
        for pair in beir.all_pairs("train")
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
        *("corpus.jsonl", "queries.jsonl", "qrels", "stage.json")
    }
    assert all(not stat.S_IMODE(p.stat().st_mode) & 0o077 for p in out.rglob("*"))


def _units(out):
    """All that was written, by user: what DP calls a unit's contribution."""
    beir = BeirDirectory(out)
    users = beir.users(field=importing.USER_FIELD)
    found = {}
    for split in beir.splits():
        for pair in beir.all_pairs(split):
            row = (split, pair.query_id, pair.document_id, pair.query, pair.document)
            found.setdefault(users[pair.query_id], set()).add(row)
    return found


# As in MS MARCO, an id can name a text, in the log or in a table of queries.
@pytest.mark.parametrize(
    ("split_by", "ids"),
    [("query", "in a table"), ("user", "none"), ("query", "of texts")],
)
def test_a_user_more_changes_no_other_users_rows(split_by, ids, tmp_path):
    changes = {"columns__user": "who", "split_by": split_by}
    if ids != "none":
        changes.update(columns__query_id="text_id")
    changes.update(dev_share=0.3, test_share=0.3)
    words = [(f"query {i % 7}", f"text {i % 5}", f"user{i % 6}") for i in range(60)]
    rows = [(*row, f"2026-0{1 + i % 6}-01") for i, row in enumerate(words)] + ROWS

    texts = sorted({row[0] for row in rows})
    if ids == "in a table":
        table = [{"text_id": str(i), "text": text} for i, text in enumerate(texts)]
        table = [row for row in table if row["text"].strip()]
        path = tmp_path / "texts.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in table))
        changes.update(queries__path=str(path), queries__columns__query="text")
        changes.update(queries__columns__query_id="text_id", columns__query="")

    def imported(name, rows):
        log = tmp_path / f"{name}.jsonl"
        lines = [
            {**row, "text_id": str(texts.index(row["asked"]))} for row in dicts(rows)
        ]
        log.write_text("".join(json.dumps(row) + "\n" for row in lines))
        command.run(config_of(log, **changes), tmp_path / name)
        return _units(tmp_path / name)

    everybody = imported("all", rows)
    assert len({row[0] for rows in everybody.values() for row in rows}) == 3
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
    config = command.default_config()
    config.header = False
    config.logs.train = f"{tmp_path}/qrels.train.tsv"
    config.logs.dev = f"{tmp_path}/qrels.dev.tsv"
    config.columns.update(query="", document="", query_id="0", document_id="2")
    config.columns.score = "3"
    config.queries.path = f"{tmp_path}/queries.*.tsv"
    config.queries.columns.update(query_id="0", query="1")
    config.corpus.path = f"{tmp_path}/collection.tsv"
    config.corpus.columns.update(document_id="0", document="1")
    result = command.run(config, tmp_path / "out")["result"]
    assert [*result["dropped"].values()] == [1]
    beir = BeirDirectory(tmp_path / "out")
    assert [d.content for d in beir.documents()] == ['A "cup of tea.', "Rain.", "Snow."]
    assert beir.qrels("train") == {"7": {"0": 1}, "8": {"1": 1}}
    assert beir.qrels("dev") == {"9": {"2": 1}}
    assert command.run(config, tmp_path / "out")["result"] == result  # not made again


def _prepare_tfds(folder):
    """Writes a TensorFlow data set of `ROWS`, cut into train and test, and lists."""
    text = tfds.features.Text()
    features = {name: text for name in NAMES}
    features["who"] = tfds.features.Scalar(np.int64)
    users = {"ann": 7, "bob": 8, "cat": 9}

    def split(rows):
        rows = [dict(row, who=users[row["who"]]) for row in dicts(rows)]
        columns = {name: [row[name] for row in rows] for name in NAMES}
        return tf.data.Dataset.from_tensor_slices(columns)

    tfds.dataset_builders.store_as_tfds_dataset(
        "my_log",
        version="1.0.0",
        features=tfds.features.FeaturesDict(features),
        split_datasets={"train": split(ROWS[:5]), "test": split(ROWS[5:])},
        data_dir=folder,
    )


def test_a_prepared_tfds_set_is_a_log(tmp_path, monkeypatch):
    _prepare_tfds(tmp_path / "sets")
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "sets"))
    config = config_of("tfds:my_log#train", columns__user="who")
    config.logs.test = f"tfds:{tmp_path}/sets/my_log/1.0.0#test"  # by its place
    result = command.run(config, tmp_path / "pairs")["result"]
    assert result["rows"] == 6 and result["pairs"] == {"train": 3, "test": 1}
    beir = BeirDirectory(tmp_path / "pairs")
    users = beir.users(field=importing.USER_FIELD)
    found = {
        (split, p.query, p.document, users[p.query_id])
        for split in ("train", "test")
        for p in beir.all_pairs(split)
    }
    names = {"ann": "7", "bob": "8", "cat": "9"}
    rows = [("train", row) for row in ROWS[:4]] + [("test", ROWS[5])]
    assert found == {(split, q, d, names[u]) for split, (q, d, u, _) in rows}


def test_private_pairs_are_refused_where_things_are_released(tmp_path):
    log = _write_log(tmp_path, "jsonl")
    with pytest.raises(InputError, match="release"):
        command.run(config_of(log), tmp_path / "release" / "pairs")
    assert not (tmp_path / "release").exists() and not (tmp_path / "private").exists()


def _write_set(folder, guarantee):
    """The BEIR files of a set as `synthesize` and `prepare` lay them out."""
    beir = folder / "beir"
    (beir / "qrels").mkdir(parents=True)
    manifest = {"schema": sets.SCHEMA, "guarantee": guarantee}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (beir / sets.PART_FILE).write_text("{}")
    (beir / "corpus.jsonl").write_text('{"_id": "d", "title": "", "text": "wool"}\n')
    (beir / "queries.jsonl").write_text('{"_id": "q", "text": "a sock"}\n')
    (beir / "qrels" / "train.tsv").write_text("q\td\t1\n")
    return beir


def _config_of_beir(beir):
    config = config_of(beir / "qrels" / "train.tsv", header=False, dev_share=0.0)
    config.columns.update(query="", document="", query_id="0", document_id="1")
    config.queries.path = str(beir / "queries.jsonl")
    config.queries.columns.update(query_id="_id", query="text")
    config.corpus.path = str(beir / "corpus.jsonl")
    config.corpus.columns.update(document_id="_id", document="text")
    config.update(log_documents_are_public=False, test_share=0.0)
    return config


def test_rows_may_come_in_any_order(tmp_path, caplog):
    units = {}
    for name, order in {"in": 1, "out": -1}.items():
        log = tmp_path / f"{name}.jsonl"
        log.write_text("".join(json.dumps(row) + "\n" for row in dicts()[::order]))
        command.run(config_of(log, columns__user="who"), tmp_path / name)
        units[name] = _units(tmp_path / name)
    assert units["in"] == units["out"] and units["in"].keys() == {"ann", "bob", "cat"}
    for place in (r"in.jsonl:3\)", r"in.jsonl:5\)"):  # there before; no query
        assert re.search(place, caplog.text), place


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"columns__query": "question"}, "no column 'question'"),
        ({"logs__train": "@/latin.csv"}, r"latin.csv:3: byte 2 .* 0xe9"),
        ({"logs__train": "@/ragged.tsv"}, "ragged.tsv:2: 3 columns"),
        ({"logs__train": "@/open.csv"}, "open.csv:2: malformed"),
        ({"logs__train": "@/twice.csv", "columns__user": "who"}, "two columns 'who'"),
        ({"logs__train": "@/bad.jsonl"}, "bad.jsonl:2: not JSON"),
        ({"logs__train": "@/cut.parquet"}, "cut.parquet: "),
        ({"log_documents_are_public": False}, "which tell what people looked for"),
        ({"dev_share": 0.6, "test_share": 0.5}, "nothing is left for training"),
        ({"columns__score": "who"}, "log.jsonl:1: score"),
        ({"columns__document_id": "who"}, "log.jsonl:4: document_id 'bob'"),
        ({"logs__train": "tfds:my_log"}, "one of its splits, .* test, train"),
        ({"logs__train": "tfds:my_log#dev"}, "one of its splits, .* test, train"),
        ({"logs__train": "tfds:mnist#train"}, "mnist#train: not prepared"),
    ],
)
def test_bad_input_is_refused_with_its_place(changes, message, tmp_path, monkeypatch):
    log = _write_log(tmp_path, "jsonl")
    latin = "asked,clicked\nn\u00e9,b\n".encode() + "n\u00e9,b\n".encode("latin-1")
    (tmp_path / "latin.csv").write_bytes(latin)
    (tmp_path / "ragged.tsv").write_text("asked\tclicked\na\tb\tc\n")
    (tmp_path / "open.csv").write_text('asked,clicked\n"a,b\n')
    (tmp_path / "twice.csv").write_text("asked,clicked,who,who\nq,d,ann,bob\n")
    (tmp_path / "bad.jsonl").write_text('{"asked": "a", "clicked": "b"}\n{"asked"\n')
    whole = _write_log(tmp_path, "parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    if "tfds" in changes.get("logs__train", ""):
        _prepare_tfds(tmp_path / "sets")
        monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "sets"))
    changes = {
        key: value.replace("@", str(tmp_path)) if isinstance(value, str) else value
        for key, value in changes.items()
    }
    with pytest.raises(InputError, match=message):
        command.run(config_of(log, **changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_synthetic_sets_and_canaries_are_not_imported_as_logs(tmp_path):
    """A synthetic set became raw private pairs, and canaries pairs without a mark."""
    certified = _write_set(tmp_path / "set", "certified")
    shutil.copytree(certified, tmp_path / "copy")  # without the manifest
    canaries = _write_set(tmp_path / "canaries" / "data", "private")
    (canaries / sets.PART_FILE).unlink()
    (canaries.parent / "manifest.json").rename(canaries / releases.MARK_FILE)
    for beir in (certified, tmp_path / "copy", canaries):
        with pytest.raises(InputError, match="give the log as it was collected"):
            command.run(_config_of_beir(beir), tmp_path / "pairs")
    assert not (tmp_path / "pairs").exists()
    # Private queries of a BEIR directory are raw, and so is what was imported of them.
    raw = shutil.copytree(canaries, tmp_path / "raw")
    (raw / releases.MARK_FILE).unlink()
    command.run(_config_of_beir(raw), tmp_path / "pairs")
    command.run(_config_of_beir(tmp_path / "pairs"), tmp_path / "again")
    assert len(list(BeirDirectory(tmp_path / "again").all_pairs("train"))) == 1


def test_a_column_may_begin_late_in_a_file_of_json_lines(tmp_path):
    """pyarrow drops such a column; an earlier reader said that it is not there."""
    rows = [{"asked": f"q {i}", "clicked": "d", "user": f"u{i}"} for i in range(3)]
    del rows[0]["user"]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_of(log, columns__user="user", dev_share=0.0, test_share=0.0)
    result = command.run(config, tmp_path / "pairs")["result"]
    assert result["pairs"] == {"train": 2}
    assert result["dropped"] == {"it has no user": 1}
    config = config_of(log, columns__user="usr", dev_share=0.0, test_share=0.0)
    with pytest.raises(InputError, match="no column 'usr'; it has 'asked', 'clicked'"):
        command.run(config, tmp_path / "others")


def test_csv_as_spark_escapes_it(tmp_path):
    """Backslashes before quotes refused the whole set."""
    log = tmp_path / "log.csv"
    log.write_text(
        'asked,clicked\n"say \\"hi\\" loudly","see \\"C:\\dir\\""\nplain,text\n'
    )
    table = tables.Table(str(log), {"query": "asked", "document": "clicked"})
    assert [[*row.values()] for _, _, row in table.rows()] == [
        ['say "hi" loudly', 'see "C:\\dir"'],
        ["plain", "text"],
    ]


def test_scores_as_floats_and_hexadecimal_users(tmp_path):
    log = tmp_path / "log.csv"
    log.write_text("asked,clicked,who,score\na,b,49018e16,1.0\na,b,007,2\n")
    config = config_of(log, columns__user="who", dev_share=0.0, test_share=0.0)
    config.columns.score = "score"
    command.run(config, tmp_path / "pairs")
    found = BeirDirectory(tmp_path / "pairs")
    assert sorted(found.users().values()) == ["007", "49018e16"]
    scores = [list(each.values()) for each in found.qrels("train").values()]
    assert sorted(scores) == [[1], [2]]


# -- No error repeats anything of a row ------------------------------------------


def test_the_first_row_of_a_log_without_header_is_not_repeated(tmp_path):
    """All of it was, a private query and a document of any length, as column names."""
    log = tmp_path / "log.csv"
    log.write_text(f"is my rash contagious,{'Rashes itch. ' * 900}\n" * 2)
    with pytest.raises(InputError, match="no column 'clicked'; .*header") as error:
        command.run(config_of(log), tmp_path / "out")
    assert "rash" not in str(error.value).lower() and len(str(error.value)) < 500


def test_a_query_under_the_name_of_an_id_is_not_repeated(tmp_path):
    queries, log = tmp_path / "queries.csv", tmp_path / "log.csv"
    queries.write_text("query_id,query\nis my rash contagious,7\n")
    log.write_text("query_id,clicked\nis my rash contagious,Rashes itch.\n")
    changes = {"columns__query": "", "columns__query_id": "query_id"}
    with pytest.raises(InputError, match="query_id is empty or holds white") as error:
        command.run(
            config_of(log, queries__path=str(queries), **changes), tmp_path / "out"
        )
    assert "rash" not in str(error.value)


def test_a_damaged_row_of_tfds_is_not_repeated(tmp_path, monkeypatch):
    """TensorFlow's message has the row as it is."""
    _prepare_tfds(tmp_path / "sets")
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "sets"))
    for path in (tmp_path / "sets").rglob("*-test.tfrecord*"):
        with tf.io.TFRecordWriter(str(path)) as writer:
            writer.write(b"is my rash contagious")
    with pytest.raises(InputError, match="my_log#test") as error:
        command.run(config_of("tfds:my_log#test"), tmp_path / "out")
    assert "rash" not in str(error.value)


def test_a_value_that_is_no_text_is_named_by_its_row(tmp_path):
    """Parquet does not check texts; it was a traceback."""
    ends = b"\0\0\0\0\1\0\0\0\2\0\0\0"
    buffers = [None, pyarrow.py_buffer(ends), pyarrow.py_buffer(b"a\xff")]
    asked = pyarrow.Array.from_buffers(pyarrow.string(), 2, buffers)
    table = pyarrow.table({"asked": asked, "clicked": ["c", "d"]})
    pyarrow.parquet.write_table(table, tmp_path / "log.parquet")
    with pytest.raises(InputError, match="log.parquet: a value of rows 1 to 2 cannot"):
        command.run(config_of(tmp_path / "log.parquet"), tmp_path / "out")


def test_several_values_are_not_one_text(tmp_path):
    """A column of lists became queries such as "['my rash']"."""
    columns = {"asked": [["my rash"], []], "clicked": ["c", "d"]}
    log = tmp_path / "log.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), log)
    with pytest.raises(InputError, match="log.parquet:1: .*'asked'") as error:
        command.run(config_of(log), tmp_path / "out")
    assert "rash" not in str(error.value)


# -- A person, query or document has one id, however it is spelled ---------------


def _imported_users(folder, *files):
    """Imports a row for each user of each file; returns the users and the result."""
    folder.mkdir()
    for name, users in enumerate(files):
        row = {"asked": ["a"] * len(users), "clicked": ["b"] * len(users), "who": users}
        pyarrow.parquet.write_table(pyarrow.table(row), folder / f"{name}.parquet")
    config = config_of(folder, columns__user="who", dev_share=0.0, test_share=0.0)
    result = command.run(config, folder / "pairs")["result"]
    users = BeirDirectory(folder / "pairs").users(field=importing.USER_FIELD)
    return sorted(users.values()), result


def test_a_person_is_one_user_in_whatever_type_the_id_is(tmp_path):
    """Two users of one person would each have the whole epsilon."""
    # As pandas writes them: 64-bit integers, floats where one is missing, and texts.
    texts = [" 7", "7.0", "7.00", "7.", "+7", "8 ", "7.5", "007", "007.0", "-0", "0.0"]
    files = ([7, 8], [7.0, float("nan"), None], texts)
    users, result = _imported_users(tmp_path / "numbers", *files)
    assert users == ["0", "007", "7", "7.5", "8"]
    assert sorted(result["dropped"].values()) == [2, 9]  # no user; there before
    objects = ([1.5], [2.0**53, float("inf")], [True], [{"id": 7}], [[7]])
    users, result = _imported_users(tmp_path / "objects", ["ann"], *objects)
    assert users == ["ann"]
    assert sum(result["dropped"].values()) == 6


def test_a_large_number_that_lost_digits_is_no_id(tmp_path):
    """One person was two, as pandas wrote the second file: a user was missing in it."""
    whole, folder = 1234567890123456789, tmp_path / "logs"
    folder.mkdir()
    for name, ids in {"jan": [whole, 42], "feb": [whole, None, 42]}.items():
        row = {"asked": ["a"] * len(ids), "clicked": ["b"] * len(ids), "who": ids}
        pandas.DataFrame(row).to_csv(folder / f"{name}.csv", index=False)
    assert "1.2345678901234568e+18" in (folder / "feb.csv").read_text()
    config = config_of(folder, columns__user="who", dev_share=0.0, test_share=0.0)
    command.run(config, folder / "pairs")
    users = BeirDirectory(folder / "pairs").users(field=importing.USER_FIELD)
    assert sorted(users.values()) == [str(whole), "42"]


@pytest.mark.parametrize(
    ("text", "of_query", "of_user"),
    [
        ("9007199254740993", "=", "="),
        ("9007199254740991.0", "9007199254740991", "9007199254740991"),
        ("9007199254740992.0", None, None),
        ("1.23457E+11", None, None),
        ("1.23456789E9", None, None),  # as Spark writes 1234567890
        ("49018e16", "=", "="),  # hexadecimal digits: no number is written so
        ("3e8", "=", "="),
        ("1.2.3", "=", "="),
        ("+49", "49", "49"),
        ("-0.0", "0", "0"),
        ("\uff17", "=", "="),
        (" \u00a07 ", "=", "7"),
        ("e\u0301", "=", "\u00e9"),
        ("nan", "=", ""),
        (b"\x81", None, None),  # of two users, it was one
        ("9" * 5000, "=", "="),
        ("9" * 5000 + ".0", None, None),
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


def test_an_id_that_is_no_text_drops_its_row(tmp_path):
    half = json.loads('"\\ud800"')
    rows = [dict(row, id="x") for row in dicts()[:3]]
    rows[0]["who"] = rows[1]["id"] = half
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_of(log, columns__user="who", dev_share=0.0, test_share=0.0)
    config.columns.document_id = "id"
    result = command.run(config, tmp_path / "pairs")["result"]
    assert result["pairs"] == {"train": 1}
    assert [*result["dropped"].values()] == [1, 1]


def test_spellings_of_a_user_are_one_person_in_a_beir_directory(tmp_path):
    """Two units would each have the whole of ε."""

    def users(*given):
        rows = [
            {"_id": f"q{i}", "text": "x", "metadata": {"user_id": user}}
            for i, user in enumerate(given)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "set" / "beir" / "queries.jsonl").write_text(text)
        judged = "".join(f"q{i}\td\t1\n" for i in range(len(given)))
        head = "query-id\tcorpus-id\tscore\n"
        (tmp_path / "set" / "beir" / "qrels" / "train.tsv").write_text(head + judged)
        return BeirDirectory(tmp_path / "set" / "beir").users()

    _write_set(tmp_path / "set", "public")
    for spellings in (("7", " 7"), (7, "7.0"), ("\u00e9", "e\u0301")):
        found = users(*spellings, "anna")
        assert found["q0"] == found["q1"] != found["q2"]
    with pytest.raises(DataError, match="queries.jsonl:1: .*digits"):
        users("1.5e+18")
