"""Clusters of public documents, private queries counted by them, and their use.

A document is its counts of hashed words, weighted by how rare each is, in a few dozen
directions (latent semantic analysis; Deerwester et al. 1990), clustered by k-means. All
of it is fitted on documents alone, so the clusters are as public as they are.
`synthesize` writes queries by the counts, as post-processing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tfdpsq.data.io import read_json, write_json
from tfdpsq.data.texts import Document
from tfdpsq.validation import InputError
from tfdpsq.words import words_of

HISTOGRAM_FILE = "histogram.json"
CLUSTERS_FILE = "clusters.npz"

# Documents that clusters are fitted on, so that memory does not grow with the corpus.
_FITTED = 50_000
_WORDS = 2**15  # hashed: no vocabulary to keep
_DIRECTIONS = 64
_BATCH = 1024


@dataclasses.dataclass(frozen=True)
class DocumentClusters:
    """Clusters that any document belongs to one of; arrays are float32."""

    rarity: np.ndarray  # [words], the weight of each hashed word
    directions: np.ndarray  # [directions, words]
    centres: np.ndarray  # [clusters, directions]

    @classmethod
    def fit(
        cls, documents: Callable[[], Iterable[Document]], clusters: int, seed: int
    ) -> DocumentClusters:
        """Fits clusters on up to 50,000 public documents, evenly spread over them.

        `documents` is called twice; `seed` has 32 bits.
        """
        from sklearn.cluster import MiniBatchKMeans  # a second to import
        from sklearn.decomposition import TruncatedSVD

        total = sum(1 for _ in documents())
        if total < clusters:
            raise InputError(
                f"clusters is {clusters}, but there are {total} documents. Lower it."
            )
        every = -(-total // _FITTED)
        texts = [each.content for each in itertools.islice(documents(), 0, None, every)]
        counts = _counts(texts)
        present = np.asarray((counts > 0).sum(axis=0)).ravel()
        rarity = np.log((1 + len(texts)) / (1 + present)).astype(np.float32) + 1
        rows = _weighted(counts, rarity)
        size = min(_DIRECTIONS, *rows.shape)
        directions = TruncatedSVD(size, random_state=seed).fit(rows).components_
        directions = directions.astype(np.float32)
        k_means = MiniBatchKMeans(clusters, random_state=seed, n_init=3)
        k_means.fit(_projected(rows, directions))
        return cls(rarity, directions, k_means.cluster_centers_.astype(np.float32))

    def of(self, contents: Sequence[str]) -> np.ndarray:
        """Returns the cluster of each `Document.content`, [documents] int64."""
        if not len(contents):
            return np.zeros([0], np.int64)
        rows = _weighted(_counts(contents), self.rarity)
        places = _projected(rows, self.directions)
        # Not by BLAS, whose rounding of a row depends on the rows around it: a count
        # must not change with a query that is not its own.
        products = np.einsum("nd,kd->nk", places, self.centres, optimize=False)
        return np.argmin((self.centres**2).sum(axis=1) - 2 * products, axis=1)

    def stream(self, documents: Iterable[Document]) -> Iterator[tuple[Document, int]]:
        """Yields each document with its cluster; reads a bounded number ahead."""
        documents = iter(documents)
        while some := list(itertools.islice(documents, _BATCH)):
            yield from zip(some, self.of([each.content for each in some]).tolist())


def _counts(texts: Sequence[str]) -> Any:
    """Returns the counts of hashed words, [texts, words], sparse."""
    from sklearn.feature_extraction.text import HashingVectorizer

    options = {"n_features": _WORDS, "alternate_sign": False, "norm": None}
    found = HashingVectorizer(**options, analyzer=list, dtype=np.float32)
    return found.transform(words_of(texts))


def _weighted(counts: Any, rarity: np.ndarray) -> Any:
    """Returns rows of unit length: logarithms of counts times how rare words are."""
    from sklearn.preprocessing import normalize

    counts = counts.copy()
    counts.data = 1 + np.log(counts.data)
    return normalize(counts.multiply(rarity[None]).tocsr())


def _projected(rows: Any, directions: np.ndarray) -> np.ndarray:
    """Returns the rows in these directions, of unit length."""
    found = np.asarray(rows @ directions.T, np.float32)
    return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)


@dataclasses.dataclass(frozen=True)
class Histogram:
    """Noisy counts of private queries by the cluster of their document."""

    clusters: DocumentClusters
    documents: Sequence[int]  # of the corpus, by cluster; public
    counts: Sequence[float]  # units of private pairs by cluster, with noise
    corpus: str  # fingerprint

    def save(self, directory: pathlib.Path) -> None:
        """Writes it into a directory."""
        np.savez(directory / CLUSTERS_FILE, **vars(self.clusters))
        content = {
            name: each for name, each in vars(self).items() if name != "clusters"
        }
        write_json(directory / HISTOGRAM_FILE, content)

    @classmethod
    def load(cls, directory: str | os.PathLike) -> Histogram:
        """Reads what `save` wrote."""
        path = pathlib.Path(directory)
        found = read_json(path / HISTOGRAM_FILE, "Give what histogram wrote")
        with np.load(path / CLUSTERS_FILE, allow_pickle=False) as file:
            return cls(DocumentClusters(**file), **found)

    def rates(self, queries: int, seed: int) -> Rates:
        """Returns how many queries each document gets, of `queries` in all.

        In proportion to the private queries about a document of its cluster; a count
        that noise made negative is 0.
        """
        counts = [
            max(0.0, count) if documents else 0.0
            for count, documents in zip(self.counts, self.documents)
        ]
        if not sum(counts):
            raise InputError(
                "no count of the histogram is above 0. Leave histogram out."
            )
        mean = (
            queries * count / sum(counts) / max(documents, 1)
            for count, documents in zip(counts, self.documents)
        )
        return Rates(self.clusters, tuple(mean), queries, seed)


@dataclasses.dataclass(frozen=True)
class Rates:
    """Decides how many queries are written for each document; can be pickled."""

    clusters: DocumentClusters
    mean: tuple[float, ...]  # number of queries of a document, by cluster
    queries: int  # of all documents together, on average
    seed: int  # public

    def of(self, documents: Iterable[Document]) -> Iterator[tuple[Document, int]]:
        """Yields each document with its number of queries, which can be 0.

        It is the mean of its cluster rounded up or down by chance, which depends on
        seed and id alone: the same in any shard.
        """
        for document, cluster in self.clusters.stream(documents):
            key = f"{self.seed}\0queries\0{document.id}".encode()
            chance = int.from_bytes(hashlib.sha256(key).digest()[:8], "big") / 2**64
            yield document, math.floor(self.mean[cluster] + chance)
