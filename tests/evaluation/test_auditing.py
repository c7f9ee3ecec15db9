"""The one-run audit: its p-value by exact oracles, its bound on known mechanisms."""

import fractions
import math

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
from dp_accounting.pld import privacy_loss_distribution

from tfdpsq.evaluation.auditing import audit_one_run, one_run_p_value
from tfdpsq.validation import InputError


def _bound(canaries, guesses, correct, delta, confidence=0.95):
    """The audit's bound of a run that has these numbers.

    All guesses are "in", the first `correct` of them right; what is left open is
    included or not as fair coins are, alternately.
    """
    included = np.arange(canaries) % 2 == 0
    included[:guesses] = np.arange(guesses) < correct
    # The rest evens out what the guesses are not.
    extra = int(included[:guesses].sum()) - guesses // 2
    rest = guesses + np.flatnonzero(included[guesses:])
    included[rest[: max(extra, 0)]] = False
    scores = -np.arange(canaries, dtype=float)
    got = audit_one_run(scores, included, delta, [(guesses, 0)], confidence)
    assert got.correct == correct
    return got.epsilon


def _worst_mechanism(guesses, correct, epsilon, delta):
    """The largest P[V ≥ v] that any (ε, δ)-DP mechanism reaches when m = r.

    V's law does not change when canaries are permuted or when a canary's coin and
    guess are both flipped, and (ε, δ)-DP survives averaging over these symmetries:
    the worst mechanism is among those whose P[T = t | S = s] depends on the number
    k of right guesses alone, x(k). Two neighbours s, s' with k' of the other guesses
    right have x(k' + 1) and x(k') where guess i is right under s, and the reverse
    where it is wrong, so (ε, δ)-DP reads

        Σ_k' C(r-1, k') ([x(k'+1) - e^ε x(k')]₊ + [x(k') - e^ε x(k'+1)]₊) ≤ δ:

    both sums belong to one pair of neighbours. With w(k) = C(r, k)·x(k), V's law, all
    of this is linear. Maximise Σ_{k ≥ v} w(k).
    """
    r = guesses
    k = np.arange(r)
    up, down = np.zeros((r, r + 1)), np.zeros((r, r + 1))
    up[k, k + 1] = (k + 1) / r  # C(r-1, k')·x(k'+1) in terms of w(k'+1)
    down[k, k] = (r - k) / r
    excess = np.eye(r)
    none = np.zeros((r, r))
    rows = np.block(
        [
            [up - math.exp(epsilon) * down, -excess, none],
            [down - math.exp(epsilon) * up, none, -excess],
            [np.zeros((1, r + 1)), np.ones((1, 2 * r))],
        ]
    )
    solved = scipy.optimize.linprog(
        -(np.arange(3 * r + 1) >= correct).astype(float) * (np.arange(3 * r + 1) <= r),
        A_ub=rows,
        b_ub=[0.0] * (2 * r) + [delta],
        A_eq=[[1.0] * (r + 1) + [0.0] * (2 * r)],
        b_eq=[1.0],
        method="highs",
    )
    assert solved.success
    return -solved.fun


def _proved_term(canaries, guesses, correct, epsilon, delta):
    """What δ > 0 adds to P[W ≥ v] at most, by a proof of its own.

    Take the canaries in some order, let V_i be the right guesses among the first i,
    d those still to come, and φ(d, x) = P[Bin(d, p) + x ≥ v]. Then φ is P[W ≥ v] at
    the start and 1{V ≥ v} at the end. A guess moves its mean by E[(R - p)·g], R = 1
    if it is right and g = P[Bin(d, p) = v - 1 - V_{i-1}], a function of the output
    and of earlier coins. (ε, δ)-DP gives E[R·g] ≤ e^ε·E[(1 - R)·g] + δ·max g, that is
    E[(R - p)·g] ≤ (1 - p)·δ·max g, the maximum being over what the excess sits on.
    In a random order d is uniform on 0 … r - 1 for every output and guess, and the
    excess given earlier coins is, averaged over them, at most that given all the
    others, which knows no order. Sum over the m canaries:

        (1 - p)·(mδ/r)·Σ_{d<r} max_x P[Bin(d, p) = x].
    """
    wrong = scipy.stats.binom(
        np.arange(guesses), scipy.stats.logistic.cdf(-epsilon)
    )  # d still to come, by wrong guesses: at most r - v may be
    mode = np.floor((np.arange(guesses) + 1) * scipy.stats.logistic.cdf(-epsilon))
    most = np.minimum(np.minimum(mode, np.arange(guesses)), guesses - correct)
    share = scipy.stats.logistic.cdf(-epsilon) * canaries * delta / guesses
    return share * wrong.pmf(most).sum()


