"""Losses and rows that read other rows are found before anything is paid."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from helpers import plans
from helpers.dense_runs import (
    batch_of_rows,
    check_independence,
    check_nothing_kept,
    dense,
    skipped_where_the_mean_is_high,
    squared,
    wide_plan,
    wide_run,
)

from tfdpsq.privacy import (
    fast,
    make_logical_step,
    make_optimizer,
    read_ledger,
    train,
)
from tfdpsq.privacy.step import make_microbatch_sum
from tfdpsq.validation import InputError


def test_rows_that_keep_to_themselves_pass():
    model = dense(
        tf.keras.layers.Dropout(0.5),
        tf.keras.layers.LayerNormalization(),
        tf.keras.layers.GaussianNoise(1.0),
    )
    check_independence(squared(model), batch_of_rows(), [model])
    plain = dense()
    tf.random.set_seed(0)  # without a seed, every call draws afresh

    def losses(b):  # whose draws are held fixed
        return squared(plain)(b) * tf.random.uniform([4])

    check_independence(losses, batch_of_rows(), [plain])


def _in_batch_softmax(model):
    def losses(b):
        scores = model(b["x"]) @ tf.transpose(b["y"])
        return tf.nn.sparse_softmax_cross_entropy_with_logits(
            tf.range(b["x"].shape[0]), scores
        )

    return losses


def _mean_subtracted(model):
    return lambda b: tf.reduce_sum(
        (model(b["x"]) - tf.reduce_mean(b["y"], 0, keepdims=True)) ** 2, 1
    )


def _summed_down(model):
    """The last row alone keeps to itself."""
    return lambda b: tf.cumsum(squared(model)(b), reverse=True)


def _finite_among_others(model):
    def losses(b):
        spread = tf.math.reduce_std(b["x"])
        return squared(model)(b) * tf.where(spread > 0.0, 1.0, np.nan)

    return losses


def _times_a_draw(model):
    return lambda b: _mean_subtracted(model)(b) * tf.random.uniform([4])


@pytest.mark.parametrize(
    "losses_of",
    [_in_batch_softmax, _mean_subtracted, _summed_down, _finite_among_others]
    + [_times_a_draw],
)
def test_losses_that_read_other_rows_are_found(losses_of):
    batch = {**batch_of_rows(), "x": np.ones([4, 5], np.float32)}
    batch["x"][1] = 2
    with pytest.raises(ValueError, match="depends on them"):
        check_independence(losses_of(model := dense()), batch, [model])


def test_batch_normalisation_is_found():
    model = dense(tf.keras.layers.BatchNormalization())
    with pytest.raises(ValueError, match="depends on them"):
        check_independence(squared(model), batch_of_rows(), [model])


def test_losses_that_read_the_number_of_rows_are_found():
    """Divided by it, another row drawn moves the losses of all."""
    model = dense()
    for losses, said in (
        (lambda b: squared(model)(b) / tf.reduce_sum(b["weights"]), "among padding"),
        (lambda b: squared(model)(b)[1:], "3 losses for 4 rows"),
    ):
        with pytest.raises(ValueError, match=said):
            check_independence(losses, batch_of_rows(), [model])


_plan = functools.partial(
    plans.plan, clip_norm=1.0, num_units=12, batch_size=4, steps=2
)


def _trained(plan, losses, model, data, engine="fast", microbatch=4, layers=None):
    return train(
        plan,
        losses,
        model.trainable_variables,
        make_optimizer(plan, 0.1, "sgd", engine),
        lambda at: {"x": data["x"][at], "y": data["y"][at]},
        microbatch,
        layers=[model] if layers is None else layers,
    )


def test_nan_in_the_rows_tried_hides_nothing():
    """Neither a loss that reads other rows nor one that does not."""
    plan, model, data = _plan(), dense(), batch_of_rows(12)
    data["x"][0] = np.nan
    data["y"][11] = np.inf
    assert _trained(plan, squared(model), model, data) == 2
    with pytest.raises(ValueError, match="depends on them"):
        _trained(plan, _mean_subtracted(model), model, data)
    data["x"][:] = np.nan
    with pytest.raises(ValueError, match="0 had a finite loss"):
        _trained(plan, squared(model), model, data)


# -- Nothing stateful ------------------------------------------------------------------


class _RunningMean(tf.keras.layers.Layer):
    """Passes its inputs on and keeps their mean: private data without noise."""

    def build(self, shape):
        self.mean = self.add_weight("mean", shape[1:], trainable=False)

    def call(self, inputs):
        self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(inputs, 0))
        return inputs


class _Metric(tf.keras.layers.Layer):
    """Keeps the largest of outliers alone, which few rows show."""

    def __init__(self):
        super().__init__()
        self.mean = tf.keras.metrics.Mean()

    def call(self, inputs):
        if tf.reduce_max(inputs) > 1e6:
            self.mean.update_state(inputs)
        return inputs


@pytest.mark.parametrize("layer", [_RunningMean, _Metric])
def test_a_layer_that_writes_is_found_before_it_does(layer):
    model = dense(layer())
    before = [value.numpy() for value in model.variables]
    with pytest.raises(ValueError, match="changes a state .*unclipped"):
        check_nothing_kept(squared(model), batch_of_rows(), [model])
    for one, other in zip(before, model.variables):
        np.testing.assert_array_equal(one, other)


def test_a_weight_that_a_forward_pass_changes_is_found():
    model = dense(_RunningMean())
    with pytest.raises(ValueError, match="changes its weight.*mean"):
        check_independence(squared(model), batch_of_rows(), [model])


def test_a_layer_that_only_reads_passes():
    class Reads(tf.keras.layers.Layer):
        table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
        vectors = tf.Variable(tf.ones([3, 5]))

        def call(self, inputs):
            found = self.table.lookup(tf.constant([1], tf.int64))
            rows = tf.TensorArray(tf.float32, 2)
            for i in tf.range(2):
                rows = rows.write(i, inputs[i])
            return inputs + found + tf.gather(self.vectors, 1) + rows.stack()[0]

    model = dense(Reads(), tf.keras.layers.Dropout(0.5))
    check_nothing_kept(squared(model), batch_of_rows(), [model])


@pytest.mark.parametrize("declared", [True, False])
def test_batch_statistics_are_not_kept_whatever_is_declared(declared):
    plan = _plan(max_batch_size=8, sensitivity_multiplier=15.0 if declared else 1.0)
    norm = tf.keras.layers.BatchNormalization()
    model, before = dense(norm), norm.moving_mean.numpy()
    microbatch, layers = (None, [model]) if declared else (4, ())
    data = batch_of_rows(12)
    with pytest.raises(ValueError, match="changes a state .*batch_norm"):
        losses = squared(model)
        _trained(plan, losses, model, data, "vectorized", microbatch, layers)
    np.testing.assert_array_equal(norm.moving_mean.numpy(), before)


def test_a_layer_that_remembers_the_last_batch_is_refused():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Reshape([5, 1]),
            tf.keras.layers.LSTM(5, stateful=True, trainable=False),
            tf.keras.layers.Dense(5),
        ]
    )
    model.build([4, 5])
    with pytest.raises(ValueError, match="changes its weight|keeps a state"):
        check_independence(squared(model), batch_of_rows(), [model])


def test_rows_that_are_all_alike_are_warned_of(caplog):
    model = dense()
    same = {name: np.repeat(v[:1], 4, 0) for name, v in batch_of_rows().items()}
    check_independence(squared(model), same, [model])
    assert "all the same" in caplog.text


# -- Sums that a row moves otherwise than by its own clipped gradient -----------------


@pytest.mark.parametrize("engine, microbatch", [("fast", 4), ("dpkeras", None)])
def test_an_undeclared_in_batch_softmax_is_refused(engine, microbatch):
    """Staying together in one microbatch declares nothing: the multiplier does."""
    model, data = dense(), batch_of_rows(12)
    with pytest.raises(ValueError, match="declare its sensitivity"):
        losses = _in_batch_softmax(model)
        _trained(_plan(), losses, model, data, engine, microbatch)


@tf.custom_gradient
def _clipped_over_the_batch(inputs):
    return tf.identity(inputs), lambda gradient: tf.clip_by_norm(gradient, 0.25)


def _guarded_over_the_batch(model):
    """The usual guard against a NaN: a row with one silences the whole batch."""

    def losses(b):
        found = squared(model)(b)
        return tf.where(tf.math.is_finite(tf.reduce_mean(found)), found, 0.0)

    return losses


def _hardest_eight(model):
    """All rows where there are eight or fewer, as when few are tried."""

    def losses(b):
        found = squared(model)(b)
        least = tf.math.top_k(found, min(8, found.shape[0])).values[-1]
        return tf.where(found >= tf.stop_gradient(least), found, 0.0)

    return losses


def _weighted_by_the_mean(model):
    def losses(b):
        found = 0.01 * squared(model)(b)
        return found * tf.stop_gradient(tf.reduce_mean(found)) + 1e5

    return losses


def _signed_by_place(model):
    """A row's sign depends on the rows drawn before it."""
    signs = tf.constant([-1.0, 1.0] * 600)
    return lambda b: squared(model)(b) * signs[: b["x"].shape[0]]


