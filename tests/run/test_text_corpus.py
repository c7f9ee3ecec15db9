"""Corpora of every format, found by path or name, read and refused."""

import gzip
import json

import pandas
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from tfdpsq.run.common.text_corpus import Texts, read_texts
from tfdpsq.validation import DataError, InputError

TEXTS = ["First text.", "Zweiter Text: é, 中文", "third\ttext  with spaces"]


def write_jsonl(path, field="text"):
    lines = (json.dumps({"url": "u", field: text}) + "\n" for text in TEXTS)
    path.write_bytes(gzip.compress("".join(lines).encode()))


def read(path, field="text"):
    parts = Texts.open(str(path), "corpus").parts()
    return [text for part in parts for text in read_texts(part, field)]


def test_format_follows_from_the_name_and_the_field_is_a_column(tmp_path):
    lines = "\n".join([TEXTS[0], "", "  ", *TEXTS[1:]]).encode()
    (tmp_path / "a.text.gz").write_bytes(gzip.compress(lines))
    assert read(tmp_path / "a.text.gz") == TEXTS
    write_jsonl(tmp_path / "c4-train.00000-of-00002.json.gz")
    assert read(tmp_path / "c4-train.00000-of-00002.json.gz") == TEXTS
    assert read(tmp_path) == TEXTS + TEXTS
    pandas.DataFrame({"body": TEXTS}).to_parquet(tmp_path / "b.parquet")
    assert read(tmp_path / "b.parquet", field="body") == TEXTS


def test_directories_and_patterns_are_read_in_order(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "deep/c.txt", "deep/er/d.txt", "deep/.hidden.txt"):
        (tmp_path / name).write_text(f"in {name}\n")
    (tmp_path / "README.md").write_text("not of the corpus")
    everything = ["in a.txt", "in b.txt", "in deep/c.txt", "in deep/er/d.txt"]
    assert read(tmp_path) == everything
    assert read(tmp_path / "**" / "*.txt") == everything
    assert read(tmp_path / "[ab].txt") == everything[:2]


def test_missing_and_malformed_files_are_named(tmp_path):
    """`test_import` has malformed tables."""
    for name in ("none.txt", "*.txt"):
        with pytest.raises(InputError, match="is not a table. Give a file"):
            read(tmp_path / name)
    path = tmp_path / "a.txt"
    path.write_bytes("fine\nna\xefve\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"a\.txt:2: byte 3 of the line is 0xef"):
        read(path)


class TinyCorpus(tfds.core.GeneratorBasedBuilder):
    """A prepared data set under a name, as C4 would be."""

    name = "tiny_corpus"
    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First."}
    code_path = None

    def _info(self):
        text = tfds.features.Text()
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict({"text": text, "url": text}),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for number in range(100):
            yield number, {"text": f"{TEXTS[1]} {number}", "url": "u"}


def test_tfds_is_read_shard_by_shard(tmp_path, monkeypatch):
    config = tfds.download.DownloadConfig(num_shards=3)
    TinyCorpus(data_dir=tmp_path).download_and_prepare(download_config=config)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    parts = Texts.open("tfds:tiny_corpus", "corpus").parts()
    assert len(parts) == 3
    texts = [text for part in parts for text in read_texts(part, "text")]
    assert texts == [f"{TEXTS[1]} {number}" for number in range(100)]
    assert read("tfds:tiny_corpus#train[10:15]") == texts[10:15]
    for name, field, message in (
        ("tiny_corpus", "body", "no column 'body'; it has 'text', 'url'"),
        ("no_such_corpus", "text", "tfds:no_such_corpus: Dataset no_such_corpus not"),
    ):
        with pytest.raises(InputError, match=message):
            read(f"tfds:{name}", field)
    # TensorFlow's error has the row as it is, which may be a private one of a log.
    for path in tmp_path.rglob("*.tfrecord*"):
        with tf.io.TFRecordWriter(str(path)) as writer:
            writer.write(b"is my rash contagious")
    with pytest.raises(DataError, match="tiny_corpus") as error:
        read("tfds:tiny_corpus")
    assert "rash" not in str(error.value)
