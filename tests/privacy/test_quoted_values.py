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

from tfdpsq.privacy import (
    PrivateModel,
    environment,
    make_optimizer,
    read_ledger,
    train,
)
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

    optimizer = make_optimizer(plan, 0.1, "sgd")
    return train(
        plan, losses, [layer.kernel], optimizer, take, 5, layers=[layer], **options
    )


@pytest.mark.parametrize("bad, where", [(0, "tried before the first step"), (7, "of")])
def test_what_take_looks_up_is_not_quoted(bad, where):
    """Row 0 is always tried, row 7 drawn by some step."""
    table = np.ones([10, 3], np.float32)
    ids = np.arange(20) % 10
    ids[bad] = 987654

    def take(at):
        return {"x": tf.nn.embedding_lookup(table, ids[at]).numpy()}

    with pytest.raises((InputError, tf.errors.OpError)) as caught:
        _train(_plan(), take)
    said = str(caught.value)
    assert "987654" not in said and "Check take" in said
    assert re.search(f"the rows {where}.*could not be taken", said)


def test_the_number_of_rows_is_not_told_where_a_bound_is_given():
    data = np.ones([17, 3], np.float32)
    with pytest.raises(InputError, match="take has no row 19") as caught:
        _train(_plan(), lambda at: {"x": data[at]})
    assert "17" not in str(caught.value)
    assert caught.value.__suppress_context__  # numpy's message has it


def test_a_text_that_tensorflow_does_not_take_costs_no_step(tmp_path):
    """It used to fail after the payment, with no way to go on."""
    texts = np.array(["some text"] * 20, "U40")
    texts[7] = "my secret \ud83d query"
    # Every step draws it, but no trial does.
    plan = _plan(batch_size=20, sampler="shuffled", n_is_public=True, steps=2)
    with pytest.raises(ValueError) as e:  # TensorFlow's own, if it is not refused
        _train(
            plan,
            lambda at: {"text": texts[at]},
            directory=tmp_path,
            data_fingerprint="texts",
        )
    assert "'text' has a text that is not UTF-8" in str(e.value)
    assert "secret" not in str(e.value) and e.value.__suppress_context__
    assert read_ledger(tmp_path / "ledger.jsonl").steps_paid == 0
    texts[7] = "Grüße, 漢字"
    assert _train(plan, lambda at: {"text": texts[at]}) == 2
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(3,))])
    private = PrivateModel(model, plan, microbatch_size=5)
    private.compile(make_optimizer(plan, 0.1, "sgd"), _squared)
    texts[3] = "\ud83d"
    with pytest.raises(InputError, match="one of the arrays of fit"):
        private.fit({"x": np.ones([20, 3], np.float32), "t": texts}, np.ones(20))


def _squared(target, predicted):
    return tf.reduce_sum(tf.square(target - predicted), -1)


def _fitted(validation_data, **compiled):
    x = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(3,))])
    private = PrivateModel(model, plan := _plan(), microbatch_size=5)
    private.compile(make_optimizer(plan, 0.1, "sgd"), _squared, **compiled)
    try:
        return private, private.fit(x, x.sum(1), validation_data=validation_data(x))
    except Exception as error:
        return private, error


@pytest.mark.parametrize(
    "validation_data, compiled, kind",
    [
        (lambda x: (x, x.sum(1)), {"metrics": ["acuracy"]}, "TypeError"),
        (lambda x: (x[:, :2], x.sum(1)), {}, "ValueError"),
        (lambda x: (x, np.array(["secret"] * 20)), {}, None),
    ],
)
def test_validation_that_cannot_be_evaluated_costs_no_epoch(
    validation_data, compiled, kind
):
    private, error = _fitted(validation_data, **compiled)
    assert isinstance(error, InputError)
    assert "validation_data" in str(error) and "Nothing was spent" in str(error)
    assert "secret" not in str(error) and private.steps_executed == 0
    assert kind is None or f"({kind})" in str(error)


def test_validation_takes_weights_of_rows():
    """They used to reach Keras as the size of a batch."""
    keep = np.repeat([1.0, 0.0], 10)
    private, history = _fitted(lambda x: (x, x.sum(1), keep))
    x = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    losses = (private(x)[:, 0].numpy() - x.sum(1)) ** 2
    expected = (losses * keep).mean()  # as Keras has it: over all rows
    assert history.history["val_loss"][-1] == pytest.approx(expected, rel=1e-5)


_BAD_LABEL = """
import numpy as np
{first}
from tfdpsq import privacy
import tensorflow as tf
y = np.arange(20) % 9
y[7] = 471147114
model = tf.keras.Sequential([tf.keras.layers.Dense(10, input_shape=(3,))])
plan = privacy.make_plan(privacy.PrivacySpec(
    epsilon=2.0, clip_norm=1.0, num_units=20, batch_size=15, steps=6, accountant="rdp"))
private = privacy.PrivateModel(model, plan, microbatch_size=5, strict=True)
loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
private.compile(privacy.make_optimizer(plan, 0.1, "sgd"), loss=loss)
try:
    private.fit(np.ones([20, 3], np.float32), y)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    "first", ["", "import tensorflow", "import tfdpsq.run.finetune, tfdpsq.run.prepare"]
)
def test_tensorflow_logs_no_row_of_a_refused_batch_or_it_is_said(first):
    """Its warning shows labels of the whole batch, whatever the exception says."""
    variables = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-c", _BAD_LABEL.format(first=first)],
        env={**variables, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "InputError" in done.stdout and "471147114" not in done.stdout
    warned = "TensorFlow was imported with TF_CPP_MIN_LOG_LEVEL=0" in done.stderr
    assert warned == (first == "import tensorflow")
    assert ("471147114" in done.stderr) == warned


def test_a_level_that_shows_values_is_named(monkeypatch):
    for level, warned in (("0", True), ("1", True), ("2", False), ("3", False)):
        monkeypatch.setattr(environment, "_LEVEL", level)
        assert (environment.warning_of_logs() is not None) == warned
