"""Reproduce the paper's tables 1 to 7: every row, ours next to the published number.

    python -m tfdpsq.run.reproduce --table=2 --scale=tiny

`--table` takes several, or "all"; rows shared by tables are made once. `--scale` is a
name in `configs/paper/tables.py`: "tiny" is offline and for two cores, "paper" needs MS
MARCO, the BEIR sets and machines (`--config.job.data=`, `--config.zero_shot.root=`).
`--workdir` takes all output; the default is a directory of the scale in the temporary
one. To resume, start the same command again. Whatever shows from settings, data and
checkpoints alone is checked before the first stage.

Writes `tables.json` and `tables.html`: numbers, Kendall's τ between the two orderings
of the rows, and for each ordering in the paper whether it holds here, and if not, why.
They are computed from private queries and must not be released. A table of examples
quotes private queries: `private/examples.html` and `examples.json`.
"""

from __future__ import annotations

import math
import pathlib
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np
from absl import flags

from tfdpsq import validation
from tfdpsq.data.pydocs import PACKAGES
from tfdpsq.privacy.spec import UNITS
from tfdpsq.run import (
    audit,
    canaries,
    evaluate,
    finetune,
    pipeline,
    prepare,
    pretrain,
    synthesize,
    train_retriever,
    zero_shot,
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
    stages,
    streams,
    workdir,
)
from tfdpsq.run.devices import strategy
from tfdpsq.run.reproduction import (
    reproduce_models,
    reproduce_numbers,
    reproduce_report,
    reproduce_rows,
)
from tfdpsq.run.search import hybrid, reranking, systems
from tfdpsq.run.training import private_training

CONFIG = pathlib.Path("configs", "paper", "tables.py")
_HERE = "this command"


def _free_form(name: str, tables: Any) -> None:
    """Refuses a value that is not a mapping; `reproduce_rows` checks its content."""
    if not isinstance(tables, (Mapping, ml_collections.ConfigDict)):
        raise validation.InputError(
            f"{name} is {validation.shown(tables)}; take it from {CONFIG}."
        )


# Settings of `finetune` that a size can have of its own, since memory decides them.
_OF_SIZES = (
    "optimizer",
    "t5x_adafactor",
    "microbatch_size",
    "rematerialize",
    "lora",
)
SETTINGS: settings.Declaration = {
    "job": pipeline.SETTINGS,
    "sizes": settings.Named(
        {"base": {}},
        {
            "init": settings.Text(""),
            "finetune": {name: finetune.SETTINGS[name] for name in _OF_SIZES},
        },
    ),
    "retriever_size": settings.Text("base", required=True),
    "seeds": settings.Several((0,), settings.Integer(0, 0, settings.SEED), 1),
    "held_out_packages": settings.Several((), settings.Text("", PACKAGES)),
    "zero_shot": zero_shot.SETTINGS,
    "audit": {
        "unit": settings.Text("", ("", *UNITS)),
        "steps": settings.Integer(0, 0, settings.STEPS),
        "batch_size": settings.Integer(0, 0),
        "query_length": settings.Integer(0, 0, settings.TOKENS),
    },
    "tables": settings.Checked({}, _free_form),
    "resamples": settings.Integer(10_000, 1, 10**7),
}


def default_config() -> ml_collections.ConfigDict:
    """Returns the settings: a job, the sizes of T5, and the tables.

    `job` is the pipeline's; `sizes` and the rows replace its `init`, `epsilons` and
    `direct_epsilons`. A size is {"init": T5}; its `finetune` holds settings of
    `job.finetune` that differ for it. Retrievers start from `retriever_size`. Every row
    is made once for each of `seeds`. With `held_out_packages` the data are pydocs
    without these, and each is a set of the zero-shot table. `audit` has the settings of
    `job.finetune` that differ for generators trained on canaries, where neither 0 nor
    "".
    """
    return settings.default_config(SETTINGS)


