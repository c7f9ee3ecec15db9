"""Hard negatives of pairs, read from a TREC run, and the check of their origin."""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import ml_collections
import numpy as np

from tfdpsq import retriever, validation
from tfdpsq.data import Tokenizer
from tfdpsq.data.beir import open_unnamed
from tfdpsq.data.io import sha256_of_file, write_json
from tfdpsq.data.texts import Pair
from tfdpsq.evaluation import measures
from tfdpsq.run.core import settings, sources

ORIGIN_FILE = "mining.json"
JUDGED = "judged"
BY_QUERY = "each query and public data alone"

# In `contents` are digests of the pairs' own documents, which may be another corpus's.
_SCHEMA = """
create table answers (query text, document text, primary key (query, document))
  without rowid;
create table contents (query text, content blob, primary key (query, content))
  without rowid;
create table digests (document text primary key, content blob) without rowid;
create table ranked (query text, document text, score real,
                     primary key (query, document)) without rowid;
create table candidates (query text, document text, place integer,
                         primary key (query, place)) without rowid;
create table texts (document text primary key, text text) without rowid;
"""
_CHOICE = """
insert into candidates select query, document, place from (
  select query, document, row_number() over
    (partition by query order by score desc, {ties}) as place
  from ranked where query in (select query from answers)
  and not exists (select 1 from answers where answers.query = ranked.query
                  and answers.document = ranked.document)
  and not exists (select 1 from digests join contents using (content)
                  where digests.document = ranked.document
                  and contents.query = ranked.query)
) where place > ? and place <= ?
"""
_OTHERS = """
select {column} from candidates join texts using (document) where query = ?
order by place
"""


def declared() -> dict[str, Any]:
    """Settings of hard negatives.

    `run`: a TREC run, query id to documents, best first, from `mine` or any system;
    "judged" for documents that the pairs' own qrels give 0; "" for none. `count`:
    negatives of a row, the best ranked that are not known answers, after `skip` of
    them, which may be unjudged answers. `corpus`: the documents; "" is the pairs' own.
    `made_from`: for a run that `mine` did not write, declare BY_QUERY if every query's
    documents follow from that query and public data. The negatives of one query must
    not depend on other queries: the certificate would not cover what they carry.
    """
    return {
        "hard_negatives": {
            "run": settings.Text(""),
            "count": settings.Integer(1, 1, 10_000),
            "skip": settings.Integer(0, 0, 10_000),
            "corpus": settings.Text(""),
            "made_from": settings.Text("", ("", BY_QUERY)),
        }
    }


def _path_of(run: str) -> pathlib.Path:
    """Returns the TREC run that `hard_negatives.run` names.

    Raises:
      InputError: there is no such file.
    """
    path = pathlib.Path(run)
    if path.is_dir():
        path /= "run.trec"
    if not path.is_file():
        raise validation.InputError(
            f"hard_negatives.run is {run}, where there is no file. Give a "
            "TREC run, or what `mine` wrote."
        )
    return path


def corpus_of(corpus: str, pairs: str) -> str:
    """Returns the path of the documents.

    Raises:
      InputError: none was given, and the pairs are a set without a corpus.
    """
    if not corpus and sources.is_free(pairs):
        raise validation.InputError(
            f"corpus is not set, and {pairs} holds pairs but no corpus to mine. Set "
            'corpus to a BEIR directory, or to "pydocs".'
        )
    return corpus or pairs


def require_unit(run: str, unit: str) -> None:
    """Refuses hard negatives for single pairs of a query.

    A query's negatives leave out all of its answers, so that those of one of its pairs
    depend on the others.
    """
    if unit == "pair" and run:
        raise validation.InputError(
            f"unit is 'pair' and hard_negatives.run is {run!r}: "
            "the negatives of a pair would depend on the query's other pairs, each of "
            "them a unit of its own. Set hard_negatives.run to '', or unit to 'query'."
        )


