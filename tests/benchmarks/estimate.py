"""What `tfdpsq.run.estimate` says against what a process of its own takes.

    python tests/benchmarks/estimate.py

prints one JSON line per (shape, engine, mode): memory in MiB and its ratio, estimated
over measured, and seconds of a logical step and theirs. "measured" is the peak
resident memory (VmHWM) of a process that runs two logical steps, Python and
TensorFlow included. What an operation of the graph takes (`estimate_step`), and what
share of single kernels' speed steps reach (`estimate_time`), were fitted to the four
engines on `tiny`; all else is derived. Times mean little while others use the machine.

    --only shape=small-1.0 engine=dpkeras     the cases of which all this is true
    --microbatch 8 --microbatches 4 --document 128 --query 32 --shape base-1.1
                                  one case of one's own, for each engine
    --lora --rematerialize --dtype mixed_bfloat16
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys
import time

from tfdpsq.run.estimation import finetuning

# Shape, microbatch, microbatches, document and query tokens, engines.
_ALL = ("plain", "fast", "dpkeras", "vectorized")
_CASES = (
    ("tiny", 32, 1, 128, 32, ("plain", "fast")),
    ("tiny", 16, 1, 128, 32, ("dpkeras", "vectorized")),
    ("tiny", 16, 4, 128, 32, _ALL),
    ("tiny", 8, 1, 384, 128, ("plain", "fast")),
    ("tiny", 8, 2, 96, 24, _ALL),
    ("small-1.0", 16, 1, 128, 32, ("plain", "fast")),
    ("small-1.0", 4, 1, 128, 32, ("dpkeras", "vectorized")),
    ("small-1.0", 8, 4, 128, 32, ("plain", "fast")),
    ("small-1.0", 4, 2, 128, 32, ("dpkeras", "vectorized")),
    ("small-1.0", 8, 1, 256, 64, ("plain", "fast")),
    ("small-1.0", 2, 2, 256, 64, ("dpkeras", "vectorized")),
    ("small-1.1", 16, 1, 128, 32, ("plain", "fast")),
    ("small-1.1", 8, 4, 128, 32, ("plain", "fast")),
    ("small-1.1", 2, 1, 128, 32, ("dpkeras", "vectorized")),
    ("small-1.1", 2, 4, 128, 32, ("dpkeras", "vectorized")),
)


def _config(case, options):
    """The settings of stage finetune for a case."""
    from tfdpsq.layers import T5Config
    from tfdpsq.run import finetune

    if case["shape"] == "tiny":  # the generator of configs/quickstart.py
        shape = T5Config(4096, 2, 4, 128, 256, 32, "1.1", 0.0)
    else:
        shape = T5Config.from_size(*case["shape"].split("-"))
    config = finetune.default_config()
    config.t5.update(dataclasses.asdict(shape))
    config.epsilon = math.inf if case["engine"] == "plain" else 8.0
    config.engine = "fast" if case["engine"] == "plain" else case["engine"]
    config.microbatch_size = case["microbatch"]
    config.batch_size = case["microbatch"] * case["microbatches"]
    config.document_length, config.query_length = case["document"], case["query"]
    config.lora.rank = 8 if options.lora else 0
    config.rematerialize, config.dtype = options.rematerialize, options.dtype
    return config


def _estimated(case, options):
    """What the estimator says; run in a process of its own, as from the command."""
    from tfdpsq.run.estimation import estimate_step, estimate_time

    config = _config(case, options)
    process = estimate_step.resident_bytes()
    rates = estimate_time.Rates(**case["rates"])
    found = finetuning.estimate(config, rates, process)
    return {
        "mib": found.memory.peak / 2**20,
        "seconds": found.seconds,
        "parts": {
            name: round(size / 2**20)
            for name, size in dataclasses.asdict(found.memory).items()
        },
    }


def _measured(case, options):
    """Peak memory and seconds of two steps, and what the machine did meanwhile."""
    import dataclasses

    import numpy as np
    import tensorflow as tf

    from tfdpsq import privacy
    from tfdpsq.generator import T5QueryGenerator
    from tfdpsq.layers import T5Config, apply_lora
    from tfdpsq.run.estimation import estimate_time

    config = _config(case, options)
    model = T5QueryGenerator(T5Config(**config.t5), config.dtype, config.rematerialize)
    if config.lora.rank:
        apply_lora(
            model, config.lora.rank, config.lora.alpha, list(config.lora.targets)
        )
    rows = config.batch_size
    spec = privacy.PrivacySpec(
        epsilon=config.epsilon, clip_norm=0.1, n=100 * rows, batch_size=rows, steps=1
    )
    plan = privacy.PrivacyPlan(spec, rows, 1.0 if spec.private else 0.0)
    optimizer = privacy.make_optimizer(plan, 1e-3, "adam", engine=config.engine)
    step = privacy.make_logical_step(
        lambda part: model.per_example_losses(part, training=True),
        model.trainable_variables,
        optimizer,
        config.microbatch_size,
        layers=[model],
    )
    random = np.random.default_rng(0)
    batch = {"weights": tf.ones([rows])}
    for text in ("document", "query"):
        length = config[f"{text}_length"]
        ids = random.integers(1, config.t5.vocabulary_size, [rows, length])
        lengths = random.integers(1, length + 1, [rows])
        batch[f"{text}_ids"] = tf.constant(ids, tf.int32)
        batch[f"{text}_lengths"] = tf.constant(lengths, tf.int32)
    function = tf.function(step)
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        function(batch, tf.constant(rows, tf.int32)).numpy()
        seconds.append(time.perf_counter() - start)
    status = pathlib.Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return {
        "mib": int(line.split()[1]) / 1024,
        "seconds": seconds[1],  # the first one traces
        "rates": dataclasses.asdict(estimate_time.measured_rates()),
    }


def _in_a_process_of_its_own(task, case):
    """What `--task` prints there. TensorFlow is never imported here."""
    words = [*sys.argv[1:], "--task", task, "--case", json.dumps(case)]
    command = [sys.executable, __file__, *words]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(output.stdout.splitlines()[-1])


def _cases(options):
    rows = _CASES
    if options.shape:
        sizes = (options.microbatch, options.microbatches)
        rows = [(options.shape, *sizes, options.document, options.query, _ALL)]
    names = ("shape", "microbatch", "microbatches", "document", "query")
    for *values, engines in rows:
        for engine in engines:
            case = {**dict(zip(names, values)), "engine": engine}
            case["mode"] = "full" if case["microbatches"] == 1 else "accumulated"
            if set(options.only) <= {f"{name}={case[name]}" for name in case}:
                yield case


def _options():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], help="such as engine=fast")
    parser.add_argument("--shape", help='"tiny", or a T5 such as "base-1.1"')
    parser.add_argument("--microbatch", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--document", type=int, default=128)
    parser.add_argument("--query", type=int, default=32)
    parser.add_argument("--lora", action="store_true", help="train LoRA of rank 8")
    parser.add_argument("--rematerialize", action="store_true")
    parser.add_argument("--dtype", default="float32", help="or mixed_bfloat16")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    options = _options()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if options.task:
        task = {"estimated": _estimated, "measured": _measured}[options.task]
        print(json.dumps(task(options.case, options)))
        return
    for case in _cases(options):
        measured = _in_a_process_of_its_own("measured", case)
        known = {**case, "rates": measured["rates"]}
        estimated = _in_a_process_of_its_own("estimated", known)
        result = {
            **case,
            "ratio": round(estimated["mib"] / measured["mib"], 3),
            "estimated_mib": round(estimated["mib"]),
            "measured_mib": round(measured["mib"]),
            "parts_mib": estimated["parts"],
            "seconds_ratio": round(estimated["seconds"] / measured["seconds"], 2),
            "estimated_seconds": round(estimated["seconds"], 2),
            "measured_seconds": round(measured["seconds"], 2),
            "lora": options.lora,
            "rematerialize": options.rematerialize,
            "dtype": options.dtype,
            "load": os.getloadavg(),
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
