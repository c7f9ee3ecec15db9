"""The cost of several runs together: composition of their events.

**One log.** Every run is DP-SGD on the same units, so an observer of all releases
learns the composition of their events, over the steps that ran: by PLD at one δ, off
which the truncation of every run is taken. That is less than the sum of the stated ε.
What is made from a released artefact and public data has the same certificate and costs
nothing (post-processing), so a run counts once, by its id.

**Neighbours.** Poisson batches protect a unit that is added or removed, shuffled ones a
unit x that is replaced by nothing, all others keeping their places (zero-out). Where
each unit's clipped gradient depends on that unit alone, or on all that were drawn, the
guarantee of Poisson batches holds for the second kind of neighbours, too: q = B/n is
the same, and so are the other units' draws U. While |U| < M no unit is cut off, and
with nothing in the place of x the sum is that of U, N(f(U), ·), whether x is drawn or
not, against the mixture that x makes of it, as where x is removed. That |U| ≥ M is paid
for in δ, as there (`accounting`). So runs of both kinds compose for zero-out
neighbours. Not so those whose rows are dealt to groups (`num_microbatches`): an empty
place there can cost another unit its own.

**A run that starts from released weights** (or follows a histogram). Given what was
released before, it is DP-SGD from weights that are then fixed, so for a unit that can
be in both logs all events compose adaptively. Where the logs are declared disjoint, for
a unit of an earlier log this run is post-processing; for a unit of this log the earlier
runs have one law for both neighbours. So the largest ε and the largest δ hold (parallel
composition). Logs cut by time share no query, but they can share a user: for unit
"user" they compose. Where only some logs are declared disjoint from each other, all
runs are composed, which is an upper bound.

**What was fixed when.** Composition by PLD or RDP holds for runs whose settings (noise,
sampling, steps) were fixed without looking at earlier releases of the same pairs; what
they train, such as weights to start from, may depend on those. For settings chosen
after looking, the sum of ε and of δ holds, if a bound on it was fixed before the first
release (basic composition as a privacy filter: Rogers et al. 2016). So both are given.
A run that stopped early may have done so for what its noised weights showed, so the sum
counts all steps that it had planned.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from tfdpsq import validation
from tfdpsq.privacy import plan as plans
from tfdpsq.privacy.plan import PrivacyPlan, epsilon_of_runs
from tfdpsq.privacy.spec import PrivacySpec

DISJOINT = ("time", "user")  # how logs can be declared so
# Share of a target that must be left for the run that follows other releases.
LEAST_LEFT = 0.95


@dataclasses.dataclass(frozen=True)
class Run:
    """The part of a certificate that decides what its own run costs."""

    key: str  # run id, or another unique name
    plan: PrivacyPlan
    steps: int  # logical steps that were paid
    pairs: str | None = None  # fingerprint of the private pairs, if known
    apart: frozenset[str] = frozenset()  # earlier pairs declared to share no unit


@dataclasses.dataclass(frozen=True)
class Total:
    """Several runs together."""

    delta: float  # of the next two
    epsilon_pld: float
    epsilon_rdp: float
    epsilon_sum: float  # by PLD, each run to its last planned step
    delta_sum: float
    runs: int
    runs_of_one_unit: int  # largest number of runs whose logs can share a unit
    stopped_early: int  # runs that took fewer steps than planned


def follow(
    plan: PrivacyPlan,
    steps: int,
    pairs: str | None,
    earlier: Sequence[Run] = (),
    disjoint: str | None = None,
) -> Run:
    """Returns a run, still without an id, that starts from what `earlier` released.

    `pairs` is the fingerprint of its pairs; `disjoint` is as in `Certificate`.

    Raises:
      InputError: no total is proved for all of them; or logs are declared disjoint
        whose fingerprints are equal or missing.
    """
    own = Run("planned", plan, steps, pairs)
    if disjoint is not None:
        validation.one_of("disjoint", disjoint, DISJOINT)
        before = frozenset(run.pairs or "" for run in earlier)
        if not pairs or before & {pairs, ""}:
            raise validation.InputError(
                f"disjoint is {disjoint!r}, but pairs {pairs} and earlier "
                f"{', '.join(before)} do not tell the logs apart. Leave disjoint out."
            )
        if separates(disjoint, plan.spec.unit):
            own = dataclasses.replace(own, apart=before)
    problem = difference([own, *earlier])
    if earlier and not all(run.plan.spec.private for run in (own, *earlier)):
        problem = "a run has epsilon inf"
    if problem:
        raise validation.InputError(
            f"the earlier run cannot be continued: {problem}. Give both one unit, one "
            "sampler and a finite epsilon, or start from public weights."
        )
    return own


def separates(disjoint: str, unit: str) -> bool:
    """Returns whether logs disjoint by "time" or "user" share no unit."""
    return disjoint == "user" or unit != "user"


def adjacency_of(runs: Sequence[Run]) -> str:
    """Returns what neighbouring data sets of all runs differ in, in words."""
    if all(run.plan.spec.sampler == "poisson" for run in runs):
        return "add or remove one unit"
    return "replace one unit by nothing, all others keeping their places (zero-out)"


def difference(runs: Sequence[Run]) -> str | None:
    """Returns why no total is proved for runs on one log, as a clause, or `None`."""
    specs = [run.plan.spec for run in runs]
    units = sorted({spec.unit for spec in specs})
    if len(units) > 1:
        return f"the units are {' and '.join(units)}"
    samplers = {spec.sampler for spec in specs}
    if len(samplers) > 1 and any(spec.num_microbatches for spec in specs):
        return "shuffled batches and num_microbatches have other neighbours"
    return None


def compose(groups: Sequence[Sequence[Run]], delta: float | None = None) -> Total:
    """Composes the runs of each group, each once; between groups the largest holds.

    Args:
      groups: runs on logs that share no unit with those of other groups (`sharing`).
      delta: δ to compute ε at; `None` takes the smallest of a group.

    Raises:
      InputError: no total is proved for the runs, or δ is out of range.
    """
    groups = [_once(group) for group in groups if group]
    every = _composable(list(itertools.chain.from_iterable(groups)))
    costs = [_together(group, delta) for group in groups]
    delta, pld, rdp, epsilon_sum, delta_sum = map(max, zip(*costs))
    together = max(map(len, groups))
    early = sum(run.steps < run.plan.spec.steps for run in every)
    return Total(delta, pld, rdp, epsilon_sum, delta_sum, len(every), together, early)


def _composable(runs: Sequence[Run]) -> list[Run]:
    """Returns each run once; an InputError where no total is proved."""
    every = _once(runs)
    problem = difference(every) if every else "there is none"
    if problem:
        raise validation.InputError(f"the runs cannot be composed: {problem}.")
    return every


def sharing(runs: Sequence[Run]) -> list[list[Run]]:
    """Returns each log's runs, if every two are declared disjoint, else one group."""
    logs: dict[str, list[Run]] = {}
    for run in runs:
        logs.setdefault(run.pairs or f"pairs of {run.key}", []).append(run)
    apart = {
        frozenset((log, other))
        for log, members in logs.items()
        for run in members
        for other in run.apart
    }
    if all(frozenset(two) in apart for two in itertools.combinations(logs, 2)):
        return list(logs.values())
    return [list(runs)]


