"""Many test sets in one run: their rules, their averages, going on, and refusals."""

import itertools
import json
import shutil

import numpy as np
import pytest
from helpers import plans, tiny
from helpers import tiny_sets as _tiny_sets

from tfdpsq import evaluation
from tfdpsq.data import BeirDirectory, train_vocabulary
from tfdpsq.privacy import read_certificate
from tfdpsq.run import zero_shot
from tfdpsq.run.core import layout
from tfdpsq.run.search import benchmark_sets
from tfdpsq.validation import DataError, InputError

# Of the twelve, those that are there.
FORUMS = ("android", "english", "gaming")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Sets under BEIR's names, and an untrained retriever."""
    base = tmp_path_factory.mktemp("zero_shot")
    _tiny_sets.write_all(base / "beir")
    for forum in FORUMS:
        shutil.copytree(base / "beir" / "cqadupstack" / forum, base / "forums" / forum)
    texts = _tiny_sets.made_up(np.random.default_rng(9), 200)
    train_vocabulary(texts, 300, base / "spiece.model")
    pairs = str(base / "beir" / "scifact")
    tiny.write_retriever(base / "tower", base, pairs=pairs, split="test")
    return base


def _dense(base, *sets, **changes):
    """A config of BM25 and the untrained retriever."""
    changes = {"systems": {"bm25": "bm25", "tower": str(base / "tower")}, **changes}
    return _tiny_sets.config_of(base, *sets, **changes)


@pytest.fixture(scope="module")
def made(base):
    """A finished run over four sets, and what it returned."""
    few = {"cqadupstack": str(base / "forums")}
    config = _dense(
        base, "scifact", "fiqa", "arguana", "cqadupstack", paths=few, skip_missing=True
    )
    return base / "made", zero_shot.run(config, base / "made")


def _by_files(folder, system, ignore=False):
    """What `evaluate_run` says of TREC files, read by themselves."""
    return evaluation.evaluate_run(
        evaluation.read_trec_qrels(folder / "qrels.trec"),
        evaluation.read_trec_run(folder / f"{system}.trec"),
        layout.METRICS,
        ignore,
    )


def test_numbers_are_those_of_the_trec_files(made, base):
    directory, found = made
    assert json.loads((directory / "metrics.json").read_text()) == found
    assert list(found["sets"]) == ["scifact", "fiqa", "arguana", "cqadupstack"]
    for name, ignore in (("scifact", False), ("fiqa", False), ("arguana", True)):
        folder = directory / "runs" / name
        beir = BeirDirectory(base / "beir" / name)
        assert evaluation.read_trec_qrels(folder / "qrels.trec") == beir.qrels("test")
        for system in ("bm25", "tower"):
            row = found["sets"][name]["systems"][system]
            expected = _by_files(folder, system, ignore)
            for metric in layout.METRICS:
                assert row[metric] == pytest.approx(expected.means[metric], abs=1e-12)
                low, high = row[f"{metric}_ci"]
                assert 0 <= low <= row[metric] <= high <= 1
            assert row["missing_queries"] == row["queries_without_relevant"] == 0
    for system, metric in itertools.product(("bm25", "tower"), layout.METRICS):
        values = [s["systems"][system][metric] for s in found["sets"].values()]
        mean = found["mean"]["systems"][system][metric]
        assert mean == pytest.approx(sum(values) / 4, abs=1e-12)
    # The retriever was not trained, but it has embedded the empty document as well.
    run = evaluation.read_trec_run(directory / "runs/fiqa/tower.trec")
    assert len(run) == 100 and {len(hits) for hits in run.values()} == {20}
    assert "empty" in {document for hits in run.values() for document in hits}
    bm25 = evaluation.BM25(
        {d.id: d.content for d in BeirDirectory(base / "beir/scifact").documents()}
    )
    queries = BeirDirectory(base / "beir/scifact").queries()
    run = evaluation.read_trec_run(directory / "runs/scifact/bm25.trec")
    assert run == bm25.search(queries, 20)
    assert found["systems"]["bm25"]["settings"] == bm25.settings


