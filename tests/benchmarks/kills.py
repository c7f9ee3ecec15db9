"""kill -9 at random moments, then the same command again: is anything lost or shown?

    python tests/benchmarks/kills.py --workdir DIR [--kills 50] [--seed 0] \
        [--stages finetune train_retriever synthesize pipeline]

Each stage of a tiny job first runs without a kill: its reference. A kill starts the
same command in a directory of its own, sends SIGKILL to its process group after a
random share of the reference's time, and runs the command again to its end. Then

  - the released files are the reference's, to the byte (but for stage.json's ids);
  - each ledger pays every step once, and `verify` accepts each certificate with it;
  - outside `private/` stands no private query, fingerprint key or seed.

Noise comes from fresh entropy, so a private stage's kills start from what its reference
had in `private/` when it had paid for one step. `pipeline` draws its seeds as it goes:
its files are compared by name alone.

Prints one JSON line. Exit status 1: a check failed, and that kill's directory is kept.
"""

import argparse
import collections
import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from helpers import secret_search, tiny  # noqa: E402

from tfdpsq.run import verify  # noqa: E402

PRIVATE, OUT = "private", "made"
_PIPELINE = """from helpers import tiny


def get_config():
    return tiny.tiny_config({!r})
"""


class Bench:
    """The inputs, the references and the kills, all in one directory."""

    def __init__(self, directory):
        """Makes the inputs unless they exist."""
        self.directory = pathlib.Path(directory).resolve()
        self.inputs = self.directory / "inputs"
        config = self.inputs / "pipeline.py"
        if not config.is_file():
            queries = tiny.write_start(self.inputs)
            (self.inputs / "queries.json").write_text(json.dumps(queries))
            (self.inputs / "fingerprint.key").write_text(os.urandom(32).hex())
            config.write_text(_PIPELINE.format(str(self.inputs / "pairs")))
        training = tiny.training(
            self.inputs, steps=8, save_every=2, microbatch_size=4, epsilon=8.0
        )
        writing = {
            "generator": self.directory / "reference" / "finetune" / OUT,
            "corpus": self.inputs / "pairs",
            "batch_size": 16,
            "shards": 2,
            "shard_documents": 40,
        }
        self.stages = {
            "finetune": training,
            "train_retriever": {
                **training,
                "method": "public_negatives",
                "negatives": 12,
                "refresh_every": 3,
                "embedding_dim": 16,
            },
            "synthesize": writing,
            "pipeline": {},
        }

    def command(self, name, place):
        """Returns the command of a stage that writes below `place`."""
        words = [f"tfdpsq.run.{name}", f"--workdir={place / OUT}"]
        words += [f"--config.{key}={of}" for key, of in self.stages[name].items()]
        if name == "pipeline":
            words.append(f"--config={self.inputs / 'pipeline.py'}")
        return [sys.executable, "-m", *words]

    def begin(self, name, place):
        """Makes a stage's directory, with the seeds of its reference or the key."""
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        seeds = self.directory / "seeds" / name
        if seeds.is_dir():
            shutil.copytree(seeds, place / PRIVATE)
        elif name != "pipeline":
            (place / PRIVATE).mkdir(mode=0o700)
            shutil.copy(self.inputs / "fingerprint.key", place / PRIVATE)

    def reference(self, name):
        """Runs a stage without a kill, once; returns its directory and seconds."""
        place, seeds = (self.directory / of / name for of in ("reference", "seeds"))
        said = place.with_suffix(".json")
        if not said.is_file():
            if name == "synthesize":
                self.reference("finetune")
            shutil.rmtree(seeds, ignore_errors=True)
            self.begin(name, place)
            started = time.monotonic()
            with _started(self.command(name, place), place) as child:
                ledger = place / PRIVATE / "runs" / OUT / "ledger.jsonl"
                while "method" in self.stages[name] or name == "finetune":
                    if child.poll() is not None:
                        break
                    if ledger.is_file() and ledger.read_bytes().count(b"\n") > 1:
                        # Stopped while it is copied: what a kill here would leave.
                        os.killpg(child.pid, signal.SIGSTOP)
                        shutil.copytree(place / PRIVATE, seeds)
                        os.killpg(child.pid, signal.SIGCONT)
                        break
                    time.sleep(0.002)
                _require_success(child, place)
            said.write_text(json.dumps(time.monotonic() - started))
        return place, json.loads(said.read_text())

    def kill(self, number, name, random):
        """Kills a stage at a moment drawn from `random`; returns the findings."""
        reference, seconds = self.reference(name)
        place = self.directory / "kills" / f"{number:03d}-{name}"
        self.begin(name, place)
        # Two thirds of a tiny stage are imports: later moments are likelier.
        moment = float(random.beta(2, 1)) * seconds
        with _started(self.command(name, place), place) as child:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(moment)
            ended = child.poll() is not None
        with _started(self.command(name, place), place) as child:
            _require_success(child, place)
        problems = self.problems(name, place, reference)
        if not problems:
            shutil.rmtree(place)
        return {
            "stage": name,
            "seconds": round(moment, 2),
            "while_running": not ended,
            "problems": problems,
        }

    def problems(self, name, place, reference):
        """Returns what is wrong after the second run, as texts."""
        below = f"{OUT}/release" if name == "pipeline" else OUT
        ours, theirs = (_contents(base, below) for base in (place, reference))
        found = [
            f"left over or missing: {of}" for of in sorted(set(ours) ^ set(theirs))
        ]
        if name != "pipeline":
            both = sorted(set(ours) & set(theirs))
            found += [f"other content: {of}" for of in both if ours[of] != theirs[of]]
        ledgers = {}
        for ledger in sorted(place.rglob("ledger.jsonl")):
            header, *lines = map(json.loads, ledger.read_text().splitlines())
            paid = collections.Counter(line["step"] for line in lines)
            if paid != collections.Counter(range(header["steps"])):
                found.append(f"{ledger}: paid {sorted(paid.elements())}")
            ledgers[header["run"]] = str(ledger)
        for path in sorted(place.rglob("certificate.json")):
            own = [of for run, of in ledgers.items() if run in path.read_text()]
            holds, said = verify.verify([str(path)], own)
            if not holds:
                found.append(f"verify {path}: {said[-500:]}")
        queries = json.loads((self.inputs / "queries.json").read_text())
        secrets = [("query", query) for query in queries]
        for key in place.rglob("fingerprint.key"):
            secrets.append(("key", key.read_text().strip()))
        for path in (self.directory / "seeds" / name).rglob("secrets.json"):
            secrets.append(("seed", json.loads(path.read_text())["seed"]))
        secrets = [secret_search.Secret(*each) for each in secrets]
        shown = secret_search.find_secrets(place / below, secrets)
        return found + [f"outside private/: {line}" for line in shown]


