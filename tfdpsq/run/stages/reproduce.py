r"""Reproduce the paper's tables: every row, ours next to the published number.

    tfdpsq reproduce --config=configs/paper/tables.py:tiny --config.table="('2',)" \
        --workdir=DIR

`table` takes several names of `tables`; () takes all, and rows that tables share are
made once. `configs/paper/tables.py:paper` needs MS MARCO, the BEIR sets and machines.
To resume, start the same command again.

Writes `private/tables.json` and `tables.html`: numbers, Kendall's τ between the two
orders of the rows, and for each ordering in the paper whether it holds here. They are
computed from private queries and must not be released; `private/examples.html` quotes
such queries.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections

from tfdpsq import validation
from tfdpsq.run.common.canary_set import DATA
from tfdpsq.run.common.search import BM25
from tfdpsq.run.frame import places, records, settings
from tfdpsq.run.frame.artefacts import SET
from tfdpsq.run.frame.pipeline import Job, Planned, Step, StepOutput, Steps
from tfdpsq.run.frame.settings import Rule, nested, setting
from tfdpsq.run.report import content, tables
from tfdpsq.run.report.tables import Row
from tfdpsq.run.stages import pipeline
from tfdpsq.validation import InputError

RETRIEVERS = "base"  # the size that all retrievers start from
_OF_ROWS = (
    *("init", "retriever_init", "epsilons", "direct_epsilons", "audit_epsilons"),
    *("embeddings", "adapter_epsilons", "histogram_epsilon", "rerank", "seed"),
)


class Reproduce(Job):
    """Makes the rows of the paper's tables, and compares."""

    name = "reproduce"

    @dataclasses.dataclass(frozen=True)
    class Settings(settings.Settings):
        """Settings of `reproduce`: a job, the sizes of T5, and the tables."""

        job: Any = nested(pipeline.STAGE.Settings, filled=_OF_ROWS)
        sizes: dict = setting(
            {"base": {"init": "t5_tiny_manuals"}},
            help='{size: {"init": T5, "finetune": settings that differ for it}}',
        )
        audit: dict = setting(
            {}, help="settings of job.finetune that differ on pairs with canaries"
        )
        seeds: tuple[int, ...] = setting((0,), of=Rule(ge=0, le=settings.SEED))
        sets: dict = setting(
            {}, help="of the zero-shot tables: {name: BEIR}; those without are left out"
        )
        table: tuple[str, ...] = setting(
            (), of=Rule(), help="names of tables; () is all"
        )
        tables: dict = setting({}, help="see configs/paper/tables.py")

        def __post_init__(self) -> None:
            """See `Settings`; mappings become plain ones."""
            super().__post_init__()
            for name in ("sizes", "audit", "sets", "tables"):
                plain = ml_collections.ConfigDict(getattr(self, name)).to_dict()
                object.__setattr__(self, name, plain)

    def steps(self, s: Settings, workdir: pathlib.Path) -> list[Step]:
        """Returns the steps of all rows, for each seed."""
        wanted = _wanted(s)
        made = _Rows(s, wanted)
        for seed in s.seeds:
            made.measure(seed)
        for row in made.of(tables.CANARIES):
            made.audit(row)
        return made

    def finish(
        self, s: Settings, planned: Sequence[Planned], workdir: pathlib.Path
    ) -> str:
        """Writes the tables; returns what holds of the paper's orderings."""
        paths = {each.step.name: each.place.path for each in planned}
        found: dict[str, Any] = {
            "tables": {},
            "seeds": list(s.seeds),
            "seconds": {e.step.name: records.seconds(e.place) for e in planned},
            "versions": records.versions(),
        }
        private, examples = workdir / places.PRIVATE, []
        own, resamples = s.job.evaluate, s.job.evaluate.resamples
        for name, table in _wanted(s).items():
            if table["measure"] == tables.EXAMPLES:
                with places.owner_only():
                    reads = records.private_reads(private)
                    reads.record("some private queries as they are", "examples.html")
                first = f"seed{s.seeds[0]}_synthetic_"
                sets = {
                    row.name: pathlib.Path(paths[first + row.part]) / SET
                    for row in tables.rows_of(table)
                }
                examples = content.examples(
                    s.job.data, own.similarity_split, s.job.examples, sets
                )
            else:
                ours = tables.cells(table, paths, s.seeds)
                found["tables"][name] = tables.compared(table, ours, resamples)
        text = tables.write(private, found, examples)
        return f"\n{text}\n\n{private / tables.PAGE_FILE}"


def _wanted(s: Reproduce.Settings) -> dict[str, Any]:
    for name in s.table:
        validation.one_of("table", name, tuple(s.tables))
    return {name: s.tables[name] for name in s.table or s.tables}


