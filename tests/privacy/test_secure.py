"""Secure mode: its keystream, its exact draws, its grid, and what is said of it.

The laws of whole samplers and of training's noise are tested where the default's are:
test_statistics.py and test_statistics_sampling.py.
"""

import bisect
import decimal
import fractions
import functools
import itertools
import math
import sys

import numpy as np
import pytest
import scipy.special
import scipy.stats
import tensorflow as tf
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from helpers import plans

from tfdpsq.privacy import RunKey, checkpoint
from tfdpsq.privacy.randomness import secure
from tfdpsq.privacy.randomness.sampling import fresh_seed
from tfdpsq.privacy.randomness.secure import PURPOSES, SecureSource, SecureStream
from tfdpsq.privacy.step import privatized
from tfdpsq.validation import InputError

_ACCEPTED, _REJECTED = 1e-4, 1e-9


_plan = functools.partial(
    plans.plan, num_units=2000, batch_size=100, steps=20, secure=True
)


class _Words:
    """A stream whose next words are given."""

    def __init__(self, *words):
        self._words = list(words)

    def words(self, count):
        taken, self._words = self._words[:count], self._words[count:]
        return np.array(taken, np.uint64)


# -- Keystream ------------------------------------------------------------------------


def test_keystream_is_that_of_rfc_8439():
    """Section 2.3.2: key 00 … 1f, nonce 000000090000004a00000000, block 1."""
    stream = SecureStream(bytes(range(32)), bytes.fromhex("000000090000004a00000000"))
    block = stream.words(16).tobytes()[64:]
    assert block.hex() == (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )


def _subkey(seed, purpose):
    """RFC 5869 by another implementation."""
    info = b"tfdpsq secure/1 " + purpose.encode()
    return HKDF(hashes.SHA256(), 32, None, info).derive(seed.to_bytes(32, "big"))


def test_subkeys_are_derived_by_rfc_5869():
    seed = (7 << 200) + 5
    for purpose in PURPOSES:
        nonce = (3).to_bytes(8, "little") + (2).to_bytes(4, "little")
        np.testing.assert_array_equal(
            SecureSource(seed).stream(purpose, 3, 2).words(9),
            SecureStream(_subkey(seed, purpose), nonce).words(9),
        )


def test_tensorflow_is_given_seeds_of_subkeys_of_their_own(monkeypatch):
    """Words of dropout are in graphs and profiles, and the global seed in state."""
    seed, given = (3 << 250) + 11, []
    plan = _plan(num_units=20, batch_size=10, steps=1)
    layer = tf.keras.layers.Dense(1, use_bias=False)
    layer.build([None, 3])
    monkeypatch.setattr(tf.random, "set_seed", given.append)
    rows = {"x": np.ones([20, 3], np.float32)}
    plans.trained(plan, lambda b: layer(b["x"])[:, 0], [layer], rows, 10, seed=seed)
    low = (1 << 63) - 1
    half, other = (
        int.from_bytes(_subkey(seed, purpose)[:16], "big")
        for purpose in ("dropout", "global")
    )
    dropout = [int(word) for word in RunKey(plan, seed).step_keys(0).dropout]
    assert dropout == [half & low, half >> 63 & low]
    assert given == [other & low]


def test_streams_repeat_and_no_two_are_alike():
    def words(seed=1, purpose="noise", step=0, index=0):
        return SecureSource(seed).stream(purpose, step, index).words(2000)

    places = [
        dict(seed=seed, purpose=purpose, step=step, index=index)
        for seed in (1, 2, 1 << 255)
        for purpose in ("noise", "units", "dealing")
        for step in (0, 1, 1 << 32)
        for index in (0, 1)
    ]
    found = [words(**place) for place in places]
    for place, one in zip(places, found):
        np.testing.assert_array_equal(one, words(**place))
    for one, other in itertools.combinations(found, 2):
        assert not (one == other).any()
    # The bits of 54 streams, and of pairs of streams, are fair and unlike each other.
    signs = np.unpackbits(np.stack(found).view(np.uint8), axis=1) * 2.0 - 1
    z = (signs @ signs.T / math.sqrt(signs.shape[1]))[np.triu_indices(54, 1)]
    assert np.abs(z).max() < 5
    assert np.abs(signs.sum(1) / math.sqrt(signs.shape[1])).max() < 4.5


