"""Which shards of a pass are missing, where every look at a file takes its time."""

import os
import pathlib
import shutil
import time

from tfdpsq.data import any_files
from tfdpsq.data.shards import PassSpec, ShardDirectory


def test_many_marks_are_judged_as_each_by_itself_in_a_fraction_of_the_time(
    tmp_path, monkeypatch
):
    """On a disk where every answer takes 20 ms, as a remote one's does."""
    spec = PassSpec("squares", 32, {}, {})
    shards = ShardDirectory(tmp_path / "pass", spec)
    shards.open()
    monkeypatch.setattr(any_files, "flush", lambda path: None)  # no test of the disk
    there = [index for index in range(32) if index % 5]
    for index in there:
        with shards.writing(index) as out:
            pathlib.Path(out.path("txt")).write_text(f"shard {index}")
    os.unlink(shards.path(7, "txt"))
    pathlib.Path(shards.path(21, "txt")).write_text("shard")  # cut short
    edited = pathlib.Path(shards.path(18, "json"))
    edited.write_text(edited.read_text().replace("18", "19"))
    shutil.copy(shards.path(1, "json"), shards.path(28, "json"))
    waits = []

    def slow(function):
        def waiting(*arguments):
            waits.append(function.__name__)
            time.sleep(0.02)
            return function(*arguments)

        return waiting

    for name in ("read_sealed", "size"):
        monkeypatch.setattr(any_files, name, slow(getattr(any_files, name)))
    started = time.monotonic()
    expected = [index for index in range(32) if shards.finished(index) is None]
    one_by_one = time.monotonic() - started
    alone = sorted(waits)
    waits.clear()
    started = time.monotonic()
    assert shards.missing() == expected
    assert time.monotonic() - started < one_by_one / 4
    assert expected == sorted({*range(0, 32, 5), 7, 18, 21, 28})
    # The same looks at the same files, but for marks that the listing lacks.
    assert alone.count("read_sealed") == 32
    assert waits.count("read_sealed") == len(there)
    assert waits.count("size") == alone.count("size") == len(there) - 2
    assert shards.missing([28, 2, 0, 21]) == [28, 0, 21]
