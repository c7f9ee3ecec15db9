"""Corpora cut into shards: each read from its place, all of them the corpus."""

import functools
import json

import pytest
import tensorflow as tf

from tfdpsq.data.shards import PassSpec, ShardDirectory
from tfdpsq.run.core import releases, sources
from tfdpsq.run.passes import corpus_shards, passes, sharded_stages
from tfdpsq.validation import DataError, InputError


def _corpus(directory, count):
    (directory / "qrels").mkdir(parents=True)
    (directory / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\n")
    (directory / "queries.jsonl").write_text('{"_id": "q", "text": "q"}\n')
    lines = [json.dumps({"_id": f"d{i}", "text": f"text {i}"}) for i in range(count)]
    (directory / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    return directory / "corpus.jsonl"


def test_a_corpus_that_changes_under_a_pass_is_refused(tmp_path):
    path = _corpus(tmp_path / "corpus", 23)
    made = []

    def start(corpus):
        def make(index, out):
            made.append(index)
            with tf.io.gfile.GFile(out.path("txt"), "w") as file:
                file.write("".join(one.text for one in corpus.read(index)))

        return make

    def run(launch=passes.ALONE):
        corpus = corpus_shards.cut(
            str(path.parent), 0, 6, sharded_stages.pass_directory(tmp_path / "out")
        )
        return sharded_stages.run_stage(
            releases.Output(tmp_path / "out", releases.PUBLIC, "texts"),
            {},
            {"corpus": corpus.plan.fingerprint},
            passes.Work("texts", corpus.count, functools.partial(start, corpus)),
            lambda out, shards: {"missing": len(shards.missing())},
            launch,
            also_keeps={corpus_shards.PLAN_FILE: corpus.plan.to_json()},
        )

    assert run(passes.Launch(2, 0)) is None
    data = path.read_text()
    path.write_text(data.replace("text 7", "text 8"))  # of shard 1
    with pytest.raises(DataError, match="documents 5 to 10 are no longer") as caught:
        run()
    assert str(path) in str(caught.value)
    path.write_text(data + '{"_id": "new", "text": "more"}\n')
    with pytest.raises(InputError, match="inputs.corpus"):
        run()
    assert not (tmp_path / "out").exists()
    path.write_text(data)
    assert run()["result"] == {"missing": 0}
    assert made == [0, 2, 1, 1, 3]


def test_a_plan_is_read_from_beside_the_shards(tmp_path, monkeypatch):
    directory = tmp_path / "corpus"
    corpus = _corpus(directory, 23)
    cut = functools.partial(
        corpus_shards.cut, str(directory), pass_directory=str(tmp_path / "pass")
    )
    for most in (0, 1, 7, 22, 23, 40):
        wanted = list(sources.sampled_documents(str(directory), most or None))
        for size in (1, 5, 6, 100):
            parts = cut(most, size)
            read = [list(parts.read(i)) for i in range(parts.count)]
            assert sum(read, []) == wanted
            assert parts.documents == len(wanted)
            assert [len(part) for part in read] == [
                parts.size(i) for i in range(parts.count)
            ]
            assert max(map(len, read)) <= size
            assert [parts.first(i) for i in range(parts.count)] == [
                sum(map(len, read[:i])) for i in range(parts.count)
            ]
    shards = ShardDirectory(tmp_path / "pass", PassSpec("any", 1, {}, {}))
    shards.open()
    plan = cut(7, 2).plan
    shards.write_json(corpus_shards.PLAN_FILE, plan.to_json())

    def planned(*_):
        raise AssertionError("the corpus was read")

    monkeypatch.setattr(corpus_shards.corpus_plan, "plan_corpus", planned)
    assert cut(7, 2).plan == plan
    for changed in (lambda: cut(8, 2), lambda: cut(7, 1)):
        with pytest.raises(AssertionError, match="was read"):
            changed()
    corpus.write_text(corpus.read_text() + "\n")
    with pytest.raises(AssertionError, match="was read"):
        cut(7, 2)
    with pytest.raises(InputError, match="shard_documents is 0"):
        cut(7, 0)
    with pytest.raises(InputError, match="-1"):
        cut(-1, 2)
