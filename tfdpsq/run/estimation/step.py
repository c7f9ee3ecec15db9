"""One fine-tuning step: the sizes of its variables, and a measurement of it.

The code that trains builds model, optimizer and step. `sizes_of` gives them variables
with a shape but no value, so a model of any size allocates nothing. `measure` runs a
real step with random weights, and reads no data.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import multiprocessing
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import ml_collections
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from tfdpsq import privacy, validation
from tfdpsq.generator import T5QueryGenerator, checkpoints
from tfdpsq.layers import T5Config
from tfdpsq.run.training import private_training, starting_model, training_settings

# Microbatches of the two measured steps.
_FEW, _MORE = 1, 3


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a step's variables.

    Attributes:
      parameters: numbers in the model.
      trained: number of trained ones.
      weights: bytes of the model.
      slots: bytes of the optimizer's variables.
      microbatches: of one logical step.
    """

    parameters: int
    trained: int
    weights: int
    slots: int
    microbatches: int


@dataclasses.dataclass(frozen=True)
class Measured:
    """A step that ran in a child process.

    Attributes:
      peak: largest resident bytes of the process; 0 where the system hides it.
      examples: pairs per second, in full microbatches.
      seconds: of a logical step in addition to its microbatches.
    """

    peak: int
    examples: float
    seconds: float


def shape_of(config: ml_collections.ConfigDict) -> T5Config:
    """Returns the model's shape, from `init`'s config where there is one.

    Raises:
      InputError: an invalid shape, no checkpoint at `init`, or one with a soft prompt
        of another length.
    """
    if config.init:
        checkpoint = checkpoints.open_checkpoint(config.init)
        checkpoint.soft_prompt_length(config.soft_prompt.length)
        return checkpoint.config
    return T5Config(**config.t5)


