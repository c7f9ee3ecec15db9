"""Seeds and states that a run keeps: shown to nobody, and of this run alone."""

import functools
import itertools
import json
import operator

import numpy as np
import pytest
import tensorflow as tf
from test_before_spending import _spec, _train, _unpaid

from tfdpsq.privacy import checkpoint, read_ledger, training
from tfdpsq.privacy.loop import Kept
from tfdpsq.validation import DataError, InputError


def test_a_seed_of_samples_is_refused_where_a_directory_keeps_one(tmp_path):
    """Killed and begun with another one, a run took a paid step on other rows."""
    with pytest.raises(ValueError, match="other rows under the same noise"):
        _train(tmp_path, _spec(), sampler_seed=5)
    assert _unpaid(tmp_path)


def test_what_holds_the_seeds_does_not_show_them(tmp_path):
    """Tracebacks and logs show the `repr` of what a frame holds."""
    found = checkpoint.open_secrets(tmp_path, 0, {})
    kept = Kept(tmp_path, None, found)
    for seed in (found.noise_seed, found.sampler_seed):
        assert str(seed) not in f"{found!r} {kept!r} {kept}"


def test_a_run_goes_on_with_the_draws_of_its_own_version_only(tmp_path, monkeypatch):
    """Other draws from the same seeds are other noise on a paid step."""
    assert _train(tmp_path, _spec(), on_step=lambda step, loss: True) == 1
    with monkeypatch.context() as changed:
        changed.setattr(training, "SCHEME", "one draw")
        with pytest.raises(ValueError, match="random_numbers was Philox .*one draw"):
            _train(tmp_path, _spec())
    assert _train(tmp_path, _spec()) == 3


def test_a_state_of_other_shapes_is_not_restored(tmp_path):
    found = checkpoint.open_secrets(tmp_path, 0, {})
    checkpoint.save(tmp_path, 2, [tf.Variable([1.0, 2.0])], found)
    for other in ([tf.Variable([1, 2])], [tf.Variable([[1.0, 2.0]])]):
        before = other[0].numpy().tolist()
        with pytest.raises(InputError, match="state of another model or optimizer"):
            checkpoint.restore(tmp_path, other, 2, found)
        assert other[0].numpy().tolist() == before


def test_weights_that_are_not_finite_are_not_gone_on_with(tmp_path):
    """Rewritten ones paid for the whole plan before training was said to diverge."""
    bad = np.array([[np.nan], [0], [np.inf]], np.float32)
    with pytest.raises(InputError, match="before the first step.*Nothing was paid"):
        _train(tmp_path, _spec(epsilon=float("inf")), initial=bad)
    assert _unpaid(tmp_path)
    assert _train(tmp_path, _spec(), on_step=lambda step, loss: True) == 1
    path = tmp_path / checkpoint.STATE / "step-00000001.npz"
    with np.load(path) as saved:
        values = dict(saved)
    np.savez(path, **{**values, "00000": bad})
    with pytest.raises(DataError, match="step-00000001.npz: .* holds NaN or infinite"):
        _train(tmp_path, _spec())
    assert read_ledger(tmp_path / "ledger.jsonl").steps_paid == 1
    np.savez(path, **values)
    assert _train(tmp_path, _spec()) == 3


def test_a_file_that_is_named_otherwise_is_no_state(tmp_path):
    """A backup was read as a number; a copy was deleted as an old state."""
    found = checkpoint.open_secrets(tmp_path, 0, {})
    weights = [tf.Variable([1.0, 2.0])]
    names = ["step-backup.npz", "step-00000001 (1).npz", "step-0.npz"]
    for name in names:
        (tmp_path / checkpoint.STATE / name).write_text("mine")
    for step in (1, 2, 3, 10**8):
        checkpoint.save(tmp_path, step, weights, found)
    assert checkpoint.steps_taken(tmp_path) == 10**8
    assert checkpoint.restore(tmp_path, weights, 10**8, found) == 10**8
    left = {path.name for path in (tmp_path / checkpoint.STATE).glob("step-*")}
    assert left == {*names, "step-00000003.npz", "step-100000000.npz"}


def test_a_run_that_did_not_keep_a_setting_is_not_gone_on_with(tmp_path):
    """Nobody knows whether its draws were these: paid steps could get others."""
    checkpoint.open_secrets(tmp_path, 0, {"engine": "fast"})
    with pytest.raises(InputError, match="older tfdpsq"):
        checkpoint.open_secrets(tmp_path, 1, {"engine": "fast", "random_numbers": "x"})


def test_only_the_first_variable_that_differs_is_named(tmp_path):
    """A model of a hundred variables listed them all, twice."""
    kinds = [([n, n], "float32") for n in range(100)]
    checkpoint.open_secrets(tmp_path, 0, {"variables": repr(kinds)})
    for now in (kinds[:70], [*kinds[:70], ([1], "float32"), *kinds[71:]], "damaged"):
        with pytest.raises(InputError, match="began with other variables") as refused:
            checkpoint.open_secrets(tmp_path, 1, {"variables": str(now)})
        assert len(str(refused.value)) < 500
        if now != "damaged":
            assert "variable.70: ([70, 70], 'float32') there" in str(refused.value)


def test_every_run_draws_two_seeds_of_128_bits(tmp_path):
    """One of them alone must not give the other away, nor be searched through."""
    seeds = []
    for number in range(40):
        directory = tmp_path / f"{number}"
        found = checkpoint.open_secrets(directory, 0, {})
        assert checkpoint.open_secrets(directory, 1, {}) == found
        seeds += [found.noise_seed, found.sampler_seed]
    assert len(set(seeds)) == 80
    # Each bit is 0 in some and 1 in others: missed by chance once in 10^21.
    ones = functools.reduce(operator.or_, seeds)
    zeros = functools.reduce(operator.and_, seeds)
    assert ones == (1 << 128) - 1 and zeros == 0
    # Between any two, about half of the bits differ: 11 deviations would be 2 or 126.
    for one, other in itertools.combinations(seeds, 2):
        assert 20 < bin(one ^ other).count("1") < 108


@pytest.mark.parametrize(
    "changes",
    [
        {"noise_seed": -1},
        {"sampler_seed": 1 << 128},
        {"noise_seed": float("inf")},
        {"noise_seed": True},
        {"sampler_seed": "5"},
        {"settings": []},
    ],
)
def test_damaged_seeds_are_named(tmp_path, changes):
    kept = {"noise_seed": 1, "sampler_seed": (1 << 128) - 1, "settings": {}}
    path = tmp_path / checkpoint.STATE / checkpoint.SECRETS
    path.parent.mkdir()
    path.write_text(json.dumps(kept))
    assert checkpoint.open_secrets(tmp_path, 1, {}).noise_seed == 1
    path.write_text(json.dumps({**kept, **changes}))
    with pytest.raises(DataError, match="does not hold the run's two seeds"):
        checkpoint.open_secrets(tmp_path, 1, {})
    if changes.get("sampler_seed") == 1 << 128:
        assert checkpoint.open_secrets(tmp_path, 1, {}, secure=True)
