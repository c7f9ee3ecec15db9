"""The two-tower model: what padding may change (nothing), training, saving."""

import dataclasses
import json

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.layers import build_encoder, train_only
from tfdpsq.retriever import (
    collate,
    encode_pairs,
    load,
    make_batches,
    save,
)
from tfdpsq.retriever.model import ordered_weights
from tfdpsq.retriever.store import encoder_fingerprint
from tfdpsq.validation import DataError, InputError

LENGTHS = {"query_length": 6, "document_length": 12}


def _ids(lengths, width, seed=0):
    """Random tokens everywhere, beyond the lengths too."""
    draw = np.random.default_rng(seed)
    return tf.constant(draw.integers(1, 60, (len(lengths), width)), tf.int32)


def test_embeddings_are_float32_of_unit_length(model):
    lengths = tf.constant([3, 1, 8])
    for encode in (model.encode_queries, model.encode_documents):
        got = encode(_ids([3, 1, 8], 8), lengths)
        assert (got.dtype, got.shape) == (tf.float32, (3, 12))
        np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1, atol=1e-6)


def test_mixed_bfloat16_is_of_the_encoders_products_alone(make_model, make_batch):
    exact, model = make_model(), make_model(dtype="mixed_bfloat16")
    assert {v.dtype.base_dtype for v in model.variables} == {tf.float32}
    batch = make_batch()
    losses = tf.function(lambda rows: model.per_example_losses(rows, training=True))
    operations = losses.get_concrete_function(batch).graph.get_operations()
    kinds = {}
    for op in operations:
        if op.type in ("Softmax", "Rsqrt", "BatchMatMulV2", "MatMul"):
            kinds.setdefault(op.type, []).append(op.outputs[0].dtype)
    assert set(kinds["Softmax"]) == set(kinds["Rsqrt"]) == {tf.float32}
    # For queries and for documents: a layer's 4 + 3 kernels, and 2 of its attention.
    products = kinds["BatchMatMulV2"] + kinds["MatMul"]
    assert products.count(tf.bfloat16) == 2 * (4 + 3 + 2)
    # Two projections, and the scores.
    assert products.count(tf.float32) == 3
    assert losses(batch).dtype == tf.float32
    low, high = (m(batch)["documents"].numpy() for m in (model, exact))
    assert low.dtype == np.float32
    cosines = (low * high).sum(axis=1)
    assert 0.999 < cosines.min() and np.abs(low - high).max() > 1e-5


def test_a_global_mixed_policy_is_as_that_of_the_model(make_model, make_batch):
    given = make_model(dtype="mixed_bfloat16")
    tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        model = make_model()
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    model.set_weights(given.get_weights())
    batch = make_batch()
    np.testing.assert_array_equal(model(batch)["queries"], given(batch)["queries"])


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_padding_never_changes_an_embedding(make_model, make_config, version):
    t5 = dataclasses.replace(make_config().t5, version=version)
    model = make_model(t5=t5)
    lengths = [1, 4, 7, 10]
    ids = _ids(lengths, 10)
    full = model.encode_documents(ids, tf.constant(lengths)).numpy()
    for row, length in enumerate(lengths):
        # Alone and cut to its tokens; then among 30 columns of other padding.
        one = ids[row : row + 1, :length]
        alone = model.encode_documents(one, tf.constant([length]))
        wide = tf.concat([one, _ids([0], 30 - length, seed=9)], axis=1)
        padded = model.encode_documents(wide, tf.constant([length]))
        np.testing.assert_allclose(alone[0], full[row], rtol=0, atol=1e-6)
        np.testing.assert_allclose(padded[0], full[row], rtol=0, atol=1e-6)
    # Real tokens do change it, ten thousand times more than padding may.
    changed = model.encode_documents((ids + 7) % 59 + 1, tf.constant(lengths))
    assert np.abs(changed - full).max(axis=1).min() > 1e-2


