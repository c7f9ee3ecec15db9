"""Losses that read other rows are found, independent ones pass."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.dense_runs import (
    batch_of_rows,
    dense,
    skipped_where_the_mean_is_high,
    squared,
    wide_plan,
    wide_run,
)

from tfdpsq.privacy import (
    Coupled,
    Groups,
    PrivacySpec,
    fast,
    independence,
    make_logical_step,
    make_optimizer,
    make_plan,
    replay,
    train,
)
from tfdpsq.privacy.independence import require_nothing_kept
from tfdpsq.privacy.step import make_microbatch_sum


def check_independence(losses, batch, layers=(), rows_per_unit=1):
    run = independence.run_of(losses, layers)
    independence.check_independence(run, batch, layers, rows_per_unit)


@pytest.mark.parametrize(
    "layers",
    [
        [],
        [tf.keras.layers.Dropout(0.5)],
        [tf.keras.layers.LayerNormalization()],
        [tf.keras.layers.GaussianNoise(1.0), tf.keras.layers.AlphaDropout(0.2)],
    ],
)
def test_rows_that_keep_to_themselves_pass(layers):
    model = dense(*layers)
    check_independence(squared(model), batch_of_rows(), [model])


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


@pytest.mark.parametrize(
    "losses_of, layers",
    [
        (squared, [tf.keras.layers.BatchNormalization()]),
        (_in_batch_softmax, []),
        (_mean_subtracted, []),
    ],
)
def test_rows_that_read_each_other_are_found(losses_of, layers):
    model = dense(*layers)
    with pytest.raises(ValueError, match="depends on them.*in-batch softmax"):
        check_independence(losses_of(model), batch_of_rows(), [model])


@pytest.mark.parametrize("reverse", [False, True])
def test_rows_that_read_the_others_on_one_side_are_found(reverse):
    """The first row, or the last one, alone keeps to itself."""
    model = dense()

    def losses(b):
        return tf.cumsum(squared(model)(b), reverse=reverse)

    with pytest.raises(ValueError, match="depends on them"):
        check_independence(losses, batch_of_rows(), [model])


def test_losses_that_read_how_many_rows_there_are_are_found():
    """Divided by it, another row drawn moves the losses of all."""
    model = dense()
    with pytest.raises(ValueError, match="among padding.*how many rows were drawn"):
        check_independence(
            lambda b: squared(model)(b) / tf.reduce_sum(b["weights"]),
            batch_of_rows(),
            [model],
        )


@pytest.mark.parametrize("engine", ["fast", "dpkeras"])
@pytest.mark.parametrize("reads", [False, True])
def test_a_nan_in_what_is_tried_hides_nothing(engine, reads):
    """Neither a loss that reads other rows nor one that does not."""
    plan, model, data = _plan(), dense(), batch_of_rows(12)
    data["x"][0] = np.nan
    data["y"][11] = np.inf
    losses = (_mean_subtracted if reads else squared)(model)

    def run():
        return train(
            plan,
            losses,
            model.trainable_variables,
            make_optimizer(plan, 0.1, "sgd", engine),
            lambda at: {"x": data["x"][at], "y": data["y"][at]},
            4,
            layers=[model],
        )

    if not reads:
        assert run() == 2
        data["x"][:] = np.nan
        with pytest.raises(ValueError, match="0 had a finite loss: .* NaN or infinite"):
            run()
        return
    with pytest.raises(ValueError, match="depends on them"):
        run()


def test_a_loss_that_is_finite_among_others_alone_is_found():
    model = dense()

    def losses(b):
        spread = tf.math.reduce_std(b["x"])
        return squared(model)(b) * tf.where(spread > 0.0, 1.0, np.nan)

    batch = {**batch_of_rows(), "x": np.ones([4, 5], np.float32)}
    batch["x"][1] = 2
    with pytest.raises(ValueError, match="depends on them"):
        check_independence(losses, batch, [model])


def test_a_model_that_keeps_its_inputs_is_given_no_row():
    class Keeps(tf.keras.layers.Layer):
        seen = []

        def call(self, inputs):
            self.seen.append(inputs)
            return inputs

    model = dense(Keeps())
    check_independence(squared(model), batch_of_rows(), [model])
    assert Keeps.seen and not any(hasattr(kept, "numpy") for kept in Keeps.seen)


@pytest.mark.parametrize("engine", ["fast", "vectorized"])
def test_a_whole_run_gives_a_model_that_keeps_its_inputs_no_row(engine):
    """Engine "fast" used to try its rules on real rows eagerly."""

    class Keeps(tf.keras.layers.Layer):
        seen = []

        def call(self, inputs):
            self.seen.append(inputs)
            return inputs

    model, data, plan = dense(Keeps()), batch_of_rows(12), _plan()
    train(
        plan,
        squared(model),
        model.trainable_variables,
        make_optimizer(plan, 0.1, "sgd", engine),
        lambda at: {"x": data["x"][at], "y": data["y"][at]},
        4,
        layers=[model],
    )
    assert Keeps.seen and not any(hasattr(kept, "numpy") for kept in Keeps.seen)


def test_one_loss_too_few_is_found():
    model = dense()
    with pytest.raises(ValueError, match="3 losses for 4 rows"):
        check_independence(lambda b: squared(model)(b)[1:], batch_of_rows(), [model])


def test_random_numbers_of_a_models_own_are_held_fixed():
    model = dense()
    check_independence(
        lambda b: squared(model)(b) * tf.random.uniform([4]), batch_of_rows(), [model]
    )
    with pytest.raises(ValueError, match="depends on them"):
        check_independence(
            lambda b: _mean_subtracted(model)(b) * tf.random.uniform([4]),
            batch_of_rows(),
            [model],
        )


class _RunningMean(tf.keras.layers.Layer):
    """Passes its inputs on and keeps their mean: private data without noise."""

    def build(self, shape):
        self.mean = self.add_weight("mean", shape[1:], trainable=False)

    def call(self, inputs):
        self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(inputs, 0))
        return inputs


def test_a_weight_that_the_forward_pass_writes_is_refused():
    model = dense(_RunningMean())
    with pytest.raises(ValueError, match="changes its weight.*mean.*without noise"):
        check_independence(squared(model), batch_of_rows(), [model])


class _Keeps(tf.keras.layers.Layer):
    """Passes its inputs on and keeps of them where values do not always show it."""

    def __init__(self, how):
        super().__init__()
        self.how, self.box = how, tf.Module()
        self.box.kept = tf.Variable(tf.zeros([5]), trainable=False)
        self.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
        self.mean = tf.keras.metrics.Mean()

    def call(self, inputs):
        getattr(self, self.how)(tf.reduce_max(inputs, 0))
        return inputs

    def in_a_graph_alone(self, found):
        if not tf.executing_eagerly():
            self.box.kept.assign(found)

    def outliers_alone(self, found):
        if tf.reduce_max(found) > 1e6:
            self.box.kept.assign_add(found)

    def in_places(self, found):
        self.box.kept.scatter_nd_update([[1]], found[:1])

    def in_a_table(self, found):
        self.table.insert(tf.constant([1], tf.int64), found[:1])

    def in_a_metric(self, found):
        self.mean.update_state(found)

    def in_a_file(self, found):
        tf.print(found, output_stream="file:///nowhere/rows.txt")

    def in_a_cache(self, found):
        dataset = tf.data.Dataset.from_tensors(found).snapshot("/nowhere/rows")
        tf.debugging.assert_all_finite(dataset.get_single_element(), "")


@pytest.mark.parametrize(
    "how",
    [
        *("in_a_graph_alone", "outliers_alone", "in_places", "in_a_table"),
        *("in_a_metric", "in_a_file", "in_a_cache"),
    ],
)
def test_whatever_writes_is_found_before_it_does(how):
    layer = _Keeps(how)
    model = dense(layer)
    before = layer.table.export()[0].shape, [v.numpy() for v in layer.box.variables]
    nodes = replay.traced(squared(model), batch_of_rows(), [model]).nodes
    with pytest.raises(ValueError, match="changes a state .*unclipped"):
        require_nothing_kept(nodes)
    assert before[0] == layer.table.export()[0].shape
    np.testing.assert_array_equal(before[1], [v.numpy() for v in layer.box.variables])


@pytest.mark.parametrize(
    "operation",
    "WriteFile Stage MapStage OrderedMapStage AssignAdd Save SaveV2 SaveSlices "
    "DatasetToTFRecord Print PrintV2".split(),
)
def test_what_keeps_outside_of_variables_is_found(operation):
    """A file, a staging area of the runtime, a variable of TensorFlow 1."""
    with pytest.raises(ValueError, match="changes a state .*own"):
        require_nothing_kept([replay.Node(name="own", op=operation)])


def test_what_only_reads_is_let_through():
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
    require_nothing_kept(replay.traced(squared(model), batch_of_rows(), [model])[0])


def _plan(**changes):
    values = dict(epsilon=2.0, clip_norm=1.0, num_units=12, batch_size=4, steps=2)
    return make_plan(PrivacySpec(**values, accountant="rdp", **changes))


@pytest.mark.parametrize("how", ["coupled", "declared", "no layers"])
def test_what_is_declared_does_not_allow_to_keep_rows(how):
    multiplier = 1.0 if how == "no layers" else 15.0
    plan = _plan(max_batch_size=8, sensitivity_multiplier=multiplier)
    norm = tf.keras.layers.BatchNormalization()
    model, data = dense(norm), batch_of_rows(12)
    before, losses = norm.moving_mean.numpy(), squared(model)

    def coupled(batch):
        def gradient(coefficients, variables):
            with tf.GradientTape() as tape:
                total = tf.reduce_sum(coefficients * losses(batch))
            return tape.gradient(total, variables)

        return Coupled(tf.zeros([batch["x"].shape[0]]), gradient)

    with pytest.raises(ValueError, match="changes a state .*batch_norm"):
        train(
            plan,
            coupled if how == "coupled" else losses,
            model.trainable_variables,
            make_optimizer(plan, 0.1, "sgd", "vectorized"),
            lambda at: {"x": data["x"][at], "y": data["y"][at]},
            None if how == "declared" else 4,
            layers=() if how == "no layers" else [model],
            coupled=how == "coupled",
        )
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


@pytest.mark.parametrize("engine", ["fast", "dpkeras"])
@pytest.mark.parametrize("microbatch", [4, None])
def test_an_undeclared_in_batch_softmax_is_refused_before_a_step(engine, microbatch):
    """Staying together in one microbatch declares nothing: the multiplier does."""
    plan = _plan()
    model, data = dense(), batch_of_rows(12)
    optimizer = make_optimizer(plan, 0.1, "sgd", engine)
    with pytest.raises(ValueError, match="declare its sensitivity"):
        train(
            plan,
            _in_batch_softmax(model),
            model.trainable_variables,
            optimizer,
            lambda at: {"x": data["x"][at], "y": data["y"][at]},
            microbatch,
            layers=[model],
        )
    assert int(optimizer.iterations) == 0


# -- Sums that a row moves otherwise than by its own clipped gradient -------------


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


def _softmax_under_a_large_constant(model):
    return lambda b: _in_batch_softmax(model)(b) + 1e5


def _weighted_by_the_mean(model):
    def losses(b):
        found = 0.01 * squared(model)(b)
        return found * tf.stop_gradient(tf.reduce_mean(found)) + 1e5

    return losses


def _signed_by_place(model):
    """A row's sign depends on the rows drawn before it."""
    signs = tf.constant([-1.0, 1.0] * 600)
    return lambda b: squared(model)(b) * signs[: b["x"].shape[0]]


