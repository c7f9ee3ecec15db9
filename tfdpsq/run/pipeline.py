"""Run the whole job: from private pairs to synthetic queries, retrievers and a report.

    python -m tfdpsq.run.pipeline --config=configs/quickstart.py --workdir=DIR

Runs every stage in one process, each in its own directory of the workdir:

    release/   made from public documents, or with a certificate of finite ε
    private/   everything else: models without a guarantee, curves, metrics
    report.html, results.json   internal; they show private queries

`--config.data` takes a log, too (see `tfdpsq import`): it is imported into
`private/pairs` first, as `config.log` says.

To resume an interrupted run, start the same command again: it skips finished stages.
Settings of stages that have not begun may be others then, such as one that was refused.
"""

from __future__ import annotations

import importlib
import json
import math
import pathlib
import shlex
import sys
import time
from typing import Any

import ml_collections
import numpy as np

from tfdpsq import privacy, retriever
from tfdpsq.data import BeirDirectory
from tfdpsq.generator import checkpoints
from tfdpsq.privacy.proof import budget
from tfdpsq.privacy.proof.ledger import READS_FILE_NAME
from tfdpsq.run import (
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
from tfdpsq.run.attacks import canary_set
from tfdpsq.run.core import (
    acting,
    command,
    layout,
    pipeline_checks,
    pipeline_data,
    releases,
    settings,
    sources,
    spending,
    stages,
    streams,
    workdir,
)
from tfdpsq.run.devices import strategy
from tfdpsq.run.reporting import content as report_content
from tfdpsq.run.reporting import page
from tfdpsq.run.search import systems
from tfdpsq.run.training import training_settings

import_log = importlib.import_module("tfdpsq.run.import")  # a word of Python's
# In names of rows.
_RERANKED, _PUBLIC = pipeline_checks.RERANKED, pipeline_checks.PUBLIC_ONLY
_INF = 'Every epsilon must be above 0, as in "(inf, 8.0)"; inf trains without privacy.'
_EPSILON = settings.Number(8.0, 0, math.inf, low_open=True, remedy=_INF)
SETTINGS: settings.Declaration = {
    "data": settings.Text(sources.PYDOCS, required=True),
    "init": settings.Text("t5_tiny_manuals"),
    "retriever_init": settings.Text(""),
    "epsilons": settings.Several((math.inf, 8.0), _EPSILON),
    "direct_epsilons": settings.Several((8.0,), _EPSILON),
    "audit_epsilons": settings.Several((), _EPSILON),
    # A directory with `documents/` of the corpus and `queries/` of all splits, by any
    # public encoder: a row; see `train_adapter`.
    "embeddings": settings.Text(""),
    # Of maps of these queries, trained on the private pairs; a row each.
    "adapter_epsilons": settings.Several((), _EPSILON),
    # Of the counts that documents get synthetic queries by; 0 takes every document.
    # Generators have their epsilons with it.
    "histogram_epsilon": settings.Number(
        0.0, 0, training_settings.MOST_EPSILON, infinite=False
    ),
    # Whether generators, and the public T5, also reorder BM25's best documents.
    "rerank": settings.Flag(True),
    # Whether the weight of their likelihoods is fitted, for the public T5, on sentences
    # of the documents (the public pairs).
    "fit_rerank": settings.Flag(False),
    "examples": settings.Integer(8, 0, 10_000),
    "seed": settings.Integer(0, 0, settings.SEED),
    "strict": settings.Flag(False),
    # Where `data` is a log.
    "log": import_log.SETTINGS,
    "prepare": settings.with_defaults(
        prepare.SETTINGS,
        vocabulary_size=pretrain.default_config().t5.vocabulary_size,
    ),
    # The preset was trained on pydocs' documents already.
    "pretrain": settings.with_defaults(
        pretrain.SETTINGS, steps=settings.Integer(0, 0, settings.STEPS)
    ),
    "histogram": histogram.SETTINGS,
    "finetune": finetune.SETTINGS,
    "synthesize": synthesize.SETTINGS,
    "retriever": train_retriever.SETTINGS,
    # The paper's values.
    "direct": settings.with_defaults(
        train_retriever.SETTINGS, method=settings.Text("naive", retriever.METHODS)
    ),
    "mine": mine.SETTINGS,
    "adapter": settings.with_defaults(
        train_adapter.SETTINGS, hard_negatives={"count": 15}
    ),
    # Rows are measured together with BM25, too, as they would be deployed.
    "evaluate": settings.with_defaults(
        evaluate.SETTINGS, fusion={"base": systems.BM25}
    ),
    "canaries": canaries.SETTINGS,
    "audit": audit.SETTINGS,
}

_IS_PUBLIC = "encoder_is_public"
_OF_ADAPTERS = [name for name, _ in acting.defaults(train_adapter.SETTINGS)]
_OF_ADAPTERS.remove(_IS_PUBLIC)
ACTING = (
    acting.Only("histogram.*", "histogram_epsilon"),
    acting.Only(f"adapter_epsilons adapter.{_IS_PUBLIC}", "embeddings"),
    acting.Only(" adapter.".join(("mine.*", *_OF_ADAPTERS)), "adapter_epsilons"),
)
_STAGES = {
    "log": import_log,
    "prepare": prepare,
    "pretrain": pretrain,
    "histogram": histogram,
    "finetune": finetune,
    "synthesize": synthesize,
    "retriever": train_retriever,
    "direct": train_retriever,
    "mine": mine,
    "adapter": train_adapter,
    "evaluate": evaluate,
    "canaries": canaries,
    "audit": audit,
}
# Settings of the stages that the job fills in.
FILLED = {
    "log": "logs.train",
    "prepare": "data seed",
    "pretrain": "data init vocabulary seed",
    "histogram": "pairs split epsilon unit user_field n_is_public n_bound seed",
    "finetune": "pairs init continues histogram vocabulary epsilon seed",
    "synthesize": "generator histogram corpus seed",
    "retriever": "pairs init continues vocabulary seed",
    "direct": "pairs init continues vocabulary epsilon seed",
    "mine": "pairs split corpus",
    "adapter": "pairs documents queries epsilon hard_negatives.run "
    "hard_negatives.corpus seed",
    "evaluate": "data systems query_embeddings synthetic baseline baselines rerankers "
    "rerank.baseline rerank.fit",
    "canaries": "data user_field",
    "audit": "canaries generator synthetic seed",
}


def default_config() -> ml_collections.ConfigDict:
    """Returns every stage's settings, and the rows of the table.

    `data` is "pydocs", a BEIR directory, or a log, which is imported first, by the
    settings `log`. `init` is the public T5 that generators and retrievers start from: a
    directory, a preset's name, or "" for random weights; `pretrain.steps` train it on
    the documents first. `retriever_init` is another one for retrievers, with the same
    vocabulary. `epsilons` are the generator's (a row of the table each),
    `direct_epsilons` the retriever's on private pairs, by `direct.method`. For each of
    `audit_epsilons` another generator is trained on pairs with canaries, and audited,
    for `finetune.unit`. Measuring reads private queries, so `strict` is refused. `seed`
    is that of every stage before the evaluation, never of noise.
    """
    return settings.default_config(SETTINGS)


@workdir.alone()
def run(
    config: ml_collections.ConfigDict,
    directory: pathlib.Path,
    devices: strategy.Devices = strategy.DEFAULT,
) -> dict[str, Any]:
    """Runs the whole job, or the rest of it.

    Returns:
      The content of `results.json`.

    Raises:
      InputError: bad settings or data; before any training where possible.
    """
    started = time.monotonic()
    job = open_job(config, directory, devices)
    config, directory = job.config, job.directory
    reads = privacy.PrivateReads(job.private / READS_FILE_NAME)
    if config.examples:
        reads.record("some private queries as they are", "report.html, results.json")
    job.prepare()
    adapted = job.adapters()
    generators = job.generators()
    sets = job.synthetic_sets(generators)
    rows = job.retrievers(sets) + adapted
    rows += job.rerankers(generators)
    job.evaluate(rows, sets)
    job.audit()
    content = report_content.gather(
        config,
        directory,
        rows=rows,
        sets=sets,
        seconds=job.seconds,
        peak_memory_gib=max(job.stages.peak_memory_gib, workdir.peak_memory_gib()),
        command=shlex.join(["python", "-m", "tfdpsq.run.pipeline", *sys.argv[1:]]),
    )
    page.write_results(directory / "results.json", content)
    page.write_report(directory / "report.html", content)
    results = json.loads((directory / "results.json").read_text("utf-8"))
    streams.say(
        f"\n{report_content.results_table(results)}\n\n"
        f"{results['peak_memory_gib']:.1f} GiB at most, "
        f"{time.monotonic() - started:.0f} s: {directory / 'report.html'}\n"
    )
    return results


def open_job(
    config: ml_collections.ConfigDict,
    directory: pathlib.Path,
    devices: strategy.Devices = strategy.DEFAULT,
) -> Job:
    """Opens a workdir for a job, to run its stages one by one; runs none of them.

    Raises:
      InputError: bad settings or data, as far as they show now; a workdir that was made
        with others.
    """
    settings.check(config, SETTINGS)
    require_acting(config)
    pipeline_checks.check_settings(config)
    given, config = config, _with_pairs(config, directory)
    beir = pipeline_data.validated(config)
    plans = pipeline_data.check_data(config, devices)
    if config.audit_epsilons:
        check_audit(config, beir)
    if spending.is_limited():
        made = pathlib.Path(directory) / releases.RELEASE_FOLDER
        spending.require_within(
            [
                budget.Run(name, plan, plan.spec.steps)
                for name, plan in plans.items()
                if not (made / name).exists()
            ]
        )
    # Last, since the workdir keeps its config from here on.
    directory = workdir.open_workdir(directory, given, pipeline_checks.USED_BY)
    return Job(config, directory, devices)


def check_audit(config: ml_collections.ConfigDict, beir: BeirDirectory) -> None:
    """Refuses settings of an audit that do not fit each other, or the pairs."""
    own, made = config.audit, config.canaries
    with pipeline_checks.of_stage("audit"):
        audit.check_settings(own, made.coins, made.trials and made.candidates)
    # Tried: these are dropped, and the stage draws its own.
    canaries.make_canaries(beir, made, np.random.default_rng())


def _with_pairs(
    config: ml_collections.ConfigDict, directory: pathlib.Path
) -> ml_collections.ConfigDict:
    """Imports a log into the workdir, unless it was; returns the config of the pairs.

    Raises:
      InputError: what `import` raises; a workdir that was made with another config.
    """
    if not sources.is_log(config.data):
        return config
    place = workdir.reserve_workdir(directory, config, pipeline_checks.USED_BY)
    logs = {**config.log.logs, "train": config.data}
    with pipeline_checks.of_stage("log"):
        made = stages.Stages(place).imported(import_log, config.log, logs)
    config = config.copy_and_resolve_references()
    config.data = str(made)
    return config


def devices_of(
    module: Any, config: ml_collections.ConfigDict, devices: strategy.Devices
) -> list[strategy.Devices]:
    """Returns the devices that a stage of a job is given; none unless it trains."""
    if module is pretrain:
        return [pretrain.usable(config, devices)]
    return [devices] if module in (finetune, train_retriever) else []


def require_acting(config: ml_collections.ConfigDict) -> None:
    """Refuses settings of the stages that would have no effect in this job."""
    rules = {name: getattr(module, "ACTING", ()) for name, module in _STAGES.items()}
    pipeline_checks.require_acting(config, SETTINGS, FILLED, rules)
    acting.require_acting(config, SETTINGS, ACTING)


def _with_epsilon(label: str, epsilon: float) -> str:
    return f"{label}, ε = {report_content.epsilon_symbol(epsilon)}"


class Job:
    """The stages of a job in its workdir, to call in this order, as `run` does.

    Every method returns its output, new or finished before; all but `prepare` need what
    `prepare` sets.

    Attributes:
      config: the settings.
      directory: the workdir.
      release: the directory of what may be shared.
      private: the directory of what must not be.
      seconds: time of each stage, by the name of its directory.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        directory: pathlib.Path,
        devices: strategy.Devices = strategy.DEFAULT,
    ):
        """Makes `private/` in a workdir that `open_job` has checked."""
        self.config = config
        self._devices = devices
        self.stages = stages.Stages(directory)
        self.directory = directory
        self.private, self.release = self.stages.private, self.stages.release
        self.seconds = self.stages.seconds

    def _run(self, stage: Any, name: str, free: bool, settings: dict) -> pathlib.Path:
        """Runs one stage under `release/` or `private/`.

        `free` outputs carry a finite ε or derive from public data alone.
        """
        module, config = stage
        # A known seed would reveal canaries.
        if module not in (evaluate, canaries, mine):
            settings = {"seed": self.config.seed, **settings}
        devices = devices_of(module, config, self._devices)
        return self.stages.run(module, config, name, free, *devices, **settings)

    def prepare(self) -> None:
        """Makes public pairs, the public T5 to start from, and its vocabulary."""
        config, init = self.config, self.config.init
        data = {"data": config.data}
        settings = {**data, "vocabulary_size": 0} if init else data
        prepared = self._run((prepare, config.prepare), "prepare", True, settings)
        self.public_pairs = str(prepared / layout.PUBLIC_PAIRS)
        own = prepared / prepare.VOCABULARY
        self.vocabulary = str(sources.vocabulary_file("", init) if init else own)
        self.start = init
        if config.pretrain.steps:
            settings = {**data, "init": init, "vocabulary": self.vocabulary}
            stage = (pretrain, config.pretrain)
            self.start = str(self._run(stage, "public_model", True, settings))
        found = self.public_pairs, self.vocabulary
        pipeline_data.check_prepared(config, *found, self.private)
        if not (self.release / "retriever_untrained").exists():
            if config.epsilons or config.audit_epsilons:
                with pipeline_checks.of_stage("finetune"):
                    finetune.try_model(config.finetune, self.vocabulary, self.start)
            for name in ("retriever", *["direct"][: len(config.direct_epsilons)]):
                stage = config[name]
                init = config.retriever_init or self.start
                with pipeline_checks.of_stage(name):
                    train_retriever.try_model(
                        stage, self.vocabulary, init, self._devices
                    )
            if config.audit_epsilons:
                pipeline_data.check_canaries(
                    self._canaries(),
                    config.audit_epsilons,
                    config.finetune,
                    "finetune",
                    config.audit,
                    self.vocabulary,
                    self._devices,
                )

    def _canaries(self) -> pathlib.Path:
        """Makes the pairs with canaries: first of all private stages, at no cost."""
        own = self.config
        data = {"data": own.data, "user_field": own.finetune.user_field}
        return self._run((canaries, self.config.canaries), "canaries", False, data)

    def generators(self) -> dict[float, pathlib.Path]:
        """Trains one generator per ε, all from the same public weights.

        A histogram, if there is one, comes first: each ε is for it and a generator.
        """
        self.histogram = ""
        if self.config.histogram_epsilon:
            own = pipeline_data.histogram_stage(self.config)
            name = f"histogram_{layout.epsilon_name(own.epsilon)}"
            self.histogram = str(self._run((histogram, own), name, True, {}))
        return {
            epsilon: self._run(
                (finetune, self.config.finetune),
                f"generator_{layout.epsilon_name(epsilon)}",
                math.isfinite(epsilon),
                {
                    "vocabulary": self.vocabulary,
                    "pairs": self.config.data,
                    "init": self.start,
                    "epsilon": epsilon,
                    "histogram": self.histogram if math.isfinite(epsilon) else "",
                },
            )
            for epsilon in self.config.epsilons
        }

    def synthetic_sets(
        self, generators: dict[float, pathlib.Path]
    ) -> dict[float, pathlib.Path]:
        """Writes one synthetic set per generator."""
        return {
            epsilon: self._written(
                generator,
                f"synthetic_{layout.epsilon_name(epsilon)}",
                math.isfinite(epsilon),
                self.histogram,
            )
            for epsilon, generator in generators.items()
        }

    def _written(
        self, generator: pathlib.Path, name: str, free: bool, histogram: str = ""
    ) -> pathlib.Path:
        """Writes a generator's set."""
        settings = {
            "generator": str(generator),
            "histogram": histogram,
            "corpus": self.config.data,
        }
        stage = (synthesize, self.config.synthesize)
        return self._run(stage, name, free, settings) / layout.SET

    def retrievers(self, sets: dict[float, pathlib.Path]) -> list[report_content.Row]:
        """Trains the retrievers, all for the same steps; returns the table's rows."""
        Row = report_content.Row
        rows = [Row("bm25", "BM25", None, None)]

        def add(
            name: Any, label: Any, epsilon: Any, config: Any, settings: Any
        ) -> None:
            start = self.config.retriever_init or self.start
            settings.update(vocabulary=self.vocabulary, init=start)
            free = epsilon is None or math.isfinite(epsilon)
            path = self._run(
                (train_retriever, config), f"retriever_{name}", free, settings
            )
            rows.append(Row(name, label, epsilon, path))

        plain = self.config.retriever
        same = {"steps": plain.steps, "epochs": plain.epochs}
        public = {"pairs": self.public_pairs}
        none = {"steps": 0, "epochs": 0.0}
        # Their validation would be a read that no ε covers.
        private = {"pairs": self.config.data, "validation_pairs": 0}
        add("untrained", "Untrained encoder", None, plain, {**public, **none})
        add("public_only", "Public-only", None, plain, public)
        add("original", "Original pairs", math.inf, plain, private)
        for epsilon, path in sets.items():
            name = f"synthetic_{layout.epsilon_row(epsilon)}"
            label = _with_epsilon("Synthetic", epsilon)
            add(name, label, epsilon, plain, {"pairs": str(path)})
        for epsilon in self.config.direct_epsilons:
            name = f"direct_{layout.epsilon_row(epsilon)}"
            label = _with_epsilon("Direct DP", epsilon)
            settings = {"pairs": self.config.data, **same, "epsilon": epsilon}
            add(name, label, epsilon, self.config.direct, settings)
        return rows

    def adapters(self) -> list[report_content.Row]:
        """Trains the maps of a public encoder's queries; returns its rows and theirs.

        Hard negatives, where the unit allows them, are BM25's.
        """
        own, stage = self.config.embeddings, self.config.adapter
        if not own:
            return []
        Row, encoder = report_content.Row, pipeline_checks.ENCODER
        rows = [Row(encoder, "Encoder as it is", None, pathlib.Path(own))]
        against = {"public_only": encoder, "unprotected": "adapter_inf"}
        settings = {"pairs": self.config.data, "documents": own, "queries": own}
        hard = train_adapter.default_config().hard_negatives.to_dict()
        if pipeline_checks.mines(self.config):
            mining = {"pairs": self.config.data, "split": stage.split}
            mined = self._run((mine, self.config.mine), "mined", False, mining)
            hard = {**stage.hard_negatives.to_dict(), "run": str(mined)}
        for epsilon in self.config.adapter_epsilons:
            name = f"{pipeline_checks.ADAPTER}_{layout.epsilon_row(epsilon)}"
            settings.update(epsilon=epsilon, hard_negatives=hard)
            free = math.isfinite(epsilon)
            path = self._run((train_adapter, stage), name, free, settings)
            label = _with_epsilon("Encoder adapted", epsilon)
            rows.append(Row(name, label, epsilon, path, against))
        return rows

    def rerankers(
        self, generators: dict[float, pathlib.Path]
    ) -> list[report_content.Row]:
        """Returns the rows of BM25 reranked, by the public T5 and by each generator."""
        if not self.config.rerank:
            return []
        names = [_PUBLIC, *(layout.epsilon_row(epsilon) for epsilon in generators)]
        public, *others = (f"{_RERANKED}_{name}" for name in names)
        against = {"public_only": public, "unprotected": f"{_RERANKED}_inf"}
        rows = []
        if self.start:
            path = checkpoints.locate(self.start)
            label = "BM25 reranked by the public T5"
            rows.append(report_content.Row(public, label, None, path, against))
        for name, (epsilon, path) in zip(others, generators.items()):
            label = _with_epsilon("BM25 reranked by the generator", epsilon)
            rows.append(report_content.Row(name, label, epsilon, path, against))
        return rows

    def audit(self) -> None:
        """Trains generators on canaries, and audits them."""
        if not self.config.audit_epsilons:
            return
        made = self._canaries()
        for epsilon in self.config.audit_epsilons:
            name = layout.epsilon_name(epsilon)
            training = {
                "vocabulary": self.vocabulary,
                "pairs": str(made / canary_set.DATA),
                "init": self.start,
                "epsilon": epsilon,
            }
            generator = self._run(
                (finetune, self.config.finetune), f"audited_{name}", False, training
            )
            written = self._written(generator, f"audited_synthetic_{name}", False)
            found = {
                "canaries": str(made),
                "generator": str(generator),
                "synthetic": str(written),
            }
            self._run((audit, self.config.audit), f"audit_{name}", False, found)

    def evaluate(
        self, rows: list[report_content.Row], sets: dict[float, pathlib.Path]
    ) -> None:
        """Measures all rows, and compares all synthetic sets with private queries."""
        searched = [row for row in rows if not row.reranks]
        ordering = {row.name: str(row.path) for row in rows if row.reranks}
        given = pipeline_checks.adapted_rows(self.config)
        embedded = dict.fromkeys(given, self.config.embeddings)
        paths = {row.name: str(row.path) for row in searched if row.path}
        if given:
            paths[pipeline_checks.ENCODER] = systems.EMBEDDINGS
        self._run(
            (evaluate, self.config.evaluate),
            "evaluation",
            False,
            {
                "data": self.config.data,
                "systems": {systems.BM25: systems.BM25, **paths},
                "indexes": embedded,
                "query_embeddings": embedded,
                "rerankers": ordering,
                "rerank": pipeline_checks.reranking_settings(
                    self.config, self.public_pairs, ordering
                ),
                "synthetic": {
                    layout.epsilon_row(epsilon): str(path)
                    for epsilon, path in sets.items()
                },
                "baseline": _PUBLIC if any(r.name == _PUBLIC for r in rows) else "",
                "baselines": {
                    row.name: row.against["public_only"]
                    for row in searched
                    if row.against
                },
            },
        )


if __name__ == "__main__":
    command.main(run, strategy.ONE_PROCESS, spends=True)
