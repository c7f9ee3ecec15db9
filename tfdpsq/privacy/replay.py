"""Dropout that a resumed run repeats: layers' random numbers from secret keys.

Keras's random layers draw from TensorFlow's stateful generators, whose state no
checkpoint holds, so a step replayed after an interruption would be another step.
While `replayable` is open they draw statelessly instead, each call with a key of
its own. The keys are secret, because dropout takes part in the mechanism: were the
masks known, a row's gradient would depend on its place in the batch, and so on who
else was drawn.

A step must be repeated with the same random numbers because its noise is the same: two
tries with other masks are two clipped sums under one noise, and their difference has no
noise at all. Neither may show more than the other. What a model draws from `tf.random`
by itself cannot be repeated, and TensorFlow stores its seed, of 31 bits, in the graph.
So `require_repeatable` refuses it, also where a run is never resumed.

Every row must have random numbers of its own. A row's clipped gradient is a function of
the row and of its numbers. If these are independent from row to row, one row more or
less leaves the law of the other rows' sum as it was, whatever places they move to. One
draw for all rows of a microbatch (a crop, `Dropout(noise_shape=(1, None))`, noise on a
weight) breaks this: a row that moves to the next microbatch, or is taken by itself
because another row has no finite gradient, gets another draw, and the sum can move by
more than one clip norm. `require_draws_of_rows` refuses that. Rows that are declared to
depend on each other form one microbatch, whose sensitivity covers them all.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.core.framework.node_def_pb2 import NodeDef as Node

from tfdpsq import dropout_masks, validation
from tfdpsq.keras_choice import keras2 as keras
from tfdpsq.privacy.fast.capture import converted, flatten, plain_errors
from tfdpsq.privacy.fast.recorder import replaced
from tfdpsq.privacy.randomness import noise, same_draws
from tfdpsq.privacy.terms import Coupled

# TensorFlow's operations whose random numbers follow from a state of the process or of
# a `tf.random.Generator`; the stateless ones are none of them.
_DRAWN_FROM_STATE = re.compile(
    r"Random(?!Shuffle(Queue|Dataset)|.*Grad$).*|NonDeterministicInts|Multinomial"
    r"|(Parameterized)?TruncatedNormal|Rng(ReadAndSkip|Skip)|\w+CandidateSampler"
    r"|Stateful(Uniform|StandardNormal|TruncatedNormal|RandomBinomial)\w*"
    r"|SampleDistortedBoundingBox\w*|Fractional(Max|Avg)Pool"
)
# Those that draw by a key that they are given.
_DRAWN_BY_KEY = re.compile(
    r"Stateless(?!RandomGet|While|If|Case|PartitionedCall).*|RandomIndexShuffle"
)
# A scope of draws whose shapes are known without looking at operations: those here, and
# dropout of this package's T5s (`layers.seeded_dropout`), whose rows come first.
_KEYED = "tfdpsq_keyed_draw"
# A scope of seeds that layers draw by themselves with.
_SEED = "tfdpsq_seed"
# Operations that a seed may go through on its way to a draw, and inputs of a draw that
# it may be.
_PASSES_ON = frozenset(
    "Identity Cast Bitcast StridedSlice Pack Reshape StatelessRandomGetKeyCounter "
    "StatelessRandomGetKeyCounterAlg".split()
)
_SEEDS = frozenset(("seed", "key", "counter"))
# Units of a loss that is looked into: enough for a thousand rows or more, of which no
# width of a model is a multiple.
_PRIMES = (3, 5, 11, 31, 101, 331, 1009)
_LOOKED_INTO = 1000


@contextlib.contextmanager
def replayable(
    layers: Iterable[tf.Module],
    seed: tf.Tensor,
    step: tf.Tensor | int,
    microbatch: tf.Tensor | int,
    draws: list[Draw] | None = None,
    redrawn: Redrawn | None = None,
) -> Iterator[None]:
    """While inside, the layers' random numbers follow from the arguments.

    Args:
      layers: models and layers; those inside them, however deep, count too. Random
        numbers that a model draws by itself, from `tf.random`, are not affected.
      seed: [2] int64, secret.
      step: scalar integer, the logical step.
      microbatch: scalar integer, unique within the step, over all replicas.
      draws: if given, what the layers draw is added to it.
      redrawn: if given, whose numbers are others than without it.
    """
    count = 0
    # A key of its own for each forward pass: microbatches have too many numbers for the
    # places of a draw.
    upper = tf.bitwise.bitwise_xor(seed[1], tf.cast(step, tf.int64))
    counter = tf.stack([tf.cast(microbatch, tf.int64), upper])
    pass_key = noise.DrawKey(
        tf.bitcast(seed[:1], tf.uint64), tf.bitcast(counter, tf.uint64)
    )
    with tf.name_scope(_KEYED):
        words = noise.integers([2], pass_key, tf.int64)

    def key() -> tf.Tensor:
        nonlocal count
        count += 1
        return tf.stack([words[0], words[1] + count, 0])

    with contextlib.ExitStack() as stack:
        for layer in flatten(layers):
            if hasattr(layer, "_random_generator"):
                generator = _StatelessGenerator(key, layer.name, draws, redrawn)
                stack.enter_context(replaced(layer, _random_generator=generator))
        yield


class Draw(NamedTuple):
    """Random numbers that a layer draws.

    Attributes:
      layer: its name, or that of an operation.
      shape: of the numbers, as far as it is known.
    """

    layer: str
    shape: tf.TensorShape


class Redrawn(NamedTuple):
    """The unit that gets new random numbers; all others keep theirs.

    Attributes:
      unit: scalar int32, its number; -1 for none.
      units: of the batch.
    """

    unit: tf.Tensor
    units: int


class Traced(NamedTuple):
    """A loss that was looked into; see `traced`.

    Attributes:
      nodes: all operations, those of functions that are called included.
      function: the concrete function, which returns losses, and gradients where the
        loss or a layer defines its own.
      draws: numbers drawn by secret keys, except for dropout of this package's T5s,
        whose rows come first.
    """

    nodes: list[Node]
    function: Any
    draws: list[Draw]


def traced(
    per_example_losses: Callable[[Mapping[str, tf.Tensor]], object],
    batch: Mapping[str, np.ndarray],
    layers: Iterable[tf.Module],
    variables: Sequence[tf.Variable] = (),
    rows: int | None = None,
) -> Traced:
    """Looks into a loss, and into its gradient where that has its own.

    The loss is traced, not run. Code inside `tf.py_function` cannot be looked into.

    Args:
      per_example_losses: as for `make_logical_step`.
      batch: a few rows, "weights" included.
      layers: the model, for its random layers.
      variables: what is differentiated by.
      rows: of the batches to be, where a loss may count on their number.

    Raises:
      InputError: what the loss raises.
    """
    rows = rows or len(next(iter(batch.values())))
    # On several replicas, those of the first: outside of them a variable has no handle.
    local = tf.distribute.get_strategy().experimental_local_results
    variables = [local(variable)[0] for variable in variables]
    of_caller = converted(per_example_losses)

    def tensors_of(values: Any) -> list[tf.Tensor]:
        flat = tf.nest.flatten(values, expand_composites=True)
        return [value for value in flat if tf.is_tensor(value)]

    def losses(tensors: Mapping[str, tf.Tensor]) -> list[tf.Tensor]:
        with replayable(layers, tf.constant([1, 2], tf.int64), 0, 0, draws):
            with tf.GradientTape() as tape:
                found = of_caller(tensors)
            if isinstance(found, Coupled):
                made = found.gradient(tf.one_hot(0, rows), variables)
                return tensors_of([found.losses, made])
            gradients: list[Any] = []
            # Other gradients are made of operations that neither draw nor write.
            if _defines_gradients(nodes_of(tf.compat.v1.get_default_graph())):
                gradients = tape.gradient(found, variables)
        return tensors_of([found, gradients])

    draws: list[Draw] = []
    tensors = {name: tf.convert_to_tensor(value) for name, value in batch.items()}
    given = {
        name: tf.TensorSpec([rows, *tensor.shape[1:]], tensor.dtype)
        for name, tensor in tensors.items()
    }
    made = tf.function(losses, autograph=False)
    with plain_errors():
        try:
            function = made.get_concrete_function(given)
        except TypeError as error:
            if "out of scope" not in str(error):
                raise
            raise validation.InputError(
                "a tf.function inside the model or the loss keeps the random numbers "
                "that it was traced with. Leave @tf.function out there: the step is "
                "compiled as a whole."
            ) from None
    nodes = nodes_of(function.graph)
    return Traced(nodes, function, [*draws, *_drawn_otherwise(nodes, function.graph)])


def require_repeatable(nodes: Iterable[Node]) -> None:
    """Refuses a loss whose random numbers are neither secret nor repeatable.

    Raises:
      InputError: it draws random numbers from a state that no saved state holds, and
        whose seed no secret is large enough for.
    """
    found = sorted({node.name for node in nodes if draws_from_state(node.op)})
    if found:
        raise validation.InputError(
            f"the loss draws random numbers from TensorFlow's own state ({found[0]}). "
            "Their seed is 31 bits that are stored in the graph, and a resumed run "
            "cannot repeat them: its noise would be used twice, on two different sums. "
            "Draw them in Keras's random layers, and name the model in `layers`."
        )


def require_draws_of_rows(
    per_example_losses: Callable[[Mapping[str, tf.Tensor]], object],
    batch: Mapping[str, np.ndarray],
    layers: Iterable[tf.Module],
    together: int,
) -> None:
    """Refuses random numbers of which not every row has its own; see above.

    The loss is traced for a number of rows that no width of a model is a multiple of.
    Numbers can be the rows' own if their first dimension is; whether they are used so
    `require_own_draws` tries.

    Arguments are those of `traced`, and `together`, the rows that are clipped together.

    Raises:
      InputError: names the layer, and the shape of what it draws; or the loss cannot be
        traced for that many rows.
    """
    rows = together * next(p for p in _PRIMES if p * together >= _LOOKED_INTO)
    try:
        draws = traced(per_example_losses, batch, layers, rows=rows).draws
    except validation.InputError:
        raise
    except (ValueError, TypeError, OverflowError, tf.errors.OpError) as error:
        raise validation.InputError(
            f"the loss could not be traced for {rows} rows ({type(error).__name__}), "
            "so it cannot be seen whether rows share random numbers. Let it take any "
            "number of rows, or train without random layers."
        ) from None
    for draw in draws:
        first = draw.shape[0] if draw.shape.rank else None
        if not first or first % rows:
            raise validation.InputError(
                f"{draw.layer} draws random numbers of shape {draw.shape} for {rows} "
                "rows, of which not every row can be seen to have its own: a row more "
                "could change the numbers of other rows, so clipping by row bounds "
                "nothing. Draw them with the rows as first dimension, and of a "
                "known shape (tf.ensure_shape), as Dropout without noise_shape does, "
                "or prepare the rows before fit."
            )


def require_own_draws(
    per_example_losses: Callable[[Mapping[str, tf.Tensor]], object],
    batch: Mapping[str, np.ndarray],
    layers: Iterable[tf.Module],
    together: int,
    tolerance: float,
) -> None:
    """Refuses random numbers of a row that another row's loss depends on.

    The first unit gets new numbers, then the last; all others keep theirs. What a layer
    draws by itself, from a seed that it asked for, is cut out of the traced loss and
    given back with other numbers for the unit.

    Args:
      per_example_losses: returns a loss for each row.
      batch: a few rows whose losses are finite, "weights" included.
      layers: the model.
      together: rows that are clipped together.
      tolerance: by which losses may differ.

    Raises:
      InputError: another unit's loss moved.
    """
    rows = len(batch["weights"])
    units = rows // together
    of_caller = converted(per_example_losses)

    def losses(
        tensors: Mapping[str, tf.Tensor], unit: tf.Tensor, key: tf.Tensor
    ) -> Any:
        with replayable(layers, key, 0, 0, redrawn=Redrawn(unit, units)):
            return of_caller(tensors)

    tensors = {name: tf.convert_to_tensor(value) for name, value in batch.items()}
    redrawn = _Redrawing(losses, tensors, units)
    before = redrawn(-1)
    allowed = tolerance * np.maximum(np.abs(before), 1e-3)
    for unit in sorted({0, units - 1}):
        now = redrawn(unit)
        others = np.arange(rows) // together != unit
        if not np.all((np.abs(now - before) <= allowed)[others]):
            raise validation.InputError(
                "the random numbers that one row is dealt move the loss of another, as "
                "where a layer averages, sorts or shuffles them over the batch, so "
                "clipping by row bounds nothing. Let every row use its own alone."
            )


class _Redrawing:
    """The losses of a batch in which one unit has other random numbers.

    Layers draw by themselves with operations that a loss has at its top level, by
    `require_draws_of_rows`. These are found in its graph, and fed.
    """

    def __init__(self, losses: Callable, tensors: Mapping[str, tf.Tensor], units: int):
        names = sorted(tensors)

        def flat(unit: tf.Tensor, key: tf.Tensor, *values: tf.Tensor) -> Any:
            return losses(dict(zip(names, values)), unit, key)

        self._units = units
        self._values = [tensors[name] for name in names]
        whole = tf.compat.v1.wrap_function(
            flat,
            [
                tf.TensorSpec([], tf.int32),
                tf.TensorSpec([2], tf.int64),
                *(tf.TensorSpec(value.shape, value.dtype) for value in self._values),
            ],
        )
        drawn = [
            op.outputs[0]
            for op in whole.graph.get_operations()
            if _DRAWN_BY_KEY.fullmatch(op.type) and _KEYED not in op.name
        ]
        given = whole.inputs[: 2 + len(self._values)]
        self._draw = whole.prune(given, drawn) if drawn else lambda *_: []
        self._losses = whole.prune([*given, *drawn], whole.outputs[0])

    def __call__(self, unit: int) -> np.ndarray:
        """Returns the losses; -1 is not a unit."""
        numbers, others = (
            self._draw(tf.constant(-1), tf.constant(key, tf.int64), *self._values)
            for key in ([1, 2], [3, 4])
        )
        key = tf.constant([1, 2], tf.int64)
        given = [
            self._of_unit(unit, first, other) for first, other in zip(numbers, others)
        ]
        found = self._losses(tf.constant(unit), key, *self._values, *given)
        return np.asarray(found, np.float64)

    def _of_unit(self, unit: int, numbers: tf.Tensor, others: tf.Tensor) -> tf.Tensor:
        size = numbers.shape[0]
        changed = np.arange(size) // (size // self._units) == unit
        column = np.reshape(changed, [-1] + [1] * (numbers.shape.rank - 1))
        return tf.where(column, others, numbers)


def require_seeds_draw(graph: tf.Graph) -> None:
    """Refuses a seed that is used as a number, which all rows would share."""
    waiting = [op for op in graph.get_operations() if _SEED in op.name.split("/")[:-1]]
    while waiting:
        for output in waiting.pop().outputs:
            for user in output.consumers():
                if _SEED in user.name or user.type in _PASSES_ON:
                    waiting.append(user)
                elif not _is_seeded_by(user, output):
                    raise validation.InputError(
                        f"the loss uses a seed as a number ({user.name}), or where it "
                        "cannot be followed: not every row can be seen to have its own "
                        "numbers, so clipping by row bounds nothing. Draw with it, by "
                        "tf.random.stateless_uniform and the like and outside of loops "
                        "and branches, with the rows as first dimension."
                    )


def _is_seeded_by(user: tf.Operation, seed: tf.Tensor) -> bool:
    """Returns whether an operation draws, and takes a tensor as its seed alone."""
    arguments = user.op_def.input_arg if user.op_def is not None else ()
    return bool(_DRAWN_BY_KEY.fullmatch(user.type)) and all(
        argument.name in _SEEDS
        for argument, value in zip(arguments, user.inputs)
        if value is seed
    )


def require_secret_seeds(graph: tf.Graph) -> None:
    """Refuses numbers of a seed that no secret key is behind: they are of a place."""
    operations = graph.get_operations()
    secret = {op.name for op in operations if _SEED in op.name.split("/")[:-1]}
    for op in operations:  # inputs come before what takes them
        if any(value.op.name in secret for value in op.inputs):
            secret.add(op.name)
        elif _DRAWN_BY_KEY.fullmatch(op.type) and _KEYED not in op.name:
            raise validation.InputError(
                f"the loss draws random numbers from a seed of its own ({op.name}), "
                "which are the same in every step: those of a row follow from its "
                "place, and the rows drawn before it decide that. Draw in Keras's "
                "random layers, or from make_seed_for_stateless_op of their generator."
            )


def _drawn_otherwise(nodes: Iterable[Node], graph: tf.Graph) -> list[Draw]:
    """Returns what operations draw that are not those of `_StatelessGenerator`."""
    drawn = {
        node.name
        for node in nodes
        if _DRAWN_BY_KEY.fullmatch(node.op) and _KEYED not in node.name
    }
    known = {
        op.name: op.outputs[0].shape for op in graph.get_operations() if op.outputs
    }
    unknown = tf.TensorShape(None)  # inside of a loop, a branch or a function
    return [Draw(name, known.get(name, unknown)) for name in sorted(drawn)]


def draws_from_state(operation: str) -> bool:
    """Returns whether a type of operation draws numbers that follow from a state."""
    return _DRAWN_FROM_STATE.fullmatch(operation) is not None


def nodes_of(graph: tf.Graph) -> list[Node]:
    """Returns the nodes of a graph and of all functions in it."""
    made = graph.as_graph_def()
    return [*made.node, *(n for f in made.library.function for n in f.node_def)]


def _defines_gradients(nodes: Iterable[Node]) -> bool:
    """Returns whether some operation has a gradient written by hand."""
    key = "_gradient_op_type"
    return any(key in n.attr and n.attr[key].s.startswith(b"Custom") for n in nodes)


class _StatelessGenerator:
    """A random generator for a Keras layer that takes a new key for each draw.

    The names and arguments are those of Keras's `backend.RandomGenerator`.
    """

    def __init__(
        self,
        key: Callable[[], tf.Tensor],
        layer: str,
        draws: list[Draw] | None,
        redrawn: Redrawn | None,
    ):
        self._key = key
        self._layer = layer
        self._draws = draws
        self._redrawn = redrawn

    def _maybe_init(self) -> None:
        """Called when a layer is first built; there is nothing to initialise."""

    def random_normal(
        self,
        shape: Any,
        mean: Any = 0.0,
        stddev: Any = 1.0,
        dtype: Any = None,
        nonce: Any = None,
    ) -> Any:
        dtype = dtype or keras.backend.floatx()
        drawn = self._drawn(lambda: noise.normal(shape, self._draw_key(), dtype))
        return mean + stddev * drawn

    def random_uniform(
        self,
        shape: Any,
        minval: Any = 0.0,
        maxval: Any = None,
        dtype: Any = None,
        nonce: Any = None,
    ) -> Any:
        dtype = dtype or keras.backend.floatx()

        def draw() -> tf.Tensor:
            seed = noise.integers([2], self._draw_key(), tf.int64)
            return tf.random.stateless_uniform(shape, seed, minval, maxval, dtype)

        return self._drawn(draw)

    def truncated_normal(
        self,
        shape: Any,
        mean: Any = 0.0,
        stddev: Any = 1.0,
        dtype: Any = None,
        nonce: Any = None,
    ) -> Any:
        dtype = dtype or keras.backend.floatx()

        def draw() -> tf.Tensor:
            seed = noise.integers([2], self._draw_key(), tf.int64)
            return tf.random.stateless_truncated_normal(
                shape, seed, mean, stddev, dtype
            )

        return self._drawn(draw)

    def dropout(self, inputs: Any, rate: Any, noise_shape: Any = None) -> Any:
        shape = tf.shape(inputs)
        if noise_shape is not None and not tf.is_tensor(noise_shape):
            sizes = enumerate(noise_shape)
            noise_shape = [shape[i] if size is None else size for i, size in sizes]
        if noise_shape is not None:
            shape = tf.convert_to_tensor(noise_shape, tf.int32)
        known = tf.fill(shape, False).shape  # as far as shapes are inferred
        shape = known.as_list() if known.is_fully_defined() else shape
        size = dropout_masks.words_for(shape)
        words = self._drawn(
            lambda: noise.integers(size, self._draw_key(), tf.uint32), known
        )
        kept = dropout_masks.kept(words, rate, shape)
        return tf.where(kept, inputs / (1 - rate), tf.zeros_like(inputs))

    def dropout_seed(self) -> tf.Tensor:
        """[3] int64, for layers of this package; see `layers.seeded_dropout`."""
        same_draws.not_by_unit()
        return self._key()

    def make_seed_for_stateless_op(self) -> Any:
        """[2] int64, of which XLA keeps 32 bits each: for layers that draw with it."""
        same_draws.not_by_unit()
        with tf.name_scope(_KEYED):
            seed = noise.integers([2], self._draw_key(), tf.int64)
        with tf.name_scope(_SEED):
            return tf.identity(seed)

    def _drawn(
        self, draw: Callable[[], tf.Tensor], shape: tf.TensorShape | None = None
    ) -> tf.Tensor:
        """Draws, and notes the shape of what is drawn for if it is another one."""
        with tf.name_scope(_KEYED):
            drawn = same_draws.of_first_unit(draw())
            if self._draws is not None:
                noted = drawn.shape if shape is None else shape
                self._draws.append(Draw(f"layer {self._layer!r}", noted))
            if self._redrawn is None:
                return drawn
            # Of every unit as many numbers, one unit after the other.
            size = drawn.shape[0]
            owners = tf.range(size) // (size // self._redrawn.units)
            column = [-1] + [1] * (drawn.shape.rank - 1)
            changed = tf.reshape(owners == self._redrawn.unit, column)
            return tf.where(changed, draw(), drawn)

    def _draw_key(self) -> noise.DrawKey:
        key, upper, lower = tf.unstack(tf.bitcast(self._key(), tf.uint64))
        return noise.DrawKey(key[tf.newaxis], tf.stack([lower, upper]))

    def make_legacy_seed(self) -> Any:
        return None