_OTHERS_READ = [
    (_signed_by_place, (), "fast", "each moved on by one place"),
    (_signed_by_place, (tf.keras.layers.Dropout(0.3),), "fast", "each moved on"),
    # The first masks that all rows are given drop everything.
    (_signed_by_place, (tf.keras.layers.Dropout(0.5, (None, 1)),), "fast", "moved on"),
    (_guarded_over_the_batch, (), "fast", "with NaN for inputs moves the clipped sum"),
    (skipped_where_the_mean_is_high, (), "fast", "with huge numbers for inputs"),
    (_hardest_eight, (), "fast", "leaving out one row moves"),
    (_hardest_eight, (), "vectorized", "leaving out one row moves"),
    (_softmax_under_a_large_constant, (), "vectorized", "the noise is made for 1"),
    (_weighted_by_the_mean, (), "fast", "not that of its parts"),
    (
        squared,
        (tf.keras.layers.Lambda(_clipped_over_the_batch),),
        "fast",
        "not that of its parts",
    ),
]


@pytest.mark.parametrize("losses_of, layers, engine, message", _OTHERS_READ)
def test_a_row_that_changes_what_others_add_is_refused(
    losses_of, layers, engine, message, tmp_path
):
    """Losses of four finite rows do not show any of these."""
    kept = {"directory": tmp_path, "data_fingerprint": "forty rows"}
    with pytest.raises(ValueError, match=f"{message}.*clipping by row bounds nothing"):
        wide_run(losses_of, layers, engine, **kept)
    assert not (tmp_path / "ledger.jsonl").exists()


