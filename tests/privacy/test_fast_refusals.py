"""What the one-pass engine refuses, and that its message says which layer and why."""

import keras_nlp
import numpy as np
import pytest
import tensorflow as tf
from helpers import fast_oracle as oracle

from tfdpsq import validation
from tfdpsq.privacy import fast

keras = tf.keras
layers = tf.keras.layers
ROWS = oracle.ROWS


def _made():
    """A stack of Dense layers and inputs for it."""
    model, _, x = oracle.made("dense")
    return model, x.astype("float32")


class _Twice(layers.Dense):
    def call(self, x):
        return 2 * super().call(x)


# Layers of Keras and keras-nlp with trainable weights and without a rule, the inputs
# they get, and which weight of which class the message must name.
_REFUSED = {
    "a subclass": (lambda: _Twice(2), (4, 3), "kernel.*_Twice"),
    "LSTM": (lambda: layers.LSTM(2), (4, 3), "kernel.*LSTMCell"),
    "GRU, unrolled": (lambda: layers.GRU(2, unroll=True), (4, 3), "kernel.*GRUCell"),
    "Bidirectional": (
        lambda: layers.Bidirectional(layers.SimpleRNN(2)),
        (4, 3),
        "kernel.*SimpleRNNCell",
    ),
    "ConvLSTM": (lambda: layers.ConvLSTM1D(2, 2), (3, 4, 2), "kernel.*ConvLSTMCell"),
    "SeparableConv": (
        lambda: layers.SeparableConv2D(2, 2),
        (4, 4, 2),
        "kernel.*SeparableConv2D",
    ),
    "transposed": (lambda: layers.Conv1DTranspose(2, 2), (4, 3), "kernel.*Transpose"),
    "Conv3D": (lambda: layers.Conv3D(2, 2), (3, 3, 3, 2), "kernel.*Conv3D"),
    "local": (lambda: layers.LocallyConnected1D(2, 2), (4, 3), "kernel.*LocallyConn"),
    "Attention": (lambda: _Scaled(layers.Attention(use_scale=True)), (4, 3), "scale"),
    "AdditiveAttention": (lambda: _Scaled(layers.AdditiveAttention()), (4, 3), "scale"),
    "MaskedLMHead": (lambda: _Masked(), (4, 3), "output_kernel.*MaskedLMHead"),
    "time in a loop": (
        lambda: layers.TimeDistributed(layers.LSTM(2)),
        (2, 4, 3),
        "kernel.*LSTMCell",
    ),
}


class _Scaled(keras.Model):
    """Attention of a sequence to itself."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def call(self, x):
        return self.attention([x, x])


class _Masked(keras.Model):
    def __init__(self):
        super().__init__()
        self.head = keras_nlp.layers.MaskedLMHead(vocabulary_size=5)

    def call(self, x):
        return self.head(x, mask_positions=tf.zeros([x.shape[0], 2], tf.int32))


@pytest.mark.parametrize(
    ("name", "mode"),
    # In a graph only where what runs there is another function, a loop or a cell.
    [
        *((name, "eager") for name in _REFUSED),
        ("LSTM", "graph"),
        ("time in a loop", "graph"),
    ],
)
def test_a_layer_without_a_rule_is_refused_by_name(name, mode):
    make, shape, message = _REFUSED[name]
    model = keras.Sequential([make()])
    x = np.random.default_rng(0).normal(size=(ROWS, *shape)).astype("float32")
    model(x)
    with pytest.raises(validation.InputError, match=message) as caught:
        oracle.run(model, x, mode=mode)
    assert "no rule covers" in str(caught.value)
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
        (lambda: layers.LayerNormalization([2, 1]), [4, 3], "ascending axes"),
        (lambda: layers.GroupNormalization(3, axis=0), [4], "takes the first axis"),
        (lambda: layers.EinsumDense("ab,ac->bc", [3]), [ROWS], "'ab,ac->bc'"),
    ],
)
def test_a_layer_set_up_so_that_its_rule_does_not_hold_is_refused(make, shape, message):
    layer, x = make(), tf.ones([ROWS, *shape])
    layer.build(x.shape)
    with pytest.raises(validation.InputError, match=message):
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


def test_errors_come_out_of_graphs_and_of_fit_as_they_are():
    """Inside tf.function and Keras's train_step, autograph would rewrite them."""
    rnn = keras.Sequential([layers.LSTM(2, name="recurrent")])
    x = np.zeros([ROWS, 4, 3], np.float32)
    rnn(x)

    @tf.function
    def traced(x):
        if tf.reduce_sum(x) > 0:  # for autograph to convert
            x = -x
        return fast.clipped_sum(
            lambda: oracle.losses(rnn, x), [rnn], rnn.trainable_variables, 1.0
        ).norms

    class _Private(keras.Model):
        def call(self, x):
            return rnn(x)

        def train_step(self, data):
            x, _ = data
            clipped = fast.clipped_sum(
                lambda: oracle.losses(rnn, x), [rnn], rnn.trainable_variables, 1.0
            )
            self.optimizer.apply_gradients(zip(clipped.sums, rnn.trainable_variables))
            return {}

    model = _Private()
    model.compile("sgd")
    data = tf.data.Dataset.from_tensors((x, x))
    for call in (lambda: traced(x), lambda: model.fit(data, verbose=0)):
        with pytest.raises(validation.InputError) as caught:
            call()
        assert type(caught.value) is validation.InputError
        message = str(caught.value)
        assert "weight 'recurrent/lstm_cell/kernel:0'" in message
        assert "in user code" not in message  # autograph's page of generated code


