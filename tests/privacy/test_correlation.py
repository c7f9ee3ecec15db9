"""Noise that cancels over the steps of an epoch: its law, its cost, what is refused."""

import functools
import math

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
import scipy.stats
import tensorflow as tf
from helpers import plans

from tfdpsq.privacy import RunKey
from tfdpsq.privacy.randomness.correlation import NoiseWindow
from tfdpsq.privacy.step import privatized
from tfdpsq.validation import InputError

# Epochs of 10 steps, in windows of 4, 4 and 2; the last epoch is not finished.
_STEPS, _EPOCH = 27, 10
_WEIGHTS = 4000


_plan = functools.partial(
    plans.plan,
    num_units=52,
    n_is_public=True,
    batch_size=5,
    steps=_STEPS,
    sampler="shuffled",
    noise_window=4,
    accountant="pld",
)


def _zeros():
    return [tf.zeros([_WEIGHTS]), tf.zeros([2, _WEIGHTS // 2])]


@functools.cache
def _noise(window=4, seed=1, jit=False):
    """[steps, 2, weights]: what each step adds to two sums of zeros, over σΔ."""
    plan = _plan(noise_window=window)
    key = RunKey(plan, seed)

    @tf.function(autograph=False, jit_compile=jit)
    def step(number):
        return privatized(plan, _zeros(), [], key.step_keys(number))

    scale = plan.spec.batch_size / plan.noise_stddev
    return (
        np.stack(
            [
                np.stack([np.ravel(one) for one in step(tf.constant(number, tf.int64))])
                for number in range(_STEPS)
            ]
        ).astype(np.float64)
        * scale
    )


def _mixing(noise, draws):
    """[steps, steps]: shares of all draws in the noise of each step."""
    flat = draws.reshape(_STEPS, -1)
    shares, *_ = np.linalg.lstsq(flat.T, noise.reshape(_STEPS, -1).T, rcond=None)
    return shares.T


def _inverse(window):
    """[window, window]: D, from its definition alone: (C/c)² adds up the steps."""
    square = scipy.linalg.sqrtm(np.tril(np.ones([window, window])))
    return np.linalg.inv(square / np.linalg.norm(square, axis=0).max())


def _expected(window):
    blocks = []
    for left in (_EPOCH, _EPOCH, _STEPS - 2 * _EPOCH):
        while left:
            steps = min(window, left)
            blocks.append(_inverse(window)[:steps, :steps])
            left -= steps
    return scipy.linalg.block_diag(*blocks)


@pytest.mark.parametrize("steps", [1, 2, 60])
def test_the_matrix_adds_up_steps_when_it_is_squared(steps):
    window = NoiseWindow(steps, 60)
    matrix = np.linalg.inv(np.tril(scipy.linalg.toeplitz(window.shares())))
    squared = matrix @ matrix / matrix[0, 0] ** 2
    np.testing.assert_allclose(squared, np.tril(np.ones([steps, steps])), atol=1e-12)
    norms = np.linalg.norm(matrix, axis=0)
    assert norms[0] == pytest.approx(1, abs=1e-12) and (norms[1:] < norms[0]).all()


@pytest.mark.parametrize(
    "window, jit", [(2, False), (4, False), (4, True), (10, False)]
)
def test_a_steps_noise_is_the_inverse_times_independent_draws(window, jit):
    found, plain = _noise(window, jit=jit), _noise(None, jit=jit)
    mixing = _mixing(found, plain)
    np.testing.assert_allclose(mixing, _expected(window), atol=1e-4)
    rest = found.reshape(_STEPS, -1) - mixing @ plain.reshape(_STEPS, -1)
    assert np.abs(rest).max() < 1e-4


def test_a_step_repeated_alone_has_the_same_noise():
    """In the middle of a window, of which a resumed run takes the rest."""
    plan = _plan()
    found = privatized(plan, _zeros(), [], RunKey(plan, 1).step_keys(6))
    scale = plan.spec.batch_size / plan.noise_stddev
    np.testing.assert_allclose(scale * np.ravel(found[0]), _noise(4)[6, 0], atol=1e-4)


def test_the_matrix_times_the_noise_is_white():
    """Tests variances by χ² at level 1e-5, and all pairs of steps and variables."""
    noise = _noise(4, seed=7).reshape(_STEPS, -1)
    white = np.linalg.solve(_expected(4), noise)
    count = white.shape[1]
    for values in white:
        tail = scipy.stats.chi2(count).cdf((values**2).sum())
        assert 5e-6 < tail < 1 - 5e-6
        for factor in (2 / 3, 1.5):
            tail = scipy.stats.chi2(count).cdf((values**2).sum() * factor**2)
            assert not 5e-6 < tail < 1 - 5e-6
    between = np.corrcoef(white) - np.eye(_STEPS)
    assert np.abs(between).max() < 5 / math.sqrt(count)
    one, other = _noise(4, seed=7)[:, 0], _noise(4, seed=7)[:, 1]
    assert abs((one * other).mean()) < 5 * (one**2).mean() / math.sqrt(one.size)
    # Independent noise is what this would find.
    plain = np.linalg.solve(_expected(4), _noise(None).reshape(_STEPS, -1))
    assert np.abs(np.corrcoef(plain) - np.eye(_STEPS)).max() > 0.3


@pytest.mark.parametrize("steps", [3, 16, _STEPS])
@pytest.mark.parametrize("window", [4, 10, 1000])
def test_no_unit_is_seen_better_than_epsilon_says(window, steps):
    """By the steps that it is drawn for and the noise that these had.

    All sums move by Δ in one direction where a unit is drawn, which is the worst that
    clipped gradients do: a Gaussian shift, whose μ is the shift's length in units of
    the noise's covariance.
    """
    plan = _plan(noise_window=window)
    mixing = _mixing(_noise(window), _noise(None))[:steps, :steps]
    sampler = plan.sampler(seed=3)
    drawn = np.zeros([plan.spec.num_units, steps])
    for step in range(steps):
        draw = sampler.draw(step)
        drawn[draw.indices[: draw.count], step] = 1
    assert drawn.sum(1).max() == math.ceil(steps / _EPOCH)
    seen = np.linalg.norm(np.linalg.solve(mixing, drawn.T), axis=0)
    worst = seen.max() / plan.noise_multiplier
    assert seen.max() ** 2 <= math.ceil(steps / _EPOCH) * (1 + 1e-3)
    assert _epsilon_of_shift(worst, plan.spec.target_delta) <= plan.epsilon(steps) * (
        1 + 1e-3
    )


def _epsilon_of_shift(mu, delta):
    """ε at δ of telling N(0, 1) from N(μ, 1): Balle & Wang 2018, theorem 8."""

    def excess(epsilon):
        normal = scipy.stats.norm
        return (
            normal.cdf(mu / 2 - epsilon / mu)
            - math.exp(epsilon) * normal.cdf(-mu / 2 - epsilon / mu)
            - delta
        )

    return scipy.optimize.brentq(excess, 0, 100)


def test_it_costs_what_independent_noise_costs():
    plan, plain = _plan(), _plan(noise_window=None)
    assert plan.noise_multiplier == plain.noise_multiplier
    for steps in (1, 9, 11, _STEPS):
        assert plan.epsilon(steps) == plain.epsilon(steps)
    assert plan.fingerprint != plain.fingerprint
    # More than an epoch is an epoch; without privacy there is no noise.
    assert _plan(noise_window=1000).noise_window == NoiseWindow(_EPOCH, _EPOCH)
    assert _plan(epsilon=math.inf).noise_window is None


@pytest.mark.parametrize("steps", [1, 10, _STEPS])
@pytest.mark.parametrize("window", [None, 3])
def test_the_step_that_is_tried_has_no_draw_of_one_that_is_taken(window, steps):
    plan = _plan(steps=steps, noise_window=window)
    first = plan.untaken_step
    if window is not None:
        first -= plan.noise_window.position(plan.untaken_step)
    assert first >= steps


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(sampler="poisson"), "noise_window is 4 and sampler 'poisson'"),
        (dict(secure=True), "noise_window is 4 and secure is True"),
        (dict(batch_size=27), "has 1 batches of 27"),
        (dict(noise_window=1), "noise_window is 1"),
        (dict(noise_window=2.5), "noise_window is 2.5"),
    ],
)
def test_plans_that_it_is_not_derived_for_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        _plan(**changes)
