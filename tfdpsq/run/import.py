"""Import a query log: Parquet, TSV, CSV, JSONL, TFDS or ir_datasets to BEIR.

    tfdpsq import --workdir=private/pairs --config.logs.train=log.parquet
        --config.columns.user=user_id --config.log_documents_are_public=True

Writes a BEIR directory for `--config.data` and `--config.pairs` of other stages, and
tells which rows were dropped and why. Rows are read in pieces and joined on disk:
memory does not grow with the log. The output holds the private queries, and is refused
where things are released. Files of a synthetic set, or of another stage's output that
is not public, are refused: they are no raw log.

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
or of the user. No cut depends on other people's rows, see `tfdpsq.data.importing`; for
cuts in time, give a log for each split.
"""

from __future__ import annotations

import hashlib
import pathlib
from typing import Any

import ml_collections
from absl import logging

from tfdpsq import validation
from tfdpsq.data import importing, io, sets, tables
from tfdpsq.run.core import acting, command, releases, settings, sources, workdir

_QUERY, _USER = _SPLIT_BY = ("query", "user")
_NAMES = settings.Text("")

SETTINGS: settings.Declaration = {
    "logs": {"train": _NAMES, "dev": _NAMES, "test": _NAMES},
    "columns": {
        "query": settings.Text("query"),
        "query_id": _NAMES,
        "document": settings.Text("document"),
        "title": _NAMES,
        "document_id": _NAMES,
        "score": _NAMES,
        "user": _NAMES,
    },
    "queries": {
        "path": _NAMES,
        "columns": {
            "query_id": settings.Text("query_id"),
            "query": settings.Text("query"),
            "user": _NAMES,
        },
    },
    "corpus": {
        "path": _NAMES,
        "columns": {
            "document_id": settings.Text("document_id"),
            "document": settings.Text("document"),
            "title": _NAMES,
        },
    },
    "header": settings.Flag(True),
    # The documents of a log tell what people looked for, unless all of them are known.
    "log_documents_are_public": settings.Flag(False),
    "split_by": settings.Text(_QUERY, _SPLIT_BY),
    "dev_share": settings.Number(0.1, 0, 1, high_open=True),
    "test_share": settings.Number(0.1, 0, 1, high_open=True),
    "seed": settings.Integer(0, 0, settings.SEED),
    "private_directory": settings.Text(""),
}

ACTING = (
    acting.Only("queries.columns.*", "queries.path"),
    acting.Only("corpus.columns.*", "corpus.path"),
    # Of rows that hold their documents; others' titles are in the corpus.
    acting.Only("columns.title", "corpus.path", ("",)),
)


def default_config() -> ml_collections.ConfigDict:
    """Returns the stage's settings.

    `columns` names the log's columns, "" for those that are not there; text files
    without a `header` have columns "0", "1", ... A log with `query_id` and no `query`
    takes texts from `queries.path`, one with `document_id` and no `document` from
    `corpus.path`, all of which becomes the corpus.
    """
    return settings.default_config(SETTINGS)


def run(config: ml_collections.ConfigDict, directory: pathlib.Path) -> dict:
    """Runs the stage into `directory` unless it is finished there.

    Raises:
      InputError: bad settings, a table, column or library that is missing, no row left,
        or a released place.
      DataError: a malformed file.
    """
    settings.check(config, SETTINGS)
    config = _with_parts(config)
    acting.require_acting(config, SETTINGS, ACTING)
    logs, queries, corpus = _tables(config)
    split = _split(config, len(logs))
    output = releases.Output(
        directory, releases.PRIVATE, "private pairs", config.private_directory
    )
    private = releases.private_directory(directory, config.private_directory)
    for table in (*logs.values(), queries, corpus):
        if table is not None:
            _require_raw(table)
    inputs = {
        name: sources.keyed_fingerprint(_content(table), private)
        for name, table in (("queries", queries), ("corpus", corpus), *logs.items())
        if table is not None
    }

    def make(out: pathlib.Path) -> dict:
        report = importing.import_pairs(out, logs, split, queries, corpus)
        for reason, count in report.dropped.most_common():
            first = report.first.get(reason)
            where = f" (first {first})" if first else ""
            logging.warning("dropped %d rows: %s%s", count, reason, where)
        logging.info(
            "%d rows: %d queries on %d documents; pairs %s",
            *(report.rows, report.queries, report.documents, report.pairs),
        )
        return {
            "rows": report.rows,
            "queries": report.queries,
            "documents": report.documents,
            "pairs": report.pairs,
            "dropped": dict(report.dropped),
        }

    return workdir.run_stage(output, config, inputs, make)


