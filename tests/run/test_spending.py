"""`--budget`: a stage is refused before it spends more than is left."""

import dataclasses
import json
import pathlib

import pytest
from helpers import plans, tiny

from tfdpsq.data import train_vocabulary
from tfdpsq.privacy.proof import budget
from tfdpsq.run import finetune, pipeline, train_retriever
from tfdpsq.run.core import spending, workdir
from tfdpsq.validation import InputError

_PLAN = plans.plan(epsilon=1.0, num_units=200, batch_size=20, steps=4)
_NEXT = [budget.Run("next", _PLAN, 4, "keyed:1")]


def _write(folder, run="a", steps=4):
    made = {"fingerprints": {"pairs": "keyed:1"}, "run_id": run}
    folder.mkdir(parents=True)
    certificate = plans.certificate(_PLAN, steps, **made)
    (folder / "certificate.json").write_text(json.dumps(certificate))
    return folder


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A job on private pairs, with a vocabulary for its stages."""
    work = tmp_path_factory.mktemp("budget")
    queries = tiny.write_pairs(work / "pairs")
    train_vocabulary(queries, 320, work / "spiece.model")
    return tiny.tiny_config(str(work / "pairs"))


@pytest.mark.parametrize("name", ["finetune", "direct"])
def test_stage_over_the_limit_reads_and_pays_nothing(config, tmp_path, name):
    stage = {"finetune": finetune, "direct": train_retriever}[name]
    settings = config[name].copy_and_resolve_references()
    vocabulary = str(pathlib.Path(config.data).parent / "spiece.model")
    settings.update(pairs=config.data, vocabulary=vocabulary, epsilon=3.0)
    release = _write(tmp_path / "work" / "release" / "first").parent
    with spending.limited(1.0, [], release / "next"):
        with pytest.raises(InputError, match="budget is epsilon 1, of which 1 earlier"):
            stage.run(settings, release / "next")
    assert not (release / "next").exists()
    private = tmp_path / "work" / "private"
    assert not list(private.rglob("ledger.jsonl"))
    assert not (private / "private_reads.jsonl").exists()


def _is_within(place, limit, released=()):
    with spending.limited(limit, released, place):
        try:
            spending.require_within(_NEXT)
        except InputError as error:
            assert f"budget is epsilon {limit:g}" in str(error)
            return False
        return True


def test_releases_next_to_the_output_and_given_ones_count(tmp_path):
    """One run costs 0.63 by PLD, two 0.88."""
    work = tmp_path / "work"
    first = _write(work / "release" / "first")
    assert not _is_within(work / "release" / "next", 0.7)
    assert not _is_within(work / "private" / "next", 0.7)
    assert _is_within(tmp_path / "other" / "release" / "next", 0.7)
    assert not _is_within(tmp_path / "other" / "release" / "next", 0.7, [str(first)])
    assert _is_within(work / "release" / "next", 0.9)


def test_runs_that_begin_together_share_the_budget(tmp_path):
    """A lock is of an open file, so one more in this process stands for another's."""
    release = tmp_path / "work" / "release"
    release.mkdir(parents=True)
    with spending.limited(1.5, [], release / "a"):
        spending.require_within(_NEXT)
        with pytest.raises(workdir.Held):
            workdir.held(release, "busy").__enter__()
        with spending.limited(1.5, [], release / "b"):  # of the same job
            spending.require_within(_NEXT)
    with workdir.held(release, "busy"), spending.limited(1.5, [], release / "b"):
        with pytest.raises(InputError, match="another process trains under a budget"):
            spending.require_within(_NEXT)
    assert _is_within(release / "b", 1.5)


def test_plans_of_a_job_are_counted_together():
    with spending.limited(0.7, (), "work"):
        spending.require_within(_NEXT)
        other = dataclasses.replace(_NEXT[0], key="other")
        with pytest.raises(InputError, match="with 2 more it would be"):
            spending.require_within([*_NEXT, other])
        spending.require_within([])  # all are finished


@pytest.mark.slow
def test_job_over_the_limit_is_refused_before_its_first_stage(config, tmp_path):
    config = config.copy_and_resolve_references()
    config.update(epsilons=(3.0,), direct_epsilons=(3.0,), audit_epsilons=())
    work = tmp_path / "work"
    with spending.limited(1.0, (), work):
        with pytest.raises(InputError, match="with 2 more it would be"):
            pipeline.open_job(config, work)
        assert not work.exists()


def test_limit_needs_certificates_that_can_be_counted(tmp_path):
    release = tmp_path / "work" / "release"
    for name in "ab":  # copies of one run, or two: nothing tells
        _write(release / name, run=None)
    with spending.limited(50.0, [], release / "next"):
        with pytest.raises(InputError, match="without a run id"):
            spending.require_within(_NEXT)
    with pytest.raises(InputError, match="none does not exist"):
        with spending.limited(50.0, [str(tmp_path / "none")], tmp_path / "out"):
            spending.require_within(_NEXT)
    with pytest.raises(InputError, match="Add --budget"):
        with spending.limited(0.0, [str(release)], tmp_path / "out"):
            spending.require_within(_NEXT)
