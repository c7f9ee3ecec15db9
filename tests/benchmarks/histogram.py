"""Synthetic queries for documents in proportion to a private histogram, and for each.

    python tests/benchmarks/histogram.py --workdir DIR [--data BEIR] [--init T5] \
        [--only amazon --share 0.05] [--seeds 0 1 2] [--histogram_epsilon 0.4]

Runs the quickstart's generator of epsilon 8, its synthetic set, a retriever trained on
it and the evaluation, twice for each seed: with and without `histogram_epsilon`. Both
have the same epsilon in all and as many queries as documents. `--only` makes the log
skewed first: of the queries of documents whose id begins otherwise, a share is kept.
Finished jobs are not run again. For other data than pydocs, `--init` is a T5 that was
trained on its documents.

Prints one JSON line: NDCG@10 on the test queries, alone and fused with BM25, by row and
seed, and differences of means over seeds, paired by query, with 95 % intervals.
"""

import argparse
import json
import pathlib
import random
import runpy
import shutil

import numpy as np
from quickstart import METRIC, ROOT, comparison, values

from tfdpsq.run import pipeline
from tfdpsq.run.core import sources

_ROW = "synthetic_eps8"
WEIGHT = pipeline.default_config().evaluate.fusion.weight


def skewed(data, folder, only, share):
    """Writes a BEIR directory with a share of the queries of other documents."""
    if folder.exists():
        return folder
    beir, chosen = pathlib.Path(sources.open_beir(data).path), random.Random(0)
    shutil.copytree(beir, folder, copy_function=shutil.copyfile)
    for path in (folder / "qrels").iterdir():
        head, *lines = path.read_text().splitlines(keepends=True)
        kept = [
            line
            for line in lines
            if line.split("\t")[1].startswith(only) or chosen.random() < share
        ]
        path.write_text("".join([head, *kept]))
    return folder


def run(config, workdir):
    """Runs a job's generator, its set, the retrievers and their evaluation."""
    job = pipeline.open_job(config, workdir)
    job.prepare()
    sets = job.synthetic_sets(job.generators())
    job.evaluate(job.retrievers(sets), {})


def summary(workdirs):
    """Returns the printed summary; `workdirs` are pairs of jobs with and without."""
    runs = []
    for pair in workdirs:
        found = {}
        for how, workdir in zip(("by histogram", "for each document"), pair):
            fused_rows = dict.fromkeys((_ROW, "public_only"), WEIGHT)
            of_job = values(workdir / "private" / "evaluation", fused_rows)
            for fused in ("", " + bm25"):
                found[f"{how}{fused}"] = of_job[f"{_ROW}{fused}"]
                found[f"public_only{fused}"] = of_job[f"public_only{fused}"]
            found["bm25"] = of_job["bm25"]
        runs.append(found)
    means = {name: np.mean([run[name] for run in runs], axis=0) for name in runs[0]}
    pairs = [
        (f"{better}{fused}", f"{worse}{fused}")
        for fused in ("", " + bm25")
        for better, worse in (
            ("by histogram", "for each document"),
            ("by histogram", "public_only"),
            ("for each document", "public_only"),
        )
    ]
    return {
        "queries": len(means["bm25"]),
        METRIC: {name: round(float(mean.mean()), 4) for name, mean in means.items()},
        "compared": {
            f"{better} - {worse}": comparison(means, runs, better, worse)
            for better, worse in pairs
        },
    }


def main():
    """Runs what is not finished and prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--data", default="pydocs")
    parser.add_argument("--init", default="t5_tiny_pydocs")
    parser.add_argument("--only", default="")
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--histogram_epsilon", type=float, default=0.4)
    options = parser.parse_args()
    options.workdir.mkdir(parents=True, exist_ok=True)
    data, name = options.data, pathlib.Path(options.data).name
    if options.only:
        data = skewed(data, options.workdir / "data", options.only, options.share)
    get_config = runpy.run_path(str(ROOT / "configs" / "quickstart.py"))["get_config"]
    workdirs = []
    for seed in options.seeds:
        pair = []
        for epsilon in (options.histogram_epsilon, 0.0):
            config = get_config()
            config.data, config.init, config.seed = str(data), options.init, seed
            config.epsilons, config.direct_epsilons = (8.0,), ()
            config.histogram_epsilon, config.rerank = epsilon, False
            config.synthesize.max_documents = 0
            pair.append(options.workdir / f"seed{seed}_{epsilon:g}")
            run(config, pair[-1])
        workdirs.append(pair)
    of = {"data": name, "only": options.only, "share": options.share}
    if not options.only:
        of = {"data": name}
    print(json.dumps({**of, "seeds": options.seeds, **summary(workdirs)}))


if __name__ == "__main__":
    main()
