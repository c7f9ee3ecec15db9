"""The report and results.json: true, self-contained, escaped, strict."""

import html.parser
import json
import math
import re

import numpy as np
import pytest

from tfdpsq.run import report as report_module
from tfdpsq.run import report_comparison, report_html, report_plots
from tfdpsq.validation import InputError

ATTACK = "\"><script>alert(1)</script><img src=x onerror=alert(2)> & 'q'"


def _row(name, epsilon, ndcg, difference=None):
    return {
        "name": name,
        "label": name.replace("_", " "),
        "description": f"what {name} is",
        "private_data": "none" if epsilon is None else "train queries",
        "epsilon": epsilon,
        "ndcg@10": ndcg,
        "ndcg@10_ci": [ndcg - 0.01, ndcg + 0.01],
        "recall@10": 2 * ndcg,
        "recall@10_ci": [2 * ndcg - 0.02, 2 * ndcg + 0.02],
        "difference_to_public_only": difference,
    }


def _report(**changes):
    worse = {"difference": -0.054, "ci": [-0.066, -0.042], "p": 0.0002}
    steps = list(range(0, 1000, 10))
    return {
        "title": "Quickstart",
        "created": "2026-11-21 10:00",
        "command": "python -m tfdpsq.run.pipeline --config=configs/quickstart.py",
        "rows": [
            _row("bm25", None, 0.397),
            _row("public_only", None, 0.114),
            _row("original", math.inf, 0.167),
            _row("synthetic_dp", 7.983, 0.06, worse),
        ],
        "curves": {
            "T5, ε = 8": {
                "step": steps,
                "loss": [9 - s / 200 for s in steps],
                "chart": "Generator",
            },
            "original": {"step": steps, "loss": [4.0 for _ in steps]},
        },
        "epsilon_curves": {
            "T5, ε = 8": {"step": steps, "epsilon": [0.008 * s for s in steps]},
            "T5, ε = ∞": {"step": steps, "epsilon": [math.inf for _ in steps]},
        },
        "examples": [
            {
                "document_id": "d1",
                "document": "Return the sorted list.",
                "original_query": "sort a list",
                "synthetic": {"ε = 8": ["return list", ""], "ε = ∞": []},
            }
        ],
        "certificates": [],
        "similarity": {"ε = 8": {"bleu": 3.21, "signature": "nrefs:1|tok:13a"}},
        "seconds": {"finetune": 421.0, "evaluate": 3.2},
        "peak_memory_gib": 5.4,
        "versions": {"tensorflow": "2.15.1"},
        "fingerprints": {"data": "ab12"},
        "notes": ["One seed."],
        **changes,
    }


def _write(tmp_path, **changes):
    path = tmp_path / "report.html"
    report_module.write_report(path, _report(**changes))
    return path.read_text(encoding="utf-8")


def _text(page):
    """What a reader sees: no tags, no style, one space between words."""
    page = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    page = re.sub(r"<[^>]+>", " ", page)
    return " ".join(html.unescape(page).split())


class _Tags(html.parser.HTMLParser):
    """Collects tags and attributes, and checks that every tag is closed."""

    VOID = ("meta", "br", "img", "hr", "link")

    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.open = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *attr) for attr in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *attr) for attr in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def _tags(page):
    parser = _Tags()
    parser.feed(page)
    assert parser.open == []
    return parser


def test_page_needs_no_other_file_no_network_and_no_script(tmp_path):
    parser = _tags(_write(tmp_path))

    assert not {"script", "link", "img", "iframe", "object"} & set(parser.tags)
    for tag, name, value in parser.attributes:
        assert name not in ("src", "srcset", "data", "action") and name[:2] != "on"
        if name.endswith("href"):
            assert value.startswith("#"), (tag, value)
    assert "url(http" not in _write(tmp_path) and "@import" not in _write(tmp_path)
    assert parser.tags.count("svg") == 4  # results, two loss charts, ε


def test_top_says_what_was_protected_at_what_cost_and_what_the_report_is(tmp_path):
    text = _text(_write(tmp_path))
    top = text[: text.index("Results")]

    assert "Every single query of the private training pairs is protected" in top
    assert "synthetic dp (ε spent: 7.98)" in top
    # 0.06 / 0.167 = 36 %.
    assert "ndcg@10 0.0600, against 0.1670 for training without protection" in top
    assert "(36% of it) and 0.1140 for using no private query at all" in top
    assert "It is worse than using no private query: its ε bought nothing" in top
    assert "Internal: this report is not covered by the guarantee." in top


@pytest.mark.parametrize(
    ("ci", "verdict"),
    [
        ([0.001, 0.02], "It is better than using no private query"),
        ([-0.01, 0.02], "It cannot be told from using no private query"),
        ([-0.02, -0.001], "It is worse than using no private query"),
    ],
)
def test_verdict_follows_the_interval(tmp_path, ci, verdict):
    difference = {"difference": sum(ci) / 2, "ci": ci, "p": 0.04}
    rows = [_row("public_only", None, 0.1), _row("dp", 3.0, 0.1, difference)]

    text = _text(_write(tmp_path, rows=rows))

    assert verdict in text


