"""Synthetic sets survive the round trip, and damage to one never goes unseen."""

import dataclasses
import json
import os

import pandas
import pytest
import tensorflow as tf

from tfdpsq.data.beir import BeirDirectory
from tfdpsq.data.sets import (
    PARQUET,
    SyntheticQuery,
    is_marked,
    read_manifest,
    read_synthetic,
    write_synthetic,
)
from tfdpsq.data.texts import Pair
from tfdpsq.validation import DataError, InputError

PROVENANCE = {"model": "tiny", "seed": 7}
CERTIFICATE = {"epsilon": 8.0, "unit": "query"}


def make_rows(count=7):
    """Two samples a document, as synthesis gives them."""
    return [
        SyntheticQuery(
            f"genQ{i}", f"query é {i}", f"d{i // 2}", f"text {i // 2}", i % 2
        )
        for i in range(count)
    ]


@pytest.fixture
def path(tmp_path):
    write_synthetic(tmp_path / "set", make_rows(), PROVENANCE, CERTIFICATE, shards=3)
    return tmp_path / "set"


@pytest.mark.parametrize("form", ["tfrecord", "parquet"])
@pytest.mark.parametrize("shards", [1, 9])
def test_round_trip_keeps_rows_and_order(tmp_path, shards, form):
    rows = iter(make_rows())
    write_synthetic(tmp_path / "set", rows, PROVENANCE, None, shards, form=form)
    assert list(read_synthetic(tmp_path / "set")) == make_rows()
    names = sorted(os.listdir(tmp_path / "set" / "records"))
    assert names[1] == f"synthetic-00000-of-{shards:05d}.{form}"
    assert len(names) == 1 + shards


def test_parquet_is_read_by_pandas_and_says_that_it_is_of_a_set(tmp_path):
    manifest = write_synthetic(tmp_path / "set", make_rows(), {}, None, form=PARQUET)
    found = pandas.read_parquet(tmp_path / "set" / "records")
    rows = [SyntheticQuery(*row) for row in found.itertuples(index=False)]
    assert rows == make_rows()
    assert is_marked(str(tmp_path / "set" / manifest["records"][0]))
    found.to_parquet(tmp_path / "raw.parquet")
    assert not is_marked(str(tmp_path / "raw.parquet"))


def test_records_follow_the_stated_schema(path):
    """What a user's own tf.data pipeline does with the manifest alone."""
    manifest = json.loads((path / "manifest.json").read_text())
    features = {
        name: tf.io.FixedLenFeature([], kind)
        for name, kind in manifest["schema"].items()
    }
    files = [str(path / name) for name in manifest["records"]]
    rows = [
        tf.io.parse_single_example(data, features)
        for data in tf.data.TFRecordDataset(files)
    ]
    assert {row["query_id"].numpy().decode() for row in rows} == {
        f"genQ{i}" for i in range(7)
    }
    assert sum(int(row["sample"]) for row in rows) == 3


def test_set_is_also_a_beir_directory(path):
    beir = BeirDirectory(path / "beir")
    assert beir.validate(["train"]).documents == 4
    assert list(beir.pairs("train")) == [
        Pair(row.query_id, row.query, row.document_id, row.document)
        for row in make_rows()
    ]


def test_fingerprint_depends_on_the_rows_alone(tmp_path):
    def fingerprint(name, rows, shards, form="tfrecord"):
        path = tmp_path / name
        return write_synthetic(path, rows, {}, None, shards, form=form)["fingerprint"]

    base = fingerprint("a", make_rows(), 1)
    assert fingerprint("b", make_rows()[::-1], 4) == base
    assert fingerprint("p", make_rows(), 2, PARQUET) == base
    other = [dataclasses.replace(make_rows()[0], query="other"), *make_rows()[1:]]
    assert fingerprint("c", other, 1) != base


def test_empty_queries_are_left_out_and_counted(tmp_path):
    """A noisy generator may end at once; no later stage can use that."""
    rows = make_rows()
    rows[2] = dataclasses.replace(rows[2], query=" ")
    manifest = write_synthetic(tmp_path / "set", rows, {}, None, 2)
    assert manifest["empty_queries_left_out"] == 1
    assert manifest["count"] == 6
    assert list(read_synthetic(tmp_path / "set")) == rows[:2] + rows[3:]
    assert "genQ2" not in BeirDirectory(tmp_path / "set" / "beir").queries()
    empty = [dataclasses.replace(row, query="") for row in rows]
    with pytest.raises(InputError, match="all 7 queries are empty; train"):
        write_synthetic(tmp_path / "none", empty, {}, None)


@pytest.mark.parametrize(
    "part", ["records/synthetic-00001-of-00003.tfrecord", "beir/corpus.jsonl"]
)
def test_flipped_bit_is_found_before_reading(path, part):
    data = bytearray((path / part).read_bytes())
    data[len(data) // 2] ^= 1
    (path / part).write_bytes(data)
    with pytest.raises(DataError, match=f"{part}: SHA-256 is not"):
        read_synthetic(path)


def test_damaged_and_lost_files_are_found(path, tmp_path):
    whole = (path / "manifest.json").read_text()
    for content in ("{", json.dumps({**json.loads(whole), "version": 1})):
        (path / "manifest.json").write_text(content)
        with pytest.raises(DataError, match="manifest.json: "):
            read_manifest(path)
    (path / "manifest.json").write_text(whole)
    (path / "records" / "synthetic-00002-of-00003.tfrecord").unlink()
    with pytest.raises(DataError, match="synthetic-00002-of-00003.tfrecord: missing"):
        read_synthetic(path)
    (path / "certificate.json").unlink()
    with pytest.raises(DataError, match="Do not release"):
        read_manifest(path)
    with pytest.raises(DataError, match="manifest.json: cannot be read"):
        read_synthetic(tmp_path)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"query_id": "q3"}, "query_id is 'q3'; expected genQ0"),
        ({"query_id": "genQ0"}, "'genQ0' was given twice"),
        ({"document_id": "d9", "document": ""}, "'d9' is empty"),
    ],
)
def test_unsound_rows_leave_nothing_behind(tmp_path, change, message):
    rows = make_rows()
    rows[3] = dataclasses.replace(rows[3], **change)
    with pytest.raises(InputError, match=message):
        write_synthetic(tmp_path / "set", rows, {}, None)
    assert os.listdir(tmp_path) == []
