"""Where outputs may be written, by their class; their modes and times."""

import dataclasses
import json
import os
import stat

import pytest
from helpers import framed

from tfdpsq.privacy import read_certificate
from tfdpsq.run.frame import places, records, runner, settings
from tfdpsq.run.frame.artefacts import Artefact, class_stated
from tfdpsq.run.frame.places import Place, Privacy
from tfdpsq.validation import DataError, InputError

_FINITE = framed.certificate(8.0)
_INFINITE = {**_FINITE, "private": False}


class _Stage(runner.Stage):
    """Makes a file, and what certificates it is told; of the class it is told."""

    name = "test"

    @dataclasses.dataclass(frozen=True)
    class Settings(settings.Settings):
        input: str = settings.path(Artefact, "")

    def __init__(self, privacy=Privacy.PUBLIC, *certificates, make=None):
        self._privacy, self._certificates, self._make = privacy, certificates, make

    def privacy(self, s, given):
        return self._privacy

    def certificate(self, s, given):
        return None

    def run(self, c):
        (c.out / "part").mkdir()
        (c.out / "part" / "file").write_text("text")
        for number, certificate in enumerate(self._certificates):
            folder = c.out / f"model{number}" if number else c.out
            folder.mkdir(exist_ok=True)
            (folder / "certificate.json").write_text(json.dumps(certificate))
        return self._make(c) if self._make else {}


def _run(place, *made, **options):
    stage = _Stage(*made, **options)
    return runner.execute(stage, stage.Settings(), Place.of(place))


@pytest.fixture(autouse=True)
def umask():
    """Others may read what nobody closes to them."""
    before = os.umask(0o022)
    yield
    assert os.umask(before) == 0o022  # every stage leaves it as it was


def _mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def _modes(folder):
    return {(path.is_dir(), _mode(path)) for path in (folder, *folder.rglob("*"))}


# -- Where -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "allowed"),
    [
        ("release/out", False),
        ("job/release/deep/down/out", False),
        ("job/release/private/out", False),
        ("job/out", False),
        ("private/out", True),
        ("job/private/deep/out", True),
    ],
)
def test_private_output_is_allowed_under_private_only(tmp_path, place, allowed):
    found = Place.of(tmp_path / place)
    if allowed:
        found.require(Privacy.PRIVATE, "test")
    else:
        with pytest.raises(InputError, match=r"Use --workdir=.*/private/out"):
            found.require(Privacy.PRIVATE, "test")
    for privacy in (Privacy.PUBLIC, Privacy.CERTIFIED):
        found.require(privacy, "test")


@pytest.mark.parametrize("place", ["job/release/deep/out", "job/private/o", "job/out"])
def test_private_directory_is_beside_release_and_never_in_it(tmp_path, place):
    assert Place.of(tmp_path / place).private == tmp_path / "job" / "private"


# -- What is made has the class that was stated --------------------------------------


@pytest.mark.parametrize(
    ("privacy", "certificates"),
    [
        (Privacy.CERTIFIED, ()),
        (Privacy.PUBLIC, (_FINITE,)),
        # Two guarantees add up, and each would be taken for the whole.
        (Privacy.CERTIFIED, (_FINITE, framed.certificate(8.0, "other"))),
    ],
)
def test_output_of_another_class_is_not_released(tmp_path, privacy, certificates):
    with pytest.raises(InputError, match="but its certificates say"):
        _run(tmp_path / "release" / "out", privacy, *certificates)
    assert not (tmp_path / "release" / "out").exists()
    _run(tmp_path / "release" / "right", Privacy.CERTIFIED, _FINITE)
    stated = json.loads((tmp_path / "release/right/stage.json").read_text())
    assert stated["guarantee"] == "certified"


def test_class_follows_from_certificates_and_what_stages_state(tmp_path):
    of = records.class_of_certificate
    assert of(None) == Privacy.PUBLIC
    assert of(_FINITE) == Privacy.CERTIFIED
    assert of(_INFINITE) == Privacy.PRIVATE
    _run(tmp_path / "private" / "audited", Privacy.PRIVATE, _FINITE)
    audited = tmp_path / "private" / "audited"
    for path in (audited, audited / "part"):
        assert class_stated(str(path)) == Privacy.PRIVATE
    assert Artefact.open(str(audited), "input").privacy == Privacy.PRIVATE


def test_private_output_without_a_certificate_is_never_read_as_public(tmp_path):
    """Embeddings of private queries have no certificate, and looked like public."""
    _run(tmp_path / "private" / "embeddings", Privacy.PRIVATE)
    with pytest.raises(DataError, match="stage.json"):
        read_certificate(tmp_path / "private" / "embeddings")


# -- Modes and times ----------------------------------------------------------------


def test_private_output_is_its_owners_from_the_first_byte(tmp_path):
    seen = {}

    def make(c):
        for name in ("direct", "part/deep"):
            (c.out / name).write_text("secret")
        os.chmod(c.out / "direct", 0o666)  # as a library may do
        made = (c.out, c.out / "part", c.out / "part/deep")
        seen.update({p.name: _mode(p) for p in made})

    _run(tmp_path / "job/private/deep/out", Privacy.PRIVATE, make=make)
    assert sorted(seen.values()) == [0o600, 0o700, 0o700]
    assert _modes(tmp_path / "job" / "private") == {(True, 0o700), (False, 0o600)}
    assert _mode(tmp_path / "job") == 0o755


def test_released_output_can_be_read_and_tells_no_time(tmp_path):
    release = tmp_path / "job" / "release"
    _run(release / "deep" / "out", Privacy.CERTIFIED, _FINITE)
    _run(release / "second")
    for folder in (release, release / "deep"):
        os.utime(folder, (1e9, 1e9))  # as where the command was killed
    _run(release / "deep" / "out", Privacy.CERTIFIED, _FINITE)  # finished
    assert _modes(release) == {(True, 0o755), (False, 0o644)}
    times = {path.stat().st_mtime for path in (release, *release.rglob("*"))}
    assert times == {315_532_800}


def test_failing_stage_leaves_nothing_but_private_partials(tmp_path):
    def fails(c):
        raise OSError(28, "No space left on device")

    with pytest.raises(InputError, match="No space left"):
        _run(tmp_path / "release" / "out", make=fails)
    assert [path.name for path in tmp_path.iterdir()] == ["private"]
    assert _modes(tmp_path / "private") == {(True, 0o700), (False, 0o600)}


def test_key_and_logs_are_their_owners(tmp_path):
    private = tmp_path / "job" / "private"
    records.keyed_fingerprint("ab", private)
    with places.owner_only():
        (places.open_private(private / "logs" / "out") / "log.jsonl").write_text("")
    assert _modes(private) == {(True, 0o700), (False, 0o600)}


# -- Damaged files of ours ----------------------------------------------------------


@pytest.mark.parametrize("content", ["", "{}", '{"a"'])
def test_damaged_stage_is_told_and_not_to_be_deleted(tmp_path, content):
    """The files next to it may have cost budget: they cannot be made again for free."""
    path = tmp_path / "out" / "stage.json"
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(DataError, match="stage.json") as caught:
        _run(path.parent)
    assert "elete" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"x" * 64])
def test_damaged_key_makes_no_fingerprint(tmp_path, content):
    """An empty key would release a plain hash of the private data."""
    (tmp_path / records.KEY_FILE).write_bytes(content)
    with pytest.raises(DataError, match=records.KEY_FILE):
        records.keyed_fingerprint("a", tmp_path)