def _with_parts(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """Names the queries, documents and columns of a log of `ir_datasets`.

    It does so where nothing but the log is named, and returns other configs unchanged.
    """
    table = config.logs.train
    given, default = workdir.plain(config), workdir.plain(default_config())
    named = any(
        given[part] != default[part] for part in ("columns", "queries", "corpus")
    )
    alone = not (config.logs.dev or config.logs.test)
    if not table.startswith(tables.IR_DATASETS) or named or not alone:
        return config
    config = config.copy_and_resolve_references()
    config.columns.update(query="", document="", query_id="query_id")
    config.columns.update(document_id="doc_id", score="relevance")
    config.queries.path = config.corpus.path = table
    config.queries.columns.update(query_id="query_id", query="text")
    title = "title" if "title" in tables.ir_columns(table, tables.CORPUS) else ""
    config.corpus.columns.update(document_id="doc_id", document="text", title=title)
    return config


def _tables(config: ml_collections.ConfigDict) -> Any:
    """Returns split -> log, the table of queries and the corpus, or `None` for those.

    Raises:
      InputError: columns that do not fit each other.
    """
    if not config.logs.train:
        raise validation.InputError(
            "logs.train is ''; it must be set: the path of a log, ir_datasets:NAME or "
            "tfds:NAME."
        )

    def named(columns: Any) -> dict[str, str]:
        return {what: name for what, name in columns.items() if name}

    queries = corpus = None
    columns = named(config.columns)
    for part, text, key in (
        ("queries", "query", "query_id"),
        ("corpus", "document", "document_id"),
    ):
        if not config[part].path:
            if text not in columns:
                raise validation.InputError(
                    f"columns.{text} is '', and {part}.path too: rows have no {text}. "
                    f"Name its column, or set columns.{key} and {part}.path."
                )
            continue
        if key not in columns or text in columns:
            raise validation.InputError(
                f"{part}.path is {validation.shown(config[part].path)}, to which rows "
                f"refer by id. Set columns.{key}, and columns.{text} to ''."
            )
        own = named(config[part].columns)
        for name in (key, text):
            if name not in own:
                raise validation.InputError(
                    f"{part}.columns.{name} is ''. Name the column of {part}.path."
                )
        table = tables.Table(config[part].path, own, config.header, part)
        if part == "queries":
            queries = table
        else:
            corpus = table
    if corpus is None and not config.log_documents_are_public:
        raise validation.InputError(
            "the corpus would be the documents of this log, which tell what people "
            "looked for; documents are public to every stage. Give the documents as a "
            "table of their own with corpus.path, or set "
            "log_documents_are_public=True if everybody may know this list."
        )
    logs = {
        name: tables.Table(path, columns, config.header)
        for name, path in config.logs.items()
        if path
    }
    return logs, queries, corpus


def _require_raw(table: tables.Table) -> None:
    """Refuses what tfdpsq made: as raw private pairs it would cost nothing."""
    if table.path.startswith(tables.IR_DATASETS):
        return
    for path in tables.files_of(table.path):
        problem = sources.why_not_public(path, raw_pairs=False)
        if table.path.startswith(tables.TFDS) and "/beir_directory/" in path:
            # `tfds_builder` keeps no record of what the directory was.
            problem = "is of a BEIR directory, perhaps of a synthetic set"
        if not problem and tables.format_of(path) == ".parquet":
            marked = sets.is_marked(path)
            problem = "is part of a set, as its metadata say" if marked else None
        if problem:
            raise validation.InputError(
                f"{path} {problem}. One private query can have a part in all of its "
                "rows, and imported pairs are taken for raw ones: give the log as it "
                "was collected. A set needs no import: give it to other stages as it "
                "is."
            )


def _split(config: ml_collections.ConfigDict, tables_given: int) -> Any:
    """Returns how rows are divided; `None` where every split has a log.

    Raises:
      InputError: shares or columns that do not fit `split_by`.
    """
    ways = ("split_by", "dev_share", "test_share", "seed")
    changed = [name for name in ways if config[name] != default_config()[name]]
    if tables_given > 1:
        if changed:
            raise validation.InputError(
                f"{changed[0]} is {validation.shown(config[changed[0]])}, which does "
                "nothing here: logs.dev or logs.test is set, so every row's split is "
                "that of its log. Leave it at its default."
            )
        return None
    has_users = config.columns.user or config.queries.columns.user
    if config.split_by == _USER and not has_users:
        raise validation.InputError(
            "split_by is 'user', and columns.user is ''. Name the column of users."
        )
    shares = {
        importing.DEV: config.dev_share,
        importing.TEST: config.test_share,
    }
    if sum(shares.values()) >= 1:
        raise validation.InputError(
            f"dev_share is {config.dev_share:g} and test_share {config.test_share:g}: "
            "nothing is left for training. Lower them to a sum below 1."
        )
    return importing.by_hash(shares, config.seed, config.split_by == _USER)


def _content(table: tables.Table) -> str:
    """Returns the SHA-256 of a table's files; the name of an `ir_datasets` one."""
    if table.path.startswith(tables.IR_DATASETS):
        return table.path
    digest = hashlib.sha256()
    for path in tables.files_of(table.path):
        digest.update(io.sha256_of_file(path).encode())
    return digest.hexdigest()


if __name__ == "__main__":
    command.main(run)
