"""Direct DP training against synthetic queries: NDCG@10 of each at the same ε.

    python tests/benchmarks/retrieval.py --workdir DIR --data pydocs

For every seed: BM25, the untrained encoder, a retriever trained on public
pseudo-queries, on the private pairs unprotected, on synthetic queries at ε = ∞ and at
each ε, and on the private pairs directly by each of `CHOSEN` at each ε. All start from
the encoder and take the same number of steps. Each dense row is fused with BM25, too
("bm25+naive"). Finished rows are kept; interrupted ones resume.

Prints one JSON line, and a table on stderr. A query's value is the mean of its NDCG@10
over seeds; rows are compared by the paired bootstrap over queries, and `by_seed` shows
the variation from training itself.
"""

import argparse
import json
import math
import pathlib
import sys
import time

import jobs
import numpy as np
import quickstart
import tensorflow as tf

from tfdpsq import evaluation
from tfdpsq.run import evaluate, prepare, train_retriever
from tfdpsq.run.core import layout, sources
from tfdpsq.run.search import systems

METRIC = "ndcg@10"
# The query tower without its embeddings; the documents' tower is frozen.
QUERY_LAYERS = ("query_tower/*transformer*", "query_tower/projection/kernel")
# What the direct methods train, and how, chosen on public stand-ins.
CHOSEN = {
    # Few rows: sensitivity, and so the noise, grows with the batch.
    "naive": {"batch_size": 4, "learning_rate": 2e-4},
    "microbatch": {
        "shared": False,
        "trained": QUERY_LAYERS,
        "batch_size": 1024,
        "num_microbatches": 128,
        "learning_rate": 5e-4,
    },
    "public_negatives": {
        "shared": False,
        "trained": QUERY_LAYERS,
        "batch_size": 1024,
        "microbatch_size": 128,
        "negatives": 4096,
        "learning_rate": 1e-3,
    },
    # After four trials on the dev queries of pydocs.
    "projection": {
        "method": "public_negatives",
        "shared": False,
        "trained": ("query_tower/projection/kernel",),
        "batch_size": 6144,
        "microbatch_size": 512,
        "negatives": 8192,
        "learning_rate": 2e-3,
    },
}
METHODS = tuple(CHOSEN)


def settings(name):
    """Returns the config of `train_retriever` for one of `CHOSEN`."""
    config = train_retriever.default_config()
    config.n_is_public = True
    config.document_length, config.query_length = 96, 24
    config.embedding_dim, config.scale = 192, 20.0
    config.schedule = "cosine"
    config.update({"method": name, **CHOSEN[name]})
    return config


def label(epsilon):
    """Returns an ε as in the names of rows: "inf" or "eps8"."""
    return "inf" if math.isinf(epsilon) else f"eps{epsilon:g}"


