"""`certificate.json`: what was guaranteed, by which mechanism, and what was not.

Every artefact derived from private queries carries one. Its ε is computed from
the steps that were executed, never copied from the target. Nearly every number
follows from a few others, which is what `verification` checks.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfdpsq import validation
from tfdpsq.privacy import accounting
from tfdpsq.privacy.plan import PrivacyPlan
from tfdpsq.privacy.proof import certificate_words
from tfdpsq.privacy.spec import PrivacySpec

FORMAT = "tfdpsq-certificate/3"
FILE_NAME = "certificate.json"
# Of more that were continued one after another, `verify` would take minutes.
MOST_EARLIER = 12
_REMEDY = "Make the artefact again; a certificate must not be edited."

_UNIT_IN_WORDS = {
    "query": "one query, together with the document it is paired with",
    "pair": "one pair: one query with one of its documents. A query that is paired "
    "with several documents is as many units",
    "user": "one user: all of that user's queries, with the documents they are "
    "paired with",
}
_ADJACENCY = {
    "poisson": "add or remove one unit",
    "shuffled": "replace all that one unit owns by nothing, every other unit keeping "
    "its place (zero-out)",
}
_SAMPLER_NAME = {"poisson": "truncated Poisson", "shuffled": "shuffled epochs"}

# Begins the warning of a run that took fewer steps than planned.
STOPPED = "Training stopped after"
HYPERPARAMETERS = (
    "Hyperparameters, if they were chosen by looking at results on private queries."
)
# True of every run: what (ε, δ) does not speak of.
_NEVER_COVERED = (
    "The documents: they are public, and the guarantee is for queries only.",
    HYPERPARAMETERS,
    "Other artefacts made from the same queries: whoever sees several of them must "
    "add up their epsilons and their deltas.",
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
    run_id: str | None = None,
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
      run_id: `Ledger.run` of the ledger that paid for the steps.

    Returns:
      A dict of plain JSON values; infinite ε is the string "inf".

    Raises:
      InputError: more steps than the plan covers, or a value that JSON cannot hold.
    """
    return sealed(
        computed(plan, steps_executed),
        description=description,
        sensitivity_argument=sensitivity_argument,
        training=training,
        fingerprints=fingerprints,
        private_reads=private_reads,
        run_id=run_id,
    )


def sealed(
    certificate: dict[str, Any],
    *,
    description: str,
    sensitivity_argument: str,
    training: Mapping[str, Any],
    fingerprints: Mapping[str, str],
    private_reads: Sequence[Mapping[str, str]],
    run_id: str | None,
) -> dict[str, Any]:
    """Adds to what was computed what its maker states, and the digest of both.

    The entries are those of `make_certificate`; `certificate` itself is changed.

    Raises:
      InputError: a value that JSON cannot hold, or of another type than verification
        reads.
    """
    _require_stated(description, sensitivity_argument, training, fingerprints)
    certificate["format"] = FORMAT
    certificate["description"] = description
    certificate["mechanism"]["sensitivity_argument"] = sensitivity_argument
    certificate["accounting"]["library_version"] = library_version()
    certificate["run_id"] = run_id
    certificate["training"] = dict(training)
    certificate["fingerprints"] = dict(fingerprints)
    certificate["private_reads"] = [dict(read) for read in private_reads]
    try:
        text = json.dumps(certificate, allow_nan=False, default=_plain)
    except (TypeError, ValueError) as error:
        raise validation.InputError(
            f"the certificate holds what JSON cannot: {error}. Give training, "
            "fingerprints and private_reads as texts and finite numbers."
        ) from error
    # Read back, so that the digest is of what a file will hold.
    certificate = json.loads(text)
    certificate["digest"] = digest_of(certificate)
    return certificate


def _require_stated(
    description: Any, sensitivity_argument: Any, training: Any, fingerprints: Any
) -> None:
    """Refuses what would make a certificate that does not verify."""
    texts = {"description": description, "sensitivity_argument": sensitivity_argument}
    for name, value in texts.items():
        if not isinstance(value, str):
            raise validation.InputError(
                f"{name} is {validation.shown(value)}. Give a sentence, as text."
            )
    for name, value in {"training": training, "fingerprints": fingerprints}.items():
        if not isinstance(value, Mapping):
            raise validation.InputError(
                f"{name} is {validation.shown(value)}. Give a dict of values by name."
            )


