"""Compose the certificates of all releases from the same pairs into one guarantee.

    python -m tfdpsq.run.budget DIRECTORY...
    python -m tfdpsq.run.budget --disjoint=time JANUARY=DIRECTORY FEBRUARY=DIRECTORY

Every certificate below the directories is verified, and the runs behind them are
composed by PLD over their executed steps, each run once, for each privacy unit. That
holds for runs whose settings were fixed without looking at earlier releases; for others
the sum of their epsilon does, which is printed too (see `privacy.proof.composition`).
Everything finished below a directory called `release` is counted. Elsewhere, what is in
directories called `private` was not released and is not; give one itself to count it.
A link below `release` that leads to something private is named, as nothing covers it;
one that leads to a part of an artefact, a file or a folder in it, counts as all of it.

Directories with one NAME are of one log, whatever the fingerprints of their pairs:
the same pairs have another fingerprint in every private directory. Without names, equal
fingerprints are one log, and other ones are not composed.

    --disjoint=time  logs with other names share no query (they may share users)
    --disjoint=user  logs with other names share no user, and so no query
    --delta=D        compute epsilon at this delta; by default the smallest stated one
    --budget=E       also say what is left of this total
    --json           print it as JSON

Exit status: 0 everything was composed, within the budget; 1 something could not be, or
the budget is exceeded; 2 something cannot be read, or the command is wrong.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from absl import app, flags

from tfdpsq import validation
from tfdpsq.privacy.proof import budget as budgets
from tfdpsq.privacy.proof import composition
from tfdpsq.privacy.proof.certificate import parents_of
from tfdpsq.run.core import command, spending

_USAGE = (
    "usage: python -m tfdpsq.run.budget [NAME=]DIRECTORY... [--disjoint=time|user] "
    "[--delta=D] [--budget=E] [--json]\n"
)


@dataclasses.dataclass
class _Log:
    """Releases that are composed with each other."""

    name: str
    releases: dict[str, composition.Release] = dataclasses.field(default_factory=dict)
    lines: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def budget(
    words: Sequence[str],
    disjoint: str = "",
    delta: float | None = None,
    limit: float | None = None,
) -> dict[str, Any]:
    """Composes all certificates in some directories.

    Args:
      words: directories or certificate files, all with a log's NAME= before them or
        none.
      disjoint: how logs with other names are disjoint, "time" or "user"; "" if nothing
        is declared.
      delta: δ to compute ε at; `None` takes the smallest stated one.
      limit: ε that all releases together are to stay within.

    Returns:
      "logs": of each log its "name", "unit", "adjacency", "epsilon" (by PLD),
      "epsilon_rdp", "delta", "epsilon_sum", "delta_sum", "runs", "runs_of_one_unit" (as
      many can have read one unit), "rests_on_declarations" (logs that were declared
      disjoint are not composed), "not_for" (whom they do not hold, or `None`),
      "stopped_early" (runs that took fewer steps than planned) and "releases";
      "together": the same numbers of all, or `None` where there is no such number;
      "not_composed": "what" and "why"; "not_released": directories passed over;
      "budget" and "left".

    Raises:
      InputError: no such directory, nothing in it, or names that do not fit.
    """
    named = _named(words, disjoint)
    refused: list[dict[str, str]] = []
    passed_over: list[str] = []
    logs: list[_Log] = []
    read: list[tuple[str, list[str], dict[str, Any]]] = []
    for name, path in named:
        found = spending.find_certificates(path)
        passed_over += found.unreleased
        refused += [{"what": at, "why": why} for at, why in found.refused.items()]
        for digest, certificate in found.certificates.items():
            read.append((name, found.places[digest], certificate))
    # First those that continue others, as they state how several logs relate.
    read.sort(key=lambda each: -len([*parents_of(each[2])]))
    for name, places, certificate in read:
        _add(logs, name, places, certificate, refused)
    composed: dict[str, composition.Composition] = {}
    shown: list[dict[str, Any]] = []
    for log in logs:
        total = composition.compose(log.releases, delta, one_log=bool(log.name))
        label = log.name or f"log {len(shown) + 1}"
        if label in composed:
            label = f"{label} ({total.unit}, {total.adjacency})"
        composed[label] = total
        shown.append({"name": label, **_numbers(total), "releases": log.lines})
    together = _together(composed, disjoint, delta, refused)
    left = None
    if limit is not None and together is not None and not refused:
        left = limit - together.epsilon_pld
    return {
        "logs": shown,
        "together": None if together is None else _numbers(together),
        "not_composed": refused,
        "not_released": passed_over,
        "budget": limit,
        "left": left,
    }


def _named(words: Sequence[str], disjoint: str) -> list[tuple[str, str]]:
    """Splits NAME=DIRECTORY; a path that exists as it stands has no name."""
    pairs = []
    for word in words:
        name, equals, path = word.partition("=")
        bare = not equals or os.path.exists(word) or "/" in name
        pairs.append(("", word) if bare else (name, path))
    unnamed = [path for name, path in pairs if not name]
    if unnamed and len(unnamed) < len(pairs):
        raise validation.InputError(
            f"{unnamed[0]} has no name, and other directories have. Name all logs, as "
            "NAME=DIRECTORY, or none."
        )
    if disjoint:
        validation.one_of("disjoint", disjoint, composition.DISJOINT)
        if unnamed:
            raise validation.InputError(
                f"disjoint is {disjoint!r}, but {unnamed[0]} has no name: the same "
                "pairs have another fingerprint in every private directory, so "
                "fingerprints do not tell which logs are disjoint. Give every "
                "directory as NAME=DIRECTORY, one name for each log."
            )
    return pairs


def _add(
    logs: list[_Log],
    name: str,
    places: Sequence[str],
    certificate: Mapping[str, Any],
    refused: list[dict[str, str]],
) -> None:
    """Adds a certificate to the log that it belongs to; a new one where there is none.

    Of a certificate that was seen in another directory only the place is added.
    """
    try:
        release = budgets.release_of(certificate, places[0])
        composition.require_one_run(release, places)
    except validation.InputError as error:
        refused.append({"what": places[0], "why": str(error)})
        return
    for log in logs:
        if log.name == name and not composition.difference(
            composition.as_one([*log.releases.values()]), release, bool(name)
        ):
            break
    else:
        log = _Log(name)
        logs.append(log)
    for line in log.lines:
        if line["digest"] == certificate["digest"]:
            line["places"] += [place for place in places if place not in line["places"]]
            try:
                composition.require_one_run(release, line["places"])
            except validation.InputError as error:
                refused.append({"what": places[0], "why": str(error)})
            return
    log.releases[places[0]] = release
    line = {
        "places": list(places),
        "digest": certificate["digest"],
        "description": certificate["description"],
        "epsilon": certificate["guarantee"]["epsilon"],
        "delta": certificate["guarantee"]["delta"],
        "protects": certificate["guarantee"]["unit_in_words"],
        "steps": certificate["accounting"]["steps_executed"],
        "of_the_last_run": "continuation" in certificate,
    }
    log.lines.append(line)


def _together(
    composed: Mapping[str, composition.Composition],
    disjoint: str,
    delta: float | None,
    refused: list[dict[str, str]],
) -> composition.Composition | None:
    """Returns the total of all logs; adds to `refused` why there is none."""
    if not composed:
        return None
    if len(composed) == 1:
        return next(iter(composed.values()))
    (first, log), *others = composed.items()
    if disjoint:
        try:
            return composition.in_parallel(composed, disjoint, delta)
        except validation.InputError as error:
            refused.append({"what": " and ".join(composed), "why": str(error)})
            return None
    for name, other in others:
        why = composition.difference(
            composition.as_one(log.releases), composition.as_one(other.releases)
        )
        if why is None or "fingerprints" in why:
            remedy = (
                "Name the logs: NAME=DIRECTORY with one name for directories of the "
                "same pairs, and --disjoint=time or user if logs of other names share "
                "no query or no user"
            )
            why = f"{why}. {remedy}" if why else remedy
        refused.append({"what": f"{first} and {name}", "why": f"{why}."})
    return None


def _numbers(total: composition.Composition) -> dict[str, Any]:
    return {
        "unit": total.unit,
        "adjacency": total.adjacency,
        "epsilon": total.epsilon_pld,
        "epsilon_rdp": total.epsilon_rdp,
        "delta": total.delta,
        "epsilon_sum": total.epsilon_sum,
        "delta_sum": total.delta_sum,
        "runs": total.runs,
        "runs_of_one_unit": total.runs_of_one_unit,
        "rests_on_declarations": total.rests_on_declarations,
        "not_for": total.not_for,
        "stopped_early": total.stopped_early,
    }


def as_text(found: Mapping[str, Any], disjoint: str = "") -> str:
    """Formats what `budget` returns as text."""
    lines = []
    for log in found["logs"]:
        lines.append(f"{log['name']}: unit {log['unit']}, {log['adjacency']}")
        for release in log["releases"]:
            first, *copies = release["places"]
            lines.append(
                f"  {first}: epsilon {release['epsilon']:.6g} at delta "
                f"{release['delta']:.3g} for {release['protects']}, "
                f"{release['steps']} steps"
                + (" of the last run" if release["of_the_last_run"] else "")
            )
            lines += [f"    also carried by {place}" for place in copies]
        lines.append(f"  together ({_runs(log['runs'])}): {_epsilon(log)}")
    together = found["together"]
    if together and len(found["logs"]) > 1:
        how = f"logs disjoint by {disjoint}"
        lines.append(f"all {len(found['logs'])} {how}: {_epsilon(together)}")
    if found["not_composed"]:
        lines.append(
            "NOT COMPOSED, so the numbers above are not all that was released:"
        )
        lines += [
            f"  - {each['what']}: {each['why']}" for each in found["not_composed"]
        ]
    if found["not_released"]:
        but = ", but for what is named above" if found["not_composed"] else ""
        lines.append(f"not counted, as it was not released{but}:")
        lines += [f"  - {place}" for place in found["not_released"]]
    if found["budget"] is not None:
        left = found["left"]
        lines.append(
            f"budget {found['budget']:g}: "
            + (
                "what is left is unknown"
                if left is None
                else f"{left:.4g} left"
                if left >= 0
                else f"EXCEEDED by {-left:.4g}"
            )
        )
    return "\n".join(lines) + "\n"


def _runs(number: int) -> str:
    return "1 run" if number == 1 else f"{number} runs"


def _epsilon(total: Mapping[str, Any]) -> str:
    composed = (
        f"epsilon {total['epsilon']:.6g} by PLD, {total['epsilon_rdp']:.6g} by RDP, "
        f"at delta {total['delta']:.3g}"
        + (f", but not for {total['not_for']}" if total["not_for"] else "")
    )
    if total["rests_on_declarations"]:
        composed += ", with logs apart as they were declared"
    conditions = []
    if total["runs_of_one_unit"] > 1:
        conditions.append(
            "the settings of every run were fixed without looking at earlier releases"
        )
    if total["stopped_early"]:
        conditions.append(
            "no run stopped early for what its weights showed "
            f"({total['stopped_early']} stopped early)"
        )
    if not conditions:
        return composed
    return (
        f"{composed}, if {' and '.join(conditions)}; else "
        f"{total['epsilon_sum']:.6g} at {total['delta_sum']:.3g}"
    )


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs the command and exits; `argv` is the command line, program first."""
    own = flags.FlagValues()
    flags.DEFINE_bool("json", False, "Print it as JSON.", flag_values=own)
    flags.DEFINE_string("disjoint", "", "How logs are disjoint.", flag_values=own)
    flags.DEFINE_float("delta", None, "Delta of the total.", flag_values=own)
    flags.DEFINE_float("budget", None, "Total to stay within.", flag_values=own)

    def run(words: Sequence[str]) -> tuple[int, str]:
        if not words:
            raise app.UsageError("")
        if own.budget is not None:
            validation.positive("budget", own.budget)
        if own.delta is not None:
            validation.in_range(
                "delta", own.delta, 0.0, 1.0, low_open=True, high_open=True
            )
        found = budget(words, own.disjoint, own.delta, own.budget)
        text = (
            json.dumps(found, indent=1) + "\n"
            if own.json
            else as_text(found, own.disjoint)
        )
        exceeded = found["left"] is not None and found["left"] < 0
        return int(bool(found["not_composed"]) or exceeded), text

    command.script(run, own, argv, __doc__, _USAGE)


if __name__ == "__main__":
    main()
