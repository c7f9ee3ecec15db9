"""All commands with all kinds of output, in a released place and in a private one."""

import importlib
import json
import math
import pathlib
import re
import stat
import zipfile

import pytest
from helpers import tiny as _tiny

from tfdpsq.run import (
    audit,
    canaries,
    choose,
    convert,
    encode,
    evaluate,
    filter,
    finetune,
    grid,
    histogram,
    index,
    mine,
    overlap,
    pipeline,
    reproduce,
    rerank,
    synthesize,
    train_adapter,
    train_retriever,
    zero_shot,
)
from tfdpsq.run.attacks import canary_set
from tfdpsq.run.core import outputs, releases
from tfdpsq.validation import InputError

_TESTS = pathlib.Path(__file__).parents[1]
_RUN = _TESTS.parent / "tfdpsq" / "run"

# What a command can write, by guarantee. A new command fails until it is listed here.
PUBLIC, CERTIFIED, PRIVATE = releases.GUARANTEES
WRITES = {
    "prepare": {PUBLIC},
    "pretrain": {PUBLIC},
    "finetune": {PUBLIC, CERTIFIED, PRIVATE},
    "choose": {CERTIFIED, PRIVATE},
    "histogram": {CERTIFIED, PRIVATE},
    "synthesize": {PUBLIC, CERTIFIED, PRIVATE},
    "filter": {PUBLIC, CERTIFIED, PRIVATE},
    "train_adapter": {CERTIFIED, PRIVATE},
    "train_retriever": {PUBLIC, CERTIFIED, PRIVATE},
    "encode": {PUBLIC, CERTIFIED, PRIVATE},
    "index": {PUBLIC, CERTIFIED, PRIVATE},
    "mine": {PUBLIC, CERTIFIED, PRIVATE},
    "rerank": {PUBLIC, CERTIFIED, PRIVATE},
    "zero_shot": {PUBLIC, CERTIFIED, PRIVATE},
    "convert": {PUBLIC, CERTIFIED, PRIVATE},
    "overlap": {PUBLIC, PRIVATE},
    "evaluate": {PRIVATE},
    "canaries": {PRIVATE},
    "audit": {PRIVATE},
    "grid": {PRIVATE},
    "pipeline": {PRIVATE},
    "reproduce": {PRIVATE},
    "estimate": {PUBLIC},  # a file, by `outputs.write_file`
    "estimate_job": {PRIVATE},  # the same
    "budget": set(),
    "forget": set(),
    "import": {PRIVATE},
    "status": set(),
    "verify": set(),
}
# Names of what must never be released.
_SECRET = re.compile(
    r"private|.*\.key|ledger.*|secrets.*|private_reads.*|seconds.*|curve.*|log\.jsonl"
    r"|.*tfevents.*|.*\.trec|metrics\.json|canaries\.jsonl|report\.html|results\.json"
    r"|step-\d+\.npz|.*\.partial"
)
_DURATION = re.compile(r"(^|_)(seconds?|hours?|times?|dates?)$")


