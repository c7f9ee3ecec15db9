r"""Measure how much of the data occurs in a corpus used for pretraining.

    tfdpsq overlap --workdir=WORKDIR/private/overlap \
        --config.data=BEIR --config.corpus='("TEXTS",)'

Draws queries and documents several times, and searches for all of them while it streams
the corpus once (paper, §5.2.3; `evaluation.overlap` says what "equal" and "contained"
are). Writes `overlap.json`, shares with Clopper-Pearson intervals, and `matches.jsonl`,
examples, which are private queries.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import tqdm

from tfdpsq import evaluation
from tfdpsq.data.io import atomic_write, write_json
from tfdpsq.run.common.kinds import Pairs
from tfdpsq.run.common.text_corpus import Texts, read_texts
from tfdpsq.run.frame import runner, settings, shards
from tfdpsq.run.frame.runner import Context, Given
from tfdpsq.run.frame.settings import path, setting
from tfdpsq.validation import InputError

OVERLAP_FILE = "overlap.json"
MATCHES_FILE = "matches.jsonl"
_EXTENSION = "npz"
_SHOWN_CHARACTERS = 500


class Overlap(runner.ShardedStage):
    """Searches for a sample of queries and of documents in a corpus."""

    name = "overlap"

    @dataclasses.dataclass(frozen=True)
    class Settings(settings.Settings):
        """Settings of `overlap`."""

        data: str = path(Pairs, "pydocs")
        split: str = setting("train", help="of the queries")
        corpus: tuple[str, ...] = path(Texts, ())
        field: str = setting("text", help="column of a table that holds the text")
        draws: int = setting(3, ge=1, le=10_000)
        draw_size: int = setting(10_000, ge=1)
        examples: int = setting(5, ge=0, help="of each kind of match")
        seed: int = setting(0, ge=0, le=settings.SEED)
        strict: bool = setting(False, help="refuse reads that no ε covers")
        shards: int = setting(
            64, ge=1, le=100_000, speed=True, help="at most; each has at least a file"
        )

    def check(self, s: Settings, given: Given) -> None:
        """Refuses a set of queries, and a search in nothing."""
        if not given["data"].raw or not s.corpus:
            raise InputError(
                f"data is {s.data} and corpus {s.corpus}. Give a BEIR directory, and "
                "one text corpus or more."
            )

    def reads(self, s: Settings, given: Given) -> list[tuple[str, str]]:
        """Which private queries are public texts."""
        read = f"which queries of split {s.split!r} occur in a public corpus"
        return [(read, f"{OVERLAP_FILE} and {MATCHES_FILE}")]

    def parts(self, c: Context) -> list[list[str]]:
        """Deals the corpus's parts into shards."""
        parts = [part for corpus in c.given["corpus"] for part in corpus.parts()]
        count = min(c.settings.shards, len(parts))
        cuts = [len(parts) * n // count for n in range(count + 1)]
        return [parts[a:b] for a, b in zip(cuts, cuts[1:])]

    def start(self, c: Context) -> shards.Make:
        """Draws the sample."""
        texts = [text for sample in _samples(c) for text in sample.texts]

        def make(index: int, out: shards.ShardWriter) -> None:
            scan = evaluation.OverlapScan(texts)
            for part in c.parts[index]:
                found = read_texts(part, c.settings.field)
                scan.scan(tqdm.tqdm(found, part, unit="record", leave=False))
            with open(out.path(_EXTENSION), "wb") as file:
                np.savez(file, **scan.state())
            out.count = scan.records

        return make

    def merge(self, c: Context, made: shards.Shards) -> dict[str, Any]:
        """Writes shares and examples."""
        samples = list(_samples(c))
        scan = evaluation.OverlapScan([x for sample in samples for x in sample.texts])
        for file in made.paths(_EXTENSION):
            scan.merge(np.load(file))
        overlap, parts = scan.result(), [part for shard in c.parts for part in shard]
        if not overlap.records:
            raise InputError(f"corpus is {c.settings.corpus}, which holds no text.")
        sizes = {"records": overlap.records, "bytes": overlap.corpus_bytes}
        found: dict[str, Any] = {"corpus": {"parts": len(parts), **sizes}}
        examples: list[dict[str, Any]] = []
        first = 0
        for sample in samples:
            here = slice(first, first := first + len(sample.texts))
            equal, contained = overlap.equal[here], overlap.contained[here]
            shares = {
                name: evaluation.share_in_draws([flags[each] for each in sample.draws])
                for name, flags in (("equal", equal), ("contained", contained))
            }
            sizes = {"draw_size": len(sample.draws[0]), "drawn": len(sample.texts)}
            found[sample.of] = {**sizes, **shares}
            for match, flags in (("equal", equal), ("contained", contained & ~equal)):
                for row in np.flatnonzero(flags)[: c.settings.examples]:
                    part, record = overlap.place[here][row].tolist()
                    example = {"of": sample.of, "match": match, "id": sample.ids[row]}
                    example["text"] = sample.texts[row][:_SHOWN_CHARACTERS]
                    place = {"corpus_part": parts[part], "record_from_0": record}
                    examples.append({**example, **place})
        write_json(c.out / OVERLAP_FILE, found)
        lines = (json.dumps(example) + "\n" for example in examples)
        atomic_write(c.out / MATCHES_FILE, "".join(lines))
        return {each.of: found[each.of]["contained"]["share"] for each in samples}


@dataclasses.dataclass(frozen=True)
class _Sample:
    """The "queries" or "documents" drawn, each once; `draws` are numbers of them."""

    of: str
    draws: list[np.ndarray]
    ids: list[str]
    texts: list[str]


def _samples(c: Context) -> Iterator[_Sample]:
    s, beir = c.settings, c.given["data"].beir()
    judged = beir.qrels(s.split)
    kinds = {
        "queries": lambda: (row for row in beir.read_queries() if row[0] in judged),
        "documents": lambda: ((d.id, d.content) for d in beir.documents()),
    }
    for kind, read in kinds.items():
        total = sum(1 for _ in read())
        draws = evaluation.draw_samples(total, s.draw_size, s.draws, s.seed)
        wanted = np.unique(np.concatenate(draws))
        numbers = set(wanted.tolist())
        rows = [row for number, row in enumerate(read()) if number in numbers]
        draws = [np.searchsorted(wanted, each) for each in draws]
        yield _Sample(kind, draws, *map(list, zip(*rows)))


STAGE = Overlap()
