"""Keep the better queries of a synthetic set, at no cost in privacy.

    tfdpsq filter --workdir=OUT --config.synthetic=SET --config.corpus=BEIR

What is computed from a synthetic set and public data has the set's guarantee, by
post-processing, so queries may be dropped for any reason that uses these alone. A
retriever that judges round trips must be public, or trained under **this** guarantee:
another one would carry into the set what its certificate does not count, and is
refused. Choosing settings by results on private queries would be a private read.

The filters, each off unless set, in this order:

    words       too few or too many words
    duplicates  repeated queries: the same words in the same order
    round_trip  queries that do not retrieve their own document among the best

Memory holds neither the corpus nor the set, only hashes.
Writes `set/`, with its certificate; `stage.json` has how many queries each filter
dropped.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tfdpsq import words
from tfdpsq.data import read_manifest, read_synthetic, write_synthetic
from tfdpsq.data.sets import SyntheticQuery
from tfdpsq.run.common import data_card, search
from tfdpsq.run.frame import settings
from tfdpsq.run.frame.artefacts import SET, Corpus, SyntheticSet, System
from tfdpsq.run.frame.places import Privacy
from tfdpsq.run.frame.runner import Context, Given, Stage
from tfdpsq.run.frame.settings import nested, path, setting
from tfdpsq.validation import InputError

# Queries in memory at a time; a round trip by BM25 reads the corpus twice for each lot.
_CHUNK = 32_768

_Test = Callable[[list[SyntheticQuery]], Iterable[bool]]


@dataclasses.dataclass(frozen=True)
class RoundTrip(settings.Settings):
    """The round trip: does a query retrieve its own document?"""

    retriever: str = path(System, "", help="its judge")
    k: int = setting(1, ge=1, when="retriever", help="the lowest rank that passes")


class Filter(Stage):
    """Drops queries of a set."""

    name = "filter"
    kind = SyntheticSet

    @dataclasses.dataclass(frozen=True)
    class Settings(settings.Settings):
        """Settings of `filter`."""

        synthetic: str = path(SyntheticSet)
        corpus: str = path(Corpus, "pydocs")
        min_words: int = setting(0, ge=0)
        max_words: int = setting(0, ge=0, help="0 is no limit")
        duplicates: bool = setting(False, help="drop repeated queries")
        round_trip: RoundTrip = nested(RoundTrip)
        batch_size: int = setting(128, ge=1, speed=True)
        shards: int = setting(4, ge=1, le=99_999, help="files of the set")

    def check(self, s: Settings, given: Given) -> None:
        """Refuses a judge that knows more of private queries than the set."""
        if 0 < s.max_words < s.min_words:
            raise InputError(
                f"min_words is {s.min_words} and max_words {s.max_words}: no query "
                "passes both."
            )
        of, judge = given["synthetic"], given["round_trip.retriever"]
        if judge is None:
            return
        search.require_retriever("round_trip.retriever", judge)
        own = judge.origin == of.origin != ""
        if judge.privacy > Privacy.PUBLIC and not own:
            raise InputError(
                f"round_trip.retriever is {judge.path}, which private queries had a "
                f"part in, and not through {of.path}: its choice would reveal what the "
                "set's certificate does not count. Use one that was trained on this "
                f"set or on public pairs, or {search.BM25!r}."
            )

    def facts(self, s: Settings, given: Given) -> dict[str, Any]:
        """Those of the set."""
        return dict(given["synthetic"].facts)

    def run(self, c: Context) -> dict[str, Any]:
        """Writes what passes all filters, unchanged and in order."""
        given = c.given["synthetic"]
        manifest, dropped = read_manifest(given.path), dict[str, int]()
        with tempfile.TemporaryDirectory(dir=c.out) as scratch:
            rows = _passing(_tests(c, scratch), given.path, dropped)
            first = next(rows, None)
            if first is None:
                raise InputError(
                    f"no query of {given.path} passes; of {manifest['count']}, the "
                    f"filters drop {dropped}. Loosen the one that drops most."
                )
            written = write_synthetic(
                c.out / SET,
                itertools.chain([first], rows),
                provenance={**c.provenance(), "of": manifest["provenance"]},
                certificate=self.certificate(c.settings, c.given),
                shards=c.settings.shards,
                guarantee=c.privacy.word,
            )
        data_card.write(c.out / SET, written)
        kept = {"read": manifest["count"], "kept": written["count"]}
        return {**kept, "dropped": dropped}


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


def _tests(c: Context, scratch: str) -> dict[str, _Test]:
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
    if s.round_trip.retriever:
        judge, beir = c.given["round_trip.retriever"].path, c.given["corpus"].beir()
        tests["round_trip"] = search.comes_back(
            judge, s.round_trip.k, beir, scratch, s.batch_size
        )
    return tests


STAGE = Filter()
