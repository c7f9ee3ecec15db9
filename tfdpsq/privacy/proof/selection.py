"""One of several private runs, chosen by its results: what that costs, certified.

A grid of k runs is trained on the same units, and queries held out choose one. To say
of the chosen one what a single run costs would be false: which one it is depends on all
k. What is certified instead, for neighbours that differ in one query (where the
unit is a pair, in one pair: every word below then holds of pairs):

**A query that was trained on.** What is shown is made of the k runs' weights and of
held-out queries, which are the same for both neighbours. So it costs what the k runs
cost together: their composition, over all steps that ran, those of runs included that
came to nothing. The truncation of each adds to δ.

**A query that was held out.** All k runs have one law for both neighbours. Given their
weights, the only thing that depends on the query is the choice. Mode "accounted" draws
it by the exponential mechanism (`choice`), which costs its own ε and no δ. Mode
"declared" takes the highest score as it is, which no ε covers; it stands among the
private reads.

Whether a query is trained on or held out must depend on this query alone, and never
both may be true of it. Then a neighbour is of one kind or the other, and for any query
the guarantee is the larger ε of the two (parallel composition). The hyperparameters
that won are part of what is shown, and so covered by the same argument.

The k runs share the target evenly: each is planned for the same ε' at δ/k, as large as
their composition allows.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tfdpsq import validation
from tfdpsq.privacy import accounting
from tfdpsq.privacy.plan import PrivacyPlan, epsilon_of_runs, make_plan
from tfdpsq.privacy.proof import certificate, choice
from tfdpsq.privacy.proof.certificate_words import NOUNS
from tfdpsq.privacy.spec import PrivacySpec

METHODS = {True: "exponential mechanism", False: "highest score, read without noise"}
# An ε' of so many digits is the same on every machine.
_DIGITS = 6


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """A run that could have been chosen.

    Attributes:
      plan: what was run, to its last step.
      settings: what this run had of its own: {field: value}.
      ledger_head: `Ledger.head` of the ledger that paid for its steps.
      diverged: whether its weights came to nothing. It cannot be chosen, and costs the
        same.
    """

    plan: PrivacyPlan
    settings: Mapping[str, Any]
    ledger_head: str | None
    diverged: bool = False


@dataclasses.dataclass(frozen=True)
class Selection:
    """Several runs on the same units, and how one of them was chosen.

    Attributes:
      runs: all of them, by name.
      chosen: name of the one that is shown.
      target_epsilon: ε that all runs together must stay within.
      delta: δ of all runs together.
      choice_epsilon: ε of the choice by the exponential mechanism; `None`: the highest
        score was taken as it is.
      score: what a held-out query gives a run in [0, 1], in words.
      draw: the name of an accounted choice, new for every draw. Equal certificates are
        one release; two draws cost twice, also where they chose the same run.

    Raises:
      InputError: what no selection is.
    """

    runs: Mapping[str, TrainedRun]
    chosen: str
    target_epsilon: float
    delta: float
    choice_epsilon: float | None
    score: str
    draw: str | None = None

    def __post_init__(self) -> None:
        """Checks that the runs belong together."""
        if len(self.runs) < 2:
            raise validation.InputError(
                f"a selection has {len(self.runs)} runs; there must be at least two to "
                "choose among."
            )
        if self.chosen not in self.runs or self.runs[self.chosen].diverged:
            raise validation.InputError(
                f"the chosen run is {self.chosen!r}, which is none of those that could "
                "be chosen."
            )
        if self.choice_epsilon is not None:
            validation.positive("the epsilon of the choice", self.choice_epsilon)
        if self.draw is not None and (
            self.choice_epsilon is None or not re.fullmatch("[0-9a-f]{32}", self.draw)
        ):
            raise validation.InputError(
                f"draw is {validation.shown(self.draw)}; it must be 32 hexadecimal "
                "digits, for a choice by the exponential mechanism alone."
            )
        self._require_ledgers_of_their_own()
        for name, run in self.runs.items():
            for problem in self._problems(run.plan.spec):
                raise validation.InputError(f"run {name!r} of the selection {problem}.")

    def _require_ledgers_of_their_own(self) -> None:
        """Refuses two runs of one ledger, which composition would count once."""
        owner: dict[str, str] = {}
        for name, run in self.runs.items():
            if run.ledger_head and owner.setdefault(run.ledger_head, name) != name:
                raise validation.InputError(
                    f"runs {owner[run.ledger_head]!r} and {name!r} of the selection "
                    "have one ledger head, but every run has a ledger of its own."
                )

    def _problems(self, spec: PrivacySpec) -> Any:
        yield from requirements(spec)
        first = next(iter(self.runs.values())).plan.spec
        fields = (
            "unit",
            "num_units",
            "n_is_public",
            "accountant",
            "epsilon",
            "delta",
            "secure",
        )
        for field in fields:
            own, common = getattr(spec, field), getattr(first, field)
            if own != common:
                yield f"has {field} {own!r}, and another one {common!r}"
        if spec.private != math.isfinite(self.target_epsilon):
            yield f"has epsilon {spec.epsilon}, of {self.target_epsilon} in all"
        each = self.delta / len(self.runs)
        if spec.private and not math.isclose(spec.target_delta, each, rel_tol=1e-9):
            yield (
                f"has delta {spec.target_delta!r}, but the share of one of "
                f"{len(self.runs)} runs is {each!r}"
            )
        if not spec.private and self.choice_epsilon is not None:
            yield "has epsilon inf, with which a private choice protects nothing"

    @property
    def whole(self) -> PrivacySpec:
        """The chosen run's spec, with ε and δ of all runs together."""
        spec = self.runs[self.chosen].plan.spec
        delta = self.delta if spec.private else spec.delta
        return dataclasses.replace(spec, epsilon=self.target_epsilon, delta=delta)

    @property
    def steps(self) -> int:
        """Logical steps of all runs, each of which ran."""
        return sum(run.plan.spec.steps for run in self.runs.values())

    @property
    def truncation_delta(self) -> float:
        """The part of δ that truncating the batches of all runs uses up."""
        plans = [run.plan for run in self.runs.values()]
        return sum(plan.truncation_delta(plan.spec.steps) for plan in plans)

    @property
    def pld_interval(self) -> float:
        """The grid of privacy losses that PLD uses for all runs together."""
        plans = [run.plan for run in self.runs.values()]
        return min(accounting.pld_interval(plan.noise_multiplier) for plan in plans)

    def epsilon_of_training(self, accountant: str | None = None) -> float:
        """ε of all runs together, at their δ: for a query that was trained on.

        Args:
          accountant: "pld" or "rdp"; `None` takes that of the runs' specs.
        """
        plans = [run.plan for run in self.runs.values()]
        return _composed(plans, self.delta, accountant or plans[0].spec.accountant)

    def epsilon(self) -> float:
        """ε for any query, trained on or held out; see the module."""
        return max(self.epsilon_of_training(), self.choice_epsilon or 0.0)


