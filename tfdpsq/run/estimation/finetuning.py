"""Memory and time of one fine-tuning step."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import ml_collections

from tfdpsq import validation
from tfdpsq.run.estimation import estimate_step, estimate_time


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What one config takes.

    Attributes:
      memory: bytes at the peak.
      parameters: how many numbers the model has.
      trained: how many of them are trained.
      microbatches: of one step.
      flops: of one step, in products.
      seconds: of one step; `None` if that was not asked for.
    """

    memory: estimate_step.Memory
    parameters: int
    trained: int
    microbatches: int
    flops: float
    seconds: float | None


def estimate(
    config: ml_collections.ConfigDict, rates: estimate_time.Rates | None, process: int
) -> Estimate:
    """Estimates one config.

    Args:
      config: of stage finetune.
      rates: what the machine does per second, or `None`.
      process: bytes of a process that has imported what training imports.

    Raises:
      InputError: settings that training would refuse, too.
    """
    traced = estimate_step.trace(config, estimate_step.shape_of(config))
    seconds = None
    if rates is not None:
        seconds = estimate_time.seconds_of(traced.flat, rates)
    return Estimate(
        memory=estimate_step.memory_of(traced, process, threads()),
        parameters=traced.parameters[0],
        trained=traced.parameters[1],
        microbatches=traced.microbatches,
        flops=estimate_time.flops_of(traced.flat),
        seconds=seconds,
    )


def threads() -> int:
    """How many kernels TensorFlow runs at once here."""
    if hasattr(os, "sched_getaffinity"):
        return max(2, len(os.sched_getaffinity(0)))
    return max(2, os.cpu_count() or 2)


def stage_config(config: Any) -> ml_collections.ConfigDict:
    """The config of stage finetune, or that of a pipeline's.

    Raises:
      InputError: it is neither.
    """
    if isinstance(config, ml_collections.ConfigDict):
        if "finetune" in config:
            config = config.finetune.copy_and_resolve_references()
        if {"microbatch_size", "t5", "init", "engine"} <= set(config):
            return config
    raise validation.InputError(
        "the config is not one of stage finetune, nor of a pipeline: it has no "
        "microbatch_size, t5, init and engine. Use configs/finetune.py or "
        "configs/quickstart.py."
    )
