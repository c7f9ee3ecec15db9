r"""Measure how much of the data occurs in a corpus used for pretraining.

    python -m tfdpsq.run.overlap --workdir=WORKDIR/private/overlap \
        --config.data=BEIR --config.corpus=TEXTS

Draws queries and documents several times, and searches for all of them while it streams
the corpus once (paper, §5.2.3; `evaluation.overlap` has the definitions). Writes
`overlap.json`, shares with intervals, and `matches.jsonl`, examples.

The results for queries are computed from private ones and covered by no ε, and the
examples are private queries: the output belongs under `private/`. Documents are drawn
from the whole corpus, whichever have queries, so their results are public.

The corpus's parts (files, or shards of a TFDS split) are dealt into `shards`, which
several commands can share (`--num_shards=4 --shard_index=0`, ...), or workers of Apache
Beam (`--beam --runner=...`); see `sharded_stages`. The result does not depend on the
division, and an interrupted command resumes after the last finished shard. Unmerged
shards reveal as much of queries as the output.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import ml_collections
import numpy as np
import tensorflow as tf
from absl import logging
from tqdm import tqdm

from tfdpsq import evaluation, validation, words
from tfdpsq.data.io import atomic_write, write_json
from tfdpsq.run.core import acting, command, records, releases, settings, sources
from tfdpsq.run.passes import passes, sharded_stages
from tfdpsq.run.passes.shards import ShardDirectory, ShardWriter
from tfdpsq.run.passes.text_corpus import (
    CorpusPart,
    corpus_parts,
    parts_fingerprint,
)

OVERLAP_FILE = "overlap.json"
MATCHES_FILE = "matches.jsonl"
QUERIES = "queries"
DOCUMENTS = "documents"
RULES = {
    "equal": "a record of the corpus has the same words and no others",
    "contained": "a record has all its words in a row",
    "interval": "Clopper-Pearson, of all draws together",
}
_STATE = "npz"
_SHOWN_CHARACTERS = 500


@dataclasses.dataclass(frozen=True)
class _Sample:
    """A sample of one kind of text.

    Attributes:
      population: number of texts it is drawn from.
      draws: indices into `ids`, per draw.
      ids: of the texts drawn, each once.
      texts: of the same.
    """

    population: int
    draws: list[np.ndarray]
    ids: list[str]
    texts: list[str]


_KINDS = settings.Text("", (QUERIES, DOCUMENTS))
SETTINGS: settings.Declaration = {
    "data": settings.Text(sources.PYDOCS, required=True),
    "split": settings.Text("train", required=True),
    "texts": settings.Several((QUERIES, DOCUMENTS), _KINDS),
    "corpus": settings.Several((), settings.Text("", required=True)),
    "field": settings.Text("text", required=True),
    "draws": settings.Integer(3, 1, 10000),
    "draw_size": settings.Integer(10000),
    "confidence": settings.Number(0.95, 0, 1, low_open=True, high_open=True),
    "examples": settings.Integer(5, 0, 1000000),
    # At most so many; each holds at least one part.
    "shards": settings.Integer(64, 1, 100000),
    "seed": settings.Integer(0, 0, settings.SEED),
    "strict": settings.Flag(False),
    "private_directory": settings.Text(""),
}


def default_config() -> ml_collections.ConfigDict:
    """Returns the stage's settings.

    `texts` names the texts to search for: queries, documents or both. `corpus` are
    files, directories, patterns or "tfds:NAME#SPLIT"; `field` is the column of tables
    that holds the text (see `passes.text_corpus`).
    """
    return settings.default_config(SETTINGS)


def run(
    config: ml_collections.ConfigDict,
    directory: sharded_stages.Place,
    launch: passes.Launch = passes.ALONE,
) -> dict[str, Any] | None:
    """Runs the stage into `directory` unless it is finished there.

    `launch` has the shards of this process. Returns what `sharded_stages.run_stage`
    returns.

    Raises:
      InputError: bad settings, a corpus that is missing or empty, or queries in strict
        mode.
      DataError: malformed data, here or in the corpus.
    """
    acting.check(config, SETTINGS, ())
    _check(config)
    private_queries = QUERIES in config.texts
    output = releases.Output(
        directory,
        releases.PRIVATE if private_queries else releases.PUBLIC,
        "private queries that occur in a public corpus",
        config.private_directory,
    )
    directory = output.directory
    private = releases.private_directory(directory, config.private_directory)
    parts = _parts(config)
    if output.guarantee != releases.PRIVATE:
        _require_public(parts)
    inputs = {"corpus": parts_fingerprint(parts)}
    if private_queries:
        records.private_reads(private, config.strict).record(
            f"which queries of split {config.split!r} occur in a public corpus",
            f"{directory.name}/{OVERLAP_FILE} and {MATCHES_FILE}",
        )
        inputs["data"] = sources.source_fingerprint(config.data, private)
    else:
        inputs["data"] = sources.corpus_fingerprint(config.data)
    count = max(1, min(config.shards, len(parts)))
    start = functools.partial(
        start_worker, config.copy_and_resolve_references(), inputs["corpus"], count
    )
    return sharded_stages.run_stage(
        output,
        config,
        inputs,
        passes.Work("overlap", count, start),
        lambda out, shards: _make(config, parts, shards, out),
        launch,
    )


def _require_public(parts: Sequence[CorpusPart]) -> None:
    """Refuses a private corpus: matches would reveal its texts."""
    for part in parts:
        problem = sources.why_not_public(part.place)
        if "/beir_directory/" in part.place:
            # `tfds_builder` keeps no record of what the directory was.
            problem = "is of a BEIR directory, perhaps of private queries"
        if problem:
            raise validation.InputError(
                f"corpus has {part.name}, which {problem}. What occurs in it would "
                "tell of private queries: give public files."
            )


def start_worker(
    config: ml_collections.ConfigDict, corpus: str, count: int
) -> passes.MakeShard:
    """Draws the sample; returns a function that searches a shard's parts for it.

    `corpus` is the fingerprint of its parts, `count` the number of shards.

    Raises:
      InputError: the corpus was changed.
    """
    parts = _parts(config)
    if parts_fingerprint(parts) != corpus:
        raise validation.InputError(
            f"the corpus {', '.join(config.corpus)} was changed since the command "
            "started. Run it again when no program writes to the corpus."
        )
    samples = _samples(config)

    def make(index: int, out: ShardWriter) -> None:
        scan = _scan(samples)
        started = time.monotonic()
        own = slice(len(parts) * index // count, len(parts) * (index + 1) // count)
        for part in parts[own]:
            scan.scan(tqdm(part.records(), part.name, unit="record", leave=False))
        seconds = max(time.monotonic() - started, 1e-9)
        logging.info(
            "looked at %d records, %.1f MB of text, in %d parts; %.1f MB/s",
            scan.records,
            scan.corpus_bytes / 1e6,
            scan.scans,
            scan.corpus_bytes / 1e6 / seconds,
        )
        state = io.BytesIO()  # an archive needs a file that can seek
        np.savez(state, **scan.state())
        with tf.io.gfile.GFile(out.path(_STATE), "wb") as file:
            file.write(state.getvalue())
        out.count = scan.records

    return make


def _check(config: ml_collections.ConfigDict) -> None:
    if not config.texts:
        raise validation.InputError(
            f"texts is empty; name {QUERIES!r}, {DOCUMENTS!r} or both."
        )


def _parts(config: ml_collections.ConfigDict) -> list[CorpusPart]:
    return corpus_parts(tuple(config.corpus), config.field)


def _samples(config: ml_collections.ConfigDict) -> dict[str, _Sample]:
    beir = sources.open_beir(config.data)
    draw = functools.partial(
        _drawn, size=config.draw_size, draws=config.draws, seed=config.seed
    )
    found = {}
    for kind in config.texts:
        if kind == QUERIES:
            judged = beir.qrels(config.split)
            texts = sorted(query for query in beir.read_queries() if query[0] in judged)
            found[kind] = draw(len(texts), iter(texts))
        else:
            total = sum(1 for _ in beir.documents())
            found[kind] = draw(total, ((d.id, d.content) for d in beir.documents()))
    return found


def _scan(samples: dict[str, _Sample]) -> evaluation.OverlapScan:
    texts = [text for sample in samples.values() for text in sample.texts]
    return evaluation.OverlapScan(texts)


def _make(
    config: ml_collections.ConfigDict,
    parts: list[CorpusPart],
    shards: ShardDirectory,
    out: pathlib.Path,
) -> dict[str, Any]:
    samples = _samples(config)
    scan = _scan(samples)
    for index in range(shards.spec.shards):
        with shards.reading(index):
            with tf.io.gfile.GFile(shards.path(index, _STATE), "rb") as file:
                scan.merge(np.load(io.BytesIO(file.read())))
    if not scan.records:
        raise validation.InputError(
            f"the corpus {', '.join(config.corpus)} is empty: its {len(parts)} parts "
            "hold no record. Give the files that hold its texts, and their format."
        )
    overlap = scan.result()
    found: dict[str, Any] = {
        "split": config.split,
        "rules": RULES,
        "words": words.RULES,
        "corpus": {
            "given": list(config.corpus),
            "parts": len(parts),
            "records": overlap.records,
            "bytes": overlap.corpus_bytes,
        },
    }
    examples: list[dict[str, Any]] = []
    first = 0
    for kind, sample in samples.items():
        here = np.arange(first, first + len(sample.texts))
        first += len(sample.texts)
        found[kind] = _summary(sample, overlap, here, config.seed, config.confidence)
        examples.extend(_examples(kind, sample, overlap, here, parts, config.examples))
    write_json(out / OVERLAP_FILE, found)
    atomic_write(
        out / MATCHES_FILE,
        "".join(json.dumps(example, sort_keys=True) + "\n" for example in examples),
    )
    return {kind: found[kind]["contained"]["share"] for kind in samples}


def _drawn(
    total: int, rows: Iterator[tuple[str, str]], size: int, draws: int, seed: int
) -> _Sample:
    drawn = evaluation.draw_samples(total, size, draws, seed)
    wanted = np.unique(np.concatenate(drawn))
    kept = set(wanted.tolist())
    chosen = [row for number, row in enumerate(rows) if number in kept]
    return _Sample(
        total,
        [np.asarray(np.searchsorted(wanted, numbers)) for numbers in drawn],
        [row[0] for row in chosen],
        [row[1] for row in chosen],
    )


def _summary(
    sample: _Sample,
    overlap: evaluation.Overlap,
    here: np.ndarray,
    seed: int,
    confidence: float,
) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "population": sample.population,
        "draw_size": len(sample.draws[0]),
        "seeds": [[seed, number] for number in range(len(sample.draws))],
        "distinct_drawn": len(sample.ids),
    }
    kinds = {"equal": overlap.equal, "contained": overlap.contained}
    for name, flags in kinds.items():
        summary[name] = evaluation.share_in_draws(
            [flags[here[numbers]] for numbers in sample.draws], confidence
        )
    return summary


def _examples(
    kind: str,
    sample: _Sample,
    overlap: evaluation.Overlap,
    here: np.ndarray,
    parts: list[CorpusPart],
    most: int,
) -> Iterator[dict[str, Any]]:
    """Yields some texts of each kind of match, each under its strongest kind."""
    sorts = {
        "equal": overlap.equal,
        "contained": overlap.contained & ~overlap.equal,
    }
    for name, flags in sorts.items():
        for row in np.flatnonzero(flags[here])[:most]:
            at = here[row]
            part, record = overlap.place[at].tolist()
            yield {
                "of": kind,
                "id": sample.ids[row],
                "match": name,
                "corpus_part": parts[part].name,
                "record_from_0": record,
                "text": sample.texts[row][:_SHOWN_CHARACTERS],
            }


if __name__ == "__main__":
    command.main(run, sharded=True)
