"""Shards of a pass: whole or not there, and damage to one never goes unseen."""

import contextlib
import errno
import json
import os
import resource

import pytest
import tensorflow as tf

from tfdpsq.data import any_files
from tfdpsq.data.shards import DamagedShard, PassSpec, ShardDirectory
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


def test_shards_are_files_of_known_names_whoever_makes_them_and_when(place, tmp_path):
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


def _edit_mark(shards):
    _rewrite(shards.path(1, "json"), lambda data: data.replace(b": 50", b": 51"))


def _cut_mark(shards):
    _rewrite(shards.path(1, "json"), lambda data: data[:40])


def _copy_mark(shards):
    tf.io.gfile.remove(shards.path(1, "json"))
    tf.io.gfile.copy(shards.path(0, "json"), shards.path(1, "json"))


def _lose_file(shards):
    tf.io.gfile.remove(shards.path(1, "txt"))


def _lose_mark(shards):
    tf.io.gfile.remove(shards.path(1, "json"))


@pytest.mark.parametrize(
    "damage, file, problem",
    [
        (_truncate, "tfrecord", "bytes, its mark says"),
        (_flip, "txt", "SHA-256 is"),
        (_edit_mark, "json", "was edited"),
        (_cut_mark, "json", "is no JSON"),
        (_copy_mark, "json", "is the mark of shard 0"),
        (_lose_file, "txt", "is missing"),
        (_lose_mark, "json", "is not there"),
    ],
)
def test_damage_is_named_and_costs_that_shard_alone(place, damage, file, problem):
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


def test_a_file_that_vanishes_between_listing_and_reading(place, monkeypatch):
    shards = _made(place)
    whole = tf.io.gfile.listdir

    def listdir(path):
        names = whole(path)
        if tf.io.gfile.exists(shards.path(2, "json")):
            tf.io.gfile.remove(shards.path(2, "json"))
        return names

    monkeypatch.setattr(tf.io.gfile, "listdir", listdir)
    assert shards.missing() == [2]
    monkeypatch.undo()
    measured = any_files.size

    def size(path):
        found = measured(path)
        if path == shards.path(0, "txt"):
            tf.io.gfile.remove(path)
        return found

    monkeypatch.setattr(any_files, "size", size)
    with pytest.raises(DamagedShard, match="vanished") as caught:
        shards.verify(0)
    assert caught.value.path == shards.path(0, "txt")
    assert shards.verify(1).count == 50
    monkeypatch.undo()
    with pytest.raises(DamagedShard, match="cannot be read") as caught:
        with shards.reading(1):
            tf.io.gfile.remove(shards.path(1, "txt"))
            tf.io.gfile.GFile(shards.path(1, "txt"), "rb").read()
    assert caught.value.index == 1


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"settings": {"seed": 8, "lengths": [3, 4]}}, "settings.seed: 7 there, 8 now"),
        ({"inputs": {"corpus": "abd"}}, "inputs.corpus: 'abc' there, 'abd' now"),
        ({"shards": 4}, "shards: 3 there, 4 now"),
    ],
)
def test_another_pass_is_refused_with_both_fingerprints(place, changes, told):
    shards = _opened(place)
    values = {name: getattr(SPEC, name) for name in ("settings", "inputs", "shards")}
    other = PassSpec("squares", **{**values, **changes})
    _make(shards, 0)
    before = _content(shards)
    with pytest.raises(InputError) as caught:
        _opened(place, other)
    for part in (told, SPEC.fingerprint, other.fingerprint, place):
        assert part in str(caught.value)
    assert _content(shards) == before


def test_a_sound_mark_of_another_pass_is_not_written_over(place, tmp_path):
    shards = _opened(place)
    other = PassSpec("squares", 3, {"seed": 8}, {})
    _make(_opened(str(tmp_path / "other"), other), 1)
    name = other.file(1, "json")
    tf.io.gfile.copy(f"{tmp_path}/other/{name}", f"{place}/{name}")
    for look in (lambda: shards.finished(1), shards.missing, lambda: shards.verify(1)):
        with pytest.raises(InputError, match="another pass") as caught:
            look()
        assert other.fingerprint in str(caught.value)
        assert SPEC.fingerprint in str(caught.value)


def test_a_pass_without_a_shard_may_be_begun_anew_with_other_settings(place):
    _opened(place)
    other = PassSpec("squares", 3, {"seed": 8}, {})
    shards = _opened(place, other)
    _make(shards, 0)
    with pytest.raises(InputError, match="settings.seed: 8 there, 7 now"):
        _opened(place)


def test_not_while_a_process_is_making_its_first_shard(tmp_path):
    shards = _opened(tmp_path / "pass")
    with shards.lock(2, wait=False), pytest.raises(InputError, match="another pass"):
        _opened(tmp_path / "pass", PassSpec("squares", 3, {"seed": 8}, {}))


