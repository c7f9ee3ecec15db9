"""Noisy counts of whose documents are asked about, and queries written by them."""

import collections
import dataclasses
import json
import math
import shutil

import numpy as np
import pytest
import scipy.stats
from helpers import framed, neighbours, tiny

from tfdpsq.data import BeirDirectory, read_synthetic
from tfdpsq.privacy import read_certificate, verify_certificate
from tfdpsq.privacy.proof import budget as budgets
from tfdpsq.privacy.proof.certificate import runs_of
from tfdpsq.run.common.documents import Histogram
from tfdpsq.run.common.kinds import SET
from tfdpsq.run.frame.artefacts import MARK_FILE
from tfdpsq.run.stages import finetune, histogram, synthesize
from tfdpsq.validation import InputError

_CLUSTERS = 40


def _counted(base, out, **changes):
    given = {"pairs": str(base / "pairs"), "n_is_public": True, "clusters": _CLUSTERS}
    framed.run(histogram.STAGE, out, **{**given, **changes})
    return Histogram.load(out)


def _exact(found, data):
    """Counts the queries of the split without noise, from the files."""
    beir = BeirDirectory(data)
    clusters = found.clusters.of([pair.document for pair in beir.pairs("train")])
    return np.bincount(clusters, minlength=_CLUSTERS)


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
    small = {"trained": ("*layer_norm*",)}  # a small graph
    usual = tiny.training(base, steps=2, epsilon=8.0, query_length=6, **small)
    framed.run(finetune.STAGE, out, **{**usual, **changes})
    return read_certificate(out)


def _written(base, out, **changes):
    usual = {
        "generator": str(base / "release" / "generator"),
        "histogram": str(base / "release" / "histogram"),
        "corpus": str(base / "pairs"),
        "samples_per_document": 3,
    }
    framed.run(synthesize.STAGE, out, **{**usual, **changes})
    return list(read_synthetic(out / SET))


def test_noise_of_the_counts_has_the_stated_deviation(base, tmp_path):
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
    neighbours.write(tmp_path, unit)
    options = {"unit": unit, "epsilon": 300.0, "clusters": 8}
    options |= {"n_is_public": False, "n_bound": 61}
    if unit == "user":
        options["rows_per_unit"] = 9
    if unit == "pair":
        options["n_bound"] = 70
    whole = _counted(tmp_path, tmp_path / "release" / "whole", **options)
    neighbours.remove(tmp_path, unit)
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


def test_generator_and_set_state_the_epsilon_of_both(base, tmp_path):
    counted = read_certificate(base / "release" / "histogram")
    certificate = read_certificate(base / "release" / "generator")
    assert certificate["earlier"] == [counted]
    stated = certificate["guarantee"]["epsilon"]
    own = certificate["continuation"]["epsilon_of_this_run"]
    assert own < 0.999 * stated and 7.9 < stated <= 8.0
    own, counts = (runs_of(each)[0] for each in (certificate, counted))
    total = budgets.compose([[own, counts]])
    assert stated == pytest.approx(total.epsilon_rdp, rel=1e-6)
    assert certificate["accounting"]["epsilon_pld"] == pytest.approx(
        total.epsilon_pld, rel=1e-6
    )
    assert verify_certificate(certificate).problems == ()
    out = tmp_path / "release" / "synthetic"
    assert _written(base, out, max_documents=20)
    assert read_certificate(out / SET) == certificate


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


def test_set_does_not_depend_on_the_division_of_the_work(base, tmp_path):
    rows = _written(base, tmp_path / "release" / "whole")
    assert len({row.query_id for row in rows}) == len(rows) > 100
    assert len({(row.document_id, row.sample) for row in rows}) == len(rows)
    numbers = collections.Counter(row.document_id for row in rows)
    assert max(numbers.values()) > 3  # more than `samples_per_document`
    parts = _written(base, tmp_path / "release" / "parts", shard_documents=30)
    assert parts == rows


def test_interrupted_release_is_not_paid_again(base, tmp_path, monkeypatch):
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
    with pytest.raises(InputError, match="has paid 1 steps with other settings"):
        _counted(base, out, epsilon=0.3)
    found = _counted(base, out)
    assert [found.counts] == released
    ledger = tmp_path / "private" / "runs" / "histogram" / "ledger.jsonl"
    assert ledger.is_file() and not (tmp_path / "release" / "private").exists()
    certificate = read_certificate(out)
    assert certificate["accounting"]["steps_executed"] == 1


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"n_is_public": False}, "n_is_public is False and n_bound 0"),
        ({"epsilon": "inf"}, "epsilon is 'inf'"),
        ({"clusters": 85}, "clusters is 85, but there are 84 documents"),
    ],
)
def test_bad_counts_are_refused_before_payment(base, tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        _counted(base, tmp_path / "release" / "histogram", **changes)
    assert not list(tmp_path.rglob("ledger.jsonl"))


def test_what_no_epsilon_would_cover_is_refused(base, tmp_path):
    counted = str(base / "release" / "histogram")
    out = tmp_path / "release" / "generator"
    tiny.write_private_generator(out, base / "public", 8.0)
    with pytest.raises(InputError, match="would add up|have to be added"):
        _written(base, tmp_path / "release" / "set", generator=str(out))
    # Public weights have no part in private queries, so the counts' epsilon is all.
    options = {"generator": str(base / "public"), "max_documents": 9}
    _written(base, tmp_path / "release" / "set", **options)
    made = read_certificate(tmp_path / "release" / "set" / SET)
    assert made == read_certificate(counted) and made["guarantee"]["epsilon"] <= 0.4
    generator = str(base / "release" / "generator")
    for message, changes in {
        "earlier releases leave less than": {"epsilon": 1.0},
        "counts within a finite epsilon": {"epsilon": "inf"},
        "Give the output of a stage": {"histogram": str(base / "public")},
        "was itself trained on private": {"init": generator},
    }.items():
        place = tmp_path / ("private" if "finite ep" in message else "release") / "no"
        with pytest.raises(InputError, match=message):
            _trained(base, place, **{"histogram": counted, **changes})
    assert not list(tmp_path.rglob("ledger.jsonl"))


def test_counts_of_canaries_stay_private_with_all_that_follows(base, tmp_path):
    shutil.copytree(base / "pairs", tmp_path / "pairs")
    (tmp_path / "pairs" / MARK_FILE).write_text('{"guarantee": "private"}')
    out = tmp_path / "private" / "histogram"
    _counted(tmp_path, out)
    assert json.loads((out / "stage.json").read_text())["guarantee"] == "private"
    generator = str(base / "public")
    place, options = tmp_path / "release" / "set", {"histogram": str(out)}
    with pytest.raises(InputError, match="is private: no epsilon covers it"):
        _written(base, place, generator=generator, **options)


def test_histogram_of_other_documents_or_without_counts_is_refused(base, tmp_path):
    tiny.write_pairs(tmp_path / "other", seed=4)
    out = tmp_path / "release" / "set"
    with pytest.raises(InputError, match="made of another corpus"):
        _written(base, out, corpus=str(tmp_path / "other"))
    noise = Histogram.load(base / "release" / "histogram")
    noise = dataclasses.replace(noise, counts=(-1.0,) * _CLUSTERS)
    with pytest.raises(InputError, match="no count of the histogram is above 0"):
        noise.rates(10, 0)
    assert not out.exists()
