"""The released histogram, and the number of synthetic queries of each document.

`histogram` writes it; `synthesize` writes queries by it, as post-processing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

from tfdpsq import validation
from tfdpsq.data.io import sha256_of_file, write_json
from tfdpsq.data.texts import Document
from tfdpsq.privacy import read_certificate
from tfdpsq.run.core import workdir
from tfdpsq.run.passes.clusters import DocumentClusters

HISTOGRAM_FILE = "histogram.json"
CLUSTERS_FILE = "clusters.npz"
_REMEDY = "Run histogram into another directory, which spends its epsilon again."


@dataclasses.dataclass(frozen=True)
class Histogram:
    """Noisy counts of private queries by the cluster of their document.

    Attributes:
      clusters: of the documents.
      documents: of the corpus, by cluster; public.
      counts: units of private pairs by the cluster of their document, with noise.
      corpus: fingerprint of the corpus.
    """

    clusters: DocumentClusters
    documents: tuple[int, ...]
    counts: tuple[float, ...]
    corpus: str

    def save(self, directory: pathlib.Path) -> None:
        """Writes it into a directory."""
        self.clusters.save(directory / CLUSTERS_FILE)
        content = {name: getattr(self, name) for name in ("documents", "counts")}
        write_json(directory / HISTOGRAM_FILE, {**content, "corpus": self.corpus})

    @classmethod
    def load(cls, directory: str | pathlib.Path) -> Histogram:
        """Reads what `save` wrote.

        Raises:
          InputError: the directory holds no histogram.
          DataError: it is damaged, or another one than its certificate is of.
        """
        path = pathlib.Path(directory, HISTOGRAM_FILE)
        if not path.is_file():
            raise validation.InputError(
                f"{directory} holds no {HISTOGRAM_FILE}. Give the directory that "
                "`tfdpsq histogram` wrote."
            )
        found = workdir.read_json(path)
        clusters = DocumentClusters.load(path.with_name(CLUSTERS_FILE))
        documents = _numbers(found.get("documents"), clusters.count)
        counts = _numbers(found.get("counts"), clusters.count)
        if not documents or not counts or not isinstance(found.get("corpus"), str):
            raise validation.DataError(path, "it is damaged", _REMEDY)
        stated = certificate_of(str(directory)).get("fingerprints", {})
        if stated.get("histogram") != fingerprint(path.parent):
            raise validation.DataError(
                path, "it is not what its certificate was made for", _REMEDY
            )
        return cls(clusters, tuple(map(int, documents)), counts, found["corpus"])

    def positive_counts(self) -> list[float]:
        """Returns the counts by cluster; those below 0, or of no document, are 0.

        Raises:
          InputError: all are.
        """
        counts = [
            max(0.0, count) if documents else 0.0
            for count, documents in zip(self.counts, self.documents)
        ]
        if not sum(counts):
            raise validation.InputError(
                "no count of the histogram is above 0: its noise is larger than the "
                "data. Leave histogram out."
            )
        return counts

    def rates(self, queries: int, seed: int) -> Rates:
        """Returns how many queries a document gets: as many as those like it have.

        In proportion to the private queries about a document of its cluster; a count
        that noise made negative is 0. `queries` counts those of all documents together.

        Raises:
          InputError: no count is above 0.
        """
        counts = self.positive_counts()
        mean = (
            queries * count / sum(counts) / max(documents, 1)
            for count, documents in zip(counts, self.documents)
        )
        return Rates(self.clusters, tuple(mean), queries, seed)


@dataclasses.dataclass(frozen=True)
class Rates:
    """Decides how many queries are written for each document; can be pickled.

    Attributes:
      clusters: of documents.
      mean: number of queries of a document, by cluster.
      queries: of all documents together, on average.
      seed: public.
    """

    clusters: DocumentClusters
    mean: tuple[float, ...]
    queries: int
    seed: int

    def of(self, documents: Iterable[Document]) -> Iterator[tuple[Document, int]]:
        """Yields each document with its number of queries, which can be 0.

        It is the mean of its cluster rounded up or down by chance, which depends on
        seed and id alone: the same in any shard.
        """
        for document, cluster in self.clusters.stream(documents):
            key = f"{self.seed}\0queries\0{document.id}".encode()
            chance = int.from_bytes(hashlib.sha256(key).digest()[:8], "big") / 2**64
            yield document, math.floor(self.mean[cluster] + chance)


def fingerprint(directory: pathlib.Path) -> str:
    """Returns the SHA-256, in hex, of a histogram's files."""
    parts = [
        sha256_of_file(directory / name) for name in (HISTOGRAM_FILE, CLUSTERS_FILE)
    ]
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def certificate_of(directory: str) -> dict[str, Any]:
    """Returns the certificate of a histogram.

    Raises:
      InputError: there is none, or it guarantees nothing.
    """
    certificate = read_certificate(directory)
    if certificate is None or not certificate["private"]:
        raise validation.InputError(
            f"histogram is {directory}, which has no certificate of a finite epsilon. "
            "Give the directory that `tfdpsq histogram` wrote."
        )
    return certificate


def _numbers(values: Any, count: int) -> tuple[float, ...]:
    """Returns so many finite numbers of a JSON list; none if it is another."""
    if not isinstance(values, list) or len(values) != count:
        return ()
    sound = all(type(value) in (int, float) for value in values)
    return tuple(values) if sound and all(map(math.isfinite, values)) else ()
