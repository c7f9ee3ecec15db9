"""A certificate next to what it certifies, and the mark that it must be there.

Weights that were copied without their `certificate.json` would look like public ones,
and what is made from them like something that private queries had no part in. So the
files that no model is used without, its `config.json` and the stage's `stage.json`,
state the digest of the certificate, and a set's `manifest.json` holds the certificate
itself: where one is stated, it has to be there. And what
depends on private queries without any certificate, such as their embeddings, says so in
its `stage.json`: it is not to be taken for public.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
from typing import Any

import tfdpsq
from tfdpsq import validation
from tfdpsq.privacy.proof.certificate import FILE_NAME, digest_of, load_certificate

MARK = "certificate_digest"
# A T5's, a retriever's, and of a search that may be deployed alone, which `run` marks
# with the certificate that it writes.
CONFIGS = ("config.json", "model/config.json", "search/config.json")
_STAGE_FILE = "stage.json"
_MANIFEST = "manifest.json"
# All files that say that a certificate belongs next to them.
MARKED = (*CONFIGS, _STAGE_FILE, _MANIFEST)
# What a `stage.json` states, and its value where no certificate covers all of it.
GUARANTEE, PRIVATE = "guarantee", "private"


def code_fingerprint() -> str:
    """Returns the SHA-256 over all sources of the package `tfdpsq`."""
    # By the package's own path: this file's would cover less after a move.
    root = pathlib.Path(tfdpsq.__file__).resolve().parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def read_certificate(directory: str | os.PathLike) -> dict[str, Any] | None:
    """The certificate in a directory, or `None` where there is and was none.

    Args:
      directory: of a model, a set, or of anything else that a stage made.

    Raises:
      DataError: the file is not a certificate, of another format, or was changed; or it
        is missing, or another model's, as a mark next to it says; or there is none, as
        for what is private.
    """
    path = pathlib.Path(directory) / FILE_NAME
    certificate = None
    if path.is_file():
        certificate = load_certificate(path)
        if certificate.get("digest") != digest_of(certificate):
            raise validation.DataError(
                path,
                "its digest is not that of its content: it was changed",
                "Make the artefact again; a certificate must not be edited.",
            )
    for marked in (pathlib.Path(directory) / name for name in MARKED):
        digest = digest_in(marked)
        if digest is not None and (certificate or {}).get("digest") != digest:
            raise validation.DataError(
                path,
                f"{'missing' if certificate is None else 'of something else'}, while "
                f"{marked.name} says that private queries had a part in this, with "
                f"certificate {digest}",
                "Copy that certificate.json from where this was made: without it, "
                "nobody knows what is protected.",
            )
    stage = pathlib.Path(directory) / _STAGE_FILE
    if certificate is None and _guarantee(stage) == PRIVATE:
        raise validation.DataError(
            stage,
            "says that this depends on private queries, and no certificate covers it",
            "Make nothing of it that is not private itself.",
        )
    return certificate


def _guarantee(stage: pathlib.Path) -> Any:
    """Returns what a stage's file states; `None` where there is none.

    Raises:
      DataError: it cannot be read, so what it would state is unknown.
    """
    try:
        values = validation.parse_json(stage.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise validation.DataError(
            stage,
            f"it cannot be read ({validation.cut(str(error))}), so it is unknown "
            "whether its directory depends on private queries",
            "Restore it; or move it away if another program wrote it.",
        ) from error
    return values.get(GUARANTEE) if isinstance(values, dict) else None


def digest_in(marked: pathlib.Path) -> Any:
    """Returns the digest of the certificate that belongs to a file, or `None`."""
    if marked.name != _MANIFEST:
        return stated(marked, MARK)
    certificate = stated(marked, "certificate")
    return certificate.get("digest") if isinstance(certificate, dict) else None


def digest_beside(directory: str | os.PathLike) -> dict[str, str]:
    """Returns the entry of a JSON file that is to be marked: `MARK`, or nothing."""
    path = pathlib.Path(directory) / FILE_NAME
    return {MARK: load_certificate(path)["digest"]} if path.is_file() else {}


def stated(path: pathlib.Path, key: str) -> Any:
    """Reads an entry of a JSON file; `None` where there is none, or no file."""
    try:
        values = validation.parse_json(path.read_text("utf-8"))
    except (OSError, ValueError):  # its own reader says what is wrong with it
        return None
    return values.get(key) if isinstance(values, dict) else None