class Seed:
    """One seed's rows, each made on first use."""

    def __init__(self, options, seed):
        """Stores the arguments; makes nothing yet."""
        self.options, self.seed = options, seed
        self.job = jobs.quickstart_job()
        self.home = options.workdir / f"seed{seed}"
        self.vocabulary = str(sources.vocabulary_file("", self.job.init))

    def rows(self):
        """Returns the names of all rows, those that others start from first."""
        epsilons = self.options.epsilons
        plain = ["public_only", "original"]
        plain += [f"synthetic_{label(e)}" for e in (math.inf, *epsilons)]
        yield from ("bm25", "untrained", *plain)
        for epsilon in epsilons:
            yield from (f"{method}_{label(epsilon)}" for method in METHODS)

    def values(self, names):
        """Returns {row: [queries] NDCG@10, in the order of the judgements}."""
        started = time.time()
        missing = {}
        for name in names:
            bm25 = name == "bm25"
            # A finished row is kept, but refused with other settings.
            found = systems.BM25 if bm25 else str(self._retriever(name))
            if not self._evaluated(name):
                missing[name] = found
            seconds = round(time.time() - started)
            sys.stderr.write(f"seed {self.seed}, {name}: {seconds} s\n")
        if missing:
            # Together, so that systems with one document tower share embeddings.
            out = self.home / "evaluation" / f"of_{len(missing)}_{list(missing)[-1]}"
            self._run(
                evaluate,
                self.job.evaluate,
                out,
                seed=0,
                data=self.options.data,
                systems=missing,
            )
        values = {name: self._values(name) for name in names}
        for name in names:
            if name != "bm25" and "bm25" in names:
                values[f"bm25+{name}"] = self._values(name, fused=True)
        return values

    def _evaluated(self, name):
        """Returns the directory of a row's evaluation, or `None`."""
        runs = sorted((self.home / "evaluation").glob(f"[!.]*/runs/{name}.trec"))
        return runs[0].parents[1] if runs else None

    def _values(self, name, fused=False):
        out, run = self._evaluated(name), self._ranking(name)
        if fused:
            weight = self.job.evaluate.fusion.weight
            run = evaluation.fuse([self._ranking("bm25"), run], [1 - weight, weight])
        qrels = evaluation.read_trec_qrels(out / "qrels.trec")
        return np.array(evaluation.evaluate_run(qrels, run, [METRIC]).values(METRIC))

    def _ranking(self, name):
        return evaluation.read_trec_run(self._evaluated(name) / "runs" / f"{name}.trec")

    def _run(self, module, stage, out, seed=None, **settings):
        config = jobs.config_of(
            stage, self.home, self.seed if seed is None else seed, **settings
        )
        module.run(config, out)
        tf.keras.backend.clear_session()
        return out

    def _retriever(self, name):
        out = self.home / "retrievers" / name
        kind, _, epsilon = name.rpartition("_")
        start = {"vocabulary": self.vocabulary, "init": self.job.init}
        steps = self.options.steps
        if kind in METHODS:
            return self._run(
                train_retriever,
                settings(kind),
                out,
                pairs=self.options.data,
                epsilon=float(epsilon.removeprefix("eps")),
                steps=steps,
                **start,
            )
        pairs = self.options.data
        if name in ("untrained", "public_only"):
            prepared = self._run(
                prepare,
                self.job.prepare,
                self.home / "prepare",
                data=pairs,
                vocabulary_size=0,
            )
            pairs = str(prepared / layout.PUBLIC_PAIRS)
        elif kind == "synthetic":
            epsilon = float(epsilon.removeprefix("eps"))
            found = jobs.synthetic_set(
                self.options,
                self.job,
                epsilon,
                self.seed,
                trained=("*",),
                learning_rate=2e-3,
            )
            pairs = str(found / "synthetic" / layout.SET)
        return self._run(
            train_retriever,
            self.job.retriever,
            out,
            pairs=pairs,
            steps=0 if name == "untrained" else steps,
            **start,
        )


def summary(runs):
    """Returns the printed summary of {row: [queries] NDCG@10} of each seed."""
    names = [name for name in runs[0] if all(name in run for run in runs)]
    means = {name: np.mean([run[name] for run in runs], axis=0) for name in names}
    pairs = []
    for name in names:
        public = "bm25+public_only" if name.startswith("bm25+") else "public_only"
        pairs += [(name, public)] if name != public else []
        kind, _, epsilon = name.rpartition("_")
        synthetic = f"synthetic_{epsilon}"
        if kind in METHODS and synthetic in means:
            pairs.append((synthetic, name))
    return {
        "seeds": len(runs),
        METRIC: {name: round(float(means[name].mean()), 4) for name in names},
        "by_seed": {
            name: [round(float(run[name].mean()), 4) for run in runs] for name in names
        },
        "compared": {
            f"{better} - {worse}": quickstart.comparison(means, runs, better, worse)
            for better, worse in pairs
            if better in means and worse in means
        },
    }


def main():
    """Makes missing rows and prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--data", default="pydocs", help="or a BEIR directory")
    parser.add_argument("--epsilons", type=float, nargs="+", default=[3.0, 8.0, 16.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=50, help="of every retriever")
    parser.add_argument("--generator_steps", type=int, default=24)
    parser.add_argument("--only", nargs="*", help="rows; all by default")
    options = parser.parse_args()
    runs = []
    for number in options.seeds:
        seed = Seed(options, number)
        seed.job.finetune.steps = options.generator_steps
        options.documents = options.steps * seed.job.retriever.batch_size
        wanted = [n for n in seed.rows() if not options.only or n in options.only]
        runs.append(seed.values(wanted))
        sys.stderr.write(quickstart.markdown(summary(runs)) + "\n")
    print(json.dumps({"data": options.data, **summary(runs)}))


if __name__ == "__main__":
    main()