def test_fresh_keys_have_256_bits_and_are_kept_like_other_seeds(tmp_path):
    seeds = [fresh_seed(secure=True) for _ in range(50)]
    assert len(set(seeds)) == 50 and max(seeds).bit_length() > 248
    (tmp_path / checkpoint.STATE).mkdir()
    made = checkpoint.open_secrets(tmp_path, "a run", 0, {}, secure=True)
    assert made.seed.bit_length() > 240
    path = tmp_path / checkpoint.STATE / checkpoint.SECRETS
    assert path.stat().st_mode & 0o777 == 0o600
    assert checkpoint.open_secrets(tmp_path, "a run", 3, {}, secure=True) == made


# -- Exact draws ----------------------------------------------------------------------


@pytest.mark.parametrize("bound", [1, 2, 3, 7, 1000, (1 << 62) * 3, 1 << 64])
def test_integers_are_uniform(bound):
    """Of 3·2^62, remainders of 64-bit words would be below 2^62 twice as often."""
    found = SecureSource(4).stream("rows", 0).integers(bound, 20_000, np.uint64)
    cells = min(bound, 12)
    counts = np.bincount((found.astype(float) / bound * cells).astype(int))
    assert len(counts) <= cells
    if bound > 1:
        assert scipy.stats.chisquare(counts[:cells]).pvalue > _ACCEPTED


def test_coins_fall_below_q_and_not_above():
    """Of q = 0.3, a float, the bound is ⌊q·2^64⌋: of its last word and the next."""
    bound = math.floor(fractions.Fraction(0.3) * 2**64)
    coins = _Words(bound, bound - 1, 0, (1 << 64) - 1)
    stream = SecureSource(1).stream("units", 0)
    stream.words = lambda count: coins.words(4) if count == 4 else np.arange(2)
    assert set(stream.poisson_subset(4, 0.3, 4).tolist()) == {1, 2}
    assert len(SecureSource(1).stream("units", 0).poisson_subset(50, 1.0, 50)) == 50


def test_equal_tags_are_drawn_again():
    stream = SecureSource(1).stream("units", 0)
    stream.words = _Words(5, 5, 1, 9, 2, 4).words
    assert stream.permutation(3).tolist() == [1, 2, 0]


# -- The rounded Gaussian -------------------------------------------------------------


def _rounded_p(values, deviation):
    """p of χ² that integers have the law of ⌊s·N(0, 1)⌉, in cells of 1/20 deviation."""
    width = max(1, round(deviation / 20))
    edges = np.arange(-70, 71) * width + 0.5  # between integers
    law = np.diff(scipy.stats.norm.cdf(edges / deviation)) * len(values)
    observed, _ = np.histogram(values, edges)
    kept = law > 20
    law, observed = law[kept], observed[kept]
    rest = len(values) - law.sum()
    return scipy.stats.chisquare(
        [*observed, len(values) - observed.sum()], [*law, rest]
    ).pvalue


@pytest.mark.parametrize("deviation", [64.0, 100.3, 127.9, 1.3 * 2.0**37])
def test_the_rounded_gaussian_has_its_law_and_no_other(deviation):
    law = secure.RoundedGaussian(deviation)
    values = law.draw(SecureSource(2).stream("noise", 0), 300_000)
    assert _rounded_p(values, deviation) > _ACCEPTED
    for wrong in (2 / 3, 3 / 2, 0.97, 1.03):
        assert _rounded_p(values, wrong * deviation) < _REJECTED
    # Tails: 300,000 normal numbers go beyond 4 deviations 19 times.
    beyond = scipy.stats.binom(300_000, 2 * scipy.stats.norm.sf(4))
    assert beyond.ppf(1e-5) <= (np.abs(values) > 4 * deviation).sum()
    assert (np.abs(values) > 4 * deviation).sum() <= beyond.ppf(1 - 1e-5)


def test_every_integer_has_its_own_probability():
    """At s = 64 each one by itself, those in the middle of pieces and at their ends."""
    values = secure.RoundedGaussian(64.0).draw(
        SecureSource(8).stream("noise", 0), 10**6
    )
    k = np.arange(-200, 201)
    law = scipy.stats.norm.cdf((k + 0.5) / 64) - scipy.stats.norm.cdf((k - 0.5) / 64)
    counts = np.bincount(values[np.abs(values) <= 200] + 200, minlength=401)
    assert scipy.stats.chisquare(counts, law / law.sum() * counts.sum()).pvalue > (
        _ACCEPTED
    )


