"""A run that started from the released weights of earlier runs: the ε of all of them.

A generator of January's log is trained further on February's. Who sees both generators,
or what was made from them, has seen both runs, and what the second one guarantees alone
would not be all. Its certificate therefore holds the certificate of the weights that it
started from, and its (ε, δ) is for what both released together, for a unit of any of
the logs. Two neighbouring data sets differ in one unit; the mechanism is the earlier
runs, then this one on their weights.

**Logs that may share units** ("composed", declared as nothing). A unit can be in every
log. Given what the earlier runs released, this run is DP-SGD on its own log, started
from weights that are then fixed, so all events compose adaptively, by PLD at one δ. Its
settings must have been fixed without looking at what was released before; else the sum
of ε and of δ holds instead, and the certificate states that, too (see `composition`).

**Logs that were declared disjoint.** Each unit is in one log only.
A unit of an earlier log: this run reads released weights and a log without that unit,
the same for both neighbours. It is post-processing, whatever its settings.
A unit of this log: the earlier runs have one law for both neighbours. Given what they
released, this run costs its own (ε, δ), whatever its settings were chosen by.
So (largest ε, largest δ) holds for every unit. Logs cut by time share no query, but
they can share a user: with unit "user" they count as logs that share units.

The earlier certificate can itself be of a run that continued others. What was released
before need not be weights: a histogram of the same queries composes in the same way,
and then the two logs are one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tfdpsq import validation
from tfdpsq.privacy.plan import PrivacyPlan
from tfdpsq.privacy.proof import certificate, certificate_words, composition

_OF_EARLIER = "Of the runs before this one: "
_CONDITION = (
    "That holds if the settings of {runs} were fixed without looking at what was "
    "released before; else epsilon_sum at delta_sum holds, if a bound on it was fixed "
    "before the first release."
)
_NUMBER_OF_REPLACED = (
    "The number of units: a run before this one protects a unit that is replaced by "
    "nothing, all others keeping their places, and so do all of them together."
)


@dataclasses.dataclass(frozen=True)
class Continuation:
    """A run, and the certificate of the weights that it started from.

    Attributes:
      plan: what was run.
      steps: logical steps executed.
      pairs: fingerprint of its pairs.
      parent: certificate of the weights that it started from.
      earlier: what `parent` says of its release.
      disjoint: "time" if its log was declared to share no query with the earlier ones,
        "user" if no user; `None` if nothing was declared.
      run_id: `Ledger.run` of the ledger that paid for the steps.

    Raises:
      InputError: what no certificate can say: runs without privacy or of another unit,
        more than 12 earlier runs, or logs declared disjoint that are one, or whose
        fingerprints are not stated.
    """

    plan: PrivacyPlan
    steps: int
    pairs: str | None
    parent: Mapping[str, Any]
    earlier: composition.Release
    disjoint: str | None
    run_id: str | None = None

    def __post_init__(self) -> None:
        """Checks that there is a guarantee for all runs together."""
        if self.disjoint is not None:
            validation.one_of("disjoint", self.disjoint, composition.DISJOINT)
        if not (self.plan.spec.private and self.parent.get("private") is True):
            raise validation.InputError(
                "a run with epsilon inf is continued, or continues another one: no "
                "total is finite with it. Start from weights with a finite epsilon, "
                "or from public ones."
            )
        most = certificate.MOST_EARLIER
        if len(self.earlier.each) > most:
            raise validation.InputError(
                f"it continues {len(self.earlier.each)} releases, each from the "
                f"weights of the one before; {most} at most. Start from public weights."
            )
        if self.earlier.digest != certificate.digest_of(self.parent):
            raise validation.InputError(
                "earlier is not what parent says of its release. Give "
                "budget.release_of(parent)."
            )
        own = self.release("")
        problem = composition.difference(self.earlier, own, one_log=True)
        if problem:
            raise validation.InputError(
                f"what it starts from cannot be continued: {problem}. Give both runs "
                "the same unit and sampler, or start from public weights."
            )
        earlier_pairs = [part.pairs for part in self.earlier.each]
        if self.disjoint and not all([self.pairs, *earlier_pairs]):
            raise validation.InputError(
                f"disjoint is {self.disjoint!r}, but not every certificate states the "
                "fingerprint of its pairs, which tells the logs apart. Leave disjoint "
                "out: epsilon then composes all runs."
            )
        if self.disjoint and self.pairs in earlier_pairs:
            raise validation.InputError(
                f"disjoint is {self.disjoint!r}, but an earlier run was trained on "
                f"these very pairs ({self.pairs}). Declare nothing: epsilon then "
                "composes all runs."
            )
        key = composition.run_key(self.run_id, "")
        if self.run_id and any(key in part.runs for part in self.earlier.each):
            raise validation.InputError(
                "it has the run id of a run that it continues, but every run has "
                "a ledger of its own."
            )

    @property
    def apart_from(self) -> frozenset[str]:
        """Fingerprints of the earlier pairs that share no unit with its own."""
        if not self.disjoint or not self._separates:
            return frozenset()
        return frozenset(part.pairs for part in self.earlier.each if part.pairs)

    @property
    def _separates(self) -> bool:
        return composition.separates(self.disjoint or "", self.plan.spec.unit)

    def release(
        self, key: str, digest: str = "", trained: Mapping[str, str] | None = None
    ) -> composition.Release:
        """Returns what the run and all that it continues cost.

        Args:
          key: name of the run where it has no id.
          digest: that of its certificate, once there is one.
          trained: see `composition.Release`.
        """
        return composition.Release(
            {composition.run_key(self.run_id, key): (self.plan, self.steps)},
            self.pairs,
            self.plan.spec.target_delta,
            nameless=not self.run_id,
            trained=trained or {},
            digest=digest,
            before=self.earlier.each,
            apart_from=self.apart_from,
            sharing_with=frozenset(
                part.pairs
                for part in self.earlier.each
                if part.pairs and part.pairs not in (self.pairs, *self.apart_from)
            ),
        )

    def total(self) -> composition.Composition:
        """Returns the cost of all runs together.

        Raises:
          InputError: truncation uses up δ.
        """
        own = self.release("that is certified")
        return composition.compose({"the run": own}, one_log=True)


def make_continuation_certificate(
    continuation: Continuation,
    *,
    description: str,
    sensitivity_argument: str,
    training: Mapping[str, Any],
    fingerprints: Mapping[str, str],
    private_reads: Sequence[Mapping[str, str]] = (),
) -> dict[str, Any]:
    """The certificate of a run that started from released weights.

    Args:
      continuation: the run, and what it continues.
      description: see `make_certificate`, as the others.
      sensitivity_argument: why one unit moves the sum of clipped gradients by at most
        the plan's sensitivity.
      training: optimizer, engine, learning rate, trained parameters and so on.
      fingerprints: SHA-256 of the data and of the code; "pairs" is the continuation's.
      private_reads: further reads of private data, none of them covered by ε; those
        of the earlier runs are added.

    Raises:
      InputError: other pairs than the continuation's, or a value that JSON cannot hold.
    """
    if fingerprints.get("pairs") != continuation.pairs:
        raise validation.InputError(
            f"fingerprints['pairs'] is {fingerprints.get('pairs')!r}, but the "
            f"continuation's pairs are {continuation.pairs!r}. Give both the same."
        )
    return certificate.sealed(
        computed_continuation(continuation),
        description=description,
        sensitivity_argument=sensitivity_argument,
        training=training,
        fingerprints=fingerprints,
        private_reads=[*private_reads, *_earlier_reads(continuation)],
        run_id=continuation.run_id,
    )


def computed_continuation(continuation: Continuation) -> dict[str, Any]:
    """All of the certificate that follows from the run and from what it continues.

    `guarantee` and the two ε of `accounting` are of all runs together; `spec`,
    `mechanism`, `sampler` and the steps of `accounting` are of the last one.
    """
    plan = continuation.plan
    found = certificate.computed(plan, continuation.steps)
    total = continuation.total()
    alone = dict(found["guarantee"])
    number = certificate.json_number
    by_own = {"pld": total.epsilon_pld, "rdp": total.epsilon_rdp}
    found["guarantee"].update(
        epsilon=number(by_own[plan.spec.accountant]),
        delta=total.delta,
        adjacency=total.adjacency,
        unit_in_words=f"{alone['unit_in_words']}, of any of the logs that were "
        "trained on one after the other",
    )
    found["accounting"].update(
        epsilon_pld=number(total.epsilon_pld), epsilon_rdp=number(total.epsilon_rdp)
    )
    if total.adjacency != alone["adjacency"] and not plan.spec.n_is_public:
        found["not_covered"][-1] = _NUMBER_OF_REPLACED
    found["warnings"] = [*_warnings(continuation, total), *_earlier(continuation)]
    found["not_covered"] = [
        *found["not_covered"],
        *_not_covered(continuation),
        *_earlier(continuation, "not_covered", but=found["not_covered"]),
    ]
    found["continuation"] = {
        "in_words": _in_words(continuation, total),
        "disjoint": continuation.disjoint,
        "runs_counted": total.runs,
        "epsilon_of_this_run": alone["epsilon"],
        "delta_of_this_run": alone["delta"],
        "epsilon_sum": number(total.epsilon_sum),
        "delta_sum": total.delta_sum,
        "parent": dict(continuation.parent),
    }
    return found


def _in_words(continuation: Continuation, total: composition.Composition) -> str:
    one, many = certificate_words.NOUNS[continuation.plan.spec.unit]
    start = certificate_words.CAME_AFTER
    if continuation.apart_from:
        shared = "no user" if continuation.disjoint == composition.USER else "no query"
        return (
            f"{start} The log of this run was declared to share {shared} with the logs "
            f"before it. For {many} of those, this run is post-processing; for "
            f"{many} of this log, the weights that it started from are the same "
            f"whether or not the {one} is there. So the largest epsilon and the "
            "largest delta hold."
            + (
                f" {_CONDITION.format(runs='runs on one log')}"
                if total.runs_of_one_unit > 1
                else ""
            )
        )
    composed = f"{total.runs_of_one_unit} of {total.runs}"
    if total.runs_of_one_unit == total.runs:
        composed = f"all {total.runs}"
    why = (
        "The log of this run was declared to share no query with those before it, but "
        "a user can be in all of them"
        if continuation.disjoint
        else f"One {one} can be in the log of this run and in those before it"
    )
    condition = _CONDITION.format(runs="these runs")
    return f"{start} {why}, so epsilon composes {composed} runs. {condition}"


def _warnings(continuation: Continuation, total: composition.Composition) -> list[str]:
    """Warns of a large δ, and of what an early stop may mean for all runs."""
    spec, steps = continuation.plan.spec, continuation.steps
    found = [spec.delta_warning] if spec.delta_warning else []
    if total.delta > max(spec.target_delta, 0.5 / spec.num_units):
        found.append(
            f"delta {total.delta:.3g}, which an earlier run has, is above 1/(2n) = "
            f"{0.5 / spec.num_units:.3g} for the log of this one."
        )
    if total.stopped_early:
        found.append(
            f"{certificate.STOPPED} {steps} of {spec.steps} planned steps, and "
            f"{total.stopped_early} of all {total.runs} runs took fewer than planned. "
            "If that was decided by looking at noised weights, epsilon_sum at "
            "delta_sum, as stated under continuation, applies instead; if by losses or "
            "metrics of private data, that choice is a private read, which no epsilon "
            "covers."
        )
    return found


def _earlier(
    continuation: Continuation, name: str = "warnings", but: Sequence[str] = ()
) -> list[str]:
    """Lines of the parent's certificate on earlier runs, without those in `but`."""
    lines = continuation.parent.get(name)
    lines = lines if isinstance(lines, list) else []
    return [
        line if line.startswith(_OF_EARLIER) else f"{_OF_EARLIER}{line}"
        for line in lines
        if isinstance(line, str)
        and line not in but
        # What it says is of fewer runs; `_warnings` says it of all.
        and certificate.STOPPED not in line
    ]


def _earlier_reads(continuation: Continuation) -> list[dict[str, str]]:
    reads = continuation.parent.get("private_reads")
    return [
        {**read, "what": f"{_OF_EARLIER}{str(read['what']).removeprefix(_OF_EARLIER)}"}
        for read in (reads if isinstance(reads, list) else [])
        if isinstance(read, Mapping) and "what" in read
    ]


def _not_covered(continuation: Continuation) -> list[str]:
    if not continuation.apart_from:
        return []
    one, _ = certificate_words.NOUNS[continuation.plan.spec.unit]
    return [
        f"A {one} that is in several of the logs: they were declared to share none, "
        "which nothing here checks."
    ]
