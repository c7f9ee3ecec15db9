"""Training stages killed, preempted and moved: the same weights, each step paid once.

Every process is a command line, forked by `helpers.forking`.
"""

import json
import shutil
import signal

import numpy as np
import pytest
from helpers import killing, tiny
from safetensors.numpy import load_file

from tfdpsq import retriever
from tfdpsq.data import train_vocabulary
from tfdpsq.run.common.kinds import MODEL

# Several trainings a test, each with all the checks before a first step.
pytestmark = pytest.mark.timeout(600)
_STEPS = 8
_T5 = {
    "t5.vocabulary_size": 320,
    **tiny.FLAGS,
    "t5.dropout": 0.2,
    "document_length": 24,
    "query_length": 10,
    "batch_size": 8,
    "microbatch_size": 4,
    "steps": _STEPS,
    "save_every": 3,
    "accountant": "rdp",
    "n_is_public": True,
}
_DIRECT = {
    "embedding_dim": 16,
    "method": "public_negatives",
    "negatives": 12,
    # So that a step after a kill needs negatives that were drawn before it.
    "refresh_every": 4,
    "epsilon": 8.0,
}
# A smaller graph is traced sooner; privacy/test_resume.py has dropout in quick tests.
_NORMS = {"t5.dropout": 0.0, "trained": "('*layer_norm*',)"}
_PROJECTION = {"t5.dropout": 0.0, "trained": "('*projection/kernel',)"}


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Pairs, and a vocabulary of their queries, which are made up."""
    base = tmp_path_factory.mktemp("data")
    queries = tiny.write_pairs(base / "pairs")
    train_vocabulary(queries, 300, base / "spiece.model")
    return {**_T5, "pairs": base / "pairs", "vocabulary": base / "spiece.model"}


def _runs(stage, tmp_path, settings):
    return [
        killing.Run(stage, tmp_path / name, "made", settings)
        for name in ("whole", "killed")
    ]


def _json(run, name):
    return json.loads((run.out / name).read_text())


def _points(run):
    log = run.base / "private" / "logs" / "made" / "log.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()]


def _ended(children):
    """Waits for all workers and returns what each wrote to stderr."""
    try:
        return [child.communicate(timeout=240)[1] for child in children]
    finally:
        for child in children:
            child.kill()


@pytest.mark.parametrize(
    "changes",
    [_NORMS, pytest.param({}, marks=pytest.mark.slow)],
    ids=["norms", "all"],
)
def test_killed_finetune_goes_on_to_the_same_weights_and_pays_once(
    tmp_path, settings, changes
):
    """The whole guarantee of resuming: weights, sampler, noise, dropout, ledger."""
    whole, killed = _runs("finetune", tmp_path, {**settings, **changes})
    whole.finish_undisturbed(killed)
    killed.kill_after(5)  # two steps past the saved one
    paid = killed.paid()
    # Another setting is refused, and nothing is spent.
    message = killed.finish(status=2, learning_rate=0.5)
    assert "settings.learning_rate: 0.001 there, 0.5 now" in message
    assert killed.paid() == paid
    # One of speed alone may change; dropout is drawn by a row's place in its batch.
    killed.finish(save_every=2)
    assert killed.paid() == whole.paid() == list(range(_STEPS))
    for name in ("model.safetensors", "certificate.json", "spiece.model"):
        assert (killed.out / name).read_bytes() == (whole.out / name).read_bytes()
    # Each point of the curve once, to the last one.
    one, other = _points(killed), _points(whole)
    assert [point["step"] for point in one] == list(range(1, _STEPS + 1))
    for name in ("step", "loss", "epsilon"):
        assert [p[name] for p in one] == [p[name] for p in other]
    spent = _json(killed, "certificate.json")["guarantee"]["epsilon"]
    assert one[-1]["epsilon"] == pytest.approx(spent, rel=1e-6)
    # The seeds are gone with the state; the ledger stays.
    left = {p.name for p in (killed.base / "private/runs/made").iterdir()}
    assert left == {"ledger.jsonl", "run.json"}
    # A finished run whose output was lost is not paid for again.
    shutil.rmtree(killed.out)
    assert "a second time" in killed.finish(status=2)


@pytest.mark.parametrize(
    "changes",
    [_PROJECTION, pytest.param({}, marks=pytest.mark.slow)],
    ids=["projection", "all"],
)
def test_killed_direct_training_goes_on_with_its_negatives(tmp_path, settings, changes):
    settings = {**settings, **_DIRECT, **changes}
    whole, killed = _runs("train_retriever", tmp_path, settings)
    whole.finish_undisturbed(killed)
    killed.kill_after(6)
    killed.finish()
    assert killed.paid() == whole.paid() == list(range(_STEPS))
    one, other = (_json(run, "certificate.json") for run in (killed, whole))
    assert one == other
    models = [retriever.load(run.out / MODEL) for run in (killed, whole)]
    for one, other in zip(*(model.get_weights() for model in models)):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_preempted_finetune_exits_with_75_and_loses_no_step(tmp_path, settings):
    settings = {**settings, "steps": 24}
    whole, asked = _runs("finetune", tmp_path, settings)
    whole.finish_undisturbed(asked)
    child = asked.start()
    asked.wait_for(7, child)
    child.send_signal(signal.SIGTERM)
    _, words = child.communicate(timeout=120)
    assert child.returncode == 75, words[-3000:]
    assert not asked.out.exists()
    # What was paid for was taken, and is in the state: nothing will be redone.
    steps = len(asked.paid())
    assert 7 <= steps < 24
    state = asked.base / "private" / "runs" / "made" / "state"
    assert (state / f"step-{steps:08d}.npz").is_file()
    asked.finish()
    assert asked.paid() == whole.paid() == list(range(24))
    for name in ("model.safetensors", "certificate.json"):
        assert (asked.out / name).read_bytes() == (whole.out / name).read_bytes()


@pytest.mark.slow
def test_workers_strategies_and_kills_make_the_same_model(tmp_path, settings):
    """Two workers, one killed; then two replicas, killed; then two workers again."""
    settings = {**settings, "steps": 24}
    whole, moved = _runs("finetune", tmp_path, settings)
    whole.finish_undisturbed(moved)
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    def workers():
        return [
            moved.start(
                "--strategy=multiworker",
                environment={**environment, "TMPDIR": str(scratch)},
            )
            for environment in killing.cluster(2)
        ]

    chief, other = children = workers()
    moved.wait_for(9, chief)
    other.kill()
    words = _ended(children)
    assert other.returncode == -signal.SIGKILL
    assert chief.returncode == 75, words[0][-3000:]
    shutil.rmtree(scratch)  # of the one that was killed
    scratch.mkdir()
    moved.kill_after(16, "--strategy=mirrored", "--replicas=2")
    children = workers()
    words = _ended(children)
    assert [child.returncode for child in children] == [0, 0], words
    assert list(scratch.iterdir()) == []
    assert moved.paid() == whole.paid() == list(range(24))
    ours, theirs = (load_file(r.out / "model.safetensors") for r in (moved, whole))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_allclose(value, theirs[name], rtol=0, atol=1e-5)
    certificates = [_json(run, "certificate.json") for run in (moved, whole)]
    for one in certificates:  # sums are added up in another order
        del one["training"]["weights"], one["digest"]
    assert certificates[0] == certificates[1]
    # Finished: all workers end, and nothing is trained again.
    before = (moved.out / "stage.json").read_bytes()
    children = workers()
    words = _ended(children)
    assert [child.returncode for child in children] == [0, 0], words
    assert (moved.out / "stage.json").read_bytes() == before


@pytest.mark.slow
def test_two_workers_train_the_retriever_as_one_process_does(tmp_path, settings):
    settings = {**settings, "embedding_dim": 16}
    for without_effect in ("accountant", "microbatch_size"):
        del settings[without_effect]
    alone, shared = (  # no ε: private
        killing.Run("train_retriever", tmp_path / name / "private", "made", settings)
        for name in ("alone", "shared")
    )
    alone.finish()
    children = [
        shared.start("--strategy=multiworker", environment=environment)
        for environment in killing.cluster(2)
    ]
    words = _ended(children)
    assert [child.returncode for child in children] == [0, 0], words
    models = [retriever.load(run.out / MODEL) for run in (alone, shared)]
    for one, other in zip(*(model.get_weights() for model in models)):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_impossible_strategy_ends_with_2_and_the_ledger_unpaid(tmp_path, settings):
    run = killing.Run("finetune", tmp_path, "made", settings)
    words = run.finish("--strategy=mirrored", "--replicas=3", status=2)
    assert "batch_size is 8, which 3 replicas cannot share" in words
    assert "Traceback" not in words
    assert run.paid() == [] and not run.out.exists()
