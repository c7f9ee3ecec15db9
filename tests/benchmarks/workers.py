"""Queries per second of two processes that share a synthesis against those of one.

    python tests/benchmarks/workers.py

Prints one JSON line. Each process is pinned to its own core and runs TensorFlow with
one thread; it loads the generator and writes one shard before its time is measured.
They write real shards, of the same documents, to one directory: one process all of
them, then two processes every other one, in alternation.

`throughput_ratio` is queries per second of wall time, from the common start until the
last process ends, two processes over one, from medians; `cpu_ratio` is the same of
processor time, which other work on the machine affects less: 2 where a query costs two
processes as much as one. Both need two idle cores to be meaningful: `load` is the
machine's load average before and after.

    --generator DIR                        another generator than the preset
    --documents 2048 --repeats 5           longer
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time


def _serve(options):
    """Runs one process: prepares, then does its part of the shards for every line."""
    os.sched_setaffinity(0, {options.core})
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    from tfdpsq.run import synthesize
    from tfdpsq.run.passes import corpus_shards, passes
    from tfdpsq.run.passes.shards import PassSpec, ShardDirectory

    corpus = corpus_shards.cut(
        options.corpus, options.documents, options.shard_documents, ""
    )
    config = synthesize.default_config()
    config.max_length = options.query
    config.batch_size = options.batch
    make = synthesize.start_worker(
        options.generator,
        "float32",
        synthesize.writing(config),
        corpus,
    )
    work = passes.Work("synthesize", corpus.count, lambda: make)

    def run(directory, indices):
        spec = PassSpec("synthesize", corpus.count, {}, {})
        shards = ShardDirectory(directory, spec)
        shards.open()
        passes.Maker(shards, work).make_all(indices)
        return sum(shards.finished(index).count for index in indices)

    with tempfile.TemporaryDirectory() as directory:
        run(directory, [0])  # traces, and touches all memory
    print(json.dumps({"shards": corpus.count}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        start = time.process_time()
        indices = range(order["index"], corpus.count, order["processes"])
        queries = run(order["directory"], indices)
        measured = {
            "queries": queries,
            "end": time.monotonic(),
            "cpu": time.process_time() - start,
        }
        print(json.dumps(measured), flush=True)


class _Process:
    """A process on one core."""

    def __init__(self, core):
        command = [sys.executable, __file__, *sys.argv[1:], "--core", str(core)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def read(self):
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit("a process ended early; run it with --core 0 to see why")

    def order(self, **order):
        print(json.dumps(order), file=self._process.stdin, flush=True)

    def stop(self):
        self._process.stdin.close()
        self._process.wait()


def _measured(processes):
    """Returns queries per second of wall time, and of each process's time."""
    with tempfile.TemporaryDirectory() as directory:
        start = time.monotonic()
        for index, process in enumerate(processes):
            process.order(directory=directory, index=index, processes=len(processes))
        found = [process.read() for process in processes]
    queries = sum(one["queries"] for one in found)
    return {
        "wall": queries / (max(one["end"] for one in found) - start),
        "cpu": len(processes) * queries / sum(one["cpu"] for one in found),
        "queries": queries,
    }


def _options():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--generator", default="t5_tiny_pydocs")
    parser.add_argument("--corpus", default="pydocs")
    parser.add_argument("--documents", type=int, default=1024)
    parser.add_argument("--shard_documents", type=int, default=128)
    parser.add_argument("--query", type=int, default=32, help="tokens")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    options = _options()
    if options.core is not None:
        _serve(options)
        return
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("this needs two cores")
    load = [os.getloadavg()[0]]
    processes = [_Process(core) for core in cores]
    shards = [process.read()["shards"] for process in processes][0]
    runs = {1: [], 2: []}
    for _ in range(options.repeats):
        for count, measured in runs.items():
            measured.append(_measured(processes[:count]))
    for process in processes:
        process.stop()

    def median(count, what):
        return statistics.median(run[what] for run in runs[count])

    result = {
        "throughput_ratio": median(2, "wall") / median(1, "wall"),
        "cpu_ratio": median(2, "cpu") / median(1, "cpu"),
        "queries_per_second": {
            count: [round(run["wall"], 2) for run in found]
            for count, found in runs.items()
        },
        "queries": runs[1][0]["queries"],
        "pass_shards": shards,
        **{
            name: getattr(options, name)
            for name in ("generator", "corpus", "documents", "document", "query")
        },
        "batch": options.batch,
        "load": [round(one, 2) for one in (*load, os.getloadavg()[0])],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
