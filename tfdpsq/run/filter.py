"""Stage `filter`: keep the better queries of a synthetic set, at no cost in privacy.

    python -m tfdpsq.run.filter --config=configs/filter.py --workdir=DIR

Whatever is computed from a synthetic set and public data has the set's guarantee, by
post-processing: so queries may be dropped for any reason that looks at these alone.
That is checked of everything a filter uses. A retriever that judges round trips must
be public, or trained on **this** guarantee: one trained on private pairs, protected by
another ε or by none, would carry into the set what the set's certificate does not
count, and is refused.

The filters, each off unless set, in this order:

    secrets     rows that hold a canary's secret (see `canaries`)
    words       fewer or more words than wanted
    known       too few of its words occur in the public documents: another language,
                or no language
    duplicates  a query that was there before, apart from case and white space
    round_trip  the query does not bring its own document back among the best (see
                `round_trip`)

Neither the corpus nor the set is in memory, but hashes: 8 bytes of a document, 16 of a
word of the corpus and of a query, where a filter looks at them.

Writes the set anew under `set/`, with its certificate, and `filter.json`: how many
queries each filter dropped.
"""

from __future__ import annotations

import functools
import itertools
import json
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import ml_collections
import numpy as np

from tfdpsq import evaluation, validation
from tfdpsq.data import (
    atomic_write,
    read_manifest,
    read_synthetic,
    write_synthetic,
)
from tfdpsq.data.records import SyntheticQuery
from tfdpsq.data.unique_ids import BATCH, SeenTexts
from tfdpsq.evaluation.text.ngrams import words
from tfdpsq.privacy import read_certificate
from tfdpsq.run.attacks import canary_set
from tfdpsq.run.core import command, layout, releases, settings, sources, workdir
from tfdpsq.run.search import round_trip

COUNTS_FILE = "filter.json"
# Queries in memory at a time; for each so many, a round trip reads the corpus twice.
_CHUNK = 32_768


SETTINGS: settings.Declaration = {
    "synthetic": settings.Text(""),
    "corpus": settings.Text(sources.PYDOCS, required=True),
    "canaries": settings.Text(""),
    "min_words": settings.Integer(0, 0),
    "max_words": settings.Integer(0, 0),
    "min_known": settings.Number(0.0, 0, 1),
    "duplicates": settings.Flag(False),
    "round_trip": {
        "retriever": settings.Text(""),
        "vocabulary": settings.Text(""),
        "k": settings.Integer(1, 1, 10**6),
    },
    "batch_size": settings.Integer(128),
    "shards": settings.Integer(4, 1, 100000),
}


def default_config() -> ml_collections.ConfigDict:
    """The stage's settings.

    `min_words` and `max_words` of 0 have no limit. `min_known` is the share of a
    query's words that the corpus must hold. `round_trip.retriever` is "bm25", a
    directory that `train_retriever` wrote, or "" for no such filter; `k` is how far
    down a query's own document may come. `canaries` is what the stage of that name
    wrote, if the generator was trained on it. Choosing these by results on private
    queries would be a private read.
    """
    return settings.default_config(SETTINGS)


def run(config: ml_collections.ConfigDict, directory: pathlib.Path) -> dict:
    """Runs the stage into `directory` unless it is finished there.

    Raises:
      InputError: bad settings, no set, a retriever with another guarantee, or nothing
        left.
      DataError: a damaged set.
    """
    settings.check(config, SETTINGS)
    _check(config)
    output = releases.Output(
        directory,
        releases.guarantee_of(
            read_certificate(config.synthetic), config.synthetic, config.canaries
        ),
        "a set that private queries had an unprotected part in",
    )
    manifest = read_manifest(config.synthetic)
    inputs = {
        "synthetic": manifest["fingerprint"],
        "corpus": sources.corpus_fingerprint(config.corpus),
    }
    judge = config.round_trip.retriever
    if judge and judge != round_trip.BM25:
        require_same_guarantee(judge, config.synthetic, manifest["certificate"])
        inputs["retriever"] = workdir.stage_fingerprint(judge)
        round_trip.tokenizer_of(config.round_trip)
    if config.canaries:
        inputs["canaries"] = workdir.stage_fingerprint(config.canaries)

    def make(out: pathlib.Path) -> dict:
        counts: dict[str, int] = {}
        with tempfile.TemporaryDirectory(dir=out) as scratch:
            rows = filtered(
                config, read_synthetic(config.synthetic), counts, pathlib.Path(scratch)
            )
            first = next(rows, None)
            if first is None:
                raise validation.InputError(
                    f"no query of {config.synthetic} passes; of {manifest['count']}, "
                    f"the filters drop {counts}. Loosen the one that drops most."
                )
            written = write_synthetic(
                out / layout.SET,
                itertools.chain([first], rows),
                provenance={
                    "config": workdir.plain(config),
                    "inputs": inputs,
                    "of": manifest["provenance"],
                },
                certificate=manifest["certificate"],
                shards=config.shards,
            )
        found = {"read": manifest["count"], "kept": written["count"], "dropped": counts}
        atomic_write(
            out / COUNTS_FILE, json.dumps(found, indent=2, sort_keys=True) + "\n"
        )
        return found

    return workdir.run_stage(output, config, inputs, make)


