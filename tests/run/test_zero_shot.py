"""Stage `evaluate` on public test sets: their rules, their averages, going on."""

import itertools
import json
import shutil

import numpy as np
import pytest
from helpers import framed, tiny_sets

from tfdpsq import evaluation
from tfdpsq.data import BeirDirectory, train_vocabulary
from tfdpsq.privacy import read_certificate
from tfdpsq.run.common.benchmark_sets import FORUMS, METRICS
from tfdpsq.run.stages.evaluate import METRICS_FILE, STAGE
from tfdpsq.validation import InputError


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Sets under BEIR's names, and an untrained retriever."""
    base = tmp_path_factory.mktemp("zero_shot")
    tiny_sets.write_all(base / "beir")
    texts = tiny_sets.made_up(np.random.default_rng(9), 200)
    train_vocabulary(texts, 300, base / "spiece.model")
    framed.write_retriever(base / "tower", base / "spiece.model")
    return base


def _run(base, out, *sets, **changes):
    given = {name: str(base / "beir" / name) for name in sets}
    usual = {"sets": given, "resamples": 300, "k": 20, **changes}
    framed.run(STAGE, out, **usual)
    return json.loads((out / METRICS_FILE).read_text())


@pytest.fixture(scope="module")
def made(base):
    """A finished run over four sets, and its numbers."""
    sets = ("scifact", "fiqa", "arguana", "cqadupstack")
    systems = {"bm25": "bm25", "tower": str(base / "tower")}
    given = {"systems": systems, "baseline": "bm25"}
    return base / "made", _run(base, base / "made", *sets, **given)


def _by_files(folder, system, ignore=False):
    """What `evaluate_run` says of TREC files, read by themselves."""
    return evaluation.evaluate_run(
        evaluation.read_trec_qrels(folder / "qrels.trec"),
        evaluation.read_trec_run(folder / f"{system}.trec"),
        METRICS,
        ignore,
    )


def test_numbers_are_those_of_the_trec_files(made, base):
    """ArguAna's queries are documents, which do not find themselves."""
    directory, found = made
    assert sorted(found["sets"]) == ["arguana", "cqadupstack", "fiqa", "scifact"]
    for name, ignore in (("scifact", False), ("fiqa", False), ("arguana", True)):
        folder = directory / "runs" / name
        beir = BeirDirectory(base / "beir" / name)
        assert evaluation.read_trec_qrels(folder / "qrels.trec") == beir.qrels("test")
        for system in ("bm25", "tower"):
            row = found["sets"][name]["systems"][system]
            expected = _by_files(folder, system, ignore)
            for metric in METRICS:
                assert row[metric] == pytest.approx(expected.means[metric], abs=1e-12)
                low, high = row[f"{metric}_ci"]
                assert 0 <= low <= row[metric] <= high <= 1
            assert row["missing_queries"] == 0
    for system, metric in itertools.product(("bm25", "tower"), METRICS):
        values = [s["systems"][system][metric] for s in found["sets"].values()]
        mean = found["mean"]["systems"][system][metric]
        assert mean == pytest.approx(sum(values) / 4, abs=1e-12)
    run = evaluation.read_trec_run(directory / "runs/fiqa/tower.trec")
    assert len(run) == 100 and {len(hits) for hits in run.values()} == {20}
    beir = BeirDirectory(base / "beir/scifact")
    bm25 = evaluation.BM25({d.id: d.content for d in beir.documents()})
    run = evaluation.read_trec_run(directory / "runs/scifact/bm25.trec")
    assert run == bm25.search(beir.queries(), 20)
    assert found["settings"]["bm25"] == bm25.settings


def test_flaws_of_published_sets_are_accepted(made):
    directory, _ = made
    # q7's answer is not there to be found: nobody can score 1.
    run = _by_files(directory / "runs/fiqa", "bm25")
    assert run.per_query["q7"]["map"] == 0 and run.per_query["q8"]["map"] == 1


def test_cqadupstack_is_averaged_over_its_forums(made):
    directory, found = made
    entry = found["sets"]["cqadupstack"]
    assert set(entry["parts"]) == {f"cqadupstack/{forum}" for forum in FORUMS}
    values = {}
    for system in ("bm25", "tower"):
        results = [
            _by_files(directory / "runs/cqadupstack" / forum, system)
            for forum in FORUMS
        ]
        values[system] = [result.values("ndcg@10") for result in results]
        macro = np.mean([v.mean() for v in values[system]])
        assert entry["systems"][system]["ndcg@10"] == pytest.approx(macro, abs=1e-12)
        for forum, result in zip(FORUMS, results):
            assert entry["parts"][f"cqadupstack/{forum}"][system] == result.means
    # An average over all queries would be another number.
    assert abs(np.concatenate(values["tower"]).mean() - macro) > 1e-3
    assert entry["queries"] == sum(map(len, values["bm25"]))
    compared = entry["systems"]["tower"]["difference_to_baseline"]
    expected = np.mean([v.mean() for v in values["tower"]]) - np.mean(
        [v.mean() for v in values["bm25"]]
    )
    assert compared["difference"] == pytest.approx(expected, abs=1e-12)


def test_numbers_of_two_private_runs_have_no_certificate(base, tmp_path):
    """The first one's would claim the budget of one run for both."""
    paths = {}
    for name in ("one", "two"):
        shutil.copytree(base / "tower", tmp_path / name)
        framed.certify(tmp_path / name, 1.0, name)
        paths[name] = str(tmp_path / name)
    release = tmp_path / "release" / "out"
    with pytest.raises(InputError, match="under release/, but what evaluate makes"):
        _run(base, release, "scifact", systems=paths)
    one = {"one": paths["one"], "bm25": "bm25"}
    _run(base, release, "scifact", systems=one)
    assert read_certificate(release) == read_certificate(paths["one"])
    assert read_certificate(release)["guarantee"]["epsilon"] <= 1.0


def test_a_set_that_is_stated_to_be_private_is_private_here(base, tmp_path):
    """Its queries are reads, its fingerprint is keyed; public sets are neither."""
    shutil.copytree(base / "beir" / "scifact", tmp_path / "mine")
    (tmp_path / "mine" / "private.json").write_text('{"guarantee": "private"}')
    mine = {"sets": {"mine": str(tmp_path / "mine")}}
    with pytest.raises(InputError, match="not under private/"):
        _run(base, tmp_path / "out", **mine)
    out = tmp_path / "private" / "out"
    with pytest.raises(InputError, match="strict mode refuses"):
        _run(base, out, **mine, strict=True)
    _run(base, out, **mine)
    reads = framed.reads(tmp_path / "private")
    assert reads == ["the queries and judgements of mine"]
    stage = json.loads((out / "stage.json").read_text())
    assert stage["depends"]["inputs"]["sets.mine"].startswith("keyed:")
    _run(base, tmp_path / "public" / "out", "scifact", strict=True)
    assert not framed.reads(tmp_path / "public" / "private")
