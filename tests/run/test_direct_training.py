"""Direct DP training as its users run it: what is certified, what is refused."""

import json

import numpy as np
import pytest
import tensorflow as tf
from helpers import tiny as _tiny

from tfdpsq import retriever
from tfdpsq.privacy import read_ledger, verify_certificate
from tfdpsq.privacy.proof.certificate import digest_of
from tfdpsq.retriever.model import ordered_weights
from tfdpsq.retriever.training import content_key
from tfdpsq.run import train_retriever
from tfdpsq.run.training import direct_training, private_training
from tfdpsq.validation import InputError


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Private pairs, and a public T5 with its vocabulary."""
    base = tmp_path_factory.mktemp("direct")
    _tiny.write_start(base)
    return base


def _train(base, name, **options):
    usual = {"embedding_dim": 16, "steps": 2, "epsilon": 8.0}
    method = {"clip_groups": 2, "negatives": 20, "microbatch_size": 4}
    settings = _tiny.training(base, **usual, **method)
    return _tiny.train_retriever(base / name, options, **settings)


@pytest.mark.parametrize("method", retriever.METHODS)
def test_each_method_trains_and_certifies_the_sensitivity_it_derives(base, method):
    scale = 1.0 if method == "logit_dp" else 20.0
    at_a_time = 5 if method == "naive" else 4  # five divide no batch that is tried
    model, certificate = _train(
        base, method, method=method, scale=scale, microbatch_size=at_a_time
    )
    assert certificate["training"]["method"] == method
    engine = certificate["training"]["engine"]
    assert engine.startswith("none:") if method == "naive" else engine == "fast"
    assert certificate["training"]["microbatch_size"] == at_a_time
    assert 7.0 < certificate["guarantee"]["epsilon"] <= 8.0
    assert verify_certificate(certificate).problems == ()
    largest = certificate["sampler"]["max_batch_size"]
    multiplier = {
        "naive": 2 * largest - 1,
        "microbatch": 2,
        "logit_dp": retriever.logit_dp_sensitivity_multiplier(largest, scale),
        "public_negatives": 1,
    }[method]
    sensitivity = certificate["mechanism"]["sensitivity"]
    assert sensitivity == pytest.approx(0.1 * multiplier)
    groups = {"clip_groups": 2} if method == "microbatch" else {}
    assert {**certificate["sampler"], **groups} == certificate["sampler"]
    assert ("clip_groups" in certificate["sampler"]) == bool(groups)
    assert ("dealt" in certificate["sampler"]["in_words"]) == (method == "microbatch")
    assert all(np.isfinite(v.numpy()).all() for v in model.trainable_variables)
    # An edited sensitivity, and groups that were not there, are noticed.
    for section, field in (("mechanism", "sensitivity"), ("sampler", "clip_groups")):
        edited = json.loads(json.dumps(certificate))
        edited[section][field] = 0.05
        edited["digest"] = digest_of(edited)  # as whoever edits it would
        assert verify_certificate(edited).problems


@pytest.mark.parametrize("strict", [True, False])
def test_a_strict_run_shows_no_loss_of_private_queries(base, tmp_path, strict):
    """Its private directory is its own: reads of other runs would count."""
    options = {"method": "public_negatives", "strict": strict}
    _, certificate = _train(base, tmp_path / "made", **options)
    reads = [read["what"] for read in certificate["private_reads"]]
    assert reads == ([] if strict else [private_training.LOSS_READ["what"]])
    log = tmp_path / "private" / "logs" / "made" / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert lines and all(("loss" in line) != strict for line in lines)


def test_bfloat16_is_certified_and_rounds_no_weight(base):
    """Noise and weights would lose digits that accounting takes for granted."""
    options = {"method": "public_negatives", "dtype": "mixed_bfloat16"}
    model, certificate = _train(base, "low", **options)
    assert certificate["training"]["computed_in"] == "mixed_bfloat16"
    assert verify_certificate(certificate).problems == ()
    weights = np.concatenate([v.ravel() for v in model.get_weights()])
    assert weights.dtype == np.float32
    rounded = tf.cast(tf.cast(weights, tf.bfloat16), tf.float32)
    assert np.mean(weights != rounded) > 0.9


@pytest.mark.parametrize("method", ["microbatch", "public_negatives"])
@pytest.mark.parametrize(
    "changes, message",
    [
        ({"sampler": "shuffled"}, "sampler is 'shuffled', for which its sensitivity"),
        ({"unit": "user"}, "unit is 'user', for which its sensitivity"),
        ({"scale": 0.0}, "scale is 0.0"),
        ({"scale": -1.0}, "scale is -1.0"),
    ],
)
def test_what_a_method_was_not_derived_for_is_refused(base, method, changes, message):
    with pytest.raises(InputError, match=message):
        _train(base, "refused", method=method, **changes)
    assert not (base / "refused").exists()
    assert not list(base.glob("private/runs/refused/ledger.jsonl"))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"method": "public_negatives", "negatives": 85}, "negatives is 85, but there"),
        ({"method": "public_negatives", "refresh_every": 0}, "refresh_every is 0"),
        ({"method": "public_negatives", "microbatch_size": 0}, "microbatch_size is 0"),
        ({"method": "public_negatives", "most_documents": 0}, "most_documents is 0"),
        ({"method": "microbatch", "clip_groups": 9}, "clip_groups is 9"),
        ({"method": "logit_dp", "engine": "vectorized"}, "cannot weight the grad"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_is_spent(
    base, changes, message
):
    with pytest.raises(InputError, match=message):
        _train(base, "refused", scale=1.0, **changes)
    assert not (base / "refused").exists()
    ledger = base / "private" / "runs" / "refused" / "ledger.jsonl"
    assert not ledger.exists() or read_ledger(ledger).steps_paid == 0


def test_a_run_keeps_its_negatives_with_the_weights(base, monkeypatch):
    """Whatever the loss reads besides rows and weights is set anew, or restored."""
    seen = {}

    def spy(devices, model, plan, loss, optimizer, take, microbatch_size=0, **options):
        seen.update(options, loss=loss, model=model)
        raise InterruptedError

    monkeypatch.setattr(private_training, "train", spy)
    with pytest.raises(InterruptedError):
        _train(base, "kept", method="public_negatives", refresh_every=5)
    loss, trained = seen["loss"], {id(v) for v in seen["model"].variables}
    held = [v for v in vars(loss).values() if isinstance(v, tf.Variable)]
    held = {id(v) for v in held} - trained
    assert len(held) == 2 and {id(v) for v in seen.get("state", ())} == held
    assert seen.get("before_step") == loss.refresh


_PROJECTION = {"shared": False, "trained": ("query_tower/projection/kernel",)}


@pytest.mark.parametrize("method", retriever.METHODS)
def test_only_the_projection_is_trained_from_pooled_queries(base, monkeypatch, method):
    """It is all that moves; the queries' states are gone when the run is finished."""
    seen = {}
    train = private_training.train

    def spy(devices, model, plan, loss, optimizer, take, **options):
        towers = {n: getattr(model, n) for n in ("query_tower", "document_tower")}
        before = {
            name: [weight.numpy() for weight in ordered_weights(tower)]
            for name, tower in towers.items()
        }
        seen.update(rows=take(np.array([0, 1])), before=before)
        return train(devices, model, plan, loss, optimizer, take, **options)

    monkeypatch.setattr(private_training, "train", spy)
    name = f"projection_{method}"
    model, certificate = _train(base, name, method=method, scale=1.0, **_PROJECTION)
    pooled = method in ("microbatch", "public_negatives")
    assert ("query_states" in seen["rows"]) == pooled
    assert ("query_ids" in seen["rows"]) != pooled
    moved = {
        (tower, weight.name)
        for tower in ("query_tower", "document_tower")
        for weight, before in zip(
            ordered_weights(getattr(model, tower)), seen["before"][tower]
        )
        if (weight.numpy() != before).any()
    }
    assert moved == {("query_tower", "projection/kernel:0")}
    assert verify_certificate(certificate).problems == ()
    assert not list((base / "private" / "runs" / name).rglob("query_states"))


