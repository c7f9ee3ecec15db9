"""Ranking quality by trec_eval's rules, through pytrec-eval-terrier; TREC files.

A *run* maps query id to {document id: score}; *qrels* map query id to {document id:
relevance}. `rules` states what two evaluators could do differently: ties, gain, missing
queries, self-matches.

Ids are text; integers, as data frames hold them, become text, as in BEIR directories.

A run's line is `qid Q0 docid rank score tag`, a qrels line `qid 0 docid relevance`.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import numbers
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytrec_eval
from absl import logging

from tfdpsq import validation
from tfdpsq.validation import DataError, InputError, id_text

Run = Mapping[str, Mapping[str, float]]
Qrels = Mapping[str, Mapping[str, int]]

# Our name -> trec_eval's measure, cut at k; it has no cut of the reciprocal rank.
_CUT = {"ndcg": "ndcg_cut", "recall": "recall", "map": "map_cut", "capped_recall": "P"}
# Half-way to the next binade above the largest float32 rounds to infinity.
_INFINITE = 3.4028235677973366e38


@dataclasses.dataclass(frozen=True)
class RankingResult:
    """The result of `evaluate_run`."""

    # query id -> {metric: value in [0, 1]}, for every query of the qrels, sorted
    per_query: dict[str, dict[str, float]]
    means: dict[str, float]  # metric -> mean over every query of the qrels
    # judged queries for which the run returns nothing; each counts as 0
    missing: tuple[str, ...]
    # judged queries without a relevant document; each counts as 0
    without_relevant: tuple[str, ...]
    rules: dict[str, Any]  # see `rules`

    def values(self, metric: str) -> np.ndarray:
        """One metric per query, [queries] float64, in sorted order of query id."""
        return np.array([row[metric] for row in self.per_query.values()])


def rules(ignore_identical_ids: bool = False) -> dict[str, Any]:
    """The rules `evaluate_run` applies, in words, with the evaluator's version."""
    version = importlib.metadata.version("pytrec-eval-terrier")
    return {
        "evaluator": f"pytrec-eval-terrier {version}",
        "gain": "linear (the relevance itself), discount log2(rank + 1)",
        "ties": "by score as float32, descending, then by document id, descending, "
        "as strings",
        "relevant": "judged above 0; what is judged below 0 counts as 0",
        "recall": "relevant retrieved / all relevant, uncapped",
        "capped_recall": "relevant among the first k / the smaller of k and all "
        "relevant (BEIR's R_cap@k)",
        "map": "precision at every relevant document retrieved (map@k: among the first "
        "k), summed, / all relevant",
        "mrr": "1 / rank of the first relevant document, 0 where it is beyond k",
        "missing_queries": "a judged query absent from the run counts as 0",
        "unjudged_queries": "left out of the mean",
        "unjudged_documents": "not relevant",
        "self_matches": "documents whose id equals the query's id are removed"
        if ignore_identical_ids
        else "kept",
    }


def evaluate_run(
    qrels: Qrels,
    run: Run,
    metrics: Sequence[str] = ("ndcg@10", "recall@10"),
    ignore_identical_ids: bool = False,
) -> RankingResult:
    """Scores a run against relevance judgements.

    Args:
      qrels: query id -> {document id: relevance}, integers; above 0 is relevant.
      run: query id -> {document id: score}; scores are any finite real numbers
        (float32 scalars too), higher is better.
      metrics: "ndcg@k", "recall@k", "capped_recall@k", "mrr@k" or "map@k", any k of
        at least 1, or "map" over all that was retrieved; see `rules`.
      ignore_identical_ids: drop a document whose id equals the query's. Right
        where queries are documents of the corpus (ArguAna, Quora), harmful where
        both are merely numbered from 0; a warning says when it matters.

    Returns:
      A `RankingResult`; a query missing from the run counts as 0 there, while
      trec_eval itself would leave it out of the mean.
    """
    wanted = {metric: _measure(metric) for metric in metrics}
    if not wanted:
        raise InputError("metrics is empty; name at least one, such as 'ndcg@10'.")
    qrels, run = _by_text(qrels), _by_text(run)
    _check_qrels(qrels)
    if run and not set(run) & set(qrels):
        raise InputError(
            f"the run ({len(run)} queries) and the qrels ({len(qrels)}) share no query "
            "id; check that both come from the same data and split."
        )
    warn_of_identical_ids(qrels, run, ignore_identical_ids)
    hits = {q: _checked(q, run.get(q, {}), ignore_identical_ids) for q in sorted(qrels)}
    missing = tuple(query_id for query_id, found in hits.items() if not found)
    evaluator = pytrec_eval.RelevanceEvaluator(
        # All below 0 is equally not relevant; trec_eval crashes on what is below -1.
        {
            query_id: {name: max(int(value), -1) for name, value in given.items()}
            for query_id, given in qrels.items()
        },
        {measure for measure, _ in wanted.values()},
    )
    values = evaluator.evaluate({q: found for q, found in hits.items() if found})
    relevant = {q: sum(value > 0 for value in qrels[q].values()) for q in hits}
    per_query = {}
    for query_id in hits:
        own = values.get(query_id, {})  # none for a query without judgements
        per_query[query_id] = {
            metric: _value(
                metric, own.get(measure.replace(".", "_"), 0.0), k, relevant[query_id]
            )
            for metric, (measure, k) in wanted.items()
        }
    if missing:
        logging.warning(
            "%d of %d judged queries have no result in the run and count as 0 "
            "(first: %r).",
            len(missing),
            len(hits),
            missing[0],
        )
    return RankingResult(
        per_query=per_query,
        means={
            metric: float(np.mean([row[metric] for row in per_query.values()]))
            for metric in wanted
        },
        missing=missing,
        without_relevant=tuple(q for q, count in relevant.items() if not count),
        rules=rules(ignore_identical_ids),
    )


