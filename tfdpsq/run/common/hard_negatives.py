"""Hard negatives of pairs, that `mine` wrote, and the check of their origin.

The negatives of one query must not depend on other queries: the certificate would not
cover what they carry. A pair's negatives depend on the other pairs of its query.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfdpsq import retriever
from tfdpsq.data import Pair, Tokenizer
from tfdpsq.evaluation import measures
from tfdpsq.run.common.kinds import Corpus
from tfdpsq.run.frame import records, settings
from tfdpsq.run.frame.artefacts import Artefact
from tfdpsq.run.frame.runner import Context, Given
from tfdpsq.run.frame.settings import path, setting
from tfdpsq.validation import InputError

RUN_FILE = "run.trec"
RUN, CORPUS = "hard_negatives.run", "hard_negatives.corpus"

_SCHEMA = """
create table answers (query text, document text, content blob,
                      primary key (query, document)) without rowid;
create table ranked (query text, document text, score real,
                     primary key (query, document)) without rowid;
create table texts (document text primary key, text text);
create index documents on ranked (document);
"""
_RANKED = """
insert or replace into ranked select ?1, ?2, ?3
where exists (select 1 from answers where query = ?1)
"""
_TEXT = """
insert or replace into texts select ?1, ?2
where exists (select 1 from ranked where document = ?1)
"""
# Best first, as trec_eval breaks ties.
_OTHERS = """
select document, text from ranked join texts using (document) where query = ?1
and document not in (select document from answers where query = ?1)
order by score desc, document desc
"""


class Mined(Artefact):
    """Output of `mine`: for each query, documents that follow from it alone."""

    wanted = "what mine wrote"

    @classmethod
    def is_at(cls, path: str) -> bool:
        """See `Artefact.is_at`."""
        return super().is_at(path) and os.path.isfile(os.path.join(path, RUN_FILE))


@dataclasses.dataclass(frozen=True)
class HardNegativesSettings(settings.Settings):
    """Settings of hard negatives."""

    run: str = path(Mined, "")
    count: int = setting(1, ge=1, le=10_000, when="run", help="negatives of a row")
    skip: int = setting(
        0, ge=0, le=10_000, when="run", help="best ones, which may be unjudged answers"
    )
    corpus: str = path(Corpus, "", when="run", help='"" for the documents of pairs')


def check(s: Any, given: Given, protects: bool = True) -> None:
    """Refuses negatives without a corpus, or of pairs whose method `protects` them."""
    own, pairs = s.hard_negatives, given["pairs"]
    if given[RUN] is None:
        return
    if protects and s.unit == "pair":
        raise InputError(
            f"unit is 'pair' and hard_negatives.run is {own.run!r}: negatives would "
            "depend on the query's other pairs. Leave out one of them."
        )
    if given[CORPUS] is None and not pairs.raw:
        raise InputError(
            f"hard_negatives.corpus is '', and {pairs.path} holds pairs but no corpus. "
            'Set it to a BEIR directory, or to "pydocs".'
        )


def origin(c: Context) -> str:
    """Returns the origin of the negatives for the certificate; "none" without any.

    Negatives mined for other pairs are refused: they would carry what those cost.
    """
    own, run = c.settings.hard_negatives, c.given[RUN]
    if run is None:
        return "none"
    mined = records.read_stage(run.path) or {}
    found = mined["depends"]["inputs"]["pairs"], mined["depends"]["settings"]["split"]
    # Of several workers, the others have a workdir and a key of their own.
    chief = c.devices is None or c.devices.chief
    if chief and found != (c.inputs["pairs"], c.settings.split):
        raise InputError(
            f"hard_negatives.run {run.path} was not mined for split "
            f"{c.settings.split!r} of {c.settings.pairs} in its present state. Mine "
            "for it, in the same workdir."
        )
    by = f"{mined['result']['by']} from each query and public data alone"
    return f"the {own.count} best after {own.skip}, mined by {by}"


class NegativeTable:
    """The queries' hard negatives, on disk: documents unlike all known answers."""

    def __init__(self, c: Context):
        """Reads answers, ranking and documents, each streamed."""
        s, pairs = c.settings, c.given["pairs"]
        self._own = own = s.hard_negatives
        self._store = sqlite3.connect("", check_same_thread=False)
        self._store.executescript(_SCHEMA)
        find = self._store.execute
        for pair in pairs.load(s.split, "pair").read():
            row = (pair.query_id, pair.document_id, _digest(pair.document))
            find("insert or ignore into answers values (?, ?, ?)", row)
        ranking = os.path.join(own.run, RUN_FILE)
        for _, query, document, score in measures.stream_trec_run(ranking):
            # trec_eval ranks by float32.
            find(_RANKED, (query, document, float(np.float32(score))))
        corpus = (c.given[CORPUS] or pairs).beir()
        for document in corpus.documents():
            find(_TEXT, (document.id, document.content))
        queries = find("select distinct query from ranked").fetchall()
        if not any(self.find(query) for (query,) in queries):
            raise InputError(
                f"hard_negatives.run {own.run} has no document of {corpus.path} for "
                f"any query. Set corpus to mine's, or lower skip, now {own.skip}."
            )

    def find(self, query: str) -> list[tuple[str, str]]:
        """Returns ids and contents of a query's hard negatives, hardest first."""
        find, own = self._store.execute, self._own
        known = set(find("select content from answers where query = ?", (query,)))
        ranked = find(_OTHERS, (query,))
        found = [row for row in ranked if (_digest(row[1]),) not in known]
        return found[own.skip : own.skip + own.count]


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def encoder(
    c: Context, tokenizer: Tokenizer
) -> Callable[[Sequence[Pair]], dict[str, np.ndarray]]:
    """Returns what tokenises pairs' hard negatives, if any, to arrays."""
    if c.given[RUN] is None:
        return lambda pairs: {}
    s, table = c.settings, functools.cache(lambda: NegativeTable(c))

    def encode(pairs: Sequence[Pair]) -> dict[str, np.ndarray]:
        found = {pair.query_id: table().find(pair.query_id) for pair in pairs}
        texts = {query: [text for _, text in rows] for query, rows in found.items()}
        return retriever.encode_negatives(
            pairs, texts, tokenizer, s.document_length, s.hard_negatives.count
        )

    return encode
