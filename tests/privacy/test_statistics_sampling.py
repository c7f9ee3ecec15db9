"""The law of each sampler, by tests that accept it and reject samplers that are off.

A statistic maps the draws of many steps, a 0/1 matrix [steps, units], to a p-value:
the probability of a matrix at least as strange under truncated-nowhere Poisson
sampling. Seeds are fixed, so a sampler that passes once passes always.
"""

import collections
import itertools

import numpy as np
import pytest
import scipy.stats

from tfdpsq.privacy.randomness.sampling import (
    DealtSampler,
    Groups,
    PoissonSampler,
    ShuffledSampler,
    UserSampler,
)
from tfdpsq.privacy.randomness.secure import SecureSource

_STEPS, _UNITS, _Q = 4000, 40, 0.2
_ACCEPTED, _REJECTED = 1e-3, 1e-6


# -- Statistics -------------------------------------------------------------------


def _two_sided(law, value):
    return min(1.0, 2 * min(law.cdf(value), law.sf(value)))


def _inclusion(draws):
    """How often each unit was drawn: as spread as binomials are, no more, no less."""
    steps, units = draws.shape
    z = (draws.sum(axis=0) - steps * _Q) / np.sqrt(steps * _Q * (1 - _Q))
    return _two_sided(scipy.stats.chi2(units), (z**2).sum())


def _co_occurrence(draws):
    """Pairs of units: each correlation alone, and their mean.

    z of a pair has mean 0, variance 1 and no correlation with other pairs' under
    independence; its sum over all pairs is what a fixed batch size pulls down.
    """
    steps, units = draws.shape
    centred = (draws - _Q) / np.sqrt(_Q * (1 - _Q))
    z = (centred.T @ centred / np.sqrt(steps))[np.triu_indices(units, 1)]
    spread = _two_sided(scipy.stats.chi2(len(z)), (z**2).sum())
    mean = _two_sided(scipy.stats.norm, z.sum() / np.sqrt(len(z)))
    return min(1.0, 2 * min(spread, mean))


def _batch_size(draws):
    """Sizes against Bin(n, q), outcomes of less than 10 expected steps put together."""
    steps, units = draws.shape
    law = scipy.stats.binom(units, _Q).pmf(np.arange(units + 1)) * steps
    kept = np.flatnonzero(law >= 10)
    low, high = kept[0], kept[-1]
    sizes = np.clip(draws.sum(axis=1).astype(int), low, high)
    observed = np.bincount(sizes, minlength=units + 1)[low : high + 1]
    expected = law[low : high + 1].copy()
    expected[0] += law[:low].sum()
    expected[-1] += law[high + 1 :].sum()
    return scipy.stats.chisquare(observed, expected).pvalue


def _steps_apart(draws):
    """Whether a unit's being drawn says anything of the four steps that follow."""
    centred = (draws - _Q) / np.sqrt(_Q * (1 - _Q))
    z = np.array(
        [
            (centred[lag:] * centred[:-lag]).sum() / np.sqrt(centred[lag:].size)
            for lag in range(1, 5)
        ]
    )
    return _two_sided(scipy.stats.chi2(4), (z**2).sum())


_STATISTICS = {
    "inclusion": _inclusion,
    "co-occurrence": _co_occurrence,
    "batch size": _batch_size,
    "steps apart": _steps_apart,
}

# -- Samplers that are off ----------------------------------------------------------


def _wrong(choose):
    """Draws whatever `choose(random, step)` says."""
    random = np.random.default_rng(0)
    draws = np.zeros((_STEPS, _UNITS))
    for step in range(_STEPS):
        draws[step, choose(random, step)] = 1
    return draws


def _fixed_size(random, step):
    return random.choice(_UNITS, round(_Q * _UNITS), replace=False)


def _with_probability(q):
    return lambda random, step: np.flatnonzero(random.random(_UNITS) < q)


def _neighbours_together(random, step):
    """Right in each unit's frequency and in the batch size, wrong in the pairs."""
    start, size = random.integers(_UNITS), random.binomial(_UNITS, _Q)
    return (start + np.arange(size)) % _UNITS


