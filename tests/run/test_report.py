"""The report and results.json: true, self-contained, escaped, strict."""

import html.parser
import json
import math
import re

import numpy as np
import pytest
from helpers import report_page as _page

from tfdpsq.run import pipeline
from tfdpsq.run.core import layout
from tfdpsq.run.reporting import content, plots, wording
from tfdpsq.run.reporting import page as report_module
from tfdpsq.validation import DataError, InputError

ATTACK, _row, _report = _page.ATTACK, _page.row, _page.report
_write, _text, _tags = _page.write, _page.text, _page.tags


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
    assert "synthetic dp (ε spent: 7.99)" in top
    # 0.06 / 0.167 = 36 %.
    assert "ndcg@10 0.0600, against 0.1670 for training without protection" in top
    assert "(36% of it) and 0.1140 for using no private query at all" in top
    assert "It is worse than using no private query: its ε bought nothing" in top
    assert "7 min 4 s for all stages, 5.40 GiB of memory at most" in top
    assert "What leaked Not measured: no generator was trained on planted" in top
    assert "Internal: this report is not covered by the guarantee." in top


@pytest.mark.parametrize(
    ("units", "said"),
    [
        (["query"], "Every single query of the private training pairs is protected"),
        (["user", "user"], "Every single user of the private training pairs is"),
        (["pair"], "a query with several documents, or a person .* is not protected"),
        (["pair", "query"], "Every single unit named in its certificate is"),
    ],
)
def test_the_top_names_the_unit_of_the_certificates(tmp_path, units, said):
    """With unit "pair" it promised the epsilon of a pair to every query."""
    certificates = [
        {
            "name": unit,
            "certificate": {"guarantee": {"epsilon": 1.0, "delta": 1e-5, "unit": unit}},
        }
        for unit in units
    ]
    text = _text(_write(tmp_path, certificates=certificates))
    assert re.search(said, text[: text.index("Results")])
    assert "any one query" not in text


def test_notes_say_what_was_trained_and_written_for():
    """They gave direct training the batches of the others, and denied a read."""
    config = pipeline.default_config()
    config.direct.batch_size = config.retriever.batch_size
    config.retriever.steps = 7
    trained, written = content.made_how(config)
    assert f"for 7 steps of {config.retriever.batch_size} pairs" in trained
    assert "direct" not in trained and "without looking at which" in written
    config.direct.batch_size = 3
    config.synthesize.documents = "train"
    trained, written = content.made_how(config)
    assert "by direct DP, of 3 pairs at scale 20" in trained
    assert "no ε covers which documents those are" in written
    config.direct_epsilons = ()
    assert "direct" not in content.made_how(config)[0]


