"""Where outputs may be written, by their guarantee; their modes and times."""

import json
import math
import os
import pathlib
import stat

import pytest
from helpers import tiny

from tfdpsq.privacy import read_certificate
from tfdpsq.privacy.proof import certificate as certificates
from tfdpsq.run import prepare
from tfdpsq.run.core import outputs, releases, sources, workdir
from tfdpsq.run.core.releases import CERTIFIED, PRIVATE, PUBLIC, Output
from tfdpsq.validation import DataError, InputError


def _certificate(epsilon, description="a generator"):
    """What the rule looks at."""
    certificate = {
        "format": certificates.FORMAT,
        "description": description,
        "private": math.isfinite(epsilon),
        "guarantee": {"epsilon": certificates.as_json(epsilon)},
    }
    return {**certificate, "digest": certificates.digest_of(certificate)}


_FINITE, _INFINITE = _certificate(2.0), _certificate(math.inf)


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


def _stage(place, guarantee, certificate=None, config=()):
    def make(out):
        (out / "part").mkdir()
        (out / "part" / "file").write_text("text")
        if certificate is not None:
            (out / "certificate.json").write_text(json.dumps(certificate))

    output = Output(place, guarantee, "test data")
    return workdir.run_stage(output, dict(config), {}, make)


# -- Where -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "released"),
    [
        ("release/out", True),
        ("job/release/deep/down/out", True),
        ("release", True),
        ("private/out", False),
        ("job/my-release/out", False),
        ("job/release/../private/out", False),
        ("gs://bucket/job/release/out", True),
        ("gs://bucket/job/private/out", False),
    ],
)
def test_private_output_is_refused_under_release(tmp_path, place, released):
    place = place if "://" in place else tmp_path / place
    assert releases.is_released(place) == released
    if released:
        with pytest.raises(
            InputError, match="under release/, but would hold test data"
        ):
            Output(place, PRIVATE, "test data")
    else:
        Output(place, PRIVATE, "test data")
    for guarantee in (PUBLIC, CERTIFIED):
        Output(place, guarantee, "test data")


@pytest.mark.parametrize("place", ["job/release/deep/out", "job/private/o", "job/out"])
def test_private_directory_is_beside_release_and_never_in_it(tmp_path, place):
    found = releases.private_directory(tmp_path / place)
    assert found == tmp_path / "job" / "private" and not releases.is_released(found)
    for given in (str(tmp_path / "release" / "private"), " ", "gs://bucket/keys"):
        with pytest.raises(InputError, match="private_directory is "):
            Output(tmp_path / place, CERTIFIED, "test data", given)
    with pytest.raises(InputError, match="Set private_directory"):
        releases.private_directory("gs://bucket/out")


# -- What is made has the guarantee that was stated --------------------------------


@pytest.mark.parametrize(
    ("guarantee", "certificate"),
    [(CERTIFIED, None), (CERTIFIED, _INFINITE), (PUBLIC, _FINITE)],
)
def test_output_of_another_guarantee_is_not_released(tmp_path, guarantee, certificate):
    with pytest.raises(InputError):
        _stage(tmp_path / "release" / "out", guarantee, certificate)
    assert list((tmp_path / "release").iterdir()) == []
    _stage(tmp_path / "release" / "right", CERTIFIED, _FINITE)
    stated = json.loads((tmp_path / "release/right/stage.json").read_text())
    assert stated["guarantee"] == CERTIFIED


def test_two_certificates_in_one_output_are_refused(tmp_path):
    """Two guarantees add up, and each would be taken for the whole."""
    with pytest.raises(InputError, match="different runs"):
        with outputs.filled(Output(tmp_path / "out", CERTIFIED, "models")) as out:
            for name, text in (("a", _FINITE), ("b", _certificate(2.0, "another"))):
                (out / name).mkdir()
                (out / name / "certificate.json").write_text(json.dumps(text))
    assert list(tmp_path.iterdir()) == []


def test_guarantee_follows_from_certificates_and_what_stages_state(tmp_path):
    assert releases.guarantee_of(None) == PUBLIC
    assert releases.guarantee_of(_FINITE) == CERTIFIED
    assert releases.guarantee_of(_INFINITE) == PRIVATE
    assert releases.guarantee_of({**_FINITE, "private": False}) == PRIVATE
    _stage(tmp_path / "audited", PRIVATE, _FINITE)
    assert releases.guarantee_of(_FINITE, str(tmp_path / "audited")) == PRIVATE
    assert releases.guarantee_of(_FINITE, "", str(tmp_path / "audited/part")) == PRIVATE


@pytest.mark.parametrize(
    ("guarantee", "name"),
    [
        (PUBLIC, "certified"),
        (PUBLIC, "embeddings/part"),
        (CERTIFIED, "unprotected"),
        (CERTIFIED, "embeddings"),
    ],
)
def test_no_stage_claims_more_than_what_it_is_made_from(tmp_path, guarantee, name):
    """Whatever the stage says: its settings, nested ones too, name what it reads."""
    _stage(tmp_path / "certified", CERTIFIED, _FINITE)
    _stage(tmp_path / "unprotected", PRIVATE, _INFINITE)
    _stage(tmp_path / "embeddings", PRIVATE)
    config = {"deep": {"inputs": ["pydocs", str(tmp_path / name)]}}
    with pytest.raises(InputError, match="deep.inputs is "):
        _stage(tmp_path / "release" / "out", guarantee, _FINITE, config)
    assert not (tmp_path / "release").exists()
    _stage(tmp_path / "derived", PRIVATE, config=config)
    # Embeddings of private queries have no certificate, and looked like public ones.
    with pytest.raises(DataError, match="stage.json"):
        read_certificate(tmp_path / "embeddings")