# -- The p-value -----------------------------------------------------------------


@pytest.mark.parametrize("delta", ["0", "1/1000", "1/150"])
def test_p_value_equals_the_theorems_sum(delta):
    # e^ε = 3, so p = 3/4, and every term is a rational number.
    p, delta, canaries, guesses = (
        fractions.Fraction(3, 4),
        fractions.Fraction(delta),
        9,
        7,
    )

    def between(low, high):  # P[high > W ≥ low]
        return sum(
            math.comb(guesses, k) * p**k * (1 - p) ** (guesses - k)
            for k in range(max(low, 0), min(high, guesses + 1))
        )

    seen = 0
    for correct in range(guesses + 1):
        alpha = max([between(correct - i, correct) / i for i in range(1, canaries + 1)])
        expected = between(correct, guesses + 1) + 2 * canaries * delta * alpha
        got = one_run_p_value(canaries, guesses, correct, math.log(3), float(delta))
        if expected > fractions.Fraction(1, 2):
            assert got == 1
        else:
            assert got == pytest.approx(float(expected), rel=1e-12)
            seen += 1
    assert seen >= 2


@pytest.mark.parametrize(
    ("numbers", "printed"),
    [
        # Steinke et al. 2023: Appendix D, rounded; section 7, cut after three digits.
        ((1000, 100, 75, 1e-4), 0.673),
        ((100_000, 1510, 1439, 1e-5), 2.675),
    ],
)
def test_bounds_equal_the_papers(numbers, printed):
    assert 0 <= _bound(*numbers) - printed + 5e-5 < 1e-3


@pytest.mark.parametrize("epsilon", [0.5, 3.0])
@pytest.mark.parametrize(("canaries", "guesses"), [(2, 2), (25, 25), (90, 30)])
def test_no_private_mechanism_beats_the_p_value(canaries, guesses, epsilon):
    for delta in (1e-3, 1e-2):
        for correct in range(1, guesses + 1):
            _check_worst(canaries, guesses, correct, epsilon, delta)


@pytest.mark.parametrize("epsilon", [0.5, 3.0])
def test_no_private_mechanism_beats_the_p_value_far_out(epsilon):
    law = scipy.stats.binom(400, scipy.stats.logistic.cdf(epsilon))
    needed = 0
    for tail in (0.3, 0.05, 1e-3, 1e-6, 1e-12):
        correct = min(int(law.isf(tail)) + 1, 400)
        needed += _check_worst(400, 400, correct, epsilon, 1e-3)
    assert needed >= 3  # the p-value at δ = 0 would not do


def _check_worst(canaries, guesses, correct, epsilon, delta):
    """Whether the p-value, which must suffice, would without δ's term not do."""
    p_value = one_run_p_value(canaries, guesses, correct, epsilon, delta)
    if p_value == 1:
        return False
    # Only the share r/m of all outputs guesses about a given canary.
    worst = _worst_mechanism(guesses, correct, epsilon, delta * canaries / guesses)
    tolerance = 1e-6  # the solver's
    assert worst <= p_value + tolerance
    plain = one_run_p_value(canaries, guesses, correct, epsilon, 0.0)
    return worst > plain + tolerance


@pytest.mark.parametrize("epsilon", [0.0, 1.0, 3.0])
def test_without_delta_randomized_response_attains_the_p_value(epsilon):
    for correct in range(18, 25):
        p_value = one_run_p_value(24, 24, correct, epsilon, 0.0)
        if p_value < 1:
            assert _worst_mechanism(24, correct, epsilon, 0.0) == pytest.approx(
                p_value, abs=1e-6
            )


