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
from tfdpsq.run.report.wording import row_part, step_part
from tfdpsq.run.stages import pretrain
from tfdpsq.validation import InputError, shown

PUBLIC, RERANKED, ENCODER = "public_only", "reranked", "encoder"
REPORT_FILE, RESULTS_FILE = "report.html", "results.json"
_EPSILON = Rule(gt=0.0, le=MOST_EPSILON, inf=True)
_OF_UNITS = ("split", "unit", "user_field", "n_is_public", "n_bound")
_TRAINED = ("pairs", "init", "continues", "vocabulary", "t5", "seed")
# Stands for what the job sets, so that the settings that act with it may be set.
_MADE = {"made": "by this job"}
# The stage that each group of settings is for.
STAGES = {
    group: importlib.import_module(f"tfdpsq.run.stages.{stage or group}").STAGE
    for group, stage in {
        "log": "import",
        **dict.fromkeys(("prepare", "pretrain", "histogram", "finetune"), ""),
        **dict.fromkeys(("synthesize", "mine", "evaluate", "canaries", "audit"), ""),
        "adapter": "train_adapter",
        "retriever": "train_retriever",
        "direct": "train_retriever",
    }.items()
}
_UNSEEDED = ("log", "canaries", "mine", "evaluate")  # a known seed would tell canaries


@dataclasses.dataclass(frozen=True)
class Pretraining(pretrain.Pretrain.Settings):
    """Settings of `pretrain`; without steps, `init` is taken as it is."""

    steps: int = setting(0, ge=0, le=10**9)


def _of(group: str, *filled: str, **options: Any) -> Any:
    """Returns a stage's settings; the job sets `filled` itself."""
    return nested(STAGES[group].Settings, filled=filled, **options)


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
            (), of=_EPSILON, when="embeddings", help="of maps of its queries"
        )
        histogram_epsilon: float = setting(
            0.0,
            ge=0,
            le=MOST_EPSILON,
            help="of the counts that documents get queries by, within each of "
            "epsilons; 0 makes none",
        )
        rerank: bool = setting(True, help="whether T5s also reorder BM25's documents")
        examples: int = setting(8, ge=0, le=10_000, help="shown in the report")
        seed: int = setting(
            0, ge=0, le=settings.SEED, help="of all stages but evaluation; not of noise"
        )
        log: Any = _of("log", "logs.train")
        prepare: Any = _of("prepare", "data", "splits", "vocabulary_size", "seed")
        pretrain: Any = nested(
            Pretraining, filled=("data", "init", "vocabulary", "seed")
        )
        histogram: Any = _of(
            "histogram",
            *("pairs", "epsilon", "seed", *_OF_UNITS),
            when="histogram_epsilon",
            unit="user",
        )
        finetune: Any = _of("finetune", "epsilon", "histogram", *_TRAINED)
        synthesize: Any = _of("synthesize", "generator", "histogram", "corpus", "seed")
        retriever: Any = _of("retriever", "method", "epsilon", *_TRAINED)
        direct: Any = _of(
            "direct", "epsilon", "steps", "epochs", *_TRAINED, method="naive"
        )
        mine: Any = _of(
            "mine", "pairs", "split", "corpus", "strict", when="adapter_epsilons"
        )
        adapter: Any = _of(
            "adapter",
            *("pairs", "documents", "queries", "epsilon", "seed"),
            *("hard_negatives.run", "hard_negatives.corpus"),
            when="adapter_epsilons",
            hard_negatives=HardNegativesSettings(run="by this job", count=15),
        )
        evaluate: Any = _of(
            "evaluate",
            *("data", "sets", "systems", "indexes", "query_embeddings"),
            *("baseline", "baselines", "rerankers", "synthetic", "strict"),
            fusion=FusionSettings(base=BM25),
            rerankers=_MADE,
            synthetic=_MADE,
        )
        canaries: Any = _of("canaries", "data", "user_field", "split")
        audit: Any = _of(
            "audit", "canaries", "generator", "synthetic", "seed", "strict"
        )

    def steps(self, s: Settings, workdir: pathlib.Path) -> list[Step]:
        """Returns the steps of all rows, public ones first."""
        _check(s)
        made = _Steps(s)
        made.prepare()
        made.retrievers()
        made.adapters()
        made.rerankings()
        made.evaluate()
        made.audit()
        return made

    def start(self, s: Settings, workdir: pathlib.Path) -> None:
        """Records what the report will show, as certificates list it."""
        if s.examples:
            with owner_only():
                reads = records.private_reads(workdir / PRIVATE)
                reads.record("some private queries as they are", REPORT_FILE)

    def finish(
        self, s: Settings, planned: Sequence[Planned], workdir: pathlib.Path
    ) -> str:
        """Writes the report; returns its table."""
        found = content.gather(s, planned)
        folder = workdir / PRIVATE
        page.write_results(folder / RESULTS_FILE, found)
        page.write_report(folder / REPORT_FILE, found)
        return f"\n{page.in_lines(found)}\n\n{folder / REPORT_FILE}"


