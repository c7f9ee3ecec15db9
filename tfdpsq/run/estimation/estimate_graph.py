"""A traced step as the flat list of kernels that TensorFlow will run.

TensorFlow lowers a function before it runs it: calls are inlined, and loops and
branches become kernels that pass tensors on. What is made here is the same list,
from the traced graph alone: what each kernel reads, how many bytes it makes, and
what it costs. Nothing is executed and no weight exists.

Branches are taken to be true (in a step they ask whether all gradients are finite).
Of a loop only a few turns are unrolled, as the others repeat them; costs count all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdpsq.run.estimation.estimate_kernels import (
    Node,
    Ref,
    bytes_of,
    constant_of,
    dims_of,
    kernel_of,
)

# Turns that are unrolled of the step's own loop, and, as a multiple of how many
# TensorFlow runs at once, of loops inside it.
_OUTER_TURNS = 2
_INNER_ROUNDS = 2

_CALLS = frozenset("PartitionedCall StatefulPartitionedCall".split())
_LOOPS = frozenset("While StatelessWhile".split())
_BRANCHES = frozenset("If StatelessIf".split())


class Flat(NamedTuple):
    """A function, flattened.

    Attributes:
      nodes: in an order in which they could run.
      constants: bytes of each constant tensor. Tensors filled with one number count:
        TensorFlow makes them once, equal ones of a function together, and keeps them.
      gathered: nodes of weights that rows are looked up in.
      operations: how many operations the traced functions hold, which is what
        tracing and preparing them takes memory by.
    """

    nodes: list[Node]
    constants: list[int]
    gathered: set[int]
    operations: int


def flatten(function: Any) -> Flat:
    """The kernels of one call.

    Args:
      function: a concrete function, traced with static shapes.
    """
    builder = _Builder()
    graph = function.graph
    inputs = []
    for tensor in graph.inputs:
        size = 0 if tensor.dtype == tf.resource else bytes_of(tensor)
        node = Node("Placeholder", sizes=[size], shares=[-1], fixed=True)
        inputs.append((builder.add(node), 0))
    results = builder.inline(graph, inputs, graph.control_outputs, (), 1.0)
    builder.add(Node("Join", inputs=results))
    constants: dict[Any, int] = {}
    operations = _survey(graph, constants, set())
    return Flat(builder.nodes, list(constants.values()), builder.gathered, operations)


class _Builder:
    def __init__(self):
        self.nodes: list[Node] = []
        self.gathered: set[int] = set()
        self._depth = 0

    def add(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def inline(self, graph, inputs, control_outputs, controls, times) -> list[Ref]:
        """Adds a function's kernels; returns where its results are."""
        at: dict[str, Ref] = {t.name: ref for t, ref in zip(graph.inputs, inputs)}
        done: dict[str, int] = {}
        arguments = {tensor.op.name for tensor in graph.inputs}
        for op in _needed(graph, control_outputs):
            if op.name in arguments:
                continue
            refs = [at[tensor.name] for tensor in op.inputs]
            before = [done[c.name] for c in op.control_inputs if c.name in done]
            if not refs and not before:
                before = list(controls)
            results, number = self._emit(op, refs, before, times)
            done[op.name] = number
            for tensor, ref in zip(op.outputs, results):
                at[tensor.name] = ref
        return [at[tensor.name] for tensor in graph.outputs]

    def _emit(self, op, refs, before, times) -> tuple[list[Ref], int]:
        kind = op.type
        if kind in _CALLS or kind in _LOOPS or kind in _BRANCHES:
            make = (
                self._loop
                if kind in _LOOPS
                else self._branch
                if kind in _BRANCHES
                else self._call
            )
            results = make(op, refs, before, times)
            # Whoever waits for it waits for all of its results.
            return results, self.add(Node("Join", controls=[n for n, _ in results]))
        node = kernel_of(op, refs, before, times)
        if kind == "ResourceGather":
            self.gathered.add(refs[0][0])
        if kind == "ReadVariableOp":
            # The weight's own memory; its node stands for it.
            self.nodes[refs[0][0]].sizes = node.sizes
        if op.outputs and op.outputs[0].dtype == tf.resource and refs:
            return [refs[0]], self.add(node)
        number = self.add(node)
        return [(number, slot) for slot in range(len(node.sizes))], number

    def _call(self, op, refs, before, times) -> list[Ref]:
        graph = _function(op, "f")
        start = self.add(Node("Join", controls=before))
        return self.inline(graph, refs, graph.control_outputs, [start], times)

    def _branch(self, op, refs, before, times) -> list[Ref]:
        graph = _function(op, "then_branch")
        pivot = self.add(Node("Join", inputs=[refs[0]], controls=before))
        inputs = self._passed("Switch", refs[1:], op.inputs[1:], [pivot])
        results = self.inline(graph, inputs, graph.control_outputs, [pivot], times)
        return self._passed("Identity", results, op.outputs, [])

    def _loop(self, op, refs, before, times) -> list[Ref]:
        graph = _function(op, "body")
        turns = _turns(op)
        at_once = op.get_attr("parallel_iterations")
        unrolled = min(turns, _INNER_ROUNDS * at_once if self._depth else _OUTER_TURNS)
        values = self._passed("Enter", refs, op.inputs, before)
        counter = refs[0][0]
        ends: list[int] = []
        self._depth += 1
        for turn in range(unrolled):
            first = len(self.nodes)
            waits = [counter] if turn < at_once else [counter, ends[turn - at_once]]
            pivot = self.add(Node("Join", controls=waits))
            values = self._passed("Switch", values, op.inputs, [pivot])
            values = self.inline(
                graph,
                values,
                graph.control_outputs,
                [pivot],
                times * turns / unrolled,
            )
            counter = values[0][0]
            ends.append(self.add(Node("Join", controls=range(first, len(self.nodes)))))
        self._depth -= 1
        return self._passed("Exit", values, op.outputs, ends[-1:])

    def _passed(self, kind, refs, tensors, controls) -> list[Ref]:
        """One kernel for each value, which passes it on."""
        passed = []
        for ref, tensor in zip(refs, tensors):
            if tensor.dtype == tf.resource:
                passed.append(ref)
                continue
            node = Node(kind, [ref], controls, [bytes_of(tensor)], [0])
            passed.append((self.add(node), 0))
        return passed


