"""A small report, and ways of reading its page, for the tests of reports."""

import html
import html.parser
import math
import re

from tfdpsq.run.report import page as report_module

ATTACK = "\"><script>alert(1)</script><img src=x onerror=alert(2)> & 'q'"


def row(name, epsilon, ndcg, difference=None):
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


def report(**changes):
    worse = {"difference": -0.054, "low": -0.066, "high": -0.042}
    steps = list(range(0, 1000, 10))
    return {
        "created": "2026-11-21 10:00",
        "rows": [
            row("bm25", None, 0.397),
            row("public_only", None, 0.114),
            row("original", math.inf, 0.167),
            row("synthetic_dp", 7.983, 0.06, worse),
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


def write(tmp_path, **changes):
    path = tmp_path / "report.html"
    report_module.write_report(path, report(**changes))
    return path.read_text(encoding="utf-8")


def text(page):
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


def tags(page):
    parser = _Tags()
    parser.feed(page)
    assert parser.open == []
    return parser
