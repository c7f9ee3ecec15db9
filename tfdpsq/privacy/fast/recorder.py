"""Records that rules keep while layers run, and the factors made of them.

The weights are read with the tape stopped, so they are constants to it: it spends
nothing on their gradients, and any *other* read of a weight that matters for the
loss shows up as a gradient that no rule accounts for. Not so where the loss itself
takes derivatives through a layer, as a gradient penalty does: only `check`, which
leaves the reads on the tape, finds those.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.keras_choice import keras2 as keras
from tfdpsq.privacy.fast.factored import (
    Direct,
    Lookup,
    Outer,
    Use,
    full_precision,
    grouped,
    merge,
    precise,
)


class _Entry(NamedTuple):
    variable: tf.Variable
    layer: str
    output: int
    folded: int  # positions of each example that are in the first dimension
    finish: Callable[[tf.Tensor], Use]


class Recorder:
    """Collects, for each use of a wanted weight, how to get its gradients.

    A rule computes its layer's output from `read` weights and calls one of
    `outer`, `lookup` and `direct` for every trainable weight it used. The tensor
    given as `output` must be the one that the rest of the model goes on with, and
    its first dimension must be the examples.

    Attributes:
      layer: the layer being run.
      outputs: the recorded outputs, each once.
      entries: the recorded uses.
      mismatches: (layer's name, relative difference), where outputs were compared.
      strays: wanted weights that matter for the losses outside every rule.
      rows: B, to be set once losses are known and before any backward pass.
    """

    def __init__(
        self,
        tape: tf.GradientTape,
        variables: Sequence[tf.Variable],
        comparing: Any = None,
        rows: int = 0,
    ):
        """Starts an empty record.

        Args:
          tape: the tape that is recording the forward pass.
          variables: the weights whose gradients are wanted; others cost nothing.
          comparing: given, leave reads of weights on the tape, and compare each output
            with that of the layer's own `call`, converted in this context of
            autograph; see `check`.
          rows: B, where it is known before the losses are; else 0.
        """
        self.layer: Any = None
        self.outputs: list[tf.Tensor] = []
        self.entries: list[_Entry] = []
        self.mismatches: list[tuple[str, tf.Tensor]] = []
        self.strays: list[tf.Variable] = []
        self.rows = rows
        self.comparing = comparing
        self.tape = tape
        self._wanted = {variable_key(v) for v in variables}
        self._graph = None if tf.executing_eagerly() else _graph()
        self._folded = 1
        self._silent = False
        self._finished: dict[int, list[Use]] = {}

    def wants(self, variable: tf.Variable) -> bool:
        """Returns whether the weight's gradient is wanted."""
        return variable_key(variable) in self._wanted

    def read(self, variable: tf.Variable) -> tf.Tensor:
        """The weight's value, as the layer would read it: autocast included."""
        with self.off_tape():
            return tf.convert_to_tensor(variable)

    def off_tape(self) -> contextlib.AbstractContextManager[None]:
        """While inside, nothing is differentiated, unless outputs are compared.

        TensorFlow stops for more than that: derivatives that a loss takes forward, by
        an accumulator, are no longer recorded afterwards. What they add to a gradient
        is then lost here, and `check` finds it where it does not stop.
        """
        return (
            contextlib.nullcontext() if self.comparing else self.tape.stop_recording()
        )

    def outer(
        self,
        variable: tf.Variable,
        inputs: tf.Tensor,
        output: tf.Tensor,
        transposed: bool = False,
        input_axes: int = 1,
        output_axes: int = 1,
    ) -> None:
        """Records output = inputs · W (+ anything), W the weight as a matrix.

        Args:
          variable: the weight; its shape is that of an m × n matrix, or what one
            reshapes to.
          inputs: [B, ..., m].
          output: [B, ..., n], the product before any nonlinearity.
          transposed: output = inputs · Wᵀ instead, inputs [B, ..., n] and output
            [B, ..., m].
          input_axes: how many last axes of `inputs` make up m (or n) together.
          output_axes: the same of `output`.
        """
        if not self.wants(variable):
            return

        def finish(gradient: tf.Tensor) -> Use:
            sides = (_positions(inputs, input_axes), _positions(gradient, output_axes))
            return Outer(*(reversed(sides) if transposed else sides))

        self._add(variable, output, finish, inputs)

    def lookup(self, variable: tf.Variable, ids: tf.Tensor, output: tf.Tensor) -> None:
        """Records output = W[ids].

        Args:
          variable: the weight, [m, n].
          ids: [B, ...] integers.
          output: [B, ..., n].
        """
        if not self.wants(variable):
            return

        def finish(gradient: tf.Tensor) -> Use:
            # XLA reads the nearest row for an id that is none, and adds to no row.
            known = (ids >= 0) & (ids < variable.shape[0])
            gradient = tf.where(known[..., tf.newaxis], gradient, 0)
            return Lookup(_positions(ids), _positions(gradient, 1))

        self._add(variable, output, finish, ids)

    def direct(
        self,
        variable: tf.Variable,
        output: tf.Tensor,
        per_example: Callable[[tf.Tensor], tf.Tensor],
    ) -> None:
        """Records a use whose per-example gradients are small enough to form.

        Args:
          variable: the weight.
          output: [B, ...].
          per_example: maps the gradient by `output`, its shape and float32, to
            the gradient by the weight for each example, [B, *weight's shape].
        """
        if not self.wants(variable):
            return

        def finish(gradient: tf.Tensor) -> Use:
            values = per_example(full_precision(gradient))
            return Direct(tf.reshape(values, [-1, *variable.shape]))

        self._add(variable, output, finish)

    def of_known_rows(self, value: Any) -> Any:
        """Returns a layer's input with its number of rows, where TensorFlow lost it.

        As behind `TextVectorization`. Another number ends the step with an error.
        """
        unknown = tf.is_tensor(value) and value.shape.rank and value.shape[0] is None
        if not unknown or not self.rows or not isinstance(value, tf.Tensor):
            return value
        shape = [self.rows * self._folded, *value.shape[1:]]
        return tf.ensure_shape(value, shape)

    def folding(self, positions: int) -> contextlib.AbstractContextManager[None]:
        """While inside, layers run on [B · positions, ...], example by example.

        For rules of layers that fold a dimension into the first, as Keras's
        TimeDistributed does: row i · positions + t must be example i's. The
        gradients of an example's positions then add up, cross terms included.

        Args:
          positions: how many of them every example has.
        """
        return replaced(self, _folded=self._folded * positions)

    def silent(self) -> contextlib.AbstractContextManager[None]:
        """While inside, rules run and write nothing down."""
        return replaced(self, _silent=True)

    def part(self, tape: tf.GradientTape) -> contextlib.AbstractContextManager[None]:
        """While inside, a part of the forward pass is recorded again, on its own tape.

        Args:
          tape: what records it. `finish_part` must be called before this ends.
        """
        return replaced(self, tape=tape, outputs=[], entries=[])

    def finish_part(
        self, gradients_by: Callable[[list[Any]], Sequence[tf.Tensor | None]]
    ) -> None:
        """Turns what a part recorded into uses, which `uses` returns with the rest.

        A weight's factors are put into their cheapest form at once, so that what they
        are made of can be let go.

        Args:
          gradients_by: the gradients of the summed losses by a list of tensors and
            variables.
        """
        watched = self.tape.watched_variables()
        strays = [v for v in watched if variable_key(v) in self._wanted]
        gradients = gradients_by([*self.outputs, *strays])
        count = len(self.outputs)
        self.strays += [v for v, g in zip(strays, gradients[count:]) if g is not None]
        shapes = {variable_key(e.variable): e.variable.shape for e in self.entries}
        for key, uses in self._uses(gradients[:count]).items():
            merged = merge(uses, shapes[key].as_list())
            self._finished.setdefault(key, []).extend(merged)

    def uses(self, gradients: Sequence[tf.Tensor | None]) -> dict[int, list[Use]]:
        """Returns the uses recorded, once the backward pass is done.

        Args:
          gradients: of the summed losses by each of `outputs`; `None` for those
            that no loss depends on.

        Returns:
          For each variable's key, its uses, in full precision; variables without
          any are left out.

        Raises:
          InputError: a layer ran on something else than `rows` examples.
        """
        found = self._uses(gradients)
        for key, uses in self._finished.items():
            found.setdefault(key, []).extend(uses)
        return found

    def _uses(self, gradients: Sequence[tf.Tensor | None]) -> dict[int, list[Use]]:
        for entry in self.entries:
            first = self.outputs[entry.output].shape[0]
            wanted = self.rows * entry.folded
            # Keras computes some outputs twice, and drops one: no loss depends on it.
            if first != wanted and gradients[entry.output] is not None:
                raise validation.InputError(
                    f"layer {entry.layer!r} ran on a tensor whose first dimension "
                    f"is {first}, not {wanted} for the {self.rows} examples of the "
                    "losses, so its gradient cannot be split by example. Give "
                    f"it inputs of static shape [{wanted}, ...]: broadcast what all "
                    "examples share, and do not fold other dimensions into the "
                    "first."
                )
        found: dict[int, list[Use]] = {}
        for entry in self.entries:
            gradient = gradients[entry.output]
            if gradient is not None:
                use = precise(entry.finish(tf.convert_to_tensor(gradient)))
                use = grouped(use, entry.folded)
                found.setdefault(variable_key(entry.variable), []).append(use)
        return found

    def running(
        self, layer: keras.layers.Layer
    ) -> contextlib.AbstractContextManager[None]:
        """While `layer`'s rule runs; rules of layers inside it may run within."""
        return replaced(self, layer=layer)

    def compare(self, layer: keras.layers.Layer, one: Any, other: Any) -> None:
        """Notes how far two outputs of a layer differ, relative to the larger."""
        for a, b in zip(tf.nest.flatten(one), tf.nest.flatten(other)):
            a, b = tf.cast(a, tf.float64), tf.cast(b, tf.float64)
            size = tf.maximum(tf.reduce_max(tf.abs(b)), 1e-30)
            self.mismatches.append((layer.name, tf.reduce_max(tf.abs(a - b)) / size))

    def _add(
        self,
        variable: tf.Variable,
        output: tf.Tensor,
        finish: Callable[[tf.Tensor], Use],
        captured: tf.Tensor | None = None,
    ) -> None:
        if self._silent:
            return
        graph = None if tf.executing_eagerly() else _graph()
        if graph is not self._graph:
            raise validation.InputError(
                f"layer {self.layer.name!r} runs inside a tf.function, tf.cond or "
                "tf.while_loop of the model, from where nothing can be recorded. "
                "Call it outside, or choose another engine."
            )
        if captured is not None and captured.shape[0] != output.shape[0]:
            raise validation.InputError(
                f"layer {self.layer.name!r} has inputs of shape {captured.shape} "
                f"but an output of shape {output.shape}: the first dimension must "
                "be the same, the examples."
            )
        index = next(
            (i for i, known in enumerate(self.outputs) if known is output), None
        )
        if index is None:
            index = len(self.outputs)
            self.outputs.append(output)
            # The first layer's output depends on nothing that the tape watches.
            self.tape.watch(output)
        self.entries.append(
            _Entry(variable, self.layer.name, index, self._folded, finish)
        )


@contextlib.contextmanager
def replaced(target: Any, **attributes: Any) -> Iterator[None]:
    """While inside, `target` has these attributes instead of its own.

    They are put where Keras does not look: its `__setattr__` would track them.
    """
    before = {name: vars(target)[name] for name in attributes if name in vars(target)}
    vars(target).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del vars(target)[name]
        vars(target).update(before)


def variable_key(variable: tf.Variable) -> int:
    """One number for one weight, in whichever of its guises it appears.

    A weight is wrapped for mixed precision, and has a component on each replica,
    which is what the tape sees.
    """
    variable = getattr(variable, "_variable", variable)
    container = getattr(variable, "_distributed_container", None)
    return id((container() if container is not None else None) or variable)


def require_distinct(variables: Sequence[tf.Variable]) -> None:
    """Refuses a weight that is listed twice.

    A row's norm would count it once and its update take it twice.

    Raises:
      InputError: a variable is listed twice.
    """
    seen: set[int] = set()
    for variable in variables:
        if variable_key(variable) in seen:
            raise validation.InputError(
                f"variables name the weight {variable.name!r} twice, as lists of two "
                "models that share a layer do: it would be clipped once and trained "
                "twice. List each weight once, for example the trainable_variables of "
                "one model that holds both."
            )
        seen.add(variable_key(variable))


def _graph() -> Any:
    return tf.compat.v1.get_default_graph()


def _positions(values: tf.Tensor, axes: int | None = None) -> tf.Tensor:
    """[B, ..., features] as [B, T, m]; ids, which have no axes of features, [B, T]."""
    rows, *sizes = values.shape.as_list()
    split = len(sizes) - (axes or 0)
    positions, features = sizes[:split], sizes[split:]
    length = -1 if None in positions else math.prod(positions)
    width = [] if axes is None else [math.prod(features)]
    return tf.reshape(values, [rows, length, *width])
