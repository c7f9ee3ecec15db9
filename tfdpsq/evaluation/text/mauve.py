"""MAUVE: how far one set of texts is, as a distribution, from another.

Pillutla et al. 2021, *MAUVE: Measuring the Gap Between Neural Text and Human Text using
Divergence Frontiers*. Texts come as feature vectors. Both sets are clustered together,
which makes of each a histogram, P and Q, and these are compared along all their
mixtures R = λP + (1 - λ)Q by the curve of the points, with a scaling factor c,

    x(λ) = exp(-c·KL(Q‖R)),    y(λ) = exp(-c·KL(P‖R)),    0 < λ < 1,

between its end points (1, 0) and (0, 1). MAUVE is the area under it: 1 where the
histograms are equal, near 0 where they share no cluster.

**What moves the value besides the texts**: the model that makes the features, the
number of clusters, and the seed of k-means (by up to 0.1 at 300 texts). Values compare
only where all of these are the same, sizes included. So there is always a mean over
seeds, with its deviation. Two samples of one distribution stay below 1, at about 0.96
for a tenth as many clusters as texts.
"""

from __future__ import annotations

import dataclasses
import statistics
import warnings
from collections.abc import Sequence

import numpy as np
import scipy.special
from absl import logging

from tfdpsq.validation import InputError, in_range, positive, positive_integer

FEWEST_SAMPLES = 1_000
_SAMPLES_PER_CLUSTER = 10
# Beyond this log-odds of λ the curve is within c·e^-40 of its ends.
_LOG_ODDS = 40.0
_PANELS = 40
_NODES = 20


@dataclasses.dataclass(frozen=True)
class Mauve:
    """The result of `mauve_of_features`.

    Attributes:
      mean: over the seeds of k-means, in [0, 1].
      deviation: standard deviation over them (of a sample: n - 1).
      scores: one value a seed.
      samples: (n, m), texts of the two sets.
      clusters: the number of clusters that k-means was given.
      components: principal components that were kept.
    """

    mean: float
    deviation: float
    scores: tuple[float, ...]
    samples: tuple[int, int]
    clusters: int
    components: int


