"""Hard negatives of pairs: read from a TREC run, and whether they may be used."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import ml_collections

from tfdpsq import evaluation, retriever, validation
from tfdpsq.data import Tokenizer, atomic_write
from tfdpsq.data.files import sha256_of_file
from tfdpsq.run.core import settings, sources

ORIGIN_FILE = "mining.json"
JUDGED = "judged"
_SPARE = 8
BY_QUERY = "each query and public data alone"


def declared() -> dict[str, Any]:
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
            "run": settings.Text(""),
            "count": settings.Integer(1, 1, 10_000),
            "skip": settings.Integer(0, 0, 10_000),
            "corpus": settings.Text(""),
            "made_from": settings.Text("", ("", BY_QUERY)),
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


def inputs(config: ml_collections.ConfigDict, private: pathlib.Path) -> dict[str, str]:
    """Fingerprints of the run, keyed as it may follow private queries, and documents.

    Raises:
      InputError: no such run.
    """
    own = config.hard_negatives
    if not own.run:
        return {}
    found = {
        "hard_negatives_corpus": sources.corpus_fingerprint(
            corpus_of(own.corpus, config.pairs)
        )
    }
    if own.run != JUDGED:  # these are a part of the pairs
        run = sha256_of_file(_path(config))
        found["hard_negatives"] = sources.keyed_fingerprint(run, private)
    return found


def write_origin(
    directory: pathlib.Path, run: pathlib.Path, config: Any, pairs: str, by: Any
) -> None:
    """Writes what a run was made from beside it.

    Args:
      directory: where.
      run: the TREC file.
      config: of the stage that mined: its split.
      pairs: fingerprint of the pairs whose queries were looked at.
      by: what ranked the documents, and its settings.
    """
    found = {
        "by": by,
        "pairs": pairs,
        "split": config.split,
        "run": sha256_of_file(run),
    }
    atomic_write(
        directory / ORIGIN_FILE, json.dumps(found, indent=2, sort_keys=True) + "\n"
    )


def origin(
    config: ml_collections.ConfigDict, source: sources.Source, pairs: str
) -> str:
    """How the negatives were found, for the certificate; "none" without any.

    Negatives that were mined for other pairs would carry what those cost.

    Args:
      config: of the stage that trains.
      source: its pairs.
      pairs: their fingerprint, under the same key as the mining had.

    Raises:
      InputError: nobody says what they follow from, or it is not these pairs.
      DataError: a damaged `mining.json`.
    """
    own = config.hard_negatives
    if not own.run:
        return "none"
    if own.run == JUDGED:
        if not source.private:
            raise validation.InputError(
                f"hard_negatives.run is {JUDGED!r}, but {config.pairs} is a set of "
                "pairs without judgements. Mine for them, or give a TREC run."
            )
        return f"{own.count} of the query's own judgements of 0"
    beside = _path(config).parent / ORIGIN_FILE
    count = f"the {own.count} best after {own.skip}"
    if beside.is_file():
        try:
            found = validation.parse_json(beside.read_text("utf-8"))
            by, made = found["by"]["name"], (found["pairs"], found["split"])
            run = found["run"]
        except (ValueError, KeyError, TypeError) as error:
            raise validation.DataError(
                beside, f"not what `mine` writes ({error!r})", "Mine again."
            ) from error
        if run != sha256_of_file(_path(config)):
            raise validation.InputError(
                f"{_path(config)} is not the run that {beside} tells of. Mine again."
            )
        if made != (pairs, config.split):
            raise validation.InputError(
                f"hard_negatives.run {_path(config)} was not mined for split "
                f"{config.split!r} of {config.pairs} as it is now, by its fingerprint "
                "under this private_directory's key. Mine for these pairs, with the "
                "same private_directory."
            )
        return f"{count}, mined by {by} from {BY_QUERY}"
    if own.made_from != BY_QUERY:
        raise validation.InputError(
            f"hard_negatives.made_from is {own.made_from!r}, and there is no "
            f"{ORIGIN_FILE} beside {_path(config)}: what its documents follow from is "
            f"not known. Let `mine` write it, or set made_from to {BY_QUERY!r} if that "
            "is so."
        )
    return f"{count}, from a run declared to be made from {BY_QUERY}"


def arrays(
    config: ml_collections.ConfigDict, source: sources.Source, tokenizer: Tokenizer
) -> dict[str, Any]:
    """The rows' hard negatives as `retriever.encode_negatives` makes them, if any.

    A document is none where it, or another with the same content, is known to answer
    the query.

    Raises:
      InputError: bad settings, or a run that has none of the queries.
      DataError: a malformed run, or one that names a document the corpus lacks.
    """
    own = config.hard_negatives
    if not own.run:
        return {}
    answers: dict[str, set[str]] = {}
    of_pairs: dict[str, set[str]] = {}
    for pair in source.pairs:
        answers.setdefault(pair.query_id, set()).add(pair.document_id)
        of_pairs.setdefault(pair.query_id, set()).add(pair.document)
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
    candidates: dict[str, list[str]] = {}
    for query, known in answers.items():
        known |= {d for d, grade in judged.get(query, {}).items() if grade > 0}
        others = [d for d in ranked.get(query, ()) if d not in known]
        # A few more than are wanted: some may hold what an answer holds.
        candidates[query] = others[: own.skip + own.count + _SPARE]
    known_answers = set().union(*answers.values())
    corpus = corpus_of(own.corpus, config.pairs)
    wanted = set().union(*candidates.values())
    texts = {
        document.id: document.content
        for document in sources.open_beir(corpus).documents()
        if document.id in wanted or document.id in known_answers
    }
    missing = sorted(wanted - texts.keys())
    if missing:
        raise validation.DataError(
            own.run,
            f"document {missing[0]!r} is not in {corpus}",
            "Set hard_negatives.corpus to the documents that the run was made on.",
        )
    chosen = {}
    for query, others in candidates.items():
        contents = {texts[d] for d in answers[query] if d in texts} | of_pairs[query]
        kept = [d for d in others if texts[d] not in contents]
        chosen[query] = kept[own.skip : own.skip + own.count]
    if not any(chosen.values()):
        raise validation.InputError(
            f"hard_negatives.run {own.run} has no document for any query of "
            f"{config.pairs}. Mine for these pairs, or lower skip (now {own.skip})."
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
