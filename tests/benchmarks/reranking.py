"""BM25 reranked by generators: what private queries are worth, with and without ε.

    python tests/benchmarks/reranking.py --workdir DIR [--config quickstart] \
        [--data DIR] [--seeds 0 1 2] [--epsilons 3 8 16] [--finished]

Runs a job of `configs/` without its retrievers, once per seed, into DIR/seed0 and so
on: the public T5, generators of every ε, and BM25's best documents ordered by each.
Other data than pydocs need `--pretrain_steps 500`. Finished seeds are not run again;
with `--finished` they are read as they are, those of `quickstart.py` too.

Prints one JSON line: NDCG@10 on the test queries, by row and seed; differences of means
over seeds, paired by query, with 95 % intervals; `share_of_gain`, how much of the
unprotected generator's gain over the public T5 each ε keeps; and `by_weight`, NDCG@10
with other weights of the likelihood, from the same runs: a look at the test queries
that nothing is chosen by.
"""

import argparse
import json
import math
import pathlib
import runpy

import numpy as np
from quickstart import METRIC, RERANKED, ROOT, comparison, values

from tfdpsq import evaluation
from tfdpsq.evaluation import ranked
from tfdpsq.run import pipeline
from tfdpsq.run.reporting.content import Row

WEIGHTS = (0.05, 0.08, 0.12, 0.16, 0.2, 0.25, 0.3)
PUBLIC, UNPROTECTED = "reranked_public_only", "reranked_inf"


def run(config, workdir):
    """Runs a job's generators and rerankers."""
    job = pipeline.open_job(config, workdir)
    job.prepare()
    rows = job.rerankers(job.generators())
    job.evaluate([Row("bm25", "BM25", None, None), *rows], {})


def summary(workdirs):
    """Returns the printed summary of finished jobs."""
    runs = [
        {
            name: found
            for name, found in values(workdir / "private" / "evaluation").items()
            if name == "bm25" or name.startswith(RERANKED)
        }
        for workdir in workdirs
    ]
    means = {name: np.mean([run[name] for run in runs], axis=0) for name in runs[0]}
    gain = means[UNPROTECTED].mean() - means[PUBLIC].mean()
    protected = [n for n in means if n not in (PUBLIC, UNPROTECTED, "bm25")]
    pairs = [(n, PUBLIC) for n in means if n not in (PUBLIC, "bm25")]
    pairs += [(n, "bm25") for n in means if n != "bm25"]
    return {
        "queries": len(means[PUBLIC]),
        METRIC: {name: round(float(mean.mean()), 4) for name, mean in means.items()},
        "by_seed": {
            name: [round(float(run[name].mean()), 4) for run in runs] for name in means
        },
        "share_of_gain": {
            name: round(float((means[name].mean() - means[PUBLIC].mean()) / gain), 3)
            for name in protected
        },
        "compared": {
            f"{better} - {worse}": comparison(means, runs, better, worse)
            for better, worse in pairs
        },
    }


def values_by_weight(evaluated, config):
    """Returns {row: {weight: NDCG@10 of each query}}; likelihoods are in the scores."""
    runs = evaluated / "runs"
    base = evaluation.read_trec_run(runs / "bm25.trec")
    qrels = evaluation.read_trec_qrels(evaluated / "qrels.trec")
    own, found = config.evaluate.rerank, {}
    for path in runs.glob("reranked_*.trec"):
        run = evaluation.read_trec_run(path)
        by_weight = {}
        for weight in WEIGHTS:
            scores = {}
            for query, hits in base.items():
                best = dict(ranked(hits)[: own["depth"]])
                scores[query] = {}
                for name, score in best.items():
                    nats = run[query][name] - (1 - own["weight"]) * score
                    nats /= own["weight"]
                    scores[query][name] = (1 - weight) * score + weight * nats
            measured = evaluation.evaluate_run(qrels, scores, [METRIC])
            by_weight[weight] = np.array(measured.values(METRIC))
        found[path.stem] = by_weight
    return found


def by_weight(workdirs, config):
    """Returns means over queries and seeds, and rows at their own best weights."""
    runs = [values_by_weight(w / "private" / "evaluation", config) for w in workdirs]
    means = {
        name: {w: np.mean([run[name][w] for run in runs], axis=0) for w in WEIGHTS}
        for name in runs[0]
    }
    best = {
        name: max(values, key=lambda w: values[w].mean())
        for name, values in means.items()
    }
    return {
        METRIC: {
            name: {str(w): round(float(v.mean()), 4) for w, v in values.items()}
            for name, values in sorted(means.items())
        },
        "each_at_its_best": {
            name: {"weight": best[name], **_over(means, best, name)}
            for name in sorted(means)
        },
    }


def _over(means, best, name):
    own, public = means[name][best[name]], means[PUBLIC][best[PUBLIC]]
    difference = own - public
    half = 1.96 * difference.std() / math.sqrt(len(difference))
    mean = difference.mean()
    return {
        "over_public_only": [
            round(float(v), 4) for v in (mean, mean - half, mean + half)
        ]
    }


def main():
    """Runs what is not finished and prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--config", default="quickstart", help="a name in configs/")
    parser.add_argument("--data", default="pydocs")
    parser.add_argument("--pretrain_steps", type=int, default=0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--epsilons", type=float, nargs="+", help="of generators; inf is added"
    )
    parser.add_argument("--finished", action="store_true", help="run nothing")
    options = parser.parse_args()
    config_file = ROOT / "configs" / f"{options.config}.py"
    get_config = runpy.run_path(str(config_file))["get_config"]
    workdirs = []
    for seed in options.seeds:
        config = get_config()
        config.data, config.seed = options.data, seed
        config.pretrain.steps = options.pretrain_steps
        config.direct_epsilons = ()  # not run, and its batch may exceed other data
        if options.epsilons:
            config.epsilons = (math.inf, *options.epsilons)
        workdirs.append(options.workdir / f"seed{seed}")
        if not options.finished:
            run(config, workdirs[-1])
    of = {"config": options.config, "data": pathlib.Path(options.data).name}
    found = {**summary(workdirs), "by_weight": by_weight(workdirs, config)}
    print(json.dumps({**of, **found}))


if __name__ == "__main__":
    main()
