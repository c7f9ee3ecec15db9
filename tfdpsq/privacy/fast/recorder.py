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
from tfdpsq.privacy.fast import factored


class UncoveredError(validation.InputError):
    """A weight is used in a way that no rule covers."""


class _Entry(NamedTuple):
    variable: int  # its place among the variables
    output: tf.Tensor
    layer: str
    folded: int
    finish: Callable[[tf.Tensor], factored.Use]


class Recorder:
    """Collects, for each use of a wanted weight, how to get its gradients.

    A rule computes its layer's output from `read` weights and calls one of
    `outer`, `lookup` and `direct` for every trainable weight it used. The tensor
    given as `output` must be the one that the rest of the model goes on with, and
    its first dimension must be the examples.

    Attributes:
      tape: for the forward pass.
      variables: the weights whose gradients are wanted; others cost nothing.
      comparing: if given, reads of weights stay on the tape, and each output is
        compared with that of the layer's own `call`, converted in this context of
        autograph; see `check`.
      rows: B, set as soon as there are losses.
      layer: the layer being run.
      folded: positions of each example in the first dimension, row i · folded + t being
        example i's; set by `replaced` in rules such as TimeDistributed's. Their
        gradients add up, cross terms included.
      silent: rules run and write nothing down.
      mismatches: (layer's name, relative difference), where outputs were compared.
      strays: wanted weights that matter for the losses outside every rule, and the
        gradients by them there; all reads if outputs are compared.
    """

    def __init__(self, variables: Sequence[tf.Variable], comparing: Any = None):
        """Starts an empty record."""
        self.tape = tf.GradientTape()
        self.variables = list(variables)
        self.comparing = comparing
        self.rows = 0
        self.layer: Any = None
        self.mismatches: list[tuple[str, tf.Tensor]] = []
        self.strays: list[tuple[tf.Variable, tf.Tensor]] = []
        keys = map(variable_key, self.variables)
        self._places = {key: place for place, key in enumerate(keys)}
        self._graph = _graph()
        self.folded = 1
        self.silent = False
        self._read: list[tf.Variable] = []
        self._entries: list[_Entry] = []
        self._adopted: list[list[factored.Use]] = [[] for _ in self.variables]

    def wants(self, variable: tf.Variable) -> bool:
        """Returns whether the weight's gradient is wanted."""
        return variable_key(variable) in self._places

    def read(self, variable: tf.Variable) -> tf.Tensor:
        """The weight's value, as the layer would read it: autocast included."""
        if self.comparing:
            return tf.convert_to_tensor(variable)
        with self.tape.stop_recording():
            return tf.convert_to_tensor(variable)

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

        def finish(gradient: tf.Tensor) -> factored.Use:
            rows = gradient.shape[0]
            left = _positions(factored.full_precision(inputs), rows, input_axes)
            right = _positions(gradient, rows, output_axes)
            return (
                factored.Outer(right, left)
                if transposed
                else factored.Outer(left, right)
            )

        self._add(variable, output, finish)

    def lookup(self, variable: tf.Variable, ids: tf.Tensor, output: tf.Tensor) -> None:
        """Records output = W[ids].

        Args:
          variable: the weight, [m, n].
          ids: [B, ...] integers.
          output: [B, ..., n].
        """

        def finish(gradient: tf.Tensor) -> factored.Use:
            # XLA reads the nearest row for an id that is none, and adds to no row.
            known = (ids >= 0) & (ids < variable.shape[0])
            rows = gradient.shape[0]
            gradient = tf.where(known[..., tf.newaxis], gradient, 0)
            return factored.Lookup(
                tf.reshape(ids, [rows, -1]), _positions(gradient, rows, 1)
            )

        self._add(variable, output, finish)

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

        def finish(gradient: tf.Tensor) -> factored.Use:
            shape = [gradient.shape[0], *variable.shape]
            return factored.Direct(tf.reshape(per_example(gradient), shape))

        self._add(variable, output, finish)

    def targets(self) -> list[Any]:
        """Lists each use's output, and the weights that something but a rule read."""
        # Every read by a rule is off the tape.
        self._read = [v for v in self.tape.watched_variables() if self.wants(v)]
        sources = self._read
        if self.comparing:  # outside of replicas, where a variable has no handle
            self._read, local = self.variables, tf.distribute.get_strategy()
            sources = [local.experimental_local_results(v)[0] for v in self._read]
        return [*(entry.output for entry in self._entries), *sources]

    def uses(self, gradients: Sequence[Any]) -> list[list[factored.Use]]:
        """Returns each variable's uses, in full precision.

        Args:
          gradients: of the summed losses by the `targets`; `None` for no dependence.

        Raises:
          UncoveredError: a layer ran on something else than `rows` examples.
        """
        strays = zip(self._read, gradients[len(self._entries) :])
        self.strays += [(v, g) for v, g in strays if g is not None]
        found = [list(uses) for uses in self._adopted]
        for entry, gradient in zip(self._entries, gradients):
            # Keras computes some outputs twice, and drops one: no loss depends on it.
            if gradient is None:
                continue
            gradient = factored.full_precision(tf.convert_to_tensor(gradient))
            first, rows = gradient.shape[0], self.rows * entry.folded
            if first is None:  # `TextVectorization` loses it
                gradient = tf.ensure_shape(gradient, [rows, *gradient.shape[1:]])
            elif first != rows:
                raise UncoveredError(
                    f"layer {entry.layer!r} ran on a tensor whose first dimension is "
                    f"{first}, not {rows} for {self.rows} examples. Broadcast what all "
                    "examples share, and fold no other dimension into the first."
                )
            use = factored.grouped(entry.finish(gradient), entry.folded)
            found[entry.variable].append(use)
        return found

    def adopt(self, part: Recorder, gradients: Sequence[Any]) -> None:
        """Takes over what a part of the forward pass, on a tape of its own, has used.

        A weight's factors are put into their cheapest form at once, so that what they
        are made of can be let go.
        """
        found = part.uses(gradients)
        for variable, uses, own in zip(self.variables, found, self._adopted):
            own.extend(factored.merge(uses, variable.shape.as_list()))
        self.strays += part.strays

    def _add(
        self,
        variable: tf.Variable,
        output: tf.Tensor,
        finish: Callable[[tf.Tensor], factored.Use],
    ) -> None:
        if self.silent or not self.wants(variable):
            return
        if _graph() is not self._graph:
            raise UncoveredError(
                f"layer {self.layer.name!r} runs inside a tf.function, tf.cond or "
                "tf.while_loop of the model. Call it outside, or choose another engine."
            )
        # The first layer's output depends on nothing that the tape watches.
        self.tape.watch(output)
        place, layer = self._places[variable_key(variable)], self.layer.name
        self._entries.append(_Entry(place, output, layer, self.folded, finish))


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
    """One number for one weight, also wrapped for mixed precision or as a replica's."""
    variable = getattr(variable, "_variable", variable)
    container = getattr(variable, "_distributed_container", None)
    return id((container() if container is not None else None) or variable)


def require_distinct(variables: Sequence[tf.Variable]) -> None:
    """Raises InputError if a weight is listed, and so would be updated, twice."""
    keys = [variable_key(variable) for variable in variables]
    for place, variable in enumerate(variables):
        if keys[place] in keys[:place]:
            raise validation.InputError(
                f"variables name the weight {variable.name!r} twice. List it once."
            )


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _positions(values: tf.Tensor, rows: int, axes: int) -> tf.Tensor:
    """[rows, ..., features] as [rows, T, m], the last `axes` being the features."""
    features = values.shape[values.shape.rank - axes :]
    return tf.reshape(values, [rows, -1, math.prod(features)])
