"""Runs that cannot go through are refused before a step is paid for, quoting no row."""

import dataclasses
import os
import traceback

import numpy as np
import pytest
import tensorflow as tf
from helpers import plans
from helpers.dense_runs import check
from helpers.small_runs import (
    interrupted_at,
    linear,
    small_run,
    small_spec,
    unpaid,
)

import tfdpsq
from tfdpsq.privacy import (
    Groups,
    Preempted,
    PrivateModel,
    discard_state,
    make_plan,
    read_ledger,
    workers,
)
from tfdpsq.privacy.batches import unquoted_values
from tfdpsq.validation import InputError

# -- Refused with the ledger unpaid ----------------------------------------------


def _only_eagerly(batch, layer):
    if not tf.executing_eagerly():
        raise ValueError("only eagerly")
    return linear(batch, layer)


def _drawn_from_a_state(batch, layer):
    return linear(batch, layer) + tf.random.uniform([batch["x"].shape[0]])


def _not_for_xla(batch, layer):
    told = tf.strings.length(tf.strings.as_string(batch["x"][:, 0]))
    return linear(batch, layer) * tf.cast(told, tf.float32)


@pytest.mark.parametrize(
    "losses, options, message",
    [
        (_only_eagerly, {}, "only eagerly"),
        (_drawn_from_a_state, {}, "resumed run cannot repeat"),
        (_not_for_xla, dict(jit_compile=True), "String.*Set it to False"),
        (lambda batch, layer: tf.round(linear(batch, layer)), {}, "no gradient"),
        (linear, dict(data=np.array([[1, 2, 3]] * 12, object)), "type object"),
        (linear, dict(seed=5), "directory keeps a seed of its own"),
    ],
)
def test_nothing_is_paid_for_a_run_that_cannot_go_through(
    tmp_path, losses, options, message
):
    with pytest.raises(ValueError, match=message):
        small_run(tmp_path, small_spec(), losses=losses, **options)
    assert unpaid(tmp_path)


def test_nothing_is_paid_for_units_that_do_not_fit_the_plan(tmp_path):
    """Corrected, the same directory serves."""
    spec = small_spec(num_units=20)
    with pytest.raises(ValueError, match="Pass units"):
        small_run(tmp_path, spec)
    assert unpaid(tmp_path)
    assert small_run(tmp_path, spec, units=12) == 3
    assert read_ledger(tmp_path / "ledger.jsonl").steps_paid == 3


def test_nothing_is_paid_for_groups_of_rows_that_the_data_lack(tmp_path):
    spec, rows = small_spec(unit="user", num_units=6, batch_size=2), np.arange(12)
    rows[7] = 50
    with pytest.raises(InputError, match="take has no row 50"):
        small_run(tmp_path, spec, units=Groups(rows, np.arange(0, 13, 2)))
    assert unpaid(tmp_path)
    # Rows that belong to nobody need not be there, nor be in order.
    data = np.arange(24, dtype=np.float32).reshape(8, 3)
    data[:2] = np.nan
    some = Groups(np.array([7, 5, 6, 2, 4, 3]), np.arange(7))
    assert small_run(tmp_path, spec, data, units=some) == 3


def test_rows_that_are_drawn_when_they_are_taken_are_refused(tmp_path):
    """A killed run took steps again with other noise on its inputs, and one of ours.

    Also where nothing is kept: rows are what their numbers say.
    """
    random = np.random.default_rng(0)
    rows = random.normal(size=[12, 3])

    class Drawn:
        def __getitem__(self, at):
            off = 1e-5 * random.normal(size=[len(at), 3])
            return (rows[at] + off).astype(np.float32)

    with pytest.raises(InputError, match="for the same rows"):
        small_run(tmp_path, small_spec(), Drawn())
    assert unpaid(tmp_path)
    with pytest.raises(InputError, match="for the same rows"):
        small_run(None, small_spec(), Drawn())


def test_runs_that_look_odd_but_can_go_through_are_trained(tmp_path):
    # Gradients that are zero at first.
    assert small_run(tmp_path / "a", small_spec(), np.zeros([12, 3], np.float32)) == 3
    # Without noise, random numbers cannot be used twice.
    public = small_spec(epsilon=float("inf"), steps=1)
    assert small_run(tmp_path / "b", public, losses=_drawn_from_a_state) == 1