# -- Modes and times ----------------------------------------------------------------


def test_private_output_is_its_owners_from_the_first_byte(tmp_path):
    seen = {}

    def make(out):
        (out / "part").mkdir()
        for name in ("direct", "part/deep"):
            (out / name).write_text("secret")
        os.chmod(out / "direct", 0o666)  # as a library may do
        seen.update({p.name: _mode(p) for p in (out, out / "part", out / "part/deep")})

    place = tmp_path / "job" / "private" / "deep" / "out"
    workdir.run_stage(Output(place, PRIVATE, "test data"), {}, {}, make)
    assert sorted(seen.values()) == [0o600, 0o700, 0o700]
    assert _modes(tmp_path / "job" / "private") == {(True, 0o700), (False, 0o600)}
    assert _mode(tmp_path / "job") == 0o755


def test_released_output_can_be_read_and_tells_no_time(tmp_path):
    release = tmp_path / "job" / "release"
    _stage(release / "deep" / "out", CERTIFIED, _FINITE)
    _stage(release / "second", PUBLIC)
    outputs.write_file(release / "measured" / "metrics.json", "{}", PUBLIC, "x")
    for folder in (release, release / "deep"):
        os.utime(folder, (1e9, 1e9))  # as where the command was killed
    _stage(release / "deep" / "out", CERTIFIED, _FINITE)  # finished
    assert _modes(release) == {(True, 0o755), (False, 0o644)}
    for path in (release, *release.rglob("*")):
        assert path.stat().st_mtime == outputs.MODIFIED, path


def test_failing_stage_leaves_nothing_and_no_time(tmp_path):
    (tmp_path / "release").mkdir()

    def fails(out):
        (out / "part").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(Exception, match="No space left"):
        workdir.run_stage(Output(tmp_path / "release/out", PUBLIC, "x"), {}, {}, fails)
    assert list((tmp_path / "release").iterdir()) == []
    assert (tmp_path / "release").stat().st_mtime == outputs.MODIFIED


def test_private_directory_and_what_was_left_open_in_it_are_closed(tmp_path):
    private = tmp_path / "private"
    for name in ("runs/out/ledger.jsonl", "logs/out/a.json", "fingerprint.key"):
        (private / name).parent.mkdir(parents=True, exist_ok=True)
        (private / name).write_text("secret")
    outputs.open_private(private)
    assert _modes(private) == {(True, 0o700), (False, 0o600)}
    sources.keyed_fingerprint("ab", tmp_path / "job" / "private")
    assert _modes(tmp_path / "job" / "private") == {(True, 0o700), (False, 0o600)}


def test_reports_and_workdirs_are_their_owners_and_not_released(tmp_path):
    path = tmp_path / "job" / "report.html"
    outputs.write_file(path, "<p>a query</p>", PRIVATE, "private queries")
    assert _mode(path) == 0o600 and path.read_text() == "<p>a query</p>"
    opened = workdir.open_workdir(tmp_path / "new", {"a": 1})
    assert _modes(opened) == {(True, 0o700), (False, 0o600)}
    with pytest.raises(InputError, match="under release/"):
        outputs.write_file(tmp_path / "release" / "report.html", "", PRIVATE, "queries")
    with pytest.raises(InputError, match="under release/"):
        workdir.open_workdir(tmp_path / "release" / "job", {"a": 1})
    assert not (tmp_path / "release").exists()


# -- Damaged files of ours ----------------------------------------------------------


@pytest.mark.parametrize("content", ["", "{}", '{"a"'])
def test_damaged_stage_is_told_and_not_to_be_deleted(tmp_path, content):
    """The files next to it may have cost budget: they cannot be made again for free."""
    path = tmp_path / "out" / "stage.json"
    path.parent.mkdir()
    path.write_text(content)
    for call in (
        lambda: workdir.stage_fingerprint(path.parent),
        lambda: workdir.finished_stage(path.parent, {}, {}),
    ):
        with pytest.raises(DataError, match="stage.json") as caught:
            call()
        assert "elete" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"x" * 64])
def test_damaged_key_makes_no_fingerprint(tmp_path, content):
    """An empty key would release a plain hash of the private data."""
    (tmp_path / sources.KEY_FILE).write_bytes(content)
    with pytest.raises(DataError, match=sources.KEY_FILE):
        sources.keyed_fingerprint("a", tmp_path)


def test_what_prepare_releases_depends_on_no_private_query(tmp_path):
    """With other queries, more of them, and other judgements: the same bytes."""
    pairs, found = tmp_path / "pairs", []
    tiny.write_pairs(pairs, train=12, dev=4, test=4)
    config = tiny.config(prepare, data=str(pairs), vocabulary_size=0)
    for name in ("one", "two"):
        out = tmp_path / name / "release" / "prepare"
        prepare.run(config, out)
        files = {p.relative_to(out): p for p in out.rglob("*") if p.is_file()}
        texts = {name: path.read_bytes() for name, path in files.items()}
        stage = json.loads(texts.pop(pathlib.Path("stage.json")))
        del stage["run"], stage["written_in"]  # random, and another place
        assert set(stage["result"]) == {"documents", "public_pairs"}
        found.append((texts, stage))
        queries = (pairs / "queries.jsonl").read_text().replace("who ", "what ")
        added = json.dumps({"_id": "added", "text": "one more"}) + "\n"
        (pairs / "queries.jsonl").write_text(queries + added)
        with (pairs / "qrels" / "train.tsv").open("a") as qrels:
            qrels.write("added\td1\t1\n")
    assert found[0] == found[1]
