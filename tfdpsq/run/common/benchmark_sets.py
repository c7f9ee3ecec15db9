"""Test sets, and the rules for scoring each of BEIR's.

A set is one BEIR directory, except CQADupStack: it is twelve, one per forum, each
searched by itself; its numbers are means over forums, whatever their numbers of queries
(Thakur et al. 2021).
"""

from __future__ import annotations

import dataclasses
import os

from tfdpsq.data import BeirDirectory
from tfdpsq.run.common.kinds import open_beir

METRICS = ("ndcg@10", "recall@10", "capped_recall@10", "mrr@10", "map")
CQADUPSTACK = "cqadupstack"
# The sets of the paper's zero-shot table, by BEIR's names.
PAPER = tuple(
    f"arguana {CQADUPSTACK} dbpedia-entity fiqa hotpotqa nfcorpus quora scidocs "
    "scifact trec-covid webis-touche2020".split()
)
FORUMS = tuple(
    "android english gaming gis mathematica physics programmers stats tex unix "
    "webmasters wordpress".split()
)
# Their queries are documents of the corpus, with the same ids.
QUERIES_ARE_DOCUMENTS = ("arguana", "quora")
# MS MARCO's test queries have no public judgements.
SPLITS = {"msmarco": "dev"}


@dataclasses.dataclass(frozen=True)
class Part:
    """A corpus and its queries: a set, or a forum of CQADupStack."""

    name: str  # "scifact" or "cqadupstack/android"; "" for the pairs' own split
    path: str  # the BEIR directory, or "pydocs"
    split: str
    ignore_identical_ids: bool = False  # leave out a document with the query's own id

    def beir(self) -> BeirDirectory:
        """Opens the directory to read."""
        return open_beir(self.path)


def parts_of(name: str, path: str) -> list[Part]:
    """Returns the parts of a set, with the rules that go with BEIR's name of it."""
    rules = (SPLITS.get(name, "test"), name in QUERIES_ARE_DOCUMENTS)
    if name != CQADUPSTACK:
        return [Part(name, path, *rules)]
    return [Part(f"{name}/{f}", os.path.join(path, f), *rules) for f in FORUMS]
