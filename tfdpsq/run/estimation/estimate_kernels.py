"""What one operation of a traced graph does as a kernel: memory and work.

Which kernels pass memory on, take over an input's, or need some besides their outputs
follows what TensorFlow 2.15's step statistics report of a CPU that uses oneDNN.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

# Outputs are inputs, in order; no memory.
_PASSING = frozenset(
    "Bitcast EnsureShape Enter Exit ExpandDims Identity IdentityN OptimizationBarrier "
    "PlaceholderWithDefault PreventGradient Reshape Snapshot Squeeze StopGradient "
    "Switch".split()
)
# Work element by element, in an input's memory if nobody else needs it. (Kernels
# that call forward_input_or_allocate_output.)
_ELEMENTWISE = frozenset(
    "Abs Add AddN AddV2 BiasAdd Ceil Cos DivNoNan Elu Erf Exp Expm1 Floor "
    "FloorDiv FloorMod Inv InvGrad Log Log1p LogicalAnd LogicalNot LogicalOr "
    "LogSoftmax Maximum Minimum Mul MulNoNan Neg Pow RealDiv Reciprocal Relu "
    "ReluGrad Rsqrt RsqrtGrad Select SelectV2 Sigmoid SigmoidGrad Sign Sin Softmax "
    "Softplus Sqrt SqrtGrad Square SquaredDifference Sub Tanh TanhGrad Xdivy "
    "Xlogy".split()
)
# TensorFlow runs these where they become ready; the rest may go to another thread.
_INLINE = _PASSING | frozenset(
    "BroadcastGradientArgs Const Join Placeholder Rank ReadVariableOp Shape ShapeN "
    "Size NoOp VarHandleOp Unused".split()
)

Ref = tuple[int, int]


@dataclasses.dataclass
class Node:
    """One kernel.

    Attributes:
      op: TensorFlow's name of its kind.
      inputs: (number of the node, which of its outputs) for each input.
      controls: numbers of further nodes that must have run.
      sizes: bytes of each output.
      shares: for each output, the input whose memory it is, or -1.
      forwards: whether the first output may take over an input's memory.
      fixed: outputs are there before and after: weights, constants, the batch.
      view: outputs are parts of an input's memory.
      scratch: bytes of what it allocates for itself, in order.
      updates: the weight (its node) that is changed in place, or -1.
      flops: multiplications and additions, of products alone.
      half: whether those are of 16 bits.
      drawn: random numbers made.
      moved: bytes read and written.
      times: how often it runs in one step.
    """

    op: str
    inputs: Sequence[Ref] = ()
    controls: Sequence[int] = ()
    sizes: Sequence[int] = ()
    shares: Sequence[int] = ()
    forwards: bool = False
    fixed: bool = False
    view: bool = False
    scratch: Sequence[int] = ()
    updates: int = -1
    flops: float = 0.0
    half: bool = False
    drawn: float = 0.0
    moved: float = 0.0
    times: float = 1.0

    @property
    def inline(self) -> bool:
        """Whether it is too small to be handed to another thread."""
        return self.op in _INLINE or self.view


def kernel_of(
    op: tf.Operation, refs: Sequence[Ref], before: Sequence[int], times: float
) -> Node:
    """The kernel of an operation that is no call, loop or branch.

    Args:
      op: the operation.
      refs: where its inputs are.
      before: numbers of further nodes that must have run.
      times: how often it runs.
    """
    kind = op.type
    sizes = [bytes_of(tensor) for tensor in op.outputs]
    node = Node(kind, refs, before, sizes, [-1] * len(sizes), times=times)
    if kind in _PASSING:
        node.shares = list(range(len(sizes)))
    elif kind == "ReadVariableOp":
        node.shares = [0]
    elif constant_of(op) is not None:
        node.fixed = True
    elif kind in _ELEMENTWISE:
        node.forwards = True
    elif kind in ("Slice", "StridedSlice", "Split", "Unpack") and _is_front(op):
        node.shares, node.view = [0 if kind != "Split" else 1] * len(sizes), True
    elif kind == "SparseSoftmaxCrossEntropyWithLogits":
        # The gradient by the logits, made in their place.
        node.forwards = True
    elif kind.startswith("ResourceApply") or kind.startswith("Assign"):
        node.updates = refs[0][0]
    node.flops, node.scratch = _work(op)
    node.half = bool(node.flops) and op.outputs[0].dtype.size == 2
    if "Random" in kind and kind != "StatelessRandomGetKeyCounter":
        # Uniform ones are the raw material of others, at about a third of the cost.
        share = 1 / 3 if "Uniform" in kind else 1.0
        node.drawn = share * _elements(op.outputs[0])
    if node.shares and node.shares[0] < 0 and not node.fixed:
        node.moved = sum(sizes) + sum(map(bytes_of, op.inputs))
    elif node.updates >= 0:
        node.moved = 3.0 * sum(map(bytes_of, op.inputs))
    return node


def _work(op: tf.Operation) -> tuple[float, list[int]]:
    """Floating-point operations, and bytes of what products allocate besides."""
    kind = op.type
    if kind == "MatMul":
        side = -2 if op.get_attr("transpose_a") else -1
        return 2.0 * _elements(op.outputs[0]) * dims_of(op.inputs[0])[side], []
    if kind in ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"):
        side = -2 if op.get_attr("adj_x") else -1
        return 2.0 * _elements(op.outputs[0]) * dims_of(op.inputs[0])[side], []
    if kind == "Einsum":
        return _einsum(op)
    if kind in ("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter"):
        sizes = sorted(_elements(t) for t in (*op.inputs, *op.outputs))
        kernel = next(
            (dims_of(t) for t in (*op.inputs, *op.outputs) if len(dims_of(t)) == 4), [1]
        )
        return 2.0 * sizes[-1] * math.prod(kernel[:3]), []
    return 0.0, []


def _einsum(op: tf.Operation) -> tuple[float, list[int]]:
    """A batched product between transposed copies of what it is given."""
    left, right = op.get_attr("equation").decode().split("->")
    terms = left.split(",")
    size: dict[str, int] = {}
    for labels, tensor in zip(terms, op.inputs):
        size.update(zip(labels, dims_of(tensor)))
    flops = 2.0 * math.prod(size.values())
    if len(terms) != 2 or "." in left:
        return flops, []
    one, other = terms
    both = [c for c in one if c in other and c in right]
    inner = [c for c in one if c in other and c not in right]
    scratch = []
    for labels, tensor in zip(terms, op.inputs):
        free = [c for c in labels if c not in both and c not in inner]
        natural = ("".join(both + free + inner), "".join(both + inner + free))
        if labels not in natural:
            scratch.append(bytes_of(tensor))
    made = both + [
        c for labels in (one, other) for c in labels if c not in both + inner
    ]
    if "".join(made) != right:
        scratch.append(bytes_of(op.outputs[0]))
    return flops, scratch


def _is_front(op: tf.Operation) -> bool:
    """Whether whole rows are taken, which are left where they are."""
    source = op.inputs[1 if op.type == "Split" else 0]
    rest, made = dims_of(source)[1:], dims_of(op.outputs[0])
    aligned = (bytes_of(op.outputs[0]) % 64) == 0
    return aligned and (made[1:] == rest or made == rest) and len(dims_of(source)) > 0


def constant_of(op: tf.Operation) -> Any:
    """What tells a constant from others of its shape, or `None` if it is not one."""
    if op.type == "Const":
        return op.name
    if op.type in ("ZerosLike", "OnesLike"):
        return op.type if op.outputs[0].shape.is_fully_defined() else None
    if op.type == "Fill" and op.outputs[0].shape.is_fully_defined():
        value = tf.get_static_value(op.inputs[1])
        return None if value is None else value.item()
    return None


def dims_of(tensor: tf.Tensor) -> list[int]:
    """The shape, with 1 for what is not known."""
    if tensor.shape.rank is None:
        return [1]
    return [1 if size is None else size for size in tensor.shape.as_list()]


def _elements(tensor: tf.Tensor) -> int:
    return math.prod(dims_of(tensor))


def bytes_of(tensor: tf.Tensor) -> int:
    """What its elements take; 0 for handles and strings."""
    if tensor.dtype in (tf.resource, tf.variant, tf.string):
        return 0
    return _elements(tensor) * tensor.dtype.size
