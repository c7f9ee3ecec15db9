"""Stage `overlap`: how much of the data stands in a corpus used for pretraining.

    python -m tfdpsq.run.overlap --config=configs/overlap.py --workdir=DIR

Draws queries and documents several times, and looks for all of them while it streams
the corpus once (paper, §5.2.3; `evaluation.overlap` has the definitions). Writes
`overlap.json`, shares with intervals, and `matches.jsonl`, examples.

What it says of queries is computed from private ones and covered by no ε, and the
examples are private queries: the output belongs under `private/`. Documents are drawn
from all there are, whichever have queries, so what it says of them is public.

Interrupted, the same command goes on after the last part of the corpus (a file, or a
shard) that was finished and saved.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import time
import zipfile
from collections.abc import Iterator
from typing import Any

import ml_collections
import numpy as np
from absl import logging
from tqdm import tqdm

from tfdpsq import evaluation, validation
from tfdpsq.data import BeirDirectory, CorpusPart, atomic_write, corpus_parts
from tfdpsq.data.files import atomic_file
from tfdpsq.data.text_corpus import parts_fingerprint
from tfdpsq.run import command, private_training, sources, workdir

OVERLAP_FILE = "overlap.json"
MATCHES_FILE = "matches.jsonl"
STATE_FILE = "overlap.npz"
QUERIES = "queries"
DOCUMENTS = "documents"
RULES = {
    "equal": "a record of the corpus has the same words and no others",
    "contained": "a record has all its words in a row",
    "containment": "share of its n-grams found anywhere in the corpus; a text of fewer "
    "than n words is one n-gram",
    "coverage": "share of its words that lie in one of these n-grams",
    "near": "coverage of at least near_threshold",
    "interval": "Clopper-Pearson, of all draws together",
}
_SAVE_AFTER_SECONDS = 60
_SHOWN_CHARACTERS = 500


@dataclasses.dataclass(frozen=True)
class _Sample:
    """What was drawn of one kind of text.

    Attributes:
      population: how many there are.
      draws: of each draw, indices into `ids`.
      ids: of the texts drawn, each once.
      texts: theirs.
    """

    population: int
    draws: list[np.ndarray]
    ids: list[str]
    texts: list[str]


def default_config() -> ml_collections.ConfigDict:
    """The stage's settings.

    `texts` says what is looked for: queries, documents or both. `corpus` are files,
    directories, patterns or "tfds:NAME"; `format`, `field`, `corpus_split` and
    `data_dir` say how to read them (see `data.text_corpus`).
    """
    return ml_collections.ConfigDict(
        {
            "data": sources.PYDOCS,
            "split": "train",
            "texts": (QUERIES, DOCUMENTS),
            "corpus": (),
            "format": "",
            "field": "text",
            "corpus_split": "train",
            "data_dir": "",
            "draws": 3,
            "draw_size": 10_000,
            "n": 8,
            "near": 0.8,
            "confidence": 0.95,
            "examples": 5,
            "threads": 1,
            "seed": 0,
            "strict": False,
            "private_directory": "",
        }
    )


def run(config: ml_collections.ConfigDict, directory: pathlib.Path) -> dict:
    """Runs the stage into `directory` unless it is finished there.

    Raises:
      InputError: bad settings, a corpus that is not there or holds nothing, or
        queries in strict mode.
      DataError: malformed data, here or in the corpus.
    """
    private = private_training.private_directory(config, directory)
    _check(config)
    parts = corpus_parts(
        tuple(config.corpus),
        config.format,
        config.field,
        config.corpus_split,
        config.data_dir,
    )
    inputs = {"corpus": parts_fingerprint(parts)}
    if QUERIES in config.texts:
        private_training.reads_of(config, private).record(
            f"which queries of split {config.split!r} stand in a public corpus",
            f"{directory.name}/{OVERLAP_FILE} and {MATCHES_FILE}",
        )
        inputs["data"] = sources.source_fingerprint(config.data, private)
    else:
        inputs["data"] = sources.corpus_fingerprint(config.data)
    saved = private_training.run_directory(config, directory) / STATE_FILE
    of = json.dumps([workdir.plain(config), inputs], sort_keys=True)
    stage = workdir.run_stage(
        directory,
        config,
        inputs,
        lambda out: _make(config, parts, saved, of, out),
    )
    saved.unlink(missing_ok=True)
    return stage


def _check(config: ml_collections.ConfigDict) -> None:
    if not config.texts:
        raise validation.InputError(
            f"texts is empty; name {QUERIES!r}, {DOCUMENTS!r} or both."
        )
    for kind in config.texts:
        validation.one_of("texts", kind, (QUERIES, DOCUMENTS))
    for name in ("draws", "draw_size", "n", "threads"):
        validation.positive_integer(name, config[name])
    validation.in_range("near", config.near, 0, 1, low_open=True)
    validation.in_range(
        "confidence", config.confidence, 0, 1, low_open=True, high_open=True
    )
    validation.in_range("examples", config.examples, 0, float("inf"))


def _make(
    config: ml_collections.ConfigDict,
    parts: list[CorpusPart],
    saved: pathlib.Path,
    of: str,
    out: pathlib.Path,
) -> dict[str, Any]:
    beir = sources.open_beir(config.data)
    draws_of = {QUERIES: _queries, DOCUMENTS: _documents}
    samples = {kind: draws_of[kind](config, beir) for kind in config.texts}
    texts = [text for sample in samples.values() for text in sample.texts]
    scan = evaluation.OverlapScan(texts, config.n, config.threads)
    _scan_all(scan, parts, saved, hashlib.sha256(of.encode()).hexdigest())
    if not scan.records:
        raise validation.InputError(
            f"the corpus {', '.join(config.corpus)} holds no record in its "
            f"{len(parts)} parts; against nothing, nothing overlaps. Give the files "
            "that hold its texts, and their format."
        )
    overlap = scan.result()
    found: dict[str, Any] = {
        "split": config.split,
        "rules": RULES,
        "normalisation": evaluation.NORMALISATION,
        "n": config.n,
        "near_threshold": config.near,
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
        found[kind] = _summary(config, sample, overlap, here)
        examples.extend(_examples(config, kind, sample, overlap, here, parts))
    atomic_write(
        out / OVERLAP_FILE,
        json.dumps(found, indent=2, sort_keys=True, allow_nan=False) + "\n",
    )
    atomic_write(
        out / MATCHES_FILE,
        "".join(json.dumps(example, sort_keys=True) + "\n" for example in examples),
    )
    return {kind: found[kind]["contained"]["share"] for kind in samples}


def _queries(config: ml_collections.ConfigDict, beir: BeirDirectory) -> _Sample:
    judged = beir.qrels(config.split)
    queries = sorted((q, text) for q, text in beir.queries().items() if q in judged)
    return _drawn(config, len(queries), iter(queries))


def _documents(config: ml_collections.ConfigDict, beir: BeirDirectory) -> _Sample:
    total = sum(1 for _ in beir.documents())
    return _drawn(config, total, ((d.id, d.content) for d in beir.documents()))


def _drawn(
    config: ml_collections.ConfigDict, total: int, rows: Iterator[tuple[str, str]]
) -> _Sample:
    draws = evaluation.draw_samples(total, config.draw_size, config.draws, config.seed)
    wanted = np.unique(np.concatenate(draws))
    kept = set(wanted.tolist())
    chosen = [row for number, row in enumerate(rows) if number in kept]
    return _Sample(
        total,
        [np.asarray(np.searchsorted(wanted, numbers)) for numbers in draws],
        [row[0] for row in chosen],
        [row[1] for row in chosen],
    )


def _scan_all(
    scan: evaluation.OverlapScan, parts: list[CorpusPart], saved: pathlib.Path, of: str
) -> None:
    """Scans the parts that were not scanned before, and saves where it is."""
    _restore(scan, saved, of)
    before, started = scan.corpus_bytes, time.monotonic()
    last = started
    for part in parts[scan.scans :]:
        records = tqdm(part.records(), part.name, unit="record", leave=False)
        scan.scan(records)
        if time.monotonic() - last > _SAVE_AFTER_SECONDS:
            with atomic_file(saved) as partial, partial.open("wb") as file:
                np.savez(file, of=of, **scan.state())
            last = time.monotonic()
    seconds = max(time.monotonic() - started, 1e-9)
    logging.info(
        "looked at %d records, %.1f MB of text, in %d parts; %.1f MB/s",
        scan.records,
        scan.corpus_bytes / 1e6,
        len(parts),
        (scan.corpus_bytes - before) / 1e6 / seconds,
    )


def _restore(scan: evaluation.OverlapScan, saved: pathlib.Path, of: str) -> None:
    if not saved.is_file():
        return
    try:
        with np.load(saved) as state:
            if str(state["of"]) == of:
                scan.restore({key: state[key] for key in state.files if key != "of"})
                logging.info("going on after %d parts", scan.scans)
    except (ValueError, KeyError, zipfile.BadZipFile) as error:
        raise validation.DataError(
            saved, f"is no state of a scan ({error})", "Delete it to start again"
        ) from error


def _summary(
    config: ml_collections.ConfigDict,
    sample: _Sample,
    overlap: evaluation.Overlap,
    here: np.ndarray,
) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "population": sample.population,
        "draw_size": len(sample.draws[0]),
        "seeds": [[config.seed, number] for number in range(len(sample.draws))],
        "distinct_drawn": len(sample.ids),
    }
    near = overlap.near(config.near)
    kinds = {"equal": overlap.equal, "contained": overlap.contained, "near": near}
    for name, flags in kinds.items():
        share = evaluation.share_in_draws(
            [flags[here[numbers]] for numbers in sample.draws], config.confidence
        )
        summary[name] = dataclasses.asdict(share)
    for name in ("containment", "coverage"):
        values = getattr(overlap, name)
        means = [float(values[here[numbers]].mean()) for numbers in sample.draws]
        summary[name] = {"mean": float(np.mean(means)), "by_draw": means}
    return summary


def _examples(
    config: ml_collections.ConfigDict,
    kind: str,
    sample: _Sample,
    overlap: evaluation.Overlap,
    here: np.ndarray,
    parts: list[CorpusPart],
) -> Iterator[dict[str, Any]]:
    """Some texts of each sort of match, the strongest that holds of them."""
    near = overlap.near(config.near)
    sorts = {
        "equal": overlap.equal,
        "contained": overlap.contained & ~overlap.equal,
        "near": near & ~overlap.contained,
    }
    for name, flags in sorts.items():
        for row in np.flatnonzero(flags[here])[: config.examples]:
            at = here[row]
            part, record = overlap.place[at].tolist()
            yield {
                "of": kind,
                "id": sample.ids[row],
                "match": name,
                "containment": float(overlap.containment[at]),
                "coverage": float(overlap.coverage[at]),
                # The n-grams of a near match have no place of their own.
                "corpus_part": parts[part].name if part >= 0 else None,
                "record_from_0": record if part >= 0 else None,
                "text": sample.texts[row][:_SHOWN_CHARACTERS],
            }


if __name__ == "__main__":
    command.main(run)
