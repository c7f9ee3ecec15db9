r"""Import a query log: Parquet, TSV, CSV, JSONL, TFDS or ir_datasets to BEIR.

    tfdpsq import --workdir=WORKDIR/private/pairs --config.logs.train=log.parquet \
        --config.columns.user=user_id --config.log_documents_are_public=True

Writes a BEIR directory, and `dropped.tsv`, which rows are left out, and why. Ids are
texts or whole numbers: 7, 7.0 (as pandas writes it next to a missing value), "7.00" and
"+7" are one id, "007" is another. Rows with large numbers that lost digits, such as
1.2345678901234568e+18, are dropped, and where there are users, rows without one.

A log's rows have a query and a document, as texts or as ids of rows in two other
tables. MS MARCO's own files, for example:

    --config.logs.train=qrels.train.tsv --config.logs.dev=qrels.dev.tsv
    --config.columns.query= --config.columns.document= --config.columns.query_id=0
    --config.columns.document_id=2 --config.queries.path=queries.*.tsv
    --config.queries.query_id=0 --config.queries.query=1
    --config.corpus.path=collection.tsv --config.corpus.document_id=0
    --config.corpus.document=1 --config.header=False

`logs.train=ir_datasets:NAME` alone names all three tables and their columns.
`tfds:NAME#SPLIT` is a split of a TensorFlow data set that was prepared before, in the
folder TFDS_DATA_DIR; its features are the columns.

`split_by` divides one log by a hash of the query or of the user, or at the days given,
never by other people's rows; or give a log for each split.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from absl import logging

from tfdpsq.data import importing, tables
from tfdpsq.run.common.text_corpus import Table
from tfdpsq.run.frame import settings
from tfdpsq.run.frame.runner import Context, Given, Stage
from tfdpsq.run.frame.settings import nested, path, setting
from tfdpsq.validation import InputError


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
    time: str = setting("", help="a date, or seconds and so on since 1970")


@dataclasses.dataclass(frozen=True)
class Queries(settings.Settings):
    """A table of queries, and its columns."""

    path: str = path(Table, "")
    query_id: str = setting("query_id", when="path")
    query: str = setting("query", when="path")
    user: str = setting("", when="path")


@dataclasses.dataclass(frozen=True)
class Documents(settings.Settings):
    """A table of documents, all of which become the corpus, and its columns."""

    path: str = path(Table, "")
    document_id: str = setting("document_id", when="path")
    document: str = setting("document", when="path")
    title: str = setting("", when="path")


class Import(Stage):
    """Makes a BEIR directory of private pairs from a log."""

    name = "import"

    @dataclasses.dataclass(frozen=True)
    class Settings(settings.Settings):
        """Settings of `import`."""

        logs: Logs = nested(Logs)
        columns: Columns = nested(Columns)
        queries: Queries = nested(Queries)
        corpus: Documents = nested(Documents)
        header: bool = setting(True, help="without, columns of text are 0, 1, ...")
        quotes: str = setting("", choices=tables.QUOTES, help="backslash is Spark's")
        log_documents_are_public: bool = setting(
            False, help="needed without corpus.path: they tell what people looked for"
        )
        split_by: str = setting("query", choices=("query", "user", "time"))
        dev_share: float = setting(0.1, ge=0, le=0.5)
        test_share: float = setting(0.1, ge=0, le=0.4)
        dev_from: str = setting("", when={"split_by": ("time",)}, help="first day")
        test_from: str = setting("", when={"split_by": ("time",)})
        seed: int = setting(0, ge=0, le=settings.SEED)

    def check(self, s: Settings, given: Given) -> None:
        """Refuses columns that do not fit, and what tfdpsq made."""
        _tables(s)
        known = {"user": s.columns.user or s.queries.user, "time": s.columns.time}
        if not known.get(s.split_by, True):
            raise InputError(
                f"split_by is {s.split_by!r}, and columns.{s.split_by} ''. Name it."
            )
        for name, table in given.each():
            if table.facts["made"]:
                raise InputError(
                    f"{name} has {table.facts['made']}, which tfdpsq made, perhaps "
                    "from other private queries. Give the log as it was collected."
                )

    def facts(self, s: Settings, given: Given) -> dict[str, Any]:
        """Those of `Pairs`."""
        return {"raw": True}

    def run(self, c: Context) -> dict[str, Any]:
        """Raises InputError if no row is left, DataError for a malformed file."""
        s, (logs, queries, corpus) = c.settings, _tables(c.settings)
        shares = {importing.DEV: s.dev_share, importing.TEST: s.test_share}
        split = importing.by_hash(shares, s.seed, s.split_by == "user")
        if s.split_by == "time":
            starts = {importing.DEV: s.dev_from, importing.TEST: s.test_from}
            split = importing.by_time(starts)
        report = importing.import_pairs(
            c.out, logs, split if len(logs) == 1 else None, queries, corpus
        )
        for why, count in report.dropped.most_common():
            logging.warning("dropped %d rows: %s (%s)", count, why, report.first[why])
        counts = dataclasses.asdict(report)
        logging.info("%s", counts)
        c.counts.update(counts, dropped=dict(report.dropped))
        return {}


def _tables(s: Any) -> tuple[dict[str, tables.Table], Any, Any]:
    """Returns split -> log, and the tables of queries and documents, or `None`."""
    s = _with_parts(s)
    columns, found = _named(s.columns), list[Any]()
    for name, text, key in (
        ("queries", "query", "query_id"),
        ("corpus", "document", "document_id"),
    ):
        part = getattr(s, name)
        if (text in columns) == bool(part.path) or (part.path and key not in columns):
            raise InputError(
                f"columns.{text} is {getattr(s.columns, text)!r}, columns.{key} "
                f"{getattr(s.columns, key)!r} and {name}.path {part.path!r}. Set the "
                f"first, or the others: rows have a {text}, or its id in a table."
            )
        own = tables.Table(part.path, _named(part), s.header, name, s.quotes)
        found.append(own if part.path else None)
    queries, corpus = found
    if not corpus and not s.log_documents_are_public:
        raise InputError(
            "the log's documents, which tell what people looked for, would become the "
            "public corpus. Give corpus.path, or set log_documents_are_public=True."
        )
    logs = {
        name: tables.Table(log, columns, s.header, quotes=s.quotes)
        for name, log in vars(s.logs).items()
        if log
    }
    return logs, queries, corpus


def _named(columns: settings.Settings) -> dict[str, str]:
    found = {what: name for what, name in vars(columns).items() if name}
    found.pop("path", None)
    return found


def _with_parts(s: Any) -> Any:
    """Names the parts of a log of `ir_datasets`, where nothing else is named."""
    log, alone = s.logs.train, (Columns(), Queries(), Documents())
    named = (s.columns, s.queries, s.corpus) != alone
    if named or not log.startswith(tables.IR_DATASETS):
        return s
    asked, read = (tables.ir_columns(log, p) for p in (tables.QUERIES, tables.CORPUS))
    title = "title" if {"title", "text"} <= {*read} else ""
    query, text = ("text" if "text" in own else "default_text" for own in (asked, read))
    return dataclasses.replace(
        s,
        columns=Columns("", "query_id", "", "", "doc_id", "relevance"),
        queries=Queries(log, "query_id", query),
        corpus=Documents(log, "doc_id", text, title),
    )


STAGE = Import()