def _needed(graph: Any, control_outputs: Sequence[tf.Operation]) -> list[tf.Operation]:
    """The operations that results depend on; TensorFlow drops the others."""
    wanted: set[str] = set()
    waiting = [tensor.op for tensor in graph.outputs] + list(control_outputs)
    while waiting:
        op = waiting.pop()
        if op.name not in wanted:
            wanted.add(op.name)
            waiting += [tensor.op for tensor in op.inputs]
            waiting += op.control_inputs
    return [op for op in graph.get_operations() if op.name in wanted]


def _survey(graph: Any, constants: dict[Any, int], seen: set[int]) -> int:
    """Counts operations, and notes constants, in all functions that could run."""
    if id(graph) in seen:
        return 0
    seen.add(id(graph))
    count = len(graph.get_operations())
    for op in _needed(graph, graph.control_outputs):
        value = constant_of(op)
        if value is not None:
            key = (id(graph), value, op.outputs[0].dtype, *dims_of(op.outputs[0]))
            constants[key] = bytes_of(op.outputs[0])
        for attribute in ("f", "body", "cond", "then_branch", "else_branch"):
            if op.type in _CALLS | _LOOPS | _BRANCHES and attribute in op.node_def.attr:
                count += _survey(_function(op, attribute), constants, seen)
    return count


def _function(op: tf.Operation, attribute: str) -> Any:
    return op.graph._get_function(op.get_attr(attribute).name).graph


def _turns(op: tf.Operation) -> int:
    """How often a loop runs: the least of the bounds its condition knows."""
    graph = _function(op, "cond")
    position = {tensor.name: i for i, tensor in enumerate(graph.inputs)}
    bounds = []
    for less in graph.get_operations():
        if less.type != "Less":
            continue
        bound = less.inputs[1]
        value = (
            tf.get_static_value(op.inputs[position[bound.name]])
            if bound.name in position
            else tf.get_static_value(bound)
        )
        if value is not None and np.ndim(value) == 0:
            bounds.append(int(value))
    return max(min(bounds, default=1), 1)
