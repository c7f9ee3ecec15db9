"""Cuts a corpus into the shards of a pass, the same for any number of workers."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from absl import logging

from tfdpsq import validation
from tfdpsq.data import io
from tfdpsq.data.texts import Document
from tfdpsq.run.core import sources
from tfdpsq.run.passes import corpus_plan

PLAN_FILE = "plan.json"


@dataclasses.dataclass(frozen=True)
class CorpusShards:
    """Shards of a corpus, or of an evenly spread part of it; can be pickled.

    Of D documents, shard i of S holds those from D·i/S to D·(i+1)/S.

    Attributes:
      file: the corpus.
      most: number of documents taken; 0 takes all.
      plan: boundaries of the shards.
      only: ids of the documents that shards hold; `None` for all. The shards are cut as
        if there were none, so that some hold fewer.
    """

    file: str
    most: int
    plan: corpus_plan.CorpusPlan
    only: frozenset[str] | None = None

    @property
    def count(self) -> int:
        """Number of shards, S."""
        return len(self.plan.ranges)

    @property
    def documents(self) -> int:
        """Number of documents in all shards, D."""
        return min(self.most or self.plan.documents, self.plan.documents)

    def first(self, index: int) -> int:
        """Returns the number of documents in the shards before this one."""
        return self.documents * index // self.count

    def size(self, index: int) -> int:
        """Returns the number of documents in a shard."""
        return self.first(index + 1) - self.first(index)

    def read(self, index: int) -> Iterator[Document]:
        """Streams a shard's documents.

        Raises:
          DataError: a malformed line.
        """
        lines = self.plan.ranges[index]
        documents = corpus_plan.read_range(self.file, lines)
        total = self.plan.documents
        due = sources.due_documents(documents, lines.start, total, self.most or total)
        if self.only is None:
            return due
        return (document for document in due if document.id in self.only)

    def fingerprint_of_only(self) -> str:
        """Returns the SHA-256, in hex, of the ids in `only`, whatever their order."""
        text = json.dumps(sorted(self.only or ()))
        return hashlib.sha256(text.encode()).hexdigest()


def require_declared(config: Any, before: str = "") -> None:
    """Refuses documents of the training pairs that were not declared to be public.

    `before` precedes the names of settings in the error.
    """
    if config.documents == "train" and not config.training_documents_are_public:
        raise validation.InputError(
            f"{before}documents is 'train', so that the set shows which documents have "
            "private queries, which no epsilon covers. Set "
            f"{before}training_documents_are_public to True if that is public anyway, "
            f"or {before}documents to 'corpus'."
        )


def cut(
    corpus: str, most: int, shard_documents: int, pass_directory: str
) -> CorpusShards:
    """Cuts a corpus into shards, by the plan in a pass's directory if there is one.

    The plan saves a pass over the corpus: it is reused if the file's size is the same.

    `most` documents, evenly spread over the corpus, are taken; 0 takes all.

    Raises:
      InputError: a number out of range.
      DataError: malformed data.
    """
    return cut_file(_file_of(corpus), most, shard_documents, pass_directory)


def cut_file(
    file: str, most: int, shard_documents: int, pass_directory: str
) -> CorpusShards:
    """Cuts a JSON Lines file, plain or gzipped, of ids and texts, as `cut` does."""
    validation.positive_integer("shard_documents", shard_documents)
    if most:
        validation.positive_integer("the number of documents", most)

    def bounds(total: int) -> list[int]:
        taken = min(most or total, total)
        shards = max(1, math.ceil(taken / shard_documents))
        # The first n documents give n · taken // total: find the least n for each.
        firsts = (taken * index // shards for index in range(shards + 1))
        return [-(-first * total // (taken or 1)) for first in firsts]

    path, plan = f"{pass_directory}/{PLAN_FILE}", None
    if tf.io.gfile.exists(path):
        found = io.read_json(path, f"Move {pass_directory} away to begin again")
        plan = corpus_plan.CorpusPlan.from_json(found)
    if plan is None or not plan.describes(file, bounds(plan.documents)):
        plan = corpus_plan.plan_corpus(file, bounds)
    else:
        logging.info("%s/%s: the corpus is not read again", pass_directory, PLAN_FILE)
    return CorpusShards(file, most, plan)


def _file_of(corpus: str) -> str:
    """Returns the file of documents; looks at nothing else in a remote directory."""
    if io.is_local(corpus):
        return str(sources.open_beir(corpus).corpus_file)
    for name in ("corpus.jsonl", "corpus.jsonl.gz"):
        if tf.io.gfile.exists(f"{corpus.rstrip('/')}/{name}"):
            return f"{corpus.rstrip('/')}/{name}"
    raise validation.DataError(
        corpus, "has no corpus.jsonl (nor .gz)", "Give a BEIR directory"
    )
