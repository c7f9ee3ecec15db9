"""Logs in every format, imported by the command, read back as a BEIR directory."""

import collections
import datetime
import gzip
import json
import re
import shutil
import stat

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from helpers import tiny
from helpers.import_logs import NAMES, ROWS, command, config_of, dicts

from tfdpsq.data import BeirDirectory, importing, records, tables
from tfdpsq.run import overlap, prepare, zero_shot
from tfdpsq.run.core import releases, sources
from tfdpsq.validation import InputError


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
    elif kind == "parts":  # a directory of Parquet files
        path.mkdir()
        for part in range(2):
            rows = table.slice(part * 3, 3)
            pyarrow.parquet.write_table(rows, path / f"{part}.parquet")
    else:  # a Hugging Face data set on disk
        path.mkdir()
        (path / "state.json").write_text("{}")
        with pyarrow.ipc.new_stream(path / "data-00000.arrow", table.schema) as out:
            out.write_table(table)
    return path


@pytest.mark.parametrize(
    "kind", ["csv", "tsv", "jsonl", "jsonl.gz", "parquet", "parts", "hugging_face"]
)
def test_every_format_gives_the_same_pairs(kind, tmp_path):
    log, out = _write_log(tmp_path, kind), tmp_path / "private" / "pairs"
    config = config_of(log, columns__user="who", dev_share=0.0, test_share=0.0)
    result = command.run(config, out)["result"]
    # Six rows: one repeats another, one has no query.
    assert result["rows"] == 6 and result["pairs"] == {"train": 4}
    assert result["dropped"] == {
        "the same pair was there before": 1,
        "it has no query": 1,
    }
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
    # Of the owner alone, the database gone.
    assert {p.name for p in out.iterdir()} == {
        *("corpus.jsonl", "queries.jsonl", "qrels", "stage.json")
    }
    assert all(not stat.S_IMODE(p.stat().st_mode) & 0o077 for p in out.rglob("*"))


def _units(out, by_user):
    """All that was written, by user or query: what DP calls a unit's contribution."""
    beir = BeirDirectory(out)
    users = beir.users(field=importing.USER_FIELD)
    found = {}
    for split in beir.splits():
        for pair in beir.all_pairs(split):
            key = users[pair.query_id] if by_user else pair.query_id
            row = (split, pair.query_id, pair.document_id, pair.query, pair.document)
            found.setdefault(key, set()).add(row)
    return found


# As in MS MARCO, an id can name a text, in the log or in a table of queries.
@pytest.mark.parametrize("ids", ["none", "of texts", "in a table"])
@pytest.mark.parametrize("split_by", ["query", "user", "time"])
def test_a_user_more_changes_no_other_users_rows(split_by, ids, tmp_path):
    changes = {"columns__user": "who", "split_by": split_by}
    if ids != "none":
        changes.update(columns__query_id="text_id")
    if split_by == "time":
        times = {"dev_from": "2026-02-01", "test_from": "2026-04-01"}
        changes.update(columns__time="when", **times)
    else:
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
        return _units(tmp_path / name, by_user=True)

    everybody = imported("all", rows)
    assert len({row[0] for rows in everybody.values() for row in rows}) == 3
    for user in ("ann", "user3"):
        others = imported(f"without-{user}", [row for row in rows if row[2] != user])
        assert others == {key: v for key, v in everybody.items() if key != user}
    if split_by == "user":
        assert all(len({row[0] for row in rows}) == 1 for rows in everybody.values())
    if split_by == "time":  # a query is in one split: that of its first row
        split_of = collections.defaultdict(set)
        for unit in everybody.values():
            for split, query_id, *_ in unit:
                split_of[query_id].add(split)
        assert all(len(splits) == 1 for splits in split_of.values())


def test_ids_are_long_enough_that_none_is_shared(tmp_path):
    """96 bits. A shared id would drop one user's row because of another's."""
    log = _write_log(tmp_path, "jsonl")
    command.run(config_of(log, columns__user="who"), tmp_path / "pairs")
    for name in ("queries", "corpus"):
        lines = (tmp_path / "pairs" / f"{name}.jsonl").read_text().splitlines()
        ids = [json.loads(line)["_id"] for line in lines]
        assert ids and all(re.fullmatch("[qd][0-9a-f]{24,}", each) for each in ids)