# -- Once steps are paid for ------------------------------------------------------


def test_run_goes_on_with_what_its_paid_steps_were_made_with(tmp_path):
    """With anything else the steps that are repeated would be other steps."""
    spec = small_spec(unit="user", num_units=6)
    good = dict(units=Groups.of(np.arange(12) // 2))
    assert small_run(tmp_path, spec, on_step=interrupted_at(1), **good) == 1
    for change, named in (
        (dict(rate=0.2), "the optimizer's settings changed since"),
        (dict(engine="vectorized"), "engine changed .*'fast' to 'vectorized'"),
        (dict(jit_compile=True), "jit_compile changed .*'False' to 'True'"),
        (dict(width=2), "the model's configuration changed since"),
        (dict(units=Groups.of(np.arange(12) % 6)), "units changed since"),
    ):
        with pytest.raises(ValueError, match=named):
            small_run(tmp_path, spec, **{**good, **change})
    with pytest.raises(ValueError, match="plan"):  # the baseline, too
        small_run(tmp_path, dataclasses.replace(spec, epsilon=float("inf")), **good)
    assert read_ledger(tmp_path / "ledger.jsonl").steps_paid == 1
    assert small_run(tmp_path, spec, **good) == 3
    # Its state is gone, so nothing can be repeated.
    discard_state(tmp_path)
    with pytest.raises(ValueError, match="would spend the budget a second time"):
        small_run(tmp_path, spec, **good)


def test_run_goes_on_with_the_layers_that_it_began_with(tmp_path, monkeypatch):
    """Another activation would take other steps, with the same noise."""
    plan, data = make_plan(small_spec()), np.eye(12, 3, dtype=np.float32)

    def run(activation="relu", frozen=1.0, microbatch=4, stops=False):
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Dense(3, activation, trainable=False),
                tf.keras.layers.Dropout(0.5),
                tf.keras.layers.Dense(1),
            ]
        )
        model.build([None, 3])
        model.layers[0].set_weights([np.eye(3), np.full([3], frozen)])
        return plans.trained(
            plan,
            lambda batch: model(batch["x"], training=True)[:, 0],
            [model],
            {"x": data},
            microbatch,
            directory=tmp_path,
            on_step=interrupted_at(1) if stops else None,
        )

    with pytest.raises(Preempted):
        run(stops=True)
    for change, named in (
        (dict(activation="tanh"), "the model's configuration changed since"),
        (dict(frozen=2.0), "frozen weights changed since"),
    ):
        with pytest.raises(InputError, match=named):
            run(**change)
    with monkeypatch.context() as patch:
        patch.setattr(tfdpsq, "__version__", "0.0")
        with pytest.raises(InputError, match="the version of tfdpsq changed since"):
            run()
    assert read_ledger(tmp_path / "ledger.jsonl").steps_paid == 1
    assert run(microbatch=3) == 3  # whose rows have the same draws


def test_seeds_states_and_ledger_are_readable_by_their_owner_alone(tmp_path):
    before = os.umask(0o022)
    try:
        small_run(tmp_path / "run", small_spec(), on_step=interrupted_at(1))
    finally:
        os.umask(before)
    kept = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    assert {path.name for path in kept} > {"ledger.jsonl", "secrets.json", "state"}
    # Folders, too: names, sizes and times in them tell when each step was taken.
    for path in kept:
        assert path.stat().st_mode & 0o077 == 0, path


# -- No value of a row in an error --------------------------------------------------


def _looked_up(batch, layer):
    # One value alone is refused; the rows of NaN and of huge values, which are tried
    # before the first step, pass.
    unknown = batch["x"][:, 0] == 4711
    factors = tf.gather(tf.ones([10]), tf.where(unknown, 4711, 0))
    return factors * linear(batch, layer)


def _failing_in_python(kind):
    def look(values):
        if (values == 4711).any():
            raise kind(f"no {values.max():.0f} here")
        return values[:, 0]

    def losses(batch, layer):
        found = tf.numpy_function(look, [batch["x"]], tf.float32)
        return linear(batch, layer) * tf.ensure_shape(found, batch["x"].shape[:1])

    return losses


