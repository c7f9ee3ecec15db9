"""Noisy counts of whose documents are asked about, and queries written by them."""

import collections
import dataclasses
import json
import math
import shutil

import numpy as np
import pytest
import scipy.stats
from helpers import tiny

from tfdpsq.data import BeirDirectory, read_synthetic
from tfdpsq.privacy import read_certificate, verify_certificate
from tfdpsq.privacy.proof import budget as budgets
from tfdpsq.privacy.proof.certified import plan_of
from tfdpsq.run import (
    budget,
    choose,
    finetune,
    histogram,
    mine,
    pipeline,
    synthesize,
    verify,
)
from tfdpsq.run.core import layout, pipeline_checks, pipeline_data, spending
from tfdpsq.run.devices import strategy
from tfdpsq.run.passes import document_rates, passes
from tfdpsq.run.passes.document_rates import Histogram
from tfdpsq.validation import DataError, InputError

_CLUSTERS = 40


def _counted(base, out, limit=0.0, **changes):
    config = histogram.default_config()
    given = {"pairs": str(base / "pairs"), "n_is_public": True, "clusters": _CLUSTERS}
    config.update({**given, **changes})
    with spending.limited(limit, (), out):
        histogram.run(config, out)
    return Histogram.load(out)


def _exact(found, data):
    """Counts the queries of the split without noise, from the files."""
    beir = BeirDirectory(data)
    clusters = found.clusters.of([pair.document for pair in beir.pairs("train")])
    return np.bincount(clusters, minlength=found.clusters.count)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Pairs, a public T5, a histogram of them and a generator that counts it."""
    base = tmp_path_factory.mktemp("histogram")
    tiny.write_start(base)
    _counted(base, base / "release" / "histogram")
    counted = str(base / "release" / "histogram")
    _trained(base, base / "release" / "generator", histogram=counted)
    return base


def _trained(base, out, **changes):
    config = tiny.config(finetune, changes, **tiny.training(base, steps=2, epsilon=8.0))
    finetune.run(config, out)
    return read_certificate(out)


def _written(base, out, **changes):
    config = tiny.config(
        synthesize,
        changes,
        generator=str(base / "release" / "generator"),
        histogram=str(base / "release" / "histogram"),
        corpus=str(base / "pairs"),
        document_length=16,
        query_length=6,
        samples_per_document=3,
    )
    synthesize.run(config, out)
    return list(read_synthetic(out / layout.SET))


def test_counts_are_those_of_the_log_with_the_stated_noise(base, tmp_path):
    """chi^2 of 40 cells: noise of 2/3 or 3/2 of the stated deviation is rejected."""
    out = base / "release" / "histogram"
    found, certificate = Histogram.load(out), read_certificate(out)
    exact = _exact(found, base / "pairs")
    assert exact.sum() == 60 and sum(found.documents) == 84
    noise = (np.array(found.counts) - exact) / certificate["mechanism"]["noise_stddev"]
    low, high = scipy.stats.chi2.interval(1 - 1e-6, _CLUSTERS)
    assert low < (noise**2).sum() < high
    assert len(set(noise.tolist())) == _CLUSTERS  # independent of each other
    again = _counted(base, tmp_path / "release" / "again")
    assert again.documents == found.documents and again.counts != found.counts
    # One Gaussian release with sensitivity 1: another library's formula.
    sigma = certificate["mechanism"]["noise_multiplier"]
    assert certificate["mechanism"]["sensitivity"] == 1.0
    stated = certificate["guarantee"]
    normal, epsilon = scipy.stats.norm.cdf, stated["epsilon"]
    delta = normal(0.5 / sigma - epsilon * sigma) - math.exp(epsilon) * normal(
        -0.5 / sigma - epsilon * sigma
    )
    assert delta == pytest.approx(stated["delta"], rel=1e-2) and epsilon <= 0.4
    assert verify_certificate(certificate).problems == ()


@pytest.mark.parametrize("unit", ["query", "pair", "user"])
def test_one_unit_moves_the_counts_by_at_most_1(unit, tmp_path):
    """Epsilon 300 leaves noise of a twentieth; a user of 9 queries still moves 1.

    Without the clipping of a user it would be at least 9 / sqrt(8).
    """
    tiny.write_start(tmp_path)
    path = tmp_path / "pairs" / "queries.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        number = int(row["_id"][1:])
        row["user_id"] = "busy" if number < 9 else f"u{number}"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"unit": unit, "epsilon": 300.0, "clusters": 8}
    options |= {"n_is_public": False, "n_bound": 61}
    if unit == "user":
        options["rows_per_unit"] = 9
    if unit == "pair":
        tiny.add_answers(tmp_path)
        options["n_bound"] = 70
    whole = _counted(tmp_path, tmp_path / "release" / "whole", **options)
    qrels = tmp_path / "pairs" / "qrels" / "train.tsv"
    lines = qrels.read_text().splitlines(keepends=True)
    gone = [f"q{n}\t" for n in (range(9) if unit == "user" else [5])]
    kept = [line for line in lines if not line.startswith(tuple(gone))]
    if unit == "pair":  # of a query's two pairs, one
        kept = [line for line in lines if line != "q5\td6\t1\n"]
    assert len(kept) < len(lines)
    qrels.write_text("".join(kept))
    less = _counted(tmp_path, tmp_path / "release" / "less", **options)
    deviation = read_certificate(tmp_path / "release" / "less")["mechanism"][
        "noise_stddev"
    ]
    assert deviation < 0.05
    moved = np.linalg.norm(np.array(whole.counts) - less.counts)
    slack = 2 * deviation * math.sqrt(2 * 8)
    assert moved == pytest.approx(1.0, abs=slack) and slack < 0.4
    # What they state of the log is what was declared.
    stated = [
        read_certificate(tmp_path / "release" / name) for name in ("whole", "less")
    ]
    for name in ("spec", "sampler", "mechanism", "accounting", "training"):
        assert stated[0][name] == stated[1][name], name


def test_generator_and_set_state_the_epsilon_of_both(base, tmp_path, capsys):
    counted = read_certificate(base / "release" / "histogram")
    certificate = read_certificate(base / "release" / "generator")
    assert certificate.get("continuation", {}).get("parent") == counted
    stated = certificate["guarantee"]["epsilon"]
    own = certificate["continuation"]["epsilon_of_this_run"]
    assert own < stated <= 8.0 and own < 0.999 * stated and stated > 7.9
    plans = {"counted": counted, "trained": certificate}
    total = budgets.compose(
        {
            name: budgets.planned_release({name: plan_of(each)[0]}, "keyed:a")
            for name, each in plans.items()
        },
        one_log=True,
    )
    assert stated == pytest.approx(total.epsilon_rdp, rel=1e-6)
    assert certificate["accounting"]["epsilon_pld"] == pytest.approx(
        total.epsilon_pld, rel=1e-6
    )
    assert verify_certificate(certificate).problems == ()
    words = certificate["continuation"]["in_words"]
    assert words.startswith("This run came after the release whose certificate is")
    rows = _written(base, tmp_path / "release" / "synthetic")
    assert rows and read_certificate(tmp_path / "release" / "synthetic" / "set") == (
        certificate
    )
    for command, words in ((verify, "holds"), (budget, f"{stated:.4g}")):
        place = base / "release" / ("generator" if command is verify else "")
        with pytest.raises(SystemExit) as caught:
            command.main([command.__name__, str(place)])
        said = capsys.readouterr()
        assert caught.value.code == 0 and words in said.out, said


def test_documents_like_those_asked_about_get_the_queries(base, tmp_path):
    """Nine of ten counts are 0: nearly all queries are of the others' documents."""
    found = Histogram.load(base / "release" / "histogram")
    hot = [c for c in range(_CLUSTERS) if found.documents[c]][:4]
    counts = [90.0 if c in hot else -3.0 for c in range(_CLUSTERS)]
    rates = Histogram(found.clusters, found.documents, tuple(counts), "").rates(168, 0)
    documents = list(BeirDirectory(base / "pairs").documents())
    numbers = collections.Counter()
    for document, number in rates.of(documents):
        (cluster,) = found.clusters.of([document.content])
        assert (number > 0) == (cluster in hot) or rates.mean[cluster] < 1
        assert abs(number - rates.mean[cluster]) < 1
        numbers[int(cluster)] += number
    assert set(numbers.elements()) <= set(hot)
    for cluster in hot:  # a quarter of 168 each, but for rounding of each document
        assert abs(numbers[cluster] - 42) <= found.documents[cluster]
    one = dict((d.id, n) for d, n in rates.of(documents[5:6]))
    assert one.items() <= {d.id: n for d, n in rates.of(documents)}.items()
    rounded = [
        sum(n for _, n in dataclasses.replace(rates, seed=seed).of(documents))
        for seed in range(40)
    ]
    assert np.mean(rounded) == pytest.approx(168, abs=3)