def computed(plan: PrivacyPlan, steps_executed: int) -> dict[str, Any]:
    """All of a certificate that follows from the plan and the steps that ran.

    Args:
      plan: what was run.
      steps_executed: logical steps that really ran.

    Raises:
      InputError: more steps than the plan covers.
    """
    spec = plan.spec
    # Both accountants are always given: "ε by PLD" can be checked against "by RDP".
    epsilons = {name: plan.epsilon(steps_executed, name) for name in ("pld", "rdp")}
    shuffled = spec.sampler == "shuffled"
    return {
        "private": spec.private,
        "spec": {name: json_number(value) for name, value in spec.recorded().items()},
        "plan": plan.fingerprint,
        "guarantee": {
            "epsilon": json_number(epsilons[spec.accountant]),
            "delta": spec.target_delta,
            "unit": spec.unit,
            "unit_in_words": _UNIT_IN_WORDS[spec.unit],
            "adjacency": _ADJACENCY[spec.sampler],
        },
        "mechanism": {
            "name": _mechanism(spec),
            "noise_multiplier": plan.noise_multiplier,
            "clip_norm": spec.clip_norm,
            "sensitivity": plan.sensitivity,
            "noise_stddev": plan.noise_stddev,
            "normalised_by": "expected batch size",
            **_cancelling(plan),
        },
        "sampler": {
            "name": _SAMPLER_NAME[spec.sampler],
            "in_words": _sampler_in_words(plan),
            "n": spec.num_units,
            "n_in_words": "the exact number of units, declared to be public"
            if spec.n_is_public
            else "a public upper bound on the number of units",
            "expected_batch_size": spec.batch_size,
            # No probability where none was used: nobody shall amplify by it.
            "sampling_probability": None if shuffled else plan.sampling_probability,
            "max_batch_size": plan.max_batch_size,
            "rows_per_unit": spec.rows_per_unit,
            **({} if spec.clip_groups is None else {"clip_groups": spec.clip_groups}),
        },
        "accounting": {
            "accountant": spec.accountant,
            "library": "dp-accounting",
            "pld_interval": accounting.pld_interval(plan.noise_multiplier)
            if spec.private
            else None,
            "target_epsilon": json_number(spec.epsilon),
            "steps_planned": spec.steps,
            "steps_executed": steps_executed,
            "releases_counted": plan.releases(steps_executed)[1],
            "epsilon_pld": json_number(epsilons["pld"]),
            "epsilon_rdp": json_number(epsilons["rdp"]),
            "delta_for_truncation": plan.truncation_delta(steps_executed),
        },
        "randomness": certificate_words.randomness(plan),
        "warnings": _warnings(plan, steps_executed),
        "not_covered": _not_covered(plan),
    }


def _mechanism(spec: Any) -> str:
    if not spec.private:
        return "none: no clipping and no noise"
    if spec.noise_window is not None:
        return "Gaussian mechanism on shuffled batches, matrix factorisation (DP-MF)"
    if spec.sampler == "shuffled":
        return "Gaussian mechanism on shuffled batches (DP-SGD)"
    return "Poisson-subsampled Gaussian mechanism (DP-SGD)"


def _cancelling(plan: PrivacyPlan) -> dict[str, Any]:
    window = plan.noise_window
    if window is None:
        return {}
    return {
        "noise_window": window.steps,
        "noise_in_words": f"Within every {window.steps} steps of an epoch of "
        f"{window.steps_per_epoch}, the noise of a step is a weighted sum of its own "
        "draw and of those of the steps before it: the inverse of a lower triangular "
        "Toeplitz matrix, whose square adds up the steps and whose columns have norm 1 "
        "at most, times independent noise of deviation noise_stddev. A unit is in one "
        "step of an epoch, so that the matrix times the sums of clipped gradients "
        "moves by the sensitivity at most, once an epoch.",
    }


def _sampler_in_words(plan: PrivacyPlan) -> str:
    spec = plan.spec
    rows = (
        f" Of each, up to {spec.rows_per_unit} of its rows, drawn anew in every step."
        if spec.unit == "user"
        else ""
    )
    if spec.clip_groups is not None:
        rows = (
            f" Each is then dealt, independently and uniformly, to one of "
            f"{spec.clip_groups} groups, of which each keeps at most "
            f"{plan.group_capacity}"
            + ("; clipped is the gradient of a group." if spec.private else ".")
        )
    if spec.sampler == "poisson":
        return (
            f"Every step draws each unit independently with probability "
            f"{spec.batch_size}/{spec.num_units}, and keeps at most "
            f"{plan.max_batch_size} of them; what this truncation costs is part of "
            f"delta.{rows}"
        )
    return (
        f"Every epoch cuts a fresh permutation into batches of exactly "
        f"{spec.batch_size} units.{rows} These are not Poisson samples, and no "
        "amplification by sampling was claimed: epsilon counts every epoch in full. "
        "The smaller epsilon that Poisson accounting would state does not hold for "
        "what ran."
    )