def test_short_gradients_hide_nothing():
    """A coupling far below the clip norm grows with the gradients."""
    with pytest.raises(ValueError, match="not that of its parts"):
        wide_run(_weighted_by_the_mean, plan=wide_plan(clip_norm=1e3))


@pytest.mark.parametrize("share", [0.0, 0.02])
def test_a_small_dependence_is_found_in_bfloat16(share):
    """By less than a comparison of losses in bfloat16 lets through."""

    def losses_of(model):
        def losses(b):
            b = {**b, "y": tf.cast(b["y"], tf.bfloat16)}
            found = tf.cast(squared(model)(b), tf.float32)
            mean = tf.stop_gradient(tf.reduce_mean(found))
            return found * (1 + share * tf.tanh(mean - 5))

        return losses

    layers = (tf.keras.layers.Dense(5, dtype="mixed_bfloat16"),)
    plan = wide_plan(clip_norm=1e3)
    if not share:
        wide_run(losses_of, layers, plan=plan)
        return
    with pytest.raises(ValueError, match="not that of its parts"):
        wide_run(losses_of, layers, plan=plan)


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


@pytest.mark.parametrize("engine", ["fast", "dpkeras", "vectorized"])
def test_rows_that_a_layer_makes_random_add_up(engine):
    """Also where a NaN makes the step take rows one by one: each keeps its masks."""
    noisy = (tf.keras.layers.Dropout(0.5), tf.keras.layers.GaussianNoise(0.1))
    try:
        wide_run(squared, noisy, engine)
    except ValueError as error:
        raise AssertionError("a layer that draws is blamed") from error


