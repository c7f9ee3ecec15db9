"""compile and fit for any Keras model, and what they refuse."""

import math

import numpy as np
import pytest
import tensorflow as tf
from helpers import plans
from helpers.fitted import NONE, compiled, data, functional, plan_of

from tfdpsq.privacy import Diverged, PrivateModel


def _sequential():
    return tf.keras.Sequential(
        [
            tf.keras.layers.Dense(8, "relu", input_shape=(6,)),
            tf.keras.layers.Dropout(0.25),
            tf.keras.layers.Dense(3),
        ]
    )


class _Subclassed(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = functional()
        self.norm = tf.keras.layers.LayerNormalization()

    def call(self, inputs, training=None):
        return self.norm(self.inner(inputs, training=training))


@pytest.mark.parametrize(
    "make, optimizer",
    [(_sequential, "adafactor"), (functional, "adam"), (_Subclassed, "sgd")],
)
def test_fit_trains_any_model_for_the_plans_steps(make, optimizer):
    model = make()
    model(np.zeros([1, 6], np.float32))
    before = [v.numpy() for v in model.trainable_variables]
    private = compiled(model, plan := plan_of(), optimizer)
    history = private.fit(*data())
    assert private.steps_executed == 8
    assert int(tf.convert_to_tensor(private.optimizer.iterations)) == 8
    assert len(history.history["loss"]) == 2  # 64 rows, 16 a batch: 4 steps an epoch
    assert all(np.abs(v - b).max() > 0 for v, b in zip(model.get_weights(), before)), (
        "a weight did not move"
    )
    assert private.epsilon() == plan.epsilon(8) <= 8.0
    x, y = data()
    np.testing.assert_allclose(private.predict(x, verbose=0), model(x), atol=1e-5)
    entropies = tf.keras.losses.sparse_categorical_crossentropy(y, model(x), True)
    mean = pytest.approx(float(tf.reduce_mean(entropies)), rel=1e-4)
    assert private.evaluate(x, y, verbose=0) == mean


def test_without_noise_fit_learns_what_plain_keras_learns():
    """ε = ∞ on whole batches is gradient descent on the mean loss, step by step."""
    x, y = data()
    plan = plan_of(epsilon=math.inf, batch_size=64, steps=5)
    private_model, plain = functional(), functional()
    plain.set_weights(private_model.get_weights())
    private = PrivateModel(private_model, plan, microbatch_size=16)
    private.compile(
        plans.optimizer(0.5),
        tf.keras.losses.SparseCategoricalCrossentropy(True, reduction=NONE),
    )
    private.fit(x, y)
    plain.compile(
        tf.keras.optimizers.legacy.SGD(0.5),
        tf.keras.losses.SparseCategoricalCrossentropy(True),
    )
    plain.fit(x, y, batch_size=64, epochs=5, verbose=0)
    for one, other in zip(private_model.get_weights(), plain.get_weights()):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_a_loss_compares_one_column_with_flat_targets_row_by_row():
    """[B] against [B, 1] broadcasts to all pairs of rows if nobody looks."""
    x, _ = data()
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(6,))])
    plan = plan_of(epsilon=math.inf, steps=60)
    private = PrivateModel(model, plan, microbatch_size=8)
    private.compile(plans.optimizer(0.1), "mse")
    losses = private.fit(x, x.sum(1)).history["loss"]
    assert losses[-1] < 1e-2 < losses[0]


def test_validation_is_recorded_as_a_private_read_and_refused_in_strict_mode():
    x, y = data()
    private = compiled(_sequential(), plan_of())
    history = private.fit(x, y, validation_data=(x[:8], y[:8]))
    assert len(history.history["val_loss"]) == 2
    assert [entry["what"] for entry in private.reads.entries] == [
        "the validation data, after every epoch",
        "the training loss of every step",
    ]
    strict = compiled(_sequential(), plan_of(), strict=True)
    with pytest.raises(ValueError, match="strict mode refuses"):
        strict.fit(x, y, validation_data=(x[:8], y[:8]))
    assert strict.steps_executed == 0
    assert "loss" not in strict.fit(x, y).history and strict.reads.entries == []


def test_what_cannot_be_private_is_refused_before_a_step():
    x, y = data()

    def refused(match, model=None, loss=None, data=(x, y), plan=None, **options):
        with pytest.raises(ValueError, match=match):
            private = compiled(model or _sequential(), plan or plan_of(), loss=loss)
            private.fit(*data, **options)
        return True

    refused("reduction=", loss=tf.keras.losses.MeanSquaredError())
    refused("Give arrays", data=(iter([x]), y))
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(10)
    refused("fit got a", data=(dataset, y))
    refused("fit got no targets", data=(x,))
    refused("64.*63 rows|63, 64", data=(x, y[:63]))
    regularised = tf.keras.Sequential(
        [tf.keras.layers.Dense(3, kernel_regularizer="l2", input_shape=(6,))]
    )
    refused("adds losses", model=regularised)
    dropping = tf.keras.layers.GRU(4, recurrent_dropout=0.5)
    recurrent = tf.keras.Sequential(
        [tf.keras.layers.Reshape([3, 2], input_shape=(6,)), dropping]
    )
    refused("replace its dropout and recurrent_dropout", model=recurrent)


