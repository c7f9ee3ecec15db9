"""Hard negatives of pairs: read from a TREC run, and whether they may be used."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import ml_collections

from tfdpsq import evaluation, retriever, validation
from tfdpsq.data.files import sha256_of_file
from tfdpsq.run import sources

ORIGIN_FILE = "mining.json"
JUDGED = "judged"
BY_QUERY = "each query and public data alone"


def settings() -> dict[str, Any]:
    """Settings of hard negatives.

    `run`: a TREC run, query id to documents, best first: what `mine` wrote, or any
    system's; "judged" for documents that the pairs' own qrels give 0; "" for no hard
    negatives. `count`: of each row, the best ranked that are
    no known answer, after `skip` of them, which may be answers that nobody judged.
    `corpus`: the documents; "" is the pairs' own. `made_from`: of a run that `mine` did
    not write, declare BY_QUERY if every query's documents follow from that query and
    public data. The negatives of one query must not depend on others': they would
    carry what no certificate knows of.
    """
    return {
        "hard_negatives": {
            "run": "",
            "count": 1,
            "skip": 0,
            "corpus": "",
            "made_from": "",
        }
    }


def corpus_of(corpus: str, pairs: str) -> str:
    """Where the documents are.

    Raises:
      InputError: none was given, and the pairs are a set without a corpus.
    """
    if not corpus and sources.is_free(pairs):
        raise validation.InputError(
            f"corpus is not set, and {pairs} holds pairs but no corpus to mine. Set "
            'corpus to a BEIR directory, or to "pydocs".'
        )
    return corpus or pairs


def fingerprint(config: ml_collections.ConfigDict, private: pathlib.Path) -> str:
    """What identifies the run, keyed: it may follow private queries."""
    if config.hard_negatives.run == JUDGED:
        return JUDGED  # a part of the pairs
    found = sha256_of_file(_path(config))
    return sources.keyed_fingerprint(found, private)


def origin(config: ml_collections.ConfigDict, source: sources.Source) -> str:
    """How the negatives were found, for the certificate; "none" without any.

    Raises:
      InputError: nobody says what they follow from, or they follow from private
        queries and the pairs do not.
    """
    if not config.hard_negatives.run:
        return "none"
    if config.hard_negatives.run == JUDGED:
        return "the query's own judgements of 0"
    beside = _path(config).parent / ORIGIN_FILE
    declared = config.hard_negatives.made_from
    if beside.is_file():
        found = json.loads(beside.read_text("utf-8"))
        if found["private"] and not source.private:
            raise validation.InputError(
                f"hard_negatives.run {_path(config)} was mined for private queries, "
                f"but {config.pairs} is free of them. Mine for these pairs instead."
            )
        return f"mined by {found['by']} from {BY_QUERY}"
    if declared != BY_QUERY:
        raise validation.InputError(
            f"hard_negatives.made_from is {declared!r}, and there is no {ORIGIN_FILE} "
            f"beside {_path(config)}: what its documents follow from is not known. Let "
            f"`mine` write it, or set made_from to {BY_QUERY!r} if that is so."
        )
    return f"from a run declared to be made from {BY_QUERY}"


def arrays(
    config: ml_collections.ConfigDict, source: sources.Source, tokenizer
) -> dict[str, Any]:
    """The rows' hard negatives as `retriever.encode_negatives` makes them.

    A document is none where it, or another with the same content, is known to answer
    the query.

    Raises:
      InputError: bad settings, or a run that has none of the queries.
      DataError: a malformed run, or one that names a document the corpus lacks.
    """
    own = config.hard_negatives
    validation.positive_integer("hard_negatives.count", own.count)
    validation.in_range("hard_negatives.skip", own.skip, 0, 10_000)
    answers: dict[str, set[str]] = {}
    for pair in source.pairs:
        answers.setdefault(pair.query_id, set()).add(pair.document_id)
    judged: Mapping[str, Mapping[str, int]] = {}
    if source.private:
        judged = sources.open_beir(config.pairs).qrels(config.split)
    if own.run == JUDGED:
        ranked = {
            query: sorted(d for d, grade in documents.items() if grade <= 0)
            for query, documents in judged.items()
        }
    else:
        ranked = {
            query: [document for document, _ in evaluation.ranked(documents)]
            for query, documents in evaluation.read_trec_run(_path(config)).items()
        }
    chosen: dict[str, list[str]] = {}
    for query, known in answers.items():
        known |= {d for d, grade in judged.get(query, {}).items() if grade > 0}
        others = [d for d in ranked.get(query, ()) if d not in known]
        chosen[query] = others[own.skip : own.skip + own.count]
    if not any(chosen.values()):
        raise validation.InputError(
            f"hard_negatives.run {own.run} has no document for any query of "
            f"{config.pairs}. Mine for these pairs, or lower skip (now {own.skip})."
        )
    wanted = {document for documents in chosen.values() for document in documents}
    corpus = corpus_of(own.corpus, config.pairs)
    texts = {
        document.id: document.content
        for document in sources.open_beir(corpus).documents()
        if document.id in wanted
    }
    missing = sorted(wanted - texts.keys())
    if missing:
        raise validation.DataError(
            own.run,
            f"document {missing[0]!r} is not in {corpus}",
            "Set hard_negatives.corpus to the documents that the run was made on.",
        )
    return retriever.encode_negatives(
        source.pairs,
        {query: [texts[d] for d in ids] for query, ids in chosen.items()},
        tokenizer,
        config.document_length,
        own.count,
    )


def _path(config: ml_collections.ConfigDict) -> pathlib.Path:
    path = pathlib.Path(config.hard_negatives.run)
    if path.is_dir():
        path /= "run.trec"
    if not path.is_file():
        raise validation.InputError(
            f"hard_negatives.run is {config.hard_negatives.run}, where there is no "
            "file. Give a TREC run, or what `mine` wrote."
        )
    return path
