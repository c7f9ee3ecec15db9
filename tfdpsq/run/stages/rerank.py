"""Export a generator as a reranker: a SavedModel that scores documents for queries.

    tfdpsq rerank --workdir=OUT --config.generator=GENERATOR

Its scores are those that `evaluate` mixes with BM25's (`rerankers`). Writes
`reranker/`, texts in, nats out, which needs TensorFlow and tensorflow-text alone: see
`generator.Reranker`. It reveals the generator, and so carries its certificate.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdpsq.generator import Reranker, T5QueryGenerator
from tfdpsq.run.common import exported, fusion
from tfdpsq.run.common.kinds import Generator
from tfdpsq.run.frame import settings
from tfdpsq.run.frame.runner import Context, Given, Stage
from tfdpsq.run.frame.settings import path

RERANKER = "reranker"


class Rerank(Stage):
    """Exports a generator."""

    name = "rerank"

    @dataclasses.dataclass(frozen=True)
    class Settings(settings.Settings):
        """Settings of `rerank`."""

        generator: str = path(Generator)

    def check(self, s: Settings, given: Given) -> None:
        """Refuses an input that is not a generator or has no vocabulary."""
        fusion.require_scorer("generator", given["generator"])

    def run(self, c: Context) -> dict[str, Any]:
        """Writes `reranker/`."""
        exported.start_numbering()
        model = T5QueryGenerator.from_preset(c.given["generator"].path)
        exported.export(Reranker(model), c.out / RERANKER)
        return {}


STAGE = Rerank()
