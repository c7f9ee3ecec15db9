"""What a job releases holds none of its secrets, in any form that a file may have.

They are the seeds of its noise and of its samplers, the rows it drew, the key of its
fingerprints, its losses, its times, and the private queries. What searches for them is
tested here, too.
"""

import base64
import gzip
import json
import pathlib
import re
import stat
import zipfile

import numpy as np
import pytest
from helpers import recorder
from helpers.secret_search import Secret, find_secrets

from tfdpsq.data import BeirDirectory, Tokenizer
from tfdpsq.privacy.randomness.noise import DRAWS
from tfdpsq.privacy.randomness.secure import derived_seed
from tfdpsq.run.common.progress import LOG_FILE, read_points

pytestmark = [pytest.mark.xdist_group("job"), pytest.mark.timeout(300)]

_NOISE = (f"noise {draw}" for draw in range(DRAWS))
_PURPOSES = (*_NOISE, "dropout", "global", "sampler")
_MODIFIED = 315_532_800  # 1980-01-01, the first day of zip files
_TIMES = re.compile("second|elapsed|duration|took|minute|clock|started|finished")


# -- The job's release -----------------------------------------------------------


def _lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def _seeds(job):
    """The seeds of every run, as they stood in its secrets.json until it finished.

    And what is derived from them, which subtracts the noise as well.
    """
    found = set()
    for entry in _lines(job.recorded / recorder.SECRETS):
        for key, value in entry.items():
            if isinstance(value, int):
                name = f"{key} of {pathlib.Path(entry['directory']).name}"
                found.add(Secret(name, value))
                for purpose in _PURPOSES:
                    words = derived_seed(value, purpose)
                    found.add(Secret(f"{name}, for {purpose}", words))
    return found


def _rows(job):
    """The rows of every step, in the order drawn and sorted."""
    drawn = [entry["rows"] for entry in _lines(job.recorded / recorder.DRAWS)]
    return [
        Secret("rows drawn", rows)
        for drawn_rows in drawn
        for rows in (drawn_rows, sorted(drawn_rows))
        if len(rows) >= 5
    ]


def _keys(job):
    private = job.directory / "private"
    key = (private / "fingerprint.key").read_text()
    return [Secret("the fingerprints' key", key)]


def _measured(job):
    """Losses on private pairs, and times of all stages: no ε covers them."""
    private, found = job.directory / "private", []
    for path in sorted(private.glob(f"logs/*/{LOG_FILE}")):
        for point in read_points(path) if path.parent.name != "public_model" else ():
            # The loss of an empty batch is 0, of which every file is full.
            if point.get("loss"):
                found.append(Secret(f"loss in {path.parent.name}", point["loss"]))
    for path in sorted(private.glob("records/*.json")):
        for one in json.loads(path.read_text())["tries"]:
            value = one["seconds"]
            # Other numbers, too, are 3.7 or 0.25: two digits are too few.
            if value > 1 and value * 10 % 1:
                found.append(Secret(f"seconds of {path.stem}", value))
    return found


def _queries(job):
    """Their texts and tokens, and the hash of them all without its key."""
    vocabulary = job.directory / "release" / "generator_eps8" / "spiece.model"
    ids, lengths = Tokenizer(vocabulary).encode(job.queries, 12)
    pairs = BeirDirectory(job.directory.parent / "pairs")
    return [
        Secret("the plain fingerprint of the pairs", pairs.fingerprint()),
        *(Secret("a private query", query) for query in job.queries),
        *(
            Secret("a private query's tokens", np.asarray(row)[:length].tolist())
            for row, length in zip(ids, lengths)
        ),
    ]


_KINDS = {
    "seeds": (_seeds, 4),
    "rows": (_rows, 4),
    "keys": (_keys, 1),
    "measured": (_measured, 20),
    "queries": (_queries, 100),
}


@pytest.mark.parametrize("kind", _KINDS)
def test_release_holds_no_secret(job, kind):
    collect, fewest = _KINDS[kind]
    secrets = list(collect(job))
    assert len(secrets) >= fewest, secrets  # Else nothing would be looked for.
    release = job.directory / "release"
    assert len(list(release.rglob("certificate.json"))) >= 3
    assert find_secrets(release, secrets) == []


# Names of what must never be released.
_PRIVATE_NAMES = re.compile(
    r"private|.*\.key|ledger.*|secrets.*|private_reads.*|log\.jsonl"
    r"|.*tfevents.*|.*\.trec|metrics\.json|canaries\.jsonl|report\.html|results\.json"
    r"|step-\d+\.npz|.*\.partial"
)


def _modes(folder):
    return {
        (path.is_dir(), stat.S_IMODE(path.stat().st_mode))
        for path in (folder, *folder.rglob("*"))
    }


def test_release_holds_public_and_certified_outputs_alone(job):
    release = job.directory / "release"
    stated = {
        path.parent.name: json.loads(path.read_text())["guarantee"]
        for path in release.glob("*/stage.json")
    }
    of_queries = ("eps8", "adapter_eps0_5", "histogram_eps0.4")
    assert stated == {
        name: "certified" if name.endswith(of_queries) else "public" for name in stated
    }
    assert len(stated) >= 8
    assert not [p for p in release.rglob("*") if _PRIVATE_NAMES.fullmatch(p.name)]
    assert _modes(release) == {(True, 0o755), (False, 0o644)}
    assert _modes(job.directory / "private") == {(True, 0o700), (False, 0o600)}