class _Walk:
    """Every command's settings, on what the job made."""

    def __init__(self, job):
        self.release, self.private = (
            job.directory / "release",
            job.directory / "private",
        )
        self.pairs = str(job.directory.parent / "pairs")
        self.config = _tiny.tiny_config(self.pairs)
        prepared = self.release / "prepare"
        self.vocabulary = str(prepared / "vocabulary" / "spiece.model")
        self.public_pairs = str(prepared / "public_pairs")

    def set(self, name):
        kind = self.release if name.endswith("_eps8") else self.private
        kind = self.private if name.startswith("audited") else kind
        return str(kind / name / "set")

    def run(self, module, place, own=None, **changes):
        """Runs a command into a place with settings of the job and these."""
        config = (own or module.default_config()).copy_and_resolve_references()
        known = {"data": self.pairs, "vocabulary": self.vocabulary, "pairs": self.pairs}
        known.update({"k": 10, **changes})  # as many as the metrics look at
        if "corpus" in config and isinstance(config.corpus, str):
            known.setdefault("corpus", self.pairs)
        with config.unlocked():
            for field, value in known.items():
                # `grid` has a number of pairs by that name.
                if field in config and not isinstance(config[field], int):
                    config[field] = value
                elif field in config and isinstance(value, int):
                    config[field] = value
        return module.run(config, place)

    def refused(self):
        """(command, what is written, how) of all that must stay private."""
        config, private = self.config, self.private
        unprotected = str(private / "generator_inf")
        original = str(private / "retriever_original")
        audited = str(private / "audited_eps8")
        two = {
            name: str(self.release / f"retriever_{name}_eps8")
            for name in ("synthetic", "direct")
        }
        choice = choose.default_config()
        choice.choice = "declared"
        choice.finetune = config.finetune.copy_and_resolve_references()
        choice.finetune.update(epsilon=math.inf, pairs=self.pairs)
        choice.finetune.vocabulary = self.vocabulary
        choice.axes = (("learning_rate", (1e-3, 2e-3)),)

        def stage(module, own=None, **changes):
            return lambda place: self.run(module, place, own, **changes)

        def converted(place):
            convert.convert(unprotected, place, "huggingface")

        def estimated(place):
            outputs.write_file(place, "{}", PRIVATE, "an estimate")

        tuned, trained = config.finetune, config.retriever
        inf = {"epsilon": math.inf}
        public = {"pairs": self.public_pairs}
        loose, audits = self.set("synthetic_inf"), self.set("audited_synthetic_eps8")
        yield "finetune", "on pairs", stage(finetune, tuned, **inf)
        yield "finetune", "on a set", stage(finetune, tuned, pairs=loose, **inf)
        changes = {**public, **inf, "init": unprotected}
        yield "finetune", "from a model", stage(finetune, tuned, **changes)
        yield "choose", "without ε", lambda place: choose.run(choice, place)
        planted = str(private / "canaries" / canary_set.DATA)
        yield "histogram", "canaries", stage(histogram, pairs=planted)
        yield "train_adapter", "canaries", stage(train_adapter, pairs=planted)
        yield "train_adapter", "without ε", stage(train_adapter, **inf)
        for name, path in (("ε = ∞", unprotected), ("canaries", audited)):
            own = config.synthesize
            yield "synthesize", name, stage(synthesize, own, generator=path)
            yield "rerank", name, stage(rerank, generator=path)
        for name, path in (("ε = ∞", loose), ("canaries", audits)):
            yield "filter", name, stage(filter, synthetic=path)
            yield "train_retriever", name, stage(train_retriever, trained, pairs=path)
            yield "mine", name, stage(mine, pairs=path)
        yield "train_retriever", "on pairs", stage(train_retriever, trained)
        direct = stage(train_retriever, config.direct, **inf)
        yield "train_retriever", "direct without ε", direct
        for module in (encode, index):
            yield (
                module.__name__.rpartition(".")[2],
                "ε = ∞",
                stage(module, retriever=original),
            )
        certified = {"retriever": two["direct"]}
        yield "encode", "queries", stage(encode, texts="queries", **certified)
        yield "mine", "pairs", stage(mine)
        yield "overlap", "queries", stage(overlap, texts=("queries",))
        yield "evaluate", "test queries", stage(evaluate)
        yield "canaries", "pairs", stage(canaries, config.canaries)
        yield "audit", "attacks", stage(audit, config.audit)
        yield "zero_shot", "queries", stage(zero_shot, private=True)
        for name, systems in (("ε = ∞", {"one": original}), ("two ε", two)):
            yield "zero_shot", name, stage(zero_shot, systems=systems)
        yield "convert", "ε = ∞", converted
        yield "estimate_job", "counts", estimated
        imported = importlib.import_module("tfdpsq.run.import")
        log = imported.default_config()
        log.logs.train = f"{self.pairs}/queries.jsonl"
        log.columns.update(query="text", document="_id")
        log.log_documents_are_public = True
        yield "import", "a log", lambda place: imported.run(log, place)
        yield "grid", "trials", stage(grid)
        yield "pipeline", "a job", lambda place: pipeline.run(config, place)
        tables = reproduce.default_config()
        yield "reproduce", "tables", lambda place: reproduce.run(tables, place)


def _modes(folder):
    return {
        (path.is_dir(), stat.S_IMODE(path.stat().st_mode))
        for path in (folder, *folder.rglob("*"))
        if not path.is_symlink()
    }


def _times(release):
    """Files and directories under `release` whose time is not the constant one."""
    return [
        path
        for path in (release, *release.rglob("*"))
        if path.stat().st_mtime != outputs.MODIFIED
    ]


def _names(release):
    return [p for p in release.rglob("*") if _SECRET.fullmatch(p.name)]


def test_every_command_is_walked(job):
    commands = {path.stem for path in _RUN.glob("[!_]*.py")}
    assert commands == set(WRITES)
    walked = {command for command, _, _ in _Walk(job).refused()}
    assert walked == {name for name, kinds in WRITES.items() if PRIVATE in kinds}


@pytest.mark.slow
def test_no_command_writes_what_is_private_to_a_released_place(job, tmp_path):
    """Refused before anything is made, there or anywhere near."""
    for command, what, run in _Walk(job).refused():
        place = tmp_path / "release" / "out"
        with pytest.raises(InputError) as caught:
            run(place)
        said = str(caught.value)
        assert str(place) in said and "private" in said, (command, what, said)
        assert list(tmp_path.rglob("*")) == [], (command, what)


@pytest.mark.slow
def test_no_command_goes_on_where_everything_was_forgotten(job, tmp_path):
    outputs.mark_forgotten(outputs.open_private(tmp_path / "private"))
    for command, what, run in _Walk(job).refused():
        with pytest.raises(InputError, match="deleted by `tfdpsq forget`"):
            run(tmp_path / "private" / "out")
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert len(files) == 1, (command, what)