def test_without_users_every_distinct_row_is_a_query(tmp_path):
    log = _write_log(tmp_path, "jsonl")
    command.run(config_of(log, dev_share=0.0, test_share=0.0), tmp_path / "pairs")
    units = _units_without_users(tmp_path / "pairs")
    assert len(units) == 4 and all(len(rows) == 1 for rows in units.values())


def _units_without_users(out):
    found = collections.defaultdict(list)
    for pair in BeirDirectory(out).all_pairs("train"):
        found[pair.query_id].append(pair)
    return found


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
    assert result["dropped"] == {"its document_id is not in the corpus": 1}
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
    features["list"] = tfds.features.Sequence(np.int64)
    users = {"ann": 7, "bob": 8, "cat": 9}

    def split(rows):
        rows = [dict(row, who=users[row["who"]]) for row in dicts(rows)]
        columns = {name: [row[name] for row in rows] for name in NAMES}
        columns["list"] = [[1, 2]] * len(rows)
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
    assert result["dropped"] == {
        "the same pair was there before": 1,
        "it has no query": 1,
    }
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


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "tfds:my_log",
            {},
            "has the splits test, train. Name one, such as tfds:my_log#",
        ),
        ("tfds:my_log#dev", {}, "Unknown split 'dev'.* Its splits are test, train"),
        ("tfds:my_log#test", {"columns__time": "at"}, "has no column 'at'; it has "),
        ("tfds:my_log#test", {"columns__time": "list"}, "several values a row"),
        (
            "tfds:mnist#train",
            {},
            r"mnist is not prepared in .*/sets, and nothing is downloaded here\. .*"
            r"tfds\.builder\('mnist', data_dir='.*/sets'\)\.download_and_prepare\(\)",
        ),
    ],
)
def test_a_tfds_set_that_cannot_be_read_says_so(
    name, changes, message, tmp_path, monkeypatch
):
    _prepare_tfds(tmp_path / "sets")
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "sets"))
    before = sorted((tmp_path / "sets").rglob("*"))
    with pytest.raises(InputError, match=message):
        command.run(config_of(name, **changes), tmp_path / "out")
    assert sorted((tmp_path / "sets").rglob("*")) == before
    assert not (tmp_path / "out").exists()


def test_a_damaged_row_of_tfds_is_not_repeated(tmp_path, monkeypatch):
    """TensorFlow's message has the row as it is."""
    _prepare_tfds(tmp_path / "sets")
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "sets"))
    for path in (tmp_path / "sets").rglob("*-test.tfrecord*"):
        with tf.io.TFRecordWriter(str(path)) as writer:
            writer.write(b"is my rash contagious")
    with pytest.raises(InputError, match="my_log#test: it cannot be read: ") as error:
        command.run(config_of("tfds:my_log#test"), tmp_path / "out")
    assert "rash" not in str(error.value)


def test_tfds_does_not_launder_a_set(tmp_path, monkeypatch):
    """Copied by our own builder, a set's rows would be taken for raw private pairs."""
    import tfdpsq.data.tfds_builder

    beir = _write_set(tmp_path / "set", "certified")
    (beir / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\nq\td\t1\n")
    builder = tfdpsq.data.tfds_builder.BeirDirectoryBuilder(
        path=beir, data_dir=tmp_path / "sets"
    )
    builder.download_and_prepare()
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "sets"))
    names = {"columns__query": "query", "columns__document": "document"}
    for name in (f"beir_directory/{builder.builder_config.name}", builder.data_path):
        with pytest.raises(
            InputError, match="perhaps of a synthetic set.*give the log"
        ):
            command.run(config_of(f"tfds:{name}#train", **names), tmp_path / "out")


def test_caches_next_to_a_hugging_face_set_are_not_of_it(tmp_path):
    """`map` writes its rows there: every query was two, each with the whole epsilon."""
    log = _write_log(tmp_path, "hugging_face")
    changed = [dict(row, asked=row["asked"].upper()) for row in dicts()]
    table = pyarrow.Table.from_pylist(changed)
    with pyarrow.ipc.new_stream(log / "cache-0123.arrow", table.schema) as out:
        out.write_table(table)
    state = {"_data_files": [{"filename": "data-00000.arrow"}]}
    (log / "state.json").write_text(json.dumps(state))
    config = config_of(log, dev_share=0.0, test_share=0.0)
    assert command.run(config, tmp_path / "pairs")["result"]["rows"] == 6
    state["_data_files"].append({"filename": "data-00001.arrow"})
    (log / "state.json").write_text(json.dumps(state))
    with pytest.raises(InputError, match="'data-00001.arrow', which is not there"):
        command.run(config, tmp_path / "again")
    (log / "state.json").write_text('{"_data_files": [1]}')
    with pytest.raises(InputError, match="state.json: it is damaged"):
        command.run(config, tmp_path / "again")


