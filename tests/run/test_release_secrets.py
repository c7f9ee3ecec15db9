"""What a job releases holds none of its secrets, in any form that a file may have.

They are the seeds of its noise and of its samplers, the rows it drew, the key of its
fingerprints, the nonces of its ledgers, its losses, its times, and the private
queries. What searches for them is tested here, too.
"""

import base64
import gzip
import hmac
import json
import pathlib
import re
import secrets
import shutil
import time

import numpy as np
import pytest
from helpers import recorder
from helpers import secret_search as _search

from tfdpsq.data import BeirDirectory, Tokenizer
from tfdpsq.privacy.randomness.noise import DRAWS, derived_seed
from tfdpsq.run.core import releases, sources, workdir
from tfdpsq.run.passes import passes, sharded_stages

_PURPOSES = (*(f"noise {draw}" for draw in range(DRAWS)), "dropout", "global")
_TIMES = re.compile("second|elapsed|duration|took|minute|clock|started|finished")


Secret, find_secrets = _search.Secret, _search.find_secrets


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
                name = f"{key} of {pathlib.Path(entry['run']).name}"
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
    key = Secret("the fingerprints' key", (private / "fingerprint.key").read_text())
    ledgers = sorted(private.rglob("ledger.jsonl"))
    return [key] + [
        Secret(f"nonce of {path.parent.name}", _lines(path)[0]["nonce"])
        for path in ledgers
    ]


def _measured(job):
    """Losses and times: private measurements that no ε covers."""
    private = job.directory / "private"
    found = []
    for path in sorted(private.rglob("curve.json")):
        curve = json.loads(path.read_text())
        for key in ("loss", "seconds"):
            # The loss of an empty batch is 0, of which every file is full.
            found += [
                Secret(f"{key} in {path.parent.name}", v) for v in curve[key] if v
            ]
    seconds = json.loads((private / "seconds.json").read_text())
    # Other numbers, too, are 3.7 or 0.25: two digits are too few to mean something.
    return found + [
        Secret(f"seconds of {stage}", value)
        for stage, value in seconds.items()
        if value > 1 and value * 10 % 1
    ]


def _queries(job):
    """Their texts and tokens, and the hash of them all without its key."""
    vocabulary = job.directory / "release" / "prepare" / "vocabulary"
    ids, lengths = Tokenizer(str(vocabulary / "spiece.model")).encode(job.queries, 12)
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
    "keys": (_keys, 3),
    "measured": (_measured, 20),
    "queries": (_queries, 100),
}


@pytest.mark.parametrize("kind", _KINDS)
def test_the_release_holds_no_secret(job, kind):
    collect, fewest = _KINDS[kind]
    secrets = list(collect(job))
    assert len(secrets) >= fewest, secrets  # Else nothing would be looked for.
    release = job.directory / "release"
    assert len(list(release.rglob("certificate.json"))) >= 3
    assert find_secrets(release, secrets) == []


