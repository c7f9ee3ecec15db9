"""TREC run and qrels files, in the order in which trec_eval ranks.

A run's line is `qid Q0 docid rank score tag`, a qrels line `qid 0 docid
relevance`, both separated by spaces. Files appear whole or not at all.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import numbers
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from tfdpsq.validation import DataError, InputError

Run = Mapping[str, Mapping[str, float]]
Qrels = Mapping[str, Mapping[str, int]]


def checked_score(score: Any, query_id: str, document_id: str) -> float:
    """`score` as a python float, which is all that pytrec-eval accepts.

    Raises:
      InputError: it is not a real number, or not finite as float32 (trec_eval's
        precision); the message names query and document.
    """
    where = f"score of document {document_id!r} for query {query_id!r}"
    if isinstance(score, bool) or not isinstance(score, numbers.Real):
        raise InputError(f"{where} is {score!r}; it must be a real number.")
    value = float(score)
    # Half-way to the next binade above the largest float32 rounds to infinity.
    if not math.isfinite(value) or abs(value) >= 3.4028235677973366e38:
        raise InputError(
            f"{where} is {score!r}; it must be finite as float32, or its rank would be "
            "arbitrary."
        )
    return value


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
      path: file to write; an existing one is replaced in one step.
      run: query id -> {document id: score}, or such pairs, streamed.
      tag: name of the run, the last field of every line.
      ignore_identical_ids: leave out documents with their query's id, so that others
        who read the run measure what `evaluate_run` does under the same rule.

    Raises:
      InputError: a score that is not finite, an empty id or tag, or one with
        white space in it, which the format cannot hold.
    """
    _check_word("tag", tag)

    def lines() -> Iterator[str]:
        for query_id, hits in run.items() if isinstance(run, Mapping) else run:
            _check_word("query id", query_id)
            checked = {
                document_id: checked_score(score, query_id, document_id)
                for document_id, score in hits.items()
                if not (ignore_identical_ids and document_id == query_id)
            }
            for rank, (document_id, score) in enumerate(ranked(checked), start=1):
                _check_word("document id", document_id)
                yield f"{query_id} Q0 {document_id} {rank} {score!r} {tag}\n"

    _write_whole(path, lines())


def read_trec_run(path: str | os.PathLike) -> dict[str, dict[str, float]]:
    """Reads a run: query id -> {document id: score}, in the file's order.

    Ranks are not kept: trec_eval, and so `evaluate_run`, ranks by score.

    Raises:
      DataError: a line without six fields, a rank or score that is not a number, a
        document twice for one query, or bytes that are not UTF-8.
    """
    run: dict[str, dict[str, float]] = {}
    for number, query_id, document_id, score in stream_trec_run(path):
        hits = run.setdefault(query_id, {})
        if document_id in hits:
            raise repeated_hit(path, number, query_id, document_id)
        hits[document_id] = score
    return run


def stream_trec_run(
    path: str | os.PathLike,
) -> Iterator[tuple[int, str, str, float]]:
    """Streams a run that may be too large for memory.

    Yields:
      Line number, query id, document id and score. Whether a document comes twice is
      for the caller to see; `repeated_hit` is the error.

    Raises:
      DataError: as `read_trec_run`.
    """
    for number, (query_id, _, document_id, rank, written, _) in _fields(path, 6):
        if not rank.isdecimal():
            raise DataError(
                path, f"rank is {rank!r}", "Write an integer from 1.", number
            )
        try:
            score = checked_score(float(written), query_id, document_id)
        except ValueError as error:
            raise DataError(
                path, f"score is {written!r}", "Write a finite number.", number
            ) from error
        yield number, query_id, document_id, score


def write_trec_qrels(path: str | os.PathLike, qrels: Qrels) -> None:
    """Writes judgements in TREC's format (no header, unlike BEIR's).

    Args:
      path: file to write; an existing one is replaced in one step.
      qrels: query id -> {document id: relevance}.

    Raises:
      InputError: an empty id or one with white space, or a relevance that is no
        integer.
    """

    def lines() -> Iterator[str]:
        for query_id, judgements in qrels.items():
            _check_word("query id", query_id)
            for document_id, relevance in judgements.items():
                _check_word("document id", document_id)
                if not isinstance(relevance, numbers.Integral):
                    raise InputError(
                        f"relevance of document {document_id!r} for query {query_id!r} "
                        f"is {relevance!r}; it must be an integer."
                    )
                yield f"{query_id} 0 {document_id} {int(relevance)}\n"

    _write_whole(path, lines())


def read_trec_qrels(path: str | os.PathLike) -> dict[str, dict[str, int]]:
    """Reads judgements: query id -> {document id: relevance}.

    Raises:
      DataError: a line without four fields, a relevance that is not an integer, a
        document twice for one query, or bytes that are not UTF-8.
    """
    qrels: dict[str, dict[str, int]] = {}
    for number, (query_id, _, document_id, relevance) in _fields(path, 4):
        judgements = qrels.setdefault(query_id, {})
        if document_id in judgements:
            raise repeated_hit(path, number, query_id, document_id)
        try:
            judgements[document_id] = int(relevance)
        except ValueError as error:
            raise DataError(
                path, f"relevance is {relevance!r}", "Write an integer.", number
            ) from error
    return qrels


def _check_word(name: str, word: str) -> None:
    if not isinstance(word, str) or len(word.split()) != 1 or word != word.strip():
        raise InputError(
            f"{name} is {word!r}; TREC files separate fields by white space, so it "
            "must be a non-empty string without any."
        )


def repeated_hit(
    path: str | os.PathLike, number: int, query_id: str, document_id: str
) -> DataError:
    """Returns the error of a document that comes twice for one query."""
    return DataError(
        path,
        f"document {document_id!r} comes a second time for query {query_id!r}",
        "Keep one line of the two.",
        number,
    )


def _fields(path: str | os.PathLike, count: int) -> Iterator[tuple[int, list[str]]]:
    with open(path, "rb") as file:
        for number in itertools.count(1):
            raw = file.readline()
            if not raw:
                return
            try:
                fields = raw.decode("utf-8").split()
            except UnicodeDecodeError as error:
                raise DataError(
                    path, f"bytes that are not UTF-8 ({error})", "Re-encode it.", number
                ) from error
            if len(fields) != count:
                raise DataError(
                    path,
                    f"{len(fields)} fields where TREC's format has {count}",
                    "Separate the fields by single spaces.",
                    number,
                )
            yield number, fields


def _write_whole(path: str | os.PathLike, lines: Iterable[str]) -> None:
    path = os.fspath(path)
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "w", encoding="utf-8", newline="\n") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
