"""Stages under `--strategy`, and asked to end, through their command lines."""

import json
import os
import shutil
import signal
import threading
import time
import types

import ml_collections
import numpy as np
import pytest
from helpers import killing as _killing
from helpers import tiny as _tiny
from safetensors.numpy import load_file

from tfdpsq import retriever, validation
from tfdpsq.data import train_vocabulary
from tfdpsq.run.core import layout, stages
from tfdpsq.run.devices import clusters, preemption, strategy, tpus

_STEPS = 24
_T5 = {
    "t5.vocabulary_size": 320,
    **_tiny.FLAGS,
    "document_length": 24,
    "query_length": 10,
    "batch_size": 8,
    "microbatch_size": 4,
    "steps": _STEPS,
    "save_every": 5,
    "accountant": "rdp",
    "n_is_public": True,
}


# -- What is refused, before anything runs --------------------------------------------


_TWO = {"worker": ["a:1", "b:2"]}


@pytest.mark.parametrize(
    "found, message",
    [
        ("", "is not set"),
        ("{", "which is not a cluster and task"),
        ("[]", "which is not a cluster and task"),
        (json.dumps({"cluster": _TWO}), "which is not a cluster and task"),
        (
            json.dumps({"cluster": _TWO, "task": {"type": "worker", "index": 2}}),
            "this is worker 2, which is not in",
        ),
        (
            json.dumps({"cluster": _TWO, "task": {"type": "chief", "index": 0}}),
            "this is chief 0, which is not in",
        ),
        (
            json.dumps(
                {
                    "cluster": {**_TWO, "ps": ["c:3"]},
                    "task": {"type": "worker", "index": 0},
                }
            ),
            r"has the jobs \['ps'\]",
        ),
        (
            json.dumps(
                {
                    "cluster": {"worker": ["a", "b:2"]},
                    "task": {"type": "worker", "index": 0},
                }
            ),
            "address 'a', which is not host:port",
        ),
        (
            json.dumps(
                {
                    "cluster": {"worker": ["a:1", "a:1"]},
                    "task": {"type": "worker", "index": 0},
                }
            ),
            "has an address twice",
        ),
    ],
)
def test_a_tf_config_that_names_no_worker_is_refused(found, message):
    with pytest.raises(validation.InputError, match=message) as raised:
        clusters.read_tf_config(found)
    assert '"index": 0' in str(raised.value)  # what it has to look like


def test_a_good_tf_config_is_read():
    task = {"type": "worker", "index": "1"}
    found = clusters.read_tf_config(json.dumps({"cluster": _TWO, "task": task}))
    assert found == (_TWO, "worker", 1)


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"kind": "gpu"}, "strategy is 'gpu'; choose one of"),
        ({"kind": "mirrored", "offered": ("default",)}, "it trains nothing under a"),
        ({"kind": "multiworker", "offered": strategy.ONE_PROCESS}, "by themselves"),
        ({"kind": "tpu"}, "tpu is not set"),
        ({"tpu": "local"}, "tpu is 'local', which applies to strategy 'tpu'"),
        ({"replicas": 2}, "replicas is 2, which applies to .*'mirrored'"),
        ({"kind": "mirrored", "replicas": -1}, "replicas is -1"),
        ({"steps_per_loop": 0}, "steps_per_loop"),
    ],
)
def test_flags_that_mean_nothing_are_refused(flags, message):
    with pytest.raises(validation.InputError, match=message):
        with strategy.opened(**flags):
            pass


def test_a_look_up_that_never_ends_is_given_up():
    """A server of names that drops what it is asked; there is one in every firewall."""
    never = threading.Event()
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="nothing was found in 0 seconds"):
        tpus._within(0.2, never.wait)
    assert time.monotonic() - began < 5
    never.set()
    assert tpus._within(5, lambda: 7) == 7
    with pytest.raises(KeyError):
        tpus._within(5, lambda: {}["missing"])


# -- Being asked to end ---------------------------------------------------------------


@pytest.fixture
def notice():
    """One that listens; afterwards the signals are handled as before."""
    before = {number: signal.getsignal(number) for number in preemption._DEFAULTS}
    made = preemption.Notice()
    made.listen()
    yield made
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_training_takes_note_of_a_signal_and_a_second_one_ends_it(notice, number):
    with notice.training() as asked:
        assert not asked()
        os.kill(os.getpid(), number)
        assert asked()
        # As if nobody had listened: a second one is not kept from anybody.
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_a_signal_in_the_last_step_ends_before_the_next_training(notice):
    """The training that it came in is finished, and its output is written first."""
    with notice.training():
        os.kill(os.getpid(), signal.SIGTERM)
    reached = []
    with pytest.raises(SystemExit) as raised:
        with notice.training():
            reached.append("a step is paid")
    assert raised.value.code == preemption.RESTART and not reached
    with pytest.raises(SystemExit):
        notice.end_if_asked()