def _keys_of(value):
    """Every key of nested JSON values."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _keys_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _keys_of(inner)


def test_nothing_in_the_release_is_called_a_time(job):
    """The searches above know durations to the digit; a stage may round its own."""
    paths = list((job.directory / "release").rglob("*.json"))
    assert {"stage.json", "manifest.json", "certificate.json"} <= {
        path.name for path in paths
    }
    told = {key for path in paths for key in _keys_of(json.loads(path.read_text()))}
    assert not [key for key in told if _TIMES.search(key)]
    seconds = _keys_of(json.loads((job.directory / "results.json").read_text()))
    assert any(map(_TIMES.search, seconds))  # no blind search


@pytest.mark.parametrize("kind", ["stage", "pass"])
def test_what_a_stage_writes_does_not_depend_on_how_long_it_took(
    tmp_path, monkeypatch, kind
):
    """The same bytes whether its clock runs fast or slow: times are private."""
    monkeypatch.setattr(secrets, "token_hex", lambda length: "0" * 2 * length)

    def make(out, *_):
        (out / "result.txt").write_text("done")
        return {"rows": 3}

    def written(speed):
        out = tmp_path / "stage"  # the same: a record says where it was written
        output = releases.Output(out, releases.PUBLIC, "rows")
        with monkeypatch.context() as patch:
            for name in ("time", "monotonic", "perf_counter"):
                own = getattr(time, name)
                patch.setattr(time, name, lambda own=own: 1e9 + speed * own())
            if kind == "stage":
                workdir.run_stage(output, {"seed": 1}, {"data": "f00"}, make)
            else:
                work = passes.Work("rows", 2, lambda: lambda index, shard: None)
                sharded_stages.run_stage(
                    output, {"seed": 1}, {"data": "f00"}, work, make, passes.ALONE
                )
        found = {
            str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*")
        }
        shutil.rmtree(out)
        return found

    slow, fast = written(1), written(1000)
    assert set(slow) == {"result.txt", "stage.json"}
    assert slow == fast


def test_a_fingerprint_is_keyed_by_what_its_owner_alone_has(tmp_path):
    """With a key that everybody has, guesses at a private query could be tested."""
    keys, found = [], []
    for name in ("one", "other"):
        found.append(sources.keyed_fingerprint("f00", tmp_path / name))
        assert sources.keyed_fingerprint("f00", tmp_path / name) == found[-1]
        assert sources.keyed_fingerprint("f01", tmp_path / name) != found[-1]
        keys.append((tmp_path / name / sources.KEY_FILE).read_text())
        mac = hmac.new(bytes.fromhex(keys[-1]), b"f00", "sha256")
        assert found[-1] == f"keyed:{mac.hexdigest()}"
    # 256 bits of the system's entropy: two of them share no more than chance has it.
    one, other = (int(key, 16) for key in keys)
    assert 70 < bin(one ^ other).count("1") < 186
    assert found[0] != found[1]


def test_a_finished_job_kept_its_seeds_nowhere(job):
    """They could only subtract the noise; the ledgers are what remains of a run."""
    assert find_secrets(job.directory, _seeds(job)) == []
    assert list((job.directory / "private").rglob("ledger.jsonl"))


def test_what_is_private_holds_them(job):
    """The same search finds each kind where it belongs, so it is no blind one."""
    found = "\n".join(
        find_secrets(
            job.directory / "private", _keys(job) + _measured(job) + _queries(job)
        )
    )
    for path, name in (
        ("fingerprint.key", "the fingerprints' key as text"),
        ("runs/generator_eps8/ledger.jsonl", "nonce of generator_eps8 as text"),
        ("logs/generator_eps8/curve.json", "loss in generator_eps8 as decimal"),
        ("seconds.json", "seconds of "),
    ):
        assert f"{path}: {name}" in found
    # results.json shows held-out private queries, and lies beside both.
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
    "decimal": (_SEED, str(_SEED)),
    "hex": (_SEED, hex(_SEED)),
    "upper-case hex": (_SEED, f"{_SEED:X}"),
    "little-endian": (_SEED, _SEED.to_bytes(16, "little")),
    "big-endian": (_SEED, _SEED.to_bytes(16, "big")),
    "int64 words": (_SEED, np.array([_SEED & _HALF, 7], "<i8").tobytes()),
    "upper int64 word": (_SEED, np.array([7, _SEED >> 63 & _HALF], ">i8").tobytes()),
    "JSON words": (_SEED, json.dumps({"key": [7, _SEED >> 64]})),
    "signed word": (_SEED, str((_SEED >> 64) - (1 << 64))),
    "base64": (_SEED, base64.b64encode(b"xy" + _SEED.to_bytes(16, "big") + b"z")),
    "URL base64": (_SEED, base64.urlsafe_b64encode(_SEED.to_bytes(16, "little"))),
    "base64 of decimal": (_SEED, base64.b64encode(f"seed={_SEED}".encode())),
    "UTF-16": (_SEED, str(_SEED).encode("utf-16")),
    "npz": (_SEED, None),
    "gzip": (_SEED, gzip.compress(json.dumps({"seed": _SEED}).encode())),
    "file name": (_SEED, ""),
    "hex key": (_KEY, f"key: {_KEY}"),
    "upper-case key": (_KEY, _KEY.upper()),
    "key's bytes": (_KEY, bytes.fromhex(_KEY)),
    "key's bytes reversed": (_KEY, bytes.fromhex(_KEY)[::-1]),
    "key's base64": (_KEY, base64.b64encode(b"k" + bytes.fromhex(_KEY))),
    "query": (_QUERY, f"<td>{_QUERY}</td>"),
    "query in JSON": (_QUERY, json.dumps({"text": _QUERY})),
    "query in base64": (_QUERY, base64.b64encode(_QUERY.encode())),
    "query in UTF-16": (_QUERY, _QUERY.encode("utf-16")),
    "query in hex": (_QUERY, _QUERY.encode().hex()),
    "loss in JSON": (_LOSS, json.dumps({"loss": [6.1, _LOSS]})),
    "loss as float32": (_LOSS, f"loss {np.float32(_LOSS)} after"),
    "loss in binary": (_LOSS, b"\x11" + np.array(_LOSS, "<f8").tobytes()),
    "loss, big-endian": (_LOSS, np.array([1.0, _LOSS], ">f8").tobytes()),
    "loss in base64": (_LOSS, base64.b64encode(np.array([2.0, _LOSS]).tobytes())),
    "seconds": (13.67, json.dumps({"seconds": 13.67})),
    "rows as int32": (_DRAWN, np.array([0, *_DRAWN], "<i4").tobytes()),
    "rows as int64": (_DRAWN, np.array(_DRAWN, "<i8").tobytes()),
    "rows, big-endian": (_DRAWN, np.array(_DRAWN, ">i8").tobytes()),
    "rows in JSON": (_DRAWN, json.dumps({"rows": _DRAWN})),
    "rows in CSV": (_DRAWN, ",".join(map(str, _DRAWN))),
    "rows in lines": (_DRAWN, "\n".join(map(str, _DRAWN))),
    "rows in base64": (_DRAWN, base64.b64encode(np.array([7, *_DRAWN]).tobytes())),
}


def _clean_release(folder):
    """Files as a release has them: weights, numbers, texts."""
    random = np.random.default_rng(5)
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "weights.h5").write_bytes(random.bytes(1 << 20))
    np.savez_compressed(folder / "model" / "slots.npz", a=random.random(1000))
    (folder / "certificate.json").write_text(
        json.dumps({"epsilon": 7.98, "steps": [1, 2, 3, 4, 5], "head": "ab" * 32})
    )
    (folder / "queries.jsonl").write_text('{"text": "who sorts a table case 18"}\n')
    (folder / "empty").write_text("")
    return folder


@pytest.mark.parametrize("form", _PLANTED)
def test_a_planted_secret_is_found_in_any_form(tmp_path, form):
    value, content = _PLANTED[form]
    release = _clean_release(tmp_path / "release")
    secrets = [Secret("planted", value), Secret("another", (1 << 120) + 12345)]
    assert find_secrets(release, secrets) == []
    target = release / "model" / "planted.bin"
    if form == "npz":
        words = np.array([_SEED & _HALF, _SEED >> 63 & _HALF])
        np.savez_compressed(target.with_suffix(".npz"), key=words)
    elif form == "file name":
        (release / "model" / f"state-{_SEED}").write_text("")
    else:
        raw = content.encode() if isinstance(content, str) else content
        target.write_bytes(b"before it " + raw if form != "gzip" else raw)
    (*_, found) = find_secrets(release, secrets)
    assert "planted as " in found and found.startswith("model/")


@pytest.mark.parametrize("value", [7, [1, 2, 3], "short"])
def test_what_would_match_by_chance_is_no_secret(value):
    with pytest.raises(AssertionError):
        _search.forms(value)
