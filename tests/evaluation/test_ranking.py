"""Ranking measures against trec_eval's rules written out in plain python."""

import math
import random
import struct

import numpy as np
import pytest

from tfdpsq.evaluation import evaluate_run, ranked
from tfdpsq.validation import InputError

METRICS = ("ndcg@10", "recall@10", "ndcg@3", "recall@1", "map", "map@10", "map@3")
METRICS += ("mrr@10", "mrr@2", "mrr@1", "capped_recall@10", "capped_recall@3")


def _float32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


def _naive_order(hits):
    """Best first: score as float32 descending, then id bytes descending."""
    order = sorted(hits, key=lambda d: d.encode("utf-8"), reverse=True)
    return sorted(order, key=lambda d: -_float32(hits[d]))  # stable


def _naive(judgements, hits, metric):
    """One query's value by trec_eval's rules, nothing shared with the library."""
    name, _, k = metric.partition("@")
    k = int(k or len(hits))
    top = _naive_order(hits)[:k]
    relevant = [d for d, r in judgements.items() if r > 0]
    ranks = [rank for rank, d in enumerate(top, start=1) if d in relevant]
    if not relevant:
        return 0.0
    if name == "recall":
        return len(ranks) / len(relevant)
    if name == "capped_recall":
        return len(ranks) / min(k, len(relevant))
    if name == "mrr":
        return 1 / ranks[0] if ranks else 0.0
    if name == "map":
        return sum((i + 1) / rank for i, rank in enumerate(ranks)) / len(relevant)
    gains = [max(judgements.get(d, 0), 0) for d in top]
    ideal = sorted((max(r, 0) for r in judgements.values()), reverse=True)[:k]
    dcg = sum(g / math.log2(rank + 2) for rank, g in enumerate(gains))
    best = sum(g / math.log2(rank + 2) for rank, g in enumerate(ideal))
    return dcg / best if best else 0.0


def _random_case(seed):
    draw = random.Random(seed)
    # Ids whose order as strings is not their order as numbers, some beyond ASCII.
    documents = [f"d{n}" for n in range(60)] + ["é1", "Z", "z", "𝛿"]
    # Scores that tie as they are, and some that tie as float32 only.
    scores = [0.0, -0.0, 0.5, 1.0, 1.0 + 1e-9, 1.0 - 1e-12, -3.25, 16777216.0]
    scores += [16777217.0, draw.random()]
    qrels, run = {}, {}
    for n in range(20):
        judged = draw.sample(documents, draw.randint(1, 30))
        relevances = [-2, -1, 0] if n % 5 == 4 else [-1, 0, 0, 1, 2, 3]
        qrels[f"q{n}"] = {d: draw.choice(relevances) for d in judged}
        if n % 7 != 3:
            found = draw.sample(documents, draw.randint(1, 40))
            run[f"q{n}"] = {d: draw.choice(scores) for d in found}
    run["not judged"] = {"d1": 1.0}
    return qrels, run


@pytest.mark.parametrize("seed", range(5))
def test_measures_equal_trec_evals_rules_on_random_runs(seed):
    qrels, run = _random_case(seed)
    result = evaluate_run(qrels, run, METRICS)
    for metric in METRICS:
        expected = {q: _naive(qrels[q], run.get(q, {}), metric) for q in sorted(qrels)}
        assert list(result.per_query) == list(expected)
        got = [row[metric] for row in result.per_query.values()]
        np.testing.assert_allclose(got, list(expected.values()), rtol=0, atol=1e-12)
        assert result.means[metric] == pytest.approx(
            sum(expected.values()) / len(expected), abs=1e-12
        )
        np.testing.assert_array_equal(result.values(metric), got)
    assert result.missing == ("q10", "q17", "q3")
    assert {"q14", "q19", "q4", "q9"} <= set(result.without_relevant)


@pytest.mark.parametrize("seed", range(5))
def test_ranked_order_is_trec_evals(seed):
    _, run = _random_case(seed)
    for hits in run.values():
        assert [document for document, _ in ranked(hits)] == _naive_order(hits)