@workdir.alone()
def run(
    config: ml_collections.ConfigDict,
    directory: pathlib.Path,
    tables: Sequence[str] = (),
    devices: strategy.Devices = strategy.DEFAULT,
) -> dict[str, Any]:
    """Makes the missing inputs of the tables, and compares.

    `tables` are names from `config.tables`; none takes all. `devices` are those that
    stages train on, as far as each can use them.

    Returns:
      The content of `tables.json`.

    Raises:
      InputError: an unknown table, bad settings or data; before any training where
        possible.
    """
    started = time.monotonic()
    settings.check(config, SETTINGS)
    # First of all, it is a place for what this is.
    releases.Output(directory, releases.PRIVATE, "tables of measures on private pairs")
    names = list(tables) or list(config.tables)
    for name in names:
        validation.one_of("table", name, tuple(config.tables))
    wanted = reproduce_rows.tables_of(config, names)
    data, sets = reproduce_rows.data_of(config)
    check(config, wanted, data, sets, directory, devices)
    used_by = reproduce_models.used_by(config)
    directory = workdir.open_workdir(directory, config, used_by)
    rows = Rows(config, directory, data, sets, devices)
    rows.check_canaries(reproduce_rows.rows_of(wanted).get("canaries", ()))
    results = reproduce_numbers.compare(rows, wanted, config.seeds, config.resamples)
    results["seconds_now"] = round(time.monotonic() - started, 1)
    results["seconds"] = dict(rows.stages.seconds)
    reproduce_report.write(directory, results)
    streams.say(
        f"\n{reproduce_report.as_text(results)}\n\n{directory / 'tables.html'}\n"
    )
    return results


def check(
    config: ml_collections.ConfigDict,
    wanted: Mapping[str, Mapping[str, Any]],
    data: str,
    sets: Mapping[str, str],
    directory: pathlib.Path,
    devices: strategy.Devices = strategy.DEFAULT,
) -> None:
    """Refuses what a later stage would refuse, when others have been paid for.

    `wanted` are the tables to make, and `sets` maps the names of zero-shot sets made
    from `data` to their directories. What was made in the workdir already is not tried
    again.

    Raises:
      InputError: names the setting, the set or the checkpoint.
      DataError: malformed data.
    """
    of_measure = reproduce_rows.rows_of(wanted)
    reproduce_numbers.check(config, wanted, sets)
    sizes = {row.size for rows in of_measure.values() for row in rows if row.size}
    for size in (*sorted(sizes), config.retriever_size):
        validation.one_of("the size of a row", size, tuple(config.sizes))
    own = "seed audit_epsilons histogram_epsilon retriever_init rerank fit_rerank "
    filled = f"{own} embeddings adapter_epsilons".split()
    acting.require_unfilled(config.job, pipeline.SETTINGS, filled, "job", _HERE)
    for name, declared in (
        ("fusion", settings.with_defaults(hybrid.SETTINGS, base=systems.BM25)),
        ("rerank", reranking.SETTINGS),
    ):
        own, where = config.job.evaluate[name], f"job.evaluate.{name}"
        acting.require_unfilled(own, declared, declared, where, _HERE)
    vocabulary = reproduce_models.check(config, sorted(sizes))
    job = reproduce_models.whole_job(config, of_measure, data)
    with pipeline_checks.of_stage("job"):
        pipeline.require_acting(job)
        pipeline_checks.check_settings(job)
    if "zero_shot" in of_measure:
        stage = reproduce_models.zero_shot_stage(config, sets, {"row": "row"})
        with pipeline_checks.of_stage("zero_shot"):
            zero_shot.check_settings(stage)
        parts, _ = zero_shot.located(stage)
    of_sizes = {
        f"sizes.{size}.finetune": reproduce_models.of_size(config, size)
        for size in sorted(sizes)
    }
    for where, own in of_sizes.items():
        acting.check(own, finetune.SETTINGS, finetune.ACTING, where)
        pipeline_checks.require_whole_users(where, own, own.unit)
    with pipeline_checks.of_stage("job"):
        beir = pipeline_data.validated(job)
        pipeline_data.check_data(job, devices)
    for where, own in of_sizes.items():
        pipeline_data.check_generators(data, job.epsilons, own, where, devices)
    taken = sorted({*sizes, config.retriever_size})
    starts = {size: reproduce_models.start_of(config, size) for size in taken}
    _try_models(config, job, starts, vocabulary, devices, directory)
    if "canaries" in of_measure:
        trained = job.finetune.copy_and_resolve_references()
        trained.update(_of_audit(config))
        with pipeline_checks.of_stage("audit"):
            private_training.check_steps(trained, trains=True)
        with pipeline_checks.of_stage("job"):
            pipeline.check_audit(job, beir)
    if "zero_shot" in of_measure and not any(directory.glob("private/*zero_shot*")):
        zero_shot.check_parts(stage, parts)