def is_log(path: str) -> bool:
    """Returns whether a path is a log to import: a table, or a directory of some."""
    folder = pathlib.Path(path)
    beir = [folder / name for name in (*corpus.FILES, "queries.jsonl")]
    if path == PYDOCS or any(file.exists() for file in beir):
        return False
    files = folder.rglob("*") if folder.is_dir() else [folder]
    named = path.startswith(tables.NAMED)
    return named or any(tables.format_of(file.name) for file in files)


def _check(s: Pipeline.Settings) -> None:
    """Refuses settings of the job that do not fit each other."""
    for name in ("epsilons", "direct_epsilons", "audit_epsilons", "adapter_epsilons"):
        if len(set(map(step_part, getattr(s, name)))) < len(getattr(s, name)):
            raise InputError(f"{name} is {getattr(s, name)}: two have one name.")
    if not s.init and not s.pretrain.steps:
        raise InputError("init is '' and pretrain.steps 0. Give a public T5, or steps.")
    for name in ("finetune", "retriever", "direct"):
        own = getattr(s, name)
        if not own.n_is_public and not own.n_bound:
            raise InputError(
                f"{name}.n_is_public is False and {name}.n_bound 0, but certificates "
                "state the number of pairs, or a bound. Declare one of them."
            )
    for name in ("init", "retriever_init"):
        path = getattr(s, name)
        found = path and artefacts.Generator.open(path, name)
        if found and found.privacy:
            raise InputError(
                f"{name} is {path}, which was trained on private queries: rows that "
                "are called public would start from it. Give public weights."
            )
    if s.log != type(s)().log and not is_log(s.data):
        raise InputError(f"log is set, but data is {shown(s.data)}, not a log.")
    if s.adapter_epsilons and s.adapter.split == s.evaluate.split:
        raise InputError(
            f"adapter.split and evaluate.split are both {s.evaluate.split!r}: adapters "
            "would be measured on what they were trained on. Name two splits."
        )


