"""kill -9 at random moments over every stage of the tiny job, then the same command.

    python tests/benchmarks/kills.py --workdir=DIR [--kills=50] [--seed=0] [--stages=A]

Prints one JSON line per kill and a summary. DIR keeps the reference and every finished
kill, so the same command goes on where it was stopped. Exit status 1: a check failed;
the directory of that kill is kept.

Each stage runs once without a kill: its reference, which the next stages read. A kill
then starts the same command in a directory of its own, sends SIGKILL to its process
group, and runs the command again to its end. The moment is a random share of the
reference's wall time, or a random delay after something appears on disk: a ledger line,
a saved state, a shard, an unfinished output, the finished output.

Checked after the second run:
  - the same files as the reference's, and no others: no unfinished ones are left;
  - the same bytes, except what `_comparable` leaves out and says why;
  - each ledger pays every step once, and `verify --ledger` accepts the certificate;
  - outside `private/` no private query, fingerprint key or seed, in any encoding, and
    no ledger, list of reads or log.

Noise is drawn from fresh entropy, so two private runs never have equal bytes. A
reference of a private stage therefore begins from a run directory that a killed run
left before its first step: seeds, and a ledger without steps. Kills of that stage begin
from a copy of it. Kills named `fresh_*` begin from nothing; there, weights cannot be
compared, everything else is. `pipeline` and `choose` draw seeds on their way and are
treated as fresh.

With --forked, commands are forked from a process that has imported TensorFlow: a kill
takes half the time, and no moment falls into imports. Keep to one way in a DIR.
"""

import argparse
import collections
import contextlib
import dataclasses
import gzip
import importlib
import io
import json
import math
import os
import pathlib
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
import traceback

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "run")]

import secret_search  # noqa: E402
import tiny  # noqa: E402

from tfdpsq.run import verify  # noqa: E402

PRIVATE = "private"
# Seconds between two looks at the directory, and the longest delay after an event.
_POLL, _DELAY = 0.002, 0.05
_LONGEST = 900
# Whether commands are forked; set once, by `main`.
_FORKED = False
_LENGTHS = {"document_length": 32, "query_length": 48}
_T5 = {
    "vocabulary_size": 420,
    "num_layers": 1,
    "num_heads": 2,
    "hidden_dim": 16,
    "intermediate_dim": 24,
    "key_value_dim": 8,
    "version": "1.0",
    "dropout": 0.0,
}
_TRAINING = {
    **_LENGTHS,
    "batch_size": 8,
    "microbatch_size": 4,
    "steps": 8,
    "save_every": 2,
    "accountant": "rdp",
    "n_is_public": True,
}
_CONFIG = """import json
import math

from tfdpsq.run import {module} as stage


def _update(config, settings):
    for name, value in settings.items():
        if isinstance(value, dict) and name in config and len(config[name]):
            _update(config[name], value)
        else:
            config[name] = tuple(value) if isinstance(value, list) else value


def get_config():
    config = stage.default_config()
    with config.unlocked():
        _update(config, json.loads({settings!r}))
    return config
"""
_PIPELINE = """import importlib.util


def get_config():
    spec = importlib.util.spec_from_file_location("tiny", {tiny!r})
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.tiny_config({data!r})
    config.finetune.save_every = 1
    return config
"""


@dataclasses.dataclass(frozen=True)
class Stage:
    """A command to kill.

    Attributes:
      name: in the report, and of its directories.
      module: of `tfdpsq.run`.
      out: where its output goes, relative to its directory.
      settings: of its config; "@NAME" in a value is the output of stage NAME, "@@" the
        directory of all inputs.
      events: what a kill may wait for, of `_EVENTS`.
      seeded: whether it begins from a run directory that holds seeds.
      fresh: whether its bytes depend on entropy that cannot be set beforehand.
    """

    name: str
    module: str
    out: str
    settings: dict
    events: tuple = ("partial", "finished")
    seeded: bool = False
    fresh: bool = False


_TRAINED = ("ledger", "state", "partial", "finished")
_SHARDED = ("shard", "partial", "finished")
# What a kill may wait for: glob patterns below the stage's directory.
_EVENTS = {
    "ledger": (f"{PRIVATE}/runs/*/ledger.jsonl",),
    "state": (f"{PRIVATE}/runs/*/state/*", f"{PRIVATE}/runs/*/state/.*"),
    "partial": ("**/.*.partial",),
    "shard": ("**/*shards*/*", "**/*shard*"),
}


