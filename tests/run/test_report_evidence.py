"""What a report says of leaks, similarity, ε, and queries won and lost."""

import math

import numpy as np
import pytest
from helpers import report_page as _page

from tfdpsq import evaluation
from tfdpsq.data import Document
from tfdpsq.data.beir_writer import BeirWriter
from tfdpsq.run.reporting import content, wording

ATTACK, _row, _report = _page.ATTACK, _page.row, _page.report
_write, _text, _tags = _page.write, _page.text, _page.tags


def _audit(epsilon, mean_rank, p_value, bound, leaked, unit="query", repetitions=100):
    units = 1 if unit == "user" else repetitions
    entry = {
        "form": "all",
        "repetitions": repetitions,
        "units": units,
        "ranks": [1, 1, 4],
        "candidates": 100,
        "mean_rank": mean_rank,
        "chance": 50.5,
        "least_mean_rank": evaluation.least_mean_rank(units * float(epsilon), 100),
        "p_value": p_value,
        "exposure": [6.6, 6.6, 4.6],
        "exposure_extrapolated": [20.0, 30.0, 5.0],
        "leaked": leaked,
        "leaked_in_set": 0.0,
        "epsilon_pure": 0.015,
    }
    bounds = {"epsilon": bound, "correct": 90, "guesses": [50, 50], "canaries": 1000}
    rates = {"0.01": [0.02, 0.01, 0.03]}
    shown = {"auc": [0.55, 0.53, 0.57], "true_positive_rates": rates}
    return {
        "epsilon_certified": epsilon,
        "delta": 1e-5,
        "unit": unit,
        "confidence": 0.95,
        "canaries": [{**entry, "form": "secret"}, entry],
        "one_run": {"generator": bounds},
        "membership": {"loss": {**shown, "members": 9, "others": 9}},
    }


def test_leaks_are_said_in_words(tmp_path):
    """Learnt or not, written out or not, and whether a bound refutes the ε."""
    page = _write(
        tmp_path,
        audits={
            "T5, ε = ∞": _audit("inf", 2.0, 1e-9, 4.5, 2 / 3),
            "T5, ε = 8": _audit(7.9, 48.2, 0.41, 0.0, 0.0),
        },
    )
    text = _text(page)
    assert "T5, ε = ∞: secrets repeated 100 times were learnt: they rank 2.0" in text
    assert "67% of them were written out" in text
    assert "cannot be distinguished from secrets that nobody trained on" in text
    assert "none was written out" in text
    assert "below the certified 7.9, as it must be" in text
    assert "refutes" not in text
    assert "Exposure of each secret, in bits" in text
    top = text[: text.index("Results")]
    assert "T5, ε = ∞: planted secrets were learnt, and 67% of those repeated" in top
    assert "ε is at least 0.00 (certified: 7.9); a training query is recognized" in top
    assert "in 55% of pairs with another (50% by guessing)" in top
    _tags(page)


def test_whose_guarantee_it_is_is_said(tmp_path):
    """In 100 queries a secret has 100 times the ε of one; as a user's it has ε."""

    def said(**options):
        audited = _audit(2.0, 48.2, 0.41, 0.0, 0.0, **options)
        return _text(_write(tmp_path, audits={"T5": audited}))

    query = said()
    assert "T5: ε = 2 is for one query. A secret in 100 queries is 100" in query
    assert "100 times as large, 200, which is no promise" in query
    assert "finetune.unit = 'user'" in query
    assert "no attack makes their mean lower than 1.00" in query
    user = said(unit="user")
    assert "ε = 2 is for one user, with all queries that are theirs" in user
    assert "no attack makes their mean lower than 6.28" in user
    assert "no promise" not in user
    once = said(repetitions=1)
    assert "secrets put in once cannot be distinguished" in once
    assert "ε = 2 is for one query. The ranks" in once and "no promise" not in once
    without = _text(_write(tmp_path, audits={"T5": _audit("inf", 2.0, 0, 4.5, 1.0)}))
    assert "is for one query" not in without


def test_a_bound_above_the_certificate_is_an_alarm(tmp_path):
    """It shows that what was certified is not what ran."""
    page = _write(tmp_path, audits={"T5": _audit(3.0, 40.0, 0.2, 3.4, 0.0)})
    assert "refutes the certificate: do not release anything" in _text(page)


def test_canaries_left_out_refute_no_certificate_of_units_replaced(tmp_path):
    """A place that is left free goes to another unit, and two move the sum."""
    audited = {**_audit(3.0, 40.0, 0.2, 3.4, 0.0), "adjacency": "… (zero-out)"}
    text = _text(_write(tmp_path, audits={"T5": audited}))
    assert "above the certified 3, which it does not refute" in text
    assert "do not release" not in text


