"""MAUVE: area and features against a second implementation of the definition."""

import math

import numpy as np
import pytest

from tfdpsq.evaluation.mauve import mauve_of_features, mauve_of_histograms
from tfdpsq.validation import InputError

# -- From histograms --------------------------------------------------------------


def _kl(a, b):
    return sum(x * math.log(x / y) for x, y in zip(a, b) if x > 0)


def _drawn(seed, k, n, concentration):
    random = np.random.default_rng(seed)
    return [
        random.multinomial(n, random.dirichlet([concentration] * k)) for _ in range(2)
    ]


HISTOGRAMS = {
    "of two clusters": ([3, 1], [1, 1]),
    "nearly equal": ([100, 101, 99], [100, 100, 100]),
    "one-sided clusters": ([5, 0, 3, 2], [4, 4, 0, 2]),
    "P within Q": ([1, 0, 0], [2, 1, 1]),
    "Q within P": ([2, 1, 1], [1, 0, 0]),
    "one text in a cluster of its own": ([999, 1000, 1], [1000, 1000, 0]),
    "far apart": ([99, 1, 0], [0, 1, 99]),
    "extreme ratios": ([1e-9, 1.0, 1e-4], [1.0, 1e-12, 1e-4]),
    "50 clusters": _drawn(0, 50, 500, 1.0),
    "50 clusters, alike": _drawn(1, 50, 500, 50.0),
}


def test_equal_histograms_have_area_one():
    assert mauve_of_histograms([3, 0, 9], [1, 0, 3]) == pytest.approx(1, abs=1e-14)


def _trapezoids(p, q, scale=5.0, points=25):
    p, q = np.asarray(p) / np.sum(p), np.asarray(q) / np.sum(q)
    curve = [(1.0, 0.0)]
    for i in range(points):
        share = i / (points - 1)
        r = share * p + (1 - share) * q
        # KL is infinite at an end where the other has clusters of its own.
        curve.append(
            tuple(
                0.0 if ((a > 0) & (r == 0)).any() else math.exp(-scale * _kl(a, r))
                for a in (q, p)
            )
        )
    curve.append((0.0, 1.0))
    return sum(
        (x1 - x2) * (y1 + y2) / 2 for (x1, y1), (x2, y2) in zip(curve, curve[1:])
    )


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_area_follows_the_published_definition(name):
    p, q = HISTOGRAMS[name]
    got = mauve_of_histograms(p, q)
    assert got == pytest.approx(_trapezoids(p, q), abs=1e-12)
    # Under the curve on one side, left of it on the other: the same area.
    assert got == pytest.approx(mauve_of_histograms(q, p), abs=1e-12)


# -- From features ----------------------------------------------------------------


def _lloyd(rows, clusters, random):
    """One run of k-means from randomly chosen rows: labels, and what to minimise."""
    centers = rows[random.choice(len(rows), clusters, replace=False)]
    labels = None
    for _ in range(500):
        # The squared distance, but for the row's own norm, which decides nothing.
        apart = (centers**2).sum(axis=1) - 2 * rows @ centers.T
        new = apart.argmin(axis=1)
        if labels is not None and (new == labels).all():
            break
        labels = new
        sizes = np.bincount(labels, minlength=clusters)
        sums = np.stack([np.bincount(labels, c, clusters) for c in rows.T], axis=1)
        full = sizes > 0
        centers[full] = sums[full] / sizes[full, None]
    return labels, apart[np.arange(len(rows)), labels].sum()  # inertia - Σ norms²


def _reference(first, second, seeds=range(5)):
    """The published settings, written a second time: SVD, Lloyd, 25 trapezoids."""
    both = np.concatenate([first, second])
    both = both / np.sqrt(np.square(both).sum(axis=1))[:, np.newaxis]
    both = both - both.mean(axis=0)
    _, singular, axes = np.linalg.svd(both, full_matrices=False)
    explained = np.cumsum(singular**2) / np.sum(singular**2)
    rows = both @ axes[: int(np.searchsorted(explained, 0.9)) + 1].T
    clusters = round(min(len(first), len(second)) / 10)
    scores = []
    for seed in seeds:
        random = np.random.default_rng(seed)
        labels, _ = min(
            (_lloyd(rows, clusters, random) for _ in range(5)), key=lambda run: run[1]
        )
        p, q = (
            np.bincount(part, minlength=clusters)
            for part in (labels[: len(first)], labels[len(first) :])
        )
        scores.append(_trapezoids(p, q))
    return np.mean(scores), rows.shape[1]