def test_a_run_that_protects_nothing_says_so(tmp_path):
    text = _text(_write(tmp_path, rows=[_row("original", math.inf, 0.2)]))

    assert "Nothing in this run is protected: no row has a finite ε." in text


def test_markup_in_any_text_is_shown_and_not_obeyed(tmp_path):
    def attack(value):
        if isinstance(value, dict):
            return {
                (k if k in KEYS else f"{k} {ATTACK}"): attack(v)
                for k, v in value.items()
            }
        if isinstance(value, list):
            return [attack(v) for v in value]
        return f"{value} {ATTACK}" if isinstance(value, str) else value

    KEYS = set(_report()) | set(_row("a", 1.0, 0.1))
    KEYS |= {"step", "loss", "epsilon", "chart", "unit", "difference", "ci", "p"}
    KEYS |= {"document_id", "document", "original_query", "synthetic"}
    KEYS |= {"name", "certificate", "bleu", "signature", "guarantee", "delta"}
    certificate = {
        "description": "what",
        "guarantee": {"epsilon": 1.0, "delta": 1e-5, "unit": "query"},
        "private_reads": [{"what": "loss"}],
        "not_covered": ["documents"],
        "warnings": ["high"],
    }
    certificates = [{"name": "n", "certificate": certificate}]

    path = tmp_path / "report.html"
    report_module.write_report(path, attack(_report(certificates=certificates)))
    page = path.read_text(encoding="utf-8")

    parser = _tags(page)
    assert "script" not in parser.tags and "img" not in parser.tags
    assert not [a for a in parser.attributes if a[1].startswith("on")]
    # Every text of the report is there, as text.
    assert f"sort a list {ATTACK}" in _text_of_nodes(page)
    assert page.count("&lt;script&gt;alert(1)") > 30


def _text_of_nodes(page):
    pieces = []
    parser = html.parser.HTMLParser()
    parser.handle_data = pieces.append
    parser.feed(page)
    return "".join(pieces)


def test_infinite_epsilon_is_a_sign_and_no_private_data_a_dash(tmp_path):
    page = _write(tmp_path)

    cells = dict(re.findall(r'what (\w+) is.*?data-label="ε"><span>(.*?)</span>', page))
    assert cells == {
        "bm25": "–",
        "public_only": "–",
        "original": "∞",
        "synthetic_dp": "7.98",
    }
    assert "ε is ∞ from the first step on: T5, ε = ∞." in _text(page)


def test_examples_show_original_and_synthetic_and_what_is_missing(tmp_path):
    text = _text(_write(tmp_path))

    assert "Original query (private) sort a list" in text
    assert "ε = 8 return list (an empty query) ε = ∞ (nothing was generated)" in text


def test_a_long_document_is_cut_and_says_so(tmp_path):
    example = {**_report()["examples"][0], "document": "word " * 1000}

    text = _text(_write(tmp_path, examples=[example]))

    assert text.count("word") == report_module.MAX_DOCUMENT_CHARACTERS // 5
    assert "word […]" in text


def test_results_are_strict_json_with_the_promised_keys(tmp_path):
    path = tmp_path / "results.json"
    rows = [_row("original", np.float32("inf"), np.float64(0.25))]
    report_module.write_results(path, _report(rows=rows))

    def refuse(constant):
        raise AssertionError(f"{constant} is not strict JSON")

    results = json.loads(path.read_text("utf-8"), parse_constant=refuse)

    assert set(results) == {
        "rows",
        "seconds",
        "peak_memory_gib",
        "fingerprints",
        "versions",
    }
    assert results["rows"][0] == {
        "name": "original",
        "epsilon": "inf",
        "ndcg@10": 0.25,
        "recall@10": 0.5,
        "ndcg@10_ci": [0.24, 0.26],
        "recall@10_ci": [0.48, 0.52],
        "difference_to_public_only": None,
    }
    assert results["seconds"] == {"finetune": 421.0, "evaluate": 3.2}


@pytest.mark.parametrize("write", ["write_report", "write_results"])
def test_nan_metric_is_refused_by_place_and_nothing_is_written(tmp_path, write):
    path = tmp_path / "out"
    rows = [_row("bm25", None, 0.2), _row("dp", 3.0, math.nan)]

    with pytest.raises(InputError, match=r"report\.rows\[1\]\.ndcg@10 is NaN"):
        getattr(report_module, write)(path, _report(rows=rows))

    assert list(tmp_path.iterdir()) == []


def test_missing_value_of_a_row_is_named(tmp_path):
    row = _row("bm25", None, 0.2)
    del row["recall@10_ci"]

    with pytest.raises(InputError, match=r"rows\[0\] \(bm25\) has no 'recall@10_ci'"):
        _write(tmp_path, rows=[row])


