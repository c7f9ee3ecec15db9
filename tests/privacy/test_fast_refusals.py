"""What the one-pass engine does not cover, and that its message says what and why."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import fast_oracle as oracle
from helpers import plans

from tfdpsq import validation
from tfdpsq.privacy import fast

keras = tf.keras
layers = tf.keras.layers
ROWS = oracle.ROWS


class _Twice(layers.Dense):
    def call(self, x):
        return 2 * super().call(x)


class _SelfAttention(keras.Model):
    def __init__(self):
        super().__init__()
        self.attention = layers.Attention(use_scale=True)

    def call(self, x):
        return self.attention([x, x])


class _Own(layers.Layer):
    """Not Keras's own: `TimeDistributed` calls it in a loop."""

    def __init__(self):
        super().__init__()
        self.inside = layers.Dense(2, name="inside")

    def call(self, x):
        return self.inside(x)

    def compute_output_shape(self, shape):
        return self.inside.compute_output_shape(shape)


@pytest.mark.parametrize(
    ("make", "shape", "message", "mode"),
    [
        (lambda: _Twice(2), (4, 3), "kernel.*_Twice", "eager"),
        (lambda: layers.LSTM(2), (4, 3), "kernel.*LSTMCell", "graph"),
        (lambda: layers.SeparableConv2D(2, 2), (4, 4, 2), "SeparableConv2D", "eager"),
        (_SelfAttention, (4, 3), "scale", "eager"),
        (
            lambda: layers.TimeDistributed(_Own()),
            (4, 3),
            "'inside' runs inside a .*tf.while_loop",
            "graph",
        ),
    ],
    ids=["a subclass", "LSTM", "SeparableConv", "Attention", "time in a loop"],
)
def test_a_layer_without_a_rule_is_named(make, shape, message, mode):
    model = keras.Sequential([make()])
    x = np.random.default_rng(0).normal(size=(ROWS, *shape)).astype("float32")
    model(x)
    with pytest.raises(fast.UncoveredError, match=message) as caught:
        oracle.run(model, x, mode=mode)
    assert "in user code" not in str(caught.value)  # autograph's page of code
    # Frozen, whatever it is, it is in nobody's way.
    head = layers.Dense(2)
    frozen = keras.Sequential([model, layers.Flatten(), head])
    frozen(x)
    model.trainable = False
    oracle.run(frozen, x, mode=mode)


@pytest.mark.parametrize(
    ("make", "shape", "message"),
    [
        (lambda: layers.Conv2D(4, 2, groups=2), [4, 4, 2], "groups=2"),
        (
            lambda: layers.DepthwiseConv2D(2, data_format="channels_first"),
            [3, 4, 4],
            "channels_first",
        ),
        (lambda: layers.Conv1D(2, 2), [2, 4, 3], "one batch dimension"),
        (lambda: layers.LayerNormalization([2, 1]), [4, 3], "ascending order"),
        (lambda: layers.GroupNormalization(3, axis=0), [4], "axis=0"),
        (lambda: layers.EinsumDense("ab,ac->bc", [3]), [ROWS], "'ab,ac->bc'"),
    ],
)
def test_a_setting_of_a_layer_without_a_rule_is_named(make, shape, message):
    layer, x = make(), tf.ones([ROWS, *shape])
    layer.build(x.shape)
    with pytest.raises(fast.UncoveredError, match=message):
        fast.clipped_sum(lambda: layer(x), [layer], layer.trainable_weights, 1.0)


def test_time_without_a_static_length_is_refused():
    layer = layers.TimeDistributed(layers.Dense(2), name="steps")
    layer.build([None, None, 3])

    @tf.function(input_signature=[tf.TensorSpec([ROWS, None, 3])])
    def clipped(x):
        return fast.clipped_sum(
            lambda: tf.reduce_sum(layer(x), [1, 2]), [layer], layer.weights, 1.0
        ).sums

    with pytest.raises(validation.InputError, match="'steps'.*static number of time"):
        clipped(tf.ones([ROWS, 4, 3]))


@pytest.mark.parametrize("kind", ["RaggedTensor", "SparseTensor"])
def test_ragged_and_sparse_inputs_are_refused(kind):
    layer, x = layers.Dense(2, name="first"), tf.ones([ROWS, 3])
    layer.build(x.shape)
    ragged = kind == "RaggedTensor"
    given = tf.RaggedTensor.from_tensor(x) if ragged else tf.sparse.from_dense(x)
    with pytest.raises(fast.UncoveredError, match=f"'first' got a {kind}; make it"):
        fast.clipped_sum(lambda: layer(given), [layer], layer.trainable_weights, 1.0)


