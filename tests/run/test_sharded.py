"""Passes over a corpus write one output, to the last byte, however they are run.

By one command, by several that share the shards, killed and restarted, on two devices,
on Beam, or on an object store. `test_passes` has the rules without models.
"""

import json

import pytest
import tensorflow as tf
from helpers import sharded as _sharded
from helpers import tiny as _tiny

from tfdpsq.data import io, read_manifest, verify, write_synthetic
from tfdpsq.generator import T5QueryGenerator
from tfdpsq.privacy import read_certificate
from tfdpsq.run import synthesize as stage
from tfdpsq.run.core import sources
from tfdpsq.run.passes import beam, passes, sharded_stages
from tfdpsq.run.passes.shards import PassSpec, ShardDirectory
from tfdpsq.run.reporting import data_card
from tfdpsq.validation import DataError, InputError

_SETTINGS = {
    "samples_per_document": 2,
    "batch_size": 16,
    "shards": 3,
    "shard_documents": 20,
}
_WORKERS = (
    "--beam",
    "--runner=DirectRunner",
    "--direct_num_workers=2",
    "--direct_running_mode=multi_processing",
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Pairs of 84 documents, and a generator of random weights for them."""
    base = tmp_path_factory.mktemp("sharded")
    queries = _tiny.write_start(base, dropout=0.1)
    (base / "texts").mkdir()
    for part in range(6):
        lines = [f"the text {i} of {part} is none of theirs" for i in range(5_000)]
        lines[part] = f"Somebody asked: {queries[10 * part].upper()}?"
        (base / "texts" / f"{part}.txt").write_text("\n".join(lines) + "\n")
    return base


def _config(base, **changes):
    paths = {"generator": str(base / "public"), "corpus": str(base / "pairs")}
    return _tiny.config(stage, changes, **paths, **_SETTINGS)


@pytest.fixture(scope="module")
def whole(base):
    """The files of the set that one command writes."""
    result = stage.run(_config(base), base / "whole")
    assert result["result"]["queries"] > 150
    verify(base / "whole" / "set")
    return _sharded.files(base / "whole" / "set")


def test_shards_make_the_set_that_the_library_writes_in_one_call(base, whole, tmp_path):
    manifest = read_manifest(base / "whole" / "set")
    config = _config(base)
    model = T5QueryGenerator.from_preset(config.generator)
    queries = model.write_queries(
        sources.sampled_documents(config.corpus, None),
        seed=config.seed,
        samples=config.samples_per_document,
        batch_size=config.batch_size,
    )
    write_synthetic(
        tmp_path / "set", queries, manifest["provenance"], None, 3, "public"
    )
    data_card.write(tmp_path / "set", manifest)
    assert _sharded.files(tmp_path / "set") == whole
    assert len({row for row in whole["beir/queries.jsonl"].splitlines()}) > 150


def test_two_devices_write_the_set_of_one(base, whole, tmp_path, on_two_devices):
    with on_two_devices():
        stage.run(_config(base), tmp_path / "out")
    assert _sharded.files(tmp_path / "out" / "set") == whole


def test_beam_writes_the_set_of_one_command(base, whole, tmp_path):
    flags = ("--runner=DirectRunner",)
    assert stage.run(_config(base), tmp_path / "out", passes.Launch(beam=flags))
    assert _sharded.files(tmp_path / "out" / "set") == whole


def test_two_commands_write_the_set_of_one_with_its_certificate(base, whole, tmp_path):
    generator = tmp_path / "generator"
    _tiny.write_private_generator(generator, base / "public", 8.0)
    config, out = _config(base, generator=str(generator)), tmp_path / "out" / "made"
    assert stage.run(config, out, passes.Launch(2, 1)) is None and not out.exists()
    # Shards that wait for the others say what holds of them.
    shards = tmp_path / "out" / ".made.shards"
    found = json.loads((shards / sharded_stages.GUARANTEE_FILE).read_text())
    certificate = read_certificate(generator)
    assert found["certificate"] == certificate
    assert stage.run(config, out, passes.Launch(2, 0))
    assert read_manifest(out / "set")["certificate"] == certificate
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"made", "private"}  # logs
    found = _sharded.files(out / "set")
    told = {"manifest.json", "README.md", "certificate.json"}
    assert {name: data for name, data in found.items() if name not in told} == {
        name: data for name, data in whole.items() if name not in told
    }


def test_errors_of_a_worker_of_beam_are_those_of_any_command(tmp_path):
    work = passes.Work("any", 2, _refusing)
    shards = ShardDirectory(tmp_path / "pass", PassSpec("any", 2, {}, {}))
    shards.open()
    with pytest.raises(InputError, match="^the vocabulary does not fit"):
        beam.run(shards, work, [0, 1], [])
    assert shards.missing() == [0, 1]


def _refusing():
    raise InputError("the vocabulary does not fit the generator.")


def test_all_may_lie_on_an_object_store(base, whole, tmp_path):
    """`ram://` has no locks and no directories to rename either."""
    remote = f"ram:/{tmp_path}"
    for name in ("public", "pairs"):
        io.copy_tree(str(base / name), f"{remote}/{name}")
    config = _config(base, generator=f"{remote}/public", corpus=f"{remote}/pairs")
    place = f"{remote}/work/out"
    assert stage.run(config, place, passes.Launch(2, 1)) is None
    shards = f"{remote}/work/.out.shards"
    assert len(tf.io.gfile.glob(f"{shards}/synthesize-*.json")) == 2
    tf.io.gfile.remove(f"{shards}/synthesize-00003-of-00005.json")
    made = stage.run(config, place)
    assert stage.run(config, place)["run"] == made["run"]
    assert tf.io.gfile.listdir(f"{remote}/work") in (["out"], ["out/"])
    io.copy_tree(place, str(tmp_path / "out"))
    found = _sharded.files(tmp_path / "out" / "set")
    # All but the manifest, which tells the paths of the inputs.
    assert found.pop("manifest.json")
    assert found == {name: whole[name] for name in found}
    assert set(whole) - set(found) == {"manifest.json"}
    with pytest.raises(InputError, match="ram:/"):
        stage.run(_config(base, generator=f"{remote}/nothing"), place)
    with pytest.raises(DataError, match="corpus.jsonl"):
        stage.run(_config(base, corpus=f"{remote}/nothing"), place)


# -- Processes of their own, as users run them -----------------------------------


def _start(base, directory, name, *flags):
    if name == "overlap":
        settings = {"data": base / "pairs", "corpus": base / "texts", "draws": 2}
    else:
        paths = {"generator": base / "public", "corpus": base / "pairs"}
        settings = {**paths, **_SETTINGS}
    return _sharded.Command(name, directory / "private" / "out", settings, *flags)


def _is_whole(directory, expected):
    found = _sharded.output(directory / "private" / "out")
    assert found[0].keys() == expected[0].keys()
    assert [n for n, data in expected[0].items() if found[0][n] != data] == []
    assert found[1:] == expected[1:]
    # Nothing else is left but what the owner keeps.
    beside = {path.name for path in (directory / "private").iterdir()}
    assert beside <= {"out", "logs", "private_reads.jsonl", "fingerprint.key"}
    reads = directory / "private" / "private_reads.jsonl"
    assert not reads.exists() or len(reads.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "shards"),
    [("overlap", 6), pytest.param("synthesize", 5, marks=pytest.mark.slow)],
)
def test_a_pass_killed_in_a_shard_goes_on_where_it_was(base, tmp_path, name, shards):
    """And two commands at once are never at one shard: the second waits for it."""
    assert _start(base, tmp_path / "whole", name).ends().count("rows in") == shards
    expected = _sharded.output(tmp_path / "whole" / "private" / "out")
    made = _start(base, tmp_path / "killed", name).is_killed_in_a_shard(marks=2)
    assert 2 <= made < shards
    rest = _start(base, tmp_path / "killed", name).ends()
    assert rest.count("rows in") == shards - made
    _is_whole(tmp_path / "killed", expected)

    first = _start(base, tmp_path / "both", name)
    first.stops_in_a_shard(marks=1)
    second = _start(base, tmp_path / "both", name)
    place = tmp_path / "both" / "private" / "out"
    second.waits_for(lambda: len(_sharded.marks_in(place)) == shards - 1)
    assert not place.exists()
    first.goes_on()
    said = first.ends() + second.ends()
    assert said.count("rows in") == shards
    _is_whole(tmp_path / "both", expected)


@pytest.mark.slow  # two workers that import TensorFlow
def test_two_workers_of_beam_write_the_set_of_one_command(base, whole, tmp_path):
    command = _start(base, tmp_path, "synthesize", *_WORKERS)
    command.ends()
    log = (tmp_path / "private" / "logs" / "out" / "log.jsonl").read_text()
    points = [json.loads(line) for line in log.splitlines()]
    made = {one["shard"]: one["process"] for one in points if "finished" in one}
    assert sorted(made) == list(range(5)) and len(set(made.values())) == 2
    assert command.process.pid not in made.values()
    assert _sharded.files(tmp_path / "private" / "out" / "set") == whole