def test_flaws_of_published_sets_are_counted_and_others_refused(made, base, tmp_path):
    directory, found = made
    entry = found["sets"]["fiqa"]
    assert (entry["empty_documents"], entry["unknown_judgements"]) == (1, 1)
    assert entry["documents"] == 101
    # q7's answer is not there to be found: nobody can score 1.
    run = _by_files(directory / "runs/fiqa", "bm25")
    assert run.per_query["q7"]["map"] == 0 and run.per_query["q8"]["map"] == 1
    config = _tiny_sets.config_of(base, "fiqa")
    config.as_published = ()
    with pytest.raises(DataError, match="corpus.jsonl:101: document 'empty'"):
        zero_shot.run(config, tmp_path / "strict")


def test_queries_that_are_documents_do_not_find_themselves(made, base, tmp_path):
    directory, found = made
    folder = directory / "runs" / "arguana"
    run = evaluation.read_trec_run(folder / "bm25.trec")
    # The text itself is the best match, but takes neither a rank nor a place; and
    # others who read the files measure what we do.
    assert not any(query in hits for query, hits in run.items())
    assert max(len(hits) for hits in run.values()) == 20
    ruled = found["sets"]["arguana"]["systems"]["bm25"]["mrr@10"]
    assert ruled == _by_files(folder, "bm25").means["mrr@10"]
    rule = {"arguana": False}
    kept = _tiny_sets.config_of(base, "arguana", ignore_identical_ids=rule)
    other = zero_shot.run(kept, tmp_path / "kept")["sets"]["arguana"]
    assert other["systems"]["bm25"]["mrr@10"] < ruled
    run = evaluation.read_trec_run(tmp_path / "kept" / "runs/arguana/bm25.trec")
    assert all(max(hits, key=hits.get) == query for query, hits in run.items())


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
        row = entry["systems"][system]
        macro = np.mean([v.mean() for v in values[system]])
        assert row["ndcg@10"] == pytest.approx(macro, abs=1e-12)
        for forum, result in zip(FORUMS, results):
            part = entry["parts"][f"cqadupstack/{forum}"]
            assert part["systems"][system] == result.means
            assert part["queries"] == len(result.per_query)
    # An average over all queries would be another number.
    assert abs(np.concatenate(values["tower"]).mean() - macro) > 1e-3
    assert entry["queries"] == sum(map(len, values["bm25"]))
    (compared,) = entry["comparisons"]
    assert (compared["first"], compared["second"]) == ("bm25", "tower")
    _check_macro_test(compared, values["bm25"], values["tower"])


def _check_macro_test(compared, first, second):
    """The mean of forums' means under all or many signs, one for each query."""
    weighted = np.concatenate(
        [(a - b) / len(a) / len(first) for a, b in zip(first, second)]
    )
    assert compared["difference"] == pytest.approx(weighted.sum(), abs=1e-12)
    draw = np.random.default_rng(0)
    signs = draw.choice([-1, 1], size=(20_000, len(weighted)))
    far = np.abs(signs @ weighted) >= abs(weighted.sum()) - 1e-12
    # 300 resamples or all signs: the deviation is at most sqrt(p (1 - p) / 300).
    slack = 4 * np.sqrt(max(far.mean(), 0.01) / 300)
    assert compared["p_value"] == pytest.approx(far.mean(), abs=slack)
    assert compared["adjusted_p_value"] == compared["p_value"]


