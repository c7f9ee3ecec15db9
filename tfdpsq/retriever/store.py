"""Embeddings of texts on disk: one array, mapped into memory, and its ids.

DIR/manifest.json   the encoder, and SHA-256 of both files
DIR/vectors.npy     [N, D] float32
DIR/ids.jsonl       N ids, a JSON string a line
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tfdpsq import validation
from tfdpsq.data import io
from tfdpsq.retriever.index import checked, search_chunks
from tfdpsq.retriever.model import TwoTower, ordered_weights

VECTORS, IDS = "vectors.npy", "ids.jsonl"
_REMEDY = "Embed the texts again, by `index`, `encode` or your own encoder."
# Of the name of an encoder, which certificates quote.
_LONGEST_NAME = 200


def encoder_fingerprint(model: TwoTower, kind: str = "document") -> str:
    """SHA-256, in hex, of all that decides what the embedding of a `kind` of text is.

    With two towers, the other one is excluded: retrievers that differ in their query
    towers alone search the same index.
    """
    of_queries = validation.one_of("kind", kind, ("document", "query")) == "query"
    config = json.loads(model.config.to_json())
    fields = ("t5", "embedding_dim", "pooling", f"{kind}_length")
    shape = [kind, *(config[field] for field in fields), model.get_config()["dtype"]]
    assert model.tokenizer is not None
    vocabulary = model.tokenizer.fingerprint
    digest = hashlib.sha256(f"{vocabulary}\n{json.dumps(shape)}".encode())
    tower = model.query_tower if of_queries else model.document_tower
    for weight in ordered_weights(tower):
        digest.update(np.ascontiguousarray(weight.numpy()).tobytes())
    return digest.hexdigest()


class VectorStore:
    """Embeddings of documents or queries by one encoder, and their ids.

    Attributes:
      directory: the directory.
      encoder: name or fingerprint of what embedded them.
      vectors: [N, D] float32, mapped into memory.
      size: N.
      width: D.
      fingerprint: SHA-256, in hex, of encoder, ids and vectors.
    """

    def __init__(self, directory: str | os.PathLike, encoder: str | None = None):
        """Opens what `write` made; `encoder` is the one that will embed queries.

        Raises:
          DataError: a file is missing, damaged or truncated.
          InputError: the texts were embedded by another encoder.
        """
        self.directory = Path(directory)
        manifest = io.read_json(self.directory / io.MANIFEST, _REMEDY)
        try:
            self.encoder: str = manifest["encoder"]
            self.vectors = np.load(self.directory / VECTORS, mmap_mode="r")
            self.size, self.width = self.vectors.shape
        except (OSError, ValueError, KeyError, EOFError) as error:
            raise validation.DataError(
                self.directory / VECTORS, f"cannot be read ({error})", _REMEDY
            ) from error
        self.fingerprint = io.sha256_of_file(self.directory / io.MANIFEST)
        if encoder not in (None, self.encoder):
            raise validation.InputError(
                f"{directory} was made by the encoder {self.encoder}, but queries "
                f"would be embedded by {encoder}: their inner products mean nothing. "
                "Use the retriever that made it, or embed the texts again."
            )

    @classmethod
    def write(
        cls,
        directory: str | os.PathLike,
        encoder: str,
        width: int,
        chunks: Iterable[tuple[Sequence[str], np.ndarray]],
    ) -> VectorStore:
        """Writes chunks of n different ids and embeddings [n, width], all or nothing.

        Raises:
          InputError: the place is taken, an encoder without a name, shapes that do not
            fit, or embeddings that are not finite.
        """
        if not isinstance(encoder, str) or not 0 < len(encoder) <= _LONGEST_NAME:
            raise validation.InputError(
                f"encoder is {validation.shown(encoder)}. Give its name as text of 1 "
                f"to {_LONGEST_NAME} characters, such as that of its checkpoint."
            )
        validation.positive_integer("width", width)
        count = 0
        with io.atomic_directory(directory) as partial:
            with (
                open(partial / VECTORS, "wb") as file,
                open(partial / IDS, "w", encoding="utf-8") as lines,
            ):
                _write_header(file, 0, width)
                for names, embeddings in chunks:
                    vectors = checked("embeddings", embeddings)
                    if vectors.shape != (len(names), width):
                        raise validation.InputError(
                            f"embeddings have shape {vectors.shape} for {len(names)} "
                            f"ids; they must be [{len(names)}, {width}]."
                        )
                    lines.writelines(json.dumps(str(name)) + "\n" for name in names)
                    file.write(vectors.tobytes())
                    count += len(vectors)
                file.seek(0)
                _write_header(file, count, width)
            io.write_manifest(partial, {"encoder": encoder})
        return cls(directory)

    def ids(self) -> Iterator[str]:
        """All ids, in the order of the embeddings."""
        path = self.directory / IDS
        count = 0
        try:
            with path.open(encoding="utf-8") as lines:
                for line in lines:
                    yield json.loads(line)
                    count += 1
        except (OSError, ValueError) as error:
            raise validation.DataError(
                path, f"cannot be read ({error})", _REMEDY
            ) from error
        if count != self.size:
            raise validation.DataError(
                path, f"has {count} ids, not {self.size}", _REMEDY
            )

    def chunks(self, rows: int) -> Iterator[tuple[list[str], np.ndarray]]:
        """Ids and embeddings of at most `rows` texts at a time, in order."""
        names = self.ids()
        for start in range(0, self.size, rows):
            vectors = np.asarray(self.vectors[start : start + rows])
            yield list(itertools.islice(names, len(vectors))), vectors

    def search(
        self, queries: np.ndarray, k: int, rows: int = 16_384
    ) -> tuple[np.ndarray, np.ndarray]:
        """The k best of queries [Q, D], exactly, with `rows` texts in memory at a time.

        Returns:
          scores: [Q, k] float32, best first; all N if k is above N.
          places: [Q, k] int64, positions in the order of `ids`.
        """
        best = search_chunks({"": queries}, self.chunks(rows), k)[""]
        return best.scores, best.places

    def places(self, names: Set[str]) -> dict[str, int]:
        """Positions, in the order of `ids`, of those of some texts that are there."""
        return {name: at for at, name in enumerate(self.ids()) if name in names}


def _write_header(file: BinaryIO, count: int, width: int) -> None:
    """Writes the header of an `.npy` file, of one length for any count."""
    np.lib.format.write_array_header_1_0(
        file,
        {"descr": "<f4", "fortran_order": False, "shape": (count, width)},
    )
