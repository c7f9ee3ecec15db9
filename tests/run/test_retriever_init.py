"""A retriever that starts from a T5's encoder: its weights, and what they cost."""

import json
import math

import numpy as np
import pytest
import tensorflow as tf
from helpers import tiny as _tiny

from tfdpsq.data import BeirDirectory, read_manifest, train_vocabulary
from tfdpsq.generator import T5QueryGenerator
from tfdpsq.generator.checkpoints import presets
from tfdpsq.privacy import read_certificate
from tfdpsq.run.training import plain_training
from tfdpsq.validation import InputError


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Pairs, public and private T5s of another shape than any default."""
    base = tmp_path_factory.mktemp("init")
    _tiny.write_start(base, version="1.1")
    for name, epsilon in (("protected", 8.0), ("other", 4.0), ("open", math.inf)):
        _tiny.write_private_generator(base / name, base / "public", epsilon)
    for name, certificate in (
        ("public_pairs", None),
        ("other_pairs", read_certificate(base / "other")),
    ):
        rows = ((f"who sorts it {i}", f"d{i}", f"It sorts {i}.") for i in range(12))
        _tiny.write_set(base / name, rows, certificate)
    return base


def _train(base, name, **options):
    """The retriever that the stage makes, and its certificate."""
    usual = {"pairs": str(base / "public_pairs"), "embedding_dim": 16}
    usual = _tiny.training(base, **usual, batch_size=4, steps=2)
    return _tiny.train_retriever(base / name, options, **usual)


def test_in_bfloat16_weights_keep_their_last_digits(base):
    exact, _ = _train(base, "exact")
    before, _ = _train(base, "before", steps=0)
    low, _ = _train(base, "low", dtype="mixed_bfloat16")
    start, high, low = (
        np.concatenate([v.ravel() for v in m.get_weights()])
        for m in (before, exact, low)
    )
    assert low.dtype == np.float32
    assert np.mean(low != tf.cast(tf.cast(low, tf.bfloat16), tf.float32)) > 0.9
    # Two steps of Adam in nearly the same direction, from the same weights.
    steps = high - start, low - start
    cosine = steps[0] @ steps[1] / np.prod([np.linalg.norm(s) for s in steps])
    assert 0.9 < cosine < 0.99999


def _encoder_weights(model):
    return [
        tower.get_layer("t5_encoder").get_weights()
        for tower in (model.query_tower, model.document_tower)
    ]


@pytest.mark.parametrize("shared", [True, False])
def test_it_starts_with_the_encoder_and_the_vocabulary_of_init(base, shared):
    name = f"untrained_{shared}"
    # `t5` is of another shape, and is not looked at.
    model, certificate = _train(base, name, steps=0, shared=shared)
    generator = T5QueryGenerator.from_preset(base / "public")
    assert model.config.t5 == generator.config
    expected = [
        # The head of T5 1.1 is no part of an encoder.
        weight.numpy()
        for weight in generator.encoder.weights
        if "reverse_embeddings" not in weight.name
    ]
    for weights in _encoder_weights(model):
        assert len(weights) == len(expected)
        for one, other in zip(weights, expected):
            np.testing.assert_array_equal(one, other)
    assert certificate is None
    stage = json.loads((base / name / "stage.json").read_text())
    assert "init" in stage["inputs"] and stage["result"] == {"steps_executed": 0}
    # And it scores as the pooled encoder does: its projection is a rotation.
    ids, lengths = tf.constant([[5, 6, 7], [8, 9, 1]]), tf.constant([3, 2])
    found = model.encode_queries(ids, lengths)
    pooled = []
    for row, length in zip(ids, lengths.numpy()):
        row = row[tf.newaxis, :length]
        pooled.append(generator.encode(row, tf.ones_like(row)).numpy()[0].mean(0))
    cosine = pooled[0] @ pooled[1] / np.prod(np.linalg.norm(pooled, axis=1))
    assert float(tf.tensordot(found[0], found[1], 1)) == pytest.approx(cosine, abs=1e-5)


@pytest.mark.slow
def test_training_goes_on_from_there(base):
    start = _encoder_weights(_train(base, "start", steps=0)[0])[0]
    model, certificate = _train(base, "trained", learning_rate=1e-4)
    moved = [
        np.abs(one - other).max()
        for one, other in zip(_encoder_weights(model)[0], start)
    ]
    # Two steps of Adam, of 1e-4 each at most.
    assert 0 < max(moved) < 3e-4
    assert certificate is None


@pytest.mark.slow
def test_a_falling_rate_goes_less_far(base):
    start = _encoder_weights(_train(base, "start", steps=0)[0])[0]
    moved = {}
    for schedule in ("constant", "cosine"):
        # So low a rate that both see nearly the same gradients.
        options = {"schedule": schedule, "steps": 20, "learning_rate": 1e-5}
        weights = _encoder_weights(_train(base, f"by_{schedule}", **options)[0])[0]
        moved[schedule] = sum(
            float(np.sum((one - other) ** 2)) for one, other in zip(weights, start)
        )
    # Rates of a cosine are on average 1/2 of the highest where steps agree; their root
    # mean square, .61 of it, counts where steps are independent.
    assert 0.45 < (moved["cosine"] / moved["constant"]) ** 0.5 < 0.7


def test_a_preset_is_a_place_to_start_from(base, monkeypatch):
    monkeypatch.setattr(presets, "_FOLDER", base)
    named, _ = _train(base, "named", init="public", steps=0)
    by_path, _ = _train(base, "by_path", steps=0)
    for one, other in zip(_encoder_weights(named)[0], _encoder_weights(by_path)[0]):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("init, steps", [("protected", 0), ("open", 2)])
def test_what_init_cost_is_inherited(base, init, steps):
    parent = read_certificate(base / init)
    _, certificate = _train(
        base, f"from_{init}_{steps}", init=str(base / init), steps=steps
    )
    assert certificate == parent
    assert certificate["private"] == (init == "protected")


def test_what_is_trained_on_counts_too(base):
    other = read_manifest(base / "other_pairs")["certificate"]
    pairs = str(base / "other_pairs")
    # The same guarantee twice, and one that is none.
    assert _train(base, "same", pairs=pairs, init=str(base / "other"))[1] == other
    _, none = _train(base, "none", pairs=pairs, init=str(base / "open"))
    assert none == read_certificate(base / "open") and none["private"] is False
    # What is not looked at costs nothing.
    untrained = _train(base, "zero", pairs=pairs, init=str(base / "protected"), steps=0)
    assert untrained[1] == read_certificate(base / "protected")


def test_two_guarantees_are_refused_before_any_training(base, monkeypatch):
    monkeypatch.setattr(plain_training, "train", lambda *args: pytest.fail("trained"))
    with pytest.raises(InputError, match="epsilons would add up"):
        _train(
            base,
            "two",
            pairs=str(base / "other_pairs"),
            init=str(base / "protected"),
        )
    assert not (base / "two").exists()


def test_plain_training_on_private_pairs_protects_nothing_whatever_init(base):
    _, certificate = _train(
        base, "plain", pairs=str(base / "pairs"), init=str(base / "protected")
    )
    assert certificate["private"] is False
    assert certificate["training"]["starting_weights"] == str(base / "protected")


@pytest.mark.slow
def test_naive_training_starts_from_public_weights_only(base):
    private = {"pairs": str(base / "pairs"), "method": "naive", "epsilon": 8.0}
    for init in ("protected", "open"):
        refused = "was itself trained on private queries|whose guarantee is 'private'"
        with pytest.raises(InputError, match=refused):
            _train(base, "naive", init=str(base / init), **private)
        assert not (base / "naive").exists()
        assert not list(base.glob("private/runs/naive/*"))  # nothing was spent
    model, certificate = _train(base, "naive_public", **private)
    assert certificate["guarantee"]["epsilon"] <= 8.0
    assert certificate["training"]["starting_weights"] == str(base / "public")
    start = _encoder_weights(_train(base, "naive_start", steps=0)[0])[0]
    assert any(
        np.any(one != other) for one, other in zip(_encoder_weights(model)[0], start)
    )


def test_a_vocabulary_that_does_not_fit_is_refused(base, tmp_path):
    lines = [f"w{i} x{i} y{i} z{i * 7} again and again" for i in range(300)]
    train_vocabulary(lines, 340, tmp_path / "large.model")
    with pytest.raises(InputError, match="was trained with another vocabulary"):
        _train(base, "large", vocabulary=str(tmp_path / "large.model"))
    with pytest.raises(InputError, match="no vocabulary was given, and a model"):
        _train(base, "large", init="")
    train_vocabulary(lines, 300, tmp_path / "other.model")
    with pytest.raises(InputError, match="was trained with another vocabulary"):
        _train(base, "large", vocabulary=str(tmp_path / "other.model"))
    assert not (base / "large").exists()


@pytest.mark.slow
def test_a_retriever_goes_on_where_another_stopped(base):
    vocabulary = str(base / "public" / "spiece.model")
    before, _ = _train(base, "first", learning_rate=1e-2)
    options = {"init": str(base / "first"), "vocabulary": vocabulary}
    after, _ = _train(base, "goes_on", steps=0, scale=5.0, **options)
    for one, other in zip(
        after.query_tower.get_weights(), before.query_tower.get_weights()
    ):
        np.testing.assert_array_equal(one, other)
    assert after.config.scale == 5.0
    other = base / "other.model"
    if not other.exists():
        texts = (d.content for d in BeirDirectory(base / "pairs").documents())
        train_vocabulary(texts, 320, other)
    with pytest.raises(InputError, match="was trained with another"):
        _train(base, "other_words", init=options["init"], vocabulary=str(other))
    for field, value in (("embedding_dim", 8), ("pooling", "first"), ("shared", False)):
        with pytest.raises(InputError, match=f"{field} is {value}"):
            _train(base, f"other_{field}", **options, **{field: value})


def test_what_a_retriever_cost_is_inherited(base):
    vocabulary = str(base / "public" / "spiece.model")
    _train(base, "costly", init=str(base / "protected"), steps=0)
    options = {"init": str(base / "costly"), "vocabulary": vocabulary}
    assert _train(base, "heir", **options)[1] == read_certificate(base / "protected")
    with pytest.raises(InputError, match="itself trained on private queries"):
        _train(base, "twice", pairs=str(base / "pairs"), method="naive", **options)


@pytest.mark.slow
def test_only_what_matches_is_trained(base):
    start, _ = _train(base, "part_start", steps=0)
    for method, pairs in (("plain", "public_pairs"), ("public_negatives", "pairs")):
        model, certificate = _train(
            base,
            f"part_{method}",
            pairs=str(base / pairs),
            method=method,
            negatives=8,
            epsilon=math.inf if method == "plain" else 8.0,
            trained=("*projection/kernel",),
        )
        moved = {
            weight.name
            for weight, before in zip(
                model.query_tower.weights, start.query_tower.weights
            )
            if np.any(weight.numpy() != before.numpy())
        }
        assert moved == {"projection/kernel:0"}
        if certificate is not None:
            assert certificate["training"]["trained"] == ["*projection/kernel"]
            assert certificate["training"]["trained_parameters"] == 16 * 16
    with pytest.raises(InputError, match="Add 'scale/\\*'"):
        _train(base, "no_scale", learned_scale=True, trained=("*projection/kernel",))
    with pytest.raises(InputError, match="nothing_like_it"):
        _train(base, "no_part", trained=("*nothing_like_it",))