def requirements(spec: PrivacySpec) -> list[str]:
    """Why a run cannot be one of a selection, for which another proof is needed."""
    problems = []
    if spec.unit == "user":
        problems.append(
            f"has unit {spec.unit!r}: a user can have queries among those that are "
            "trained on and among those held out, any number of them. Set unit to "
            "'query'"
        )
    if spec.sampler != "poisson":
        problems.append(
            f"has sampler {spec.sampler!r}, whose neighbours are others than those of "
            "the choice. Set sampler to 'poisson'"
        )
    return problems


def share_epsilon(
    specs: Sequence[PrivacySpec], epsilon: float, delta: float
) -> list[PrivacySpec]:
    """Shares a target among runs on the same units, evenly.

    Args:
      specs: what is to be run; their own ε and δ are not looked at.
      epsilon: ε for all of them together, finite.
      delta: δ for all of them together.

    Returns:
      The specs with the same ε' and δ/k each, ε' as large as their composition allows,
      within 1 %.

    Raises:
      InputError: no noise reaches the target.
    """

    def shared(each: float, **changes: Any) -> list[PrivacySpec]:
        each = accounting.rounded_down(each, _DIGITS)
        share = {"epsilon": each, "delta": delta / len(specs), **changes}
        return [dataclasses.replace(spec, **share) for spec in specs]

    def spent_by(accountant: str) -> Any:
        def spent(inverse: float) -> float:
            planned = shared(1 / inverse, accountant=accountant)
            # Runs that differ in what costs nothing, such as learning rates, are one.
            made = {spec: make_plan(spec) for spec in set(planned)}
            return _composed([made[spec] for spec in planned], delta, accountant)

        return spent

    # What is searched is 1/ε', with which the cost falls as it does with σ. Of k
    # Gaussian mechanisms, each has about 1/√k of their ε.
    inverse = math.sqrt(len(specs)) / epsilon
    inverse = accounting.secant(spent_by("rdp"), epsilon, inverse)
    if specs[0].accountant != "rdp":
        inverse = accounting.secant(spent_by("pld"), epsilon, inverse)
    return shared(1 / inverse)


def _composed(plans: Sequence[PrivacyPlan], delta: float, accountant: str) -> float:
    """ε at δ of all plans, each run to its last step."""
    runs = [(plan, plan.spec.steps) for plan in plans]
    return epsilon_of_runs(runs, delta, accountant)


def make_selection_certificate(
    selection: Selection,
    own: Mapping[str, Any],
    private_reads: Sequence[Mapping[str, str]],
) -> dict[str, Any]:
    """The certificate of the chosen run, which counts all runs and the choice.

    Args:
      selection: the runs, and how one was chosen.
      own: the chosen run's own certificate, by `make_certificate`; what it says of
        training and data is taken over.
      private_reads: see `make_certificate`.

    Raises:
      InputError: the runs spent more than their target.
    """
    spent = selection.epsilon_of_training()
    if spent > selection.target_epsilon:
        raise validation.InputError(
            f"the {len(selection.runs)} runs spent epsilon {spent:.6g} together, above "
            f"their target {selection.target_epsilon:g}: they were not planned "
            "together. Plan them by share_epsilon."
        )
    return certificate.sealed(
        computed_selection(selection),
        description=own["description"],
        sensitivity_argument=own["mechanism"]["sensitivity_argument"],
        training=own["training"],
        fingerprints=own["fingerprints"],
        private_reads=private_reads,
        ledger_head=selection.runs[selection.chosen].ledger_head,
    )