def test_two_columns_of_one_name_are_refused(tmp_path):
    """The last column of the file was read in their place."""
    columns = [pyarrow.array([name]) for name in ("q", "d", "ann", "bob", "secret")]
    names = ["asked", "clicked", "who", "who", "other"]
    table = pyarrow.Table.from_arrays(columns, names=names)
    with pyarrow.ipc.new_stream(tmp_path / "log.arrow", table.schema) as out:
        out.write_table(table)
    pyarrow.parquet.write_table(table, tmp_path / "log.parquet")
    (tmp_path / "log.csv").write_text(",".join(names) + "\nq,d,ann,bob,secret\n")
    for kind in ("arrow", "parquet", "csv"):
        config = config_of(tmp_path / f"log.{kind}", columns__user="who")
        with pytest.raises(
            InputError, match=f"{kind} has 2 columns 'who', and nothing"
        ):
            command.run(config, tmp_path / "out")


def test_times_are_read_as_they_come():
    noon = datetime.datetime(2026, 1, 2, 12, tzinfo=datetime.timezone.utc)
    for value in (
        *("2026-01-02T12:00:00", "2026-01-02T12:00:00Z", "2026-01-02T14:00:00+02:00"),
        *(noon, noon.replace(tzinfo=None), noon.timestamp(), str(noon.timestamp())),
    ):
        assert tables.seconds_of(value) == noon.timestamp(), value
    for value in (noon.date(), "2026-01-02", "20260102"):
        assert tables.seconds_of(value) == noon.timestamp() - 12 * 3600
    assert tables.seconds_of("20261302") == 20261302  # of no month: seconds
    for value in (None, "", "yesterday", float("nan"), "inf", True, [1], 10**400):
        assert tables.seconds_of(value) is None, value


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"columns__query": "question"}, "has no column 'question'; it has 'asked'"),
        ({"logs__train": "@/none.csv"}, "none.csv is not a table"),
        ({"logs__train": "@/latin.csv"}, r"latin.csv:2: byte 2 of the line is 0xe9"),
        ({"logs__train": "@/ragged.tsv"}, "ragged.tsv:2: 3 columns, and the first"),
        ({"logs__train": "@/open.csv"}, "open.csv:2: malformed"),
        ({"logs__train": "@/bad.jsonl"}, "bad.jsonl:2: not JSON"),
        ({"logs__train": "@/cut.parquet"}, "cut.parquet: it cannot be read"),
        ({"logs__train": "@/cut.jsonl.gz"}, "cut.jsonl.gz: it cannot be unpacked"),
        ({"logs__train": "@/mixed"}, "several formats, .csv, .jsonl"),
        ({"logs__train": "@/arrows"}, "several formats, .arrow, .csv, .jsonl"),
        ({"logs__train": "ir_datasets:x"}, "ir_datasets"),
        ({"log_documents_are_public": False}, "which tell what people looked for"),
        ({"split_by": "time"}, "columns.time and dev_from or test_from must be set"),
        (
            {
                "split_by": "time",
                "columns__time": "when",
                "dev_from": "2026-03-01",
                "test_from": "2026-02-01",
            },
            "dev_from is 2026-03-01, later than test_from, 2026-02-01.* swap them",
        ),
        ({"logs__train": "@/two.csv"}, r"two.csv:3: byte 2 .* is 0xe9, .* each part"),
        ({"split_by": "user"}, "columns.user is ''. Name the column"),
        ({"dev_from": "2026-01-01"}, "dev_from is '2026-01-01', which does nothing"),
        ({"dev_share": 0.6, "test_share": 0.5}, "nothing is left for training"),
        ({"columns__query": ""}, "rows have no query"),
        ({"corpus__path": "@/log.jsonl"}, "to which rows refer by id"),
        ({"corpus__columns__title": "t"}, "acts only where corpus.path is set"),
        (
            {"columns__title": "t", "corpus__path": "@/log.jsonl"},
            "columns.title is 't', which does nothing here: it acts only where corpus.",
        ),
        ({"logs__dev": "@/log.jsonl", "seed": 7}, "seed is 7, which does nothing here"),
        ({"header": False}, "header is False, which does nothing here: it acts only"),
        ({"header": False, "logs__train": "@/log.parquet"}, "header is False, which"),
        ({"columns__score": "who"}, "log.jsonl:1: score is not a number; judgements"),
        ({"columns__score": "asked"}, "log.jsonl:1: score is not a number; judge"),
        (
            {"logs__train": "@/huge.jsonl", "columns__score": "score"},
            r"huge.jsonl:1: score is 1e\+19; judgements are integers up to 1,000,000",
        ),
        ({"columns__document_id": "who"}, "log.jsonl:4: document_id 'bob' has another"),
        (
            {"columns__time": "who", "split_by": "time", "test_from": "2026"},
            "give seconds since|no row of 6 is left",
        ),
    ],
)
def test_bad_input_is_refused_with_its_place(changes, message, tmp_path):
    log = _write_log(tmp_path, "jsonl")
    (tmp_path / "latin.csv").write_bytes("asked,clicked\nn\xe9,b\n".encode("latin-1"))
    two = "asked,clicked\nn\u00e9,b\n".encode() + "n\u00e9,b\n".encode("latin-1")
    (tmp_path / "two.csv").write_bytes(two)
    (tmp_path / "ragged.tsv").write_text("asked\tclicked\na\tb\tc\n")
    (tmp_path / "open.csv").write_text('asked,clicked\n"a,b\n')
    (tmp_path / "bad.jsonl").write_text('{"asked": "a", "clicked": "b"}\n{"asked"\n')
    whole = _write_log(tmp_path, "parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    packed = gzip.compress(log.read_bytes())
    (tmp_path / "cut.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    huge = {"asked": "a", "clicked": "b", "score": 1e19}
    (tmp_path / "huge.jsonl").write_text(json.dumps(huge))
    (tmp_path / "mixed").mkdir()
    (tmp_path / "arrows").mkdir()
    for name in (
        "mixed/a.csv",
        "mixed/b.jsonl",
        "arrows/c.arrow",
        "arrows/a.csv",
        "arrows/b.jsonl",
    ):
        (tmp_path / name).write_text("")
    changes = {
        key: value.replace("@", str(tmp_path)) if isinstance(value, str) else value
        for key, value in changes.items()
    }
    with pytest.raises(InputError, match=message):
        command.run(config_of(log, **changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_times_out_of_order_change_nothing_and_drops_say_what_to_do(tmp_path, caplog):
    """A user without queries; a query asked before and after a cut; no time."""
    rows = [*ROWS, ("late", "Socks.", "dan", "soon")]
    times = {"split_by": "time", "columns__time": "when", "test_from": "2026-02-15"}
    units = {}
    for name, order in {"in": 1, "out": -1}.items():
        log = tmp_path / f"{name}.jsonl"
        lines = [json.dumps(row) + "\n" for row in dicts(rows)[::order]]
        log.write_text("".join(lines))
        command.run(config_of(log, columns__user="who", **times), tmp_path / name)
        units[name] = _units(tmp_path / name, by_user=True)
    assert units["in"] == units["out"] and units["in"].keys() == {"ann", "bob", "cat"}
    assert {split for split, *_ in units["in"]["ann"]} == {"train"}  # also of March
    said = caplog.text
    for sentence in (
        r"dropped 1 rows: it has no query .first .*in.jsonl:5.\. A user without queries"
        r" is not written, .* check columns.query\.",
        r"its query is in an earlier split already\. Rows may come in any order: .* "
        r"Move dev_from or test_from to keep these\.",
        r"its time is not .* or ISO 8601 .*jsonl:7.\. Write it as one of them; rows may"
        r" come in any order\.",
    ):
        assert re.search(sentence, said), sentence


def test_private_pairs_are_refused_where_things_are_released(tmp_path):
    log = _write_log(tmp_path, "jsonl")
    with pytest.raises(InputError, match="release"):
        command.run(config_of(log), tmp_path / "release" / "pairs")
    assert not (tmp_path / "release").exists() and not (tmp_path / "private").exists()


def _may_be_released(guarantee, pairs, tmp_path):
    output = releases.Output(tmp_path / "release" / "out", guarantee, "a model")
    try:
        releases.check_lineage(output, {"pairs": str(pairs)})
    except InputError as error:
        assert "whose guarantee is 'private'" in str(error)
        return False
    return True


def test_imported_pairs_are_an_input_as_any_private_pairs(tmp_path):
    """They were refused as if a stage had made them from private queries."""
    log, pairs = _write_log(tmp_path, "jsonl"), tmp_path / "private" / "pairs"
    command.run(config_of(log, dev_share=0.0, test_share=0.0), pairs)
    (tmp_path / "link").symlink_to(pairs)
    for guarantee in (releases.PUBLIC, releases.CERTIFIED):
        for path in (pairs, tmp_path / "link"):
            assert _may_be_released(guarantee, path, tmp_path)
    config = tiny.config(prepare, data=str(pairs), splits=("train",), vocabulary_size=0)
    prepare.run(config, tmp_path / "release" / "prepare")
    # What is made of them without an epsilon is private, and so are their queries.
    assert sources.guarantee_of_pairs(str(pairs)) == releases.PRIVATE
    assert releases.stated(pairs / "queries.jsonl") == releases.PRIVATE
    # Nor may it be told what occurs in them, or how they are found.
    config = overlap.default_config()
    config.update(data=str(pairs), texts=("documents",), corpus=(f"{pairs}/q*.jsonl",))
    with pytest.raises(InputError, match="corpus has .* guarantee is 'private'"):
        overlap.run(config, tmp_path / "release" / "overlap")
    config = tiny.config(zero_shot, sets=("mine",), systems={"bm25": "bm25"})
    config.paths = {"mine": str(pairs)}
    with pytest.raises(InputError, match="mine is .* but private is False"):
        zero_shot.run(config, tmp_path / "release" / "zero_shot")
    # A directory of links to their files is the same pairs.
    (tmp_path / "links").mkdir()
    for name in ("corpus.jsonl", "queries.jsonl", "qrels"):
        (tmp_path / "links" / name).symlink_to(pairs / name)
    assert _may_be_released(releases.CERTIFIED, tmp_path / "links", tmp_path)
    # Nothing else passes for them.
    (pairs / "other").mkdir()
    assert not _may_be_released(releases.PUBLIC, pairs / "other", tmp_path)
    for name in (releases.MARK_FILE, "manifest.json", "certificate.json"):
        (pairs / name).write_text("{}")
        assert not _may_be_released(releases.PUBLIC, pairs, tmp_path)
        (pairs / name).unlink()
    stage = json.loads((pairs / "stage.json").read_text())
    del stage["config"]["logs"]
    (pairs / "stage.json").write_text(json.dumps(stage))
    assert not _may_be_released(releases.PUBLIC, pairs, tmp_path)


def _write_set(folder, guarantee):
    """The BEIR files of a set as `synthesize` and `prepare` lay them out."""
    beir = folder / "beir"
    (beir / "qrels").mkdir(parents=True)
    manifest = {"schema": records.SCHEMA, "guarantee": guarantee}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (beir / records.PART_FILE).write_text("{}")
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


def test_what_a_stage_made_is_not_imported_as_a_log(tmp_path):
    """A synthetic set became raw private pairs, and canaries pairs without a mark."""
    certified = _write_set(tmp_path / "set", "certified")
    shutil.copytree(certified, tmp_path / "copy")  # without the manifest
    canaries = _write_set(tmp_path / "canaries" / "data", "private")
    (canaries / records.PART_FILE).unlink()
    (canaries.parent / "manifest.json").rename(canaries / releases.MARK_FILE)
    raw = shutil.copytree(certified, tmp_path / "raw")
    (raw / records.PART_FILE).unlink()
    link = tmp_path / "link.jsonl"
    link.symlink_to(certified / "queries.jsonl")
    linked = _config_of_beir(raw)
    linked.queries.path = str(link)
    refused = [*map(_config_of_beir, (certified, tmp_path / "copy", canaries)), linked]
    for config in refused:
        with pytest.raises(InputError, match="give the log as it was collected"):
            command.run(config, tmp_path / "pairs")
        assert not (tmp_path / "pairs").exists()
    # Private queries of a BEIR directory are raw, and so is what was imported of them.
    command.run(_config_of_beir(raw), tmp_path / "pairs")
    command.run(_config_of_beir(tmp_path / "pairs"), tmp_path / "again")
    assert len(_units_without_users(tmp_path / "again")) == 1
    command.run(_config_of_beir(_write_set(tmp_path / "own", "public")), tmp_path / "o")
