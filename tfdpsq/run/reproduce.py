"""Reproduce the paper's tables 3 to 7: every row, ours next to the published number.

    python -m tfdpsq.run.reproduce --table=3 --scale=tiny

`--table` takes several, or "all"; rows shared by tables are made once. `--scale` is a
name in `configs/paper/tables.py`: "tiny" is offline and for two cores, "paper" needs MS
MARCO, the BEIR sets and machines (`--config.job.data=`, `--config.zero_shot.root=`).
`--workdir` takes all output; the default is a directory of the scale in the temporary
one. To resume, start the same command again.

Writes `tables.json` and `tables.html`: numbers, Kendall's τ between the two orderings
of the rows, and for each ordering in the paper whether it holds here, and if not, why.
They are computed from private queries and must not be released.
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
    command,
    layout,
    pipeline_checks,
    settings,
    sources,
    stages,
    streams,
    workdir,
)
from tfdpsq.run.devices import strategy
from tfdpsq.run.reproduction import reproduce_numbers, reproduce_report, reproduce_rows

CONFIG = pathlib.Path("configs", "paper", "tables.py")


def _free_form(name: str, tables: Any) -> None:
    """Refuses a value that is not a mapping; `reproduce_rows` checks its content."""
    if not isinstance(tables, (Mapping, ml_collections.ConfigDict)):
        raise validation.InputError(
            f"{name} is {validation.shown(tables)}; take it from {CONFIG}."
        )


SETTINGS: settings.Declaration = {
    "job": pipeline.SETTINGS,
    "sizes": settings.Named(
        {"base": {}}, {"init": settings.Text(""), **pretrain.RESIZE}
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
    `direct_epsilons`. A size is {"init": T5}, or what `pretrain`'s `resize` takes, made
    from `job.init` and trained by `job.pretrain`. Retrievers start from
    `retriever_size`. Every row is made once for each of `seeds`. With
    `held_out_packages` the data are pydocs without these, and each is a set of the
    zero-shot table. `audit` has the settings of `job.finetune` that differ for
    generators trained on canaries, where neither 0 nor "".
    """
    return settings.default_config(SETTINGS)


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
    names = list(tables) or list(config.tables)
    for name in names:
        validation.one_of("table", name, tuple(config.tables))
    wanted = {name: config.tables[name].to_dict() for name in names}
    for table in wanted.values():
        for name in (*table["paper"], *table["controls"]):
            size = reproduce_rows.row_of(name).size
            if size:
                validation.one_of(
                    f"the size of row {name!r}", size, tuple(config.sizes)
                )
    pipeline_checks.check_settings(config.job)
    for trained in (config.job.finetune, config.job.retriever):
        devices.require_share(trained.batch_size)
    directory = workdir.open_workdir(directory, config)
    rows = Rows(config, directory, devices)
    results = reproduce_numbers.compare(rows, wanted, config.seeds, config.resamples)
    results["seconds_now"] = round(time.monotonic() - started, 1)
    results["seconds"] = dict(rows.stages.seconds)
    reproduce_report.write(directory, results)
    streams.say(
        f"\n{reproduce_report.as_text(results)}\n\n{directory / 'tables.html'}\n"
    )
    return results


