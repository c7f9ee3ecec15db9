"""TREC files: round trips, the order of ranks, and clear refusals."""

import random

import pytest
import pytrec_eval

from tfdpsq.evaluation import (
    evaluate_run,
    read_trec_qrels,
    read_trec_run,
    write_trec_qrels,
    write_trec_run,
)
from tfdpsq.validation import DataError, InputError


def test_run_round_trips_to_the_last_bit(tmp_path):
    draw = random.Random(0)
    run = {
        f"q{q}": {f"d{d}": draw.gauss(0, 1) * 10.0 ** draw.randint(-30, 30)}
        for q in range(20)
        for d in range(20)
    }
    run["é"] = {"𝛿": 1 / 3, "d": 0.0}
    write_trec_run(tmp_path / "run.trec", run)
    assert read_trec_run(tmp_path / "run.trec") == run


def test_run_has_six_fields_ranks_from_one_in_trec_order(tmp_path):
    # As float32 all three scores are 1: the order is that of ids, descending.
    write_trec_run(tmp_path / "r", {"q1": {"d10": 1.0, "d9": 1.0, "d2": 1 + 1e-9}}, "t")
    assert (tmp_path / "r").read_text() == (
        "q1 Q0 d9 1 1.0 t\nq1 Q0 d2 2 1.000000001 t\nq1 Q0 d10 3 1.0 t\n"
    )


def test_other_tools_read_the_files(tmp_path):
    run, qrels = {"q": {"a": 0.25, "b": 3.0}}, {"q": {"a": 1, "c": 0}, "p": {"b": 2}}
    write_trec_run(tmp_path / "run", run)
    write_trec_qrels(tmp_path / "qrels", qrels)
    with open(tmp_path / "run") as file:
        assert pytrec_eval.parse_run(file) == run
    with open(tmp_path / "qrels") as file:
        assert pytrec_eval.parse_qrel(file) == qrels
    assert read_trec_qrels(tmp_path / "qrels") == qrels


@pytest.fixture
def written(tmp_path):
    """Ours of files with ties, a query without results, and a query's own document."""
    draw = random.Random(1)
    qrels = {
        f"q{q}": {f"d{d}": draw.randint(0, 3) for d in draw.sample(range(60), 9)}
        for q in range(40)
    }
    run = {
        query: {f"d{d}": draw.randint(0, 30) / 8 for d in draw.sample(range(60), 30)}
        for query in list(qrels)[1:]
    }
    run["q1"]["q1"] = 9.0
    for query in qrels:
        qrels[query]["d0"] = 1
    write_trec_qrels(tmp_path / "qrels.trec", qrels)
    write_trec_run(tmp_path / "run.trec", run, ignore_identical_ids=True)
    return tmp_path, evaluate_run(qrels, run, ["ndcg@10", "recall@10"], True)


def test_ir_measures_measures_the_same(written):
    ir_measures = pytest.importorskip("ir_measures")
    directory, ours = written
    qrels = list(ir_measures.read_trec_qrels(str(directory / "qrels.trec")))
    run = list(ir_measures.read_trec_run(str(directory / "run.trec")))
    wanted = [ir_measures.nDCG @ 10, ir_measures.R @ 10]
    found = ir_measures.calc_aggregate(wanted, qrels, run)
    for measure, name in zip(wanted, ("ndcg@10", "recall@10")):
        assert found[measure] == pytest.approx(ours.means[name], abs=1e-6)


@pytest.mark.slow  # it compiles for minutes
def test_ranx_measures_the_same(written):
    ranx = pytest.importorskip("ranx")
    directory, ours = written
    qrels = ranx.Qrels.from_file(str(directory / "qrels.trec"), kind="trec")
    run = ranx.Run.from_file(str(directory / "run.trec"), kind="trec")
    names = ["ndcg@10", "recall@10"]
    # Without it, ranx refuses a run that lacks a query.
    found = ranx.evaluate(qrels, run, names, make_comparable=True)
    for name in names:
        assert found[name] == pytest.approx(ours.means[name], abs=1e-6)


@pytest.mark.parametrize("word", ["", "a b", "a\t", "\na", "a\u2028b"])
def test_ids_that_the_format_cannot_hold_are_refused(tmp_path, word):
    for run, tag in (({word: {"d": 1.0}}, "t"), ({"q": {word: 1.0}}, "t"), ({}, word)):
        with pytest.raises(InputError, match="white space"):
            write_trec_run(tmp_path / "run", run, tag)
    for qrels in ({word: {"d": 1}}, {"q": {word: 1}}):
        with pytest.raises(InputError, match="white space"):
            write_trec_qrels(tmp_path / "qrels", qrels)
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "run"
    write_trec_run(path, {"q": {"d": 1.0}})
    before = path.read_bytes()
    with pytest.raises(InputError, match="score of document 'd' for query 'p'"):
        write_trec_run(path, {"q": {"d": 1.0}, "p": {"d": float("nan")}})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"q Q0 d 1 1.0", "5 fields"),
        (b"", "0 fields"),
        (b"q Q0 d first 1.0 t", "rank is 'first'"),
        (b"q Q0 d 2 high t", "score is 'high'"),
        (b"q Q0 d 2 nan t", "score is 'nan'"),
        (b"q Q0 a 2 1.0 t", "document 'a' comes a second time"),
        (b"q Q0 \xff 2 1.0 t", "not UTF-8"),
    ],
)
def test_bad_run_lines_are_named(tmp_path, line, problem):
    path = tmp_path / "run"
    path.write_bytes(b"q Q0 a 1 2.0 t\n" + line + b"\n")
    with pytest.raises(DataError, match=problem) as error:
        read_trec_run(path)
    assert str(error.value).startswith(f"{path}:2: ")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("query-id\tcorpus-id\tscore", "3 fields"),  # BEIR's, with its header
        ("q 0 d 1.5", "relevance is '1.5'"),
        ("q 0 a 0", "document 'a' comes a second time"),
    ],
)
def test_bad_qrels_lines_are_named(tmp_path, line, problem):
    path = tmp_path / "qrels"
    path.write_text(f"q 0 a 1\n{line}\n")
    with pytest.raises(DataError, match=problem) as error:
        read_trec_qrels(path)
    assert error.value.line == 2
