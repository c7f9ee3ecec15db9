"""Composition of certificates: what several releases from the same pairs cost together.

**One log.** Every release is a run of DP-SGD on the same units, so what an observer of
all of them learns is the composition of their events, over the steps that ran. Its ε is
computed by PLD at one δ, off which the truncation of every run is taken; that is less
than the sum of the stated ε. What is made from a released artefact and public data
carries the same certificate and costs nothing (post-processing): a run counts once, by
the head of its ledger.

**A run that was chosen** among several counts as all of them. A unit was either trained
on, which costs those runs, or held out, which costs the exponential mechanism's ε at
δ = 0 and adds to the rest. Every combination of roles over all such releases is
computed, and the largest ε holds for every unit. Where the choice was "declared", made
without noise, nothing is guaranteed for the units held out, nor by any total with it.

**Disjoint logs.** A query in one log only is protected by the composition of that log's
releases, whatever was released from the others (parallel composition): (largest ε,
largest δ) of the logs. Logs cut by time share no query, but they do share users; for
unit "user" they are composed like one log. Logs cut by user share neither.

**Not composed**, as no proof is stated for it: certificates of other pairs, of another
unit, of another adjacency (add/remove and zero-out), and any that `verify_certificate`
refuses.

The fingerprint of the pairs is keyed by a secret of the private directory, so equal
fingerprints are equal pairs, but other fingerprints may be the same pairs under another
key. Nothing is assumed of those: the caller declares one log, or disjoint ones.

**What was fixed when.** Composition by PLD or RDP holds for runs whose settings (noise,
sampling, steps) were fixed without looking at earlier releases of the same pairs; what
they train, such as weights to start from, may depend on those. Settings chosen after
looking make the order of losses the releases' own choice, and no total by PLD is proved
for that: an adversary could pick the next run by the loss of the last. The sum of ε and
of δ holds all the same, if a bound on it was fixed before the first release (basic
composition as a privacy filter: Rogers et al. 2016). So both are given. A run that
stopped early may have been stopped for what its noised weights showed, which is a
setting chosen after looking: the sum counts all steps that it had planned.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfdpsq import validation
from tfdpsq.privacy.plan import PrivacyPlan
from tfdpsq.privacy.proof.certificate import adjacency_of, digest_of
from tfdpsq.privacy.proof.certified import entry_at, plan_of, selection_of
from tfdpsq.privacy.proof.selection import epsilon_of_runs
from tfdpsq.privacy.proof.verification import verify_certificate

# How logs can be disjoint.
TIME, USER = DISJOINT = ("time", "user")
# Beyond this many private choices, the combinations of roles would take minutes.
_MOST_CHOICES = 6
_Run = tuple[PrivacyPlan, int]


@dataclasses.dataclass(frozen=True)
class Release:
    """The part of a certificate that decides what its release costs.

    Attributes:
      runs: ledger head, or else digest -> (plan, steps executed), of all runs.
      choice_epsilon: ε for a unit that was held out to choose among the runs; `None`
        where there was no private choice.
      pairs: fingerprint of the private pairs; `None` where none is stated.
      delta: δ of the certificate.
      open_choice: whether units that were held out chose among the runs without noise,
        so that nothing is guaranteed for them.
      trained: ledger head -> digest of what the certificate states of that run's
        training and data, where it does.
      nameless: whether a run has no ledger head, so that a second run of the same
        settings has an equal certificate.
    """

    runs: Mapping[str, _Run]
    choice_epsilon: float | None
    pairs: str | None
    delta: float
    open_choice: bool = False
    nameless: bool = False
    trained: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Composition:
    """Several releases together.

    Attributes:
      releases: what is composed.
      unit: privacy unit of all of them.
      adjacency: neighbouring relation of all of them, in words.
      delta: δ that ε is computed at.
      epsilon_pld: ε of all releases together by PLD.
      epsilon_rdp: the same by RDP.
      epsilon_sum: sum of the releases' ε, each run counted once and to its last
        planned step: for runs whose settings were chosen after looking at earlier
        releases, or that were stopped early after looking at their own weights.
      delta_sum: δ that goes with it.
    """

    releases: tuple[Release, ...]
    unit: str
    adjacency: str
    delta: float
    epsilon_pld: float
    epsilon_rdp: float
    epsilon_sum: float
    delta_sum: float

    @property
    def runs(self) -> int:
        """Number of training runs, each counted once."""
        return len({key for release in self.releases for key in release.runs})

    @property
    def stopped_early(self) -> int:
        """Number of runs that took fewer steps than planned."""
        runs = {k: run for release in self.releases for k, run in release.runs.items()}
        return sum(steps < plan.spec.steps for plan, steps in runs.values())

    @property
    def not_for(self) -> str | None:
        """Returns the units that no ε here holds for, in words; `None` for all."""
        if not any(release.open_choice for release in self.releases):
            return None
        return "units held out to choose among runs without noise"

    @property
    def pairs(self) -> set[str]:
        """Fingerprints of the private pairs that are stated."""
        return {release.pairs for release in self.releases if release.pairs}


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
    pairs = entry_at(certificate, "fingerprints.pairs")
    pairs = pairs if isinstance(pairs, str) else None
    delta = float(certificate["guarantee"]["delta"])
    head = certificate["ledger_head"]
    trained = {head: _trained(certificate)} if head else {}
    if "selection" in certificate:
        selection = selection_of(certificate)
        runs = {
            run.ledger_head or f"{certificate['digest']}/{key}": (
                run.plan,
                run.plan.spec.steps,
            )
            for key, run in selection.runs.items()
        }
        open_choice = bool(selection.choice_epsilon is None)
        nameless = not all(run.ledger_head for run in selection.runs.values())
        return Release(
            runs,
            selection.choice_epsilon,
            pairs,
            delta,
            open_choice,
            nameless,
            trained,
        )
    runs = {head or digest_of(certificate): plan_of(certificate)}
    return Release(runs, None, pairs, delta, nameless=not head, trained=trained)


def require_one_run(release: Release, places: Sequence[str]) -> None:
    """Refuses equal certificates of which nobody can say whether they are of one run.

    Args:
      release: what one of them costs.
      places: where they were found.

    Raises:
      InputError: a run without a ledger head is found in several places.
    """
    if release.nameless and len(places) > 1:
        raise validation.InputError(
            f"{places[0]} and {places[1]} hold equal certificates without a ledger "
            "head: two runs of the same settings, or copies of one, and a total would "
            "differ. Give one of them if they are copies; train with a directory to "
            "have a ledger."
        )


def planned_release(
    plans: Mapping[str, PrivacyPlan], pairs: str, choice_epsilon: float | None = None
) -> Release:
    """Returns the cost of runs that have not begun, all their steps included.

    Args:
      plans: by name, of the run, or of those that one will be chosen among.
      pairs: fingerprint of their pairs.
      choice_epsilon: see `Release`.
    """
    runs = {name: (plan, plan.spec.steps) for name, plan in plans.items()}
    delta = sum(plan.spec.target_delta for plan in plans.values())
    return Release(runs, choice_epsilon, pairs, delta)


def compose(
    releases: Mapping[str, Release],
    delta: float | None = None,
    one_log: bool = False,
) -> Composition:
    """Composes all releases from one log.

    Args:
      releases: by name, for errors; see `release_of`.
      delta: δ to compute ε at; `None` takes the smallest of the releases', at which the
        composed ε is at least that of each.
      one_log: declares that pairs with other fingerprints belong to the same log.

    Raises:
      InputError: no release; other pairs, another unit or another adjacency; a run with
        two costs or two trainings; or δ above the sum of theirs, or one that truncation
        uses up.
    """
    if not releases:
        raise validation.InputError(
            "there is no release to compose. Give at least one certificate."
        )
    first_name, first = next(iter(releases.items()))
    for name, release in releases.items():
        problem = difference(first, release, one_log)
        if problem:
            raise validation.InputError(
                f"{first_name} and {name} cannot be composed: {problem}."
            )
    _require_one_cost(releases)
    deltas = [release.delta for release in releases.values()]
    if delta is None:
        delta = min(deltas)
    validation.in_range("delta", delta, 0.0, 1.0, low_open=True, high_open=True)
    if delta > sum(deltas):
        raise validation.InputError(
            f"delta is {delta:g}, above {sum(deltas):.3g}, the sum of what releases "
            "state: epsilon would look smaller than any of them promises. Give at most "
            "that sum."
        )
    parts = tuple(releases.values())
    found = {name: _epsilon(parts, delta, name) for name in ("pld", "rdp")}
    if not math.isfinite(found["pld"]):
        raise validation.InputError(
            f"delta is {delta!r}, which truncating the batches of these releases uses "
            "up. Compute epsilon at a larger delta."
        )
    spec = _spec_of(first)
    return Composition(
        parts,
        spec.unit,
        adjacency_of(spec),
        delta,
        found["pld"],
        found["rdp"],
        *_summed(parts),
    )


def difference(first: Release, other: Release, one_log: bool = False) -> str | None:
    """Returns why two releases cannot be composed, as a clause, or `None`.

    Arguments are those of `compose`.
    """
    ours, theirs = _spec_of(first), _spec_of(other)
    if ours.unit != theirs.unit:
        return (
            f"one protects a unit {ours.unit!r} and the other a unit {theirs.unit!r}, "
            "and neither guarantee says anything of the other's unit"
        )
    if ours.sampler != theirs.sampler:
        return (
            f"their neighbours differ: {adjacency_of(ours)!r} and "
            f"{adjacency_of(theirs)!r}"
        )
    if not one_log and (first.pairs is None or first.pairs != other.pairs):
        return (
            f"their pairs have the fingerprints {first.pairs} and {other.pairs}: "
            "other pairs, or the same under the key of another private directory"
        )
    return None


def in_parallel(logs: Mapping[str, Composition], disjoint: str) -> Composition:
    """Composes releases from disjoint logs.

    Args:
      logs: the composition of each log, by its name.
      disjoint: "time", where every query is in one log, or "user", where every user is.

    Returns:
      (Largest ε, largest δ) of the logs; for unit "user" and logs cut by time, the
      composition of all of them, since a user can be in every log.

    Raises:
      InputError: no log; two with the same pairs or the same run, which are then not
        disjoint; or of another unit or adjacency.
    """
    validation.one_of("disjoint", disjoint, DISJOINT)
    if not logs:
        raise validation.InputError("there is no log. Give at least one.")
    for (name, log), (other_name, other) in itertools.combinations(logs.items(), 2):
        problem = difference(log.releases[0], other.releases[0], one_log=True)
        if not problem and (log.pairs & other.pairs or _keys(log) & _keys(other)):
            problem = "both hold releases of the same pairs: give them one name"
        if problem:
            raise validation.InputError(
                f"the logs {name} and {other_name} cannot be composed: {problem}."
            )
    first = next(iter(logs.values()))
    every = tuple(release for log in logs.values() for release in log.releases)
    if first.unit == "user" and disjoint == TIME:
        named = {str(number): release for number, release in enumerate(every)}
        return compose(named, min(log.delta for log in logs.values()), one_log=True)
    return Composition(
        every,
        first.unit,
        first.adjacency,
        max(log.delta for log in logs.values()),
        max(log.epsilon_pld for log in logs.values()),
        max(log.epsilon_rdp for log in logs.values()),
        max(log.epsilon_sum for log in logs.values()),
        max(log.delta_sum for log in logs.values()),
    )


def require_within(
    budget: float, released: Mapping[str, Release], planned: Mapping[str, Release]
) -> Composition:
    """Refuses runs that would exceed a total, before their first step.

    Every release given counts, as if all were from one log: a run may be refused that
    disjoint logs would have allowed. The total is by PLD, so the settings of all runs
    must have been fixed without looking at earlier releases; see the module. A run that
    stopped early counts with all steps that it had planned.

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
    every = {name: _to_the_last_step(release) for name, release in every.items()}
    total = compose(every, one_log=True)
    if total.epsilon_pld <= budget:
        return total
    earlier = {name: _to_the_last_step(each) for name, each in released.items()}
    before = compose(earlier, one_log=True).epsilon_pld if released else 0.0
    raise validation.InputError(
        f"the budget is epsilon {budget:g}, of which {len(released)} earlier releases "
        f"spent {before:.4g}; with {' and '.join(planned)} it would be "
        f"{total.epsilon_pld:.4g} at delta {total.delta:.3g}. Nothing was spent: lower "
        "epsilon or steps, or raise the budget."
    )


