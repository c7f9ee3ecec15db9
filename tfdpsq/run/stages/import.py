r"""Import a query log: Parquet, TSV, CSV, JSONL, TFDS or ir_datasets to BEIR.

    tfdpsq import --workdir=WORKDIR/private/pairs --config.logs.train=log.parquet \
        --config.columns.user=user_id --config.log_documents_are_public=True

Writes a BEIR directory for `--config.data` and `--config.pairs` of other stages, and
logs which rows were dropped and why. Rows are read in pieces and joined on disk: memory
does not grow with the log. The output holds the private queries.

Ids are texts or whole numbers; rows with others are dropped, and so are those without a
user where there is a column of users. An id is one in any file: 7, 7.0 (as pandas
writes it in a column with a missing value), "7.00", "7." and "+7" are one, and so is
" 7" of a user. Leading zeros count: "007" is another. Large numbers that lost digits,
such as 1.2345678901234568e+18, are dropped: write such ids as text.

A log's rows have a query and a document, as texts or as ids of rows in two other
tables. MS MARCO's own files, for example:

    --config.logs.train=qrels.train.tsv --config.logs.dev=qrels.dev.tsv
    --config.columns.query= --config.columns.document= --config.columns.query_id=0
    --config.columns.document_id=2 --config.queries.path=queries.*.tsv
    --config.queries.columns.query_id=0 --config.queries.columns.query=1
    --config.corpus.path=collection.tsv --config.corpus.columns.document_id=0
    --config.corpus.columns.document=1 --config.header=False

A set of `ir_datasets` has the three parts by one name: with `logs.train=
ir_datasets:NAME` alone, its queries, documents and their columns need not be named.
`tfds:NAME#SPLIT` is a split of a TensorFlow data set that was prepared before, in the
folder TFDS_DATA_DIR; nothing is downloaded. Its features are the columns.

`split_by` divides one log: by a hash of the query, so that equal texts stay together,
by a hash of the user, or at the times given. No cut depends on other people's rows, see
`tfdpsq.data.importing`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from absl import logging

from tfdpsq.data import importing, tables
from tfdpsq.run.common.text_corpus import Table
from tfdpsq.run.frame import settings
from tfdpsq.run.frame.artefacts import Pairs
from tfdpsq.run.frame.places import Privacy
from tfdpsq.run.frame.runner import Context, Given, Stage
from tfdpsq.run.frame.settings import nested, path, setting
from tfdpsq.validation import InputError, shown

_QUERY, _USER, _TIME = _SPLIT_BY = ("query", "user", "time")
_BY_HASH = {"split_by": (_QUERY, _USER)}
_WAYS = ("split_by", "dev_share", "test_share", "dev_from", "test_from", "seed")


@dataclasses.dataclass(frozen=True)
class Logs(settings.Settings):
    """The log, or one for each split."""

    train: str = path(Table)
    dev: str = path(Table, "")
    test: str = path(Table, "")


@dataclasses.dataclass(frozen=True)
class Columns(settings.Settings):
    """Names of a log's columns, "" for those that are not there."""

    query: str = setting("query")
    query_id: str = setting("", help="of a row in queries.path, without query")
    document: str = setting("document")
    title: str = setting("")
    document_id: str = setting("", help="of a row in corpus.path, without document")
    score: str = setting("")
    user: str = setting("")
    time: str = setting("")


@dataclasses.dataclass(frozen=True)
class QueryColumns(settings.Settings):
    """Names of the columns of a table of queries."""

    query_id: str = setting("query_id")
    query: str = setting("query")
    user: str = setting("")


@dataclasses.dataclass(frozen=True)
class Queries(settings.Settings):
    """A table of queries."""

    path: str = path(Table, "")
    columns: QueryColumns = nested(QueryColumns, when="path")


@dataclasses.dataclass(frozen=True)
class DocumentColumns(settings.Settings):
    """Names of the columns of a table of documents."""

    document_id: str = setting("document_id")
    document: str = setting("document")
    title: str = setting("")


@dataclasses.dataclass(frozen=True)
class Documents(settings.Settings):
    """A table of documents, all of which become the corpus."""

    path: str = path(Table, "")
    columns: DocumentColumns = nested(DocumentColumns, when="path")


class Import(Stage):
    """Makes a BEIR directory of private pairs from a log."""

    name = "import"
    kind = Pairs

    @dataclasses.dataclass(frozen=True)
    class Settings(settings.Settings):
        """Settings of `import`."""

        logs: Logs = nested(Logs)
        columns: Columns = nested(Columns)
        queries: Queries = nested(Queries)
        corpus: Documents = nested(Documents)
        header: bool = setting(
            True, help="whether text files name their columns; else they are 0, 1, ..."
        )
        log_documents_are_public: bool = setting(
            False, help="needed without corpus.path: they tell what people looked for"
        )
        split_by: str = setting(_QUERY, choices=_SPLIT_BY)
        dev_share: float = setting(0.1, ge=0, lt=1, when=_BY_HASH)
        test_share: float = setting(0.1, ge=0, lt=1, when=_BY_HASH)
        dev_from: str = setting(
            "", when={"split_by": (_TIME,)}, help="seconds since 1970, or ISO 8601"
        )
        test_from: str = setting("", when={"split_by": (_TIME,)})
        seed: int = setting(0, ge=0, le=settings.SEED, when=_BY_HASH)

    def check(self, s: Settings, given: Given) -> None:
        """Refuses columns and splits that do not fit, and what tfdpsq made."""
        _tables(s)
        _split(s)
        for name, table in given.each():
            if table.facts["made"]:
                raise InputError(
                    f"{name} is {table.path}, where {table.facts['made']} is part of a "
                    "set, or was made from private queries: one of them can have a "
                    "part in all of its rows, and imported pairs are taken for raw "
                    "ones. Give the log as it was collected; other stages take a set "
                    "as it is."
                )

    def privacy(self, s: Settings, given: Given) -> Privacy:
        """Returns PRIVATE: the output holds the queries."""
        return Privacy.PRIVATE

    def facts(self, s: Settings, given: Given) -> dict[str, Any]:
        """Those of `Pairs`."""
        return {"raw": True}

    def run(self, c: Context) -> dict[str, Any]:
        """Raises InputError if no row is left, DataError for a malformed file."""
        logs, queries, corpus = _tables(c.settings)
        split = _split(c.settings)
        report = importing.import_pairs(c.out, logs, split, queries, corpus)
        for reason, count in report.dropped.most_common():
            first = report.first.get(reason)
            where = f" (first {first})" if first else ""
            logging.warning("dropped %d rows: %s%s", count, reason, where)
        counts = dataclasses.asdict(report)
        del counts["first"]
        c.counts.update(counts, dropped=dict(report.dropped))
        logging.info(
            "%d rows: %d queries on %d documents; pairs %s",
            *(report.rows, report.queries, report.documents, report.pairs),
        )
        return {}


