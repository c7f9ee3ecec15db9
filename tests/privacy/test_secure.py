"""Secure mode: its keystream, its exact draws, its grid, and what is said of it.

The laws of whole samplers and of training's noise are tested where the default's are:
test_statistics.py and test_statistics_sampling.py.
"""

import decimal
import fractions
import functools
import hashlib
import hmac
import itertools
import json
import math
import pathlib
import sys

import numpy as np
import pytest
import scipy.special
import scipy.stats
import tensorflow as tf
from helpers import plans

from tfdpsq.privacy import (
    checkpoint,
    make_optimizer,
    train,
    verify_certificate,
)
from tfdpsq.privacy.proof import certificate as certificates
from tfdpsq.privacy.proof import certificate_randomness
from tfdpsq.privacy.randomness import grid
from tfdpsq.privacy.randomness.sampling import PoissonSampler, fresh_seed
from tfdpsq.privacy.randomness.secure import PURPOSES, SecureSource, SecureStream
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
        assert len(taken) == count
        return np.array(taken, np.uint64)


# -- Keystream ------------------------------------------------------------------------


def test_the_keystream_is_rfc_8439s():
    """Section 2.3.2: key 00 … 1f, nonce 000000090000004a00000000, block 1."""
    stream = SecureStream(bytes(range(32)), bytes.fromhex("000000090000004a00000000"))
    block = stream.words(16).tobytes()[64:]
    assert block.hex() == (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )


def test_keys_of_purposes_are_derived_by_hkdf():
    """RFC 5869 by Python's hmac: extract with 32 zero bytes, expand one block."""
    seed = (7 << 200) + 5
    for purpose in PURPOSES:
        extracted = hmac.digest(bytes(32), seed.to_bytes(32, "big"), hashlib.sha256)
        info = b"tfdpsq secure/1 " + purpose.encode() + b"\x01"
        key = hmac.digest(extracted, info, hashlib.sha256)
        nonce = (3).to_bytes(8, "little") + (2).to_bytes(4, "little")
        np.testing.assert_array_equal(
            SecureSource(seed).stream(purpose, 3, 2).words(9),
            SecureStream(key, nonce).words(9),
        )


def test_seeds_for_other_generators_are_of_subkeys_and_tell_no_key():
    """Dropout and TensorFlow's own state: what a graph or a profile may show."""
    number = int.from_bytes(bytes(range(32)), "big")
    source = SecureSource(number)
    seeds = {purpose: source.seed(purpose) for purpose in PURPOSES}
    assert len(set(seeds.values())) == len(PURPOSES)
    halves = {int.from_bytes(h, "big") for h in (source.key[:16], source.key[16:])}
    assert not halves & set(seeds.values())
    for purpose, seed in seeds.items():
        extracted = hmac.digest(bytes(32), source.key, hashlib.sha256)
        info = b"tfdpsq secure/1 " + purpose.encode() + b"\x01"
        key = hmac.digest(extracted, info, hashlib.sha256)
        assert seed.to_bytes(16, "big") == key[:16]


def _key_by_hand(seed, purpose):
    """The subkey of a purpose by RFC 5869, as an integer of 256 bits."""
    extracted = hmac.digest(bytes(32), seed.to_bytes(32, "big"), hashlib.sha256)
    info = b"tfdpsq secure/1 " + purpose.encode() + b"\x01"
    return int.from_bytes(hmac.digest(extracted, info, hashlib.sha256), "big")


def _shared_runs(words, key):
    """The runs of 32 bits that words of 63 bits have in common with a key."""
    bits = f"{key:0256b}"
    runs = {f"{word:063b}"[at : at + 32] for word in words for at in range(32)}
    return {run for run in runs if run in bits}