def inputs(
    own: ml_collections.ConfigDict, pairs: str, private: pathlib.Path
) -> dict[str, str]:
    """Returns fingerprints of the documents and, keyed as it may be private, the run.

    `own` is the section of the settings, as in all that follows.

    Raises:
      InputError: no such run.
    """
    if not own.run:
        return {}
    found = {
        "hard_negatives_corpus": sources.corpus_fingerprint(
            corpus_of(own.corpus, pairs)
        )
    }
    if own.run != JUDGED:  # judgements are a part of the pairs
        run = sha256_of_file(_path_of(own.run))
        found["hard_negatives"] = sources.keyed_fingerprint(run, private)
    return found


def write_origin(
    directory: pathlib.Path, run: pathlib.Path, split: str, pairs: str, by: Any
) -> None:
    """Writes a record of how a run was mined next to it.

    `pairs` is the fingerprint of the pairs, `by` the ranking system and its settings.
    """
    found = {"by": by, "pairs": pairs, "split": split, "run": sha256_of_file(run)}
    write_json(directory / ORIGIN_FILE, found)


def origin(own: ml_collections.ConfigDict, source: sources.Source, pairs: str) -> str:
    """Returns the origin of the negatives for the certificate; "none" without any.

    Negatives that were mined for other pairs would carry what those cost.

    `pairs` is the fingerprint of the source, under the key used when mining.

    Raises:
      InputError: the origin is not known, or not these pairs.
      DataError: a damaged `mining.json`.
    """
    if not own.run:
        return "none"
    if own.run == JUDGED:
        if not source.private:
            raise validation.InputError(
                f"hard_negatives.run is {JUDGED!r}, but {source.path} is a set of "
                "pairs without judgements. Mine for them, or give a TREC run."
            )
        return f"{own.count} of the query's own judgements of 0"
    path = _path_of(own.run)
    record = path.parent / ORIGIN_FILE
    count = f"the {own.count} best after {own.skip}"
    if record.is_file():
        try:
            found = validation.parse_json(record.read_text("utf-8"))
            by, made = found["by"]["name"], (found["pairs"], found["split"])
            run = found["run"]
        except (ValueError, KeyError, TypeError) as error:
            raise validation.DataError(
                record, f"not what `mine` writes ({error!r})", "Mine again."
            ) from error
        if run != sha256_of_file(path):
            raise validation.InputError(
                f"{path} is not the run that {record} describes. Mine again."
            )
        if made != (pairs, source.split):
            raise validation.InputError(
                f"hard_negatives.run {path} was not mined for split "
                f"{source.split!r} of {source.path} in its present state, by its "
                "fingerprint under this private_directory's key. Mine for these pairs, "
                "with the same private_directory."
            )
        return f"{count}, mined by {by} from {BY_QUERY}"
    if own.made_from != BY_QUERY:
        raise validation.InputError(
            f"hard_negatives.made_from is {own.made_from!r}, and there is no "
            f"{ORIGIN_FILE} next to {path}, so the origin of its documents is "
            f"not known. Let `mine` write it, or set made_from to {BY_QUERY!r} if that "
            "is true."
        )
    return f"{count}, from a run declared to be made from {BY_QUERY}"


