"""The plan, the selection or the continuation that a certificate describes.

All its other entries follow from these; nothing else in it is looked at here. See
`verification`, which compares the rest.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from tfdpsq import validation
from tfdpsq.privacy.plan import PrivacyPlan
from tfdpsq.privacy.proof.certificate import digest_of
from tfdpsq.privacy.proof.composition import Release, run_key
from tfdpsq.privacy.proof.continuation import Continuation
from tfdpsq.privacy.proof.selection import Selection, TrainedRun
from tfdpsq.privacy.spec import PrivacySpec


def plan_of(certificate: Mapping[str, Any]) -> tuple[PrivacyPlan, int]:
    """The plan, and the steps executed, that a certificate's free numbers describe.

    Nothing else in it is looked at: `verify_certificate` compares the rest.

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
        delta=_delta_of(certificate),
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


def continuation_of(certificate: Mapping[str, Any]) -> Continuation:
    """The continuation that a certificate's free entries describe.

    Raises:
      InputError: they describe none.
    """
    plan, steps = plan_of(certificate)
    parent = entry_at(certificate, "continuation.parent")
    if not isinstance(parent, Mapping):
        raise validation.InputError(
            f"continuation.parent is {validation.shown(parent)}, which is no "
            "certificate"
        )
    return Continuation(
        plan,
        steps,
        _pairs_of(certificate),
        parent,
        release_in(parent),
        entry_at(certificate, "continuation.disjoint"),
        _head_of(certificate),
    )


def release_in(certificate: Mapping[str, Any]) -> Release:
    """The cost of a certificate's release by its free entries, which are not verified.

    `budget.release_of` verifies the certificate first.

    Raises:
      InputError: they describe no run.
    """
    head, digest = _head_of(certificate), digest_of(certificate)
    trained = {head: _trained(certificate)} if head else {}
    require_one_kind(certificate)
    if "continuation" in certificate:
        return continuation_of(certificate).release(digest, digest, trained)
    if "selection" not in certificate:
        return Release(
            {run_key(head, digest): plan_of(certificate)},
            None,
            _pairs_of(certificate),
            _delta_of(certificate),
            nameless=not head,
            trained=trained,
            digest=digest,
        )
    selection = selection_of(certificate)
    runs = {
        run_key(run.ledger_head, f"{digest}/{key}"): (run.plan, run.plan.spec.steps)
        for key, run in selection.runs.items()
    }
    return Release(
        runs,
        selection.choice_epsilon,
        _pairs_of(certificate),
        _delta_of(certificate),
        open_choice=selection.choice_epsilon is None,
        nameless=not all(run.ledger_head for run in selection.runs.values()),
        trained=trained,
        digest=digest,
    )


def require_one_kind(certificate: Mapping[str, Any]) -> None:
    """Refuses a certificate of a selection that would be a continuation as well."""
    if "selection" in certificate and "continuation" in certificate:
        raise validation.InputError(
            "there are entries of a selection and of a continuation, but a run that "
            "was chosen starts from public weights"
        )


def _pairs_of(certificate: Mapping[str, Any]) -> str | None:
    pairs = entry_at(certificate, "fingerprints.pairs")
    return pairs if isinstance(pairs, str) and pairs else None


def _head_of(certificate: Mapping[str, Any]) -> str | None:
    head = certificate.get("ledger_head")
    return head if isinstance(head, str) and head else None


def _delta_of(certificate: Mapping[str, Any]) -> float:
    return validation.positive(
        "guarantee.delta", entry_at(certificate, "guarantee.delta")
    )


def _trained(certificate: Mapping[str, Any]) -> str:
    """Returns a digest of what a run's certificate states of training and inputs."""
    inputs = entry_at(certificate, "fingerprints")
    if isinstance(inputs, Mapping):
        inputs = {**inputs, "code": None}  # a newer one may go on
    continued = [
        entry_at(certificate, "continuation.disjoint"),
        entry_at(certificate, "continuation.parent.digest"),
    ]
    stated = [certificate.get("training"), inputs, *continued]
    return hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()


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