def test_what_tensorflow_is_given_is_of_no_key_that_noise_or_samples_have(monkeypatch):
    """Words of dropout are in graphs and profiles, and the global seed in state."""
    noise_seed, sampler_seed, given = (3 << 250) + 11, (5 << 249) + 7, []
    plan = _plan(num_units=20, batch_size=10, steps=1)
    optimizer = make_optimizer(plan, 0.1, "sgd", noise_seed=noise_seed)
    layer = tf.keras.layers.Dense(1, use_bias=False)
    layer.build([None, 3])
    monkeypatch.setattr(tf.random, "set_seed", given.append)
    train(
        plan,
        lambda batch: layer(batch["x"])[:, 0],
        [layer.kernel],
        optimizer,
        lambda at: {"x": np.ones([len(at), 3], np.float32)},
        10,
        layers=[layer],
        sampler_seed=sampler_seed,
    )
    dropout = [int(word) for word in optimizer.step_keys(0).dropout]
    assert dropout == [int(word) for word in optimizer.dropout_seed]
    low = (1 << 63) - 1
    half = _key_by_hand(noise_seed, "dropout") >> 128
    assert dropout == [half & low, half >> 63 & low]
    assert given == [(_key_by_hand(sampler_seed, "global") >> 128) & low]
    # Keys of either seed, lest they be mistaken for each other.
    for seed, purpose in itertools.product((noise_seed, sampler_seed), PURPOSES):
        key, own = _key_by_hand(seed, purpose), (seed, purpose)
        assert bool(_shared_runs(dropout, key)) == (own == (noise_seed, "dropout"))
        assert bool(_shared_runs(given, key)) == (own == (sampler_seed, "global"))


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


def test_a_stream_ends_before_its_counter_begins_again():
    stream = SecureSource(1).stream("noise", 0)
    stream._left = 10
    stream.words(8)
    with pytest.raises(InputError, match="more than 256 GiB of random bits"):
        stream.words(3)


def test_fresh_keys_have_256_bits_and_are_kept_like_other_seeds(tmp_path):
    seeds = [fresh_seed(secure=True) for _ in range(50)]
    assert len(set(seeds)) == 50 and max(seeds).bit_length() > 248
    (tmp_path / checkpoint.STATE).mkdir()
    made = checkpoint.open_secrets(tmp_path, 0, {}, secure=True)
    assert max(made.noise_seed, made.sampler_seed).bit_length() > 240
    path = tmp_path / checkpoint.STATE / checkpoint.SECRETS
    assert path.stat().st_mode & 0o777 == 0o600
    assert checkpoint.open_secrets(tmp_path, 3, {}, secure=True) == made


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
    # Always and never.
    assert len(SecureSource(1).stream("units", 0).poisson_subset(50, 1.0, 50)) == 50
    assert len(SecureSource(1).stream("units", 0).poisson_subset(50, 1e-30, 50)) == 0


def test_coins_are_the_same_whatever_is_held_at_a_time(monkeypatch):
    whole = PoissonSampler(1000, 0.3, 1000, SecureSource(3)).draw(5)
    monkeypatch.setattr("tfdpsq.privacy.randomness.secure._COINS", 64)
    parts = PoissonSampler(1000, 0.3, 1000, SecureSource(3)).draw(5)
    np.testing.assert_array_equal(whole.indices, parts.indices)


def test_equal_tags_are_drawn_again():
    stream = SecureSource(1).stream("units", 0)
    stream.words = _Words(5, 5, 1, 9, 2, 4).words
    assert stream.order(3).tolist() == [1, 2, 0]


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
    law = grid.RoundedGaussian(deviation)
    values = law.draw(SecureSource(2).stream("noise", 0), 300_000)
    assert _rounded_p(values, deviation) > _ACCEPTED
    for wrong in (2 / 3, 3 / 2, 0.97, 1.03):
        assert _rounded_p(values, wrong * deviation) < _REJECTED
    # Tails: 300,000 normal numbers go beyond 4 deviations 19 times.
    beyond = scipy.stats.binom(300_000, 2 * scipy.stats.norm.sf(4))
    assert beyond.ppf(1e-5) <= (np.abs(values) > 4 * deviation).sum()
    assert (np.abs(values) > 4 * deviation).sum() <= beyond.ppf(1 - 1e-5)


@pytest.mark.parametrize("deviation", [64.0, 100.3, 2.0**57])
def test_what_is_cut_off_is_what_the_docstring_says(deviation):
    """No sample shows a tail that is too short: 6 deviations cut off 2^-29."""
    law = grid.RoundedGaussian(deviation)
    pieces = len(law._ends) + 1
    beyond = math.ldexp(pieces, law._shift) / deviation  # in deviations
    assert scipy.special.erfc(beyond / math.sqrt(2)) < 2.0**-125
    # The largest number picks the last piece.
    top = (1 << 64) - 1
    assert law._decided(top, 0, 0, _Words(top, 0, 0)) == (pieces - 1, True)