_NOT_PARTS = "not that of its parts"
_DROPOUT = tf.keras.layers.Dropout(0.5, (None, 1))  # drops all with the first masks
_CLIPPED = tf.keras.layers.Lambda(_clipped_over_the_batch)
_TOGETHER = {"engine": "vectorized", "microbatch": None}


@pytest.mark.parametrize(
    "losses_of, layers, options, clip_norm, message",
    [
        (_signed_by_place, [], {}, 1.0, "moved on by one place"),
        (_signed_by_place, [_DROPOUT], {}, 1.0, "moved on by one place"),
        (_guarded_over_the_batch, [], {}, 1.0, "with NaN for inputs"),
        (skipped_where_the_mean_is_high, [], {}, 1.0, "with huge numbers"),
        (skipped_where_the_mean_is_high, [], _TOGETHER, 1.0, "with huge numbers"),
        (_hardest_eight, [], {}, 1.0, "leaving out one row moves"),
        # A coupling far below the clip norm grows with the gradients.
        (_weighted_by_the_mean, [], {}, 1e3, _NOT_PARTS),
        (squared, [_CLIPPED], {}, 1.0, _NOT_PARTS),
    ],
)
def test_a_row_that_changes_what_others_add_is_refused(
    losses_of, layers, options, clip_norm, message, tmp_path
):
    """Losses of four finite rows do not show any of these."""
    plan = wide_plan(clip_norm=clip_norm)
    kept = {"directory": tmp_path, "data_fingerprint": "forty rows", "plan": plan}
    with pytest.raises(ValueError, match=message):
        wide_run(losses_of, layers, **options, **kept)
    assert not (tmp_path / "ledger.jsonl").exists()


