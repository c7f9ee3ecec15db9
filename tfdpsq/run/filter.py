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
    round_trip  the query does not bring its own document back among the best (Dai et
                al. 2022, *Promptagator*, arXiv:2209.11755, section 3.2)

Writes the set anew under `set/`, with its certificate, and `filter.json`: how many
queries each filter dropped.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import ml_collections
import numpy as np

from tfdpsq import evaluation, retriever, validation
from tfdpsq.data import (
    Tokenizer,
    atomic_write,
    read_manifest,
    read_synthetic,
    write_synthetic,
)
from tfdpsq.data.records import SyntheticQuery
from tfdpsq.data.texts import Document
from tfdpsq.evaluation.ngrams import words
from tfdpsq.privacy import read_certificate
from tfdpsq.run import canaries, command, sources, workdir

SET = "set"
COUNTS_FILE = "filter.json"
BM25 = "bm25"
# Queries embedded at a time, and scored at a time: against a million documents, 1 GiB.
_CHUNK = 8192
_SCORED = 256


def default_config() -> ml_collections.ConfigDict:
    """The stage's settings.

    `min_words` and `max_words` of 0 have no limit. `min_known` is the share of a
    query's words that the corpus must hold. `round_trip.retriever` is "bm25", a
    directory that `train_retriever` wrote, or "" for no such filter; `k` is how far
    down a query's own document may come. `canaries` is what the stage of that name
    wrote, if the generator was trained on it. Choosing these by results on private
    queries would be a private read.
    """
    return ml_collections.ConfigDict(
        {
            "synthetic": "",
            "corpus": sources.PYDOCS,
            "canaries": "",
            "min_words": 0,
            "max_words": 0,
            "min_known": 0.0,
            "duplicates": False,
            "round_trip": {"retriever": "", "vocabulary": "", "k": 1},
            "batch_size": 128,
            "shards": 4,
        }
    )


