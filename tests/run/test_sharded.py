"""Sets are equal to the last byte, whichever process makes their shards.

By one command, on two devices, or on Beam. `test_shards` has the rules without models,
and `test_frame` a pass that is killed and goes on.
"""

import pathlib

import pytest
from helpers import framed, tiny

from tfdpsq.data import read_manifest
from tfdpsq.run.frame import runner, settings
from tfdpsq.run.frame.places import Place
from tfdpsq.run.stages import synthesize

_SETTINGS = {
    "samples_per_document": 2,
    "max_length": 12,
    "batch_size": 16,
    "shards": 3,
    "shard_documents": 20,
}
_WORKERS = (
    "--runner=DirectRunner",
    "--direct_num_workers=2",
    "--direct_running_mode=multi_processing",
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Pairs of 84 documents, and a generator of random weights for them."""
    base = tmp_path_factory.mktemp("sharded")
    tiny.write_start(base, dropout=0.1)
    return base


def _run(base, place, **options):
    paths = {"generator": str(base / "public"), "corpus": str(base / "pairs")}
    made = settings.from_config(
        synthesize.STAGE.Settings, {**paths, **_SETTINGS, **options.pop("changes", {})}
    )
    runner.execute(synthesize.STAGE, made, Place.of(place), **options)
    return _content(place)


def _content(place):
    found = pathlib.Path(place) / "set"
    files = sorted(path for path in found.rglob("*") if path.is_file())
    data = {p.relative_to(found).as_posix(): p.read_bytes() for p in files}
    for name in ("manifest.json", "README.md"):  # have the settings of speed
        del data[name]
    return {**data, "rows": read_manifest(found)["fingerprint"]}


@pytest.fixture(scope="module")
def whole(base):
    """The files of the set that one command writes."""
    return _run(base, base / "whole")


def test_size_of_shards_changes_nothing(base, whole, tmp_path):
    assert _run(base, tmp_path / "one", changes={"shard_documents": 100}) == whole


def test_two_devices_write_the_set_of_one(base, whole, tmp_path, on_two_devices):
    with on_two_devices() as devices:
        assert _run(base, tmp_path / "out", devices=devices) == whole


@pytest.mark.slow
def test_two_workers_of_beam_write_the_set_of_one_command(base, whole, tmp_path):
    pytest.importorskip("apache_beam")
    assert _run(base, tmp_path / "out", beam=_WORKERS) == whole
    assert framed.reads(tmp_path / "private") == []
