"""Epochs: steps follow from the counts that are found in the data."""

import pytest
from helpers import tiny as _tiny

from tfdpsq.privacy import read_certificate, verify_certificate
from tfdpsq.run import finetune, train_retriever
from tfdpsq.run.core import workdir
from tfdpsq.run.training import private_training
from tfdpsq.validation import InputError


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """60 training queries in 63 pairs, and a public T5."""
    base = tmp_path_factory.mktemp("epochs")
    _tiny.write_start(base, dropout=0.0)
    _tiny.add_answers(base)
    return base


def _config(stage, base, **options):
    return _tiny.config(stage, options, **_tiny.training(base, steps=0))


@pytest.mark.parametrize(
    "unit, options, n, steps",
    [
        ("query", {}, 60, 4),  # 0.5 * 60 / 8 = 3.75
        ("pair", {"epochs": 0.9}, 63, 7),  # 0.9 * 63 / 8 = 7.09, of 60 it were 6.75
        # 63 // 8: an eighth step would begin, and cost, a second epoch.
        ("pair", {"epochs": 1.0, "sampler": "shuffled"}, 63, 7),
        # From the bound, which is public; the count is not.
        ("pair", {"n_is_public": False, "n_bound": 100}, 100, 6),  # 6.25
    ],
)
def test_steps_of_a_generator_follow_from_its_units(
    base, tmp_path, monkeypatch, unit, options, n, steps
):
    """What is trained with; the next test trains."""
    plans = []

    def train(devices, model, plan, *_, **__):
        plans.append(plan)
        raise InterruptedError

    monkeypatch.setattr(private_training, "train", train)
    config = _config(finetune, base, epsilon=8.0, unit=unit, microbatch_size=4)
    config.epochs = 0.5
    config.update(options)
    with pytest.raises(InterruptedError):
        finetune.run(config, tmp_path / "generator")
    (plan,) = plans
    assert plan.spec.num_units == n and plan.spec.steps == steps
    assert plan.spec.target_delta == 0.5 / n


def test_as_many_steps_are_executed_and_certified(base, tmp_path):
    config = _config(finetune, base, epsilon=8.0, unit="pair", microbatch_size=4)
    config.epochs = 0.4
    stage = finetune.run(config, tmp_path / "generator")
    assert stage["result"]["steps_executed"] == 3  # 0.4 * 63 / 8 = 3.15
    certificate = read_certificate(tmp_path / "generator")
    assert certificate["spec"]["n"] == 63 and certificate["spec"]["steps"] == 3
    assert certificate["guarantee"]["delta"] == 0.5 / 63
    # The config as it was given, so that the same command finds it finished.
    assert stage["config"]["steps"] == 0
    again = finetune.run(config, tmp_path / "generator")
    assert again["result"] == stage["result"] and "seconds" not in again


def test_noise_cancels_over_the_steps_of_an_epoch(base, tmp_path):
    changes = {"sampler": "shuffled", "noise_window": 5, "clip_per_layer": True}
    config = _config(finetune, base, epsilon=8.0, microbatch_size=4, **changes)
    config.epochs = 1.0
    finetune.run(config, tmp_path / "generator")
    certificate = read_certificate(tmp_path / "generator")
    assert verify_certificate(certificate).problems == ()
    assert certificate["mechanism"]["noise_window"] == 5
    assert "each variable" in certificate["mechanism"]["clipping_in_words"]
    accounting = certificate["accounting"]
    assert (accounting["steps_executed"], accounting["releases_counted"]) == (7, 1)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"noise_window": 5}, "noise_window is 5.*sampler"),
        ({"clip_per_layer": True, "engine": "dpkeras"}, "clip_per_layer is True.*eng"),
    ],
)
def test_settings_that_need_another_are_refused(base, tmp_path, changes, message):
    config = _config(finetune, base, epsilon=8.0, microbatch_size=4, **changes)
    config.epochs = 1.0
    with pytest.raises(InputError, match=message):
        finetune.run(config, tmp_path / "generator")
    assert not (tmp_path / "generator").exists()


def test_epochs_of_a_retriever_are_of_its_own_pairs(base, tmp_path):
    config = _config(train_retriever, base, unit="pair", epochs=1.0, accountant="pld")
    config.embedding_dim = 16
    stage = train_retriever.run(config, tmp_path / "private" / "all")
    assert stage["result"]["steps_executed"] == 8  # 63 / 8
    config.split = "dev"  # 12 pairs
    stage = train_retriever.run(config, tmp_path / "private" / "dev")
    assert stage["result"]["steps_executed"] == 2  # 1.5, to even
    config.epochs = 0.0
    stage = train_retriever.run(config, tmp_path / "untrained")
    assert stage["result"]["steps_executed"] == 0
    assert not (tmp_path / "untrained" / "certificate.json").exists()


@pytest.mark.parametrize("stage", [finetune, train_retriever])
def test_steps_and_epochs_together_are_refused(base, tmp_path, stage):
    config = _config(stage, base, steps=3, epochs=2.0, accountant="pld")
    with pytest.raises(InputError, match="epochs is 2.0 and steps 3.*Set steps to 0"):
        stage.run(config, tmp_path / "private" / "out")
    assert not list(tmp_path.rglob(workdir.STAGE_FILE))
    assert not list(tmp_path.rglob("ledger.jsonl"))
