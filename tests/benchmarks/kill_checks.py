"""What `kills.py` demands of a stage that was killed and run again."""

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
    """{relative path: path} of all files, with the names that vary made equal."""

    def name_of(path):
        name = re.sub(r"process-\d+", "process", str(path.relative_to(place)))
        return re.sub(r"events\.out\.tfevents\..*", "events", name)

    return {
        name_of(path): path
        for path in place.rglob("*")
        if path.is_file() or not any(path.iterdir())
    }


def compared(place, reference, fresh):
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


def unpaid(ledger):
    """Whether a ledger pays each step of its plan exactly once."""
    header, *lines = ledger.read_text().splitlines()
    paid = collections.Counter(json.loads(line)["step"] for line in lines)
    wanted = collections.Counter(range(json.loads(header)["steps"]))
    if paid == wanted:
        return []
    return [f"{ledger}: paid {sorted(paid.elements())}, not {sorted(wanted)}"]


def unverified(place):
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


def outside(place, stage):
    """What could be released: everything but private directories."""
    if stage.module == "pipeline":  # whose report is for its owner
        return [place / stage.out / "release"]
    if stage.module == "grid":
        return [path for path in (place / stage.out).iterdir() if path.name != PRIVATE]
    return [path for path in place.iterdir() if path.name != PRIVATE]


@contextlib.contextmanager
def folder_of(path):
    """A folder that holds one file alone."""
    folder = path.with_name(path.name + ".alone")
    folder.mkdir()
    try:
        shutil.copy(path, folder)
        yield folder
    finally:
        shutil.rmtree(folder)
