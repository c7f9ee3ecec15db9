"""Fusion of runs: scikit-learn's scaling, ranks by hand, fitted weights."""

import numpy as np
import pytest
from sklearn.preprocessing import minmax_scale

from tfdpsq import evaluation


def _runs(seed, queries=20, documents=30, found=12):
    """Two runs that find different documents, with scores of different scales."""
    random = np.random.default_rng(seed)
    runs = []
    for scale in (1.0, 40.0):
        run = {}
        for query in range(queries):
            names = random.choice(documents, found, replace=False)
            scores = random.normal(3 * scale, scale, found)
            run[f"q{query}"] = {f"d{n:02}": float(s) for n, s in zip(names, scores)}
        runs.append(run)
    return runs


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_scores_are_the_weighted_sum_of_scaled_ones(weight):
    first, second = _runs(0)
    fused = evaluation.fuse([first, second], [1 - weight, weight], k=100)
    names = [f"d{n:02}" for n in range(30)]
    for query in first:
        expected = np.zeros(30)
        for run, share in ((first, 1 - weight), (second, weight)):
            hits = run[query]
            scaled = minmax_scale(list(hits.values()))
            for name, value in zip(hits, scaled):
                expected[names.index(name)] += share * value
        found = [fused[query].get(name, 0.0) for name in names]
        np.testing.assert_allclose(found, expected, atol=1e-12)


def test_rank_fusion_sums_reciprocal_ranks():
    first = {"q": {"a": 9.0, "b": 8.0, "c": 7.0}}
    second = {"q": {"c": 0.3, "a": 0.2}}
    fused = evaluation.fuse([first, second], [1.0, 1.0], "ranks")["q"]
    assert fused == pytest.approx(
        {"a": 1 / 61 + 1 / 62, "c": 1 / 63 + 1 / 61, "b": 1 / 62}
    )
    assert list(fused) == ["a", "c", "b"]


def test_missing_queries_use_the_other_run():
    fused = evaluation.fuse([{"q": {}}, {"q": {"a": 2.0, "b": 1.0}}], [0.7, 0.3])
    assert fused["q"] == pytest.approx({"a": 0.3, "b": 0.0})


def test_bad_fusions_are_refused():
    for runs, weights, method in (
        ([{}], [0.5, 0.5], "scores"),
        ([{}, {}], [0.5, float("nan")], "scores"),
        ([{}, {}], [0.5, 0.5], "sum"),
    ):
        with pytest.raises(ValueError, match="weights|finite|method"):
            evaluation.fuse(runs, weights, method)
