"""Where training pairs come from: private BEIR splits, or sets that are free to use.

Whether a set is private decides what its use costs, so it is read off the data
itself: a directory with a manifest is synthetic or public and says by its
certificate what it already cost; a BEIR directory's queries are private.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import hashlib
import hmac
import os
import pathlib
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.data import (
    BeirDirectory,
    any_files,
    atomic_write,
    build_pydocs,
    read_manifest,
    read_synthetic,
)
from tfdpsq.data.texts import Document, Pair, documents_fingerprint
from tfdpsq.data.tokenization import VOCABULARY_FILE
from tfdpsq.generator import checkpoints
from tfdpsq.privacy import read_certificate
from tfdpsq.run.core import outputs, releases

PYDOCS = "pydocs"
KEY_FILE = "fingerprint.key"


@dataclasses.dataclass(frozen=True)
class Source:
    """Pairs to train on.

    Attributes:
      count: how many there are.
      read: streams them; for private pairs exactly one per query. A set is checked
        against its checksums first, and is not in memory; private pairs are.
      private: whether these are private pairs themselves, which alone can be
        trained on under DP: one query has a part in one row only.
      certificate: of the synthetic set they come from; `None` for public pairs and
        for private ones.
    """

    count: int
    read: Callable[[], Iterator[Pair]]
    private: bool
    certificate: dict[str, Any] | None

    @functools.cached_property
    def pairs(self) -> list[Pair]:
        """All of them, in memory from now on."""
        return list(self.read())


def open_beir(path: str, as_published: bool = False) -> BeirDirectory:
    """A BEIR directory, or the embedded corpus for "pydocs".

    Args:
      path: the directory, or "pydocs".
      as_published: see `BeirDirectory`.

    Raises:
      DataError: the directory lacks a file.
      InputError: it is the inside of a synthetic set, whose rows are no private
        pairs: one private query can have a part in all of them.
    """
    if path == PYDOCS:
        return build_pydocs()
    if is_free(str(pathlib.Path(path).resolve().parent)):
        raise validation.InputError(
            f"{path} is part of a synthetic or public set. Give the set itself, "
            f"{pathlib.Path(path).resolve().parent}, whose certificate says what it "
            "cost."
        )
    return BeirDirectory(path, as_published)


def corpus_fingerprint(path: str) -> str:
    """SHA-256 of the documents of a corpus, which are public; no query enters."""
    return documents_fingerprint(open_beir(path).documents())


def source_fingerprint(path: str, private_directory: pathlib.Path) -> str:
    """What identifies a source's content, fit to be released.

    A plain hash of private pairs would let whoever knows all of them but one test
    guesses at the last, which no ε covers. So the hash is keyed: its owner can
    compare data with it, nobody else can.

    Args:
      path: a BEIR directory, "pydocs", or a synthetic set.
      private_directory: where the key lies, or is made; never released.
    """
    if is_free(path):
        return read_manifest(path)["fingerprint"]
    return keyed_fingerprint(open_beir(path).fingerprint(), private_directory)


def keyed_fingerprint(fingerprint: str, private_directory: pathlib.Path) -> str:
    """HMAC-SHA256 of a fingerprint under this workdir's secret key."""
    path = outputs.open_private(private_directory) / KEY_FILE
    if not path.is_file():
        own = private_directory / f".{KEY_FILE}.{secrets.token_hex(6)}"
        with outputs.owner_only():
            atomic_write(own, secrets.token_hex(32))
        try:
            os.link(own, path)
        except FileExistsError:
            pass  # of commands that start at once, all take the key of the first
        except OSError:  # no links on this file system
            os.replace(own, path)
        own.unlink(missing_ok=True)
    key = bytes.fromhex(path.read_text())
    return "keyed:" + hmac.new(key, fingerprint.encode(), hashlib.sha256).hexdigest()


