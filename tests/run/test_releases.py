"""The rule of what may lie where, by its guarantee; no stage writes past it."""

import json
import math
import os
import pathlib
import stat

import pytest
from helpers import tiny as _tiny

from tfdpsq.privacy import read_certificate
from tfdpsq.privacy.proof import certificate as certificates
from tfdpsq.run import prepare
from tfdpsq.run.core import command, outputs, releases, sources, stages, workdir
from tfdpsq.run.core.releases import CERTIFIED, PRIVATE, PUBLIC, Output
from tfdpsq.validation import DataError, InputError

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def _certificate(epsilon, description="a generator"):
    """What the rule looks at; `test_certificate` tests the rest."""
    certificate = {
        "format": certificates.FORMAT,
        "description": description,
        "private": math.isfinite(epsilon),
        "guarantee": {"epsilon": certificates.json_number(epsilon)},
    }
    return {**certificate, "digest": certificates.digest_of(certificate)}


@pytest.fixture(scope="module")
def finite():
    return _certificate(2.0)


@pytest.fixture(scope="module")
def infinite():
    return _certificate(math.inf)


@pytest.fixture(autouse=True)
def umask():
    """Others may read what nobody closes to them."""
    before = os.umask(0o022)
    yield
    assert os.umask(before) == 0o022  # every stage leaves it as it was


def _mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def _stage(place, guarantee, certificate=None, text="text", **options):
    def make(out):
        (out / "part").mkdir()
        (out / "part" / "file").write_text(text)
        if certificate is not None:
            (out / "certificate.json").write_text(json.dumps(certificate))

    return workdir.run_stage(
        Output(place, guarantee, "test data"), options.get("config", {}), {}, make
    )


# -- Where -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "place, released",
    [
        ("release/out", True),
        ("job/release/deep/down/out", True),
        ("release", True),
        ("private/out", False),
        ("released/out", False),
        ("job/my-release/out", False),
        ("job/release.old/out", False),
        ("gs://bucket/job/release/out", True),
        ("gs://bucket/job/private/out", False),
        ("link/out", True),
        ("job/chain/out", True),
        ("into/out", True),
        ("job/release/../private/out", False),
        ("job/release/away/out", True),
    ],
)
def test_a_path_is_released_however_it_is_spelled(tmp_path, place, released):
    (tmp_path / "job" / "release").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    # What is released need not say so: `link` is job/release; `chain` leads through it
    # to elsewhere; `into` is in it.
    (tmp_path / "link").symlink_to(tmp_path / "job" / "release")
    (tmp_path / "job" / "release" / "away").symlink_to("../../elsewhere")
    (tmp_path / "job" / "chain").symlink_to("release/away")
    (tmp_path / "into").symlink_to(tmp_path / "job" / "release" / "new")
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


def test_a_file_url_is_a_path_of_this_machine(tmp_path):
    """A link in one led queries without a guarantee into a released place."""
    (tmp_path / "job" / "release").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "job" / "release")
    for url in (f"file://{tmp_path}", f"file://localhost{tmp_path}"):
        for place in (f"{url}/link/out", f"{url}/job/release/out"):
            with pytest.raises(InputError, match="under release/, but would hold"):
                Output(place, PRIVATE, "test data")
            assert releases.private_directory(place) == tmp_path / "job" / "private"
        with pytest.raises(InputError, match="private_directory is .* under release/"):
            releases.private_directory(tmp_path / "out", f"{url}/link/keys")
        assert Output(f"{url}/private/out", PUBLIC, "test data").owner_only
        # Which is what commands are given.
        found = command.place_of(f"{url}/link/out", anywhere=True)
        assert found == tmp_path / "link" / "out"