def _epsilon(releases: Sequence[Release], delta: float, accountant: str) -> float:
    """ε for every unit, whichever role it had in each private choice."""
    choices = [r for r in releases if r.choice_epsilon is not None]
    if len(choices) > _MOST_CHOICES:
        raise validation.InputError(
            f"there are {len(choices)} releases with a private choice, of which at "
            f"most {_MOST_CHOICES} can be composed. Compose fewer at a time."
        )
    return max(
        epsilon_of_runs(_runs_of(releases, held_out), delta, accountant)
        + sum(r.choice_epsilon or 0.0 for r in held_out)
        for held_out in _subsets(choices)
    )


def _summed(releases: Sequence[Release]) -> tuple[float, float]:
    """ε and δ by basic composition; a release whose runs are another's counts once."""
    seen: set[str] = set()
    epsilon = delta = 0.0
    for release in sorted(releases, key=lambda each: len(each.runs), reverse=True):
        if release.choice_epsilon is None and set(release.runs) <= seen:
            continue
        seen |= set(release.runs)
        epsilon += _epsilon([_to_the_last_step(release)], release.delta, "pld")
        delta += release.delta
    return epsilon, delta


def _to_the_last_step(release: Release) -> Release:
    """Returns a release with all planned steps of its runs."""
    runs = {key: (plan, plan.spec.steps) for key, (plan, _) in release.runs.items()}
    return dataclasses.replace(release, runs=runs)


