"""Shards of a pass: whole or not there; made in one process, or on Beam."""

import contextlib
import os
import pathlib
import sys

import pytest
from helpers import squares

from tfdpsq.run.frame import runner
from tfdpsq.run.frame.places import Place
from tfdpsq.run.frame.shards import Shards
from tfdpsq.validation import InputError


def _make(made, index, number=50):
    with made.writing(index) as out:
        with open(out.path("txt"), "w") as file:
            file.write(f"shard {index}\n" * number)
        out.count = number
        out.result["largest"] = index


def _content(made):
    return {
        file.name: file.read_bytes() for file in pathlib.Path(made.directory).iterdir()
    }


def test_shards_are_the_same_files_in_any_order(tmp_path):
    made = Shards(str(tmp_path), 3)
    for index in (2, 0):
        _make(made, index)
    assert made.missing() == [1] and made.mark(1) is None
    _make(made, 1)
    assert made.missing() == []
    assert made.mark(2) == {"count": 50, "result": {"largest": 2}}
    assert list(made.paths("txt")) == [f"{tmp_path}/0000{i}.txt" for i in range(3)]
    before = _content(made)
    _make(made, 1)
    assert _content(made) == before


@pytest.mark.parametrize("again", [False, True])
def test_failed_write_leaves_the_shard_as_it_was(tmp_path, again):
    made = Shards(str(tmp_path), 1)
    if again:
        _make(made, 0)
    before = _content(made)
    with pytest.raises(KeyboardInterrupt):
        with made.writing(0) as out:
            with open(out.path("txt"), "w") as file:
                file.write("half")
            raise KeyboardInterrupt
    assert _content(made) == before


# -- A pass --------------------------------------------------------------------------


def _run(place, beam=None, **changes):
    made = squares.Squares.Settings(**changes)
    return runner.execute(squares.STAGE, made, place, beam=beam)


def _killed(place, monkeypatch, at):
    start = squares.Squares.start

    def dies(self, c):
        make = start(self, c)

        def make_or_die(index, out):
            make(index, out)
            if index == at:
                raise KeyboardInterrupt

        return make_or_die

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(squares.Squares, "start", dies)
        _run(place)


@pytest.mark.parametrize("changes", [{"add": 1}, {"rows": 8}, {}])
def test_shards_of_other_settings_are_not_used(tmp_path, monkeypatch, changes):
    place = Place.of(tmp_path / "squares")
    _killed(place, monkeypatch, at=2)
    (directory,) = place.partial.glob("shards/*")
    assert Shards(str(directory), 4).missing() == [2, 3]
    total = sum(n * n for n in range(16)) + 16 * changes.get("add", 0)
    assert _run(place, **changes)["result"] == {"sum": total}
    assert not place.partial.exists()


def test_pass_without_a_shard_yet_takes_other_settings(tmp_path):
    place = Place.of(tmp_path / "squares")
    with pytest.raises(InputError, match="0 is unlucky"):
        _run(place, unlucky=0)
    assert _run(place)["result"]["sum"] == 1240


def test_without_beam_the_command_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "apache_beam", None)
    with pytest.raises(InputError, match=r"pip install 'tfdpsq\[beam\]'"):
        _run(Place.of(tmp_path / "squares"), beam=())


_WORKERS = ("--direct_num_workers=2", "--direct_running_mode=multi_processing")


@pytest.mark.parametrize("flags", [(), _WORKERS])
def test_beam_makes_the_shards_of_one_process(tmp_path, monkeypatch, flags):
    pytest.importorskip("apache_beam")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # `helpers` too
    one = _run(Place.of(tmp_path / "one"))
    two = _run(Place.of(tmp_path / "two"), beam=("--runner=DirectRunner", *flags))
    assert one["result"] == two["result"]
    rows = [(tmp_path / name / "rows.txt").read_text() for name in ("one", "two")]
    assert rows[0] == rows[1]


def test_error_of_a_worker_of_beam_is_that_of_any_command(tmp_path):
    pytest.importorskip("apache_beam")
    with pytest.raises(InputError, match="^13 is unlucky. Leave it out.$"):
        _run(Place.of(tmp_path / "out"), beam=(), unlucky=13)
