"""Queries that a stage embeds: their file, their guarantee, and the cost of their use.

| input                               | its queries                                |
|-------------------------------------|--------------------------------------------|
| a synthetic or public set           | are free to use; the certificate is kept   |
| a BEIR directory, `private` = True  | are private: see below                     |
| a BEIR directory, `private` = False | are public, as declared                    |

An embedding of a private query reveals its content, nearly to the word, and no ε covers
it, whatever protects the retriever. So the read is recorded before the queries are
used and refused in strict mode, and the output must be in the private directory.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_collections

from tfdpsq import validation
from tfdpsq.data import BeirDirectory, io
from tfdpsq.data.sets import verify
from tfdpsq.data.texts import Document, documents_fingerprint
from tfdpsq.privacy import read_certificate
from tfdpsq.privacy.proof.certificate import inherited_certificate
from tfdpsq.run.core import records, releases, settings, sources
from tfdpsq.run.passes import sharded_stages


@dataclasses.dataclass(frozen=True)
class QuerySet:
    """Some queries.

    Attributes:
      file: JSON Lines file that holds them.
      fingerprint: of their content; may be released.
      judged: (BEIR directory, split) whose judged queries alone are taken from the
        file; `None` takes all.
      private: whether they are private queries themselves.
      certificate: of what is made from them: that of the set or of the encoder. `None`
        where both are public, and for private queries, which have none.
    """

    file: str
    fingerprint: str
    judged: tuple[str, str] | None
    private: bool = False
    certificate: dict[str, Any] | None = None


def declared() -> dict[str, settings.Setting]:
    """Settings that choose queries and declare their guarantee.

    `split` and `private` apply to a BEIR directory: the split of its queries, and
    whether they are private. `strict` refuses private ones; `private_directory` is the
    private directory, by default `private/` above the output, or next to it.
    """
    return {
        "split": settings.Text("test", required=True),
        "private": settings.Flag(True),
        "strict": settings.Flag(False),
        "private_directory": settings.Text(""),
    }


def open_queries(
    config: ml_collections.ConfigDict,
    directory: sharded_stages.Place,
    name: str,
    encoder: dict[str, Any] | None,
) -> QuerySet:
    """Checks queries, and records the read if they are private.

    `config` has `declared` and `corpus`: a synthetic or public set, local or of another
    file system; a BEIR directory, or "pydocs". `name` is that of the result, for the
    record; `encoder` the encoder's certificate, `None` for a public one.

    Raises:
      InputError: private queries in strict mode, or for an output outside the private
        directory; no such split; a set and an encoder with different guarantees, which
        would add up.
      DataError: malformed data.
    """
    path = config.corpus
    here = io.is_local(path)
    if not here and not io.gfile().exists(f"{path.rstrip('/')}/manifest.json"):
        raise validation.InputError(
            f"corpus is {path}, where there is no synthetic or public set; the queries "
            "of a BEIR directory are read from local paths only. Give a set, or a "
            "local directory."
        )
    if not here or sources.is_free(path):
        fetched = sources.fetched(path)
        manifest = verify(fetched)
        return QuerySet(
            f"{path.rstrip('/')}/beir/queries.jsonl",
            manifest["fingerprint"],
            None,
            certificate=inherited_certificate(read_certificate(fetched), encoder),
        )
    beir = sources.open_beir(path)
    validation.one_of("split", config.split, beir.splits())
    if config.private:
        out = releases.local_path(directory)
        private = releases.private_directory(out, config.private_directory)
        if not releases.is_inside(out, private):
            raise validation.InputError(
                f"the queries of {path} are private, and an embedding reveals its "
                f"query, so none can be released. Write them under {private} instead "
                f"of {out}, or set private = False if the queries are public."
            )
        read = (
            f"the queries of split {config.split!r}",
            f"{out.name}/{name}, and whatever is made from it",
        )
        if config.strict:  # refuses, before the queries are read
            records.private_reads(private, strict=True).record(*read)
    fingerprint = split_fingerprint(beir, config.split)
    if config.private:
        records.private_reads(private, config.strict).record(*read)
        fingerprint = sources.keyed_fingerprint(fingerprint, private)
    return QuerySet(
        str(beir.queries_file),
        fingerprint,
        (path, config.split),
        bool(config.private),
        None if config.private else encoder,
    )


def split_fingerprint(beir: BeirDirectory, split: str) -> str:
    """Returns the SHA-256, in hex, of the judged queries of a split.

    Raises:
      DataError: a judged query without a text.
    """
    judged = beir.qrels(split)
    queries = {name: text for name, text in beir.read_queries() if name in judged}
    unknown = next((name for name in judged if name not in queries), None)
    if unknown is not None:
        raise validation.DataError(
            beir.path / "qrels" / f"{split}.tsv",
            f"a judged query is not in {beir.queries_file}",
            "Add it there, or remove its judgements",
        )
    return documents_fingerprint(
        Document(name, "", queries[name]) for name in sorted(judged)
    )


def judged_in(queries: QuerySet) -> frozenset[str] | None:
    """Returns the ids of the queries that are taken from the file; `None` for all."""
    if queries.judged is None:
        return None
    path, split = queries.judged
    return frozenset(sources.open_beir(path).qrels(split))
