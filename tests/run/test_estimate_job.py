"""What a whole job costs: sums by hand, where rates come from, and a measurement."""

import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys
import time

import pytest
from helpers import tiny as _tiny

from tfdpsq import validation
from tfdpsq.data import Tokenizer, read_synthetic
from tfdpsq.generator import QueryLikelihood, T5QueryGenerator
from tfdpsq.layers import T5Config
from tfdpsq.run import estimate_job, evaluate, finetune, pipeline, synthesize
from tfdpsq.run.core import layout, point_log
from tfdpsq.run.estimation import costs, rates
from tfdpsq.run.estimation.costs import Devices, Rates, Work, parts_of

ROOT = pathlib.Path(__file__).resolve().parents[2]

_GIVEN = {
    "examples": 50.0,
    "queries": 20.0,
    "documents": 400.0,
    "retriever_steps": 2.0,
    "likelihoods": 8.0,
}


def _by_name(parts):
    return {part.name: part for part in parts}


# -- Sums, by hand ------------------------------------------------------------------


def test_fine_tuning_of_ms_marco_by_hand():
    # 533,000 · 30 / 1024 = 15,615.2 steps of 1024 / 16 = 64 microbatches, and a half.
    work = Work(generators=1, steps=15_616, batch=1024, microbatch=16)
    speed = Rates(examples=100.0, step=0.5, start=60.0)
    (part,) = parts_of(work, speed, Devices())
    # 64.5 · 16 = 1032 pairs a step at 100 a second, and half a second.
    assert part.seconds == pytest.approx(15_616 * (10.32 + 0.5) + 60)
    assert part.device_hours == pytest.approx(part.seconds / 3600)
    # On four devices at 90 %: the half second stays.
    (shared,) = parts_of(work, speed, Devices(replicas=4, scaling=0.9))
    assert shared.seconds == pytest.approx(15_616 * (10.32 / 3.6 + 0.5) + 60)
    assert shared.device_hours == pytest.approx(4 * shared.seconds / 3600)


def test_ten_million_documents_by_hand():
    work = Work(
        generators=1,
        synthetic_documents=10_000_000,
        samples=2,
        retrievers=3,
        retriever_steps=1000,
        documents=10_000_000,
        queries=5000,
        systems=2,
        dimension=768,
    )
    speed = Rates(
        queries=25.0,
        query_bytes=700.0,
        documents=500.0,
        retriever_steps=4.0,
        products=1e10,
        bytes=1e8,
        start=10.0,
    )
    parts = _by_name(parts_of(work, speed, Devices(workers=8, scaling=0.5)))
    # Eight workers at half their speed are four.
    assert parts["synthesize"].seconds == pytest.approx(2e7 / 25 / 4 + 10)
    assert parts["synthesize"].bytes == 2e7 * 700
    assert parts["synthesize"].devices == 8
    assert parts["train_retriever"].seconds == pytest.approx(3 * (1000 / 4 + 10))
    size = 1e7 * 768 * 4
    assert parts["index"].bytes == size
    assert parts["index"].seconds == pytest.approx(1e7 / 500 / 4 + size / 4e8 + 10)
    search = 1e7 * 5000 * 768 / 4e10
    assert parts["evaluate"].seconds == pytest.approx(
        2 * ((1e7 + 5000) / 500 / 4 + search + 10)
    )
    assert "finetune" not in parts  # no steps


def test_reranking_by_hand():
    work = Work(documents=1000, queries=50, rerankers=4, reranked=20, fitted=10)
    speed = Rates(likelihoods=10.0, start=3.0)
    part = _by_name(parts_of(work, speed, Devices(workers=2)))["rerank"]
    # 1,000 pairs by each of four, and 200 by one, ten a second on each of two machines.
    assert part.seconds == pytest.approx(4200 / 20 + 4 * 3)
    assert part.work == "4,200 pairs" and part.bytes == 0
    found = _by_name(parts_of(work, Rates(documents=1.0), Devices()))
    assert found["rerank"].seconds is None  # unknown
    assert "rerank" not in _by_name(
        parts_of(Work(queries=5, reranked=9), speed, Devices())
    )


