"""A guarantee follows what is made from an artefact, and never appears by itself."""

import json
import shutil

import pytest
from helpers import framed

from tfdpsq.privacy import read_certificate
from tfdpsq.run import command, jobs
from tfdpsq.run.common.kinds import Generator, Pairs
from tfdpsq.run.frame import settings
from tfdpsq.run.frame.artefacts import Artefact, class_stated
from tfdpsq.run.frame.places import Privacy
from tfdpsq.run.frame.runner import Given
from tfdpsq.validation import DataError, InputError

STAGES = {
    name: command.stage(name)
    for name in command.names()
    if name not in ("verify", "status")
}
STAGES = {n: s for n, s in STAGES.items() if not isinstance(s, jobs.Job)}
PATHS = [
    (name, setting)
    for name, stage in STAGES.items()
    for setting, _, _ in settings.paths_of(stage.Settings())
]


def _given(s, **changed):
    """Public inputs of all settings, but for some."""
    given = Given()
    for name, value, rule in settings.paths_of(s):
        one = rule.kind("p", Privacy.PUBLIC)
        given[name] = changed.get(name, one)
        if isinstance(value, (dict, tuple)):
            given[name] = {"x": given[name]} if isinstance(value, dict) else (one,)
            if name in changed and isinstance(value, tuple):
                given[name] = (changed[name],)
    return given


@pytest.mark.parametrize(("name", "setting"), PATHS)
def test_path_setting_does_not_hide_what_is_private(name, setting):
    stage, made = STAGES[name], framed.certificate(8.0)
    s = stage.Settings()
    rules = {name: rule for name, _, rule in settings.paths_of(s)}
    kind = rules[setting].kind
    private = kind("p", Privacy.PRIVATE)
    assert stage.privacy(s, _given(s, **{setting: private})) == Privacy.PRIVATE
    certified = kind("p", Privacy.CERTIFIED, made, {}, made["digest"])
    given = _given(s, **{setting: certified})
    if stage.privacy(s, given) == Privacy.CERTIFIED:
        assert stage.certificate(s, given)["digest"] == made["digest"]
    assert stage.privacy(s, given) >= Privacy.CERTIFIED


def test_set_made_without_protection_cannot_be_protected_later(tmp_path):
    """One private query had a part in all of its rows: ε = 8 per row is no ε."""
    (tmp_path / "corpus.jsonl").write_text("")
    (tmp_path / "manifest.json").write_text(
        json.dumps({"schema": 1, "guarantee": "private"})
    )
    found = Pairs.open(str(tmp_path), "pairs")
    assert found.privacy == Privacy.PRIVATE and not found.raw
    assert "pairs" not in STAGES["finetune"].covered(
        STAGES["finetune"].Settings(epsilon=8.0), Given(pairs=found)
    )


def test_model_copied_without_its_certificate_is_known_as_derived(tmp_path):
    for name in ("made", "copy"):
        (tmp_path / name).mkdir()
    (tmp_path / "made" / "config.json").write_text('{"model_type": "t5"}')
    made = framed.certify(tmp_path / "made", 8.0)
    assert Generator.open(str(tmp_path / "made"), "init").certificate == made
    shutil.copy(tmp_path / "made" / "config.json", tmp_path / "copy")
    with pytest.raises(DataError, match="certificate.json: missing"):
        Generator.open(str(tmp_path / "copy"), "init")
    with pytest.raises(DataError, match="certificate.json: missing"):
        read_certificate(tmp_path / "copy")


@pytest.mark.parametrize("name", ["stage.json", "private.json", "manifest.json"])
def test_damaged_mark_is_not_taken_for_none(tmp_path, name):
    """Documents beside a `private.json` that was cut short were released."""
    (tmp_path / "made" / "part").mkdir(parents=True)
    (tmp_path / "made" / name).write_text('{"guarantee": "priv')
    for place in (tmp_path / "made", tmp_path / "made" / "part"):
        with pytest.raises(DataError, match=name):
            class_stated(str(place))


def test_input_of_another_kind_is_named(tmp_path):
    with pytest.raises(InputError, match="input is .*Give the output of a stage"):
        Artefact.open(str(tmp_path), "input")