@pytest.mark.parametrize("deviation", [64.0, 1000.7, 2.0**57])
def test_pieces_are_proposed_as_often_as_the_density_at_their_beginning(deviation):
    """Half a per cent less noise would pass a test by a million draws."""
    law = grid.RoundedGaussian(deviation)
    begins = math.ldexp(1.0, law._shift) * np.arange(len(law._ends) + 1) / deviation
    weights = np.exp(-(begins**2) / 2)
    expected = np.cumsum(weights)[:-1] / weights.sum()
    found = [end / 2.0**128 for end in law._ends]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert begins[-1] > 12.9


def test_every_integer_has_its_own_probability():
    """At s = 64 each one by itself, those in the middle of pieces and at their ends."""
    values = grid.RoundedGaussian(64.0).draw(SecureSource(8).stream("noise", 0), 10**6)
    k = np.arange(-200, 201)
    law = scipy.stats.norm.cdf((k + 0.5) / 64) - scipy.stats.norm.cdf((k - 0.5) / 64)
    counts = np.bincount(values[np.abs(values) <= 200] + 200, minlength=401)
    assert scipy.stats.chisquare(counts, law / law.sum() * counts.sum()).pvalue > (
        _ACCEPTED
    )


def test_low_bits_are_uniform_and_of_both_signs():
    values = grid.RoundedGaussian(1.7 * 2.0**36).draw(
        SecureSource(3).stream("noise", 0), 100_000
    )
    for shift in (0, 8, 16):
        low = (values >> shift) & 15
        assert scipy.stats.chisquare(np.bincount(low)).pvalue > _ACCEPTED


def test_floats_decide_as_exact_arithmetic_does():
    law = grid.RoundedGaussian(1.3 * 2.0**36)
    words = SecureSource(6).stream("noise", 0).words(3 * 2000).reshape(3, -1)
    values, accepted = law._from_words(words, None)
    more = SecureSource(6).stream("noise", 1)
    for at in range(2000):
        pick, place, level = (int(word) for word in words[:, at])
        place &= (1 << 63) - 1
        piece, accepts = law._decided(pick, place, level, more)
        assert accepts == accepted[at]
        position = fractions.Fraction(place, 1 << 63) + piece
        exact = math.floor(position * 2**law._shift + fractions.Fraction(1, 2))
        assert abs(int(values[at])) == exact
        assert (values[at] < 0) == (words[1, at] >> np.uint64(63))


def test_what_64_bits_leave_open_further_bits_decide():
    deviation = 1.3 * 2.0**36
    law = grid.RoundedGaussian(deviation)
    piece, place = 40, 1 << 62  # f = 1/2
    with decimal.localcontext() as context:
        context.prec = 60
        width = decimal.Decimal(2**law._shift) / decimal.Decimal(deviation)
        chance = (-width * width * (piece + decimal.Decimal("0.25")) / 2).exp()
        level = int(chance * 2**64)
    pick, top = int(law._first[piece - 1]) + 5, (1 << 64) - 1
    # One below the chance and one above it, which are the same number in float64.
    assert float(level - 1) == float(level + 1)
    for one, accepts in ((level - 1, True), (level + 1, False)):
        words = np.array([[pick], [place], [one]], np.uint64)
        values, accepted = law._from_words(words, _Words(0, 0, 0))
        assert accepted[0] == accepts
        assert values[0] == (2 * piece + 1) << (law._shift - 1)
    # The chance's own word is below it or above it by its second one.
    for extra, accepts in ((0, True), (top, False)):
        words = np.array([[pick], [place], [level]], np.uint64)
        _, accepted = law._from_words(words, _Words(0, 0, extra))
        assert accepted[0] == accepts
    # A pick equal to the first word of an end is above or below it by the second one.
    first, second = divmod(law._ends[piece], 1 << 64)
    for extra, expected in ((0, piece), (top, piece + 1)):
        assert second not in (0, top)
        words = np.array([[first], [place], [0]], np.uint64)
        values, _ = law._from_words(words, _Words(extra, 0, 0))
        assert values[0] == (2 * expected + 1) << (law._shift - 1)


# -- The grid -------------------------------------------------------------------------


