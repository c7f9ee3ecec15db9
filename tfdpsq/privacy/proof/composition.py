"""Composition of releases: what several from private pairs cost together.

**One log.** Every release is a run of DP-SGD on the same units, so what an observer of
all of them learns is the composition of their events, over the steps that ran. Its ε is
computed by PLD at one δ, off which the truncation of every run is taken; that is less
than the sum of the stated ε. What is made from a released artefact and public data
carries the same certificate and costs nothing (post-processing): a run counts once, by
its run id.

**Neighbours.** Poisson batches protect a unit that is added or removed, shuffled ones a
unit x that is replaced by nothing, all others keeping their places (zero-out). Where
each unit's clipped gradient depends on that unit alone, or on all that were drawn, the
guarantee of Poisson batches holds for the second kind of neighbours, too: q = B/n is
the same, and so are the other units' draws U. While |U| < M no unit is cut off, and
with nothing in the place of x the sum is that of U, whether x is drawn or not; it is
N(f(U), ·) against the mixture that x makes of it, as where x is removed. That
|U| ≥ M is paid for in δ, as there (`accounting`). So releases of both kinds compose for
zero-out neighbours, and the total says so. Not so those whose rows are dealt to groups
(`clip_groups`): an empty place there can cost another unit its own.

**Disjoint logs.** A unit in one log only is protected by the composition of that log's
releases, whatever was released from the others (parallel composition): (largest ε,
largest δ) of the logs. Logs cut by time share no query, but they do share users; for
unit "user" they are composed like one log. Logs cut by user share neither. Where some
logs are disjoint and others may share units, every largest set of logs that one unit
can be in is composed, and the largest ε and the largest δ hold.

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
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfdpsq import validation
from tfdpsq.privacy.plan import LARGEST_EPSILON, PrivacyPlan, epsilon_of_runs
from tfdpsq.privacy.proof.certificate import adjacency_of

# How logs can be disjoint.
TIME, USER = DISJOINT = ("time", "user")
# Beyond this many sets of logs that can share a unit, all releases are composed.
_MOST_GROUPS = 1024
_Run = tuple[PrivacyPlan, int]


@dataclasses.dataclass(frozen=True)
class Release:
    """The part of a certificate that decides what its release costs.

    Attributes:
      runs: name of the run, by `run_key` -> (plan, steps executed), of all runs.
      pairs: fingerprint of the private pairs; `None` where none is stated.
      delta: δ of the certificate.
      trained: run id -> digest of what the certificate states of that run's
        training and data, where it does.
      nameless: whether a run has no run id, so that a second run of the same
        settings has an equal certificate.
      digest: that of the certificate, by which equal releases count once.
      before: the releases whose weights its run started from, each by itself.
      apart_from: fingerprints of earlier pairs that were declared to share no unit
        with its own.
      sharing_with: fingerprints of earlier pairs of which nothing was declared.
    """

    runs: Mapping[str, _Run]
    pairs: str | None
    delta: float
    nameless: bool = False
    trained: Mapping[str, str] = dataclasses.field(default_factory=dict)
    digest: str = ""
    before: tuple[Release, ...] = ()
    apart_from: frozenset[str] = frozenset()
    sharing_with: frozenset[str] = frozenset()

    @property
    def each(self) -> tuple[Release, ...]:
        """The releases before it, and its own run or runs alone."""
        return (*self.before, dataclasses.replace(self, before=()))

    @property
    def known(self) -> set[str]:
        """Fingerprints of pairs that it states how its own relate to."""
        return {part.pairs for part in self.each if part.pairs}


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
      runs_of_one_unit: number of runs, at most, that one unit can have had a part in.
      rests_on_declarations: whether runs were not composed because their logs were
        declared disjoint.
    """

    releases: tuple[Release, ...]
    unit: str
    adjacency: str
    delta: float
    epsilon_pld: float
    epsilon_rdp: float
    epsilon_sum: float
    delta_sum: float
    runs_of_one_unit: int
    rests_on_declarations: bool = False

    @property
    def runs(self) -> int:
        """Number of training runs, each counted once."""
        return len(self._runs)

    @property
    def stopped_early(self) -> int:
        """Number of runs that took fewer steps than planned."""
        return sum(steps < plan.spec.steps for plan, steps in self._runs.values())

    @property
    def pairs(self) -> set[str]:
        """Fingerprints of the releases' own pairs, where they are stated."""
        return {release.pairs for release in self.releases if release.pairs}

    @property
    def _runs(self) -> dict[str, _Run]:
        parts = _distinct(self.releases)
        return {key: run for part in parts for key, run in part.runs.items()}


