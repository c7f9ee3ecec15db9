"""Passes: who does which shard, who merges, and what a fault costs. No model."""

import ast
import json
import os
import pathlib
import sys
import threading
import time

import ml_collections
import pytest
import tensorflow as tf

from tfdpsq.data.shards import PassSpec, ShardDirectory
from tfdpsq.run.core import command, releases
from tfdpsq.run.passes import passes, sharded_stages
from tfdpsq.validation import DataError, InputError

_ROOT = pathlib.Path(__file__).resolve().parents[2]
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
    assert stage["seconds"] >= 0
    again = _run(tmp_path / "out", numbers)
    assert "seconds" not in again and again["run"] == stage["run"]
    assert numbers.loaded == 1
    with pytest.raises(InputError, match="seed: 3 there, 4 now"):
        _run(tmp_path / "out", numbers, config=ml_collections.ConfigDict({"seed": 4}))


def test_the_time_that_is_told_is_that_of_the_whole_pass(tmp_path, caplog):
    """It was that of the merge alone, which a user takes for all of it."""
    numbers = _Numbers()
    numbers.before = lambda index: time.sleep(0.25)
    with caplog.at_level("INFO", "absl"):
        stage = _run(tmp_path / "out", numbers)
    assert 0.25 * SHARDS <= stage["seconds"] < 30
    told = [line for line in caplog.messages if line.startswith(("out:", "numbers: m"))]
    assert told[0].startswith("out: 7 shards, in ")
    assert told[1:] == [
        "numbers: merging 7 shards",
        f"out: finished in {stage['seconds']:.0f} s",
    ]
    assert int(told[2].split()[3]) >= 2  # 7 times a quarter, and the rest


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


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)])
def test_commands_share_the_shards_and_the_last_one_merges(tmp_path, order):
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


def test_more_commands_than_shards_and_another_number_of_them(tmp_path):
    first, rest = _Numbers(), _Numbers()
    assert _run(tmp_path / "out", first, passes.Launch(20, 6)) is None
    assert _run(tmp_path / "out", first, passes.Launch(20, 19)) is None
    assert (first.loaded, first.made) == (1, [6])
    _run(tmp_path / "out", rest)
    assert rest.made == [0, 1, 2, 3, 4, 5]
    _is_whole(tmp_path / "out")


@pytest.mark.parametrize(
    "given, message",
    [
        ((4, 4), "shard_index is 4; with num_shards = 4"),
        ((4, -1), "shard_index is -1"),
        ((0, 0), "num_shards is 0"),
        ((2, 0, ("--runner=DirectRunner",)), "Leave out num_shards"),
    ],
)
def test_a_command_that_is_none_is_refused(given, message):
    with pytest.raises(InputError, match=message):
        passes.Launch(*given)


def test_a_workdir_on_another_file_system_is_not_taken_for_a_local_one():
    assert command.place_of("out/a", anywhere=True) == pathlib.Path.cwd() / "out/a"
    assert command.place_of("gs://bucket/a", anywhere=True) == "gs://bucket/a"
    with pytest.raises(InputError, match="gs://bucket/a; this stage writes to local"):
        command.place_of("gs://bucket/a", anywhere=False)
    assert sharded_stages.pass_directory("gs://b/c/a/") == "gs://b/c/.a.shards"
    assert sharded_stages.pass_directory(pathlib.Path("a")) == ".a.shards"


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


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-3])


def _change(path):
    path.write_bytes(path.read_bytes().replace(b"9", b"8"))


def _edit_mark(path):
    mark = path.with_suffix(".json")
    mark.write_text(mark.read_text().replace('"count": 10', '"count": 11'))


@pytest.mark.parametrize("damage", [_truncate, _change, _edit_mark, os.unlink])
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


def test_a_file_that_vanishes_while_it_is_merged(tmp_path):
    numbers = _Numbers()
    merges = []

    def merge(out, shards):
        merges.append(out)
        assert not os.listdir(out)  # what the last merge had written is gone
        (out / "half").write_text("half")
        if len(merges) < 3:
            os.unlink(shards.path(2, "txt"))
        found = _merge(out, shards)
        (out / "half").unlink()
        return found

    _run(tmp_path / "out", numbers, merge=merge)
    assert numbers.made == [*range(SHARDS), 2, 2]
    _is_whole(tmp_path / "out")


