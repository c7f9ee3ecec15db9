"""MAUVE: how far one set of texts is, as a distribution, from another.

Pillutla et al. 2021, *MAUVE: Measuring the Gap Between Neural Text and Human Text using
Divergence Frontiers*. Texts come as feature vectors. Both sets are clustered together,
which makes of each a histogram, P and Q, and these are compared along all their
mixtures R = λP + (1 - λ)Q by the curve of the points, with a scaling factor c,

    x(λ) = exp(-c·KL(Q‖R)),    y(λ) = exp(-c·KL(P‖R)),    0 < λ < 1,

between its end points (1, 0) and (0, 1). MAUVE is the area under it: 1 where the
histograms are equal, near 0 where they share no cluster. As published, the curve is
taken at 25 evenly spaced λ from 0 to 1 and joined by straight lines: within .002 of the
area where the histograms share most clusters, too large where they share few.

The model that makes the features, the number of clusters and of texts, and the seed of
k-means (by up to 0.1 at 300 texts) move the value, too: values compare only where all
are the same, and come as a mean over seeds. Two samples of one distribution stay below
1, at about 0.96 for a tenth as many clusters as texts.
"""

from __future__ import annotations

import dataclasses
import statistics
import warnings
from collections.abc import Sequence

import numpy as np
import scipy.special
from absl import logging

from tfdpsq.validation import InputError

_FEW = 1_000
# The published settings.
_SAMPLES_PER_CLUSTER = 10
_SCALE = 5.0
_POINTS = 25
_EXPLAINED_VARIANCE = 0.9
_RESTARTS = 5
_ITERATIONS = 500


@dataclasses.dataclass(frozen=True)
class Mauve:
    """The result of `mauve_of_features`."""

    mean: float  # over the seeds of k-means, in [0, 1]
    deviation: float  # standard deviation over them (of a sample: n - 1)
    scores: tuple[float, ...]  # one value a seed
    samples: tuple[int, int]  # (n, m), texts of the two sets
    clusters: int  # the number of clusters that k-means was given
    components: int  # principal components that were kept


def mauve_of_features(
    first: np.ndarray,
    second: np.ndarray,
    *,
    clusters: int | None = None,
    seeds: Sequence[int] = (25, 26, 27, 28, 29),
) -> Mauve:
    """MAUVE of two sets of texts, given as features, with the published settings.

    Features of unit norm, as many principal components of both sets together as explain
    90 % of the variance, k-means of both sets together from randomly chosen texts: of
    five runs the one of least inertia. Rows that are equal to the last bit are one
    point with a weight: two centres on one point would share its rows between them by
    rounding. Where no more points than clusters are distinct, each is a cluster.
    (Features are normalised before PCA, as in the authors' package, mauve-text. PCA
    centres them; normalising afterwards would discard the distance from the mean, by
    which too little diversity shows.)

    Logs a warning below 1,000 texts on a side, where noise exceeds most differences.

    Args:
      first: [n, d] floating point, one row a text.
      second: [m, d] of the same model; swapping the two changes nothing beyond
        rounding.
      clusters: by default a tenth of the smaller n or m, rounded, and at least 2.
      seeds: of k-means, at least two, all different; public.

    Returns:
      Mean, deviation and the values behind them.
    """
    from sklearn.decomposition import PCA  # a second to import

    first, second = _features("first", first), _features("second", second)
    if first.shape[1] != second.shape[1]:
        raise InputError(
            f"first has features of width {first.shape[1]}, second of "
            f"{second.shape[1]}; make both by the same model."
        )
    if len(set(seeds)) < max(2, len(seeds)):
        raise InputError(f"seeds is {list(seeds)}; give at least two different ones.")
    smaller = min(len(first), len(second))
    clusters = clusters or max(2, round(smaller / _SAMPLES_PER_CLUSTER))
    if not 2 <= clusters <= smaller:
        raise InputError(
            f"{clusters} clusters, but {smaller} samples on one side; give 2 clusters "
            "or more, and as many samples (a tenth as many clusters is usual)."
        )
    if smaller < _FEW:
        logging.warning("MAUVE of %d texts depends on seed and number", smaller)
    both = np.concatenate([first, second])
    norms = np.linalg.norm(both, axis=1, keepdims=True)
    both = both / np.where(norms > 0, norms, 1)
    distinct, which, counts = np.unique(
        both, axis=0, return_inverse=True, return_counts=True
    )
    pca = PCA(_EXPLAINED_VARIANCE, svd_solver="full").fit(both)
    reduced = pca.transform(distinct)
    scores = []
    for seed in seeds:
        labels = _labels(reduced, counts, clusters, seed)[which]
        p, q = (
            np.bincount(part, minlength=clusters)
            for part in np.split(labels, [len(first)])
        )
        scores.append(mauve_of_histograms(p, q))
    return Mauve(
        mean=statistics.fmean(scores),
        deviation=statistics.stdev(scores),
        scores=tuple(scores),
        samples=(len(first), len(second)),
        clusters=clusters,
        components=reduced.shape[1],
    )


def mauve_of_histograms(p: np.ndarray, q: np.ndarray) -> float:
    """The area under the divergence curve of two histograms, as published.

    Args:
      p: [k] counts or probabilities, at least 0, not all 0; divided by their sum.
      q: [k] the same of the other set; swapping the two does not change the area.

    Returns:
      The area, in [0, 1].
    """
    p, q = (np.asarray(each, np.float64) / np.sum(each) for each in (p, q))
    share = np.linspace(0, 1, _POINTS)[:, np.newaxis]
    mixture = share * p + (1 - share) * q
    x, y = (
        np.exp(-_SCALE * scipy.special.rel_entr(each, mixture).sum(axis=1))
        for each in (q, p)
    )
    x, y = np.concatenate([[1], x, [0]]), np.concatenate([[0], y, [1]])
    return float(-np.trapz(y, x))


def _labels(
    rows: np.ndarray, weights: np.ndarray, clusters: int, seed: int
) -> np.ndarray:
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    if len(rows) <= clusters:
        return np.arange(len(rows))
    k_means = KMeans(
        clusters,
        init="random",
        n_init=_RESTARTS,
        max_iter=_ITERATIONS,
        random_state=seed,
    )
    with warnings.catch_warnings():
        # Some rows may differ only in the dropped components.
        warnings.simplefilter("ignore", ConvergenceWarning)
        # Single precision takes half the time, and only labels come out.
        return k_means.fit_predict(rows.astype(np.float32), sample_weight=weights)


def _features(name: str, values: np.ndarray) -> np.ndarray:
    matrix = np.asarray(values, np.float64)
    if matrix.ndim != 2 or not matrix.size or not np.isfinite(matrix).all():
        raise InputError(
            f"{name} has shape {matrix.shape}; give finite features, [texts, features]."
        )
    return matrix