def compose(
    releases: Mapping[str, Release],
    delta: float | None = None,
    one_log: bool = False,
    apart: Sequence[frozenset[str]] = (),
) -> Composition:
    """Composes all releases, as from one log where no certificate says otherwise.

    Args:
      releases: by name, for errors; see `budget.release_of`.
      delta: δ to compute ε at; `None` takes, of releases that can share a unit, the
        smallest, at which the composed ε is at least that of each.
      one_log: declares that pairs with other fingerprints belong to the same log,
        unless a certificate states that they share no unit, and none states that of
        the same two logs nothing was declared.
      apart: fingerprints of pairs, two by two, that are declared to share no unit.

    Raises:
      InputError: no release; other pairs or another unit; neighbours that no total is
        proved for; a run with two costs or two trainings; or δ above the sum of theirs,
        or one that truncation uses up.
    """
    if not releases:
        raise validation.InputError(
            "there is no release to compose. Give at least one certificate."
        )
    _require_alike(releases, one_log)
    _require_one_cost(releases)
    if delta is not None:
        validation.in_range("delta", delta, 0.0, 1.0, low_open=True, high_open=True)
    given = tuple(releases.values())
    parts = _distinct(given)
    groups = list(itertools.islice(_sharing(parts, apart), _MOST_GROUPS + 1))
    if len(groups) > _MOST_GROUPS:
        groups = [list(parts)]  # which is an upper bound
    found = [(*_together(group, delta), len(groups) > 1) for group in groups]
    specs = [plan.spec for part in parts for plan, _ in part.runs.values()]
    # Zero-out where one release needs it; see the module.
    widest = max(specs, key=lambda spec: spec.sampler == "shuffled")
    return Composition(
        given,
        widest.unit,
        adjacency_of(widest),
        *(max(numbers) for numbers in zip(*found)),
    )


def _together(parts: Sequence[Release], delta: float | None) -> tuple[Any, ...]:
    """Numbers of `Composition` from `delta` on, of releases that share units."""
    deltas = [release.delta for release in parts]
    if delta is None:
        delta = min(deltas)
    if delta > sum(deltas):
        raise validation.InputError(
            f"delta is {delta:g}, above {sum(deltas):.3g}, the sum of what releases "
            "state that one unit can be in: epsilon would look smaller than any of "
            "them promises. Give at most that sum."
        )
    rdp = _epsilon(parts, delta, "rdp")
    if LARGEST_EPSILON < rdp < math.inf:
        raise validation.InputError(
            f"epsilon by RDP is {rdp:.3g} for all releases together, which protects "
            "nothing"
        )
    pld = _epsilon(parts, delta, "pld")
    if not math.isfinite(pld):
        raise validation.InputError(
            f"delta is {delta!r}, which truncating the batches of these releases, and "
            "rounding, use up. Compute epsilon at a larger delta."
        )
    runs = len({key for part in parts for key in part.runs})
    return delta, pld, rdp, *_summed(parts), runs


def _distinct(releases: Sequence[Release]) -> tuple[Release, ...]:
    """Each release by itself, and those before it, once."""
    found: list[Release] = []
    for part in (part for release in releases for part in release.each):
        if not part.digest or all(part.digest != other.digest for other in found):
            found.append(part)
    return tuple(found)


