"""The plan or the continuation that a certificate describes.

All its other entries follow from these; nothing else in it is looked at here. See
`verification`, which compares the rest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from tfdpsq import validation
from tfdpsq.privacy.plan import PrivacyPlan
from tfdpsq.privacy.proof.certificate import digest_of
from tfdpsq.privacy.proof.composition import Release, run_key
from tfdpsq.privacy.proof.continuation import Continuation
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
        _run_id_of(certificate),
    )


def release_in(certificate: Mapping[str, Any]) -> Release:
    """The cost of a certificate's release by its free entries, which are not verified.

    `budget.release_of` verifies the certificate first.

    Raises:
      InputError: they describe no run.
    """
    run_id, digest = _run_id_of(certificate), digest_of(certificate)
    trained = {run_id: _trained(certificate)} if run_id else {}
    if "continuation" in certificate:
        return continuation_of(certificate).release(digest, digest, trained)
    return Release(
        {run_key(run_id, digest): plan_of(certificate)},
        _pairs_of(certificate),
        _delta_of(certificate),
        nameless=not run_id,
        trained=trained,
        digest=digest,
    )


def _pairs_of(certificate: Mapping[str, Any]) -> str | None:
    pairs = entry_at(certificate, "fingerprints.pairs")
    return pairs if isinstance(pairs, str) and pairs else None


def _run_id_of(certificate: Mapping[str, Any]) -> str | None:
    run_id = certificate.get("run_id")
    return run_id if isinstance(run_id, str) and run_id else None


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