def stages():
    """All stages, each after those that it reads."""
    vocabulary = {"vocabulary": "@prepare/vocabulary/spiece.model"}
    data, pairs = {"data": "@@/pairs"}, {"pairs": "@@/pairs"}
    start = {**vocabulary, "init": "@pretrain"}
    generator = {**_TRAINING, **pairs, **start}
    retriever = {**start, **_LENGTHS, "embedding_dim": 16, "batch_size": 4, "steps": 4}
    direct = {**retriever, **_TRAINING, **pairs, "epsilon": 8.0}
    writing = {**vocabulary, **_LENGTHS, "corpus": "@@/pairs", "batch_size": 16}
    writing = {**writing, "shards": 2, "shard_documents": 40}
    embedding = {**vocabulary, "corpus": "@@/pairs", "batch_size": 16}
    embedding = {**embedding, "retriever": "@retriever", "shard_documents": 30}
    search = {**vocabulary, "resamples": 200, "batch_size": 16}
    return [
        Stage("prepare", "prepare", "prepare", {**data, "vocabulary_size": 320}),
        Stage(
            "pretrain",
            "pretrain",
            "public_model",
            {
                **data,
                **vocabulary,
                "t5": _T5,
                "document_length": 32,
                "query_length": 12,
                "steps": 4,
                "held_out_one_in": 8,
                "pair_rows": 4,
                "text_rows": 4,
            },
        ),
        Stage("finetune", "finetune", "generator", generator, _TRAINED, seeded=True),
        Stage(
            "finetune_user",
            "finetune",
            "generator_user",
            {**generator, "unit": "user", "sampler": "poisson"},
            _TRAINED,
            seeded=True,
        ),
        Stage(
            "finetune_unprotected",
            "finetune",
            f"{PRIVATE}/generator_inf",
            {**generator, "epsilon": math.inf},
            _TRAINED,
            seeded=True,
        ),
        Stage(
            "fresh_finetune", "finetune", "generator", generator, _TRAINED, fresh=True
        ),
        Stage(
            "synthesize",
            "synthesize",
            "synthetic",
            {**writing, "generator": "@finetune"},
            _SHARDED,
        ),
        Stage(
            "filter",
            "filter",
            "filtered",
            {
                "synthetic": "@synthesize/set",
                "corpus": "@@/pairs",
                "duplicates": True,
                "shards": 2,
            },
        ),
        Stage("mine", "mine", f"{PRIVATE}/mined", {**pairs, "k": 10}),
        Stage(
            "retriever",
            "train_retriever",
            "retriever",
            {**retriever, "pairs": "@synthesize/set"},
        ),
        Stage(
            "retriever_original",
            "train_retriever",
            f"{PRIVATE}/original",
            {**retriever, **pairs},
        ),
        Stage(
            "direct",
            "train_retriever",
            "direct",
            {
                **direct,
                "method": "public_negatives",
                "negatives": 12,
                "refresh_every": 3,
            },
            _TRAINED,
            seeded=True,
        ),
        Stage(
            "fresh_direct",
            "train_retriever",
            "direct",
            {**direct, "method": "microbatch", "clip_groups": 2},
            _TRAINED,
            fresh=True,
        ),
        Stage("encode", "encode", "embeddings", embedding, _SHARDED),
        Stage("index", "index", "index", embedding, _SHARDED),
        Stage(
            "evaluate",
            "evaluate",
            f"{PRIVATE}/evaluation",
            {
                **data,
                **search,
                "systems": {"bm25": "bm25", "mine": "@retriever"},
                "synthetic": {"eps8": "@synthesize/set"},
                "shard_documents": 30,
            },
            _SHARDED,
        ),
        Stage(
            "zero_shot",
            "zero_shot",
            "zero_shot",
            {
                **search,
                "sets": ("one", "two"),
                "paths": {"one": "@@/public/one", "two": "@@/public/two"},
                "systems": {"bm25": "bm25", "mine": "@retriever"},
            },
        ),
        Stage(
            "overlap",
            "overlap",
            f"{PRIVATE}/overlap",
            {**data, "corpus": ("@@/texts",), "draw_size": 40, "shards": 3},
            _SHARDED,
        ),
        Stage(
            "canaries",
            "canaries",
            f"{PRIVATE}/canaries",
            {
                **data,
                "repetitions": (2,),
                "trials": 1,
                "candidates": 20,
                "digits": 8,
                "coins": 24,
                "seed": 7,
            },
        ),
        Stage(
            "audited",
            "finetune",
            f"{PRIVATE}/audited",
            {**generator, "pairs": "@canaries/data"},
            _TRAINED,
            seeded=True,
        ),
        Stage(
            "audited_synthesize",
            "synthesize",
            f"{PRIVATE}/audited_synthetic",
            {**writing, "generator": "@audited"},
            _SHARDED,
        ),
        Stage(
            "audit",
            "audit",
            f"{PRIVATE}/audit",
            {
                "canaries": "@canaries",
                "generator": "@audited",
                "synthetic": "@audited_synthesize/set",
                "samples_per_document": 1,
                "members": 10,
                "batch_size": 16,
            },
        ),
        Stage(
            "choose",
            "choose",
            "chosen",
            {
                "finetune": {**generator, "strict": True, "steps": 3},
                "axes": (("learning_rate", (1e-3, 3e-2)),),
            },
            _TRAINED,
            fresh=True,
        ),
        Stage(
            "grid",
            "grid",
            "grid",
            {
                **data,
                "pairs": 30,
                "held_out": 20,
                "finetune": {
                    **generator,
                    "steps": 3,
                    "pairs": "",
                },
                "axes": (("learning_rate", (1e-3, 1e-2)),),
            },
            ("partial", "finished"),
            fresh=True,
        ),
        Stage("convert", "convert", "converted", {"input": "@finetune"}),
        Stage(
            "pipeline",
            "pipeline",
            "work",
            {},
            ("partial",),
            fresh=True,
        ),
    ]


