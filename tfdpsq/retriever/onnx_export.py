"""A retriever's towers as ONNX, to embed texts without TensorFlow.

The graph is written node by node from the tower's weights, with the package `onnx`
alone: T5 encoder, pooling, projection, unit length. `compare` runs it by ONNX Runtime
next to our tower and says how near the two are; a wrong conversion is refused.

    session = onnxruntime.InferenceSession("encoder.onnx")
    session.run(None, {"input_ids": ids, "attention_mask": mask})   # [B, D]

Both inputs are [B, L] int64 for any B and L; every row has at least one real token.
"""

from __future__ import annotations

import os
import pathlib
import tempfile
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.retriever.config import RetrieverConfig
from tfdpsq.retriever.model import TwoTower

DTYPES = ("float32", "int8")
# The versions of ONNX's operators and of its file format, which runtimes since 2024
# read: opset 20 has T5's activation, the tanh approximation of GELU.
_OPSET, _IR = 20, 9
_MASKED = -1e9
_EPSILON = 1e-6
# Beyond this distance, all positions are in one bucket.
_MAX_DISTANCE = 128
# Bytes that a file of protocol buffers holds at most.
_MOST_BYTES = 2**31
# The smallest cosine to ours that passes: rounding makes 1 - 1e-6 in float32.
_LEAST_COSINE = {"float32": 0.99999, "int8": 0.95}


def check_options(dtype: str) -> None:
    """Refuses what `save` cannot write.

    Raises:
      InputError: an unknown dtype, or a package is not installed.
    """
    validation.one_of("dtype", dtype, DTYPES)
    library()


def library() -> tuple[Any, Any]:
    """Returns the modules onnx and onnxruntime.

    Raises:
      InputError: one is not installed.
    """
    remedy = (
        "the format onnx needs the packages onnx and onnxruntime, which are not "
        "both installed. Run pip install 'tfdpsq[onnx]'."
    )
    return validation.library("onnx", remedy), validation.library("onnxruntime", remedy)


def towers_of(model: TwoTower) -> dict[str, tf.keras.Model]:
    """Returns the towers by the names of their files, without the extension."""
    if model.config.shared:
        return {"encoder": model.query_tower}
    return {"queries": model.query_tower, "documents": model.document_tower}


def save(directory: str | os.PathLike, model: TwoTower, dtype: str = "float32") -> None:
    """Writes `encoder.onnx`, or `queries.onnx` and `documents.onnx`.

    Args:
      directory: an existing directory.
      model: the retriever.
      dtype: one of `DTYPES`. In int8, each column of a matrix has a scale of its own,
        and inputs are rounded as they come (dynamic quantisation); 7 bits of weights
        are used, since processors without VNNI overflow at 8.

    Raises:
      InputError: see `check_options`; or a weight is not finite, or all of them take
        2 GiB, more than such a file holds.
    """
    check_options(dtype)
    onnx, _ = library()
    directory = pathlib.Path(directory)
    for name, tower in towers_of(model).items():
        size = 4 * tower.count_params()
        if size >= _MOST_BYTES:
            raise validation.InputError(
                f"the tower has {size} bytes of weights, and an ONNX file holds fewer "
                f"than {_MOST_BYTES}. Use the format sentence-transformers."
            )
        proto = _Graph(model.config, tower).model()
        target = directory / f"{name}.onnx"
        if dtype == "float32":
            onnx.save_model(proto, target)
            continue
        from onnxruntime import quantization

        with tempfile.TemporaryDirectory(dir=directory) as folder:
            onnx.save_model(proto, f"{folder}/float32.onnx")
            quantization.quantize_dynamic(
                f"{folder}/float32.onnx",
                target,
                op_types_to_quantize=["MatMul", "Gather"],
                per_channel=True,
                reduce_range=True,
                weight_type=quantization.QuantType.QInt8,
            )


def session(path: str | os.PathLike, threads: int = 0) -> Any:
    """Opens a file that `save` wrote; `threads` of 0 takes all cores."""
    _, onnxruntime = library()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or len(os.sched_getaffinity(0))
    options.log_severity_level = 3  # errors alone
    return onnxruntime.InferenceSession(
        os.fspath(path), options, providers=["CPUExecutionProvider"]
    )


