"""Seconds from a command to its first progress bar, on tiny inputs.

    python tests/benchmarks/startup.py --workdir DIR [--trees TREE ...] [--rounds 3]

A command without a bar counts to its end; others are killed at their bar. `--trees`
compares checkouts of the project: the sides alternate within each round.

Prints one JSON line: for each command and tree the least and the median of the wall
seconds, and of the process's own user and system seconds, which a busy machine changes
less.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from helpers import framed, killing, tiny  # noqa: E402

_TICK = os.sysconf("SC_CLK_TCK")


def commands(inputs, out):
    """Returns {name: words after `python -m tfdpsq.run`}."""
    training = tiny.training(inputs, steps=8, microbatch_size=4, epsilon=8.0)
    data, public = inputs / "pairs", inputs / "public"
    plain = {**training, "embedding_dim": 16, "epsilon": "inf"}
    for without_effect in ("accountant", "microbatch_size"):
        del plain[without_effect]
    stages = {
        "prepare": {"data": data, "vocabulary_size": 0},
        "finetune": training,
        "synthesize": {"generator": public, "corpus": data},
        "train_retriever": plain,
        "evaluate": {"data": data},
    }
    found = {
        name: killing.command(name, out / "private" / name, settings, False)[3:]
        for name, settings in stages.items()
    }
    return {
        "--help": ["--help"],
        "finetune --help": ["finetune", "--help"],
        "bad setting": [*found["finetune"], "--config.steps=-1"],
        "verify": ["verify", f"{inputs / 'certified'}"],
        "status": ["status", f"{inputs}"],
        **found,
    }


def measured(words, tree, log):
    """Returns wall and processor seconds to the first bar, or to the end."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tree}",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": "-1",
    }
    with open(log, "wb") as file:
        started = time.monotonic()
        child = subprocess.Popen(
            [sys.executable, "-m", "tfdpsq.run", *words],
            cwd=tree,
            env=environment,
            stdout=file,
            stderr=file,
        )
        used = 0.0
        while True:
            # Read before it is asked for its status, which ends the entry.
            fields = pathlib.Path(f"/proc/{child.pid}/stat").read_text()
            user, system = fields.rpartition(")")[2].split()[11:13]
            used = max(used, (int(user) + int(system)) / _TICK)
            ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended or b"%|" in log.read_bytes():
                break
            time.sleep(0.01)
        wall = time.monotonic() - started
    child.kill()
    status = child.wait()
    if ended and status not in (0, 2):
        raise RuntimeError(f"{words} in {tree} ended with {status}: {log.read_text()}")
    return wall, used


def main():
    """Measures every command of every tree in alternation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--trees", nargs="*", default=[str(ROOT)])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    inputs, out = (options.workdir.resolve() / of for of in ("inputs", "out"))
    if not inputs.is_dir():
        tiny.write_start(inputs)
        (inputs / "certified").mkdir()
        framed.certify(inputs / "certified", 8.0)
    made = commands(inputs, out)
    found = {name: {tree: [] for tree in options.trees} for name in made}
    for _ in range(options.rounds):
        for name, words in made.items():
            for tree in options.trees:
                shutil.rmtree(out, ignore_errors=True)
                out.mkdir()
                found[name][tree].append(measured(words, tree, out / "said"))
    result = {
        name: {
            tree: {
                kind: [round(min(of), 2), round(statistics.median(of), 2)]
                for kind, of in zip(("wall", "processor"), zip(*runs))
            }
            for tree, runs in sides.items()
        }
        for name, sides in found.items()
    }
    print(json.dumps({"benchmark": "startup", "rounds": options.rounds, **result}))


if __name__ == "__main__":
    main()
