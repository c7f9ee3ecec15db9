"""Models of every kind of layer, their float64 twins, and a naive loop over rows.

What the tests of the one-pass engine compare with: a batch of its own for every
row, ordinary gradients in float64, and norms, clipping and sums in numpy.
"""

from __future__ import annotations

import contextlib
import functools

import keras_nlp
import numpy as np
import tensorflow as tf

from tfdpsq.layers import Folded, LoRADense
from tfdpsq.privacy import fast

keras = tf.keras
layers = tf.keras.layers
ROWS = 6


@contextlib.contextmanager
def floatx(name):
    """While inside, layers are made in this precision."""
    before = keras.backend.floatx()
    keras.backend.set_floatx(name)
    try:
        yield
    finally:
        keras.backend.set_floatx(before)


class Block(keras.Model):
    """A transformer block around Keras's MultiHeadAttention, subclassed."""

    def __init__(self):
        super().__init__()
        self.embed = layers.Embedding(11, 8)
        self.norms = [layers.LayerNormalization(epsilon=e) for e in (1e-3, 1e-6)]
        self.attention = layers.MultiHeadAttention(2, 4, value_dim=3)
        self.inner = keras.Sequential([layers.Dense(12, "gelu"), layers.Dense(8)])
        self.head = layers.Dense(1)

    def call(self, ids):
        x = self.embed(ids)
        y = self.norms[0](x)
        x = x + self.attention(y, y, use_causal_mask=True)
        x = x + self.inner(self.norms[1](x))
        return self.head(tf.tanh(x))[..., 0]


class Masked(keras.Model):
    """Padding that Keras passes on by itself: id 0 neither attends nor counts."""

    def __init__(self):
        super().__init__()
        self.embed = layers.Embedding(7, 6, mask_zero=True)
        self.attention = layers.MultiHeadAttention(2, 3)
        self.mean = layers.GlobalAveragePooling1D()

    def call(self, ids):
        x = self.embed(ids)
        return self.mean(self.attention(x, x), mask=x._keras_mask)