class _Pieces:
    """The proposal of von Neumann's rejection, in 60 digits, from its definition.

    Pieces are W = 2^shift wide, between 2^-7 and 2^-6 deviations; piece j is proposed
    with a probability proportional to exp(-(jW/s)²/2), up to 13 deviations.
    """

    def __init__(self, deviation):
        self.shift = math.frexp(deviation)[1] - 7
        with decimal.localcontext() as context:
            context.prec = 60
            width = decimal.Decimal(2) ** self.shift / decimal.Decimal(deviation)
            self.square = width * width
            self.count = math.ceil(13 / float(width))
            weights = [(-self.square * j * j / 2).exp() for j in range(self.count)]
            whole = sum(weights)
            self.ends = list(itertools.accumulate(w / whole for w in weights[:-1]))
            # As integers of 128 bits.
            self.words = [int(end * (1 << 128)) for end in self.ends]

    def chance(self, piece, place):
        """The probability that what lies at place / 2^63 of a piece is accepted."""
        with decimal.localcontext() as context:
            context.prec = 60
            fraction = decimal.Decimal(place) / (1 << 63)
            return (-self.square * fraction * (piece + fraction / 2)).exp()

    def rounded(self, piece, place):
        position = fractions.Fraction(place, 1 << 63) + piece
        return math.floor(position * 2**self.shift + fractions.Fraction(1, 2))


@pytest.mark.parametrize("deviation", [64.0, 1000.7, 2.0**57])
def test_pieces_are_proposed_as_often_as_the_density_and_far_into_the_tail(deviation):
    """Half a per cent less noise would pass a test by a million draws."""
    law, pieces = secure.RoundedGaussian(deviation), _Pieces(deviation)
    inner = [j for j, end in enumerate(pieces.ends) if end < 1 - 1e-6]
    for factor, beyond in ((1 - 1e-12, 0), (1 + 1e-12, 1)):
        picks = [int(float(pieces.ends[j]) * factor * 2.0**64) for j in inner]
        drawn = law.draw(_Words(*picks, *[0] * (2 * len(picks))), len(picks))
        expected = [(j + beyond) << pieces.shift for j in inner]
        np.testing.assert_array_equal(drawn, expected)
    # What is cut off: the largest number picks the last piece.
    top = (1 << 64) - 1
    (last,) = law.draw(_Words(top, 0, 0, top, 0, 0), 1)
    end = (int(last) + math.ldexp(1, pieces.shift)) / deviation  # in deviations
    assert scipy.special.erfc(end / math.sqrt(2)) < 2.0**-125


def test_draws_decide_as_exact_arithmetic_does():
    deviation, count = 1.3 * 2.0**36, 2000
    pieces, stream = _Pieces(deviation), SecureSource(6).stream("noise", 0)
    expected, left = np.zeros(count, np.int64), np.arange(count)
    while len(left):
        again = []
        for at, words in zip(left, stream.words(3 * len(left)).reshape(3, -1).T):
            pick, place, level = (int(word) for word in words)
            negative, place = divmod(place, 1 << 63)
            piece = bisect.bisect_right(pieces.words, pick << 64)
            if decimal.Decimal(level) / (1 << 64) >= pieces.chance(piece, place):
                again.append(at)
                continue
            value = pieces.rounded(piece, place)
            expected[at] = -value if negative else value
        left = np.array(again, int)
    law = secure.RoundedGaussian(deviation)
    found = law.draw(SecureSource(6).stream("noise", 0), count)
    np.testing.assert_array_equal(found, expected)


def test_draws_that_64_bits_leave_open_are_decided_by_further_bits():
    deviation, piece, place, top = 1.3 * 2.0**36, 40, 1 << 62, (1 << 64) - 1
    law, pieces = secure.RoundedGaussian(deviation), _Pieces(deviation)
    level = int(pieces.chance(piece, place) * (1 << 64))
    pick = (pieces.words[piece - 1] >> 64) + 5

    def drawn(pick, level, extra):
        """The proposal if it is accepted, else 0, the next one."""
        words = _Words(pick, place, level, *extra, 0, 0, 0)
        return int(law.draw(words, 1)[0])

    own = pieces.rounded(piece, place)
    # One below the chance and one above it, which are the same number in float64.
    assert float(level - 1) == float(level + 1)
    assert drawn(pick, level - 1, (0, 0, 0)) == own
    assert drawn(pick, level + 1, (0, 0, 0)) == 0
    # The chance's own word is below it or above it by its second one.
    assert drawn(pick, level, (0, 0, 0)) == own
    assert drawn(pick, level, (0, 0, top)) == 0
    # A pick equal to the first word of an end is above or below it by the second one.
    first, second = divmod(pieces.words[piece], 1 << 64)
    assert second not in (0, top)
    assert drawn(first, 0, (0, 0, 0)) == own
    assert drawn(first, 0, (top, 0, 0)) == pieces.rounded(piece + 1, place)


