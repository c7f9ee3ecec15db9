"""The rows of the paper's tables, each made when it is asked for.

A row's public T5, generator, synthetic set and retriever are stages like any other:
finished ones are not made again, and tables that share rows share them.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np

from tfdpsq import validation
from tfdpsq.data.pydocs import PACKAGES, build_pydocs
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
from tfdpsq.run.core import pipeline_checks, sources, stages

CONTROLS = ("untrained", "public-only")


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of some table.

    Attributes:
      name: "original", "synthetic-SIZE-EPSILON", "direct-EPSILON", or a control.
      kind: what comes before the first "-".
      size: of the generator; "" where there is none.
      epsilon: target ε; ∞ without protection, `None` where nothing private is read.
    """

    name: str
    kind: str
    size: str
    epsilon: float | None


def row_of(name: str) -> Row:
    """What a row's name says.

    Raises:
      InputError: it is no row's name.
    """
    if name in CONTROLS:
        return Row(name, name, "", None)
    if name == "original":
        return Row(name, name, "", math.inf)
    kind, *rest = name.split("-")
    try:
        size = rest.pop(0) if kind == "synthetic" else ""
        (text,) = rest
        epsilon = float(text.removeprefix("eps"))
        if kind not in ("synthetic", "direct") or not epsilon > 0:
            raise ValueError
    except (ValueError, IndexError) as error:
        raise validation.InputError(
            f"a table has the row {name!r}; rows are called original, "
            f"synthetic-SIZE-eps8, synthetic-SIZE-inf, direct-eps8, "
            f"{' or '.join(CONTROLS)}."
        ) from error
    return Row(name, kind, size, epsilon)