def _warnings(plan: PrivacyPlan, steps_executed: int) -> list[str]:
    warnings = [plan.spec.delta_warning] if plan.spec.delta_warning else []
    if plan.spec.private and steps_executed < plan.spec.steps:
        warnings.append(
            f"{STOPPED} {steps_executed} of {plan.spec.steps} planned "
            "steps. If that was decided by looking at the noised weights, the target "
            f"epsilon of the whole plan, {plan.spec.epsilon:g}, applies instead; if by "
            "losses or metrics of private data, that choice is a private read, which "
            "no epsilon covers."
        )
    return warnings


def _not_covered(plan: PrivacyPlan) -> list[str]:
    spec = plan.spec
    number = (
        "The number of units n, which was declared to be public: it sets delta and "
        "the sampling probability."
        if spec.n_is_public
        else "The upper bound n on the number of units, which was public before; the "
        "number itself is protected like the rest."
    )
    never = list(_NEVER_COVERED)
    never.insert(3, certificate_words.not_covered(plan))
    return [*never, certificate_words.several_units(spec.unit), number]


def inherited_certificate(
    *certificates: Mapping[str, Any] | None,
) -> dict[str, Any] | None:
    """The certificate of what is made from several artefacts and public data.

    By post-processing, what is made from one guaranteed artefact has its guarantee;
    what an unprotected artefact had any part in has none. The guarantee of a run that
    continued others holds for all that was made from any of them.

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
    earlier = {digest_of(parent) for own in present for parent in parents_of(own)}
    present = [own for own in present if digest_of(own) not in earlier]
    if any(certificate != present[0] for certificate in present):
        raise validation.InputError(
            "two artefacts with guarantees of their own meet here, and their "
            "epsilons would add up. Start from public weights, or from the artefact "
            "that the other one was made from."
        )
    return present[0] if present else None


def parents_of(certificate: Any) -> Iterator[Mapping[str, Any]]:
    """Yields the certificates that one continues, the last one first."""
    while isinstance(certificate, Mapping):
        certificate = certificate.get("continuation")
        if not isinstance(certificate, Mapping):
            return
        certificate = certificate.get("parent")
        if isinstance(certificate, Mapping):
            yield certificate


def adjacency_of(spec: PrivacySpec) -> str:
    """Returns what neighbouring data sets of a run differ in, in words."""
    return _ADJACENCY[spec.sampler]


def json_number(value: Any) -> Any:
    """The value, or "inf" for infinity, which JSON has none of."""
    return "inf" if value == math.inf else value


def library_version() -> str:
    """The version of dp-accounting that computes here."""
    return importlib.metadata.version("dp-accounting")


def digest_of(certificate: Mapping[str, Any]) -> str:
    """SHA-256, in hex, over the canonical JSON of all but `digest` itself.

    Raises:
      ValueError: a value that JSON cannot hold.
      TypeError: likewise.
    """
    content = {key: value for key, value in certificate.items() if key != "digest"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def load_certificate(path: str | os.PathLike) -> dict[str, Any]:
    """The content of a certificate file, of which only the format is checked.

    Raises:
      InputError: the path is empty, or a URL.
      DataError: it cannot be read, is no JSON object, says a thing twice, or is of
        another format.
    """
    name = os.fspath(path)
    if not name.strip() or "://" in name:
        raise validation.InputError(
            f"{name!r} is not a path of this machine. Give a {FILE_NAME}, copied here "
            "first where it lies elsewhere."
        )
    path = pathlib.Path(path)
    try:
        certificate = validation.parse_json(
            path.read_text("utf-8"),
            object_pairs_hook=_without_repetition,
            parse_constant=_no_number,
        )
    except OSError as error:
        raise validation.DataError(
            path, f"cannot be read ({error.strerror})", f"Give a {FILE_NAME}."
        ) from error
    except (ValueError, RecursionError) as error:
        raise validation.DataError(
            path, f"is not a certificate ({error})", _REMEDY
        ) from error
    problem = format_problem(certificate)
    if problem:
        raise validation.DataError(path, problem, _REMEDY)
    return certificate


def format_problem(certificate: Any) -> str | None:
    """Says why a value cannot be a certificate of this format, or returns `None`."""
    if sum(1 for _ in parents_of(certificate)) > MOST_EARLIER:
        return f"it continues more than {MOST_EARLIER} certificates, one after another"
    if not isinstance(certificate, Mapping) or "format" not in certificate:
        return f"this is no {FORMAT} file"
    found = certificate["format"]
    if found != FORMAT:
        return (
            f"its format is {validation.shown(found)}, and this tfdpsq reads {FORMAT!r}"
        )
    return None


def _without_repetition(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    # Readers differ in which of two equal keys they believe.
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{validation.shown(twice)} stands there twice")
    return found


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def _plain(value: Any) -> Any:
    """A number of numpy as a number of Python; json asks for what it cannot do."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{value!r} is of type {type(value).__name__}")
