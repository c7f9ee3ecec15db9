"""The cost of several runs together: composition of their events.

**One log.** Every run is DP-SGD on the same units, so what an observer of all releases
learns is the composition of their events, over the steps that ran: by PLD at one δ, off
which the truncation of every run is taken. That is less than the sum of the stated ε.
What is made from a released artefact and public data carries the same certificate and
costs nothing (post-processing), so a run counts once, by its id.

**Neighbours.** Poisson batches protect a unit that is added or removed, shuffled ones a
unit x that is replaced by nothing, all others keeping their places (zero-out). Where
each unit's clipped gradient depends on that unit alone, or on all that were drawn, the
guarantee of Poisson batches holds for the second kind of neighbours, too: q = B/n is
the same, and so are the other units' draws U. While |U| < M no unit is cut off, and
with nothing in the place of x the sum is that of U, whether x is drawn or not; it is
N(f(U), ·) against the mixture that x makes of it, as where x is removed. That
|U| ≥ M is paid for in δ, as there (`accounting`). So runs of both kinds compose for
zero-out neighbours, and the total says so. Not so those whose rows are dealt to groups
(`clip_groups`): an empty place there can cost another unit its own.

**A run that starts from released weights** (or follows a histogram). A unit can be in
both logs: given what was released before, this run is DP-SGD from weights that are then
fixed, so all events compose adaptively. Where the logs are declared disjoint, for a
unit of an earlier log this run is post-processing; for a unit of this log the earlier
runs have one law for both neighbours. So the largest ε and the largest δ hold (parallel
composition). Logs cut by time share no query, but they can share a user: for unit
"user" they compose. Where only some logs are declared disjoint from each other, all
runs are composed, which is an upper bound.

**What was fixed when.** Composition by PLD or RDP holds for runs whose settings (noise,
sampling, steps) were fixed without looking at earlier releases of the same pairs; what
they train, such as weights to start from, may depend on those. For settings chosen
after looking, the sum of ε and of δ holds, if a bound on it was fixed before the first
release (basic composition as a privacy filter: Rogers et al. 2016). So both are given.
A run that stopped early may have been stopped for what its noised weights showed, so
the sum counts all steps that it had planned.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfdpsq import validation
from tfdpsq.privacy import accounting
from tfdpsq.privacy.plan import (
    LARGEST_EPSILON,
    PrivacyPlan,
    epsilon_of_runs,
    make_plan,
)
from tfdpsq.privacy.spec import PrivacySpec

# How logs can be disjoint.
TIME, USER = DISJOINT = ("time", "user")
# Share of a target that must be left for the run that follows other releases.
LEAST_LEFT = 0.95
_ADJACENCY = {
    "poisson": "add or remove one unit",
    "shuffled": "replace all that one unit owns by nothing, every other unit keeping "
    "its place (zero-out)",
}


@dataclasses.dataclass(frozen=True)
class Run:
    """The part of a certificate that decides what its own run costs.

    Attributes:
      key: names the run: its id, or the digest of its certificate.
      plan: what ran.
      steps: logical steps that were paid.
      pairs: fingerprint of the private pairs; `None` where none is stated.
      apart: fingerprints of earlier pairs that were declared to share no unit with it.
      related: fingerprints of earlier pairs, declared apart or not.
      trained: digest of what the certificate states of training and inputs.
    """

    key: str
    plan: PrivacyPlan
    steps: int
    pairs: str | None = None
    apart: frozenset[str] = frozenset()
    related: frozenset[str] = frozenset()
    trained: str = ""


@dataclasses.dataclass(frozen=True)
class Total:
    """Several runs together.

    Attributes:
      unit: privacy unit of all of them.
      adjacency: neighbouring relation of all of them, in words.
      delta: δ that ε is computed at.
      epsilon_pld: ε by PLD.
      epsilon_rdp: ε by RDP.
      epsilon_sum: sum of the runs' ε, each to its last planned step.
      delta_sum: δ that goes with it.
      runs: number of runs.
      runs_of_one_unit: number of runs, at most, that one unit can have had a part in.
      stopped_early: number of runs that took fewer steps than planned.
      rests_on_declarations: whether logs were declared disjoint.
    """

    unit: str
    adjacency: str
    delta: float
    epsilon_pld: float
    epsilon_rdp: float
    epsilon_sum: float
    delta_sum: float
    runs: int
    runs_of_one_unit: int
    stopped_early: int
    rests_on_declarations: bool


def runs_of(certificate: Mapping[str, Any]) -> list[Run]:
    """The runs behind a certificate, its own first, by its free numbers alone.

    Raises:
      InputError: they describe no run.
    """
    plan, steps = plan_of(certificate)
    earlier = [run for each in certificate.get("earlier", ()) for run in runs_of(each)]
    inputs = certificate.get("fingerprints") or {}
    stated = [certificate.get("training"), {**inputs, "code": None}]
    trained = hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()
    own = follow(plan, steps, inputs.get("pairs"), earlier, certificate.get("disjoint"))
    key = certificate.get("run_id") or f"certificate {certificate.get('digest')}"
    return [dataclasses.replace(own, key=key, trained=trained), *earlier]


def follow(
    plan: PrivacyPlan,
    steps: int,
    pairs: str | None,
    earlier: Sequence[Run] = (),
    disjoint: str | None = None,
) -> Run:
    """A run that may follow others, before it has an id.

    Args:
      plan: what runs.
      steps: logical steps.
      pairs: fingerprint of its pairs.
      earlier: the runs whose releases it starts from.
      disjoint: "time" if its log was declared to share no query with the earlier ones,
        "user" if no user; `None` if nothing was declared.

    Raises:
      InputError: no total is proved for all of them; or logs declared disjoint that are
        one, or whose fingerprints are not stated.
    """
    before = frozenset(run.pairs for run in earlier if run.pairs)
    if disjoint is not None:
        validation.one_of("disjoint", disjoint, DISJOINT)
        if not pairs or len(before) < len({run.pairs for run in earlier}):
            raise validation.InputError(
                f"disjoint is {disjoint!r}, but not every certificate states the "
                "fingerprint of its pairs, which tells the logs apart. Leave disjoint "
                "out: epsilon then composes all runs."
            )
        if pairs in before:
            raise validation.InputError(
                f"disjoint is {disjoint!r}, but an earlier run was trained on these "
                f"very pairs ({pairs}). Leave disjoint out: epsilon then composes all "
                "runs."
            )
    apart = disjoint is not None and separates(disjoint, plan.spec.unit)
    run = Run("planned", plan, steps, pairs, before if apart else frozenset(), before)
    for other in earlier:
        problem = difference([run], [other], one_log=True)
        if problem or not (plan.spec.private and other.plan.spec.private):
            raise validation.InputError(
                "what it starts from cannot be continued: "
                f"{problem or 'one of both has epsilon inf'}. Give both runs the same "
                "unit and sampler and a finite epsilon, or start from public weights."
            )
    return run


def plan_of(certificate: Mapping[str, Any]) -> tuple[PrivacyPlan, int]:
    """The plan and the steps that a certificate's free numbers describe.

    Raises:
      InputError: they describe none.
    """
    try:
        spec = PrivacySpec.from_recorded(certificate["spec"])
        maximum = certificate["sampler"]["max_batch_size"]
        sigma = certificate["mechanism"]["noise_multiplier"]
        steps = certificate["accounting"]["steps_executed"]
    except (KeyError, TypeError) as error:
        raise validation.InputError(
            f"the certificate has no {error}, which says what ran"
        ) from error
    validation.positive_integer("sampler.max_batch_size", maximum)
    if spec.private:
        validation.positive("mechanism.noise_multiplier", sigma)
    validation.in_range("accounting.steps_executed", steps, 0, spec.steps)
    return PrivacyPlan(spec, maximum, float(sigma)), int(steps)


def separates(disjoint: str, unit: str) -> bool:
    """Returns whether logs that are disjoint in this way share no unit."""
    return disjoint == USER or unit != "user"


def adjacency_of(spec: PrivacySpec) -> str:
    """Returns what neighbouring data sets of a run differ in, in words."""
    return _ADJACENCY[spec.sampler]


def difference(
    ours: Sequence[Run], theirs: Sequence[Run], one_log: bool = False
) -> str | None:
    """Returns why runs cannot be composed, as a clause, or `None`.

    Args:
      ours: runs of one release.
      theirs: of another.
      one_log: pairs with different fingerprints are declared to be of one log.
    """
    specs = [run.plan.spec for run in (*ours, *theirs)]
    units = sorted({spec.unit for spec in specs})
    if len(units) > 1:
        return (
            f"the units are {' and '.join(units)}, and neither guarantee says anything "
            "of the other's"
        )
    samplers = {spec.sampler for spec in specs}
    if len(samplers) > 1 and any(spec.clip_groups for spec in specs):
        return (
            "one has shuffled batches and one clip_groups, whose neighbours differ: "
            f"{' and '.join(sorted(_ADJACENCY[one] for one in samplers))}"
        )
    known, others = (_known(runs) for runs in (ours, theirs))
    if not one_log and not known & others:
        return (
            f"their pairs have the fingerprints {_list(known)} and {_list(others)}: "
            "other pairs, or the same under the key of another private directory"
        )
    return None


def _known(runs: Sequence[Run]) -> set[str]:
    return {pairs for run in runs for pairs in (run.pairs, *run.related) if pairs}


def _list(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def compose(
    groups: Sequence[Sequence[Run]], delta: float | None = None, whole: bool = False
) -> Total:
    """Composes the runs of each group; between groups the largest holds.

    Args:
      groups: runs that one unit can have had a part in, a sequence for each set of logs
        that shares no unit with the others; see `sharing`. A run may stand there twice.
      delta: δ to compute ε at; `None` takes the smallest of a group, at which the
        composed ε is at least that of each run.
      whole: count all planned steps of every run.

    Raises:
      InputError: no run; runs that no total is proved for; two costs or trainings of
        one run; or δ above the sum of theirs, or one that truncation uses up.
    """
    groups = [list(_once(group).values()) for group in groups if group]
    every = list(itertools.chain.from_iterable(groups))
    if not every:
        raise validation.InputError("there is no run to compose. Give a certificate.")
    problem = difference(every, (), one_log=True)
    if problem:
        raise validation.InputError(f"the runs cannot be composed: {problem}.")
    _once(every)
    numbers = [_together(group, delta, whole) for group in groups]
    shuffled = any(run.plan.spec.sampler == "shuffled" for run in every)
    delta, pld, rdp, epsilon_sum, delta_sum = map(max, zip(*numbers))
    return Total(
        every[0].plan.spec.unit,
        # Zero-out where one run needs it; see the module.
        _ADJACENCY["shuffled" if shuffled else "poisson"],
        delta,
        pld,
        rdp,
        epsilon_sum,
        delta_sum,
        len(_once(every)),
        max(map(len, groups)),
        sum(run.steps < run.plan.spec.steps for run in _once(every).values()),
        len(groups) > 1,
    )


def sharing(runs: Sequence[Run]) -> list[list[Run]]:
    """Groups runs by what their certificates declare of their logs.

    Where every two logs are declared disjoint, each is a group; else all are one.
    """
    logs: dict[str, list[Run]] = {}
    for run in runs:
        logs.setdefault(run.pairs or f"pairs of {run.key}", []).append(run)
    apart = {
        frozenset((log, other))
        for log, rs in logs.items()
        for r in rs
        for other in r.apart
    }
    if all(frozenset(two) in apart for two in itertools.combinations(logs, 2)):
        return list(logs.values())
    return [list(runs)]


def _once(runs: Sequence[Run]) -> dict[str, Run]:
    """Each run once, by its key.

    Raises:
      InputError: one id stands for two plans, numbers of steps or trainings.
    """
    found: dict[str, Run] = {}
    for run in runs:
        other = found.setdefault(run.key, run)
        if (other.plan.fingerprint, other.steps, other.trained) != (
            run.plan.fingerprint,
            run.steps,
            run.trained,
        ):
            raise validation.InputError(
                f"two certificates state the run {run.key} and another plan, number of "
                "steps, training or data: two runs from a copied directory, which may "
                "share their noise, so no total holds for both. Use one of them."
            )
    return found


def _together(
    runs: Sequence[Run], delta: float | None, whole: bool
) -> tuple[float, ...]:
    """(δ, ε by PLD, ε by RDP, Σε, Σδ) of runs that share units."""
    deltas = [run.plan.spec.target_delta for run in runs]
    own = min(deltas) if delta is None else delta
    if own > sum(deltas):
        raise validation.InputError(
            f"delta is {own:g}, above {sum(deltas):.3g}, the sum of what the runs "
            "state: epsilon would look smaller than any of them promises. Give at most "
            "that sum."
        )
    planned = [(run.plan, run.plan.spec.steps) for run in runs]
    events = planned if whole else [(run.plan, run.steps) for run in runs]
    rdp = epsilon_of_runs(events, own, "rdp")
    if LARGEST_EPSILON < rdp < float("inf"):
        raise validation.InputError(
            f"epsilon by RDP is {rdp:.3g} for all runs together, which protects nothing"
        )
    pld = epsilon_of_runs(events, own, "pld")
    if pld == float("inf"):
        raise validation.InputError(
            f"delta is {own!r}, which truncating the batches of these runs, and "
            "rounding, use up, or a run has no privacy. Compute epsilon at a larger "
            "delta, without runs of epsilon inf."
        )
    each = [epsilon_of_runs([run], d, "pld") for run, d in zip(planned, deltas)]
    return own, pld, rdp, sum(each), sum(deltas)


def require_within(
    budget: float, released: Sequence[Run], planned: Sequence[Run]
) -> Total:
    """Refuses runs that would exceed a total, before their first step.

    Every run counts with all of its planned steps, as if all were from one log, but for
    logs that are declared disjoint. The total is by PLD.

    Args:
      budget: ε that all runs together must stay within.
      released: earlier runs.
      planned: runs that are about to begin.

    Raises:
      InputError: they would exceed the budget, or cannot be composed.
    """
    validation.positive("budget", budget)
    total = compose(sharing([*released, *planned]), whole=True)
    if total.epsilon_pld <= budget:
        return total
    before = 0.0
    if released:
        before = compose(sharing(released), whole=True).epsilon_pld
    remedy = "lower epsilon or steps, or raise the budget"
    raise validation.InputError(
        f"the budget is epsilon {budget:g}, of which {len(_once(released))} earlier "
        f"runs spent {before:.4g}; with {len(planned)} more it would be "
        f"{total.epsilon_pld:.4g} at delta {total.delta:.3g}. Nothing more was spent: "
        f"{remedy if before < budget else 'raise the budget'}."
    )


def plan_within(spec: PrivacySpec, released: Sequence[Run]) -> PrivacyPlan:
    """Plans a run whose target counts earlier runs on the same units, too.

    Args:
      spec: of the run; its ε is for the run and for all that was released before.
      released: earlier runs.

    Returns:
      A plan for ε, or for a smaller one, of four digits so that all machines find it.

    Raises:
      InputError: less than 95 % of ε would be left for the run; or they cannot be
        composed.
    """
    left = spec.epsilon
    while left >= LEAST_LEFT * spec.epsilon:
        plan = make_plan(dataclasses.replace(spec, epsilon=left))
        total = compose([[*released, Run("planned", plan, spec.steps)]])
        spent = {"pld": total.epsilon_pld, "rdp": total.epsilon_rdp}[spec.accountant]
        if spent <= spec.epsilon:
            return plan
        left = min(left - (spent - spec.epsilon), left * (1 - 1e-3))
        left = accounting.rounded_down(left, 4) if left > 0 else 0.0
    raise validation.InputError(
        f"epsilon is {spec.epsilon:g}, of which less than {LEAST_LEFT:.0%} would be "
        "left after what was released before. Raise epsilon, or release that with more "
        "noise."
    )


def parents_of(certificate: Any) -> Iterator[Mapping[str, Any]]:
    """Yields the certificates that one follows, the last one first."""
    held = certificate if isinstance(certificate, Mapping) else {}
    for parent in held.get("earlier", ()):
        yield parent
        yield from parents_of(parent)
