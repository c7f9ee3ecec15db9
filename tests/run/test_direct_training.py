"""Direct DP training as its users run it: what is certified, what is refused."""

import json

import numpy as np
import pytest
import tensorflow as tf
from helpers import framed, tiny

from tfdpsq import retriever
from tfdpsq.privacy import read_certificate, verify_certificate
from tfdpsq.retriever.model import ordered_weights
from tfdpsq.run.common import training
from tfdpsq.run.common.kinds import MODEL
from tfdpsq.run.stages import train_retriever
from tfdpsq.validation import InputError


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """60 private queries in 63 pairs, and a public T5 with its vocabulary."""
    base = tmp_path_factory.mktemp("direct")
    tiny.write_start(base)
    tiny.add_answers(base)
    return base


_OF = {"microbatch": {"num_microbatches": 2}, "public_negatives": {"negatives": 20}}


def _train(base, name, method, **options):
    usual = {"embedding_dim": 16, "steps": 2, "epsilon": 8.0, "microbatch_size": 4}
    settings = {"method": method, **usual, **_OF.get(method, {}), **options}
    out = base / name / "out"
    framed.run(train_retriever.STAGE, out, **tiny.training(base, **settings))
    return retriever.load(out / MODEL), read_certificate(out)


def _points(base, name):
    private = base / name / "private"
    lines = (private / "logs" / "out" / "log.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("method", ["naive", "microbatch", "public_negatives"])
def test_each_method_certifies_the_sensitivity_it_derives(base, method):
    """Losses are shown, and recorded as a read, unless the run is strict."""
    options = {"scale": 1.0, "strict": method == "naive"}
    options["trained"] = ("*projection/kernel",)  # a small graph
    if method == "naive":
        options["microbatch_size"] = 5  # divides no batch that is tried
    if method == "public_negatives":
        options["unit"] = "pair"
    model, certificate = _train(base, method, method, **options)
    stated = certificate["training"]
    assert stated["method"] == method
    engine = {"microbatch": "vectorized", "public_negatives": "fast"}
    assert stated["engine"].startswith(engine.get(method, "none"))
    assert 7.0 < certificate["guarantee"]["epsilon"] <= 8.0
    assert verify_certificate(certificate).problems == ()
    sampler = certificate["sampler"]
    largest = sampler["max_batch_size"]
    multiplier = {
        "naive": 2 * largest - 1,
        "microbatch": 2,
        "public_negatives": 1,
    }[method]
    sensitivity = certificate["mechanism"]["sensitivity"]
    assert sensitivity == pytest.approx(0.1 * multiplier)
    dealt = certificate["spec"]["num_microbatches"]
    assert dealt == (2 if method == "microbatch" else None)
    # 63 pairs of 60 queries.
    unit = "pair" if method == "public_negatives" else "query"
    assert certificate["guarantee"]["unit"] == unit
    assert sampler["n"] == (63 if unit == "pair" else 60)
    assert f"one {unit}" in certificate["mechanism"]["sensitivity_argument"].lower()
    assert all(np.isfinite(v.numpy()).all() for v in model.trainable_variables)
    reads = [read["what"] for read in certificate["private_reads"]]
    shown = [] if options["strict"] else [training.LOSS_READ[0]]
    assert reads == shown
    points = _points(base, method)
    assert points and all(("loss" in point) == bool(shown) for point in points)


def test_noise_for_the_papers_factor_certifies_nothing(base):
    """The batch size times C, which one query can exceed."""
    options = {"unsound": True, "trained": ("*projection/kernel",)}
    with pytest.raises(InputError, match="no epsilon covers it"):
        _train(base, "unsound", "naive", **options)
    _, certificate = _train(base, "unsound/private", "naive", **options)
    assert certificate["private"] is False
    assert certificate["guarantee"]["epsilon"] == "inf"
    with pytest.raises(InputError, match="does nothing where method is 'microbatch'"):
        _train(base, "refused", "microbatch", unsound=True)


@pytest.mark.slow
def test_bfloat16_is_certified_and_rounds_no_weight(base):
    """Noise and weights would lose digits that accounting takes for granted.

    Only the projection is trained, from queries that were pooled once; their states
    are gone when the run is finished.
    """
    options = {
        "dtype": "mixed_bfloat16",
        "shared": False,
        "trained": ("query_tower/projection/kernel",),
    }
    model, certificate = _train(base, "low", "public_negatives", **options)
    assert certificate["training"]["computed_in"] == "mixed_bfloat16"
    assert certificate["training"]["trained"] == list(options["trained"])
    assert certificate["training"]["trained_parameters"] == 16 * 16
    assert verify_certificate(certificate).problems == ()
    plain = {"pairs": tiny.write_public_pairs(base), "shared": False, "steps": 0}
    settings = tiny.training(base, embedding_dim=16, **plain)
    framed.run(train_retriever.STAGE, base / "start", **settings)
    start = retriever.load(base / "start" / MODEL)
    moved = {
        (tower, weight.name)
        for tower in ("query_tower", "document_tower")
        for weight, before in zip(
            *(ordered_weights(getattr(each, tower)) for each in (model, start))
        )
        if (weight.numpy() != before.numpy()).any()
    }
    assert moved == {("query_tower", "projection/kernel:0")}
    weights = np.concatenate([v.ravel() for v in model.get_weights()])
    assert weights.dtype == np.float32
    rounded = tf.cast(tf.cast(weights, tf.bfloat16), tf.float32)
    assert np.mean(weights != rounded) > 0.9
    assert not list((base / "low" / "private" / "runs").rglob("query_states"))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"sampler": "shuffled"}, "sampler is 'shuffled'"),
        ({"unit": "user", "method": "microbatch"}, "unit is 'user'"),
        # Negatives are drawn from all documents, not from those of the pairs.
        ({"negatives": 85}, "negatives is 85, but there are 84"),
        ({"method": "microbatch", "num_microbatches": 9}, "num_microbatches is 9"),
    ],
)
def test_impossible_settings_are_refused_with_the_ledger_unpaid(base, changes, message):
    with pytest.raises(InputError, match=message):
        _train(base, "refused", **{"method": "public_negatives", **changes})
    assert not list((base / "refused").rglob("ledger.jsonl"))
    assert not list((base / "refused").rglob(MODEL))
