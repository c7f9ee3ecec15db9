"""Verification of a certificate: its numbers are recomputed from the file alone.

That a run took place as stated, no file can show; the data's owner can compare the
certificate with the run's ledger.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from tfdpsq import validation
from tfdpsq.privacy import accounting
from tfdpsq.privacy.proof import budget
from tfdpsq.privacy.proof.certificate import Certificate, as_json, parents_of
from tfdpsq.privacy.proof.ledger import LedgerSummary

_TOLERANCE = 1e-6
# A coarser version of the accountant states a higher ε, which is still true.
_HIGHER = 1e-2


@dataclasses.dataclass(frozen=True)
class Verification:
    """Result of recomputing a certificate.

    Attributes:
      epsilon_pld: ε by PLD, at the certificate's δ and for its executed steps; NaN
        if it cannot be computed.
      epsilon_rdp: ε by RDP.
      problems: what is wrong, a sentence each; none if the certificate holds.
    """

    epsilon_pld: float
    epsilon_rdp: float
    problems: tuple[str, ...]


def verify_certificate(certificate: Mapping[str, Any]) -> Verification:
    """Recomputes σ → ε, δ, truncation and sensitivity, of earlier runs, too."""
    try:
        own = Certificate.from_json(certificate)
        expected = as_json(own.numbers())
    except (validation.InputError, ArithmeticError, TypeError) as error:
        return Verification(math.nan, math.nan, (f"what was run is unknown: {error}",))
    earlier = verify_certificate(own.earlier).problems if own.earlier else ()
    problems = [f"the earlier certificate: {problem}" for problem in earlier]
    accounts = expected["accounting"]
    # PLD rounds differently on other machines, by a share of δ; ε differs by no more.
    rounding = accounting.pld_rounding(accounts["releases_counted"])
    lower = _TOLERANCE + min(rounding / expected["guarantee"]["delta"], 1e-2)
    entries = dict(_entries(certificate))
    for path, value in _entries(expected):
        found = entries.get(path)
        spent = path.rpartition(".")[2].startswith("epsilon")
        if not _agree(found, value, *((lower, _HIGHER) if spent else (1e-9, 1e-9))):
            problems.append(
                f"{path} is {validation.shown(found)}, but what was run gives "
                f"{value!r}."
            )
    return Verification(
        float(accounts["epsilon_pld"]), float(accounts["epsilon_rdp"]), tuple(problems)
    )


def verified_runs(
    certificate: Mapping[str, Any], name: str = "the certificate"
) -> list[budget.Run]:
    """The runs behind a certificate, its own first, after verifying it.

    Raises:
      InputError: it does not hold, or guarantees nothing.
    """
    for problem in verify_certificate(certificate).problems:
        raise validation.InputError(
            f"{name} does not hold: {problem} Restore the one that its artefact was "
            "made with."
        )
    if not certificate["private"]:
        raise validation.InputError(
            f"{name} is of a run without privacy (epsilon inf): no total is finite "
            "with it. Leave it out only if its artefact was never released."
        )
    return Certificate.from_json(certificate).runs()


def ledger_problems(
    certificate: Mapping[str, Any], ledger: LedgerSummary
) -> tuple[str, ...]:
    """Lists where a ledger contradicts the certificate of its run, or one after it."""
    chain = (certificate, *parents_of(certificate))
    own = next((each for each in chain if each["run_id"] == ledger.run), certificate)
    accounts = own["accounting"]
    return tuple(
        f"the certificate states {what} {stated!r}, but the ledger {paid!r}."
        for what, stated, paid in (
            ("plan", own["plan"], ledger.plan),
            ("planned steps", accounts["steps_planned"], ledger.steps_allowed),
            ("paid steps", accounts["steps_executed"], ledger.steps_paid),
            ("run", own["run_id"], ledger.run),
        )
        if stated != paid
    )


def _agree(stated: Any, expected: Any, lower: float, higher: float) -> bool:
    """Compares an entry with the recomputed one, up to relative tolerances."""
    number = isinstance(expected, (int, float)) and not isinstance(expected, bool)
    if not number or not isinstance(stated, (int, float)):
        return stated == expected
    return expected * (1 - lower) <= stated <= expected * (1 + higher)


def _entries(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested mappings by dotted path."""
    if not isinstance(value, Mapping):
        yield path, value
        return
    for key, inner in value.items():
        yield from _entries(inner, f"{path}.{key}" if path else key)