def test_what_is_not_known_is_not_made_up():
    work = Work(generators=1, steps=10, synthetic_documents=10, documents=10)
    parts = parts_of(work, Rates(examples=1.0), Devices())
    assert [part.seconds is None for part in parts] == [False, True, True]
    found = costs.Estimate(parts, Rates(), None, [])
    assert costs.as_text(found, Devices()).count("unknown") == 2


def test_money_is_devices_times_hours_times_price():
    work = Work(generators=1, synthetic_documents=3600, samples=1)
    devices = Devices(workers=2, price=3.0)
    parts = parts_of(work, Rates(queries=1.0), devices)
    found = costs.Estimate(parts, Rates(), None, ["One assumption."])
    # 3,600 queries by two workers: half an hour each, one hour of devices.
    (part,) = costs.as_json(found, devices)["parts"]
    assert part["device_hours"] == pytest.approx(1.0)
    assert part["price"] == pytest.approx(3.0)
    text = costs.as_text(found, devices)
    assert "3.00" in text and "30.0 min" in text and "One assumption." in text


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Work(steps=-1), "steps is -1"),
        (lambda: Work(batch=0), "batch is 0"),
        (lambda: Devices(workers=0), "workers is 0"),
        (lambda: Devices(scaling=1.5), "scaling is 1.5"),
        (lambda: Devices(price=-1.0), "price is -1.0"),
        (lambda: estimate_job.Options(pairs=10), "pairs is 10 and epochs 0"),
        (lambda: Devices(replicas=10**400), "replicas is 1000"),
        (lambda: estimate_job.Options(seconds=0), "seconds is 0"),
        (lambda: estimate_job.Options(retriever_size="x"), "retriever_size is 'x'"),
        (
            lambda: estimate_job.Options(rates={"queries": 1e-300}),
            r"queries_per_second is 1e-300; it must lie in \[1e-09",
        ),
        (lambda: rates.known({"queries": math.nan}), "queries is nan"),
    ],
)
def test_bad_numbers_are_refused(make, message):
    with pytest.raises(validation.InputError, match=message):
        make()


# -- From configs and logs ------------------------------------------------------------


def test_the_work_of_a_job_is_what_its_config_says(tmp_path):
    _tiny.write_pairs(tmp_path / "pairs")
    config = _tiny.tiny_config(tmp_path / "pairs")
    config.synthesize.max_documents = 50
    work = estimate_job.work_of(config, estimate_job.Options(), 16)
    # Two generators; retrievers for each, on the original pairs and public ones;
    # evaluated are these, the untrained one and the direct one.
    assert work == Work(
        generators=2,
        steps=3,
        batch=8,
        microbatch=4,
        synthetic_documents=50,
        samples=1,
        retrievers=4,
        retriever_steps=2,
        documents=84,
        queries=12,
        systems=6,
        rerankers=3,  # both generators and the public T5
        reranked=20,
        fitted=0,
        dimension=16,
    )
    options = estimate_job.Options(pairs=1000, epochs=2.5, documents=10**7, queries=100)
    work = estimate_job.work_of(config, options, 16)
    # ⌈1000 · 2.5 / 8⌉ = 313
    assert (work.steps, work.documents, work.queries) == (313, 10**7, 100)


