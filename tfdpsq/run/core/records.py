"""Records that every stage with private queries keeps: private reads, certificates."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from tfdpsq import privacy
from tfdpsq.data.files import write_json
from tfdpsq.privacy.proof import certificate as certificates
from tfdpsq.privacy.proof import certificate_files, reads
from tfdpsq.run.core import outputs, workdir


def private_reads(private: pathlib.Path, strict: bool) -> privacy.PrivateReads:
    """Returns the list of private reads outside the budget in a private directory.

    With `strict` the list refuses new entries.
    """
    if not strict:
        outputs.open_private(private)
    return privacy.PrivateReads(private / reads.FILE_NAME, strict=strict)


def write_certificate(
    directory: pathlib.Path, certificate: Mapping[str, Any] | None
) -> None:
    """Writes `certificate.json`, and its digest into the configs of models next to it.

    Writes nothing for `None`, where no private query was used.
    """
    if certificate is None:
        return
    for path in (directory / name for name in certificate_files.CONFIGS):
        if path.is_file():
            marked = {certificate_files.MARK: certificate["digest"]}
            write_json(path, {**workdir.read_json(path), **marked})
    write_json(directory / certificates.FILE_NAME, certificate)
