"""The READMEs: examples run as they stand, and links lead somewhere."""

import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf

ROOT = pathlib.Path(__file__).resolve().parents[1]


def _run_example(package, name, folder, place):
    """Runs an example with its folder replaced; returns its names."""
    text = (ROOT / "tfdpsq" / package / "README.md").read_text("utf-8")
    found = re.search(rf"<!-- example: {name} -->\n```python\n(.*?)```", text, re.S)
    assert found, f"the README of {package} has no example {name!r}"
    assert place in found.group(1)
    code = found.group(1).replace(place, str(folder))
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    return names


def test_privacy_example_trains_within_its_budget(tmp_path, capsys):
    tf.keras.utils.set_random_seed(0)  # for the weights; the noise is fresh
    names = _run_example("privacy", "fit", tmp_path, "/tmp/tfdpsq-example")
    stated = re.search(r"epsilon ([\d.]+) at delta 0.00025", capsys.readouterr().out)
    assert 2.9 < float(stated.group(1)) <= 3.0
    assert (tmp_path / "private" / "ledger.jsonl").read_text().count("\n") == 41
    # It learns what there is to learn: one input decides.
    logits = names["model"].predict(names["x"], verbose=0)
    assert np.mean(logits.argmax(1) == names["y"]) > 0.8


@pytest.mark.slow
def test_adapter_example_finds_what_the_encoder_alone_does_not(tmp_path, capsys):
    names = _run_example("layers", "adapter", tmp_path, "/tmp/tfdpsq-adapter")
    stated = re.search(r"epsilon ([\d.]+): first (\d+)%", capsys.readouterr().out)
    assert 7.9 < float(stated.group(1)) <= 8.0
    scores = names["public"] @ names["documents"].T
    before = scores.argmax(1) == np.arange(500)
    assert np.mean(before) < 0.02 < 0.3 < int(stated.group(2)) / 100


def test_links_lead_to_files_and_headings():
    for readme in (ROOT / "README.md", *ROOT.glob("tfdpsq/*/README.md")):
        for link in re.findall(r"\]\(([^)\s]+)\)", readme.read_text("utf-8")):
            if link.startswith("http"):
                continue
            name, _, anchor = link.partition("#")
            target = (readme.parent / name) if name else readme
            assert target.is_file(), f"{readme}: {link}"
            headings = re.findall(r"^#+ (.*)$", target.read_text("utf-8"), re.M)
            anchors = {
                re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
                for heading in headings
            }
            assert not anchor or anchor in anchors, f"{readme}: {link}"
