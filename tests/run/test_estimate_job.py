"""The estimated cost of a whole job equals sums by hand, from given rates."""

import pytest
from helpers import tiny

from tfdpsq.run import estimate_job
from tfdpsq.run.estimation.costs import Devices, Rates, Work, parts_of


def test_fine_tuning_of_ms_marco_by_hand():
    # 533,000 * 30 / 1024 = 15,615.2 steps of 1024 / 16 = 64 microbatches, and a half.
    work = Work(generators=1, steps=15_616, batch=1024, microbatch=16)
    speed = Rates(examples=100.0, step=0.5, start=60.0)
    (part,) = parts_of(work, speed, Devices())
    # 64.5 * 16 = 1032 pairs a step at 100 a second, and half a second.
    assert part.seconds == pytest.approx(15_616 * (10.32 + 0.5) + 60)
    # On four devices at 90 %: the half second stays.
    (shared,) = parts_of(work, speed, Devices(replicas=4, scaling=0.9))
    assert shared.seconds == pytest.approx(15_616 * (10.32 / 3.6 + 0.5) + 60)
    assert shared.device_hours == pytest.approx(4 * shared.seconds / 3600)


def test_job_is_estimated_from_its_config_and_given_rates(tmp_path):
    tiny.write_pairs(tmp_path / "pairs")
    config = tiny.tiny_config(tmp_path / "pairs")
    given = {
        "examples": 50.0,
        "queries": 20.0,
        "documents": 400.0,
        "retriever_steps": 2.0,
        "likelihoods": 8.0,
    }
    options = estimate_job.Options(memory=False, seconds=0.01, rates=given)
    found = estimate_job.run(config, options, Devices(workers=2, price=1.0))
    parts = {part.name: part for part in found.parts}
    # Two sets of 84 queries by two workers.
    assert parts["synthesize"].seconds == pytest.approx(2 * 84 / (2 * 20.0))
    # Three rerankers of 20 documents for each of 12 queries.
    start = found.rates.start
    expected = 3 * (12 * 20 / (2 * 8.0) + start)
    assert parts["rerank"].seconds == pytest.approx(expected)