def test_missing_sets_are_listed_or_left_out_and_named(made, base, tmp_path):
    _, found = made
    absent = set(benchmark_sets.FORUMS) - set(FORUMS)
    assert set(found["skipped"]) == {f"cqadupstack/{forum}" for forum in absent}
    config = _tiny_sets.config_of(base, "scifact", "quora", "hotpotqa")
    with pytest.raises(InputError, match="2 of 3 sets .*quora .*hotpotqa"):
        zero_shot.run(config, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_interrupted_run_goes_on_and_a_finished_one_is_left(base, monkeypatch):
    config = _tiny_sets.config_of(base, "scifact", "nfcorpus", "arguana")
    whole = zero_shot.run(config, base / "whole")
    with monkeypatch.context() as patch:
        first = _tiny_sets.searched(patch, fails_at=2)
        with pytest.raises(KeyboardInterrupt):
            zero_shot.run(config, base / "halved")
        assert first == ["scifact", "nfcorpus"]
        assert not (base / "halved" / "metrics.json").exists()
    with monkeypatch.context() as patch:
        then = _tiny_sets.searched(patch)
        assert zero_shot.run(config, base / "halved") == whole
        assert then == ["nfcorpus", "arguana"]
        for path in (base / "whole").rglob("*.*"):
            if path.name != "stage.json":
                relative = path.relative_to(base / "whole")
                assert (base / "halved" / relative).read_bytes() == path.read_bytes()
        # Another set, another metric: only what is new is searched.
        config.sets = ("nfcorpus", "scifact", "fiqa")
        config.metrics = ("ndcg@10", "recall@20")
        more = zero_shot.run(config, base / "halved")
        assert then == ["nfcorpus", "arguana", "fiqa"]
    assert list(more["sets"]) == ["nfcorpus", "scifact", "fiqa"]
    assert 0 < more["mean"]["systems"]["bm25"]["recall@20"] <= 1
    config.systems = {"again": "bm25"}
    with pytest.raises(InputError, match=r"is finished.*config\.systems"):
        zero_shot.run(config, base / "halved")


def test_numbers_of_two_private_runs_have_no_certificate(base, tmp_path):
    """The first one's would claim the budget of one run for both."""
    plan = plans.plan(epsilon=1.0, num_units=200, batch_size=20, steps=4)
    paths = {}
    for name in ("one", "two"):
        certificate = plans.certificate(
            plan, fingerprints={"pairs": "keyed:1"}, run_id=name
        )
        shutil.copytree(base / "tower", tmp_path / name)
        (tmp_path / name / "certificate.json").write_text(json.dumps(certificate))
        paths[name] = str(tmp_path / name)
    release = tmp_path / "release" / "out"
    with pytest.raises(InputError, match="must stay private"):
        zero_shot.run(_dense(base, "scifact", systems=paths), release)
    assert not release.exists()
    one = {"one": paths["one"], "bm25": "bm25"}
    found = zero_shot.run(_dense(base, "scifact", systems=one), release)
    assert read_certificate(release) == read_certificate(paths["one"])
    guarantees = {name: s["guarantee"] for name, s in found["systems"].items()}
    assert guarantees["one"]["epsilon"] <= 1.0 and guarantees["bm25"] is None


def test_private_queries_are_recorded_or_refused(base, tmp_path):
    config = _tiny_sets.config_of(base, "scifact", private=True)
    zero_shot.run(config, tmp_path / "private" / "out")
    reads = (tmp_path / "private" / "private_reads.jsonl").read_text()
    assert "the queries and judgements of split 'test' of scifact" in reads
    stage = tmp_path / "private/out/runs/scifact/stage.json"
    data = json.loads(stage.read_text())["inputs"]["data"]
    assert data.startswith("keyed:")
    assert BeirDirectory(base / "beir/scifact").fingerprint() not in stage.read_text()
    config.strict = True
    with pytest.raises(InputError, match="strict is True and private is True"):
        zero_shot.run(config, tmp_path / "private" / "other")
    public = _tiny_sets.config_of(base, "scifact", strict=True)
    zero_shot.run(public, tmp_path / "public" / "out")
    assert not (tmp_path / "public" / "private").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metrics": ("ndcg@10", "mrr")}, "metric is 'mrr'"),
        ({"systems": {"qrels": "bm25"}}, "'qrels'"),
        ({"systems": {"a": "{base}/beir"}}, "beir is not a finished stage"),
        ({"splits": {"scifakt": "dev"}}, "splits names 'scifakt'"),
        ({"splits": {"scifact": "dev"}}, "dev.tsv"),
    ],
)
def test_bad_settings_are_named(base, tmp_path, changes, message):
    if "systems" in changes:
        systems = changes["systems"].items()
        changes = {"systems": {n: p.replace("{base}", str(base)) for n, p in systems}}
    config = _dense(base, "scifact", **changes)
    with pytest.raises(InputError, match=message):
        zero_shot.run(config, tmp_path / "out")
