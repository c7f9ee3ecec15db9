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
from typing import Any, NamedTuple, Union

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.privacy.fast.factored import (
    Direct,
    Lookup,
    Outer,
    Use,
    full_precision,
    grouped,
    merge,
)

Gradients = Callable[[list[Any]], Sequence[Union[tf.Tensor, None]]]


class UncoveredError(validation.InputError):
    """A weight is used in a way that no rule covers."""


class _Entry(NamedTuple):
    variable: int  # its place among the variables
    layer: str
    output: int  # its place among the outputs
    folded: int  # positions of each example that are in the first dimension
    finish: Callable[[tf.Tensor], Use]


class Recorder:
    """Collects, for each use of a wanted weight, how to get its gradients.

    A rule computes its layer's output from `read` weights and calls one of
    `outer`, `lookup` and `direct` for every trainable weight it used. The tensor
    given as `output` must be the one that the rest of the model goes on with, and
    its first dimension must be the examples.

    Attributes:
      tape: records the forward pass.
      variables: the weights whose gradients are wanted; others cost nothing.
      rows: B; 0 where it is not known before the losses are.
      comparing: if given, reads of weights stay on the tape, and each output is
        compared with that of the layer's own `call`, converted in this context of
        autograph; see `check`.
      layer: the layer being run.
      folded: positions of each example that are in the first dimension.
      silent: rules run and write nothing down.
      outputs: the recorded outputs, each once.
      mismatches: (layer's name, relative difference), where outputs were compared.
      strays: wanted weights that matter for the losses outside every rule, and the
        gradients by them there; all reads if outputs are compared.
    """

    def __init__(
        self,
        tape: tf.GradientTape,
        variables: Sequence[tf.Variable],
        rows: int | None = None,
        comparing: Any = None,
    ):
        """Starts an empty record."""
        self.tape = tape
        self.variables = list(variables)
        self.rows = rows or 0
        self.comparing = comparing
        self.layer: Any = None
        self.outputs: list[tf.Tensor] = []
        self.mismatches: list[tuple[str, tf.Tensor]] = []
        self.strays: list[tuple[tf.Variable, tf.Tensor]] = []
        keys = map(variable_key, self.variables)
        self._places = {key: place for place, key in enumerate(keys)}
        self._graph = _graph()
        self.folded = 1
        self.silent = False
        self._entries: list[_Entry] = []
        self._adopted: list[list[Use]] = [[] for _ in self.variables]

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

        def finish(gradient: tf.Tensor) -> Use:
            sides = (_positions(inputs, input_axes), _positions(gradient, output_axes))
            return Outer(*(reversed(sides) if transposed else sides))

        self._add(variable, output, finish)

    def lookup(self, variable: tf.Variable, ids: tf.Tensor, output: tf.Tensor) -> None:
        """Records output = W[ids].

        Args:
          variable: the weight, [m, n].
          ids: [B, ...] integers.
          output: [B, ..., n].
        """

        def finish(gradient: tf.Tensor) -> Use:
            # XLA reads the nearest row for an id that is none, and adds to no row.
            known = (ids >= 0) & (ids < variable.shape[0])
            gradient = tf.where(known[..., tf.newaxis], gradient, 0)
            return Lookup(_positions(ids), _positions(gradient, 1))

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

        def finish(gradient: tf.Tensor) -> Use:
            values = per_example(full_precision(gradient))
            return Direct(tf.reshape(values, [-1, *variable.shape]))

        self._add(variable, output, finish)

    def folding(self, positions: int) -> contextlib.AbstractContextManager[None]:
        """While inside, layers run on [B · positions, ...], example by example.

        For rules of layers that fold a dimension of this length into the first, as
        Keras's TimeDistributed does: row i · positions + t must be example i's. The
        gradients of an example's positions then add up, cross terms included.
        """
        return replaced(self, folded=self.folded * positions)

    def uses(self, gradients_by: Gradients) -> list[list[Use]]:
        """Differentiates, and returns each variable's uses, in full precision.

        Args:
          gradients_by: maps tensors and variables to the gradients of the summed losses
            by them, `None` where the losses do not depend on one.

        Raises:
          UncoveredError: a layer ran on something else than `rows` examples.
        """
        # Every read by a rule is off the tape, so these were read by something else.
        read = [v for v in self.tape.watched_variables() if self.wants(v)]
        sources = read
        if self.comparing:  # outside of replicas, where a variable has no handle
            read, local = self.variables, tf.distribute.get_strategy()
            sources = [local.experimental_local_results(v)[0] for v in read]
        gradients = gradients_by([*self.outputs, *sources])
        strays = zip(read, gradients[len(self.outputs) :])
        self.strays += [(v, g) for v, g in strays if g is not None]
        found = [list(uses) for uses in self._adopted]
        for entry in self._entries:
            gradient = gradients[entry.output]
            # Keras computes some outputs twice, and drops one: no loss depends on it.
            if gradient is None:
                continue
            first = self.outputs[entry.output].shape[0]
            if first != self.rows * entry.folded:
                raise UncoveredError(
                    f"layer {entry.layer!r} ran on a tensor whose first dimension is "
                    f"{first}, not {self.rows * entry.folded} for the {self.rows} "
                    "examples of the losses. Broadcast what all examples share, and do "
                    "not fold other dimensions into the first."
                )
            use = entry.finish(tf.convert_to_tensor(gradient))
            use = type(use)(
                *(full_precision(x) if x.dtype.is_floating else x for x in use)
            )
            found[entry.variable].append(grouped(use, entry.folded))
        return found

    def adopt(self, part: Recorder, gradients_by: Gradients) -> None:
        """Takes over what a part of the forward pass, on a tape of its own, has used.

        A weight's factors are put into their cheapest form at once, so that what they
        are made of can be let go.
        """
        for variable, uses, own in zip(
            self.variables, part.uses(gradients_by), self._adopted
        ):
            own.extend(merge(uses, variable.shape.as_list()))
        self.strays += part.strays

    def _add(
        self,
        variable: tf.Variable,
        output: tf.Tensor,
        finish: Callable[[tf.Tensor], Use],
    ) -> None:
        if self.silent or not self.wants(variable):
            return
        if _graph() is not self._graph:
            raise UncoveredError(
                f"layer {self.layer.name!r} runs inside a tf.function, tf.cond or "
                "tf.while_loop of the model, where nothing can be recorded. Call it "
                "outside, or choose another engine."
            )
        index = next((i for i, x in enumerate(self.outputs) if x is output), None)
        if index is None:
            index = len(self.outputs)
            self.outputs.append(output)
            # The first layer's output depends on nothing that the tape watches.
            self.tape.watch(output)
        place = self._places[variable_key(variable)]
        self._entries.append(_Entry(place, self.layer.name, index, self.folded, finish))


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
                f"variables name the weight {variable.name!r} twice, as lists of two "
                "models that share a layer do: list each weight once."
            )


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _positions(values: tf.Tensor, axes: int | None = None) -> tf.Tensor:
    """[B, ..., features] as [B, T, m]; ids, which have no axes of features, [B, T]."""
    rows, *sizes = values.shape.as_list()
    split = len(sizes) - (axes or 0)
    positions, features = sizes[:split], sizes[split:]
    length = -1 if None in positions else math.prod(positions)
    width = [] if axes is None else [math.prod(features)]
    return tf.reshape(values, [rows, length, *width])
