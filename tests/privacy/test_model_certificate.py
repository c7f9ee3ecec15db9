"""The certificate that a private model of another project has."""

import json

import pytest
import tensorflow as tf
from helpers.fitted import compiled, data, functional, plan_of

from tfdpsq import privacy
from tfdpsq.privacy.proof import certificate as certificates
from tfdpsq.validation import InputError


def _model(wrapped=None, options=None, **changes):
    plan = plan_of(n_is_public=True, steps=4, **changes)
    return compiled(wrapped or functional(), plan, **(options or {}))


def test_it_states_what_ran_and_anyone_can_recompute_it(tmp_path):
    model = _model()
    with pytest.raises(InputError, match="has run 0 of 4 steps; finish it"):
        model.certificate("Three numbers from six.")
    model.reads.record("scores of an earlier model", "the terminal")
    model.fit(*data(), directory=tmp_path / "private")
    pairs = "hmac-sha256:" + "3" * 64
    written = tmp_path / "certificate.json"
    found = model.certificate("Three numbers from six.", fingerprints={"pairs": pairs})
    written.write_text(json.dumps(found))
    read = privacy.read_certificate(tmp_path)
    assert read == found
    paid = tmp_path / "private" / "ledger.jsonl"
    assert privacy.verify_certificate(read).problems == ()
    assert certificates.ledger_problems(read, privacy.read_ledger(paid)) == ()
    assert read["guarantee"]["epsilon"] == pytest.approx(model.epsilon())
    assert 7.5 < read["guarantee"]["epsilon"] <= 8.0
    assert read["accounting"]["steps_executed"] == 4
    assert read["run_id"] == privacy.read_ledger(paid).run
    reads = [entry["what"] for entry in read["private_reads"]]
    assert reads == ["scores of an earlier model", "the training loss of every step"]
    assert "one query moves the sum" in read["mechanism"]["sensitivity_argument"]
    (run,) = certificates.verified_runs(read, "certificate.json")
    assert run.pairs == pairs


def test_it_lists_the_reads_of_a_process_that_was_killed(tmp_path):
    class Stop(tf.keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise KeyboardInterrupt

    x, y = data()
    options = {"directory": tmp_path / "private", "validation_data": (x, y)}
    with pytest.raises(KeyboardInterrupt):
        _model().fit(x, y, steps_per_epoch=2, callbacks=[Stop()], **options)
    model = _model()  # as a new process makes it
    model.fit(x, y, directory=tmp_path / "private")
    found = model.certificate("Three numbers from six.")
    assert [entry["what"] for entry in found["private_reads"]] == [
        "the validation data, after every epoch",
        "the training loss of every step",
    ]


def _adapted():
    """A model whose first layer holds the mean and variance of the rows."""
    x, y = data()
    scale = tf.keras.layers.Normalization()
    scale.adapt(x)
    outer = tf.keras.Sequential([scale, tf.keras.layers.Dense(3)])
    return x, y, outer


def test_statistics_of_rows_are_released_only_where_their_owner_is_declared(tmp_path):
    """Keras's usual first layer holds them exactly, and so does what is released."""
    x, y, outer = _adapted()
    refused = _model(tf.keras.Sequential([outer]))  # also where it is nested
    with pytest.raises(InputError, match=r"adapt\(\) was called on normalization"):
        refused.fit(x, y, directory=tmp_path / "private")
    assert not list(tmp_path.rglob("ledger.jsonl"))
    assert refused.steps_executed == 0
    strict = _model(outer, options={"strict": True, "adapted_to": "private"})
    with pytest.raises(InputError, match="strict mode refuses .*normalization"):
        strict.fit(x, y)
    stated = _model(outer, options={"adapted_to": "private"})
    stated.fit(x, y)
    found = stated.certificate("Three numbers from six.")
    (read,) = (e for e in found["private_reads"] if "adapted" in e["what"])
    assert read["where"] == "the weights" and "normaliz" in read["what"]
    _, _, outer = _adapted()
    free = _model(outer, options={"adapted_to": "public"})
    free.fit(x, y)
    found = free.certificate("Three numbers from six.")
    assert found["training"]["adapted_layers"].endswith(", to public data")
    assert not any("adapted" in e["what"] for e in found["private_reads"])
    assert privacy.verify_certificate(found).problems == ()


def test_an_argument_of_ones_own_is_stated_and_needed_where_the_usual_does_not_hold():
    model = _model(sensitivity_multiplier=2.0)
    model.fit(*data())
    with pytest.raises(InputError, match="sensitivity_multiplier is 2.0. Give"):
        model.certificate("Three numbers from six.")
    found = model.certificate("Three numbers.", "A row has two of them.")
    assert found["mechanism"]["sensitivity_argument"] == "A row has two of them."
    assert found["mechanism"]["sensitivity"] == 2.0
    assert privacy.verify_certificate(found).problems == ()
