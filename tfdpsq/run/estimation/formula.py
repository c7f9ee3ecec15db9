"""Memory and operations of a fine-tuning step, by formula.

Per row of a microbatch, a step keeps the activations of every layer (A numbers each)
and of the loss (Z logits, several times over). With W bytes of trained weights, E of
the embedding and microbatch m, a step takes

    w·W + e·E + 4·m·(a·layers·A + z·Z) + 4·m²·q·Z

bytes in addition to the weights, the optimizer's slots and one sum of gradients. The
last term is that of tensorflow-privacy's engines, which take every row's gradients
through every row of the microbatch. The coefficients were fitted to T5 small, base and
large of version 1.1; tests/benchmarks/estimate.py measures how well they do.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import NamedTuple

import ml_collections
import tensorflow as tf

from tfdpsq.layers import T5Config
from tfdpsq.run.estimation.step import Sizes

# TensorFlow's memory per operation of a traced step, and once, in bytes.
_PER_OPERATION, _ONCE = 25_000, 60 << 20
# Speed of a step as a share of that of a large product.
_REACHED = 1 / 1.4
# Share of float32 activations that mixed_bfloat16 keeps: some stay in float32.
_HALF = 0.6


class _Engine(NamedTuple):
    """Coefficients of an engine; see the module.

    `gaps` is the memory lost between tensors, as a share of them; `operations` the
    numbers in the traced step, once and per layer.
    """

    weights: float
    embedding: float
    layers: float
    logits: float
    squared: float
    gaps: float
    operations: tuple[int, int]


_PLAIN = _Engine(0.0, 3.0, 1.0, 17.0, 0.0, 0.04, (700, 1300))
_ENGINES = {
    "plain": _PLAIN,
    "fast": _Engine(1.5, 0.5, 0.92, 4.5, 0.0, 0.05, (1000, 2400)),
    "dpkeras": _Engine(5.0, 0.0, 1.0, 17.0, 14.0, 0.2, (5000, 6500)),
    "vectorized": _Engine(4.5, 0.0, 1.0, 17.0, 14.0, 0.2, (5000, 6500)),
}


@dataclasses.dataclass(frozen=True)
class Memory:
    """Peak bytes by purpose.

    Attributes:
      weights: the model.
      optimizer: its slots.
      sums: the sums of clipped gradients over microbatches.
      step: activations, gradients, temporary results.
      gaps: lost between these, too small to be used.
      process: Python, TensorFlow, and the step's graph.
    """

    weights: int
    optimizer: int
    sums: int
    step: int
    gaps: int
    process: int

    @property
    def peak(self) -> int:
        """Returns the most resident memory of the process."""
        return sum(dataclasses.astuple(self))


def engine_of(engine: str, epsilon: float | str) -> str:
    """Returns the engine, or "plain" without privacy."""
    return engine if math.isfinite(float(epsilon)) else "plain"


def memory_of(
    config: ml_collections.ConfigDict, shape: T5Config, sizes: Sizes, process: int
) -> Memory:
    """Returns the peak of a step.

    `sizes` are `step.sizes_of` config and shape; `process` is the bytes of a process
    that has imported what training imports.
    """
    engine = _ENGINES[engine_of(config.engine, config.epsilon)]
    rows, documents, queries = (
        config.microbatch_size,
        config.document_length + config.soft_prompt.length,
        config.query_length,
    )
    trained = 4 * sizes.trained
    layer = _activations(shape, documents, queries)
    layers = shape.num_layers * layer
    if config.rematerialize:  # each layer's input, and one layer
        inputs = 2 * shape.num_layers * (documents + queries) * shape.hidden_dim
        layers = min(layers, inputs + layer)
    if config.dtype == "mixed_bfloat16":
        layers *= _HALF
    logits = queries * shape.vocabulary_size
    embedding = 4 * shape.vocabulary_size * shape.hidden_dim
    step = (
        engine.weights * trained
        + min(engine.embedding * embedding, trained)
        + 4 * rows * (engine.layers * layers + engine.logits * logits)
        + 4 * rows**2 * engine.squared * logits
    )
    once, each = engine.operations
    operations = once + each * shape.num_layers
    alive = sizes.weights + sizes.slots + trained + step
    return Memory(
        weights=sizes.weights,
        optimizer=sizes.slots,
        sums=trained,
        step=round(step),
        gaps=round(engine.gaps * alive),
        process=process + _ONCE + _PER_OPERATION * operations,
    )


def flops_of(config: ml_collections.ConfigDict, shape: T5Config, sizes: Sizes) -> float:
    """Returns the multiplications and additions of one step's products.

    A backward pass takes twice the forward's, or the same where few weights are
    trained. tensorflow-privacy's engines run it once per row.
    """
    forward = _forward(shape, config.document_length, config.query_length)
    backward = 1.0 + sizes.trained / sizes.parameters
    engine = engine_of(config.engine, config.epsilon)
    if engine in ("dpkeras", "vectorized"):
        backward *= config.microbatch_size
    factor = 1.0 + config.rematerialize + backward * (1.05 if engine == "fast" else 1)
    return factor * forward * sizes.microbatches * config.microbatch_size


def flops_per_second(seconds: float = 0.6) -> float:
    """Measures this machine's speed at the products of a step."""
    one, other = tf.ones([2048, 512]), tf.ones([512, 1024])
    tf.matmul(one, other)
    # The mean, not the best: other load slows training as well.
    start, runs = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        tf.matmul(one, other).numpy()
        runs += 1
    return _REACHED * 2 * 2048 * 512 * 1024 * runs / (time.perf_counter() - start)


def _activations(shape: T5Config, documents: int, queries: int) -> float:
    """Returns the numbers that one encoder and one decoder layer keep for a row."""
    attention = shape.num_heads * shape.key_value_dim
    gated = 1.0 if shape.version == "1.1" else 0.5
    return (
        9.0 * (documents + 1.5 * queries) * shape.hidden_dim
        + 6.6 * (documents + queries) * attention
        + 6.5 * gated * (documents + queries) * shape.intermediate_dim
        + 4.5 * shape.num_heads * (documents**2 + queries**2 + documents * queries)
    )


def _forward(shape: T5Config, documents: int, queries: int) -> float:
    """Returns the multiplications and additions of a row's forward pass."""
    attention = shape.num_heads * shape.key_value_dim
    projection = shape.hidden_dim * attention
    feed_forward = (3 if shape.version == "1.1" else 2) * (
        shape.hidden_dim * shape.intermediate_dim
    )
    pairs = documents**2 + queries**2 + documents * queries
    layer = (
        (documents + queries) * (4 * projection + feed_forward)
        + 2 * (documents + queries) * projection  # attention to the document
        + 2 * pairs * attention
    )
    logits = queries * shape.hidden_dim * shape.vocabulary_size
    return 2.0 * (shape.num_layers * layer + logits)