def _gaussians(shift, n=600, m=600, seed=0):
    """Two samples of a Gaussian of deviations 1.5, 1.25, … 0.25; one is shifted."""
    random = np.random.default_rng(seed)
    deviations = np.array([1.5, 1.25, 1, 1, 0.75, 0.75, 0.5, 0.25])
    first, second = (random.normal(size=(k, 8)) * deviations for k in (n, m))
    second[:, 0] += shift
    return first, second


SHIFTS = (0.0, 1.0, 2.0, 4.0)


@pytest.fixture(scope="module")
def of_shifts():
    return {shift: mauve_of_features(*_gaussians(shift)) for shift in SHIFTS}


@pytest.mark.parametrize("shift", SHIFTS)
def test_features_equal_a_second_implementation(of_shifts, shift):
    got = of_shifts[shift]
    expected, components = _reference(*_gaussians(shift))
    assert got.mean == pytest.approx(expected, abs=0.03)
    assert got.components == components < 8


def test_sets_of_two_sizes_equal_a_second_implementation():
    got = mauve_of_features(*_gaussians(2.0, m=800))
    expected, _ = _reference(*_gaussians(2.0, m=800))
    assert got.mean == pytest.approx(expected, abs=0.03)
    assert (got.samples, got.clusters) == ((600, 800), 60)


def test_mean_and_deviation_are_those_of_the_seeds(of_shifts):
    got = of_shifts[1.0]
    assert len(got.scores) == 5
    assert got.mean == pytest.approx(np.mean(got.scores))
    assert got.deviation == pytest.approx(np.std(got.scores, ddof=1))
    assert 0 < got.deviation < 0.05
    again = mauve_of_features(*_gaussians(1.0), seeds=(26, 25))
    # Threads add in an order of their own, so not to the last digit.
    assert again.scores == pytest.approx(got.scores[1::-1], abs=1e-6)


def test_repeated_texts_share_a_cluster(recwarn):
    """Four different texts and twenty clusters: then the counts decide, exactly."""
    random = np.random.default_rng(0)
    different = random.normal(size=(4, 6))
    p, q = np.array([80, 60, 40, 20]), np.array([20, 20, 60, 100])
    got = mauve_of_features(different.repeat(p, 0), different.repeat(q, 0))
    assert got.clusters == 20
    expected = mauve_of_histograms(p, q)
    assert got.scores == pytest.approx([expected] * 5, abs=1e-12)
    # One varying direction: of unit norm there are two points, and no complaint.
    line = np.abs(random.normal(size=(50, 1))) + 1
    signs = mauve_of_features(np.append(line, -line, 0), np.append(line[:10], -line, 0))
    expected = mauve_of_histograms([50, 50], [10, 50])
    assert signs.scores == pytest.approx([expected] * 5, abs=1e-9)
    assert not [w for w in recwarn if "distinct clusters" in str(w.message)]


def test_repeated_texts_weigh_by_their_count():
    """0° and 40° are written a thousand times, 95° once: two clusters keep 0 and 40.

    As three points of one weight, 0° and 40° would share a cluster.
    """
    angles = np.radians([0.0, 40.0, 95.0])
    points = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    first, second = (points.repeat(n, 0) for n in ([600, 400, 0], [400, 600, 1]))
    got = mauve_of_features(first, second, clusters=2)
    expected = mauve_of_histograms([600, 400], [400, 601])
    assert got.scores == pytest.approx([expected] * 5, abs=1e-12)


def test_bad_features_are_refused():
    rows = np.ones([30, 3])
    with pytest.raises(InputError, match="width 3, second of 4"):
        mauve_of_features(rows, np.ones([30, 4]))
    with pytest.raises(InputError, match="second has shape .* finite"):
        mauve_of_features(rows, np.where(np.arange(30)[:, None] == 7, np.nan, rows))
    with pytest.raises(InputError, match="10 clusters, but 9 samples on one side"):
        mauve_of_features(rows, rows[:9], clusters=10)