def _try_models(
    config: ml_collections.ConfigDict,
    job: ml_collections.ConfigDict,
    starts: Mapping[str, str],
    vocabulary: str,
    devices: strategy.Devices,
    directory: pathlib.Path,
) -> None:
    """Refuses settings that do not fit the T5s of some sizes, {size: weights}.

    What was trained in the workdir `directory` already is not tried again.
    """

    def untried(size: str, outputs: str) -> bool:
        return size in starts and not any(directory.glob(f"*/*{outputs}*"))

    for size, start in starts.items():
        if job.epsilons and untried(size, f"generator_{size}_"):
            own = reproduce_models.of_size(config, size)
            with pipeline_checks.of_stage(f"sizes.{size}.finetune"):
                finetune.try_model(own, vocabulary, start)
    base = config.retriever_size
    for name in ("retriever", *["direct"][: len(job.direct_epsilons)]):
        if untried(base, "retriever_direct" if name == "direct" else "retriever_[!d]"):
            with pipeline_checks.of_stage(f"job.{name}"):
                train_retriever.try_model(job[name], vocabulary, starts[base], devices)


def _of_audit(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Returns the settings of `finetune` that differ on canaries."""
    return {name: value for name, value in config.audit.items() if value}


class Rows:
    """Every row's model, set and numbers, each made on first use.

    The names of outputs contain the seed, and name the ledgers under `private/runs`:
    two seeds are two runs.

    Attributes:
      config: the settings.
      stages: runs the stages of the rows.
      data: the pairs' BEIR directory, or "pydocs".
      sets: {name: directory} of the zero-shot sets made here.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        directory: pathlib.Path,
        data: str,
        sets: Mapping[str, str],
        devices: strategy.Devices = strategy.DEFAULT,
    ):
        """Trains nothing yet. The workdir must exist, and `check` have passed."""
        self._devices = devices
        self.config = config
        self.job = config.job
        self.stages = stages.Stages(directory)
        self.data, self.sets = data, sets
        # Finding a finished stage reads all documents, so once is enough.
        self._models: dict[str, str] = {}
        self._zero_shot: dict[tuple[int, tuple[str, ...]], Any] = {}

    def _run(
        self,
        module: Any,
        config: ml_collections.ConfigDict,
        name: str,
        free: bool,
        **settings: Any,
    ) -> pathlib.Path:
        devices = pipeline.devices_of(module, config, self._devices)
        return self.stages.run(module, config, name, free, *devices, **settings)

    def model(self, size: str) -> str:
        """Returns the public T5 of a size."""
        if size not in self._models:
            self._models[size] = self._made(size)
        return self._models[size]

    def _made(self, size: str) -> str:
        init = reproduce_models.start_of(self.config, size)
        if not self.job.pretrain.steps:
            return init
        stage = self.job.pretrain.copy_and_resolve_references()
        # On all public documents, including those of the zero-shot sets.
        return str(
            self._run(
                pretrain, stage, f"t5_{size}", True, data=self.job.data, init=init
            )
        )

    def vocabulary(self) -> str:
        """Returns the one vocabulary of all sizes."""
        return str(sources.vocabulary_file("", self.model(self.config.retriever_size)))

    def synthetic_set(self, row: reproduce_rows.Row, seed: int) -> pathlib.Path:
        """Returns the set that a row's generator wrote."""
        assert row.epsilon is not None
        name = f"{row.size}_{layout.epsilon_name(row.epsilon)}"
        names = f"seed{seed}_generator_{name}", f"seed{seed}_synthetic_{name}"
        free = math.isfinite(row.epsilon)
        return self._generated(row, names, free, self.data, seed)[1]

    def _generated(
        self,
        row: reproduce_rows.Row,
        names: tuple[str, str],
        free: bool,
        pairs: str,
        seed: int,
        **changed: Any,
    ) -> tuple[pathlib.Path, pathlib.Path]:
        """Returns a row's generator, trained on `pairs`, and the set that it wrote.

        `names` are those of the two outputs; `changed` are settings of training.
        """
        generator = self._run(
            finetune,
            reproduce_models.of_size(self.config, row.size),
            names[0],
            free,
            pairs=pairs,
            init=self.model(row.size),
            epsilon=row.epsilon,
            vocabulary=self.vocabulary(),
            seed=seed,
            **changed,
        )
        written = self._run(
            synthesize,
            self.job.synthesize,
            names[1],
            free,
            generator=str(generator),
            corpus=self.data,
            seed=seed,
        )
        return generator, written / layout.SET

    def retriever(self, row: reproduce_rows.Row, seed: int) -> pathlib.Path:
        """Returns a row's retriever."""
        stage, free = self.job.retriever, True
        settings: dict[str, Any] = {
            "vocabulary": self.vocabulary(),
            "init": self.model(self.config.retriever_size),
            "seed": seed,
        }
        if row.kind == "synthetic":
            settings["pairs"] = str(self.synthetic_set(row, seed))
            free = math.isfinite(row.epsilon or 0)
        elif row.kind in reproduce_rows.CONTROLS:
            prepared = self._run(
                prepare,
                self.job.prepare,
                "prepare",
                True,
                data=self.data,
                vocabulary_size=0,
            )
            settings["pairs"] = str(prepared / layout.PUBLIC_PAIRS)
            if row.kind == "untrained":
                settings.update(steps=0, epochs=0.0)
        else:
            settings["pairs"] = self.data
            free = row.kind == "direct"
            if free:
                stage = self.job.direct
                stage_of_all = self.job.retriever
                settings.update(
                    epsilon=row.epsilon,
                    steps=stage_of_all.steps,
                    epochs=stage_of_all.epochs,
                )
            else:
                settings["validation_pairs"] = 0  # as in `pipeline`
        name = f"seed{seed}_retriever_{row.name}"
        return self._run(train_retriever, stage, name, free, **settings)

    def retrieved(self, row: reproduce_rows.Row, seed: int) -> pathlib.Path:
        """Returns the TREC files of a row on the test queries."""
        return self._evaluated(
            row, seed, "retrieval", systems={row.name: str(self.retriever(row, seed))}
        )

    def compared(self, row: reproduce_rows.Row, seed: int) -> pathlib.Path:
        """Returns the measures of a row's synthetic text."""
        synthetic = {row.name: str(self.synthetic_set(row, seed))}
        return self._evaluated(row, seed, "text", systems={}, synthetic=synthetic)

    def _evaluated(
        self, row: reproduce_rows.Row, seed: int, what: str, **settings: Any
    ) -> pathlib.Path:
        return self._run(
            evaluate,
            self.job.evaluate,
            f"seed{seed}_{what}_{row.name}",
            False,
            data=self.data,
            # The paper's rows are not fused with BM25.
            fusion=evaluate.default_config().fusion,
            **settings,
        )

    def zero_shot(
        self, rows: Sequence[reproduce_rows.Row], seed: int, metric: str
    ) -> dict[str, dict[str, list[np.ndarray]]]:
        """Evaluates several rows on the zero-shot sets, together.

        Returns:
          {set: {row: [[queries] values, for each of its parts]}}.
        """
        out = self.stages.private / f"seed{seed}_zero_shot"
        place = seed, tuple(row.name for row in rows)
        if place not in self._zero_shot:
            retrievers = {row.name: str(self.retriever(row, seed)) for row in rows}
            stage = reproduce_models.zero_shot_stage(self.config, self.sets, retrievers)
            stage.private_directory = str(self.stages.private)
            zero_shot.run(stage, out)
            self._zero_shot[place] = stage
        return zero_shot.values_of(self._zero_shot[place], out, metric)

    def examples(self, rows: Sequence[reproduce_rows.Row], seed: int) -> dict[str, Any]:
        """Writes queries of all rows for the same documents, under `private/`.

        Returns:
          The file, the names of the rows, and how many documents it shows.
        """
        made = {row.name: self.synthetic_set(row, seed) for row in rows}
        own = self.job.evaluate.similarity_split, self.job.examples
        return reproduce_report.write_examples(
            self.stages.private, self.data, *own, made
        )

    def _canaries(self) -> pathlib.Path:
        """Returns the pairs with canaries."""
        whose = {"user_field": self.job.finetune.user_field}
        stage = self.job.canaries
        return self._run(canaries, stage, "canaries", False, data=self.data, **whose)

    def _of_audit(self, row: reproduce_rows.Row) -> dict[str, Any]:
        """Returns the settings of `finetune` that differ for a row's audit."""
        changed = _of_audit(self.config)
        if math.isinf(row.epsilon or 0):
            # Without protection, draw single queries, as usual.
            changed.pop("unit", None)
        return changed

    def check_canaries(self, rows: Sequence[reproduce_rows.Row]) -> None:
        """Makes canaries, which costs nothing, and tries the plans of audits on them.

        Raises:
          InputError: names the setting.
        """
        for row in rows:
            own = reproduce_models.of_size(self.config, row.size)
            own.update(self._of_audit(row))
            pipeline_data.check_canaries(
                self._canaries(),
                [row.epsilon or math.inf],
                own,
                "audit",
                self.job.audit,
                self.vocabulary(),
                self._devices,
            )

    def audited(self, row: reproduce_rows.Row) -> pathlib.Path:
        """Returns `audit`'s findings on a generator that was trained on canaries."""
        assert row.epsilon is not None
        made = self._canaries()
        name = f"{row.size}_{layout.epsilon_name(row.epsilon)}"
        names = f"audited_{name}", f"audited_{name}_synthetic"
        data = str(made / canary_set.DATA)
        generator, written = self._generated(
            row, names, False, data, 0, **self._of_audit(row)
        )
        return self._run(
            audit,
            self.job.audit,
            f"audited_{name}_audit",
            False,
            canaries=str(made),
            generator=str(generator),
            synthetic=str(written),
            seed=0,
        )