def test_a_text_of_padding_is_an_error_and_in_a_graph_no_nan(model):
    ids, lengths = _ids([2, 0], 4), tf.constant([2, 0])
    with pytest.raises(InputError, match="row 1 of the mask holds padding only"):
        model.encode_queries(ids, lengths)
    got = tf.function(model.encode_queries, jit_compile=True)(ids, lengths)
    assert not np.any(got[1])
    np.testing.assert_allclose(np.linalg.norm(got[0]), 1, atol=1e-6)


def test_losses_equal_float64_arithmetic_on_the_embeddings(make_model, make_batch):
    model = make_model(scale=7.0)
    batch = make_batch()
    q = model.encode_queries(batch["query_ids"], batch["query_lengths"])
    d = model.encode_documents(batch["document_ids"], batch["document_lengths"])
    scores = 7.0 * q.numpy().astype(np.float64) @ d.numpy().astype(np.float64).T
    expected = np.log(np.exp(scores).sum(axis=1)) - np.diag(scores)
    got = model.per_example_losses(batch)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-5)
    assert float(model.compute_loss(batch)) == pytest.approx(expected.mean(), rel=1e-5)


def test_both_directions_equal_float64_arithmetic(make_model, make_rows, tokenizer):
    model = make_model(scale=7.0, bidirectional=True)
    rows = make_rows(6)
    rows[4] = dataclasses.replace(rows[4], document=rows[1].document)
    arrays = encode_pairs(rows, tokenizer, **LENGTHS)
    # Row 2's query is answered by row 5's document as well.
    arrays["positive_keys"][2, 0] = arrays["document_key"][5]
    weights = np.array([1, 1, 1, 0, 1, 1], np.float32)
    batch = collate(arrays, np.arange(6), weights)
    batch = {name: tf.constant(array) for name, array in batch.items()}
    q = model.encode_queries(batch["query_ids"], batch["query_lengths"])
    d = model.encode_documents(batch["document_ids"], batch["document_lengths"])
    scores = 7.0 * q.numpy().astype(np.float64) @ d.numpy().astype(np.float64).T
    kept = np.ones([6, 6], bool)
    kept[:, 3] = kept[3] = False
    kept[1, 4] = kept[4, 1] = kept[2, 5] = False
    shares = np.where(kept, np.exp(scores), 0)
    for i in (0, 1, 2, 4, 5):
        forward = np.log(shares[i].sum()) - scores[i, i]
        backward = np.log(shares[:, i].sum()) - scores[i, i]
        got = float(model.per_example_losses(batch)[i])
        assert got == pytest.approx((forward + backward) / 2, rel=1e-5)
    assert float(model.per_example_losses(batch)[3]) == 0


def test_a_learned_scale_is_trained_and_saved(make_model, make_batch, tmp_path):
    model = make_model(scale=5.0, learned_scale=True)
    batch = make_batch()
    fixed = make_model(scale=5.0)
    np.testing.assert_allclose(
        model.per_example_losses(batch), fixed.per_example_losses(batch), rtol=1e-6
    )
    assert len(model.trainable_variables) == len(fixed.trainable_variables) + 1
    model.compile(tf.keras.optimizers.Adam(3e-2))
    data = tf.data.Dataset.from_tensors(batch).repeat()
    model.fit(data, steps_per_epoch=10, verbose=0)
    weight = float(model.scaled.log_scale)
    assert weight > np.log(5.0) + 0.05  # sharper is better once it has learned
    save(model, tmp_path / "learned")
    loaded = load(tmp_path / "learned")
    assert float(loaded.scaled.log_scale) == weight
    np.testing.assert_allclose(
        loaded.per_example_losses(batch), model.per_example_losses(batch)
    )


