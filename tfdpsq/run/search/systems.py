"""Checks of the systems that `evaluate` and `zero_shot` measure, before any search."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

import ml_collections

from tfdpsq import evaluation, validation
from tfdpsq.retriever import index
from tfdpsq.run.core import layout, workdir
from tfdpsq.run.search import benchmark_sets

BM25 = "bm25"
# Embeddings that exist, as they are.
EMBEDDINGS = "embeddings"
# The one kind of index that needs all embeddings in memory.
TREE = index.TREE
INDEXES = index.KINDS


@dataclasses.dataclass(frozen=True)
class Systems:
    """Systems to search with.

    Attributes:
      paths: name -> "bm25", the directory of a retriever, or, of those in `queries`,
        that of an adapter or "embeddings".
      index: one of INDEXES.
      batch_size: texts embedded at a time.
      dtype: of the encoders that embed them; see `layers.T5Backbone`.
      indexes: name -> output of `index` or `encode` with embeddings to use.
      queries: name -> directory of the embeddings of queries that exist; such a system
        embeds nothing. See `search.adapted`.
    """

    paths: Mapping[str, str]
    index: str
    batch_size: int
    dtype: str
    indexes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    queries: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, config: ml_collections.ConfigDict) -> Systems:
        """Returns the systems that a stage's settings name."""
        return cls(
            dict(config.systems),
            config.index,
            config.batch_size,
            config.dtype,
            dict(config.get("indexes", {})),
            dict(config.get("query_embeddings", {})),
        )

    @property
    def retrievers(self) -> dict[str, str]:
        """Returns the systems that embed texts."""
        return {
            name: path
            for name, path in self.paths.items()
            if path != BM25 and name not in self.queries
        }

    @property
    def adapted(self) -> dict[str, str]:
        """Returns the systems of embeddings that exist."""
        return {name: self.paths[name] for name in self.queries}

    @property
    def by_shards(self) -> list[str]:
        """Returns those that embed a corpus here and can search it by shards."""
        if self.index == TREE:
            return []
        return [name for name in self.retrievers if not self.indexes.get(name)]

    def fingerprints(self) -> dict[str, str]:
        """Returns the ids of all retrievers, as inputs of a stage.

        Raises:
          InputError: one is missing.
        """
        return {
            f"system {name}": workdir.stage_fingerprint(path)
            for name, path in sorted({**self.retrievers, **self.adapted}.items())
            if path != EMBEDDINGS
        }

    def require_documents(self, count: int) -> None:
        """Refuses a corpus with too few documents for the index."""
        if self.index == TREE and self.retrievers:
            index.require_tree("index", count)

    def require_retrievers(self) -> None:
        """Refuses the first system that holds no retriever."""
        for name, path in self.retrievers.items():
            if (pathlib.Path(path) / layout.ADAPTER_FILE).is_file():
                raise validation.InputError(
                    f"systems.{name} is {path}, an adapter of embeddings, which are "
                    f"not given. Set query_embeddings.{name} and indexes.{name}."
                )
            if not (pathlib.Path(path) / layout.RETRIEVER_MODEL).is_dir():
                raise validation.InputError(
                    f"system {name!r} is {path}, which holds no retriever. Give what "
                    "train_retriever wrote."
                )


def check_search(paths: Mapping[str, str], k: int, metrics: Sequence[str]) -> None:
    """Refuses names and numbers that would make a search impossible to score."""
    evaluation.evaluate_run({"q": {"d": 1}}, {"q": {"d": 1.0}}, metrics)
    for metric in metrics:
        if int(metric.partition("@")[2] or 0) > k:
            raise validation.InputError(
                f"{metric!r} needs more documents than the {k} that are found for a "
                "query. Raise k."
            )
    for name, path in paths.items():
        benchmark_sets.check_file_name("a system", name)
        if not path:
            raise validation.InputError(
                f"systems.{name} is {path!r}. Give it the directory of a retriever "
                f"that train_retriever wrote, or {BM25!r}."
            )