def test_documents_and_reranked_pairs_are_those_of_the_stages(tmp_path, monkeypatch):
    """Counted in what `synthesize` writes and in what `evaluate` scores."""
    _tiny.write_start(tmp_path)
    with open(tmp_path / "pairs" / "qrels" / "train.tsv", "a") as qrels:
        # A document of two queries, one of the test split, and one that is no answer.
        qrels.write("q0\td1\t1\nq0\td80\t1\nq5\td81\t0\n")
    config = _tiny.tiny_config(tmp_path / "pairs")
    config.init = str(tmp_path / "public")
    config.pretrain.steps = 0
    config.epsilons = (8.0,)
    config.synthesize.update(documents="train", training_documents_are_public=True)
    config.synthesize.samples_per_document = 2
    config.evaluate.rerank.depth = 7
    work = estimate_job.work_of(config, estimate_job.Options(), 16)
    start = {"vocabulary": str(tmp_path / "spiece.model")}

    stage = config.synthesize.copy_and_resolve_references()
    stage.update(generator=config.init, corpus=config.data, **start)
    result = synthesize.run(stage, tmp_path / "written")["result"]
    rows = list(read_synthetic(tmp_path / "written" / layout.SET))
    written = len(rows) + result["empty_queries_left_out"]
    assert work.synthetic_documents * work.samples == written == 61 * 2

    scored, scores = [], QueryLikelihood.scores

    def counted(self, pairs):
        for value in scores(self, pairs):
            scored.append(value)
            yield value

    monkeypatch.setattr(QueryLikelihood, "scores", counted)
    stage = config.evaluate.copy_and_resolve_references()
    with stage.unlocked():
        stage.data, stage.systems = config.data, {"bm25": "bm25"}
        stage.rerankers = {"public": config.init, "generator": config.init}
        stage.rerank.update(prompt="", document_length=20, query_length=6)
    evaluate.run(stage, tmp_path / "private" / "evaluated")
    assert work.rerankers * work.queries * work.reranked == len(scored) == 2 * 12 * 7
    config.fit_rerank = True
    fit = {"fit": _tiny.write_public_pairs(tmp_path), "fit_queries": 5}
    stage.rerank.update(baseline="public", **fit)
    config.evaluate.rerank.fit_queries = 5
    work = estimate_job.work_of(config, estimate_job.Options(), 16)
    del scored[:]
    evaluate.run(stage, tmp_path / "private" / "fitted")
    queries = work.rerankers * work.queries + work.fitted
    assert queries * work.reranked == len(scored) == (2 * 12 + 5) * 7

    config.synthesize.max_documents = 9
    work = estimate_job.work_of(config, estimate_job.Options(), 16)
    assert work.synthetic_documents == 9
    # Planned without data: at most a document for each pair.
    config.synthesize.max_documents = 0
    options = estimate_job.Options(pairs=1000, epochs=1, documents=10**7, queries=5)
    config.data = str(tmp_path / "not there")
    assert estimate_job.work_of(config, options, 16).synthetic_documents == 1000
    options = dataclasses.replace(options, documents=300)
    assert estimate_job.work_of(config, options, 16).synthetic_documents == 300
    config.rerank = False
    assert estimate_job.work_of(config, options, 16).rerankers == 0


def test_a_config_of_finetune_is_taken_for_a_job_of_its_own():
    config = finetune.default_config()
    config.epsilon, config.document_length = 3.0, 100
    job = estimate_job.job_config(config)
    assert job.epsilons == (3.0,) and job.synthesize.document_length == 100
    assert estimate_job.job_config(pipeline.default_config()).epsilons == (math.inf, 8)
    with pytest.raises(validation.InputError, match="of no stage.*configs/finetune.py"):
        estimate_job.job_config({"no": "config"})
    job = pipeline.default_config()
    del job.retriever
    with pytest.raises(validation.InputError, match="no setting retriever. Start from"):
        estimate_job.job_config(job)


def test_rates_are_read_off_the_logs_of_a_job(tmp_path):
    logs = tmp_path / "private" / "logs"
    for name, *points in (
        ("generator_eps8", {"examples_per_second": 1.0}, {"examples_per_second": 9.0}),
        ("retriever_original", {"steps_per_second": 3.0, "examples_per_second": 7.0}),
        ("synthetic_eps8", {"queries_per_second": 5.0}, {"rows_per_second": 4.0}),
        ("index", {"documents_per_second": 600.0}, {"rows_per_second": 9.0}),
    ):
        for point in points:
            point_log.append(logs / name / "log.jsonl", point)
    expected = {
        "examples": 9.0,
        "step": 0.0,
        "queries": 5.0,
        "documents": 600.0,
        "retriever_steps": 3.0,
    }
    assert rates.from_logs(tmp_path) == expected
    assert rates.from_logs(tmp_path / "private") == expected
    with pytest.raises(validation.InputError, match="has no log with a rate"):
        rates.from_logs(tmp_path / "elsewhere")