def embed(opened: Any, ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Embeds [B, L] ids with [B] lengths; returns [B, D] float32 of unit length."""
    mask = np.arange(ids.shape[1]) < np.asarray(lengths)[:, np.newaxis]
    (found,) = opened.run(
        None,
        {"input_ids": ids.astype(np.int64), "attention_mask": mask.astype(np.int64)},
    )
    return found


def compare(
    directory: str | os.PathLike,
    model: TwoTower,
    dtype: str,
    ids: np.ndarray,
    lengths: np.ndarray,
) -> dict[str, Any]:
    """Compares what `save` wrote with the retriever it was made from.

    Args:
      directory: `save` wrote it.
      model: the retriever.
      dtype: the one it was saved in.
      ids: [B, L] int32, of public texts.
      lengths: [B] int32.

    Returns:
      For each file the number of "texts", and the smallest ("least") and the "mean"
      "cosine" of theirs and our embeddings of them.

    Raises:
      InputError: a cosine is smaller than rounding to `dtype` explains.
    """
    result: dict[str, Any] = {}
    encoders = model.encode_queries, model.encode_documents
    for (name, _), encode in zip(towers_of(model).items(), encoders):
        path = pathlib.Path(directory) / f"{name}.onnx"
        theirs = embed(session(path), ids, lengths)
        ours = encode(tf.constant(ids), tf.constant(lengths)).numpy()
        cosine = (theirs * ours).sum(axis=1) / np.linalg.norm(theirs, axis=1)
        least = float(cosine.min())
        result[name] = {
            "texts": len(ids),
            "cosine": {"least": least, "mean": float(cosine.mean())},
        }
        if not least >= _LEAST_COSINE[dtype]:
            raise validation.InputError(
                f"an embedding by {name}.onnx has cosine {least:.6f} to ours, less "
                f"than {_LEAST_COSINE[dtype]:g}: {dtype} does not hold this retriever. "
                + ("Use float32." if dtype != "float32" else "Use another format.")
            )
    return result


class _Graph:
    """Nodes and weights of one tower, in the order of their computation."""

    def __init__(self, config: RetrieverConfig, tower: tf.keras.Model):
        self._onnx, _ = library()
        self._config, self._tower = config, tower
        self._nodes: list[Any] = []
        self._weights: dict[str, np.ndarray] = {}

    def model(self) -> Any:
        """Returns the tower as an `onnx.ModelProto`."""
        helper, kinds = self._onnx.helper, self._onnx.TensorProto
        vectors = self._pooled(self._encoded())
        vectors = self._add(
            "MatMul", vectors, self._weight(self._tower.get_layer("projection").kernel)
        )
        self._add("LpNormalization", vectors, to="embedding", axis=-1, p=2)
        inputs = [
            helper.make_tensor_value_info(name, kinds.INT64, ["batch", "length"])
            for name in ("input_ids", "attention_mask")
        ]
        width = self._config.embedding_dim
        output = helper.make_tensor_value_info(
            "embedding", kinds.FLOAT, ["batch", width]
        )
        weights = [
            self._onnx.numpy_helper.from_array(value, name)
            for name, value in self._weights.items()
        ]
        graph = helper.make_graph(
            self._nodes, "tfdpsq_tower", inputs, [output], weights
        )
        return helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", _OPSET)],
            ir_version=_IR,
            producer_name="tfdpsq",
        )

    def _encoded(self) -> str:
        """Adds the T5 encoder; returns its states [B, L, hidden]."""
        encoder = self._tower.get_layer("t5_encoder")
        table = encoder.get_layer("token_embedding").embeddings
        x = self._add("Gather", self._weight(table), "input_ids")
        layers = [
            encoder.get_layer(f"transformer_encoder_layer_{number}")
            for number in range(self._config.t5.num_layers)
        ]
        bias = self._bias(layers[0].self_attention)
        for layer in layers:
            normed = self._norm(x, layer.self_attention_layer_norm)
            x = self._add("Add", x, self._attention(normed, layer.self_attention, bias))
            normed = self._norm(x, layer.layer_norm)
            x = self._add("Add", x, self._feed_forward(normed, layer))
        return self._norm(x, encoder.get_layer("encoder_output_layer_norm"))

    def _attention(self, x: str, layer: tf.keras.layers.Layer, bias: str) -> str:
        heads, width = layer.num_heads, layer.key_value_dim
        split = self._integers(0, 0, heads, width)
        parts = {}
        for role, order in (
            ("query", [0, 2, 1, 3]),
            ("key", [0, 2, 3, 1]),
            ("value", [0, 2, 1, 3]),
        ):
            kernel = getattr(layer, f"{role}_projector").kernel
            product = self._add("MatMul", x, self._weight(kernel))
            product = self._add("Reshape", product, split)
            parts[role] = self._add("Transpose", product, perm=order)
        scores = self._add("MatMul", parts["query"], parts["key"])
        shares = self._add("Softmax", self._add("Add", scores, bias), axis=-1)
        mixed = self._add("MatMul", shares, parts["value"])
        mixed = self._add("Transpose", mixed, perm=[0, 2, 1, 3])
        mixed = self._add("Reshape", mixed, self._integers(0, 0, heads * width))
        return self._add("MatMul", mixed, self._weight(layer.output_projector.kernel))

    def _feed_forward(self, x: str, layer: tf.keras.layers.Layer) -> str:
        hidden = self._add("MatMul", x, self._weight(layer.input_projector.kernel))
        if layer.use_gated_activation:
            hidden = self._add("Gelu", hidden, approximate="tanh")
            gate = self._add("MatMul", x, self._weight(layer.gate_projector.kernel))
            hidden = self._add("Mul", hidden, gate)
        else:
            hidden = self._add("Relu", hidden)
        return self._add("MatMul", hidden, self._weight(layer.output_projector.kernel))

    def _bias(self, layer: tf.keras.layers.Layer) -> str:
        """Adds what is added to all scores, [B, heads, L, L]: positions and padding."""
        distances = tf.range(-_MAX_DISTANCE, _MAX_DISTANCE + 1)
        buckets = layer._relative_position_bucket(distances)
        table = tf.gather(layer.relative_attention_bias, buckets)
        length = self._add(
            "Gather", self._add("Shape", "input_ids"), self._integer(1), axis=0
        )
        places = self._add("Range", self._integer(0), length, self._integer(1))
        keys = self._add("Unsqueeze", places, self._integers(0))
        queries = self._add("Unsqueeze", places, self._integers(1))
        distance = self._add("Sub", keys, queries)
        far = self._integer(_MAX_DISTANCE)
        distance = self._add("Clip", distance, self._integer(-_MAX_DISTANCE), far)
        rows = self._add("Add", distance, far)
        found = self._add("Gather", self._weight(table), rows)
        found = self._add("Transpose", found, perm=[2, 0, 1])  # [heads, L, L]
        padding = self._add("Sub", self._weight(1.0), self._real())
        padding = self._add("Mul", padding, self._weight(_MASKED))
        padding = self._add("Unsqueeze", padding, self._integers(1, 2))
        return self._add("Add", found, padding)

    def _pooled(self, states: str) -> str:
        """Adds the pooling of states to [B, hidden]."""
        if self._config.pooling == "first":
            return self._add("Gather", states, self._integer(0), axis=1)
        real = self._add("Unsqueeze", self._real(), self._integers(2))
        kept, axes = self._add("Mul", states, real), self._integers(1)
        total = self._add("ReduceSum", kept, axes, keepdims=0)
        count = self._add("ReduceSum", real, axes, keepdims=0)
        return self._add("Div", total, count)

    def _real(self) -> str:
        """Adds the mask as float32, [B, L]."""
        return self._add("Cast", "attention_mask", to_type=self._onnx.TensorProto.FLOAT)

    def _norm(self, x: str, layer: tf.keras.layers.Layer) -> str:
        """Adds T5's norm, in the steps that runtimes know and join."""
        squares = self._add("Pow", x, self._weight(2.0))
        mean = self._add("ReduceMean", squares, self._integers(-1), keepdims=1)
        root = self._add("Sqrt", self._add("Add", mean, self._weight(_EPSILON)))
        scaled = self._add("Div", x, root)
        return self._add("Mul", scaled, self._weight(layer.weight))

    def _add(self, kind: str, *inputs: str, to: str = "", **attributes: Any) -> str:
        """Adds a node; returns the name of its output."""
        name = to or f"{kind}_{len(self._nodes)}"
        if "to_type" in attributes:  # Cast calls it `to`
            attributes["to"] = attributes.pop("to_type")
        self._nodes.append(
            self._onnx.helper.make_node(kind, inputs, [name], name=name, **attributes)
        )
        return name

    def _weight(self, value: Any) -> str:
        array = np.asarray(value, np.float32)
        if not np.isfinite(array).all():
            raise validation.InputError(
                f"weight {getattr(value, 'name', value)} holds values that are not "
                "finite. Use weights from before training diverged."
            )
        return self._constant(array)

    def _integers(self, *values: int) -> str:
        return self._constant(np.array(values, np.int64))

    def _integer(self, value: int) -> str:
        return self._constant(np.array(value, np.int64))

    def _constant(self, array: np.ndarray) -> str:
        name = f"weight_{len(self._weights)}"
        self._weights[name] = array
        return name
