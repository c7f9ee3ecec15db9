"""The main job: private pairs in, synthetic queries, retrievers and a report out.

    python -m tfdpsq.run.pipeline --config=configs/quickstart.py --workdir=DIR

Runs every stage in one process, each into its own directory of the workdir:

    release/   made from public documents, or carries a certificate of finite ε
    private/   everything else: models without a guarantee, curves, metrics
    report.html, results.json   internal; they show private queries

A stage that is finished is not redone, so a run that was interrupted is started
again with the same command.
"""

from __future__ import annotations

import json
import math
import pathlib
import shlex
import sys
import time
from typing import Any

import ml_collections

from tfdpsq import privacy, retriever
from tfdpsq.generator.span_corruption import SENTINELS
from tfdpsq.privacy import reads as privacy_reads
from tfdpsq.run import (
    audit,
    canaries,
    evaluate,
    finetune,
    prepare,
    pretrain,
    synthesize,
    train_retriever,
)
from tfdpsq.run.attacks import canary_set
from tfdpsq.run.core import (
    command,
    layout,
    pipeline_checks,
    settings,
    sources,
    stages,
    workdir,
)
from tfdpsq.run.devices import strategy
from tfdpsq.run.reporting import content as report_content
from tfdpsq.run.reporting import page
from tfdpsq.run.search import systems

SPLITS = ("train", "dev", "test")


_INF = 'Every epsilon must be above 0 (float("inf") trains without privacy).'
_EPSILON = settings.Number(8.0, 0, math.inf, low_open=True, remedy=_INF)
SETTINGS: settings.Declaration = {
    "data": settings.Text(sources.PYDOCS, required=True),
    "init": settings.Text("t5_tiny_pydocs"),
    "retriever_init": settings.Text(""),
    "epsilons": settings.Several((math.inf, 8.0), _EPSILON),
    "direct_epsilons": settings.Several((8.0,), _EPSILON),
    "audit_epsilons": settings.Several((), _EPSILON),
    "examples": settings.Integer(8, 0, 10_000),
    "seed": settings.Integer(0, 0, settings.SEED),
    "strict": settings.Flag(False),
    # Where a T5 is pretrained from random weights, it has sentinels besides.
    "prepare": settings.with_defaults(
        prepare.SETTINGS,
        vocabulary_size=pretrain.default_config().t5.vocabulary_size - SENTINELS,
    ),
    # The preset has seen pydocs' documents already.
    "pretrain": settings.with_defaults(
        pretrain.SETTINGS, steps=settings.Integer(0, 0, settings.STEPS)
    ),
    "finetune": finetune.SETTINGS,
    "synthesize": synthesize.SETTINGS,
    "retriever": train_retriever.SETTINGS,
    # The paper's.
    "direct": settings.with_defaults(
        train_retriever.SETTINGS, method=settings.Text("naive", retriever.METHODS)
    ),
    "evaluate": evaluate.SETTINGS,
    "canaries": canaries.SETTINGS,
    "audit": audit.SETTINGS,
}


def default_config() -> ml_collections.ConfigDict:
    """Every stage's settings, and which rows the table has.

    `init` is the public T5 that generators and retrievers start from: a directory, a
    preset's name, or "" for random weights. With `pretrain.steps` it is first trained
    on the documents. `retriever_init` is another one for retrievers, with the same
    vocabulary. `epsilons` are those of the generator (a row of the table each), and
    `direct_epsilons` those of the retriever trained on private pairs directly, by
    `direct.method`. With `strict` the job refuses: measuring what was kept reads
    private queries. `seed` is that of every stage before the evaluation; the noise is
    drawn afresh whatever it is. For each of `audit_epsilons` one more generator is
    trained, on pairs with canaries among them, and audited, for `finetune.unit`. Paths,
    ε and seed inside the stages' own settings are filled in by the pipeline.
    """
    return settings.default_config(SETTINGS)


