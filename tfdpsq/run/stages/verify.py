"""Verify certificates: recompute each from its file alone, and compose several.

    tfdpsq verify certificate.json|DIRECTORY
    tfdpsq verify DIRECTORY --ledger=private/runs/NAME/ledger.jsonl
    tfdpsq verify DIRECTORY DIRECTORY...
    tfdpsq verify --disjoint=time JANUARY=DIRECTORY FEBRUARY=DIRECTORY

A certificate's ε follows from its own numbers: the plan, the noise and the steps that
were executed. It is recomputed by both accountants, and compared with what the file
states. That the run took place, only its ledger can show.

Several certificates are verified and then composed by PLD, each run once. That total
holds for runs whose settings were fixed without looking at earlier releases; for others
the sum of their epsilons holds, which is printed, too (see `privacy.proof.budget`).
What is in a workdir's `release/` counts, and what is in its `private/` does not.

Directories with one NAME are of one log. Without names, equal fingerprints of the pairs
are one log, and different ones are not composed: the same pairs have another
fingerprint in every private directory.

    --disjoint=time  logs with other names share no query (they may share users)
    --disjoint=user  logs with other names share no user, and so no query
    --delta=D        compute epsilon at this delta; by default the smallest stated one

Exit status: 0 if all certificates hold and were composed; 1 if one does not hold or
cannot be read, or no total is proved; 2 if the command or a ledger is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from tfdpsq import validation
from tfdpsq.privacy.proof import budget
from tfdpsq.privacy.proof import certificate as certificates
from tfdpsq.privacy.proof.ledger import read_ledger
from tfdpsq.run.frame.budget import Found
from tfdpsq.validation import InputError


@dataclasses.dataclass
class _Log:
    """Runs on the same pairs."""

    name: str
    runs: list[budget.Run]


def main(words: list[str]) -> tuple[int, str]:
    """Returns the exit status and the text to print."""
    flags = argparse.ArgumentParser("tfdpsq verify", allow_abbrev=False)
    flags.add_argument("paths", nargs="+", metavar="[NAME=]DIRECTORY")
    flags.add_argument("--ledger", action="append", default=[])
    flags.add_argument("--disjoint", default="", choices=budget.DISJOINT)
    flags.add_argument("--delta", type=float)
    given = flags.parse_args(words)
    if given.delta is not None:
        validation.in_range("delta", given.delta, 0, 1, low_open=True, high_open=True)
    problems: list[str] = []
    lines = _verified(given, problems)
    if problems:
        lines += [f"DOES NOT HOLD, problems: {len(problems)}"]
        lines += [f"- {problem}" for problem in problems]
    return int(bool(problems)), "\n".join(lines) + "\n"


def _verified(given: argparse.Namespace, problems: list[str]) -> list[str]:
    """Verifies all certificates, and composes them; adds to `problems`."""
    named: dict[str, Found] = {}
    for word in given.paths:
        name, equals, path = word.partition("=")
        # A path that exists as it stands has no name.
        if not equals or os.path.exists(word) or "/" in name:
            name, path = "", word
        named.setdefault(name, Found()).add(path)
    if "" in named and (len(named) > 1 or given.disjoint):
        raise InputError(
            f"{', '.join(given.paths)}: some logs have no name. Give each as "
            "NAME=DIRECTORY, or none and no --disjoint."
        )
    read = [
        (name, found.places[digest], certificate)
        for name, found in named.items()
        for digest, certificate in found.certificates.items()
    ]
    if given.ledger and len(read) != 1:
        raise InputError(
            f"--ledger is given with {len(read)} certificates. Give that of its run."
        )
    # Those that continue others state how several logs relate.
    read.sort(key=lambda item: -len([*certificates.parents_of(item[2])]))
    lines, logs = [], list[_Log]()
    for name, places, certificate in read:
        own = certificates.verify_certificate(certificate)
        lines += [*places, *_claims(certificate, own)]
        problems += [f"{places[0]}: {problem}" for problem in own.problems]
        if not own.problems:
            lines.append(_conclusion(certificate, given.ledger, problems))
            _add(logs, name, certificate)
    for found in named.values():
        problems += found.problems
        lines += [f"not counted, private: {path}" for path in found.private]
    if len(read) > 1:
        lines += _totals(logs, given.disjoint, given.delta, problems)
    return lines


# -- One certificate -------------------------------------------------------------------


def _claims(
    certificate: Mapping[str, Any], result: certificates.Verification
) -> list[str]:
    """Returns what a certificate states, beside what its numbers give."""
    if result.problems:
        return []
    stated, accounts = certificate["guarantee"], certificate["accounting"]
    steps = f"{accounts['steps_executed']} of {accounts['steps_planned']} steps"
    if "continuation" in certificate:
        runs = certificate["continuation"]["runs_counted"]
        steps = f"all {runs} runs, of which the last took {steps}"
    lines = [
        f"  states      epsilon {stated['epsilon']}, delta {stated['delta']} for "
        f"{stated['unit_in_words']}",
        f"  recomputed  epsilon {result.epsilon_pld:.6g} by PLD, "
        f"{result.epsilon_rdp:.6g} by RDP, for {steps}",
    ]
    if len(budget.sharing(certificates.runs_of(certificate))) > 1:
        lines.append("  rests on    what nothing checks: logs were declared disjoint")
    return lines


def _conclusion(
    certificate: Mapping[str, Any], ledgers: Sequence[str], problems: list[str]
) -> str:
    """Compares a certificate that holds with ledgers; adds to `problems`."""
    compared = set()
    for path in ledgers:
        paid = read_ledger(path)
        compared.add(paid.run)
        differences = certificates.ledger_problems(certificate, paid)
        problems += [f"{path}: {difference}" for difference in differences]
    if not certificate["private"]:
        return "  agrees with itself, and guarantees nothing"
    runs = 1 + len([*certificates.parents_of(certificate)])
    which = f"{len(compared)} of its {runs} ledgers" if ledgers else "no ledger"
    return f"  holds: it agrees with itself (compared with {which})"


# -- Several ---------------------------------------------------------------------------


def _add(logs: list[_Log], name: str, certificate: Mapping[str, Any]) -> None:
    """Adds a certificate that holds to its log; to a new one where there is none."""
    if not certificate["private"]:
        return
    runs = certificates.runs_of(certificate)
    pairs = {run.pairs for run in runs}
    for log in logs:
        # The same pairs have another fingerprint in every private directory.
        one_log = name or {run.pairs for run in log.runs} & pairs - {None}
        if log.name == name and one_log and not budget.difference([*log.runs, *runs]):
            log.runs += runs
            return
    logs.append(_Log(name, runs))


def _totals(
    logs: Sequence[_Log], disjoint: str, delta: float | None, problems: list[str]
) -> list[str]:
    """Composes each log and all of them; adds to `problems` where there is no total."""
    labels: list[str] = []
    lines: list[str] = []
    try:
        for number, log in enumerate(logs, 1):
            groups = budget.sharing(log.runs) if not log.name else [log.runs]
            total = budget.compose(groups, delta)
            label = log.name or f"log {number}"
            unit = f"{log.runs[0].plan.spec.unit}, {budget.adjacency_of(log.runs)}"
            labels.append(f"{label} ({unit})" if label in labels else label)
            runs = "1 run" if total.runs == 1 else f"{total.runs} runs"
            lines.append(f"{labels[-1]}, {runs}, unit {unit}: {_epsilon(total)}")
        if len(logs) < 2:
            return lines
        if not disjoint:
            raise InputError(
                "the releases are of other pairs or units, so no total holds for all. "
                "Name directories of one log alike (NAME=DIRECTORY), and add "
                "--disjoint=time or user if other names share no query or no user."
            )
        every = [run for log in logs for run in log.runs]
        keys = [{run.key for run in log.runs} for log in logs]
        if len(set.union(*keys)) < sum(map(len, keys)):
            raise InputError(
                "one run is in two logs, so they are not disjoint. Give them one name."
            )
        apart = budget.separates(disjoint, every[0].plan.spec.unit)
        total = budget.compose([log.runs for log in logs] if apart else [every], delta)
    except InputError as error:
        problems.append(f"{', '.join(labels)}: {error}" if labels else str(error))
        return lines
    return [*lines, f"all {len(labels)} logs disjoint by {disjoint}: {_epsilon(total)}"]


def _epsilon(total: budget.Total) -> str:
    composed = (
        f"epsilon {total.epsilon_pld:.6g} by PLD, {total.epsilon_rdp:.6g} by RDP, "
        f"at delta {total.delta:.3g}"
    )
    if total.runs_of_one_unit < total.runs:
        composed += ", with logs apart as they were declared"
    conditions = []
    if total.runs_of_one_unit > 1:
        conditions += ["all settings were fixed without looking at earlier releases"]
    if early := total.stopped_early:
        conditions += [f"no run stopped because of its weights ({early} stopped early)"]
    if not conditions:
        return composed
    return (
        f"{composed}, if {' and '.join(conditions)}; else the sum, "
        f"{total.epsilon_sum:.6g} at {total.delta_sum:.3g}"
    )
