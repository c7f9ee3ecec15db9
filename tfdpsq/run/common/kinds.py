"""The kinds of inputs: generators, retrievers, embeddings, sets, corpora and pairs."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from tfdpsq.data import BeirDirectory, Pair
from tfdpsq.data import load as open_beir
from tfdpsq.data.beir import PairTable
from tfdpsq.data.sets import PART_FILE, read_manifest, read_synthetic
from tfdpsq.privacy.proof import certificate as certificates
from tfdpsq.run.common import corpus
from tfdpsq.run.frame import records
from tfdpsq.run.frame.artefacts import MARK_FILE, Artefact, class_stated
from tfdpsq.run.frame.places import Privacy
from tfdpsq.validation import InputError

PYDOCS = "pydocs"  # the embedded corpus
SET = "set"  # the folder of a set of queries in its stage's output
MODEL = "model"  # the folder of a retriever in its stage's output
ADAPTER_FILE = "adapter.npy"


class File(Artefact):
    """Any file or directory that somebody else made."""

    wanted, files = "a file or directory", ("",)


class Generator(Artefact):
    """A T5: what `finetune` or `pretrain` wrote, a checkpoint, or a preset's name."""

    # The checkpoint's reader says what is wrong with anything else.
    wanted, files = "what finetune wrote, a T5 checkpoint, or a preset's name", ("",)

    @classmethod
    def open(cls, path: str, setting: str) -> Artefact:
        """Opens it as any; presets and URLs are fetched."""
        from tfdpsq.generator import checkpoints

        return super().open(str(checkpoints.locate(path)), setting)


class Retriever(Artefact):
    """Output of `train_retriever`."""

    wanted = "what train_retriever wrote"
    files = (MODEL,)


class System(Artefact):
    """A system of `evaluate`: BM25, a retriever, an adapter, or embeddings."""

    wanted = "'bm25', 'embeddings', or what train_retriever or train_adapter wrote"
    files, words = (MODEL, ADAPTER_FILE), ("bm25", "embeddings")


class Embeddings(Artefact):
    """Embeddings by `embed`, or by any encoder that `retriever.VectorStore` stored."""

    wanted = "embeddings that embed or retriever.VectorStore wrote"
    files = ("documents", "queries")

    def fingerprint(self, private: pathlib.Path) -> str:
        """Returns the stage's, or a keyed one, as they may be of private queries."""
        found = super().fingerprint(private)
        if records.read_stage(self.path) is None:
            return records.keyed_fingerprint(found, private)
        return found


# -- Sets and pairs --------------------------------------------------------------------


class SyntheticSet(Artefact):
    """A set that `synthesize`, `filter` or `prepare` wrote: its output, or the set."""

    wanted = "a set of queries that synthesize, filter or prepare wrote"

    @classmethod
    def open(cls, path: str, setting: str) -> Artefact:
        """Opens it as any; an output is opened as the set in it."""
        is_output = (pathlib.Path(path) / SET).is_dir()
        return super().open(f"{path}/{SET}" if is_output else path, setting)

    @classmethod
    def is_at(cls, path: str) -> bool:
        """Returns whether the manifest of a set is at a path."""
        manifest = pathlib.Path(path) / "manifest.json"
        return certificates.stated(manifest, "schema") is not None

    def fingerprint(self, private: pathlib.Path) -> str:
        """Returns the manifest's."""
        return read_manifest(self.path)["fingerprint"]