class Bench:
    """The inputs, the references and the kills, all in one directory.

    Attributes:
      directory: where everything is kept.
      queries: all private queries.
    """

    def __init__(self, directory):
        """Makes the inputs unless they are there."""
        self.directory = pathlib.Path(directory).resolve()
        self._stages = {stage.name: stage for stage in stages()}
        inputs = self.directory / "inputs"
        if not inputs.is_dir():
            unfinished = self.directory / "inputs.new"
            shutil.rmtree(unfinished, ignore_errors=True)
            _write_inputs(unfinished)
            unfinished.rename(inputs)
        self.queries = json.loads((inputs / "private_queries.json").read_text())

    def reference(self, name):
        """Runs a stage without a kill, once; returns its directory and seconds."""
        stage, place = self._stages[name], self.directory / "reference" / name
        said = place.with_suffix(".json")
        if not said.is_file():
            for other in _named(stage.settings):
                self.reference(other)
            shutil.rmtree(place, ignore_errors=True)
            self._begin(stage, place)
            print(f"reference: {name}", file=sys.stderr, flush=True)
            started = time.monotonic()
            _run_to_the_end(self._command(stage, place), place)
            said.write_text(json.dumps({"seconds": time.monotonic() - started}))
        return place, json.loads(said.read_text())["seconds"]

    def kill(self, number, name, generator):
        """Kills a stage at a moment drawn from `generator`; returns what was found."""
        stage = self._stages[name]
        reference, seconds = self.reference(name)
        place = self.directory / "kills" / f"{number:03d}-{name}"
        shutil.rmtree(place, ignore_errors=True)
        self._begin(stage, place)
        moment = _choose_moment(stage, seconds, generator)
        command = self._command(stage, place)
        try:
            state = _kill(command, place, stage, moment)
            # `convert` is not a stage: it refuses to replace what is finished.
            refuses = stage.module == "convert" and state["finished"]
            _run_to_the_end(command, place, 2 if refuses else 0)
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
        """Makes a stage's directory: one key for all, and seeds where it needs them."""
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
        """A private directory as a run leaves it that was killed before step 0."""
        kept = self.directory / "seeds" / stage.name
        if kept.is_dir():
            return kept
        place = self.directory / "seeding" / stage.name
        shutil.rmtree(place, ignore_errors=True)
        (place / PRIVATE).mkdir(parents=True, mode=0o700)
        shutil.copy(self.directory / "inputs" / "fingerprint.key", place / PRIVATE)
        run = place / PRIVATE / "runs" / pathlib.Path(stage.out).name
        print(f"seeds: {stage.name}", file=sys.stderr, flush=True)
        child = _start(self._command(stage, place), place)
        _wait(
            child,
            lambda: (
                (run / "state" / "secrets.json").is_file()
                and (run / "ledger.jsonl").is_file()
            ),
        )
        _end(child)
        header = (run / "ledger.jsonl").read_bytes().split(b"\n")[0] + b"\n"
        (run / "ledger.jsonl").write_bytes(header)
        for path in (run / "state").iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "secrets.json":
                path.unlink()
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
            data = str(self.directory / "inputs" / "pairs")
            return _PIPELINE.format(tiny=tiny.__file__, data=data)
        settings = json.dumps(self._resolved(stage.settings))
        return _CONFIG.format(module=stage.module, settings=settings)

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
        problems = _compared(place, reference, stage.fresh)
        for ledger in sorted(place.rglob("ledger.jsonl")):
            problems += _unpaid(ledger)
        problems += _unverified(place)
        secrets = self._secrets(stage, place)
        for path in _outside(place, stage):
            if path.is_dir():
                found = secret_search.find_secrets(path, secrets)
            else:
                with _folder_of(path) as folder:
                    found = secret_search.find_secrets(folder, secrets)
            problems += [f"outside private/: {path.name}/{line}" for line in found]
            names = [path, *(path.rglob("*") if path.is_dir() else ())]
            problems += [
                f"outside private/: {name.relative_to(place)}"
                for name in names
                if re.fullmatch(_PRIVATE_NAMES, name.name)
            ]
        return problems, len(secrets)

    def _secrets(self, stage, place):
        """Everything known to be private: queries, keys, and seeds where kept."""
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


