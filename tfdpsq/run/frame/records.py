"""Records of finished stages, and of what stays under `private/`.

`stage.json` of an output has its privacy class, its settings, the fingerprints of its
inputs, what it states of itself, and versions. A result is looked up by the
fingerprint of all it depends on: settings without those of speed and without paths,
and what the inputs hold.

Durations and exact private counts depend on private data: they are in
`private/records/NAME.json`.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import resource
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

import tfdpsq
from tfdpsq import privacy, validation
from tfdpsq.data import io
from tfdpsq.privacy.proof import certificate as certificates
from tfdpsq.privacy.proof.ledger import FILE_NAME as LEDGER
from tfdpsq.privacy.proof.ledger import READS_FILE_NAME
from tfdpsq.run.frame.places import Place, Privacy, open_private, owner_only

STAGE_FILE = "stage.json"
FORMAT = "tfdpsq-stage/1"
KEY_FILE = "fingerprint.key"
_REMEDY = "Restore it, or move its directory away to make it again."
_PACKAGES = (
    "tensorflow tensorflow-text tensorflow-privacy tensorflow-recommenders scann "
    "tensorflow-datasets dp-accounting keras-nlp sacrebleu pytrec-eval-terrier numpy"
)


# -- stage.json ----------------------------------------------------------------------


def digest(value: Any) -> str:
    """Returns the SHA-256, in hex, of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def read_stage(directory: str | os.PathLike) -> dict[str, Any] | None:
    """Returns the record of a finished stage; `None` where there is none.

    Raises:
      DataError: it is damaged, or of version 0.x.
    """
    path = os.path.join(directory, STAGE_FILE)
    if not os.path.isfile(path):
        return None
    found = io.read_json(path, _REMEDY)
    if found.get("format") != FORMAT:
        problem = f"is not a {FORMAT} record: another version of tfdpsq wrote it"
        raise validation.DataError(path, problem, "Make it again in a new workdir.")
    return found


def write_stage(
    directory: pathlib.Path, depends: Mapping[str, Any], **entries: Any
) -> dict[str, Any]:
    """Writes the record of a stage, last, and returns it.

    Args:
      directory: of the output.
      depends: what the result depends on: "stage", "settings", "inputs".
      **entries: "guarantee", the privacy class; "settings", all of them; "facts";
        "result".
    """
    record = {
        "format": FORMAT,
        "stage": depends["stage"],
        "depends": dict(depends),
        "fingerprint": digest(depends),
        "run": secrets.token_hex(8),
        "versions": versions(),
        **entries,
    }
    path = directory / certificates.FILE_NAME
    if path.is_file():
        record[certificates.MARK] = certificates.load_certificate(path)["digest"]
    io.write_json(directory / STAGE_FILE, record)
    return record


