r"""Evaluate retrieval: on private test queries, or on public test sets.

    tfdpsq evaluate --workdir=JOB/private/evaluation --config.data=BEIR \
        --config.systems="{'bm25': 'bm25', 'mine': 'RETRIEVER'}"

Scores by trec_eval's rules; no ε covers numbers on private queries. With `sets`, BEIR's
or your own public ones, it evaluates zero-shot by the paper's rules, and the numbers
have the guarantee of the systems.

Writes TREC files, `runs/SYSTEM.trec` and `qrels.trec` (of sets `runs/SET/…`), and
`metrics.json`. The corpus is embedded and searched by shards.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from tfdpsq import retriever
from tfdpsq.data import io
from tfdpsq.retriever.index import EXACT, ROWS, search_chunks
from tfdpsq.run.common import embeddings, fusion, kinds, scores, search, similarity
from tfdpsq.run.common.benchmark_sets import METRICS, Part, parts_of
from tfdpsq.run.common.corpus import Parts, scan
from tfdpsq.run.common.fusion import FusionSettings, RerankSettings
from tfdpsq.run.common.kinds import Generator, Pairs, Retriever, SyntheticSet
from tfdpsq.run.common.search import BM25, EMBEDDINGS, Run
from tfdpsq.run.common.similarity import SimilaritySettings
from tfdpsq.run.frame import runner, settings, shards
from tfdpsq.run.frame.places import Privacy
from tfdpsq.run.frame.runner import Context, Given
from tfdpsq.run.frame.settings import nested, path, setting
from tfdpsq.validation import InputError

METRICS_FILE = "metrics.json"
_REMEDY = "Remove the shards next to it: they are made again."
_OWN: Mapping[str, Any] = {"sets": ({},)}  # acts on the pairs' own split


@dataclasses.dataclass(frozen=True)
class Piece:
    """Systems that search a corpus, or a shard of it, together."""

    test: Part
    systems: tuple[str, ...]  # their names
    cut: Parts | None = None  # `None`: the whole corpus
    shard: int = 0


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
            kinds.Benchmark, {}, help="public test sets by name, instead of data"
        )
        systems: dict = path(kinds.System, {BM25: BM25})
        indexes: dict = path(
            kinds.Embeddings,
            {},
            when=_OWN,
            help="embeddings of the corpus for some systems, which embed no document",
        )
        query_embeddings: dict = path(
            kinds.Embeddings,
            {},
            when=_OWN,
            help="those of the queries: the system is an adapter, or 'embeddings'",
        )
        baseline: str = setting("", help="the system that others are compared with")
        baselines: dict = setting({}, help="another one for some")
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
        index: str = setting("scann_brute_force", choices=EXACT)
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
            raise InputError(f"data is {s.data}, a set. Give a BEIR directory.")
        self._check_names(s)
        for name, system in given["systems"].items():
            known = system.path == BM25 or system.promised
            if name in s.query_embeddings:
                if system.path == BM25 or name not in s.indexes:
                    raise InputError(
                        f"query_embeddings names {name!r}. Give indexes.{name}, too, "
                        f"and as the system {EMBEDDINGS!r} or what train_adapter wrote."
                    )
            elif not (known or Retriever.is_at(system.path)):
                raise InputError(
                    f"systems.{name} is {system.path}, which embeds no text. Give "
                    f"{BM25!r}, or {Retriever.wanted}."
                )
        for name, generator in given["rerankers"].items():
            fusion.require_scorer(f"rerankers.{name}", generator)
        if s.rerankers and s.rerank.depth > s.k:
            raise InputError(f"rerank.depth is {s.rerank.depth}, k {s.k}. Raise k.")

    def _check_names(self, s: Settings) -> None:
        """Refuses names that nothing has, and those that are no names of files."""
        measured = {**s.systems, **s.rerankers}
        for place, names, known in (
            ("baseline", [s.baseline], measured),
            ("baselines", [*s.baselines, *s.baselines.values()], measured),
            ("indexes", s.indexes, s.systems),
            ("query_embeddings", s.query_embeddings, s.systems),
            ("fusion.base", [s.fusion.base], s.systems),
            ("fusion.weights", s.fusion.weights, s.systems),
            ("rerank.base", [s.rerank.base] if s.rerankers else [], s.systems),
        ):
            unknown = [name for name in names if name and name not in known]
            if unknown:
                there = ", ".join(sorted(known))
                raise InputError(f"{place} names {unknown[0]!r}; there are {there}.")
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

    def parts(self, c: Context) -> list[Piece]:
        """Validates the data; cuts each corpus if a system is searched by shards."""
        s, pieces = c.settings, list[Piece]()
        for test in _tests(s, c.given):
            more = (s.similarity_split, s.similarity.training_split)
            splits = (test.split, *(more if s.synthetic else ()))
            test.beir().validate(tuple(dict.fromkeys(splits)))
            whole = tuple(
                name
                for name, path in s.systems.items()
                if path == BM25 or name in s.indexes
            )
            by_shards = tuple(name for name in s.systems if name not in whole)
            if whole:
                pieces.append(Piece(test, whole))
            if by_shards:
                cut = scan(str(test.beir().corpus_file)).cut(s.shard_documents)
                pieces += [Piece(test, by_shards, cut, at) for at in range(len(cut))]
        return pieces

    def start(self, c: Context) -> shards.Make:
        """Returns what searches one piece."""
        s = c.settings
        paths = {name: one.path for name, one in c.given["systems"].items()}
        retrievers = search.Retrievers(paths, s.batch_size, s.dtype, c.scope)
        queries = functools.lru_cache(_queries)

        def make(index: int, out: shards.ShardWriter) -> None:
            piece = c.parts[index]
            asked = queries(piece.test)
            for name, run in _search(c, piece, asked, retrievers, out.result):
                io.atomic_write(out.path(f"{name}.run"), json.dumps(run))
            out.count = len(asked)

        return make

    def merge(self, c: Context, made: shards.Shards) -> dict[str, Any]:
        """Measures every system on every set; writes `metrics.json`."""
        s, found, notes = c.settings, list[scores.Measured](), dict[str, Any]()
        for at in range(len(c.parts)):
            notes.update((made.mark(at) or {})["result"])
        tests = _tests(s, c.given)
        for test in tests:
            k = s.k + test.ignore_identical_ids

            def run_of(name: str, test: Part = test, k: int = k) -> Run:
                files = (
                    made.path(at, f"{name}.run")
                    for at, piece in enumerate(c.parts)
                    if piece.test == test and name in piece.systems
                )
                return search.merged((io.read_json(f, _REMEDY) for f in files), k)

            found.append(scores.measure(c, test, _queries(test), run_of))
        if s.sets:
            metrics = scores.summary_of_sets(found, s)
            systems = metrics["mean"]["systems"]
        else:
            metrics = scores.summary(found, s)
            systems = metrics["systems"]
            sets = {name: one.path for name, one in c.given["synthetic"].items()}
            metrics["similarity"] = similarity.measure(
                s.similarity, sets, tests[0].beir(), s.similarity_split
            )
        io.write_json(c.out / METRICS_FILE, {**metrics, "settings": notes})
        return {name: row[METRICS[0]] for name, row in systems.items()}


def _tests(s: Evaluate.Settings, given: Given) -> list[Part]:
    if not s.sets:
        return [Part("", given["data"].path, s.split, s.ignore_identical_ids)]
    sets = sorted(given["sets"].items())  # shards are numbered in this order
    return [part for name, one in sets for part in parts_of(name, one.path)]


def _queries(test: Part) -> dict[str, str]:
    """Returns {id: text} of the judged queries."""
    beir = test.beir()
    judged = beir.qrels(test.split)
    return {name: text for name, text in beir.read_queries() if name in judged}


def _search(
    c: Context,
    piece: Piece,
    queries: Mapping[str, str],
    retrievers: search.Retrievers,
    notes: dict[str, Any],
) -> Iterator[tuple[str, Run]]:
    """Yields name and run of each system; notes what BM25's scores depend on."""
    s, test, beir, dense = c.settings, piece.test, piece.test.beir(), list[str]()
    k = s.k + test.ignore_identical_ids  # one more, to leave out a self-match
    for name in piece.systems:
        if s.systems[name] == BM25:
            words = search.bm25(beir)
            notes[name] = words.settings
            yield name, words.search(queries, k, progress=True)
        elif name in s.indexes:
            yield name, _search_index(c, test, name, queries, retrievers, k)
        else:
            dense.append(name)

    def documents() -> Iterator[Any]:
        return beir.documents() if piece.cut is None else piece.cut.read(piece.shard)

    yield from retrievers.search(dense, test.name, queries, k, documents, s.index)