def test_the_noised_sum_is_the_rounded_one_plus_the_noise_exactly():
    """Of float64, whose 53 bits hold all these sums; of float32, rounded to it."""
    plan, random = _plan(), np.random.default_rng(0)
    step = plan.grid_step
    assert math.frexp(step)[0] == 0.5  # a power of two
    sums = random.normal(size=500) * np.logspace(-12, 1, 500)
    noise = grid.drawn(SecureSource(1), plan.noise_stddev / step, 0, [[500]])[0]
    for dtype in (np.float64, np.float32):
        given = sums.astype(dtype)
        (found,) = grid.noised([tf.constant(given)], [tf.constant(noise)], step)
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
    optimizer = make_optimizer(plan, 0.1, "sgd", noise_seed=5)
    variables = [tf.Variable(tf.zeros([30, 20])), tf.Variable(tf.zeros([30, 20]))]
    random = np.random.default_rng(1)
    sums = [tf.constant(random.normal(size=[30, 20]), tf.float32) for _ in variables]
    noise = [tf.constant(one) for one in optimizer.secure_noise(0, variables)]
    run = tf.function(optimizer.privatize, jit_compile=jit)
    found = [64.0 * np.float64(one) / plan.grid_step for one in run(sums, noise)]
    for one, value, integers in zip(found, sums, noise):
        np.testing.assert_array_equal(one, np.rint(one))
        exact = np.float64(value) + np.float64(integers) * plan.grid_step
        np.testing.assert_allclose(one * plan.grid_step, exact, rtol=1e-6)
    # Variables of one shape, and steps, have noise of their own.
    again = optimizer.secure_noise(0, variables)
    other = optimizer.secure_noise(1, variables)
    np.testing.assert_array_equal(noise[0], again[0])
    vectors = [np.ravel(one).astype(float) for one in (*noise, *other)]
    for one, two in itertools.combinations(vectors, 2):
        assert abs(np.corrcoef(one, two)[0, 1]) < 4.5 / math.sqrt(600)


def test_each_step_of_a_run_has_secure_noise_of_its_own():
    """Noise that were the same in two steps would go out of their difference."""
    plan = _plan(num_units=20, batch_size=10, steps=4)

    def weights(steps_per_loop):
        layer = tf.keras.layers.Dense(1, use_bias=False)
        layer.build([None, 3])
        layer.kernel.assign(tf.zeros([3, 1]))
        seen = [layer.kernel.numpy()]
        train(
            plan,
            lambda batch: 0.0 * layer(batch["x"])[:, 0],
            [layer.kernel],
            make_optimizer(plan, 1.0, "sgd", noise_seed=11),
            lambda at: {"x": np.ones([len(at), 3], np.float32)},
            10,
            layers=[layer],
            on_step=lambda *_: seen.append(layer.kernel.numpy()),
            sampler_seed=5,
            steps_per_loop=steps_per_loop,
        )
        return seen

    seen = weights(1)
    moves = {one.tobytes() for one in np.diff(seen, axis=0).round(6)}
    assert len(moves) == 4
    np.testing.assert_allclose(weights(4)[-1], seen[-1], rtol=1e-5)


def test_neighbours_on_the_grid_are_no_further_apart_than_stated():
    """Each of d coordinates can be rounded by half a step away from its neighbour."""
    for clip_norm, multiplier in ((0.5, 1.0), (0.3, 7.0), (1e-4, 1.0)):
        plan = _plan(clip_norm=clip_norm, sensitivity_multiplier=multiplier)
        moved, step = clip_norm * multiplier, plan.grid_step
        assert moved * 2.0**-37 < step <= moved * 2.0**-36
        # At the largest d allowed: Δ + γ·√d.
        assert moved + step * math.sqrt(grid.MOST_WEIGHTS) <= plan.sensitivity
        assert plan.sensitivity <= moved * (1 + 2.0**-15)
        assert plan.noise_stddev == plan.noise_multiplier * plan.sensitivity
    # The bound is met where all coordinates lie at the middle between two points.
    one = np.full([10_000], 0.5 - 1e-9)
    both = [
        grid.noised([tf.constant(x)], [tf.zeros([10_000], tf.int64)], 1.0)[0].numpy()
        for x in (one, one + 2e-9)
    ]
    assert np.linalg.norm(both[1] - both[0]) == math.sqrt(10_000)
    # Beyond what integers hold, sums are cut and noise is still added.
    far = grid.noised([tf.constant([1e30])], [tf.constant([7], tf.int64)], 1.0)[0]
    assert float(far[0]) == 2.0**61


def test_a_step_without_noise_is_refused():
    plan = _plan()
    optimizer = make_optimizer(plan, 0.1, "sgd")
    with pytest.raises(InputError, match="noise for 0 of 1 variables.*secure_noise"):
        optimizer.privatize([tf.zeros([3])])
    default = make_optimizer(_plan(secure=False), 0.1, "sgd")
    assert default.secure_noise(0, [tf.Variable([1.0])]) == []
    without = make_optimizer(_plan(epsilon=math.inf), 0.1, "sgd")
    assert without.secure_noise(0, [tf.Variable([1.0])]) == []
    np.testing.assert_array_equal(without.privatize([tf.fill([2], 50.0)])[0], 0.5)


