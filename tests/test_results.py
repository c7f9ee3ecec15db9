"""`tfdpsq.results` reads workdirs without TensorFlow; notebooks/views.py draws."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tfdpsq.validation import InputError

ROOT = pathlib.Path(__file__).resolve().parents[1]
pytest.importorskip("pandas", reason="extra `results`")

from notebooks import views  # noqa: E402
from tfdpsq import results  # noqa: E402

_CERTIFICATE = {
    "guarantee": {"epsilon": 7.5, "delta": 1e-4, "unit": "query"},
    "accounting": {"epsilon_pld": 7.5, "epsilon_rdp": 9.0, "steps_executed": 3},
    "mechanism": {"noise_multiplier": 0.5, "clip_norm": 0.1},
    "sampler": {"n": 100},
    "digest": "0123456789abcdef",
}
_MEASURES = {"ndcg@10": 0.3, "ndcg@10_ci": [0.2, 0.45]}


def _write(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def _beir(folder, queries, prefix):
    texts = {f"{prefix}{i}": text for i, text in enumerate(queries)}
    _write(folder / "queries.jsonl", *({"_id": i, "text": t} for i, t in texts.items()))
    _write(
        folder / "corpus.jsonl",
        {"_id": "1", "title": "Sorting", "text": "sorts a list"},
        {"_id": "2", "text": "reads a file"},
    )
    (folder / "qrels").mkdir()
    lines = [f"{query}\t{i % 2 + 1}\t1\n" for i, query in enumerate(texts)]
    head = "query-id\tcorpus-id\tscore\n"
    (folder / "qrels" / "train.tsv").write_text(head + "".join(lines))


@pytest.fixture
def work(tmp_path):
    """A workdir as stages write it; ids are digits, which are texts all the same."""
    work, data = tmp_path / "work", tmp_path / "pairs"
    private, release = work / "private", work / "release"
    _beir(data, ['how to "sort"', "open it"], "0")
    _write(work / "config.json", {"data": str(data)})
    for name, guarantee in (("generator_eps8", "certified"), ("prepare", "public")):
        _write(release / name / "stage.json", {"guarantee": guarantee})
    _write(release / "generator_eps8" / "certificate.json", _CERTIFICATE)
    synthetic = release / "synthetic_eps8"
    _write(synthetic / "stage.json", {"guarantee": "certified"})
    _write(synthetic / "set" / "manifest.json", {})
    _write(synthetic / "set" / "certificate.json", _CERTIFICATE)
    _beir(synthetic / "set" / "beir", ["sort a list now", "sort", "sort"], "genQ")
    _beir(release / "prepare" / "public_pairs" / "beir", ["sorts"], "p")
    _write(release / "retriever_synthetic_eps8" / "stage.json", {})
    _write(release / "retriever_synthetic_eps8" / "certificate.json", _CERTIFICATE)
    _write(release / "retriever_public_only" / "stage.json", {})
    over = {"difference": 0.1, "low": 0.05, "high": 0.2, "p_value": 0.01}
    systems = {
        "bm25": {**_MEASURES, "difference_to_baseline": over},
        "public_only": {"ndcg@10": 0.2, "ndcg@10_ci": [0.1, 0.3]},
        "synthetic_eps8": _MEASURES,
        "reranked_public_only": _MEASURES,
        "reranked_eps8": _MEASURES,
        "somebodys": _MEASURES,
    }
    evaluation = private / "evaluation"
    _write(evaluation / "stage.json", {"config": {"data": str(data)}})
    _write(evaluation / "metrics.json", {"systems": systems})
    (evaluation / "qrels.trec").write_text("00 0 1 1\n01 0 2 1\n")
    (evaluation / "runs").mkdir()
    (evaluation / "runs" / "bm25.trec").write_text("00 Q0 1 1 2.5 t\n00 Q0 2 2 1 t\n")
    (evaluation / "runs" / "synthetic_eps8.trec").write_text("00 Q0 2 1 0.5 t\n")
    for step, epsilon in ((1, 6.0), (2, "inf")):
        log = private / "logs" / "generator_eps8" / "log.jsonl"
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "a") as file:
            point = {"step": step, "of": 2, "epsilon": epsilon, "loss": 5.0 - step}
            file.write(json.dumps(point) + "\n")
    with open(log, "a") as file:
        file.write('{"step": 3, "los')  # being written
    _write(private / "seconds.json", {"generator_eps8": 12.5})
    _write(private / "private_reads.jsonl", {"what": "losses", "where": "terminal"})
    _write(private / "audit_eps8" / "stage.json", {})
    canary = {"form": "all", "ranks": [3, 5], "mean_rank": 4.0}
    attack = {"auc": [0.5, 0.4, 0.6]}
    _write(
        private / "audit_eps8" / "audit.json",
        {"canaries": [canary], "membership": {"loss": attack}},
    )
    return work


def test_tables_equal_the_files(work):
    job = results.open_job(work)
    assert job.stages.guarantee["generator_eps8"] == "certified"
    assert job.stages.seconds["generator_eps8"] == 12.5
    assert job.stages.seconds.isna().sum() == len(job.stages) - 1
    certificates = job.certificates
    assert list(certificates.index) == [
        "generator_eps8",
        "retriever_synthetic_eps8",
        "synthetic_eps8",
    ]
    assert certificates.run.nunique() == 1 and set(certificates.epsilon) == {7.5}
    assert job.certificate("prepare") is None
    # A generator that reranks was said to have used no private query.
    assert dict(job.rows.epsilon.dropna()) == {
        "bm25": 0.0,
        "public_only": 0.0,
        "synthetic_eps8": 7.5,
        "reranked_public_only": 0.0,
        "reranked_eps8": 7.5,
    }
    assert job.rows.epsilon.isna()["somebodys"]
    assert tuple(job.rows.loc["bm25", ["ndcg@10_low", "ndcg@10_high"]]) == (0.2, 0.45)
    assert job.rows.over_baseline["bm25"] == 0.1
    assert job.rows.over_baseline.isna().sum() == 5
    assert list(job.set("synthetic_eps8").query_id) == ["genQ0", "genQ1", "genQ2"]
    assert list(job.pairs["query"]) == ['how to "sort"', "open it"]
    assert list(job.documents) == ["Sorting sorts a list", "reads a file"]
    assert list(job.curves.step) == [1, 2]  # and not the line being written
    assert list(job.curves.epsilon) == [6.0, float("inf")]


def test_ids_that_look_like_other_things_are_ids(work):
    """NA was missing, and a quotation mark swallowed the lines after it."""
    evaluation = work / "private" / "evaluation"
    lines = ["NA Q0 null 1 2 t", '00 Q0 "Heroes" 1 2 t', '00 Q0 "Low 2 1 t']
    (evaluation / "runs" / "bm25.trec").write_text("\n".join([*lines, ""]))
    (evaluation / "qrels.trec").write_text('NA 0 null 1\n00 0 "Low 1\n')
    job = results.open_job(work)
    assert list(views.asked(job)) == ["NA", "00"]
    for query, documents in (("NA", ["null"]), ("00", ['"Heroes"', '"Low'])):
        found = views.compare(job, query, ("bm25",))["bm25"]
        assert found.document.tolist() == documents and found.relevant.iloc[-1]
    data = work.parent / "pairs"
    _write(data / "queries.jsonl", {"_id": "NA", "text": "nothing"})
    for path in (data / "qrels").glob("*.tsv"):
        path.write_text("query-id\tcorpus-id\tscore\nNA\t1\t1\n")
    assert set(results.open_job(work).pairs["query"]) == {"nothing"}


def test_sets_and_audits_equal_the_files(work):
    job = results.open_job(work)
    sets = views.sets(job)
    assert sets.loc["synthetic_eps8", ["queries", "distinct"]].tolist() == [3, 2]
    assert sets.words["synthetic_eps8"] == 2.0 and sets.epsilon.tolist() == [7.5]
    assert views.private_reads(job).what.tolist() == ["losses"]
    assert views.canaries(job).mean_rank["audit_eps8"] == 4.0
    assert views.membership(job).auc_high["audit_eps8"] == 0.6


def test_comparisons_by_query_and_by_document(work):
    job = results.open_job(work)
    found = views.compare(job, "00", ("bm25", "synthetic_eps8"))
    assert found["bm25"].document.tolist() == ["1", "2"]
    assert found["bm25"].relevant.tolist() == [True, False]
    assert found["bm25"].text.tolist() == ["Sorting sorts a list", "reads a file"]
    assert found["synthetic_eps8"].document.tolist()[0] == "2"
    queries = views.of_document(job, "1")["query"]
    assert queries["private"] == 'how to "sort"'
    assert list(queries["synthetic_eps8"]) == ["sort a list now", "sort"]


def test_figures_show_the_tables(work):
    job = results.open_job(work)
    rows, lengths = views.plot_rows(job), views.plot_lengths(job)
    curves = views.plot_curves(job, "generator_eps8")
    names = [text.get_text() for text in rows.axes[0].get_yticklabels()]
    assert names[-3:] == ["synthetic_eps8", "public_only", "bm25"]
    assert len(names) == 6
    drawn = curves.axes[0].lines[0]
    assert drawn.get_xydata().tolist() == [[1, 4.0], [2, 3.0]]
    assert len(lengths.axes[0].get_legend().get_texts()) == 3
    # matplotlib refused a value beside its interval, as few resamples have it.
    job.rows["ndcg@10"] += 1.0
    for figure in (rows, curves, lengths, views.plot_rows(job)):
        views.plt.close(figure)


def test_unknown_stages_are_refused(work):
    with pytest.raises(InputError, match="no stage 'none' in .* There are: "):
        results.open_job(work).path("none")


def test_other_directories_are_named(work, tmp_path):
    (tmp_path / "pairs").rename(tmp_path / "moved")
    with pytest.raises(InputError, match="are not a directory of this machine"):
        results.open_job(work).pairs  # noqa: B018
    with pytest.raises(InputError, match="none holds no finished"):
        results.open_job(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no finished stage"):
        results.open_job(tmp_path / "empty")


def test_it_imports_without_tensorflow(work):
    code = (
        "import sys\n"
        "for name in ('tensorflow', 'absl', 'matplotlib', 'dp_accounting'):\n"
        "    sys.modules[name] = None\n"
        "from tfdpsq import results\n"
        f"print(len(results.open_job({str(work)!r}).certificates))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "3\n", done.stderr