def test_no_file_of_the_release_holds_a_time(job):
    """Times of files, of members of archives, and in the header of gzip."""
    release, archives, found = job.directory / "release", 0, []
    for path in (release, *release.rglob("*")):
        if path.stat().st_mtime != _MODIFIED:
            found.append(path)
        if path.is_file() and zipfile.is_zipfile(path):
            archives += 1
            members = zipfile.ZipFile(path).infolist()
            found += [(path, m) for m in members if m.date_time[:3] != (1980, 1, 1)]
        head = path.read_bytes()[:8] if path.is_file() else b""
        if head[:2] == b"\x1f\x8b" and head[4:8] != bytes(4):
            found.append(path)
    assert found == [] and archives


def _keys_of(value):
    """Every key of nested JSON values."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _keys_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _keys_of(inner)


def test_no_entry_of_the_release_is_called_a_time(job):
    """The searches above know durations to the digit; a stage may round its own."""
    paths = list((job.directory / "release").rglob("*.json"))
    assert {"stage.json", "manifest.json", "certificate.json"} <= {
        path.name for path in paths
    }
    told = {key for path in paths for key in _keys_of(json.loads(path.read_text()))}
    assert not [key for key in told if _TIMES.search(key)]
    results = json.loads((job.directory / "private" / "results.json").read_text())
    assert any(map(_TIMES.search, _keys_of(results)))  # no blind search


def test_finished_job_kept_its_seeds_nowhere(job):
    """They could only subtract the noise; the ledgers are what remains of a run."""
    assert find_secrets(job.directory, _seeds(job)) == []
    assert list((job.directory / "private").rglob("ledger.jsonl"))


def test_search_finds_secrets_where_they_belong(job):
    """The same search finds each kind where it belongs, so it is no blind one."""
    found = "\n".join(
        find_secrets(
            job.directory / "private", _keys(job) + _measured(job) + _queries(job)
        )
    )
    for line in (
        "fingerprint.key: the fingerprints' key as text",
        f"logs/generator_eps8/{LOG_FILE}: loss in generator_eps8 as decimal",
        r"records/\w+.json: seconds of ",
    ):
        assert re.search(line, found)
    # results.json shows held-out private queries.
    assert any(
        "a private query as" in f for f in find_secrets(job.directory, _queries(job))
    )


# -- The search itself -----------------------------------------------------------

_SEED = 0xC0FFEE1234567890DEADBEEF87654321
_HALF = (1 << 63) - 1
_KEY = "9f" * 15 + "a7" + "3c" * 16
_QUERY = "who sorts a “table” safely case 17"
_LOSS = 6.281515598297119
_DRAWN = [3, 17, 22, 41, 58]
_PLANTED = {
    "decimal": (_SEED, str(_SEED).encode()),
    "big-endian": (_SEED, _SEED.to_bytes(16, "big")),
    "int64 words": (_SEED, np.array([_SEED & _HALF, 7], "<i8").tobytes()),
    "base64": (_SEED, base64.b64encode(b"xy" + _SEED.to_bytes(16, "big") + b"z")),
    "gzip": (_SEED, gzip.compress(json.dumps({"seed": _SEED}).encode())),
    "key's bytes": (_KEY, bytes.fromhex(_KEY)),
    "query in JSON": (_QUERY, json.dumps({"text": _QUERY}).encode()),
    "query in UTF-16": (_QUERY, _QUERY.encode("utf-16")),
    "loss in JSON": (_LOSS, json.dumps({"loss": [6.1, _LOSS]}).encode()),
    "loss in binary": (_LOSS, b"\x11" + np.array(_LOSS, "<f8").tobytes()),
    "rows as int32": (_DRAWN, np.array([0, *_DRAWN], "<i4").tobytes()),
    "rows in JSON": (_DRAWN, json.dumps({"rows": _DRAWN}).encode()),
}


def test_search_finds_a_secret_in_any_form(tmp_path):
    secrets = [Secret("planted", value) for value, _ in _PLANTED.values()]
    random = np.random.default_rng(5)
    (tmp_path / "weights.h5").write_bytes(random.bytes(1 << 20))
    np.savez_compressed(tmp_path / "slots.npz", a=random.random(1000))
    certificate = {"epsilon": 7.98, "steps": [1, 2, 3, 4, 5], "head": "ab" * 32}
    (tmp_path / "certificate.json").write_text(json.dumps(certificate))
    (tmp_path / "queries.jsonl").write_text('{"text": "who sorts a table case 18"}\n')
    assert find_secrets(tmp_path, secrets) == []
    for form, (_, content) in _PLANTED.items():
        (tmp_path / form).write_bytes(content)
    words = np.array([_SEED & _HALF, _SEED >> 63 & _HALF])
    np.savez_compressed(tmp_path / "words.npz", key=words)
    (tmp_path / f"state-{_SEED}").write_text("")
    found = {
        line.partition(": planted as ")[0] for line in find_secrets(tmp_path, secrets)
    }
    assert found == {*_PLANTED, "words.npz", f"state-{_SEED}"}
