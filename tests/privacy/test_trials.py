"""Trials of rows that no data hold, of small couplings, and of whole batches."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.dense_runs import (
    skipped_where_the_mean_is_high,
    squared,
    wide_plan,
    wide_run,
)

from tfdpsq.privacy import Terms, make_optimizer, read_ledger, train, trials
from tfdpsq.privacy.step import Setup
from tfdpsq.validation import InputError


@pytest.mark.parametrize("kind", [KeyError, ValueError])
def test_a_row_that_no_data_hold_ends_nothing(kind, caplog):
    """A look-up that refuses NaN and huge numbers; the data were blamed for it."""

    def look(values):
        if not (np.abs(values) < 100).all():
            raise kind("no such number")
        return values

    def losses_of(model):
        def losses(b):
            found = tf.numpy_function(look, [b["x"]], tf.float32)
            return squared(model)({**b, "x": tf.ensure_shape(found, b["x"].shape)})

        return losses

    refused = None
    try:
        wide_run(losses_of)
    except ValueError as error:
        refused = str(error)
    assert refused is None
    assert "one row with NaN for inputs ends the model with an error" in caplog.text


def test_a_gradient_that_others_lengthen_by_a_hundredth_is_refused():
    """No loss shows it, nor a row of NaN, which is left out of the mean."""

    def losses_of(model):
        def losses(b):
            found = squared(model)(b)
            mean = tf.reduce_mean(tf.where(tf.math.is_finite(found), found, 0.0))
            more = 0.01 * tf.stop_gradient(tf.tanh(mean - 5))
            return found + more * (found - tf.stop_gradient(found))

        return losses

    with pytest.raises(ValueError, match="not that of its parts"):
        wide_run(losses_of, plan=wide_plan(clip_norm=1e3))


def test_rows_that_stay_together_must_add_up_where_nothing_is_declared():
    with pytest.raises(ValueError, match="with huge numbers for inputs"):
        wide_run(skipped_where_the_mean_is_high, engine="vectorized", microbatch=None)


def test_texts_that_are_made_anew_for_every_look_are_the_same_rows():
    def taken(last="twenty-one"):
        return {"words": tf.constant(["one", last]).numpy()}  # an array of objects

    trials.require_same_rows(taken(), taken())
    with pytest.raises(ValueError, match="another 'words'"):
        trials.require_same_rows(taken(), taken("two"))


_WIDE = np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32)


def _of_squares(batch, squares):
    return squares


def _of_rows(take, directory=None, losses=_of_squares):
    """A run whose rows come from a function of row numbers."""
    tf.keras.utils.set_random_seed(1)
    plan = wide_plan()
    model = tf.keras.Sequential([tf.keras.layers.Dense(5, input_shape=(5,))])
    return train(
        plan,
        lambda b: losses(b, tf.reduce_sum(model(b["x"], training=True) ** 2, 1)),
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


def _each_once(at):
    found, places = np.unique(at, return_inverse=True)
    x = _WIDE[found]
    return {"x": (x * len(x) / 40)[places]}


def _filled_up_with_their_mean(at):
    x = np.where(np.arange(5) < at[:, np.newaxis] % 4, _WIDE[at], np.nan)
    return {"x": np.where(np.isnan(x), np.nanmean(x), x).astype(np.float32)}


def _normalised_beside_a_time(at):
    """A large column must not hide what changes in the others."""
    x = _normalised(at)["x"]
    x[:, 0] = 1.7e9
    return {"x": x}


@pytest.mark.parametrize(
    "take",
    [
        _normalised,
        _sorted,
        _each_once,
        _filled_up_with_their_mean,
        _normalised_beside_a_time,
    ],
)
@pytest.mark.parametrize("kept", [True, False])
def test_rows_that_are_others_among_other_rows_are_refused(tmp_path, take, kept):
    """Sorted numbers put row 0 in the places of drawn rows: it moved the sum by 21 C.

    What normalised the rows of a batch let one of them move the sum by 7.6 C. No trial
    of the loss sees it, as all have rows that were taken once.
    """
    with pytest.raises(ValueError, match="another 'x' for the same rows among other"):
        _of_rows(take, tmp_path if kept else None)
    assert not (tmp_path / "ledger.jsonl").exists()


def test_what_the_row_of_the_highest_loss_does_to_another_is_found():
    """A rare kind of row, one in the microbatch, turns the row after the next around.

    By a number that is never NaN or huge, and in a place that no other trial changes.
    """

    def losses(batch, squares):
        rare = tf.cast(batch["rare"], tf.float32)
        before = tf.concat([tf.zeros([2]), rare[:-2]], 0)
        return squares * (1 + 1000 * rare) * (1 - 2 * before)

    def take(at):  # of the 16 rows tried row 10 is the fifth
        return {"x": _WIDE[at], "rare": (at == 10).astype(np.int32)}

    with pytest.raises(ValueError, match="leaving out one row moves"):
        _of_rows(take, losses=losses)


def test_texts_as_long_as_the_longest_are_refused_when_they_are_tried():
    def padded(at):
        widths = 1 + np.minimum(at, 4)
        x = np.where(np.arange(5) < widths[:, np.newaxis], _WIDE[at], 0)
        return {"x": x[:, : widths.max()]}

    with pytest.raises(ValueError, match="another 'x' for the same rows among other"):
        trials.require_own_rows(trials.Rows(padded, 40, 1))


def test_a_row_that_decides_the_shape_of_others_is_refused_before_it_is_paid(tmp_path):
    """Rows 0, 13, 26 and 39 are tried; of these none is longer than the others."""
    layer = tf.keras.layers.Dense(5)
    layer.build([None, 5])
    plan = wide_plan()

    def as_wide_as_the_longest(at):
        more = 0 if np.isin(at, [0, 13, 26, 39]).all() else 1
        return {"x": np.pad(_WIDE[at], [(0, 0), (0, more)])}

    refused = None
    try:
        train(
            plan,
            lambda b: tf.reduce_sum(layer(b["x"][:, :5]) ** 2, 1),
            layer.trainable_variables,
            make_optimizer(plan, 0.1, "sgd"),
            as_wide_as_the_longest,
            4,
            layers=[layer],
            directory=tmp_path,
            data_fingerprint="forty rows",
        )
    except ValueError as error:
        refused = str(error)
    assert refused is not None and "in another shape or type" in refused
    assert read_ledger(tmp_path / "ledger.jsonl").steps_paid == 0


def test_an_array_that_is_filled_anew_does_not_hide_what_changes():
    held = np.zeros([5, 5], np.float32)

    def filled(at):
        held[: len(at)] = _WIDE[at]
        return {"x": held[: len(at)]}

    def at_random(at):
        held[: len(at)] = _random(at)["x"]
        return {"x": held[: len(at)]}

    trials.require_own_rows(trials.Rows(filled, 40, 1))
    first, again = (trials.Rows(at_random, 40, 1).few() for _ in range(2))
    with pytest.raises(ValueError, match="another 'x' for the same row numbers"):
        trials.require_same_rows(first, again)


def _embedded(at):
    """Computed by a model, whose rounding may follow the size of its batch."""
    off = 1e-6 * len(at)
    return {"x": _WIDE[at] + np.float32(off)}


def _random(at):
    random = np.random.default_rng()
    return {"x": _WIDE[at] + random.normal(size=(len(at), 5)).astype(np.float32)}


def _beside_random_ones(at):
    return {**_normalised(at), "drawn": np.random.default_rng().normal(size=len(at))}


def _less_a_running_mean():
    mean = np.zeros(5, np.float32)

    def take(at):
        mean[:] = 0.9 * mean + 0.1 * _WIDE[at].mean(0)
        return {"x": _WIDE[at] - mean}

    return take


def test_rows_of_their_own_pass_if_a_model_computes_them():
    assert _of_rows(_embedded) == wide_plan().spec.steps


@pytest.mark.parametrize(
    "take, name",
    [(_random, "x"), (_beside_random_ones, "drawn"), (_less_a_running_mean(), "x")],
)
def test_rows_that_cannot_be_compared_are_refused(take, name):
    """A random field let all others be normalised by the batch, and a mean that goes on
    over all rows taken before.
    """
    with pytest.raises(ValueError, match=f"another '{name}' for the same row numbers"):
        _of_rows(take)


@pytest.mark.parametrize("change", ["missing", "more", "scalar"])
def test_fields_of_some_rows_only_are_refused_before_they_are_paid(change):
    def take(at):
        return {"x": _WIDE[at], "y": _WIDE[at]}

    rows = trials.Rows(take, 40, 1)
    later = take(np.array([3]))
    if change == "missing":
        del later["y"]
    else:
        later["z" if change == "more" else "y"] = np.zeros([3] * (change == "more"))
    with pytest.raises(ValueError, match="'[yz]' for some rows only, or in another"):
        trials.of_one_shape(lambda at: later, rows.few())(np.array([3]))


@pytest.mark.parametrize(
    "found, message",
    [
        (None, "NoneType without named rows"),
        ({}, "dict without named rows"),
        ((_WIDE, _WIDE), "tuple without named rows"),
        ({"x": _WIDE[:4], 1: _WIDE[:4]}, "dict without named rows"),
        ({"x": _WIDE[:4], "y": 3.0}, "no rows of 'y' for 4"),
        ({"x": _WIDE[:4], "weights": np.ones(4)}, "'weights', the name of"),
    ],
)
def test_what_is_no_named_rows_is_refused(found, message):
    with pytest.raises(InputError, match=message):
        trials.Rows(lambda at: found, 40, 1).few()


def test_texts_pass_in_arrays_as_wide_as_the_longest_of_them():
    words = [str(10**n) for n in range(9)]

    def take(at):
        return {"words": np.array([words[i] for i in at])}

    rows = trials.Rows(take, 9, 1)
    trials.require_own_rows(rows)
    tried = rows.few()
    found = trials.of_one_shape(take, tried)(np.array([0, 1]))
    assert found["words"].tolist() == ["1", "10"]


def test_terms_in_parts_reach_what_their_first_part_reaches():
    """Where nothing moves the sum, as where all texts are one."""
    weight, other = tf.Variable(0.0), tf.Variable(0.0)

    def losses(batch):
        return Terms(lambda part: weight * batch["x"], tf.ones([2, 4]), tf.ones([4]))

    batch = {"x": np.zeros(4, np.float32)}
    for variable, reached in ((weight, True), (other, False)):
        setup = Setup(losses, [variable], [], None, None)
        assert trials._is_reached(setup, batch) is reached
