"""A step that does not count is taken before the first one is paid for."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.privacy import (
    Groups,
    PrivacySpec,
    checkpoint,
    make_optimizer,
    make_plan,
    read_ledger,
    train,
)
from tfdpsq.privacy.compiled import CompiledSteps
from tfdpsq.privacy.loop import unquoted_values
from tfdpsq.validation import InputError

_DATA = np.arange(36, dtype=np.float32).reshape(12, 3)
_SPEC = dict(
    epsilon=2.0, clip_norm=1.0, num_units=12, batch_size=6, steps=3, accountant="rdp"
)


def _train(directory, microbatch=4, spec=(), **options):
    """Trains on twelve rows; returns the weights."""
    plan = make_plan(PrivacySpec(**{**_SPEC, **dict(spec)}))
    layer = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    layer.build([None, 3])
    train(
        plan,
        lambda batch: layer(batch["x"])[:, 0] ** 2,
        [layer.kernel],
        make_optimizer(plan, 0.1, "adam"),
        lambda at: {"x": _DATA[at]},
        microbatch,
        layers=[layer],
        directory=directory,
        data_fingerprint="twelve rows",
        **options,
    )
    return layer.kernel.numpy()


def _fails(monkeypatch, when):
    """Lets a step find no memory when its batch and its number say so."""
    take = CompiledSteps.__call__

    def limited(self, batches, counts, noise, first):
        if when(self.microbatch_size, first):
            raise tf.errors.ResourceExhaustedError(None, None, "OOM")
        return take(self, batches, counts, noise, first)

    monkeypatch.setattr(CompiledSteps, "__call__", limited)


def test_a_microbatch_that_memory_does_not_hold_costs_nothing(tmp_path, monkeypatch):
    _fails(monkeypatch, lambda microbatch, _: microbatch > 4)
    message = (
        "too little memory.*smaller microbatch_size or batch_size. Nothing was paid"
    )
    with pytest.raises(InputError, match=message):
        _train(tmp_path, 8)
    assert read_ledger(tmp_path / "ledger.jsonl").steps_paid == 0
    _train(tmp_path, 4)
    assert read_ledger(tmp_path / "ledger.jsonl").steps_paid == 3


def test_memory_that_is_gone_later_is_told_with_its_remedy(tmp_path, monkeypatch):
    _fails(monkeypatch, lambda _, first: first == 1)
    message = r"step 2 .*microbatch_size \(now 4\).*Count 2 steps of this run as spent"
    with pytest.raises(InputError, match=message):
        _train(tmp_path)
    # Of the rows that are tried it named no setting.
    with pytest.raises(InputError, match="smaller microbatch_size or batch_size. The"):
        with unquoted_values("the problem", "The remedy."):
            raise tf.errors.ResourceExhaustedError(None, None, "OOM")


@pytest.mark.parametrize(
    "spec, options",
    [
        ({}, {}),
        ({"secure": True}, {}),
        ({}, {"steps_per_loop": 2, "save_every": 2}),
        (
            {"unit": "user", "rows_per_unit": 2, "num_units": 6, "batch_size": 3},
            {"groups": Groups.of(np.arange(12) // 2)},
        ),
    ],
    ids=["rows", "secure", "loops", "users"],
)
def test_it_leaves_nothing_behind(tmp_path, monkeypatch, spec, options):
    """The steps are those of a run without it, bit for bit; its keys are its own."""
    monkeypatch.setattr(checkpoint, "fresh_seed", lambda secure: 4711)
    taken, take = [], CompiledSteps.__call__

    def seen(self, batches, counts, noise, first):
        taken.append((first, max(len(batch["weights"]) for batch in batches)))
        return take(self, batches, counts, noise, first)

    monkeypatch.setattr(CompiledSteps, "__call__", seen)
    with_it = _train(tmp_path / "with", spec=spec, **options)
    (first, rows), *real = taken
    assert first == 3 and all(number < 3 for number, _ in real)
    assert all(rows >= count for _, count in real)
    monkeypatch.setattr(CompiledSteps, "rehearse", lambda *_: None)
    np.testing.assert_array_equal(
        _train(tmp_path / "without", spec=spec, **options), with_it
    )


def test_a_run_that_paid_goes_on_without_it(tmp_path, monkeypatch):
    _fails(monkeypatch, lambda _, first: first == 1)
    with pytest.raises(InputError, match="found too little memory"):
        _train(tmp_path, save_every=1)
    monkeypatch.undo()
    rehearsed = []
    monkeypatch.setattr(CompiledSteps, "rehearse", lambda *_: rehearsed.append(1))
    _train(tmp_path, save_every=1)
    assert not rehearsed
