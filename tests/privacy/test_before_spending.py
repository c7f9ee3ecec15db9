"""What cannot run is refused before a step of it is paid for."""

import os
import re
import traceback

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.privacy import (
    Coupled,
    Groups,
    PrivacySpec,
    PrivateModel,
    checkpoint,
    discard_state,
    make_optimizer,
    make_plan,
    read_ledger,
    replay,
    train,
    workers,
)
from tfdpsq.privacy.loop import unquoted_values
from tfdpsq.validation import InputError

_FOUR = {"x": np.ones([4, 3], np.float32), "weights": np.ones(4, np.float32)}


def _spec(**changes):
    values = dict(
        epsilon=2.0,
        clip_norm=1.0,
        num_units=12,
        batch_size=6,
        steps=3,
        accountant="rdp",
    )
    return PrivacySpec(**{**values, **changes})


def _losses(batch, layer):
    return layer(batch["x"])[:, 0]


def _coupled(batch, layer):
    losses = _losses(batch, layer)
    return losses - tf.reduce_mean(losses)


def _train(
    directory,
    spec,
    data=None,
    microbatch=4,
    losses=_losses,
    rate=0.1,
    width=1,
    engine="fast",
    initial=None,
    **options,
):
    plan = make_plan(spec)
    layer = tf.keras.layers.Dense(width, use_bias=False)
    layer.build([None, 3])
    if initial is not None:
        layer.kernel.assign(initial)
    data = np.arange(36, dtype=np.float32).reshape(12, 3) if data is None else data
    return train(
        plan,
        lambda batch: losses(batch, layer),
        [layer.kernel],
        make_optimizer(plan, rate, "sgd", engine=engine),
        lambda at: {"x": data[at]},
        microbatch,
        layers=[layer],
        directory=directory,
        data_fingerprint="twelve rows",
        **options,
    )


def _unpaid(directory):
    path = directory / "ledger.jsonl"
    return not path.exists() or read_ledger(path).steps_paid == 0


