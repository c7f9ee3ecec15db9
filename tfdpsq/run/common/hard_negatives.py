"""Hard negatives of pairs, read from a TREC run, and the check of their origin.

The negatives of one query must not depend on other queries: the certificate would not
cover what they carry. A query's negatives leave out all of its answers, so those of one
of its pairs depend on the others.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfdpsq import retriever
from tfdpsq.data import Pair, Tokenizer
from tfdpsq.evaluation import measures
from tfdpsq.run.frame import records, settings
from tfdpsq.run.frame.artefacts import Artefact, Corpus
from tfdpsq.run.frame.places import Privacy
from tfdpsq.run.frame.runner import Context, Given
from tfdpsq.run.frame.settings import path, setting
from tfdpsq.validation import DataError, InputError

RUN_FILE = "run.trec"
JUDGED = "judged"
BY_QUERY = "each query and public data alone"
RUN, CORPUS = "hard_negatives.run", "hard_negatives.corpus"

_SCHEMA = """
pragma cache_size = -65536;
pragma journal_mode = off;
create table answers (query text, document text, primary key (query, document))
  without rowid;
create table contents (query text, content blob, primary key (query, content))
  without rowid;
create table ranked (query text, document text, score real,
                     primary key (query, document)) without rowid;
create table wanted (document text primary key) without rowid;
create table texts (document text primary key, text text);
"""
_ALSO = """
insert or ignore into answers select ?1, ?2
where exists (select 1 from answers where query = ?1)
"""
_TEXT = """
insert or replace into texts select ?1, ?2
where exists (select 1 from wanted where document = ?1)
"""
_WANTED = """
insert into wanted select document from answers
union select document from ranked where query in (select query from answers)
"""
_OTHERS = """
select document, text from ranked join texts using (document) where query = ?1
and document not in (select document from answers where query = ?1)
order by score desc, document {ties}
"""


class Ranking(Artefact):
    """A TREC run: what `mine` wrote, a file by any system, or the word "judged"."""

    wanted = f"what mine wrote, a TREC run, or {JUDGED!r}"

    @classmethod
    def open(cls, path: str, setting: str) -> Artefact:
        """See `Artefact.open`; judgements are a part of the pairs."""
        if path == JUDGED:
            return cls(path, Privacy.PUBLIC)
        return super().open(path, setting)

    @classmethod
    def is_at(cls, path: str) -> bool:
        """See `Artefact.is_at`."""
        return os.path.isfile(_file_of(path))

    def fingerprint(self, private: Any) -> str:
        """See `Artefact.fingerprint`; keyed, as the run may be of private queries."""
        if self.path == JUDGED or records.read_stage(self.path) is not None:
            return self.path if self.path == JUDGED else super().fingerprint(private)
        return records.keyed_fingerprint(super().fingerprint(private), private)


@dataclasses.dataclass(frozen=True)
class HardNegativesSettings(settings.Settings):
    """Settings of hard negatives."""

    run: str = path(Ranking, "", help="judged: documents that the qrels give 0")
    count: int = setting(1, ge=1, le=10_000, when="run", help="negatives of a row")
    skip: int = setting(
        0, ge=0, le=10_000, when="run", help="best ones, which may be unjudged answers"
    )
    corpus: str = path(Corpus, "", when="run", help='"" for the documents of pairs')
    made_from: str = setting(
        "",
        choices=("", BY_QUERY),
        when="run",
        help="declare that, of a run that mine did not write, if it is true",
    )


def check(s: Any, given: Given, protects: bool = True) -> None:
    """Refuses hard negatives that do not fit the pairs.

    `protects` says that the method has a guarantee for units.

    Raises:
      InputError: they are for single pairs of a query, of another split, have no
        corpus, or come from an unknown origin.
    """
    own, pairs, run = s.hard_negatives, given["pairs"], given[RUN]
    if run is None:
        return
    if protects and s.unit == "pair":
        raise InputError(
            f"unit is 'pair' and hard_negatives.run is {own.run!r}: the negatives of a "
            "pair would depend on the query's other pairs, each of them a unit of its "
            "own. Set hard_negatives.run to '', or unit to 'query'."
        )
    if given[CORPUS] is None and not pairs.raw:
        raise InputError(
            f"hard_negatives.corpus is not set, and {pairs.path} holds pairs but no "
            'corpus. Set it to a BEIR directory, or to "pydocs".'
        )
    if own.run == JUDGED:
        if not pairs.raw:
            raise InputError(
                f"hard_negatives.run is {JUDGED!r}, but {pairs.path} is a set of pairs "
                "without judgements. Mine for them, or give a TREC run."
            )
        return
    if run.promised or _mined(run.path):
        if run.facts.get("split") != s.split:
            raise _not_of(run, pairs, s.split)
    elif own.made_from != BY_QUERY:
        raise InputError(
            f"hard_negatives.made_from is {own.made_from!r}, and {own.run} is not what "
            "mine wrote, so the origin of its documents is not known. Let mine write "
            f"it, or set made_from to {BY_QUERY!r} if that is true."
        )


def origin(c: Context) -> str:
    """Returns the origin of the negatives for the certificate; "none" without any.

    Negatives that were mined for other pairs would carry what those cost.

    Raises:
      InputError: they were not mined for these pairs, by the key of this workdir.
    """
    own, run = c.settings.hard_negatives, c.given[RUN]
    if run is None:
        return "none"
    if own.run == JUDGED:
        return f"{own.count} of the query's own judgements of 0"
    count, mined = f"the {own.count} best after {own.skip}", _mined(run.path)
    if mined is None:
        return f"{count}, from a run declared to be made from {BY_QUERY}"
    # Of several workers, the others have a workdir and a key of their own.
    chief = c.devices is None or c.devices.chief
    if chief and mined["depends"]["inputs"]["pairs"] != c.inputs["pairs"]:
        raise _not_of(run, c.given["pairs"], c.settings.split)
    return f"{count}, mined by {mined['result']['by']} from {BY_QUERY}"


def _mined(run: str) -> dict[str, Any] | None:
    """Returns the record of a run that `mine` wrote."""
    folder = run if os.path.isdir(run) else os.path.dirname(run)
    if _file_of(folder) != _file_of(run):  # another file beside it
        return None
    record = records.read_stage(folder)
    return record if record is not None and record["stage"] == "mine" else None


def _not_of(run: Artefact, pairs: Artefact, split: str) -> InputError:
    return InputError(
        f"hard_negatives.run {run.path} was not mined for split {split!r} of "
        f"{pairs.path} in its present state, by its fingerprint under this workdir's "
        "key. Mine for these pairs, in the same workdir."
    )


def _file_of(run: str) -> str:
    return os.path.join(run, RUN_FILE) if os.path.isdir(run) else run


class NegativeTable:
    """The hard negatives of the queries of pairs, on disk.

    A document is skipped if it, or another with the same content, is a known answer.
    """

    def __init__(self, c: Context):
        """Reads answers, ranking and documents, each streamed.

        Raises:
          InputError: a run that has none of the queries.
          DataError: a malformed run, or one that names a document the corpus lacks.
        """
        s, pairs = c.settings, c.given["pairs"]
        self._own = own = s.hard_negatives
        self._store = sqlite3.connect("", check_same_thread=False)
        self._store.executescript(_SCHEMA)
        find = self._store.execute
        for pair in pairs.load(s.split, s.unit).read():
            key, content = (pair.query_id, pair.document_id), _digest(pair.document)
            find("insert or ignore into answers values (?, ?)", key)
            find("insert or ignore into contents values (?, ?)", (key[0], content))
        for row in pairs.beir().judgements(s.split) if pairs.raw else ():
            if row.score > 0:
                find(_ALSO, (row.query_id, row.document_id))
        self._add_ranking(pairs, s.split)
        find(_WANTED)
        corpus = (c.given[CORPUS] or pairs).beir()
        for document in corpus.documents():
            find(_TEXT, (document.id, document.content))
        self._require_texts(corpus.path)
        queries = find("select distinct query from answers").fetchall()
        if not any(self.texts(query) for (query,) in queries):
            raise InputError(
                f"hard_negatives.run {own.run} has no document for any query of "
                f"{pairs.path}. Mine for these pairs, or lower skip (now {own.skip})."
            )

    def _add_ranking(self, pairs: Any, split: str) -> None:
        insert = "insert or ignore into ranked values (?, ?, ?)"
        if self._own.run == JUDGED:
            judged = pairs.beir().judgements(split)
            rows = ((r.query_id, r.document_id, 0.0) for r in judged if r.score <= 0)
            self._store.executemany(insert, rows)
            return
        file = _file_of(self._own.run)
        for line, query, document, score in measures.stream_trec_run(file):
            # trec_eval ranks by float32.
            row = (query, document, float(np.float32(score)))
            if not self._store.execute(insert, row).rowcount:
                raise measures.repeated_hit(file, line, query, document)

    def _require_texts(self, corpus: os.PathLike) -> None:
        (missing,) = self._store.execute(
            "select min(document) from ranked where query in (select query from "
            "answers) and document not in (select document from texts)"
        ).fetchone()
        if missing is not None:
            raise DataError(
                self._own.run,
                f"document {missing!r} is not in {corpus}",
                "Set hard_negatives.corpus to the documents that the run was made on.",
            )

    def texts(self, query: str) -> list[str]:
        """Returns the contents of a query's hard negatives, hardest first."""
        return [text for _, text in self._others(query)]

    def ids(self, query: str) -> list[str]:
        """Returns the ids of a query's hard negatives, hardest first."""
        return [document for document, _ in self._others(query)]

    def _others(self, query: str) -> list[tuple[str, str]]:
        find, own = self._store.execute, self._own
        answers = "select text from answers join texts using (document) where query = ?"
        known = {_digest(text) for (text,) in find(answers, (query,))}
        contents = find("select content from contents where query = ?", (query,))
        known.update(content for (content,) in contents)
        ties = "asc" if own.run == JUDGED else "desc"
        ranked = find(_OTHERS.format(ties=ties), (query,))
        found = [row for row in ranked if _digest(row[1]) not in known]
        return found[own.skip : own.skip + own.count]


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def encoder(
    c: Context, tokenizer: Tokenizer, document_length: int
) -> Callable[[Sequence[Pair]], dict[str, np.ndarray]]:
    """Returns what tokenises pairs' hard negatives, as `retriever.encode_negatives`.

    Without hard negatives it returns no array.
    """
    if c.given[RUN] is None:
        return lambda pairs: {}
    table, count = NegativeTable(c), c.settings.hard_negatives.count

    def encode(pairs: Sequence[Pair]) -> dict[str, np.ndarray]:
        texts = {pair.query_id: table.texts(pair.query_id) for pair in pairs}
        return retriever.encode_negatives(
            pairs, texts, tokenizer, document_length, count
        )

    return encode