def test_training_that_diverged_is_drawn_and_told(tmp_path):
    curve = {"step": [1, 2, 3], "loss": [2.0, math.nan, math.inf]}

    text = _text(_write(tmp_path, curves={"wild": curve}))

    assert "wild has values that are not finite; they are left out." in text


def test_report_is_the_same_bytes_for_the_same_input(tmp_path):
    assert _write(tmp_path) == _write(tmp_path)


def test_only_the_rows_are_needed(tmp_path):
    whole = _report()
    few = {key: whole[key] for key in ("title", "created", "command", "rows")}
    path = tmp_path / "report.html"

    report_module.write_report(path, few)

    titles = re.findall("<h2>(.*?)</h2>", path.read_text("utf-8"))
    assert titles == ["Results", "How this was made"]


def test_thinned_curve_keeps_the_mean_and_the_last_step():
    values = [float(i % 7) for i in range(1000)]

    steps, means, size = report_plots.thin(list(range(1000)), values)

    # 1000 points in 200 blocks of 5: block 1 is values 5..9 = 5, 6, 0, 1, 2.
    assert (len(means), size, steps[-1]) == (200, 5, 999)
    assert means[1] == pytest.approx((5 + 6 + 0 + 1 + 2) / 5)
    assert sum(means) / 200 == pytest.approx(sum(values) / 1000)
    assert report_plots.thin([3], [1.5]) == ([3], [1.5], 1)


def test_thinned_epsilon_is_what_was_spent_and_not_a_mean():
    spent = [0.01 * (i + 1) for i in range(1000)]

    steps, values, _ = report_plots.thin(list(range(1000)), spent, average=False)

    assert values == [spent[step] for step in steps]
    assert values[-1] == spent[-1]


def test_plots_take_the_pages_colours():
    svg = report_plots.lines({"a": ([1, 2], [3.0, 4.0])}, "loss", "nats")

    assert "var(--series-0)" in svg and "currentColor" in svg
    assert not re.search("#0[0-9a-f]0[0-9a-f]{3}", svg)  # no stand-in is left
    assert "--series-0:" in report_html.STYLE


def test_durations_read_as_people_say_them():
    assert report_html.duration_text(3.21) == "3.2 s"
    assert report_html.duration_text(421) == "7 min 1 s"
    assert report_html.duration_text(7260) == "2 h 1 min"


# -- What leaked ----------------------------------------------------------------


def _audit(epsilon, mean_rank, p_value, bound, leaked):
    entry = {
        "form": "all",
        "repetitions": 100,
        "ranks": [1, 1, 4],
        "candidates": 100,
        "mean_rank": mean_rank,
        "chance": 50.5,
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
    assert "cannot be told from secrets that nobody trained on" in text
    assert "none was written out" in text
    assert "below the certified 7.9, as it must be" in text
    assert "refutes" not in text
    assert "Exposure of each secret, in bits" in text
    _tags(page)


def test_a_bound_above_the_certificate_is_an_alarm(tmp_path):
    """It shows that what was certified is not what ran."""
    page = _write(tmp_path, audits={"T5": _audit(3.0, 40.0, 0.2, 3.4, 0.0)})
    assert "refutes the certificate: do not release anything" in _text(page)


def test_a_report_without_audits_says_nothing_of_leaks(tmp_path):
    """No section, rather than an empty one."""
    assert "What leaked" not in _text(_write(tmp_path))


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
    from tfdpsq import evaluation

    qrels = {f"q{i}": {f"d{i}": 1} for i in range(3)}
    ours = {"q0": {"d0": 2.0}, "q1": {"d9": 1.0}, "q2": {"d9": 2.0, "d2": 1.0}}
    theirs = {"q0": {"d9": 1.0}, "q1": {"d9": 1.0}, "q2": {"d2": 2.0}}
    (tmp_path / "runs").mkdir()
    evaluation.write_trec_qrels(tmp_path / "qrels.trec", qrels)
    for name, run in (("ours", ours), ("theirs", theirs)):
        evaluation.write_trec_run(tmp_path / "runs" / f"{name}.trec", run, tag=name)
    found = report_comparison.wins_and_losses(
        tmp_path,
        {f"q{i}": f"query {i} {ATTACK}" for i in range(3)},
        {f"d{i}": f"document {i}" for i in range(3)},
        "ours",
        "theirs",
    )
    assert (found["better"], found["equal"], found["worse"]) == (1, 1, 1)
    assert found["wins"][0]["document"] == "document 0"
    assert found["wins"][0]["value"] == 1.0 and found["wins"][0]["other"] == 0.0
    assert found["losses"][0]["query"].startswith("query 2")
    assert found["losses"][0]["value"] == pytest.approx(1 / np.log2(3))
    page = _write(tmp_path, wins_and_losses=found)
    assert "ours is better than theirs on 1 test queries, worse on 1" in _text(page)
    assert "<script>" not in page