def _subsets(choices: Sequence[Release]) -> Iterator[tuple[Release, ...]]:
    for size in range(len(choices) + 1):
        yield from itertools.combinations(choices, size)


def _runs_of(
    releases: Sequence[Release], held_out: Sequence[Release]
) -> tuple[_Run, ...]:
    """Returns the runs of all releases but some, each once."""
    found: dict[str, _Run] = {}
    for release in releases:
        if not any(release is other for other in held_out):
            found.update(release.runs)
    return tuple(found.values())


def _require_one_cost(releases: Mapping[str, Release]) -> None:
    """Refuses releases that state other costs or trainings for one ledger's run."""
    seen: dict[str, tuple[str, _Run]] = {}
    for name, release in releases.items():
        for key, run in release.runs.items():
            before_name, before = seen.setdefault(key, (name, run))
            if before_name != name:
                require_one_run(release, (before_name, name))
            if (before[0].fingerprint, before[1]) != (run[0].fingerprint, run[1]):
                raise validation.InputError(
                    f"{before_name} and {name} state the same ledger head and other "
                    "runs, so one of them was forged. Compare both with the ledger: "
                    "tfdpsq verify CERTIFICATE --ledger=LEDGER."
                )
    stated: dict[str, tuple[str, str]] = {}
    for name, release in releases.items():
        for head, digest in release.trained.items():
            before_name, before_digest = stated.setdefault(head, (name, digest))
            if digest != before_digest:
                raise validation.InputError(
                    f"{before_name} and {name} state the same ledger head and another "
                    "training or other inputs: two runs from a copied ledger, which "
                    "may share their noise, so that no total holds for both, or one "
                    "was edited. Compare both with what they were made with."
                )


def _trained(certificate: Mapping[str, Any]) -> str:
    """Returns a digest of what a run's certificate states of training and inputs."""
    inputs = {**certificate["fingerprints"], "code": None}  # a newer one may go on
    stated = json.dumps([certificate["training"], inputs], sort_keys=True)
    return hashlib.sha256(stated.encode()).hexdigest()


def _keys(log: Composition) -> set[str]:
    return {key for release in log.releases for key in release.runs}


def _spec_of(release: Release):
    return next(iter(release.runs.values()))[0].spec
