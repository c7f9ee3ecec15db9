"""Verify certificates: recompute each from its file alone, and compose several.

    python -m tfdpsq.run.verify certificate.json|DIRECTORY
    python -m tfdpsq.run.verify DIRECTORY --ledger=private/runs/NAME/ledger.jsonl
    python -m tfdpsq.run.verify DIRECTORY DIRECTORY...
    python -m tfdpsq.run.verify --disjoint=time JANUARY=DIRECTORY FEBRUARY=DIRECTORY

A certificate's ε follows from its own numbers: the plan, the noise and the steps that
were executed. It is recomputed by both accountants, and everything else in the file is
compared with what follows from it. That the run took place as stated, the file cannot
show; its owner can pass the run's ledger.

Several certificates, or a directory with several below it, are verified and then
composed by PLD, each run once, for each privacy unit. That total holds for runs whose
settings were fixed without looking at earlier releases; for others the sum of their
epsilons holds, which is printed, too (see `privacy.proof.budget`). What is in a
workdir's `release/` counts, and what is in its `private/` does not.

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

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from absl import app, flags

from tfdpsq import validation
from tfdpsq.privacy.proof import budget
from tfdpsq.privacy.proof import certificate as certificates
from tfdpsq.privacy.proof.ledger import read_ledger
from tfdpsq.run.core import command, spending

_USAGE = (
    "usage: python -m tfdpsq.run.verify [NAME=]CERTIFICATE|DIRECTORY... "
    "[--ledger=LEDGER] [--disjoint=time|user] [--delta=D]\n"
)


@dataclasses.dataclass
class _Log:
    """Runs on the same pairs."""

    name: str
    runs: list[budget.Run] = dataclasses.field(default_factory=list)


def verify(
    words: Sequence[str],
    ledgers: Sequence[str] = (),
    disjoint: str = "",
    delta: float | None = None,
) -> tuple[bool, str]:
    """Verifies all certificates in some directories, and composes them.

    Args:
      words: certificate files and directories, each with a log's NAME= before it or
        none.
      ledgers: ledgers to compare a single certificate with; only the data's owner has
        them.
      disjoint: how logs with other names are disjoint, "time" or "user"; "" if nothing
        is declared.
      delta: δ to compute the total's ε at; `None` takes the smallest stated one.

    Returns:
      Whether all hold and were composed, and a report.

    Raises:
      InputError: no such directory, nothing in it, or arguments that do not fit.
      DataError: a ledger cannot be read.
    """
    problems: list[str] = []
    lines: list[str] = []
    logs: list[_Log] = []
    found: dict[str, spending.Found] = {}
    for name, path in _named(words):
        found.setdefault(name, spending.Found()).add(spending.find_certificates(path))
    if disjoint:
        validation.one_of("disjoint", disjoint, budget.DISJOINT)
        if "" in found:
            raise validation.InputError(
                "disjoint is given and not all logs are named. Give each as "
                "NAME=DIRECTORY, one name for each log."
            )
    count = sum(len(each.certificates) for each in found.values())
    if ledgers and count != 1:
        raise validation.InputError(
            f"--ledger is given with {count} certificates. Give the one of its run."
        )
    # Those that continue others state how several logs relate.
    read = [
        (name, each.places[digest], certificate)
        for name, each in found.items()
        for digest, certificate in each.certificates.items()
    ]
    read.sort(key=lambda item: -len([*certificates.parents_of(item[2])]))
    for name, places, certificate in read:
        lines += _one(places, certificate, ledgers, problems)
        _add(logs, name, certificate)
    for each in found.values():
        problems += each.ambiguous
        problems += [f"{path}: {why}" for path, why in each.refused.items()]
        lines += [f"not counted, private: {path}" for path in each.unreleased]
    if count > 1:
        lines += _totals(logs, disjoint, delta, problems)
    if problems:
        lines += [f"DOES NOT HOLD, problems: {len(problems)}"]
        lines += [f"- {problem}" for problem in problems]
    return not problems, "\n".join(lines) + "\n"


def _named(words: Sequence[str]) -> list[tuple[str, str]]:
    """Splits NAME=DIRECTORY; a path that exists as it stands has no name."""
    pairs = []
    for word in words:
        name, equals, path = word.partition("=")
        bare = not equals or os.path.exists(word) or "/" in name
        pairs.append(("", word) if bare else (name, path))
    if len({bool(name) for name, _ in pairs}) > 1:
        raise validation.InputError(
            f"{', '.join(words)}: some directories have a name and others have none. "
            "Name all logs, as NAME=DIRECTORY, or none."
        )
    return pairs


def _one(
    places: Sequence[str],
    certificate: Mapping[str, Any],
    ledgers: Sequence[str],
    problems: list[str],
) -> list[str]:
    """Verifies one certificate; adds to `problems`, and returns its lines."""
    result = certificates.verify_certificate(certificate)
    problems += [f"{places[0]}: {problem}" for problem in result.problems]
    lines = [places[0], *_claims(certificate, result)]
    lines += [f"  copy        {place}" for place in places[1:]]
    if result.problems:
        return lines
    compared = set()
    for path in ledgers:
        paid = read_ledger(path)
        compared.add(paid.run)
        differences = certificates.ledger_problems(certificate, paid)
        problems += [f"{path}: {difference}" for difference in differences]
    if not certificate["private"]:
        return [*lines, "  agrees with itself, and guarantees nothing"]
    runs = 1 + sum(1 for _ in certificates.parents_of(certificate))
    which = f"{len(compared)} of its {runs} ledgers" if ledgers else "no ledger"
    return [*lines, f"  holds: it agrees with itself (compared with {which})"]


def _claims(
    certificate: Mapping[str, Any], result: certificates.Verification
) -> list[str]:
    def at(section: str, key: str) -> Any:
        entries = certificate.get(section)
        return entries.get(key) if isinstance(entries, Mapping) else None

    steps = f"{at('accounting', 'steps_executed')} of"
    steps += f" {at('accounting', 'steps_planned')} steps"
    if at("continuation", "runs_counted"):
        counted = validation.shown(at("continuation", "runs_counted"))
        steps = f"all {counted} runs, of which the last took {steps}"
    return [
        f"  states      epsilon {at('guarantee', 'epsilon')}, "
        f"delta {at('guarantee', 'delta')} for {at('guarantee', 'unit_in_words')}",
        f"  recomputed  epsilon {result.epsilon_pld:.6g} by PLD, "
        f"{result.epsilon_rdp:.6g} by RDP, for {steps}",
        *([] if result.problems else _declared(certificate)),
    ]


def _declared(certificate: Mapping[str, Any]) -> list[str]:
    """Returns lines on what the stated epsilon rests on and nothing checks."""
    runs = certificates.runs_of(certificate)
    if len(budget.sharing(runs)) < 2:
        return []
    shared = {"time": "query", "user": "user"}
    chain = (certificate, *certificates.parents_of(certificate))
    found = [shared[each["disjoint"]] for each in chain if each.get("disjoint")]
    units = " and no ".join(dict.fromkeys(found))
    return [
        f"  rests on    what nothing checks: no {units} is in two of the logs that "
        "were declared disjoint",
    ]


def _add(logs: list[_Log], name: str, certificate: Mapping[str, Any]) -> None:
    """Adds a certificate that holds to its log; to a new one where there is none."""
    if certificates.verify_certificate(certificate).problems:
        return
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
    composed: dict[str, _Log] = {}
    lines: list[str] = []
    for number, log in enumerate(logs, 1):
        groups = budget.sharing(log.runs) if not log.name else [log.runs]
        try:
            total = budget.compose(groups, delta)
        except validation.InputError as error:
            problems.append(str(error))
            return lines
        label = log.name or f"log {number}"
        unit = log.runs[0].plan.spec.unit
        adjacency = budget.adjacency_of(log.runs)
        if label in composed:
            label = f"{label} ({unit}, {adjacency})"
        composed[label] = log
        runs = "1 run" if total.runs == 1 else f"{total.runs} runs"
        lines.append(f"{label}, {runs}, unit {unit}, {adjacency}: {_epsilon(total)}")
    if len(composed) < 2:
        return lines
    if not disjoint:
        problems.append(
            f"{', '.join(composed)}: the releases are of other pairs or units, so no "
            "total holds for all. Name directories of one log alike (NAME=DIRECTORY), "
            "and add --disjoint=time or user if other names share no query or no user."
        )
        return lines
    apart = [log.runs for log in logs]
    every = [run for log in logs for run in log.runs]
    unit = every[0].plan.spec.unit
    try:
        if len({run.key for run in every}) < sum(map(len, map(_keys, logs))):
            raise validation.InputError(
                "one run is in two of them, so they are not disjoint. Give them one "
                "name."
            )
        disjoint_groups = apart if budget.separates(disjoint, unit) else [every]
        total = budget.compose(disjoint_groups, delta)
    except validation.InputError as error:
        problems.append(f"{' and '.join(composed)}: {error}")
        return lines
    return [
        *lines,
        f"all {len(composed)} logs disjoint by {disjoint}: {_epsilon(total)}",
    ]


def _keys(log: _Log) -> set[str]:
    return {run.key for run in log.runs}


def _epsilon(total: budget.Total) -> str:
    composed = (
        f"epsilon {total.epsilon_pld:.6g} by PLD, {total.epsilon_rdp:.6g} by RDP, "
        f"at delta {total.delta:.3g}"
    )
    if total.runs_of_one_unit < total.runs:
        composed += ", with logs apart as they were declared"
    conditions = []
    if total.runs_of_one_unit > 1:
        conditions.append(
            "the settings of every run were fixed without looking at earlier releases"
        )
    if total.stopped_early:
        conditions.append(
            "no run stopped early for what its weights showed "
            f"({total.stopped_early} stopped early)"
        )
    if not conditions:
        return composed
    return (
        f"{composed}, if {' and '.join(conditions)}; else the sum, "
        f"{total.epsilon_sum:.6g} at {total.delta_sum:.3g}"
    )


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs the command and exits; `argv` is the command line, program first."""
    own = flags.FlagValues()
    flags.DEFINE_multi_string("ledger", [], "The ledger of a run.", flag_values=own)
    flags.DEFINE_string("disjoint", "", "How logs are disjoint.", flag_values=own)
    flags.DEFINE_float("delta", None, "Delta of the total.", flag_values=own)

    def run(words: Sequence[str]) -> tuple[int, str]:
        if not words:
            raise app.UsageError("")
        if own.delta is not None:
            validation.in_range(
                "delta", own.delta, 0.0, 1.0, low_open=True, high_open=True
            )
        holds, text = verify(words, own.ledger, own.disjoint, own.delta)
        return 0 if holds else 1, text

    command.script(run, own, argv, __doc__, _USAGE)


if __name__ == "__main__":
    main()
