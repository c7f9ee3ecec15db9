"""Synthesis by any number of processes writes the same set, to the last byte."""

import contextlib
import json
import os
import pathlib
import pickle
import signal

import pytest
import tensorflow as tf
from helpers import sharded as _sharded
from helpers import tiny as _tiny

from tfdpsq.data import (
    BeirDirectory,
    Tokenizer,
    any_files,
    encode_query,
    read_manifest,
    read_synthetic,
    verify,
    write_synthetic,
)
from tfdpsq.data.shards import PassSpec, ShardDirectory
from tfdpsq.generator import (
    SamplingConfig,
    SynthesisConfig,
    Synthesizer,
    T5QueryGenerator,
    synthesis,
    synthesize,
)
from tfdpsq.run import synthesize as stage
from tfdpsq.run.core import sources
from tfdpsq.run.passes import beam, passes, sharded_stages
from tfdpsq.run.reporting import data_card
from tfdpsq.validation import DataError, InputError

_TESTS = pathlib.Path(__file__).parents[1]
_ROOT = _TESTS.parent


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Pairs of 84 documents, and a generator of random weights for them."""
    base = tmp_path_factory.mktemp("sharded")
    _tiny.write_start(base, dropout=0.1)
    return base


def _config(base, **changes):
    return _tiny.config(
        stage,
        changes,
        generator=str(base / "public"),
        corpus=str(base / "pairs"),
        samples_per_document=2,
        document_length=48,
        query_length=12,
        batch_size=16,
        shards=3,
        shard_documents=20,
    )


def _by_one_call(config, directory, manifest):
    """The set as it is written without shards: the library's two functions alone."""
    settings = SynthesisConfig(
        samples_per_document=config.samples_per_document,
        document_length=config.document_length,
        query_length=config.query_length,
        batch_size=config.batch_size,
        seed=config.seed,
        sampling=SamplingConfig(1.0, None, 0.8),
    )
    write_synthetic(
        directory,
        synthesize(
            T5QueryGenerator.from_preset(config.generator),
            Tokenizer(sources.vocabulary_file("", config.generator)),
            sources.sampled_documents(config.corpus, config.max_documents or None),
            settings,
        ),
        manifest["provenance"],
        None,
        config.shards,
        manifest["guarantee"],
    )
    return _sharded.files(directory)


@pytest.fixture(scope="module")
def whole(base):
    """The files of the set that one command writes."""
    result = stage.run(_config(base), base / "whole")
    assert result["result"]["queries"] > 150
    verify(base / "whole" / "set")
    return _sharded.files(base / "whole" / "set")


def test_the_set_is_what_is_written_without_shards(base, whole, tmp_path):
    manifest = read_manifest(base / "whole" / "set")
    assert manifest["guarantee"] == "public"
    by_one_call = _by_one_call(_config(base), tmp_path / "set", manifest)
    data_card.write(tmp_path / "set", manifest)
    assert _sharded.files(tmp_path / "set") == whole
    assert by_one_call.items() < whole.items()
    assert len({row for row in whole["beir/queries.jsonl"].splitlines()}) > 150


def test_two_commands_write_the_same_set(base, whole, tmp_path):
    for index in (1, 0):
        done = stage.run(_config(base), tmp_path / "out", passes.Launch(2, index))
        assert (done is None) == (index == 1)
        assert (tmp_path / "out").exists() == (index == 0)
    assert _sharded.files(tmp_path / "out" / "set") == whole
    assert {path.name for path in tmp_path.iterdir()} == {"out", "private"}  # logs


def test_two_devices_write_the_same_set(base, whole, tmp_path, on_two_devices):
    with on_two_devices():
        stage.run(_config(base), tmp_path / "out")
    assert _sharded.files(tmp_path / "out" / "set") == whole


def test_shards_of_a_private_generator_say_what_holds_of_them(
    base, tmp_path, monkeypatch
):
    certificate = {"guarantee": {"epsilon": 8.0}}
    monkeypatch.setattr(sources, "certificate_of_model", lambda _: certificate)
    assert stage.run(_config(base), tmp_path / "out", passes.Launch(2, 1)) is None
    (shards,) = tmp_path.glob(".out.shards")
    found = json.loads((shards / sharded_stages.GUARANTEE_FILE).read_text())
    assert found["certificate"] == certificate
    # It is the set's in the end, and the shards are gone with what they said.
    assert stage.run(_config(base), tmp_path / "out", passes.Launch(2, 0))
    manifest = read_manifest(tmp_path / "out" / "set")
    assert manifest["certificate"] == certificate
    assert manifest.get("guarantee") == "private"  # as it is of no private run
    assert not shards.exists()