def require_same_guarantee(
    path: str, of: str, certificate: dict[str, Any] | None
) -> None:
    """Refuses a model that carries more of private queries than a set does.

    Args:
      path: the model's directory.
      of: the set, for the error.
      certificate: the set's; `None` for public pairs.

    Raises:
      InputError: the model has a certificate that is not the set's.
    """
    found = read_certificate(path)
    own = None if certificate is None else certificate["digest"]
    if found is None or found["digest"] == own:
        return
    counted = "none" if certificate is None else certificate["guarantee"]["epsilon"]
    raise validation.InputError(
        f"{path}/certificate.json shows that private queries had a part in this "
        f"retriever (epsilon {found['guarantee']['epsilon']}), and not through {of} "
        f"(epsilon {counted}): what it keeps would say of them what the "
        "certificate of the set does not count. Use one that was trained on this set "
        'or on public pairs, or "bm25".'
    )


def filtered(
    config: ml_collections.ConfigDict,
    rows: Iterable[SyntheticQuery],
    counts: dict[str, int],
    scratch: pathlib.Path,
) -> Iterator[SyntheticQuery]:
    """The rows that pass all filters that are set, in their order.

    Args:
      config: the stage's.
      rows: of a set; read as a stream.
      counts: filled with the number of rows that each filter dropped first.
      scratch: a directory for the corpus's embeddings.

    Yields:
      Rows as they are.
    """
    tests: list[tuple[str, Callable[[list[SyntheticQuery]], Iterable[bool]]]] = []
    if config.canaries:
        tests.append(("secrets", _each(_without_secrets(config.canaries))))
    if config.min_words or config.max_words:
        tests.append(("words", _each(_of_length(config))))
    if config.min_known:
        tests.append(("known", _each(_of_known_words(config))))
    if config.duplicates:
        tests.append(("duplicates", _each(_new())))
    if config.round_trip.retriever:
        tests.append(("round_trip", round_trip.comes_back(config, scratch)))
    counts.update({name: 0 for name, _ in tests})
    stream = iter(rows)
    while chunk := list(itertools.islice(stream, _CHUNK)):
        for name, test in tests:
            before = len(chunk)
            kept = test(chunk) if chunk else ()
            chunk = [row for row, keep in zip(chunk, kept) if keep]
            counts[name] += before - len(chunk)
        yield from chunk


def _each(keep: Callable[[str], bool]):
    return lambda chunk: [keep(row.query) for row in chunk]


def _without_secrets(path: str) -> Callable[[str], bool]:
    made = canary_set.read_canaries(pathlib.Path(path))
    secrets = [canary.secret for canary in made]
    return lambda query: not any(evaluation.leaked_secrets(secrets, [query]).found)


def _of_length(config) -> Callable[[str], bool]:
    most = config.max_words or np.inf
    return lambda query: config.min_words <= len(query.split()) <= most


def _of_known_words(config) -> Callable[[str], bool]:
    known = SeenTexts()
    recent: set[str] = set()  # frequent words come again and again
    for document in sources.open_beir(config.corpus).documents():
        recent.update(words(document.content))
        if len(recent) > BATCH:
            known.update(recent)
            recent.clear()
    known.update(recent)
    is_known = functools.lru_cache(BATCH)(known.__contains__)

    def keep(query: str) -> bool:
        found = words(query)
        return sum(map(is_known, found)) >= config.min_known * len(found)

    return keep


def _new() -> Callable[[str], bool]:
    """Whether a query is the first of its kind; keeps 16 bytes of each in memory."""
    seen = SeenTexts()
    return lambda query: seen.add(" ".join(query.casefold().split()))


def _check(config: ml_collections.ConfigDict) -> None:
    judge = config.round_trip.retriever
    if (
        judge not in ("", round_trip.BM25)
        and not (pathlib.Path(judge) / "model").is_dir()
    ):
        raise validation.InputError(
            f"round_trip.retriever is {judge!r}, where no retriever lies. Give what "
            f"train_retriever wrote, {round_trip.BM25!r}, or nothing."
        )
    if not config.synthetic or not sources.is_free(config.synthetic):
        raise validation.InputError(
            f"synthetic is {config.synthetic!r}; give a set that synthesize wrote. "
            "Private pairs cannot be filtered for free."
        )
    if 0 < config.max_words < config.min_words:
        raise validation.InputError(
            f"min_words is {config.min_words} and max_words {config.max_words}; no "
            "query passes. Set min_words to at most max_words."
        )


if __name__ == "__main__":
    command.main(run)
