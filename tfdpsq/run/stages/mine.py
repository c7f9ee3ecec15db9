"""Mine hard negatives: documents that look like answers, to train against.

    tfdpsq mine --workdir=WORKDIR/private/mined --config.pairs=BEIR

Ranks the public documents for every query of a set of pairs by BM25 and writes
`run.trec`, which `train_retriever` takes as `hard_negatives.run`. Each query is ranked
by itself: its negatives depend on it and the public documents alone.

For private queries the file is a read that no ε covers: it names documents that share
words with each query.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from tfdpsq import evaluation
from tfdpsq.run.common import search
from tfdpsq.run.common.kinds import Corpus, Pairs
from tfdpsq.run.frame import settings
from tfdpsq.run.frame.runner import Context, Given, Stage
from tfdpsq.run.frame.settings import path, setting
from tfdpsq.validation import InputError

RUN_FILE = "run.trec"
# Most found documents in memory; the corpus is read twice per chunk of queries.
_HITS = 4_000_000


class Mine(Stage):
    """Ranks documents for queries, by BM25."""

    name = "mine"

    @dataclasses.dataclass(frozen=True)
    class Settings(settings.Settings):
        """Settings of `mine`."""

        pairs: str = path(Pairs, "pydocs")
        split: str = setting("train")
        corpus: str = path(Corpus, "", help='"" for the documents of pairs')
        k: int = setting(50, ge=1, help="documents per query, its answers included")
        strict: bool = setting(False, help="refuse reads that no ε covers")

    def check(self, s: Settings, given: Given) -> None:
        """A set has no corpus of its own."""
        if given["corpus"] is None and not given["pairs"].raw:
            raise InputError(f"pairs is {s.pairs}, a set of queries. Give corpus, too.")

    def reads(self, s: Settings, given: Given) -> list[tuple[str, str]]:
        """Private queries decide what is written."""
        if not given["pairs"].raw:
            return []
        return [
            (f"BM25's best documents for each query of split {s.split!r}", RUN_FILE)
        ]

    def run(self, c: Context) -> dict[str, Any]:
        """Searches for the queries in chunks."""
        beir = (c.given["corpus"] or c.given["pairs"]).beir()
        pairs = c.given["pairs"].load(c.settings.split)
        index, rows, k = search.bm25(beir), pairs.read(), c.settings.k

        def found() -> Iterator[tuple[str, dict[str, float]]]:
            while some := list(itertools.islice(rows, max(1, _HITS // k))):
                queries = {pair.query_id: pair.query for pair in some}
                yield from index.search(queries, k, progress=True).items()

        evaluation.write_trec_run(c.out / RUN_FILE, found(), tag="bm25")
        c.counts["queries"] = pairs.count
        return {"by": "bm25", "settings": index.settings}


STAGE = Mine()
