"""TREC files: round trips, the order of ranks, and clear refusals."""

import random

import numpy as np
import pytest
import pytrec_eval

from tfdpsq.evaluation import (
    BM25,
    evaluate_run,
    read_trec_qrels,
    read_trec_run,
    write_trec_qrels,
    write_trec_run,
)
from tfdpsq.retriever import as_run
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


def test_ids_that_are_integers_become_text(tmp_path):
    """Integer ids of data frames are text in qrels of BEIR directories."""
    run = BM25({7: "the words", np.int64(10): "others"}).search({1: "words"})
    assert [*run["1"]] == ["7"]
    assert as_run([1], [[0.5, 0.1]], np.array([[7, 10]])) == {
        "1": {"7": 0.5, "10": 0.1}
    }
    for found in ({1: {7: 0.5}}, {"1": {"7": 0.5}}):
        for qrels in ({1: {7: 1}}, {"1": {"7": 1}}):
            assert evaluate_run(qrels, found).means["ndcg@10"] == 1
            write_trec_qrels(tmp_path / "qrels", qrels)
        write_trec_run(tmp_path / "run", found)
        assert read_trec_run(tmp_path / "run") == {"1": {"7": 0.5}}
    assert read_trec_qrels(tmp_path / "qrels") == {"1": {"7": 1}}


@pytest.mark.parametrize("word", ["", "a b", "a\u2028b"])
def test_ids_that_the_format_cannot_hold_are_refused(tmp_path, word):
    for run, tag in (({word: {"d": 1.0}}, "t"), ({"q": {word: 1.0}}, "t"), ({}, word)):
        with pytest.raises(InputError, match="white space"):
            write_trec_run(tmp_path / "run", run, tag)
    for qrels in ({word: {"d": 1}}, {"q": {word: 1}}):
        with pytest.raises(InputError, match="white space"):
            write_trec_qrels(tmp_path / "qrels", qrels)


def test_bad_lines_are_named(tmp_path):
    path = tmp_path / "file"
    for line in (
        b"q Q0 d 1 1.0",
        b"q Q0 d 2 high t",
        b"q Q0 d 2 nan t",
        b"q Q0 a 2 1.0 t",
        b"q Q0 \xff 2 1.0 t",
    ):
        path.write_bytes(b"q Q0 a 1 2.0 t\n" + line + b"\n")
        with pytest.raises(DataError) as error:
            read_trec_run(path)
        assert str(error.value).startswith(f"{path}:2: ")
    for line in ("query-id\tcorpus-id\tscore", "q 0 d 1.5", "q 0 a 0"):
        path.write_text(f"q 0 a 1\n{line}\n")
        with pytest.raises(DataError) as error:
            read_trec_qrels(path)
        assert error.value.line == 2