def test_bounds_are_rounded_to_the_side_on_which_they_hold(tmp_path):
    audited = _audit(1.0037, 48.2, 0.41, 0.9999, 0.0)
    audited["canaries"][0]["epsilon_pure"] = 0.0159
    text = _text(_write(tmp_path, audits={"T5": audited}))
    assert "ε is at least 0.99 (certified: 1.01)" in text
    assert "0.999" in text and "0.015" in text and "0.016" not in text
    for value, digits, shown in (
        (8.0, 3, "8"),
        (7.9801, 3, "7.99"),
        (5.00001e-5, 3, "5.01e-05"),
        (1 / 36954, 4, "2.707e-05"),
        (0.1 + 0.2, 3, "0.301"),
        (0.0, 3, "0"),
        (123456.7, 3, "1.24e+05"),
    ):
        assert wording.most_text(value, digits) == shown
        assert float(shown) >= value
    assert (
        wording.least_text(1.2999, 2) == "1.29" and wording.least_text(0, 2) == "0.00"
    )


def test_a_report_without_audits_says_that_leaks_were_not_measured(tmp_path):
    """In one sentence at the top, and no empty section."""
    page = _write(tmp_path)
    assert "What leaked Not measured" in _text(page)
    assert "<h2>What leaked</h2>" not in page


def test_quality_is_drawn_against_epsilon_where_there_are_two(tmp_path):
    """One point is no curve; ∞ has its place on the axis."""
    one = [_row("public_only", None, 0.1), _row("synthetic_eps8", 7.9, 0.2)]
    assert "against ε" not in _text(_write(tmp_path, rows=one))
    two = [*one, _row("synthetic_inf", math.inf, 0.3), _row("direct_eps8", 8.0, 0.15)]
    page = _write(tmp_path, rows=two)
    assert "ndcg@10 against ε, with 95 % intervals" in _text(page)
    assert "Synthetic queries" in _text(page) and "∞" in _text(page)
    _tags(page)


def test_queries_won_and_lost_are_those_that_differ_most(tmp_path):
    """From the TREC files, by hand: q0 won by all, q2 lost, q1 equal."""
    (tmp_path / "data").mkdir()
    with BeirWriter(tmp_path / "data") as writer:
        for i in range(3):
            writer.add_document(Document(f"d{i}", "", f"document {i}"))
            writer.add_query(f"q{i}", f"query {i} {ATTACK}")
            writer.add_judgement("test", f"q{i}", f"d{i}", 1)
    qrels = {f"q{i}": {f"d{i}": 1} for i in range(3)}
    ours = {"q0": {"d0": 2.0}, "q1": {"d9": 1.0}, "q2": {"d9": 2.0, "d2": 1.0}}
    theirs = {"q0": {"d9": 1.0}, "q1": {"d9": 1.0}, "q2": {"d2": 2.0}}
    (tmp_path / "runs").mkdir()
    evaluation.write_trec_qrels(tmp_path / "qrels.trec", qrels)
    for name, run in (("synthetic_eps8", ours), ("public_only", theirs)):
        evaluation.write_trec_run(tmp_path / "runs" / f"{name}.trec", run, tag=name)
    rows = [
        content.Row("public_only", "theirs", None, None),
        content.Row("synthetic_inf", "no", math.inf, None),
        content.Row("synthetic_eps8", "ours", 8.0, None),
    ]
    given = (str(tmp_path / "data"), "test", 9, tmp_path)
    assert content.wins_and_losses(*given, rows[:2]) is None
    found = content.wins_and_losses(*given, rows)
    assert (found["better"], found["equal"], found["worse"]) == (1, 1, 1)
    assert found["wins"][0]["document"] == "document 0"
    assert found["wins"][0]["value"] == 1.0 and found["wins"][0]["other"] == 0.0
    assert found["losses"][0]["query"].startswith("query 2")
    assert found["losses"][0]["value"] == pytest.approx(1 / np.log2(3))
    page = _write(tmp_path, wins_and_losses=found)
    assert "ours is better than theirs on 1 test queries, worse on 1" in _text(page)
    assert "<script>" not in page


def test_similarity_is_shown_with_its_control(tmp_path):
    """Each number beside that of held-out queries; what is missing is a dash."""
    share = {"synthetic": {"share": 0.012}, "held_out": {"share": 0.034}}
    found = {
        "bleu": 3.2,
        "queries": 120,
        "signature": "nrefs:1",
        "mauve": {"mean": 0.812, "deviation": 0.013},
        "distinct": {"synthetic": {"2": 0.51}, "held_out": {"2": 0.77}},
        "lengths": {"synthetic": {"mean": 6.12}, "held_out": {"mean": 8.34}},
        "vocabulary": {"jensen_shannon": 0.4321},
        "copies": {"exact": share, "by_grams": {"closer": 0.25}},
        "rules": {"equal_texts": "by NFKC"},
    }
    page = _write(tmp_path, similarity={"set A": found, "set B": {"bleu": None}})
    text = _text(page)
    for shown in ("3.2", "0.812 ± 0.013", "51.0% held-out: 77.0%", "6.1 held-out: 8.3"):
        assert shown in text
    for shown in ("0.4321", "1.2% held-out: 3.4%", "25.0%", "equal texts: by NFKC"):
        assert shown in text
    assert "nrefs:1" in text
    _tags(page)
    # No query has two words.
    found["distinct"] = {"synthetic": {"2": None}, "held_out": {"2": 0.77}}
    page = _write(tmp_path, similarity={"set A": found})
    assert "held-out: 77.0%" in _text(page) and "51.0%" not in _text(page)
