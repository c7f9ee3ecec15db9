r"""Evaluate retrieval: on private test queries, or on public test sets.

    tfdpsq evaluate --workdir=JOB/private/evaluation --config.data=BEIR \
        --config.systems="{'bm25': 'bm25', 'mine': 'RETRIEVER'}"

Scores by trec_eval's rules. Numbers on private queries are covered by no ε: the output
is private. With `sets`, BEIR's or your own public ones, it evaluates zero-shot instead,
by the paper's rules; then only the systems can hold what is private, and the numbers
have their guarantee.

Writes TREC files, `runs/SYSTEM.trec` and `qrels.trec` (of sets `runs/SET/…`), and
`metrics.json`. The corpus is embedded and searched by shards.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tfdpsq import retriever
from tfdpsq.data.io import write_json
from tfdpsq.retriever.index import KINDS, TREE, require_tree
from tfdpsq.run.common import reranking, scores, search, similarity
from tfdpsq.run.common.benchmark_sets import METRICS, Part, parts_of
from tfdpsq.run.common.embeddings import (
    DOCUMENTS,
    QUERIES,
    Embeddings,
    require_one_encoder,
)
from tfdpsq.run.common.fusion import (
    FitSet,
    FusionSettings,
    require_protected,
    without_fits,
)
from tfdpsq.run.common.reranking import RerankSettings
from tfdpsq.run.common.search import BM25, EMBEDDINGS, Run
from tfdpsq.run.common.similarity import SimilaritySettings
from tfdpsq.run.frame import artefacts, corpus, runner, settings, shards
from tfdpsq.run.frame.artefacts import Benchmark, Generator, Pairs, SyntheticSet, System
from tfdpsq.run.frame.places import Privacy
from tfdpsq.run.frame.runner import Context, Given
from tfdpsq.run.frame.settings import nested, path, setting
from tfdpsq.validation import InputError

METRICS_FILE = "metrics.json"
_EXTENSION = "npz"
_OWN: Mapping[str, Any] = {"sets": ({},)}  # acts on the pairs' own split


@dataclasses.dataclass(frozen=True)
class Work:
    """What is searched, in parts: each test set as a whole, and by shards.

    Attributes:
      tests: the test sets.
      corpora: their documents, cut into shards; `None` where all search the whole.
      pieces: (test set, shard), by their numbers; shard -1 is the whole corpus.
    """

    tests: tuple[Part, ...]
    corpora: tuple[corpus.Parts | None, ...]
    pieces: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        """Returns the number of pieces."""
        return len(self.pieces)


class Evaluate(runner.ShardedStage):
    """Searches for test queries, and measures what is found."""

    name = "evaluate"
    strategies = ("default", "mirrored", "tpu")

    @dataclasses.dataclass(frozen=True)
    class Settings(settings.Settings):
        """Settings of `evaluate`."""

        data: str = path(Pairs, "pydocs", when=_OWN)
        split: str = setting("test", when=_OWN)
        ignore_identical_ids: bool = setting(
            False, when=_OWN, help="leave out a document with the query's own id"
        )
        sets: dict = path(
            Benchmark, {}, help="public test sets by BEIR's names, instead of data"
        )
        systems: dict = path(System, {BM25: BM25})
        indexes: dict = path(
            artefacts.Embeddings,
            {},
            when=_OWN,
            help="embeddings of the corpus for some systems, which embed no document",
        )
        query_embeddings: dict = path(
            artefacts.Embeddings,
            {},
            when=_OWN,
            help="those of the queries: the system is an adapter, or 'embeddings'",
        )
        baseline: str = setting("", help="the system that others are compared with")
        baselines: dict = setting({}, help="another one for some systems")
        fusion: FusionSettings = nested(FusionSettings)
        rerankers: dict = path(
            Generator, {}, help="generators that order a system's best documents"
        )
        rerank: RerankSettings = nested(RerankSettings, when="rerankers")
        synthetic: dict = path(
            SyntheticSet, {}, when=_OWN, help="sets to compare with private queries"
        )
        similarity_split: str = setting("dev", when="synthetic")
        similarity: SimilaritySettings = nested(SimilaritySettings, when="synthetic")
        k: int = setting(100, ge=10, help="documents for each query")
        index: str = setting("scann_brute_force", choices=KINDS)
        dtype: str = setting("float32", choices=("float32", "mixed_bfloat16"))
        resamples: int = setting(10_000, ge=1)
        seed: int = setting(0, ge=0, le=settings.SEED)
        strict: bool = setting(False, help="refuse reads that no epsilon covers")
        batch_size: int = setting(128, ge=1, speed=True)
        shard_documents: int = setting(65_536, ge=1, speed=True)

    def check(self, s: Settings, given: Given) -> None:
        """Refuses names and inputs that do not fit each other."""
        if not s.systems and not s.synthetic:
            raise InputError("systems and synthetic are empty: nothing to evaluate.")
        if not s.sets and not given["data"].raw:
            raise InputError(
                f"data is {s.data}, a set of queries. Give a BEIR directory."
            )
        self._check_names(s)
        for name, system in given["systems"].items():
            if name not in s.query_embeddings:
                search.require_retriever(f"systems.{name}", system)
            elif system.path == BM25 or name not in s.indexes:
                raise InputError(
                    f"query_embeddings names {name!r}. Give indexes.{name}, too, and "
                    f"as the system {EMBEDDINGS!r} or what train_adapter wrote."
                )
        for name, generator in given["rerankers"].items():
            reranking.require_scorer(f"rerankers.{name}", generator)
        if s.rerankers and s.rerank.depth > s.k:
            raise InputError(
                f"rerank.depth is {s.rerank.depth}, but k is {s.k}. Raise k."
            )
        for name, lacks in (
            ("fusion", bool(s.query_embeddings)),
            ("rerank", s.rerank.base in s.query_embeddings),
        ):
            fit = given.get(f"{name}.fit")
            require_protected(f"{name}.fit", fit)
            if fit is not None and (lacks or s.sets):
                lacking = "query_embeddings" if lacks else "sets"
                raise InputError(
                    f"{name}.fit is set, and so is {lacking}, which has nothing for "
                    f"its queries. Set {name}.weight instead."
                )

    def _check_names(self, s: Settings) -> None:
        """Refuses names that nothing has, and those that are no names of files."""
        for place, names in (
            ("baseline", [s.baseline]),
            ("baselines", [*s.baselines, *s.baselines.values()]),
            ("indexes", s.indexes),
            ("query_embeddings", s.query_embeddings),
            ("fusion.base", [s.fusion.base]),
            ("fusion.weights", s.fusion.weights),
            ("rerank.base", [s.rerank.base] if s.rerankers else []),
        ):
            unknown = [name for name in names if name and name not in s.systems]
            if unknown:
                known = ", ".join(sorted(s.systems))
                raise InputError(f"{place} names {unknown[0]!r}; systems are {known}.")
        if s.rerank.baseline and s.rerank.baseline not in s.rerankers:
            known = ", ".join(sorted(s.rerankers))
            raise InputError(
                f"rerank.baseline is {s.rerank.baseline!r}; rerankers are {known}."
            )
        names = [*s.systems, *s.rerankers, *s.sets, "qrels"]
        for name in names:
            word = [name] == name.split() and name == pathlib.PurePath(name).name
            if not word or names.count(name) > 1:
                raise InputError(
                    f"{name!r} names a system, a reranker or a set, and so a file. "
                    "Choose another name, without white space and slashes."
                )

    def privacy(self, s: Settings, given: Given) -> Privacy:
        """Private, unless on public sets, by systems of at most one guarantee."""
        origins = {one.origin for _, one in given.each() if one.origin}
        if not s.sets or len(origins) > 1:
            return Privacy.PRIVATE
        return given.privacy()

    def certificate(self, s: Settings, given: Given) -> dict[str, Any] | None:
        """That of the systems; numbers on private queries have none."""
        if self.privacy(s, given) == Privacy.PRIVATE:
            return None
        return super().certificate(s, given)

    def reads(self, s: Settings, given: Given) -> list[tuple[str, str]]:
        """All private queries that are searched for, or compared with."""
        where = f"{METRICS_FILE}, TREC files and whatever is made from them"
        judged = "the queries and judgements of"
        if s.sets:
            sets = given["sets"].items()
            private = [name for name, one in sets if one.privacy == Privacy.PRIVATE]
            return [(f"{judged} {name}", where) for name in private]
        found = [(f"{judged} split {s.split!r}", where)]
        if s.synthetic:
            splits = dict.fromkeys((s.similarity_split, s.similarity.training_split))
            found += [(f"the queries of split {split!r}", where) for split in splits]
        return found

    def parts(self, c: Context) -> Work:
        """Validates the data; cuts each corpus if a system is searched by shards."""
        s, tests = c.settings, _tests(c.settings, c.given)
        corpora, pieces = [], []
        for number, test in enumerate(tests):
            splits = [test.split]
            if s.synthetic:
                splits += [s.similarity_split, s.similarity.training_split]
            counts = test.beir().validate(tuple(dict.fromkeys(splits)))
            if s.index == TREE and set(s.systems.values()) != {BM25}:
                require_tree("index", counts.documents)
            whole, cut = _whole(s, test), None
            if whole:
                pieces.append((number, -1))
            if len(whole) < len(s.systems):
                cut = corpus.scan(str(test.beir().corpus_file)).cut(s.shard_documents)
                pieces += [(number, shard) for shard in range(len(cut))]
            corpora.append(cut)
        return Work(tuple(tests), tuple(corpora), tuple(pieces))

    def start(self, c: Context) -> shards.Make:
        """Returns what searches one piece."""
        s, work, given = c.settings, c.parts, c.given["systems"]
        dense = {n: one.path for n, one in given.items() if not _unsharded(s, n)}
        retrievers = search.Retrievers(dense, s.batch_size, s.dtype, c.scope)
        queries = functools.lru_cache(lambda number: _queries(c, work.tests[number]))

        def make(index: int, out: shards.ShardWriter) -> None:
            number, shard = work.pieces[index]
            test, documents = work.tests[number], work.corpora[number]
            asked, arrays = queries(number), dict[str, np.ndarray]()
            k = s.k + test.ignore_identical_ids  # one more, to leave out a self-match
            if shard < 0:
                for name, run, note in _search_whole(c, test, asked, k):
                    arrays.update(search.arrays_of(name, run, list(asked)))
                    out.result[name] = note
            elif documents is not None:
                best = retrievers.search(
                    test.name, asked, k, lambda: documents.read(shard), s.index
                )
                for name, one in best:
                    arrays[f"{name}/scores"] = one.scores
                    arrays[f"{name}/ids"] = one.ids.astype(str)
            out.count = len(asked)
            search.write_arrays(out.path(_EXTENSION), arrays)

        return make

    def merge(self, c: Context, made: shards.Shards) -> dict[str, Any]:
        """Measures every system on every set; writes `metrics.json`."""
        s, work = c.settings, c.parts
        found = []
        for number, test in enumerate(work.tests):
            own = [at for at, (of, _) in enumerate(work.pieces) if of == number]
            paths = [made.path(at, _EXTENSION) for at in own]
            marks = (made.mark(at) or {} for at in own)
            notes = {n: note for one in marks for n, note in one["result"].items()}
            found.append(
                scores.measure(c, test, _queries(c, test), _fits(c), paths, notes)
            )
        against = {name: s.baseline for name in s.systems}
        against.update(s.baselines)
        against.update(dict.fromkeys(s.rerankers, s.rerank.baseline))
        how = (against, s.resamples, s.seed)
        if s.sets:
            metrics = scores.summary_of_sets(found, *how)
        else:
            sets = {name: one.path for name, one in c.given["synthetic"].items()}
            similar = similarity.measure(
                s.similarity, sets, work.tests[0].beir(), s.similarity_split
            )
            metrics = {**scores.summary(found, *how), "similarity": similar}
        write_json(c.out / METRICS_FILE, metrics)
        rows = metrics["mean" if s.sets else "systems"]
        rows = rows["systems"] if s.sets else rows
        return {name: row[METRICS[0]] for name, row in rows.items()}


def _unsharded(s: Evaluate.Settings, name: str) -> bool:
    """Returns whether a system searches a whole corpus at a time, not by shards."""
    return s.systems[name] == BM25 or name in s.indexes or s.index == TREE


def _whole(s: Evaluate.Settings, test: Part) -> list[str]:
    """Returns the systems that do; for a set with flaws, which is small, all."""
    return [name for name in s.systems if test.as_published or _unsharded(s, name)]


def _tests(s: Evaluate.Settings, given: Given) -> list[Part]:
    if not s.sets:
        return [Part("", given["data"].path, s.split, s.ignore_identical_ids)]
    sets = sorted(given["sets"].items())  # shards are numbered in this order
    return [part for name, one in sets for part in parts_of(name, one.path)]


def _fits(c: Context) -> tuple[FitSet, FitSet]:
    """Reads the queries to fit the weights of fusion and reranking on."""
    s, given = c.settings, c.given
    return (
        FitSet(given.get("fusion.fit"), "fusion.fit", s.fusion.fit_queries),
        FitSet(given.get("rerank.fit"), "rerank.fit", s.rerank.fit_queries),
    )


def _queries(c: Context, test: Part) -> dict[str, str]:
    """Returns {id: text} of the judged queries, and of those to fit weights on."""
    beir = test.beir()
    judged = beir.qrels(test.split)
    found = {name: text for name, text in beir.read_queries() if name in judged}
    for fit in _fits(c):
        found.update(fit.queries)
    return found


def _search_whole(
    c: Context, test: Part, queries: Mapping[str, str], k: int
) -> Iterator[tuple[str, Run, dict[str, Any]]]:
    """Yields name and run of each system, and what its scores depend on."""
    s, given, beir, dense = c.settings, c.given, test.beir(), dict[str, str]()
    stored: dict[str, Embeddings] = {}
    for name in _whole(s, test):
        if name in s.indexes:
            stored[name] = own = Embeddings(
                given["indexes"][name], f"indexes.{name}", DOCUMENTS
            )
            own.require_made_of(
                corpus.scan(str(beir.corpus_file)).fingerprint, test.path
            )
            own.require((document.id for document in beir.documents()), test.path)
        if s.systems[name] == BM25:
            words = search.bm25(beir)
            yield name, words.search(queries, k, progress=True), words.settings
        elif name in s.query_embeddings:
            asked = Embeddings(
                given["query_embeddings"][name], f"query_embeddings.{name}", QUERIES
            )
            asked.require_made_of(c.inputs["data"], s.data, s.split)
            require_one_encoder(own, asked)
            adapter, names = given["systems"][name].path, without_fits(queries)
            yield name, search.by_embeddings(adapter, own, asked, names, k, s.index), {}
        else:
            dense[name] = given["systems"][name].path
    found = search.Retrievers(dense, s.batch_size, s.dtype, c.scope)
    for name, best in found.search(
        test.name, queries, k, beir.documents, s.index, stored
    ):
        yield name, retriever.as_run(list(queries), best.scores, best.ids), {}


STAGE = Evaluate()