def _sharing(
    parts: Sequence[Release], apart: Sequence[frozenset[str]]
) -> Iterator[list[Release]]:
    """Yields the largest sets of releases that one unit can have had a part in.

    These are the maximal cliques of the logs that are not declared disjoint, by the
    algorithm of Bron and Kerbosch 1973 with a pivot.
    """
    edges = {frozenset((log_of(p), other)) for p in parts for other in p.apart_from}
    edges -= {frozenset((log_of(p), other)) for p in parts for other in p.sharing_with}
    edges.update(apart)
    logs = list(dict.fromkeys(map(log_of, parts)))
    # Of logs that share units with each other and with the same others, one stands for
    # all: of any number in one clique, say, so that the recursion is no deeper.
    stands: dict[frozenset[str], str] = {}
    leader = {
        log: stands.setdefault(
            frozenset(o for o in logs if o == log or frozenset((log, o)) not in edges),
            log,
        )
        for log in logs
    }
    leaders = set(stands.values())
    shares = {log: same & leaders - {log} for same, log in stands.items()}

    def cliques(chosen: set[str], left: set[str], done: set[str]) -> Any:
        if not left and not done:
            yield chosen
            return
        pivot = max(sorted(left | done), key=lambda log: len(left & shares[log]))
        for log in sorted(left - shares[pivot]):
            yield from cliques(chosen | {log}, left & shares[log], done & shares[log])
            left, done = left - {log}, done | {log}

    for clique in cliques(set(), set(shares), set()):
        yield [part for part in parts if leader[log_of(part)] in clique]


def run_key(run_id: str | None, otherwise: str) -> str:
    """Names a run: by its id, or by what else tells it from all others."""
    return f"id {run_id}" if run_id else f"run {otherwise}"


def log_of(release: Release) -> str:
    """Returns the name of a release's log: the fingerprint of its pairs, if stated."""
    return release.pairs or f"pairs of {min(release.runs)}"


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
    parts = (*first.each, *other.each)
    specs = [plan.spec for p in parts for plan, _ in p.runs.values()]
    if len({spec.sampler for spec in specs}) > 1 and any(
        spec.clip_groups for spec in specs
    ):
        kinds = sorted({adjacency_of(spec) for spec in specs})
        return (
            f"their neighbours differ: {' and '.join(map(repr, kinds))}, and a run "
            "with clip_groups holds for the first kind alone"
        )
    if not one_log and not first.known & other.known:
        return (
            f"their pairs have the fingerprints {first.pairs} and {other.pairs}: "
            "other pairs, or the same under the key of another private directory"
        )
    return None


def as_one(releases: Sequence[Release]) -> Release:
    """Returns several as one, to be distinguished from others by `difference`."""
    first, *others = releases
    before = [part for release in others for part in release.each]
    return dataclasses.replace(first, before=(*first.before, *before))


def in_parallel(
    logs: Mapping[str, Composition], disjoint: str, delta: float | None = None
) -> Composition:
    """Composes releases from disjoint logs.

    Args:
      logs: the composition of each log, by its name.
      disjoint: "time", where every query is in one log, or "user", where every user is.
      delta: as `compose` takes it.

    Returns:
      (Largest ε, largest δ) of the logs; for unit "user" and logs cut by time, the
      composition of all of them, since a user can be in every log. A release whose
      weights a run started from counts to the log of its own pairs.

    Raises:
      InputError: no log; two with the same pairs or the same run, which are then not
        disjoint; or of another unit or adjacency.
    """
    validation.one_of("disjoint", disjoint, DISJOINT)
    if not logs:
        raise validation.InputError("there is no log. Give at least one.")
    apart = []
    for (name, log), (other_name, other) in itertools.combinations(logs.items(), 2):
        problem = difference(log.releases[0], other.releases[0], one_log=True)
        if not problem and (log.pairs & other.pairs or _keys(log) & _keys(other)):
            problem = "both hold releases of the same pairs: give them one name"
        if problem:
            raise validation.InputError(
                f"the logs {name} and {other_name} cannot be composed: {problem}."
            )
        couples = itertools.product(log.releases, other.releases)
        apart += [frozenset(map(log_of, couple)) for couple in couples]
    first = next(iter(logs.values()))
    every = [release for log in logs.values() for release in log.releases]
    named = {str(number): release for number, release in enumerate(every)}
    if not separates(disjoint, first.unit):
        apart = []
    return compose(named, delta, one_log=True, apart=apart)