class Rows:
    """Every row's model, set and numbers, each made on first use.

    The names of outputs contain the seed, and name the ledgers under `private/runs`:
    two seeds are two runs.

    Attributes:
      config: the settings.
      stages: runs the stages of the rows.
      sets: {name: directory} of the zero-shot sets made here.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        directory: pathlib.Path,
        devices: strategy.Devices = strategy.DEFAULT,
    ):
        """Finds the data; trains nothing yet. The workdir must exist."""
        self._devices = devices
        self.config = config
        self.job = config.job
        self.stages = stages.Stages(directory)
        self.data, self.sets = reproduce_rows.data_of(config)
        # Finding a finished stage reads all documents, so once is enough.
        self._models: dict[str, str] = {}
        beir = sources.open_beir(self.data)
        beir.validate(pipeline_checks.splits_of(self.job, beir))
        pipeline_checks.check_sizes(self.job, len(beir.pairs("train")))

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
        own = self.config.sizes[size].to_dict()
        init = own.pop("init", self.job.init)
        if not self.job.pretrain.steps:
            if own:
                raise validation.InputError(
                    f"size {size!r} is {own}, which takes training: set "
                    "job.pretrain.steps, or give the size's own init."
                )
            return init
        stage = self.job.pretrain.copy_and_resolve_references()
        stage.resize.update(own)
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
        free = math.isfinite(row.epsilon)
        name = f"{row.size}_{pipeline.epsilon_name(row.epsilon)}"
        common: dict[str, Any] = {"vocabulary": self.vocabulary(), "seed": seed}
        generator = self._run(
            finetune,
            self.job.finetune,
            f"seed{seed}_generator_{name}",
            free,
            pairs=self.data,
            init=self.model(row.size),
            epsilon=row.epsilon,
            **common,
        )
        written = self._run(
            synthesize,
            self.job.synthesize,
            f"seed{seed}_synthetic_{name}",
            free,
            generator=str(generator),
            corpus=self.data,
            prompt=self.job.finetune.prompt,
            **common,
        )
        return written / layout.SET

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
        self, row: reproduce_rows.Row, seed: int, what: str, **settings
    ) -> pathlib.Path:
        return self._run(
            evaluate,
            self.job.evaluate,
            f"seed{seed}_{what}_{row.name}",
            False,
            data=self.data,
            vocabulary=self.vocabulary(),
            **settings,
        )

    def zero_shot(
        self, rows: Sequence[reproduce_rows.Row], seed: int, metric: str
    ) -> dict[str, dict[str, list[np.ndarray]]]:
        """Evaluates several rows on the zero-shot sets, together.

        Returns:
          {set: {row: [[queries] values, for each of its parts]}}.
        """
        stage = self.config.zero_shot.copy_and_resolve_references()
        out = self.stages.private / f"seed{seed}_zero_shot"
        stage.private_directory = str(self.stages.private)
        stage.vocabulary = self.vocabulary()
        with stage.unlocked():
            stage.systems = {row.name: str(self.retriever(row, seed)) for row in rows}
            if self.sets:
                stage.sets = tuple(self.sets)
                stage.paths = self.sets
                # No split was trained on; this is the largest.
                stage.splits = {name: "train" for name in self.sets}
        zero_shot.run(stage, out)
        return zero_shot.values_of(stage, out, metric)

    def audited(self, row: reproduce_rows.Row) -> pathlib.Path:
        """Returns `audit`'s findings on a generator that was trained on canaries."""
        assert row.epsilon is not None
        made = self._run(canaries, self.job.canaries, "canaries", False, data=self.data)
        name = f"{row.size}_{pipeline.epsilon_name(row.epsilon)}"
        changed = {k: v for k, v in self.config.audit.items() if v}
        if math.isinf(row.epsilon):
            # Without protection, draw single queries, as usual.
            changed.pop("unit", None)
        common: dict[str, Any] = {"vocabulary": self.vocabulary(), "seed": 0}
        generator = self._run(
            finetune,
            self.job.finetune,
            f"audited_{name}",
            False,
            pairs=str(made / canary_set.DATA),
            init=self.model(row.size),
            epsilon=row.epsilon,
            **common,
            **changed,
        )
        length = {k: v for k, v in changed.items() if k == "query_length"}
        written = self._run(
            synthesize,
            self.job.synthesize,
            f"audited_{name}_synthetic",
            False,
            generator=str(generator),
            corpus=self.data,
            prompt=self.job.finetune.prompt,
            **common,
            **length,
        )
        return self._run(
            audit,
            self.job.audit,
            f"audited_{name}_audit",
            False,
            canaries=str(made),
            generator=str(generator),
            synthetic=str(written / layout.SET),
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
        words = [*words, f"--config={path}:{own.scale}"]
    if not own.workdir and own.scale == "tiny":
        out = pathlib.Path(tempfile.gettempdir()) / "tfdpsq-reproduce-tiny"
        words = [*words, f"--workdir={out}"]
    return words


def main() -> None:
    """Parses the flags and runs."""
    flags.DEFINE_string("scale", "tiny", "What configs/paper/tables.py holds.")
    table = flags.DEFINE_list("table", [], "Such as 3, or 3,4; all by default.")
    try:
        sys.argv = _default_flags(sys.argv)
    except validation.InputError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)

    def asked(
        config: ml_collections.ConfigDict,
        directory: pathlib.Path,
        devices: strategy.Devices,
    ) -> None:
        names = [] if table.value == ["all"] else table.value
        run(config, directory, names, devices)

    command.main(asked, strategy.ONE_PROCESS)


if __name__ == "__main__":
    main()
