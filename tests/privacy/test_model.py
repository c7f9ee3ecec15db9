"""compile and fit for any Keras model, and what they refuse."""

import math
import shutil

import numpy as np
import pytest
import tensorflow as tf
from helpers.fitted import NONE as _NONE
from helpers.fitted import compiled as _compiled
from helpers.fitted import data as _data
from helpers.fitted import functional as _functional
from helpers.fitted import plan_of as _plan

from tfdpsq.privacy import (
    Diverged,
    Groups,
    PrivateModel,
    make_optimizer,
)
from tfdpsq.privacy.proof.ledger import FILE_NAME, Ledger
from tfdpsq.validation import InputError


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
        self.inner = _functional()
        self.norm = tf.keras.layers.LayerNormalization()

    def call(self, inputs, training=None):
        return self.norm(self.inner(inputs, training=training))


@pytest.mark.parametrize("make", [_sequential, _functional, _Subclassed])
@pytest.mark.parametrize("optimizer", ["adam", "adafactor", "t5x_adafactor", "sgd"])
def test_fit_trains_any_model_for_the_plans_steps(make, optimizer):
    model = make()
    model(np.zeros([1, 6], np.float32))
    before = [v.numpy() for v in model.trainable_variables]
    private = _compiled(model, plan := _plan(), optimizer)
    history = private.fit(*_data())
    assert private.steps_executed == 8
    assert int(tf.convert_to_tensor(private.optimizer.iterations)) == 8
    assert len(history.history["loss"]) == 2  # 64 rows, 16 a batch: 4 steps an epoch
    assert all(np.abs(v - b).max() > 0 for v, b in zip(model.get_weights(), before)), (
        "a weight did not move"
    )
    assert private.epsilon() == plan.epsilon(8) <= 8.0
    x, y = _data()
    np.testing.assert_allclose(private.predict(x, verbose=0), model(x), atol=1e-5)
    entropies = tf.keras.losses.sparse_categorical_crossentropy(y, model(x), True)
    mean = pytest.approx(float(tf.reduce_mean(entropies)), rel=1e-4)
    assert private.evaluate(x, y, verbose=0) == mean


def test_without_noise_fit_learns_what_plain_keras_learns():
    """ε = ∞ on whole batches is gradient descent on the mean loss, step by step."""
    x, y = _data()
    plan = _plan(epsilon=math.inf, batch_size=64, steps=5)
    private_model, plain = _functional(), _functional()
    plain.set_weights(private_model.get_weights())
    private = PrivateModel(private_model, plan, microbatch_size=16)
    private.compile(
        make_optimizer(plan, 0.5, "sgd"),
        tf.keras.losses.SparseCategoricalCrossentropy(True, reduction=_NONE),
    )
    private.fit(x, y)
    plain.compile(
        tf.keras.optimizers.legacy.SGD(0.5),
        tf.keras.losses.SparseCategoricalCrossentropy(True),
    )
    plain.fit(x, y, batch_size=64, epochs=5, verbose=0)
    for one, other in zip(private_model.get_weights(), plain.get_weights()):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "loss", ["mse", tf.keras.losses.MeanSquaredError(reduction=_NONE)]
)
def test_a_loss_compares_one_column_with_flat_targets_row_by_row(loss):
    """[B] against [B, 1] broadcasts to all pairs of rows if nobody looks."""
    x, _ = _data()
    target = x.sum(1)
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(6,))])
    plan = _plan(epsilon=math.inf, steps=60)
    private = PrivateModel(model, plan, microbatch_size=8)
    private.compile(make_optimizer(plan, 0.1, "sgd"), loss)
    history = private.fit(x, target)
    assert history.history["loss"][-1] < 1e-2 < history.history["loss"][0]


