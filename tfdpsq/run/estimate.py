"""Estimate the memory and time of a fine-tuning config, before it starts.

    python -m tfdpsq.run.estimate --config=configs/finetune.py

Measures a config that is small enough for this machine: a child process runs a few
steps with random weights, and reads no data. Estimates any other by formula (see
`estimation.formula`), which aims at 25 % for memory. `--table` adds the published sizes
of T5 with every engine, by formula, and the largest microbatch for some sizes of
memory, with the config's other settings. A pipeline's config stands for its finetune
stage.

    --engines=plain,fast    fewer rows of the table
    --json=FILE             the same as JSON
    --flops_per_second=X    speed of whole steps on another machine
    --seconds=False         memory alone
    --measure=False         by formula alone

Memory is that of a process on a CPU, TensorFlow included. With an accelerator the part
called "process" is in the host's memory and the rest on the device, whose own libraries
take some more.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import ml_collections
from absl import flags

from tfdpsq import validation
from tfdpsq.run import finetune
from tfdpsq.run.core import command, outputs, progress, releases, streams
from tfdpsq.run.estimation import finetuning, step, table

_NOTE = (
    "Assumed: steps of exactly batch_size rows. The parts are by formula. Sizes in GiB "
    "(2^30 bytes); in the table, limits in GB (10^9)."
)


def as_text(config: ml_collections.ConfigDict, found: finetuning.Estimate) -> str:
    """Formats the estimate as text."""
    memory = found.memory
    part = "all" if found.trained == found.parameters else f"{found.trained:,}"
    settings = [
        "no privacy" if not math.isfinite(float(config.epsilon)) else config.engine,
        config.optimizer,
        config.dtype,
        *(["rematerialised"] if config.rematerialize else []),
    ]
    how = "by formula" if found.measured is None else "measured here"
    lines = [
        f"{found.parameters:,} parameters, {part} trained; {', '.join(settings)}",
        f"{config.batch_size:,} rows a step in {found.microbatches:,} microbatches of "
        f"{config.microbatch_size}; documents of {config.document_length}, queries of "
        f"{config.query_length} tokens",
        "",
        f"peak memory      {_gib(found.peak)}  {how}",
        f"  weights        {_gib(memory.weights)}",
        f"  optimizer      {_gib(memory.optimizer)}",
        f"  gradient sums  {_gib(memory.sums)}",
        f"  step           {_gib(memory.step)}  activations, gradients, temporaries",
        f"  gaps           {_gib(memory.gaps)}  lost between them",
        f"  process        {_gib(memory.process)}  Python, TensorFlow, the traced step",
    ]
    if found.seconds is not None:
        lines.append(f"time per step    {_duration(found.seconds)}")
        if config.steps:  # 0 where epochs decide, of pairs that are not read here
            whole = _duration(found.seconds * config.steps)
            lines.append(f"all {config.steps:,} steps  {whole}")
    return "\n".join([*lines, "", _NOTE]) + "\n"


def _gib(size: float) -> str:
    return f"{size / 2**30:8.2f} GiB"


def _duration(seconds: float) -> str:
    number, unit = progress.duration(seconds, digits=2).split()
    return f"{number:>8} {unit}"


def _as_json(found: finetuning.Estimate, steps: int) -> dict[str, Any]:
    result = dataclasses.asdict(found)
    result["memory"]["peak"] = found.peak
    if found.seconds is not None and steps:
        result["seconds_of_all_steps"] = found.seconds * steps
    return result


def main() -> None:
    """Parses the flags and prints the estimate."""
    config = command.config_flag("estimate")
    file = flags.DEFINE_string("json", None, "JSON file to write the estimate to.")
    rate = flags.DEFINE_float(
        "flops_per_second", None, "What whole steps reach on the target machine."
    )
    seconds = flags.DEFINE_bool("seconds", True, "Whether to estimate time.")
    measure = flags.DEFINE_bool("measure", True, "Whether to run a step that is small.")
    with_table = flags.DEFINE_bool(
        "table", False, "Sizes and engines, what fits where."
    )
    engines = flags.DEFINE_list("engines", list(table.ENGINES), "Rows of the table.")

    def started() -> None:
        if file.value is not None:
            validation.given_path("--json", file.value)
        process = step.resident_bytes()
        settings = finetuning.stage_config(
            command.given_config(config), finetune.SETTINGS
        )
        if rate.value is not None:
            validation.positive("flops_per_second", rate.value)
        found = finetuning.estimate(
            settings,
            process=process,
            measure=measure.value,
            time=seconds.value,
            flops_per_second=rate.value,
        )
        result: dict[str, Any] = {"config": _as_json(found, settings.steps)}
        streams.say(as_text(settings, found))
        if with_table.value:
            rows = list(table.rows(settings, process, engines.value))
            result["table"] = [dataclasses.asdict(row) for row in rows]
            streams.say("\n" + table.head() + "".join(map(table.line, rows)))
        if file.value is not None:
            text = json.dumps(result, indent=2) + "\n"
            outputs.write_file(file.value, text, releases.PUBLIC, "an estimate")

    command.program(started)


if __name__ == "__main__":
    main()