@functools.cache
def fetched(path: str) -> str:
    """A model's directory, or a file, on this machine.

    Args:
      path: as users give it; what lies on another file system is copied, once in a
        process, to a temporary directory that goes with the process.

    Raises:
      InputError: there is nothing.
    """
    if any_files.is_local(path):
        return path
    folder = tempfile.mkdtemp(prefix="tfdpsq-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    target = f"{folder}/{path.rstrip('/').rpartition('/')[2]}"
    try:
        if tf.io.gfile.isdir(path):
            any_files.copy_tree(path, target)
        else:
            tf.io.gfile.copy(path, target)
    except any_files.GONE as error:
        raise validation.InputError(
            f"{path}: there is no such file or directory. Give another path."
        ) from error
    return target


def vocabulary_file(given: str, model: str = "") -> pathlib.Path:
    """The SentencePiece model to use: the one given, or the one beside a model.

    Args:
      given: a file, or "".
      model: a T5 that may hold one, its directory or its name, or "".

    Raises:
      InputError: neither is there.
    """
    if given:
        return pathlib.Path(given)
    beside = checkpoints.vocabulary_in(checkpoints.locate(model)) if model else None
    if beside is not None:
        return beside
    raise validation.InputError(
        f"no vocabulary was given, and {model or 'no model'} has no {VOCABULARY_FILE} "
        "beside its weights. Set vocabulary to the model's SentencePiece file."
    )


def certificate_of_model(model: str) -> dict[str, Any] | None:
    """The certificate beside a model's weights; `None` for public weights.

    Args:
      model: a directory, a preset's name, or "" for random weights.
    """
    return read_certificate(checkpoints.locate(model)) if model else None


def require_public(init: str, consequence: str) -> None:
    """Refuses weights that private queries had a part in, protected or not.

    Args:
      init: as in `certificate_of_model`.
      consequence: what would be untrue of what is made from them.

    Raises:
      InputError: there is a certificate beside them.
    """
    parent = certificate_of_model(init)
    if parent is not None:
        raise validation.InputError(
            f"init is {init}, which was itself trained on private queries (epsilon "
            f"{parent['guarantee']['epsilon']}), as its certificate says: "
            f"{consequence}. Start from public weights."
        )


def is_free(path: str) -> bool:
    """Whether a path holds a synthetic or public set rather than private pairs."""
    return path != PYDOCS and (pathlib.Path(path) / "manifest.json").is_file()


def certificate_of_pairs(path: str) -> dict[str, Any] | None:
    """The certificate of a set; `None` for public pairs, and for private ones.

    Args:
      path: as for `load_source`.
    """
    return read_certificate(path) if is_free(path) else None


def guarantee_of_pairs(path: str) -> str:
    """The guarantee of what follows from pairs, if nothing protects it.

    Args:
      path: as for `load_source`.
    """
    if not is_free(path):
        return releases.PRIVATE
    return releases.guarantee_of(read_certificate(path), path)


def load_source(path: str, split: str = "train") -> Source:
    """Finds the pairs of a BEIR split or of a synthetic set.

    Args:
      path: "pydocs", a BEIR directory, or a directory that `synthesize` or
        `prepare` wrote.
      split: which qrels; a synthetic set has only "train".

    Raises:
      DataError: malformed data, named by file and line.
      InputError: no pairs.
    """
    if is_free(path):
        # Whose certificate must be the one beside it.
        count = read_manifest(path)["count"]
        source = Source(
            count, lambda: _pairs_of_set(path), False, read_certificate(path)
        )
    else:
        pairs = open_beir(path).pairs(split)
        source = Source(len(pairs), lambda: iter(pairs), True, None)
    if not source.count:
        raise validation.InputError(
            f"{path} has no pairs in split {split!r}. Choose another split or set."
        )
    return source


def _pairs_of_set(path: str) -> Iterator[Pair]:
    for row in read_synthetic(path):
        yield Pair(row.query_id, row.query, row.document_id, row.document)


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
    validation.positive_integer("the number of documents", most)
    total = sum(1 for _ in beir.documents())
    yield from due_documents(beir.documents(), 0, total, most)


def due_documents(
    documents: Iterable[Document], start: int, total: int, most: int
) -> Iterator[Document]:
    """Of consecutive documents, those whose share of the quota has just become due.

    Args:
      documents: some of a corpus.
      start: how many of the corpus lie before them.
      total: how many the corpus has.
      most: how many of all are wanted. Of the first n, n · most // total are due.
    """
    for number, document in enumerate(documents, start):
        if (number + 1) * most // total > number * most // total or most >= total:
            yield document