def test_beam_in_this_process_writes_the_same_set(base, whole, tmp_path, monkeypatch):
    loaded = []
    load = T5QueryGenerator.from_preset.__func__

    def counted(cls, *args):
        loaded.append(args)
        return load(cls, *args)

    monkeypatch.setattr(T5QueryGenerator, "from_preset", classmethod(counted))
    flags = ("--runner=DirectRunner",)
    assert stage.run(_config(base), tmp_path / "out", passes.Launch(beam=flags))
    assert _sharded.files(tmp_path / "out" / "set") == whole
    assert len(loaded) == 1


def test_what_beam_s_workers_are_sent_can_be_pickled_and_is_small(base, monkeypatch):
    sent = []
    monkeypatch.setattr(beam, "run", lambda *args: sent.append(args))
    with pytest.raises(InputError, match="that they share with"):
        stage.run(_config(base), base / "sent", passes.Launch(beam=("--x=1",)))
    ((shards, work, missing, flags),) = sent
    assert missing == list(range(5)) and flags == ("--x=1",)
    data = pickle.dumps(beam.MakeShardFn(shards, work))
    assert len(data) < 20_000
    again = pickle.loads(data)
    again.setup()
    assert list(again.process(1)) == [1]
    assert shards.missing() == [0, 2, 3, 4]


def _refusing():
    raise InputError("the vocabulary does not fit the generator.")


def test_what_a_worker_of_beam_refuses_is_told_as_by_any_command(tmp_path):
    work = passes.Work("any", 2, _refusing)
    shards = ShardDirectory(tmp_path / "pass", PassSpec("any", 2, {}, {}))
    shards.open()
    with pytest.raises(InputError) as caught:
        beam.run(shards, work, [0, 1], [])
    assert str(caught.value).startswith("the vocabulary does not fit the generator.")
    assert shards.missing() == [0, 1]


def test_a_generator_is_made_ready_once_for_all_shards(base, whole, monkeypatch):
    """And a shard's queries are those of its documents in the whole."""
    traced = []
    generate = synthesis.generate

    def counted(*args, **options):
        traced.append(args)
        return generate(*args, **options)

    monkeypatch.setattr(synthesis, "generate", counted)
    model = T5QueryGenerator.from_preset(str(base / "public"))
    tokenizer = Tokenizer(base / "spiece.model")
    documents = list(BeirDirectory(base / "pairs").documents())
    settings = SynthesisConfig(2, 48, 12, batch_size=16)
    writer = Synthesizer(model, tokenizer, settings)
    parts = []
    for start, stop in ((40, 84), (0, 7), (7, 40)):
        part = list(writer.queries(iter(documents[start:stop]), start))
        parts.append((start, part))
    assert len(traced) == 1
    rows = [row for _, part in sorted(parts) for row in part]
    found = read_synthetic(base / "whole" / "set")
    assert [row for row in rows if row.query] == list(found)
    assert [row.query_id for row in rows] == [f"genQ{i}" for i in range(168)]
    assert len({encode_query(row) for row in rows}) == 168


def test_all_may_lie_on_an_object_store(base, whole, tmp_path):
    """`ram://` has no locks and no directories to rename either."""
    remote = f"ram:/{tmp_path}"
    for name in ("public", "pairs"):
        any_files.copy_tree(str(base / name), f"{remote}/{name}")
    config = _config(base, generator=f"{remote}/public", corpus=f"{remote}/pairs")
    place = f"{remote}/work/out"
    assert stage.run(config, place, passes.Launch(2, 1)) is None
    shards = f"{remote}/work/.out.shards"
    assert len(tf.io.gfile.glob(f"{shards}/synthesize-*.json")) == 2
    mark = f"{shards}/synthesize-00003-of-00005.json"
    tf.io.gfile.remove(mark)
    made = stage.run(config, place)
    assert stage.run(config, place)["run"] == made["run"]
    assert tf.io.gfile.listdir(f"{remote}/work") in (["out"], ["out/"])
    any_files.copy_tree(place, str(tmp_path / "out"))
    found = _sharded.files(tmp_path / "out" / "set")
    # All but the manifest, which tells the paths of the inputs.
    assert found.pop("manifest.json")
    assert found == {name: whole[name] for name in found}
    assert set(whole) - set(found) == {"manifest.json"}
    with pytest.raises(InputError, match="ram:/.*no such file or directory"):
        stage.run(_config(base, generator=f"{remote}/nothing"), place)
    with pytest.raises(DataError, match="has no corpus.jsonl"):
        stage.run(_config(base, corpus=f"{remote}/nothing"), place)