class _Steps(Steps):
    """The steps of a job, made in the order in which they run; `rows` of its table."""

    def __init__(self, s: Pipeline.Settings):
        super().__init__()
        self.s = s
        self.rows: list[dict[str, str]] = []
        self.systems: dict[str, str] = {}  # by row
        self.rerankers: dict[str, str] = {}  # by row
        self.generators: dict[float, StepOutput] = {}
        self.pairs, self.start, self.histogram = s.data, s.init, ""

    def make(
        self, name: str, group: str, label: str, given: Mapping[str, Any], **shows: Any
    ) -> StepOutput:
        """Adds a step with a group of the job's settings, and what the job sets."""
        if group not in _UNSEEDED:
            given = {"seed": self.s.seed, **given}
        own = getattr(self.s, group)
        return self.add(name, STAGES[group], own, given, label, **shows)

    def row(self, within: dict[str, str], name: str, label: str, made: str) -> None:
        """Adds a row of the table: a step's output, or something that is there."""
        step = made if isinstance(made, StepOutput) else ""
        self.rows.append({"name": name, "label": label, "step": step})
        within[name] = made

    def prepare(self) -> None:
        """The pairs of a log, public pairs, and the public T5."""
        s = self.s
        if is_log(s.data):
            logs = dataclasses.replace(s.log.logs, train=s.data)
            self.pairs = self.make("pairs", "log", "Pairs", {"logs": logs})
        splits = [s.finetune.split, s.retriever.split, s.direct.split, s.evaluate.split]
        splits += [s.evaluate.similarity_split, s.evaluate.similarity.training_split]
        given: dict[str, Any] = {"data": self.pairs, "vocabulary_size": 0}
        given["splits"] = tuple(dict.fromkeys(splits))
        self.make("prepare", "prepare", "Public pairs", given)
        if s.pretrain.steps:
            given = {"data": self.pairs, "init": s.init}
            self.start = self.make("public_model", "pretrain", "Public T5", given)

    def retrievers(self) -> None:
        """Rows that are trained for the same steps from the same weights."""
        s, public = self.s, {"pairs": StepOutput(f"prepare/{SET}")}
        self.row(self.systems, BM25, "BM25", BM25)
        none = {**public, "steps": 0, "epochs": 0.0}
        self._retriever("untrained", "Untrained encoder", none)
        self._retriever(PUBLIC, "Public-only", public)
        # No private pair is held out: the other rows search for public ones.
        given: dict[str, Any] = {"pairs": self.pairs, "validation_pairs": 0}
        self._retriever("original", "Original pairs", given)
        if s.histogram_epsilon and any(map(math.isfinite, s.epsilons)):
            given = {name: getattr(s.finetune, name) for name in _OF_UNITS}
            given.update(pairs=self.pairs, epsilon=s.histogram_epsilon)
            name = f"histogram_{step_part(s.histogram_epsilon)}"
            self.histogram = self.make(name, "histogram", "Histogram", given)
        for epsilon in s.epsilons:
            generator, pairs = self._generated("", epsilon, self.pairs, self.histogram)
            self.generators[epsilon] = generator
            name, label = f"synthetic_{row_part(epsilon)}", _at("Synthetic", epsilon)
            self._retriever(name, label, {"pairs": pairs})
        for epsilon in s.direct_epsilons:
            given = {"pairs": self.pairs, "epsilon": epsilon}
            given.update(steps=s.retriever.steps, epochs=s.retriever.epochs)
            label = _at("Direct DP", epsilon)
            self._retriever(f"direct_{row_part(epsilon)}", label, given, "direct")

    def _retriever(
        self, name: str, label: str, given: Mapping[str, Any], group: str = "retriever"
    ) -> None:
        given = {"init": self.s.retriever_init or self.start, **given}
        step, long = f"retriever_{name}", f"Retriever: {label}"
        made = self.make(step, group, long, given, chart="Retriever")
        self.row(self.systems, name, label, made)

    def _generated(
        self, before: str, epsilon: float, pairs: str, histogram: str
    ) -> tuple[StepOutput, StepOutput]:
        """Returns a generator and its set; their names start with `before`."""
        audited, part = bool(before), step_part(epsilon)
        given: dict[str, Any] = {"init": self.start, "pairs": pairs, "epsilon": epsilon}
        given["histogram"] = histogram if math.isfinite(epsilon) else ""
        label = _at("Audited generator" if audited else "Generator", epsilon)
        shows = {} if audited else {"chart": "Generator"}
        name = f"{before}generator_{part}"
        generator = self.make(name, "finetune", label, given, **shows)
        given = {"generator": generator, "corpus": self.pairs, "histogram": histogram}
        label = _at("Audited set" if audited else "Synthetic", epsilon)
        shows = {} if audited else {"set": row_part(epsilon)}
        name = f"{before}synthetic_{part}"
        made = self.make(name, "synthesize", label, given, **shows)
        return generator, StepOutput(f"{made}/{SET}")

    def adapters(self) -> None:
        """A public encoder, and maps of its queries; hard negatives are BM25's."""
        s = self.s
        if s.embeddings:
            self.row(self.systems, ENCODER, "Encoder as it is", EMBEDDINGS)
        given: dict[str, Any] = {"documents": s.embeddings, "queries": s.embeddings}
        given["pairs"] = self.pairs
        if s.adapter_epsilons and s.adapter.unit != "pair":
            mining = {"pairs": self.pairs, "split": s.adapter.split}
            mined = self.make("mined", "mine", "Hard negatives", mining)
            negatives = dataclasses.replace(s.adapter.hard_negatives, run=mined)
            given["hard_negatives"] = negatives
        else:  # single pairs of a query can have none
            given["hard_negatives"] = HardNegativesSettings()
        for epsilon in s.adapter_epsilons:
            given["epsilon"] = epsilon
            name, label = f"adapter_{row_part(epsilon)}", _at("Adapter", epsilon)
            made = self.make(name, "adapter", label, given, chart="Retriever")
            self.row(self.systems, name, label, made)

    def rerankings(self) -> None:
        """BM25's documents in the order of the public T5, and of each generator."""
        if self.s.rerank:
            label = "BM25 reranked, public T5"
            self.row(self.rerankers, f"{RERANKED}_{PUBLIC}", label, self.start)
            for epsilon, generator in self.generators.items():
                name = f"{RERANKED}_{row_part(epsilon)}"
                self.row(self.rerankers, name, _at("BM25 reranked", epsilon), generator)

    def evaluate(self) -> None:
        """Measures all rows, and compares all sets with private queries."""
        adapted = [name for name in self.systems if name.startswith("adapter_")]
        own = [ENCODER, *adapted] if self.s.embeddings else []
        embedded = dict.fromkeys(own, self.s.embeddings)
        given: dict[str, Any] = {
            "data": self.pairs,
            "systems": self.systems,
            "indexes": embedded,
            "query_embeddings": embedded,
            "rerankers": self.rerankers,
            "synthetic": {
                row_part(e): StepOutput(f"synthetic_{step_part(e)}/{SET}")
                for e in self.generators
            },
            "baseline": PUBLIC,
            "baselines": {
                **dict.fromkeys(adapted, ENCODER),
                **dict.fromkeys(self.rerankers, f"{RERANKED}_{PUBLIC}"),
            },
        }
        if not self.generators:  # these settings are for the examples alone
            default = STAGES["evaluate"].Settings()
            given["similarity_split"] = default.similarity_split
            given["similarity"] = default.similarity
        self.make("evaluation", "evaluate", "Evaluation", given, rows=self.rows)

    def audit(self) -> None:
        """Generators that are trained on canaries, and attacked."""
        s = self.s
        if s.audit_epsilons:
            given = {"user_field": s.finetune.user_field, "split": s.finetune.split}
            given["data"] = self.pairs
            canaries = self.make("canaries", "canaries", "Canaries", given)
            pairs = StepOutput(f"{canaries}/{DATA}")
        for epsilon in s.audit_epsilons:
            generator, written = self._generated("audited_", epsilon, pairs, "")
            given = {"generator": generator, "synthetic": written}
            given["canaries"] = canaries
            name, label = f"audit_{step_part(epsilon)}", _at("Audit", epsilon)
            self.make(name, "audit", label, given)


def _at(what: str, epsilon: float) -> str:
    return f"{what}, ε = {'∞' if math.isinf(epsilon) else f'{epsilon:g}'}"


STAGE = Pipeline()
