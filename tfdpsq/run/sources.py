"""Where training pairs come from: private BEIR splits, or sets that are free to use.

Whether a set is private decides what its use costs, so it is read off the data
itself: a directory with a manifest is synthetic or public and says by its
certificate what it already cost; a BEIR directory's queries are private.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

from tfdpsq import validation
from tfdpsq.data import BeirDirectory, build_pydocs, read_manifest, read_synthetic
from tfdpsq.data.texts import Document, Pair

PYDOCS = "pydocs"


@dataclasses.dataclass(frozen=True)
class Source:
    """Pairs to train on.

    Attributes:
      pairs: the rows; for a private source exactly one per query.
      private: whether using them spends privacy.
      certificate: what making them has already cost; `None` if nothing.
      fingerprint: SHA-256 of the content.
    """

    pairs: list[Pair]
    private: bool
    certificate: dict[str, Any] | None
    fingerprint: str


def open_beir(path: str) -> BeirDirectory:
    """A BEIR directory, or the embedded corpus for "pydocs".

    Raises:
      DataError: the directory lacks a file.
    """
    return build_pydocs() if path == PYDOCS else BeirDirectory(path)


def source_fingerprint(path: str) -> str:
    """What identifies the content of a BEIR directory or synthetic set."""
    if is_free(path):
        return read_manifest(path)["fingerprint"]
    return open_beir(path).fingerprint()


def is_free(path: str) -> bool:
    """Whether a path holds a synthetic or public set rather than private pairs."""
    return path != PYDOCS and (pathlib.Path(path) / "manifest.json").is_file()


def load_source(path: str, split: str = "train") -> Source:
    """Reads the pairs of a BEIR split or of a synthetic set.

    Args:
      path: "pydocs", a BEIR directory, or a directory that `synthesize` or
        `prepare` wrote.
      split: which qrels; a synthetic set has only "train".

    Raises:
      DataError: malformed data, named by file and line.
      InputError: no pairs.
    """
    if is_free(path):
        manifest = read_manifest(path)
        pairs = [
            Pair(row.query_id, row.query, row.document_id, row.document)
            for row in read_synthetic(path)
        ]
        certificate = manifest.get("certificate")
        source = Source(
            pairs,
            # A set made without privacy is as private as what it was made from.
            private=bool(certificate) and not certificate["private"],
            certificate=certificate,
            fingerprint=manifest["fingerprint"],
        )
    else:
        beir = open_beir(path)
        source = Source(beir.pairs(split), True, None, beir.fingerprint())
    if not source.pairs:
        raise validation.InputError(
            f"{path} has no pairs in split {split!r}. Choose another split or set."
        )
    return source


def sampled_documents(path: str, most: int | None) -> Iterator[Document]:
    """The documents of a corpus, or an evenly spread part of them.

    The choice looks at the corpus alone, never at which documents have private
    queries: that would be a private read.

    Args:
      path: "pydocs" or a BEIR directory.
      most: how many documents; `None` takes all.

    Yields:
      Documents in the corpus's order.
    """
    beir = open_beir(path)
    if most is None:
        yield from beir.documents()
        return
    validation.positive_integer("max_documents", most)
    total = sum(1 for _ in beir.documents())
    for number, document in enumerate(beir.documents()):
        # Every document whose share of the quota has just become due.
        if (number + 1) * most // total > number * most // total or most >= total:
            yield document
