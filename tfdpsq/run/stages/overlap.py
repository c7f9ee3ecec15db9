r"""Measure how much of the data occurs in a corpus used for pretraining.

    tfdpsq overlap --workdir=WORKDIR/private/overlap \
        --config.data=BEIR --config.corpus='("TEXTS",)'

Draws queries and documents several times, and searches for all of them while it streams
the corpus once (paper, §5.2.3; `evaluation.overlap` says what "equal" and "contained"
are). Writes `overlap.json`, shares with Clopper-Pearson intervals, and `matches.jsonl`,
examples.

The results for queries are computed from private ones and covered by no ε, and the
examples are private queries. Documents are drawn from the whole corpus, whichever have
queries, so their results are public.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tqdm

from tfdpsq import evaluation
from tfdpsq.data.io import atomic_write, write_json
from tfdpsq.run.common.text_corpus import Texts, read_texts
from tfdpsq.run.frame import runner, settings, shards
from tfdpsq.run.frame.artefacts import Corpus, Pairs
from tfdpsq.run.frame.places import Privacy
from tfdpsq.run.frame.runner import Context, Given
from tfdpsq.run.frame.settings import Rule, path, setting
from tfdpsq.validation import InputError

OVERLAP_FILE = "overlap.json"
MATCHES_FILE = "matches.jsonl"
QUERIES, DOCUMENTS = _KINDS = ("queries", "documents")
_EXTENSION = "npz"
_SHOWN_CHARACTERS = 500


class Overlap(runner.ShardedStage):
    """Searches for a sample of texts in a corpus."""

    name = "overlap"

    @dataclasses.dataclass(frozen=True)
    class Settings(settings.Settings):
        """Settings of `overlap`."""

        data: str = path(Corpus, "pydocs")
        texts: tuple[str, ...] = setting(
            _KINDS, of=Rule(choices=_KINDS), help="what to search for"
        )
        split: str = setting("train", help="of the queries")
        corpus: tuple[str, ...] = path(Texts, ())
        field: str = setting("text", help="column of a table that holds the text")
        draws: int = setting(3, ge=1, le=10_000)
        draw_size: int = setting(10_000, ge=1)
        examples: int = setting(5, ge=0, help="of each kind of match")
        seed: int = setting(0, ge=0, le=settings.SEED)
        shards: int = setting(
            64, ge=1, le=100_000, speed=True, help="at most; each has at least a file"
        )

    def check(self, s: Settings, given: Given) -> None:
        """Refuses a search for nothing, or in nothing."""
        for name in ("texts", "corpus"):
            if not getattr(s, name):
                raise InputError(f"{name} is empty. Name at least one.")

    def privacy(self, s: Settings, given: Given) -> Privacy:
        """With queries, or anything private among the corpus, private."""
        return Privacy.PRIVATE if QUERIES in s.texts else given.privacy()

    def reads(self, s: Settings, given: Given) -> list[tuple[str, str]]:
        """Which private queries are public texts."""
        read = f"which queries of split {s.split!r} occur in a public corpus"
        where = f"{OVERLAP_FILE} and {MATCHES_FILE}"
        return [(read, where)] if QUERIES in s.texts else []

    def also(self, c: Context) -> dict[str, str]:
        """The queries are an input, too."""
        if QUERIES not in c.settings.texts:
            return {}
        pairs = Pairs.open(c.given["data"].path, "data")
        return {"queries": pairs.fingerprint(c.place.private)}

    def parts(self, c: Context) -> list[list[str]]:
        """Deals the corpus's parts into shards."""
        parts = [part for corpus in c.given["corpus"] for part in corpus.parts()]
        count = min(c.settings.shards, len(parts))
        cuts = [len(parts) * n // count for n in range(count + 1)]
        return [parts[a:b] for a, b in zip(cuts, cuts[1:])]

    def start(self, c: Context) -> shards.Make:
        """Draws the sample."""
        texts = [text for _, rows in _samples(c).values() for _, text in rows]

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
        samples = _samples(c)
        scan = evaluation.OverlapScan(
            [text for _, rows in samples.values() for _, text in rows]
        )
        for file in made.paths(_EXTENSION):
            scan.merge(np.load(file))
        overlap, parts = scan.result(), [part for shard in c.parts for part in shard]
        if not overlap.records:
            raise InputError(f"corpus is {c.settings.corpus}, which holds no text.")
        sizes = {"records": overlap.records, "bytes": overlap.corpus_bytes}
        found: dict[str, Any] = {"corpus": {"parts": len(parts), **sizes}}
        examples: list[dict[str, Any]] = []
        first = 0
        for kind, (draws, rows) in samples.items():
            here = slice(first, first := first + len(rows))
            equal, contained = overlap.equal[here], overlap.contained[here]
            found[kind] = {
                "draw_size": len(draws[0]),
                "distinct_drawn": len(rows),
                "equal": evaluation.share_in_draws([equal[each] for each in draws]),
                "contained": evaluation.share_in_draws(
                    [contained[each] for each in draws]
                ),
            }
            for match, flags in (("equal", equal), ("contained", contained & ~equal)):
                for row in np.flatnonzero(flags)[: c.settings.examples]:
                    part, record = overlap.place[here][row].tolist()
                    example = {"of": kind, "match": match, "id": rows[row][0]}
                    example["text"] = rows[row][1][:_SHOWN_CHARACTERS]
                    place = {"corpus_part": parts[part], "record_from_0": record}
                    examples.append({**example, **place})
        write_json(c.out / OVERLAP_FILE, found)
        lines = (json.dumps(example) + "\n" for example in examples)
        atomic_write(c.out / MATCHES_FILE, "".join(lines))
        return {kind: found[kind]["contained"]["share"] for kind in samples}


def _samples(
    c: Context,
) -> dict[str, tuple[Sequence[np.ndarray], Sequence[tuple[str, str]]]]:
    """Draws texts of each kind.

    Returns:
      Kind -> the draws, each indices into rows; and the rows drawn, (id, text).
    """
    s, beir, found = c.settings, c.given["data"].beir(), {}
    judged = beir.qrels(s.split) if QUERIES in s.texts else {}

    def read(kind: str) -> Iterator[tuple[str, str]]:
        if kind == DOCUMENTS:
            return ((document.id, document.content) for document in beir.documents())
        return (query for query in beir.read_queries() if query[0] in judged)

    for kind in s.texts:
        total = sum(1 for _ in read(kind))
        draws = evaluation.draw_samples(total, s.draw_size, s.draws, s.seed)
        wanted = np.unique(np.concatenate(draws))
        kept = set(wanted.tolist())
        rows = [row for number, row in enumerate(read(kind)) if number in kept]
        found[kind] = [np.searchsorted(wanted, each) for each in draws], rows
    return found


STAGE = Overlap()