def test_given_rates_are_used_and_said_to_be_given(tmp_path):
    _tiny.write_pairs(tmp_path / "pairs")
    config = _tiny.tiny_config(tmp_path / "pairs")
    options = estimate_job.Options(memory=False, seconds=0.01, rates=_GIVEN)
    devices = Devices(workers=2, price=1.0)
    found = estimate_job.run(config, options, devices)
    assert dataclasses.asdict(found.rates).items() >= _GIVEN.items()
    part = _by_name(found.parts)["synthesize"]
    assert part.seconds == pytest.approx(2 * 84 / (2 * 20.0))
    # Three rerankers of 20 documents for each of 12 queries, by two devices.
    part = _by_name(found.parts)["rerank"]
    start = found.rates.start
    assert part.seconds == pytest.approx(3 * (12 * 20 / (2 * 8.0) + start))
    assert sum("(given)" in line for line in found.assumed) == 5
    assert any("2 workers" in line and "given" in line for line in found.assumed)


# -- Measured -------------------------------------------------------------------------


def test_reranking_is_measured_in_pairs(tmp_path):
    """Against the same scorer timed by hand, within a factor of five."""
    _tiny.write_start(tmp_path)
    tokenizer = Tokenizer(tmp_path / "spiece.model")
    documents = rates.sample(str(tmp_path / "pairs"))
    shape, tokens = T5Config(330, 1, 2, 16, 24, 8, "1.0"), (32, 12)
    found = rates.reranking(shape, tokenizer, documents, tokens, 16, 0.5)
    scorer = QueryLikelihood(T5QueryGenerator(shape), tokenizer, *tokens, batch_size=16)
    pairs = [(document.content, "who sorts a list") for document in documents[:80]]
    list(scorer.scores(pairs[:16]))  # traces
    began = time.perf_counter()
    assert len(list(scorer.scores(pairs))) == 80
    ratio = found["likelihoods"] * (time.perf_counter() - began) / 80
    assert found.keys() == {"likelihoods"} and 1 / 5 < ratio < 5


@pytest.mark.slow
def test_measured_rates_are_near_those_that_a_job_had(job, tmp_path):
    """One of three tries is within a factor of five: so short a job is all noise."""
    config = _tiny.tiny_config(job.directory.parent / "pairs")
    options = estimate_job.Options(seconds=1.0)
    logged = rates.from_logs(job.directory)
    # A job's three steps say nothing, nor do the two of its retrievers.
    stage = json.loads((job.directory / "private/generator_inf/stage.json").read_text())
    longer = finetune.default_config()
    with longer.unlocked():
        longer.update({**stage["config"], "epsilon": math.inf, "steps": 100})
    ratios = []
    for place in (tmp_path / name for name in "abc"):  # other work comes and goes
        longer.private_directory = str(place / "private")
        finetune.run(longer, place / "private" / "generator")
        logged["examples"] = rates.from_logs(place)["examples"]
        found = estimate_job.run(config, options, Devices())
        assert found.memory > 100 << 20
        # A log's rate is of whole steps: with what a step costs whatever its rows.
        rows, rate = longer.batch_size, found.rates
        steps = rows / (rate.step + rows / rate.examples)
        ratios.append([steps / logged["examples"], rate.queries / logged["queries"]])
        if all(1 / 5 < ratio < 5 for ratio in ratios[-1]):
            return
    raise AssertionError(ratios)


@pytest.mark.slow
def test_the_command_prints_parts_and_assumptions(tmp_path):
    _tiny.write_pairs(tmp_path / "pairs")
    command = [sys.executable, "-m", "tfdpsq.run.estimate_job", "--memory=False"]
    given = [f"--{name}_per_second=10" for name in ("examples", "queries", "documents")]
    done = subprocess.run(
        [
            *command,
            "--config=configs/quickstart.py",
            f"--config.data={tmp_path / 'pairs'}",
            *given,
            "--retriever_steps_per_second=10",
            "--price=2",
            f"--json={tmp_path / 'found.json'}",
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "train_retriever" in done.stdout and "Not counted:" in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert [part["name"] for part in found["parts"]][:2] == ["finetune", "synthesize"]
    done = subprocess.run(
        [*command, "--config=configs/evaluate.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    (line,) = (one for one in done.stderr.splitlines() if one.startswith("error: "))
    assert "configs/finetune.py" in line