def test_a_declared_sensitivity_that_is_too_small_is_refused():
    """Declared losses may read each other, within what was declared."""
    few = dict(num_units=40, batch_size=8, max_batch_size=16)
    too_small = wide_plan(**few, sensitivity_multiplier=1.01)
    declared = dict(engine="vectorized", microbatch=None)
    with pytest.raises(ValueError, match="the noise is made for 1.01"):
        wide_run(_hardest_eight, plan=too_small, **declared)
    wide_run(
        _hardest_eight,
        plan=wide_plan(**few, sensitivity_multiplier=31.0),
        **declared,
    )


@pytest.mark.parametrize(
    "engine", ["fast", pytest.param("dpkeras", marks=pytest.mark.slow)]
)
def test_rows_that_a_layer_makes_random_add_up(engine):
    """Also where a NaN makes the step take rows one by one: each keeps its masks."""
    noisy = (tf.keras.layers.Dropout(0.5), tf.keras.layers.GaussianNoise(0.1))
    wide_run(squared, noisy, engine)


def _sums(losses, model, batch, engine):
    """The clipped sums of eight rows, flat, and whether all rows were finite."""
    summed = make_microbatch_sum(
        losses,
        model.trainable_variables,
        make_optimizer(wide_plan(), 0.1, "sgd", engine),
        8,
        [model],
        True,
    )
    tensors = {name: tf.constant(value) for name, value in batch.items()}
    found = summed(tensors, tf.constant(False), tf.constant([1, 2], tf.int64))
    return np.concatenate([np.ravel(each) for each in found.sums]), found.complete