@pytest.mark.parametrize(
    "losses, tried",
    [
        (_looked_up, True),
        (_looked_up, False),
        (_failing_in_python(KeyError), True),
        (_failing_in_python(MemoryError), False),
    ],
)
def test_errors_quote_no_value_of_a_row(tmp_path, losses, tried):
    """Row 0 is tried before payment, and row 5 met in a step."""
    data = np.ones([12, 3], np.float32)
    data[0 if tried else 5, 0] = 4711
    with pytest.raises((InputError, tf.errors.OpError)) as caught:
        small_run(tmp_path, small_spec(steps=30), data, losses=losses, rate=0.0)
    shown = "".join(traceback.format_exception(caught.value))
    assert "4711" not in shown
    if tried:
        assert unpaid(tmp_path) and "Nothing was spent" in shown
    else:
        assert "as spent" in shown


@pytest.mark.parametrize("several", [False, True])
def test_a_worker_that_is_gone_is_not_taken_for_bad_data(monkeypatch, several):
    """A restarted worker shows as the same kind of TensorFlow error."""
    monkeypatch.setattr(workers, "several", lambda: several)
    kind = tf.errors.FailedPreconditionError
    with pytest.raises(kind if several else InputError) as caught:
        with unquoted_values("the problem", "The remedy."):
            raise kind(None, None, "4711")
    assert "4711" not in "".join(traceback.format_exception(caught.value))


def test_validation_data_are_evaluated_before_a_step_and_not_quoted(tmp_path):
    plan = make_plan(small_spec(n_is_public=True, steps=4))
    ids, ones = np.ones([12, 1], np.int64), np.ones([12, 1], np.float32)
    bad = ids.copy()
    bad[3] = 4711

    def run(validation, **options):
        parts = [tf.keras.layers.Embedding(9, 1), tf.keras.layers.Flatten()]
        private = PrivateModel(tf.keras.Sequential(parts), plan, 4)
        loss = tf.keras.losses.MeanSquaredError(reduction="none")
        private.compile(tf.keras.optimizers.SGD(0.1), loss, **options)
        private.fit(ids, ones, directory=tmp_path, validation_data=(validation, ones))
        return private.steps_executed

    with pytest.raises(
        ValueError, match="validation_data could not be evaluated"
    ) as caught:
        run(bad)
    assert "4711" not in "".join(traceback.format_exception(caught.value))
    with pytest.raises((ValueError, TypeError)):
        run(ids, metrics=["acuracy"])
    assert not (tmp_path / "ledger.jsonl").exists()
    assert run(ids) == 4


# -- Random numbers that a resumed run could not repeat ------------------------------


@tf.custom_gradient
def _drawn_by_the_gradient(values):
    return tf.identity(values), lambda above: above * tf.random.uniform(above.shape)


@pytest.mark.parametrize(
    "draw",
    [
        tf.random.normal,
        "uniform",
        lambda shape: tf.nn.dropout(tf.ones(shape), 0.5),
        lambda shape: tf.random.shuffle(tf.ones(shape)),
        lambda shape: tf.while_loop(
            lambda i, x: i < 2,
            lambda i, x: (i + 1, x + tf.random.uniform(shape)),
            (0, tf.zeros(shape)),
        )[1],
        None,
    ],
)
def test_numbers_drawn_from_a_state_are_found(draw):
    """Also those of the gradient alone."""
    if isinstance(draw, str):  # of a generator, which is made by an operation
        draw = getattr(tf.random.Generator.from_seed(7), draw)
    layer = tf.keras.layers.Dense(1)
    layer.build([None, 3])

    def losses(batch):
        made = layer(batch["x"])[:, 0]
        if draw is None:
            return _drawn_by_the_gradient(made)
        return made * tf.reduce_sum(draw([made.shape[0], 3]), 1)

    data = {"x": np.ones([8, 3], np.float32)}
    with pytest.raises(InputError, match="cannot repeat"):
        check(losses, data, layer.trainable_variables, [layer])
