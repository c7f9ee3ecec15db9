r"""Measure how much of the data occurs in a corpus used for pretraining.

    tfdpsq overlap --workdir=WORKDIR/private/overlap \
        --config.data=BEIR --config.corpus='("TEXTS",)'

Draws queries and documents several times, and searches for all of them while it streams
the corpus once (paper, §5.2.3; `evaluation.overlap` has the definitions). Writes
`overlap.json`, shares with intervals, and `matches.jsonl`, examples.

The results for queries are computed from private ones and covered by no ε, and the
examples are private queries. Documents are drawn from the whole corpus, whichever have
queries, so their results are public.

The corpus's parts (files, or shards of a TFDS split) are dealt into `shards`. The
result does not depend on the division.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tqdm

from tfdpsq import evaluation, words
from tfdpsq.data.io import atomic_write, write_json
from tfdpsq.run.common.text_corpus import CorpusPart, Texts, corpus_parts
from tfdpsq.run.frame import runner, settings, shards
from tfdpsq.run.frame.artefacts import Corpus, Pairs
from tfdpsq.run.frame.places import Privacy
from tfdpsq.run.frame.runner import Context, Given
from tfdpsq.run.frame.settings import Rule, path, setting
from tfdpsq.validation import InputError

OVERLAP_FILE = "overlap.json"
MATCHES_FILE = "matches.jsonl"
QUERIES, DOCUMENTS = _KINDS = ("queries", "documents")
RULES = {
    "equal": "a record of the corpus has the same words and no others",
    "contained": "a record has all its words in a row",
    "interval": "Clopper-Pearson, of all draws together",
}
_EXTENSION = "npz"
_SHOWN_CHARACTERS = 500


@dataclasses.dataclass(frozen=True)
class _Sample:
    """A sample of one kind of text.

    Attributes:
      population: number of texts it is drawn from.
      draws: indices into `rows`, per draw.
      rows: (id, text) of the texts drawn, each once.
    """

    population: int
    draws: list[np.ndarray]
    rows: list[tuple[str, str]]


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
        confidence: float = setting(0.95, gt=0, lt=1)
        examples: int = setting(5, ge=0, help="of each kind of match")
        seed: int = setting(0, ge=0, le=settings.SEED)
        strict: bool = setting(False, help="refuse reads that no ε covers")
        shards: int = setting(
            64, ge=1, le=100_000, speed=True, help="at most; each has at least a part"
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
        if QUERIES not in s.texts:
            return []
        read = f"which queries of split {s.split!r} occur in a public corpus"
        return [(read, f"{OVERLAP_FILE} and {MATCHES_FILE}")]

    def also(self, c: Context) -> dict[str, str]:
        """The queries are an input, too."""
        if QUERIES not in c.settings.texts:
            return {}
        pairs = Pairs.open(c.given["data"].path, "data")
        return {"queries": pairs.fingerprint(c.place.private)}

    def parts(self, c: Context) -> list[list[CorpusPart]]:
        """Deals the corpus's parts into shards."""
        parts = corpus_parts([each.path for each in c.given["corpus"]])
        count = min(c.settings.shards, len(parts))
        cuts = [len(parts) * n // count for n in range(count + 1)]
        return [parts[a:b] for a, b in zip(cuts, cuts[1:])]

    def start(self, c: Context) -> shards.Make:
        """Draws the sample."""
        samples = _samples(c)

        def make(index: int, out: shards.ShardWriter) -> None:
            scan = _scan(samples)
            for part in c.parts[index]:
                records = part.records(c.settings.field)
                scan.scan(tqdm.tqdm(records, part.name, unit="record", leave=False))
            with open(out.path(_EXTENSION), "wb") as file:
                np.savez(file, **scan.state())
            out.count = scan.records

        return make

    def merge(self, c: Context, made: shards.Shards) -> dict[str, Any]:
        """Writes shares and examples."""
        s, samples = c.settings, _samples(c)
        parts = [part.name for shard in c.parts for part in shard]
        scan = _scan(samples)
        for file in made.paths(_EXTENSION):
            scan.merge(np.load(file))
        if not scan.records:
            raise InputError(
                f"corpus is {s.corpus}: its {len(parts)} parts hold no record. Give "
                "the files that hold its texts."
            )
        overlap = scan.result()
        found: dict[str, Any] = {
            "split": s.split,
            "rules": RULES,
            "words": words.RULES,
            "corpus": {
                "given": list(s.corpus),
                "parts": len(parts),
                "records": overlap.records,
                "bytes": overlap.corpus_bytes,
            },
        }
        examples: list[dict[str, Any]] = []
        first = 0
        for kind, sample in samples.items():
            here = slice(first, first := first + len(sample.rows))
            found[kind] = _summary(sample, overlap, here, s)
            examples += _examples(kind, sample, overlap, here, parts, s.examples)
        write_json(c.out / OVERLAP_FILE, found)
        lines = (json.dumps(example, sort_keys=True) + "\n" for example in examples)
        atomic_write(c.out / MATCHES_FILE, "".join(lines))
        return {kind: found[kind]["contained"]["share"] for kind in samples}


def _samples(c: Context) -> dict[str, _Sample]:
    """Draws texts of each kind."""
    s, beir, found = c.settings, c.given["data"].beir(), {}
    draw = functools.partial(_drawn, s.draw_size, s.draws, s.seed)
    for kind in s.texts:
        if kind == QUERIES:
            found[kind] = draw(*beir.judged_queries(s.split))
        else:
            total = sum(1 for _ in beir.documents())
            found[kind] = draw(total, ((d.id, d.content) for d in beir.documents()))
    return found


def _drawn(
    size: int, draws: int, seed: int, total: int, rows: Iterator[tuple[str, str]]
) -> _Sample:
    drawn = evaluation.draw_samples(total, size, draws, seed)
    wanted = np.unique(np.concatenate(drawn))
    kept = set(wanted.tolist())
    chosen = [row for number, row in enumerate(rows) if number in kept]
    return _Sample(total, [np.searchsorted(wanted, each) for each in drawn], chosen)


def _scan(samples: Mapping[str, _Sample]) -> evaluation.OverlapScan:
    return evaluation.OverlapScan(
        [text for sample in samples.values() for _, text in sample.rows]
    )


def _summary(
    sample: _Sample, overlap: evaluation.Overlap, here: slice, s: Any
) -> dict[str, Any]:
    """Returns the shares of one kind of text, which `here` has in the scan."""
    summary: dict[str, Any] = {
        "population": sample.population,
        "draw_size": len(sample.draws[0]),
        "seeds": [[s.seed, number] for number in range(len(sample.draws))],
        "distinct_drawn": len(sample.rows),
    }
    for name in ("equal", "contained"):
        flags = getattr(overlap, name)[here]
        in_draws = [flags[numbers] for numbers in sample.draws]
        summary[name] = evaluation.share_in_draws(in_draws, s.confidence)
    return summary


def _examples(
    kind: str,
    sample: _Sample,
    overlap: evaluation.Overlap,
    here: slice,
    parts: Sequence[str],
    most: int,
) -> Iterator[dict[str, Any]]:
    """Yields some texts of each kind of match, each under its strongest kind."""
    sorts = {"equal": overlap.equal, "contained": overlap.contained & ~overlap.equal}
    for name, flags in sorts.items():
        for row in np.flatnonzero(flags[here])[:most]:
            part, record = overlap.place[here][row].tolist()
            yield {
                "of": kind,
                "id": sample.rows[row][0],
                "match": name,
                "corpus_part": parts[part],
                "record_from_0": record,
                "text": sample.rows[row][1][:_SHOWN_CHARACTERS],
            }


STAGE = Overlap()
