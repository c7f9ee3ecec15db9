"""BEIR directories are read and written as others read and write them."""

import collections
import gc
import gzip
import json
import os
import pathlib
import shutil

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tfdpsq.data import beir
from tfdpsq.data.beir import BeirDirectory, Counts, Judgement, write_beir
from tfdpsq.data.texts import Document, Pair
from tfdpsq.validation import DataError, InputError

DOCUMENTS = [
    Document("d1", "Title", "first text"),
    Document("d2", "", "second \n text"),
    Document("d3", "Only a title", ""),
]
QUERIES = [("q1", "what is first"), ("q2", "what is second"), ("q3", "unjudged é")]
QRELS = {
    "train": [("q1", "d2", 1), ("q1", "d3", 2), ("q1", "d1", 2)],
    "test": [("q2", "d2", 1), ("q2", "d1", 0)],
}


@pytest.fixture
def sound(tmp_path):
    write_beir(tmp_path / "set", DOCUMENTS, QUERIES, QRELS)
    return tmp_path / "set"


def test_files_have_the_published_layout(sound):
    """What the beir package's GenericDataLoader expects, read without our code."""
    corpus = [json.loads(line) for line in (sound / "corpus.jsonl").open()]
    assert corpus[0] == {"_id": "d1", "title": "Title", "text": "first text"}
    queries = [json.loads(line) for line in (sound / "queries.jsonl").open()]
    assert queries[2] == {"_id": "q3", "text": "unjudged é"}
    assert (sound / "qrels" / "test.tsv").read_text() == (
        "query-id\tcorpus-id\tscore\nq2\td2\t1\nq2\td1\t0\n"
    )


@pytest.fixture
def flawed(tmp_path):
    """Flaws that published sets and logs have, one of each kind but missing answers."""
    path, numbers = tmp_path / "flawed", range(10)
    write_beir(
        path,
        [Document(str(i), "", f"text {i // 2}") for i in numbers],  # each text twice
        [(f"q{i}", f"query {i}") for i in numbers],
        {"test": [(f"q{i}", str(i), 1) for i in numbers] + [("q0", "1", 1)]},
    )
    for name, line in (
        ("corpus.jsonl", '{"_id": 10, "title": "", "text": ""}'),
        ("queries.jsonl", '{"_id": 11, "text": " "}'),
        ("qrels/test.tsv", "q0\tgone\t3\nq1\tgone\t1\nq12\t1\t1\nq2\t2\t1.0"),
    ):
        with (path / name).open("a") as file:
            file.write(f"{line}\n")
    return path


def test_flaws_of_logs_and_published_sets_are_left_out_and_counted(flawed, caplog):
    """FiQA has empty documents, ArguAna judges some it lacks; logs have the rest."""
    beir = BeirDirectory(flawed)
    flaws = {
        "a document without text": 1,
        "a query without text": 1,
        "a judgement of a document that is not there": 2,
        "a judgement of a query that is not there": 1,
        "a judgement that is there twice": 1,
        "a query's further answer with the same text": 1,
    }
    assert beir.validate(["test"]) == Counts(10, 10, {"test": 11}, flaws)
    # q0 keeps its best document of those that are there.
    pairs = beir.pairs("test")
    assert [*pairs.ids()] == [(f"q{i}", f"{i}") for i in range(10)]
    assert len(beir.all_pairs("test")) == 11 and pairs.left_out == 3
    assert "left out 3 judgements" in caplog.text and "gone" not in caplog.text
    # Published numbers count answers that cannot be found.
    assert beir.qrels("test")["q0"] == {"0": 1, "1": 1, "gone": 3}
    assert "10" not in [document.id for document in beir.documents()]


def test_strict_validation_refuses_each_flaw_by_its_line(flawed):
    for name, line in (
        ("queries.jsonl", 11),
        ("corpus.jsonl", 11),
        *[("qrels/test.tsv", 13)] * 4,
    ):
        with pytest.raises(DataError, match=f"{name}:{line}: a .*leave strict out"):
            BeirDirectory(flawed).validate(["test"], strict=True)
        lines = (flawed / name).read_text().splitlines(keepends=True)
        (flawed / name).write_text("".join([*lines[: line - 1], *lines[line:]]))
    BeirDirectory(flawed).validate(["test"], strict=True)


def test_ids_may_be_integers(tmp_path):
    """Integer ids of data frames are text on disk and in results."""
    documents, queries = [Document(7, "", "x")], [(np.int64(1), "what")]
    beir = write_beir(tmp_path / "set", documents, queries, {"train": [(1, 7, 1)]})
    assert [*beir.pairs("train")] == [Pair("1", "what", "7", "x")]


