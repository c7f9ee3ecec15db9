"""Keep the better queries of a synthetic set, at no cost in privacy.

    tfdpsq filter --workdir=OUT --config.synthetic=SET --config.corpus=BEIR

What is computed from a synthetic set and public data has the set's guarantee, by
post-processing, so queries may be dropped for any reason that uses these alone.
Choosing settings by results on private queries would be a private read.

The filters, each off unless set, in this order:

    words       too few or too many words
    duplicates  repeated queries: the same words in the same order
    round_trip  queries that do not find their own document among BM25's best (Dai et
                al. 2022, *Promptagator*, arXiv:2209.11755, section 3.2)

Memory holds neither a large corpus nor the set, only hashes. Writes `set/`, with its
certificate; `stage.json` has how many queries each filter dropped.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tfdpsq import words
from tfdpsq.data import BeirDirectory, read_manifest, read_synthetic
from tfdpsq.data.sets import SyntheticQuery
from tfdpsq.run.common import data_card, search
from tfdpsq.run.common.kinds import Corpus, SyntheticSet
from tfdpsq.run.frame import settings
from tfdpsq.run.frame.runner import Context, Given, Stage
from tfdpsq.run.frame.settings import path, setting
from tfdpsq.validation import InputError, shown

# Queries in memory at a time; BM25 reads a large corpus twice for each lot.
_CHUNK = 32_768

_Test = Callable[[list[SyntheticQuery]], Iterable[bool]]


class Filter(Stage):
    """Drops queries of a set."""

    name = "filter"

    @dataclasses.dataclass(frozen=True)
    class Settings(settings.Settings):
        """Settings of `filter`."""

        synthetic: str = path(SyntheticSet)
        corpus: str = path(Corpus, "pydocs")
        min_words: int = setting(0, ge=0)
        max_words: int = setting(0, ge=0, help="0 sets none")
        duplicates: bool = setting(False, help="drop repeated queries")
        round_trip: int = setting(
            0, ge=0, help="lowest rank of a query's own document; 0 searches for none"
        )
        shards: int = setting(4, ge=1, le=99_999, help="files of the set")

    def check(self, s: Settings, given: Given) -> None:
        """Refuses limits that exclude each other."""
        if 0 < s.max_words < s.min_words:
            raise InputError(
                f"min_words is {s.min_words} and max_words {s.max_words}: no query "
                "passes both."
            )

    def facts(self, s: Settings, given: Given) -> dict[str, Any]:
        """Those of the set."""
        return dict(given["synthetic"].facts)

    def run(self, c: Context) -> dict[str, Any]:
        """Writes what passes all filters, unchanged and in order."""
        given = c.given["synthetic"]
        manifest, dropped = read_manifest(given.path), dict[str, int]()
        rows = _passing(_tests(c), given.path, dropped)
        first = next(rows, None)
        if first is None:
            raise InputError(
                f"no query of {given.path} passes; of {manifest['count']}, the "
                f"filters drop {dropped}. Loosen the one that drops most."
            )
        kept, of = itertools.chain([first], rows), manifest["provenance"]
        written = data_card.write_set(c, kept, c.settings.shards, of=of)
        read, passed = manifest["count"], written["count"]
        return {"read": read, "kept": passed, "dropped": dropped}


def _passing(
    tests: dict[str, _Test], path: str, dropped: dict[str, int]
) -> Iterator[SyntheticQuery]:
    """Yields the rows of a set that pass; counts what each test drops."""
    dropped.update(dict.fromkeys(tests, 0))
    rows = read_synthetic(path)
    while chunk := list(itertools.islice(rows, _CHUNK)):
        for name, test in tests.items():
            before = len(chunk)
            kept = test(chunk) if chunk else ()
            chunk = [row for row, keep in zip(chunk, kept) if keep]
            dropped[name] += before - len(chunk)
        yield from chunk


def _tests(c: Context) -> dict[str, _Test]:
    """Returns the filters that are set, in their order."""
    s, tests = c.settings, dict[str, _Test]()
    if s.min_words or s.max_words:
        most = s.max_words or math.inf
        tests["words"] = lambda rows: (
            s.min_words <= len(found) <= most
            for found in words.words_of(row.query for row in rows)
        )
    if s.duplicates:
        seen: set[int] = set()

        def is_new(key: int) -> bool:
            new = key not in seen
            seen.add(key)
            return new

        tests["duplicates"] = lambda rows: map(
            is_new, words.text_hashes(row.query for row in rows)
        )
    if s.round_trip:
        tests["round_trip"] = _comes_back(c.given["corpus"].beir(), s.round_trip)
    return tests


def _comes_back(beir: BeirDirectory, k: int) -> _Test:
    """Returns a test: is a query's own document among BM25's k best of the corpus?"""
    bm25 = search.bm25(beir)
    known = {hash(document.id) for document in beir.documents()}

    def passes(rows: list[SyntheticQuery]) -> list[bool]:
        for row in rows:
            if hash(row.document_id) not in known:
                raise InputError(
                    f"query {row.query_id!r} was written for document "
                    f"{shown(row.document_id)}, which {beir.path} does not have. Give "
                    "the corpus that the set was written for."
                )
        found = bm25.search({row.query_id: row.query for row in rows}, k)
        return [row.document_id in found.get(row.query_id, {}) for row in rows]

    return passes


STAGE = Filter()