@pytest.mark.parametrize("guesses", [100, 40_000])
@pytest.mark.parametrize("epsilon", [0.0, 1.0, 8.0])
def test_p_value_is_above_a_bound_proved_for_any_size(guesses, epsilon):
    canaries, delta = 2 * guesses, 1e-3 / guesses
    law = scipy.stats.binom(guesses, scipy.stats.logistic.cdf(epsilon))
    compared = 0
    for tail in (0.3, 0.05, 1e-2):  # those that decide at 95 % and 99 %
        correct = min(int(law.isf(tail)) + 1, guesses)
        plain = one_run_p_value(canaries, guesses, correct, epsilon, 0.0)
        p_value = one_run_p_value(canaries, guesses, correct, epsilon, delta)
        if p_value == 1:
            continue
        proved = _proved_term(canaries, guesses, correct, epsilon, delta)
        assert 0 < proved <= p_value - plain
        compared += 1
    assert compared >= 2 or guesses * math.exp(-epsilon) < 5


def test_theorem_fails_only_where_it_is_not_used():
    """Two canaries at (3, δ): a mechanism that beats the printed right-hand side.

    With x0, x1, x2 the chances of an output with 0, 1, 2 right guesses under
    randomized response, move η from the first to the two middle ones. Neighbours
    then differ beyond e^ε by (x1 + η/2) - e^ε·(x0 - η) = η/2 + e^ε·η alone.
    """
    epsilon, delta = 3.0, 1e-3
    odds = math.exp(epsilon)
    x0, x1, x2 = (odds**k / (1 + odds) ** 2 for k in range(3))
    eta = delta / (odds + 0.5)
    x0, x1 = x0 - eta, x1 + eta / 2

    def output(s, t):
        return (x0, x1, x2)[(s[0] == t[0]) + (s[1] == t[1])]

    signs = [(a, b) for a in (0, 1) for b in (0, 1)]
    for s, other in ((s, o) for s in signs for o in signs if (s != o)):
        if (s[0] != other[0]) + (s[1] != other[1]) == 1:
            excess = sum(max(output(s, t) - odds * output(other, t), 0) for t in signs)
            assert excess <= delta * (1 + 1e-12)  # it is (3, δ)-DP
    printed = 1 - 1 / (1 + odds) ** 2 + 2 * 2 * delta / (1 + odds) ** 2
    assert 1 - x0 > printed
    assert one_run_p_value(2, 2, 1, epsilon, delta) == 1


@pytest.mark.parametrize("delta", [0.0, 5e-3])
def test_p_value_grows_with_epsilon(delta):
    # 2mδ is 10 at the largest δ: there the terms below i = 10 are the delicate ones.
    for guesses, correct in ((1000, 620), (1000, 1000), (200, 197), (1000, 500)):
        values = [
            one_run_p_value(1000, guesses, correct, epsilon, delta)
            for epsilon in np.linspace(0, 12, 400)
        ]
        assert (np.diff(values) >= 0).all()
        assert values[-1] == 1


# -- The bound -------------------------------------------------------------------


@pytest.mark.parametrize(("correct", "delta"), [(75, 1e-4), (100, 1e-6), (96, 0.0)])
def test_bound_is_where_the_p_value_crosses(correct, delta):
    bound = _bound(1000, 100, correct, delta, confidence=0.9)
    assert one_run_p_value(1000, 100, correct, bound, delta) <= 0.1
    assert one_run_p_value(1000, 100, correct, bound + 1e-9, delta) > 0.1


def test_all_right_guesses_give_the_closed_form():
    # p^r = 0.05 at δ = 0, so ε = ln(p/(1 - p)).
    p = 0.05 ** (1 / 300)
    assert _bound(600, 300, 300, 0.0) == pytest.approx(math.log(p / (1 - p)), rel=1e-9)
    assert _bound(600, 300, 150, 0.0) == 0


def _randomized_response(random, canaries, epsilon):
    included = random.random(canaries) < 0.5
    kept = random.random(canaries) < 1 / (1 + math.exp(-epsilon))
    return np.where(included == kept, 1.0, -1.0), included


