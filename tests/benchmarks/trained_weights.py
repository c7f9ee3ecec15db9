"""LoRA against all weights under DP: results of each at the same ε.

    python tests/benchmarks/trained_weights.py --workdir DIR --data pydocs \
        --epsilons 3 8 16 --seeds 0 1 2

For every way, ε and seed: fine-tunes on the private pairs as configs/quickstart.py does
except for the trained weights, writes queries, trains a retriever on them, measures.
Prints one JSON line per cell when it is ready, also to DIR/cells.jsonl; finished cells
are kept, interrupted ones resume. The last line has the means over seeds with their
standard deviations.

`own_loss` and `gap` (nats per token) are the loss of held-out private queries given
their own document, and its increase given another one; `bleu` compares synthetic
queries with held-out ones of the same documents; `ndcg@10` is the retriever's on the
test queries.
"""

import argparse
import json
import math
import pathlib
import statistics
import sys
import time

import numpy as np
import tensorflow as tf

from tfdpsq.data import Tokenizer
from tfdpsq.generator import T5QueryGenerator, encode_pairs
from tfdpsq.generator.pretraining import Watcher
from tfdpsq.run import evaluate, finetune, synthesize, train_retriever
from tfdpsq.run.core import layout, sources

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from configs import quickstart as quickstart_config  # noqa: E402

# Rates and LoRA's rank: the best on public stand-ins (configs/grid.py).
WAYS = {
    "lora": {
        "lora": {"rank": 32, "alpha": 32.0, "targets": ("*projector",)},
        "trained": ("*",),
        "learning_rate": 6e-3,
    },
    "full": {"trained": ("*",), "learning_rate": 2e-3},
    "decoder": {"trained": ("*decoder*",), "learning_rate": 2e-3},
}
MEASURED = ("own_loss", "gap", "bleu", "ndcg@10")
HELD_OUT = 512


def config_of(stage, home, seed, **settings):
    config = stage.copy_and_resolve_references()
    config.seed = seed
    if "private_directory" in config:
        # Of the cell alone: a run's ledger is named after its stage.
        config.private_directory = str(home / "private")
    with config.unlocked():
        config.update(settings)
    return config


def _held_out(generator, data, config):
    """Returns loss and gap of held-out private queries, spread over the corpus."""
    tokenizer = Tokenizer(sources.vocabulary_file("", str(generator)))
    pairs = sources.open_beir(data).pairs("dev")
    count = min(HELD_OUT, len(pairs))
    pairs = [pairs[i] for i in np.linspace(0, len(pairs) - 1, count).astype(int)]
    rows = encode_pairs(
        pairs,
        tokenizer,
        query_length=config.query_length,
        document_length=config.document_length,
    )
    rows["document_key"] = np.arange(count)
    found = Watcher(T5QueryGenerator.from_preset(generator), rows)()
    return {name: round(found[name], 4) for name in ("own_loss", "gap")}


def synthetic_set(options, job, way, epsilon, seed):
    """Trains a generator and writes its queries, or resumes.

    Returns:
      The directory of the cell, which holds the set, and the seconds of training.
    """
    started = time.time()
    home = options.workdir / f"{way}-eps{epsilon:g}-seed{seed}"
    config = config_of(
        job.finetune,
        home,
        seed,
        pairs=options.data,
        init=job.init,
        epsilon=epsilon,
        **WAYS[way],
    )
    finetune.run(config, home / "generator")
    trained_for = time.time() - started
    tf.keras.backend.clear_session()
    synthesize.run(
        config_of(
            job.synthesize,
            home,
            seed,
            generator=str(home / "generator"),
            corpus=options.data,
            max_documents=options.documents,
        ),
        home / "synthetic",
    )
    return home, trained_for


def cell(options, job, way, epsilon, seed):
    """Runs or resumes one cell of the table."""
    started = time.time()
    data = options.data
    home, trained_for = synthetic_set(options, job, way, epsilon, seed)
    vocabulary = str(sources.vocabulary_file("", job.init))
    tf.keras.backend.clear_session()
    train_retriever.run(
        config_of(
            job.retriever,
            home,
            seed,
            init=job.init,
            pairs=str(home / "synthetic" / layout.SET),
            steps=options.documents // job.retriever.batch_size,
        ),
        home / "retriever",
    )
    tf.keras.backend.clear_session()
    evaluate.run(
        config_of(
            job.evaluate,
            home,
            0,
            data=data,
            vocabulary=vocabulary,
            systems={"synthetic": str(home / "retriever")},
            synthetic={"synthetic": str(home / "synthetic" / layout.SET)},
        ),
        home / "evaluation",
    )
    metrics = json.loads((home / "evaluation" / layout.METRICS_FILE).read_text())
    found = _held_out(home / "generator", data, job.finetune)
    tf.keras.backend.clear_session()
    return {
        "way": way,
        "epsilon": epsilon if math.isfinite(epsilon) else "inf",
        "seed": seed,
        **found,
        "bleu": round(metrics["similarity"]["synthetic"]["bleu"], 3),
        "ndcg@10": round(metrics["systems"]["synthetic"]["ndcg@10"], 4),
        "seconds": round(time.time() - started),
        "seconds_training": round(trained_for),
    }


def summary(cells):
    """Returns means over seeds with standard deviations."""
    table = {}
    for way, epsilon in dict.fromkeys((c["way"], c["epsilon"]) for c in cells):
        of_seeds = [c for c in cells if (c["way"], c["epsilon"]) == (way, epsilon)]
        row = {"seeds": len(of_seeds)}
        for name in MEASURED:
            values = [c[name] for c in of_seeds]
            row[name] = round(statistics.mean(values), 4)
            if len(values) > 1:
                row[f"{name}_sd"] = round(statistics.stdev(values), 4)
        table[f"{way}, epsilon {epsilon}"] = row
    return table


def main():
    """Makes missing cells and prints all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--data", default="pydocs", help="or a BEIR directory")
    parser.add_argument("--epsilons", type=float, nargs="+", default=[3.0, 8.0, 16.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=("lora", "full"))
    parser.add_argument("--steps", type=int, help="of fine-tuning; as quickstart's")
    parser.add_argument("--batch_size", type=int, help="the same")
    parser.add_argument("--documents", type=int, default=6400)
    options = parser.parse_args()
    options.workdir.mkdir(parents=True, exist_ok=True)
    job = quickstart_config.get_config()
    for field in ("steps", "batch_size"):
        if getattr(options, field):
            job.finetune[field] = getattr(options, field)
    path = options.workdir / "cells.jsonl"
    cells = [json.loads(line) for line in path.open()] if path.exists() else []
    there = {(c["way"], float(c["epsilon"]), c["seed"]) for c in cells}
    for seed in options.seeds:
        for epsilon in options.epsilons:
            for way in options.ways:
                if (way, epsilon, seed) in there:
                    continue
                cells.append(cell(options, job, way, epsilon, seed))
                line = json.dumps(cells[-1])
                with path.open("a") as file:
                    file.write(line + "\n")
                print(line, flush=True)
    print(json.dumps({"data": options.data, "rows": summary(cells)}))


if __name__ == "__main__":
    main()