def test_nan_row_changes_no_number_of_rows_for_others():
    """The loss reads how many there are: alone each row is among copies."""
    model, sums = dense(), []
    for spoilt in (True, False):
        batch = batch_of_rows(8)
        batch["x"][3] = np.nan if spoilt else 0
        batch["weights"][3] = spoilt

        def losses(b):
            return squared(model)(b) / tf.cast(tf.shape(b["x"])[0], tf.float32) ** 4

        found, complete = _sums(losses, model, batch, "dpkeras")
        assert bool(complete) != spoilt
        sums.append(found)
    assert np.linalg.norm(sums[0]) < 1.0  # no row is clipped
    np.testing.assert_allclose(*sums, rtol=1e-5, atol=1e-9)


def test_padding_that_spoils_a_batch_spoils_no_row():
    """A mean over no token is 0/0: each row is taken by itself, without padding."""
    embedding = tf.keras.layers.Embedding(9, 4, mask_zero=True)
    pooling = tf.keras.layers.GlobalAveragePooling1D()
    model, sums = tf.keras.Sequential([embedding, pooling]), []
    model(ids := np.random.default_rng(0).integers(1, 9, [8, 3]).astype(np.int32))
    for rows in (8, 7):
        used = (np.arange(8) < rows).astype(np.int32)
        batch = {"ids": ids * used[:, None], "weights": used.astype(np.float32)}

        def losses(b):
            return 1e3 * tf.reduce_sum(model(b["ids"]) ** 2, axis=1)

        found, complete = _sums(losses, model, batch, "vectorized")
        assert bool(complete) == (rows == 8)
        sums.append(found)
    assert np.linalg.norm(sums[0]) > 2.0
    assert np.linalg.norm(sums[0] - sums[1]) == pytest.approx(1.0, rel=1e-3)


def test_a_weight_that_is_listed_twice_is_refused():
    """Two towers that share an encoder: one row moved the sum by 1.30 C."""
    shared = dense()
    tower = tf.keras.Sequential([tf.keras.Input([5]), shared, tf.keras.layers.Dense(5)])
    variables = shared.trainable_variables + tower.trainable_variables
    batch, optimizer = batch_of_rows(), make_optimizer(_plan(), 0.1, "sgd")

    def losses(b=batch):
        return tf.reduce_sum((shared(b["x"]) - tower(b["y"])) ** 2, 1)

    layers = [shared, tower]
    for run in (
        lambda: make_logical_step(losses, variables, optimizer, 4, layers=layers),
        lambda: fast.clipped_sum(losses, layers, variables, 1.0),
    ):
        with pytest.raises(ValueError, match="the weight 'dense.*/kernel:0' twice"):
            run()


# -- Rows that `take` gives by their company ------------------------------------------


_WIDE = np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32)


def _of_rows(take, directory=None):
    """A run whose rows come from a function of row numbers."""
    tf.keras.utils.set_random_seed(1)
    plan = wide_plan()
    model = dense()
    return train(
        plan,
        lambda b: tf.reduce_sum(model(b["x"][:, :5], training=True) ** 2, 1),
        model.trainable_variables,
        make_optimizer(plan, 0.1, "sgd"),
        take,
        16,
        layers=[model],
        directory=directory,
        data_fingerprint="forty rows",
    )


def _normalised(at):
    x = _WIDE[at]
    return {"x": (x - x.mean(0)) / (x.std(0) + 1e-6)}


def _sorted(at):
    """Reads rows in ascending order, as some files require."""
    return {"x": _WIDE[np.sort(at)]}