def sizes_of(config: ml_collections.ConfigDict, shape: T5Config) -> Sizes:
    """Builds the model and the optimizer without values, and counts.

    Layers have equal sizes, so models of one and two layers determine any other, unless
    `trained` names layers by number.

    Raises:
      InputError: settings that training would refuse as well.
    """
    size = validation.positive_integer("microbatch_size", config.microbatch_size)
    validation.positive_integer("batch_size", config.batch_size)
    for text in ("document", "query"):
        validation.positive_integer(f"{text}_length", config[f"{text}_length"])
    by_number = any(map(str.isdigit, "".join([*config.trained, *config.lora.targets])))
    if by_number or shape.num_layers < 3:
        counts = _counted(config, shape)
    else:
        one, two = (
            _counted(config, dataclasses.replace(shape, num_layers=layers))
            for layers in (1, 2)
        )
        counts = [a + (b - a) * (shape.num_layers - 1) for a, b in zip(one, two)]
    parameters, trained, weights, slots = counts
    return Sizes(parameters, trained, weights, slots, -(-config.batch_size // size))


def _counted(config: ml_collections.ConfigDict, shape: T5Config) -> list[int]:
    with tf.variable_creator_scope(_without_value):
        model, optimizer = _model_and_optimizer(config, shape, config.batch_size)
        optimizer.prepare(model.trainable_variables)
        return [
            sum(math.prod(v.shape) for v in model.variables),
            sum(math.prod(v.shape) for v in model.trainable_variables),
            sum(map(_bytes, model.variables)),
            sum(map(_bytes, optimizer.state())),
        ]


def measure(
    config: ml_collections.ConfigDict, shape: T5Config, seconds: float
) -> Measured | None:
    """Runs the step in a child process, so that its peak memory is its own.

    One step has one microbatch, another one three; their difference is two
    microbatches.

    Returns:
      The measurement; `None` if the process was killed, as when memory runs out.

    Raises:
      InputError: settings that training would refuse as well.
    """
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(
                _measure, config.to_dict(), dataclasses.asdict(shape), seconds
            ).result()
        except concurrent.futures.process.BrokenProcessPool:
            return None


def resident_bytes(field: str = "VmRSS") -> int:
    """Returns this process's memory (VmHWM: its peak), or 0 if the system hides it."""
    return _kib("/proc/self/status", field)


def available_bytes() -> int:
    """Returns the memory that is free on this machine, or 0 if the system hides it."""
    return _kib("/proc/meminfo", "MemAvailable")


def in_turns(runs: Sequence[Callable[[], Any]], seconds: float) -> list[float]:
    """Returns the mean seconds of each run; they alternate, at least twice."""
    for run in runs:  # traces, allocates
        run()
    totals = [0.0] * len(runs)
    turns, began = 0, time.perf_counter()
    while turns < 2 or time.perf_counter() - began < seconds:
        for number, run in enumerate(runs):
            start = time.perf_counter()
            run()
            totals[number] += time.perf_counter() - start
        turns += 1
    return [total / turns for total in totals]


def _measure(
    values: dict[str, Any], of_shape: dict[str, Any], seconds: float
) -> Measured:
    config, shape = ml_collections.ConfigDict(values), T5Config(**of_shape)
    size = validation.positive_integer("microbatch_size", config.microbatch_size)
    more = min(_MORE, -(-config.batch_size // size))
    rows = more * size
    model, optimizer = _model_and_optimizer(config, shape, rows)
    step = tf.function(
        privacy.make_logical_step(
            lambda part: model.per_example_losses(part, training=True),
            model.trainable_variables,
            optimizer,
            size,
            layers=[model],
        ),
        jit_compile=config.jit_compile,
        autograph=False,
    )
    batch = {"weights": tf.ones([rows])}
    random = np.random.default_rng(0)
    for text in ("document", "query"):
        length = config[f"{text}_length"]
        ids = random.integers(3, shape.vocabulary_size, [rows, length])
        batch[f"{text}_ids"] = tf.constant(ids, tf.int32)
        batch[f"{text}_lengths"] = tf.fill([rows], length)

    # Of noise that cancels, a step draws that of the steps before it again: half a
    # window of them, on average.
    window = optimizer.plan.noise_window
    keys = None if window is None else optimizer.step_keys(window.steps // 2)

    def run(microbatches: int) -> Callable[[], Any]:
        count = tf.constant(microbatches * size)
        return lambda: float(step(batch, count, (), keys))

    if more > _FEW:
        one, several = in_turns([run(_FEW), run(more)], seconds)
        each = max(several - one, 1e-9) / (more - _FEW)
    else:
        (one,) = in_turns([run(_FEW)], seconds)
        each = one
    return Measured(resident_bytes("VmHWM"), size / each, max(one - each, 0.0))


def _model_and_optimizer(
    config: ml_collections.ConfigDict, shape: T5Config, rows: int
) -> tuple[T5QueryGenerator, Any]:
    n = max(config.n_bound, 100 * config.batch_size)
    units = private_training.Units(n, groups=None, private=False)
    spec = private_training.spec_of(config, units)
    # Calibrating the noise is slow, and its value does not affect the time.
    plan = privacy.PrivacyPlan(spec, rows, 1.0 if spec.private else 0.0)
    model = T5QueryGenerator(
        shape, config.dtype, config.rematerialize, config.soft_prompt.length
    )
    starting_model.choose_trained(
        model, config.lora, config.soft_prompt.length, tuple(config.trained)
    )
    optimizer = privacy.make_optimizer(
        plan,
        config.learning_rate,
        config.optimizer,
        config.engine,
        **training_settings.optimizer_options(config),
    )
    return model, optimizer


def _without_value(create: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
    """Makes a variable with all its properties except the initial value."""
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


def _kib(path: str, field: str) -> int:
    try:
        text = pathlib.Path(path).read_text()
    except OSError:
        return 0
    found = [line.split()[1] for line in text.splitlines() if line.startswith(field)]
    return 1024 * int(found[0]) if found else 0


def _bytes(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.size