class Corpus(Artefact):
    """Documents of a BEIR directory, which are public."""

    wanted = f"a BEIR directory, or {PYDOCS!r}"

    @classmethod
    def open(cls, path: str, setting: str) -> Artefact:
        """Opens a directory that has documents; only those of canaries are private."""
        _require_beir(path, setting)
        marked = os.path.isfile(f"{path}/{MARK_FILE}")
        return cls(path, Privacy.PRIVATE if marked else Privacy.PUBLIC)

    @classmethod
    def promised_by(cls, promise: Artefact, path: str) -> Artefact:
        """Returns a promise as any kind does; documents of a log are public."""
        found = super().promised_by(promise, path)
        if promise.facts.get("raw") and not promise.facts.get("canaries"):
            found = dataclasses.replace(found, privacy=Privacy.PUBLIC)
        return found

    def fingerprint(self, private: pathlib.Path) -> str:
        """Returns the SHA-256 of the documents."""
        return corpus.scan(self.beir().corpus_file).fingerprint

    def beir(self) -> BeirDirectory:
        """Opens the directory to read."""
        return open_beir(self.path)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Pairs to train on.

    Attributes:
      count: how many; exact, so of private pairs a secret.
      read: streams them from disk.
      table: private pairs on disk, by number; `None` for a set.
    """

    count: int
    read: Callable[[], Iterator[Pair]]
    table: PairTable | None


class Pairs(Artefact):
    """Pairs to train on: private ones of a BEIR split, or those of a set.

    The fact "raw" says that they are private pairs as somebody collected them, which
    an ε can protect; "canaries" that secrets are among them.
    """

    wanted = f"a BEIR directory, {PYDOCS!r}, or a set of queries"

    @classmethod
    def open(cls, path: str, setting: str) -> Artefact:
        """Opens a set as any artefact, a BEIR directory as private pairs."""
        if SyntheticSet.is_at(path):
            found = SyntheticSet.open(path, setting)
            return cls(path, found.privacy, found.certificate, {}, found.origin)
        _require_beir(path, setting)
        marked = os.path.isfile(f"{path}/{MARK_FILE}")
        return cls(path, Privacy.PRIVATE, None, {"raw": True, "canaries": marked})

    @property
    def raw(self) -> bool:
        """True for private pairs, False for a set."""
        return bool(self.facts.get("raw"))

    def fingerprint(self, private: pathlib.Path) -> str:
        """Returns the manifest's, or a keyed one of private pairs."""
        if not self.raw:
            return read_manifest(self.path)["fingerprint"]
        return records.keyed_fingerprint(_pairs_fingerprint(self.path), private)

    def beir(self) -> BeirDirectory:
        """Opens private pairs to read."""
        return open_beir(self.path)

    def load(self, split: str = "train", unit: str = "query") -> Rows:
        """Returns the pairs, to read one after the other or in any order.

        Args:
          split: of private pairs; a set has none.
          unit: "pair" reads every pair of the split; else every query is in one row,
            with its best document.

        Raises:
          InputError: there are none.
          DataError: a malformed line.
        """
        if self.raw:
            beir = self.beir()
            table = beir.all_pairs(split) if unit == "pair" else beir.pairs(split)
            found = Rows(len(table), lambda: iter(table), table)
        else:
            found = Rows(read_manifest(self.path)["count"], self._of_set, None)
        if not found.count:
            raise InputError(f"{self.path} has no pairs in split {split!r}.")
        return found

    def _of_set(self) -> Iterator[Pair]:
        for row in read_synthetic(self.path):
            yield Pair(row.query_id, row.query, row.document_id, row.document)


class Benchmark(Artefact):
    """A public test set: a BEIR directory, or a folder of several, as CQADupStack's."""

    wanted = "a BEIR directory, or one of several, as CQADupStack's"

    @classmethod
    def open(cls, path: str, setting: str) -> Artefact:
        """Opens directories that have documents; without a record they are public."""
        for part in _beir_in(path):
            _require_beir(part, setting)
        return cls(path, Privacy.PUBLIC if path == PYDOCS else class_stated(path))

    def fingerprint(self, private: pathlib.Path) -> str:
        """Returns a digest of documents, queries and judgements."""
        found = records.digest([_pairs_fingerprint(one) for one in _beir_in(self.path)])
        if self.privacy == Privacy.PRIVATE:
            return records.keyed_fingerprint(found, private)
        return found


# -- Reading ---------------------------------------------------------------------------


def _require_beir(path: str, setting: str) -> None:
    """Refuses what is no BEIR directory; its content is validated where it is read."""
    if path == PYDOCS:
        return
    folder = pathlib.Path(path)
    if any((above / PART_FILE).is_file() for above in (folder, *folder.parents[:2])):
        raise InputError(
            f"{setting} is {path}, a part of a set of queries. Give the set itself, "
            "whose certificate says what it cost."
        )
    if not any((folder / name).is_file() for name in corpus.FILES):
        raise InputError(
            f"{setting} is {path!r}, which has no corpus.jsonl. Give {Corpus.wanted}; "
            "`tfdpsq import` makes one of a log."
        )


def _beir_in(path: str) -> list[str]:
    """Returns a BEIR directory, or those in it."""
    here = pathlib.Path(path)
    if any((here / name).is_file() for name in corpus.FILES):
        return [path]
    found = [file.parent for name in corpus.FILES for file in here.glob(f"*/{name}")]
    return sorted(map(str, found)) or [path]


def _pairs_fingerprint(path: str) -> str:
    """Returns the fingerprint of private pairs; they are read once while unchanged."""
    files = sorted(file for file in open_beir(path).path.rglob("*") if file.is_file())
    states = (file.stat() for file in files)
    return _of_pairs(path, *((s.st_size, s.st_mtime_ns) for s in states))


@functools.lru_cache(maxsize=4)
def _of_pairs(path: str, *_: Any) -> str:
    return open_beir(path).fingerprint()
