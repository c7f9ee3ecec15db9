"""Descriptions of what a run computes: equal in every process, and for nothing else.

    python test_computation.py SHIFT

prints, on its last line, the descriptions that another process is compared with. SHIFT
layers and functions are made before, so that every number in a name is another one.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from helpers import plans

from tfdpsq.generator import T5QueryGenerator
from tfdpsq.layers import T5Config, lora, train_only
from tfdpsq.privacy import (
    Coupled,
    PrivateModel,
    Terms,
    checkpoint,
    computation,
    make_optimizer,
    replay,
)
from tfdpsq.privacy.proof.ledger import FILE_NAME, read_ledger

_ROWS = 4
layers = tf.keras.layers


def _vectors(*shape):
    return np.random.default_rng(1).normal(size=[_ROWS, *shape]).astype(np.float32)


def _of(model, x, loss=tf.square):
    def losses(batch):
        made = loss(tf.cast(model(batch["x"], training=True), tf.float32))
        return tf.reduce_mean(tf.reshape(made, [_ROWS, -1]), 1)

    model(tf.zeros_like(x))
    return losses, {"x": x}, [model], model.trainable_variables


def _dense(activation="relu", rate=0.5, epsilon=1e-3, loss=tf.square, scale=1.0):
    parts = [
        layers.Dense(6, activation),
        layers.Dropout(rate),
        layers.LayerNormalization(epsilon=epsilon),
        layers.Lambda(lambda values: values * np.full([6], scale, np.float32)),
        layers.Dense(1),
    ]
    return _of(tf.keras.Sequential(parts), _vectors(5), loss)


def _convolutions():
    parts = [layers.Conv1D(4, 3, activation="swish"), layers.GlobalMaxPooling1D()]
    return _of(tf.keras.Sequential(parts), _vectors(8, 3))


def _recurrent():
    parts = [layers.LSTM(4, return_sequences=True), layers.GRU(3)]
    return _of(tf.keras.Sequential(parts), _vectors(5, 3))


def _attention(policy="mixed_bfloat16"):
    x = tf.keras.Input([5, 6])
    made = layers.MultiHeadAttention(2, 3, dropout=0.1, dtype=policy)(x, x)
    return _of(tf.keras.Model(x, layers.Add(dtype=policy)([x, made])), _vectors(5, 6))


def _control(share=2):
    """Loops, branches and functions of a loss, and a table that it reads."""
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer([1, 2], [0.5, 0.25]), 0.0
    )
    far = tf.constant(np.arange(400, dtype=np.float32))

    @tf.function
    def halved(values):
        return values / share + table.lookup(tf.constant(1))

    def loss(values):
        total = tf.zeros_like(values)
        for _ in tf.range(3):
            total += halved(values)
        made = tf.map_fn(tf.nn.silu, total)
        far_enough = tf.reduce_sum(far) > 1.0
        return tf.cond(far_enough, lambda: tf.square(made), lambda: made)

    return _of(tf.keras.Sequential([layers.Dense(2)]), _vectors(3), loss)


def _tables(last=1.0, first="two"):
    """Tables of two types, in an order of their own, and a variable between them."""
    weight, frozen = tf.Variable(1.0), tf.Variable(2.0, trainable=False)
    names = tf.lookup.experimental.MutableHashTable(tf.string, tf.float32, [0.0, 0.0])
    names.insert(["one", "two", "three"], [[1.0, 1.0], [2.0, 2.0], [3.0, last]])
    numbers = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(tf.range(3, dtype=tf.int64), [first] * 3),
        "",
    )

    def losses(batch):
        found = names.lookup(numbers.lookup(tf.cast(batch["x"][:, 0], tf.int64)))
        return weight * frozen * tf.reduce_sum(tf.ensure_shape(found, [_ROWS, 2]), 1)

    return losses, {"x": _vectors(1)}, [], [weight]


def _vector_keys(last=1.0):
    """A table whose keys are vectors: sorted one by one, the last entry counted not."""
    weight = tf.Variable(1.0)
    table = tf.lookup.experimental.DenseHashTable(
        tf.int64, tf.float32, 0.0, empty_key=[-1, -1], deleted_key=[-2, -2]
    )
    keys = np.stack([np.arange(6)] * 2, 1)
    table.insert(tf.constant(keys), tf.constant([1.0, 2.0, 3.0, 4.0, 5.0, last]))

    def losses(batch):
        at = tf.cast(batch["x"], tf.int64)
        return weight * tf.ensure_shape(table.lookup(at), [_ROWS])

    return losses, {"x": _vectors(2)}, [], [weight]


def _terms(reversed_=False):
    one, other = tf.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0])

    def losses(batch):
        values = tf.linalg.matvec(batch["x"], other if reversed_ else one)
        rest = tf.linalg.matvec(batch["x"], one if reversed_ else other)
        return Terms(values, tf.ones([_ROWS]), tf.square(rest))

    return losses, {"x": _vectors(2)}, [], [one, other]


def _coupled(power=2):
    weight = tf.Variable(1.0)

    def losses(batch):
        scores = batch["x"][:, 0] * weight
        return Coupled(scores, lambda c, _: [tf.reduce_sum(c * scores) ** power])

    return losses, {"x": _vectors(2)}, [], [weight]


def _generator(kind="lora", dropout=0.1, version="1.1"):
    config = T5Config(23, 1, 2, 8, 12, 4, version, dropout=dropout)
    prompt = 3 if kind == "prompt" else 0
    model = T5QueryGenerator(config, None, kind == "rematerialised", prompt)
    if kind == "lora":
        lora.apply_lora(model, rank=2, alpha=4.0, targets=("*/value_projector",))
    if kind == "prompt":
        train_only(model, ["*soft_prompt/*"])
    random, batch = np.random.default_rng(2), {}
    for name in ("document", "query"):
        ids = random.integers(1, 9, [_ROWS, 5]).astype(np.int32)
        batch |= {f"{name}_ids": ids, f"{name}_lengths": np.full(_ROWS, 5, np.int32)}

    def losses(part):
        return model.per_example_losses(part, training=True)

    return losses, batch, [model], model.trainable_variables


_MADE = {
    "dense": _dense,
    "convolutions": _convolutions,
    "recurrent": _recurrent,
    "attention": _attention,
    "control": _control,
    "tables": _tables,
    "vector keys": _vector_keys,
    "terms": _terms,
    "coupled": _coupled,
    "lora": _generator,
    "prompt": lambda: _generator("prompt"),
    "rematerialised": lambda: _generator("rematerialised"),
}


def _described(losses, batch, held, variables):
    batch = {**batch, "weights": np.ones(_ROWS, np.float32)}
    function = replay.traced(losses, batch, held, variables).function
    state = [variable for layer in held for variable in layer.variables]
    return computation.described(function, variables, state)


def _all(shift):
    for _ in range(shift):
        layers.Dense(1).build([None, 2])
        tf.function(lambda x: tf.nn.silu(x) + x).get_concrete_function(tf.zeros([2]))
    return {name: _described(*make()) for name, make in _MADE.items()}


def test_two_processes_describe_the_same_code_alike():
    """Whatever their hashes and the numbers in their names, and when traced again."""
    path = os.pathsep.join(sys.path)
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "7"}
    child = subprocess.run(
        [sys.executable, __file__, "5"], env=environment, capture_output=True, text=True
    )
    assert child.returncode == 0, child.stderr[-4000:]
    elsewhere = json.loads(child.stdout.splitlines()[-1])
    here, again = _all(0), _all(3)
    assert here == again == elsewhere
    digests = {json.loads(made)["digest"] for made in here.values()}
    assert len(digests) == len(_MADE)


@pytest.mark.parametrize(
    "one, other, told",
    [
        (lambda: _dense("relu"), lambda: _dense("tanh"), r"Relu \(1\).*Tanh \(1\)"),
        (_dense, lambda: _dense(loss=tf.abs), r"Square.* only then.*Abs.* only now"),
        (_dense, lambda: _dense(rate=0.25), "other constants"),
        (_dense, lambda: _dense(epsilon=1e-2), "other constants"),
        (_dense, lambda: _dense(scale=1.5), "other constants"),
        (_control, lambda: _control(share=4), "other constants"),
        (_tables, lambda: _tables(last=2.0), "other constants"),
        (_tables, lambda: _tables(first="one"), "other constants"),
        (_vector_keys, lambda: _vector_keys(last=2.0), "other constants"),
        (_attention, lambda: _attention("float32"), "Cast .* only then"),
        (_terms, lambda: _terms(reversed_=True), "other constants"),
        (_coupled, lambda: _coupled(power=3), "other constants"),
        (_generator, lambda: _generator(dropout=0.2), "other constants"),
        (_generator, lambda: _generator(version="1.0"), "only"),
    ],
)
def test_whatever_is_computed_otherwise_is_told(one, other, told):
    before, now = _described(*one()), _described(*other())
    with pytest.raises(AssertionError, match=told):
        raise AssertionError(computation.difference(before, now))
    assert computation.difference(before, before) is None


def _far(power):
    with tf.init_scope():  # captured, as it is large
        return tf.constant(np.arange(400, dtype=np.float32) ** power)


@tf.function
def _first_less_second(one, other):
    return one - other


@tf.function
def _second_less_first(one, other):
    return other - one


@pytest.mark.parametrize(
    "one, other",
    [
        (lambda x, y: x - y, lambda x, y: y - x),
        (lambda x, y: x * _far(1)[3], lambda x, y: x * _far(2)[3]),
        (
            lambda x, y: tf.unstack(tf.stack([x, y]))[0],
            lambda x, y: tf.unstack(tf.stack([x, y]))[1],
        ),
        (_first_less_second, _second_less_first),
    ],
    ids=["order", "numbers", "results", "arguments"],
)
def test_the_same_operations_connected_otherwise_are_told_apart(one, other):
    """Both have the same operations, and the same numbers but for one constant."""

    def described(compute):
        weights = tf.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0])

        def losses(batch):
            return compute(*(tf.linalg.matvec(batch["x"], w) for w in weights))

        return _described(losses, {"x": _vectors(2)}, [], weights)

    assert computation.difference(described(one), described(one)) is None
    told = computation.difference(described(one), described(other))
    assert told == "its operations have other constants, settings or connections"


def test_gradients_that_a_loss_defines_itself_count():
    def losses(factor):
        @tf.custom_gradient
        def own(values):
            return tf.identity(values), lambda above: factor * above

        weight = tf.Variable(1.0)
        return lambda b: own(weight * b["x"][:, 0]), {"x": _vectors(1)}, [], [weight]

    one, same, other = (_described(*losses(factor)) for factor in (1.0, 1.0, 2.0))
    assert computation.difference(one, same) is None
    assert computation.difference(one, other)


@tf.RegisterGradient("TwiceInTests")
def _twice(_, above):
    return 2 * above


def test_an_identity_whose_gradient_is_another_counts():
    def losses(own):
        weight = tf.Variable(1.0)

        def of(batch):
            graph = tf.compat.v1.get_default_graph()
            named = {"Identity": "TwiceInTests"} if own else {}
            with graph.gradient_override_map(named):
                return tf.identity(weight * batch["x"][:, 0])

        return of, {"x": _vectors(1)}, [], [weight]

    one, same, other = (_described(*losses(own)) for own in (True, True, False))
    assert computation.difference(one, same) is None
    assert computation.difference(one, other)


def _embedded():
    x = np.random.default_rng(1).integers(0, 9, [_ROWS, 5])
    parts = [layers.Embedding(9, 4), layers.GlobalMaxPooling1D()]
    return _of(tf.keras.Sequential(parts), x)


@pytest.mark.parametrize(
    "make",
    [_dense, _embedded, _generator, lambda: _generator("whole", 0.2)],
    ids=["dense", "embedded", "T5", "T5 whole"],
)
def test_another_number_of_replicas_is_the_same_computation(strategy_of, make):
    """A run may go on under another strategy."""
    before = _described(*make())
    with strategy_of(2).scope():
        assert computation.difference(before, _described(*make())) is None


def test_rows_of_another_axis_are_told_apart():
    """Only rows of a variable that is read whole are one operation."""

    def of(gather):
        table = tf.Variable(np.arange(36.0, dtype=np.float32).reshape(6, 6))

        def losses(batch):
            rows = gather(table, batch["x"])
            return tf.reduce_sum(tf.reshape(rows, [_ROWS, -1]), 1)

        return _described(losses, {"x": np.arange(_ROWS)}, [], [table])

    rows = of(lambda table, at: table.sparse_read(at))
    assert not computation.difference(
        rows, of(lambda table, at: tf.gather(table.read_value(), at))
    )
    for other in (
        lambda table, at: tf.gather(table.read_value(), at, axis=1),
        lambda table, at: tf.gather(table.read_value() + 1, at),
        lambda table, at: tf.gather(table.read_value(), at + 1),
    ):
        assert computation.difference(rows, of(other))


def test_constants_that_are_cast_are_told_apart_by_their_values():
    """A shape in a gradient is one or the other, as the strategy has it."""

    def of(number, kind=tf.int64, to=tf.int32):
        def losses(batch):
            tail = tf.raw_ops.Cast(x=tf.constant([number], kind), DstT=to)
            return tf.reshape(batch["x"], tf.concat([[_ROWS], tail[1:]], 0)) + tf.cast(
                tail[0], tf.float32
            )

        return _described(losses, {"x": np.ones(_ROWS, np.float32)}, [], [])

    assert not computation.difference(of(3), of(3, tf.int32, tf.int32))
    for other in (of(4), of(3, tf.float32), of(2**32 + 3)):
        assert computation.difference(of(3), other)


# -- Runs that go on --------------------------------------------------------------


class _Stop(tf.keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise InterruptedError


def _run(directory, activation="relu", loss="mse", steps=6):
    plan = plans.plan(
        epsilon=4.0,
        clip_norm=0.5,
        num_units=60,
        n_is_public=True,
        batch_size=8,
        steps=steps,
    )
    parts = [layers.Dense(3, activation), layers.Dense(1)]
    private = PrivateModel(tf.keras.Sequential(parts), plan, 4)
    if loss == "mse":
        loss = tf.keras.losses.MeanSquaredError(reduction="none")
    private.compile(make_optimizer(plan, 0.1, "sgd"), loss)
    x = np.random.default_rng(0).normal(size=[60, 5]).astype(np.float32)
    with pytest.raises(InterruptedError):
        private.fit(x, x[:, :1], directory=directory, callbacks=[_Stop()])


def test_a_fit_goes_on_with_the_model_and_the_loss_that_it_began_with(tmp_path):
    """Another activation used to go on, under one ledger and the same noise."""
    _run(tmp_path)
    with pytest.raises(ValueError, match=r"Relu \(1\) only then.*Tanh \(1\) only now"):
        _run(tmp_path, "tanh")
    with pytest.raises(ValueError, match="Abs.*Go on with the layers, activations"):
        _run(tmp_path, loss=lambda true, made: tf.abs(true - made))
    assert read_ledger(tmp_path / FILE_NAME).steps_paid == 1
    _run(tmp_path)


def test_runs_that_cannot_be_compared_go_on(tmp_path, caplog):
    """Begun by an older version, or traced by another TensorFlow; damage is told."""
    _run(tmp_path)
    path = tmp_path / checkpoint.STATE / checkpoint.SECRETS
    kept = json.loads(path.read_text())
    began = json.loads(kept["settings"].pop(checkpoint.COMPUTED))
    path.write_text(json.dumps(kept))
    _run(tmp_path, "tanh")
    kept["settings"][checkpoint.COMPUTED] = json.dumps({**began, "tensorflow": "2.14"})
    path.write_text(json.dumps(kept))
    _run(tmp_path, "tanh")
    assert "began with TensorFlow 2.14" in caplog.text
    kept["settings"][checkpoint.COMPUTED] = "{"
    path.write_text(json.dumps(kept))
    with pytest.raises(ValueError, match="does not say what model and loss computed"):
        _run(tmp_path)


if __name__ == "__main__":
    print(json.dumps(_all(int(sys.argv[1]))))