def _measure(metric: str) -> tuple[str, int]:
    """Returns pytrec-eval's measure and the cut that is ours to make."""
    if metric == "map":
        return "map", 0
    match = re.fullmatch(r"([a-z_]+)@([1-9][0-9]*)", metric)
    if match and match[1] in _CUT:
        return f"{_CUT[match[1]]}.{match[2]}", int(match[2])
    if match and match[1] == "mrr":
        return "recip_rank", int(match[2])
    known = ", ".join(f"'{name}@k'" for name in (*_CUT, "mrr"))
    raise InputError(
        f"metric is {metric!r}; write {known} with k of at least 1, or 'map'."
    )


def _value(metric: str, value: float, k: int, relevant: int) -> float:
    if metric.startswith("mrr") and value:
        return value if round(1 / value) <= k else 0.0
    if metric.startswith("capped") and relevant:
        # Precision at k is a whole number of documents over k.
        return round(value * k) / min(k, relevant)
    return value


def _by_text(table: Mapping[Any, Mapping[Any, Any]]) -> dict[str, dict[str, Any]]:
    return {
        id_text(query_id): {id_text(name): value for name, value in row.items()}
        for query_id, row in table.items()
    }


def _check_qrels(qrels: Qrels) -> None:
    if not qrels:
        raise InputError("qrels hold no query; there is nothing to score against.")
    for query_id, judgements in qrels.items():
        for document_id, relevance in judgements.items():
            whole = isinstance(relevance, numbers.Integral)
            if not whole or relevance > validation.MOST_RELEVANT:
                # trec_eval keeps a table of all values.
                raise InputError(
                    f"relevance of document {document_id!r} for query {query_id!r} is "
                    f"{validation.shown(relevance)}; it must be an integer of at most "
                    f"{validation.MOST_RELEVANT:,}."
                )


def _checked(
    query_id: str, hits: Mapping[str, float], ignore_identical_ids: bool
) -> dict[str, float]:
    """Returns hits with scores as Python's floats."""
    found = {}
    for document_id, score in hits.items():
        if ignore_identical_ids and document_id == query_id:
            continue
        real = isinstance(score, numbers.Real) and math.isfinite(score)
        if not real or abs(score) >= _INFINITE:
            raise InputError(
                f"score of document {document_id!r} for query {query_id!r} is "
                f"{score!r}; it must be a number that is finite as float32."
            )
        found[document_id] = float(score)
    return found


def warn_of_identical_ids(qrels: Qrels, run: Run, ignored: bool) -> None:
    """Logs a warning where the rule for self-matches seems wrong for the data."""
    relevant = retrieved = 0
    for query_id, judgements in qrels.items():
        if query_id in run.get(query_id, {}):
            retrieved += 1
            relevant += judgements.get(query_id, 0) > 0
    if ignored and relevant:
        logging.warning(
            "ignore_identical_ids removes %d documents judged relevant: ids of queries "
            "and documents seem to collide; turn it off for this data.",
            relevant,
        )
    elif not ignored and retrieved > relevant:
        logging.warning(
            "%d queries retrieve an unjudged document of their own id: where queries "
            "are documents (ArguAna, Quora) set ignore_identical_ids.",
            retrieved - relevant,
        )


