"""The frame: a new stage is a few lines, and has all the rest for nothing."""

import dataclasses
import fcntl
import json
import os
import pathlib
import stat
import sys

import pytest
from helpers import tiny

from tfdpsq.data import io
from tfdpsq.data.sets import SyntheticQuery, read_synthetic, write_synthetic
from tfdpsq.run import command, jobs
from tfdpsq.run.common.kinds import SET, Pairs, SyntheticSet
from tfdpsq.run.frame import records, runner, settings
from tfdpsq.run.frame.places import Place, Privacy
from tfdpsq.run.frame.settings import path, setting
from tfdpsq.run.stages import status
from tfdpsq.validation import InputError


# -- A stage ---------------------------------------------------------------------------
class Shorter(runner.ShardedStage):
    """Keeps the queries of a set that have few words."""

    name = "shorter"

    @dataclasses.dataclass(frozen=True)
    class Settings(settings.Settings):
        """Settings of `shorter`."""

        synthetic: str = path(SyntheticSet)
        most_words: int = setting(8, ge=1, help="words that a query may have")
        rows: int = setting(2, ge=1, speed=True, help="rows of a shard")

    def parts(self, c):
        rows = list(read_synthetic(c.given["synthetic"].path))
        return [
            rows[at : at + c.settings.rows]
            for at in range(0, len(rows), c.settings.rows)
        ]

    def start(self, c):
        def make(index, out):
            short = [
                dataclasses.asdict(row)
                for row in c.parts[index]
                if len(row.query.split()) <= c.settings.most_words
            ]
            pathlib.Path(out.path("rows")).write_text(json.dumps(short))
            out.count = len(short)

        return make

    def merge(self, c, shards):
        found = (json.loads(pathlib.Path(p).read_text()) for p in shards.paths("rows"))
        rows = (SyntheticQuery(**row) for shard in found for row in shard)
        written = write_synthetic(
            c.out / SET, rows, c.provenance, c.certificate, guarantee=c.privacy.word
        )
        return {"kept": written["count"]}


# -- What it has for nothing -----------------------------------------------------------
STAGE = Shorter()


@pytest.fixture
def made(tmp_path):
    """A set of five queries of 1 to 5 words."""
    rows = [
        SyntheticQuery(f"genQ{n}", " ".join("abcde"[: n + 1]), "d", "text", 0)
        for n in range(5)
    ]
    write_synthetic(tmp_path / SET, rows, {}, None, guarantee="public")
    return Shorter.Settings(synthetic=str(tmp_path / SET), most_words=3)


def test_output_is_made_once(made, tmp_path):
    place = Place.of(tmp_path / "release" / "short")
    record = runner.execute(STAGE, made, place)
    assert record["result"] == {"kept": 3} and record["guarantee"] == "public"
    assert runner.execute(STAGE, made, place) == record
    # A setting of speed keeps the output valid; another one does not.
    faster = dataclasses.replace(made, rows=4)
    assert runner.execute(STAGE, faster, place)["run"] == record["run"]
    with pytest.raises(InputError, match="settings.most_words: 3 there, 2 now"):
        runner.execute(STAGE, dataclasses.replace(made, most_words=2), place)
    took = records.read_private(place)
    assert len(took["tries"]) == 1 and records.seconds(place) >= 0
    assert not place.partial.exists()
    modified = {p.stat().st_mtime for p in pathlib.Path(place.path).rglob("*")}
    assert len(modified) == 1  # real times would show how long stages took


def test_inputs_may_move(made, tmp_path):
    place = Place.of(tmp_path / "short")
    record = runner.execute(STAGE, made, place)
    os.rename(tmp_path / SET, tmp_path / "moved")
    moved = dataclasses.replace(made, synthetic=str(tmp_path / "moved"))
    assert runner.execute(STAGE, moved, place)["run"] == record["run"]


def test_killed_pass_goes_on(made, tmp_path, monkeypatch):
    place, start = Place.of(tmp_path / "short"), Shorter.start

    def dies(self, c):
        def make(index, out):
            if index == 2:
                raise KeyboardInterrupt
            start(self, c)(index, out)

        return make

    monkeypatch.setattr(Shorter, "start", dies)
    with pytest.raises(KeyboardInterrupt):
        runner.execute(STAGE, made, place)
    (state,) = status.survey(tmp_path)
    assert (state.state, state.detail) == ("interrupted", "2 shards")
    assert stat.S_IMODE(place.partial.stat().st_mode) == 0o700
    made_now = []

    def counts(self, c):
        make = start(self, c)
        return lambda index, out: (made_now.append(index), make(index, out))

    monkeypatch.setattr(Shorter, "start", counts)
    runner.execute(STAGE, made, place)
    assert made_now == [2]
    assert [row.query for row in read_synthetic(tmp_path / "short" / SET)] == [
        "a",
        "a b",
        "a b c",
    ]
    assert len(records.read_private(place)["tries"]) == 2


