"""Keep the better queries of a synthetic set, at no cost in privacy.

    python -m tfdpsq.run.filter --config=configs/filter.py --workdir=DIR

Results computed from a synthetic set and public data have the set's guarantee, by
post-processing, so queries may be dropped for any reason that uses these alone. The
stage checks this for every input. A retriever that judges round trips must be public,
or trained under **this** guarantee: one trained on private pairs, under another ε or
none, would carry into the set what its certificate does not count, and is refused.

The filters, each off unless set, in this order:

    secrets     rows that hold a canary's secret (see `canaries`)
    words       too few or too many words
    known       too few words that occur in the public documents: another language, or
                none
    duplicates  repeated queries: the same words in the same order
    round_trip  queries that do not retrieve their own document among the best (see
                `round_trip`)

Memory holds neither the corpus nor the set, only hashes where a filter needs them: 8
bytes per document, 16 per word of the corpus and per query.

Writes the remaining set under `set/`, with its certificate, and `filter.json`: the
number of queries that each filter dropped.
"""

from __future__ import annotations

import itertools
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import ml_collections
import numpy as np

from tfdpsq import evaluation, validation, words
from tfdpsq.data import read_manifest, read_synthetic, write_synthetic
from tfdpsq.data.io import write_json
from tfdpsq.data.sets import SyntheticQuery
from tfdpsq.privacy import read_certificate
from tfdpsq.run.attacks import canary_set
from tfdpsq.run.core import (
    acting,
    command,
    layout,
    releases,
    settings,
    sources,
    workdir,
)
from tfdpsq.run.reporting import data_card
from tfdpsq.run.search import round_trip

COUNTS_FILE = "filter.json"
# Queries in memory at a time; a round trip by BM25 reads the corpus twice for each lot.
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
        "k": settings.Integer(1, 1, 10**6),
    },
    "batch_size": settings.Integer(128),
    "shards": settings.Integer(4, 1, 100000),
}


ACTING = (acting.Only("round_trip.k batch_size", "round_trip.retriever"),)


def default_config() -> ml_collections.ConfigDict:
    """Returns the stage's settings.

    `min_words` and `max_words` of 0 have no limit. `min_known` is the share of a
    query's words that the corpus must contain. `round_trip.retriever` is "bm25", an
    output of `train_retriever`, or "" for no such filter; `k` is the lowest rank
    allowed for a query's own document. `canaries` is the output of that stage, if the
    generator was trained on it. Choosing these by results on private queries would be
    a private read.
    """
    return settings.default_config(SETTINGS)


def run(config: ml_collections.ConfigDict, directory: pathlib.Path) -> dict:
    """Runs the stage into `directory` unless it is finished there.

    Raises:
      InputError: bad settings, no set, a retriever with another guarantee, or nothing
        left.
      DataError: a damaged set.
    """
    acting.check(config, SETTINGS, ACTING)
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
    if config.canaries:
        canary_set.read_canaries(pathlib.Path(config.canaries))  # or refuses it
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
                guarantee=output.guarantee,
            )
        data_card.write(out / layout.SET, written)
        found = {"read": manifest["count"], "kept": written["count"], "dropped": counts}
        write_json(out / COUNTS_FILE, found)
        return found

    return workdir.run_stage(output, config, inputs, make)


def require_same_guarantee(
    path: str, of: str, certificate: dict[str, Any] | None
) -> None:
    """Refuses a model that carries more of private queries than a set does.

    `certificate` is the set's; `None` for public pairs.

    Raises:
      InputError: the model has a certificate other than the set's.
    """
    found = read_certificate(path)
    own = None if certificate is None else certificate["digest"]
    if found is None or found["digest"] == own:
        return
    counted = "none" if certificate is None else certificate["guarantee"]["epsilon"]
    raise validation.InputError(
        f"{path}/certificate.json shows that private queries had a part in this "
        f"retriever (epsilon {found['guarantee']['epsilon']}), and not through "
        f"{of} (epsilon {counted}): its choice would reveal what the set's "
        "certificate does not count. Use one that was trained on this set or on "
        "public pairs, "
        'or "bm25".'
    )