def _once(runs: Sequence[Run]) -> list[Run]:
    """Returns each run once, by its key."""
    found: dict[str, Run] = {}
    for run in runs:
        if found.setdefault(run.key, run) != run:
            raise validation.InputError(
                f"two certificates state the run {run.key} and differ. Use one."
            )
    return list(found.values())


def _together(runs: Sequence[Run], delta: float | None) -> tuple[float, ...]:
    """(δ, ε by PLD, ε by RDP, Σε, Σδ) of runs that share units."""
    deltas = [run.plan.spec.target_delta for run in runs]
    own = min(deltas) if delta is None else delta
    events = [(run.plan, run.steps) for run in runs]
    rdp = pld = epsilon_of_runs(events, own, "rdp")
    if rdp <= plans.LARGEST_EPSILON:  # beyond, PLD takes minutes and gigabytes
        pld = epsilon_of_runs(events, own, "pld")
    if not max(rdp, pld) <= plans.LARGEST_EPSILON:
        raise validation.InputError(
            f"delta is {own!r}, at which epsilon is {pld:.3g}: truncating the batches "
            "uses it up, or a run is hardly private. Raise delta."
        )
    planned = [(run.plan, run.plan.spec.steps) for run in runs]
    each = [epsilon_of_runs([run], d, "pld") for run, d in zip(planned, deltas)]
    return own, pld, rdp, sum(each), sum(deltas)


def plan_within(spec: PrivacySpec, released: Sequence[Run]) -> PrivacyPlan:
    """Plans a run whose ε holds for it and all released runs together.

    Raises:
      InputError: less than `LEAST_LEFT` of ε is left for it, or no total is proved.
    """
    left = spec.epsilon
    while left >= LEAST_LEFT * spec.epsilon:
        plan = plans.make_plan(dataclasses.replace(spec, epsilon=left))
        runs = _composable([*released, Run("planned", plan, spec.steps)])
        delta = min(run.plan.spec.target_delta for run in runs)
        events = [(run.plan, run.steps) for run in runs]
        spent = epsilon_of_runs(events, delta, spec.accountant)
        if spent <= spec.epsilon:
            return plan
        left = min(left - spent + spec.epsilon, 0.999 * left)
        if left > 0:  # to four digits, so that all machines find it
            scale = 10.0 ** (3 - math.floor(math.log10(left)))
            left = math.floor(left * scale) / scale
    raise validation.InputError(
        f"epsilon is {spec.epsilon:g}: earlier releases leave less than "
        f"{LEAST_LEFT:.0%}. Raise it, or release those with more noise."
    )
