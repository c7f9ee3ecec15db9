"""Filters of a synthetic set: a retriever's gain from each, and what they drop.

    python tests/benchmarks/filters.py --workdir DIR

For every seed: one generator at ε = 8 as in configs/quickstart.py, one set of more
queries than a retriever's steps read, so that a filter has a choice, and a retriever
for each way of filtering the set (see `run/filter.py`). All retrievers take the same
number of steps from the same encoder. Finished stages are not run again; interrupted
ones resume.

Prints one JSON line, and a table on stderr. A query's value is the mean of its NDCG@10
over seeds; every row is compared with the unfiltered set's by the paired bootstrap over
queries, and `by_seed` shows the variation from training itself. `kept` is the share of
the set that passed, `dropped` the number of queries that each filter dropped, both
means over seeds.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time

import jobs
import numpy as np
import quickstart
import tensorflow as tf

from tfdpsq.run import evaluate, prepare, train_retriever
from tfdpsq.run import filter as filter_stage
from tfdpsq.run.core import layout

METRIC = "ndcg@10"
REFERENCE = "unfiltered"
PUBLIC = "public_only"


def rows(options):
    """Returns {row: settings of the stage `filter`, `None` without it}."""
    words, round_trip = {"min_words": 3, "duplicates": True}, {"round_trip": options.k}
    found = {
        PUBLIC: None,
        REFERENCE: None,
        "words_duplicates": words,
        "round_trip": round_trip,
        "all": {**words, **round_trip},
    }
    wanted = [REFERENCE, *(options.only or found)]
    return {name: settings for name, settings in found.items() if name in wanted}


def one_seed(options, seed):
    """Runs the missing stages of one seed.

    Returns:
      {row: [queries] NDCG@10}, and {filtered row: `result` of `stage.json`}.
    """
    job = jobs.quickstart_job()
    job.finetune.steps = options.generator_steps
    home = options.workdir / f"seed{seed}"
    started = time.time()

    def note(what):
        tf.keras.backend.clear_session()
        sys.stderr.write(f"seed {seed}, {what}: {time.time() - started:.0f} s\n")

    def stage(module, config, out, of_seed=seed, **settings):
        module.run(jobs.config_of(config, home, of_seed, **settings), out)
        return out

    def retriever(name, pairs):
        out = stage(
            train_retriever,
            job.retriever,
            home / "retrievers" / name,
            pairs=str(pairs),
            init=job.init,
            steps=options.steps,
        )
        note(name)
        return str(out)

    made = jobs.synthetic_set(
        options, job, options.epsilon, seed, trained=("*decoder*",), learning_rate=2e-3
    )
    whole = made / "synthetic" / layout.SET
    note("a set")
    counts: dict = {}

    def unfiltered(name):
        """Returns a retriever of the whole set, or of public pairs."""
        pairs = whole
        if name == PUBLIC:
            prepared = stage(
                prepare,
                job.prepare,
                home / "prepare",
                data=options.data,
                vocabulary_size=0,
            )
            pairs = prepared / layout.PUBLIC_PAIRS
        return retriever(name, pairs)

    def made_of(name, settings):
        """Returns a retriever of the filtered set."""
        config = filter_stage.default_config()
        config.update(synthetic=str(whole), corpus=options.data, **settings)
        out = home / "filtered" / name
        filter_stage.run(config, out)
        counts[name] = json.loads((out / "stage.json").read_text("utf-8"))["result"]
        return retriever(name, out / layout.SET)

    found = {}
    job.evaluate.systems = {}  # without BM25, which no filter changes
    for name, settings in rows(options).items():
        path = unfiltered(name) if settings is None else made_of(name, settings)
        # By itself, so that rows can be added later.
        out = stage(
            evaluate,
            job.evaluate,
            home / "private" / name,
            of_seed=0,
            data=options.data,
            systems={name: path},
        )
        found.update(quickstart.values(out))
        note(f"{name}, measured")
    return found, counts


def summary(runs, counts):
    """Returns the printed summary of `one_seed`'s results."""
    names = list(runs[0])
    means = {name: np.mean([run[name] for run in runs], axis=0) for name in names}
    return {
        "seeds": len(runs),
        METRIC: {name: round(float(means[name].mean()), 4) for name in names},
        "by_seed": {
            name: [round(float(run[name].mean()), 4) for run in runs] for name in names
        },
        "compared": {
            f"{name} - {REFERENCE}": quickstart.comparison(means, runs, name, REFERENCE)
            for name in names
            if name != REFERENCE
        },
        "kept": {
            name: round(
                statistics.mean(c[name]["kept"] / c[name]["read"] for c in counts), 3
            )
            for name in counts[0]
        },
        "dropped": {
            name: {
                test: round(statistics.mean(c[name]["dropped"][test] for c in counts))
                for test in counts[0][name]["dropped"]
            }
            for name in counts[0]
        },
    }


def main():
    """Runs missing stages and prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--data", default="pydocs", help="or a BEIR directory")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--documents", type=int, default=9600, help="queries written")
    parser.add_argument("--steps", type=int, default=50, help="of every retriever")
    parser.add_argument("--generator_steps", type=int, default=24)
    parser.add_argument("--only", nargs="*", help="rows besides unfiltered; or all")
    parser.add_argument("--k", type=int, default=10, help="of round trips")
    options = parser.parse_args()
    runs, counts = [], []
    for seed in options.seeds:
        values, of_filters = one_seed(options, seed)
        runs.append(values)
        counts.append(of_filters)
    print(json.dumps({"data": options.data, **summary(runs, counts)}))


if __name__ == "__main__":
    main()