def test_a_set_does_not_depend_on_the_division_of_the_work(base, tmp_path):
    rows = _written(base, tmp_path / "release" / "whole")
    assert len({row.query_id for row in rows}) == len(rows) > 100
    assert len({(row.document_id, row.sample) for row in rows}) == len(rows)
    numbers = collections.Counter(row.document_id for row in rows)
    assert max(numbers.values()) > 3  # more than `samples_per_document`
    parts = _written(base, tmp_path / "release" / "parts", shard_documents=7)
    assert parts == rows
    config = synthesize.default_config()
    config.update(
        generator=str(base / "release" / "generator"),
        histogram=str(base / "release" / "histogram"),
        corpus=str(base / "pairs"),
        document_length=16,
        query_length=6,
        samples_per_document=3,
        shard_documents=30,
    )
    out = tmp_path / "release" / "several"
    for index in (2, 0, 1):
        synthesize.run(config, out, passes.Launch(3, index))
    assert list(read_synthetic(out / layout.SET)) == rows
    fewer = _written(
        base, tmp_path / "release" / "fewer", max_documents=20, samples_per_document=1
    )
    assert 8 <= len(fewer) <= 32


def test_a_step_that_was_paid_is_not_paid_again(base, tmp_path, monkeypatch):
    """Killed after the release of the counts, before they are written."""
    out = tmp_path / "release" / "histogram"
    released = []

    def kill(self, directory):
        released.append(self.counts)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Histogram, "save", kill)
        with pytest.raises(KeyboardInterrupt):
            _counted(base, out)
    assert not out.exists()
    with pytest.raises(InputError, match="begun with another config"):
        _counted(base, out, epsilon=0.3)
    found = _counted(base, out)
    assert [found.counts] == released
    ledger = tmp_path / "private" / "runs" / "histogram" / "ledger.jsonl"
    assert ledger.is_file() and not (tmp_path / "release" / "private").exists()
    certificate = read_certificate(out)
    assert certificate["accounting"]["steps_executed"] == 1


