"""Many test sets in one run: their rules, their averages, and going on."""

import itertools
import json

import numpy as np
import pytest
from helpers import plans, tiny
from helpers import tiny_sets as _tiny_sets

from tfdpsq import evaluation
from tfdpsq.data import BeirDirectory, train_vocabulary
from tfdpsq.retriever import index
from tfdpsq.retriever.nearest import KBest
from tfdpsq.run import zero_shot
from tfdpsq.run.core import layout
from tfdpsq.run.search import benchmark_sets, retrieval
from tfdpsq.validation import InputError


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Sets under BEIR's names, and an untrained retriever."""
    base = tmp_path_factory.mktemp("zero_shot")
    _tiny_sets.write_all(base / "beir")
    texts = _tiny_sets.made_up(np.random.default_rng(9), 200)
    train_vocabulary(texts, 300, base / "spiece.model")
    pairs = str(base / "beir" / "scifact")
    tiny.write_retriever(base / "tower", base, pairs=pairs, split="test")
    return base


def _dense(base, *sets, **changes):
    """A config of BM25 and the untrained retriever."""
    return _tiny_sets.config_of(
        base,
        *sets,
        vocabulary=str(base / "spiece.model"),
        systems={"bm25": "bm25", "tower": str(base / "tower")},
        **changes,
    )


@pytest.fixture(scope="module")
def made(base):
    """A finished run over four sets, and what it returned."""
    zero_shot.run(_dense(base, "fiqa"), base / "made")
    with pytest.MonkeyPatch.context() as patch:
        # To load a model for every forum would take most of the time.
        patch.setattr(retrieval, "Retrievers", _AtRandom)
        config = _dense(base, "scifact", "fiqa", "arguana", "cqadupstack")
        found = zero_shot.run(config, base / "made")
    return base / "made", found


class _AtRandom:
    """Finds anything."""

    def __init__(self, config, queries, k):
        self.queries, self.k = list(queries), k

    def one_tower(self, name, among):
        return [name]

    def search(self, one_tower, documents):
        draw = np.random.default_rng(len(self.queries))
        ids = [document.id for document in documents()]
        best = KBest(len(self.queries), self.k)
        rows = np.stack([draw.permutation(len(ids))[: self.k] for _ in self.queries])
        scores = draw.random(rows.shape).astype(np.float32)
        best.merge(scores, rows, np.array(ids, object)[rows], len(ids))
        return dict.fromkeys(one_tower, best)


def _by_files(folder, system, ignore=False):
    """What `evaluate_run` says of TREC files, read by themselves."""
    return evaluation.evaluate_run(
        evaluation.read_trec_qrels(folder / "qrels.trec"),
        evaluation.read_trec_run(folder / f"{system}.trec"),
        layout.METRICS,
        ignore,
    )


def test_two_devices_find_what_one_does(base, tmp_path, on_two_devices):
    """In a set of 30 documents, at 8 a batch, and in one whose rules differ."""
    config = _dense(base, "scifact", "arguana", batch_size=8)
    alone = zero_shot.run(config, tmp_path / "alone")
    with on_two_devices():
        found = zero_shot.run(config, tmp_path / "together")
    assert found == alone
    runs = [
        {
            str(path.relative_to(made)): path.read_bytes()
            for path in made.rglob("*.trec")
        }
        for made in (tmp_path / "alone" / "runs", tmp_path / "together" / "runs")
    ]
    assert runs[0] == runs[1] and "scifact/tower.trec" in runs[0]


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


def test_rules_versions_and_what_was_evaluated_are_stated(made):
    _, found = made
    rules = found["sets"]["scifact"]["rules"]
    assert rules["evaluator"].startswith("pytrec-eval-terrier")
    assert rules["self_matches"] == "kept"
    assert rules["retrieved"] == "20 documents of each query"
    assert "removed" in found["sets"]["arguana"]["rules"]["self_matches"]
    assert found["versions"]["pytrec-eval-terrier"] and found["skipped"] == {}
    assert "Holm" in found["tests"]["correction"]
    assert "300 random" in found["tests"]["test"]
    assert found["queries_are"].startswith("public")
    assert found["sets"]["scifact"]["documents"] == 30
    assert found["mean"]["sets"] == 4


