"""The plan, or the selection among plans, that a certificate describes.

All its other entries follow from these; nothing else in it is looked at here. See
`verification`, which compares the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tfdpsq import validation
from tfdpsq.privacy.plan import PrivacyPlan
from tfdpsq.privacy.proof.selection import Selection, TrainedRun
from tfdpsq.privacy.spec import PrivacySpec


def plan_of(certificate: Mapping[str, Any]) -> tuple[PrivacyPlan, int]:
    """The plan, and the steps executed, that a certificate's free numbers describe.

    Nothing else in it is looked at: `verify_certificate` compares the rest.

    Args:
      certificate: as `make_certificate` gives it.

    Raises:
      InputError: they describe none.
    """
    return _plan(
        entry_at(certificate, "spec"),
        entry_at(certificate, "sampler.max_batch_size"),
        entry_at(certificate, "mechanism.noise_multiplier"),
        entry_at(certificate, "accounting.steps_executed"),
    )


def _plan(fields: Any, maximum: Any, sigma: Any, steps: Any) -> tuple[PrivacyPlan, int]:
    spec = PrivacySpec.from_recorded(fields)
    validation.positive_integer("sampler.max_batch_size", maximum)
    if spec.private:
        validation.positive("mechanism.noise_multiplier", sigma)
    elif sigma != 0:
        raise validation.InputError(
            f"mechanism.noise_multiplier is {sigma!r} although epsilon is infinite"
        )
    validation.in_range("accounting.steps_executed", steps, 0, spec.steps)
    if steps:
        validation.positive_integer("accounting.steps_executed", steps)
    return PrivacyPlan(spec, maximum, float(sigma)), int(steps)


def selection_of(certificate: Mapping[str, Any]) -> Selection:
    """The selection that a certificate's free entries describe.

    Args:
      certificate: as `make_selection_certificate` gives it.

    Raises:
      InputError: they describe none.
    """
    entries = entry_at(certificate, "selection.runs")
    if not isinstance(entries, Mapping):
        raise validation.InputError(
            f"selection.runs is {validation.shown(entries)}, which are no runs"
        )
    target = entry_at(certificate, "accounting.target_epsilon")
    choice_epsilon = entry_at(certificate, "selection.epsilon_of_choice")
    score = entry_at(certificate, "selection.score")
    chosen = entry_at(certificate, "selection.chosen")
    draw = entry_at(certificate, "selection.draw")  # none before it was named
    if not isinstance(score, str) or not isinstance(chosen, str):
        raise validation.InputError(
            f"selection.score is {validation.shown(score)} and selection.chosen "
            f"{validation.shown(chosen)}; both must "
            "be texts"
        )
    if not isinstance(draw, (str, type(None))):
        raise validation.InputError(
            f"selection.draw is {validation.shown(draw)}; it must be a text"
        )
    return Selection(
        runs={name: _run(name, entry) for name, entry in entries.items()},
        chosen=chosen,
        target_epsilon=math.inf
        if target == "inf"
        else validation.positive("accounting.target_epsilon", target),
        delta=validation.positive(
            "guarantee.delta", entry_at(certificate, "guarantee.delta")
        ),
        choice_epsilon=choice_epsilon,
        score=score,
        draw=draw,
    )


def _run(name: str, entry: Any) -> TrainedRun:
    """One of a selection's runs, of which every step must have been executed."""
    words = ("spec", "max_batch_size", "noise_multiplier", "steps_executed")
    plan, steps = _plan(*(entry_at(entry, word) for word in words))
    if steps != plan.spec.steps:
        raise validation.InputError(
            f"run {name!r} has {steps} steps of {plan.spec.steps}; runs are chosen "
            "among when all are finished"
        )
    settings, head = entry_at(entry, "settings"), entry_at(entry, "ledger_head")
    diverged = entry_at(entry, "diverged")
    if (
        not isinstance(settings, Mapping)
        or not isinstance(head, (str, type(None)))
        or not isinstance(diverged, bool)
    ):
        raise validation.InputError(
            f"run {name!r} has settings {validation.shown(settings)}, ledger_head "
            f"{validation.shown(head)} and diverged {validation.shown(diverged)}, "
            "which they cannot be"
        )
    return TrainedRun(plan, settings, head, diverged)


def entry_at(certificate: Mapping[str, Any], path: str, missing: Any = None) -> Any:
    """The entry at a dotted path.

    Args:
      certificate: nested mappings, or what was taken for them.
      path: names of entries, joined by dots.
      missing: what to return where there is none.
    """
    value: Any = certificate
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return missing
        value = value[part]
    return value
