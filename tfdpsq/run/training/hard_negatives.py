"""Hard negatives of pairs, read from a TREC run, and the check of their origin."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from tfdpsq import evaluation, retriever, validation
from tfdpsq.data import Tokenizer
from tfdpsq.data.files import sha256_of_file, write_json
from tfdpsq.run.core import settings, sources

ORIGIN_FILE = "mining.json"
JUDGED = "judged"
_SPARE = 8
BY_QUERY = "each query and public data alone"


def declared() -> dict[str, Any]:
    """Settings of hard negatives.

    `run`: a TREC run, query id to documents, best first, from `mine` or any system;
    "judged" for documents that the pairs' own qrels give 0; "" for none. `count`:
    negatives of a row, the best ranked that are not known answers, after `skip` of
    them, which may be unjudged answers. `corpus`: the documents; "" is the pairs' own.
    `made_from`: for a run that `mine` did not write, declare BY_QUERY if every query's
    documents follow from that query and public data. The negatives of one query must
    not depend on other queries: the certificate would not cover what they carry.
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


@dataclasses.dataclass(frozen=True)
class HardNegatives:
    """Settings of hard negatives; see `declared`."""

    run: str
    count: int
    skip: int
    corpus: str
    made_from: str

    @property
    def path(self) -> pathlib.Path:
        """Returns the TREC run.

        Raises:
          InputError: there is no such file.
        """
        path = pathlib.Path(self.run)
        if path.is_dir():
            path /= "run.trec"
        if not path.is_file():
            raise validation.InputError(
                f"hard_negatives.run is {self.run}, where there is no file. Give a "
                "TREC run, or what `mine` wrote."
            )
        return path


def corpus_of(corpus: str, pairs: str) -> str:
    """Returns the path of the documents.

    Raises:
      InputError: none was given, and the pairs are a set without a corpus.
    """
    if not corpus and sources.is_free(pairs):
        raise validation.InputError(
            f"corpus is not set, and {pairs} holds pairs but no corpus to mine. Set "
            'corpus to a BEIR directory, or to "pydocs".'
        )
    return corpus or pairs


def inputs(own: HardNegatives, pairs: str, private: pathlib.Path) -> dict[str, str]:
    """Returns fingerprints of the documents and, keyed as it may be private, the run.

    Raises:
      InputError: no such run.
    """
    if not own.run:
        return {}
    found = {
        "hard_negatives_corpus": sources.corpus_fingerprint(
            corpus_of(own.corpus, pairs)
        )
    }
    if own.run != JUDGED:  # judgements are a part of the pairs
        run = sha256_of_file(own.path)
        found["hard_negatives"] = sources.keyed_fingerprint(run, private)
    return found


def write_origin(
    directory: pathlib.Path, run: pathlib.Path, split: str, pairs: str, by: Any
) -> None:
    """Writes a record of how a run was mined next to it.

    `pairs` is the fingerprint of the pairs, `by` the ranking system and its settings.
    """
    found = {"by": by, "pairs": pairs, "split": split, "run": sha256_of_file(run)}
    write_json(directory / ORIGIN_FILE, found)


def origin(own: HardNegatives, source: sources.Source, pairs: str) -> str:
    """Returns the origin of the negatives for the certificate; "none" without any.

    Negatives that were mined for other pairs would carry what those cost.

    `pairs` is the fingerprint of the source, under the key used when mining.

    Raises:
      InputError: the origin is not known, or not these pairs.
      DataError: a damaged `mining.json`.
    """
    if not own.run:
        return "none"
    if own.run == JUDGED:
        if not source.private:
            raise validation.InputError(
                f"hard_negatives.run is {JUDGED!r}, but {source.path} is a set of "
                "pairs without judgements. Mine for them, or give a TREC run."
            )
        return f"{own.count} of the query's own judgements of 0"
    record = own.path.parent / ORIGIN_FILE
    count = f"the {own.count} best after {own.skip}"
    if record.is_file():
        try:
            found = validation.parse_json(record.read_text("utf-8"))
            by, made = found["by"]["name"], (found["pairs"], found["split"])
            run = found["run"]
        except (ValueError, KeyError, TypeError) as error:
            raise validation.DataError(
                record, f"not what `mine` writes ({error!r})", "Mine again."
            ) from error
        if run != sha256_of_file(own.path):
            raise validation.InputError(
                f"{own.path} is not the run that {record} describes. Mine again."
            )
        if made != (pairs, source.split):
            raise validation.InputError(
                f"hard_negatives.run {own.path} was not mined for split "
                f"{source.split!r} of {source.path} in its present state, by its "
                "fingerprint under this private_directory's key. Mine for these pairs, "
                "with the same private_directory."
            )
        return f"{count}, mined by {by} from {BY_QUERY}"
    if own.made_from != BY_QUERY:
        raise validation.InputError(
            f"hard_negatives.made_from is {own.made_from!r}, and there is no "
            f"{ORIGIN_FILE} next to {own.path}, so the origin of its documents is "
            f"not known. Let `mine` write it, or set made_from to {BY_QUERY!r} if that "
            "is true."
        )
    return f"{count}, from a run declared to be made from {BY_QUERY}"


def arrays(
    own: HardNegatives,
    source: sources.Source,
    tokenizer: Tokenizer,
    document_length: int,
) -> dict[str, Any]:
    """Returns the rows' hard negatives as `retriever.encode_negatives` makes them.

    A document is skipped if it, or another with the same content, is a known answer.

    Raises:
      InputError: bad settings, or a run that has none of the queries.
      DataError: a malformed run, or one that names a document the corpus lacks.
    """
    if not own.run:
        return {}
    answers: dict[str, set[str]] = {}
    of_pairs: dict[str, set[str]] = {}
    for pair in source.pairs:
        answers.setdefault(pair.query_id, set()).add(pair.document_id)
        of_pairs.setdefault(pair.query_id, set()).add(pair.document)
    judged: Mapping[str, Mapping[str, int]] = {}
    if source.private:
        judged = sources.open_beir(source.path).qrels(source.split)
    if own.run == JUDGED:
        ranked = {
            query: sorted(d for d, grade in documents.items() if grade <= 0)
            for query, documents in judged.items()
        }
    else:
        ranked = {
            query: [document for document, _ in evaluation.ranked(documents)]
            for query, documents in evaluation.read_trec_run(own.path).items()
        }
    candidates: dict[str, list[str]] = {}
    for query, known in answers.items():
        known |= {d for d, grade in judged.get(query, {}).items() if grade > 0}
        others = [d for d in ranked.get(query, ()) if d not in known]
        # A few spare ones: some may have the content of an answer.
        candidates[query] = others[: own.skip + own.count + _SPARE]
    known_answers = set().union(*answers.values())
    corpus = corpus_of(own.corpus, source.path)
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
            f"{source.path}. Mine for these pairs, or lower skip (now {own.skip})."
        )
    return retriever.encode_negatives(
        source.pairs,
        {query: [texts[d] for d in ids] for query, ids in chosen.items()},
        tokenizer,
        document_length,
        own.count,
    )
