"""Memory and time of one fine-tuning step."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_collections

from tfdpsq import validation
from tfdpsq.layers import T5Config
from tfdpsq.run.core import config_file, settings
from tfdpsq.run.estimation import formula, step
from tfdpsq.run.training import private_training

# A step is measured if it needs at most this share of the free memory and at most so
# many operations.
_MEMORY, _FLOPS = 0.6, 3e12


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Memory and time of one config.

    Attributes:
      memory: peak bytes, by formula.
      parameters: numbers in the model.
      trained: number of trained ones.
      microbatches: of one step.
      flops: of one step, in products.
      measured: the step that ran here; `None` if none did.
      seconds: of one step; `None` if time was not requested.
    """

    memory: formula.Memory
    parameters: int
    trained: int
    microbatches: int
    flops: float
    measured: step.Measured | None = None
    seconds: float | None = None

    @property
    def peak(self) -> int:
        """Returns the measured peak, or else that of the formula."""
        return (self.measured and self.measured.peak) or self.memory.peak


def estimate(
    config: ml_collections.ConfigDict,
    shape: T5Config | None = None,
    *,
    process: int,
    measure: bool = False,
    time: bool = False,
    flops_per_second: float | None = None,
    seconds: float = 2.0,
) -> Estimate:
    """Estimates one config.

    `process` is the bytes of a process that has imported what training imports.
    `measure` runs the step in a child process for about `seconds`, if it is small
    enough; `flops_per_second` is another machine's.

    Raises:
      InputError: settings that training would refuse as well.
    """
    shape = shape or step.shape_of(config)
    sizes = step.sizes_of(config, shape)
    memory = formula.memory_of(config, shape, sizes, process)
    flops = formula.flops_of(config, shape, sizes)
    measured = None
    small = memory.peak < _MEMORY * step.available_bytes()
    if measure and small and flops / sizes.microbatches < _FLOPS:
        measured = step.measure(config, shape, seconds)
    taken = None
    if time and (flops_per_second or measured is None):
        taken = flops / (flops_per_second or formula.flops_per_second())
    elif time and measured is not None:
        rows = sizes.microbatches * config.microbatch_size
        taken = rows / measured.examples + measured.seconds
    return Estimate(
        memory=memory,
        parameters=sizes.parameters,
        trained=sizes.trained,
        microbatches=sizes.microbatches,
        flops=flops,
        measured=measured,
        seconds=taken,
    )


def stage_config(
    config: Any, declaration: settings.Declaration
) -> ml_collections.ConfigDict:
    """Returns the config of stage finetune, given or inside a pipeline's or a grid's.

    Of a pipeline it starts from the pipeline's T5; of a grid it is one point, without
    what the grid varies. `declaration` is that of the stage.

    Raises:
      InputError: it is neither, or the stage would refuse a setting.
    """
    if isinstance(config, ml_collections.ConfigDict):
        if config.get("stage", "finetune") != "finetune":  # a grid of another one
            raise other_stage(config)
        if "finetune" in config:
            stage = settings.value_of(config, "finetune")
            settings.check(stage, declaration, "finetune")
            private_training.check_steps(stage, trains=True, before="finetune.")
            stage = stage.copy_and_resolve_references()
            if "init" in config and not stage.init:  # a pipeline fills it in
                stage.init = config.init
                if not config.init and "pretrain" in config:
                    stage.t5 = config.pretrain.t5
            return stage
        if is_of_stage(config, "finetune", declaration):
            settings.check(config, declaration)
            private_training.check_steps(config, trains=True)
            return config
    raise other_stage(config)


def is_of_stage(
    config: ml_collections.ConfigDict, stage: str, declaration: settings.Declaration
) -> bool:
    """Returns whether a config is of a stage, be some of its settings missing."""
    return set(config) == set(declaration) or config_file.stage_of(config) == stage


def other_stage(config: Any) -> validation.InputError:
    """Returns the error for a config that no cost can be estimated of."""
    is_config = isinstance(config, ml_collections.ConfigDict)
    other = config_file.stage_of(config) if is_config else ""
    return validation.InputError(
        f"the config is {f'of the stage {other}' if other else 'of no stage'}; costs "
        "are estimated of the stage finetune, and of a pipeline or grid of it. Use "
        "configs/finetune.py or configs/quickstart.py."
    )
