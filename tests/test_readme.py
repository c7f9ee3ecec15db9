"""What README shows runs as it stands there."""

import pathlib
import re

import numpy as np
import tensorflow as tf

ROOT = pathlib.Path(__file__).resolve().parents[1]


def _example(name):
    text = (ROOT / "README.md").read_text("utf-8")
    found = re.search(rf"<!-- example: {name} -->\n```python\n(.*?)```", text, re.S)
    assert found, f"README has no example {name!r}"
    return found.group(1)


def test_the_example_trains_within_its_budget(tmp_path, capsys):
    code = _example("fit").replace("/tmp/tfdpsq-example", str(tmp_path))
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
