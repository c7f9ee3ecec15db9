"""Corpora of every format, found by path or name, read and refused."""

import gzip
import json

import pandas
import pytest
import tensorflow_datasets as tfds

from tfdpsq.run.common.text_corpus import Texts, corpus_parts
from tfdpsq.validation import DataError, InputError

TEXTS = ["First text.", "Zweiter Text: é, 中文", "third\ttext  with spaces"]


def write_lines(path, texts):
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wb") as file:
        file.write("\n".join([texts[0], "", "  ", *texts[1:]]).encode())


def write_jsonl(path, texts, field="text"):
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wb") as file:
        for text in texts:
            file.write(json.dumps({"url": "u", field: text}).encode() + b"\n")


def read(paths, field="text"):
    paths = [paths] if isinstance(paths, str) else paths
    return [text for part in corpus_parts(paths) for text in part.records(field)]


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.text.gz", write_lines),
        ("c4-train.00000-of-00002.json.gz", write_jsonl),
    ],
)
def test_format_follows_from_the_name(tmp_path, name, write):
    write(tmp_path / name, TEXTS)
    assert read(str(tmp_path / name)) == TEXTS
    assert read([str(tmp_path)]) == TEXTS


def test_the_field_is_a_column(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", TEXTS, "body")
    assert read(str(tmp_path / "a.jsonl"), field="body") == TEXTS
    pandas.DataFrame({"body": TEXTS}).to_parquet(tmp_path / "b.parquet")
    assert read(str(tmp_path / "b.parquet"), field="body") == TEXTS


def test_directories_and_patterns_are_read_in_order(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "deep/c.txt", "deep/er/d.txt", "deep/.hidden.txt"):
        (tmp_path / name).write_text(f"in {name}\n")
    (tmp_path / "README.md").write_text("not of the corpus")
    everything = ["in a.txt", "in b.txt", "in deep/c.txt", "in deep/er/d.txt"]
    assert read(str(tmp_path)) == everything
    assert read(str(tmp_path / "**" / "*.txt")) == everything
    assert read(str(tmp_path / "[ab].txt")) == everything[:2]
    twice = [str(tmp_path / "b.txt"), str(tmp_path), str(tmp_path / "deep/../a.txt")]
    assert read(twice) == ["in b.txt", "in a.txt", *everything[2:]]


def test_fingerprint_follows_names_sizes_and_times(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\n")

    def fingerprint():
        return Texts.open(str(tmp_path), "corpus").fingerprint(None)

    first = fingerprint()
    assert fingerprint() == first
    path.write_text("one two\n")
    longer = fingerprint()
    (tmp_path / "b.txt").write_text("two\n")
    assert len({first, longer, fingerprint()}) == 3


# -- What is refused ---------------------------------------------------------------


def test_missing_and_empty_paths_are_named(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "README.md").write_text("x")
    for name in ("none.txt", "*.txt", "sub"):
        with pytest.raises(InputError, match="is no table. Give a file"):
            Texts.open(str(tmp_path / name), "corpus")


def test_malformed_lines_bytes_and_files_are_named(tmp_path):
    path = tmp_path / "a.jsonl"
    for line in ('{"text": "cut', '{"body": "b"}', '{"text": ["a"]}'):
        path.write_text(f'{{"text": "a"}}\n{line}\n')
        with pytest.raises(InputError, match=r"a\.jsonl"):
            read(str(tmp_path))
    path = tmp_path / "a.txt"
    path.write_bytes("fine\nna\xefve\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"a\.txt:2: byte 3 of the line is 0xef"):
        read(str(path))
    path = tmp_path / "a.jsonl.gz"
    write_jsonl(path, TEXTS * 50)
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz:\d+: broken gzip file"):
        read(str(path))


# -- TFDS -----------------------------------------------------------------------------


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


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    config = tfds.download.DownloadConfig(num_shards=3)
    TinyCorpus(data_dir=tmp_path).download_and_prepare(download_config=config)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))


def test_tfds_is_read_shard_by_shard(prepared):
    parts = corpus_parts(["tfds:tiny_corpus"])
    assert len(parts) == 3
    texts = [text for part in parts for text in part.records("text")]
    assert texts == [f"{TEXTS[1]} {number}" for number in range(100)]
    assert read("tfds:tiny_corpus#train[10:15]") == texts[10:15]


@pytest.mark.parametrize(
    ("name", "field", "message"),
    [
        ("tiny_corpus", "body", "no column 'body'; it has 'text', 'url'"),
        ("no_such_corpus", "text", "tfds:no_such_corpus: Dataset no_such_corpus not"),
        ("c4/en", "text", r"tfds:c4/en: not prepared. Prepare it"),
    ],
)
def test_missing_tfds_data_is_named(prepared, name, field, message):
    with pytest.raises(InputError, match=message):
        read(f"tfds:{name}", field)
