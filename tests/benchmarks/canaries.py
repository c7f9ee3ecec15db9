"""Canaries in a generator's training data: leaks without DP, and at ε = 8.

    python tests/benchmarks/canaries.py --workdir DIR

Inserts the paper's canaries (section 6.3) into private pairs, each secret with its own
user; trains the quickstart's generator on them for each privacy unit and ε; writes a
set; and audits both (see `run/stages/audit.py`). Prints one JSON line: for each of
these and each number of repetitions the mean rank of the secrets among 100 candidates
with its p-value against chance, their mean exposure, the share that leaked into the
set, which has a query for every training document, and the lower bounds on ε.

A secret repeated 100 times is 100 units under unit query, and one under unit user:
`--guarantees` chooses the measured ones, as UNIT:EPSILON.

`--pairs` limits the training pairs: a secret is learnt by its number of appearances,
which takes fewer steps among fewer other pairs. `--document_length` defaults to the
quickstart's.
"""

import argparse
import json
import math
import pathlib
import sys
import time

import numpy as np
import tensorflow as tf

from tfdpsq.run.common import canary_set, kinds
from tfdpsq.run.frame import runner, settings
from tfdpsq.run.frame.places import Place
from tfdpsq.run.stages import audit, canaries, finetune, synthesize

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from configs import quickstart as quickstart_config  # noqa: E402


def execute(stage, out, changes):
    """Runs a stage unless it is finished, and forgets its graphs."""
    made = settings.from_config(stage.Settings, changes)
    runner.execute(stage, made, Place.of(out))
    tf.keras.backend.clear_session()


def run(options):
    """Runs missing stages; returns {unit and ε: content of audit.json}."""
    job, private = quickstart_config.get_config(), options.workdir / "private"
    inserted = {"data": kinds.PYDOCS, "trials": options.trials, "coins": options.coins}
    inserted |= {"repetitions": tuple(options.repetitions)}
    inserted |= {"most_pairs": options.pairs}
    execute(canaries.STAGE, private / "canaries", inserted)
    found = {}
    for unit, epsilon in options.guarantees:
        name = f"{unit}_{'inf' if math.isinf(epsilon) else f'eps{epsilon:g}'}"
        training = job.finetune.to_dict()
        if options.document_length:
            training["document_length"] = options.document_length
        training |= {
            "pairs": str(private / "canaries" / canary_set.DATA),
            "init": job.init,
            "unit": unit,
            "epsilon": epsilon,
            "steps": options.steps,
            "epochs": 0.0,
            "batch_size": options.batch_size,
            "query_length": 32,
        }
        generator = private / f"generator_{name}"
        execute(finetune.STAGE, generator, training)
        writing = job.synthesize.to_dict()
        corpus = training["pairs"]
        writing |= {"generator": str(generator), "corpus": corpus, "max_length": 24}
        writing |= {"documents": "train", "training_documents_are_public": True}
        written = private / f"synthetic_{name}"
        execute(synthesize.STAGE, written, {**writing, "max_documents": 0})
        auditing = {
            "canaries": str(private / "canaries"),
            "generator": str(generator),
            "synthetic": str(written),
            "members": options.members,
        }
        out = private / f"audit_{name}"
        execute(audit.STAGE, out, auditing)
        found[name] = json.loads((out / audit.AUDIT_FILE).read_text("utf-8"))
    return found


def summary(found):
    """Returns the figures of an audit that the README shows."""
    return {
        "epsilon": found["epsilon_certified"],
        "unit": found["unit"],
        "repeated": {
            str(entry["repetitions"]): {
                "units": entry["units"],
                "ranks": entry["ranks"],
                "mean_rank": round(entry["mean_rank"], 2),
                "p_value": entry["p_value"],
                "ranked_first": float(np.mean(np.equal(entry["ranks"], 1))),
                "exposure": round(float(np.mean(entry["exposure"])), 2),
                "leaked": entry["leaked"],
                "epsilon_pure": round(entry["epsilon_pure"], 4),
            }
            for entry in found["canaries"]
            if entry["form"] == "all"
        },
        "epsilon_at_least": {
            name: round(each["epsilon"], 3) for name, each in found["one_run"].items()
        },
        "coins_auc": {
            name: [round(value, 4) for value in each["auc"]]
            for name, each in found["one_run"].items()
        },
        "membership_auc": {
            name: [round(value, 4) for value in each["auc"]]
            for name, each in found["membership"].items()
        },
    }


def guarantee(text):
    """Parses a unit and an ε, such as "user:8"."""
    unit, epsilon = text.split(":")
    if unit not in ("query", "user"):
        raise argparse.ArgumentTypeError(f"the unit is {unit!r}; give query or user")
    return unit, float(epsilon)


def main():
    """Parses the flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--pairs", type=int, default=4000)
    parser.add_argument(
        "--guarantees",
        type=guarantee,
        nargs="+",
        default=[("query", math.inf), ("query", 8.0), ("user", 8.0)],
    )
    parser.add_argument("--repetitions", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--coins", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--document_length", type=int, default=0)
    parser.add_argument("--members", type=int, default=1000)
    options = parser.parse_args()
    started = time.time()
    found = run(options)
    sys.stdout.write(
        json.dumps(
            {
                "benchmark": "canaries",
                "data": kinds.PYDOCS,
                "pairs": options.pairs,
                "steps": options.steps,
                "batch_size": options.batch_size,
                **{name: summary(each) for name, each in found.items()},
                "seconds": round(time.time() - started),
            }
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