def _tables(s: Any) -> tuple[dict[str, importing.Table], Any, Any]:
    """Returns split -> log, the table of queries and the corpus, or `None` for those.

    Raises:
      InputError: columns that do not fit each other.
    """
    s = _with_parts(s)
    columns, found = _named(s.columns), list[Any]()
    for name, text, key in (
        ("queries", "query", "query_id"),
        ("corpus", "document", "document_id"),
    ):
        part = getattr(s, name)
        if not part.path:
            if text not in columns:
                raise InputError(
                    f"columns.{text} is '', and {name}.path too: rows have no {text}. "
                    f"Name its column, or set columns.{key} and {name}.path."
                )
            found.append(None)
            continue
        if key not in columns or text in columns:
            raise InputError(
                f"{name}.path is {part.path}, to which rows refer by id. Set "
                f"columns.{key}, and columns.{text} to ''."
            )
        own = _named(part.columns)
        if not own.keys() >= {key, text}:
            raise InputError(
                f"{name}.columns lacks {key} or {text}. Name the columns of "
                f"{name}.path."
            )
        found.append(importing.Table(part.path, own, s.header, name))
    if not s.corpus.path and not s.log_documents_are_public:
        raise InputError(
            "the corpus would be the documents of this log, which tell what people "
            "looked for; documents are public to every stage. Give the documents as a "
            "table of their own with corpus.path, or set "
            "log_documents_are_public=True if everybody may know this list."
        )
    logs = {
        name: importing.Table(log, columns, s.header)
        for name, log in vars(s.logs).items()
        if log
    }
    queries, corpus = found
    return logs, queries, corpus


def _named(columns: settings.Settings) -> dict[str, str]:
    return {what: name for what, name in vars(columns).items() if name}


def _with_parts(s: Any) -> Any:
    """Names the parts of a log of `ir_datasets`, where nothing else is named."""
    log, parts = s.logs.train, (s.columns, s.queries, s.corpus)
    named = parts != (Columns(), Queries(), Documents()) or s.logs.dev or s.logs.test
    if not log.startswith(tables.IR_DATASETS) or named:
        return s
    title = "title" if "title" in tables.ir_columns(log, tables.CORPUS) else ""
    return dataclasses.replace(
        s,
        columns=Columns("", "query_id", "", "", "doc_id", "relevance"),
        queries=Queries(log, QueryColumns("query_id", "text")),
        corpus=Documents(log, DocumentColumns("doc_id", "text", title)),
    )


def _split(s: Any) -> importing.Split | None:
    """Returns how rows are divided; `None` where every split has a log.

    Raises:
      InputError: shares, times or columns that do not fit `split_by`.
    """
    if s.logs.dev or s.logs.test:
        for name in _WAYS:
            if getattr(s, name) != getattr(Import.Settings, name):
                raise InputError(
                    f"{name} is {shown(getattr(s, name))}, which does nothing where "
                    "logs.dev or logs.test is set: a row's split is that of its log. "
                    "Leave it at its default."
                )
        return None
    if s.split_by == _TIME:
        return importing.by_time(_starts(s))
    if s.split_by == _USER and not (s.columns.user or s.queries.columns.user):
        raise InputError(
            "split_by is 'user', and columns.user is ''. Name the column of users."
        )
    if s.dev_share + s.test_share >= 1:
        raise InputError(
            f"dev_share is {s.dev_share:g} and test_share {s.test_share:g}: nothing is "
            "left for training. Lower them to a sum below 1."
        )
    shares = {importing.DEV: s.dev_share, importing.TEST: s.test_share}
    return importing.by_hash(shares, s.seed, s.split_by == _USER)


def _starts(s: Any) -> dict[str, float]:
    """Returns split -> the second that it begins at."""
    given = {importing.DEV: s.dev_from, importing.TEST: s.test_from}
    starts = {name: tables.seconds_of(at) for name, at in given.items() if at}
    if not s.columns.time or not starts:
        raise InputError(
            "split_by is 'time', for which columns.time and dev_from or test_from must "
            "be set: cuts are given, as those at quantiles would depend on everybody's "
            "rows."
        )
    found = [at for at in starts.values() if at is not None]
    if len(found) < len(starts) or found != sorted(found):
        raise InputError(
            f"dev_from is {s.dev_from!r} and test_from {s.test_from!r}. Give seconds "
            "since 1970 or ISO 8601, such as 2026-01-31, the later one for test."
        )
    return dict(zip(starts, found))


STAGE = Import()
