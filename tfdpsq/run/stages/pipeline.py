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
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from tfdpsq.privacy.plan import MOST_EPSILON
from tfdpsq.run.common import corpus, kinds, training
from tfdpsq.run.common.fusion import FusionSettings
from tfdpsq.run.common.hard_negatives import HardNegativesSettings
from tfdpsq.run.common.kinds import PYDOCS, SET
from tfdpsq.run.common.search import BM25, EMBEDDINGS
from tfdpsq.run.frame import records, settings
from tfdpsq.run.frame.places import PRIVATE, RELEASE, owner_only
from tfdpsq.run.frame.settings import Rule, nested, setting
from tfdpsq.run.jobs import Job, Planned, Step, StepOutput
from tfdpsq.run.report import content, page
from tfdpsq.run.report.wording import row_part, step_part
from tfdpsq.run.stages import pretrain
from tfdpsq.run.stages._steps import PAIRS, PUBLIC, STAGES, JobSteps, at, is_log
from tfdpsq.validation import InputError, shown

RERANKED, ENCODER = "reranked", "encoder"
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
        rows: str = setting(
            "all",
            choices=("all", "deciding"),
            help="deciding: without the untrained encoder, direct training and ε = ∞",
        )
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
        for name in ("finetune", "retriever", "direct"):
            own = getattr(s, name)
            if not own.n_is_public and not own.n_bound:
                raise InputError(
                    f"{name}.n_is_public is False and {name}.n_bound 0. Declare the "
                    "number of pairs to be public, or a bound."
                )
        if s.log != type(s)().log and not is_log(s.data):
            raise InputError(f"log is set, but data is {shown(s.data)}, not a log.")
        return _Rows(s)

    def counts(self, s: Settings, workdir: pathlib.Path) -> tuple[int, int] | None:
        """Returns documents, and training pairs: exact if public, else their bound."""
        data = s.data
        if is_log(data):
            data = str(workdir / PRIVATE / PAIRS)
            if records.read_stage(data) is None:
                return None
        pairs: Any = kinds.Pairs.open(data, "data")
        documents = corpus.scan(pairs.beir().corpus_file).count
        return documents, training.units_in(s.finetune, pairs).n

    def start(self, s: Settings, workdir: pathlib.Path) -> None:
        """Records what the report will show, as certificates list it."""
        if s.examples:
            with owner_only():
                reads = records.private_reads(workdir / PRIVATE)
                reads.record("some private queries as they are", REPORT_FILE)

    def finish(
        self, s: Settings, planned: Sequence[Planned], workdir: pathlib.Path
    ) -> str:
        """Writes the report; returns its table and three lines with the answer."""
        found = content.gather(s, planned)
        folder = workdir / PRIVATE
        page.write_results(folder / RESULTS_FILE, found)
        page.write_report(folder / REPORT_FILE, found)
        shared = f"To share, within the ε of certificates: {workdir / RELEASE}"
        return f"\n{page.in_lines(found)}\n{shared}\nReport: {folder / REPORT_FILE}"


class _Rows(JobSteps):
    """The steps of all rows of the job's table, and the rows."""

    def __init__(self, s: Pipeline.Settings):
        super().__init__(s)
        self.rows: list[dict[str, str]] = []
        self.systems: dict[str, str] = {}  # by row
        self.rerankers: dict[str, str] = {}  # by row
        self.generators: dict[float, StepOutput] = {}
        self.start = self.model("public_model", s.init, "Public T5")
        self.retrievers()
        self.adapters()
        self.rerankings()
        self.evaluate()
        for epsilon in s.audit_epsilons:
            self.audit(step_part(epsilon), {"init": self.start, "epsilon": epsilon})

    def taken(self, epsilons: Sequence[float]) -> list[float]:
        """Returns those whose rows are wanted."""
        return [e for e in epsilons if self.s.rows == "all" or math.isfinite(e)]

    def row(self, within: dict[str, str], name: str, label: str, made: str) -> None:
        """Adds a row of the table: a step's output, or something that is there."""
        step = made if isinstance(made, StepOutput) else ""
        self.rows.append({"name": name, "label": label, "step": step})
        within[name] = made

    def retrievers(self) -> None:
        """BM25 and all trained retrievers."""
        s = self.s
        self.row(self.systems, BM25, "BM25", BM25)
        self._retriever(PUBLIC, PUBLIC, "Public-only")
        if s.rows == "all":
            self._retriever("untrained", "untrained", "Untrained encoder")
            self._retriever("original", "original", "Original pairs")
        if s.histogram_epsilon and any(map(math.isfinite, s.epsilons)):
            given = {name: getattr(s.finetune, name) for name in _OF_UNITS}
            given.update(pairs=self.pairs, epsilon=s.histogram_epsilon)
            name = f"histogram_{step_part(s.histogram_epsilon)}"
            self.histogram = self.make(name, "histogram", given, "Histogram")
        for epsilon in self.taken(s.epsilons):
            given = {"init": self.start, "pairs": self.pairs, "epsilon": epsilon}
            made, pairs = self.generated(f"{{}}_{step_part(epsilon)}", given)
            self.generators[epsilon] = made
            name, label = f"synthetic_{row_part(epsilon)}", at("Synthetic", epsilon)
            self._retriever(name, "synthetic", label, pairs=pairs)
        for epsilon in s.direct_epsilons if s.rows == "all" else ():
            name, label = f"direct_{row_part(epsilon)}", at("Direct DP", epsilon)
            self._retriever(name, "direct", label, epsilon=epsilon)

    def _retriever(self, name: str, kind: str, label: str, **given: Any) -> None:
        given["init"] = self.s.retriever_init or self.start
        long = f"Retriever: {label}"
        made = self.retriever(f"retriever_{name}", kind, given, long)
        self.row(self.systems, name, label, made)

    def adapters(self) -> None:
        """A public encoder, and maps of its queries; hard negatives are BM25's."""
        s = self.s
        if s.embeddings:
            self.row(self.systems, ENCODER, "Encoder as it is", EMBEDDINGS)
        given: dict[str, Any] = {"documents": s.embeddings, "queries": s.embeddings}
        given["pairs"] = self.pairs
        if s.adapter_epsilons and s.adapter.unit != "pair":
            mining = {"pairs": self.pairs, "split": s.adapter.split}
            mined = self.make("mined", "mine", mining, "Hard negatives")
            negatives = dataclasses.replace(s.adapter.hard_negatives, run=mined)
            given["hard_negatives"] = negatives
        else:  # single pairs of a query can have none
            given["hard_negatives"] = HardNegativesSettings()
        for epsilon in self.taken(s.adapter_epsilons):
            given["epsilon"] = epsilon
            name, label = f"adapter_{row_part(epsilon)}", at("Adapter", epsilon)
            made = self.make(name, "adapter", given, label, chart="Retriever")
            self.row(self.systems, name, label, made)

    def rerankings(self) -> None:
        """BM25's documents in the order of the public T5, and of each generator."""
        if self.s.rerank:
            label = "BM25 reranked, public T5"
            self.row(self.rerankers, f"{RERANKED}_{PUBLIC}", label, self.start)
            for epsilon, generator in self.generators.items():
                name = f"{RERANKED}_{row_part(epsilon)}"
                self.row(self.rerankers, name, at("BM25 reranked", epsilon), generator)

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
        self.make("evaluation", "evaluate", given, "Evaluation", rows=self.rows)


STAGE = Pipeline()
