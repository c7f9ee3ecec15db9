"""One person, query or document has one id in an import, however it is spelled."""

import json

import pandas
import pyarrow
import pyarrow.parquet
import pytest
from helpers.import_logs import ROWS, command, config_of, dicts

from tfdpsq.data import BeirDirectory, importing, texts
from tfdpsq.validation import DataError, InputError


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
    assert result["dropped"] == {
        "the same pair was there before": 9,
        "it has no user": 2,
    }
    objects = ([1.5], [2.0**53, float("inf")], [True], [{"id": 7}], [[7]])
    users, result = _imported_users(tmp_path / "objects", ["ann"], *objects)
    assert users == ["ann"]
    assert result["dropped"] == {_no_id("user"): 6}


def _no_id(what):
    return (
        f"its {what} is neither a text nor a whole number with all its digits "
        "(no 1.2e+18, nor 2^53 or more with a point); write it as text"
    )


@pytest.mark.parametrize("of_user", [True, False])
def test_a_large_number_that_lost_digits_is_no_id(tmp_path, of_user):
    """One person was two, as pandas wrote the second file: a user was missing in it."""
    whole, folder = 1234567890123456789, tmp_path / "logs"
    column = "who" if of_user else "id"
    folder.mkdir()
    for name, ids in {"jan": [whole, 42], "feb": [whole, None, 42]}.items():
        row = {"asked": ["a"] * len(ids), "clicked": ["b"] * len(ids), column: ids}
        pandas.DataFrame(row).to_csv(folder / f"{name}.csv", index=False)
    assert "1.2345678901234568e+18" in (folder / "feb.csv").read_text()
    name = "columns__user" if of_user else "columns__query_id"
    config = config_of(folder, **{name: column}, dev_share=0.0, test_share=0.0)
    dropped = command.run(config, folder / "pairs")["result"]["dropped"]
    assert dropped.get(_no_id("user" if of_user else "query_id")) == 1
    if of_user:
        users = BeirDirectory(folder / "pairs").users(field=importing.USER_FIELD)
        assert sorted(users.values()) == [str(whole), "42"]


@pytest.mark.parametrize(
    ("text", "of_query", "of_user"),
    [
        ("9007199254740993", "=", "="),
        ("9007199254740991.0", "9007199254740991", "9007199254740991"),
        ("9007199254740992.0", None, None),
        ("1e+16", None, None),
        ("1.23457E+11", None, None),
        ("1.23456789E9", None, None),  # as Spark writes 1234567890
        ("7e0", "=", None),
        ("3e8", "=", None),  # perhaps hexadecimal, perhaps not
        ("12e5a", "=", "="),
        ("1.2.3", "=", "="),
        ("+49", "49", "49"),
        ("-0.0", "0", "0"),
        ("-7.", "-7", "-7"),
        ("\uff17", "=", "="),
        (" \u00a07 ", "=", "7"),
        ("e\u0301", "=", "\u00e9"),
        ("nan", "=", ""),
        ("NULL", "=", ""),
        ("Nan", "=", "="),
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


def test_ids_of_documents_and_queries_are_one_in_every_spelling(tmp_path):
    ids = ("1", "1.0", 2.0, True)
    rows = [dict(row, id=each) for each, row in zip(ids, dicts([*ROWS[:4]]))]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_of(log, columns__query_id="id", dev_share=0.0, test_share=0.0)
    result = command.run(config, tmp_path / "pairs")["result"]
    assert {*BeirDirectory(tmp_path / "pairs").qrels("train")} == {"1", "2"}
    assert [*result["dropped"]] == [
        "its query_id had another text or user before",
        _no_id("query_id"),
    ]


def test_tables_refer_to_ids_in_another_spelling(tmp_path):
    """pandas made floats of the log's ids, and not of those of the two tables."""
    (tmp_path / "log.csv").write_text("qid,did\n1.0,7.0\n2,8.00\n")
    (tmp_path / "queries.csv").write_text("query_id,query\n1,who\n2.0,what\n")
    corpus = "document_id,document\n7,Seven.\n8.0,Eight.\n"
    (tmp_path / "corpus.csv").write_text(corpus)
    config = command.default_config()
    config.logs.train = str(tmp_path / "log.csv")
    config.columns.update(query="", document="", query_id="qid", document_id="did")
    config.queries.path = str(tmp_path / "queries.csv")
    config.corpus.path = str(tmp_path / "corpus.csv")
    config.update(dev_share=0.0, test_share=0.0)
    assert command.run(config, tmp_path / "pairs")["result"]["dropped"] == {}
    found = BeirDirectory(tmp_path / "pairs").qrels("train")
    assert found == {"1": {"7": 1}, "2": {"8": 1}}


def test_an_id_that_is_no_text_drops_its_row(tmp_path):
    half = json.loads('"\\ud800"')
    rows = [dict(row, id="x") for row in dicts()[:3]]
    rows[0]["who"] = rows[1]["id"] = half
    rows[2]["id"] = "y"
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_of(log, columns__user="who", dev_share=0.0, test_share=0.0)
    config.columns.document_id = "id"
    result = command.run(config, tmp_path / "pairs")["result"]
    assert result["pairs"] == {"train": 1} and result["dropped"] == {
        "its user holds half a surrogate pair, which is not text": 1,
        "its document_id holds half a surrogate pair, which is not text": 1,
    }
    (tmp_path / "texts.jsonl").write_text('{"id": "y", "text": "\\ud800"}\n')
    config.columns.update(query="", query_id="id")
    config.queries.path = str(tmp_path / "texts.jsonl")
    config.queries.columns.update(query="text", query_id="id")
    with pytest.raises(InputError, match="texts.jsonl:1: query holds half"):
        command.run(config, tmp_path / "out")


def test_ids_in_bytes_are_texts_or_none(tmp_path):
    """Two users were one, and one query's row dropped another's."""
    users, result = _imported_users(tmp_path / "u", [b"\x81", b"\x82", b"ann"], ["ann"])
    assert users == ["ann"]
    assert result["dropped"] == {
        _no_id("user"): 2,
        "the same pair was there before": 1,
    }
    for value in (b"\x81", b"1e+16"):
        with pytest.raises(ValueError):
            texts.id_of(value)
    assert texts.id_of(b"7.0") == "7"


def _beir(folder, *users):
    (folder / "qrels").mkdir(parents=True)
    rows = [
        {"_id": f"q{number}", "text": f"query {number}", "metadata": {"user_id": user}}
        for number, user in enumerate(users)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "queries.jsonl").write_text(lines)
    (folder / "corpus.jsonl").write_text('{"_id": "d", "title": "", "text": "x"}\n')
    judged = "".join(f"{row['_id']}\td\t1\n" for row in rows)
    head = "query-id\tcorpus-id\tscore\n"
    (folder / "qrels" / "train.tsv").write_text(head + judged)
    return BeirDirectory(folder)


def test_spellings_of_a_user_are_one_person_in_a_beir_directory(tmp_path):
    """Two units would each have the whole of ε."""
    pairs = (("7", " 7"), (7, "7.0"), ("\u00e9", "e\u0301"))
    for number, spellings in enumerate(pairs):
        users = _beir(tmp_path / str(number), *spellings, "anna").users()
        assert users["q0"] == users["q1"] != users["q2"]
    rounded = _beir(tmp_path / "rounded", "1.5e+18")
    with pytest.raises(DataError, match="queries.jsonl:1: .*rounded off.*digits"):
        rounded.users()