@pytest.mark.parametrize("engine", ["dpkeras", "vectorized"])
def test_a_row_without_a_gradient_changes_no_number_of_rows_for_others(engine):
    """The loss reads how many there are: alone each row is among copies."""
    model, plan = dense(), wide_plan()
    summed = make_microbatch_sum(
        lambda b: squared(model)(b) / tf.cast(tf.shape(b["x"])[0], tf.float32) ** 4,
        model.trainable_variables,
        make_optimizer(plan, 0.1, "sgd", engine),
        8,
        [model],
        True,
    )
    sums = []
    for spoilt in (True, False):
        batch = batch_of_rows(8)
        batch["x"][3] = np.nan if spoilt else 0
        batch["weights"][3] = spoilt
        tensors = {name: tf.constant(value) for name, value in batch.items()}
        found = summed(tensors, tf.constant(False), tf.constant([1, 2], tf.int64))
        assert bool(found.complete) != spoilt
        sums.append(np.concatenate([np.ravel(each) for each in found.sums]))
    assert np.linalg.norm(sums[0]) < 1.0  # no row is clipped
    np.testing.assert_allclose(*sums, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("engine", ["dpkeras", "vectorized"])
def test_padding_that_spoils_a_batch_spoils_no_row(engine):
    """A mean over no token is 0/0: each row is taken by itself, without padding."""
    embedding = tf.keras.layers.Embedding(9, 4, mask_zero=True)
    pooling = tf.keras.layers.GlobalAveragePooling1D()
    model = tf.keras.Sequential([embedding, pooling])
    model(ids := np.random.default_rng(0).integers(1, 9, [8, 3]).astype(np.int32))
    summed = make_microbatch_sum(
        lambda b: 1e3 * tf.reduce_sum(model(b["ids"]) ** 2, axis=1),
        model.trainable_variables,
        make_optimizer(wide_plan(), 0.1, "sgd", engine),
        8,
        [model],
        True,
    )
    sums = []
    for rows in (8, 7):
        used = (np.arange(8) < rows).astype(np.int32)
        batch = {"ids": ids * used[:, None], "weights": used.astype(np.float32)}
        batch = {name: tf.constant(value) for name, value in batch.items()}
        found = summed(batch, tf.constant(False), tf.constant([1, 2], tf.int64))
        assert bool(found.complete) == (rows == 8)
        sums.append(np.concatenate([np.ravel(each) for each in found.sums]))
    assert np.linalg.norm(sums[0]) > 2.0
    assert np.linalg.norm(sums[0] - sums[1]) == pytest.approx(1.0, rel=1e-3)


def test_users_of_several_rows_add_up():
    model, data = dense(tf.keras.layers.Dropout(0.5)), batch_of_rows(40)
    plan = wide_plan(unit="user", rows_per_unit=3, num_units=20, batch_size=5)
    steps = train(
        plan,
        squared(model),
        model.trainable_variables,
        make_optimizer(plan, 0.1, "sgd"),
        lambda at: {"x": data["x"][at], "y": data["y"][at]},
        12,
        layers=[model],
        groups=Groups.of(np.arange(40) // 2),
    )
    assert steps == 1


@pytest.mark.parametrize("door", ["train", "make_logical_step", "clipped_sum"])
def test_a_weight_that_is_listed_twice_is_refused(door):
    """Two towers that share an encoder: one row moved the sum by 1.30 C."""
    shared = dense()
    tower = tf.keras.Sequential([tf.keras.Input([5]), shared, tf.keras.layers.Dense(5)])
    variables = shared.trainable_variables + tower.trainable_variables
    plan, data = _plan(), batch_of_rows(12)
    optimizer = make_optimizer(plan, 0.1, "sgd")

    def losses(b):
        return tf.reduce_sum((shared(b["x"]) - tower(b["y"])) ** 2, 1)

    def take(at):
        return {name: data[name][at] for name in "xy"}

    layers = [shared, tower]
    with pytest.raises(ValueError, match="the weight 'dense.*/kernel:0' twice"):
        if door == "train":
            train(plan, losses, variables, optimizer, take, 4, layers=layers)
        elif door == "make_logical_step":
            make_logical_step(losses, variables, optimizer, 4, layers=layers)
        else:
            batch = {name: tf.constant(values) for name, values in data.items()}
            fast.clipped_sum(lambda: losses(batch), layers, variables, 1.0)
    assert int(optimizer.iterations) == 0
