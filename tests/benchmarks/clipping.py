"""Time and memory of a private logical step against the same step without privacy.

    python tests/benchmarks/clipping.py

prints one JSON line. A logical step is what training runs: --logical rows in
microbatches of --batch, clipped sums added up, noise once, Adam once. The baseline is
the same code path with ε = ∞, so nothing else differs.

`time_ratio` is `fast` over the baseline: steps of the two alternate in one process,
and the medians of their wall times are compared. `cpu_ratio` compares processor time
instead, which other work on the machine hardly moves. `memory_ratio` compares the
peak resident memory of two processes, each of which runs one of them for eight
microbatches. Defaults are T5-small (1.0), document 128 and query 32 tokens,
microbatches of 32, a logical batch of 1,024.

    --against dpkeras --batch 8 --logical 64    adds `dpkeras_over_fast`
    --against secure                            adds `secure_over_fast`, noise included
    --lora                                      trains a LoRA update only
    --document 384 --query 128 --batch 8        other shapes
"""

import argparse
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import time

_SIZES = {
    "layers": 6,
    "width": 512,
    "heads": 8,
    "intermediate": 2048,
    "vocabulary": 32128,
    "document": 128,
    "query": 32,
    "batch": 32,
    "logical": 1024,
}


# Enough microbatches to show that memory does not grow with their number.
_MICROBATCHES = 8


def _steps(options, names):
    """Returns {name: function of a number of rows that runs one logical step}."""
    import numpy as np
    import tensorflow as tf

    from tfdpsq import privacy
    from tfdpsq.generator.model import T5QueryGenerator
    from tfdpsq.layers import lora, t5

    config = t5.T5Config(
        vocabulary_size=options.vocabulary,
        num_layers=options.layers,
        num_heads=options.heads,
        hidden_dim=options.width,
        intermediate_dim=options.intermediate,
        key_value_dim=options.width // options.heads,
        version="1.0",
    )
    model = T5QueryGenerator(config)
    if options.lora:
        targets = ["*/query_projector", "*/value_projector"]
        lora.apply_lora(model, 8, 16.0, targets)
    random = np.random.default_rng(0)
    rows = options.logical
    batch = {"weights": tf.ones([rows])}
    for text in ("document", "query"):
        length = getattr(options, text)
        ids = random.integers(1, options.vocabulary, [rows, length])
        lengths = random.integers(1, length + 1, [rows])
        batch[f"{text}_ids"] = tf.constant(ids, tf.int32)
        batch[f"{text}_lengths"] = tf.constant(lengths, tf.int32)

    def step_of(name):
        spec = privacy.PrivacySpec(
            epsilon=math.inf if name == "plain" else 8.0,
            clip_norm=0.1,
            num_units=100 * rows,
            batch_size=rows,
            steps=1,
            secure=name == "secure",
        )
        # Calibrating σ is slow, and its value does not affect the time.
        plan = privacy.PrivacyPlan(spec, rows, 0.0 if name == "plain" else 1.0)
        step = privacy.make_logical_step(
            plan,
            lambda part: model.per_example_losses(part, training=True),
            model.trainable_variables,
            tf.keras.optimizers.Adam(1e-3),
            options.batch,
            layers=[model],
            engine="fast" if name in ("plain", "secure") else name,
        )
        step = tf.function(step)
        variables, numbers = model.trainable_variables, iter(range(1 << 30))
        key = privacy.RunKey(plan)

        def run(count):
            number = next(numbers)
            noise = map(tf.convert_to_tensor, key.secure_noise(number, variables))
            keys = key.step_keys(number)
            return step(batch, tf.constant(count, tf.int32), [*noise], keys).numpy()

        return run

    return {name: step_of(name) for name in names}


def _seconds(options, names):
    """Returns {name: [wall, processor] seconds per logical step}, in alternation."""
    steps = _steps(options, names)
    for step in steps.values():
        step(options.batch)  # traces, compiles, and touches all memory
    seconds = {name: [] for name in names}
    for _ in range(options.repeats):
        for name, step in steps.items():
            start = time.perf_counter(), time.process_time()
            step(options.logical)
            stop = time.perf_counter(), time.process_time()
            seconds[name].append([stop[0] - start[0], stop[1] - start[1]])
    return seconds


def _peak_mib(options, name):
    """Returns the peak resident memory of this process after some microbatches."""
    step = _steps(options, [name])[name]
    step(min(_MICROBATCHES * options.batch, options.logical))
    # Not getrusage's ru_maxrss: it starts from the process that started this one.
    status = pathlib.Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def _in_a_process_of_its_own(task):
    """Returns the output of `--task`; TensorFlow is never imported in this process."""
    command = [sys.executable, __file__, *sys.argv[1:], "--task", task]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(output.stdout.splitlines()[-1])


def _options():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, size in _SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--repeats", type=int, default=2, help="logical steps of each")
    parser.add_argument("--lora", action="store_true", help="train LoRA of rank 8")
    parser.add_argument(
        "--against",
        choices=("plain", "rowwise", "dpkeras", "vectorized", "secure"),
        default="plain",
    )
    parser.add_argument("--no-memory", action="store_true", help="measure time alone")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.logical % options.batch:
        parser.error(f"--batch {options.batch} must divide --logical {options.logical}")
    return options


def main():
    options = _options()
    names = list(dict.fromkeys(["plain", "fast", options.against]))
    if options.task == "time":
        print(json.dumps(_seconds(options, names)))
        return
    if options.task:
        print(json.dumps(_peak_mib(options, options.task)))
        return
    result = {}
    if not options.no_memory:
        peaks = {name: _in_a_process_of_its_own(name) for name in names}
        result["memory_ratio"] = peaks["fast"] / peaks["plain"]
        result["peak_mib"] = {name: round(peak) for name, peak in peaks.items()}
    measured = _in_a_process_of_its_own("time")
    wall, cpu = (
        {name: [pair[which] for pair in pairs] for name, pairs in measured.items()}
        for which in (0, 1)
    )
    medians = {name: statistics.median(values) for name, values in wall.items()}
    result["time_ratio"] = medians["fast"] / medians["plain"]
    result["cpu_ratio"] = min(cpu["fast"]) / min(cpu["plain"])
    if options.against != "plain":
        ratio = medians[options.against] / medians["fast"]
        result[f"{options.against}_over_fast"] = ratio
        ratio = min(cpu[options.against]) / min(cpu["fast"])
        result[f"{options.against}_over_fast_cpu"] = ratio
    settings = (*_SIZES, "repeats", "lora", "against")
    result |= {
        "seconds": {name: [round(s, 2) for s in wall[name]] for name in names},
        **{name: getattr(options, name) for name in settings},
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