def test_relevance_far_below_zero_does_not_end_the_process():
    # Touché 2020 was judged down to -2, where trec_eval reads memory not its own.
    draw = random.Random(0)
    documents = [f"d{n}" for n in range(60)]
    for _ in range(20):
        judged = {d: draw.choice([-9, -2, -1, 0, 1]) for d in documents[:40]}
        run = {"q": {d: draw.random() for d in draw.sample(documents, 30)}}
        result = evaluate_run({"q": judged}, run, METRICS)
        for metric in METRICS:
            expected = _naive(judged, run["q"], metric)
            assert result.means[metric] == pytest.approx(expected, abs=1e-12)


def test_mrr_stops_at_rank_k():
    # trec_eval's recip_rank has no cut: 1/rank at any rank, 49 here included, whose
    # reciprocal's reciprocal is 49.00000000000001 in floating point.
    for rank in (1, 2, 3, 10, 11, 49, 99, 100):
        run = {"q": {f"d{n:03}": -float(n) for n in range(1, 101)}}
        metrics = [f"mrr@{rank}", f"mrr@{max(1, rank - 1)}", "mrr@1000"]
        means = evaluate_run({"q": {f"d{rank:03}": 1}}, run, metrics).means
        assert means[f"mrr@{rank}"] == means["mrr@1000"] == pytest.approx(1 / rank)
        assert rank == 1 or means[f"mrr@{rank - 1}"] == 0


def test_missing_queries_count_as_zero_and_are_reported():
    # A query without any hit in the run is missing too.
    qrels = {"a": {"d": 1}, "b": {"d": 1}, "c": {"d": 1}, "e": {}}
    metrics = ("ndcg@10", "recall@10", "map", "mrr@10", "capped_recall@10")
    result = evaluate_run(qrels, {"a": {"d": 1.0}, "b": {}}, metrics)
    assert result.means == dict.fromkeys(metrics, 0.25)
    assert result.missing == ("b", "c", "e")
    assert result.without_relevant == ("e",)
    assert "counts as 0" in result.rules["missing_queries"]


def test_self_matches_are_kept_or_removed_as_told():
    qrels, run = {"7": {"d": 1}}, {"7": {"7": 9.0, "d": 1.0}}
    kept = evaluate_run(qrels, run)
    removed = evaluate_run(qrels, run, ignore_identical_ids=True)
    assert kept.means["ndcg@10"] == pytest.approx(1 / math.log2(3))
    assert removed.means["ndcg@10"] == 1.0
    assert kept.rules["self_matches"] == "kept"
    assert "removed" in removed.rules["self_matches"]


def test_bad_scores_metrics_and_relevances_are_refused():
    for score in (math.nan, -math.inf, 1e39, "1"):
        with pytest.raises(InputError, match="score of document 'd7' for query 'q1'"):
            evaluate_run({"q1": {"d7": 1}}, {"q1": {"d7": score}})
    for metric in ("ndcg", "ndcg@0", "P@10", "ndcg@x"):
        with pytest.raises(InputError, match="'recall@k'"):
            evaluate_run({"q": {"d": 1}}, {"q": {"d": 1.0}}, [metric])
    with pytest.raises(InputError, match="share no query id"):
        evaluate_run({"q": {"d": 1}}, {"p": {"d": 1.0}})
    for relevance in (1.0, "1"):
        with pytest.raises(InputError, match="relevance of document 'd' for query"):
            evaluate_run({"q": {"d": relevance}}, {"q": {"d": 1.0}})


@pytest.mark.parametrize("relevance", [10**6 + 1, 2**62])
def test_huge_relevance_is_refused(relevance):
    """It took gigabytes, was scored 0 from 2^32 on, or ended the process (2^62)."""
    run = {"q": {"d": 2.0, "e": 1.0}}
    with pytest.raises(InputError, match="'d' for query 'q' .* at most 1,000,000"):
        evaluate_run({"q": {"d": relevance, "e": 1}}, run, ["ndcg@10"])
    found = evaluate_run({"q": {"d": 10**6, "e": 1}}, run, ["ndcg@10"])
    assert found.means["ndcg@10"] == pytest.approx(1.0)