def test_private_directories_are_not_released_however_they_are_set(job, tmp_path):
    walk, hidden = _Walk(job), str(tmp_path / "release" / "hidden")
    for module, own in (
        (finetune, walk.config.finetune),
        (histogram, None),
        (train_adapter, None),
        (train_retriever, walk.config.direct),
        (mine, None),
        (evaluate, None),
        (overlap, None),
        (audit, walk.config.audit),
        (canaries, None),
        (zero_shot, None),
    ):
        with pytest.raises(InputError, match="private_directory is .* under release/"):
            walk.run(module, tmp_path / "out", own, private_directory=hidden)
        assert list(tmp_path.rglob("*")) == []


def test_the_job_released_nothing_private_and_no_time(job):
    release = job.directory / "release"
    states = {
        path.parent.name: json.loads(path.read_text())["guarantee"]
        for path in release.glob("*/stage.json")
    }
    assert set(states.values()) == {PUBLIC, CERTIFIED} and len(states) >= 8
    assert {name for name, state in states.items() if state == CERTIFIED} == {
        name
        for name in states
        if name.endswith(("eps8", "adapter_eps0_5", "histogram_eps0.4"))
    }
    assert _names(release) == [] and _times(release) == []
    assert _modes(release) == {(True, 0o755), (False, 0o644)}


def test_what_the_job_keeps_is_its_owners(job):
    assert stat.S_IMODE(job.directory.stat().st_mode) == 0o700
    assert _modes(job.directory / "private") == {(True, 0o700), (False, 0o600)}
    for name in ("report.html", "results.json"):
        assert stat.S_IMODE((job.directory / name).stat().st_mode) == 0o600


def test_no_file_that_is_released_holds_a_time(job):
    """Archives have the times of what is in them, and JSON may have a field."""
    found = []

    def keys(value):
        if isinstance(value, dict):
            yield from value
        for each in value.values() if isinstance(value, dict) else value:
            if isinstance(each, (dict, list)):
                yield from keys(each)

    for path in (job.directory / "release").rglob("*"):
        if path.is_dir():
            continue
        if path.suffix == ".json":
            value = json.loads(path.read_text())
            named = [key for key in keys(value) if _DURATION.search(key)]
            found += [(path, key) for key in named if key != "rows_at_a_time"]
        elif zipfile.is_zipfile(path):
            members = zipfile.ZipFile(path).infolist()
            found += [(path, m) for m in members if m.date_time[:3] != (1980, 1, 1)]
        else:
            head = path.read_bytes()[:8]
            if head[:2] == b"\x1f\x8b" and head[4:8] != bytes(4):
                found.append((path, head))
    assert found == []


def _released(tmp_path, name, guarantee):
    """Checks what a command wrote to a released place."""
    release = tmp_path / "release"
    certified = any((release / name).rglob("certificate.json"))
    assert certified == (guarantee == CERTIFIED), name
    # A run of a certified set, and numbers of a certified system, are what they are.
    measured = (".trec", "metrics.json")
    assert [p for p in _names(release) if not p.name.endswith(measured)] == [], name
    assert _times(release) == [], name
    assert _modes(release) == {(True, 0o755), (False, 0o644)}, name


def test_what_follows_from_a_certificate_may_be_released(job, tmp_path):
    walk = _Walk(job)
    release = tmp_path / "release"
    made = walk.set("synthetic_eps8")
    walk.run(filter, release / "filter", synthetic=made)
    walk.run(mine, release / "mine", pairs=made)
    convert.convert(walk.release / "generator_eps8", release / "convert", "keras")
    walk.run(rerank, release / "rerank", generator=str(walk.release / "generator_eps8"))
    for name in ("filter", "mine", "convert", "rerank"):
        _released(tmp_path, name, CERTIFIED)
    walk.run(mine, release / "mine_public", pairs=walk.public_pairs)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a table\n")
    texts = (str(tmp_path / "texts"),)
    walk.run(overlap, release / "overlap", texts=("documents",), corpus=texts)
    for name in ("mine_public", "overlap"):
        _released(tmp_path, name, PUBLIC)
    # Of the private queries, the same is private, and so are all traces of it.
    private = tmp_path / "private"
    walk.run(mine, private / "mine")
    walk.run(overlap, private / "overlap", corpus=texts)
    assert _modes(private) == {(True, 0o700), (False, 0o600)}
    for name in ("fingerprint.key", "private_reads.jsonl"):
        assert (private / name).is_file()


@pytest.mark.slow
def test_embeddings_and_benchmarks_of_a_certified_retriever(job, tmp_path):
    walk, release = _Walk(job), tmp_path / "release"
    own = str(walk.release / "retriever_direct_eps8")
    walk.run(encode, release / "encode", retriever=own)
    walk.run(index, release / "index", retriever=own)
    walk.run(encode, release / "queries", retriever=own, texts="queries", private=False)
    places = {"sets": ("one",), "paths": {"one": walk.pairs}, "resamples": 50}
    systems = {"bm25": "bm25", "own": own}
    walk.run(zero_shot, release / "zero_shot", systems=systems, **places)
    for name in ("encode", "index", "queries", "zero_shot"):
        _released(tmp_path, name, CERTIFIED)
    private = tmp_path / "private"
    walk.run(encode, private / "queries", retriever=own, texts="queries")
    assert _modes(private) == {(True, 0o700), (False, 0o600)}
