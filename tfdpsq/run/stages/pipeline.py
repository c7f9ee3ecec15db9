"""Run the whole job: from private pairs to synthetic queries, retrievers and a report.

    tfdpsq pipeline --config=configs/quickstart.py --workdir=DIR

Runs every stage in one process, each in its own directory of the workdir:

    release/   made from public documents, or with a certificate of finite ε
    private/   everything else: models without a guarantee, logs, metrics, and
               report.html and results.json, which show private queries

`--config.data` takes a log, too (see `tfdpsq import`): it is imported into
`private/pairs` first, as `config.log` says. All steps are checked before the first one.
To resume an interrupted job, start the same command again: it skips finished steps, and
settings of steps that have not begun may be others then.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from tfdpsq.data import tables
from tfdpsq.privacy.plan import MOST_EPSILON
from tfdpsq.run.common.canary_set import DATA
from tfdpsq.run.common.fusion import FusionSettings
from tfdpsq.run.common.hard_negatives import HardNegativesSettings
from tfdpsq.run.common.search import BM25, EMBEDDINGS
from tfdpsq.run.frame import artefacts, corpus, records, settings
from tfdpsq.run.frame.artefacts import PYDOCS, SET
from tfdpsq.run.frame.pipeline import Job, Planned, Step, StepOutput, Steps
from tfdpsq.run.frame.places import PRIVATE, owner_only
from tfdpsq.run.frame.settings import Rule, nested, setting
from tfdpsq.run.report import content, page
from tfdpsq.run.report.wording import epsilon_symbol, row_part, step_part
from tfdpsq.run.stages import (
    audit,
    canaries,
    evaluate,
    finetune,
    histogram,
    mine,
    prepare,
    pretrain,
    synthesize,
    train_adapter,
    train_retriever,
)
from tfdpsq.validation import InputError, shown

import_log = importlib.import_module("tfdpsq.run.stages.import")  # Python's own word
PUBLIC, RERANKED, ENCODER = "public_only", "reranked", "encoder"
REPORT_FILE, RESULTS_FILE = "report.html", "results.json"
_EPSILON = Rule(gt=0.0, le=MOST_EPSILON, inf=True)
_OF_UNITS = ("split", "unit", "user_field", "n_is_public", "n_bound")
_TRAINED = ("pairs", "init", "continues", "vocabulary", "t5", "seed")
# Stands for what the job sets, so that the settings that act with it may be set.
_MADE = {"made": "by this job"}


@dataclasses.dataclass(frozen=True)
class Pretraining(pretrain.Pretrain.Settings):
    """Settings of `pretrain`; without steps, `init` is taken as it is."""

    steps: int = setting(0, ge=0, le=10**9)


class Pipeline(Job):
    """Makes every row of the report's table, and the report."""

    name = "pipeline"

    @dataclasses.dataclass(frozen=True)
    class Settings(settings.Settings):
        """Settings of `pipeline`: the rows, and those of all stages."""

        data: str = setting(PYDOCS, help="also a BEIR directory, or a log to import")
        init: str = setting("t5_tiny_manuals", help="the public T5 to start from")
        retriever_init: str = setting("", help="another one for retrievers")
        epsilons: tuple[float, ...] = setting((math.inf, 8.0), of=_EPSILON)
        direct_epsilons: tuple[float, ...] = setting(
            (8.0,), of=_EPSILON, help="of retrievers trained on private pairs"
        )
        audit_epsilons: tuple[float, ...] = setting(
            (), of=_EPSILON, help="of further generators, trained on canaries"
        )
        embeddings: str = setting(
            "", help="of documents and all queries by a public encoder: a row"
        )
        adapter_epsilons: tuple[float, ...] = setting(
            (),
            of=_EPSILON,
            when="embeddings",
            help="of maps of its queries: a row each",
        )
        histogram_epsilon: float = setting(
            0.0,
            ge=0,
            le=MOST_EPSILON,
            help="of the counts that documents get queries by, within each of "
            "epsilons; 0 makes none",
        )
        rerank: bool = setting(True, help="whether T5s also reorder BM25's documents")
        fit_rerank: bool = setting(
            False, when="rerank", help="their weight, on sentences of the documents"
        )
        examples: int = setting(8, ge=0, le=10_000, help="shown in the report")
        seed: int = setting(
            0, ge=0, le=settings.SEED, help="of all stages but evaluation; not of noise"
        )
        log: Any = nested(import_log.STAGE.Settings, filled=("logs.train",))
        prepare: Any = nested(
            prepare.STAGE.Settings, filled=("data", "splits", "vocabulary_size", "seed")
        )
        pretrain: Any = nested(
            Pretraining, filled=("data", "init", "vocabulary", "seed")
        )
        histogram: Any = nested(
            histogram.STAGE.Settings,
            filled=("pairs", "epsilon", "seed", *_OF_UNITS),
            when="histogram_epsilon",
            unit="user",
        )
        finetune: Any = nested(
            finetune.STAGE.Settings, filled=("epsilon", "histogram", *_TRAINED)
        )
        synthesize: Any = nested(
            synthesize.STAGE.Settings,
            filled=("generator", "histogram", "corpus", "seed"),
        )
        retriever: Any = nested(
            train_retriever.STAGE.Settings, filled=("method", "epsilon", *_TRAINED)
        )
        direct: Any = nested(
            train_retriever.STAGE.Settings,
            filled=("epsilon", "steps", "epochs", *_TRAINED),
            method="naive",
        )
        mine: Any = nested(
            mine.STAGE.Settings,
            filled=("pairs", "split", "corpus", "strict"),
            when="adapter_epsilons",
        )
        adapter: Any = nested(
            train_adapter.STAGE.Settings,
            filled=("pairs", "documents", "queries", "epsilon", "seed")
            + ("hard_negatives.run", "hard_negatives.corpus"),
            when="adapter_epsilons",
            hard_negatives=HardNegativesSettings(run="by this job", count=15),
        )
        evaluate: Any = nested(
            evaluate.STAGE.Settings,
            filled=("data", "sets", "systems", "indexes", "query_embeddings")
            + ("baseline", "baselines", "rerankers", "synthetic", "strict"),
            fusion=FusionSettings(base=BM25),
            rerankers=_MADE,
            synthetic=_MADE,
        )
        canaries: Any = nested(canaries.STAGE.Settings, filled=("data", "user_field"))
        audit: Any = nested(
            audit.STAGE.Settings,
            filled=("canaries", "generator", "synthetic", "seed"),
        )

    def steps(self, s: Settings, workdir: pathlib.Path) -> list[Step]:
        """Returns the steps of all rows, public ones first."""
        _check(s)
        made = _Steps(s)
        made.prepare()
        made.adapters()
        made.generators()
        made.retrievers()
        made.evaluate()
        made.audit()
        return made.steps

    def start(
        self,
        s: Settings,
        planned: Sequence[Planned],
        workdir: pathlib.Path,
        budget: Any,
    ) -> None:
        """Records what the report will show, as certificates list it."""
        if s.examples:
            with owner_only():
                reads = records.private_reads(workdir / PRIVATE)
                reads.record("some private queries as they are", REPORT_FILE)

    def finish(
        self, s: Settings, planned: Sequence[Planned], workdir: pathlib.Path
    ) -> str:
        """Writes the report; returns its table."""
        found = content.gather(workdir)
        folder = workdir / PRIVATE
        page.write_results(folder / RESULTS_FILE, found)
        page.write_report(folder / REPORT_FILE, found)
        return f"\n{page.table_in_markdown(found)}\n\n{folder / REPORT_FILE}"


