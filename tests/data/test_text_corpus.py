"""Corpora of every format, found by path or name, read and refused."""

import gzip
import json

import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from tfdpsq.data import corpus_parts
from tfdpsq.data.text_corpus import parts_fingerprint
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


def write_tfrecord(path, texts, field="text"):
    options = "GZIP" if path.suffix == ".gz" else ""
    with tf.io.TFRecordWriter(str(path), options) as writer:
        for text in texts:
            feature = {
                "url": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"u"])),
                field: tf.train.Feature(
                    bytes_list=tf.train.BytesList(value=[text.encode()])
                ),
            }
            features = tf.train.Features(feature=feature)
            writer.write(tf.train.Example(features=features).SerializeToString())


def read(*arguments, **settings):
    return [
        text for part in corpus_parts(*arguments, **settings) for text in part.records()
    ]


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.text.gz", write_lines),
        ("c4-train.00000-of-00002.json.gz", write_jsonl),
        ("c4-train.tfrecord-00000-of-00002", write_tfrecord),
    ],
)
def test_format_follows_from_the_name(tmp_path, name, write):
    write(tmp_path / name, TEXTS)
    assert read(str(tmp_path / name)) == TEXTS
    assert read([str(tmp_path)]) == TEXTS


def test_given_format_and_field_are_read(tmp_path):
    path = tmp_path / "data.bin"
    write_lines(path, TEXTS)
    with pytest.raises(InputError, match="data.bin: its name does not tell its format"):
        corpus_parts(str(path))
    assert read(str(path), format="lines") == TEXTS
    assert read(str(path), format="whole") == ["\n".join(TEXTS)]
    write_tfrecord(path, TEXTS)
    assert read(str(path), format="tfrecord") == TEXTS
    (tmp_path / "empty.txt").write_text("\n \n")
    assert read(str(tmp_path / "empty.txt"), format="whole") == []
    for write, name in ((write_jsonl, "a.jsonl"), (write_tfrecord, "a.tfrecord")):
        write(tmp_path / name, TEXTS, "body")
        assert read(str(tmp_path / name), field="body") == TEXTS


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

    def fingerprint(**settings):
        return parts_fingerprint(corpus_parts(str(tmp_path), **settings))

    first = fingerprint()
    assert fingerprint() == first
    assert fingerprint(field="body") != first
    path.write_text("one two\n")
    longer = fingerprint()
    (tmp_path / "b.txt").write_text("two\n")
    assert len({first, longer, fingerprint()}) == 3


# -- What is refused ---------------------------------------------------------------


def test_missing_and_empty_paths_are_named(tmp_path):
    (tmp_path / "sub").mkdir()
    with pytest.raises(InputError, match="sub holds no file"):
        corpus_parts(str(tmp_path / "sub"))
    (tmp_path / "sub" / "README.md").write_text("x")
    with pytest.raises(InputError, match="no corpus was given"):
        corpus_parts("")
    with pytest.raises(InputError, match=r"none\.txt: no such file or directory"):
        corpus_parts(str(tmp_path / "none.txt"))
    with pytest.raises(InputError, match=r"\*\.txt: no such file .* matches it"):
        corpus_parts(str(tmp_path / "*.txt"))
    with pytest.raises(
        InputError, match="sub holds no file of a known name among its 1"
    ):
        corpus_parts(str(tmp_path / "sub"))
    with pytest.raises(InputError, match="format is 'csv'; choose one of 'lines'"):
        corpus_parts(str(tmp_path), format="csv")


def test_malformed_lines_bytes_and_files_are_named(tmp_path):
    path = tmp_path / "a.jsonl"
    for line in ('{"text": "cut', '{"body": "b"}', '{"text": ["a"]}'):
        path.write_text(f'{{"text": "a"}}\n{line}\n')
        with pytest.raises(DataError, match=r"a\.jsonl:2: "):
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
    path = tmp_path / "b.tfrecord"
    write_tfrecord(path, TEXTS * 50)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match=r"b\.tfrecord: broken after record 128"):
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


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tfds")
    config = tfds.download.DownloadConfig(num_shards=3)
    TinyCorpus(data_dir=directory).download_and_prepare(download_config=config)
    return str(directory)


def test_tfds_is_read_shard_by_shard(prepared):
    parts = corpus_parts("tfds:tiny_corpus", data_dir=prepared)
    assert [part.name for part in parts] == [
        f"tfds:tiny_corpus/1.0.0 train[{n}shard:{n + 1}shard]" for n in range(3)
    ]
    texts = [text for part in parts for text in part.records()]
    assert texts == [f"{TEXTS[1]} {number}" for number in range(100)]
    sliced = {"split": "train[10:15]", "data_dir": prepared}
    assert len(corpus_parts("tfds:tiny_corpus", **sliced)) == 1
    assert read("tfds:tiny_corpus", **sliced) == texts[10:15]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("tiny_corpus", {"field": "body"}, "no feature 'body'; it has text, url"),
        ("no_such_corpus", {}, "tfds:no_such_corpus: Dataset no_such_corpus not found"),
        ("c4/en", {}, r"tfds:c4/en is not prepared in .* Prepare it \(tfds build c4"),
    ],
)
def test_missing_tfds_data_is_named(prepared, name, settings, message):
    with pytest.raises(InputError, match=message):
        corpus_parts(f"tfds:{name}", data_dir=prepared, **settings)
