"""Seconds from a command to its first progress bar, on a tiny job.

    python tests/benchmarks/startup.py --workdir DIR [--trees TREE ...] [--rounds 3]

The stages and their inputs are those of `kills.py`; a command without a bar counts to
its end. Each command is killed at its bar. `--trees` compares checkouts of the project:
the sides alternate within each round, over the same inputs, which the first tree makes.

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
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/benchmarks")]

from kills import OUT, Bench  # noqa: E402

STAGES = ("finetune", "train_retriever", "synthesize", "pipeline")
TOOLS = {
    "tfdpsq --help": ["tfdpsq.run", "--help"],
    "finetune --help": ["tfdpsq.run.finetune", "--help"],
    "bad setting": ["tfdpsq.run.finetune", "--config.steps=-1", "--workdir={out}"],
    "verify": ["tfdpsq.run.verify", "{finetune}/certificate.json"],
    "status": ["tfdpsq.run.status", "{reference}/finetune"],
}
_TICK = os.sysconf("SC_CLK_TCK")


def measured(words, tree, place):
    """Returns wall and processor seconds to the first bar, or to the end."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tree}:{ROOT / 'tests'}",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": "-1",
    }
    log = place / "said"
    with open(log, "wb") as file:
        started = time.monotonic()
        child = subprocess.Popen(
            words, cwd=tree, env=environment, stdout=file, stderr=file
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
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--trees", nargs="*", default=[str(ROOT)])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commands", nargs="*", default=[*TOOLS, *STAGES])
    options = parser.parse_args()
    bench = Bench(options.workdir)
    reference = bench.directory / "reference"
    commands = {}
    bench.reference("finetune")
    out = bench.directory / "started"
    for name in options.commands:
        if name in TOOLS:
            made = reference / "finetune" / OUT
            places = {"finetune": made, "reference": reference, "out": out / "bad"}
            words = [word.format(**places) for word in TOOLS[name]]
            commands[name] = [sys.executable, "-m", *words]
        else:
            commands[name] = bench.command(name, out)
    found = {name: {tree: [] for tree in options.trees} for name in commands}
    for _ in range(options.rounds):
        for name, words in commands.items():
            for tree in options.trees:
                shutil.rmtree(out, ignore_errors=True)
                if name in TOOLS:
                    out.mkdir()
                else:
                    bench.begin(name, out)
                found[name][tree].append(measured(words, tree, out))
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