def ranked(hits: Mapping[str, float]) -> list[tuple[str, float]]:
    """`hits` best first, as trec_eval orders them.

    Args:
      hits: document id -> score.

    Returns:
      (document id, score) by score **as float32**, descending, then by document
      id as a string, descending. (Code points order as UTF-8 bytes do, so this
      is C's `strcmp`.)
    """
    return sorted(
        hits.items(), key=lambda hit: (float(np.float32(hit[1])), hit[0]), reverse=True
    )


def write_trec_run(
    path: str | os.PathLike,
    run: Run | Iterable[tuple[str, Mapping[str, float]]],
    tag: str = "tfdpsq",
    ignore_identical_ids: bool = False,
) -> None:
    """Writes a run, best document first, ranks from 1.

    Scores are written so that they read back to the same float. A query with no
    document has no line in this format.

    Args:
      path: file to write.
      run: query id -> {document id: score}, or such pairs, streamed.
      tag: name of the run, the last field of every line.
      ignore_identical_ids: leave out documents with their query's id, so that others
        who read the run measure what `evaluate_run` does under the same rule.
    """
    _check_word("tag", tag)
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for asked, hits in run.items() if isinstance(run, Mapping) else run:
            ((query_id, own),) = _by_text({asked: hits}).items()
            _check_word("query id", query_id)
            checked = _checked(query_id, own, ignore_identical_ids)
            for rank, (document_id, score) in enumerate(ranked(checked), start=1):
                _check_word("document id", document_id)
                file.write(f"{query_id} Q0 {document_id} {rank} {score!r} {tag}\n")


def write_trec_qrels(path: str | os.PathLike, qrels: Qrels) -> None:
    """Writes judgements in TREC's format (no header, unlike BEIR's)."""
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for query_id, judgements in _by_text(qrels).items():
            _check_word("query id", query_id)
            for document_id, relevance in judgements.items():
                _check_word("document id", document_id)
                file.write(f"{query_id} 0 {document_id} {int(relevance)}\n")


def read_trec_run(path: str | os.PathLike) -> dict[str, dict[str, float]]:
    """Reads a run: query id -> {document id: score}, in the file's order.

    Ranks are not kept: trec_eval, and so `evaluate_run`, ranks by score.
    """
    return _gathered(path, stream_trec_run(path))


def read_trec_qrels(path: str | os.PathLike) -> dict[str, dict[str, int]]:
    """Reads judgements: query id -> {document id: relevance}."""
    return _gathered(path, _lines(path, pytrec_eval.parse_qrel))


def stream_trec_run(path: str | os.PathLike) -> Iterator[tuple[int, str, str, float]]:
    """Streams a run that may be too large for memory.

    Yields:
      Line number, query id, document id and score; `repeated_hit` is the error of a
      document that comes twice, which the caller has to see.
    """
    for line, query_id, document_id, score in _lines(path, pytrec_eval.parse_run):
        try:
            _checked(query_id, {document_id: score}, False)
        except InputError as error:
            raise DataError(path, str(error)[:-1], "Write another one.", line) from None
        yield line, query_id, document_id, score


def repeated_hit(
    path: str | os.PathLike, line: int, query_id: str, document_id: str
) -> DataError:
    """Returns the error of a document that comes twice for one query."""
    problem = f"document {document_id!r} comes a second time for query {query_id!r}"
    return DataError(path, problem, "Keep one line of the two.", line)


def _gathered(
    path: str | os.PathLike, rows: Iterable[tuple[int, str, str, Any]]
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for line, query_id, document_id, value in rows:
        hits = found.setdefault(query_id, {})
        if document_id in hits:
            raise repeated_hit(path, line, query_id, document_id)
        hits[document_id] = value
    return found


def _lines(
    path: str | os.PathLike, parse: Callable[[Iterable[str]], Any]
) -> Iterator[tuple[int, str, str, Any]]:
    """Yields line number, query, document and value, as pytrec-eval parses a line."""
    with open(path, "rb") as file:
        for line, raw in enumerate(file, 1):
            try:
                ((query_id, hits),) = parse([raw.decode()]).items()
            except ValueError as error:
                raise DataError(
                    path, f"not a line of TREC's ({error})", "Correct it.", line
                ) from error
            ((document_id, value),) = hits.items()
            yield line, query_id, document_id, value


def _check_word(name: str, word: str) -> None:
    if not isinstance(word, str) or word.split() != [word]:
        raise InputError(
            f"{name} is {word!r}; TREC files separate fields by white space, so it "
            "must be a non-empty string without any."
        )