def finished(place: Place, depends: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the record of an output if it is finished, `None` if it is not there.

    Raises:
      InputError: it was made with other settings or inputs, or something else is there.
    """
    path = pathlib.Path(place.path)
    found = read_stage(path)
    if found is None and (path.is_file() or (path.is_dir() and any(path.iterdir()))):
        raise validation.InputError(
            f"{path} is a file, or not empty and without {STAGE_FILE}. Use another "
            "--workdir."
        )
    if found is None or found["fingerprint"] == digest(depends):
        return found
    raise validation.InputError(
        f"{path} is finished, but was made with other settings or inputs "
        f"({differences(found['depends'], depends)}). Use another directory, or move "
        "this one away to make it again."
    )


def differences(old: Any, new: Any, most: int = 5) -> str:
    """Returns `most` paths at which JSON values differ, each with both values."""
    return "; ".join(list(_differences(old, new))[:most])


def _differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted(old.keys() | new.keys()):
            path = f"{where}.{key}" if where else key
            yield from _differences(old.get(key), new.get(key), path)
    # Compared as JSON: a tuple equals the list it was written as.
    elif json.dumps(old, sort_keys=True) != json.dumps(new, sort_keys=True):
        yield f"{where}: {validation.shown(old)} there, {validation.shown(new)} now"


def versions() -> dict[str, str]:
    """Returns the versions of what numbers depend on."""
    found = {"tfdpsq": tfdpsq.__version__, "python": platform.python_version()}
    for package in _PACKAGES.split():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def write_certificate(
    directory: pathlib.Path, certificate: Mapping[str, Any] | None
) -> None:
    """Writes a certificate, and its digest into the configs of the models next to it.

    A model that is copied without its certificate is then still known as derived.
    """
    if certificate is None:
        return
    for path in (directory / name for name in certificates.CONFIGS):
        if path.is_file():
            marked = {certificates.MARK: certificate["digest"]}
            io.write_json(path, {**io.read_json(path, _REMEDY), **marked})
    io.write_json(directory / certificates.FILE_NAME, certificate)


def require_class(directory: pathlib.Path, stated: Privacy, place: str) -> None:
    """Refuses an output whose certificates disagree with the class stated for it."""
    if stated == Privacy.PRIVATE:
        return
    files = directory.rglob(certificates.FILE_NAME)
    read = [privacy.read_certificate(file.parent) for file in files]
    found = {one["digest"]: class_of_certificate(one).word for one in read if one}
    words = list(found.values())  # copies of one count once
    if words != [stated.word] * (stated == Privacy.CERTIFIED):
        raise validation.InputError(
            f"{place} was to be {stated.word}, but its certificates say {words}. "
            "Please report this."
        )


def class_of_certificate(certificate: Mapping[str, Any] | None) -> Privacy:
    """Returns the class of what a certificate covers; `None` is public."""
    if certificate is None:
        return Privacy.PUBLIC
    finite = str(certificate["guarantee"]["epsilon"]) != "inf"
    is_certified = certificate["private"] is True and finite
    return Privacy.CERTIFIED if is_certified else Privacy.PRIVATE


# -- Under private/ --------------------------------------------------------------------


def private_reads(private: pathlib.Path, strict: bool = False) -> privacy.PrivateReads:
    """Returns the list of private reads that no ε covers; `strict` refuses new ones."""
    path = private / READS_FILE_NAME
    if not strict:
        open_private(private)
    with owner_only():
        return privacy.PrivateReads(path, strict=strict)


def keyed_fingerprint(fingerprint: str, private: pathlib.Path) -> str:
    """Returns the HMAC-SHA256 of a fingerprint of private data.

    With a plain hash, anyone who knows all other pairs could test guesses of one.
    The key is made on first use, and never leaves the private directory.

    Raises:
      DataError: the key is damaged; or it is missing, and a run has paid for data.
    """
    path = open_private(private) / KEY_FILE
    if not path.is_file():
        for ledger in sorted((private / "runs").glob(f"*/{LEDGER}")):
            if privacy.read_ledger(ledger).steps_paid:
                problem = f"is missing, but steps are paid in {ledger}"
                raise validation.DataError(path, problem, "Restore it.")
        with owner_only():
            own = private / f".{KEY_FILE}.{os.getpid()}"
            io.atomic_write(own, secrets.token_hex(32))
            with contextlib.suppress(FileExistsError):  # by another command
                os.link(own, path)
            own.unlink()
    key = path.read_text().strip()
    if not re.fullmatch("[0-9a-f]{64}", key):
        problem = "does not hold a key of 64 hexadecimal digits"
        raise validation.DataError(path, problem, "Restore it.")
    made = hmac.new(bytes.fromhex(key), fingerprint.encode(), hashlib.sha256)
    return f"keyed:{made.hexdigest()}"


def read_private(place: Place) -> dict[str, Any]:
    """Returns a stage's private record: "tries", "counts", "peak_gib"."""
    if not place.record.is_file():
        return {"tries": [], "counts": {}}
    return io.read_json(place.record, "Move it away: it only says what stages took.")


@contextlib.contextmanager
def timed(place: Place) -> Iterator[dict[str, Any]]:
    """Records how long the block takes, as one more try of the stage.

    Yields:
      Exact private counts to fill in.
    """
    found, started = read_private(place), time.time()
    try:
        yield found["counts"]
    finally:
        took = round(time.time() - started, 2)
        found["tries"].append({"started": started, "seconds": took})
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        found["peak_gib"] = round(max(found.get("peak_gib", 0.0), peak), 3)
        with owner_only():
            io.write_json(open_private(place.record.parent) / place.record.name, found)


def seconds(place: Place) -> float:
    """Returns how long a stage took, all tries together that were not killed."""
    return sum(one["seconds"] for one in read_private(place)["tries"])
