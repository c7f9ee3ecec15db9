"""A description of what a traced loss computes, equal in every process that traces it.

A resumed run repeats steps that it paid for under the same noise, so model and loss
must compute what they computed before. Their graph says what that is: operations with
their settings and constants, from the batch and the variables to the losses, and to
the gradients where a layer defines its own; and what is in tables that it reads. Node
names, which number the layers of a process, do not count, nor do the names of
functions, nor anything that the result does not depend on.

The same code may be traced to other operations by another TensorFlow, so such
descriptions are not compared. The Python code in `tf.py_function`, and what the
optimizer does, are not in the graph of the loss; nor is what is in tables that are read
inside a `tf.function`, a loop or a branch of the loss.
"""

from __future__ import annotations

import collections
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from absl import logging

if TYPE_CHECKING:
    from tensorflow.core.framework.attr_value_pb2 import AttrValue
    from tensorflow.core.framework.node_def_pb2 import NodeDef

# Names, and where and how an operation runs; not what it computes. Attributes that
# begin with an underscore are of that kind, too, except for the name of a gradient.
_IRRELEVANT = frozenset(
    "config_proto container debug_name executor_type parallel_iterations shared_name "
    "stack_name tensor_array_name token".split()
)
_GRADIENT = "_gradient_op_type"


def described(
    traced: Any, variables: Sequence[tf.Variable], state: Iterable[tf.Variable]
) -> str:
    """Describes what a concrete function computes.

    Args:
      traced: the concrete function; what it returns is what counts.
      variables: what is trained.
      state: further variables that it may read, in an order that follows from the
        model; those in neither are distinguished by the order in which they are read.

    Returns:
      JSON: TensorFlow's version, a digest, and the number of operations of each type.
    """
    graph = traced.graph.as_graph_def()
    places: dict[int, str] = {}
    for place, variable in enumerate([*variables, *state]):
        for copy in getattr(variable, "values", None) or (variable,):
            places.setdefault(id(copy.handle), f"variable {place}")
    captured = list(traced.captured_inputs)
    given = list(traced.inputs)
    leaves = {}
    for place, tensor in enumerate(given[: len(given) - len(captured)]):
        leaves[tensor.op.name] = f"argument {place} {tensor.dtype} {tensor.shape}"
    finds = {n.input[0]: n for n in graph.node if n.op == "LookupTableFindV2"}
    for place, (held, tensor) in enumerate(zip(captured, given[-len(captured) :])):
        if held.dtype not in (tf.resource, tf.variant):
            leaves[tensor.op.name] = _of_values(held.numpy())
        elif id(held) in places:
            leaves[tensor.op.name] = places[id(held)]
        else:
            content = _of_table(held, finds.get(tensor.op.name))
            leaves[tensor.op.name] = f"resource {place} {content}"
    functions = _Functions(graph.library.function)
    digest = functions.digest(
        graph.node, leaves, [tensor.name for tensor in traced.outputs]
    )
    return json.dumps(
        {
            "tensorflow": tf.__version__,
            "digest": digest,
            "operations": dict(sorted(functions.operations.items())),
        }
    )


def difference(before: str, now: str) -> str | None:
    """Says in which operations two of the texts that `described` returns differ.

    Returns:
      A clause for an error message; `None` where they are equal, or of versions that
      cannot be compared.
    """
    first, second = json.loads(before), json.loads(now)
    if first["tensorflow"] != second["tensorflow"]:
        logging.warning(
            "the run began with TensorFlow %s and goes on with %s: whether model and "
            "loss compute the same was not compared",
            first["tensorflow"],
            second["tensorflow"],
        )
        return None
    if first["digest"] == second["digest"]:
        return None
    counts = [collections.Counter(each["operations"]) for each in (first, second)]
    gone, new = counts[0] - counts[1], counts[1] - counts[0]
    parts = [
        f"{', '.join(f'{name} ({n})' for name, n in sorted(more.items()))} only {when}"
        for more, when in ((gone, "then"), (new, "now"))
        if more
    ]
    return (
        f"there are operations {', and '.join(parts)}"
        if parts
        else "its operations have other constants, settings or connections"
    )


