"""`--budget`: a run is refused before it spends more than is left."""

import dataclasses
import json

import pytest
from helpers import plans, tiny

from tfdpsq.privacy.proof import budget
from tfdpsq.run.frame import pipeline, settings
from tfdpsq.run.frame.budget import Budget
from tfdpsq.run.frame.places import Place
from tfdpsq.run.stages import finetune, histogram
from tfdpsq.validation import InputError

_PLAN = plans.plan(epsilon=1.0, num_units=200, batch_size=20, steps=4)
_NEXT = [budget.Run("next", _PLAN, 4, "keyed:1")]


def _write(folder, run="a", steps=4):
    made = {"fingerprints": {"pairs": "keyed:1"}, "run_id": run}
    folder.mkdir(parents=True)
    certificate = plans.certificate(_PLAN, steps, **made)
    (folder / "certificate.json").write_text(json.dumps(certificate))
    return folder


def _is_within(output, limit, *released):
    try:
        Budget(limit, released).require_within(Place.of(output), _NEXT)
        return True
    except InputError as error:
        assert f"budget is epsilon {limit:g}" in str(error)
        return False


def test_releases_next_to_the_output_and_given_ones_count(tmp_path):
    """One run costs 0.63 by PLD, two 0.88."""
    work = tmp_path / "work"
    first = _write(work / "release" / "first")
    _write(work / "private" / "audited", "b")
    assert not _is_within(work / "release" / "next", 0.7)
    assert not _is_within(work / "private" / "next", 0.7)
    assert _is_within(tmp_path / "other" / "release" / "next", 0.7)
    assert not _is_within(tmp_path / "other" / "release" / "next", 0.7, str(first))
    assert _is_within(work / "release" / "next", 0.9)


def test_plans_of_a_job_are_counted_together(tmp_path):
    place = Place.of(tmp_path / "work" / "release" / "a")
    Budget(0.7).require_within(place, _NEXT)
    other = dataclasses.replace(_NEXT[0], key="other")
    with pytest.raises(InputError, match="with 2 more it would be"):
        Budget(0.7).require_within(place, [*_NEXT, other])
    Budget(0.7).require_within(place, [])  # all are finished


def test_job_is_asked_for_all_steps_before_the_first(tmp_path):
    """A histogram counts within its generator's epsilon; two generators add up."""
    tiny.write_start(tmp_path)
    own = {"pairs": str(tmp_path / "pairs"), "n_is_public": True}
    counted = settings.from_config(histogram.STAGE.Settings, {"clusters": 4, **own})
    made = settings.from_config(
        finetune.STAGE.Settings,
        tiny.training(tmp_path, epsilon=2.0, steps=2, accountant="pld"),
    )
    steps = pipeline.Steps()
    first = steps.add("histogram", histogram.STAGE, counted, {})
    steps.add("generator", finetune.STAGE, made, {"histogram": first})
    pipeline.plan(steps, tmp_path / "work", budget=Budget(2.0))
    steps.add("another", finetune.STAGE, made, {})
    with pytest.raises(InputError, match="budget is epsilon 2,.*with 3 more"):
        pipeline.plan(steps, tmp_path / "work", budget=Budget(2.0))
    assert not list(tmp_path.rglob("ledger.jsonl"))


def test_limit_needs_certificates_that_can_be_counted(tmp_path):
    release = tmp_path / "work" / "release"
    for name in "ab":  # copies of one run, or two: nothing tells
        _write(release / name, run=None)
    with pytest.raises(InputError, match="without a run id"):
        Budget(50.0).require_within(Place.of(release / "next"), _NEXT)
    with pytest.raises(InputError, match="none' does not exist"):
        Budget(50.0, (str(tmp_path / "none"),)).require_within(
            Place.of(tmp_path / "other"), _NEXT
        )
    with pytest.raises(InputError, match="budget is -1"):
        Budget(-1.0)