@pytest.mark.parametrize(
    ("ci", "verdict"),
    [
        ([0.001, 0.02], "It is better than using no private query"),
        (
            [-0.01, 0.02],
            "It is not significantly different from using no private query",
        ),
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

    table = page[page.index("<h2>Results") :]
    cells = dict(
        re.findall(r'what (\w+) is.*?data-label="ε"><span>(.*?)</span>', table)
    )
    assert cells == {
        "bm25": "–",
        "public_only": "–",
        "original": "∞",
        "synthetic_dp": "7.99",
    }
    assert "ε is ∞ from the first step on: T5, ε = ∞." in _text(page)


def test_examples_show_original_and_synthetic_and_what_is_missing(tmp_path):
    text = _text(_write(tmp_path))

    assert "Original query (private) sort a list" in text
    assert "ε = 8 return list (an empty query) ε = ∞ (nothing was generated)" in text


def test_a_long_document_is_cut_and_says_so(tmp_path):
    example = {**_report()["examples"][0], "document": "lorem " * 1000}

    text = _text(_write(tmp_path, examples=[example]))

    assert text.count("lorem") == report_module.MAX_DOCUMENT_CHARACTERS // 6
    assert "lorem […]" in text


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


def test_a_reranked_row_is_compared_with_its_own_rows(tmp_path):
    own = {"public_only": "reranked_public_only", "unprotected": "reranked_inf"}
    better = {"difference": 0.012, "ci": [0.007, 0.017], "p": 0.01}
    rows = [
        _row("bm25", None, 0.44),
        _row("public_only", None, 0.27),
        _row("original", "inf", 0.29),
        *(
            {**row, "reference_rows": own}
            for row in (
                _row("reranked_public_only", None, 0.46),
                _row("reranked_inf", "inf", 0.4779),
                _row("reranked_eps8", 8.0, 0.4716, better),
            )
        ),
    ]
    page = _write(tmp_path, rows=rows)
    text = _text(page)
    assert (
        "reranked eps8: ndcg@10 0.4716, against 0.4779 for training without protection "
        "(99% of it) and 0.4600 for using no private query at all. It is better" in text
    )
    first = page.index("reranked eps8", page.index("<svg"))
    assert first < page.index("</svg>")


def test_what_decides_is_the_first_plot_the_table_and_the_results(tmp_path):
    """The gain over BM25 with the public-only row, wherever results are shown."""
    gain = {"mean": 0.021, "low": 0.012, "high": 0.03}
    better = {"difference": 0.01, "ci": [0.002, 0.018], "p": 0.01}
    fused = {
        "fused_ndcg@10": 0.4711,
        "fused_ndcg@10_ci": [0.46, 0.48],
        "fused_weight": 0.3,
        "fused_over_public_only": gain,
    }
    rows = [
        _row("bm25", None, 0.44),
        {**_row("public_only", None, 0.27), **fused, "fused_over_public_only": None},
        {**_row("synthetic_eps8", 8.0, 0.28, better), **fused},
    ]
    report_module.write_results(tmp_path / "results.json", _report(rows=rows))
    written = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert {key: written[2][key] for key in fused} == fused
    assert not set(fused) & set(written[0])
    page = _write(tmp_path, rows=rows)
    text = _text(page)
    assert "Together with BM25: 0.4711, +0.0210 over BM25 with the public-only" in text
    assert "+0.0210, +0.0120 to +0.0300" in text
    first = page.index("BM25 + synthetic eps8")
    assert page.index("<svg") < first < page.index("</svg>")
    shown = content.results_table({"rows": written}).splitlines()
    assert shown[-1].endswith("| 0.4711 | +0.0210 (+0.0120 to +0.0300) |")
    assert shown[2].endswith("| – | – |")


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
    measured = tmp_path / "private" / "evaluation" / layout.METRICS_FILE
    measured.parent.mkdir(parents=True)
    found = {"systems": {"bm25": row}, "rules": {}, "similarity": {}, "queries": 3}
    measured.write_text(json.dumps(found))

    with pytest.raises(DataError, match="no sound entry 'recall@10_ci'.*made again"):
        content.gather(
            pipeline.default_config(),
            tmp_path,
            rows=[content.Row("bm25", "BM25", None, None)],
            sets={},
            seconds={},
            peak_memory_gib=1.0,
            command="",
        )


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

    steps, means, size = plots.thin(list(range(1000)), values)

    # 1000 points in 200 blocks of 5: block 1 is values 5..9 = 5, 6, 0, 1, 2.
    assert (len(means), size, steps[-1]) == (200, 5, 999)
    assert means[1] == pytest.approx((5 + 6 + 0 + 1 + 2) / 5)
    assert sum(means) / 200 == pytest.approx(sum(values) / 1000)
    assert plots.thin([3], [1.5]) == ([3], [1.5], 1)


def test_thinned_epsilon_is_what_was_spent_and_not_a_mean():
    spent = [0.01 * (i + 1) for i in range(1000)]

    steps, values, _ = plots.thin(list(range(1000)), spent, average=False)

    assert values == [spent[step] for step in steps]
    assert values[-1] == spent[-1]


def test_plots_take_the_pages_colours(tmp_path):
    curves = {f"run {i}": ([1, 2], [3.0, 4.0]) for i in range(9)}
    svg = plots.lines(curves, "loss", "nats").svg

    assert "currentColor" in svg
    assert not re.search("#0[0-9a-f]0[0-9a-f]{3}", svg)  # no stand-in is left
    used = set(re.findall(r"var(\(--[a-z0-9-]+)\)", svg))
    assert len(used) == 8 + 1  # a colour per series, the ninth reuses one; the grid
    style = _write(tmp_path).split("</style>")[0].replace("{", ";").replace("\n", ";")
    light, dark = style.split("prefers-color-scheme:dark")
    for variable in used:
        name = variable[1:] + ":"
        assert re.search(f"[; ]{name}#", light) and re.search(f"[; ]{name}#", dark)


def test_durations_read_as_people_say_them():
    assert wording.duration_text(3.21) == "3.2 s"
    assert wording.duration_text(421) == "7 min 1 s"
    assert wording.duration_text(7260) == "2 h 1 min"


def test_what_each_stage_took_is_a_table_with_shares(tmp_path):
    seconds = {"generator_eps8": 75.0, "evaluation": 25.0, "of_my_own": 300.0}
    text = _text(_write(tmp_path, seconds=seconds, peak_memory_gib=2.345))
    top, table = text.split("What each stage took")

    # 75, 25 and 300 of 400 s.
    for row in (
        "Generator, ε = 8 the language model learns to write queries 1 min 15 s 18.8%",
        "Evaluation all retrievers search for the test queries 25.0 s 6.2%",
        "of_my_own 5 min 0 s 75.0%",
        "All stages 6 min 40 s 100%",
        "Peak memory: 2.35 GiB",
    ):
        assert row in table
    assert "6 min 40 s for all stages, 2.35 GiB of memory at most" in top
    assert "Longest: of_my_own, 5 min 0 s (75%)" in top


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("generator_eps8", "Generator, ε = 8"),
        ("generator_inf", "Generator, ε = ∞"),
        ("audited_synthetic_eps0.5", "Set for the audit, ε = 0.5"),
        ("retriever_synthetic_eps1e-05", "Retriever, synthetic, ε = 1e-05"),
        ("retriever_public_only", "Retriever, public-only"),
        ("prepare", "Public pairs"),
        ("else_eps8", "else_eps8"),
    ],
)
def test_stages_are_called_as_people_would(name, label):
    assert wording.run_label(name) == label
    assert bool(wording.run_note(name)) == (label != name)