def is_log(path: str) -> bool:
    """Returns whether a path is a log to import: a table, or a directory of some."""
    if path == PYDOCS or path.startswith(tables.NAMED) or not os.path.isdir(path):
        named = path.startswith(tables.NAMED) or tables.format_of(path) is not None
        return path != PYDOCS and named
    folder = pathlib.Path(path)
    if any((folder / name).exists() for name in (*corpus.FILES, "queries.jsonl")):
        return False
    files = (file.name for file in folder.rglob("*"))
    return any(tables.format_of(name) for name in files)


def _check(s: Pipeline.Settings) -> None:
    """Refuses settings of the job that do not fit each other."""
    for name in ("epsilons", "direct_epsilons", "audit_epsilons", "adapter_epsilons"):
        parts = [step_part(epsilon) for epsilon in getattr(s, name)]
        if len(set(parts)) < len(parts):
            raise InputError(f"{name} is {getattr(s, name)}: two have one name.")
    if not s.init and not s.pretrain.steps:
        raise InputError(
            "init is '' and pretrain.steps 0: every row would start from random "
            "weights. Give a public T5, or steps to pretrain one."
        )
    default = settings.default_of(_field(s, "log"))
    if s.log != default and not is_log(s.data):
        raise InputError(
            f"log is set, which does nothing here: data is {shown(s.data)}, no log."
        )
    if s.histogram_epsilon and not any(map(math.isfinite, s.epsilons)):
        raise InputError(
            f"histogram_epsilon is {s.histogram_epsilon}, but no generator of epsilons "
            f"{s.epsilons} would count it. Add a finite epsilon, or set it to 0."
        )
    for name in ("finetune", "retriever", "direct"):
        own = getattr(s, name)
        if not own.n_is_public and not own.n_bound:
            raise InputError(
                f"{name}.n_is_public is False and {name}.n_bound 0, but certificates "
                "state the number of pairs, or a bound. Declare one of them."
            )
    for name in ("retriever_init", "init"):
        path = getattr(s, name)
        found = path and artefacts.Generator.open(path, name)
        if found and found.privacy:
            raise InputError(
                f"{name} is {path}, which was trained on private queries: rows that "
                "are called public would start from it. Give public weights."
            )
    if s.adapter_epsilons and s.adapter.split == s.evaluate.split:
        raise InputError(
            f"adapter.split and evaluate.split are both {s.evaluate.split!r}: adapters "
            "would be measured on what they were trained on. Name two splits."
        )
    if s.audit_epsilons and s.canaries.split != s.finetune.split:
        raise InputError(
            f"canaries.split is {s.canaries.split!r} and finetune.split "
            f"{s.finetune.split!r}: no canary would be trained on. Name one split."
        )