# -- Processes of their own, as users run them -----------------------------------


_SETTINGS = (
    "generator",
    "corpus",
    "samples_per_document",
    "document_length",
    "query_length",
    "batch_size",
    "shards",
    "shard_documents",
)


def _start(base, directory, *flags):
    config = _config(base)
    settings = {name: config[name] for name in _SETTINGS}
    return _sharded.Command("synthesize", directory, settings, *flags)


def _is_whole(directory, whole):
    assert _sharded.files(directory / "out" / "set") == whole
    # Nothing else is left but the logs.
    assert {path.name for path in directory.iterdir()} == {"out", "private"}


@pytest.mark.slow  # four processes, one after another
def test_four_processes_write_the_same_set(base, whole, tmp_path):
    for index in range(4):
        flags = ("--num_shards=4", f"--shard_index={index}")
        told = _start(base, tmp_path / "out", *flags).ends()
        missing = [s for s in range(5) if s % 4 > index]
        if missing:
            assert f"{len(missing)} of 5 shards are still to be made" in told
            assert ", ".join(map(str, missing)) in told
    _is_whole(tmp_path, whole)


@pytest.mark.slow  # one process, and two of Beam's
def test_two_processes_of_beam_write_the_same_set(base, whole, tmp_path):
    _start(base, tmp_path / "out", *_sharded.BEAM).ends()
    _is_whole(tmp_path, whole)


@pytest.mark.slow  # two processes, one after another
def test_a_process_killed_in_a_shard_is_gone_on_with(base, whole, tmp_path):
    made = _start(base, tmp_path / "out").is_killed_in_a_shard(2, partial=True)
    told = _start(base, tmp_path / "out").ends()
    assert told.count("rows in") == 5 - made
    _is_whole(tmp_path, whole)


@pytest.mark.slow  # two processes
def test_two_processes_told_to_make_the_same_shards(base, whole, tmp_path):
    pair = [_start(base, tmp_path / "out") for _ in range(2)]
    assert sum(command.ends().count("rows in") for command in pair) == 5
    _is_whole(tmp_path, whole)


@pytest.mark.slow  # four processes
def test_what_is_wrong_with_flags_is_said_in_one_line(base, tmp_path):
    for flags, message in (
        (("--num_shards=4", "--shard_index=4"), "shard_index is 4"),
        (("--shard_index=1",), "num_shards was not given"),
    ):
        told = _start(base, tmp_path / "out", *flags).ends(status=2)
        assert "Traceback" not in told
        assert message in told.strip().splitlines()[-1]
    told = _start(base, tmp_path / "out", "--runner=X").ends(status=2)
    assert "there is no flag --runner" in told
    assert not list(tmp_path.iterdir())
    # `ram://` is gone with its process, which wrote nothing to a directory "ram:".
    told = _start(base, f"ram:/{tmp_path}/out").ends()
    assert told.count("rows in") == 5 and "out: finished in" in told
    assert not pathlib.Path(_ROOT, "ram:").exists()


def _writing(directory):
    """The processes that have a file of an unfinished shard open."""
    found = set()
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or closed a file, meanwhile
            for link in (process / "fd").iterdir():
                file = os.readlink(link)
                if file.startswith(str(directory)) and ".tfrecord." in file:
                    found.add(int(process.name))
    return found


@pytest.mark.slow  # two workers and those that come after them
def test_a_worker_of_beam_that_is_killed_costs_its_shard_alone(base, whole, tmp_path):
    def killed():
        for worker in _writing(tmp_path):
            os.kill(worker, signal.SIGSTOP)
            inside = worker in _writing(tmp_path)  # it could end the shard meanwhile
            os.kill(worker, signal.SIGKILL if inside else signal.SIGCONT)
            if inside:
                return True
        return False

    command = _start(base, tmp_path / "out", *_sharded.BEAM)
    command.waits_for(killed)
    told = command.ends()
    assert "a worker of Beam died" in told
    _is_whole(tmp_path, whole)
    assert not _writing(tmp_path)