@pytest.mark.parametrize("compressed", [False, True])
def test_round_trip_with_and_without_compression(sound, compressed):
    for name in ("corpus.jsonl", "queries.jsonl") if compressed else ():
        (sound / f"{name}.gz").write_bytes(gzip.compress((sound / name).read_bytes()))
        (sound / name).unlink()
    beir = BeirDirectory(sound)
    assert list(beir.documents()) == DOCUMENTS
    assert beir.queries() == dict(QUERIES)
    assert beir.splits() == ("test", "train")
    assert beir.qrels("test") == {"q2": {"d2": 1, "d1": 0}}
    assert list(beir.positives("test")) == [Judgement(2, "q2", "d2", 1)]
    assert beir.validate() == Counts(3, 3, {"train": 3, "test": 1})


def test_a_query_has_exactly_one_pair_for_training(sound):
    """k pairs of one query would protect it k times less than stated."""
    beir = BeirDirectory(sound)
    # d1 and d3 both score 2; d1 has the smaller id.
    assert list(beir.pairs("train")) == [
        Pair("q1", "what is first", "d1", "Title first text")
    ]
    assert [pair.document_id for pair in beir.all_pairs("train")] == ["d1", "d2", "d3"]
    # A judgement of 0 is no pair.
    assert [pair.document_id for pair in beir.all_pairs("test")] == ["d2"]


def test_fingerprint_sees_content_not_order(tmp_path):
    def fingerprint(documents=DOCUMENTS, queries=QUERIES, qrels=QRELS):
        shutil.rmtree(tmp_path / "set", ignore_errors=True)
        return write_beir(tmp_path / "set", documents, queries, qrels).fingerprint()

    reversed_qrels = {split: rows[::-1] for split, rows in QRELS.items()}
    base = fingerprint()
    assert fingerprint(DOCUMENTS[::-1], QUERIES[::-1], reversed_qrels) == base
    changed = {
        fingerprint([Document("d1", "", "Title first text"), *DOCUMENTS[1:]]),
        fingerprint(queries=[("q1", "what is first?"), *QUERIES[1:]]),
        fingerprint(qrels={**QRELS, "test": [("q2", "d2", 2), ("q2", "d1", 0)]}),
        fingerprint(qrels={"train": QRELS["train"], "dev": QRELS["test"]}),
    }
    assert len(changed | {base}) == 5


def _with_fields(path, *fields):
    """Rewrites a set's queries, the i-th with further fields."""
    file = path / "queries.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text(
        "".join(json.dumps({**a, **b}) + "\n" for a, b in zip(records, fields))
    )
    return BeirDirectory(path)


def test_users_are_read_from_metadata_or_beside_it(sound):
    beir = _with_fields(
        sound,
        {"metadata": {"user_id": "anna"}},
        {"user_id": 7, "metadata": {}},
        {"metadata": {"user_id": "anna", "team": "x"}, "user_id": "anna"},
    )
    assert beir.users() == {"q1": "anna", "q2": "7", "q3": "anna"}
    assert beir.users({"q2", "q9"}) == {"q2": "7"}
    with pytest.raises(
        DataError, match="queries.jsonl:1: .*'q1' has no user under 'te"
    ):
        beir.users(field="team")


def test_queries_without_one_user_are_named(tmp_path):
    for number, fields in enumerate(
        (
            {},
            {"metadata": {"user_id": "nan"}},
            {"metadata": {"user_id": ["anna"]}},
            {"metadata": {"user_id": "b"}, "user_id": "a"},
        )
    ):
        path = write_beir(tmp_path / str(number), DOCUMENTS, QUERIES, QRELS).path
        beir = _with_fields(path, {"user_id": "anna"}, fields, {})
        for among in (None, {"q2"}):
            with pytest.raises(DataError, match="queries.jsonl:2: query 'q2' has "):
                beir.users(among)
        assert beir.users({"q1"}) == {"q1": "anna"}


def test_fingerprint_covers_users(sound):
    """Under user-level privacy other users are other data, also on resume."""
    base = BeirDirectory(sound).fingerprint()
    empty = {"metadata": {}, "user_id": None}
    assert _with_fields(sound, empty, empty, {}).fingerprint() == base
    found = {
        _with_fields(sound, {"metadata": {"user_id": user}}, {}, {}).fingerprint()
        for user in ("a", "b", 0)
    }
    assert len(found | {base}) == 4


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
IDENTIFIER = st.text(
    st.characters(exclude_categories=["Cs", "Z", "C"]), min_size=1, max_size=5
).filter(lambda text: text.split() == [text])


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_text_survives_the_round_trip(tmp_path, data):
    """Line breaks of Unicode, quotes, NUL, astral characters: all are text."""
    texts = data.draw(st.dictionaries(IDENTIFIER, TEXT.filter(str.strip), min_size=1))
    queries = data.draw(st.dictionaries(IDENTIFIER, TEXT.filter(str.strip), min_size=1))
    rows = [(query, document, 1) for query in queries for document in texts]
    shutil.rmtree(tmp_path / "set", ignore_errors=True)
    documents = [Document(key, "", text) for key, text in texts.items()]
    beir = write_beir(tmp_path / "set", documents, queries.items(), {"train": rows})
    assert list(beir.documents()) == documents
    assert beir.queries() == queries
    assert beir.validate(["train"]).pairs == {"train": len(rows)}
    assert len(beir.pairs("train")) == len(queries)


