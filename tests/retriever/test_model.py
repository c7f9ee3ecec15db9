"""The two-tower model: padding, losses, weights of its towers, saving."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.generator import checkpoints
from tfdpsq.layers import build_encoder
from tfdpsq.retriever import TwoTower, load, save
from tfdpsq.validation import DataError, InputError


def _ids(lengths, width, seed=0):
    """Random tokens everywhere, beyond the lengths too."""
    draw = np.random.default_rng(seed)
    return tf.constant(draw.integers(1, 60, (len(lengths), width)), tf.int32)


def test_mixed_bfloat16_keeps_float32_weights_and_close_embeddings(
    make_model, make_batch
):
    exact, model = make_model(), make_model(dtype="mixed_bfloat16")
    assert {v.dtype.base_dtype for v in model.variables} == {tf.float32}
    low, high = (m(make_batch())["documents"].numpy() for m in (model, exact))
    assert low.dtype == np.float32
    cosines = (low * high).sum(axis=1)
    assert 0.999 < cosines.min() and np.abs(low - high).max() > 1e-5


def test_padding_never_changes_an_embedding(make_model):
    model = make_model()
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
    model.fit(data, steps_per_epoch=8, verbose=0)
    weight = float(model.scaled.log_scale)
    assert weight > np.log(5.0) + 0.05  # sharper is better once it has learned
    save(model, tmp_path / "learned")
    assert float(load(tmp_path / "learned").scaled.log_scale) == weight


def test_first_pooling_takes_the_first_token(make_model):
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


@pytest.mark.parametrize("shared", [True, False])
def test_towers_share_weights_only_when_told(make_model, shared):
    model = make_model(shared=shared)
    tower = len(model.query_tower.trainable_variables)
    assert len(model.trainable_variables) == (tower if shared else 2 * tower)
    ids, lengths = _ids([5], 5), tf.constant([5])
    gap = model.encode_queries(ids, lengths) - model.encode_documents(ids, lengths)
    assert (float(tf.norm(gap)) < 1e-7) == shared


@pytest.fixture
def encoder(make_config, tmp_path):
    """An encoder of random weights, saved as Hugging Face's in `tmp_path`."""
    tf.keras.utils.set_random_seed(8)
    encoder = build_encoder(make_config().t5)
    checkpoints.save(tmp_path, make_config().t5, encoder, encoder_only=True)
    return encoder


@pytest.mark.parametrize("shared", [True, False])
def test_both_towers_start_from_an_encoder(encoder, tmp_path, shared):
    model = TwoTower.from_preset(tmp_path, shared=shared, query_length=9)
    config = model.config
    assert (config.embedding_dim, config.scale, config.query_length) == (16, 20.0, 9)
    kernels = [tower.get_layer("projection").kernel for tower in model.towers]
    # One projection for both: two rotations would make every cosine noise.
    np.testing.assert_array_equal(*kernels)
    own = [tower.get_layer("t5_encoder") for tower in model.towers]
    for each in own:
        for one, other in zip(each.get_weights(), encoder.get_weights()):
            np.testing.assert_array_equal(one, other)
    # Copies: training a tower leaves the other one alone.
    own[0].weights[0].assign_add(tf.ones_like(own[0].weights[0]))
    gap = own[0].weights[0] - own[1].weights[0]
    assert (float(tf.norm(gap)) == 0) == shared


def test_a_saved_retriever_is_a_preset(make_model, tmp_path):
    """As it is, or with other settings of training around its weights."""
    model = make_model(seed=3, shared=False, learned_scale=True)
    save(model, tmp_path / "saved")
    ids, lengths = _ids([5, 2], 5), tf.constant([5, 2])
    for changes in ({}, {"scale": 5.0, "document_length": 7}):
        again = TwoTower.from_preset(tmp_path / "saved", **changes)
        assert again.config == dataclasses.replace(model.config, **changes)
        for name in ("encode_queries", "encode_documents"):
            np.testing.assert_array_equal(
                getattr(again, name)(ids, lengths), getattr(model, name)(ids, lengths)
            )


@pytest.mark.parametrize("field, value", [("embedding_dim", 13), ("shared", True)])
def test_settings_that_weights_contradict_are_refused(
    make_model, tmp_path, field, value
):
    model = make_model(shared=False)
    save(model, tmp_path / "saved")
    with pytest.raises(InputError, match=f"{field} is {value}, but .* has "):
        TwoTower.from_preset(tmp_path / "saved", **{field: value})


@pytest.mark.parametrize("embedding_dim", [16, 12])
def test_projection_as_wide_as_the_encoder_keeps_every_cosine(
    encoder, tmp_path, embedding_dim
):
    """The projection begins as a rotation; a narrower one cannot be one."""
    model = TwoTower.from_preset(tmp_path, embedding_dim=embedding_dim, shared=False)
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


def test_dropout_is_on_in_training_only(make_model, make_config, make_batch):
    t5 = dataclasses.replace(make_config().t5, dropout=0.5)
    model = make_model(t5=t5)
    batch = make_batch()
    still = [model.per_example_losses(batch).numpy() for _ in range(2)]
    noisy = [model.per_example_losses(batch, training=True).numpy() for _ in range(2)]
    np.testing.assert_array_equal(*still)
    assert np.abs(noisy[0] - noisy[1]).max() > 1e-3


def test_malformed_directory_is_refused(make_model, make_config, tmp_path):
    with pytest.raises(DataError, match="config.json: no retriever's config"):
        load(tmp_path)
    save(make_model(), tmp_path / "a")
    config = tmp_path / "a" / "config.json"
    config.write_text(make_config(embedding_dim=13).to_json())
    with pytest.raises(DataError, match="of another config"):
        load(tmp_path / "a")
    config.write_text(make_config(shared=False).to_json().replace("}", "", 1))
    with pytest.raises(DataError, match="no retriever's config"):
        load(tmp_path / "a")
    config.write_text(make_config().to_json())
    data = tmp_path / "a" / "weights.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:-40])
    with pytest.raises(DataError, match="weights.*truncated"):
        load(tmp_path / "a")
    (tmp_path / "a" / "weights.index").unlink()
    with pytest.raises(DataError, match="weights missing"):
        load(tmp_path / "a")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scale", float("nan")),
        ("embedding_dim", 0),
        ("shared", "yes"),
        ("pooling", "max"),
    ],
)
def test_bad_settings_are_named(make_config, field, value):
    with pytest.raises(InputError, match=f"{field} is {value!r}"):
        make_config(**{field: value})