class _Rows(Steps):
    """The steps of the rows, each made once; a seed in a name gives it a ledger."""

    def __init__(self, s: Reproduce.Settings, wanted: Mapping[str, Any]):
        super().__init__()
        self.s, self.job, self.wanted = s, s.job, wanted
        splits = {s.job.finetune.split, s.job.retriever.split, s.job.evaluate.split}
        given = {"data": self.job.data, "splits": tuple(sorted(splits))}
        self.make("prepare", "prepare", {**given, "vocabulary_size": 0})

    def of(self, *measures: str) -> list[Row]:
        """Returns the rows of all tables of some measures, each once."""
        tables_ = [t for t in self.wanted.values() if t["measure"] in measures]
        return list(dict.fromkeys(row for t in tables_ for row in tables.rows_of(t)))

    def make(
        self, name: str, group: str, given: Mapping[str, Any], own: Any = None
    ) -> StepOutput:
        """Adds a step with a group of the job's settings, or `own`, once."""
        if not any(step.name == name for step in self):
            own = getattr(self.job, group) if own is None else own
            self.add(name, pipeline.STAGES[group], own, given)
        return StepOutput(name)

    def _model(self, size: str) -> str:
        """Returns the public T5 of a size."""
        validation.one_of("the size of a row", size, tuple(self.s.sizes))
        init = self.s.sizes[size].get("init", "")
        if not init:
            raise InputError(f"sizes.{size}.init is ''. Give a T5 of this size.")
        if not self.job.pretrain.steps:
            return init
        given = {"data": self.job.data, "init": init}
        return self.make(f"t5_{size}", "pretrain", given)

    def _generated(
        self, row: Row, name: str, pairs: str, seed: int, **changes: Any
    ) -> tuple[StepOutput, StepOutput]:
        """Returns a row's generator, and the set that it wrote; `name` has a blank."""
        config = settings.config_of(self.job.finetune)
        config.update({**self.s.sizes[row.size].get("finetune", {}), **changes})
        kind = type(self.job.finetune)
        own = settings.from_config(kind, config, "job.finetune.")
        given = {"init": self._model(row.size), "pairs": pairs, "seed": seed}
        given.update(epsilon=row.epsilon)
        generator = self.make(name.format("generator"), "finetune", given, own)
        given = {"generator": generator, "corpus": self.job.data, "seed": seed}
        written = self.make(name.format("synthetic"), "synthesize", given)
        return generator, StepOutput(f"{written}/{SET}")

    def _set(self, row: Row, seed: int) -> StepOutput:
        name = f"seed{seed}_{{}}_{row.part}"
        return self._generated(row, name, self.job.data, seed)[1]

    def _retriever(self, row: Row, seed: int) -> StepOutput:
        own = self.job.retriever
        start = self._model(RETRIEVERS)
        given: dict[str, Any] = {"init": start, "seed": seed, "pairs": self.job.data}
        if row.kind in tables.CONTROLS:
            given["pairs"] = StepOutput(f"prepare/{SET}")
        if row.kind == "untrained":
            given.update(steps=0, epochs=0.0)
        if row.kind == "original":
            given.update(validation_pairs=0)
        if row.kind == "synthetic":
            given["pairs"] = self._set(row, seed)
        if row.kind == "direct":
            given.update(epsilon=row.epsilon, steps=own.steps, epochs=own.epochs)
        group = "direct" if row.kind == "direct" else "retriever"
        return self.make(f"seed{seed}_retriever_{row.name}", group, given)

    def measure(self, seed: int) -> None:
        """Adds what the tables measure of one seed's rows."""
        own, default = self.job.evaluate, type(self.job.evaluate)()
        shared = "k index dtype resamples seed batch_size shard_documents".split()
        common = {name: getattr(own, name) for name in shared}
        compared = {
            r.name: self._set(r, seed)
            for r in self.of(tables.SIMILARITY, tables.EXAMPLES)
        }
        searched = {r.name: self._retriever(r, seed) for r in self.of(tables.RETRIEVAL)}
        similar = {row.name: compared[row.name] for row in self.of(tables.SIMILARITY)}
        if searched or similar:
            given = {
                "data": self.job.data,
                "systems": {BM25: BM25, **searched},
                **common,
            }
            given.update(split=own.split, synthetic=similar)
            if similar:
                given.update(similarity_split=own.similarity_split)
                given.update(similarity=own.similarity)
            self.make(f"seed{seed}_retrieval", "evaluate", given, default)
        sets = {name: path for name, path in self.s.sets.items() if path}
        systems = {r.name: self._retriever(r, seed) for r in self.of(tables.ZERO_SHOT)}
        if systems and not sets:
            raise InputError("sets holds none, for the zero-shot tables. Give some.")
        if systems:
            given = {"systems": systems, "sets": sets, **common}
            self.make(f"seed{seed}_zero_shot", "evaluate", given, default)

    def audit(self, row: Row) -> None:
        """Adds a generator that is trained on canaries, and its audit."""
        given = {"data": self.job.data, "user_field": self.job.finetune.user_field}
        made = self.make("canaries", "canaries", given)
        pairs, name = StepOutput(f"{made}/{DATA}"), f"audited_{{}}_{row.part}"
        generator, written = self._generated(row, name, pairs, 0, **self.s.audit)
        given = {"canaries": made, "generator": generator, "synthetic": written}
        self.make(f"audit_{row.part}", "audit", given)


STAGE = Reproduce()