def test_the_first_token_stands_for_its_text(make_model):
    model = make_model(pooling="first")
    ids, lengths = _ids([3, 6], 6), tf.constant([3, 6])
    mask = tf.cast(tf.range(6)[None] < lengths[:, None], tf.int32)
    tower = model.query_tower
    states = tower.get_layer("t5_encoder")(
        {"encoder_token_ids": ids, "encoder_padding_mask": mask}
    )
    expected = states.numpy()[:, 0] @ tower.get_layer("projection").kernel.numpy()
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    got = model.encode_queries(ids, lengths)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    with pytest.raises(InputError, match="row 1 of the mask holds padding only"):
        model.encode_queries(ids, tf.constant([3, 0]))
    inside = tf.function(model.encode_queries)(ids, tf.constant([3, 0]))
    assert not np.any(inside[1])


def test_loss_is_the_mean_over_real_rows(model, make_batch):
    weights = np.array([1, 1, 1, 1, 0, 0], np.float32)
    padded = make_batch(weights=weights)
    plain = {name: value[:4] for name, value in padded.items()}
    # Each row's own loss, and the mean over 4, not over 6.
    losses = model.per_example_losses(padded)
    np.testing.assert_allclose(losses[:4], model.per_example_losses(plain), atol=1e-5)
    assert not np.any(losses[4:])
    assert float(model.compute_loss(padded)) == pytest.approx(
        float(tf.reduce_mean(losses[:4])), rel=1e-6
    )


def test_gradients_per_row_add_up_and_skip_padding(model, make_batch):
    weights = np.array([1, 1, 1, 0], np.float32)
    batch = make_batch(n=4, weights=weights)
    with tf.GradientTape(persistent=True) as tape:
        losses = model.per_example_losses(batch)
        rows = [losses[i] for i in range(4)]
        total = tf.reduce_sum(losses)
    variables = model.trainable_variables
    summed = tape.gradient(total, variables)
    each = [tape.gradient(row, variables) for row in rows]
    for number, gradient in enumerate(summed):
        dense = tf.convert_to_tensor(gradient)
        parts = [tf.convert_to_tensor(row[number]) for row in each]
        np.testing.assert_allclose(tf.add_n(parts), dense, rtol=1e-3, atol=2e-5)
        assert not np.any(parts[3])
    assert all(gradient is not None for gradient in summed)


@pytest.mark.parametrize("shared", [True, False])
def test_towers_share_weights_only_when_told(make_model, shared):
    model = make_model(shared=shared)
    tower = len(model.query_tower.trainable_variables)
    assert len(model.trainable_variables) == (tower if shared else 2 * tower)
    ids, lengths = _ids([5], 5), tf.constant([5])
    gap = model.encode_queries(ids, lengths) - model.encode_documents(ids, lengths)
    assert (float(tf.norm(gap)) < 1e-7) == shared


def test_projection_has_no_bias(model):
    tower = model.query_tower
    assert [w.shape.as_list() for w in tower.get_layer("projection").weights] == [
        [16, 12]
    ]


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("shared", [True, False])
def test_both_towers_start_from_an_encoder(make_model, make_config, shared, version):
    t5 = dataclasses.replace(make_config().t5, version=version)
    tf.keras.utils.set_random_seed(8)
    encoder = build_encoder(t5)
    before = encoder.get_weights()
    model = make_model(t5=t5, shared=shared)
    towers = [model.query_tower, model.document_tower]
    kernels = [tower.get_layer("projection").kernel.numpy() for tower in towers]
    model.load_encoder_weights_from(encoder)
    for tower in towers:
        # One projection for both: two rotations would make every cosine noise.
        np.testing.assert_array_equal(tower.get_layer("projection").kernel, kernels[0])
        own = tower.get_layer("t5_encoder")
        for one, other in zip(own.get_weights(), before):
            np.testing.assert_array_equal(one, other)
        # A copy: training a tower leaves the encoder, and the other tower, alone.
        own.weights[0].assign_add(tf.ones_like(own.weights[0]))
        np.testing.assert_array_equal(encoder.weights[0], before[0])
        own.weights[0].assign(before[0])