@pytest.mark.parametrize(
    "spec, options, message",
    [
        (
            _spec(unit="user", rows_per_unit=3, num_units=6),
            dict(groups=Groups.of(np.arange(12) // 2), microbatch=8),
            "parts the 3 rows that are clipped together",
        ),
        (_spec(num_units=20), {}, "Pass units"),
        (
            _spec(),
            dict(microbatch=None, losses=_coupled),
            "the loss of a row is another one among",
        ),
        (_spec(), dict(data=np.array([[1, 2, 3]] * 12, object)), "Python objects"),
    ],
)
def test_nothing_is_paid_for_what_cannot_run(tmp_path, spec, options, message):
    with pytest.raises(ValueError, match=message):
        _train(tmp_path, spec, **options)
    assert _unpaid(tmp_path)
    # Mended, the same directory serves.
    good = dict(options, microbatch=3 if "groups" in options else 4)
    good.pop("data", None)
    good.pop("losses", None)
    if message == "Pass units":
        good["units"] = 12
    assert _train(tmp_path, spec, **good) == 3
    assert read_ledger(tmp_path / "ledger.jsonl").steps_paid == 3


def test_a_model_that_cannot_be_compiled_costs_nothing(tmp_path):
    def losses(batch, layer):
        if not tf.executing_eagerly():
            raise ValueError("only eagerly")
        return _losses(batch, layer)

    with pytest.raises(ValueError, match="only eagerly"):
        _train(tmp_path, _spec(), losses=losses)
    assert _unpaid(tmp_path)


def test_what_xla_does_not_have_costs_nothing(tmp_path):
    """It was told after a step was paid for, as a value that a row has."""

    def losses(batch, layer):
        told = tf.strings.length(tf.strings.as_string(batch["x"][:, 0]))
        return _losses(batch, layer) * tf.cast(told, tf.float32)

    with pytest.raises(InputError, match="XLA does not have .*String.*jit_compile to"):
        _train(tmp_path, _spec(), losses=losses, jit_compile=True)
    assert _unpaid(tmp_path)
    assert _train(tmp_path, _spec(), losses=losses) == 3


def test_a_model_whose_step_alone_cannot_be_compiled_costs_nothing(tmp_path):
    """Its loss can, and so can what is tried: not the loop over microbatches."""

    def losses(batch, layer):
        graph = tf.compat.v1.get_default_graph()
        while graph is not None:
            if "while" in getattr(graph, "name", ""):
                raise ValueError("not in a loop")
            graph = getattr(graph, "outer_graph", None)
        return _losses(batch, layer)

    with pytest.raises(ValueError, match="not in a loop"):
        _train(tmp_path, _spec(), losses=losses, microbatch=7)
    assert _unpaid(tmp_path)


def test_other_users_are_other_data(tmp_path):
    spec = _spec(unit="user", num_units=6, steps=2)
    groups = Groups.of(np.arange(12) // 2)
    stop = dict(groups=groups, on_step=lambda step, loss: True)
    assert _train(tmp_path, spec, **stop) == 1
    others = Groups.of(np.arange(12) % 6)
    with pytest.raises(ValueError, match="data"):
        _train(tmp_path, spec, groups=others)
    assert _train(tmp_path, spec, groups=groups) == 2


def test_a_row_has_one_owner():
    with pytest.raises(ValueError, match="belongs to two units"):
        Groups(np.array([0, 1, 1, 2]), np.array([0, 2, 4]))


def test_groups_of_rows_that_the_data_lack_cost_nothing(tmp_path):
    """They used to end a run at some step, whose directory took no other groups."""
    spec, rows = _spec(unit="user", num_units=6, batch_size=2), np.arange(12)
    rows[7] = 50
    groups = Groups(rows, np.arange(0, 13, 2))
    # Where it is not refused, a step that draws the row ends in an IndexError.
    with pytest.raises((InputError, IndexError)) as caught:
        _train(tmp_path, spec, groups=groups)
    message = r"take has no row 50\. Give groups of the rows that the data have"
    assert re.search(message, str(caught.value))
    assert _unpaid(tmp_path)
    # Rows that belong to nobody need not be there, nor be in order.
    data = np.arange(24, dtype=np.float32).reshape(8, 3)
    data[:2] = np.nan
    some = Groups(np.array([7, 5, 6, 2, 4, 3]), np.arange(7))
    assert _train(tmp_path, spec, data, groups=some) == 3


def test_the_baseline_does_not_wipe_a_private_runs_ledger(tmp_path):
    _train(tmp_path, _spec())
    discard_state(tmp_path)
    with pytest.raises(ValueError, match="plan"):
        _train(tmp_path, _spec(epsilon=float("inf")))
    assert read_ledger(tmp_path / "ledger.jsonl").steps_paid == 3


def test_a_finished_run_is_not_paid_for_by_its_own_ledger_again(tmp_path):
    """Its state is gone, so nothing can be repeated: the ledger has to stay."""
    _train(tmp_path, _spec())
    discard_state(tmp_path)
    kept = (tmp_path / "ledger.jsonl").read_bytes()
    with pytest.raises(ValueError, match="would spend the budget a second time"):
        _train(tmp_path, _spec())
    assert (tmp_path / "ledger.jsonl").read_bytes() == kept


def test_bfloat16_weights_are_saved_and_restored_bit_by_bit(tmp_path):
    secrets = checkpoint.Secrets(1, 2)
    (tmp_path / checkpoint.STATE).mkdir()
    values = [[1.5, -0.0078125, 3e38], [0.1, 0.2, 0.3]]
    saved = [tf.Variable(v, dtype=tf.bfloat16) for v in values]
    checkpoint.save(tmp_path, 4, saved, secrets)
    loaded = [tf.Variable(tf.zeros([3], tf.bfloat16)) for _ in values]
    assert checkpoint.restore(tmp_path, loaded, 4, secrets) == 4
    for one, other in zip(saved, loaded):
        assert one.numpy().tobytes() == other.numpy().tobytes()


@pytest.mark.parametrize("engine", ["fast", "vectorized"])
@pytest.mark.parametrize(
    "losses",
    [
        lambda batch, layer: batch["x"][:, 0],
        lambda batch, layer: tf.round(_losses(batch, layer)),
        lambda batch, layer: tf.stop_gradient(_losses(batch, layer)),
    ],
    ids=["no model", "rounded", "stopped"],
)
def test_a_loss_that_trains_nothing_costs_nothing(tmp_path, losses, engine):
    """All of ε was spent on noise alone."""
    with pytest.raises(InputError, match="no gradient in any of the 1 variables"):
        _train(tmp_path, _spec(), losses=losses, engine=engine)
    assert _unpaid(tmp_path)


def test_gradients_that_are_zero_at_first_are_trained(tmp_path):
    assert _train(tmp_path, _spec(), np.zeros([12, 3], np.float32)) == 3


@pytest.mark.parametrize(
    "change, named",
    [
        (dict(microbatch=3), "microbatch_size was 4 .* is 3 now"),
        (dict(rate=0.2), "optimizer was .*0.1.* is .*0.2"),
        (dict(jit_compile=True), "jit_compile was False .* is True now"),
        (dict(width=2), r"variable.0: .*\[3, 1\].* there, .*\[3, 2\].* now"),
        (dict(units=11), "the private data changed"),
    ],
    ids=["microbatches", "optimizer", "compiler", "weights", "units"],
)
def test_a_run_goes_on_with_what_its_paid_steps_were_made_with(tmp_path, change, named):
    """With anything else the steps that are repeated would be other steps."""
    stop = dict(on_step=lambda step, loss: True)
    assert _train(tmp_path, _spec(), **{"units": 12, **stop}) == 1
    with pytest.raises(ValueError, match=named):
        _train(tmp_path, _spec(), **{"units": 12, **change})
    assert read_ledger(tmp_path / "ledger.jsonl").steps_paid == 1
    assert _train(tmp_path, _spec(), units=12) == 3


def test_what_a_run_keeps_is_its_owners_alone(tmp_path):
    """Seeds, states and ledger: whoever reads them can subtract the noise."""
    before = os.umask(0o022)
    try:
        _train(tmp_path / "run", _spec(), on_step=lambda step, loss: True)
    finally:
        os.umask(before)
    kept = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    assert {path.name for path in kept} > {"ledger.jsonl", "secrets.json", "state"}
    assert sum(path.is_file() for path in kept) >= 3
    # Folders, too: names, sizes and times in them tell when each step was taken.
    for path in kept:
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_flipped_byte_of_a_state_is_named_or_harmless(tmp_path):
    """One in 332 was a NotImplementedError of zip."""
    secrets = checkpoint.open_secrets(tmp_path, 0, {})
    variables = [tf.Variable([[1.0, 2.0]]), tf.Variable(3, dtype=tf.int64)]
    checkpoint.save(tmp_path, 3, variables, secrets)
    (path,) = (tmp_path / checkpoint.STATE).glob("*.npz")
    whole, refused = path.read_bytes(), 0
    for at in range(0, len(whole), 2):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
        try:
            checkpoint.restore(tmp_path, variables, 5, secrets)
        except InputError:
            refused += 1
    assert refused > len(whole) / 5  # of values, names and lengths


def test_random_numbers_that_cannot_be_repeated_are_refused(tmp_path):
    """A step taken twice has the same noise, so it must have the same sum."""

    def losses(batch, layer):
        return _losses(batch, layer) + tf.random.uniform([batch["x"].shape[0]])

    with pytest.raises(ValueError, match="cannot repeat .*noise would be used twice"):
        _train(tmp_path, _spec(), losses=losses)
    assert _unpaid(tmp_path)
    # Where there is no noise it cannot be used twice.
    public = _spec(epsilon=float("inf"), steps=1)
    assert _train(tmp_path / "public", public, losses=losses) == 1


def test_rows_that_are_drawn_when_they_are_taken_are_refused(tmp_path):
    """A killed run took steps again with other noise on its inputs, and one of ours.

    However little: what rounds otherwise each time passes only where nothing repeats.
    """
    plan, layer = make_plan(_spec()), tf.keras.layers.Dense(1, use_bias=False)
    layer.build([None, 3])
    random = np.random.default_rng(0)
    rows = random.normal(size=[12, 3]).astype(np.float32)

    def take(at):
        off = 1e-5 * random.normal(size=[len(at), 3])
        return {"x": rows[at] + off.astype(np.float32)}

    def run(directory):
        return train(
            plan,
            lambda batch: layer(batch["x"])[:, 0],
            [layer.kernel],
            make_optimizer(plan, 0.1, "sgd"),
            take,
            4,
            layers=[layer],
            directory=directory,
            data_fingerprint="twelve rows",
        )

    with pytest.raises(InputError, match="killed run could not repeat"):
        run(tmp_path)
    assert _unpaid(tmp_path)
    assert run(None) == 3  # of which no step is repeated


def _looked_up(batch, layer):
    factors = tf.gather(tf.ones([10]), tf.cast(batch["x"][:, 0], tf.int32))
    return factors * _losses(batch, layer)


def test_what_is_tried_quotes_no_value_of_a_row(tmp_path):
    """TensorFlow's message has the id, before payment as after it."""
    data = np.ones([12, 3], np.float32)
    data[0, 0] = 4711
    with pytest.raises(tf.errors.InvalidArgumentError, match="4711"):
        _looked_up({"x": tf.constant(data)}, lambda x: x)
    with pytest.raises((InputError, tf.errors.OpError)) as caught:
        _train(tmp_path, _spec(), data, losses=_looked_up)
    shown = "".join(traceback.format_exception(caught.value))
    assert "4711" not in shown and _unpaid(tmp_path)
    assert "rows tried before the first step" in shown and "Nothing was spent" in shown


def _failing_in_python(kind):
    def look(values):
        if (values == 4711).any():
            raise kind(f"no {values.max():.0f} here")
        return values[:, 0]

    def losses(batch, layer):
        found = tf.numpy_function(look, [batch["x"]], tf.float32)
        return _losses(batch, layer) * tf.ensure_shape(found, batch["x"].shape[:1])

    return losses


def _read_from_a_file(batch, layer):
    name = tf.strings.as_string(tf.cast(batch["x"][:, 0], tf.int32))
    read = tf.map_fn(
        lambda one: tf.cond(
            one == "4711",
            lambda: tf.strings.length(tf.io.read_file("/nowhere/" + one)),
            lambda: 1,
        ),
        name,
        fn_output_signature=tf.int32,
    )
    return _losses(batch, layer) * tf.cast(read, tf.float32)


@pytest.mark.parametrize(
    "losses",
    [
        _read_from_a_file,
        *map(_failing_in_python, (KeyError, MemoryError, NotImplementedError)),
    ],
    ids=["file", "key", "memory", "not implemented"],
)
def test_no_kind_of_error_quotes_a_value_of_a_row(tmp_path, losses):
    """The row is not among those tried; Python errors have five TensorFlow kinds."""
    data = np.ones([12, 3], np.float32)
    data[5, 0] = 4711
    with pytest.raises((InputError, tf.errors.OpError)) as caught:
        _train(tmp_path, _spec(steps=30), data, losses=losses, rate=0.0)
    shown = "".join(traceback.format_exception(caught.value))
    assert "4711" not in shown and "steps of this run as spent" in shown


@pytest.mark.parametrize("kind", [KeyError, MemoryError, NotImplementedError])
def test_no_kind_of_error_quotes_a_row_that_is_tried(tmp_path, kind):
    data = np.full([12, 3], 4711, np.float32)
    with pytest.raises((InputError, tf.errors.OpError)) as caught:
        _train(tmp_path, _spec(), data, losses=_failing_in_python(kind))
    assert "4711" not in "".join(traceback.format_exception(caught.value))
    assert "Nothing was spent" in str(caught.value)
    assert _unpaid(tmp_path)


@pytest.mark.parametrize("several", [False, True])
def test_a_worker_that_is_gone_is_not_taken_for_bad_data(monkeypatch, several):
    """A restarted worker shows as the same kind of TensorFlow error."""
    monkeypatch.setattr(workers, "several", lambda: several)
    kind = tf.errors.FailedPreconditionError
    with pytest.raises(kind if several else InputError) as caught:
        with unquoted_values("the problem", "The remedy."):
            raise kind(None, None, "4711")
    assert "4711" not in "".join(traceback.format_exception(caught.value))


def test_validation_data_are_not_quoted_and_may_be_mended(tmp_path):
    """They are read after steps that were paid for; those are not lost."""
    plan = make_plan(_spec(n_is_public=True, steps=4))
    ids, ones = np.ones([12, 1], np.int64), np.ones([12, 1], np.float32)
    bad = ids.copy()
    bad[3] = 4711

    def run(validation):
        parts = [tf.keras.layers.Embedding(9, 1), tf.keras.layers.Flatten()]
        private = PrivateModel(tf.keras.Sequential(parts), plan, 4)
        loss = tf.keras.losses.MeanSquaredError(reduction="none")
        private.compile(make_optimizer(plan, 0.1, "sgd"), loss)
        private.fit(ids, ones, directory=tmp_path, validation_data=(validation, ones))
        return private.steps_executed

    # Without a look at a value, before anything is paid.
    with pytest.raises(InputError, match=r"validation_data have \[11, 12\] rows"):
        run(ids[1:])
    assert not (tmp_path / "ledger.jsonl").exists()
    with pytest.raises((InputError, tf.errors.OpError)) as caught:
        run(bad)
    assert re.search("validation_data .*after step 2", str(caught.value))
    assert "4711" not in "".join(traceback.format_exception(caught.value))
    assert read_ledger(tmp_path / "ledger.jsonl").steps_paid == 2
    assert run(ids) == 4


def test_a_call_of_several_steps_that_fails_counts_them_all():
    """The first step took effect before the second one met a value that it refused."""
    plan = make_plan(_spec())
    seed = next(
        seed
        for seed in range(99)
        if 5 not in _drawn(plan.sampler(12, seed), 0)
        if 5 in _drawn(plan.sampler(12, seed), 1)
    )
    data = np.ones([12, 3], np.float32)
    data[5, 0] = 4711  # rows 0, 3, 7 and 11 are tried
    layer = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    layer.build([None, 3])
    with pytest.raises(InputError) as caught:
        train(
            plan,
            lambda batch: _looked_up(batch, layer),
            [layer.kernel],
            make_optimizer(plan, 0.1, "sgd"),
            lambda at: {"x": data[at]},
            4,
            layers=[layer],
            sampler_seed=seed,
            steps_per_loop=3,
        )
    assert np.abs(layer.kernel).min() > 0
    shown = "".join(traceback.format_exception(caught.value))
    assert "one of steps 1 to 3" in shown and "4711" not in shown
    assert "Count 3 steps of this run as spent" in shown


def _drawn(sampler, step):
    draw = sampler.draw(step)
    return draw.indices[: draw.count]


@pytest.mark.parametrize("to", [0, 9])
def test_iterations_are_set_by_no_hook(tmp_path, to):
    """A schedule would give the next step another rate, as a loss says."""
    plan = make_plan(_spec())
    optimizer = make_optimizer(plan, 0.1, "sgd")
    layer = tf.keras.layers.Dense(1, use_bias=False)
    layer.build([None, 3])
    with pytest.raises(InputError, match=f"iterations of the optimizer .* to {to} bef"):
        train(
            plan,
            lambda batch: _losses(batch, layer),
            [layer.kernel],
            optimizer,
            lambda at: {"x": np.ones([len(at), 3], np.float32)},
            4,
            layers=[layer],
            on_step=lambda step, loss: optimizer.iterations.assign(to) is None,
            hooks_may_write=False,
        )


def test_seeds_that_would_not_be_deleted_are_not_made(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "state").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="run/state is a link, and the seeds"):
        _train(tmp_path / "run", _spec())
    assert _unpaid(tmp_path / "run") and not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize(
    "draw",
    [
        tf.random.normal,
        tf.random.truncated_normal,
        "uniform",
        "truncated_normal",
        lambda shape: tf.nn.dropout(tf.ones(shape), 0.5),
        lambda shape: tf.cast(tf.random.categorical(tf.zeros(shape), 3), tf.float32),
        lambda shape: tf.random.shuffle(tf.ones(shape)),
        lambda shape: tf.random.gamma(shape, 1.0),
        lambda shape: tf.random.poisson(shape, 1.0),
        lambda shape: tf.while_loop(
            lambda i, x: i < 2,
            lambda i, x: (i + 1, x + tf.random.uniform(shape)),
            (0, tf.zeros(shape)),
        )[1],
    ],
)
def test_every_way_to_draw_from_a_state_is_known(draw):
    if isinstance(draw, str):  # of a generator, which is made by an operation
        draw = getattr(tf.random.Generator.from_seed(7), draw)

    def losses(tensors):
        return tf.reduce_sum(tensors["x"] * draw([4, 3]), 1)

    with pytest.raises(ValueError, match="cannot repeat"):
        replay.require_repeatable(replay.traced(losses, _FOUR, [])[0])


def _in_a_gradient_of_its_own(tensors, scale):
    def gradient(coefficients, variables):
        return [tf.random.uniform([]) * tf.reduce_sum(coefficients)]

    return Coupled(tensors["x"][:, 0] * scale, gradient)


def _in_a_gradient_written_by_hand(tensors, scale):
    @tf.custom_gradient
    def as_it_is(values):
        return tf.identity(values), lambda above: above * tf.random.uniform([4])

    return as_it_is(tensors["x"][:, 0] * scale)


@pytest.mark.parametrize(
    "losses", [_in_a_gradient_of_its_own, _in_a_gradient_written_by_hand]
)
def test_what_only_the_gradient_draws_is_found(losses):
    scale = tf.Variable(1.0)
    given = (lambda tensors: losses(tensors, scale), _FOUR, [], [scale])
    nodes = replay.traced(*given).nodes
    with pytest.raises(ValueError, match="cannot repeat"):
        replay.require_repeatable(nodes)


def test_random_layers_of_keras_can_be_repeated():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Dropout(0.5, input_shape=[3]),
            tf.keras.layers.Dense(1),
            tf.keras.layers.GaussianNoise(0.1),
        ]
    )
    given = (lambda b: model(b["x"], training=True)[:, 0], _FOUR, [model])
    replay.require_repeatable(replay.traced(*given)[0])
