"""tfds.load reads any BEIR directory and keeps every query."""

import pytest
import tensorflow_datasets as tfds

import tfdpsq.data.tfds_builder  # Registers the data set.
from tfdpsq.data.beir import write_beir
from tfdpsq.data.sets import SyntheticQuery, write_synthetic
from tfdpsq.data.texts import Document

DOCUMENTS = [Document("d1", "Title", "é one"), Document("d2", "", "two")]
# Three queries share a passage: TFDS's own beir builder would keep one.
QUERIES = [("q1", "first"), ("q2", "second"), ("q3", "third"), ("q4", "held out")]
QRELS = {
    "train": [("q1", "d1", 1), ("q2", "d1", 1), ("q3", "d1", 2), ("q3", "d2", 1)],
    "test": [("q4", "d2", 1), ("q4", "d1", 0)],
}


@pytest.fixture
def source(tmp_path):
    return write_beir(tmp_path / "set", DOCUMENTS, QUERIES, QRELS)


def load(source, data_dir, split):
    data = tfds.load(
        "beir_directory",
        split=split,
        data_dir=data_dir,
        builder_kwargs={"path": source.path},
    )
    return list(tfds.as_numpy(data))


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_pair_is_loaded_in_order(source, tmp_path, split):
    rows = load(source, tmp_path / "tfds", split)
    assert [
        tuple(
            row[name].decode()
            for name in ("query_id", "query", "document_id", "document")
        )
        for row in rows
    ] == [
        (pair.query_id, pair.query, pair.document_id, pair.document)
        for pair in source.all_pairs(split)
    ]
    expected = [score for *_, score in QRELS[split] if score > 0]
    assert [int(row["score"]) for row in rows] == expected


def test_changed_files_are_prepared_anew(source, tmp_path):
    assert load(source, tmp_path / "tfds", "test")[0]["document"] == b"two"
    queries = source.path / "corpus.jsonl"
    queries.write_text(queries.read_text().replace("two", "2"))
    assert load(source, tmp_path / "tfds", "test")[0]["document"] == b"2"


def test_a_set_is_loaded_and_private_pairs_stay_private(source, tmp_path):
    rows = [SyntheticQuery(f"genQ{i}", f"q {i}", "d", "text", i) for i in range(3)]
    write_synthetic(tmp_path / "made", rows, {}, None)
    found = tfds.load(
        "beir_directory",
        split="train",
        data_dir=tmp_path / "tfds",
        builder_kwargs={"path": tmp_path / "made"},
    )
    assert [row["query"].numpy() for row in found] == [b"q 0", b"q 1", b"q 2"]
    builder = tfdpsq.data.tfds_builder.BeirDirectoryBuilder(path=source.path)
    place = tmp_path / "private" / "tfds"
    assert builder.data_dir.startswith(str(place))
    assert place.stat().st_mode & 0o777 == 0o700
