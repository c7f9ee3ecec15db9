"""Records that every stage with private queries keeps: private reads, certificates."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from tfdpsq import privacy
from tfdpsq.data.io import write_json
from tfdpsq.privacy.proof import certificate as certificates
from tfdpsq.privacy.proof.ledger import READS_FILE_NAME
from tfdpsq.run.core import outputs, workdir


def private_reads(private: pathlib.Path, strict: bool) -> privacy.PrivateReads:
    """Returns the list of private reads outside the budget in a private directory.

    With `strict` the list refuses new entries.
    """
    if not strict:
        outputs.open_private(private)
    return privacy.PrivateReads(private / READS_FILE_NAME, strict=strict)


def all_private_reads(private: pathlib.Path) -> list[dict[str, str]]:
    """Returns the reads that are listed in a private directory, for a certificate.

    An output deeper in it, such as `private/tests/evaluation`, has a list of its own:
    those count, too.
    """
    lists = [private / READS_FILE_NAME, *sorted(private.rglob(READS_FILE_NAME))]
    found: list[dict[str, str]] = []
    for path in dict.fromkeys(lists):
        found += [e for e in privacy.PrivateReads(path).entries if e not in found]
    return found


def write_certificate(
    directory: pathlib.Path, certificate: Mapping[str, Any] | None
) -> None:
    """Writes `certificate.json`, and its digest into the configs of models next to it.

    Writes nothing for `None`, where no private query was used.
    """
    if certificate is None:
        return
    for path in (directory / name for name in certificates.CONFIGS):
        if path.is_file():
            marked = {certificates.MARK: certificate["digest"]}
            write_json(path, {**workdir.read_json(path), **marked})
    write_json(directory / certificates.FILE_NAME, certificate)
