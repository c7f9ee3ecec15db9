"""Records that rules keep while layers run, and the factors made of them.

Weights are read with the tape stopped: it spends nothing on their gradients, and any
*other* read that matters for the loss shows up as a gradient that no rule accounts for.
(Where the loss takes derivatives through a layer, as a gradient penalty does, only
`check` finds it, which leaves the reads on the tape.)
"""

from __future__ import annotations

import contextlib
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

    A rule computes its layer's output from `read` weights and calls one of `outer`,
    `lookup` and `direct` for every trainable weight it used. The model must go on with
    the tensor given as `output`, whose first dimension must be the examples.

    Attributes:
      tape: for the forward pass.
      variables: the weights whose gradients are wanted; others cost nothing.
      comparing: for `check`, reads of weights stay on the tape.
      rows: B, set as soon as there are losses.
      layer: the layer being run.
      folded: positions of each example in the first dimension, row i · folded + t being
        example i's; set by `replaced` in rules such as TimeDistributed's.
      silent: rules run and write nothing down.
      strays: wanted weights that matter for the losses outside every rule, and the
        gradients by them there; all reads if `comparing`.
    """

    def __init__(self, variables: Sequence[tf.Variable], comparing: bool = False):
        """Starts an empty record."""
        self.tape = tf.GradientTape()
        self.variables = list(variables)
        self.comparing = comparing
        self.rows, self.folded, self.silent = 0, 1, False
        self.layer: Any = None
        self.strays: list[tuple[tf.Variable, tf.Tensor]] = []
        keys = map(variable_key, self.variables)
        self._places = {key: place for place, key in enumerate(keys)}
        self._graph = _graph()
        self._read: list[tf.Variable] = []
        self._entries: list[_Entry] = []
        self._adopted: list[list[factored.Use]] = [[] for _ in self.variables]

    def wants(self, variable: tf.Variable) -> bool:
        """Returns whether the weight's gradient is wanted."""
        return variable_key(variable) in self._places

    def read(self, variable: tf.Variable, ids: Any = None) -> tf.Tensor:
        """The weight's value, or rows of it, as its layer reads it: autocast, too."""
        stop = contextlib.nullcontext if self.comparing else self.tape.stop_recording
        with stop():
            if ids is None:
                return tf.convert_to_tensor(variable)
            return tf.nn.embedding_lookup(variable, ids)  # without copying the table

    def outer(
        self,
        variable: tf.Variable,
        inputs: tf.Tensor,
        output: tf.Tensor,
        width: int | None = None,
        transposed: bool = False,
    ) -> None:
        """Records output = inputs · W (+ anything), W the weight as a matrix.

        Args:
          variable: the weight, m × n or what such a matrix reshapes to.
          inputs: [B, ..., m], or what reshapes to it.
          output: [B, ..., n], or what reshapes to it, before any nonlinearity.
          width: m (n if `transposed`), by default the last axis of `inputs`.
          transposed: output = inputs · Wᵀ: inputs [B, ..., n], output [B, ..., m].
        """
        width = width or inputs.shape[-1]

        def finish(gradient: tf.Tensor) -> factored.Use:
            rows, other = gradient.shape[0], variable.shape.num_elements() // width
            left = tf.reshape(factored.full_precision(inputs), [rows, -1, width])
            right = tf.reshape(gradient, [rows, -1, other])
            return factored.Outer(*((right, left) if transposed else (left, right)))

        self._add(variable, output, finish)

    def lookup(self, variable: tf.Variable, ids: tf.Tensor, output: tf.Tensor) -> None:
        """Records output = W[ids]: W [m, n], ids [B, ...] integers, [B, ..., n]."""

        def finish(gradient: tf.Tensor) -> factored.Use:
            # XLA reads the nearest row for an id that is none, and adds to no row.
            known = (ids >= 0) & (ids < variable.shape[0])
            right = tf.where(known[..., tf.newaxis], gradient, 0)
            rows, width = gradient.shape[0], variable.shape[1]
            left = tf.reshape(tf.cast(ids, tf.int64), [rows, -1])
            return factored.Lookup(left, tf.reshape(right, [rows, -1, width]))

        self._add(variable, output, finish)

    def direct(
        self,
        variable: tf.Variable,
        output: tf.Tensor,
        per_example: Callable[[tf.Tensor], tf.Tensor],
    ) -> None:
        """Records a use whose per-example gradients are small enough to form.

        `per_example` maps the gradient by `output`, float32 [B, ...], to each example's
        gradient by the weight, [B, *weight's shape].
        """

        def finish(gradient: tf.Tensor) -> factored.Use:
            shape = [gradient.shape[0], *variable.shape]
            return factored.Direct(tf.reshape(per_example(gradient), shape))

        self._add(variable, output, finish)

    def targets(self) -> list[Any]:
        """Lists each use's output, and the weights that something but a rule read."""
        self._read = [v for v in self.tape.watched_variables() if self.wants(v)]
        sources = self._read
        if self.comparing:  # outside of replicas, where a variable has no handle
            self._read, local = self.variables, tf.distribute.get_strategy()
            sources = [local.experimental_local_results(v)[0] for v in self._read]
        return [*(entry.output for entry in self._entries), *sources]

    def uses(self, gradients: Sequence[Any]) -> list[list[factored.Use]]:
        """Each variable's uses, from the gradients by the `targets`, None for zero."""
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
                    f"{first}, not {rows} for all examples. Broadcast what they share."
                )
            use = factored.grouped(entry.finish(gradient), entry.folded)
            found[entry.variable].append(use)
        return found

    def adopt(self, part: Recorder, gradients: Sequence[Any]) -> None:
        """Takes over the uses by a part of the forward pass, in their cheapest form."""
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
                "tf.while_loop. Call it outside, or choose another engine."
            )
        # The first layer's output depends on nothing that the tape watches.
        self.tape.watch(output)
        place, layer = self._places[variable_key(variable)], self.layer.name
        self._entries.append(_Entry(place, output, layer, self.folded, finish))


@contextlib.contextmanager
def replaced(target: Any, **attributes: Any) -> Iterator[None]:
    """While inside, `target` has these attributes instead of its own."""
    # By `vars`: Keras's `__setattr__` would track them.
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