# -- The grid -------------------------------------------------------------------------


def test_the_noised_sum_is_the_rounded_one_plus_the_noise_exactly():
    """Of float64, whose 53 bits hold all these sums; of float32, rounded to it."""
    plan, random = _plan(), np.random.default_rng(0)
    step = plan.grid_step
    assert math.frexp(step)[0] == 0.5  # a power of two
    sums = random.normal(size=500) * np.logspace(-12, 1, 500)
    noise = secure.drawn(SecureSource(1), plan.noise_stddev / step, 0, [[500]])[0]
    for dtype in (np.float64, np.float32):
        given = sums.astype(dtype)
        (found,) = secure.noised([tf.constant(given)], [tf.constant(noise)], step)
        found = found.numpy()
        assert found.dtype == dtype
        np.testing.assert_array_equal(np.rint(found / step), found / step)
        for value, integer, one in zip(given, noise, found):
            rounded = round(fractions.Fraction(float(value)) / fractions.Fraction(step))
            assert one == dtype((rounded + int(integer)) * step)
    # Something was rounded.
    assert (np.abs(sums / step - np.rint(sums / step)) > 0.1).any()


@pytest.mark.parametrize("jit", [False, True])
def test_what_training_adds_is_on_the_grid(jit):
    plan = _plan(batch_size=64, num_units=6400)  # by 64, a float is divided exactly
    key = RunKey(plan, 5)
    variables = [tf.Variable(tf.zeros([30, 20])), tf.Variable(tf.zeros([30, 20]))]
    random = np.random.default_rng(1)
    sums = [tf.constant(random.normal(size=[30, 20]), tf.float32) for _ in variables]
    noise = [tf.constant(one) for one in key.secure_noise(0, variables)]

    @tf.function(jit_compile=jit)
    def run(sums, noise):
        return privatized(plan, sums, noise, key.step_keys(0))

    found = [64.0 * np.float64(one) / plan.grid_step for one in run(sums, noise)]
    for one, value, integers in zip(found, sums, noise):
        np.testing.assert_array_equal(one, np.rint(one))
        exact = np.float64(value) + np.float64(integers) * plan.grid_step
        np.testing.assert_allclose(one * plan.grid_step, exact, rtol=1e-6)


def test_neighbours_on_the_grid_are_no_further_apart_than_stated():
    """Each of d coordinates can be rounded by half a step away from its neighbour."""
    for clip_norm, multiplier in ((0.5, 1.0), (0.3, 7.0), (1e-4, 1.0)):
        plan = _plan(clip_norm=clip_norm, sensitivity_multiplier=multiplier)
        moved, step = clip_norm * multiplier, plan.grid_step
        assert moved * 2.0**-37 < step <= moved * 2.0**-36
        # At the largest d allowed: Δ + γ·√d.
        assert moved + step * math.sqrt(secure.MOST_WEIGHTS) <= plan.sensitivity
        assert plan.sensitivity <= moved * (1 + 2.0**-15)
        assert plan.noise_stddev == plan.noise_multiplier * plan.sensitivity
    # The bound is met where all coordinates lie at the middle between two points.
    one = np.full([10_000], 0.5 - 1e-9)
    both = [
        secure.noised([tf.constant(x)], [tf.zeros([10_000], tf.int64)], 1.0)[0].numpy()
        for x in (one, one + 2e-9)
    ]
    assert np.linalg.norm(both[1] - both[0]) == math.sqrt(10_000)
    # Beyond what integers hold, sums are cut and noise is still added.
    far = secure.noised([tf.constant([1e30])], [tf.constant([7], tf.int64)], 1.0)[0]
    assert float(far[0]) == 2.0**61


def test_step_without_noise_is_refused():
    plan = _plan()
    with pytest.raises(InputError, match="from RunKey.secure_noise"):
        privatized(plan, [tf.zeros([3])], [], RunKey(plan).step_keys(0))
    for other in (_plan(secure=False), _plan(epsilon=math.inf)):
        assert RunKey(other).secure_noise(0, [tf.zeros(1)]) == []


def test_a_missing_library_is_named_before_anything_is_spent(monkeypatch):
    plan = _plan()
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    for begin in (lambda: RunKey(plan), plan.sampler):
        with pytest.raises(InputError, match=r"pip install 'tfdpsq\[secure\]'"):
            begin()
