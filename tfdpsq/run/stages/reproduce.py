r"""Reproduce the paper's tables: every row, ours next to the published number.

    tfdpsq reproduce --config=configs/paper/tables.py:tiny --config.table="('3',)" \
        --workdir=DIR

`table` takes several names of `tables`; () takes all, and rows that tables share are
made once. `configs/paper/tables.py:paper` needs MS MARCO, the BEIR sets and machines.
To resume, start the same command again.

Writes `private/tables.json` and `tables.html`: numbers, and for each ordering in the
paper whether it holds here. They are computed from private queries and must not be
released; `private/examples.html` quotes such queries.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from tfdpsq import validation
from tfdpsq.run.common.canary_set import DATA, LEFT_OUT
from tfdpsq.run.common.kinds import SET
from tfdpsq.run.common.search import BM25
from tfdpsq.run.frame import places, records, settings
from tfdpsq.run.frame.settings import Rule, nested, setting
from tfdpsq.run.jobs import Job, Planned, Step, StepOutput
from tfdpsq.run.report import content, tables
from tfdpsq.run.report.tables import RETRIEVAL, ZERO_SHOT, Row
from tfdpsq.run.stages import pipeline
from tfdpsq.run.stages._steps import STAGES, JobSteps, of_split
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
        overlap: Any = nested(STAGES["overlap"].Settings, filled=("data", "seed"))
        seeds: tuple[int, ...] = setting((0,), of=Rule(ge=0, le=settings.SEED))
        sets: dict = setting(
            {}, help="of the zero-shot tables: {name: BEIR}; those without are left out"
        )
        table: tuple[str, ...] = setting(
            (), of=Rule(), help="names of tables; () is all"
        )
        tables: dict = setting({}, help="see configs/paper/tables.py")
        examples_about: tuple[str, ...] = setting(
            (), of=Rule(), help="words of documents that are shown first"
        )

    def steps(self, s: Settings, workdir: pathlib.Path) -> list[Step]:
        """Returns the steps of all rows, for each seed."""
        return _Rows(s)

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
                first, rows = f"seed{s.seeds[0]}_synthetic_", tables.rows_of(table)
                made = {row.name: paths[first + row.part] for row in rows}
                sets = {name: pathlib.Path(path) / SET for name, path in made.items()}
                shown = s.job.examples, sets, s.examples_about
                examples = content.examples(s.job.data, own.similarity_split, *shown)
            else:
                ours = tables.cells(table, paths, s.seeds)
                found["tables"][name] = tables.compared(table, ours, resamples)
        text = tables.write(private, found, examples)
        return f"\n{text}\n\n{private / tables.PAGE_FILE}"


def _wanted(s: Reproduce.Settings) -> dict[str, Any]:
    for name in s.table:
        validation.one_of("table", name, tuple(s.tables))
    return {name: s.tables[name] for name in s.table or s.tables}


class _Rows(JobSteps):
    """The steps of the rows; a seed in a name gives it a ledger."""

    def __init__(self, s: Reproduce.Settings):
        super().__init__(s.job)
        self.all, self.wanted = s, _wanted(s)
        for self.seed in s.seeds:
            before = f"seed{self.seed}_"
            self.measure(before)
            for row in self.of(tables.CANARIES):  # others for each seed
                self.audit(row.part, *self._finetune(row, **s.audit), before)
            for table in self.wanted.values():
                if table["measure"] == tables.GRID:
                    self.grid(tables.rows_of(table), table["most_pairs"], before)

    def of(self, *measures: str) -> list[Row]:
        """Returns the rows of all tables of some measures, each once."""
        tables_ = [t for t in self.wanted.values() if t["measure"] in measures]
        return list(dict.fromkeys(row for t in tables_ for row in tables.rows_of(t)))

    def _model(self, size: str) -> str:
        """Returns the public T5 of a size."""
        validation.one_of("the size of a row", size, tuple(self.all.sizes))
        return self.model(f"t5_{size}", self.all.sizes[size].get("init", ""))

    def _finetune(self, row: Row, **changes: Any) -> tuple[dict[str, Any], Any]:
        """Returns what is given to a row's generator, and its settings."""
        given = {"init": self._model(row.size), "epsilon": row.epsilon}
        config = settings.config_of(self.s.finetune)
        config.update({**self.all.sizes[row.size].get("finetune", {}), **changes})
        own = settings.from_config(type(self.s.finetune), config, "job.finetune.")
        return given, own

    def _set(self, row: Row, before: str, pairs: str = "", **more: Any) -> StepOutput:
        given, own = self._finetune(row)
        given["pairs"] = pairs or self.pairs
        return self.generated(f"{before}{{}}_{row.part}", given, own, **more)[1]

    def _retriever(self, row: Row, before: str) -> StepOutput:
        given: dict[str, Any] = {"init": self._model(RETRIEVERS)}
        if row.kind == "synthetic":
            given["pairs"] = self._set(row, before)
        if row.kind == "direct":
            given["epsilon"] = row.epsilon
        kind = row.kind.replace("-", "_")
        return self.retriever(f"{before}retriever_{row.name}", kind, given)

    def measure(self, before: str) -> None:
        """Adds what the tables measure of one seed's rows."""
        own, default = self.s.evaluate, type(self.s.evaluate)()
        shared = "k index dtype resamples seed batch_size shard_documents".split()
        common = {name: getattr(own, name) for name in shared}
        compared = self.of(tables.SIMILARITY, tables.EXAMPLES)
        sets = {r.name: self._set(r, before) for r in compared}
        searched = {r.name: self._retriever(r, before) for r in self.of(RETRIEVAL)}
        similar = {row.name: sets[row.name] for row in self.of(tables.SIMILARITY)}
        if searched or similar:
            given = {"systems": {BM25: BM25, **searched}, "synthetic": similar}
            given.update(data=self.pairs, split=own.split, **common)
            if similar:
                given.update(similarity_split=own.similarity_split)
                given.update(similarity=own.similarity)
            self.make(f"{before}{RETRIEVAL}", "evaluate", given, own=default)
        beir = {name: path for name, path in self.all.sets.items() if path}
        systems = {r.name: self._retriever(r, before) for r in self.of(ZERO_SHOT)}
        if systems and not beir:
            raise InputError("sets holds none, for the zero-shot tables. Give some.")
        if systems:
            given = {"systems": systems, "sets": beir, **common}
            self.make(f"{before}{ZERO_SHOT}", "evaluate", given, own=default)
        if self.of(tables.OVERLAP):
            given = {"data": self.pairs}
            self.make(tables.OVERLAP, "overlap", given, own=self.all.overlap)

    def grid(self, points: Sequence[Row], most_pairs: int, before: str) -> None:
        """Adds a grid's points, and their BLEU on pairs that none was trained on."""
        own: Any = STAGES["canaries"].Settings(trials=0)
        cut = self.canaries(f"{before}grid_pairs", own, most_pairs=most_pairs)
        pairs, own = StepOutput(f"{cut}/{DATA}"), self.s.evaluate.similarity
        writing = of_split(pairs, LEFT_OUT)
        given: dict[str, Any] = {"data": pairs, "split": LEFT_OUT, "systems": {}}
        given["similarity_split"] = LEFT_OUT
        given["similarity"] = dataclasses.replace(
            own, samples=1, training_split=LEFT_OUT
        )
        given["synthetic"] = {
            row.name: self._set(row, before, pairs, **writing) for row in points
        }
        own = type(self.s.evaluate)()
        self.make(f"{before}{tables.GRID}", "evaluate", given, own=own)


STAGE = Reproduce()
