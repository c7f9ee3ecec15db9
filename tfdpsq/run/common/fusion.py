"""Hybrid retrieval in `evaluate`: every system fused with one of them, such as BM25.

What is deployed is rarely a retriever alone, so the question is what it adds to BM25.
Weights are settings: one that is fitted on private queries would tell of them.
"""

from __future__ import annotations

import dataclasses

from tfdpsq import evaluation
from tfdpsq.evaluation.fusion import METHODS
from tfdpsq.run.common.search import Run
from tfdpsq.run.frame import settings
from tfdpsq.run.frame.settings import Rule, setting


@dataclasses.dataclass(frozen=True)
class FusionSettings(settings.Settings):
    """How systems are fused with `base`."""

    base: str = setting("", help="the system that all others are fused with")
    method: str = setting("scores", choices=METHODS, when="base")
    weight: float = setting(
        0.3, ge=0, le=1, when="base", help="of the others; base has the rest"
    )
    weights: dict = setting({}, of=Rule(ge=0.0, le=1.0), when="base")


def fused(own: FusionSettings, name: str, base: Run, other: Run, k: int) -> Run:
    """Returns the best `k` documents of a system and the base together."""
    weight = own.weights.get(name, own.weight)
    return evaluation.fuse([base, other], [1 - weight, weight], own.method, k)