class _Outside(keras.Model):
    """Reads a layer's kernel without calling the layer."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(5, use_bias=False, name="reread")

    def call(self, x):
        return self.dense(x) @ tf.transpose(self.dense.kernel)


def test_a_weight_used_outside_its_layer_is_found():
    model = _Outside()
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
    model(x)
    for found_by in (
        lambda: oracle.run(model, x, mode="eager"),
        lambda: fast.check(
            lambda: oracle.losses(model, x), [model], model.trainable_variables
        ),
    ):
        with pytest.raises(ValueError, match="'reread' is used where its layer's rule"):
            found_by()


class _OutsideAgain(layers.Layer):
    """The same inside a layer that is rematerialised."""

    rematerialize = True

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(5, use_bias=False, name="reread")

    def call(self, x):
        return self.products(x)

    def pieces(self, x):
        return self.products, [x]

    def products(self, x):
        return self.dense(x) @ tf.transpose(self.dense.kernel)


def test_a_weight_used_outside_its_layer_is_found_on_the_second_run():
    layer = _OutsideAgain()
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
    layer(x)
    with pytest.raises(ValueError, match="'reread' is used where its layer's rule"):
        oracle.run(layer, x, mode="eager")


def test_derivatives_that_a_loss_takes_forward_are_refused():
    """TensorFlow drops them from a tape that was stopped: noise alone trained it."""
    model = tf.keras.Sequential([layers.Dense(8, "tanh"), layers.Dense(1)])
    x = np.random.default_rng(0).normal(size=(ROWS, 5)).astype("float32")
    model(x)

    def losses(inputs):
        ones = tf.ones_like(inputs)
        with tf.autodiff.ForwardAccumulator(inputs, ones) as forward:
            outputs = model(inputs)
        return forward.jvp(outputs)[:, 0] ** 2 + outputs[:, 0]

    with pytest.raises(ValueError, match="weight 'dense.* is used where its layer's r"):
        fast.check(losses, [model], model.trainable_variables, inputs=[tf.constant(x)])


def test_rows_that_depend_on_each_other_are_found():
    model, x = _made()

    def in_batch_softmax():
        outputs = model(x)
        logits = outputs @ tf.transpose(outputs)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(ROWS), logits)

    with pytest.raises(ValueError, match="loss of example 0 depends on other rows"):
        fast.check(in_batch_softmax, [model], model.trainable_variables)


def test_rows_that_read_those_before_them_alone_are_found():
    model, x = _made()
    with pytest.raises(ValueError, match=f"example {ROWS - 1} depends on other rows"):
        fast.check(
            lambda: tf.cumsum(oracle.losses(model, x)),
            [model],
            model.trainable_variables,
        )


def test_batch_normalisation_is_refused_in_training_only():
    model = keras.Sequential([layers.Dense(3), layers.BatchNormalization(name="bn")])
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
    model(x)
    with pytest.raises(ValueError, match="'bn' normalises over the batch"):
        oracle.run(model, x, mode="eager")
    # Its rows meet in it also where none of its own weights is trained.
    kernel, bias = model.layers[0].trainable_variables
    with pytest.raises(ValueError, match="'bn' normalises over the batch"):
        fast.clipped_sum(
            lambda: tf.reduce_sum(model(x, training=True), 1),
            [model],
            [kernel, bias],
            1.0,
        )
    model.layers[1].trainable = False
    oracle.run(model, x)


def test_bad_arguments_are_refused():
    model, x = _made()
    variables = model.trainable_variables
    with pytest.raises(ValueError, match="clip_norm is 0"):
        oracle.run(model, x, clip_norm=0, mode="eager")
    with pytest.raises(ValueError, match="one loss per row"):
        fast.clipped_sum(
            lambda: tf.reduce_mean(oracle.losses(model, x)), [model], variables, 1.0
        )
    with pytest.raises(ValueError, match="give a class of Keras layers"):
        fast.register_rule("Dense", print)
    with pytest.raises(ValueError, match="cannot run inside tf.function"):
        tf.function(
            lambda: fast.check(lambda: None, [model], variables), autograph=False
        )()


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


def test_inputs_that_only_look_like_the_examples_fail_the_check():
    """As many positions as examples: shapes cannot tell, values can."""
    embed = layers.Embedding(ROWS, 3, name="positions")
    embed.build(None)
    x = tf.random.normal([ROWS, ROWS, 3])

    def losses():
        return tf.reduce_sum(x * embed(tf.range(ROWS)), [1, 2])

    with pytest.raises(
        ValueError, match="example 0 depends on other rows.*'positions'"
    ):
        fast.check(losses, [embed], embed.trainable_variables)


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
