"""`certificate.json`: what was guaranteed, by which mechanism, and what was not.

Every artefact derived from private queries carries one. Its ε is computed from
the steps that were executed, never copied from the target.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from tfdpsq import validation
from tfdpsq.privacy.plan import PrivacyPlan

FORMAT = "tfdpsq-certificate/1"
FILE_NAME = "certificate.json"

# True of every run: what (ε, δ) does not speak of.
_NEVER_COVERED = (
    "The documents: they are public, and the guarantee is for queries only.",
    "Hyperparameters, if they were chosen by looking at results on private queries.",
    "A person who wrote several queries: each query is protected by itself, and "
    "k of them together by about k times epsilon.",
    "The number of queries n, which is treated as public: it sets delta and the "
    "sampling probability.",
    "Other artefacts made from the same queries: whoever sees several of them must "
    "add up their epsilons and their deltas.",
    "Attacks on floating-point arithmetic and on pseudorandom generators: noise "
    "is drawn in float32 from Philox, seeded with 126 bits of the operating "
    "system's entropy.",
    "Training curves, reports and metrics computed on private queries: they stay "
    "with the data's owner.",
)


def make_certificate(
    plan: PrivacyPlan,
    steps_executed: int,
    *,
    description: str,
    sensitivity_argument: str,
    training: Mapping[str, Any],
    fingerprints: Mapping[str, str],
    private_reads: Sequence[Mapping[str, str]] = (),
) -> dict[str, Any]:
    """The certificate of one finished training run.

    Args:
      plan: what was run.
      steps_executed: logical steps that really ran.
      description: what was trained, on what, in a sentence.
      sensitivity_argument: why one unit moves the sum of clipped gradients by at
        most `plan.sensitivity`.
      training: optimizer, engine, learning rate, trained parameters and so on.
      fingerprints: SHA-256 of the data and of the code.
      private_reads: further reads of private data, each with "what" and "where";
        none of them is covered by ε.

    Returns:
      A dict of plain JSON values; infinite ε is the string "inf".
    """
    spec = plan.spec
    # Both accountants are always given: "ε by PLD" can be checked against "by RDP".
    epsilons = {name: plan.epsilon(steps_executed, name) for name in ("pld", "rdp")}
    return {
        "format": FORMAT,
        "description": description,
        "private": spec.private,
        "guarantee": {
            "epsilon": json_number(epsilons[spec.accountant]),
            "delta": spec.target_delta,
            "unit": spec.unit,
            "unit_in_words": "one query, together with the document it is paired with",
            "adjacency": "add or remove one unit",
        },
        "mechanism": {
            "name": "Poisson-subsampled Gaussian mechanism (DP-SGD)"
            if spec.private
            else "none: no clipping and no noise",
            "noise_multiplier": plan.noise_multiplier,
            "clip_norm": spec.clip_norm,
            "sensitivity": plan.sensitivity,
            "sensitivity_argument": sensitivity_argument,
            "noise_stddev": plan.noise_stddev,
            "normalised_by": "expected batch size",
        },
        "sampler": {
            "name": "truncated Poisson",
            "n": spec.n,
            "expected_batch_size": spec.batch_size,
            "sampling_probability": plan.sampling_probability,
            "max_batch_size": plan.max_batch_size,
        },
        "accounting": {
            "accountant": spec.accountant,
            "library": "dp-accounting",
            "library_version": importlib.metadata.version("dp-accounting"),
            "target_epsilon": json_number(spec.epsilon),
            "steps_planned": spec.steps,
            "steps_executed": steps_executed,
            "epsilon_pld": json_number(epsilons["pld"]),
            "epsilon_rdp": json_number(epsilons["rdp"]),
            "delta_for_truncation": plan.truncation_delta(spec.steps),
        },
        "training": dict(training),
        "fingerprints": dict(fingerprints),
        "private_reads": [dict(read) for read in private_reads],
        "warnings": [spec.delta_warning] if spec.delta_warning else [],
        "not_covered": list(_NEVER_COVERED),
    }


def inherited_certificate(
    *certificates: Mapping[str, Any] | None,
) -> dict[str, Any] | None:
    """The certificate of what is made from several artefacts and public data.

    By post-processing, what is made from one guaranteed artefact has its guarantee;
    what an unprotected artefact had any part in has none.

    Args:
      *certificates: of the artefacts used; `None` for public ones.

    Returns:
      The one that applies, or `None` if all were public.

    Raises:
      InputError: two different finite guarantees, which would have to be added.
    """
    present = [dict(c) for c in certificates if c is not None]
    for certificate in present:
        if not certificate["private"]:
            return certificate
    if any(certificate != present[0] for certificate in present):
        raise validation.InputError(
            "two artefacts with guarantees of their own meet here, and their "
            "epsilons would add up. Start from public weights, or from the artefact "
            "that the other one was made from."
        )
    return present[0] if present else None


def json_number(value: float) -> float | str:
    """The value, or "inf", as JSON has no infinity."""
    return "inf" if math.isinf(value) else value


def read_certificate(directory: str | os.PathLike) -> dict[str, Any] | None:
    """The certificate in a directory, or `None` where there is none.

    Raises:
      DataError: the file is no certificate.
    """
    path = pathlib.Path(directory) / FILE_NAME
    if not path.is_file():
        return None
    try:
        certificate = json.loads(path.read_text("utf-8"))
        known = certificate["format"] == FORMAT
    except (ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise validation.DataError(
            path,
            f"this is no {FORMAT} file",
            "Make the artefact again; a certificate must not be edited.",
        )
    return certificate
