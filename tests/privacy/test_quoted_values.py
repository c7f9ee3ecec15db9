"""Values of rows stay out of errors and logs, and what they break costs nothing."""

import functools
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from helpers import plans

from tfdpsq.privacy import PrivateModel, read_ledger, training
from tfdpsq.validation import InputError

_plan = functools.partial(
    plans.plan, clip_norm=1.0, num_units=20, batch_size=15, steps=6
)


def _train(plan, take, **options):
    layer = tf.keras.layers.Dense(1, use_bias=False)
    layer.build([None, 3])

    def losses(batch):
        # Texts are read, too, but not trained on.
        x = batch.get("x")
        if x is None:
            lengths = tf.strings.length(batch["text"])
            x = tf.cast(tf.stack([lengths] * 3, 1), tf.float32)
        return layer(x)[:, 0]

    return plans.trained(plan, losses, [layer], take, 5, **options)


@pytest.mark.parametrize("bad, where", [(0, "tried before the first step"), (7, "of")])
def test_values_that_take_looks_up_are_not_quoted(bad, where):
    """Row 0 is always tried, row 7 drawn by some step."""
    table = np.ones([10, 3], np.float32)
    ids = np.arange(20) % 10
    ids[bad] = 987654

    def take(at):
        return {"x": tf.nn.embedding_lookup(table, ids[at]).numpy()}

    with pytest.raises((InputError, tf.errors.OpError)) as caught:
        _train(_plan(), take, seed=1)  # of fresh draws one in 4,096 would lack row 7
    said = str(caught.value)
    assert "987654" not in said and "Check take" in said
    assert re.search(f"the rows {where}.*could not be taken", said)


def test_a_text_that_is_not_utf8_costs_no_step(tmp_path):
    """It used to fail after the payment, with no way to go on."""
    texts = np.array(["some text"] * 20, "U40")
    texts[7] = "my secret \ud83d query"
    # Every step draws it, but no trial does.
    plan = _plan(batch_size=20, sampler="shuffled", n_is_public=True, steps=2)
    with pytest.raises(ValueError) as e:  # TensorFlow's own, if it is not refused
        _train(plan, {"text": texts}, directory=tmp_path)
    assert "'text' has a text that is not UTF-8" in str(e.value)
    assert "secret" not in str(e.value) and e.value.__suppress_context__
    assert read_ledger(tmp_path / "ledger.jsonl").steps_paid == 0
    texts[7] = "Grüße, 漢字"
    assert _train(plan, {"text": texts}) == 2


def test_tensorflow_logs_no_row_of_a_refused_batch(capfd):
    """At level 2, which commands set: its warning shows labels of the whole batch."""
    y = np.arange(20) % 9
    y[7] = 471147114
    model = tf.keras.Sequential([tf.keras.layers.Dense(10, input_shape=(3,))])
    private = PrivateModel(model, _plan(steps=12), microbatch_size=5, strict=True)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(True, reduction="none")
    private.compile(plans.optimizer(0.1), loss=loss)
    with pytest.raises(InputError) as caught:
        private.fit(np.ones([20, 3], np.float32), y)
    out, err = capfd.readouterr()
    assert "471147114" not in str(caught.value) + out + err


@pytest.mark.parametrize("level, warned", [("0", True), ("2", False)])
def test_train_warns_where_tensorflow_may_log_rows(monkeypatch, caplog, level, warned):
    """An operation that refuses a value logs values of its whole batch."""
    monkeypatch.setattr(training, "LOG_LEVEL", level)
    with caplog.at_level("WARNING"), pytest.raises(InputError, match="units is"):
        _train(_plan(), {}, units="twelve")
    assert ("TF_CPP_MIN_LOG_LEVEL" in caplog.text) == warned


@pytest.mark.parametrize(
    "first, warned",
    [
        ("import tfdpsq.run.process", False),
        pytest.param("import tensorflow", True, marks=pytest.mark.slow),
    ],
)
def test_commands_set_a_level_that_shows_no_values_or_it_is_said(first, warned):
    variables = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    code = f"{first}\nfrom tfdpsq.privacy import training\n"
    done = subprocess.run(
        [sys.executable, "-c", code + "print(training.LOG_LEVEL)"],
        env={**variables, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout.strip() == "0") == warned
