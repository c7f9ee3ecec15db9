"""kill -9 at random moments over every stage of the tiny job, then the same command.

    python tests/benchmarks/kills.py --workdir=DIR [--kills=50] [--seed=0] [--stages=A]

Prints one JSON line per kill and a summary. DIR keeps the reference and every finished
kill, so the same command resumes. Exit status 1: a check failed; the directory of that
kill is kept.

Each stage runs once without a kill: its reference, which the next stages read. A kill
then starts the same command in its own directory, sends SIGKILL to its process group,
and runs the command again to its end. The moment is a random share of the reference's
wall time, or a random delay after an event on disk: a ledger line, a saved state, a
shard, an unfinished output, the finished output.

Checks after the second run:
  - the same files as the reference's, without unfinished ones;
  - the same bytes, except what `kill_checks` leaves out, with reasons;
  - each ledger pays every step once, and `verify --ledger` accepts the certificate;
  - outside `private/` no private query, fingerprint key or seed, in any encoding, and
    no ledger, list of reads or log.

Noise is drawn from fresh entropy, so two private runs never have equal bytes. The
reference of a private stage therefore starts from a run directory that a killed run
left when its first step was paid for: seeds, first weights, and that payment. Kills of
that stage start from a copy of it. Kills named `fresh_*` start from nothing; there,
weights cannot be compared, everything else is. `pipeline` and `choose` draw seeds as
they go and count as fresh.

With --forked, commands are forked from a process that has imported TensorFlow: a kill
takes half the time, and never hits an import. Use one way only per DIR.
"""

import argparse
import contextlib
import importlib
import json
import os
import pathlib
import re
import shutil
import sys
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/benchmarks")]

import kill_moments  # noqa: E402
import secret_search  # noqa: E402
import tiny  # noqa: E402
from kill_checks import (  # noqa: E402
    PRIVATE_NAMES,
    compared,
    folder_of,
    outside,
    unpaid,
    unverified,
)
from kill_moments import (  # noqa: E402
    Failed,
    choose_moment,
    end_group,
    kill_at,
    run_to_the_end,
    start,
    wait,
)
from kill_stages import (  # noqa: E402
    CONFIG,
    PIPELINE,
    PRIVATE,
    named,
    stages,
    write_inputs,
)


