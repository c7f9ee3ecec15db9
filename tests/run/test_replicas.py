"""Ordinary training on replicas: the steps that one device takes, dropout included."""

import contextlib
import json

import numpy as np
import pytest
import tensorflow as tf
from helpers import tiny as _tiny
from safetensors.numpy import load_file

from tfdpsq import privacy, retriever, validation
from tfdpsq.data import write_rows
from tfdpsq.layers import T5Config, train_only
from tfdpsq.retriever.stored_pairs import PooledQueries, WithVectors
from tfdpsq.run import pretrain
from tfdpsq.run.devices import preemption, strategy
from tfdpsq.run.training import plain_training, pretraining_loop


def _ids(random, shape, length):
    return {
        "ids": random.integers(2, 30, (*shape, length)).astype(np.int32),
        "lengths": random.integers(1, length + 1, shape).astype(np.int32),
    }


# -- The retriever --------------------------------------------------------------------


def _batch(rows, hard):
    """With `hard` negatives of each row, all different."""
    random = np.random.default_rng(0)
    batch = {
        "document_key": np.arange(rows),
        "positive_keys": np.full([rows, 1], -1),
        "negative_keys": 100 + np.arange(rows * hard).reshape(rows, hard),
    }
    for name, shape in (
        ("query", [rows]),
        ("document", [rows]),
        ("negative", [rows, hard]),
    ):
        for what, values in _ids(random, shape, 5).items():
            batch[f"{name}_{what}"] = values
    return batch


def _two_tower(pooled=False):
    """Returns a model; `pooled` trains a projection alone, on states that stay."""
    tf.keras.utils.set_random_seed(4)
    t5 = T5Config(30, 1, 2, 8, 12, 4, dropout=0.0 if pooled else 0.2)
    config = retriever.RetrieverConfig(t5, 6, 10.0, 5, 5, shared=not pooled)
    model = retriever.TwoTower(config)
    if pooled:
        train_only(model, ["query_tower/projection/kernel"])
    return model


def _trained(strategy, rows_at_a_time=0, seed=3, steps=4, rate=1e-3):
    """Losses and weights of a few steps on one batch, with hard negatives."""
    weights = np.array([1, 1, 1, 1, 1, 1, 1, 0], np.float32)
    batch = {**_batch(8, 2), "weights": weights}
    with strategy.scope():
        model = _two_tower()
        step = plain_training.make_step(model, rate, rows_at_a_time, seed=seed)
        losses = [step(batch) for _ in range(steps)]
    return losses, [v.numpy() for v in model.trainable_variables]


@pytest.fixture(scope="module")
def alone():
    """By one device."""
    return _trained(tf.distribute.get_strategy())


@pytest.mark.parametrize(
    "replicas, rows_at_a_time", [(2, 2), pytest.param(4, 0, marks=pytest.mark.slow)]
)
def test_a_row_loses_the_same_units_wherever_it_is_embedded(
    strategy_of, alone, replicas, rows_at_a_time
):
    """Replicas, and parts of their rows that are embedded one after the other."""
    losses, weights = _trained(strategy_of(replicas), rows_at_a_time)
    np.testing.assert_allclose(losses, alone[0], rtol=1e-5)
    for one, other in zip(weights, alone[1]):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_seed_and_step_decide_what_is_dropped(alone):
    """At rate 0 nothing else differs from step to step."""
    losses, _ = _trained(tf.distribute.get_strategy(), seed=4, steps=3, rate=0.0)
    found = sorted([*losses, alone[0][0]])  # that of another seed's first step
    assert min(np.diff(found)) > 1e-4


def _trained_directly(strategy, method, directory):
    """Weights (and negatives) after some private steps."""
    n, rows = 40, 8
    pairs = {
        name: values
        for name, values in _batch(n, 1).items()
        if not name.startswith("negative")
    }
    values = dict(epsilon=8.0, clip_norm=0.5, num_units=n, batch_size=rows, steps=4)
    if method == "naive":
        values.update(max_batch_size=25, sensitivity_multiplier=49)
    plan = privacy.make_plan(privacy.PrivacySpec(**values, accountant="rdp"))
    with strategy.scope():
        model = _two_tower(method == "pooled")
        corpus = {
            name: values for name, values in pairs.items() if name.startswith("doc")
        }
        stored = write_rows(directory / "rows", [pairs])
        if method == "pooled":
            corpus = retriever.with_vectors(model, corpus)
            stored = WithVectors(directory / "vectors", stored, model, known=corpus)
            stored = PooledQueries(directory / "states", stored, model)
        if method == "naive":
            made = retriever.NaiveLosses(model, 4)
            layers, state, options = made.layers, [], {"coupled": True}

            def loss(batch):
                return privacy.Coupled(*made(batch))
        else:
            loss = retriever.PublicNegatives(model, corpus, 12, seed=5, refresh_every=2)
            layers, state = loss.layers, loss.state
            options = {"before_step": loss.refresh, "state": state}
        executed = privacy.train(
            plan,
            loss,
            model.trainable_variables,
            privacy.make_optimizer(plan, 1e-3, "adam", noise_seed=7),
            stored.take,
            4,
            layers=layers,
            sampler_seed=3,
            **options,
        )
    assert executed == 4
    return [v.numpy() for v in (*model.trainable_variables, *state)]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["naive", "public_negatives", "pooled"])
