"""Verify certificates: recompute each from its file alone, and compose several.

    tfdpsq verify certificate.json|DIRECTORY
    tfdpsq verify DIRECTORY --ledger=private/runs/NAME/ledger.jsonl
    tfdpsq verify DIRECTORY DIRECTORY...
    tfdpsq verify --disjoint=time JANUARY=DIRECTORY FEBRUARY=DIRECTORY

A certificate's ε is recomputed from its own numbers by both accountants, and all else
in the file is compared with what follows from it. That the run took place, the file
cannot show; its owner can pass the run's ledger.

Several certificates, or those below a directory, are verified and then composed by PLD,
each run once. That total holds for runs whose settings were fixed without looking at
earlier releases; for others the sum of their epsilons holds, which is printed, too (see
`privacy.proof.budget`). What is in a workdir's `private/` does not count.

Directories with one NAME are of one log. Without names, runs on pairs of one
fingerprint are, and others are not composed: the same pairs have another fingerprint in
every private directory.

    --disjoint=time  logs with other names share no query (they may share users)
    --disjoint=user  logs with other names share no user, and so no query
    --delta=D        compute epsilon at this delta; by default the smallest stated one

Exit status: 0 if all certificates hold and were composed; 1 if one does not hold or
cannot be read, or no total is proved; 2 if the command or a ledger is wrong.
"""

from __future__ import annotations

import argparse
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfdpsq import privacy, validation
from tfdpsq.privacy.proof import budget
from tfdpsq.privacy.proof import certificate as certificates
from tfdpsq.privacy.proof.certificate import FILE_NAME
from tfdpsq.privacy.proof.ledger import read_ledger
from tfdpsq.run.frame import places
from tfdpsq.run.frame.artefacts import class_stated
from tfdpsq.run.frame.places import Privacy
from tfdpsq.validation import InputError

_Log = tuple[str, list[budget.Run]]  # its name, or "", and runs on the same pairs
_Found = tuple[Mapping[str, Any], list[str]]  # a certificate, and where it lies
# The certificate itself, and what says that one is missing if there is none.
_MARKED = {FILE_NAME, *(name.rpartition("/")[2] for name in certificates.MARKED)}


def main(words: list[str]) -> tuple[int, str]:
    """Returns the exit status and the text to print."""
    flags = argparse.ArgumentParser("tfdpsq verify", allow_abbrev=False)
    flags.add_argument("paths", nargs="+", metavar="[NAME=]DIRECTORY")
    flags.add_argument("--ledger", action="append", default=[])
    flags.add_argument("--disjoint", default="", choices=budget.DISJOINT)
    flags.add_argument("--delta", type=float)
    given = flags.parse_args(words)
    if given.delta is not None:
        bounds = {"low_open": True, "high_open": True}
        validation.in_range("delta", given.delta, 0.0, 1.0, **bounds)
    problems: list[str] = []
    lines = _verified(given, problems)
    if problems:
        lines += [f"DOES NOT HOLD, problems: {len(problems)}"]
        lines += [f"- {problem}" for problem in problems]
    return int(bool(problems)), "\n".join(lines) + "\n"


def _verified(given: argparse.Namespace, problems: list[str]) -> list[str]:
    """Verifies all certificates, and composes them; adds to `problems`."""
    named: dict[str, dict[str, _Found]] = {}
    for word in given.paths:
        name, equals, path = word.partition("=")
        if not equals or os.path.exists(word) or "/" in name:
            name, path = "", word
        found = named.setdefault(name, {})
        _read(path, found, problems)
        if not found and not problems:
            raise InputError(
                f"{word}: there is no certificate of anything released. Give the "
                "workdir or the directory of an artefact that was."
            )
    if "" in named and (given.disjoint or len(named) > 1):
        raise InputError(
            f"{' '.join(given.paths)}: not all logs are named. Give each as "
            "NAME=DIRECTORY, one name for each log."
        )
    read = [(name, *one) for name, found in named.items() for one in found.values()]
    if given.ledger and len(read) != 1:
        raise InputError(
            f"--ledger is given with {len(read)} certificates. Give that of its run."
        )
    lines, logs = [], list[_Log]()
    # Those that continue others state how several logs relate.
    read.sort(key=lambda item: -len([*certificates.parents_of(item[1])]))
    for name, certificate, folders in read:
        result = certificates.verify_certificate(certificate)
        problems += [f"{folders[0]}: {problem}" for problem in result.problems]
        lines += folders
        if not result.problems:
            lines += _claims(certificate, result)
            lines.append(_compared(certificate, given.ledger, problems))
            if certificate["private"]:
                _add(logs, name, certificates.runs_of(certificate))
    return lines + (_totals(logs, given, problems) if len(read) > 1 else [])


def _read(path: str, found: dict[str, _Found], problems: list[str]) -> None:
    """Adds the certificates at a path to `found`, or to `problems` what is wrong."""
    for place in _places(path):
        is_file = os.path.isfile(place)
        read = certificates.load_certificate if is_file else privacy.read_certificate
        try:
            certificate = read(place)
        except InputError as error:
            problems.append(str(error))
            continue
        if certificate is None:
            continue
        _, known = found.setdefault(str(certificate.get("digest")), (certificate, []))
        if known and certificate["private"] and not certificate.get("run_id"):
            problems.append(
                f"{known[0]} and {place} hold equal certificates without a run "
                "id: two runs, or copies of one. Give one of them if they are copies."
            )
        known += [place] if place not in known else []


