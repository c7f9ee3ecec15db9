"""Time and memory of exact per-example clipping against an ordinary gradient.

    python tests/benchmarks/clipping.py --memory

prints one JSON line. `time_ratio` is the `fast` engine's clipped sum over the
plain gradient of the summed losses, same model, batch and run: calls of the two
alternate, and the medians are compared. `memory_ratio`, with --memory, compares the
peak resident memory of two processes that each run one of them.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time

import numpy as np
import tensorflow as tf

from tfdpsq.generator.model import T5QueryGenerator
from tfdpsq.layers import t5
from tfdpsq.privacy import fast

_SIZES = {
    "layers": 2,
    "width": 128,
    "heads": 4,
    "vocabulary": 4096,
    "document": 96,
    "query": 24,
    "batch": 64,
}


def _functions(options, jit):
    config = t5.T5Config(
        vocabulary_size=options.vocabulary,
        num_layers=options.layers,
        num_heads=options.heads,
        hidden_dim=options.width,
        intermediate_dim=4 * options.width,
        key_value_dim=options.width // options.heads,
        version=options.version,
    )
    model = T5QueryGenerator(config)
    random = np.random.default_rng(0)
    rows = options.batch
    batch = {
        "document_ids": random.integers(
            1, options.vocabulary, [rows, options.document]
        ),
        "document_lengths": random.integers(1, options.document + 1, [rows]),
        "query_ids": random.integers(1, options.vocabulary, [rows, options.query]),
        "query_lengths": random.integers(1, options.query + 1, [rows]),
    }
    batch = {name: tf.constant(value, tf.int32) for name, value in batch.items()}
    variables = model.trainable_variables

    @tf.function(jit_compile=jit)
    def plain():
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(model.row_losses(batch, training=True))
        return [tf.convert_to_tensor(g) for g in tape.gradient(total, variables)]

    @tf.function(jit_compile=jit)
    def clipped():
        return fast.clipped_sum(
            lambda: model.row_losses(batch, training=True), [model], variables, 0.1
        ).sums

    return {"plain": plain, "fast": clipped}


def _peak(name):
    """Peak resident memory, in MiB, of a process that runs only this one."""
    command = [sys.executable, __file__, *sys.argv[1:], "--only", name]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])["peak_mib"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name, size in _SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--version", default="1.0", help="T5 shape, 1.0 or 1.1")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--jit", action="store_true", help="compile with XLA")
    parser.add_argument("--memory", action="store_true", help="measure memory, too")
    parser.add_argument("--only", choices=("plain", "fast"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    functions = _functions(options, options.jit)
    if options.only:
        for _ in range(3):
            functions[options.only]()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"peak_mib": peak}))
        return
    seconds = {name: [] for name in functions}
    for repeat in range(options.repeats + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()[0].numpy()
            if repeat:  # the first call traces and compiles
                seconds[name].append(time.perf_counter() - start)
    medians = {name: float(np.median(values)) for name, values in seconds.items()}
    result = {
        "time_ratio": medians["fast"] / medians["plain"],
        "plain_seconds": medians["plain"],
        "fast_seconds": medians["fast"],
        **{name: getattr(options, name) for name in (*_SIZES, "version", "jit")},
        "cores": len(os.sched_getaffinity(0)),
    }
    if options.memory:
        peaks = {name: _peak(name) for name in functions}
        result["memory_ratio"] = peaks["fast"] / peaks["plain"]
        result |= {f"{name}_peak_mib": peak for name, peak in peaks.items()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
