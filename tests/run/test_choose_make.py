"""The stage `choose` from its points to its output, with points that nobody trained."""

import json

import pytest
from helpers import plans
from helpers import tiny_grid as _grid

from tfdpsq import privacy
from tfdpsq.run import choose, finetune, synthesize
from tfdpsq.run.core import records, sources, workdir
from tfdpsq.run.training import choice_points, private_training

_DIVERGES = 3e-2
_AXES = (("learning_rate", (1e-3, 2e-3, _DIVERGES)), ("batch_size", (60,)))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return _grid.write(tmp_path_factory.mktemp("choose"))


@pytest.fixture
def points(monkeypatch):
    """Returns, by name, what `finetune` left of every point; the last one diverged."""
    made = {}

    def run(stage, out, devices, stays_private):
        assert stays_private
        source = sources.load_source(stage.pairs, stage.split, stage.unit)
        units = private_training.units_of(source, stage.unit, stage.user_field)
        plan = privacy.make_plan(private_training.spec_of(stage, units))
        made[out.name] = certificate = plans.certificate(
            plan,
            training={"learning_rate": stage.learning_rate},
            fingerprints={"code": "ab"},
            ledger_head=f"{len(made)}" * 64,
        )
        if stage.learning_rate == _DIVERGES:
            raise finetune.DivergedError("it diverged", certificate)
        (out / "part").mkdir(parents=True)
        (out / "part" / "weights").write_text(out.name)
        (out / workdir.STAGE_FILE).write_text("{}")
        records.write_certificate(out, certificate)

    monkeypatch.setattr(choice_points, "_try", lambda *_: None)  # makes no models
    monkeypatch.setattr(finetune, "run", run)
    return made


def _made(base, directory, **changes):
    """Makes the output where the second of three points was chosen."""
    config = _grid.config(base, axes=_AXES, finetune__steps=3, **changes)
    (_, (name, _), _) = choice_points.check(config)
    private = directory / "private"
    stage = choose._Choice(config, directory / "generator", private, {})
    stage._own.mkdir(parents=True)
    # Without a name of its draw, it could also be a declared choice.
    found = {"chosen": name, "epsilon": 8.0, "score": "sentence BLEU"}
    (stage._own / choose.CHOICE_FILE).write_text(json.dumps(found))
    for place, what in ((private, "BLEU of 3 generators"), (private / "deep", "MRR")):
        records.private_reads(place, False).record(what, "terminal")
    out = directory / "out"
    out.mkdir()
    stage.make(out)
    return name, out


def test_the_certificate_counts_all_runs_the_choice_and_the_reads(
    base, tmp_path, points
):
    name, out = _made(base, tmp_path, finetune__strict=False)
    certificate = privacy.read_certificate(out)
    assert "selection" in certificate
    found = certificate["selection"]
    assert found["runs_counted"] == 3 and found["candidates"] == 2
    assert found["chosen"] == name and found["epsilon_of_choice"] == 8.0
    assert 7.9 < found["epsilon_of_training"] <= 8.0
    for point, run in found["runs"].items():
        own, rate = points[f"generator-{point}"], run["settings"]["learning_rate"]
        assert run["ledger_head"] == own["ledger_head"]
        assert own["training"]["learning_rate"] == rate
        assert run["diverged"] == (rate == _DIVERGES)
    reads = [read["what"] for read in certificate["private_reads"]]
    assert reads == ["BLEU of 3 generators", "MRR"]
    assert privacy.verify_certificate(certificate).problems == ()


def test_the_weights_are_those_that_the_certificate_names(base, tmp_path, points):
    name, out = _made(base, tmp_path)
    assert (out / "part" / "weights").read_text() == f"generator-{name}"
    certificate = privacy.read_certificate(out)
    assert certificate["training"]["learning_rate"] == 2e-3
    assert not (out / workdir.STAGE_FILE).exists()


def test_a_point_writes_with_the_prompt_it_was_trained_with(base):
    config = _grid.config(base, finetune__prompt="Ask: ")
    assert synthesize.writing(config.synthesize, config.finetune).prompt == "Ask: "