@pytest.mark.parametrize("embedding_dim", [16, 12])
def test_as_wide_as_the_encoder_every_cosine_is_kept(
    make_model, make_config, embedding_dim
):
    """The projection begins as a rotation; a narrower one cannot be one."""
    tf.keras.utils.set_random_seed(9)
    encoder = build_encoder(make_config().t5)
    model = make_model(embedding_dim=embedding_dim, shared=False)
    model.load_encoder_weights_from(encoder)
    lengths = [3, 8, 1, 5]
    ids = _ids(lengths, 8)
    pooled = []
    for row, length in zip(ids, lengths):
        one = row[tf.newaxis, :length]
        states = encoder(
            {"encoder_token_ids": one, "encoder_padding_mask": tf.ones_like(one)}
        )
        pooled.append(states.numpy()[0].astype(np.float64).mean(0))
    unit = np.array(pooled) / np.linalg.norm(pooled, axis=1, keepdims=True)
    for encode in (model.encode_queries, model.encode_documents):
        found = encode(ids, tf.constant(lengths)).numpy()
        off = np.abs(found @ found.T - unit @ unit.T).max()
        assert off < 1e-5 if embedding_dim == 16 else off > 1e-2
    # Two rotations: what one tower makes has no meaning to the other yet.
    kernels = [
        tower.get_layer("projection").kernel.numpy()
        for tower in (model.query_tower, model.document_tower)
    ]
    for kernel in kernels:
        np.testing.assert_allclose(
            kernel.T @ kernel, np.eye(embedding_dim), rtol=0, atol=1e-5
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_dim": 24},
        {"num_layers": 2},
        {"version": "1.0"},
        {"vocabulary_size": 61},
        {"num_heads": 4, "key_value_dim": 4},  # as many weights, but for the biases
    ],
)
def test_an_encoder_of_another_shape_is_refused(make_model, make_config, changes):
    model = make_model()
    before = model.get_weights()
    encoder = build_encoder(dataclasses.replace(make_config().t5, **changes))
    with pytest.raises(InputError, match="encoder's weights have shapes.*T5Config"):
        model.load_encoder_weights_from(encoder)
    for one, other in zip(before, model.get_weights()):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "jit_compile", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_fit_learns_pairs_by_heart(make_model, make_rows, tokenizer, jit_compile):
    model = make_model()
    model.compile(tf.keras.optimizers.Adam(3e-3), jit_compile=jit_compile)
    batches = make_batches(make_rows(16), tokenizer, 8, **LENGTHS, seed=0)
    data = tf.data.Dataset.from_tensors(next(batches)).repeat()
    history = model.fit(data, steps_per_epoch=20, epochs=2, verbose=0)
    # Chance is log 8 = 2.08 nats.
    assert history.history["loss"][-1] < 0.7


def test_dropout_is_on_in_training_only(make_model, make_config, make_batch):
    t5 = dataclasses.replace(make_config().t5, dropout=0.5)
    model = make_model(t5=t5)
    batch = make_batch()
    still = [model.per_example_losses(batch).numpy() for _ in range(2)]
    noisy = [model.per_example_losses(batch, training=True).numpy() for _ in range(2)]
    np.testing.assert_array_equal(*still)
    assert np.abs(noisy[0] - noisy[1]).max() > 1e-3


@pytest.mark.parametrize("shared", [True, False])
def test_saves_and_loads_to_the_same_embeddings(make_model, tmp_path, shared):
    model = make_model(seed=3, shared=shared)
    # An optimizer's state is the trainer's business, and must not get in the way.
    model.compile(tf.keras.optimizers.Adam())
    save(model, tmp_path / "retriever")
    tf.keras.utils.set_random_seed(4)
    loaded = load(tmp_path / "retriever")
    assert loaded.config == model.config
    ids, lengths = _ids([5, 2], 5), tf.constant([5, 2])
    for name in ("encode_queries", "encode_documents"):
        np.testing.assert_array_equal(
            getattr(loaded, name)(ids, lengths), getattr(model, name)(ids, lengths)
        )
    assert sorted(p.name.split(".")[0] for p in tmp_path.iterdir()) == ["retriever"]


