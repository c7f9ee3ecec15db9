"""Noise that cancels over the steps of an epoch: its law, its cost, what is refused."""

import functools
import math
import shutil

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
import scipy.stats
import tensorflow as tf
from helpers import fitted, plans

from tfdpsq.privacy import (
    make_optimizer,
    verify_certificate,
)
from tfdpsq.privacy.randomness.correlation import NoiseWindow
from tfdpsq.privacy.randomness.sampling import Groups
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
    optimizer = make_optimizer(plan, 1.0, "sgd", noise_seed=seed)

    @tf.function(autograph=False, jit_compile=jit)
    def step(number):
        return optimizer.privatize(_zeros(), (), optimizer.step_keys(number))

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


@pytest.mark.parametrize("steps", [1, 2, 7, 60])
def test_the_matrix_adds_up_steps_when_it_is_squared(steps):
    window = NoiseWindow(steps, 60)
    matrix = np.linalg.inv(np.tril(scipy.linalg.toeplitz(window.shares())))
    squared = matrix @ matrix / matrix[0, 0] ** 2
    np.testing.assert_allclose(squared, np.tril(np.ones([steps, steps])), atol=1e-12)
    norms = np.linalg.norm(matrix, axis=0)
    assert norms[0] == pytest.approx(1, abs=1e-12) and (norms[1:] < norms[0]).all()


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("window", [2, 4, 10])
def test_a_steps_noise_is_the_inverse_times_independent_draws(window, jit):
    found, plain = _noise(window, jit=jit), _noise(None, jit=jit)
    mixing = _mixing(found, plain)
    np.testing.assert_allclose(mixing, _expected(window), atol=1e-4)
    rest = found.reshape(_STEPS, -1) - mixing @ plain.reshape(_STEPS, -1)
    assert np.abs(rest).max() < 1e-4


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


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_a_compiled_step_has_64_bit_floats_where_its_weights_have(dtype):
    optimizer = make_optimizer(_plan(), 1.0, "sgd", noise_seed=1)

    @tf.function(autograph=False, jit_compile=True)
    def step(number):
        sums = [tf.zeros([3], dtype)]
        return optimizer.privatize(sums, (), optimizer.step_keys(number))

    number = tf.constant(5, tf.int64)
    program = step.experimental_get_compiler_ir(number)(stage="hlo")
    assert ("f64[" in program) == (dtype == tf.float64)
    assert step(number)[0].dtype == dtype


def test_sums_over_a_window_have_less_noise():
    deviation = _noise(10)[:_EPOCH].sum(0).std()
    assert deviation < 1 + math.log(_EPOCH) / math.pi + 0.1
    assert _noise(None)[:_EPOCH].sum(0).std() > 3


@pytest.mark.parametrize("steps", [3, 10, 16, _STEPS])
@pytest.mark.parametrize("window", [3, 4, 10, 1000])
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


@pytest.mark.parametrize("steps", [1, 9, 10, _STEPS])
@pytest.mark.parametrize("window", [None, 3, 10])
def test_the_step_that_is_tried_has_no_draw_of_one_that_is_taken(window, steps):
    plan = _plan(steps=steps, noise_window=window)
    first = plan.untaken_step
    if window is not None:
        first -= plan.noise_window.position(plan.untaken_step)
    assert first >= steps


def test_users_are_once_in_an_epoch_too():
    groups = Groups.of(np.arange(156) // 3)
    plan = _plan(unit="user", rows_per_unit=2)
    sampler = plan.sampler(groups=groups, seed=2)
    seen = []
    for step in range(_EPOCH):
        draw = sampler.draw(step)
        seen += sorted({row // 3 for row in draw.indices[draw.weights > 0]})
    assert len(seen) == len(set(seen)) == 50


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(sampler="poisson"), "noise_window is 4 and sampler 'poisson'"),
        (dict(secure=True), "noise_window is 4 and secure is True"),
        (dict(batch_size=27), "has 1 batches of 27"),
        (dict(noise_window=1), "noise_window is 1, and an epoch of 52"),
        (dict(noise_window=0), "noise_window is 0"),
        (dict(noise_window=2.5), "noise_window is 2.5"),
    ],
)
def test_what_it_is_not_derived_for_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        _plan(**changes)


def test_windows_are_parts_of_an_epoch():
    with pytest.raises(InputError, match="steps is 11, but an epoch has 10"):
        NoiseWindow(11, 10)


def test_certificates_say_what_cancels_and_verify():
    certificate = plans.certificate(_plan(), 12)
    mechanism = certificate["mechanism"]
    assert mechanism["name"].endswith("matrix factorisation (DP-MF)")
    assert certificate["spec"]["noise_window"] == mechanism["noise_window"] == 4
    assert "every 4 steps of an epoch of 10" in mechanism["noise_in_words"]
    assert not verify_certificate(certificate).problems
    most = plans.certificate(_plan(noise_window=1000), 12)["mechanism"]
    assert most["noise_window"] == _EPOCH and "every 10 steps" in most["noise_in_words"]
    plain = plans.certificate(_plan(noise_window=None), 12)
    assert "noise_window" not in plain["spec"] and "noise" not in plain["mechanism"]
    mechanism["noise_window"] = 5
    problems = " ".join(verify_certificate(certificate).problems)
    assert "mechanism.noise_window is 5, but what was run gives 4" in problems


class _Stop(tf.keras.callbacks.Callback):
    def __init__(self, step):
        super().__init__()
        self.left = step

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def _fitted(directory, stop=None):
    tf.keras.utils.set_random_seed(0)
    plan = fitted.plan_of(
        sampler="shuffled", n_is_public=True, noise_window=4, batch_size=8, steps=11
    )
    model = fitted.compiled(fitted.functional(), plan)
    callbacks = [] if stop is None else [_Stop(stop)]
    model.fit(*fitted.data(), directory=directory, callbacks=callbacks)
    return model.get_weights()


def test_a_model_that_was_stopped_goes_on_to_the_same_weights(tmp_path):
    """In the middle of a window: its draws are made again."""
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    with pytest.raises(KeyboardInterrupt):
        _fitted(stopped, 1)
    shutil.copytree(stopped, whole)  # with the seeds of the run
    with pytest.raises(KeyboardInterrupt):
        _fitted(stopped, 5)
    for one, other in zip(_fitted(stopped), _fitted(whole)):
        assert one.tobytes() == other.tobytes()
