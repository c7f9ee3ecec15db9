"""Queries that a stage embeds: where they lie, whose they are, what their use costs.

| what is given                       | its queries                                |
|-------------------------------------|--------------------------------------------|
| a synthetic or public set           | are free; its certificate goes along       |
| a BEIR directory, `private` = True  | are private: see below                     |
| a BEIR directory, `private` = False | are public, as BEIR's own are, by its word |

An embedding of a private query tells what it says, near enough to find its text, and no
ε covers it, whatever protects the retriever. So the read is recorded before anything is
made of it, refused in strict mode, and the output has to lie in the private directory.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import ml_collections

from tfdpsq import validation
from tfdpsq.data import any_files
from tfdpsq.data.records import verify
from tfdpsq.data.texts import Document, documents_fingerprint
from tfdpsq.privacy import read_certificate
from tfdpsq.privacy.certificate import inherited_certificate
from tfdpsq.run.core import settings, sources
from tfdpsq.run.passes import sharded_stages
from tfdpsq.run.training import private_training


@dataclasses.dataclass(frozen=True)
class QuerySet:
    """Some queries.

    Attributes:
      file: JSON lines, which hold them.
      fingerprint: of what they say, fit to be released.
      judged: (BEIR directory, split) whose judged queries alone are taken of the file;
        `None` takes all.
      private: whether they are private queries themselves.
      certificate: of what is made of them. That of the set, or of what embeds them;
        `None` where both are public, and for private ones, which have none.
    """

    file: str
    fingerprint: str
    judged: tuple[str, str] | None
    private: bool = False
    certificate: dict[str, Any] | None = None


def declared() -> dict[str, settings.Setting]:
    """Settings that say which queries, and whose.

    `split` and `private` are of a BEIR directory: which of its queries, and whether
    they are private. `strict` refuses private ones; `private_directory` is where
    private things lie, by default `private/` above the output, or beside it.
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
    """Checks queries, and records that they are read if they are private.

    Args:
      config: `settings`, and `corpus`: a synthetic or public set, local or of another
        file system; a BEIR directory, or "pydocs".
      directory: where what is made of them goes.
      name: what that is, for the record.
      encoder: certificate of what embeds them; `None` for a public one.

    Raises:
      InputError: private queries in strict mode, or for an output that is not in the
        private directory; no such split; a set and an encoder with guarantees of
        their own, which would have to be added.
      DataError: malformed data.
    """
    path = config.corpus
    here = any_files.is_local(path)
    if not here and not any_files.exists(f"{path.rstrip('/')}/manifest.json"):
        raise validation.InputError(
            f"corpus is {path}, where no synthetic or public set lies; the queries of "
            "a BEIR directory are read from local paths, and copied to none. Give a "
            "set, or a local directory."
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
        out = sharded_stages.local_path(directory)
        private = private_training.private_directory(config, out)
        if private.resolve() not in out.resolve().parents:
            raise validation.InputError(
                f"the queries of {path} are private, and so is an embedding of one, "
                f"which tells what it says: it is not for release. Write it under "
                f"{private} instead of {out}, or set private = False if the "
                "queries are public."
            )
        if config.strict:  # before they are looked at
            _record(config, private, out, name)
    queries = beir.queries()
    judged = beir.qrels(config.split)
    unknown = next((name for name in judged if name not in queries), None)
    if unknown is not None:
        raise validation.DataError(
            beir.path / "qrels" / f"{config.split}.tsv",
            f"query {unknown!r} is not in {beir.queries_file}",
            "Add it there, or remove its judgements",
        )
    fingerprint = documents_fingerprint(
        Document(name, "", queries[name]) for name in sorted(judged)
    )
    if config.private:
        _record(config, private, out, name)
        fingerprint = sources.keyed_fingerprint(fingerprint, private)
    return QuerySet(
        str(beir.queries_file),
        fingerprint,
        (path, config.split),
        bool(config.private),
        None if config.private else encoder,
    )


def _record(config, private: pathlib.Path, out: pathlib.Path, name: str) -> None:
    private_training.reads_of(config, private).record(
        f"the queries of split {config.split!r}",
        f"{out.name}/{name}, and whatever is made from it",
    )


def judged_in(queries: QuerySet) -> frozenset[str] | None:
    """The ids of the queries that are taken of the file; `None` for all."""
    if queries.judged is None:
        return None
    path, split = queries.judged
    return frozenset(sources.open_beir(path).qrels(split))