def test_a_shard_that_is_damaged_again_and_again_is_an_error(tmp_path):
    numbers = _Numbers()

    def merge(out, shards):
        os.unlink(shards.path(2, "txt"))
        return _merge(out, shards)

    with pytest.raises(DataError, match="Shard 2 has to be made again"):
        _run(tmp_path / "out", numbers, merge=merge)
    assert numbers.made.count(2) == 3
    assert not (tmp_path / "out").exists()
    assert _shards(tmp_path / "out").missing() == [2]


def test_two_commands_at_once_share_the_work_and_one_merges(tmp_path):
    """Both are told to do everything; each makes what the other is not making."""
    workers = [_Numbers(), _Numbers()]
    merges = []
    together = threading.Barrier(2, timeout=30)
    for worker in workers:
        # Each makes its first shard while the other makes one, too.
        worker.before = lambda index: together.wait() if index in (0, 1) else None

    def merge(out, shards):
        merges.append(out)
        return _merge(out, shards)

    results = [None, None]

    def command(number):
        results[number] = _run(tmp_path / "out", workers[number], merge=merge)

    threads = [threading.Thread(target=command, args=[i]) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(workers[0].made + workers[1].made) == list(range(SHARDS))
    assert workers[0].made and workers[1].made
    assert len(merges) == 1
    assert results[0]["run"] == results[1]["run"]
    _is_whole(tmp_path / "out")


def test_a_shard_that_another_process_holds_is_waited_for_at_the_end(tmp_path):
    """The other dies without finishing: the shard is made here then."""
    shards = _shards(tmp_path / "out")
    shards.open()
    numbers = _Numbers()
    last = threading.Event()
    numbers.before = lambda index: last.set() if index == SHARDS - 1 else None
    with shards.lock(2, wait=False):
        thread = threading.Thread(target=_run, args=[tmp_path / "out", numbers])
        thread.start()
        assert last.wait(30)
        assert not (tmp_path / "out").exists()
    thread.join(60)
    assert numbers.made == [0, 1, 3, 4, 5, 6, 2]
    _is_whole(tmp_path / "out")


def test_a_command_that_others_finish_under_returns_their_result(tmp_path):
    slow, other = _Numbers(), _Numbers()

    def overtaken(index):
        # Without locks, as on an object store, others make all, merge and remove.
        if index == 0:
            pathlib.Path(shards.directory, ".numbers-00000-of-00007.lock").unlink()
            _run(tmp_path / "out", other)

    shards = _shards(tmp_path / "out")
    slow.before = overtaken
    stage = _run(tmp_path / "out", slow)
    assert slow.made == [0]
    assert other.made == list(range(SHARDS))
    assert stage["result"] == {"numbers": 70}
    _is_whole(tmp_path / "out")


def test_shards_that_vanish_one_by_one_are_not_made_again(tmp_path):
    """A command merges and removes while another looks for what is to be done."""
    late, other = _Numbers(), _Numbers()
    shards = _shards(tmp_path / "out")
    work = passes.Work("numbers", SHARDS, late.start)
    _run(tmp_path / "out", other, passes.Launch(2, 0))
    tf.io.gfile.remove(f"{shards.directory}/pass.json")  # what `remove` begins with
    with pytest.raises(FileNotFoundError, match="was removed"):
        passes.Maker(shards, work).make_all(range(SHARDS))
    assert late.made == []


def test_what_a_killed_merger_left_is_removed(tmp_path):
    numbers = _Numbers()
    _run(tmp_path / "out", numbers)
    shards = _shards(tmp_path / "out")
    shards.open()  # as if it had been killed after its merge
    _run(tmp_path / "out", numbers)
    _is_whole(tmp_path / "out")


def test_beam_is_imported_by_one_module_that_nobody_imports_at_once():
    """A library that half of the users do not have, and seconds to import."""
    late = []
    for path in (_ROOT / "tfdpsq").rglob("*.py"):
        source = path.read_text("utf-8")
        tree = ast.parse(source if "beam" in source else "")
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            if any(name.startswith("apache_beam") for name in names):
                assert path.name == "beam.py", path
            if "tfdpsq.run.passes.beam" in names:
                assert node not in tree.body, path
                late.append(path.name)
    assert late == ["sharded_stages.py"]


def test_without_beam_the_command_says_what_to_install(tmp_path, monkeypatch):
    import tfdpsq.run.passes

    monkeypatch.setitem(sys.modules, "apache_beam", None)
    monkeypatch.delitem(sys.modules, "tfdpsq.run.passes.beam", raising=False)
    monkeypatch.delattr(tfdpsq.run.passes, "beam", raising=False)
    with pytest.raises(InputError, match=r"pip install 'tfdpsq\[beam\]'"):
        _run(tmp_path / "out", _Numbers(), passes.Launch(beam=()))