def test_one_process_makes_an_output(made, tmp_path):
    place = Place.of(tmp_path / "short")
    place.lock.parent.mkdir(parents=True)
    with open(place.lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("4711")
        file.flush()
        with pytest.raises(InputError, match="is being made by process 4711"):
            runner.execute(STAGE, made, place)


def test_command_line(made, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "stage", lambda name: STAGE)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["tfdpsq", *words])
        with command.reported():
            command.run(STAGE, list(words), "Keeps short queries.")

    with pytest.raises(SystemExit) as ended:
        run("--help")
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "--config.most_words=8  (words that a query may have)" in said
    assert "--workdir" in said and "speed only" in said
    into = f"--workdir={tmp_path / 'short'}"
    run(into, f"--config.synthetic={made.synthetic}", "--config.most_words=1")
    assert capsys.readouterr().out.endswith("short: kept 1\n")


def test_a_job_checks_all_steps_on_promises(made, tmp_path):
    class Twice(jobs.Job):
        name, Settings = "twice", Shorter.Settings

        def steps(self, s, workdir):
            again = Shorter.Settings(jobs.StepOutput(f"first/{SET}"), most_words=2)
            steps = {"first": s, "second": again}
            return [jobs.Step(name, STAGE, own) for name, own in steps.items()]

        def finish(self, s, planned, workdir):
            return status.survey(workdir)

    first, second = jobs.plan(Twice().steps(made, tmp_path), tmp_path)
    assert second.settings.synthetic == f"{first.place.path}/{SET}"
    assert (
        second.privacy == Privacy.PUBLIC and not pathlib.Path(first.place.path).exists()
    )
    states = jobs.run(Twice(), made, tmp_path)
    assert [(one.name, one.state, one.detail) for one in states] == [
        ("first", "done", "kept 3"),
        ("second", "done", "kept 2"),
    ]


def test_fingerprint_of_private_pairs_is_keyed(tmp_path):
    tiny.write_pairs(tmp_path / "pairs", train=4, dev=1, test=1)
    pairs = Pairs.open(str(tmp_path / "pairs"), "pairs")
    assert pairs.raw and pairs.privacy == Privacy.PRIVATE
    found = [pairs.fingerprint(tmp_path / name) for name in ("a/private", "b/private")]
    assert found[0] != found[1] and all(each.startswith("keyed:") for each in found)
    assert pairs.fingerprint(tmp_path / "a" / "private") == found[0]
    key = tmp_path / "a" / "private" / records.KEY_FILE
    assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_records_of_another_version_are_refused(tmp_path):
    (tmp_path / "old").mkdir()
    io.write_json(
        tmp_path / "old" / "stage.json", {"config": {}, "guarantee": "public"}
    )
    with pytest.raises(InputError, match="another version of tfdpsq wrote it"):
        records.read_stage(tmp_path / "old")


def test_class_of_an_output_follows_from_its_inputs():
    """Certificates certify; two of them add up; private pairs make it private."""

    def artefact(privacy, certificate=None, **facts):
        digest = certificate["digest"] if certificate else ""
        return Pairs("p", privacy, certificate, facts, digest)

    one = {"digest": "1", "private": True, "guarantee": {"epsilon": 8.0}}
    other = {"digest": "2", "private": True, "guarantee": {"epsilon": 3.0}}
    certified = artefact(Privacy.CERTIFIED, one)
    raw = artefact(Privacy.PRIVATE, raw=True)
    given = runner.Given(a=certified, b=None, c=artefact(Privacy.PUBLIC))
    assert STAGE.privacy(None, given) == Privacy.CERTIFIED
    assert STAGE.certificate(None, given) == one
    two = runner.Given(a=certified, b={"x": artefact(Privacy.CERTIFIED, other)})
    with pytest.raises(InputError, match="add up"):
        STAGE.privacy(None, two)
    measured = runner.Given(two, data=raw)  # such as by `evaluate`
    assert STAGE.privacy(None, measured) == Privacy.PRIVATE
    assert STAGE.certificate(None, measured) is None

    class Trains(Shorter):
        def covered(self, s, given):
            return ("pairs",)

    found = [
        Trains().privacy(None, runner.Given(pairs=pairs, init=init))
        for pairs in (raw, artefact(Privacy.PRIVATE, raw=True, canaries=True))
        for init in (None, artefact(Privacy.PRIVATE))
    ]
    assert [each.word for each in found] == ["certified", *["private"] * 3]
