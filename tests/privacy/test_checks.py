"""Losses and rows that read other rows are found before anything is paid."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from helpers import plans
from helpers.dense_runs import (
    batch_of_rows,
    check,
    dense,
    skipped_where_the_mean_is_high,
    squared,
    wide_plan,
    wide_run,
)
from helpers.small_runs import unpaid

from tfdpsq.privacy import checks, fast, make_logical_step
from tfdpsq.privacy.step import Setup, make_microbatch_sum
from tfdpsq.validation import InputError


def _rows(count=8):
    batch = batch_of_rows(count)
    return {"x": batch["x"], "y": batch["y"]}


def _check(losses, model, data=None, **options):
    """Eight rows, all in one microbatch."""
    data = _rows() if data is None else data
    return check(losses, data, model.trainable_variables, [model], **options)


@pytest.mark.parametrize("engine", ["fast", "vectorized"])
def test_rows_that_keep_to_themselves_pass(engine):
    model = dense(
        tf.keras.layers.Dropout(0.5),
        tf.keras.layers.LayerNormalization(),
        tf.keras.layers.GaussianNoise(1.0),
    )
    setup, read = _check(squared(model), model, engine=engine)
    assert setup.engine == engine
    assert len(read) == len(model.variables)


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


def _normalised_over_the_batch(model):
    """Batch normalisation without a state."""

    def losses(b):
        made = model(b["x"])
        return tf.reduce_sum((made / tf.math.reduce_std(made, 0) - b["y"]) ** 2, 1)

    return losses


def _divided_by_their_number(model):
    """Another row drawn moves the losses of all."""
    return lambda b: squared(model)(b) / tf.reduce_sum(b["weights"])


@pytest.mark.parametrize(
    "engine, losses_of",
    [
        ("fast", _in_batch_softmax),
        ("vectorized", _in_batch_softmax),
        ("fast", _mean_subtracted),
        ("vectorized", _summed_down),
        ("fast", _finite_among_others),
        ("vectorized", _normalised_over_the_batch),
        ("fast", _divided_by_their_number),
    ],
)
def test_losses_that_read_other_rows_are_found(engine, losses_of):
    data = {**_rows(), "x": np.ones([8, 5], np.float32)}
    data["x"][1::2] = [[2, 3, 1, 5, 4]]
    with pytest.raises(InputError, match="rows read others"):
        _check(losses_of(model := dense()), model, data, engine=engine)


def test_losses_that_are_not_one_per_row_are_found():
    with pytest.raises(InputError, match=r"shape \(1008,\) for 1009 rows"):
        _check(lambda b: squared(model)(b)[1:], model := dense())


def test_loss_for_even_numbers_of_rows_alone_is_refused():
    def of_pairs(b):
        return tf.reshape(tf.reshape(squared(model)(b), [-1, 2]), [-1])

    with pytest.raises(InputError, match="fails for 1009"):
        _check(of_pairs, model := dense(), engine="dpkeras")


_plan = functools.partial(
    plans.plan, clip_norm=1.0, num_units=12, batch_size=4, steps=2
)


def _times_the_finite_mean(model):
    def losses(b):
        found = squared(model)(b)
        mean = tf.reduce_mean(tf.where(tf.math.is_finite(found), found, 0.0))
        return found * tf.stop_gradient(mean)

    return losses


def test_nan_in_the_rows_tried_hides_nothing():
    """Neither a loss that reads other rows nor one that does not."""
    plan, model, data = _plan(), dense(), _rows(12)
    data["x"][0] = np.nan
    data["y"][11] = np.inf
    assert plans.trained(plan, squared(model), [model], data) == 2
    with pytest.raises(InputError, match="rows read others"):
        plans.trained(plan, _times_the_finite_mean(model), [model], data)
    data["x"][:] = np.nan
    with pytest.raises(InputError, match="0 had a finite loss"):
        plans.trained(plan, squared(model), [model], data)


@pytest.mark.parametrize("count", [2, 5])
def test_of_fewer_rows_than_a_microbatch_all_are_tried(count):
    rows = checks.Rows(lambda at: {"x": at}, range(count))
    assert sorted(rows.take_some(8)["x"][:count]) == list(range(count))


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


@pytest.mark.parametrize(
    "layer", [_RunningMean, _Metric, tf.keras.layers.BatchNormalization]
)
def test_a_layer_that_writes_is_found_before_it_does(layer):
    model = dense(layer())
    before = [value.numpy() for value in model.variables]
    for layers in ([model], []):
        with pytest.raises(InputError, match="changes a state .*unclipped"):
            check(squared(model), _rows(), model.trainable_variables, layers)
    for one, other in zip(before, model.variables):
        np.testing.assert_array_equal(one, other)


def test_a_layer_that_remembers_its_last_batch_is_refused():
    """Keras builds it for batches of one size."""
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Reshape([5, 1]),
            tf.keras.layers.LSTM(5, stateful=True, trainable=False),
            tf.keras.layers.Dense(5),
        ]
    )
    model.build([4, 5])
    with pytest.raises(InputError, match="must take any number of rows"):
        _check(squared(model), model)


def test_a_layer_that_only_reads_keeps_nothing():
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
    vectors = tf.Variable(tf.ones([3, 5]))
    model = dense(tf.keras.layers.Dropout(0.5))

    def losses(batch):
        x = batch["x"]
        found = tf.ensure_shape(table.lookup(tf.constant([1], tf.int64)), [1])
        rows = tf.TensorArray(tf.float32, x.shape[0])
        for i in tf.range(x.shape[0]):
            rows = rows.write(i, x[i])
        same = tf.ensure_shape(rows.stack(), x.shape)
        return squared(model)({**batch, "x": x + found + tf.gather(vectors, 1) + same})

    _check(losses, model)


# -- Sums that a row moves otherwise than by its own clipped gradient -----------------


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


_CLIPPED = tf.keras.layers.Lambda(_clipped_over_the_batch)


@pytest.mark.parametrize(
    "losses_of, layers, engine, clip_norm",
    [
        (_guarded_over_the_batch, [], "fast", 1.0),
        (skipped_where_the_mean_is_high, [], "fast", 1.0),
        (skipped_where_the_mean_is_high, [], "vectorized", 1.0),
        (_hardest_eight, [], "fast", 1.0),
        # A coupling far below the clip norm grows with the gradients.
        (_weighted_by_the_mean, [], "fast", 1e3),
        (squared, [_CLIPPED], "fast", 1.0),
    ],
)
def test_a_row_that_changes_what_others_add_is_refused(
    losses_of, layers, engine, clip_norm, tmp_path
):
    """Losses of four finite rows do not show any of these."""
    plan = wide_plan(clip_norm=clip_norm)
    kept = {"directory": tmp_path, "plan": plan}
    with pytest.raises(InputError, match="rows read others"):
        wide_run(losses_of, layers, engine, **kept)
    assert not (tmp_path / "ledger.jsonl").exists()


def test_a_multiplier_allows_no_row_to_read_others():
    """It covers rows of one dealt microbatch, or an engine of the caller's own."""
    plan = wide_plan(
        num_units=40, batch_size=8, max_batch_size=16, sensitivity_multiplier=31.0
    )
    with pytest.raises(InputError, match="rows read others"):
        wide_run(_hardest_eight, plan=plan, engine="vectorized")


