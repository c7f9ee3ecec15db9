"""The quickstart job for several seeds, and the differences between its rows.

    python tests/benchmarks/quickstart.py --workdir DIR --seeds 0 1 2 [-- FLAGS]

Runs `tfdpsq pipeline` on configs/quickstart.py, with all rows, once per seed, into
DIR/seed0 and so on, and prints one JSON line. Finished seeds are not run again.
DIR/quickstart.json holds the line, DIR/quickstart.svg its plot;
`results/` here keeps those of the figures in README.md.

A row "+ bm25" is the row before it, fused with BM25 by the job's weight, and compared
with public-only fused; one "reranked_…" with BM25 reranked by the public T5. A query's
value is the mean of its NDCG@10 over seeds, and each pair of rows is compared by the
paired bootstrap over queries; `by_seed` shows the variation from training.
`share_of_original` is synthetic over original; `share_of_gain` is what ε = 8 keeps of
what reranking gains at ε = ∞. `seconds` are the jobs' own stages.
"""

import argparse
import json
import pathlib
import subprocess
import sys

import numpy as np

from tfdpsq import evaluation, results

ROOT = pathlib.Path(__file__).resolve().parents[2]
METRIC = "ndcg@10"
# Rows are compared with this one (see `reference_of`); and these pairs besides:
# (better, worse).
REFERENCE = "public_only"
BM25, FUSED, RERANKED = "bm25", " + bm25", "reranked_"
LABELS = {
    "original": "original, no protection",
    "synthetic_inf": "synthetic, ε = ∞",
    "synthetic_eps8": "synthetic, ε = 8",
    "untrained": "untrained encoder",
    "direct_eps8": "direct, public negatives, ε = 8",
}
_BESIDE = {"textcoords": "offset points", "fontsize": "small"}
PAIRS = (
    ("synthetic_eps8", "direct_eps8"),
    ("synthetic_eps8", "untrained"),
    ("original", "synthetic_eps8"),
    ("direct_eps8 + bm25", "synthetic_eps8 + bm25"),
    ("reranked_eps8", "bm25"),
    ("reranked_inf", "bm25"),
)


def reference_of(name):
    """Returns the row that a row is compared with."""
    if name.startswith(RERANKED):
        return RERANKED + REFERENCE
    return REFERENCE + FUSED if name.endswith(FUSED) else REFERENCE


def values_of(job):
    """Returns {row: [queries] NDCG@10} of a job; fused rows by the job's weights."""
    found = job / "private" / "evaluation"
    weights = json.loads((found / "metrics.json").read_text("utf-8"))["fused"]
    qrels = evaluation.read_trec_qrels(found / "qrels.trec")
    runs = {
        path.stem: evaluation.read_trec_run(path)
        for path in sorted((found / "runs").glob("*.trec"))
    }
    for name in weights:
        shares = [1 - weights[name]["weight"], weights[name]["weight"]]
        runs[name + FUSED] = evaluation.fuse([runs[BM25], runs[name]], shares)
    return {
        name: np.array(evaluation.evaluate_run(qrels, run, [METRIC]).values(METRIC))
        for name, run in runs.items()
    }


def comparison(means, runs, better, worse):
    """Returns the difference of one row from another, over queries and by seed."""
    found = evaluation.paired_bootstrap(means[better], means[worse])
    return {
        "difference": round(found.difference, 4),
        "low": round(found.low, 4),
        "high": round(found.high, 4),
        "p": round(found.p_value, 4),
        "by_seed": [
            round(float(run[better].mean() - run[worse].mean()), 4) for run in runs
        ],
    }


def summary(workdirs):
    """Returns the printed summary of finished jobs."""
    runs = [values_of(workdir) for workdir in workdirs]
    names = [name for name in runs[0] if all(name in run for run in runs)]
    means = {name: np.mean([run[name] for run in runs], axis=0) for name in names}
    compared = {}
    pairs = [(name, reference_of(name)) for name in names if name != reference_of(name)]
    for better, worse in [*pairs, *PAIRS]:
        if better in means and worse in means:
            name = f"{better} - {worse}"
            compared[name] = comparison(means, runs, better, worse)
    found = {}
    if RERANKED + REFERENCE in means:  # the job's flags may leave reranking out
        rows = (REFERENCE, "eps8", "inf")
        public, private, free = (means[RERANKED + row].mean() for row in rows)
        share = (private - public) / (free - public)
        found["share_of_gain"] = round(float(share), 3)
    return {
        METRIC: {name: round(float(means[name].mean()), 4) for name in names},
        "by_seed": {
            name: [round(float(run[name].mean()), 4) for run in runs] for name in names
        },
        "share_of_original": round(
            float(means["synthetic_eps8"].mean() / means["original"].mean()), 3
        ),
        **found,
        "compared": compared,
        "seconds": [
            round(float(results.open_job(each).stages["seconds"].sum()))
            for each in workdirs
        ],
    }


def draw(found, path):
    """Plots each row's difference from public-only, with its 95 % interval."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "tfdpsq"  # the same bytes from the same figures
    pyplot.rcParams["svg.fonttype"] = "none"
    rows = [
        (name, found[METRIC][name], found["compared"][f"{name} - {REFERENCE}"])
        for name in sorted(found[METRIC], key=found[METRIC].get)
        if reference_of(name) == REFERENCE and name not in (REFERENCE, BM25)
    ]
    figure, axes = pyplot.subplots(figsize=(7, 2.4), layout="constrained")
    for place, (name, mean, over) in enumerate(rows):
        colour = "tab:red" if name == "synthetic_eps8" else "tab:gray"
        axes.plot([over["low"], over["high"]], [place, place], color=colour)
        axes.plot(over["difference"], place, "o", color=colour)
        axes.annotate(f"{mean:.4f}", (over["high"], place), (6, -3), **_BESIDE)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [LABELS.get(row[0], row[0]) for row in rows])
    axes.set_xlabel("NDCG@10 over public-only, with 95 % interval")
    axes.margins(x=0.15, y=0.1)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main():
    """Runs what is not finished and prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("flags", nargs="*", help="after --: flags of the pipeline")
    options = parser.parse_args()
    workdirs = []
    for seed in options.seeds:
        workdirs.append(options.workdir / f"seed{seed}")
        command = [sys.executable, "-m", "tfdpsq.run", "pipeline"]
        command += [f"--config={ROOT / 'configs' / 'quickstart.py'}"]
        command += [f"--workdir={workdirs[-1]}", f"--config.seed={seed}"]
        command += ["--config.rows=all"]
        subprocess.run(
            [*command, *options.flags], check=True, cwd=ROOT, stdout=sys.stderr
        )
    found = summary(workdirs)
    line = json.dumps(found)
    (options.workdir / "quickstart.json").write_text(line + "\n", encoding="utf-8")
    draw(found, options.workdir / "quickstart.svg")
    print(line)


if __name__ == "__main__":
    main()