@contextlib.contextmanager
def _started(command, place):
    """Starts a command in a process group, which is killed at the end; it logs."""
    with open(place.parent / f"{place.name}.log", "ab") as log:
        child = subprocess.Popen(
            list(map(str, command)),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _require_success(child, place):
    if status := child.wait(900):
        log = place.parent / f"{place.name}.log"
        raise RuntimeError(f"exit status {status}: {log.read_text()[-1500:]}")


def _contents(base, below):
    """Returns {file: content} below a directory."""
    found = {}
    for path in (base / below).rglob("*"):
        # A record has random ids; TensorBoard's events have times.
        if path.is_file() and "tfevents" not in path.name:
            content = path.read_bytes().replace(str(base).encode(), b"BASE")
            name = str(path.relative_to(base))
            found[name] = b"" if path.name == "stage.json" else content
    return found


def main():
    """Kills, and prints all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stages", nargs="+", help="default: all")
    options = parser.parse_args()
    bench = Bench(options.workdir)
    names = options.stages or list(bench.stages)
    random = np.random.default_rng(options.seed)
    kills = [
        bench.kill(number, names[number % len(names)], random)
        for number in range(options.kills)
    ]
    failed = [line for line in kills if line["problems"]]
    print(json.dumps({"benchmark": "kills", "failed": len(failed), "kills": kills}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
