"""Memory and time of a fine-tuning config, before it starts.

    python -m tfdpsq.run.estimate --config=configs/finetune.py

The step that would run is traced, without its weights, and played on sizes alone (see
`estimate_graph` and `estimate_memory`): no data is read, and nothing of the model is
allocated. `--table` adds the published sizes of T5 with every engine, and which
microbatch fits into how much memory, with the config's other settings: it takes some
half an hour. A pipeline's config is taken for its finetune stage.

    --engines=plain,fast    fewer rows of the table
    --json=FILE             the same as JSON
    --flops_per_second=X    for another machine: what whole steps reach there
    --seconds=False         memory alone

Memory is that of a process on a CPU, TensorFlow itself included. With an accelerator
the part called "process" lies in the host's memory and the rest on the device, whose
own libraries take some more.
"""

from __future__ import annotations

import dataclasses
import json
import logging as standard_logging
import math
import os
import sys
from typing import Any

import ml_collections
from absl import app, flags, logging
from ml_collections import config_flags

from tfdpsq import validation
from tfdpsq.run.core import outputs, releases
from tfdpsq.run.estimation import (
    estimate_step,
    estimate_table,
    estimate_time,
    finetuning,
)

_SIGNS = (
    "Assumed: as many rows a step as batch_size says, every gradient finite, no XLA.",
    "Sizes in GiB (2^30 bytes); what fits is meant in GB (10^9).",
)


def as_text(config: ml_collections.ConfigDict, found: finetuning.Estimate) -> str:
    """The estimate for people to read."""
    memory = found.memory
    part = "all" if found.trained == found.parameters else f"{found.trained:,}"
    settings = [
        "no privacy" if not math.isfinite(float(config.epsilon)) else config.engine,
        config.optimizer,
        config.dtype,
        *(["rematerialised"] if config.rematerialize else []),
    ]
    lines = [
        f"{found.parameters:,} parameters, {part} trained; {', '.join(settings)}",
        f"{config.batch_size:,} rows a step in {found.microbatches:,} microbatches of "
        f"{config.microbatch_size}; documents of {config.document_length}, queries of "
        f"{config.query_length} tokens",
        "",
        f"peak memory      {_gib(memory.peak)}",
        f"  weights        {_gib(memory.weights)}",
        f"  optimizer      {_gib(memory.optimizer)}",
        f"  gradient sums  {_gib(memory.sums)}",
        f"  step           {_gib(memory.step)}  activations, gradients, temporaries",
        f"  gaps           {_gib(memory.gaps)}  lost between them",
        f"  process        {_gib(memory.process)}  Python, TensorFlow, the traced step",
    ]
    if found.seconds is not None:
        whole = found.seconds * config.steps
        lines += [
            f"time per step    {_duration(found.seconds)}",
            f"all {config.steps:,} steps  {_duration(whole)}",
        ]
    return "\n".join([*lines, "", *_SIGNS]) + "\n"


def _gib(size: float) -> str:
    return f"{size / 2**30:8.2f} GiB"


def _duration(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:8.1f} {unit}"
    return f"{seconds:8.2f} s"


def _as_json(
    found: finetuning.Estimate, config: ml_collections.ConfigDict
) -> dict[str, Any]:
    result = dataclasses.asdict(found)
    result["memory"]["peak"] = found.memory.peak
    if found.seconds is not None:
        result["seconds_of_all_steps"] = found.seconds * config.steps
    return result


def main() -> None:
    """Parses the flags and prints the estimate."""
    config = config_flags.DEFINE_config_file(
        "config", None, "Python file whose get_config() returns the settings."
    )
    file = flags.DEFINE_string("json", None, "Where the estimate also goes, as JSON.")
    rate = flags.DEFINE_float(
        "flops_per_second", None, "What whole steps reach on the machine meant."
    )
    seconds = flags.DEFINE_bool("seconds", True, "Whether to estimate time.")
    table = flags.DEFINE_bool("table", False, "Sizes and engines, what fits where.")
    engines = flags.DEFINE_list(
        "engines", list(estimate_table.ENGINES), "Those that the table is for."
    )
    flags.mark_flag_as_required("config")

    def started(argv: list[str]) -> None:
        if len(argv) > 1:
            raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
        logging.set_verbosity(logging.WARNING)
        standard_logging.getLogger("tensorflow").setLevel(standard_logging.ERROR)
        process = estimate_step.resident_bytes()
        try:
            settings = finetuning.stage_config(config.value)
            rates = None
            if seconds.value:
                rates = (
                    estimate_time.measured_rates()
                    if rate.value is None
                    else estimate_time.Rates(
                        *[validation.positive("flops_per_second", rate.value)] * 2
                    )
                )
            found = finetuning.estimate(settings, rates, process)
            result: dict[str, Any] = {"config": _as_json(found, settings)}
            sys.stdout.write(as_text(settings, found))
            if table.value:
                result["table"] = []
                sys.stdout.write("\n" + estimate_table.head())
                rows = estimate_table.rows(
                    settings, process, finetuning.threads(), engines.value
                )
                for row in rows:
                    result["table"].append(dataclasses.asdict(row))
                    sys.stdout.write(estimate_table.line(row))
                    sys.stdout.flush()
            if file.value:
                text = json.dumps(result, indent=2) + "\n"
                outputs.write_file(file.value, text, releases.PUBLIC, "an estimate")
        except (validation.InputError, OSError) as error:
            sys.stderr.write(f"error: {error}\n")
            sys.exit(2)

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    app.run(started)


if __name__ == "__main__":
    main()