def test_reads_of_outputs_deeper_in_the_private_directory_are_stated(base, tmp_path):
    """They have lists of their own, and were reads of these pairs all the same."""
    config = tiny.config(mine, pairs=str(base / "pairs"), k=5)
    mine.run(config, tmp_path / "private" / "tests" / "mined")
    out = tmp_path / "release" / "histogram"
    _counted(base, out, strict=True)
    (read,) = read_certificate(out)["private_reads"]
    assert read["what"].startswith("BM25's best documents for each query")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"n_is_public": False}, "Set n_is_public = True"),
        ({"epsilon": math.inf}, "epsilon is inf"),
        ({"epsilon": 0.0}, "epsilon is 0"),
        ({"clusters": 85}, "clusters is 85, but there are 84 documents"),
        ({"user_field": "who"}, "user_field is 'who', which does nothing here"),
        ({"split": "trian"}, "trian"),
    ],
)
def test_bad_counts_are_refused_before_payment(base, tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        _counted(base, tmp_path / "release" / "histogram", **changes)
    assert not list(tmp_path.rglob("ledger.jsonl"))


def test_counts_stay_within_a_limit_and_out_of_public_sets(base, tmp_path):
    out = tmp_path / "release" / "histogram"
    with pytest.raises(InputError, match="the budget is epsilon 0.1"):
        _counted(base, out, limit=0.1)
    synthetic = tmp_path / "synthetic"
    _written(base, synthetic, max_documents=4)
    with pytest.raises(InputError, match="a synthetic or public set: counts of it"):
        _counted(base, out, pairs=str(synthetic / layout.SET))
    assert not list(tmp_path.rglob("ledger.jsonl"))


def test_what_no_epsilon_would_cover_is_refused(base, tmp_path):
    counted = str(base / "release" / "histogram")
    out = tmp_path / "release" / "generator"
    other = _trained(base, out)
    assert "continuation" not in other
    with pytest.raises(InputError, match="whose cost the certificate of .* does not"):
        _written(base, tmp_path / "release" / "set", generator=str(out))
    # Public weights have no part in private queries, so the counts' epsilon is all.
    _written(base, tmp_path / "release" / "set", generator=str(base / "public"))
    made = read_certificate(tmp_path / "release" / "set" / layout.SET)
    assert made == read_certificate(counted) and made["guarantee"]["epsilon"] <= 0.4
    refused = {
        "would be left in addition to the histogram": {"epsilon": 1.0},
        "counts within a finite epsilon": {"epsilon": math.inf},
        "has no certificate of a finite": {"histogram": str(base / "public")},
        "a run from public weights": {
            "continues": "composed",
            "init": str(base / "release" / "generator"),
        },
        "which was itself trained on private": {
            "init": str(base / "release" / "generator")
        },
    }
    for message, changes in refused.items():
        place = tmp_path / ("private" if "finite ep" in message else "release") / "no"
        with pytest.raises(InputError, match=message):
            _trained(base, place, **{"histogram": counted, **changes})
    config = choose.default_config()
    config.finetune.update(tiny.training(base, histogram=counted, steps=2))
    config.axes = (("learning_rate", (1e-3, 2e-3)),)
    with pytest.raises(InputError, match="no epsilon of runs to choose among counts"):
        choose.run(config, tmp_path / "release" / "chosen")
    paid = [path.parent.name for path in tmp_path.rglob("ledger.jsonl")]
    assert paid == ["generator"]


def test_counts_of_canaries_stay_private_with_all_that_follows(base, tmp_path):
    shutil.copytree(base / "pairs", tmp_path / "pairs")
    (tmp_path / "canaries.jsonl").write_text("")  # as the stage `canaries` writes it
    out = tmp_path / "private" / "histogram"
    _counted(tmp_path, out)
    assert json.loads((out / "stage.json").read_text())["guarantee"] == "private"
    generator = str(base / "public")
    with pytest.raises(InputError, match="which must stay private"):
        _written(
            base, tmp_path / "release" / "set", histogram=str(out), generator=generator
        )
    _written(
        base, tmp_path / "private" / "set", histogram=str(out), generator=generator
    )


def test_a_histogram_of_other_documents_or_damaged_is_refused(base, tmp_path):
    tiny.write_pairs(tmp_path / "other", seed=4)
    out = tmp_path / "release" / "set"
    with pytest.raises(InputError, match="which was made of another corpus than"):
        _written(base, out, corpus=str(tmp_path / "other"))
    copy = tmp_path / "copy"
    shutil.copytree(base / "release" / "histogram", copy)
    path = copy / document_rates.HISTOGRAM_FILE
    found = json.loads(path.read_text())
    for changed in (
        {"counts": found["counts"][1:]},
        {"counts": [True, *found["counts"][1:]]},
        {"documents": "many"},
        {"corpus": 3},
    ):
        path.write_text(json.dumps({**found, **changed}))
        with pytest.raises(DataError, match="it is damaged"):
            _written(base, out, histogram=str(copy))
    path.write_text(json.dumps({**found, "counts": [1e6] * _CLUSTERS}))
    with pytest.raises(DataError, match="not what its certificate was made for"):
        _written(base, out, histogram=str(copy))
    noise = Histogram.load(base / "release" / "histogram")
    noise = dataclasses.replace(noise, counts=(-1.0,) * _CLUSTERS)
    with pytest.raises(InputError, match="no count of the histogram is above 0"):
        noise.rates(10, 0)
    path.unlink()
    with pytest.raises(InputError, match="holds no histogram.json. Give the directory"):
        _written(base, out, histogram=str(copy))
    assert not out.exists()


def test_a_job_plans_its_histogram_within_each_epsilon(base):
    """Before its first stage: what would cost too much is refused there."""
    config = tiny.tiny_config(base / "pairs")
    config.histogram_epsilon = 0.4
    pipeline.require_acting(config)
    plans = pipeline_data.check_data(config, strategy.DEFAULT)
    private = {name for name, plan in plans.items() if plan.spec.private}
    assert private == {"histogram_eps0.4", "generator_eps8", "retriever_direct_eps8"}
    for histogram_epsilon, epsilon in ((0.4, 1.0), (20.0, 8.0)):
        config.histogram_epsilon, config.epsilons = histogram_epsilon, (epsilon,)
        with pytest.raises(
            InputError, match="less than 95% would be left in addition to the"
        ):
            pipeline_data.check_data(config, strategy.DEFAULT)
    config.epsilons, config.histogram_epsilon = (math.inf,), 0.4
    with pytest.raises(InputError, match="no generator of epsilons .* would count it"):
        pipeline_checks.check_settings(config)
    config.synthesize.documents = "train"
    with pytest.raises(InputError, match="histogram_epsilon is 0.4, which does nothin"):
        pipeline_checks.check_settings(config)
    config.histogram_epsilon = 0.0
    config.histogram.clusters = 9
    with pytest.raises(InputError, match="histogram.clusters is 9, which does nothing"):
        pipeline.require_acting(config)
