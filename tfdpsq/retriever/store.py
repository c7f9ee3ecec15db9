"""Document embeddings on disk: searched in chunks, added to without retraining.

Queries' embeddings have the same form.

    DIR/index.json           encoder's fingerprint, width, shards
    DIR/shard-00000.npy      [n, D] float32, read by memory map
    DIR/shard-00000.jsonl    n ids, a JSON string a line

A shard is whole or not there, and never changes. Adding documents writes another shard
and then, in one rename, the list that names it.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np

from tfdpsq import validation
from tfdpsq.data.files import atomic_file, atomic_write, sha256_of_file
from tfdpsq.data.unique_ids import BATCH, UniqueIds
from tfdpsq.retriever.model import TwoTower, ordered_weights
from tfdpsq.retriever.nearest import ROWS, BestDocuments

# Queries that are ranked at a time: with `ROWS` documents, 16 MiB of scores.
_RANKED = 256
INDEX_FILE = "index.json"
_FORMAT = "tfdpsq-index/2"
_INDEX = ("encoder", "width")
_SHARD = ("name", "count", "sha256", "ids_sha256")
_REMEDY = "Embed the texts again, by `index`, `encode` or your own encoder."
# Of the name of an encoder, which certificates quote.
_LONGEST_NAME = 200


def encoder_fingerprint(
    model: TwoTower, vocabulary: str, kind: str = "document"
) -> str:
    """SHA-256, in hex, of all that decides what a text's embedding is.

    With two towers, the other one is excluded: retrievers that differ in
    their query towers alone search the same index. That of queries is never that of
    documents.

    Args:
      model: the retriever.
      vocabulary: the tokenizer's fingerprint.
      kind: "document" or "query": which texts.
    """
    of_queries = validation.one_of("kind", kind, ("document", "query")) == "query"
    config = json.loads(model.config.to_json())
    fields = ("t5", "embedding_dim", "pooling", f"{kind}_length")
    shape = json.dumps([config[field] for field in fields], sort_keys=True)
    content = f"{vocabulary}\n{shape}" + ("\nof queries" if of_queries else "")
    dtype = model.get_config()["dtype"]
    if dtype not in (None, "float32"):
        content += f"\nin {dtype}"
    digest = hashlib.sha256(content.encode())
    tower = model.query_tower if of_queries else model.document_tower
    for weight in ordered_weights(tower):
        digest.update(np.ascontiguousarray(weight.numpy()).tobytes())
    return digest.hexdigest()


class DocumentIndex:
    """Embeddings of documents and their ids, in shards on disk.

    Attributes:
      directory: the directory.
      encoder: fingerprint of what embedded them.
      width: D.
      size: N, documents.
    """

    def __init__(self, directory: str | os.PathLike, encoder: str | None = None):
        """Opens what `create` made.

        Args:
          directory: the index.
          encoder: fingerprint of the encoder that will embed queries, if there is one.

        Raises:
          DataError: no index, or embeddings that are missing or of another shape
            (`verify` reads them).
          InputError: documents embedded by another encoder: inner products with its
            queries would mean nothing.
        """
        self.directory = Path(directory)
        content = self._content()
        self.encoder, self.width = content["encoder"], content["width"]
        self._shards = content["shards"]
        if encoder is not None and encoder != self.encoder:
            raise validation.InputError(
                f"{directory} was made by the encoder {self.encoder}, but queries "
                f"would be embedded by {encoder}: their inner products mean nothing. "
                "Use the retriever that made the index, or make the index again."
            )
        self.size = sum(shard["count"] for shard in self._shards)
        self._known: UniqueIds | None = None  # the ids, once they are asked for
        for shard in self._shards:
            self._embeddings(shard)

    @classmethod
    def create(
        cls, directory: str | os.PathLike, encoder: str, width: int
    ) -> DocumentIndex:
        """Makes an index without documents.

        Raises:
          InputError: there is one already, a width below 1, or an encoder without a
            name.
        """
        directory = Path(directory)
        if not _is_name(encoder):
            raise validation.InputError(
                f"encoder is {validation.shown(encoder)}. Give its name as text of 1 "
                f"to {_LONGEST_NAME} characters, such as that of its checkpoint."
            )
        if (directory / INDEX_FILE).exists():
            raise validation.InputError(
                f"{directory} holds an index already. Add to it, or choose another "
                "directory."
            )
        validation.positive_integer("width", width)
        directory.mkdir(parents=True, exist_ok=True)
        _write(directory, {"encoder": encoder, "width": width, "shards": []})
        return cls(directory)

    def add(self, ids: Iterable[str], embeddings: np.ndarray) -> None:
        """Adds documents, as one shard.

        Args:
          ids: n of them, none of which is there already.
          embeddings: [n, D] float32.

        Raises:
          InputError: shapes that do not fit, an id twice, or numbers that are none.
        """
        names = list(ids)
        for name in names:
            if not _is_text(name):
                raise validation.InputError(
                    f"id {validation.shown(name)} is not text. Give ids as strings, as "
                    "the corpus and the queries have them."
                )
        vectors = np.ascontiguousarray(embeddings, np.float32)
        if vectors.shape != (len(names), self.width) or not names:
            raise validation.InputError(
                f"embeddings have shape {vectors.shape} for {len(names)} ids; they "
                f"must be [{len(names)}, {self.width}], of one document at least."
            )
        if not np.isfinite(vectors).all():
            row = int(np.flatnonzero(~np.isfinite(vectors).all(axis=1))[0])
            raise validation.InputError(
                f"the embedding of {names[row]!r} is not finite; its rank would mean "
                "nothing."
            )
        self._require_new(names)
        stem = f"shard-{len(self._shards):05d}"
        texts = "".join(json.dumps(name) + "\n" for name in names)
        with atomic_file(self.directory / f"{stem}.npy") as partial:
            with partial.open("wb") as file:
                np.save(file, vectors)
        atomic_write(self.directory / f"{stem}.jsonl", texts)
        digest = _sha256(vectors)
        shard = {
            "name": stem,
            "count": len(names),
            "sha256": digest,
            "ids_sha256": hashlib.sha256(texts.encode()).hexdigest(),
        }
        content = {"encoder": self.encoder, "width": self.width}
        _write(self.directory, {**content, "shards": [*self._shards, shard]})
        self._shards = [*self._shards, shard]
        self.size += len(names)

    def ids(self) -> Iterator[str]:
        """All ids, in the order of the embeddings.

        Raises:
          DataError: a file of ids cannot be read.
        """
        for shard in self._shards:
            path = self.directory / f"{shard['name']}.jsonl"
            count = 0
            try:
                with path.open(encoding="utf-8") as lines:
                    for line in lines:
                        name = json.loads(line)
                        if not _is_text(name):
                            raise ValueError(f"id {validation.shown(name)} is not text")
                        yield name
                        count += 1
            except (OSError, ValueError) as error:
                raise validation.DataError(
                    path, f"cannot be read ({error})", _REMEDY
                ) from error
            if count != shard["count"]:
                raise validation.DataError(
                    path, f"has {count} ids, not {shard['count']}", _REMEDY
                )

    def chunks(self, rows: int) -> Iterator[np.ndarray]:
        """Embeddings [at most `rows`, D], in order, off the disk."""
        validation.positive_integer("rows", rows)
        for shard in self._shards:
            vectors = self._embeddings(shard)
            for start in range(0, len(vectors), rows):
                yield np.asarray(vectors[start : start + rows])

    def documents(self, rows: int) -> Iterator[tuple[list[str], np.ndarray]]:
        """Ids and embeddings of at most `rows` documents, in order, off the disk."""
        names = self.ids()
        for vectors in self.chunks(rows):
            yield list(itertools.islice(names, len(vectors))), vectors

    def embeddings(self) -> np.ndarray:
        """[N, D] float32, all in memory."""
        parts = [self._embeddings(shard) for shard in self._shards]
        return np.concatenate([np.zeros([0, self.width], np.float32), *parts])

    def take(self, places: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns the embeddings [n, D] at some positions, off the disk.

        Args:
          places: [n] positions in the order of `ids`; any order, also repeated.

        Raises:
          InputError: a position that is none.
        """
        wanted = self._checked_places(places)
        found = np.empty([len(wanted), self.width], np.float32)
        first = 0
        for shard in self._shards:
            at = wanted - first
            here = np.flatnonzero((at >= 0) & (at < shard["count"]))
            if len(here):
                found[here] = self._embeddings(shard)[at[here]]
            first += shard["count"]
        return found

    def search(
        self, queries: np.ndarray, k: int, rows: int = ROWS
    ) -> tuple[np.ndarray, np.ndarray]:
        """The k best of each query by inner product, exactly, in flat memory.

        Args:
          queries: [Q, D] float32.
          k: documents a query; if above N, all N come back.
          rows: documents in memory at a time.

        Returns:
          scores: [Q, k] float32, best first; of equal ones the earlier document's
            first.
          places: [Q, k] int64, positions in the order of `ids`.

        Raises:
          InputError: another width, or k below 1.
        """
        self._require_width(queries)
        best = BestDocuments(queries, k)
        for vectors in self.chunks(rows):
            best.add(vectors)
        return best.scores, best.places

    def places(self, names: Set[str]) -> dict[str, int]:
        """Positions, in the order of `ids`, of those of some documents that are there.

        Args:
          names: their ids; no others are kept in memory.
        """
        return {name: at for at, name in enumerate(self.ids()) if name in names}

    def ranks(
        self, queries: np.ndarray, places: Sequence[int] | np.ndarray, rows: int = ROWS
    ) -> np.ndarray:
        """Ranks one document of each query exactly, in flat memory.

        A document's own score is taken out of the very product that the others are
        compared in, so rounding never puts it before or behind itself.

        Args:
          queries: [Q, D] float32.
          places: [Q] positions of the documents, in the order of `ids`.
          rows: documents in memory at a time.

        Returns:
          [Q] int64: 1, and 1 for each document of a higher inner product.

        Raises:
          InputError: another width, or positions that are none.
        """
        self._require_width(queries)
        own = self._checked_places(places)
        if len(own) != len(queries):
            raise validation.InputError(
                f"there are {len(own)} places for {len(queries)} queries. Give each "
                "query one."
            )
        # Neighbours share their own documents' chunk, so few products are made twice.
        order = np.argsort(own, kind="stable")
        queries, own = np.asarray(queries, np.float32)[order], own[order]
        parts = [slice(start, start + _RANKED) for start in range(0, len(own), _RANKED)]
        scores = np.empty([len(own), 1], np.float32)
        for first, vectors in self._numbered(rows):
            for part in parts:
                at = own[part] - first
                here = np.flatnonzero((at >= 0) & (at < len(vectors)))
                if len(here):
                    found = queries[part] @ vectors.T
                    scores[part][here, 0] = found[here, at[here]]
        better = np.zeros(len(own), np.int64)
        for _, vectors in self._numbered(rows):
            for part in parts:
                better[part] += (queries[part] @ vectors.T > scores[part]).sum(axis=1)
        ranks = np.empty_like(better)
        ranks[order] = 1 + better
        return ranks

    def verify(self) -> None:
        """Reads every shard and compares it with what was written.

        Raises:
          DataError: one differs.
        """
        for shard in self._shards:
            found = _sha256(self._embeddings(shard))
            if found != shard["sha256"]:
                path = self.directory / f"{shard['name']}.npy"
                raise validation.DataError(path, "holds other embeddings", _REMEDY)
            path = self.directory / f"{shard['name']}.jsonl"
            try:
                digest = sha256_of_file(path)
            except OSError as error:
                raise validation.DataError(
                    path, f"cannot be read ({error})", _REMEDY
                ) from error
            if digest != shard["ids_sha256"]:
                raise validation.DataError(path, "holds other ids", _REMEDY)

    def _numbered(self, rows: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yields `chunks` with the position of each chunk's first document."""
        first = 0
        for vectors in self.chunks(rows):
            yield first, vectors
            first += len(vectors)

    def _checked_places(self, places: Sequence[int] | np.ndarray) -> np.ndarray:
        found = np.asarray(places, np.int64)
        if found.ndim != 1 or ((found < 0) | (found >= self.size)).any():
            raise validation.InputError(
                f"places have shape {found.shape}; give [n] positions from 0 to "
                f"{self.size - 1}."
            )
        return found

    def _require_width(self, queries: np.ndarray) -> None:
        if np.ndim(queries) != 2 or np.shape(queries)[1] != self.width:
            raise validation.InputError(
                f"queries have shape {np.shape(queries)}; they must be "
                f"[Q, {self.width}]."
            )

    def _require_new(self, names: list[str]) -> None:
        """Refuses ids that come twice; keeps eight bytes a document."""
        if self._known is None:
            self._known = UniqueIds()
            held = self.ids()
            while batch := list(itertools.islice(held, BATCH)):
                self._known.add(batch)
        suspects = self._known.add(names)
        known = None
        if suspects:
            known = next((name for name in self.ids() if name in suspects), None)
        if known is None and len(set(names)) < len(names):
            known = collections.Counter(names).most_common(1)[0][0]
        if known is not None:
            raise validation.InputError(
                f"document {known!r} is there already. Leave it out; to replace "
                "documents, make the index again."
            )

    def _content(self) -> dict[str, Any]:
        path = self.directory / INDEX_FILE
        try:
            content = validation.parse_json(path.read_text(encoding="utf-8"))
            if content["format"] != _FORMAT:
                raise ValueError(f"format {content['format']!r}, not {_FORMAT!r}")
            shards = [
                {name: shard[name] for name in _SHARD} for shard in content["shards"]
            ]
            for shard in shards:
                if type(shard["count"]) is not int or shard["count"] < 1:
                    raise ValueError(f"a shard of {validation.shown(shard['count'])}")
            if len({shard["name"] for shard in shards}) < len(shards):
                raise ValueError("it names a shard twice")
            if not _is_name(content["encoder"]):
                raise ValueError(f"an encoder {validation.shown(content['encoder'])}")
            if type(content["width"]) is not int or content["width"] < 1:
                raise ValueError(f"a width of {validation.shown(content['width'])}")
            return {**{name: content[name] for name in _INDEX}, "shards": shards}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise validation.DataError(path, f"no index ({error})", _REMEDY) from error

    def _embeddings(self, shard: dict[str, Any]) -> np.ndarray:
        path = self.directory / f"{shard['name']}.npy"
        try:
            vectors = np.load(path, mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise validation.DataError(
                path, f"cannot be read ({error})", _REMEDY
            ) from error
        wanted = (shard["count"], self.width)
        if not isinstance(vectors, np.ndarray):
            raise validation.DataError(path, "holds no array but an archive", _REMEDY)
        if vectors.shape != wanted or vectors.dtype != np.float32:
            raise validation.DataError(
                path,
                f"holds {vectors.dtype} {vectors.shape}, not float32 {wanted}",
                _REMEDY,
            )
        if not vectors.flags.c_contiguous:
            raise validation.DataError(path, "does not hold row after row", _REMEDY)
        return vectors


def _is_text(name: Any) -> bool:
    """Returns whether it is a string that UTF-8 can encode."""
    if not isinstance(name, str):
        return False
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_name(encoder: Any) -> bool:
    return _is_text(encoder) and 0 < len(encoder) <= _LONGEST_NAME


def _sha256(vectors: np.ndarray) -> str:
    return hashlib.sha256(vectors.data).hexdigest()


def _write(directory: Path, content: dict[str, Any]) -> None:
    text = json.dumps({"format": _FORMAT, **content}, indent=1, sort_keys=True)
    atomic_write(directory / INDEX_FILE, text + "\n")