def mauve_of_features(
    first: np.ndarray,
    second: np.ndarray,
    *,
    clusters: int | None = None,
    scale: float = 5.0,
    points: int | None = None,
    explained_variance: float = 0.9,
    unit_norm: bool = True,
    restarts: int = 5,
    iterations: int = 500,
    seeds: Sequence[int] = (25, 26, 27, 28, 29),
) -> Mauve:
    """MAUVE of two sets of texts, given as features; the defaults are the published.

    Unit norm, principal components of both sets together, k-means of both sets together
    from randomly chosen texts: of `restarts` runs the one of least inertia. Rows that
    are equal to the last bit are one point with a weight: two centres on one point
    would share its rows between them by rounding. Where no more points than clusters
    are distinct, each is a cluster. (Features are normalised before PCA, as in the
    authors' package, mauve-text. PCA centres them; normalising afterwards would discard
    the distance from the mean, by which too little diversity shows.)

    Logs a warning below 1,000 texts on a side: clustering noise and the bias of small
    histograms are then larger than most differences of interest.

    Args:
      first: [n, d] floating point, one row a text.
      second: [m, d] of the same model; swapping the two changes nothing beyond
        rounding.
      clusters: by default a tenth of the smaller n or m, rounded, and at least 2.
      scale: c, above 0.
      points: see `mauve_of_histograms`.
      explained_variance: keep as many principal components as explain this share of
        the variance, in (0, 1]; 1 keeps all.
      unit_norm: whether each text's features are divided by their norm.
      restarts: runs of k-means for each seed.
      iterations: at most so many in a run.
      seeds: of k-means, at least two, all different; public.

    Returns:
      Mean, deviation and the values behind them.

    Raises:
      InputError: features that are no matrices, of different widths, or not finite;
        fewer samples than clusters on a side; fewer than two seeds; or a setting out of
        range.
    """
    from sklearn.decomposition import PCA  # a second to import

    first, second = _features("first", first), _features("second", second)
    if first.shape[1] != second.shape[1]:
        raise InputError(
            f"first has features of width {first.shape[1]}, second of "
            f"{second.shape[1]}; make both by the same model."
        )
    in_range("explained_variance", explained_variance, 0, 1, low_open=True)
    _check_curve(scale, points)
    for name, value in (("restarts", restarts), ("iterations", iterations)):
        positive_integer(name, value)
    seeds = tuple(seeds)
    if len(seeds) < 2 or len(set(seeds)) < len(seeds):
        raise InputError(
            f"seeds is {list(seeds)}; give at least two different ones: a value "
            "without its deviation over seeds says little."
        )
    smaller = min(len(first), len(second))
    if clusters is None:
        clusters = max(2, round(smaller / _SAMPLES_PER_CLUSTER))
    if positive_integer("clusters", clusters) > smaller:
        raise InputError(
            f"there are {clusters} clusters, but {smaller} samples on one side; give "
            f"more texts, or fewer clusters ({_SAMPLES_PER_CLUSTER} texts for each is "
            "usual)."
        )
    if smaller < FEWEST_SAMPLES:
        logging.warning(
            "MAUVE of %d and %d texts: below %d it depends much on the seed of k-means "
            "and on the number of texts",
            len(first),
            len(second),
            FEWEST_SAMPLES,
        )
    both = np.concatenate([first, second])
    if unit_norm:
        norms = np.linalg.norm(both, axis=1, keepdims=True)
        both = both / np.where(norms > 0, norms, 1)
    distinct, which, counts = np.unique(
        both, axis=0, return_inverse=True, return_counts=True
    )
    kept = None if explained_variance == 1 else explained_variance
    reduced = PCA(kept, svd_solver="full").fit(both).transform(distinct)
    scores = []
    for seed in seeds:
        labels = _labels(reduced, counts, clusters, restarts, iterations, seed)[which]
        p, q = (
            np.bincount(part, minlength=clusters)
            for part in (labels[: len(first)], labels[len(first) :])
        )
        scores.append(mauve_of_histograms(p, q, scale, points))
    return Mauve(
        mean=statistics.fmean(scores),
        deviation=statistics.stdev(scores),
        scores=tuple(scores),
        samples=(len(first), len(second)),
        clusters=clusters,
        components=reduced.shape[1],
    )


def mauve_of_histograms(
    p: np.ndarray, q: np.ndarray, scale: float = 5.0, points: int | None = None
) -> float:
    r"""The area under the divergence curve of two histograms.

    *Exact*, the default. With s the log-odds of λ and x' = dx/ds,

        area = x(λ₁) + ∫ y·(-x') ds    from log-odds -40 to 40, where λ₁ is at 40.

    The part to the right of λ₁ has y within c·e^-40 of 1 and so the area
    x(λ₁); to the left, x is within c·e^-40 of 1. In between the integrand is analytic
    in s, with no singularity nearer to the axis than π, even where λ's own is not (a
    cluster that only one side has makes x' infinite at an end): Gauss and Legendre's
    rule on panels of width 2 gives it to rounding.

    *Published*: that many points, evenly spaced over λ from 0 to 1 with both ends, and
    the end points, joined by straight lines; 25 is the published number. It is within
    0.002 of the exact area where the histograms share most clusters, and too large
    where they share few: .12 for an exact area of .05.

    Args:
      p: [k] counts or probabilities, at least 0; divided by their sum.
      q: [k] the same of the other set; swapping the two does not change the area.
      scale: c, above 0.
      points: of the published discretisation, at least 2; `None` for the exact area.

    Returns:
      The area, in [0, 1].

    Raises:
      InputError: histograms of different or other shapes, negative, not finite or all
        zero; or a setting out of range.
    """
    if points is not None:
        x, y = divergence_curve(p, q, scale, points)
        return float(np.sum((x[:-1] - x[1:]) * (y[:-1] + y[1:]) / 2))
    p, q = _histograms(p, q)
    _check_curve(scale, points)
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    half = _LOG_ODDS / _PANELS
    middles = half * (2 * np.arange(_PANELS) + 1) - _LOG_ODDS
    log_odds = np.append((middles[:, np.newaxis] + half * nodes).ravel(), _LOG_ODDS)
    # λ and 1 - λ, each exact where the other rounds to 1.
    share = scipy.special.expit(log_odds)[:, np.newaxis]
    rest = scipy.special.expit(-log_odds)[:, np.newaxis]
    mixture = share * p + rest * q
    x, y = _point(p, q, mixture, scale)
    # d KL(Q‖R)/dλ = Σ q·(q - p)/r, and dλ/ds = λ·(1 - λ).
    slope = (q * (q - p) / mixture * (share * rest)).sum(axis=1)
    area = np.tile(half * weights, _PANELS) @ (y * scale * x * slope)[:-1]
    return float(min(max(area + x[-1], 0.0), 1.0))