def _filled_up_with_their_mean(at):
    x = np.where(np.arange(5) < at[:, np.newaxis] % 4, _WIDE[at], np.nan)
    return {"x": np.where(np.isnan(x), np.nanmean(x), x).astype(np.float32)}


def _padded_to_the_longest(at):
    widths = 1 + np.minimum(at, 4)
    x = np.where(np.arange(5) < widths[:, np.newaxis], _WIDE[at], 0)
    return {"x": x[:, : widths.max()]}


@pytest.mark.parametrize(
    "take",
    [
        _normalised,
        _sorted,
        _filled_up_with_their_mean,
        _padded_to_the_longest,
    ],
)
def test_rows_that_differ_among_other_rows_are_refused(tmp_path, take):
    """A `take` that normalises over its batch lets one row move the sum by 7.6 C.

    Checks of the loss cannot see it: they use rows that were taken once.
    """
    with pytest.raises(ValueError, match="another 'x' for the same rows among other"):
        _of_rows(take, tmp_path)
    assert not (tmp_path / "ledger.jsonl").exists()


@pytest.mark.parametrize("change", ["wider", "missing"])
def test_a_row_that_decides_the_shape_of_others_is_refused_unpaid(tmp_path, change):
    """The four rows that are tried first look like any others."""

    def take(at):
        more = int(len(at) > 5)
        found = {"x": np.pad(_WIDE[at], [(0, 0), (0, more)]), "y": _WIDE[at]}
        if change == "missing":
            found["x"] = found["x"][:, :5]
            if more:
                del found["y"]
        return found

    with pytest.raises(ValueError, match="in another"):
        _of_rows(take, tmp_path)
    ledger = tmp_path / "ledger.jsonl"
    assert not ledger.exists() or read_ledger(ledger).steps_paid == 0


_BUFFER = np.zeros([40, 5], np.float32)


def _in_a_buffer(at):
    _BUFFER[: len(at)] = _WIDE[at]
    return {"x": _BUFFER[: len(at)]}


def _embedded(at):
    """Computed by a model, whose rounding may follow the size of its batch."""
    return {"x": _WIDE[at] + np.float32(1e-6 * len(at))}


def _with_texts(at):
    """An array of texts is as wide as the longest of them."""
    return {"x": _WIDE[at], "words": np.array([str(10**i) for i in at])}


@pytest.mark.parametrize("take", [_in_a_buffer, _embedded, _with_texts])
def test_rows_of_their_own_pass(take):
    assert _of_rows(take) == wide_plan().spec.steps


def _random(at):
    random = np.random.default_rng()
    return {"x": _WIDE[at] + random.normal(size=(len(at), 5)).astype(np.float32)}


def test_rows_that_differ_each_time_are_refused():
    with pytest.raises(ValueError, match="another 'x' for the same row numbers"):
        _of_rows(_random)


@pytest.mark.parametrize(
    "found, message",
    [
        (None, "NoneType without named rows"),
        ({"x": _WIDE[:4], "y": 3.0}, "no rows of 'y' for 4"),
        ({"x": _WIDE[:4], "weights": np.ones(4)}, "'weights', the name of"),
        ({"x": _WIDE[:4].astype(object)}, "as Python objects"),
    ],
)
def test_unnamed_rows_are_refused(found, message):
    with pytest.raises(InputError, match=message):
        _of_rows(lambda at: found)


def test_a_look_up_that_refuses_a_trial_row_ends_nothing(caplog):
    """It refuses NaN and huge numbers, which no data hold; the data were blamed."""

    def look(values):
        if not (np.abs(values) < 100).all():
            raise ValueError("no such number")
        return values

    def losses_of(model):
        def losses(b):
            found = tf.numpy_function(look, [b["x"]], tf.float32)
            return squared(model)({**b, "x": tf.ensure_shape(found, b["x"].shape)})

        return losses

    wide_run(losses_of)
    assert "one row with NaN for inputs ends the model with an error" in caplog.text