def test_queries_that_are_documents_do_not_find_themselves(made, base):
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
    other = zero_shot.run(kept, base / "kept")["sets"]["arguana"]
    assert other["rules"]["self_matches"] == "kept"
    assert other["systems"]["bm25"]["mrr@10"] < ruled
    run = evaluation.read_trec_run(base / "kept" / "runs" / "arguana" / "bm25.trec")
    assert all(max(hits, key=hits.get) == query for query, hits in run.items())


def test_cqadupstack_is_averaged_over_its_forums(made):
    directory, found = made
    entry = found["sets"]["cqadupstack"]
    assert set(entry["parts"]) == {f"cqadupstack/{f}" for f in benchmark_sets.FORUMS}
    assert entry["rules"]["averaged_over"].startswith("12 forums")
    values = {}
    for system in ("bm25", "tower"):
        results = [
            _by_files(directory / "runs/cqadupstack" / forum, system)
            for forum in benchmark_sets.FORUMS
        ]
        values[system] = [result.values("ndcg@10") for result in results]
        macro = np.mean([v.mean() for v in values[system]])
        micro = np.concatenate(values[system]).mean()
        row = entry["systems"][system]
        assert row["ndcg@10"] == pytest.approx(macro, abs=1e-12)
        assert abs(macro - micro) > 1e-3
        for forum, result in zip(benchmark_sets.FORUMS, results):
            part = entry["parts"][f"cqadupstack/{forum}"]
            assert part["systems"][system] == result.means
            assert part["queries"] == len(result.per_query)
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


def test_a_set_too_small_for_a_tree_is_named_before_any_search(
    base, tmp_path, monkeypatch
):
    monkeypatch.setattr(index, "LEAST_OF_TREE", 31)
    config = _dense(base, "scifact", index="scann")
    with pytest.raises(InputError, match="^index is 'scann', but 30 documents are"):
        zero_shot.run(config, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_numbers_of_two_private_runs_have_no_certificate(base, tmp_path):
    """The first one's would claim the budget of one run for both."""
    plan = plans.plan(epsilon=1.0, num_units=200, batch_size=20, steps=4)
    for name in ("one", "two"):
        certificate = plans.certificate(
            plan, fingerprints={"pairs": "keyed:1"}, ledger_head=name
        )
        (tmp_path / name).mkdir()
        (tmp_path / name / "certificate.json").write_text(json.dumps(certificate))
    paths = {name: str(tmp_path / name) for name in ("one", "two")}
    place = tmp_path / "release" / "numbers"
    config = _tiny_sets.config_of(base, "scifact", systems={"a": paths["one"]})
    output, certificate = zero_shot._output(config, place)
    assert (output.guarantee, certificate["ledger_head"]) == ("certified", "one")
    with config.unlocked():
        config.systems = {"a": paths["one"], "again": paths["one"], "bm25": "bm25"}
    assert zero_shot._output(config, place)[1] == certificate
    with config.unlocked():
        config.systems = paths
    with pytest.raises(InputError, match="must stay private"):
        zero_shot._output(config, place)
    assert zero_shot._output(config, tmp_path / "private" / "numbers")[1] is None


def test_the_guarantee_of_every_system_is_stated(made, base, monkeypatch):
    _, found = made
    # Untrained: no private query had a part in it.
    assert {s["guarantee"] for s in found["systems"].values()} == {None}
    spent = {"epsilon": 7.9, "delta": 1e-5}
    monkeypatch.setattr(
        zero_shot, "read_certificate", lambda path: {"guarantee": spent, "digest": "d"}
    )
    again = zero_shot.run(_dense(base, "scifact"), base / "made")
    assert again["systems"]["tower"]["guarantee"] == spent
    assert again["systems"]["bm25"]["guarantee"] is None