def divergence_curve(
    p: np.ndarray, q: np.ndarray, scale: float = 5.0, points: int = 25
) -> tuple[np.ndarray, np.ndarray]:
    """Points of the divergence curve, as the published discretisation has them.

    Args:
      p: see `mauve_of_histograms`.
      q: see there.
      scale: see there.
      points: see there.

    Returns:
      x and y, both [points + 2] float64, from (1, 0) to (0, 1).

    Raises:
      InputError: see there.
    """
    p, q = _histograms(p, q)
    _check_curve(scale, points)
    share = np.linspace(0, 1, points)[:, np.newaxis]
    x, y = _point(p, q, share * p + (1 - share) * q, scale)
    return np.concatenate([[1], x, [0]]), np.concatenate([[0], y, [1]])


def _point(
    p: np.ndarray, q: np.ndarray, mixture: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """The curve at mixtures [rows, k]: x and y, [rows] each."""
    to_q, to_p = (scipy.special.rel_entr(a, mixture).sum(axis=1) for a in (q, p))
    return np.exp(-scale * to_q), np.exp(-scale * to_p)


def _labels(
    rows: np.ndarray,
    weights: np.ndarray,
    clusters: int,
    restarts: int,
    iterations: int,
    seed: int,
) -> np.ndarray:
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    if len(rows) <= clusters:
        return np.arange(len(rows))
    k_means = KMeans(
        clusters, init="random", n_init=restarts, max_iter=iterations, random_state=seed
    )
    with warnings.catch_warnings():
        # Some rows may differ only in the dropped components.
        warnings.simplefilter("ignore", ConvergenceWarning)
        # Single precision takes half the time, and only labels come out.
        return k_means.fit_predict(rows.astype(np.float32), sample_weight=weights)


def _features(name: str, values: np.ndarray) -> np.ndarray:
    matrix = np.asarray(values, np.float64)
    if matrix.ndim != 2 or not matrix.size:
        raise InputError(
            f"{name} has shape {matrix.shape}; it must be [texts, features], with at "
            "least one of each."
        )
    finite = np.isfinite(matrix).all(axis=1)
    if not finite.all():
        raise InputError(
            f"{name}[{int(np.argmin(finite))}] holds NaN or infinity; look at the "
            "model that made the features."
        )
    return matrix


def _histograms(p: np.ndarray, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both as probabilities, without the clusters that neither has."""
    p, q = np.asarray(p, np.float64), np.asarray(q, np.float64)
    if p.ndim != 1 or p.shape != q.shape:
        raise InputError(
            f"p has shape {p.shape} and q {q.shape}; both must be vectors over the "
            "same clusters."
        )
    for name, values in (("p", p), ("q", q)):
        if not np.isfinite(values).all() or (values < 0).any() or not values.any():
            raise InputError(
                f"{name} is {values}; a histogram is finite, at least 0, and not 0 "
                "throughout."
            )
    some = (p > 0) | (q > 0)
    p, q = p[some], q[some]
    return p / p.sum(), q / q.sum()


def _check_curve(scale: float, points: int | None) -> None:
    positive("scale", scale)
    if points is not None and positive_integer("points", points) < 2:
        raise InputError(f"points is {points}; a curve has at least 2, its ends.")
