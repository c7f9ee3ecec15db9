r"""Measure how much of the data occurs in a corpus used for pretraining.

    tfdpsq overlap --workdir=WORKDIR/private/overlap \
        --config.data=BEIR --config.corpus='("TEXTS",)'

Draws queries and documents several times, and searches for all of them while it streams
the corpus once (paper, §5.2.3; `evaluation.overlap` says what "equal" and "contained"
are). Writes `overlap.json`, shares with Clopper-Pearson intervals.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tqdm

from tfdpsq import evaluation
from tfdpsq.data.io import write_json
from tfdpsq.run.common.kinds import Pairs
from tfdpsq.run.common.text_corpus import Texts, read_texts
from tfdpsq.run.frame import runner, settings, shards
from tfdpsq.run.frame.runner import Context, Given
from tfdpsq.run.frame.settings import path, setting
from tfdpsq.validation import InputError

OVERLAP_FILE = "overlap.json"
_EXTENSION = "npz"


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
        return [(read, OVERLAP_FILE)]

    def parts(self, c: Context) -> list[list[str]]:
        """Deals the corpus's parts into shards."""
        parts = [part for corpus in c.given["corpus"] for part in corpus.parts()]
        count = min(c.settings.shards, len(parts))
        cuts = [len(parts) * n // count for n in range(count + 1)]
        return [parts[a:b] for a, b in zip(cuts, cuts[1:])]

    def start(self, c: Context) -> shards.Make:
        """Draws the sample."""
        texts = [text for _, texts in _samples(c).values() for text in texts]

        def make(index: int, out: shards.ShardWriter) -> None:
            scan = evaluation.OverlapScan(texts)
            for part in c.parts[index]:
                found = read_texts(part, c.settings.field)
                scan.scan(tqdm.tqdm(found, part, unit="record", leave=False))
            with open(out.path(_EXTENSION), "wb") as file:
                np.savez(file, equal=scan.equal, contained=scan.contained)
            out.count, out.result["bytes"] = scan.records, scan.corpus_bytes

        return make

    def merge(self, c: Context, made: shards.Shards) -> dict[str, Any]:
        """Writes the shares."""
        marks = [made.mark(index) or {} for index in range(made.total)]
        sizes = {
            "records": sum(mark["count"] for mark in marks),
            "bytes": sum(mark["result"]["bytes"] for mark in marks),
        }
        if not sizes["records"]:
            raise InputError(f"corpus is {c.settings.corpus}, which holds no text.")
        found: dict[str, Any] = {"corpus": {"parts": sum(map(len, c.parts)), **sizes}}
        scans, samples, first = [*map(np.load, made.paths(_EXTENSION))], _samples(c), 0
        for kind, (draws, texts) in samples.items():
            here = slice(first, first := first + len(texts))
            found[kind] = {"draw_size": len(draws[0]), "drawn": len(texts)}
            for name in ("equal", "contained"):
                flags = np.any([scan[name] for scan in scans], axis=0)[here]
                share = evaluation.share_in_draws([flags[each] for each in draws])
                found[kind][name] = share
        write_json(c.out / OVERLAP_FILE, found)
        return {kind: found[kind]["contained"]["share"] for kind in samples}


def _samples(c: Context) -> dict[str, tuple[list[np.ndarray], list[str]]]:
    """Returns numbers of the texts in each draw, and the texts, each once, by kind."""
    s, beir = c.settings, c.given["data"].beir()
    judged, found = beir.qrels(s.split), {}
    for kind, read in {
        "queries": lambda: (
            text for name, text in beir.read_queries() if name in judged
        ),
        "documents": lambda: (document.content for document in beir.documents()),
    }.items():
        total = sum(1 for _ in read())
        draws = evaluation.draw_samples(total, s.draw_size, s.draws, s.seed)
        wanted = np.unique(np.concatenate(draws))
        numbers = set(wanted.tolist())
        texts = [text for number, text in enumerate(read()) if number in numbers]
        found[kind] = [np.searchsorted(wanted, each) for each in draws], texts
    return found


STAGE = Overlap()