def test_logit_dp_tells_when_its_bound_is_vacuous(caplog):
    config = train_retriever.default_config()
    config.update({"method": "logit_dp", "batch_size": 8, "steps": 2, "epsilon": 8.0})
    config.update({"accountant": "rdp", "n_is_public": True})
    units = private_training.Units(100, None, True)
    for scale, told in ((1.0, False), (20.0, True)):
        config.scale = scale
        with caplog.at_level("WARNING"):
            plan = direct_training.make_plan(config, units)
        assert ("no better than naive's" in caplog.text) == told
        assert plan.sensitivity < 0.1 * (2 * plan.max_batch_size + 1e-9)


def test_the_negatives_are_drawn_from_all_documents_and_not_from_the_pairs(
    base, monkeypatch
):
    seen = {}

    def spy(model, corpus, *options):
        seen["keys"] = set(corpus["document_key"])
        raise InterruptedError

    monkeypatch.setattr(retriever, "PublicNegatives", spy)
    with pytest.raises(InterruptedError):
        _train(base, "drawn", method="public_negatives")
    lines = (base / "pairs" / "corpus.jsonl").read_text().splitlines()
    texts = [json.loads(line) for line in lines]
    contents = [f"{t.get('title', '')} {t['text']}".strip() for t in texts]
    assert seen["keys"] == {content_key(text) for text in contents}
    assert len(seen["keys"]) == 84  # those of dev and test queries, too