class _Functions:
    """Digests of graphs, and of the functions that they call.

    Attributes:
      operations: how often each type was met.
    """

    def __init__(self, library: Iterable[Any]):
        self._library = {made.signature.name: made for made in library}
        self._known: dict[str, str] = {}
        self.operations: collections.Counter[str] = collections.Counter()

    def digest(
        self,
        nodes: Iterable[NodeDef],
        leaves: Mapping[str, str],
        outputs: Iterable[str],
    ) -> str:
        """Returns a digest of the outputs: of all operations that they follow from.

        `leaves` describes inputs, by name; `outputs` are named as nodes name their
        inputs.
        """
        named = {node.name: node for node in nodes}
        found = dict(leaves)

        def source(name: str) -> str:
            # How variables are read depends on the distribution strategy.
            while _node_of(name) in named and _only_names(named[_node_of(name)]):
                name = named[_node_of(name)].input[0]
            return name

        def tensor(name: str) -> str:
            node, _, which = name.partition(":")
            return f"{found[node]}:{which or 0}"

        outputs = [source(output) for output in outputs]
        wanted = [_node_of(output) for output in outputs]
        # Not by recursion: graphs are deeper than Python's stack.
        while wanted:
            if wanted[-1] in found:
                wanted.pop()
                continue
            node = _rows_of_a_variable(named[wanted[-1]], named, source)
            node = _folded(node, named, source)
            inputs = [source(name) for name in node.input if name[0] != "^"]
            missing = [name for name in map(_node_of, inputs) if name not in found]
            wanted += missing
            if not missing:
                found[node.name] = self._of_node(node, [tensor(one) for one in inputs])
        return _hashed([tensor(output) for output in outputs])

    def _of_node(self, node: NodeDef, inputs: list[str]) -> str:
        self.operations[node.op] += 1
        settings = [
            f"{name}={self._of_setting(name, node.attr[name])}"
            for name in sorted(node.attr)
            if name not in _IRRELEVANT and (name[0] != "_" or name == _GRADIENT)
        ]
        # The order of its terms follows from that in which they were differentiated.
        inputs = sorted(inputs) if node.op == "AddN" else inputs
        return _hashed([node.op, *settings, "of", *inputs])

    def _of_setting(self, name: str, value: AttrValue) -> str:
        kind = value.WhichOneof("value")
        if kind == "func":
            return self._of_function(value.func.name)
        if kind == "list" and value.list.func:
            return " ".join(self._of_function(each.name) for each in value.list.func)
        if name == _GRADIENT:  # numbered where a layer defines it, and then traced
            return re.sub(r"^(CustomGradient)-\d+$", r"\1", value.s.decode())
        return hashlib.sha256(value.SerializeToString(deterministic=True)).hexdigest()

    def _of_function(self, name: str) -> str:
        if name not in self._known:
            made = self._library[name]
            arguments = made.signature.input_arg
            leaves = {
                each.name: f"argument {place}" for place, each in enumerate(arguments)
            }
            results = [made.ret[each.name] for each in made.signature.output_arg]
            self._known[name] = self.digest(made.node_def, leaves, results)
        return self._known[name]


def _of_table(held: tf.Tensor, find: NodeDef | None) -> str:
    """Returns a digest of the content of a table that an operation reads, if one does.

    By that operation's types: TensorFlow ends the process where others are asked for.
    """
    if find is None:
        return ""
    keys, values = (
        part.numpy()
        for part in tf.raw_ops.LookupTableExportV2(
            table_handle=held,
            Tkeys=find.attr["Tin"].type,
            Tvalues=find.attr["Tout"].type,
        )
    )
    kinds = [f"{part.dtype} {part.shape}" for part in (keys, values)]
    # By entry, as a key may be a vector; in the table's order, which may change.
    entries = sorted(
        _hashed([_of_values(key), _of_values(value)])
        for key, value in zip(keys, values)
    )
    return _hashed([*kinds, *entries])


def _node_of(tensor: str) -> str:
    return tensor.partition(":")[0]


def _rows_of_a_variable(
    node: NodeDef, named: Mapping[str, NodeDef], source: Callable[[str], str]
) -> NodeDef:
    """Returns a gather as one operation, where it reads a variable's rows by two.

    Outside of the replicas of a `MirroredStrategy` that is how they are read.
    """
    if node.op != "GatherV2":
        return node
    read, _, axis = (named.get(_node_of(source(name))) for name in node.input[:3])
    if read is None or read.op != "ReadVariableOp" or axis is None:
        return node
    if axis.op != "Const" or tf.make_ndarray(axis.attr["value"].tensor) != 0:
        return node
    found = type(node)(name=node.name, op="ResourceGather")
    found.input.extend([read.input[0], node.input[1]])
    for name, value in (
        ("Tindices", node.attr["Tindices"]),
        ("batch_dims", node.attr["batch_dims"]),
        ("dtype", node.attr["Tparams"]),
    ):
        found.attr[name].CopyFrom(value)
    found.attr["validate_indices"].b = True
    return found


def _folded(
    node: NodeDef, named: Mapping[str, NodeDef], source: Callable[[str], str]
) -> NodeDef:
    """Returns a cast of constant integers as the constant of the other type.

    Gradients of rows that are read by two operations, see above, cast the shape of the
    variable, which is a constant of either type.
    """
    if node.op != "Cast":
        return node
    given = named.get(_node_of(source(node.input[0])))
    kind = tf.as_dtype(node.attr["DstT"].type)
    if given is None or given.op != "Const" or not kind.is_integer:
        return node
    values = tf.make_ndarray(given.attr["value"].tensor)
    cast = values.astype(kind.as_numpy_dtype)
    if values.dtype.kind not in "iu" or (cast != values).any():
        return node
    found = type(node)(name=node.name, op="Const")
    found.attr["dtype"].type = kind.as_datatype_enum
    found.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(cast))
    return found


def _only_names(node: NodeDef) -> bool:
    return node.op == "Identity" and _GRADIENT not in node.attr


def _of_values(given: np.ndarray | np.generic | bytes) -> str:
    # Of a single text TensorFlow and numpy make no array.
    values = np.array(given, object) if isinstance(given, bytes) else given
    content = values.tobytes() if values.dtype != object else repr(values.tolist())
    return _hashed([str(values.dtype), str(values.shape), content])


def _hashed(parts: Iterable[str | bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        content = part if isinstance(part, bytes) else part.encode()
        digest.update(f"{len(content)} ".encode() + content)
    return digest.hexdigest()