def _sums(losses, model, batch, engine):
    """The clipped sums of eight rows, flat, and whether all rows were finite."""
    variables = model.trainable_variables
    setup = Setup(wide_plan(), losses, variables, [model], 8, engine)
    tensors = {name: tf.constant(value) for name, value in batch.items()}
    found = make_microbatch_sum(setup)(tensors, tf.constant([1, 2], tf.int64))
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
    batch, optimizer = batch_of_rows(), tf.keras.optimizers.SGD(0.1)

    def losses(b=batch):
        return tf.reduce_sum((shared(b["x"]) - tower(b["y"])) ** 2, 1)

    layers = [shared, tower]
    for run in (
        lambda: make_logical_step(_plan(), losses, variables, optimizer, 4, layers),
        lambda: fast.clipped_sum(losses, layers, variables, 1.0),
    ):
        with pytest.raises(InputError, match="the weight 'dense.*/kernel:0' twice"):
            run()


# -- Rows that `take` gives by their company ------------------------------------------


_WIDE = np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32)


def _of_rows(take, directory=None):
    """A run whose rows come from a function of row numbers."""
    tf.keras.utils.set_random_seed(1)
    model = dense()
    return plans.trained(
        wide_plan(),
        lambda b: tf.reduce_sum(model(b["x"][:, :5], training=True) ** 2, 1),
        [model],
        take,
        16,
        directory=directory,
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
    with pytest.raises(ValueError, match="another 'x' for the same rows"):
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

    with pytest.raises(ValueError, match="of another shape"):
        _of_rows(take, tmp_path)
    assert unpaid(tmp_path)


_BUFFER = np.zeros([40, 5], np.float32)


def _in_a_buffer(at):
    _BUFFER[: len(at)] = _WIDE[at]
    return {"x": _BUFFER[: len(at)]}


def _with_texts(at):
    """An array of texts is as wide as the longest of them."""
    return {"x": _WIDE[at], "words": np.array([str(10**i) for i in at])}


def _with_a_nan(at):
    return {"x": _WIDE[at], "unused": np.where(at < 1, np.nan, at)}


@pytest.mark.parametrize("take", [_in_a_buffer, _with_texts, _with_a_nan])
def test_rows_of_their_own_pass(take):
    assert _of_rows(take) == wide_plan().spec.steps


@pytest.mark.parametrize(
    "found, message",
    [
        ({}, "must return a dict of arrays"),
        ({"y": 3.0}, r"returned 'y' with shape \(\)"),
        ({"y": _WIDE[:2]}, r"returned 'y' with shape \(2, 5\)"),
        ({"weights": _WIDE[:, 0]}, "none of them called 'weights'"),
        ({"y": _WIDE[:1].astype(object)}, "and type object"),
    ],
)
def test_unnamed_rows_are_refused(found, message):
    with pytest.raises(InputError, match=message):
        _of_rows(lambda at: found and {"x": _WIDE[at], **found} or None)


def test_a_look_up_that_refuses_numbers_which_no_data_hold_is_refused():
    """A row of NaN would end a run, and so tell that it is there."""

    def look(values):
        if not (np.abs(values) < 100).all():
            raise ValueError(f"no such number as {np.abs(values).max()}")
        return values

    def losses_of(model):
        def losses(b):
            found = tf.numpy_function(look, [b["x"]], tf.float32)
            return squared(model)({**b, "x": tf.ensure_shape(found, b["x"].shape)})

        return losses

    with pytest.raises(InputError, match="NaN or huge inputs, failed") as told:
        wide_run(losses_of)
    assert "no such number" not in str(told.value)
