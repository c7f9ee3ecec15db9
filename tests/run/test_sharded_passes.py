"""Every pass over a corpus, by any number of processes: one output, to the last byte.

`test_sharded_synthesis` has the same of `synthesize`. Here are the four others, as
their users run them. Shards are stopped and killed while a process holds their lock
and they have no mark: in the middle.
"""

import json
import pathlib

import pytest
from helpers import sharded as _sharded
from helpers import tiny as _tiny

from tfdpsq.data import train_vocabulary
from tfdpsq.run.passes import sharded_stages

pytestmark = pytest.mark.slow  # a minute for every stage


_SHARDS = 6
_EMBEDS = {"shard_documents": 100, "batch_size": 8}
_STAGES = ("encode", "index", "evaluate", "overlap")
# What of the private queries is read, whoever does it: recorded once.
_READS = {
    "encode": [],
    "index": [],
    "evaluate": [
        {
            "what": "the queries and judgements of split 'test'",
            "where": "metrics.json, TREC files and whatever is made from them",
        }
    ],
    "overlap": [
        {
            "what": "which queries of split 'train' occur in a public corpus",
            "where": "out/overlap.json and matches.jsonl",
        }
    ],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """600 pairs, a retriever of random weights for them, and texts that hold some."""
    base = tmp_path_factory.mktemp("sharded_passes")
    queries = _tiny.write_pairs(base / "pairs", 560, 20, 20)
    train_vocabulary(queries, 320, base / "spiece.model")  # a test's made-up queries
    _tiny.write_retriever(base / "retriever", base)
    (base / "texts").mkdir()
    for part in range(_SHARDS):
        lines = [f"the text {i} of {part} is none of theirs" for i in range(10_000)]
        lines[part] = f"Somebody asked: {queries[10 * part].upper()}?"
        (base / "texts" / f"{part}.txt").write_text("\n".join(lines) + "\n")
    return base


def _settings(base, stage):
    if stage == "overlap":
        return {"data": base / "pairs", "corpus": base / "texts", "draws": 2}
    if stage == "evaluate":
        of_evaluate = {"data": base / "pairs", "resamples": 100, "k": 20}
        return {**_vocabulary(base), **_EMBEDS, **of_evaluate} | {
            "systems.mine": base / "retriever"
        }
    return {
        **_vocabulary(base),
        **_EMBEDS,
        "retriever": base / "retriever",
        "corpus": base / "pairs",
    }


def _vocabulary(base):
    return {"vocabulary": base / "spiece.model"}


def _start(base, stage, directory, *flags):
    place = directory / "private" / "out"
    return _sharded.Command(stage, place, _settings(base, stage), *flags)


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    """A function: what one command writes, by stage."""
    made = {}

    def of(stage):
        if stage not in made:
            directory = tmp_path_factory.mktemp(stage)
            assert _made_by(_start(base, stage, directory).ends()) == _SHARDS
            made[stage] = _sharded.output(directory / "private" / "out")
            assert made[stage][0]
        return made[stage]

    return of


def _made_by(said):
    return said.count("rows in")


def _is_whole(directory, stage, whole):
    private = directory / "private"
    found = _sharded.output(private / "out")
    expected = whole(stage)
    assert sorted(found[0]) == sorted(expected[0])
    differ = [name for name, data in expected[0].items() if found[0][name] != data]
    assert not differ
    assert found[1:] == expected[1:]
    assert _recorded(directory) == _READS[stage]
    # Of the pass itself nothing is left but its log.
    beside = {"out", "logs"}
    if _READS[stage]:
        beside |= {"private_reads.jsonl", "fingerprint.key"}
    assert {path.name for path in private.iterdir()} == beside
    assert [path.name for path in directory.iterdir()] == ["private"]


def _recorded(directory):
    path = directory / "private" / "private_reads.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("stage", _STAGES)
def test_two_commands_share_the_shards(base, whole, tmp_path, stage):
    """Both at once; whichever is last merges."""
    flags = [("--num_shards=2", f"--shard_index={index}") for index in range(2)]
    pair = [_start(base, stage, tmp_path, *each) for each in flags]
    assert [_made_by(command.ends()) for command in pair] == [_SHARDS / 2] * 2
    _is_whole(tmp_path, stage, whole)


@pytest.mark.parametrize("stage", _STAGES)
def test_two_workers_of_beam_share_the_shards(base, whole, tmp_path, stage):
    command = _start(base, stage, tmp_path, *_sharded.BEAM)
    command.ends()
    log = (tmp_path / "private" / "logs" / "out" / "log.jsonl").read_text()
    points = [json.loads(line) for line in log.splitlines()]
    made = {one["shard"]: one["process"] for one in points if "finished" in one}
    assert sorted(made) == list(range(_SHARDS))
    assert command.process.pid not in made.values()
    assert len(set(made.values())) == 2
    _is_whole(tmp_path, stage, whole)


@pytest.mark.parametrize("stage", _STAGES)
def test_a_command_killed_in_a_shard_is_gone_on_with(base, whole, tmp_path, stage):
    made = _start(base, stage, tmp_path).is_killed_in_a_shard(marks=2)
    assert 2 <= made < _SHARDS
    assert _recorded(tmp_path) == _READS[stage]  # before anything was read
    assert _made_by(_start(base, stage, tmp_path).ends()) == _SHARDS - made
    _is_whole(tmp_path, stage, whole)


@pytest.mark.parametrize("stage", _STAGES)
def test_two_commands_are_at_one_shard_at_once(base, whole, tmp_path, stage):
    """The second makes all others and waits for the first, which is stopped in it."""
    first = _start(base, stage, tmp_path)
    held = first.stops_in_a_shard(marks=1)
    number = int(held.split("-")[1])
    second = _start(base, stage, tmp_path)
    waits = f"{stage}: shard {number} of {_SHARDS} is being made by another process"
    second.waits_for(lambda: waits in second.said())
    place = tmp_path / "private" / "out"
    assert len(_sharded.marks_in(place)) == _SHARDS - 1 and not place.exists()
    first.goes_on()
    assert _made_by(first.ends()) + _made_by(second.ends()) == _SHARDS
    assert not pathlib.Path(sharded_stages.pass_directory(place)).exists()
    _is_whole(tmp_path, stage, whole)