HEADER = b"query-id\tcorpus-id\tscore\n"
# What is broken -> (file, its bytes, what the message must hold).
BROKEN = {
    "no JSON": (
        "corpus.jsonl",
        b'{"_id": "d1", "text": "x"}\n{oops\n',
        r"jsonl:2: not",
    ),
    "half a surrogate": (
        "corpus.jsonl",
        b'{"_id": "d1", "text": "\\ud800"}',
        "jsonl:1: text holds half a surrogate",
    ),
    "not UTF-8": (
        "corpus.jsonl",
        b'\n{"_id": "d1", "text": "\xe9"}\n',
        r"corpus.jsonl:2: byte 24 .* 0xe9, which is not UTF-8\. Convert",
    ),
    "document twice": (
        "corpus.jsonl",
        b'{"_id": "d1", "text": "x"}\n\n{"_id": "d1", "text": "y"}\n',
        r"corpus.jsonl:3: id 'd1' occurs on an earlier line",
    ),
    "score a word": (
        "qrels/train.tsv",
        HEADER + b"q1\td1\tyes\n",
        r":2: not two ids and an integer score",
    ),
    "two scores": (
        "qrels/train.tsv",
        HEADER + b"q1\td1\t2.0\nq1\td1\t1\n",
        ":3: .*another score",
    ),
    "another set's qrels": (
        "qrels/train.tsv",
        HEADER + b"x1\td1\t1\n",
        "train.tsv: no judgement above 0 is of a query and document that exist",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_malformed_content_is_named_by_file_and_line(sound, case):
    name, content, message = BROKEN[case]
    (sound / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        BeirDirectory(sound).validate()
    assert caught.value.path == str(sound / name)


def test_missing_files_and_directories_are_named(sound, tmp_path):
    with pytest.raises(DataError, match="dev.tsv: missing"):
        BeirDirectory(sound).validate(["dev"])
    packed = gzip.compress((sound / "corpus.jsonl").read_bytes())
    (sound / "corpus.jsonl.gz").write_bytes(packed[:-12])
    (sound / "corpus.jsonl").unlink()
    with pytest.raises(DataError, match="corpus.jsonl.gz:.*broken gzip file"):
        BeirDirectory(sound).validate()
    (sound / "corpus.jsonl.gz").unlink()
    with pytest.raises(DataError, match="corpus.jsonl: missing"):
        BeirDirectory(sound)
    (sound / "corpus.jsonl").touch()
    shutil.rmtree(sound / "qrels")
    with pytest.raises(DataError, match="qrels: missing"):
        BeirDirectory(sound)
    with pytest.raises(DataError, match="no such directory"):
        BeirDirectory(sound / "nowhere")


@pytest.mark.parametrize(
    "documents, queries, qrels, message",
    [
        ([], QUERIES, QRELS, "no document 'd2' is there"),
        ([*DOCUMENTS, DOCUMENTS[0]], QUERIES, QRELS, "'d1' was given twice"),
        (DOCUMENTS, QUERIES, {"train": [("q9", "d1", 1)]}, "no query 'q9' is there"),
    ],
)
def test_writer_rejects_what_the_reader_would(
    tmp_path, documents, queries, qrels, message
):
    with pytest.raises(InputError, match=message):
        write_beir(tmp_path / "set", documents, queries, qrels)
    assert os.listdir(tmp_path) == []


_JAPANESE = "\u521d\u671f\u306e\u75c7\u72b6\u306f\u4f55\u3067\u3059\u304b"


@pytest.mark.parametrize(
    "name, line",
    [
        ("queries.jsonl", b'{"_id": "q1", "text": "my secret illness'),
        ("queries.jsonl", b'{"_id": "q1", "text": "my secret\0illness"}'),
        ("queries.jsonl", b'{"_id": 7.5, "text": "my secret illness"}'),
        (
            "queries.jsonl",
            '{"_id": "q1", "text": "my secret illn\xe9ss"}'.encode("latin1"),
        ),
        ("qrels/train.tsv", HEADER + b"q1\td1\tmy secret illness\n"),
        # In a language that does not part its words.
        ("qrels/train.tsv", HEADER + f"{_JAPANESE}\td1\t1\n".encode()),
    ],
)
def test_errors_do_not_quote_a_private_query(sound, name, line):
    """Errors end up in logs, which others read."""
    (sound / name).write_bytes(line)
    with pytest.raises(DataError) as caught:
        BeirDirectory(sound).validate()
    said = str(caught.value)
    assert _JAPANESE not in said
    assert name in said and "secret" not in said and "illn" not in said


def _naive_pairs(judged, best):
    """Returns (query id, document id) of judgements above 0, as `pairs` says."""
    found = sorted((q, d) for q, d, score in judged if score > 0)
    if not best:
        return found
    scores = {(q, d): score for q, d, score in judged}
    of_query = collections.defaultdict(list)
    for query, document in found:
        of_query[query].append((-scores[query, document], document))
    return [(query, min(ranked)[1]) for query, ranked in sorted(of_query.items())]


@pytest.mark.parametrize("best", [True, False])
def test_pairs_on_disk_equal_a_naive_join(best, tmp_path):
    random = np.random.default_rng(1)
    # Ids whose order differs between languages, and between UTF-8 and UTF-16.
    names = ["a", "B", "é", "z", "\U0001f600", "\ufb01", "10", "9", "ÿ", "aa"]
    judged = {
        (q, f"d{d}"): int(score)
        for q, d, score in zip(
            random.choice(names, 60),
            random.integers(0, 12, 60),
            random.integers(-1, 3, 60),
        )
    }
    rows = [(q, d, score) for (q, d), score in judged.items()]
    rows += [("a", "d50", 3), ("a", "d51", 10**6)]
    documents = [Document(f"d{d}", "", f"text {d}") for d in range(60)]
    users = {name: f"user {random.integers(0, 4)}" for name in names}
    queries = [(name, f"query {name}") for name in names]
    beir = write_beir(tmp_path / "set", documents, queries, {"train": rows})
    lines = [
        json.dumps({"_id": name, "text": text, "user_id": users[name]})
        for name, text in queries
    ]
    beir.queries_file.write_text("\n".join(lines))
    found = beir.pairs("train") if best else beir.all_pairs("train")
    wanted = [
        Pair(q, f"query {q}", d, f"text {d[1:]}") for q, d in _naive_pairs(rows, best)
    ]
    assert len(found) == len(wanted) and list(found) == wanted
    assert [found[row] for row in range(len(found))] == wanted
    assert found[-2:] == wanted[-2:] and found[-1] == wanted[-1]
    with pytest.raises(IndexError):
        found[len(wanted)]
    assert list(found.ids()) == [(pair.query_id, pair.document_id) for pair in wanted]
    # The users' places as NumPy sorts their names: so privacy.Groups is the same.
    labels = np.array([users[pair.query_id] for pair in wanted])
    _, places = np.unique(labels, return_inverse=True)
    owners = beir.owners(found)
    assert owners.dtype == np.int64
    np.testing.assert_array_equal(owners, places)


def test_large_pairs_spill_to_an_unnamed_file(tmp_path):
    """They are private: a file that others could open, or that a kill left, is not."""
    names = [f"q{number}" for number in range(3000)]
    beir = write_beir(
        tmp_path / "set",
        [Document("d", "", "text")],
        [(name, f"{name} " + "word " * 2000) for name in names],
        {"train": [(name, "d", 1) for name in names]},
    )

    def opened():
        files = pathlib.Path("/proc/self/fd").iterdir()
        return {os.readlink(file) for file in files if file.is_symlink()}

    before = opened()
    pairs = beir.pairs("train")  # 30 MB, and the cache is 16 MiB
    made = opened() - before
    assert made and all(path.endswith(" (deleted)") for path in made)
    assert len(pairs) == sum(1 for _ in pairs) == 3000
    del pairs
    gc.collect()
    assert not opened() & made


def test_joining_takes_work_in_proportion_to_the_pairs(monkeypatch):
    """In SQLite's instructions; it once tried every query with every document."""
    opened, counts = beir.open_unnamed, []

    def counted(schema):
        store = opened(schema)
        store.set_progress_handler(lambda: counts.append(1), 100)
        return store

    monkeypatch.setattr(beir, "open_unnamed", counted)
    work = []
    for size in (500, 2000):
        counts.clear()
        names = [f"{number:05d}" for number in range(size)]
        judged = [Judgement(1, name, name, 1) for name in names]
        texts = [(name, "text") for name in names]
        assert len(beir.PairTable(judged, texts, texts, best=True)) == size
        work.append(len(counts))
    assert work[1] < 6 * work[0]
