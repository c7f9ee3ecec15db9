"""Reports and results.json: their numbers are the run's, escaped, strict, sound."""

import functools
import html
import html.parser
import json
import math
import re

import pytest
from helpers import plans

from tfdpsq.run.common import data_card
from tfdpsq.run.report import page as report_module
from tfdpsq.run.report import wording

ATTACK = "\"><script>alert(1)</script><img src=x onerror=alert(2)> & 'q'"


def _row(name, epsilon, ndcg, difference=None):
    used = "unprotected" if epsilon == math.inf else "protected"
    return {
        "name": name,
        "label": name.replace("_", " "),
        "private_data": "none" if epsilon is None else used,
        "epsilon": epsilon,
        "ndcg@10": ndcg,
        "ndcg@10_ci": [ndcg - 0.01, ndcg + 0.01],
        "recall@10": 2 * ndcg,
        "recall@10_ci": [2 * ndcg - 0.02, 2 * ndcg + 0.02],
        "difference_to_public_only": difference,
    }


def _report(**changes):
    worse = {"difference": -0.054, "low": -0.066, "high": -0.042}
    steps = list(range(0, 1000, 10))
    return {
        "created": "2026-11-21 10:00",
        "rows": [
            _row("bm25", None, 0.397),
            _row("public_only", None, 0.114),
            _row("original", math.inf, 0.167),
            _row("synthetic_dp", 7.983, 0.06, worse),
        ],
        "losses": {
            "Generator": {"T5, ε = 8": (steps, [9 - s / 200 for s in steps])},
            "Retriever": {"original": (steps, [4.0 for _ in steps])},
        },
        "spent": {"T5, ε = 8": (steps, [0.008 * s for s in steps])},
        "queries": 12,
        "examples": [
            {
                "document": "Return the sorted list.",
                "original_query": "sort a list",
                "synthetic": {"ε = 8": ["return list", ""], "ε = ∞": []},
            }
        ],
        "certificates": {},
        "similarity": {"ε = 8": {"queries": 9, "bleu": 3.21}},
        "audits": {},
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
    """Returns the visible text: no tags, no style, one space between words."""
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


_plan = functools.partial(plans.plan, num_units=2000, batch_size=100, steps=20)


def test_page_needs_no_other_file_no_network_and_no_script(tmp_path):
    page = _write(tmp_path)
    parser = _tags(page)
    assert not {"script", "link", "img", "iframe", "object"} & set(parser.tags)
    for tag, name, value in parser.attributes:
        assert name not in ("src", "srcset", "data", "action") and name[:2] != "on"
        if name.endswith("href"):
            assert value.startswith("#"), (tag, value)
    assert "url(http" not in page and "@import" not in page
    assert _write(tmp_path) == page  # the same bytes for the same input


def test_markup_in_any_text_is_shown_and_not_obeyed(tmp_path):
    def attack(value):
        if isinstance(value, dict):
            return {
                (k if k in KEYS else f"{k} {ATTACK}"): attack(v)
                for k, v in value.items()
            }
        if isinstance(value, list):
            return [attack(v) for v in value]
        is_text = isinstance(value, str) and value not in classes
        return f"{value} {ATTACK}" if is_text else value

    classes = {"protected", "unprotected", "none", "query"}  # which are ours
    classes |= {row["name"] for row in _report()["rows"]}
    certificate = _certificate(2.0)
    KEYS = {*_report(), *_row("a", 1.0, 0.1), *certificate}
    for part in certificate.values():
        KEYS |= part.keys() if isinstance(part, dict) else set()
    KEYS |= {"Generator", "Retriever", "difference", "low", "high"}
    KEYS |= {"document", "original_query", "synthetic", "queries", "bleu"}

    path = tmp_path / "report.html"
    report_module.write_report(path, attack(_report(certificates={"n": certificate})))
    page = path.read_text(encoding="utf-8")

    parser = _tags(page)
    assert "script" not in parser.tags and "img" not in parser.tags
    assert not [a for a in parser.attributes if a[1].startswith("on")]
    # Every text of the report is there, as text.
    assert f"sort a list {ATTACK}" in html.unescape(page)
    assert page.count("&lt;script&gt;alert(1)") > 30


def test_every_row_is_shown_with_its_epsilon_and_numbers(tmp_path):
    page = _write(tmp_path)
    row = r'<th scope="row">([\w ]+?) <span.*?data-label="ε spent"><span>(.*?)</span>'
    assert dict(re.findall(row, page, re.DOTALL)) == {
        "bm25": "–",
        "public only": "–",
        "original": "∞",
        "synthetic dp": "7.99",
    }
    text = _text(page)
    for number in ("0.3970", "0.1140", "0.1670", "0.0600", "7 min", "5.40 GiB"):
        assert number in text
    # A private query, and what was written for its document.
    assert "sort a list" in text and "return list" in text


def test_an_epsilon_of_a_pair_is_promised_to_no_query(tmp_path):
    """With unit "pair" it promised the epsilon of a pair to every query."""
    texts = {}
    for unit in ("query", "user", "pair"):
        certificate = {**_certificate(2.0)}
        certificate["guarantee"] = {**certificate["guarantee"], "unit": unit}
        texts[unit] = _text(_write(tmp_path, certificates={unit: certificate}))
    for unit, text in texts.items():
        promised = re.findall(r"every single (\w+)", text, re.IGNORECASE)
        assert set(promised) == {unit}, unit
    assert "several documents" in texts["pair"]
    assert "several documents" not in texts["query"]


def test_results_are_strict_json_with_the_promised_keys(tmp_path):
    path = tmp_path / "results.json"
    rows = [_row("original", "inf", 0.25)]
    report_module.write_results(path, _report(rows=rows))

    def refuse(constant):
        raise AssertionError(f"{constant} is not strict JSON")

    results = json.loads(path.read_text("utf-8"), parse_constant=refuse)
    (row,) = results["rows"]
    assert (row["name"], row["epsilon"], row["ndcg@10"]) == ("original", "inf", 0.25)
    assert row["ndcg@10_ci"] == [0.24, 0.26]
    assert results["seconds"] == {"finetune": 421.0, "evaluate": 3.2}


def test_bounds_are_rounded_to_the_side_on_which_they_hold():
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
    assert wording.least_text(1.2999, 2) == "1.29"


# -- Certificates in words: the certificate's own numbers, and no promise beyond -----


def _guarantee_text(tmp_path, *certificates):
    """Returns the guarantee's section of a report, as its reader sees it."""
    items = {f"T5 {number}": each for number, each in enumerate(certificates)}
    page = _write(tmp_path, certificates=items, losses={}, spent={})
    text = _text(page)
    start = text.index(" Privacy ")
    return text[start : text.index(" Cost ", start)]


def _certificate(epsilon, **changes):
    return plans.certificate(
        _plan(epsilon=epsilon, **changes),
        15,
        description="T5 fine-tuned on pydocs",
        sensitivity_argument="each loss depends on one query",
        private_reads=[{"what": "validation loss", "where": "finetune"}],
    )


def test_certificate_in_words_carries_the_certificates_numbers(tmp_path):
    certificate = _certificate(2.0)
    text = _guarantee_text(tmp_path, certificate)
    epsilon = certificate["guarantee"]["epsilon"]

    # 15 of 20 steps ran: less was spent than the target, and that is what counts.
    assert epsilon < 2.0
    shown = float(re.search(r"ε = ([.\d]+)\), except .* δ = 0.00025", text)[1])
    assert epsilon <= shown < epsilon + 0.01
    factor = float(re.search(r"e\^ε = ([.\d]+) times", text)[1])
    assert math.exp(epsilon) <= factor < math.exp(epsilon) * 1.001
    for fact in ("15 of 20", "n = 2,000", "100/2000", "each loss depends on one query"):
        assert fact in text
    card = data_card.text(
        {
            "count": 3,
            "documents": 2,
            "certificate": certificate,
            "guarantee": "certified",
        }
    )
    assert certificate["warnings"]
    for line in certificate["warnings"]:
        assert line in text
    for shown in (text, card):
        assert "validation loss: finetune" in shown
        for line in certificate["not_covered"]:
            assert line in shown


def test_shuffled_batches_are_called_what_they_are(tmp_path):
    certificate = _certificate(2.0, sampler="shuffled", n_is_public=True)
    text = _guarantee_text(tmp_path, certificate)
    assert "no amplification by sampling" in text and "with probability" not in text


def test_certificate_without_privacy_promises_nothing(tmp_path):
    text = _guarantee_text(tmp_path, _certificate(math.inf))
    assert "No guarantee (ε = ∞)" in text and "times as likely" not in text


def test_releasing_several_artefacts_adds_up(tmp_path):
    def item(epsilon, delta=1e-5):
        made = _certificate(epsilon)
        guarantee = {**made["guarantee"], "epsilon": epsilon, "delta": delta}
        return {**made, "guarantee": guarantee}

    free = _certificate(math.inf)
    both = _guarantee_text(tmp_path, item(8.0), item(4.5), free)
    assert "ε = 12.5, δ = 2e-05" in both
    assert "only at the sum" not in _guarantee_text(tmp_path, item(8.0), free)


# -- Leaks, similarity, and queries won and lost -------------------------------------


def _audit(epsilon, bound):
    entry = {
        "form": "all",
        "repetitions": 100,
        "units": 100,
        "ranks": [1, 1, 4],
        "candidates": 100,
        "mean_rank": 40.0,
        "chance": 50.5,
        "p_value": 0.2,
        "exposure": [6.6, 6.6, 4.6],
        "leaked": 0.0,
        "epsilon_pure": 0.0159,
    }
    bounds = {"epsilon": bound, "correct": 90, "guesses": [50, 50], "canaries": 1000}
    rates = {"0.01": [0.02, 0.01, 0.03]}
    shown = {"auc": [0.55, 0.53, 0.57], "true_positive_rates": rates}
    return {
        "epsilon_certified": epsilon,
        "adjacency": "add or remove",
        "delta": 1e-5,
        "unit": "query",
        "confidence": 0.95,
        "canaries": [{**entry, "form": "secret"}, entry],
        "one_run": {"generator": bounds},
        "membership": {"loss": {**shown, "members": 9, "others": 9}},
    }


def test_a_bound_above_the_certificate_is_an_alarm(tmp_path):
    """It shows that what was certified is not what ran; but not where a canary that is
    left out makes room for another unit: two move the sum."""
    audited = _audit(3.0, 3.4)
    assert "do not release" in _text(_write(tmp_path, audits={"T5": audited}))
    audited["adjacency"] = "… (zero-out)"
    assert "do not release" not in _text(_write(tmp_path, audits={"T5": audited}))


@pytest.mark.parametrize("depth", [0, 1])
def test_a_card_tells_which_private_reads_made_the_set(depth):
    """A set of `documents=train`, filtered or not; its card once said none."""
    read = {"what": "which documents have queries", "where": "the set's documents"}
    provenance = {"config": {}, "private_reads": [read]}
    for _ in range(depth):
        provenance = {"config": {}, "of": provenance}
    for guarantee, certificate in (
        ("certified", _certificate(2.0)),
        ("public", None),
        ("private", None),
    ):
        manifest = {"count": 3, "documents": 2, "provenance": provenance}
        manifest.update(guarantee=guarantee, certificate=certificate)
        shown = data_card.text(manifest)
        assert f"{read['what']}: {read['where']}" in shown
        assert "No private query had" not in shown and "nothing to prot" not in shown
        assert ("Not for release" in shown) == (guarantee == "private")
