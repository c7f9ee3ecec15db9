"""The cost of what was released from the same pairs, and of a planned run with it.

`release_of` takes a certificate for what its release costs, after verifying it;
`composition` says what several cost together. Composed are runs whose settings were
fixed without looking at earlier releases; for others the sum holds.

**Not composed**, as no proof is stated for it: certificates of other pairs, of another
unit, and any that `verify_certificate` refuses.

The fingerprint of the pairs is keyed by a secret of the private directory, so equal
fingerprints are equal pairs, but other fingerprints may be the same pairs under another
key. Nothing is assumed of those: the caller declares one log, or disjoint ones. A
certificate of a run that continued another one states how the two logs were declared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tfdpsq import validation
from tfdpsq.privacy import accounting
from tfdpsq.privacy.plan import PrivacyPlan, make_plan
from tfdpsq.privacy.proof.certified import release_in
from tfdpsq.privacy.proof.composition import (
    Composition,
    Release,
    compose,
    run_key,
    to_the_last_step,
)
from tfdpsq.privacy.proof.continuation import Continuation
from tfdpsq.privacy.proof.verification import verify_certificate
from tfdpsq.privacy.spec import PrivacySpec

# Share of a target that must be left for the run that follows other releases.
LEAST_LEFT = 0.95


def release_of(
    certificate: Mapping[str, Any], name: str = "the certificate"
) -> Release:
    """Returns what a certificate's release costs, after verifying the certificate.

    Args:
      certificate: as `load_certificate` reads it.
      name: what it is called in errors.

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
    return release_in(certificate)


def planned_release(
    plans: Mapping[str, PrivacyPlan],
    pairs: str,
    continuation: Continuation | None = None,
) -> Release:
    """Returns the cost of runs that have not begun, all their steps included.

    Args:
      plans: by name.
      pairs: fingerprint of their pairs.
      continuation: of the one run that starts from released weights.
    """
    if continuation is not None:
        return continuation.release(f"planned {next(iter(plans))}")
    runs = {
        run_key(None, f"planned {name}"): (plan, plan.spec.steps)
        for name, plan in plans.items()
    }
    delta = sum(plan.spec.target_delta for plan in plans.values())
    return Release(runs, pairs, delta)


def require_within(
    budget: float, released: Mapping[str, Release], planned: Mapping[str, Release]
) -> Composition:
    """Refuses runs that would exceed a total, before their first step.

    Every release given counts, as if all were from one log, but for logs that a
    certificate or the planned run itself declares disjoint. The total is by PLD, so the
    settings of all runs must have been fixed without looking at earlier releases; see
    `composition`. A run that stopped early counts with all steps that it had planned.

    Args:
      budget: ε that all releases together must stay within.
      released: earlier releases, by name.
      planned: runs that are about to begin, by name.

    Returns:
      The composition of all of them.

    Raises:
      InputError: they would exceed the budget, or cannot be composed.
    """
    validation.positive("budget", budget)
    every = dict(planned)
    for name, release in released.items():
        while name in every:  # a directory can have the name of a run
            name = f"earlier {name}"
        every[name] = release
    # Why a run stopped early is not known, so it counts whole.
    every = {name: to_the_last_step(release) for name, release in every.items()}
    total = compose(every, one_log=True)
    if total.epsilon_pld <= budget:
        return total
    earlier = {name: to_the_last_step(each) for name, each in released.items()}
    for release in planned.values():
        for part in map(to_the_last_step, release.before):
            if all(part.digest != other.digest for other in earlier.values()):
                earlier[f"what is continued ({part.digest})"] = part
    before = compose(earlier, one_log=True).epsilon_pld if earlier else 0.0
    remedy = "lower epsilon or steps, or raise the budget"
    raise validation.InputError(
        f"the budget is epsilon {budget:g}, of which {len(earlier)} earlier releases "
        f"spent {before:.4g}; with {' and '.join(planned)} it would be "
        f"{total.epsilon_pld:.4g} at delta {total.delta:.3g}. Nothing more was spent: "
        f"{remedy if before < budget else 'raise the budget'}."
    )


def plan_within(spec: PrivacySpec, released: Mapping[str, Release]) -> PrivacyPlan:
    """Plans a run whose target counts earlier releases of the same units, too.

    Args:
      spec: of the run; its ε is for the run and for all that was released before.
      released: earlier releases, by name; of the unit of `spec`.

    Returns:
      A plan for ε, or for a smaller one, of four digits so that all machines find it.

    Raises:
      InputError: less than 95 % of ε would be left for the run; or they cannot be
        composed.
    """
    left = spec.epsilon
    while left >= LEAST_LEFT * spec.epsilon:
        plan = make_plan(dataclasses.replace(spec, epsilon=left))
        every = {**released, "planned": planned_release({"planned": plan}, "")}
        total = compose(every, one_log=True)
        spent = {"pld": total.epsilon_pld, "rdp": total.epsilon_rdp}[spec.accountant]
        if spent <= spec.epsilon:
            return plan
        left = min(left - (spent - spec.epsilon), left * (1 - 1e-3))
        left = accounting.rounded_down(left, 4) if left > 0 else 0.0
    raise validation.InputError(
        f"epsilon is {spec.epsilon:g}, of which less than {LEAST_LEFT:.0%} would "
        f"be left in addition to {' and '.join(released)}. Raise epsilon, or "
        "release that with more noise."
    )
