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
        ("a.txt", write_lines),
        ("a.text.gz", write_lines),
        ("a.jsonl", write_jsonl),
        ("c4-train.00000-of-00002.json.gz", write_jsonl),
        ("a.ndjson", write_jsonl),
        ("a.tfrecord", write_tfrecord),
        ("a.tfrecords.gz", write_tfrecord),
        ("c4-train.tfrecord-00000-of-00002", write_tfrecord),
    ],
)
def test_every_format_is_read_by_its_name(tmp_path, name, write):
    write(tmp_path / name, TEXTS)
    assert read(str(tmp_path / name)) == TEXTS
    assert read([str(tmp_path)]) == TEXTS


def test_any_name_is_read_by_a_given_format(tmp_path):
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


def test_more_records_than_are_read_at_once_stay_in_order(tmp_path):
    texts = [f"text {number}" for number in range(150)]
    write_tfrecord(tmp_path / "a.tfrecord", texts)
    assert read(str(tmp_path)) == texts


def test_directories_and_patterns_are_read_by_name_and_files_once(tmp_path):
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


def test_a_directory_of_several_formats_is_refused_until_one_is_named(tmp_path):
    write_lines(tmp_path / "a.txt", TEXTS)
    write_jsonl(tmp_path / "b.jsonl", TEXTS[:1])
    with pytest.raises(InputError, match="files of several formats, jsonl, lines"):
        corpus_parts(str(tmp_path))
    assert read(str(tmp_path), format="jsonl") == TEXTS[:1]


def test_another_field_is_read(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", TEXTS, "body")
    write_tfrecord(tmp_path / "a.tfrecord", TEXTS, "body")
    for name in ("a.jsonl", "a.tfrecord"):
        assert read(str(tmp_path / name), field="body") == TEXTS


def test_the_fingerprint_follows_names_sizes_and_times(tmp_path):
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


@pytest.mark.parametrize("paths", ["", [], [""], ()])
def test_no_corpus_is_named(paths):
    with pytest.raises(InputError, match="no corpus was given. Name the files"):
        corpus_parts(paths)


def test_a_path_that_leads_nowhere_is_named(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "README.md").write_text("x")
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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut', r"a\.jsonl:2: not JSON \(Unterminated string.*'{\"text"),
        ('{"body": "b"}', r"a\.jsonl:2: no text under 'text'.* Set field"),
        ('{"text": null}', r"a\.jsonl:2: no text under 'text'"),
        ('{"text": ["a"]}', r"a\.jsonl:2: no text under 'text'"),
        ('"text"', r"a\.jsonl:2: no text under 'text'"),
    ],
)
def test_a_malformed_json_line_is_named(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "a"}}\n{line}\n')
    with pytest.raises(DataError, match=message):
        read(str(tmp_path))


def test_half_a_surrogate_pair_is_no_reason_to_stop(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a \\ud83d b"}\n')
    assert read(str(tmp_path)) == ["a \ud83d b"]


def test_bytes_that_are_not_utf8_are_named(tmp_path):
    (tmp_path / "a.txt").write_bytes("fine\nna\xefve\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"a\.txt:2: byte 3 of the line is 0xef"):
        read(str(tmp_path))
    (tmp_path / "a.txt").unlink()
    value = tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"na\xefve"]))
    example = tf.train.Example(features=tf.train.Features(feature={"text": value}))
    with tf.io.TFRecordWriter(str(tmp_path / "a.tfrecord")) as writer:
        writer.write(example.SerializeToString())
    with pytest.raises(DataError, match=r"a\.tfrecord: record 1 is not UTF-8 \(byte 3"):
        read(str(tmp_path))


def test_damaged_files_are_named(tmp_path):
    write_jsonl(tmp_path / "a.jsonl.gz", TEXTS * 50)
    whole = (tmp_path / "a.jsonl.gz").read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz:\d+: broken gzip file"):
        read(str(tmp_path / "a.jsonl.gz"))
    write_tfrecord(tmp_path / "b.tfrecord", TEXTS * 50)
    whole = (tmp_path / "b.tfrecord").read_bytes()
    (tmp_path / "b.tfrecord").write_bytes(whole[:-5])
    with pytest.raises(DataError, match=r"b\.tfrecord: broken after record 128 or at"):
        read(str(tmp_path / "b.tfrecord"))


def test_records_that_are_no_examples_with_the_field_are_named(tmp_path):
    path = str(tmp_path / "a.tfrecord")
    with tf.io.TFRecordWriter(path) as writer:
        writer.write(b"\xff\xff no example")
    with pytest.raises(DataError, match=r"record 1 is not a tf\.train\.Example"):
        read(path)
    write_tfrecord(tmp_path / "a.tfrecord", TEXTS, "body")
    message = r"record 1 has 0 texts under 'text'; its features are body, url\. Set"
    with pytest.raises(DataError, match=message):
        read(path)


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


def test_tfds_is_read_by_name_shard_by_shard(prepared):
    parts = corpus_parts("tfds:tiny_corpus", data_dir=prepared)
    assert [part.name for part in parts] == [
        f"tfds:tiny_corpus/1.0.0 train[{n}shard:{n + 1}shard]" for n in range(3)
    ]
    texts = [text for part in parts for text in part.records()]
    assert texts == [f"{TEXTS[1]} {number}" for number in range(100)]
    assert read("tfds:tiny_corpus", field="url", data_dir=prepared) == ["u"] * 100


def test_a_slice_of_a_split_is_one_part(prepared):
    sliced = {"split": "train[10:15]", "data_dir": prepared}
    assert len(corpus_parts("tfds:tiny_corpus", **sliced)) == 1
    texts = read("tfds:tiny_corpus", **sliced)
    assert texts == [f"{TEXTS[1]} {number}" for number in range(10, 15)]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("tiny_corpus", {"field": "body"}, "no feature 'body'; it has text, url"),
        ("tiny_corpus", {"split": "dev"}, "Unknown split 'dev'.* Set split"),
        ("no_such_corpus", {}, "tfds:no_such_corpus: Dataset no_such_corpus not found"),
        ("c4/xx", {}, "tfds:c4/xx: .*BuilderConfig xx not found.* Correct the name"),
        ("c4/en:9.9.9", {}, "cannot be loaded at version 9.9.9"),
        ("c4/en", {}, r"tfds:c4/en is not prepared in .* Prepare it \(tfds build c4"),
    ],
)
def test_what_tfds_does_not_have_is_named(prepared, name, settings, message):
    with pytest.raises(InputError, match=message):
        corpus_parts(f"tfds:{name}", data_dir=prepared, **settings)


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path):
    """Editors write one before the first line, of text as of JSON."""
    for name, content in (
        ("a.txt", "one\n\ufefftwo\n"),
        ("b.jsonl", '{"text": "one"}'),
    ):
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
    read = [list(part.records()) for part in corpus_parts([str(tmp_path / "a.txt")])]
    assert read == [["one", "\ufefftwo"]]
    (part,) = corpus_parts([str(tmp_path / "b.jsonl")])
    assert list(part.records()) == ["one"]


def test_an_empty_directory_and_one_of_other_files_are_told_apart(tmp_path):
    with pytest.raises(InputError, match="holds no file. Give the path"):
        corpus_parts([str(tmp_path)])
    (tmp_path / "page.warc").write_text("x")
    with pytest.raises(InputError, match="of a known name among its 1, such as page.w"):
        corpus_parts([str(tmp_path)])
