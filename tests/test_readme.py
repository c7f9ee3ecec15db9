"""The READMEs: the example runs as it stands, links lead somewhere."""

import json
import pathlib
import re

import numpy as np
import tensorflow as tf

from tfdpsq.run.__main__ import stages

ROOT = pathlib.Path(__file__).resolve().parents[1]


def _example(package, name):
    text = (ROOT / "tfdpsq" / package / "README.md").read_text("utf-8")
    found = re.search(rf"<!-- example: {name} -->\n```python\n(.*?)```", text, re.S)
    assert found, f"the README of {package} has no example {name!r}"
    return found.group(1)


def test_the_example_trains_within_its_budget(tmp_path, capsys):
    code = _example("privacy", "fit").replace("/tmp/tfdpsq-example", str(tmp_path))
    assert str(tmp_path) in code
    names: dict = {}
    tf.keras.utils.set_random_seed(0)  # of the weights; the noise is fresh
    exec(compile(code, "README.md", "exec"), names)
    stated = re.search(r"epsilon ([\d.]+) at delta 0.00025", capsys.readouterr().out)
    assert 2.9 < float(stated.group(1)) <= 3.0
    assert (tmp_path / "private" / "ledger.jsonl").read_text().count("\n") == 41
    # It learns what there is to learn: one input decides.
    logits = names["model"].predict(names["x"], verbose=0)
    assert np.mean(logits.argmax(1) == names["y"]) > 0.8


def test_the_adapter_of_the_example_finds_what_the_encoder_alone_does_not(
    tmp_path, capsys
):
    code = _example("layers", "adapter").replace("/tmp/tfdpsq-adapter", str(tmp_path))
    assert str(tmp_path) in code
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    stated = re.search(r"epsilon ([\d.]+): first (\d+)%", capsys.readouterr().out)
    assert 7.9 < float(stated.group(1)) <= 8.0
    scores = names["public"] @ names["documents"].T
    before = scores.argmax(1) == np.arange(500)
    assert np.mean(before) < 0.02 < 0.3 < int(stated.group(2)) / 100


def _links(path):
    """Yields a README's links to files and headings of this repository."""
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text("utf-8")):
        if not target.startswith("http"):
            yield target


def _anchor(heading):
    """Returns the anchor that GitHub makes of a heading."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


def test_links_lead_to_files_and_headings():
    readmes = [ROOT / "README.md", *ROOT.glob("tfdpsq/*/README.md")]
    readmes.append(ROOT / "tests" / "benchmarks" / "README.md")
    checked = 0
    for readme in readmes:
        for link in _links(readme):
            name, _, anchor = link.partition("#")
            target = (readme.parent / name) if name else readme
            assert target.is_file(), f"{readme}: {link}"
            headings = re.findall(r"^#+ (.*)$", target.read_text("utf-8"), re.M)
            assert not anchor or anchor in map(_anchor, headings), f"{readme}: {link}"
            checked += 1
    assert checked > 12


def test_the_front_page_is_one_page():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 200


def test_the_front_page_names_every_stage():
    text = (ROOT / "README.md").read_text("utf-8")
    table = text[text.index("## Stages") : text.index("## Results")]
    named = set(re.findall(r"`([a-z_]+)`", table))
    assert set(stages()) <= named


def test_the_tables_of_results_have_the_figures_of_their_files():
    results = ROOT / "tests" / "benchmarks" / "results"
    text = (ROOT / "README.md").read_text("utf-8")
    reranked, dense = text.split("**Two-tower retrievers**")
    found = json.loads((results / "quickstart.json").read_text("utf-8"))
    assert _stated(reranked, 1) == sorted(
        _figures(found, name, "reranked_public_only", {"bm25"})
        for name in found["ndcg@10"]
        if name == "bm25" or name.startswith("reranked_")
    )
    fused = " + bm25"
    assert _stated(dense, 2) == sorted(
        (
            *_figures(found, name, "public_only", set()),
            *_figures(found, name + fused, "public_only" + fused, set()),
        )
        for name in found["ndcg@10"]
        if name + fused in found["ndcg@10"]
    )


def _stated(text, columns):
    """Returns the rows of a table: means, and differences in words."""
    row = r"^\| [^|]+ \|" + r" \**(\.\d{4})\** \|([^|]*)\|" * columns + "$"
    return sorted(
        tuple(value.strip("* ") for value in found)
        for found in re.findall(row, text, re.M)
    )


def _figures(found, name, reference, uncompared):
    """Returns a row's mean and its difference; some rows have none."""

    def shown(value):
        return f"{value:+.4f}".replace("0.", ".", 1).replace("-", "−")

    over = found["compared"].get(f"{name} - {reference}")
    words = "" if name in uncompared else "–"
    if over:
        words = "{} ({} to {})".format(
            *(shown(over[end]) for end in ("difference", "low", "high"))
        )
    return shown(found["ndcg@10"][name])[1:], words
