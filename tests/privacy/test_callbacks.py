"""Callbacks of `fit`, which get losses of private rows: they watch, and set nothing."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.fitted import NONE, compiled, data, functional, plan_of

from tfdpsq.privacy import Groups, PrivateModel, make_optimizer
from tfdpsq.privacy.proof.ledger import FILE_NAME, read_ledger
from tfdpsq.validation import InputError


def test_arrays_that_a_callback_changes_are_not_those_of_fit(tmp_path):
    """A killed run would take its steps again on the rows as they were."""
    x, y = data()

    class Spoils(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            x[:] = np.nan

    private = compiled(functional(), plan_of(steps=3), "sgd")
    history = private.fit(
        x, y, directory=tmp_path, callbacks=[Spoils()], steps_per_epoch=1
    )
    assert np.isnan(x).all() and min(history.history["loss"]) > 0.1


class _SetsRate(tf.keras.callbacks.Callback):
    """Sets the learning rate, and says whether it was asked to before the step."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_begin(self, epoch, logs=None):
        self.seen.append(("epoch", epoch))

    def on_train_batch_begin(self, batch, logs=None):
        steps = int(tf.convert_to_tensor(self.model.optimizer.iterations))
        self.seen.append((batch, steps))
        if steps == 2:
            self.model.optimizer.learning_rate = 0.01


@pytest.mark.parametrize("kept", [True, False], ids=["directory", "none"])
@pytest.mark.parametrize("optimizer", ["sgd", "adafactor"])
def test_rates_that_no_epsilon_covers_are_refused(tmp_path, optimizer, kept):
    """Callbacks get losses; and a killed run would repeat noise from other weights."""
    x, y = data()
    options = {"directory": tmp_path} if kept else {}
    for callback, said in (
        (
            tf.keras.callbacks.LearningRateScheduler(lambda at: 0.5**at),
            "killed run .*Le",
        ),
        (tf.keras.callbacks.ReduceLROnPlateau(monitor="loss"), "from the private loss"),
        (
            tf.keras.callbacks.EarlyStopping("loss", restore_best_weights=True),
            "no ε covers that choice",
        ),
    ):
        private = compiled(functional(), plan_of(), optimizer)
        with pytest.raises(ValueError, match=said):
            private.fit(x, y, callbacks=[callback], **options)
        assert not list(tmp_path.iterdir())
    private, own = compiled(functional(), plan_of(), optimizer), _SetsRate()
    with pytest.raises(ValueError, match=r"learning_rate .* was 0\.05 and .* 0\.01"):
        private.fit(x, y, callbacks=[own], **options)
    assert own.seen == [("epoch", 0), (0, 0), (1, 1), (2, 2)]
    # Of a call that failed all steps count, unless the ledger has them.
    assert private.steps_executed == (2 if kept else 3)
    if kept:
        assert read_ledger(tmp_path / FILE_NAME).steps_paid == 2


class _Chooses(tf.keras.callbacks.Callback):
    """Puts other weights in place, as if by their losses, once no step is left.

    After the steps of the last call number `when`, or at the end.
    """

    def __init__(self, when):
        super().__init__()
        self._when, self.last, self._first, self.chosen = when, None, None, False

    def on_train_batch_end(self, batch, logs=None):
        # Read by the variables: `get_weights` is what `fit` itself uses.
        if not self.chosen:
            self.last = [v.numpy() for v in self.model.model.weights]
        self._first = self._first or self.last
        if batch == self._when:
            self._choose()

    def on_train_end(self, logs=None):
        if self._when is None:
            self._choose()

    def _choose(self):
        self.chosen = True
        self.model.model.set_weights([1.5 * values for values in self._first])


@pytest.mark.parametrize("at_once, when", [(1, 7), (1, None), (4, None), (4, 5)])
@pytest.mark.parametrize("kept", [True, False], ids=["directory", "none"])
def test_weights_that_a_callback_chooses_are_not_those_certified(
    tmp_path, caplog, kept, at_once, when
):
    """It has seen each step's private loss; what is certified is the last step's."""
    private = PrivateModel(functional(), plan := plan_of(), microbatch_size=8)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(True, reduction=NONE)
    optimizer = make_optimizer(plan, 0.05, "sgd")
    private.compile(optimizer, loss, steps_per_execution=at_once)
    own, options = _Chooses(when), {"directory": tmp_path} if kept else {}
    private.fit(*data(), callbacks=[own], steps_per_epoch=8, **options)
    assert private.steps_executed == 8 and "They are set back" in caplog.text
    for values, last in zip(private.model.get_weights(), own.last):
        np.testing.assert_array_equal(values, last)


class _Rate(tf.keras.optimizers.schedules.LearningRateSchedule):
    """A rate that is kept in a variable."""

    def __init__(self):
        self.rate = tf.Variable(0.05)

    def __call__(self, step):
        return self.rate

    def get_config(self):
        return {}