def filtered(
    config: ml_collections.ConfigDict,
    rows: Iterable[SyntheticQuery],
    counts: dict[str, int],
    scratch: pathlib.Path,
) -> Iterator[SyntheticQuery]:
    """Yields the rows that pass all active filters, unchanged and in order.

    Fills `counts` with the number of rows that each filter dropped.
    """
    tests: list[tuple[str, Callable[[list[SyntheticQuery]], Iterable[bool]]]] = []
    if config.canaries:
        tests.append(("secrets", _of_queries(_without_secrets(config.canaries))))
    if config.min_words or config.max_words:
        each = _of_length(config.min_words, config.max_words)
        tests.append(("words", _of_queries(each)))
    if config.min_known:
        each = _of_known_words(config.corpus, config.min_known)
        tests.append(("known", _of_queries(each)))
    if config.duplicates:
        tests.append(("duplicates", _of_queries(_new())))
    if config.round_trip.retriever:
        returns = round_trip.comes_back(
            config.round_trip, config.corpus, config.batch_size, scratch
        )
        tests.append(("round_trip", returns))
    counts.update({name: 0 for name, _ in tests})
    stream = iter(rows)
    while chunk := list(itertools.islice(stream, _CHUNK)):
        for name, test in tests:
            before = len(chunk)
            kept = test(chunk) if chunk else ()
            chunk = [row for row, keep in zip(chunk, kept) if keep]
            counts[name] += before - len(chunk)
        yield from chunk


_Test = Callable[[list[str]], list[bool]]


def _of_queries(keep: _Test) -> Callable[[list[SyntheticQuery]], list[bool]]:
    return lambda chunk: keep([row.query for row in chunk])


def _without_secrets(path: str) -> _Test:
    made = canary_set.read_canaries(pathlib.Path(path))
    secrets = [canary.secret for canary in made]
    return lambda queries: [
        not any(evaluation.leaked_secrets(secrets, [query])) for query in queries
    ]


def _of_length(least: int, most: int) -> _Test:
    most_words = most or np.inf
    return lambda queries: [
        least <= len(found) <= most_words for found in words.words_of(queries)
    ]


def _of_known_words(corpus: str, share: float) -> _Test:
    documents = sources.open_beir(corpus).documents()
    known: set[int] = set()  # hashes
    for found in words.words_of(document.content for document in documents):
        known.update(map(hash, found))

    def keep(found: list[str]) -> bool:
        return sum(hash(word) in known for word in found) >= share * len(found)

    return lambda queries: list(map(keep, words.words_of(queries)))


def _new() -> _Test:
    """Returns a test for new queries; keeps 16 bytes of each in memory."""
    seen: set[int] = set()

    def is_new(key: int) -> bool:
        new = key not in seen
        seen.add(key)
        return new

    return lambda queries: list(map(is_new, words.text_hashes(queries)))


def _check(config: ml_collections.ConfigDict) -> None:
    judge = config.round_trip.retriever
    if (
        judge not in ("", round_trip.BM25)
        and not (pathlib.Path(judge) / layout.RETRIEVER_MODEL).is_dir()
    ):
        raise validation.InputError(
            f"round_trip.retriever is {judge!r}, where there is no retriever. Give an "
            f"output of train_retriever, {round_trip.BM25!r}, or nothing."
        )
    if not config.synthetic or not sources.is_free(config.synthetic):
        raise validation.InputError(
            f"synthetic is {config.synthetic!r}; give a set that synthesize wrote, "
            f"the directory {layout.SET!r} in its output. "
            "Private pairs cannot be filtered for free."
        )
    if 0 < config.max_words < config.min_words:
        raise validation.InputError(
            f"min_words is {config.min_words} and max_words {config.max_words}; no "
            "query passes. Set min_words to at most max_words."
        )


if __name__ == "__main__":
    command.main(run)