@pytest.mark.parametrize("given", [".", "./", "../here", "../here/../here/."])
def test_a_relative_workdir_has_a_name_and_a_parent(tmp_path, monkeypatch, given):
    """With "." it was made inside the output, which then was not empty."""
    (tmp_path / "here" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    place = command.place_of(given, anywhere=False)
    assert place == tmp_path / "here"
    assert releases.private_directory(place) == tmp_path / "private"
    # Where it is not the same, a link is followed as the system does.
    (tmp_path / "link").symlink_to(tmp_path / "here" / "below")
    place = command.place_of("../link/../out", anywhere=False)
    assert os.path.realpath(place) == str(tmp_path / "here" / "out")


def test_a_private_directory_is_on_this_machine(tmp_path):
    """A directory called "gs:" was made where the command ran."""
    with pytest.raises(InputError, match="private_directory is ' ', which is white"):
        releases.private_directory("/jobs/one/out", " ")
    with pytest.raises(InputError, match="private_directory is gs://bucket/keys; keys"):
        Output(tmp_path / "out", CERTIFIED, "test data", "gs://bucket/keys")


@pytest.mark.parametrize(
    "place, private",
    [
        ("job/release/out", "job/private"),
        ("job/release/deep/down/out", "job/private"),
        ("job/private/out", "job/private"),
        ("job/out", "job/private"),
        ("job/release/again/release/out", "job/private"),
    ],
)
def test_what_is_private_of_an_output_is_never_released(tmp_path, place, private):
    found = releases.private_directory(tmp_path / place)
    assert found == tmp_path / private and not releases.is_released(found)


def test_a_private_directory_that_would_be_released_is_refused(tmp_path):
    (tmp_path / "job" / "release").mkdir(parents=True)
    (tmp_path / "job" / "private").symlink_to("release/hidden")
    given = str(tmp_path / "job" / "release" / "private")
    with pytest.raises(InputError, match="private_directory is .* under release/"):
        releases.private_directory(tmp_path / "out", given)
    with pytest.raises(InputError, match="private_directory is .* under release/"):
        Output(tmp_path / "out", CERTIFIED, "test data", given)
    # Nor through a link, of the outputs in `release` and of those next to it.
    for place in ("job/release/out", "job/out"):
        with pytest.raises(InputError, match="is released, and so is|under release/"):
            outputs.open_private(releases.private_directory(tmp_path / place))
    with pytest.raises(InputError, match="cannot be kept. Set private_directory"):
        releases.private_directory("gs://bucket/out")


@pytest.mark.parametrize("guarantee", [PUBLIC, CERTIFIED])
def test_nothing_in_a_release_is_where_who_lists_it_does_not_look(tmp_path, guarantee):
    (tmp_path / "release" / ".deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "release" / ".deep")
    for place, name in (
        (tmp_path / "release" / "private" / "b", "private"),
        (tmp_path / "release" / ".c", ".c"),
        (tmp_path / "link" / "out", ".deep"),
        ("gs://bucket/release/.d/out", ".d"),
    ):
        with pytest.raises(InputError, match=f"Leave '{name}' out of its path"):
            Output(place, guarantee, "a model")
    for place in ("private/release/out", ".hidden/release/out", "private/out"):
        Output(tmp_path / place, guarantee, "a model")


def test_the_error_names_a_place_that_is_allowed(tmp_path):
    with pytest.raises(InputError) as caught:
        Output(tmp_path / "job" / "release" / "out", PRIVATE, "private queries")
    assert f"Write it to {tmp_path}/job/private/out instead" in str(caught.value)
    with pytest.raises(InputError, match="to gs://b/private/out instead"):
        Output("gs://b/release/out", PRIVATE, "private queries")
    with pytest.raises(InputError, match="guarantee"):
        Output(tmp_path / "out", "harmless", "private queries")


# -- What is made has the guarantee that was stated --------------------------------


def test_a_stage_states_its_guarantee(tmp_path, finite, infinite):
    for name, guarantee, certificate in (
        ("release/one", PUBLIC, None),
        ("release/two", CERTIFIED, finite),
        ("three", PRIVATE, infinite),
        ("four", PRIVATE, None),
        ("five", PRIVATE, finite),
    ):
        _stage(tmp_path / name, guarantee, certificate)
        found = json.loads((tmp_path / name / "stage.json").read_text())
        assert found["guarantee"] == guarantee == releases.stated(tmp_path / name)
        assert releases.stated(tmp_path / name / "part") == guarantee


def test_what_was_made_must_have_what_was_stated(tmp_path, finite, infinite):
    edited = {**finite, "private": True, "guarantee": {**finite["guarantee"]}}
    edited["guarantee"]["epsilon"] = 0.1
    for guarantee, certificate, message in (
        (CERTIFIED, None, "carries no certificate"),
        (CERTIFIED, infinite, "of an infinite epsilon"),
        (PUBLIC, finite, "private queries had a part in it"),
        (PUBLIC, infinite, "private queries had a part in it"),
        (CERTIFIED, edited, "its digest is not that of its content"),
    ):
        with pytest.raises((InputError, DataError), match=message):
            _stage(tmp_path / "release" / "out", guarantee, certificate)
        assert list((tmp_path / "release").iterdir()) == []


def test_two_certificates_in_one_output_are_refused(tmp_path, finite):
    with pytest.raises(InputError, match="different runs"):
        with outputs.filled(Output(tmp_path / "out", CERTIFIED, "models")) as out:
            for name, text in (("a", finite), ("b", _certificate(2.0, "another"))):
                (out / name).mkdir()
                (out / name / "certificate.json").write_text(json.dumps(text))
    assert list(tmp_path.iterdir()) == []


def test_the_guarantee_follows_from_certificates_and_marks(tmp_path, finite, infinite):
    assert releases.guarantee_of(None) == PUBLIC
    assert releases.guarantee_of(finite) == CERTIFIED
    assert releases.guarantee_of(infinite) == PRIVATE
    for forged in (
        {**infinite, "private": True},
        {**finite, "private": False},
        {**finite, "guarantee": {}},
        {**finite, "guarantee": {"epsilon": "nan"}},
    ):
        assert releases.guarantee_of(forged) == PRIVATE
    _stage(tmp_path / "audited", PRIVATE, finite)
    assert releases.guarantee_of(finite, str(tmp_path / "audited")) == PRIVATE
    assert releases.guarantee_of(finite, "", str(tmp_path / "audited/part")) == PRIVATE


def test_no_stage_can_claim_more_than_what_it_is_made_from(tmp_path, finite, infinite):
    """Whatever the stage says: its settings name what it reads."""
    _stage(tmp_path / "certified", CERTIFIED, finite)
    _stage(tmp_path / "unprotected", PRIVATE, infinite)
    _stage(tmp_path / "embeddings", PRIVATE)
    old = tmp_path / "old"  # of a version that stated no guarantee
    old.mkdir()
    (old / "certificate.json").write_text(json.dumps(infinite))
    for guarantee, name in (
        (PUBLIC, "certified"),
        (PUBLIC, "unprotected"),
        (PUBLIC, "embeddings"),
        (PUBLIC, "embeddings/part"),
        (PUBLIC, "old"),
        (CERTIFIED, "unprotected"),
        (CERTIFIED, "embeddings"),
        (CERTIFIED, "old"),
    ):
        config = {"deep": {"inputs": ["pydocs", str(tmp_path / name)]}}
        with pytest.raises(InputError, match="deep.inputs is .*, whose guarantee is"):
            _stage(tmp_path / "release" / "out", guarantee, finite, config=config)
        assert not (tmp_path / "release").exists()
        _stage(tmp_path / f"of {name}".replace("/", " "), PRIVATE, config=config)


def test_one_of_the_points_that_a_choice_was_among_is_not_released(tmp_path, finite):
    """Its certificate counts its own run alone; older versions stated "certified"."""
    point = tmp_path / "private" / "choices" / "grid" / "points" / "grid-a"
    _stage(point, CERTIFIED, finite)
    (tmp_path / "link").symlink_to(point)
    for path in (point, tmp_path / "link"):
        assert releases.guarantee_of(finite, str(path)) == PRIVATE
        with pytest.raises(InputError, match="generator is .* guarantee is 'private'"):
            config = {"generator": str(path)}
            _stage(tmp_path / "release" / "set", CERTIFIED, finite, config=config)


def test_links_do_not_hide_what_an_artefact_states(tmp_path, finite):
    """A link to a private set was released, under the certificate in it."""
    _stage(tmp_path / "job" / "private" / "set", PRIVATE, finite)
    part = tmp_path / "job" / "private" / "set" / "part"
    (part / "certificate.json").write_text(json.dumps(finite))
    (part / "deep").mkdir()
    (tmp_path / "link").symlink_to(part)
    (tmp_path / "again").symlink_to("link")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "file").symlink_to(part / "file")
    # The set is elsewhere, and what says so where it was.
    _stage(tmp_path / "moved", PRIVATE, finite)
    (tmp_path / "moved" / "part").rename(tmp_path / "away")
    (tmp_path / "moved" / "part").symlink_to(tmp_path / "away")
    for name in ("link", "again", "link/deep", "files", "moved/part"):
        path = str(tmp_path / name)
        assert releases.guarantee_of(finite, path) == PRIVATE
        with pytest.raises(
            InputError, match="pairs is .*, whose guarantee is 'private"
        ):
            _stage(tmp_path / "out", CERTIFIED, finite, config={"pairs": path})
    # Those that are stated closer win, and of several the strictest.
    _stage(part / "own", CERTIFIED, finite)
    assert releases.stated(part / "own") == CERTIFIED
    (part / "own" / releases.MARK_FILE).write_text('{"guarantee": "private"}')
    assert releases.stated(part / "own") == PRIVATE
    (part / "own" / releases.MARK_FILE).write_text('{"guarantee": ["x"]}')
    assert releases.stated(part / "own") == CERTIFIED


def test_what_is_private_without_a_certificate_is_not_taken_for_public(tmp_path):
    """Embeddings of private queries have none, and looked like public ones."""
    _stage(tmp_path / "embeddings", PRIVATE)
    with pytest.raises(
        DataError, match="stage.json: says that this depends on private"
    ):
        read_certificate(tmp_path / "embeddings")
    stage = tmp_path / "embeddings" / "stage.json"
    old = json.loads(stage.read_text())
    del old["guarantee"]
    stage.write_text(json.dumps(old))
    assert read_certificate(tmp_path / "embeddings") is None  # as before


# -- Modes and times ----------------------------------------------------------------


def _look(folder):
    paths = [folder, *folder.rglob("*")]
    return {(path.is_dir(), _mode(path)) for path in paths}


def test_what_is_private_is_its_owners_from_the_first_byte(tmp_path):
    seen = {}

    def make(out):
        (out / "part").mkdir()
        for name in ("direct", "part/deep"):
            (out / name).write_text("secret")
        os.chmod(out / "direct", 0o666)  # as a library may do
        seen.update({p.name: _mode(p) for p in (out, out / "part", out / "part/deep")})

    place = tmp_path / "job" / "private" / "runs" / "out"
    workdir.run_stage(Output(place, PRIVATE, "test data"), {}, {}, make)
    assert sorted(seen.values()) == [0o600, 0o700, 0o700]
    assert _look(place) == {(True, 0o700), (False, 0o600)}
    for above in (place.parent, place.parents[1]):
        assert _mode(above) == 0o700
    assert _mode(tmp_path / "job") == 0o755


def test_what_may_be_released_can_be_read_and_tells_no_time(tmp_path, finite):
    place = tmp_path / "job" / "release" / "deep" / "out"
    _stage(place, CERTIFIED, finite)
    release = tmp_path / "job" / "release"
    assert _look(release) == {(True, 0o755), (False, 0o644)}
    _stage(release / "second", PUBLIC)
    _stage(release / "second", PUBLIC)  # finished: nothing is touched
    for path in (release, *release.rglob("*")):
        path.is_dir() and list(path.iterdir())
        found = path.stat()
        times = found.st_mtime, found.st_atime
        assert times == (outputs.MODIFIED, outputs.ACCESSED), path
    # In a private directory it is as private as all else there.
    _stage(tmp_path / "job" / "private" / "out", CERTIFIED, finite)
    assert _look(tmp_path / "job" / "private") == {(True, 0o700), (False, 0o600)}


def test_a_command_that_was_killed_before_the_last_times_sets_them_again(tmp_path):
    release = tmp_path / "job" / "release"
    _stage(release / "deep" / "out", PUBLIC)
    for folder in (release, release / "deep"):
        os.utime(folder, (1e9, 1e9))
    _stage(release / "deep" / "out", PUBLIC)  # finished
    for folder in (release, release / "deep"):
        assert folder.stat().st_mtime == outputs.MODIFIED


def test_a_private_directory_is_closed_and_so_is_what_was_left_open(tmp_path):
    private = tmp_path / "private"
    kept = [private / name for name in ("runs/out", "logs/out", "choices/out/scores")]
    for folder in kept:
        folder.mkdir(parents=True)
        (folder / "a.json").write_text("secret")
    for name in ("fingerprint.key", "runs/out/ledger.jsonl", "notes"):
        (private / name).write_text("secret")
    outputs.open_private(private)
    assert _mode(private) == _mode(private / "runs" / "out") == 0o700
    assert _mode(private / "fingerprint.key") == 0o600
    assert _mode(private / "runs" / "out" / "ledger.jsonl") == 0o600
    for folder in kept:
        assert _mode(folder) == _mode(folder.parent) == 0o700
        assert _mode(folder / "a.json") == 0o600
    assert _mode(private / "notes") == 0o644  # not ours
    shared = tmp_path / "shared"  # given by name: who enters it is not for us to say
    shared.mkdir()
    outputs.open_private(shared)
    assert _mode(shared) == 0o755
    (tmp_path / "job").mkdir()
    link = tmp_path / "job" / "private"
    link.symlink_to(shared)  # or others could put a ledger of theirs into it
    outputs.open_private(link)
    assert _mode(shared) == 0o700 and link.is_symlink()


def test_what_is_closed_stays_so_until_the_last_that_needs_it_is_done(tmp_path):
    """One private output inside another, as a stage's files in its directory."""
    with outputs.owner_only():
        with outputs.owner_only():
            (tmp_path / "inner").write_text("secret")
        (tmp_path / "outer").write_text("secret")
    (tmp_path / "after").write_text("public")
    assert _mode(tmp_path / "inner") == _mode(tmp_path / "outer") == 0o600
    assert _mode(tmp_path / "after") == 0o644


def test_the_key_of_fingerprints_is_its_owners(tmp_path):
    sources.keyed_fingerprint("ab", tmp_path / "job" / "private")
    key = tmp_path / "job" / "private" / sources.KEY_FILE
    assert _mode(key) == 0o600 and _mode(key.parent) == 0o700


@pytest.mark.parametrize("name", ["private", "private/deeper"])
def test_a_private_directory_that_is_a_file_is_named(tmp_path, name):
    (tmp_path / "private").write_text("")
    with pytest.raises(InputError, match=f"{tmp_path}/private"):
        outputs.open_private(tmp_path / name)


def test_reports_are_their_owners_and_not_released(tmp_path):
    path = tmp_path / "job" / "report.html"
    outputs.write_file(path, "<p>a query</p>", PRIVATE, "private queries")
    assert _mode(path) == 0o600 and path.read_text() == "<p>a query</p>"
    with pytest.raises(InputError, match="under release/"):
        outputs.write_file(
            tmp_path / "release" / "report.html", "", PRIVATE, "private queries"
        )
    assert not (tmp_path / "release").exists()
    opened = workdir.open_workdir(tmp_path / "new", {"a": 1})
    assert _look(opened) == {(True, 0o700), (False, 0o600)}
    with pytest.raises(InputError, match="under release/"):
        workdir.open_workdir(tmp_path / "release" / "job", {"a": 1})


def test_a_stage_that_fails_leaves_no_time_in_a_released_place(tmp_path):
    release = tmp_path / "release"
    release.mkdir()

    def fails(out):
        (out / "part").write_text("x")
        raise InputError("n was not declared")

    with pytest.raises(InputError, match="n was not declared"):
        workdir.run_stage(Output(release / "out", PUBLIC, "x"), {}, {}, fails)
    assert list(release.iterdir()) == []
    assert release.stat().st_mtime == outputs.MODIFIED


def test_a_file_beside_the_stages_leaves_no_time_in_a_released_place(tmp_path):
    """Such as the metrics of `zero_shot`, which come last."""
    place = tmp_path / "release" / "measured" / "metrics.json"
    outputs.write_file(place, "{}", PUBLIC, "x")
    for path in (place, place.parent, place.parent.parent):
        assert path.stat().st_mtime == outputs.MODIFIED, path


# -- Damaged files of ours ----------------------------------------------------------


@pytest.mark.parametrize("content", ["", "[]", "3", "null", "{}", '{"a"', "\x80"])
def test_a_damaged_stage_is_told_and_nothing_is_to_be_deleted(tmp_path, content):
    """The files next to it may have cost budget: they cannot be made again for free."""
    path = tmp_path / "out" / "stage.json"
    path.parent.mkdir()
    path.write_text(content, "latin-1")
    for call in (
        lambda: workdir.stage_fingerprint(path.parent),
        lambda: workdir.finished_stage(path.parent, {}, {}),
        lambda: workdir.read_json(path),
    ):
        with pytest.raises(
            DataError, match="stage.json: it is damaged: .*move the"
        ) as e:
            call()
        assert "elete" not in str(e.value)


@pytest.mark.parametrize("content", ["", "[]", "3", '{"a"'])
def test_a_damaged_config_of_a_workdir_is_told(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(DataError, match="config.json: it is damaged: .*copy the one"):
        workdir.open_workdir(tmp_path, {"steps": 3})


def test_another_config_does_not_advise_to_delete_what_was_paid_for(tmp_path):
    output = Output(tmp_path / "out", PUBLIC, "x")
    workdir.run_stage(output, {"steps": 3}, {}, lambda out: None)
    with pytest.raises(InputError, match="move this one away to make it again") as e:
        workdir.run_stage(output, {"steps": 4}, {}, lambda out: None)
    assert "elete" not in str(e.value)


@pytest.mark.parametrize("content", ["[]", "3", '{"a"', '{"gib": "x"}', '{"a": NaN}'])
def test_damaged_durations_are_told(tmp_path, content):
    private = outputs.open_private(tmp_path / "private")
    for name in (stages.SECONDS_FILE, stages.MEMORY_FILE):
        (private / name).write_text(content)
        with pytest.raises(DataError, match=f"{name}: it is damaged: .*"):
            stages.Stages(tmp_path)
        (private / name).unlink()
    assert stages.Stages(tmp_path).seconds == {}


@pytest.mark.parametrize("content", [b"", b"\n", b"ab" * 31, b"x" * 64, b"\x80"])
def test_a_damaged_key_makes_no_fingerprint(tmp_path, content):
    """An empty key would release a plain hash of the private data."""
    (tmp_path / sources.KEY_FILE).write_bytes(content)
    with pytest.raises(DataError, match="fingerprint.key: it does not hold a key of"):
        sources.keyed_fingerprint("a", tmp_path)


def test_what_prepare_releases_depends_on_no_private_query(tmp_path):
    """With other queries, more of them, and other judgements: the same bytes."""
    pairs, found = tmp_path / "pairs", []
    _tiny.write_pairs(pairs, train=12, dev=4, test=4)
    config = _tiny.config(prepare, data=str(pairs), vocabulary_size=0)
    for name in ("one", "two"):
        out = tmp_path / name / "release" / "prepare"
        prepare.run(config, out)
        files = {p.relative_to(out): p for p in out.rglob("*") if p.is_file()}
        texts = {name: path.read_bytes() for name, path in files.items()}
        stage = json.loads(texts.pop(pathlib.Path("stage.json")))
        del stage["run"], stage["written_in"]  # random, and another place
        found.append((texts, stage))
        queries = (pairs / "queries.jsonl").read_text().replace("who ", "what ")
        added = json.dumps({"_id": "added", "text": "one more"}) + "\n"
        (pairs / "queries.jsonl").write_text(queries + added)
        with (pairs / "qrels" / "train.tsv").open("a") as qrels:
            qrels.write("added\td1\t1\n")
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "place, private",
    [
        ("private/runs", ""),
        ("private/logs", ""),
        ("private/choices", ""),
        ("private/choices/generator", "private"),
        ("private/runs/histogram", "private"),
        ("linked", "private"),
    ],
)
def test_no_output_is_where_runs_logs_or_choices_are_kept(tmp_path, place, private):
    """It could not take that place once all was paid for."""
    (tmp_path / "private" / "runs").mkdir(parents=True)
    (tmp_path / "linked").symlink_to(tmp_path / "private" / "runs")
    given = str(tmp_path / private) if private else ""
    with pytest.raises(InputError, match="are kept. Use another --workdir"):
        Output(tmp_path / place, PRIVATE, "a test", given)
    # A point of `choose`, and what is only called so.
    for apart in ("private/choices/grid/points/grid-all", "release/runs", "logs/a"):
        Output(tmp_path / apart, CERTIFIED if "rel" in apart else PRIVATE, "a test")