def test_coverage_is_what_the_confidence_says():
    """Randomized response attains the p-value, so the share of failures is known."""
    epsilon, half, repeats = 1.0, 150, 1000
    law = scipy.stats.binom(2 * half, 1 / (1 + math.exp(-epsilon)))
    # The bound exceeds ε where P[W ≥ v] ≤ 0.05: from this v on.
    expected = law.sf(law.isf(0.05))
    random = np.random.default_rng(1)
    bounds = []
    for trial in range(repeats):
        scores, included = _randomized_response(random, 400, epsilon)
        found = audit_one_run(scores, included, 0.0, [(half, half)], seed=trial)
        bounds.append(found.epsilon)
    failed = np.mean(np.array(bounds) > epsilon)
    assert 0.04 < expected <= 0.05
    assert abs(failed - expected) < 4 * math.sqrt(0.05 * 0.95 / repeats)
    # W is 300p ± 7.7; v - 1.64·7.7 of 300 guesses is p = 0.689 on average: ε = 0.80.
    assert np.mean(bounds) == pytest.approx(0.80, abs=0.03)


def test_choosing_guesses_afterwards_needs_a_correction():
    """The best of five bounds fails too often, unless the five were declared."""
    epsilon, repeats = 1.0, 300
    pairs = [(k, k) for k in (5, 12, 28, 65, 150)]
    random = np.random.default_rng(2)
    best, declared = [], []
    for trial in range(repeats):
        scores, included = _randomized_response(random, 400, epsilon)
        each = [
            audit_one_run(scores, included, 0.0, [pair], seed=trial).epsilon
            for pair in pairs
        ]
        best.append(max(each))
        found = audit_one_run(scores, included, 0.0, pairs, seed=trial)
        assert found.declared == 5 and found.guesses in pairs
        declared.append(found.epsilon)
    spread = math.sqrt(0.05 * 0.95 / repeats)
    assert np.mean(np.array(best) > epsilon) > 0.05 + 4 * spread
    assert np.mean(np.array(declared) > epsilon) < 0.05 + 2 * spread


def _gaussian(random, canaries, mu):
    included = random.random(canaries) < 0.5
    return included + random.normal(0, 1 / mu, canaries), included


def test_gaussian_bound_is_below_epsilon_and_above_it_at_half_the_noise():
    mu, delta, canaries = 0.5, 1e-6, 50_000
    epsilon, doubled = (
        privacy_loss_distribution.from_gaussian_mechanism(
            1 / each
        ).get_epsilon_for_delta(delta)
        for each in (mu, 2 * mu)
    )
    random = np.random.default_rng(3)
    pairs = [(100, 100), (400, 400), (1600, 1600)]

    def bounds(mu):
        return np.array(
            [
                audit_one_run(*_gaussian(random, canaries, mu), delta, pairs).epsilon
                for _ in range(40)
            ]
        )

    as_claimed, halved = bounds(mu), bounds(2 * mu)
    assert (as_claimed <= epsilon).all()
    # The 400 highest of 50,000 scores begin 2.4 deviations of 2 above 1/2, where the
    # log odds μ²·(x - 1/2) are 1.2: a bound of about that, ε being 2.25.
    assert as_claimed.mean() > 0.5 * epsilon
    assert (halved > epsilon).all()
    assert (halved <= doubled).all()


def test_ties_give_no_bound():
    included = np.arange(1000) >= 500
    for order in (included, ~included):
        assert audit_one_run(np.zeros(1000), order, 0.0, [(300, 300)]).epsilon < 0.3
        alternating = np.arange(1000) % 2 == 0
        assert audit_one_run(alternating * 1.0, order, 0.0, [(300, 300)]).epsilon == 0


def test_guesses_are_the_extreme_scores():
    scores = np.array([5.0, -1.0, 3.0, -7.0, 0.0, 2.0])
    included = np.array([True, True, False, False, False, True])
    # In for 5, 3, 2 (right, wrong, right), out for -7, -1 (right, wrong).
    assert audit_one_run(scores, included, 0.0, [(3, 2)]).correct == 3
    assert audit_one_run(scores, included, 0.0, [(0, 1)]).correct == 1


def test_bad_audits_are_refused():
    scores, included = np.arange(100.0), np.arange(100) % 2 == 0
    with pytest.raises(InputError, match=r"scores\[99\] is nan"):
        audit_one_run(np.append(scores[1:], math.nan), included, 1e-3, [(10, 10)])
    with pytest.raises(InputError, match="100 of 100 canaries are included"):
        audit_one_run(scores, np.ones(100, bool), 1e-3, [(10, 10)])
    with pytest.raises(InputError, match=r"guesses are \[\(60, 41\)\]"):
        audit_one_run(scores, included, 1e-3, [(60, 41)])