def _field(s: Pipeline.Settings, name: str) -> dataclasses.Field:
    return next(field for field in dataclasses.fields(s) if field.name == name)


class _Steps:
    """The steps of a job, made in the order in which they run.

    Attributes:
      steps: those so far.
      rows: of the report's table, see `content.gather`.
    """

    def __init__(self, s: Pipeline.Settings):
        self.s = s
        self.steps = Steps()
        self.rows: list[dict[str, Any]] = []
        self.generated: dict[float, str] = {}
        self.pairs: str = s.data
        self.canaries = self.histogram = ""

    def _add(
        self, name: str, stage: Any, own: Any, label: str, given: Any, **shows: Any
    ) -> StepOutput:
        """Adds a step, with the job's seed where it has one."""
        if stage not in (evaluate.STAGE, canaries.STAGE, import_log.STAGE, mine.STAGE):
            given = {"seed": self.s.seed, **given}  # a known one would tell canaries
        return self.steps.add(name, stage, own, given, label, **shows)

    def _row(self, name: str, label: str, step: str = "") -> None:
        self.rows.append({"name": name, "label": label, "step": step})

    def prepare(self) -> None:
        """The pairs of a log, public pairs, the public T5, and the canaries."""
        s = self.s
        if is_log(s.data):
            self.pairs = self._add(
                "pairs", import_log.STAGE, s.log, "Pairs", {"logs.train": s.data}
            )
        splits = [s.finetune.split, s.retriever.split, s.direct.split, s.evaluate.split]
        splits += [s.evaluate.similarity_split, s.evaluate.similarity.training_split]
        given = {"data": self.pairs, "splits": tuple(dict.fromkeys(splits))}
        given["vocabulary_size"] = 0  # models hold theirs
        self._add("prepare", prepare.STAGE, s.prepare, "Public pairs", given)
        self.start: str = s.init
        if s.pretrain.steps:
            own = pretrain.STAGE.Settings(**vars(s.pretrain))
            given = {"data": self.pairs, "init": s.init}
            self.start = self._add(
                "public_model", pretrain.STAGE, own, "Public T5", given
            )
        if s.audit_epsilons:
            given = {"data": self.pairs, "user_field": s.finetune.user_field}
            self.canaries = self._add(
                "canaries", canaries.STAGE, s.canaries, "Canaries", given
            )

    def adapters(self) -> None:
        """Maps of a public encoder's queries; hard negatives are BM25's."""
        s = self.s
        given: dict[str, Any] = {"documents": s.embeddings, "queries": s.embeddings}
        if s.adapter_epsilons and s.adapter.unit != "pair":
            mining = {"pairs": self.pairs, "split": s.adapter.split}
            mined = self._add("mined", mine.STAGE, s.mine, "Hard negatives", mining)
            given["hard_negatives.run"] = mined
        else:  # single pairs of a query can have none
            given["hard_negatives"] = HardNegativesSettings()
        for epsilon in s.adapter_epsilons:
            given.update(pairs=self.pairs, epsilon=epsilon)
            self._add(
                f"adapter_{row_part(epsilon)}",
                train_adapter.STAGE,
                s.adapter,
                _labelled("Adapter", epsilon),
                given,
                chart="Retriever",
            )

    def generators(self) -> None:
        """One generator and its set for each ε, all from the same public weights."""
        s = self.s
        if s.histogram_epsilon:
            of_units = {name: getattr(s.finetune, name) for name in _OF_UNITS}
            self.histogram = self._add(
                f"histogram_{step_part(s.histogram_epsilon)}",
                histogram.STAGE,
                s.histogram,
                "Histogram",
                {"pairs": self.pairs, "epsilon": s.histogram_epsilon, **of_units},
            )
        for epsilon in s.epsilons:
            self.generated[epsilon] = self._generator(
                f"generator_{step_part(epsilon)}",
                _labelled("Generator", epsilon),
                epsilon,
                self.pairs,
                chart="Generator",
            )
        for epsilon, generator in self.generated.items():
            name = f"synthetic_{step_part(epsilon)}"
            label = _labelled("Synthetic", epsilon)
            self._set(name, label, generator, set=row_part(epsilon))

    def _generator(
        self, name: str, label: str, epsilon: float, pairs: str, **shows: Any
    ) -> StepOutput:
        counted = self.histogram if math.isfinite(epsilon) and shows else ""
        given = {"init": self.start, "pairs": pairs, "epsilon": epsilon}
        given["histogram"] = counted
        return self._add(name, finetune.STAGE, self.s.finetune, label, given, **shows)

    def _set(self, name: str, label: str, generator: str, **shows: Any) -> StepOutput:
        given = {"generator": generator, "corpus": self.pairs}
        given["histogram"] = self.histogram if shows else ""  # none of canaries
        own = self.s.synthesize
        made = self._add(name, synthesize.STAGE, own, label, given, **shows)
        return StepOutput(f"{made}/{SET}")

    def retrievers(self) -> None:
        """The table's rows, all trained for the same steps from the same weights."""
        s, plain = self.s, self.s.retriever
        public, none = StepOutput(f"prepare/{SET}"), {"steps": 0, "epochs": 0.0}
        # Of private pairs none is held out: the other rows search for public ones.
        unseen = {"validation_pairs": 0}
        self._row(BM25, "BM25")
        rows: list[tuple[str, str, Any, Mapping[str, Any]]] = [
            ("untrained", "Untrained encoder", plain, {"pairs": public, **none}),
            (PUBLIC, "Public-only", plain, {"pairs": public}),
            ("original", "Original pairs", plain, {"pairs": self.pairs, **unseen}),
        ]
        for epsilon in s.epsilons:
            pairs = {"pairs": StepOutput(f"synthetic_{step_part(epsilon)}/{SET}")}
            label = _labelled("Synthetic", epsilon)
            rows.append((f"synthetic_{row_part(epsilon)}", label, plain, pairs))
        for epsilon in s.direct_epsilons:
            given = {"pairs": self.pairs, "epsilon": epsilon}
            given.update(steps=plain.steps, epochs=plain.epochs)
            label = _labelled("Direct DP", epsilon)
            rows.append((f"direct_{row_part(epsilon)}", label, s.direct, given))
        for name, label, own, given in rows:
            step = self._add(
                f"retriever_{name}",
                train_retriever.STAGE,
                own,
                f"Retriever: {label}",
                {"init": s.retriever_init or self.start, **given},
                chart="Retriever",
            )
            self._row(name, label, step)
        if s.embeddings:
            self._row(ENCODER, "Encoder as it is")
        for epsilon in s.adapter_epsilons:
            name = f"adapter_{row_part(epsilon)}"
            self._row(name, _labelled("Adapter", epsilon), name)
        if s.rerank:
            public = f"{RERANKED}_{PUBLIC}"
            step = self.start if isinstance(self.start, StepOutput) else ""
            self._row(public, "BM25 reranked, public T5", step)
            for epsilon, generator in self.generated.items():
                label = _labelled("BM25 reranked", epsilon)
                name = f"{RERANKED}_{row_part(epsilon)}"
                self._row(name, label, generator)

    def evaluate(self) -> None:
        """Measures all rows, and compares all sets with private queries."""
        s, own = self.s, self.s.evaluate
        systems: dict[str, str] = {}
        rerankers: dict[str, str] = {}
        for row in self.rows:
            name, step = row["name"], row["step"]
            if name.startswith(f"{RERANKED}_"):
                rerankers[name] = StepOutput(step) if step else s.init
            else:
                where = {BM25: BM25, ENCODER: EMBEDDINGS}.get(name)
                systems[name] = where or StepOutput(step)
        own_queries = [n for n in systems if n == ENCODER or n.startswith("adapter_")]
        embedded = dict.fromkeys(own_queries, s.embeddings)
        given = {
            "data": self.pairs,
            "systems": systems,
            "indexes": embedded,
            "query_embeddings": embedded,
            "rerankers": rerankers,
            "synthetic": {
                row_part(e): StepOutput(f"synthetic_{step_part(e)}/{SET}")
                for e in self.generated
            },
            "baseline": PUBLIC,
            "baselines": dict.fromkeys([n for n in embedded if n != ENCODER], ENCODER),
        }
        if not self.generated:  # these settings are of the examples alone
            default = evaluate.STAGE.Settings()
            given.update(similarity_split=default.similarity_split)
            given.update(similarity=default.similarity)
        if rerankers and not own.rerank.baseline:
            given["rerank.baseline"] = f"{RERANKED}_{PUBLIC}"
        if s.fit_rerank:
            given["rerank.fit"] = StepOutput(f"prepare/{SET}")
        self._add(
            "evaluation", evaluate.STAGE, own, "Evaluation", given, rows=self.rows
        )

    def audit(self) -> None:
        """Generators that are trained on canaries, and attacked."""
        for epsilon in self.s.audit_epsilons:
            part = step_part(epsilon)
            label = _labelled("Audited generator", epsilon)
            pairs = StepOutput(f"{self.canaries}/{DATA}")
            generator = self._generator(f"audited_{part}", label, epsilon, pairs)
            written = self._set(
                f"audited_synthetic_{part}",
                _labelled("Audited set", epsilon),
                generator,
            )
            given = {"canaries": StepOutput(self.canaries), "generator": generator}
            self._add(
                f"audit_{part}",
                audit.STAGE,
                self.s.audit,
                _labelled("Audit", epsilon),
                {**given, "synthetic": written},
            )


def _labelled(what: str, epsilon: float) -> str:
    return f"{what}, ε = {epsilon_symbol(epsilon)}"


STAGE = Pipeline()
