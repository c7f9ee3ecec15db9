"""Training a part: what is chosen, and what stays frozen."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.layers import train_only
from tfdpsq.validation import InputError

keras = tf.keras


def _plain():
    """A nested model: names "first", "block/inner", "block/norm", "last"."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    block = keras.Sequential(
        [layers.Dense(4, "tanh", name="inner"), layers.LayerNormalization(name="norm")],
        name="block",
    )
    model = keras.Sequential(
        [layers.Dense(3, name="first"), block, layers.Dense(2, name="last")]
    )
    model.build([None, 5])
    return model


_PATHS = [
    "first/kernel",
    "first/bias",
    "block/inner/kernel",
    "block/inner/bias",
    "block/norm/gamma",
    "block/norm/beta",
    "last/kernel",
    "last/bias",
]


def _shapes(variables):
    return [tuple(variable.shape) for variable in variables]


@pytest.mark.parametrize(
    "patterns, kept",
    [
        (["*"], range(8)),
        (["block/*"], [2, 3, 4, 5]),
        (["*norm*", "last/kernel"], [4, 5, 6]),
        (["[fl]*st/b???"], [1, 7]),
    ],
)
def test_patterns_choose_by_whole_paths(patterns, kept):
    model = _plain()
    everything = model.get_weights()
    by_path = dict(zip(_PATHS, model.trainable_variables))
    assert train_only(model, patterns) == [_PATHS[i] for i in kept]
    trained = {id(variable) for variable in model.trainable_variables}
    assert trained == {id(by_path[_PATHS[i]]) for i in kept}
    assert len(model.trainable_variables) == len(kept)
    assert len(model.non_trainable_variables) == 8 - len(kept)
    assert sorted(map(np.shape, model.get_weights())) == sorted(
        map(np.shape, everything)
    )


def test_frozen_weights_stay_frozen():
    model = _plain()
    train_only(model, ["block/*"])
    model.trainable = True
    assert _shapes(model.trainable_variables) == [(3, 4), (4,), (4,), (4,)]
    # And once more, of what is left: nothing comes back.
    assert train_only(model, ["*bias", "*beta"]) == [
        "block/inner/bias",
        "block/norm/beta",
    ]
    with pytest.raises(InputError, match=r"'first/\*', which matches no trainable"):
        train_only(model, ["first/*"])
    model.get_layer("block").get_layer("norm").trainable = False
    assert train_only(model, ["*"]) == ["block/inner/bias"]


def test_bad_patterns_are_refused_and_change_nothing():
    model = _plain()
    for patterns, message in (
        (["block/*", "kernel"], "'kernel', which"),
        ("*", "give patterns"),
    ):
        with pytest.raises(InputError, match=message):
            train_only(model, patterns)
    assert len(model.trainable_variables) == 8


class _Shared(keras.Model):
    """One layer in two places, and one weight that two layers hold."""

    def __init__(self):
        super().__init__()
        dense = keras.layers.Dense
        self.one = dense(4, use_bias=False, name="one")
        self.two = dense(4, use_bias=False, name="two")
        inner = dense(4, name="inner")
        self.left = keras.Sequential([inner, dense(4, name="l")], name="left")
        self.right = keras.Sequential([inner, dense(4, name="r")], name="right")

    def build(self, shape):
        for part in (self.one, self.two, self.left, self.right):
            part.build(shape)
        self.two.kernel = self.one.kernel
        self.two._trainable_weights = [self.one.kernel]
        self.built = True

    def call(self, x):
        return self.right(self.left(self.two(self.one(x))))


def test_shared_weights_are_frozen_everywhere():
    model = _Shared()
    model.build([None, 4])
    everything = [
        "one/kernel",
        *(f"left/{name}" for name in ("inner/kernel", "inner/bias", "l/kernel")),
        *("left/l/bias", "right/r/kernel", "right/r/bias"),
    ]
    assert train_only(model, ["*"]) == everything
    assert len(model.trainable_variables) == 7
    with pytest.raises(InputError, match="'two/kernel', which matches"):
        train_only(model, ["two/kernel"])
    # A weight that two layers hold once was frozen in the second alone, and trained.
    assert train_only(model, ["right/*", "left/inner/*"]) == [
        *everything[1:3],
        *everything[5:],
    ]
    assert len(model.trainable_variables) == 4
    assert not any(v is model.one.kernel for v in model.trainable_variables)
    assert train_only(model, ["left/inner/kernel"]) == ["left/inner/kernel"]
    assert model.trainable_variables[0] is model.left.layers[0].kernel