def test_callbacks_can_stop_early_and_epsilon_counts_what_ran():
    class Stop(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            assert logs["loss"] > 0
            if batch == 2:
                self.model.stop_training = True

    private = _compiled(_sequential(), plan := _plan())
    private.fit(*_data(), callbacks=[Stop()])
    assert private.steps_executed == 3
    assert private.epsilon() == plan.epsilon(3) < plan.epsilon(8)


def test_validation_is_recorded_as_a_private_read_and_refused_in_strict_mode():
    x, y = _data()
    private = _compiled(_sequential(), _plan())
    history = private.fit(x, y, validation_data=(x[:8], y[:8]))
    assert len(history.history["val_loss"]) == 2
    assert [entry["what"] for entry in private.reads.entries] == [
        "the validation data, after every epoch",
        "the training loss of every step",
    ]
    strict = _compiled(_sequential(), _plan(), strict=True)
    with pytest.raises(ValueError, match="strict mode refuses"):
        strict.fit(x, y, validation_data=(x[:8], y[:8]))
    assert strict.steps_executed == 0
    assert "loss" not in strict.fit(x, y).history and strict.reads.entries == []


def test_a_users_rows_are_clipped_together():
    """One user's rows, however many, move the update by exactly the clip norm.

    Every gradient here is larger than C, and the user's own rows agree, so that
    clipped one by one they would move it by four times as much.
    """
    x, y = _data(11)
    x, y = np.concatenate([np.repeat(x[:1], 30, 0), x]), np.append(y[:1].repeat(30), y)
    owners = ["a"] * 30 + [f"u{i}" for i in range(11)]
    plan = _plan(
        clip_norm=1e-3,
        num_units=12,
        batch_size=12,
        unit="user",
        rows_per_unit=4,
        steps=1,
    )
    start = _functional().get_weights()
    after = []
    for first in (0, 30):  # with that user, and without
        model = _functional()
        model.set_weights(start)
        private = _compiled(model, plan, "sgd")
        private.fit(x[first:], y[first:], groups=Groups.of(owners[first:]))
        after.append(model.get_weights())
    moved = np.sqrt(sum(((a - b) ** 2).sum() for a, b in zip(*after)))
    # Learning rate times clip norm over the expected batch.
    assert moved == pytest.approx(0.05 * 1e-3 / 12, rel=1e-2)


def test_fit_goes_on_with_the_same_data_only(tmp_path):
    class Stop(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = True

    x, y = _data()
    private = _compiled(model := _functional(), _plan())
    private.fit(x, y, directory=tmp_path, callbacks=[Stop()])
    assert private.steps_executed == 1
    again = _compiled(_functional(), private.plan)
    with pytest.raises(ValueError, match="data"):
        again.fit(x + 1, y, directory=tmp_path)
    again.fit(x, y, directory=tmp_path)
    assert again.steps_executed == 8
    assert model.get_weights()[0].shape == again.model.get_weights()[0].shape


def test_what_cannot_be_private_is_refused_before_a_step():
    x, y = _data()

    def refused(match, model=None, loss=None, data=(x, y), plan=None, **options):
        with pytest.raises(ValueError, match=match):
            private = _compiled(model or _sequential(), plan or _plan(), loss=loss)
            private.fit(*data, **options)
        return True

    refused("reduction", loss=tf.keras.losses.MeanSquaredError())
    refused(
        "one loss per row",
        loss=lambda y, p: tf.reduce_mean(
            tf.keras.losses.sparse_categorical_crossentropy(y, p, True)
        ),
    )
    refused("must draw the batches itself", data=(iter([x]), y))
    refused("fit got no targets", data=(x,))
    refused("64.*63 rows|63, 64", data=(x, y[:63]))
    norm = tf.keras.Sequential(
        [
            tf.keras.layers.Dense(4, input_shape=(6,)),
            tf.keras.layers.BatchNormalization(),
            tf.keras.layers.Dense(3),
        ]
    )
    refused("batch\n?.*normalisation|depends on", model=norm)
    refused(
        "depends on",
        loss=lambda y, p: tf.nn.softmax_cross_entropy_with_logits(
            tf.eye(p.shape[0]), p @ tf.transpose(p)
        ),
    )
    regularised = tf.keras.Sequential(
        [tf.keras.layers.Dense(3, kernel_regularizer="l2", input_shape=(6,))]
    )
    refused("losses of its own", model=regularised)
    recurrent = tf.keras.Sequential(
        [
            tf.keras.layers.Reshape([3, 2], input_shape=(6,)),
            tf.keras.layers.LSTM(4),
            tf.keras.layers.Dense(3),
        ]
    )
    refused("lstm", model=recurrent)
    dropping = tf.keras.layers.GRU(4, recurrent_dropout=0.5)
    recurrent = tf.keras.Sequential(
        [tf.keras.layers.Reshape([3, 2], input_shape=(6,)), dropping]
    )
    refused("recurrent_dropout keep their masks", model=recurrent)
    with pytest.raises(ValueError, match="neither clips nor adds noise"):
        PrivateModel(_sequential(), _plan()).compile("adam", "mse")
    with pytest.raises(ValueError, match="another plan"):
        plan, other = _plan(), _plan(epsilon=1.0)
        PrivateModel(_sequential(), plan).compile(make_optimizer(other, 0.1), "mse")


def test_fit_compiles_with_xla():
    plan = _plan(steps=2)
    private = PrivateModel(_sequential(), plan, microbatch_size=8)
    private.compile(
        make_optimizer(plan, 0.05, "adafactor"),
        tf.keras.losses.SparseCategoricalCrossentropy(True, reduction=_NONE),
        jit_compile=True,
    )
    private.fit(*_data())
    assert private.steps_executed == 2


def test_an_unbuilt_subclassed_model_is_trained_in_full():
    model = _Subclassed()
    private = _compiled(model, _plan(), "sgd")
    private.fit(*_data())
    assert int(private.optimizer.iterations) == 8
    assert len(model.trainable_variables) == 6


@pytest.mark.parametrize("name", ["saved", "whole.keras", "whole.h5"])
def test_checkpoints_of_fit_hold_the_wrapped_model(tmp_path, name):
    model = _functional() if name.endswith("h5") else _Subclassed()
    private = _compiled(model, _plan(), "sgd")
    path = str(tmp_path / name)
    keep = tf.keras.callbacks.ModelCheckpoint(path)
    private.fit(*_data(), callbacks=[keep], directory=tmp_path / "private")
    x = _data()[0]
    with tf.keras.utils.custom_object_scope({"_Subclassed": _Subclassed}):
        loaded = tf.keras.models.load_model(path)
    np.testing.assert_allclose(loaded(x), model(x), atol=1e-6)


def test_weights_saved_by_the_wrapper_are_those_of_the_wrapped_model(tmp_path):
    private = _compiled(model := _functional(), _plan())
    private.save_weights(path := str(tmp_path / "weights.h5"))
    other = _functional()
    other.load_weights(path)
    PrivateModel(again := _functional(), _plan()).load_weights(path)
    for weight, *copies in zip(
        model.get_weights(), other.get_weights(), again.get_weights()
    ):
        for copy in copies:
            np.testing.assert_array_equal(copy, weight)


def test_the_wrapped_model_is_exported_and_summed_up(tmp_path, capsys):
    private = _compiled(model := _functional(), _plan())
    private.export(str(tmp_path / "served"))
    x = tf.constant(_data()[0])
    served = tf.saved_model.load(str(tmp_path / "served"))  # which has the weights
    np.testing.assert_allclose(served.serve(x), model(x), atol=1e-6)
    private.summary()
    assert model.name in capsys.readouterr().out


def test_a_second_fit_would_spend_twice_and_is_refused():
    private = _compiled(_functional(), _plan())
    private.fit(*_data())
    private.compile(make_optimizer(private.plan, 0.05), "mse")
    with pytest.raises(ValueError, match="spend the same budget a second time"):
        private.fit(*_data())


def test_a_fit_in_another_directory_would_spend_twice_and_is_refused(tmp_path):
    private = _compiled(_functional(), _plan(), "sgd")
    ends = [_InterruptAtOnce()]
    with pytest.raises(KeyboardInterrupt):
        private.fit(*_data(), directory=tmp_path / "a", callbacks=[_Interrupt(1)])
    with pytest.raises(ValueError, match="spend the same budget a second time"):
        private.fit(*_data(), directory=tmp_path / "b", callbacks=ends)


class _Interrupt(tf.keras.callbacks.Callback):
    def __init__(self, steps):
        super().__init__()
        self._left = steps

    def on_train_batch_end(self, batch, logs=None):
        self._left -= 1
        if not self._left:
            raise KeyboardInterrupt


class _InterruptAtOnce(tf.keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        raise KeyboardInterrupt


def test_an_interrupted_fit_counts_the_steps_that_ran():
    private = _compiled(_functional(), plan := _plan())
    with pytest.raises(KeyboardInterrupt):
        private.fit(*_data(), callbacks=[_Interrupt(3)])
    assert private.steps_executed == 3 and private.epsilon() == plan.epsilon(3)


def test_steps_count_though_a_callback_set_iterations_back():
    """Refused after the second, which is paid for."""
    private = _compiled(_functional(), _plan(), "sgd")

    def back(batch, logs):
        private.optimizer.iterations.assign(min(batch, 0) if batch else 1)

    called = tf.keras.callbacks.LambdaCallback(on_train_batch_end=back)
    with pytest.raises(InputError, match="iterations .* set to 0 before step 2"):
        private.fit(*_data(), callbacks=[called])
    assert private.steps_executed == 2


def test_a_fit_that_goes_on_counts_what_was_paid_before_it(tmp_path):
    """The first one's callbacks saw the weights of step 4, whatever the second does."""
    plan, paid = _plan(), []
    for steps in (4, 2, None):
        private = _compiled(_functional(), plan)
        with pytest.raises(KeyboardInterrupt):
            ends = _Interrupt(steps) if steps else _InterruptAtOnce()
            private.fit(*_data(), directory=tmp_path, callbacks=[ends])
        paid.append(private.steps_executed)
    assert paid == [4, 4, 4] and private.epsilon() == plan.epsilon(4)


class _Infinite(tf.keras.optimizers.schedules.LearningRateSchedule):
    """A rate that is infinite where a step is compiled; checks call it outside."""

    def __call__(self, step):
        return math.inf if tf.inside_function() else 0.05

    def get_config(self):
        return {}


def test_a_fit_that_diverges_has_spent_the_whole_plan(tmp_path):
    """When it ended was decided by noised weights: steps that ran are too few.

    Here none is left that ran: the first one's weights are infinite.
    """
    plan = _plan()
    private = PrivateModel(_functional(), plan, microbatch_size=8)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(True, reduction=_NONE)
    private.compile(make_optimizer(plan, _Infinite(), "sgd"), loss)
    with pytest.raises(Diverged) as ended:
        private.fit(*_data(), directory=tmp_path)
    assert (ended.value.diverged_at, ended.value.weights_of) == (1, 0)
    assert private.steps_executed == 8
    assert private.epsilon() == plan.epsilon(8) > plan.epsilon(7)
    for values in private.model.get_weights():
        assert np.isfinite(values).all()


class _Watch(tf.keras.callbacks.Callback):
    """What callbacks find, among the payments."""

    def __init__(self, events, last=None):
        super().__init__()
        self.events, self._last, self._step = events, last, 0
        self.at_epochs = []

    def on_train_batch_end(self, batch, logs=None):
        self._step += 1
        self.events.append("told")
        self.model.stop_training = self._step == self._last

    def on_epoch_end(self, epoch, logs=None):
        self.at_epochs.append((epoch, self.model.model.get_weights()))


def test_steps_per_execution_are_the_steps_one_by_one(tmp_path, monkeypatch):
    """Paid for before each loop, of which none goes past an epoch or the plan."""
    pay, events = Ledger.pay, []

    def paid(self, step):
        events.append("paid")
        return pay(self, step)

    monkeypatch.setattr(Ledger, "pay", paid)
    plan = _plan(steps=10)

    def fit(name, last=None, **options):
        private = PrivateModel(_sequential(), plan, microbatch_size=8)
        loss = tf.keras.losses.SparseCategoricalCrossentropy(True, reduction=_NONE)
        private.compile(make_optimizer(plan, 0.05, "adam"), loss, **options)
        events.clear()
        watch = _Watch(events, last)
        private.fit(*_data(), directory=tmp_path / name, callbacks=[watch])
        return private, watch

    begun, _ = fit("one", last=1)  # whose seeds and state both go on from
    assert begun.steps_executed == 1
    shutil.copytree(tmp_path / "one", tmp_path / "looped")
    _, alone = fit("one")
    assert events == ["paid", "told"] * 9
    private, looped = fit("looped", steps_per_execution=3)
    # Epochs end after 4, 8 and 10 steps: loops are 1-4, 4-7, 7-8, 8-10.
    sizes = (3, 3, 1, 2)
    assert events == [word for n in sizes for word in ["paid"] * n + ["told"] * n]
    assert private.steps_executed == 10
    ledgers = [(tmp_path / n / FILE_NAME).read_bytes() for n in ("one", "looped")]
    assert ledgers[0] == ledgers[1]
    assert [epoch for epoch, _ in alone.at_epochs] == [0, 1, 2]
    # Also at an epoch's end callbacks find the weights of its last step.
    for (_, ours), (_, theirs) in zip(looped.at_epochs, alone.at_epochs):
        for one, other in zip(ours, theirs):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("value", [0, -2, "auto", 1.5])
def test_steps_per_execution_are_a_number(value):
    plan = _plan()
    private = PrivateModel(_functional(), plan)
    with pytest.raises(ValueError, match="steps_per_execution is"):
        private.compile(
            make_optimizer(plan, 0.05, "sgd"), "mse", steps_per_execution=value
        )


def test_an_epoch_has_a_step():
    private = _compiled(_functional(), _plan())
    with pytest.raises(ValueError, match="steps_per_epoch is -4"):
        private.fit(*_data(), steps_per_epoch=-4)


def test_a_data_set_is_refused_with_lines_that_work():
    x, y = _data()
    dataset = tf.data.Dataset.from_tensor_slices(({"x": x}, y)).batch(10)
    plan = _plan(steps=2)
    inputs = tf.keras.Input([6], name="x")
    model = tf.keras.Model({"x": inputs}, tf.keras.layers.Dense(3)(inputs))
    private = _compiled(model, plan)
    for arguments in ((dataset,), (x, dataset)):
        with pytest.raises(InputError, match="the plan's sampler must") as refusal:
            private.fit(*arguments)
    lines = [line for line in str(refusal.value).splitlines() if line[:2] == "  "]
    assert len(lines) == 3
    names = {"dataset": dataset, "private": private, "tf": tf, "np": np}
    exec("\n".join(map(str.strip, lines)), names)
    assert private.steps_executed == 2
    np.testing.assert_array_equal(names["x"]["x"], x)
    np.testing.assert_array_equal(names["y"], y)


def test_mixed_float16_is_refused():
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        with pytest.raises(ValueError, match="mixed_float16.*mixed_bfloat16"):
            _compiled(_functional(), _plan())
        made = _functional()
    finally:
        tf.keras.mixed_precision.set_global_policy(None)
    with pytest.raises(ValueError, match="mixed_float16.*mixed_bfloat16"):
        _compiled(made, _plan())


@pytest.mark.parametrize("tried", [True, False])
def test_an_id_that_an_embedding_does_not_have_is_not_repeated(tmp_path, tried):
    """The message of TensorFlow quotes it; it is a private row's."""
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Lambda(
                lambda x: x % 10**7, input_shape=(2,), dtype="int64"
            ),
            tf.keras.layers.Embedding(10, 3),
            tf.keras.layers.Flatten(),
        ]
    )
    ids = np.ones([64, 2], np.int64)
    ids[0, 1] = 10**7 + 1  # an id that there is; smallest and largest are tried
    # One row alone would now and then not be drawn. Some are tried before.
    at = np.concatenate([np.linspace(0, 63, n).astype(int) for n in (4, 8)])
    ids[at if tried else np.setdiff1d(np.arange(64), at), 1] = 7654321
    private = _compiled(model, _plan(), "sgd")
    with pytest.raises(ValueError, match="embedding does not have") as raised:
        private.fit(ids, np.ones(64, np.int64), directory=tmp_path)
    assert "7654321" not in str(raised.value) and raised.value.__suppress_context__
    assert ("Nothing was spent" in str(raised.value)) == tried


def test_a_schedule_without_a_config_trains_where_nothing_is_kept(tmp_path):
    class Rate(tf.keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.1

    plan = _plan(steps=1)
    model = tf.keras.Sequential([tf.keras.layers.Dense(3, input_shape=(6,))])
    private = PrivateModel(model, plan, microbatch_size=16)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(reduction=_NONE)
    private.compile(make_optimizer(plan, Rate(), "sgd", "vectorized"), loss)
    with pytest.raises(ValueError, match="a schedule without get_config"):
        private.fit(*_data(), directory=tmp_path)
    private.fit(*_data())
    assert private.steps_executed == 1
