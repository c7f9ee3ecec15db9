"""The step of a fine-tuning config, traced without its weights, and what it takes.

Model, optimizer and step are built by the code that trains, but with variables that
have a shape and no value: nothing is allocated, however large the model. Only shapes
are needed, so no data is read.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_collections
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from tfdpsq import privacy, validation
from tfdpsq.generator import T5QueryGenerator, checkpoints
from tfdpsq.layers import T5Config
from tfdpsq.run.estimation import estimate_graph, estimate_memory
from tfdpsq.run.training import private_training, starting_model

# What TensorFlow takes for each operation of a traced step until it can be run, and
# once for all, in bytes: measured on tiny models, see tests/benchmarks/estimate.py.
_PER_OPERATION = 26_500
_ONCE = 60 << 20


class Traced(NamedTuple):
    """A step and what it works on.

    Attributes:
      flat: its kernels.
      weights: bytes of each weight.
      slots: bytes of each of the optimizer's variables.
      sums: bytes of the sums of gradients, of which there is one for each weight
        that is trained.
      batch: bytes of each array of the batch.
      parameters: how many numbers the weights are, and how many of them are trained.
      microbatches: in one step.
    """

    flat: estimate_graph.Flat
    weights: list[int]
    slots: list[int]
    sums: int
    batch: list[int]
    parameters: tuple[int, int]
    microbatches: int


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes at the peak, by what they are for.

    Attributes:
      weights: the model.
      optimizer: its slots.
      sums: the sums of clipped gradients, which all microbatches add to.
      step: activations, gradients, temporary results, constants, and the batch.
      gaps: between all of these, too small for what was wanted.
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
        """All of it: the most resident memory of the process."""
        return sum(dataclasses.astuple(self))


def shape_of(config: ml_collections.ConfigDict) -> T5Config:
    """The model's shape, read from `init`'s config where there is one.

    Raises:
      InputError: a shape that is none, no checkpoint at `init`, or one with a soft
        prompt of another length.
    """
    if config.init:
        checkpoint = checkpoints.open_checkpoint(config.init)
        checkpoint.soft_prompt_length(config.soft_prompt.length)
        return checkpoint.config
    return T5Config(**config.t5)


def trace(config: ml_collections.ConfigDict, shape: T5Config) -> Traced:
    """Traces one logical step of a config.

    Args:
      config: the stage's settings.
      shape: the model's shape, `shape_of(config)` or another.

    Raises:
      InputError: settings that training would refuse, too.
    """
    size = validation.positive_integer("microbatch_size", config.microbatch_size)
    validation.positive_integer("batch_size", config.batch_size)
    microbatches = -(-config.batch_size // size)
    rows = microbatches * size
    n = max(config.n_bound, 100 * config.batch_size)
    units = private_training.Units(n, groups=None, private=False)
    spec = private_training.spec_of(config, units)
    # The noise's deviation costs nothing; finding it does.
    plan = privacy.PrivacyPlan(spec, rows, 1.0 if spec.private else 0.0)
    specs = {"weights": tf.TensorSpec([rows], tf.float32)}
    for text in ("document", "query"):
        length = validation.positive_integer(f"{text}_length", config[f"{text}_length"])
        specs[f"{text}_ids"] = tf.TensorSpec([rows, length], tf.int32)
        specs[f"{text}_lengths"] = tf.TensorSpec([rows], tf.int32)
    with tf.variable_creator_scope(_without_value):
        model = T5QueryGenerator(
            shape, config.dtype, config.rematerialize, config.soft_prompt.length
        )
        starting_model.choose_trained(model, config)
        optimizer = privacy.make_optimizer(
            plan, config.learning_rate, config.optimizer, config.engine
        )
        step = privacy.make_logical_step(
            lambda part: model.per_example_losses(part, training=True),
            model.trainable_variables,
            optimizer,
            size,
            layers=[model],
        )
        function = tf.function(step).get_concrete_function(
            specs, tf.TensorSpec([], tf.int32)
        )
        trained = sum(math.prod(v.shape) for v in model.trainable_variables)
        return Traced(
            flat=estimate_graph.flatten(function),
            weights=[_bytes(v) for v in model.variables],
            slots=[_bytes(v) for v in optimizer.state()],
            sums=4 * trained,
            batch=[_bytes(one) for one in specs.values()],
            parameters=(sum(math.prod(v.shape) for v in model.variables), trained),
            microbatches=microbatches,
        )


def memory_of(traced: Traced, process: int, threads: int) -> Memory:
    """The peak of a traced step.

    Args:
      traced: the step.
      process: bytes of a process that has imported what training imports.
      threads: how many kernels run at once.
    """
    persistent = [*traced.weights, *traced.slots, *traced.batch]
    peak = estimate_memory.simulate(traced.flat, persistent, threads)
    weights, slots = sum(traced.weights), sum(traced.slots)
    return Memory(
        weights=weights,
        optimizer=slots,
        sums=traced.sums,
        step=peak.alive - weights - slots - traced.sums,
        gaps=peak.touched - peak.alive,
        process=process + _ONCE + _PER_OPERATION * traced.flat.operations,
    )


def resident_bytes() -> int:
    """What this process takes now, in bytes; 0 where the system does not say."""
    try:
        status = pathlib.Path("/proc/self/status").read_text()
    except OSError:
        return 0
    lines = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return 1024 * int(lines["VmRSS"].split()[0])


def _without_value(create: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
    """Makes a variable as it would be, but for its initial value."""
    initial = options["initial_value"]
    if not callable(initial):
        return create(**options)
    with tf.Graph().as_default():
        value = tf.convert_to_tensor(initial(), options.get("dtype"))
    return resource_variable_ops.UninitializedVariable(
        trainable=options.get("trainable"),
        name=options.get("name"),
        shape=value.shape,
        dtype=value.dtype,
    )


def _bytes(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.size
