"""Verification of a certificate: its numbers are recomputed from the file alone.

A certificate states the request (`spec`), the size of a batch, the noise and the steps
that ran. Every other number that decides the guarantee follows from these, and is
recomputed here and compared: q = B/n, the sensitivity, the noise's deviation,
truncation's cost, δ, ε by both accountants for the steps *executed*, and the plan's
fingerprint. If it started from released weights, so are their certificate and what both
cost together (see `budget`). Words are not compared.

That a run took place as stated, no file can show. The owner of the private data can
compare it with the ledger that training wrote (`ledger_problems`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from tfdpsq import validation
from tfdpsq.privacy import accounting
from tfdpsq.privacy.plan import LARGEST_EPSILON, PrivacyPlan, max_batch_size_of
from tfdpsq.privacy.proof import budget
from tfdpsq.privacy.proof.certificate import (
    computed,
    format_problem,
    library_version,
)
from tfdpsq.privacy.proof.ledger import LedgerSummary

# Arithmetic and binomial tails agree to this on every machine.
_TOLERANCE = 1e-9
# ε comes from Fourier transforms; another release of the accountant may be finer
# than the one the file was made with, by which the stated ε is then too high.
_EPSILON_TOLERANCE = 1e-6
_OTHER_VERSION_TOLERANCE = 1e-2
_LARGEST_NUMBER = 1e300
_EPSILONS = (
    "guarantee.epsilon",
    "accounting.epsilon_pld",
    "accounting.epsilon_rdp",
    "continuation.epsilon_of_this_run",
    "continuation.epsilon_sum",
)
# What is no number and compared all the same.
_TEXTS = ("plan", "guarantee.unit", "accounting.accountant")
# Sections whose numbers follow from others.
_RECOMPUTED = (
    "private",
    "plan",
    "spec",
    "guarantee",
    "mechanism",
    "sampler",
    "accounting",
    "continuation",
)


@dataclasses.dataclass(frozen=True)
class Verification:
    """Result of recomputing a certificate.

    Attributes:
      epsilon_pld: ε by PLD, at the certificate's δ and for its executed steps; NaN
        where it cannot be computed.
      epsilon_rdp: ε by RDP.
      problems: what is wrong, a sentence each; none if the certificate holds.
    """

    epsilon_pld: float
    epsilon_rdp: float
    problems: tuple[str, ...]


def verify_certificate(certificate: Mapping[str, Any]) -> Verification:
    """Recomputes a certificate from itself; see the module for what this can find.

    Args:
      certificate: as `make_certificate` gives it or `load_certificate` reads it.

    Raises:
      InputError: it is not a certificate of this format.
    """
    problem = format_problem(certificate)
    if problem:
        raise validation.InputError(f"{problem}. Make the artefact again.")
    problems: list[str] = []
    try:
        plan, computed_numbers = _followed(certificate, problems)
    except (validation.InputError, ArithmeticError, TypeError, ValueError) as error:
        problems.append(f"what was run is unknown: {error}")
        return Verification(math.nan, math.nan, tuple(problems))
    expected, stated = _numbers(computed_numbers), _numbers(certificate)
    version = _entry_at(certificate, "accounting.library_version")
    for path in sorted(expected):
        if path not in stated:
            problems.append(f"{path} is missing; it must be {expected[path]!r}.")
        elif not _agree(path, stated[path], expected, version):
            problems.append(
                f"{path} is {validation.shown(stated[path])}, but what was run gives "
                f"{expected[path]!r}{_versions(path, version)}."
            )
    return Verification(
        float(expected["accounting.epsilon_pld"]),
        float(expected["accounting.epsilon_rdp"]),
        tuple(problems),
    )


def verified_runs(
    certificate: Mapping[str, Any], name: str = "the certificate"
) -> list[budget.Run]:
    """The runs behind a certificate, its own first, after verifying it.

    Raises:
      InputError: verification refuses it, or it guarantees nothing.
    """
    problems = verify_certificate(certificate).problems
    if problems:
        raise validation.InputError(
            f"{name} does not hold: {problems[0]} Restore the certificate that its "
            "artefact was made with; `tfdpsq verify` lists every problem."
        )
    if not certificate["private"]:
        raise validation.InputError(
            f"{name} is of a run without privacy (epsilon inf): no total is finite "
            "with it. Leave it out only if its artefact was never released."
        )
    return budget.runs_of(certificate)


def _followed(
    certificate: Mapping[str, Any], problems: list[str]
) -> tuple[PrivacyPlan, dict[str, Any]]:
    """The plan, and all entries that follow from it and from earlier runs.

    Adds to `problems` what no plan of this project has.

    Raises:
      InputError: the free entries describe no run, or an earlier one does not hold.
      ArithmeticError, TypeError, ValueError: likewise.
    """
    plan, steps = budget.plan_of(certificate)
    problems += _plan_problems(plan)
    earlier = next(iter(certificate.get("earlier", ())), None)
    if earlier is not None:
        for problem in verify_certificate(earlier).problems[:1]:
            raise validation.InputError(f"the earlier certificate: {problem}")
    pairs = (certificate.get("fingerprints") or {}).get("pairs")
    return plan, computed(plan, steps, pairs, earlier, certificate.get("disjoint"))


def ledger_problems(
    certificate: Mapping[str, Any], ledger: LedgerSummary
) -> tuple[str, ...]:
    """Lists where the ledger of a run contradicts its certificate.

    It may be of the certificate's run, or of one that it continues: the one that
    states the ledger's run.

    Args:
      certificate: of the format that `verify_certificate` takes.
      ledger: what `read_ledger` says of the private ledger.
    """
    for earlier in budget.parents_of(certificate):
        own = certificate.get("run_id")
        if ledger.run == earlier.get("run_id") and own != ledger.run:
            certificate = earlier
            break
    stated: Mapping[str, Any] = {
        path: _entry_at(certificate, path)
        for path in (
            "plan",
            "accounting.steps_planned",
            "accounting.steps_executed",
            "run_id",
        )
    }
    problems = []
    for path, paid, what in (
        ("plan", ledger.plan, "the ledger was opened for the plan"),
        ("accounting.steps_planned", ledger.steps_allowed, "the ledger's plan has"),
        ("accounting.steps_executed", ledger.steps_paid, "the steps paid for are"),
        ("run_id", ledger.run, "the ledger is of run"),
    ):
        if stated[path] != paid:
            said = validation.shown(stated[path])
            problems.append(f"{path} is {said}, but {what} {paid!r}.")
    return tuple(problems)


def _plan_problems(plan: PrivacyPlan) -> list[str]:
    """Lists what no plan made by `make_plan` has.

    Raises:
      InputError: noise so small that ε cannot even be computed.
    """
    problems = []
    chosen = max_batch_size_of(plan.spec)
    if plan.max_batch_size != chosen:
        problems.append(
            f"sampler.max_batch_size is {plan.max_batch_size}, but the spec gives "
            f"{chosen}."
        )
    if not plan.spec.private:
        return problems
    by_rdp = accounting.epsilon_of(
        plan.noise_multiplier,
        *plan.releases(plan.spec.steps),
        plan.spec.target_delta,
        "rdp",
    )
    if not by_rdp <= LARGEST_EPSILON:
        raise validation.InputError(
            f"mechanism.noise_multiplier {plan.noise_multiplier!r} is so small that "
            f"epsilon by RDP is {by_rdp:.3g}, which protects nothing"
        )
    planned = plan.epsilon(plan.spec.steps)
    if planned > plan.spec.epsilon * (1 + _EPSILON_TOLERANCE):
        problems.append(
            f"mechanism.noise_multiplier is {plan.noise_multiplier!r}, with which all "
            f"{plan.spec.steps} planned steps spend epsilon {planned:.6g}, above the "
            f"target {plan.spec.epsilon:g}."
        )
    return problems


def _tolerance(path: str, recomputed: Mapping[str, Any]) -> float:
    """Returns the share by which an ε may differ from one machine to another.

    PLD's rounding does, by a share of δ, and ε by no larger one.
    """
    delta, accountant = (
        recomputed.get(name) for name in ("guarantee.delta", "accounting.accountant")
    )
    by_rdp = path == "accounting.epsilon_rdp" or accountant == "rdp"
    if not delta or by_rdp:
        return _EPSILON_TOLERANCE
    rounding = accounting.pld_rounding(recomputed["accounting.releases_counted"])
    most = 1 / accounting.LEAST_DELTA_IN_ROUNDING
    return _EPSILON_TOLERANCE + min(rounding / delta, most)


def _agree(path: str, stated: Any, recomputed: Mapping[str, Any], version: Any) -> bool:
    """Returns whether a value in the file is the recomputed one, up to rounding."""
    expected = recomputed[path]
    if path in _EPSILONS:
        stated, expected = _number(stated), _number(expected)
        tolerance = _tolerance(path, recomputed)
        # A higher ε is still true, and what a coarser accountant gave.
        same = version == library_version()
        more = tolerance if same else _OTHER_VERSION_TOLERANCE
        least = expected * (1 - tolerance)
        return stated == expected or least <= stated <= expected * (1 + more)
    if isinstance(expected, bool) or not isinstance(expected, (int, float)):
        return type(stated) is type(expected) and stated == expected
    return math.isclose(_number(stated), _number(expected), rel_tol=_TOLERANCE)


def _number(value: Any) -> float:
    """A number from JSON; NaN, which agrees with nothing, for what is none."""
    if value == "inf":
        return math.inf
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    return float(value) if abs(value) < _LARGEST_NUMBER else math.nan


def _versions(path: str, version: Any) -> str:
    """A remark on two versions of the accountant, where they may matter."""
    here = library_version()
    if path not in _EPSILONS or version == here:
        return ""
    return f" with dp-accounting {here} (the file was made with {version})"


def _numbers(value: Any, path: str = "") -> dict[str, Any]:
    """Numbers, flags and `_TEXTS` in nested mappings, by dotted path."""
    if isinstance(value, Mapping):
        found = {}
        for key, inner in value.items():
            if path or key in _RECOMPUTED:
                found.update(_numbers(inner, f"{path}.{key}" if path else key))
        return found
    compared = isinstance(value, (int, float)) or value in (None, "inf")
    return {path: value} if compared or path in _TEXTS else {}


def _entry_at(certificate: Mapping[str, Any], path: str) -> Any:
    """The entry at a dotted path; `None` where there is none."""
    value: Any = certificate
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