@pytest.mark.parametrize("name", ["whole.keras", "whole.h5"])
def test_checkpoints_of_fit_hold_the_wrapped_model(tmp_path, name):
    model = functional() if name.endswith("h5") else _Subclassed()
    private = compiled(model, plan_of(steps=2), "sgd")
    path = str(tmp_path / name)
    keep = tf.keras.callbacks.ModelCheckpoint(path)
    private.fit(*data(), callbacks=[keep], directory=tmp_path / "private")
    x = data()[0]
    with tf.keras.utils.custom_object_scope({"_Subclassed": _Subclassed}):
        loaded = tf.keras.models.load_model(path)
    np.testing.assert_allclose(loaded(x), model(x), atol=1e-6)


class _OwnLosses(tf.keras.Model):
    """A model that computes its losses from its inputs alone."""

    def __init__(self):
        super().__init__()
        self.head = tf.keras.layers.Dense(3)

    def call(self, inputs, training=None):
        return self.head(inputs["x"])

    def per_example_losses(self, inputs, training=False):
        return tf.keras.losses.sparse_categorical_crossentropy(
            inputs["y"], self(inputs, training=training), True
        )


def test_a_model_with_losses_of_its_own_needs_no_other():
    x, y = data()
    rows = {"x": x, "y": y}
    private = PrivateModel(model := _OwnLosses(), plan_of(epsilon=100.0), 8)
    private.compile(plans.optimizer(0.5))
    history = private.fit(rows, validation_data=(rows, None)).history
    assert history["val_loss"][-1] < history["val_loss"][0]
    mean = float(tf.reduce_mean(model.per_example_losses(rows)))
    assert history["val_loss"][-1] == pytest.approx(mean, rel=1e-4)
    assert private.evaluate(rows, verbose=0) == pytest.approx(mean, rel=1e-4)


class _Ends(tf.keras.callbacks.Callback):
    """Stops or interrupts `fit` after this many steps; before the first one for 0."""

    def __init__(self, steps, interrupts=True):
        super().__init__()
        self._steps, self._interrupts = steps, interrupts

    def on_train_batch_begin(self, batch, logs=None):
        if not self._steps:
            raise KeyboardInterrupt

    def on_train_batch_end(self, batch, logs=None):
        self._steps -= 1
        if not self._steps and self._interrupts:
            raise KeyboardInterrupt
        self.model.stop_training = not self._steps


@pytest.mark.parametrize("interrupts", [True, False])
def test_a_fit_that_ends_early_counts_what_ran_and_is_not_repeated(interrupts):
    private = compiled(functional(), plan := plan_of())
    try:
        private.fit(*data(), callbacks=[_Ends(3, interrupts)])
    except KeyboardInterrupt:
        assert interrupts
    assert private.steps_executed == (3 if interrupts else 8)
    # When a callback stopped it tells of the data: then the whole plan is spent.
    assert private.epsilon() == plan.epsilon(3 if interrupts else 8)
    private.compile(plans.optimizer(0.05), "mse")
    with pytest.raises(ValueError, match="spend the same budget a second time"):
        private.fit(*data())


def test_a_fit_goes_on_in_its_directory_with_its_data_only(tmp_path):
    """Steps count that were paid before, whatever the second process does."""
    x, y = data()
    plan, paid = plan_of(), []
    for steps in (4, 2, 0):
        private = compiled(functional(), plan)
        with pytest.raises(KeyboardInterrupt):
            private.fit(x, y, directory=tmp_path / "a", callbacks=[_Ends(steps)])
        paid.append(private.steps_executed)
    assert paid == [4, 4, 4] and private.epsilon() == plan.epsilon(4)
    with pytest.raises(ValueError, match="spend the same budget a second time"):
        private.fit(x, y, directory=tmp_path / "b")
    assert not (tmp_path / "b").exists()
    again = compiled(functional(), plan)
    for changed in (x.copy(), y.copy()):
        changed[7:8] += 1
        rows = (changed, y) if changed.ndim == 2 else (x, changed)
        with pytest.raises(ValueError, match="other data|data"):
            again.fit(*rows, directory=tmp_path / "a")
    again.fit(x, y, directory=tmp_path / "a")
    assert again.steps_executed == 8


def test_a_fit_that_diverges_has_spent_the_whole_plan(tmp_path):
    """When it ended was decided by noised weights: steps that ran are too few.

    Here none is left that ran: the first one's weights are infinite.
    """
    plan = plan_of()
    private = PrivateModel(functional(), plan, microbatch_size=8)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(True, reduction=NONE)
    private.compile(plans.optimizer(plans.Breaks(0)), loss)
    with pytest.raises(Diverged) as ended:
        private.fit(*data(), directory=tmp_path)
    assert (ended.value.diverged_at, ended.value.weights_of) == (1, 0)
    assert private.steps_executed == 8
    assert private.epsilon() == plan.epsilon(8) > plan.epsilon(7)
    for values in private.model.get_weights():
        assert np.isfinite(values).all()


def test_mixed_float16_is_refused():
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        with pytest.raises(ValueError, match="mixed_float16.*mixed_bfloat16"):
            compiled(functional(), plan_of())
        made = functional()
    finally:
        tf.keras.mixed_precision.set_global_policy(None)
    with pytest.raises(ValueError, match="mixed_float16.*mixed_bfloat16"):
        compiled(made, plan_of())