class _Sets(tf.keras.callbacks.Callback):
    """Sets a variable to the loss of a row of private data."""

    def __init__(self, variable):
        super().__init__()
        self._variable = variable

    def on_train_batch_end(self, batch, logs=None):
        self._variable.assign(logs["loss"])


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "t5x_adafactor"])
@pytest.mark.parametrize("kept", [True, False], ids=["directory", "none"])
def test_a_rate_in_a_variable_is_set_by_no_callback(tmp_path, kept, optimizer):
    """Its configuration never tells of it."""
    rate, plan = _Rate(), plan_of()
    private = PrivateModel(functional(), plan, microbatch_size=8)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(True, reduction=NONE)
    private.compile(make_optimizer(plan, rate, optimizer), loss)
    options = {"directory": tmp_path} if kept else {}
    with pytest.raises(InputError, match="weights were changed between two steps"):
        private.fit(*data(), callbacks=[_Sets(rate.rate)], **options)
    assert rate.rate.numpy() == np.float32(0.05)


@pytest.mark.parametrize("when", ["last step", "end", "next step"])
@pytest.mark.parametrize("kept", [True, False], ids=["directory", "none"])
def test_weights_of_a_callback_that_raises_stay_in_no_model(tmp_path, kept, when):
    """The caller that catches its error has the steps' own weights, uncertified."""

    class Raises(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.last = [v.numpy() for v in self.model.model.weights]
            if batch == {"last step": 7, "next step": 3}.get(when):
                self._raise(logs["loss"])

        def on_train_end(self, logs=None):
            self._raise(0.5)

        def _raise(self, loss):
            for variable in self.model.model.weights:
                variable.assign(tf.fill(variable.shape, float(loss)))
            raise KeyError("of the callback")

    private = compiled(functional(), plan_of(), "sgd")
    own, options = Raises(), {"directory": tmp_path} if kept else {}
    with pytest.raises(KeyError, match="of the callback"):
        private.fit(*data(), callbacks=[own], steps_per_epoch=8, **options)
    for variable, last in zip(private.model.weights, own.last):
        np.testing.assert_array_equal(variable.numpy(), last)
    with pytest.raises(InputError, match="fit has run 4 of 8|the last fit did not end"):
        private.certificate("Three numbers from six.")


class _SetsEpsilon(tf.keras.callbacks.Callback):
    """Sets what no checkpoint holds, and what a step that is traced again reads."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.optimizer.epsilon = 1e3


def test_no_setting_of_the_optimizer_is_set_by_a_callback():
    private = compiled(functional(), plan_of(), "adam")
    with pytest.raises(InputError, match="epsilon of the optimizer was .* set to 1000"):
        private.fit(*data(), callbacks=[_SetsEpsilon()], steps_per_epoch=1)


def test_weights_that_are_loaded_after_fit_have_no_certificate(tmp_path):
    """A callback has saved those of each epoch, and the last are what fit left."""
    private = compiled(functional(), plan_of(), "sgd", noise_seed=None)
    keep = tf.keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.h5"))
    private.fit(*data(), callbacks=[keep], steps_per_epoch=1)  # 8 epochs
    private.load_weights(str(tmp_path / "8.h5"))
    private.certificate("Three numbers from six.")
    private.load_weights(str(tmp_path / "7.h5"))
    with pytest.raises(InputError, match="are others than fit left"):
        private.certificate("Three numbers from six.")


class _Reads(tf.keras.layers.Layer):
    """Multiplies by what a metric holds, and keeps a mean where it is evaluated."""

    def __init__(self, keeps=False):
        super().__init__()
        self.total, self._keeps = tf.keras.metrics.Sum(), keeps
        self.total.total.assign(1.0)

    def build(self, shape):
        zeros = {"shape": [3], "initializer": "zeros"}
        self.kept = self.add_weight(name="kept", trainable=False, **zeros)

    def call(self, inputs, training=None):
        if self._keeps and not training:
            self.kept.assign(tf.reduce_mean(inputs, 0))
        return (inputs + self.kept) * self.total.total


def _with(layer):
    inner = tf.keras.Input([6])
    return tf.keras.Model(inner, layer(tf.keras.layers.Dense(3)(inner)))


def test_what_a_loss_reads_of_a_metric_is_set_by_no_callback():
    """Variables of other metrics change whenever something is evaluated."""
    private = compiled(_with(layer := _Reads()), plan_of(), "sgd")
    with pytest.raises(InputError, match="weights were changed between two steps"):
        private.fit(*data(), callbacks=[_Sets(layer.total.total)])
    assert layer.total.total.numpy() == 1.0


def test_validation_leaves_nothing_of_its_rows_in_the_model():
    """No callback is given; what keeps rows in training is refused anyway."""
    x, y = data()
    private = compiled(_with(_Reads(keeps=True)), plan_of(), "sgd")
    with pytest.raises(InputError, match="weights were changed between two steps"):
        private.fit(x, y, validation_data=(x[:5] + 9, y[:5]), steps_per_epoch=2)
    assert np.abs(private.model.get_weights()[-1]).max() < 1.0


class _Does(tf.keras.callbacks.Callback):
    """Calls a function of the model after the second step, or at the end."""

    def __init__(self, function, at_the_end=False):
        super().__init__()
        self._function, self._at_the_end = function, at_the_end

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1 and not self._at_the_end:
            self._function(self.model)

    def on_train_end(self, logs=None):
        if self._at_the_end:
            self._function(self.model)


def test_the_noise_of_later_steps_is_set_by_no_callback():
    for change in (
        lambda private: private.optimizer.reseed(1),
        lambda private: setattr(private.optimizer, "plan", plan_of(epsilon=20.0)),
    ):
        private = compiled(functional(), plan_of(), "sgd")
        own = _Does(change)
        with pytest.raises(InputError, match="plan or seeds of the optimizer were set"):
            private.fit(*data(), callbacks=[own], steps_per_epoch=8)
        assert private.steps_executed == 2


@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_certificate_is_of_what_ran_whatever_stands_in_its_place(at_the_end):
    for change in (
        lambda private: setattr(private, "plan", plan_of(epsilon=0.5)),
        lambda private: setattr(private, "model", functional()),
        lambda private: private.fit(*data()),
        *([] if at_the_end else [lambda own: own.compile(own.optimizer, "mse")]),
    ):
        private = compiled(functional(), plan_of(), "sgd")
        own = _Does(change, at_the_end)
        with pytest.raises(
            InputError, match="others than fit left|fit runs|already|run 2"
        ):
            private.fit(*data(), callbacks=[own], steps_per_epoch=8)
            private.certificate("Three numbers from six.")


class _Holds(tf.keras.layers.Layer):
    """A layer with texts among its weights, as of a vocabulary."""

    def build(self, shape):
        self.one = tf.Variable("a text", trainable=False)
        self.many = tf.Variable(["some", "texts"], trainable=False)

    def call(self, inputs):
        return inputs


def test_weights_that_are_texts_are_kept_and_certified():
    private = compiled(_with(_Holds()), plan_of(), "sgd", noise_seed=None)
    private.fit(*data(), callbacks=[_Does(lambda own: None)])
    before = private.certificate("Three numbers from six.")
    assert private.certificate("Three numbers from six.") == before


def test_layers_that_are_frozen_after_fit_keep_their_certificate():
    """Layers are frozen to build on them; only their values count."""
    private = compiled(functional(), plan_of(), "sgd", noise_seed=None)
    private.fit(*data())
    before = private.certificate("Three numbers from six.")
    private.model.layers[-1].trainable = False
    assert private.certificate("Three numbers from six.") == before
    private.model.trainable = False
    private.model.set_weights([values + 1 for values in private.model.get_weights()])
    with pytest.raises(InputError, match="are others than fit left"):
        private.certificate("Three numbers from six.")


def test_units_are_those_of_before_whatever_a_callback_makes_of_the_arrays():
    groups = Groups.of(np.repeat(np.arange(32), 2))
    plan = plan_of(unit="user", rows_per_unit=2, num_units=32, batch_size=8)
    private = PrivateModel(functional(), plan, microbatch_size=8)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(True, reduction=NONE)
    private.compile(make_optimizer(plan, 1e-9, "sgd"), loss)

    def spoil(private):
        groups.rows[:] = 7

    history = []
    losses = tf.keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: history.append(logs["loss"])
    )
    own = [_Does(spoil), losses]
    private.fit(*data(), groups=groups, callbacks=own, steps_per_epoch=8)
    # Keras tells the mean of all steps of an epoch so far.
    each = np.diff(np.array(history) * np.arange(1, 9))[2:]
    assert (groups.rows == 7).all() and np.ptp(each) > 1e-3


def test_a_row_that_no_unit_owns_is_not_tried():
    x, y = data()
    y[40:] = -1  # of no class
    groups = Groups(np.arange(32), np.arange(0, 33, 2))
    plan = plan_of(unit="user", rows_per_unit=2, num_units=16, batch_size=4)
    compiled(functional(), plan, "sgd").fit(x, y, groups=groups)


def test_a_loss_of_rows_that_are_clipped_together_is_traced_on_whole_groups():
    plan = plan_of(clip_groups=8, max_batch_size=32, sensitivity_multiplier=2.0)
    together = plan.rows_clipped_together
    assert together > 1 and 4099 % together

    def loss(y, outputs):
        of = tf.keras.losses.sparse_categorical_crossentropy(y, outputs, True)
        return of + 0 * tf.reshape(tf.reshape(of, [-1, together]), [-1])

    private = PrivateModel(functional(), plan, microbatch_size=2 * together)
    private.compile(make_optimizer(plan, 0.05, "sgd"), loss)
    private.fit(*data())
    assert private.steps_executed == 8
