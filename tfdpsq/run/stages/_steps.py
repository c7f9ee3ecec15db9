"""Steps of `pipeline` and `reproduce`: pairs, models, sets, retrievers, audits."""

from __future__ import annotations

import dataclasses
import importlib
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from tfdpsq.data import tables
from tfdpsq.run.common import corpus
from tfdpsq.run.common.canary_set import DATA
from tfdpsq.run.common.kinds import PYDOCS, SET
from tfdpsq.run.jobs import Step, StepOutput
from tfdpsq.run.report.wording import row_part
from tfdpsq.validation import InputError

PAIRS, PUBLIC = "pairs", "public_only"
# The stage that each group of settings is for.
STAGES = {
    group: importlib.import_module(f"tfdpsq.run.stages.{stage or group}").STAGE
    for group, stage in {
        "log": "import",
        **dict.fromkeys(("prepare", "pretrain", "histogram", "finetune"), ""),
        **dict.fromkeys(("synthesize", "mine", "evaluate", "canaries", "audit"), ""),
        "overlap": "",
        "adapter": "train_adapter",
        "retriever": "train_retriever",
        "direct": "train_retriever",
    }.items()
}
_UNSEEDED = ("log", "canaries", "mine", "evaluate")  # a known seed would tell canaries


def is_log(path: str) -> bool:
    """Returns whether a path is a log to import: a table, or a directory of some."""
    folder = pathlib.Path(path)
    beir = [folder / name for name in (*corpus.FILES, "queries.jsonl")]
    if path == PYDOCS or any(file.exists() for file in beir):
        return False
    files = folder.rglob("*") if folder.is_dir() else [folder]
    named = path.startswith(tables.NAMED)
    return named or any(tables.format_of(file.name) for file in files)


class JobSteps(list):
    """Steps with settings of a job, from its pairs on; each name is added once."""

    def __init__(self, s: Any):
        """Adds the pairs of a log, and public pairs."""
        super().__init__()
        self.s, self.seed, self.pairs, self.histogram = s, s.seed, s.data, ""
        if is_log(s.data):
            logs = dataclasses.replace(s.log.logs, train=s.data)
            self.pairs = self.make(PAIRS, "log", {"logs": logs}, "Pairs")
        splits = [s.finetune.split, s.retriever.split, s.direct.split, s.evaluate.split]
        splits += [s.evaluate.similarity_split, s.evaluate.similarity.training_split]
        given: dict[str, Any] = {"data": self.pairs, "vocabulary_size": 0}
        given["splits"] = tuple(dict.fromkeys(splits))
        self.make("prepare", "prepare", given, "Public pairs")

    def make(
        self,
        name: str,
        group: str,
        given: Mapping[str, Any],
        label: str = "",
        own: Any = None,
        **shows: Any,
    ) -> StepOutput:
        """Adds a step with a group of the job's settings, or `own`, and `given`."""
        if not any(step.name == name for step in self):
            if group not in _UNSEEDED:
                given = {"seed": self.seed, **given}
            own = dataclasses.replace(own or getattr(self.s, group), **given)
            self.append(Step(name, STAGES[group], own, label, shows))
        return StepOutput(name)

    def model(self, name: str, init: str, label: str = "") -> str:
        """Returns a public T5, further trained if the job has steps for it."""
        if not init and not self.s.pretrain.steps:
            raise InputError(
                "init is '' and pretrain.steps 0. Give a public T5, or steps."
            )
        if not self.s.pretrain.steps:
            return init
        given = {"data": self.pairs, "init": init, "seed": self.s.seed}
        return self.make(name, "pretrain", given, label)

    def generated(
        self,
        name: str,
        given: Mapping[str, Any],
        own: Any = None,
        audited: bool = False,
        **writing: Any,
    ) -> tuple[StepOutput, StepOutput]:
        """Adds a generator and its set; `name` has a blank for the word."""
        epsilon = given["epsilon"]
        histogram = "" if audited else self.histogram
        given = {"histogram": histogram if math.isfinite(epsilon) else "", **given}
        label = at("Audited generator" if audited else "Generator", epsilon)
        shows = {} if audited else {"chart": "Generator"}
        step = name.format("generator")
        generator = self.make(step, "finetune", given, label, own, **shows)
        given = {"corpus": self.pairs, "histogram": histogram, **writing}
        given["generator"] = generator
        label = at("Audited set" if audited else "Synthetic", epsilon)
        shows = {} if audited else {"set": row_part(epsilon)}
        made = self.make(name.format("synthetic"), "synthesize", given, label, **shows)
        return generator, StepOutput(f"{made}/{SET}")

    def retriever(
        self, name: str, kind: str, given: Mapping[str, Any], label: str = ""
    ) -> StepOutput:
        """Adds a retriever; all train for the same steps from the same weights."""
        given, group = {"pairs": self.pairs, **given}, "retriever"
        if kind in ("untrained", PUBLIC):
            given["pairs"] = StepOutput(f"prepare/{SET}")
        if kind == "untrained":
            given.update(steps=0, epochs=0.0)
        elif kind == "original":
            # No private pair is held out: the other rows search for public ones.
            given.update(validation_pairs=0)
        elif kind == "direct":
            own, group = self.s.retriever, "direct"
            given.update(steps=own.steps, epochs=own.epochs)
        return self.make(name, group, given, label, chart="Retriever")

    def canaries(self, name: str, own: Any = None, **given: Any) -> StepOutput:
        """Adds the pairs with canaries, or without some that are left out."""
        given.update(user_field=self.s.finetune.user_field, data=self.pairs)
        given["split"] = self.s.finetune.split
        return self.make(name, "canaries", given, "Canaries", own)

    def audit(
        self, part: str, given: Mapping[str, Any], own: Any = None, before: str = ""
    ) -> None:
        """Adds a generator that is trained on canaries, and attacks on it."""
        canaries = self.canaries(f"{before}canaries")
        pairs = StepOutput(f"{canaries}/{DATA}")
        name, writing = (
            f"{before}audited_{{}}_{part}",
            of_split(pairs, self.s.finetune.split),
        )
        trained = {**given, "pairs": pairs}
        generator, written = self.generated(name, trained, own, audited=True, **writing)
        made = {"canaries": canaries, "generator": generator, "synthetic": written}
        label = at("Audit", given["epsilon"])
        self.make(f"{before}audit_{part}", "audit", made, label)


def of_split(pairs: StepOutput, split: str) -> dict[str, Any]:
    """Returns settings to write for a split's documents alone; keep the set private."""
    public = {"training_documents_are_public": True, "max_documents": 0}
    return {"corpus": pairs, "documents": "train", "split": split, **public}


def at(what: str, epsilon: float) -> str:
    """Returns a label with an ε."""
    return f"{what}, ε = {'∞' if math.isinf(epsilon) else f'{epsilon:g}'}"