def test_more_weights_than_the_rounding_is_derived_for_are_refused():
    shapes = [[1 << 20, 1 << 20], [1]]
    with pytest.raises(InputError, match="weights are trained, but secure noise is"):
        grid.drawn(SecureSource(1), 2.0**36, 0, shapes)


def test_fresh_optimizers_and_samplers_share_nothing():
    plan, variables = _plan(), [tf.Variable(tf.zeros([400]))]
    draws = [
        make_optimizer(plan, 0.1).secure_noise(0, variables)[0].astype(float)
        for _ in range(3)
    ]
    for one, other in itertools.combinations(draws, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 4.5 / 20
    samples = [set(plan.sampler().draw(0).indices.tolist()) for _ in range(3)]
    for one, other in itertools.combinations(samples, 2):
        assert len(one & other) < 30  # of about 100 of 2,000


# -- Settings and words ---------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"secure": 1}, "secure is 1; say True or False"),
        ({"clip_norm": 1e-30}, "secure is True and clip_norm 1e-30"),
        ({"clip_norm": 1e30}, "secure is True and clip_norm 1e.30"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        _plan(**changes)


def test_a_missing_library_is_named_before_anything_is_spent(monkeypatch):
    plan = _plan()
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives", None)
    for begin in (lambda: make_optimizer(plan, 0.1), plan.sampler):
        with pytest.raises(InputError, match=r"pip install 'tfdpsq\[secure\]'"):
            begin()


def _certificate(**changes):
    return plans.certificate(_plan(**changes))


def test_the_certificate_says_what_is_secure_and_what_is_not():
    certificate = _certificate()
    entry = certificate["randomness"]
    assert entry["secure"] is True and entry["grid_step"] == _plan().grid_step
    assert "ChaCha20" in entry["generator"]
    assert entry["key_bits"] == {"samples": 256, "noise": 256}
    assert certificate["spec"]["secure"] is True
    assert certificate["mechanism"]["sensitivity"] == 0.5 * (1 + 2.0**-16)
    assert any("Rounding errors" in line for line in certificate["not_covered"])
    assert verify_certificate(certificate).problems == ()
    # The same ε: rounding is paid for in noise.
    default = _certificate(secure=False)
    assert certificate["guarantee"] == default["guarantee"]
    assert verify_certificate(default).problems == ()
    assert default["randomness"]["secure"] is False
    assert default["randomness"]["key_bits"] == {"samples": 128, "noise": 128}
    (line,) = (line for line in default["not_covered"] if "Philox" in line)
    assert "compiled by XLA or not" in line and "neither is a cryptographic" in line
    without = _certificate(epsilon=math.inf)
    assert without["randomness"]["grid_step"] is None
    assert verify_certificate(without).problems == ()


def test_certificates_of_shortened_seeds_still_verify():
    """Of the version whose noise was one draw, from 64 bits where XLA compiled."""
    today = _certificate(secure=False)
    before = json.loads(json.dumps(today))
    before["randomness"]["generator"] = certificate_randomness._SHORTENED_ENTRIES[
        "randomness.generator"
    ]
    bits = {"samples": 128, "noise": 126, "noise_compiled_by_xla": 64}
    before["randomness"]["key_bits"] = bits
    (place,) = (i for i, line in enumerate(today["not_covered"]) if "Philox" in line)
    before["not_covered"][place] = certificate_randomness._SHORTENED
    before["digest"] = certificates.digest_of(before)
    assert verify_certificate(before).problems == ()
    # Neither its bits with today's words, nor today's bits with its words.
    for key in ("randomness", "not_covered"):
        mixed = {**before, key: today[key]}
        mixed["digest"] = certificates.digest_of(mixed)
        assert verify_certificate(mixed).problems


def test_certificates_made_before_still_verify():
    """Written by the version that did not speak of random numbers."""
    path = pathlib.Path(__file__).with_name("certificate_before_randomness.json")
    before = certificates.load_certificate(path)
    assert "randomness" not in before
    assert verify_certificate(before).problems == ()
    # Its words are not today's, and today's entry without today's words is refused.
    for key in ("randomness", "not_covered"):
        mixed = json.loads(json.dumps(before))
        mixed[key] = _certificate(secure=False)[key]
        mixed["digest"] = certificates.digest_of(mixed)
        assert verify_certificate(mixed).problems