class Bench:
    """The inputs, the references and the kills, all in one directory.

    Attributes:
      directory: of all of them.
      queries: all private queries.
    """

    def __init__(self, directory):
        """Makes the inputs unless they exist."""
        self.directory = pathlib.Path(directory).resolve()
        self._stages = {stage.name: stage for stage in stages()}
        inputs = self.directory / "inputs"
        if not inputs.is_dir():
            unfinished = self.directory / "inputs.new"
            shutil.rmtree(unfinished, ignore_errors=True)
            write_inputs(unfinished)
            unfinished.rename(inputs)
        self.queries = json.loads((inputs / "private_queries.json").read_text())

    def reference(self, name):
        """Runs a stage without a kill, once; returns its directory and seconds."""
        stage, place = self._stages[name], self.directory / "reference" / name
        said = place.with_suffix(".json")
        if not said.is_file():
            for other in named(stage.settings):
                self.reference(other)
            shutil.rmtree(place, ignore_errors=True)
            self._begin(stage, place)
            print(f"reference: {name}", file=sys.stderr, flush=True)
            started = time.monotonic()
            run_to_the_end(self._command(stage, place), place)
            said.write_text(json.dumps({"seconds": time.monotonic() - started}))
        return place, json.loads(said.read_text())["seconds"]

    def kill(self, number, name, generator):
        """Kills a stage at a moment drawn from `generator`; returns the findings."""
        stage = self._stages[name]
        reference, seconds = self.reference(name)
        place = self.directory / "kills" / f"{number:03d}-{name}"
        shutil.rmtree(place, ignore_errors=True)
        self._begin(stage, place)
        moment = choose_moment(stage, seconds, generator)
        command = self._command(stage, place)
        try:
            state = kill_at(command, place, stage, moment)
            # `convert` is not a stage: it refuses to replace what is finished.
            refuses = stage.module == "convert" and state["finished"]
            run_to_the_end(command, place, 2 if refuses else 0)
            problems, secrets = self._problems(stage, place, reference)
        except Failed as failed:
            state, problems, secrets = {}, [str(failed)], 0
        if not problems:
            shutil.rmtree(place)
        return {
            "kill": number,
            "stage": name,
            "moment": moment,
            "state": state,
            "ok": not problems,
            "problems": problems,
            "secrets_searched": secrets,
        }

    def _begin(self, stage, place):
        """Makes a stage's directory, with the common key, and seeds where needed."""
        place.mkdir(parents=True)
        key = self.directory / "inputs" / "fingerprint.key"
        private = place / PRIVATE
        if stage.module == "pipeline":
            return
        if stage.seeded:
            shutil.copytree(self._seeds(stage), private)
        else:
            private.mkdir(mode=0o700)
            shutil.copy(key, private)

    def _seeds(self, stage):
        """Makes a private directory as left by a run that was killed in step 0."""
        kept = self.directory / "seeds" / stage.name
        if kept.is_dir():
            return kept
        place = self.directory / "seeding" / stage.name
        shutil.rmtree(place, ignore_errors=True)
        (place / PRIVATE).mkdir(parents=True, mode=0o700)
        shutil.copy(self.directory / "inputs" / "fingerprint.key", place / PRIVATE)
        run = place / PRIVATE / "runs" / pathlib.Path(stage.out).name
        print(f"seeds: {stage.name}", file=sys.stderr, flush=True)
        state, ledger = run / "state" / "step-00000000.npz", run / "ledger.jsonl"

        def paid():
            # Copied at once: later states replace it.
            with contextlib.suppress(FileNotFoundError):
                if not (place / state.name).is_file():
                    shutil.copy(state, place)
                return ledger.read_bytes().count(b"\n") > 1
            return False

        child = start(self._command(stage, place), place)
        wait(child, paid)
        end_group(child)
        ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(True)[:2]))
        for path in (run / "state").iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "secrets.json":
                path.unlink()
        shutil.copy(place / state.name, state)
        shutil.rmtree(place / PRIVATE / "logs", ignore_errors=True)
        kept.parent.mkdir(exist_ok=True)
        (place / PRIVATE).rename(kept)
        return kept

    def _command(self, stage, place):
        words = [sys.executable, "-m", f"tfdpsq.run.{stage.module}"]
        if stage.module == "convert":
            source = self._resolved(stage.settings["input"])
            out = place / stage.out
            return [*words, f"--input={source}", f"--output={out}", "--format=keras"]
        config = self.directory / "configs" / f"{stage.name}.py"
        if not config.is_file():
            config.parent.mkdir(exist_ok=True)
            config.write_text(self._config(stage))
        return [*words, f"--config={config}", f"--workdir={place / stage.out}"]

    def _config(self, stage):
        if stage.module == "pipeline":
            inputs = self.directory / "inputs"
            return PIPELINE.format(
                here=os.path.dirname(tiny.__file__),
                data=str(inputs / "pairs"),
                embedded=str(inputs / "embedded"),
            )
        settings = json.dumps(self._resolved(stage.settings))
        return CONFIG.format(module=stage.module, settings=settings)

    def _resolved(self, value):
        if isinstance(value, dict):
            return {name: self._resolved(held) for name, held in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._resolved(held) for held in value]
        if not isinstance(value, str) or not value.startswith("@"):
            return value
        name, _, below = value[1:].partition("/")
        if name == "@":
            return str(self.directory / "inputs" / below)
        made = self.directory / "reference" / name / self._stages[name].out
        return str(made / below) if below else str(made)

    def _problems(self, stage, place, reference):
        problems = compared(place, reference, stage.fresh)
        for ledger in sorted(place.rglob("ledger.jsonl")):
            problems += unpaid(ledger)
        problems += unverified(place)
        secrets = self._secrets(stage, place)
        for path in outside(place, stage):
            if path.is_dir():
                found = secret_search.find_secrets(path, secrets)
            else:
                with folder_of(path) as folder:
                    found = secret_search.find_secrets(folder, secrets)
            problems += [f"outside private/: {path.name}/{line}" for line in found]
            names = [path, *(path.rglob("*") if path.is_dir() else ())]
            problems += [
                f"outside private/: {name.relative_to(place)}"
                for name in names
                if re.fullmatch(PRIVATE_NAMES, name.name)
            ]
        return problems, len(secrets)

    def _secrets(self, stage, place):
        """Returns all known secrets: queries, keys, and seeds where kept."""
        secrets = [
            secret_search.Secret(f"query {number}", query)
            for number, query in enumerate(self.queries)
        ]
        for key in place.rglob("fingerprint.key"):
            secrets.append(secret_search.Secret("key", key.read_text().strip()))
        if stage.seeded:
            for path in self._seeds(stage).rglob("secrets.json"):
                held = json.loads(path.read_text())
                secrets += [
                    secret_search.Secret(name, held[name])
                    for name in ("noise_seed", "sampler_seed")
                ]
        return secrets


def main(arguments=None):
    """Runs the missing kills, and prints all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stages", default="", help="names, by comma; default all")
    parser.add_argument("--forked", action="store_true", help="see above")
    options = parser.parse_args(arguments)
    if options.forked:
        kill_moments.FORKED = True
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
        for module in {stage.module for stage in stages()}:
            importlib.import_module(f"tfdpsq.run.{module}")
    bench = Bench(options.workdir)
    names = [stage.name for stage in stages()]
    if options.stages:
        names = options.stages.split(",")
    found = []
    # Every stage once, in random order, before the next round.
    order = np.random.default_rng(options.seed)
    rounds = -(-options.kills // len(names))
    chosen = [name for _ in range(rounds) for name in order.permutation(names)]
    for number, name in enumerate(chosen[: options.kills]):
        kept = bench.directory / "found" / f"{options.seed}-{number:03d}-{name}.json"
        if not kept.is_file():
            generator = np.random.default_rng([options.seed, number])
            line = bench.kill(number, str(name), generator)
            kept.parent.mkdir(exist_ok=True)
            kept.write_text(json.dumps(line))
        found.append(json.loads(kept.read_text()))
        print(json.dumps(found[-1]), flush=True)
    failed = [line["kill"] for line in found if not line["ok"]]
    states = [line["state"] for line in found if line["state"]]
    summary = {
        "kills": len(found),
        "stages": len({line["stage"] for line in found}),
        "ok": len(found) - len(failed),
        "failed": failed,
        "killed_while_running": sum(not state["ended_before"] for state in states),
        "killed_with_steps_paid": sum(any(state["steps_paid"]) for state in states),
        "killed_with_unfinished_output": sum(
            state["unfinished"] > 0 for state in states
        ),
        "seed": options.seed,
        "forked": options.forked,
    }
    print(json.dumps(summary), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