def _default_flags(words: list[str]) -> list[str]:
    """Returns the command line with the scale's config and workdir as defaults."""
    own = flags.FlagValues()
    flags.DEFINE_string("scale", "tiny", "", flag_values=own)
    flags.DEFINE_string("config", "", "", flag_values=own)
    flags.DEFINE_string("workdir", "", "", flag_values=own)
    own(words, known_only=True)
    if not own.config:
        in_checkout = pathlib.Path(__file__).resolve().parents[2] / CONFIG
        path = CONFIG if CONFIG.is_file() else in_checkout
        if not path.is_file():
            raise validation.InputError(
                f"{CONFIG} is not there. Run this in a checkout of tfdpsq, or give "
                "--config=FILE:SCALE."
            )
        # Before any --config.NAME, which changes it.
        words = [words[0], f"--config={path}:{own.scale}", *words[1:]]
    if not own.workdir and own.scale == "tiny":
        out = pathlib.Path(tempfile.gettempdir()) / "tfdpsq-reproduce-tiny"
        words = [*words, f"--workdir={out}"]
    return words


def main() -> None:
    """Parses the flags and runs."""
    flags.DEFINE_string("scale", "tiny", "What configs/paper/tables.py holds.")
    table = flags.DEFINE_list("table", [], "Such as 2, or 2,3; all by default.")
    with command.refused_flags():
        sys.argv = _default_flags(sys.argv)

    def asked(
        config: ml_collections.ConfigDict,
        directory: pathlib.Path,
        devices: strategy.Devices,
    ) -> None:
        run(config, directory, [] if table.value == ["all"] else table.value, devices)

    command.main(asked, strategy.ONE_PROCESS)


if __name__ == "__main__":
    main()