def _places(path: str) -> Iterator[str]:
    """Yields a certificate's file, or the artefacts below a directory that need one.

    Private ones are passed over, unless they are given themselves.
    """
    root = pathlib.Path(path)
    if not root.exists():
        raise InputError(f"{path!r} does not exist. Give a workdir or an output.")
    if root.is_file():
        yield path
    folders = {file.parent for name in _MARKED for file in root.rglob(name)}
    for folder in sorted(folders):
        is_part = not (folder / FILE_NAME).exists() and folder != root
        if is_part and (folder.parent / FILE_NAME).exists():
            continue  # of the artefact above, as a retriever's `model/`
        inside = places.PRIVATE in folder.relative_to(root).parts
        hidden = inside or class_stated(str(folder)) == Privacy.PRIVATE
        if folder == root or not hidden:
            yield str(folder)


# -- One certificate -------------------------------------------------------------------


def _claims(
    certificate: Mapping[str, Any], result: certificates.Verification
) -> Iterator[str]:
    states, accounting = certificate["guarantee"], certificate["accounting"]
    steps = f"{accounting['steps_executed']} of {accounting['steps_planned']} steps"
    if continuation := certificate.get("continuation"):
        counted = continuation["runs_counted"]
        steps = f"all {counted} runs, of which the last took {steps}"
    yield (
        f"  states      epsilon {states['epsilon']}, delta {states['delta']} for "
        f"{states['unit_in_words']}"
    )
    yield (
        f"  recomputed  epsilon {result.epsilon_pld:.6g} by PLD, "
        f"{result.epsilon_rdp:.6g} by RDP, for {steps}"
    )
    if len(budget.sharing(certificates.runs_of(certificate))) > 1:
        shared = {"time": "query", "user": "user"}
        chain = (certificate, *certificates.parents_of(certificate))
        found = [shared[each["disjoint"]] for each in chain if each.get("disjoint")]
        units = " and no ".join(dict.fromkeys(found))
        yield (
            f"  rests on    what nothing checks: no {units} is in two of the logs that "
            "were declared disjoint"
        )


def _compared(
    certificate: Mapping[str, Any], ledgers: Sequence[str], problems: list[str]
) -> str:
    """Compares a certificate that agrees with itself with ledgers; says the result."""
    paid = {path: read_ledger(path) for path in ledgers}
    for path, ledger in paid.items():
        differences = certificates.ledger_problems(certificate, ledger)
        problems += [f"{path}: {difference}" for difference in differences]
    if not certificate["private"]:
        return "  agrees with itself, and guarantees nothing"
    runs = 1 + len([*certificates.parents_of(certificate)])
    compared = len({ledger.run for ledger in paid.values()})
    which = f"{compared} of its {runs} ledgers" if ledgers else "no ledger"
    return f"  holds: it agrees with itself (compared with {which})"


# -- Several ---------------------------------------------------------------------------


def _add(logs: list[_Log], name: str, runs: list[budget.Run]) -> None:
    """Adds the runs of a certificate to their log; to a new one where there is none."""
    pairs = {run.pairs for run in runs}
    for known, log in logs:
        # The same pairs have another fingerprint in every private directory.
        one_log = name or {run.pairs for run in log} & pairs - {None}
        if known == name and one_log and not budget.difference([*log, *runs]):
            log += runs
            return
    logs.append((name, [*runs]))


def _totals(
    logs: Sequence[_Log], given: argparse.Namespace, problems: list[str]
) -> list[str]:
    """Composes each log and all of them; adds to `problems` where there is no total."""
    lines, disjoint = [], given.disjoint
    every = [run for _, log in logs for run in log]
    try:
        for number, (name, log) in enumerate(logs, 1):
            total = budget.compose([log] if name else budget.sharing(log), given.delta)
            unit, adjacency = log[0].plan.spec.unit, budget.adjacency_of(log)
            runs = "1 run" if total.runs == 1 else f"{total.runs} runs"
            label = f"{name or f'log {number}'}, {runs}, unit {unit}, {adjacency}"
            lines.append(f"{label}: {_epsilon(total)}")
        if len(logs) < 2:
            return lines
        if not disjoint:
            raise InputError(
                "the releases are of other pairs or units, so no total holds for all. "
                "Give one NAME=DIRECTORY name for each log, and add --disjoint=time or "
                "user if other names share no query or no user."
            )
        keys = [key for _, log in logs for key in {run.key for run in log}]
        if len(set(keys)) < len(keys):
            raise InputError("one run is in two logs. Give those logs one name.")
        apart = budget.separates(disjoint, every[0].plan.spec.unit)
        groups = [log for _, log in logs] if apart else [every]
        total = budget.compose(groups, given.delta)
        lines.append(f"all {len(logs)} logs disjoint by {disjoint}: {_epsilon(total)}")
    except InputError as error:
        problems.append(str(error))
    return lines


def _epsilon(total: budget.Total) -> str:
    composed = (
        f"epsilon {total.epsilon_pld:.6g} by PLD, {total.epsilon_rdp:.6g} by RDP, "
        f"at delta {total.delta:.3g}"
    )
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
    summed = f"{total.epsilon_sum:.6g} at {total.delta_sum:.3g}"
    return f"{composed}, if {' and '.join(conditions)}; else the sum, {summed}"