def run(
    config: ml_collections.ConfigDict,
    directory: pathlib.Path,
    devices: strategy.Devices = strategy.DEFAULT,
) -> dict[str, Any]:
    """Runs the whole job, or what is left of it.

    Args:
      config: the settings.
      directory: the workdir.
      devices: what generators and retrievers are trained on.

    Returns:
      What `results.json` holds.

    Raises:
      InputError: bad settings or data; before any training where they can be told.
    """
    started = time.monotonic()
    job = open_job(config, directory, devices)
    directory = job.directory
    reads = privacy.PrivateReads(job.private / privacy_reads.FILE_NAME)
    if config.examples:
        reads.record("some private queries as they are", "report.html, results.json")
    job.prepare()
    generators = job.generators()
    sets = job.synthetic_sets(generators)
    rows = job.retrievers(sets)
    job.evaluate(rows, sets)
    job.audit()
    content = report_content.gather(
        config,
        directory,
        rows=rows,
        sets=sets,
        seconds=job.seconds,
        peak_memory_gib=max(job.stages.peak_memory_gib, workdir.peak_memory_gib()),
        command=" ".join(map(shlex.quote, ["python", "-m", "tfdpsq.run.pipeline"]))
        + " "
        + " ".join(map(shlex.quote, sys.argv[1:])),
    )
    page.write_results(directory / "results.json", content)
    page.write_report(directory / "report.html", content)
    results = json.loads((directory / "results.json").read_text("utf-8"))
    sys.stdout.write(
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
      InputError: bad settings or data, as far as they can be told now; a workdir that
        was made with others.
    """
    settings.check(config, SETTINGS)
    pipeline_checks.check_settings(config)
    for trained in (config.finetune, config.retriever):
        devices.require_share(trained.batch_size)
    directory = workdir.open_workdir(directory, config)
    beir = sources.open_beir(config.data)
    beir.validate(SPLITS)
    pipeline_checks.check_sizes(config, len(beir.pairs("train")))
    return Job(config, directory, devices)


def epsilon_name(epsilon: float) -> str:
    """What files are called by: "inf", or "eps8" for 8.0."""
    return "inf" if math.isinf(epsilon) else f"eps{epsilon:g}"


class Job:
    """The stages of a job in its workdir, to be called in this order, as `run` does.

    Every method returns what it made, or what lies there finished; all but `prepare`
    need what it sets.

    Attributes:
      config: the settings.
      directory: the workdir.
      release: the directory of what may be shared.
      private: the directory of what must not be.
      seconds: how long each stage took, by the name of its directory.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        directory: pathlib.Path,
        devices: strategy.Devices = strategy.DEFAULT,
    ):
        """Makes `private/` in a workdir; `open_job` checks what it is given first."""
        self.config = config
        self._devices = devices
        self.stages = stages.Stages(directory)
        self.directory = directory
        self.private, self.release = self.stages.private, self.stages.release
        self.seconds = self.stages.seconds

    def _run(self, stage, name: str, free: bool, settings: dict) -> pathlib.Path:
        """Runs one stage under `release/` if its output is free to go, or `private/`.

        Args:
          stage: the stage's module.
          name: of its output directory.
          free: whether the output carries a finite ε or touches nothing private.
          settings: what the pipeline fills into the stage's config.
        """
        module, config = stage
        if module not in (evaluate, canaries):  # whose seed would tell the secrets
            settings = {"seed": self.config.seed, **settings}
        devices = [self._devices] if module is finetune else []
        if module in (pretrain, train_retriever):
            devices = [module.usable(config, self._devices)]
        return self.stages.run(module, config, name, free, *devices, **settings)

    def prepare(self) -> None:
        """Public pairs, the public T5 to start from, and its vocabulary."""
        init = self.config.init
        data = {"data": self.config.data}
        settings = {**data, "vocabulary_size": 0} if init else data
        prepared = self._run((prepare, self.config.prepare), "prepare", True, settings)
        self.public_pairs = str(prepared / layout.PUBLIC_PAIRS)
        self.vocabulary = (
            str(sources.vocabulary_file("", init))
            if init
            else str(prepared / prepare.VOCABULARY)
        )
        self.start = init
        if self.config.pretrain.steps:
            self.start = str(
                self._run(
                    (pretrain, self.config.pretrain),
                    "public_model",
                    True,
                    {**data, "init": init, "vocabulary": self.vocabulary},
                )
            )

    def generators(self) -> dict[float, pathlib.Path]:
        """One generator per ε, all from the same publicly pretrained weights."""
        return {
            epsilon: self._run(
                (finetune, self.config.finetune),
                f"generator_{epsilon_name(epsilon)}",
                math.isfinite(epsilon),
                {
                    "vocabulary": self.vocabulary,
                    "pairs": self.config.data,
                    "init": self.start,
                    "epsilon": epsilon,
                },
            )
            for epsilon in self.config.epsilons
        }

    def synthetic_sets(
        self, generators: dict[float, pathlib.Path]
    ) -> dict[float, pathlib.Path]:
        """One synthetic set per generator."""
        return {
            epsilon: self._run(
                (synthesize, self.config.synthesize),
                f"synthetic_{epsilon_name(epsilon)}",
                math.isfinite(epsilon),
                {
                    "vocabulary": self.vocabulary,
                    "generator": str(generator),
                    "corpus": self.config.data,
                },
            )
            / layout.SET
            for epsilon, generator in generators.items()
        }

    def retrievers(self, sets: dict[float, pathlib.Path]) -> list[report_content.Row]:
        """The rows of the table, every retriever trained for the same steps."""
        pipeline_checks.require_one_vocabulary(
            self.config.retriever_init, self.vocabulary
        )
        Row = report_content.Row
        rows = [Row("bm25", "BM25", None, None)]

        def add(name, label, epsilon, config, free, settings):
            start = self.config.retriever_init or self.start
            settings.update(vocabulary=self.vocabulary, init=start)
            path = self._run(
                (train_retriever, config), f"retriever_{name}", free, settings
            )
            rows.append(Row(name, label, epsilon, path))

        plain = self.config.retriever
        public = {"pairs": self.public_pairs}
        private = {"pairs": self.config.data}
        add("untrained", "Untrained encoder", None, plain, True, {**public, "steps": 0})
        add("public_only", "Public-only", None, plain, True, public)
        add("original", "Original pairs", math.inf, plain, False, private)
        for epsilon, path in sets.items():
            add(
                f"synthetic_{epsilon_name(epsilon)}",
                f"Synthetic, ε = {report_content.epsilon_symbol(epsilon)}",
                epsilon,
                plain,
                math.isfinite(epsilon),
                {"pairs": str(path)},
            )
        for epsilon in self.config.direct_epsilons:
            add(
                f"direct_{epsilon_name(epsilon)}",
                f"Direct DP, ε = {report_content.epsilon_symbol(epsilon)}",
                epsilon,
                self.config.direct,
                math.isfinite(epsilon),
                {
                    **private,
                    "epsilon": epsilon,
                    "steps": plain.steps,
                },
            )
        return rows

    def audit(self) -> None:
        """Generators that were trained on canaries, and what leaks of them."""
        if not self.config.audit_epsilons:
            return
        whose = self.config.finetune.user_field
        data = {"data": self.config.data, "user_field": whose}
        made = self._run((canaries, self.config.canaries), "canaries", False, data)
        for epsilon in self.config.audit_epsilons:
            name = epsilon_name(epsilon)
            training = {
                "vocabulary": self.vocabulary,
                "pairs": str(made / canary_set.DATA),
                "init": self.start,
                "epsilon": epsilon,
            }
            generator = self._run(
                (finetune, self.config.finetune), f"audited_{name}", False, training
            )
            writing = {
                "vocabulary": self.vocabulary,
                "generator": str(generator),
                "corpus": self.config.data,
            }
            written = self._run(
                (synthesize, self.config.synthesize),
                f"audited_synthetic_{name}",
                False,
                writing,
            )
            found = {
                "canaries": str(made),
                "generator": str(generator),
                "synthetic": str(written / layout.SET),
            }
            self._run((audit, self.config.audit), f"audit_{name}", False, found)

    def evaluate(
        self, rows: list[report_content.Row], sets: dict[float, pathlib.Path]
    ) -> None:
        """Metrics of all rows, BLEU of all synthetic sets."""
        self._run(
            (evaluate, self.config.evaluate),
            "evaluation",
            False,
            {
                "data": self.config.data,
                "vocabulary": self.vocabulary,
                "systems": {
                    row.name: systems.BM25 if row.path is None else str(row.path)
                    for row in rows
                },
                "synthetic": {
                    epsilon_name(epsilon): str(path) for epsilon, path in sets.items()
                },
                "baseline": "public_only",
            },
        )


if __name__ == "__main__":
    command.main(run, strategy.ONE_PROCESS)
