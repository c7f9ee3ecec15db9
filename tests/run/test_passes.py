"""Passes: who does which shard, who merges, and what a fault costs. No model."""

import functools
import json
import os
import pathlib
import sys

import ml_collections
import pytest
import tensorflow as tf

from tfdpsq.run.core import releases, sources
from tfdpsq.run.passes import corpus_shards, passes, sharded_stages
from tfdpsq.run.passes.shards import PassSpec, ShardDirectory
from tfdpsq.validation import InputError

SHARDS = 7
CONFIG = ml_collections.ConfigDict({"seed": 3, "epsilon": float("inf")})
INPUTS = {"numbers": "f00"}


class _Numbers:
    """Writes numbers to shards; remembers what it was asked for."""

    def __init__(self):
        self.loaded, self.made = 0, []
        self.before = lambda index: None

    def start(self):
        self.loaded += 1

        def make(index, out):
            self.made.append(index)
            with tf.io.gfile.GFile(out.path("txt"), "w") as file:
                for number in range(10 * index, 10 * index + 10):
                    file.write(f"{number}\n")
                    out.count += 1
            self.before(index)

        return make


def _merge(out, shards):
    lines = []
    for index in range(shards.spec.shards):
        with shards.reading(index) as mark:
            lines += tf.io.gfile.GFile(shards.path(index, "txt")).read().splitlines()
            assert mark.count == 10
    (out / "numbers.txt").write_text("\n".join(lines))
    return {"numbers": len(lines)}


def _run(directory, worker, launch=passes.ALONE, merge=_merge, config=CONFIG, **more):
    work = passes.Work("numbers", SHARDS, worker.start)
    inputs = {**INPUTS, **more}
    output = releases.Output(directory, releases.PUBLIC, "numbers")
    return sharded_stages.run_stage(output, config, inputs, work, merge, launch)


def _shards(directory):
    place = sharded_stages.pass_directory(directory)
    spec = PassSpec("numbers", SHARDS, {"seed": 3, "epsilon": "inf"}, INPUTS)
    return ShardDirectory(place, spec)


def _is_whole(directory):
    expected = [str(number) for number in range(10 * SHARDS)]
    assert (directory / "numbers.txt").read_text().split() == expected
    stage = json.loads((directory / "stage.json").read_text())
    assert stage["result"] == {"numbers": 70}
    beside = {path.name for path in directory.parent.iterdir()} - {"private"}  # logs
    assert beside == {directory.name}


def test_one_command_does_all_and_a_finished_stage_is_not_redone(tmp_path):
    numbers = _Numbers()
    stage = _run(tmp_path / "out", numbers)
    _is_whole(tmp_path / "out")
    assert (numbers.loaded, numbers.made) == (1, list(range(SHARDS)))
    assert _run(tmp_path / "out", numbers)["run"] == stage["run"]
    assert numbers.loaded == 1
    with pytest.raises(InputError, match="seed: 3 there, 4 now"):
        _run(tmp_path / "out", numbers, config=ml_collections.ConfigDict({"seed": 4}))


def test_shards_that_wait_for_others_are_their_owners(tmp_path):
    """They hold rankings for private queries, where the pass is of those."""
    place = tmp_path / "out"
    before = os.umask(0o022)
    try:
        assert _run(place, _Numbers(), passes.Launch(4, 0)) is None
    finally:
        os.umask(before)
    shards = pathlib.Path(sharded_stages.pass_directory(place))
    left = [shards, *shards.rglob("*")]
    assert len(left) > 4
    assert [path.name for path in left if path.stat().st_mode & 0o077] == []


def test_commands_share_the_shards_and_the_last_one_merges(tmp_path):
    order = (2, 0, 3, 1)
    workers = {index: _Numbers() for index in order}
    for index in order[:-1]:
        launch = passes.Launch(4, index)
        assert _run(tmp_path / "out", workers[index], launch) is None
        assert not (tmp_path / "out").exists()
    stage = _run(tmp_path / "out", workers[order[-1]], passes.Launch(4, order[-1]))
    assert stage["result"] == {"numbers": 70}
    _is_whole(tmp_path / "out")
    made = {index: worker.made for index, worker in workers.items()}
    assert made == {0: [0, 4], 1: [1, 5], 2: [2, 6], 3: [3]}
    # A command that comes late finds it finished, and loads nothing.
    late = _Numbers()
    assert _run(tmp_path / "out", late, passes.Launch(4, 2))["run"] == stage["run"]
    assert late.loaded == 0