class Rows:
    """Every row's model, set and numbers, each made when it is asked for.

    Outputs bear the seed in their own names, by which ledgers under `private/runs` are
    kept: two seeds are two runs.

    Attributes:
      config: the settings.
      stages: where they are made.
      sets: {name: directory} of the zero-shot sets made here.
    """

    def __init__(self, config: ml_collections.ConfigDict, directory: pathlib.Path):
        """Finds the data; trains nothing yet.

        Args:
          config: the settings.
          directory: the workdir, which exists.
        """
        self.config = config
        self.job = config.job
        self.stages = stages.Stages(directory)
        self.data, self.sets = _data(config)
        # To find a finished stage again reads all documents: once is enough.
        self._models: dict[str, str] = {}
        beir = sources.open_beir(self.data)
        beir.validate(pipeline.SPLITS)
        pipeline_checks.check_sizes(self.job, len(beir.pairs("train")))

    def model(self, size: str) -> str:
        """The public T5 of a size."""
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
        # Of all documents that are public: those of the zero-shot sets, too.
        return str(
            self.stages.run(
                pretrain, stage, f"t5_{size}", True, data=self.job.data, init=init
            )
        )

    def vocabulary(self) -> str:
        """The one vocabulary of all sizes."""
        return str(sources.vocabulary_file("", self.model(self.config.retriever_size)))

    def synthetic_set(self, row: Row, seed: int) -> pathlib.Path:
        """What a row's generator wrote."""
        assert row.epsilon is not None
        free = math.isfinite(row.epsilon)
        name = f"{row.size}_{pipeline.epsilon_name(row.epsilon)}"
        common: dict[str, Any] = {"vocabulary": self.vocabulary(), "seed": seed}
        generator = self.stages.run(
            finetune,
            self.job.finetune,
            f"seed{seed}_generator_{name}",
            free,
            pairs=self.data,
            init=self.model(row.size),
            epsilon=row.epsilon,
            **common,
        )
        written = self.stages.run(
            synthesize,
            self.job.synthesize,
            f"seed{seed}_synthetic_{name}",
            free,
            generator=str(generator),
            corpus=self.data,
            **common,
        )
        return written / synthesize.SET

    def retriever(self, row: Row, seed: int) -> pathlib.Path:
        """A row's retriever."""
        stage, free = self.job.retriever, True
        settings: dict[str, Any] = {
            "vocabulary": self.vocabulary(),
            "init": self.model(self.config.retriever_size),
            "seed": seed,
        }
        if row.kind == "synthetic":
            settings["pairs"] = str(self.synthetic_set(row, seed))
            free = math.isfinite(row.epsilon or 0)
        elif row.kind in CONTROLS:
            prepared = self.stages.run(
                prepare,
                self.job.prepare,
                "prepare",
                True,
                data=self.data,
                vocabulary_size=0,
            )
            settings["pairs"] = str(prepared / prepare.PUBLIC_PAIRS)
            if row.kind == "untrained":
                settings["steps"] = 0
        else:
            settings["pairs"] = self.data
            free = row.kind == "direct"
            if free:
                stage = self.job.direct
                settings.update(epsilon=row.epsilon, steps=self.job.retriever.steps)
        name = f"seed{seed}_retriever_{row.name}"
        return self.stages.run(train_retriever, stage, name, free, **settings)

    def retrieved(self, row: Row, seed: int) -> pathlib.Path:
        """TREC files of a row on the test queries."""
        return self._evaluated(
            row, seed, "retrieval", systems={row.name: str(self.retriever(row, seed))}
        )

    def compared(self, row: Row, seed: int) -> pathlib.Path:
        """The measures of a row's synthetic text."""
        synthetic = {row.name: str(self.synthetic_set(row, seed))}
        return self._evaluated(row, seed, "text", systems={}, synthetic=synthetic)

    def _evaluated(self, row: Row, seed: int, what: str, **settings) -> pathlib.Path:
        return self.stages.run(
            evaluate,
            self.job.evaluate,
            f"seed{seed}_{what}_{row.name}",
            False,
            data=self.data,
            vocabulary=self.vocabulary(),
            **settings,
        )

    def zero_shot(
        self, rows: Sequence[Row], seed: int, metric: str
    ) -> dict[str, dict[str, list[np.ndarray]]]:
        """What several rows find on the zero-shot sets, together.

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
                # Nobody was trained on any split of them; this is the largest.
                stage.splits = {name: "train" for name in self.sets}
        zero_shot.run(stage, out)
        return zero_shot.values_of(stage, out, metric)

    def audited(self, row: Row) -> pathlib.Path:
        """`audit`'s findings on a generator that was trained on canaries."""
        assert row.epsilon is not None
        made = self.stages.run(
            canaries, self.job.canaries, "canaries", False, data=self.data
        )
        name = f"{row.size}_{pipeline.epsilon_name(row.epsilon)}"
        changed = {k: v for k, v in self.config.audit.items() if v}
        if math.isinf(row.epsilon):
            # Nothing is protected of anyone; each query is drawn as it would be.
            changed.pop("unit", None)
        common: dict[str, Any] = {"vocabulary": self.vocabulary(), "seed": 0}
        generator = self.stages.run(
            finetune,
            self.job.finetune,
            f"audited_{name}",
            False,
            pairs=str(made / canaries.DATA),
            init=self.model(row.size),
            epsilon=row.epsilon,
            **common,
            **changed,
        )
        length = {k: v for k, v in changed.items() if k == "query_length"}
        written = self.stages.run(
            synthesize,
            self.job.synthesize,
            f"audited_{name}_synthetic",
            False,
            generator=str(generator),
            corpus=self.data,
            **common,
            **length,
        )
        return self.stages.run(
            audit,
            self.job.audit,
            f"audited_{name}_audit",
            False,
            canaries=str(made),
            generator=str(generator),
            synthetic=str(written / synthesize.SET),
            seed=0,
        )


def _data(config: ml_collections.ConfigDict) -> tuple[str, Mapping[str, str]]:
    """Where the pairs are, and the zero-shot sets that are made here."""
    held = tuple(config.held_out_packages)
    if not held:
        return config.job.data, {}
    if config.job.data != sources.PYDOCS:
        raise validation.InputError(
            f"held_out_packages is {held}, which is for pydocs, but job.data is "
            f"{config.job.data}. Set held_out_packages to (), and zero_shot to sets "
            "that are there."
        )
    home = build_pydocs(packages=[name for name in PACKAGES if name not in held])
    return str(home.path), {
        name: str(build_pydocs(packages=(name,)).path) for name in held
    }