class Failed(Exception):
    """A command did not do what every command must."""


_PRIVATE_NAMES = (
    r"fingerprint\.key|ledger\.jsonl|private_reads\.jsonl|secrets\.json"
    r"|step-.*\.npz|events\.out\..*|log\.jsonl|run\.json"
)


def _write_inputs(directory):
    queries = tiny.write_pairs(directory / "pairs")
    path = directory / "pairs" / "queries.jsonl"
    records = map(json.loads, path.read_text().splitlines())
    lines = [
        json.dumps({**record, "metadata": {"user_id": f"u{number % 20}"}}) + "\n"
        for number, record in enumerate(records)
    ]
    path.write_text("".join(lines))
    for name in ("one", "two"):
        shutil.copytree(directory / "pairs", directory / "public" / name)
    (directory / "texts").mkdir()
    for part in range(3):
        documents = (directory / "pairs" / "corpus.jsonl").read_text().splitlines()
        texts = [json.loads(line)["text"] for line in documents[part::6]]
        (directory / "texts" / f"{part}.txt").write_text("\n".join(texts) + "\n")
    # What private queries may be found by: the public sets are copies of them.
    (directory / "private_queries.json").write_text(json.dumps(queries))
    (directory / "fingerprint.key").write_text(os.urandom(32).hex())


