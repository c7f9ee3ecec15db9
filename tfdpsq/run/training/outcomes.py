"""Outcomes of training: completed, or diverged with an earlier step's weights."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from tfdpsq import privacy, validation


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a training run.

    Attributes:
      paid: steps paid for, which the certificate counts.
      diverged_at: the step after which weights were not finite; `None` if they stayed.
      weights_of: the step whose weights are kept in that case.
    """

    paid: int
    diverged_at: int | None = None
    weights_of: int | None = None

    def recorded(self) -> dict[str, Any]:
        """Returns the divergence, if any, for `stage.json` and the certificate."""
        if self.diverged_at is None:
            return {}
        return {
            "diverged": f"training diverged at step {self.diverged_at}: these are the "
            f"weights of step {self.weights_of}. All {self.paid} steps of the plan are "
            "paid for and counted, taken or not."
        }


class DivergedError(validation.InputError):
    """Training diverged after it was paid for; its output is kept.

    Attributes:
      certificate: of its cost; `None` if no private query was used.
    """

    def __init__(self, message: str, certificate: dict[str, Any] | None):
        """Stores the certificate next to the message."""
        super().__init__(message)
        self.certificate = certificate


def require_converged(
    stage: Mapping[str, Any],
    directory: pathlib.Path,
    learning_rate: float,
    setting: str = "learning_rate",
) -> None:
    """Raises `DivergedError` for a diverged stage, once its output is saved.

    Also raises it when an earlier command made that output. `setting` is the one that
    has the rate.
    """
    found = stage["result"].get("diverged")
    if found:
        certificate = privacy.read_certificate(directory)
        own = (
            "in a run of its own: its budget adds up with this one's."
            if certificate is None
            or math.isfinite(float(certificate["guarantee"]["epsilon"]))
            else "and move this one away: it has no epsilon, and cost no budget."
        )
        raise DivergedError(
            f"{found} They are in {directory}, with the certificate of what was paid. "
            f"Lower {setting} (now {learning_rate}) {own}",
            certificate,
        )
