"""The map of query embeddings: its loss, its sensitivity, and what it learns."""

import re

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq import privacy
from tfdpsq.layers import QueryAdapter, sampled_softmax
from tfdpsq.privacy import fast
from tfdpsq.validation import InputError

_SCALE = 20.0


def _unit(values):
    return values / np.linalg.norm(values, axis=-1, keepdims=True)


def _vectors(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _naive(documents, queries, negatives, scale):
    """The losses in float64, a row and a negative at a time."""
    found = []
    for document, query in zip(_unit(np.float64(documents)), np.float64(queries)):
        terms = [np.exp(scale * query @ document)]
        for negative in _unit(np.float64(negatives)):
            if not np.allclose(negative, document, atol=1e-5):
                terms.append(np.exp(scale * query @ negative))
        found.append(np.log(sum(terms)) - np.log(terms[0]))
    return found


def test_the_loss_is_a_softmax_among_the_negatives_that_are_other_documents():
    documents = _vectors(0, 6, 5)
    queries = _unit(_vectors(1, 6, 5))
    # The first two are the documents of rows 2 and 4 again, longer and shorter.
    negatives = np.concatenate([3 * documents[[2]], documents[[4]] / 7])
    negatives = np.concatenate([negatives, _vectors(2, 9, 5)])
    found = sampled_softmax(negatives, _SCALE)(documents, queries)
    expected = _naive(documents, queries, negatives, _SCALE)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    # With the own documents among the negatives these rows would lose log 2 at least.
    alone = sampled_softmax(negatives[:2], _SCALE)(
        documents[[2]], _unit(documents[[2]])
    )
    assert alone.numpy()[0] < np.log(2)


def test_a_rows_hard_negatives_are_its_own_and_may_be_fewer():
    documents, queries = _vectors(0, 4, 5), _unit(_vectors(1, 4, 5))
    hard, shared = _vectors(2, 4, 3, 5), _vectors(3, 7, 5)
    hard[1, 2] = 0  # row 1 has two, row 2 none
    hard[2] = 0
    hard[3, 0] = 2 * documents[3]  # the own document again
    given = np.concatenate([documents[:, np.newaxis], hard], axis=1)
    found = sampled_softmax(shared, _SCALE)(tf.constant(given), queries).numpy()
    for row, kept in enumerate((hard[0], hard[1, :2], hard[2, :0], hard[3, 1:])):
        negatives = np.concatenate([shared, kept])
        (expected,) = _naive(documents[[row]], queries[[row]], negatives, _SCALE)
        np.testing.assert_allclose(found[row], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [0.01, 3.0, None])
def test_every_negative_counts_at_any_scale(scale):
    """300 of them at a scale where none stands out; `None` is the default, 20."""
    documents, queries = _vectors(0, 3, 5), _unit(_vectors(1, 3, 5))
    negatives = _vectors(2, 300, 5)
    given = {} if scale is None else {"scale": scale}
    found = sampled_softmax(negatives, **given)(documents, queries)
    expected = _naive(documents, queries, negatives, scale or 20.0)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_what_is_the_same_document_and_what_is_not():
    documents = _unit(_vectors(0, 1, 384))
    loss = sampled_softmax(documents, _SCALE)  # its only negative is itself
    with tf.GradientTape() as tape:
        queries = tf.constant(_unit(_vectors(1, 1, 384)))
        tape.watch(queries)
        losses = loss(documents, queries)
    assert losses.numpy()[0] == 0
    np.testing.assert_array_equal(tape.gradient(losses, queries), np.zeros([1, 384]))
    for factor in (1e-30, 1e-8, 1.7, 1e30):
        assert loss(np.float32(factor) * documents, queries).numpy()[0] == 0
    # A cosine of .999 is of another document.
    near = _unit(documents + 0.0447 * _unit(_vectors(2, 1, 384)))
    assert 0.998 < np.sum(near * documents) < 0.9995
    assert 0.1 < sampled_softmax(near, _SCALE)(documents, queries).numpy()[0]


def test_a_document_of_zeros_has_cosines_of_zero():
    negatives, queries = _vectors(0, 9, 5), _unit(_vectors(1, 1, 5))
    found = sampled_softmax(negatives, 2.0)(np.zeros([1, 5]), queries)
    expected = np.log(1 + np.exp(2.0 * queries @ _unit(negatives).T).sum())
    np.testing.assert_allclose(found, [expected], rtol=1e-5)


def test_the_gradient_is_that_of_the_loss():
    """Every term's: against central differences of the naive float64 loss."""
    documents, queries = _vectors(0, 2, 4), _unit(_vectors(1, 2, 4))
    hard, negatives = _vectors(2, 2, 3, 4), _vectors(3, 6, 4)
    given = np.concatenate([documents[:, np.newaxis], hard], axis=1)
    with tf.GradientTape() as tape:
        symbols = tf.constant(queries)
        tape.watch(symbols)
        losses = sampled_softmax(negatives, 3.0)(given, symbols)
    found = tape.gradient(losses, symbols).numpy()
    for row in range(2):
        among = np.concatenate([negatives, hard[row]])
        for at in range(4):
            moved = []
            for step in (1e-5, -1e-5):
                query = np.float64(queries[[row]])
                query[0, at] += step
                moved.append(_naive(documents[[row]], query, among, 3.0)[0])
            slope = (moved[0] - moved[1]) / 2e-5
            np.testing.assert_allclose(found[row, at], slope, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", [np.float64, np.float16, np.int32])
def test_the_loss_takes_numbers_of_other_kinds(kind):
    documents, queries = np.array([[3, 4, 0]]), _unit(_vectors(1, 1, 3))
    negatives = np.array([[300.0, 0, 1], [0, 200, 7]])
    found = sampled_softmax(np.float16(negatives), 2.0)(kind(documents), queries)
    expected = _naive(documents, queries, negatives, 2.0)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    low = tf.cast(queries, tf.bfloat16)  # from an adapter under mixed_bfloat16
    found = sampled_softmax(negatives, 2.0)(kind(documents), low)
    np.testing.assert_allclose(found, expected, rtol=0.02)


@pytest.mark.parametrize("factor", [1e-30, 1e-3, 1e3, 1e30])
def test_the_adapter_starts_as_it_is_and_gives_unit_length(factor):
    vectors = _vectors(0, 7, 5)
    found = QueryAdapter()(np.float32(factor) * vectors)
    np.testing.assert_allclose(found, _unit(vectors), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(QueryAdapter()(np.zeros([2, 5])), np.zeros([2, 5]))
    layer = QueryAdapter()
    layer.build([None, 5])
    np.testing.assert_array_equal(layer.get_weights()[0], np.eye(5))
    assert tuple(layer.compute_output_shape((2, 5))) == (2, 5)


def test_a_row_reads_no_other_row():
    loss = sampled_softmax(_vectors(0, 30, 5), _SCALE)
    documents, queries = _vectors(1, 8, 5), _unit(_vectors(2, 8, 5))
    together = loss(documents, queries).numpy()
    for row in range(8):
        alone = loss(documents[[row]], queries[[row]]).numpy()
        np.testing.assert_allclose(alone[0], together[row], rtol=1e-5)
    queries[3] = np.nan
    found = loss(documents, queries).numpy()
    assert np.isnan(found[3])
    np.testing.assert_allclose(np.delete(found, 3), np.delete(together, 3), rtol=1e-6)


def test_one_pair_moves_the_clipped_sum_by_the_clip_norm_at_most():
    """`privacy.fast` against gradients clipped one by one in float64."""
    clip, negatives = 0.7, _vectors(0, 40, 6)
    loss, layer = sampled_softmax(negatives, _SCALE), QueryAdapter()
    queries, documents = _vectors(1, 12, 6), _vectors(2, 12, 6)
    layer(queries)
    layer.set_weights([np.eye(6) + 0.1 * _vectors(3, 6, 6)])

    def clipped(rows):
        total = np.zeros([6, 6])
        for row in rows:
            with tf.GradientTape() as tape:
                value = loss(documents[[row]], layer(queries[[row]]))[0]
            gradient = tape.gradient(value, layer.trainable_variables[0]).numpy()
            norm = np.linalg.norm(gradient.astype(np.float64))
            total += gradient * min(1, clip / norm)
        return total

    @tf.function
    def clipped_sum(inputs, targets):
        found = fast.clipped_sum(
            lambda: loss(targets, layer(inputs)),
            [layer],
            layer.trainable_variables,
            clip,
        )
        return found.sums[0]

    whole = clipped_sum(tf.constant(queries), tf.constant(documents)).numpy()
    np.testing.assert_allclose(whole, clipped(range(12)), rtol=1e-4, atol=1e-5)
    moved = []
    for row in range(12):
        rest = np.delete(np.arange(12), row)
        fewer = clipped_sum(*map(tf.constant, (queries[rest], documents[rest])))
        moved.append(np.linalg.norm(whole - fewer.numpy()))
    assert max(moved) <= clip * (1 + 1e-5)
    assert max(moved) > 0.99 * clip  # so the bound is no larger than it must be


def _problem(count, width=8):
    """Queries that are their documents in other axes, with noise."""
    turn = np.linalg.qr(_vectors(0, width, width))[0]
    documents = _unit(_vectors(1, count, width))
    queries = _unit(documents @ turn + 0.1 * _vectors(2, count, width))
    unseen = _unit(_vectors(3, 400, width))
    asked = _unit(unseen @ turn + 0.1 * _vectors(4, 400, width))
    return (queries, documents), (asked, unseen)


def _private(count, negatives, steps, width=8):
    """An adapter, and what trains it at ε = 8."""
    spec = privacy.PrivacySpec(
        epsilon=8.0,
        clip_norm=1.0,
        num_units=count,
        n_is_public=True,
        batch_size=count // 2,
        steps=steps,
    )
    plan = privacy.make_plan(spec)
    inputs = tf.keras.Input([width])
    model = tf.keras.Model(inputs, QueryAdapter()(inputs))
    private = privacy.PrivateModel(model, plan, microbatch_size=500)
    optimizer = privacy.make_optimizer(plan, 1.0, "sgd", momentum=0.9)
    private.compile(optimizer, loss=sampled_softmax(negatives, _SCALE))
    return model, private


def _found_first(queries, documents):
    return float(np.mean(np.argmax(queries @ documents.T, axis=1) == np.arange(400)))


def test_private_training_finds_the_map_that_queries_need():
    pairs, (asked, unseen) = _problem(4000)
    model, private = _private(4000, _vectors(5, 300, 8), steps=40)
    assert _found_first(model(asked).numpy(), unseen) < 0.05  # it starts as it is
    private.fit(*pairs)
    assert private.epsilon() <= 8.0
    assert _found_first(model(asked).numpy(), unseen) > 0.6


def test_a_run_goes_on_with_the_negatives_that_it_began_with(tmp_path):
    """Under the noise that a resumed run repeats, other ones would be a second look."""
    pairs, _ = _problem(400)

    class Stop(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    _, private = _private(400, _vectors(5, 30, 8), steps=4)
    with pytest.raises(KeyboardInterrupt):
        private.fit(*pairs, directory=tmp_path / "run", callbacks=[Stop()])
    _, other = _private(400, _vectors(6, 30, 8), steps=4)
    with pytest.raises(InputError, match="other constants"):
        other.fit(*pairs, directory=tmp_path / "run")
    _, same = _private(400, _vectors(5, 30, 8), steps=4)
    same.fit(*pairs, directory=tmp_path / "run")
    assert same.steps_executed == 4


@pytest.mark.parametrize("shape", [[None], [0], None])
def test_the_embeddings_width_must_be_known(shape):
    with pytest.raises(InputError, match="without a static width.*shape .D,"):
        QueryAdapter().build(shape if shape is None else [None, *shape])


@pytest.mark.parametrize(
    "documents, queries",
    [
        ((4, 6), (4, 5)),
        ((4, 5), (4, 6)),
        ((5,), (4, 5)),
        ((4, 1, 1, 5), (4, 5)),
        ((1, 5), (4, 5)),
    ],
)
def test_embeddings_of_another_encoder_are_refused(documents, queries):
    loss = sampled_softmax(_vectors(0, 3, 5))
    with pytest.raises(
        InputError, match="documents have shape .*5 dimensions.*one enc"
    ):
        loss(tf.constant(_vectors(1, *documents)), tf.constant(_vectors(2, *queries)))


@pytest.mark.parametrize(
    "negatives, said",
    [
        (np.ones([3]), r"float64 of shape \(3,\)"),
        (np.ones([0, 4]), r"float64 of shape \(0, 4\)"),
        (np.ones([3, 4], np.int64), "int64 of shape"),
        (np.array([["a", "b"]]), "<U1 of shape"),
        (np.ones([3, 4], tf.bfloat16.as_numpy_dtype), "bfloat16 of shape.*float32"),
        ([[1.0, 2.0], [1.0]], "a list that is not an array"),
        (np.eye(3)[:, :2], "row 2 of the negatives is all zeros"),
        (np.array([[1.0, 2.0], [1.0, np.inf]]), "row 1 of .*not finite"),
        (np.array([[np.nan, 2.0], [1.0, 2.0]]), "row 0 of .*not finite"),
    ],
)
def test_negatives_that_are_no_embeddings_are_refused(negatives, said):
    with pytest.raises(InputError, match="negatives.*documents") as error:
        sampled_softmax(negatives)
    assert re.search(said, str(error.value))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), 1e20, 1e-30])
def test_a_scale_that_is_none_is_refused(scale):
    with pytest.raises(InputError, match="scale"):
        sampled_softmax(np.ones([2, 2]), scale)
