"""Checks of `kills.py` on a stage that was killed and run again."""

import collections
import contextlib
import gzip
import io
import json
import pathlib
import re
import shutil

from kill_stages import PRIVATE

from tfdpsq.run import verify

PRIVATE_NAMES = (
    r"fingerprint\.key|ledger\.jsonl|private_reads\.jsonl|secrets\.json"
    r"|step-.*\.npz|events\.out\..*|log\.jsonl|run\.json"
)


def _files(place):
    """Returns {relative path: path} of all files, with varying names made equal."""

    def name_of(path):
        name = re.sub(r"process-\d+", "process", str(path.relative_to(place)))
        return re.sub(r"events\.out\.tfevents\..*", "events", name)

    return {
        name_of(path): path
        for path in place.rglob("*")
        if path.is_file() or not any(path.iterdir())
    }


def compared(place, reference, fresh):
    """Returns the differences between the files of a killed run and the reference's."""
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
    """Returns whether a file derives from public data alone, without a private run."""
    parts = pathlib.Path(name).parts
    public = ("prepare", "public_model", "retriever_untrained", "retriever_public_only")
    public += ("proxy",)
    return bool(set(parts) & set(public)) and PRIVATE not in parts


def _comparable(name, content, base):
    """Returns a file's content without what differs between any two runs.

    | left out                               | why                                 |
    |----------------------------------------|-------------------------------------|
    | "run" of stage.json, and where inputs  | a random id of one run of a stage   |
    | state it                               |                                     |
    | durations, times and processes in logs | measured                            |
    | log lines of single shards             | a process killed after a shard      |
    |                                        | writes none                         |
    | TensorBoard's events                   | times and the host's name           |
    | the stage's own directory              | each kill has another               |
    | "fingerprint" of settings that name it | a hash of them, also in "inputs"    |
    """
    if name.endswith("events"):
        return b""
    # Not where it only begins the name of another directory.
    content = re.sub(re.escape(str(base).encode()) + rb"(?![\w-])", b"BASE", content)
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

_RUN_OF_A_STAGE = re.compile(r"[0-9a-f]{64}/[0-9a-f]{16}")


def _is_of_a_pass(name, line):
    return name.endswith("log.jsonl") and isinstance(line, dict) and "shard" in line


def _without_times(value):
    if isinstance(value, dict):
        return {
            name: _without_times(held)
            for name, held in value.items()
            if not (_TIMES.fullmatch(name) and not isinstance(held, dict))
            and not (name == "fingerprint" and "BASE" in json.dumps(value))
            and not (isinstance(held, str) and _RUN_OF_A_STAGE.fullmatch(held))
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


def unpaid(ledger):
    """Returns a problem unless a ledger pays each step of its plan exactly once."""
    header, *lines = ledger.read_text().splitlines()
    paid = collections.Counter(json.loads(line)["step"] for line in lines)
    wanted = collections.Counter(range(json.loads(header)["steps"]))
    if paid == wanted:
        return []
    return [f"{ledger}: paid {sorted(paid.elements())}, not {sorted(wanted)}"]


def unverified(place):
    """Returns certificates that `verify` refuses with the ledgers that they name."""
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


def outside(place, stage):
    """Returns the directories that could be released: all except private ones."""
    if stage.module == "pipeline":  # whose report is for its owner
        return [place / stage.out / "release"]
    if stage.module == "grid":
        return [path for path in (place / stage.out).iterdir() if path.name != PRIVATE]
    return [path for path in place.iterdir() if path.name != PRIVATE]


@contextlib.contextmanager
def folder_of(path):
    """Yields a folder that holds one file alone."""
    folder = path.with_name(path.name + ".alone")
    folder.mkdir()
    try:
        shutil.copy(path, folder)
        yield folder
    finally:
        shutil.rmtree(folder)