class NegativeTable:
    """The hard negatives of a source's queries, on disk, as `PairTable` keeps pairs.

    A document is skipped if it, or another with the same content, is a known answer.
    """

    def __init__(self, own: ml_collections.ConfigDict, source: sources.Source):
        """Reads answers, ranking and documents, each streamed.

        Raises:
          InputError: bad settings, or a run that has none of the queries.
          DataError: a malformed run, or one that names a document the corpus lacks.
        """
        self._own = own
        self._store = open_unnamed(_SCHEMA)
        self._add_answers(source)
        self._add_ranking(source)
        corpus = corpus_of(own.corpus, source.path)
        self._add_digests(corpus)
        ties = "document" if own.run == JUDGED else "document desc"
        between = (own.skip, own.skip + own.count)
        self._store.execute(_CHOICE.format(ties=ties), between)
        for table in ("ranked", "digests"):
            self._store.execute(f"delete from {table}")
        self._add_documents(corpus)
        queries = self._store.execute("select distinct query from candidates")
        if not any(self.texts(query) for (query,) in queries):
            raise validation.InputError(
                f"hard_negatives.run {own.run} has no document for any query of "
                f"{source.path}. Mine for these pairs, or lower skip (now {own.skip})."
            )

    def _add_answers(self, source: sources.Source) -> None:
        for pair in source.read():
            key = (pair.query_id, pair.document_id)
            self._store.execute("insert or ignore into answers values (?, ?)", key)
            content = (pair.query_id, _digest(pair.document))
            self._store.execute("insert or ignore into contents values (?, ?)", content)
        if not source.private:
            return
        self._store.executemany(
            "insert or ignore into answers select ?1, ?2 where exists "
            "(select 1 from answers where query = ?1)",
            (
                (row.query_id, row.document_id)
                for row in sources.open_beir(source.path).judgements(source.split)
                if row.score > 0
            ),
        )

    def _add_ranking(self, source: sources.Source) -> None:
        insert = "insert or ignore into ranked values (?, ?, ?)"
        if self._own.run == JUDGED:
            judged = sources.open_beir(source.path).judgements(source.split)
            rows = ((r.query_id, r.document_id, 0.0) for r in judged if r.score <= 0)
            self._store.executemany(insert, rows)
            return
        path = _path_of(self._own.run)
        for line, query, document, score in measures.stream_trec_run(path):
            # trec_eval ranks by float32.
            row = (query, document, float(np.float32(score)))
            if not self._store.execute(insert, row).rowcount:
                raise measures.repeated_hit(path, line, query, document)

    def _add_digests(self, corpus: str) -> None:
        """Reads what the documents hold, so that copies of answers are known."""
        self._store.executemany(
            "insert or ignore into digests values (?, ?)",
            (
                (document.id, _digest(document.content))
                for document in sources.open_beir(corpus).documents()
            ),
        )
        self._store.execute(
            "insert or ignore into contents select query, content from answers "
            "join digests using (document)"
        )

    def _add_documents(self, corpus: str) -> None:
        self._store.execute("create index wanted on candidates (document)")
        for document in sources.open_beir(corpus).documents():
            self._store.execute(
                "insert or replace into texts select ?1, ?2 where exists "
                "(select 1 from candidates where document = ?1)",
                (document.id, document.content),
            )
        (missing,) = self._store.execute(
            "select min(document) from candidates "
            "where document not in (select document from texts)"
        ).fetchone()
        if missing is not None:
            raise validation.DataError(
                self._own.run,
                f"document {missing!r} is not in {corpus}",
                "Set hard_negatives.corpus to the documents that the run was made on.",
            )

    def texts(self, query: str) -> list[str]:
        """Returns the contents of a query's hard negatives, hardest first."""
        return self._others("text", query)

    def ids(self, query: str) -> list[str]:
        """Returns the ids of a query's hard negatives, hardest first."""
        return self._others("document", query)

    def _others(self, column: str, query: str) -> list[str]:
        found = self._store.execute(_OTHERS.format(column=column), (query,))
        return [value for (value,) in found]


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def encoder(
    own: ml_collections.ConfigDict,
    source: sources.Source,
    tokenizer: Tokenizer,
    document_length: int,
) -> Callable[[Sequence[Pair]], dict[str, np.ndarray]]:
    """Returns what tokenises pairs' hard negatives, as `retriever.encode_negatives`.

    Without hard negatives it returns no array.

    Raises:
      InputError, DataError: as `NegativeTable`.
    """
    if not own.run:
        return lambda pairs: {}
    table = NegativeTable(own, source)

    def encode(pairs: Sequence[Pair]) -> dict[str, np.ndarray]:
        return retriever.encode_negatives(
            pairs,
            {pair.query_id: table.texts(pair.query_id) for pair in pairs},
            tokenizer,
            document_length,
            own.count,
        )

    return encode