def _named(value):
    """Names of the stages that settings refer to."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return sorted({name for held in value for name in _named(held)})
    if isinstance(value, str) and re.match("@[^@]", value):
        return [value[1:].partition("/")[0]]
    return []


class Forked:
    """A command in a process that is forked from this one, as far as a Popen is used.

    This process has imported what commands import, and computed nothing with it.
    """

    def __init__(self, command, log):
        """Starts `python -m MODULE FLAGS…` in a session of its own."""
        sys.stdout.flush()
        self.pid = os.fork()
        self.returncode = None
        if self.pid:
            return
        code = 1
        try:
            os.setsid()
            os.chdir(ROOT)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(log.fileno(), 2)
            sys.argv = command[1:]
            random.seed()
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as end:
            code = end.code or 0
            if not isinstance(code, int):
                code = 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def poll(self):
        """Its exit status, `None` while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout=math.inf):
        """Its exit status; raises TimeoutExpired, as a Popen does."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a command", timeout)
            time.sleep(_POLL)
        return self.returncode


def _start(command, place):
    with open(place.parent / f"{place.name}.log", "ab") as log:
        if _FORKED:
            return Forked(command[1:], log)
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1"},
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )


def _end(child):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _run_to_the_end(command, place, status=0):
    child = _start(command, place)
    try:
        code = child.wait(_LONGEST)
    except subprocess.TimeoutExpired:
        code = "no end"
    finally:
        _end(child)
    if code != status:
        said = (place.parent / f"{place.name}.log").read_text(errors="replace")
        raise Failed(f"exit status {code}: {said[-1500:]}")


def _wait(child, seen):
    """Returns whether something was seen before the process ended."""
    deadline = time.monotonic() + _LONGEST
    while time.monotonic() < deadline:
        if seen():
            return True
        if child.poll() is not None:
            return False
        time.sleep(_POLL)
    return False


def _choose_moment(stage, seconds, generator):
    """A share of the reference's time, or a delay after an event; each half the time.

    The first two thirds of a tiny stage are imports and reading: shares are drawn from
    a distribution that prefers the rest.
    """
    if generator.random() < 0.5:
        share = float(generator.beta(2, 1))
        return {"at": "time", "seconds": round(share * seconds, 3)}
    event = str(generator.choice(stage.events))
    count = int(generator.integers(1, 8)) if event in ("ledger", "state") else 1
    delay = float(generator.uniform(0, _DELAY)) * float(generator.random() < 0.7)
    return {"at": event, "count": count, "delay": round(delay, 4)}


def _kill(command, place, stage, moment):
    """Starts a command and kills it at the moment; returns what was on disk then."""
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    started = time.monotonic()
    child = _start(command, place)
    if moment["at"] == "time":
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(moment["seconds"])
    else:
        _wait(child, lambda: _happened(place, stage, moment, before))
        time.sleep(moment["delay"])
    ended = child.poll()
    _end(child)
    if ended not in (None, 0):
        said = (place.parent / f"{place.name}.log").read_text(errors="replace")
        raise Failed(f"exit status {ended} before it was killed: {said[-1500:]}")
    return {
        "seconds": round(time.monotonic() - started, 2),
        "ended_before": ended is not None,
        "steps_paid": [_steps(path) for path in sorted(place.rglob("ledger.jsonl"))],
        "states": len(list(place.rglob("step-*.npz"))),
        "unfinished": len(list(place.rglob("*.partial"))),
        "finished": (place / stage.out).is_dir() and stage.module != "pipeline",
        "new_files": sum(path not in before for path in place.rglob("*")),
    }


def _happened(place, stage, moment, before):
    if moment["at"] == "finished":
        return (place / stage.out).is_dir()
    try:
        found = [
            path for pattern in _EVENTS[moment["at"]] for path in place.glob(pattern)
        ]
        if moment["at"] == "ledger":
            return any(_steps(path) >= moment["count"] for path in found)
        if moment["at"] == "state":
            return len({path for path in found if path not in before}) >= min(
                2, moment["count"]
            )
        return any(path not in before for path in found)
    except OSError:  # it was renamed between two looks
        return True


def _steps(ledger):
    return max(0, ledger.read_bytes().count(b"\n") - 1)


def _files(place):
    """{relative path: path} of all files, with the names that vary made equal."""

    def name_of(path):
        name = re.sub(r"process-\d+", "process", str(path.relative_to(place)))
        return re.sub(r"events\.out\.tfevents\..*", "events", name)

    return {
        name_of(path): path
        for path in place.rglob("*")
        if path.is_file() or not any(path.iterdir())
    }


def _compared(place, reference, fresh):
    """Differences between the files of a killed run and the reference's."""
    ours, theirs = _files(place), _files(reference)
    problems = [f"left over: {name}" for name in sorted(set(ours) - set(theirs))]
    problems += [f"missing: {name}" for name in sorted(set(theirs) - set(ours))]
    for name in sorted(set(ours) & set(theirs)):
        if not ours[name].is_file() or (fresh and not _same_in_all(name)):
            continue
        one, other = (
            _comparable(name, found[name].read_bytes(), base)
            for found, base in ((ours, place), (theirs, reference))
        )
        if one != other:
            problems.append(f"other bytes: {name}{_first_difference(one, other)}")
    return problems