class Reusing(keras.Model):
    """One layer called three times on itself, one embedding looked up twice."""

    def __init__(self):
        super().__init__()
        self.embed = layers.Embedding(9, 5)
        self.step = layers.Dense(5, "tanh")

    def call(self, ids):
        x = self.embed(ids) + self.embed(ids[:, ::-1] // 2)
        for _ in range(3):
            x = x + self.step(x)
        return tf.reduce_sum(x, -1)


class Tied(keras.Model):
    """A Dense layer that goes by another layer's weight."""

    def __init__(self, width=6):
        super().__init__()
        self.one = layers.Dense(width, "tanh", use_bias=False)
        self.other = layers.Dense(width, use_bias=False)

    def build(self, shape):
        self.one.build(shape)
        self.other.build(shape)
        self.other.kernel = self.one.kernel
        self.other._trainable_weights = []
        self.built = True

    def call(self, x):
        return self.other(self.one(x))


class Language(keras.Model):
    """Tied embeddings as in a language model: looked up, and logits made of them."""

    def __init__(self):
        super().__init__()
        self.embed = keras_nlp.layers.ReversibleEmbedding(9, 5)
        self.dense = layers.Dense(5, "tanh")

    def call(self, ids):
        return tf.nn.log_softmax(self.embed(self.dense(self.embed(ids)), reverse=True))


class Translation(keras.Model):
    """keras-nlp's transformer layers, with a mask, made of layers that have rules."""

    def __init__(self):
        super().__init__()
        nlp = keras_nlp.layers
        self.embed = nlp.TokenAndPositionEmbedding(11, 9, 8)
        self.encoder = nlp.TransformerEncoder(12, 2, normalize_first=True)
        self.decoder = nlp.TransformerDecoder(10, 2)
        self.fourier = nlp.FNetEncoder(7)

    def call(self, ids):
        source, target = ids[:, :5], ids[:, 3:]
        mask = source > 2
        encoded = self.encoder(self.embed(source), padding_mask=mask)
        decoded = self.decoder(self.embed(target), encoded, encoder_padding_mask=mask)
        return self.fourier(decoded)


def _dense_stack():
    return keras.Sequential(
        [layers.Dense(7, "relu"), layers.Dense(4, "tanh"), layers.Dense(3)]
    )


def _wide():
    return keras.Sequential([layers.Dense(30, "tanh"), layers.Dense(20)])


def _nested():
    inner_input = keras.Input([5, 4])
    inner = keras.Model(inner_input, layers.Dense(4, "tanh")(inner_input))
    outer_input = keras.Input([5, 4])
    x = inner(inner(outer_input))
    return keras.Model(outer_input, layers.LayerNormalization()(x))


def _cnn():
    return keras.Sequential(
        [
            layers.Conv1D(5, 3, padding="same", activation="relu"),
            layers.Conv1D(4, 3, padding="causal", dilation_rate=2),
            layers.LayerNormalization(),
            layers.Conv1D(3, 2, strides=2, padding="valid", activation="tanh"),
            layers.Flatten(),
            layers.Dense(2),
        ]
    )


def _cnn_2d():
    return keras.Sequential(
        [
            layers.Conv2D(4, (3, 2), padding="same", strides=2, activation="relu"),
            layers.GroupNormalization(2),
            layers.Conv2D(3, 2, use_bias=False),
            layers.Flatten(),
            layers.Dense(2),
        ]
    )


def _separable():
    return keras.Sequential(
        [
            layers.DepthwiseConv2D((3, 2), padding="same", depth_multiplier=2),
            layers.PReLU(shared_axes=[1]),
            layers.DepthwiseConv2D(2, strides=2, use_bias=False, activation="tanh"),
            layers.GroupNormalization(3, axis=1),
            layers.DepthwiseConv2D((1, 2), dilation_rate=(1, 1), activation="tanh"),
            layers.PReLU(),
        ]
    )


def _over_time():
    inside = [layers.Conv1D(3, 2, activation="tanh"), layers.Dense(4)]
    return keras.Sequential(
        [layers.TimeDistributed(layer) for layer in inside]
        + [layers.TimeDistributed(layers.TimeDistributed(layers.Dense(2, "tanh")))]
    )


def _einsums_of_vectors():
    """Weights without an axis of inputs, or of outputs."""
    return keras.Sequential(
        [
            layers.EinsumDense("abc,cd->abd", [None, 3], activation="tanh"),
            layers.EinsumDense("abc,c->ab", [None], activation="tanh"),
            layers.EinsumDense("ab,cd->abcd", [None, 2, 3]),
        ]
    )


def _model_over_time():
    """Keras computes the mask of an inner model by running it a second time."""
    inner = keras.Sequential([layers.Dense(3, "tanh"), layers.Dense(2)])
    return keras.Sequential([layers.TimeDistributed(inner)])


def _einsums():
    return keras.Sequential(
        [
            layers.EinsumDense("...c,cde->...de", [2, 3], bias_axes="de"),
            layers.EinsumDense("abde,dec->abc", [None, 4], activation="tanh"),
            # Weights that differ by position, a transposed kernel, and a sum.
            layers.EinsumDense("abc,bcd->abd", [5, 3], bias_axes="d"),
            layers.EinsumDense("abc,dc->abd", [None, 4]),
            layers.EinsumDense("abc,cd->ad", 2),
        ]
    )


def _folded():
    """Each position by itself to the layer, all of them one example's."""
    inner = keras.Sequential([layers.Dense(3, "tanh"), layers.Dense(2)])
    return keras.Sequential([Folded(inner)])


def _lora():
    """Updates in a model inside a model, and of a layer used twice."""
    inner = keras.Input([None, 6])
    hidden = LoRADense(layers.Dense(6, "tanh"), 2, 3.0)
    tower = keras.Model(inner, hidden(hidden(inner)), name="tower")
    inputs = keras.Input([5, 4])
    x = tower(layers.Dense(6, trainable=False)(inputs))
    return keras.Model(inputs, LoRADense(layers.Dense(4, "tanh"), 2, 3.0)(x))


def _ids(high, *shape):
    return lambda random: random.integers(0, high, size=(ROWS, *shape))


def _floats(*shape):
    return lambda random: random.normal(size=(ROWS, *shape))


MODELS = {
    "dense": (_dense_stack, _floats(5)),
    "dense, long": (_dense_stack, _floats(20, 5)),  # by the product itself
    "dense, wide": (_wide, _floats(3, 24)),  # by Gram matrices
    "nested": (_nested, _floats(5, 4)),
    "conv1d": (_cnn, _floats(9, 4)),
    "conv2d": (_cnn_2d, _floats(6, 5, 3)),
    "depthwise": (_separable, _floats(6, 5, 3)),
    "einsum": (_einsums, _floats(5, 4)),
    "einsum, vectors": (_einsums_of_vectors, _floats(5, 4)),
    "folded": (_folded, _floats(5, 4)),
    "lora": (_lora, _floats(5, 4)),
    "attention": (Block, _ids(11, 7)),
    "masked": (Masked, _ids(7, 5)),
    "reusing": (Reusing, _ids(9, 6)),
    "tied": (Tied, _floats(6)),
    "tied, long": (Tied, _floats(8, 6)),
    "tied, wide": (lambda: Tied(24), _floats(2, 24)),
    "language": (Language, _ids(9, 4)),
    "transformer": (Translation, _ids(11, 9)),
    "time": (_over_time, _floats(4, 3, 5)),
    "time of a model": (_model_over_time, _floats(3, 4)),
}


def made(name):
    """A model, its float64 twin, and inputs for both.

    The models are those of every call: tests differentiate and do not train them.
    """
    model, twin, x = _made(name)
    return model, twin, x.copy()


@functools.cache
def _made(name):
    make, draw = MODELS[name]
    random = np.random.default_rng(0)
    x = draw(random)
    x = single(x).astype(x.dtype)  # the same numbers in either precision
    keras.utils.set_random_seed(0)
    model = make()
    model(single(x))
    for variable in model.trainable_variables:  # biases and scales matter, too
        variable.assign_add(0.3 * random.normal(size=variable.shape))
    with floatx("float64"):
        twin = make()
        twin(x)
        twin.set_weights([w.astype(np.float64) for w in model.get_weights()])
    return model, twin, x


def losses(model, x):
    """One loss per example: a fixed function of the outputs, with wild sizes."""
    outputs = model(tf.convert_to_tensor(x), training=True)
    outputs = tf.reshape(outputs, [x.shape[0], -1])
    mix = tf.cos(tf.range(outputs.shape[1], dtype=tf.float64))
    return tf.reduce_sum(tf.cast(mix, outputs.dtype) * outputs**2, 1)


def naive(twin, x):
    """Every example's gradient from a batch of its own, per weight, float64."""
    return by_row(lambda rows: losses(twin, x[rows]), twin.trainable_variables, len(x))


def by_row(losses_of, variables, rows):
    """Each row's gradient per weight, [rows, ...]; `losses_of` takes a slice of one."""
    gradients = []
    for row in range(rows):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(losses_of(slice(row, row + 1)))
        found = tape.gradient(loss, variables)
        gradients.append([tf.convert_to_tensor(g).numpy() for g in found])
    return [np.stack(per_weight) for per_weight in zip(*gradients)]


def single(x):
    """Inputs for the float32 model; ids stay what they are."""
    return x.astype("float32") if x.dtype.kind == "f" else x


def run(model, x, variables=None, clip_norm=1e30, mode="graph", poison=1, **options):
    """The engine's answer: eagerly, in a graph, or compiled by XLA.

    Losses are multiplied by `poison`, one number a row.
    """
    variables = model.trainable_variables if variables is None else variables
    x = x if model.dtype == "float64" else single(x)

    def clipped():
        return fast.clipped_sum(
            lambda: losses(model, x) * poison, [model], variables, clip_norm, **options
        )

    if mode == "eager":
        return clipped()
    return tf.function(clipped, jit_compile=mode == "xla")()


def norms(gradients):
    """Per-example norms over all weights, from [B, ...] gradients of each."""
    return np.sqrt(sum((g.reshape(len(g), -1) ** 2).sum(1) for g in gradients))


def clipped_by_hand(gradients, clip_norm):
    """Σ min(1, C / norm) · gradient, for each weight."""
    scale = np.minimum(1, clip_norm / norms(gradients))
    return [np.tensordot(scale, g, 1) for g in gradients]


def assert_close(found, expected, size, names=None, tolerance=1e-5):
    """Each weight by itself, in norm and in maximum, at this relative error.

    A weight that is zero in exact arithmetic, such as a key's bias (softmax takes it
    out again), has no relative error: below 1e-12 of `size`, the clip norm, in float64,
    it must be below 1e-6 of it here.
    """
    assert len(found) == len(expected)
    for index, (one, other) in enumerate(zip(found, expected)):
        name = names[index] if names else index
        off = np.asarray(one, np.float64) - other
        if np.linalg.norm(other) < 1e-12 * size:
            assert np.linalg.norm(off) < 1e-6 * size, name
            continue
        assert np.linalg.norm(off) <= tolerance * np.linalg.norm(other), name
        assert np.abs(off).max() <= tolerance * np.abs(other).max(), name