def test_saving_never_overwrites(make_model, tmp_path):
    model = make_model()
    save(model, tmp_path / "a")
    before = (tmp_path / "a" / "weights.index").read_bytes()
    with pytest.raises(InputError, match="a"):
        save(make_model(seed=1), tmp_path / "a")
    assert (tmp_path / "a" / "weights.index").read_bytes() == before


def test_loading_says_what_is_wrong(make_model, make_config, tmp_path):
    with pytest.raises(DataError, match="config.json: no retriever's config"):
        load(tmp_path)
    save(make_model(), tmp_path / "a")
    config = tmp_path / "a" / "config.json"
    config.write_text(make_config(embedding_dim=13).to_json())
    with pytest.raises(DataError, match="not of this config"):
        load(tmp_path / "a")
    config.write_text(make_config(shared=False).to_json().replace("}", "", 1))
    with pytest.raises(DataError, match="no retriever's config"):
        load(tmp_path / "a")
    sound, long = json.loads(make_config().to_json()), 10**400
    for changed, said in (
        (None, "it is not an object"),
        ({**sound, "t5": None}, "no retriever's config"),
        ({**sound, "embedding_dim": long}, "embedding_dim is 1000"),
        ({**sound, "query_length": long}, "query_length is 1000"),
        *(
            ({**sound, "t5": {**sound["t5"], size: long}}, f"{size} is 1000")
            for size in ("vocabulary_size", "num_layers", "num_heads", "key_value_dim")
        ),
    ):
        config.write_text(json.dumps(changed))
        with pytest.raises(DataError, match=f"config.json: .*{said}"):
            load(tmp_path / "a")
    config.write_text(make_config().to_json())
    data = tmp_path / "a" / "weights.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:-40])
    with pytest.raises(DataError, match="weights.data-00000-of-00001: .*truncated"):
        load(tmp_path / "a")
    (tmp_path / "a" / "weights.index").unlink()
    with pytest.raises(DataError, match="weights missing"):
        load(tmp_path / "a")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scale", 0.0),
        ("scale", -1.0),
        ("scale", float("nan")),
        ("embedding_dim", 0),
        ("query_length", 0),
        ("document_length", -5),
        ("shared", "yes"),
        ("pooling", "max"),
        ("learned_scale", 1.5),
        ("bidirectional", "both"),
    ],
)
def test_bad_settings_are_named(make_config, field, value):
    with pytest.raises(InputError, match=f"{field} is {value!r}"):
        make_config(**{field: value})


def test_what_is_frozen_changes_no_weights_place(make_model):
    """A pattern may freeze a part of a layer, and Keras then lists its weights last."""
    trained = make_model(1, shared=False)
    frozen, start = make_model(1, shared=False), make_model(2, shared=False)
    train_only(frozen, ["query_tower/*query_projector/kernel"])
    train_only(start, ["query_tower/*value_projector/kernel"])
    before = ordered_weights(trained.query_tower)
    assert {id(w) for w in before} == {id(w) for w in trained.query_tower.weights}
    ordered, after = ordered_weights(frozen.query_tower), frozen.query_tower.weights
    assert {id(w) for w in ordered} == {id(w) for w in after}
    assert [w.shape for w in ordered] == [w.shape for w in before]
    assert [id(w) for w in ordered] != [id(w) for w in after]
    prints = {encoder_fingerprint(model, "v") for model in (trained, frozen)}
    assert len(prints) == 1
    start.load_weights_from(frozen)
    for side in ("query_tower", "document_tower"):
        for one, other in zip(
            ordered_weights(getattr(start, side)),
            ordered_weights(getattr(trained, side)),
        ):
            np.testing.assert_array_equal(one, other)