def _same_in_all(name):
    """Whether a file is made of public data alone, without any private run before."""
    parts = pathlib.Path(name).parts
    public = ("prepare", "public_model", "retriever_untrained", "retriever_public_only")
    public += ("proxy",)
    return bool(set(parts) & set(public)) and PRIVATE not in parts


def _comparable(name, content, base):
    """A file's content without what differs between any two runs.

    | left out                               | why                                 |
    |----------------------------------------|-------------------------------------|
    | "run" of stage.json, and where inputs  | a random number that tells one run  |
    | state it                               | of a stage from another             |
    | durations, times and processes in logs | measured                            |
    | log lines of single shards             | what one process did: a process     |
    |                                        | killed after a shard writes none    |
    | TensorBoard's events                   | times and the host's name           |
    | the stage's own directory              | each kill has another               |
    """
    if name.endswith("events"):
        return b""
    content = content.replace(str(base).encode(), b"BASE")
    if name.endswith((".gz",)):
        content = gzip.decompress(content)
    if name.endswith((".json", ".jsonl")):
        with contextlib.suppress(ValueError):
            lines = [content] if name.endswith(".json") else content.splitlines()
            found = [_without_times(json.loads(line)) for line in lines]
            return [line for line in found if not _is_of_a_pass(name, line)]
    return content


_TIMES = re.compile(
    r"run|.*seconds.*|time|wall.*|.*per_second|.*_gib|started|ended|date|duration"
    r"|process|host"
)


def _is_of_a_pass(name, line):
    return name.endswith("log.jsonl") and isinstance(line, dict) and "shard" in line


def _without_times(value):
    if isinstance(value, dict):
        return {
            name: _without_times(held)
            for name, held in value.items()
            if not (_TIMES.fullmatch(name) and not isinstance(held, dict))
        }
    if isinstance(value, list):
        return [_without_times(held) for held in value]
    return value


def _first_difference(one, other):
    if isinstance(one, list):
        for here, there in zip(one, other):
            if here != there:
                return f": {json.dumps(here)[:300]} | {json.dumps(there)[:300]}"
    return ""


def _unpaid(ledger):
    """Whether a ledger pays each step of its plan exactly once."""
    header, *lines = ledger.read_text().splitlines()
    paid = collections.Counter(json.loads(line)["step"] for line in lines)
    wanted = collections.Counter(range(json.loads(header)["steps"]))
    if paid == wanted:
        return []
    return [f"{ledger}: paid {sorted(paid.elements())}, not {sorted(wanted)}"]


def _unverified(place):
    """Certificates that `verify` refuses, with the ledgers that have their heads."""
    problems = []
    ledgers = sorted(place.rglob("ledger.jsonl"))
    heads = {
        json.loads(path.read_text().splitlines()[-1])["chain"]: path for path in ledgers
    }
    for path in sorted(place.rglob("certificate.json")):
        stated = [head for head in heads if head in path.read_text()]
        words = [f"--ledger={heads[head]}" for head in stated]
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                verify.main(["verify", str(path), *words])
            except SystemExit as end:
                code = end.code
        if code:
            problems.append(f"verify {path}: {said.getvalue()[-500:]}")
    return problems


def _outside(place, stage):
    """What could be released: everything but private directories."""
    if stage.module == "pipeline":  # whose report is for its owner
        return [place / stage.out / "release"]
    if stage.module == "grid":
        return [path for path in (place / stage.out).iterdir() if path.name != PRIVATE]
    return [path for path in place.iterdir() if path.name != PRIVATE]


@contextlib.contextmanager
def _folder_of(path):
    """A folder that holds one file alone."""
    folder = path.with_name(path.name + ".alone")
    folder.mkdir()
    try:
        shutil.copy(path, folder)
        yield folder
    finally:
        shutil.rmtree(folder)


def main(arguments=None):
    """Runs the kills that are not there yet, and prints all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stages", default="", help="names, by comma; default all")
    parser.add_argument("--forked", action="store_true", help="see above")
    options = parser.parse_args(arguments)
    if options.forked:
        global _FORKED
        _FORKED = True
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
        for module in {stage.module for stage in stages()}:
            importlib.import_module(f"tfdpsq.run.{module}")
    bench = Bench(options.workdir)
    names = [stage.name for stage in stages()]
    if options.stages:
        names = options.stages.split(",")
    found = []
    # Every stage once, in random order, before any of them a second time.
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