class _Outside(layers.Layer):
    """Reads a layer's kernel without calling the layer."""

    def __init__(self, rematerialize):
        super().__init__()
        self.rematerialize = rematerialize
        self.dense = layers.Dense(5, use_bias=False, name="reread")

    def call(self, x):
        return self.products(x)

    def pieces(self, x):
        return self.products, [x]

    def products(self, x):
        return self.dense(x) @ tf.transpose(self.dense.kernel)


@pytest.mark.parametrize("rematerialize", [False, True])
def test_a_weight_used_outside_its_layer_is_found(rematerialize):
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
    layer = _Outside(rematerialize)
    layer(x)
    with pytest.raises(ValueError, match="'reread' is used where its layer's rule"):
        oracle.run(layer, x, mode="eager")


def test_batch_normalisation_is_refused_in_training_only():
    """Rows meet in it also where none of its own weights is trained."""
    model = keras.Sequential([layers.Dense(3), layers.BatchNormalization(name="bn")])
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
    model(x)
    for variables in (None, model.layers[0].trainable_variables):
        with pytest.raises(ValueError, match="'bn' normalises over the batch"):
            oracle.run(model, x, variables, mode="eager")
    model.layers[1].trainable = False
    oracle.run(model, x, mode="eager")


def test_bad_arguments_are_refused():
    model, _, x = oracle.made("dense")
    variables = model.trainable_variables
    with pytest.raises(ValueError, match="clip_norm is 0"):
        oracle.run(model, x, clip_norm=0, mode="eager")
    with pytest.raises(ValueError, match="one loss per row"):
        fast.clipped_sum(lambda: tf.constant(1.0), [model], variables, 1.0)


def test_inputs_that_are_not_the_examples_are_refused():
    """Positions [T] broadcast over the batch: whose gradient would it be?"""
    embed, dense = layers.Embedding(7, 3, name="positions"), layers.Dense(3)
    embed.build(None), dense.build([None, 3])
    x = tf.ones([ROWS, 7, 3])

    def losses():
        return tf.reduce_sum(dense(x) * embed(tf.range(7)), [1, 2])

    variables = [embed.embeddings, dense.kernel]
    with pytest.raises(ValueError, match="'positions'.*first dimension is 7"):
        fast.clipped_sum(losses, [embed, dense], variables, 1.0)


def test_inputs_that_only_look_like_the_examples_are_refused_by_train():
    """As many positions as examples: shapes cannot tell, values can."""
    embed = layers.Embedding(4, 3, name="positions")
    embed.build(None)
    x = np.random.default_rng(0).normal(size=(16, 4, 3)).astype(np.float32)

    def losses(batch):
        return tf.reduce_sum(batch["x"] * embed(tf.range(4)), [1, 2])

    with pytest.raises(validation.InputError, match="leaving out rows moves"):
        plans.trained(
            plans.plan(num_units=16, batch_size=4, steps=1), losses, [embed], {"x": x}
        )


def test_a_layer_inside_a_tf_function_of_the_model_is_refused():
    dense = layers.Dense(2, name="inside")
    x = tf.ones([ROWS, 3])
    dense(x)
    inner = tf.function(lambda x: tf.reduce_sum(dense(x), 1), autograph=False)
    with pytest.raises(ValueError, match="'inside' runs inside a tf.function"):
        fast.clipped_sum(lambda: inner(x), [dense], dense.trainable_variables, 1.0)
    traced = tf.function(lambda x: tf.reduce_sum(dense(x), 1))
    traced(x)  # its graph was made before any rule could take part
    with pytest.raises(ValueError, match="'inside' is used where its layer's rule"):
        fast.clipped_sum(lambda: traced(x), [dense], dense.trainable_variables, 1.0)


def test_weights_that_the_losses_do_not_use_or_no_layer_holds_are_named():
    layer, x = layers.Dense(1), tf.ones([ROWS, 3])
    layer.build(x.shape)
    stray = tf.Variable(2.0, name="stray")
    with pytest.raises(validation.InputError, match="depend on none of the variables"):
        fast.clipped_sum(lambda: layer(x)[:, 0], [layer], [stray], 1.0)
    with pytest.raises(fast.UncoveredError, match="'stray:0' belongs to none"):
        fast.clipped_sum(lambda: stray * layer(x)[:, 0], [layer], [stray], 1.0)