def test_direct_private_training_takes_the_steps_of_one_replica(
    strategy_of, method, tmp_path
):
    """Which negatives are drawn, what they are embedded as, noise, dropout."""
    alone, shared = (
        _trained_directly(strategy_of(replicas), method, tmp_path / name)
        for name, replicas in (("alone", 1), ("shared", 2))
    )
    for one, other in zip(shared, alone):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
    # Noise of its own would be seen: each step of Adam moves a weight by 1e-3.
    start = _two_tower(method == "pooled").trainable_variables
    assert min(np.abs(a - b).max() for a, b in zip(alone, start)) > 1e-3


# -- Pretraining ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Of a T5 with dropout; its corpus."""
    directory = tmp_path_factory.mktemp("data") / "pairs"
    _tiny.write_pairs(directory, train=60, dev=5, test=5)
    config = pretrain.default_config()
    config.update(
        data=str(directory),
        document_length=24,
        query_length=10,
        pair_rows=8,
        text_rows=4,
        held_out_one_in=8,
        steps=6,
        watch_every=4,
        save_every=4,
        warmup=2,
        learning_rate=1e-2,
        stored="float32",
    )
    config.t5.update(
        vocabulary_size=420,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=12,
        key_value_dim=4,
        dropout=0.2,
    )
    return config


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """A function: what one device makes by some optimizer, uninterrupted."""
    base = tmp_path_factory.mktemp("whole")

    def made(optimizer):
        settings = config.copy_and_resolve_references()
        settings.optimizer = optimizer
        pretrain.run(settings, base / optimizer)  # not redone where it is finished
        return settings, base / optimizer

    return made


def _assert_like(out, other):
    ours, theirs = (load_file(path / "model.safetensors") for path in (out, other))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_allclose(value, theirs[name], rtol=0, atol=1e-5)
    curves = [
        json.loads((path / pretrain.CURVE_FILE).read_text()) for path in (out, other)
    ]
    assert curves[0]["steps"] == curves[1]["steps"] == [4, 6]
    for name in ("losses", "watched"):
        for one, two in zip(*(curve[name] for curve in curves)):
            assert _but_first(one) == pytest.approx(_but_first(two), abs=2e-3)


def _but_first(measured):
    """Without the share whose own document is nearest: of near ones, any may be."""
    return {name: value for name, value in measured.items() if name != "first"}


class _AskedAt(preemption.Notice):
    """Of a SIGTERM during some step."""

    def __init__(self, step):
        super().__init__()
        self._left = step

    @contextlib.contextmanager
    def training(self):
        def asked():
            self._left -= 1
            return self._left <= 0

        yield asked


@pytest.mark.slow
@pytest.mark.parametrize(
    "before, after, step, optimizer",
    [(2, 1, 5, "adafactor"), (1, 4, 2, "adam"), (4, 2, 3, "adafactor")],
)
def test_pretraining_moves_between_replicas(
    whole, strategy_of, tmp_path, before, after, step, optimizer
):
    """Ended under one number of them, gone on with under another: the same T5.

    With dropout. Adam's steps are clipped, and Adafactor's are of the size that its
    statistics say: neither is the same where a share's gradient is taken for all.
    """
    settings, wanted = whole(optimizer)
    devices = strategy.Devices(strategy_of(before), notice=_AskedAt(step))
    with pytest.raises(privacy.Preempted):
        pretrain.run(settings, tmp_path / "t5", devices)
    assert (tmp_path / ".t5.state" / f"record-{step}.json").is_file()
    assert not (tmp_path / "t5").exists()
    devices = strategy.Devices(strategy_of(after))
    pretrain.run(settings, tmp_path / "t5", devices)
    _assert_like(tmp_path / "t5", wanted)


@pytest.mark.slow
def test_what_replicas_agree_on_says_something_of_dropout(whole, tmp_path):
    settings, wanted = whole("adafactor")
    settings.t5.dropout = 0.0
    pretrain.run(settings, tmp_path / "t5")
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        _assert_like(tmp_path / "t5", wanted)


@pytest.mark.parametrize("changes", [{"text_rows": 3}, {"pair_rows": 6}])
def test_replicas_that_cannot_share_a_batch_are_refused(
    config, strategy_of, tmp_path, changes
):
    config = config.copy_and_resolve_references()
    config.update(changes)
    devices = strategy.Devices(strategy_of(4), steps_per_loop=2)
    ((name, rows),) = changes.items()
    # A job that does more than this goes on with one device.
    assert pretrain.usable(config, devices) == strategy.Devices(notice=devices.notice)
    devices = strategy.Devices(devices.strategy)
    with pytest.raises(
        validation.InputError,
        match=f"{name} is {rows}, which 4 replicas cannot share. Make it a multiple",
    ):
        pretrain.run(config, tmp_path / "t5", devices)
    assert list(tmp_path.iterdir()) == []


def test_a_share_has_its_part_of_both_kinds_of_rows():
    batch = {
        "query_ids": np.arange(24).reshape(12, 2),
        "document_key": np.arange(8) + 100,
    }
    shares = [pretraining_loop.deal(batch, replica, 4) for replica in range(4)]
    for replica, share in enumerate(shares):
        first, text = 2 * replica, 8 + replica
        rows = [2 * row + np.arange(2) for row in (first, first + 1, text)]
        np.testing.assert_array_equal(share["query_ids"], rows)
        assert share["document_key"].tolist() == [100 + first, 101 + first]