def _every_draw_twice(random, step):
    again = np.random.default_rng([7, step // 2])
    return np.flatnonzero(again.random(_UNITS) < _Q)


def _one_unit_favoured(random, step):
    q = np.full(_UNITS, _Q)
    q[3] *= 1.3
    return np.flatnonzero(random.random(_UNITS) < q)


def _shuffled(random, step):
    # Five batches of eight make an epoch.
    order = np.random.default_rng([7, step // 5]).permutation(_UNITS)
    return order[8 * (step % 5) :][:8]


@pytest.mark.parametrize(
    "choose, rejecting",
    [
        (_fixed_size, {"co-occurrence", "batch size"}),
        (
            _with_probability(1.2 * _Q),
            {"inclusion", "co-occurrence", "batch size", "steps apart"},
        ),
        (_with_probability(0.8 * _Q), {"inclusion", "co-occurrence", "batch size"}),
        # Each unit once in five steps: its frequency hardly varies.
        (_shuffled, {"inclusion", "co-occurrence", "batch size", "steps apart"}),
        (_neighbours_together, {"co-occurrence"}),
        (_every_draw_twice, {"steps apart"}),
        (_one_unit_favoured, {"inclusion"}),
    ],
)
def test_broken_samplers_are_rejected(choose, rejecting):
    draws = _wrong(choose)
    rejected = {name for name, test in _STATISTICS.items() if test(draws) < _REJECTED}
    assert rejected >= rejecting


# -- The samplers of the package ------------------------------------------------------


def _matrix(sampler, steps=_STEPS, units=_UNITS):
    draws = np.zeros((steps, units))
    for step in range(steps):
        draw = sampler.draw(step)
        draws[step, draw.indices[draw.weights > 0]] = 1
    return draws


@pytest.fixture(scope="module", params=["default", "secure", "users"])
def draws(request):
    if request.param == "users":
        return request.getfixturevalue("users")[0]
    seed = SecureSource(7) if request.param == "secure" else 7
    return _matrix(PoissonSampler(_UNITS, _Q, _UNITS, seed))


def test_poisson_batches_are_poisson(draws):
    """Those of users, too, however many rows they own."""
    for name, test in _STATISTICS.items():
        assert test(draws) > _ACCEPTED, name


def test_draws_of_other_seeds_are_independent():
    """Draws of one step under different seeds are as good as draws of other steps."""
    draws = np.zeros((_STEPS, _UNITS))
    for seed in range(_STEPS):
        draw = PoissonSampler(_UNITS, _Q, _UNITS, seed).draw(0)
        draws[seed, draw.indices[: draw.count]] = 1
    for name, test in _STATISTICS.items():
        assert test(draws) > _ACCEPTED, name


@pytest.mark.parametrize("secure, sound", [(0, True), (1, True), (None, False)])
def test_truncation_keeps_a_uniformly_random_subset(secure, sound):
    sampler = PoissonSampler(10, 0.9, 3, seed=SecureSource(1) if secure else 1)
    kept = collections.Counter()
    random = np.random.default_rng(0)
    for step in range(7200):
        if sound:
            draw = sampler.draw(step)
            assert draw.count == 3
            kept[tuple(draw.indices.tolist())] += 1
        else:
            kept[tuple(np.flatnonzero(random.random(10) < 0.9)[:3].tolist())] += 1
    # All 10·9·8 = 720 ordered triples are equally likely, ten times each.
    counts = [kept[triple] for triple in itertools.permutations(range(10), 3)]
    if sound:
        assert sum(counts) == 7200
        assert scipy.stats.chisquare(counts).pvalue > _ACCEPTED
    else:
        assert scipy.stats.chisquare(counts, [sum(counts) / 720] * 720).pvalue < (
            _REJECTED
        )


# Unit u owns 1 + u % 4 rows.
_LABELS = [unit for unit in range(_UNITS) for _ in range(1 + unit % 4)]


@pytest.fixture(scope="module")
def users():
    """Which users each step drew, and how often each of their rows stood for them."""
    sampler = UserSampler(
        PoissonSampler(_UNITS, _Q, _UNITS, seed=11), Groups.of(_LABELS)
    )
    included, rows = np.zeros((_STEPS, _UNITS)), np.zeros(len(_LABELS))
    choices = np.full((_STEPS, _UNITS), -1)
    first = np.searchsorted(_LABELS, np.arange(_UNITS))
    for step in range(_STEPS):
        draw = sampler.draw(step)
        assert draw.weights.sum() == draw.count  # one row each
        for row in draw.indices[: draw.count]:
            included[step, _LABELS[row]] += 1
            choices[step, _LABELS[row]] = row - first[_LABELS[row]]
            rows[row] += 1
    assert included.max() == 1
    return included, rows, choices


def _uniform_within_users(rows):
    """χ² of row counts within users; a user with r rows has r - 1 degrees."""
    statistic, degrees = 0.0, 0
    for user in range(_UNITS):
        own = rows[np.asarray(_LABELS) == user]
        statistic += ((own - own.mean()) ** 2 / own.mean()).sum()
        degrees += len(own) - 1
    return _two_sided(scipy.stats.chi2(degrees), statistic)


def test_one_row_of_each_drawn_user_is_drawn_uniformly(users):
    included, rows, _ = users
    assert _uniform_within_users(rows) > _ACCEPTED
    # One that takes a user's first row a tenth too often is rejected.
    first = np.searchsorted(_LABELS, np.arange(_UNITS))
    favoured = rows.copy()
    favoured[first] += 0.1 * included.sum(axis=0)
    assert _uniform_within_users(favoured) < _REJECTED


def test_users_rows_are_drawn_independently_of_other_users_and_steps(users):
    """Users 3, 7, 11, … own four rows each: the choices of two form a 4 x 4 table."""
    choices = users[2][:, 3::4]

    def independence(one, other):
        both = (one >= 0) & (other >= 0)
        table = np.zeros((4, 4))
        np.add.at(table, (one[both], other[both]), 1)
        return scipy.stats.chi2_contingency(table).pvalue

    pairs = [
        independence(choices[:, a], choices[:, b])
        for a, b in itertools.combinations(range(choices.shape[1]), 2)
    ]
    in_turn = [
        independence(choices[1:, a], choices[:-1, a]) for a in range(choices.shape[1])
    ]
    assert len(pairs) == 45 and min(pairs) > _ACCEPTED / 45
    assert min(in_turn) > _ACCEPTED / 10
    # One random number shared by all users of a step would be found.
    shared = np.random.default_rng(0).integers(4, size=_STEPS)
    assert (
        independence(
            np.where(choices[:, 0] >= 0, shared, -1),
            np.where(choices[:, 1] >= 0, shared, -1),
        )
        < _REJECTED
    )


@pytest.mark.parametrize("secure", [False, True])
def test_all_subsets_of_a_users_rows_are_equally_likely(secure):
    seed = SecureSource(3) if secure else 3
    sampler = UserSampler(PoissonSampler(1, 1.0, 1, seed), Groups.of([0] * 5), 2)
    counts = collections.Counter(
        tuple(sorted(sampler.draw(step).indices.tolist())) for step in range(4000)
    )
    assert len(counts) == 10
    assert scipy.stats.chisquare(list(counts.values())).pvalue > _ACCEPTED


@pytest.mark.parametrize("secure", [False, True])
def test_shuffled_epochs_are_uniform_permutations_and_apart(secure):
    sampler = ShuffledSampler(4, 4, SecureSource(2) if secure else 2)
    orders = [tuple(sampler.draw(epoch).indices.tolist()) for epoch in range(1200)]
    index = {order: i for i, order in enumerate(itertools.permutations(range(4)))}
    counts = np.bincount([index[order] for order in orders], minlength=24)
    assert scipy.stats.chisquare(counts).pvalue > _ACCEPTED
    # What an epoch begins with says nothing of the next: also not its own rotation.
    table = np.zeros((4, 4))
    for one, other in zip(orders[:-1], orders[1:]):
        table[one[0], other[0]] += 1
    assert scipy.stats.chi2_contingency(table).pvalue > _ACCEPTED
    rotated = np.bincount([(i % 24) // 6 * 6 for i in range(1200)], minlength=24)
    assert scipy.stats.chisquare(rotated).pvalue < _REJECTED


def test_what_a_shuffled_epoch_leaves_out_is_uniform():
    drawn = _matrix(ShuffledSampler(11, 8, seed=5), steps=600, units=11)
    assert (drawn.sum(axis=1) == 8).all()
    # Counts of eight of eleven without replacement: variance 8/11·3/11 an epoch, and
    # (n-1)/n times the sum of squares is χ² with n-1 = 10 degrees.
    z = (drawn.sum(axis=0) - 600 * 8 / 11) / np.sqrt(600 * 8 / 11 * 3 / 11)
    assert _two_sided(scipy.stats.chi2(10), (z**2).sum() * 10 / 11) > _ACCEPTED


# -- Dealt to microbatches -------------------------------------------------------


def _together(sampler_of):
    """z of how often two drawn units share a group, and of how full group 0 is."""
    groups, shared, pairs, first, drawn = 4, 0, 0, 0, 0
    sampler = sampler_of(groups)
    for step in range(3000):
        draw = sampler.draw(step)
        sizes = draw.weights.reshape(groups, -1).sum(axis=1)
        total = sizes.sum()
        shared += (sizes * (sizes - 1) / 2).sum()
        pairs += total * (total - 1) / 2
        first, drawn = first + sizes[0], drawn + total
    chance = 1 / groups
    # Pairs of independent throws coincide independently of each other, two by two.
    return (
        (shared - pairs * chance) / np.sqrt(pairs * chance * (1 - chance)),
        (first - drawn * chance) / np.sqrt(drawn * chance * (1 - chance)),
    )


@pytest.mark.parametrize("secure", [False, True])
def test_units_are_dealt_independently_and_uniformly(secure):
    seed = SecureSource(3) if secure else 3

    def dealt(groups):
        return DealtSampler(PoissonSampler(40, 0.2, 40, seed), groups, 40)

    assert np.abs(_together(dealt)).max() < 4

    class CutInto(DealtSampler):
        """A draw cut into groups one after the other: sizes as even as can be."""

        def draw(self, step):
            found = super().draw(step)
            rows = found.indices[found.weights > 0]
            weights = np.zeros([self.num_microbatches, self.capacity])
            for group, part in enumerate(np.array_split(rows, self.num_microbatches)):
                weights[group, : len(part)] = 1
            return type(found)(found.indices, weights.ravel(), found.count)

    def cut(groups):
        return CutInto(PoissonSampler(40, 0.2, 40, seed=3), groups, 40)

    assert _together(cut)[0] < -10


# -- Draws of one step for several purposes ---------------------------------------


def _dependence(first, second):
    """p of the χ² test that two columns of small integers are independent."""
    table = np.zeros([first.max() + 1, second.max() + 1])
    np.add.at(table, (first, second), 1)
    table = table[table.sum(1) > 60][:, table.sum(0) > 60]
    assert table.size >= 6
    return scipy.stats.chi2_contingency(table).pvalue


@pytest.mark.parametrize("secure", [False, True])
def test_the_group_of_a_unit_says_nothing_of_how_many_were_drawn(secure):
    """Dealt by the sample's own bits, a group would tell who else is in the batch."""
    poisson = PoissonSampler(40, 0.2, 40, seed=SecureSource(3) if secure else 3)
    dealt = DealtSampler(poisson, 4, 40)
    counts, groups = [], []
    for step in range(3000):
        drawn = poisson.draw(step)
        if drawn.count < 4:
            continue
        found = dealt.draw(step)
        places = np.flatnonzero(found.weights)
        of = dict(zip(found.indices[places], places // 40))
        counts.append(drawn.count)
        groups.append([of[unit] for unit in drawn.indices[:4]])
    for column in np.array(groups).T:
        assert _dependence(np.array(counts), column) > _ACCEPTED
    assert _dependence(np.array(counts), np.array(counts) // 3) < 1e-50