def separates(disjoint: str, unit: str) -> bool:
    """Returns whether logs that are disjoint in this way share no unit."""
    return disjoint == USER or unit != "user"


def require_one_run(release: Release, places: Sequence[str]) -> None:
    """Refuses equal certificates of which nobody can say if they are of one run."""
    if release.nameless and len(places) > 1:
        raise validation.InputError(
            f"{places[0]} and {places[1]} hold equal certificates without a run id: "
            "two runs of the same settings, or copies of one, and a total would "
            "differ. Give one of them if they are copies; train with a directory to "
            "have a ledger."
        )


def to_the_last_step(release: Release) -> Release:
    """Returns a release with all planned steps of its runs."""
    runs = {key: (plan, plan.spec.steps) for key, (plan, _) in release.runs.items()}
    before = tuple(map(to_the_last_step, release.before))
    return dataclasses.replace(release, runs=runs, before=before)


def _epsilon(releases: Sequence[Release], delta: float, accountant: str) -> float:
    """ε of the runs of all releases, each once."""
    runs = {key: run for release in releases for key, run in release.runs.items()}
    return epsilon_of_runs(tuple(runs.values()), delta, accountant)


def _summed(releases: Sequence[Release]) -> tuple[float, float]:
    """ε and δ by basic composition; a release whose runs are another's counts once."""
    seen: set[str] = set()
    epsilon = delta = 0.0
    for release in sorted(releases, key=lambda each: len(each.runs), reverse=True):
        if set(release.runs) <= seen:
            continue
        seen |= set(release.runs)
        epsilon += _epsilon([to_the_last_step(release)], release.delta, "pld")
        delta += release.delta
    return epsilon, delta


def _require_alike(releases: Mapping[str, Release], one_log: bool) -> None:
    """Refuses releases whose pairs nothing relates, or of another kind of guarantee."""
    # One that continues others states how several logs relate.
    ordered = sorted(releases.items(), key=lambda item: -len(item[1].before))
    first_name, first = ordered[0]
    left = ordered[1:]
    joined = first
    while left:
        problems = {n: difference(joined, r, one_log) for n, r in left}
        # One at a time: two that each fit all before them need not fit each other.
        name = next((n for n, _ in left if not problems[n]), None)
        if name is None:
            name, problem = next(iter(problems.items()))
            raise validation.InputError(
                f"{first_name} and {name} cannot be composed: {problem}."
            )
        joined = as_one([joined, releases[name]])
        left = [(n, r) for n, r in left if n != name]


def _require_one_cost(releases: Mapping[str, Release]) -> None:
    """Refuses releases that state other costs or trainings for one ledger's run."""
    seen: dict[str, tuple[str, _Run]] = {}
    stated: dict[str, tuple[str, str]] = {}
    for name, part in ((n, part) for n, r in releases.items() for part in r.each):
        for key, run in part.runs.items():
            before_name, before = seen.setdefault(key, (name, run))
            if before_name != name:
                require_one_run(part, (before_name, name))
            if (before[0].fingerprint, before[1]) != (run[0].fingerprint, run[1]):
                raise validation.InputError(
                    f"{before_name} and {name} state one run id and other plans or "
                    "steps. Compare both with the ledger: "
                    "tfdpsq verify CERTIFICATE --ledger=LEDGER."
                )
        for run_id, digest in part.trained.items():
            before_name, before_digest = stated.setdefault(run_id, (name, digest))
            if digest != before_digest:
                raise validation.InputError(
                    f"{before_name} and {name} state one run id and another training "
                    "or other inputs: two runs from a copied directory, which may "
                    "share their noise, so no total holds for both. Use one of them."
                )


def _keys(log: Composition) -> set[str]:
    return {key for release in log.releases for key in release.runs}


def _spec_of(release: Release) -> Any:
    return next(iter(release.runs.values()))[0].spec