@pytest.mark.parametrize("damage", [lambda data: data[:30], lambda data: b"[]"])
def test_an_edited_pass_file_is_written_again_and_shards_are_kept(place, damage):
    shards = _made(place)
    before = _content(shards)
    _rewrite(f"{place}/pass.json", damage)
    shards.open()
    assert _content(shards) == before
    assert shards.missing() == []


@pytest.mark.parametrize("again", [False, True])
def test_what_fails_leaves_a_shard_as_it_was(place, again):
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


@pytest.mark.parametrize("writer", ["tfrecord", "gfile", "python"])
def test_a_full_disk_is_told_and_finished_shards_are_kept(tmp_path, writer):
    shards = _opened(tmp_path / "pass")
    _make(shards, 0)
    before = _content(shards)
    with (
        pytest.raises(InputError, match="run the same command again") as caught,
        _files_of_at_most(1 << 20),
        shards.writing(1) as out,
    ):
        path = out.path("data")
        if writer == "tfrecord":
            with tf.io.TFRecordWriter(path) as file:
                for _ in range(3):
                    file.write(bytes(1 << 20))
        elif writer == "gfile":
            with tf.io.gfile.GFile(path, "wb") as file:
                file.write(bytes(3 << 20))
        else:
            with open(path, "wb") as file:
                file.write(bytes(3 << 20))
    assert str(shards.directory) in str(caught.value)
    assert "Free space" in str(caught.value)
    assert _content(shards) == before
    assert shards.missing() == [1, 2]


def test_two_processes_without_locks_leave_a_whole_shard(tmp_path):
    shards = _opened(f"ram:/{tmp_path}/two")
    with shards.lock(0, wait=False) as first, shards.lock(0, wait=False) as second:
        assert first and second  # there are none
        with shards.writing(0) as one, shards.writing(0) as other:
            for out in (one, other):
                with tf.io.gfile.GFile(out.path("txt"), "w") as file:
                    file.write("the same bytes")
            assert one.path("txt") != other.path("txt")
    assert shards.verify(0).files["txt"]["bytes"] == 14
    assert len(_content(shards)) == 3  # pass.json, the shard's file, its mark


def test_a_lock_is_one_process_s_and_removes_what_a_dead_one_left(tmp_path):
    shards = _opened(tmp_path / "pass")
    left = [tmp_path / "pass" / f".{SPEC.file(i, 'txt')}.0ab.partial" for i in (0, 1)]
    for path in left:
        path.write_text("half")
    with shards.lock(0, wait=False) as held:
        assert held
        assert [path.exists() for path in left] == [False, True]
        with shards.lock(0, wait=False) as again:
            assert not again
        with shards.lock(1, wait=False) as other:
            assert other
    with shards.lock(0, wait=False) as held:
        assert held


def test_without_locks_what_another_process_may_be_writing_stays(tmp_path, monkeypatch):
    shards = _opened(tmp_path / "pass")
    partial = tmp_path / "pass" / f".{SPEC.file(0, 'txt')}.0ab.partial"
    partial.write_text("half")

    def refused(*args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(any_files.fcntl, "flock", refused)
    with shards.lock(0, wait=False) as held:
        assert held and partial.exists()


def test_a_lock_in_a_directory_that_was_merged_and_removed(tmp_path):
    shards = _opened(tmp_path / "pass")
    shards.remove()
    with pytest.raises(FileNotFoundError):
        with shards.lock(0, wait=True):
            pass
    assert not os.path.exists(shards.directory)


def test_a_seal_is_broken_by_any_edit(tmp_path):
    path = str(tmp_path / "sealed.json")
    any_files.write_sealed(path, {"a": 1, "b": [1, 2]})
    assert any_files.read_sealed(path) == {"a": 1, "b": [1, 2]}
    value = json.loads((tmp_path / "sealed.json").read_text())
    for edit in ({"a": 2}, {"c": 0}, {"seal": "0" * 64}):
        (tmp_path / "sealed.json").write_text(json.dumps({**value, **edit}))
        with pytest.raises(ValueError, match="seal"):
            any_files.read_sealed(path)


@pytest.mark.parametrize("extension", ["json", "", "a/b", ".."])
def test_names_that_are_no_shard_s_are_refused(tmp_path, extension):
    shards = _opened(tmp_path / "pass")
    with pytest.raises(InputError, match="extension is"), shards.writing(0) as out:
        out.path(extension)


def test_a_pass_has_a_name_and_shards():
    with pytest.raises(InputError, match="shards is 0"):
        PassSpec("squares", 0, {}, {})
    with pytest.raises(InputError, match="name is 'a/b'"):
        PassSpec("a/b", 1, {}, {})
