"""Trials of rows that no data hold, of small couplings, and of whole batches."""

import numpy as np
import pytest
import tensorflow as tf
from dense_runs import (
    skipped_where_the_mean_is_high,
    squared,
    wide_plan,
    wide_run,
)

from tfdpsq.privacy import trials


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