def test_a_signal_in_the_last_step_ends_a_job_after_its_stage(notice, tmp_path):
    (tmp_path / "work").mkdir()
    job = stages.Stages(tmp_path / "work")
    devices = strategy.Devices(notice=notice)
    ran = []

    def run(config, out, given):
        with given.notice.training():
            os.kill(os.getpid(), signal.SIGTERM)
        ran.append(out.name)
        return {"seconds": 1.0}

    module = types.SimpleNamespace(run=run)
    with pytest.raises(SystemExit) as raised:
        job.run(module, ml_collections.ConfigDict(), "a", True, devices)
    assert raised.value.code == preemption.RESTART
    assert ran == ["a"] and stages.Stages(tmp_path / "work").seconds == {"a": 1.0}


def test_outside_of_training_sigterm_ends_at_once(notice):
    with pytest.raises(SystemExit) as raised:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert raised.value.code == preemption.RESTART == 75
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)


def test_whoever_imports_a_stage_keeps_its_handlers():
    before = signal.getsignal(signal.SIGTERM)
    with preemption.Notice().training() as asked:
        assert not asked() and signal.getsignal(signal.SIGTERM) == before


# -- Through the command line ---------------------------------------------------------


def test_what_a_killed_worker_left_is_removed_and_nothing_of_a_living_one(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(strategy.tempfile, "tempdir", str(tmp_path))
    left, new = tmp_path / "tfdpsq-worker-left", tmp_path / "tfdpsq-worker-new"
    for path in (left, new):
        (path / "private").mkdir(parents=True)
    os.utime(left, (1, 1))
    with strategy.scratch_directory() as living:
        os.utime(living, (1, 1))
        with strategy.scratch_directory() as other:
            assert set(tmp_path.iterdir()) == {new, living, other}
    assert set(tmp_path.iterdir()) == {new}


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Pairs, and a vocabulary of their queries, which are made up."""
    base = tmp_path_factory.mktemp("data")
    queries = _tiny.write_pairs(base / "pairs")
    train_vocabulary(queries, 300, base / "spiece.model")
    return {**_T5, "pairs": base / "pairs", "vocabulary": base / "spiece.model"}


def _run(stage, base, settings, **more):
    return _killing.Run(stage, base, "made", {**settings, **more})


def _began_alike(first, *others):
    """Gives all the seeds and the first state of the first, which is killed."""
    first.kill_after(1)
    for other in others:
        shutil.copytree(first.base / "private", other.base / "private")


def _assert_same_weights(one, other):
    ours, theirs = (load_file(run.out / "model.safetensors") for run in (one, other))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_allclose(value, theirs[name], rtol=0, atol=1e-5)


def _ended(children):
    """What each of several workers wrote; none is left when this returns."""
    try:
        return [child.communicate(timeout=240)[1] for child in children]
    finally:
        for child in children:
            child.kill()


@pytest.mark.slow
def test_a_stage_that_is_asked_to_end_goes_on_to_the_same_bytes(tmp_path, settings):
    asked, whole = (
        _run("finetune", tmp_path / name, settings, **{"t5.dropout": 0.2})
        for name in ("asked", "whole")
    )
    _began_alike(asked, whole)
    child = asked.start()
    asked.wait_for(7, child)
    child.send_signal(signal.SIGTERM)
    _, words = child.communicate(timeout=120)
    assert child.returncode == 75, words[-3000:]
    assert "Start the same command again to go on" in words
    assert not asked.out.exists()
    # What was paid for was taken, and is in the state: nothing will be redone.
    steps = len(asked.paid())
    assert 7 <= steps < _STEPS
    state = asked.base / "private" / "runs" / "made" / "state"
    assert (state / f"step-{steps:08d}.npz").is_file()
    asked.finish()
    whole.finish()
    assert asked.paid() == whole.paid() == list(range(_STEPS))
    for name in ("model.safetensors", "certificate.json"):
        assert (asked.out / name).read_bytes() == (whole.out / name).read_bytes()


@pytest.mark.slow
def test_workers_strategies_and_kills_make_no_other_model(tmp_path, settings):
    """Two workers, one killed; then two replicas, killed; then two workers again."""
    moved, whole = (
        _run("finetune", tmp_path / name, settings, **{"t5.dropout": 0.2})
        for name in ("moved", "whole")
    )
    _began_alike(moved, whole)
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    def workers():
        return [
            moved.start(
                "--strategy=multiworker",
                environment={**environment, "TMPDIR": str(scratch)},
            )
            for environment in _killing.cluster(2)
        ]

    chief, other = children = workers()
    moved.wait_for(9, chief)
    began = time.monotonic()
    other.kill()
    words = _ended(children)
    assert time.monotonic() - began < 90  # by missing signs of life
    assert other.returncode == -signal.SIGKILL
    assert chief.returncode == 75, words[0][-3000:]
    assert "another worker ended" in words[0]
    shutil.rmtree(scratch)  # of the one that was killed
    scratch.mkdir()
    moved.kill_after(16, "--strategy=mirrored", "--replicas=2")
    children = workers()
    words = _ended(children)
    assert [child.returncode for child in children] == [0, 0], words
    assert list(scratch.iterdir()) == []
    whole.finish()
    _assert_same_weights(moved, whole)
    assert moved.paid() == whole.paid() == list(range(_STEPS))
    # But for what they cost they are told apart by nothing.
    certificates = [
        json.loads((run.out / "certificate.json").read_text()) for run in (moved, whole)
    ]
    assert certificates[0] == certificates[1]
    made, usual = (
        {p.name for p in run.base.rglob("*") if "tfevents" not in p.name}
        for run in (moved, whole)
    )
    assert made == usual
    # Finished: all end, and nothing is trained again.
    before = (moved.out / "stage.json").read_bytes()
    children = workers()
    words = _ended(children)
    assert [child.returncode for child in children] == [0, 0], words
    assert (moved.out / "stage.json").read_bytes() == before


@pytest.mark.slow
def test_ordinary_training_of_the_retriever_is_the_same_on_two_workers(
    tmp_path, settings
):
    settings = {**settings, "embedding_dim": 16, "t5.dropout": 0.2, "steps": 12}
    for without_effect in ("accountant", "microbatch_size"):
        del settings[without_effect]
    alone, shared = (
        _run("train_retriever", tmp_path / name, settings) for name in ("a", "b")
    )
    alone.finish()
    children = [
        shared.start("--strategy=multiworker", environment=environment)
        for environment in _killing.cluster(2)
    ]
    words = _ended(children)
    assert [child.returncode for child in children] == [0, 0], words
    models = [
        retriever.load(run.out / layout.RETRIEVER_MODEL) for run in (alone, shared)
    ]
    for one, other in zip(*(model.get_weights() for model in models)):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage, flags, more, message",
    [
        ("finetune", ["--strategy=gpu"], {}, "choose one of"),
        ("finetune", ["--strategy=tpu", "--tpu=local"], {}, "there is no TPU on this"),
        ("finetune", ["--strategy=tpu", "--tpu=none"], {}, "name or address 'none'"),
        ("finetune", ["--strategy=multiworker"], {}, "TF_CONFIG is not set"),
        (
            "finetune",
            ["--strategy=mirrored", "--replicas=3"],
            {},
            "batch_size is 8, which 3 replicas cannot share",
        ),
        (
            "finetune",
            ["--strategy=mirrored", "--replicas=4"],
            {"microbatch_size": 16},
            "of 4 replicas some would never have one",
        ),
        (
            "train_retriever",
            ["--strategy=mirrored", "--replicas=2"],
            # Its default, since the method takes the whole batch.
            {"method": "logit_dp", "epsilon": 8.0, "microbatch_size": 32},
            "must stay on one replica",
        ),
        (
            "train_retriever",
            ["--steps_per_loop=2"],
            {"method": "public_negatives", "epsilon": 8.0, "negatives": 12},
            "takes one step at a time",
        ),
        ("choose", ["--strategy=multiworker"], None, "by themselves"),
    ],
)
def test_bad_input_ends_with_2_before_anything_is_paid(
    tmp_path, settings, stage, flags, more, message
):
    run = _killing.Run(
        stage, tmp_path, "made", {} if more is None else {**settings, **more}
    )
    began = time.monotonic()
    words = run.finish(*flags, status=2, environment={"TF_CONFIG": ""})
    assert message in words
    assert time.monotonic() - began < 90
    assert "Traceback" not in words
    assert run.paid() == [] and not run.out.exists()