def _search_index(
    c: Context,
    test: Part,
    name: str,
    queries: Mapping[str, str],
    retrievers: search.Retrievers,
    k: int,
) -> Run:
    """Searches embeddings of the corpus, for those of queries, or by a retriever."""
    s, given, beir = c.settings, c.given, test.beir()
    opened, place = embeddings.Embeddings, f"indexes.{name}"
    held = opened(given["indexes"][name], place, embeddings.DOCUMENTS)
    held.require_made_of(scan(str(beir.corpus_file)).fingerprint, test.path)
    held.require((document.id for document in beir.documents()), test.path)
    if name in s.query_embeddings:
        place = f"query_embeddings.{name}"
        asked = opened(given["query_embeddings"][name], place, embeddings.QUERIES)
        asked.require_made_of(c.inputs["data"], s.data, s.split)
        embeddings.require_one_encoder(held, asked)
        adapter, vectors = given["systems"][name].path, asked.take(list(queries))
        vectors = search.adapted(adapter, vectors, held)
    else:
        vectors = retrievers.embed(name, test.name, queries)
        tower = retrievers.towers[name]
        retriever.VectorStore(held.store.directory, tower)  # refuses another's
    best = search_chunks({"": vectors}, held.chunks(ROWS), k, s.index)[""]
    return retriever.as_run(list(queries), best.scores, best.ids)


STAGE = Evaluate()