def test_an_interrupted_pass_goes_on_where_it_was(tmp_path):
    numbers = _Numbers()

    def stop(index):
        if index == 3:
            raise KeyboardInterrupt

    numbers.before = stop
    with pytest.raises(KeyboardInterrupt):
        _run(tmp_path / "out", numbers)
    assert _shards(tmp_path / "out").missing() == [3, 4, 5, 6]
    rest = _Numbers()
    _run(tmp_path / "out", rest)
    assert rest.made == [3, 4, 5, 6]
    _is_whole(tmp_path / "out")


@pytest.mark.parametrize("more", [{}, {"numbers": "f01"}])
def test_shards_of_other_settings_or_inputs_are_refused(tmp_path, more):
    numbers = _Numbers()
    assert _run(tmp_path / "out", numbers, passes.Launch(2, 0)) is None
    config = CONFIG if more else ml_collections.ConfigDict({"seed": 4})
    with pytest.raises(InputError, match="of another pass") as caught:
        _run(tmp_path / "out", _Numbers(), config=config, **more)
    wanted = "inputs.numbers: 'f00' there, 'f01' now" if more else "seed: 3 there, 4"
    assert wanted in str(caught.value)
    _run(tmp_path / "out", numbers)
    _is_whole(tmp_path / "out")


def _change(path):
    path.write_bytes(path.read_bytes().replace(b"9", b"8"))


@pytest.mark.parametrize("damage", [_change, os.unlink])
def test_a_damaged_shard_is_made_again_and_no_other(tmp_path, damage, caplog):
    first, rest = _Numbers(), _Numbers()
    _run(tmp_path / "out", first, passes.Launch(2, 0))
    path = pathlib.Path(_shards(tmp_path / "out").path(4, "txt"))
    damage(path)
    with caplog.at_level("WARNING", "absl"):
        _run(tmp_path / "out", rest)
    assert sorted(rest.made) == [1, 3, 4, 5]
    assert path.stem in caplog.text
    _is_whole(tmp_path / "out")


def test_without_beam_the_command_says_what_to_install(tmp_path, monkeypatch):
    import tfdpsq.run.passes

    monkeypatch.setitem(sys.modules, "apache_beam", None)
    monkeypatch.delitem(sys.modules, "tfdpsq.run.passes.beam", raising=False)
    monkeypatch.delattr(tfdpsq.run.passes, "beam", raising=False)
    with pytest.raises(InputError, match=r"pip install 'tfdpsq\[beam\]'"):
        _run(tmp_path / "out", _Numbers(), passes.Launch(beam=()))


# -- Corpora cut into shards --------------------------------------------------


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
    with pytest.raises(InputError, match="is of another pass"):
        run()
    assert not (tmp_path / "out").exists()
    path.write_text(data)
    assert run()["result"] == {"missing": 0}
    assert made == [0, 2, 1, 3]


def test_shards_are_read_from_their_places_and_are_the_whole_corpus(tmp_path):
    directory = tmp_path / "corpus"
    _corpus(directory, 23)
    for most, size in ((0, 5), (1, 1), (7, 6), (22, 6), (23, 1), (40, 100)):
        wanted = list(sources.sampled_documents(str(directory), most or None))
        parts = corpus_shards.cut(str(directory), most, size, str(tmp_path / "pass"))
        read = [list(parts.read(i)) for i in range(parts.count)]
        assert sum(read, []) == wanted
        assert parts.documents == len(wanted)
        lengths = [len(part) for part in read]
        assert lengths == [parts.size(i) for i in range(parts.count)]
        assert max(lengths) <= size
        assert [parts.first(i) for i in range(parts.count)] == [
            sum(lengths[:i]) for i in range(parts.count)
        ]
