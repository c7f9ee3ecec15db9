"""Outcomes of training: all steps, or an earlier step's weights where it diverged."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from tfdpsq import privacy, validation


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A training run's end.

    Attributes:
      paid: steps paid for, which the certificate counts.
      diverged_at: the step after which weights were not finite; `None` if they stayed.
      weights_of: the step whose weights are kept then.
    """

    paid: int
    diverged_at: int | None = None
    weights_of: int | None = None

    def recorded(self) -> dict[str, Any]:
        """What `stage.json` and the certificate say of it, besides the steps paid."""
        if self.diverged_at is None:
            return {}
        return {
            "diverged": f"training diverged at step {self.diverged_at}: these are the "
            f"weights of step {self.weights_of}. All {self.paid} steps of the plan are "
            "paid for and counted, taken or not."
        }


class DivergedError(validation.InputError):
    """Training diverged, and was paid for; its output is kept.

    Attributes:
      certificate: what it cost; `None` where no private query had a part in it.
    """

    def __init__(self, message: str, certificate: dict[str, Any] | None):
        """Takes the message and what was spent."""
        super().__init__(message)
        self.certificate = certificate


def require_converged(
    stage: Mapping[str, Any], directory: pathlib.Path, learning_rate: float
) -> None:
    """Ends a stage whose training diverged, when its output is safe.

    Args:
      stage: the content of its `stage.json`.
      directory: where its output is.
      learning_rate: as it was set.

    Raises:
      DivergedError: it did; also if that was in an earlier command.
    """
    found = stage["result"].get("diverged")
    if found:
        raise DivergedError(
            f"{found} They are in {directory}, with the certificate of what was paid. "
            f"Lower learning_rate (now {learning_rate}) in a run of its own: its "
            "budget adds up with this one's.",
            privacy.read_certificate(directory),
        )
