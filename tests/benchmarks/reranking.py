"""BM25 reranked by generators: what private queries are worth, with and without ε.

    python tests/benchmarks/reranking.py --workdir DIR [--config quickstart] \
        [--data DIR] [--seeds 0 1 2] [--epsilons 3 8 16]

Runs a job of `configs/` without its retrievers, once per seed, into DIR/seed0 and so
on: the public T5, generators of every ε, and BM25's best documents ordered by each.
Other data than pydocs need `--pretrain_steps 500`. Finished seeds are not run again.

Prints one JSON line: NDCG@10 on the test queries, by row and seed; differences of means
over seeds, paired by query, with 95 % intervals; and `share_of_gain`, how much of the
unprotected generator's gain over the public T5 each ε keeps.
"""

import argparse
import json
import math
import pathlib
import runpy

import numpy as np
from quickstart import METRIC, ROOT, comparison, values

from tfdpsq.run import pipeline
from tfdpsq.run.reporting.content import Row

PUBLIC, UNPROTECTED = "reranked_public_only", "reranked_inf"


def run(config, workdir):
    """Runs a job's generators and rerankers."""
    job = pipeline.open_job(config, workdir)
    job.prepare()
    rows = job.rerankers(job.generators())
    job.evaluate([Row("bm25", "BM25", None, None), *rows], {})


def summary(workdirs):
    """Returns the printed summary of finished jobs."""
    runs = [values(workdir / "private" / "evaluation") for workdir in workdirs]
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
    options = parser.parse_args()
    config_file = ROOT / "configs" / f"{options.config}.py"
    get_config = runpy.run_path(str(config_file))["get_config"]
    workdirs = []
    for seed in options.seeds:
        config = get_config()
        config.data, config.seed = options.data, seed
        config.pretrain.steps = options.pretrain_steps
        if options.epsilons:
            config.epsilons = (math.inf, *options.epsilons)
        workdirs.append(options.workdir / f"seed{seed}")
        run(config, workdirs[-1])
    of = {"config": options.config, "data": pathlib.Path(options.data).name}
    print(json.dumps({**of, **summary(workdirs)}))


if __name__ == "__main__":
    main()