def run(config: ml_collections.ConfigDict, directory: pathlib.Path) -> dict:
    """Runs the stage into `directory` unless it is finished there.

    Raises:
      InputError: bad settings, no set, a retriever with another guarantee, or nothing
        left.
      DataError: a damaged set.
    """
    _check(config)
    manifest = read_manifest(config.synthetic)
    inputs = {
        "synthetic": manifest["fingerprint"],
        "corpus": sources.corpus_fingerprint(config.corpus),
    }
    read_certificate(config.synthetic)  # refuses one that was changed
    judge = config.round_trip.retriever
    if judge and judge != BM25:
        require_same_guarantee(judge, config.synthetic, manifest["certificate"])
        inputs["retriever"] = workdir.stage_fingerprint(judge)
        _tokenizer(config.round_trip)
    if config.canaries:
        inputs["canaries"] = workdir.stage_fingerprint(config.canaries)

    def make(out: pathlib.Path) -> dict:
        counts: dict[str, int] = {}
        rows = filtered(config, read_synthetic(config.synthetic), counts)
        first = next(rows, None)
        if first is None:
            raise validation.InputError(
                f"no query of {config.synthetic} passes; of {manifest['count']}, the "
                f"filters drop {counts}. Loosen the one that drops most."
            )
        written = write_synthetic(
            out / SET,
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

    return workdir.run_stage(directory, config, inputs, make)


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
) -> Iterator[SyntheticQuery]:
    """The rows that pass all filters that are set, in their order.

    Args:
      config: the stage's.
      rows: of a set; read as a stream.
      counts: filled with the number of rows that each filter dropped first.

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
        tests.append(("round_trip", _comes_back(config)))
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
    made = canaries.read_canaries(pathlib.Path(path))
    secrets = [canary.secret for canary in made]
    return lambda query: not any(evaluation.leaked_secrets(secrets, [query]).found)


def _of_length(config) -> Callable[[str], bool]:
    most = config.max_words or np.inf
    return lambda query: config.min_words <= len(query.split()) <= most


def _of_known_words(config) -> Callable[[str], bool]:
    known = set()
    for document in sources.open_beir(config.corpus).documents():
        known.update(words(document.content))

    def keep(query: str) -> bool:
        found = words(query)
        return sum(word in known for word in found) >= config.min_known * len(found)

    return keep


def _new() -> Callable[[str], bool]:
    """Whether a query is the first of its kind; keeps hashes alone in memory."""
    seen: set[bytes] = set()

    def keep(query: str) -> bool:
        plain = " ".join(query.casefold().split())
        key = hashlib.blake2b(plain.encode(), digest_size=16).digest()
        if key in seen:
            return False
        seen.add(key)
        return True

    return keep


def _comes_back(config) -> Callable[[list[SyntheticQuery]], Iterable[bool]]:
    """Whether queries find their documents, by BM25 or by a retriever."""
    own, k = config.round_trip, config.round_trip.k
    ids: dict[str, int] = {}

    def documents() -> Iterator[Document]:
        for document in sources.open_beir(config.corpus).documents():
            ids[document.id] = len(ids)
            yield document

    def known(chunk: list[SyntheticQuery]) -> None:
        for row in chunk:
            if row.document_id not in ids:
                raise validation.InputError(
                    f"query {row.query_id!r} was written for document "
                    f"{row.document_id!r}, which {config.corpus} does not hold. Give "
                    "the corpus that the set was written for."
                )

    if own.retriever == BM25:
        index = evaluation.BM25((d.id, d.content) for d in documents())

        def by_words(chunk):
            known(chunk)
            queries = {row.query_id: row.query for row in chunk}
            found = index.search(queries, k)
            return [row.document_id in found.get(row.query_id, {}) for row in chunk]

        return by_words
    model = retriever.load(pathlib.Path(own.retriever) / "model")
    tokenizer = _tokenizer(own)
    corpus = retriever.encode_texts(
        model,
        (document.content for document in documents()),
        tokenizer,
        "document",
        config.batch_size,
    )

    def by_vectors(chunk):
        known(chunk)
        texts = [row.query for row in chunk]
        vectors = retriever.encode_texts(
            model, texts, tokenizer, "query", config.batch_size, progress=False
        )
        mine = np.array([ids[row.document_id] for row in chunk])
        kept = []
        for start in range(0, len(chunk), _SCORED):
            part = slice(start, start + _SCORED)
            scores = vectors[part] @ corpus.T
            own_score = np.take_along_axis(scores, mine[part, None], axis=1)
            kept.extend((scores > own_score).sum(axis=1) < k)
        return kept

    return by_vectors


def _tokenizer(own: ml_collections.ConfigDict) -> Tokenizer:
    """The retriever's vocabulary.

    Raises:
      InputError: none was given, or another one than the retriever was trained with.
    """
    if not own.vocabulary:
        raise validation.InputError(
            f"round_trip.vocabulary is not set, and {own.retriever} needs the one it "
            "was trained with. Give its SentencePiece file."
        )
    tokenizer = Tokenizer(own.vocabulary)
    stage = workdir.read_json(pathlib.Path(own.retriever) / workdir.STAGE_FILE)
    trained = stage["inputs"].get("vocabulary")
    if trained != tokenizer.fingerprint:
        raise validation.InputError(
            f"round_trip.vocabulary is {own.vocabulary}, which is not the one that "
            f"{own.retriever} was trained with ({trained}). Give that one."
        )
    return tokenizer


def _check(config: ml_collections.ConfigDict) -> None:
    validation.positive_integer("batch_size", config.batch_size)
    validation.positive_integer("shards", config.shards)
    judge = config.round_trip.retriever
    if judge not in ("", BM25) and not (pathlib.Path(judge) / "model").is_dir():
        raise validation.InputError(
            f"round_trip.retriever is {judge!r}, where no retriever lies. Give what "
            f"train_retriever wrote, {BM25!r}, or nothing."
        )
    if not config.synthetic or not sources.is_free(config.synthetic):
        raise validation.InputError(
            f"synthetic is {config.synthetic!r}; give a set that synthesize wrote. "
            "Private pairs cannot be filtered for free."
        )
    validation.in_range("min_known", config.min_known, 0, 1)
    validation.positive_integer("round_trip.k", config.round_trip.k)
    for name in ("min_words", "max_words"):
        validation.in_range(name, config[name], 0, np.inf)
    if 0 < config.max_words < config.min_words:
        raise validation.InputError(
            f"min_words is {config.min_words} and max_words {config.max_words}; no "
            "query passes. Set min_words to at most max_words."
        )


if __name__ == "__main__":
    command.main(run)
