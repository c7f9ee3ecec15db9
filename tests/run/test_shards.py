"""Shards of a pass: whole or not there, and damage to one never goes unseen."""

import contextlib
import resource

import pytest
import tensorflow as tf

from tfdpsq.run.passes.shards import DamagedShard, PassSpec, ShardDirectory
from tfdpsq.validation import InputError

SPEC = PassSpec("squares", 3, {"seed": 7, "lengths": [3, 4]}, {"corpus": "abc"})


@pytest.fixture(params=["local", "ram"])
def place(request, tmp_path):
    """A directory of the disk, and of a file system that is none, as `gs://`."""
    return str(tmp_path / "pass") if request.param == "local" else f"ram:/{tmp_path}/p"


def _opened(place, spec=SPEC):
    shards = ShardDirectory(place, spec)
    shards.open()
    return shards


def _make(shards, index):
    with shards.writing(index) as out:
        with tf.io.TFRecordWriter(out.path("tfrecord")) as file:
            for number in range(50):
                file.write(str((number + index) ** 2).encode())
        with tf.io.gfile.GFile(out.path("txt"), "w") as file:
            file.write(f"shard {index}\n")
        out.count = 50
        out.result["largest"] = (49 + index) ** 2


def _made(place):
    shards = _opened(place)
    for index in range(3):
        _make(shards, index)
    return shards


def _content(shards):
    names = sorted(tf.io.gfile.listdir(shards.directory))
    return {
        name: tf.io.gfile.GFile(f"{shards.directory}/{name}", "rb").read()
        for name in names
        if not name.endswith(".lock")
    }


def _rewrite(path, change):
    with tf.io.gfile.GFile(path, "rb") as file:
        data = file.read()
    tf.io.gfile.remove(path)  # `ram://` writes behind what is there
    with tf.io.gfile.GFile(path, "wb") as file:
        file.write(change(data))


def test_shards_are_the_same_files_in_any_order(place, tmp_path):
    shards = _opened(place)
    assert shards.missing() == [0, 1, 2]
    for index in (2, 0):
        _make(shards, index)
    assert shards.missing() == [1]
    assert shards.finished(1) is None
    _make(shards, 1)
    mark = shards.verify(2)
    assert (mark.index, mark.count, mark.result) == (2, 50, {"largest": 51**2})
    records = tf.data.TFRecordDataset(shards.path(2, "tfrecord"))
    assert [int(r) for r in records.as_numpy_iterator()] == [
        (n + 2) ** 2 for n in range(50)
    ]
    assert set(_content(shards)) == {
        "pass.json",
        *(
            f"squares-{i:05d}-of-00003.{extension}"
            for i in range(3)
            for extension in ("json", "tfrecord", "txt")
        ),
    }
    other = _made(str(tmp_path / "other"))
    assert _content(other) == _content(shards)
    shards.remove()
    assert not tf.io.gfile.exists(place) or not tf.io.gfile.listdir(place)
    shards.remove()  # of what is gone already


def _truncate(shards):
    _rewrite(shards.path(1, "tfrecord"), lambda data: data[:-100])


def _flip(shards):
    _rewrite(shards.path(1, "txt"), lambda data: b"S" + data[1:])


def _cut_mark(shards):
    _rewrite(shards.path(1, "json"), lambda data: data[:40])


def _lose_file(shards):
    tf.io.gfile.remove(shards.path(1, "txt"))


@pytest.mark.parametrize(
    "damage, file, problem",
    [
        (_truncate, "tfrecord", "bytes, its mark says"),
        (_flip, "txt", "SHA-256 is"),
        (_cut_mark, "json", "is not there"),
        (_lose_file, "txt", "is missing"),
    ],
)
def test_damage_is_named_and_costs_one_shard(place, damage, file, problem):
    shards = _made(place)
    before = _content(shards)
    damage(shards)
    with pytest.raises(DamagedShard, match=problem) as caught:
        shards.verify(1)
    assert caught.value.index == 1
    assert caught.value.path == shards.path(1, file)
    if damage is _flip:  # sizes do not show it
        assert shards.missing() == []
        shards.discard(1)
    assert shards.missing() == [1]
    assert shards.verify(0).index == 0 and shards.verify(2).index == 2
    _make(shards, 1)
    assert _content(shards) == before


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"settings": {"seed": 8, "lengths": [3, 4]}}, "settings.seed: 7 there, 8 now"),
        ({"inputs": {"corpus": "abd"}}, "inputs.corpus: 'abc' there, 'abd' now"),
    ],
)
def test_another_pass_is_refused(place, changes, told):
    shards = _opened(place)
    values = {name: getattr(SPEC, name) for name in ("settings", "inputs", "shards")}
    other = PassSpec("squares", **{**values, **changes})
    _make(shards, 0)
    before = _content(shards)
    with pytest.raises(InputError) as caught:
        _opened(place, other)
    for part in (told, place):
        assert part in str(caught.value)
    assert _content(shards) == before


@pytest.mark.parametrize("again", [False, True])
def test_failed_write_leaves_the_shard_as_it_was(place, again):
    shards = _opened(place)
    if again:
        _make(shards, 0)
    before = _content(shards)
    with pytest.raises(RuntimeError, match="worker"), shards.writing(0) as out:
        with tf.io.gfile.GFile(out.path("txt"), "w") as file:
            file.write("half")
        raise RuntimeError("the worker's")
    assert _content(shards) == before
    assert (shards.finished(0) is not None) is again


@contextlib.contextmanager
def _files_of_at_most(size):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("writer", ["tfrecord", "gfile"])
def test_full_disk_keeps_finished_shards(tmp_path, writer):
    shards = _opened(tmp_path / "pass")
    _make(shards, 0)
    before = _content(shards)
    with (
        pytest.raises(InputError, match="Run the same command again") as caught,
        _files_of_at_most(1 << 20),
        shards.writing(1) as out,
    ):
        path = out.path("data")
        if writer == "tfrecord":
            with tf.io.TFRecordWriter(path) as file:
                for _ in range(3):
                    file.write(bytes(1 << 20))
        else:
            with tf.io.gfile.GFile(path, "wb") as file:
                file.write(bytes(3 << 20))
    assert str(shards.directory) in str(caught.value)
    assert "Free space" in str(caught.value)
    assert _content(shards) == before
    assert shards.missing() == [1, 2]


def test_lock_is_exclusive(tmp_path):
    shards = _opened(tmp_path / "pass")
    with shards.lock(0, wait=False) as held:
        assert held
        with shards.lock(0, wait=False) as again:
            assert not again
        with shards.lock(1, wait=False) as other:
            assert other
    with shards.lock(0, wait=False) as held:
        assert held