def computed_selection(selection: Selection) -> dict[str, Any]:
    """All of a chosen run's certificate that follows from the selection.

    `mechanism`, `sampler` and `spec` are of the chosen run; `guarantee` and
    `accounting` of all runs and the choice, which `selection` lists.
    """
    plan = selection.runs[selection.chosen].plan
    found = certificate.computed(plan, plan.spec.steps)
    whole = selection.whole
    # Not `found`'s: the ε of one run is not that of the one chosen among many.
    trained = {name: selection.epsilon_of_training(name) for name in ("pld", "rdp")}
    private = selection.choice_epsilon is not None
    number = certificate.json_number
    found["guarantee"].update(
        epsilon=number(selection.epsilon()),
        delta=whole.target_delta,
        unit_in_words=found["guarantee"]["unit_in_words"]
        + (
            ", whether it was trained on or had a part in the choice among runs"
            if private
            else ", if it was trained on; none of those that chose among runs"
        ),
    )
    found["accounting"].update(
        pld_interval=selection.pld_interval if whole.private else None,
        target_epsilon=number(whole.epsilon),
        steps_planned=selection.steps,
        steps_executed=selection.steps,
        releases_counted=selection.steps,
        epsilon_pld=number(trained["pld"]),
        epsilon_rdp=number(trained["rdp"]),
        delta_for_truncation=selection.truncation_delta,
    )
    found["warnings"] = [whole.delta_warning] if whole.delta_warning else []
    found["not_covered"] = _not_covered(found["not_covered"], selection)
    found["selection"] = {
        "method": METHODS[private],
        "in_words": _in_words(selection),
        "score": selection.score,
        "sensitivity": choice.SENSITIVITY if private else None,
        "noise_scale": choice.SENSITIVITY / selection.choice_epsilon
        if selection.choice_epsilon is not None
        else None,
        "epsilon_of_choice": selection.choice_epsilon,
        "epsilon_of_training": number(trained[plan.spec.accountant]),
        "runs_counted": len(selection.runs),
        "candidates": sum(not run.diverged for run in selection.runs.values()),
        "chosen": selection.chosen,
        **({"draw": selection.draw} if selection.draw else {}),
        "runs": {name: _entry(run) for name, run in selection.runs.items()},
    }
    return found


def _entry(run: TrainedRun) -> dict[str, Any]:
    spec = run.plan.spec
    recorded = spec.recorded().items()
    return {
        "settings": dict(run.settings),
        "diverged": run.diverged,
        "spec": {name: certificate.json_number(value) for name, value in recorded},
        "plan": run.plan.fingerprint,
        "noise_multiplier": run.plan.noise_multiplier,
        "noise_stddev": run.plan.noise_stddev,
        "sampling_probability": run.plan.sampling_probability,
        "max_batch_size": run.plan.max_batch_size,
        "steps_executed": spec.steps,
        "delta_for_truncation": run.plan.truncation_delta(spec.steps),
        "ledger_head": run.ledger_head,
    }


def _in_words(selection: Selection) -> str:
    runs = len(selection.runs)
    one, many = NOUNS[selection.whole.unit]
    trained = (
        f"{runs} runs were trained on the same {many}, and epsilon counts all of "
        "their steps."
    )
    if selection.choice_epsilon is None:
        return (
            f"{trained} The one with the highest score on {many} held out was taken, "
            f"without noise: for those {many} nothing is guaranteed."
        )
    return (
        f"{trained} One was drawn by the exponential mechanism, its chance "
        f"proportional to exp({selection.choice_epsilon!r} * S), with S the sum of the "
        f"scores that the {many} held out gave it. One {one} moves all sums the same "
        "way and by at most 1, so the choice costs each of them epsilon "
        f"{selection.choice_epsilon!r} and no delta. No {one} is among both, so the "
        f"larger epsilon of the two holds for every {one}."
    )


def _not_covered(lines: Sequence[str], selection: Selection) -> list[str]:
    hyperparameters = (
        "Hyperparameters other than those that the runs of the selection differ in, if "
        "they were chosen by looking at results on private queries."
    )
    if selection.choice_epsilon is None:
        more = (
            f"The queries held out, by whose scores one of {len(selection.runs)} runs "
            "was chosen: they were read without noise, and which run it was may tell "
            "of them."
        )
    else:
        more = (
            "The scores of the runs, which must never be shown: that of the choice "
            "alone is covered."
        )
    kept = [
        hyperparameters if line == certificate.HYPERPARAMETERS else line
        for line in lines
    ]
    return [*kept, more]
