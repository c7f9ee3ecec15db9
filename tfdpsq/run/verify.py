"""Verify a certificate: recompute its guarantee from its file alone.

    python -m tfdpsq.run.verify certificate.json|DIRECTORY
    python -m tfdpsq.run.verify certificate.json --ledger=private/runs/NAME/ledger.jsonl

Without the ledger it needs neither data nor model nor configuration, and checks the
certificate against itself: every number follows from the others, ε from the executed
steps by both accountants, and the digest from all of it. Of a directory it also checks
that files next to the certificate state no other digest. It cannot check that the run
took place: a consistent forgery, digest included, passes. The owner of the private data
can pass the run's ledger, which must then have paid for exactly these steps of this
plan; for a run chosen among several, the ledgers of all, each with its own `--ledger`.
No ledger holds the epsilon of such a choice, which is the maker's word.

Exit status: 0 the certificate holds, 1 it does not, 2 it or the ledger cannot be read,
or the command is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from absl import app, flags

from tfdpsq import validation
from tfdpsq.privacy.proof import certificate as certificates
from tfdpsq.privacy.proof import certificate_files, verification
from tfdpsq.privacy.proof.certified import continuation_of
from tfdpsq.privacy.proof.ledger import read_ledger
from tfdpsq.run.core import command

_USAGE = "usage: python -m tfdpsq.run.verify CERTIFICATE|DIRECTORY [--ledger=LEDGER]\n"


def verify(path: str, ledgers: Sequence[str] = ()) -> tuple[bool, str]:
    """Verifies a certificate, or that of what a directory holds.

    Only the data's owner has the ledgers, of the run or of those it was chosen among.

    Returns:
      Whether it holds, and a report for the reader.

    Raises:
      InputError: a ledger's path is empty.
      DataError: the certificate or the ledger cannot be read.
    """
    for ledger in ledgers:
        validation.given_path("--ledger", ledger)
    folder = path if os.path.isdir(path) else ""
    if folder:
        path = os.path.join(folder, certificates.FILE_NAME)
        if not os.path.isfile(path):
            certificate_files.read_certificate(folder)  # a mark says that it is missing
    certificate = certificates.load_certificate(path)
    result = verification.verify_certificate(certificate)
    problems = result.problems
    if folder:
        problems += _problems_beside(folder)
    heads = set()
    for ledger in () if problems else ledgers:
        paid = read_ledger(ledger)
        heads.add(paid.head)
        found = verification.ledger_problems(certificate, paid)
        problems += tuple(f"{ledger}: {problem}" for problem in found)
    lines = [path, *_claims(certificate, result)]
    lines += [f"  warning     {warning}" for warning in result.warnings]
    if problems:
        lines += [f"  DOES NOT HOLD, problems: {len(problems)}"]
        lines += [f"  - {problem}" for problem in problems]
    elif certificate["private"]:
        compared = "(not compared with a ledger)"
        if ledgers:
            runs = sum(
                len(each.get("selection", {}).get("runs", {})) or 1
                for each in (certificate, *certificates.parents_of(certificate))
            )
            compared = "and with the ledger"
            if runs > 1:
                compared = f"and with {len(heads)} of the {runs} ledgers"
        lines += [f"  holds: it agrees with itself {compared}"]
    else:
        lines += ["  agrees with itself, and guarantees nothing"]
    return not problems, "\n".join(lines) + "\n"


def _problems_beside(folder: str) -> tuple[str, ...]:
    """Returns what the files of a directory say against the certificate in it."""
    try:
        certificate_files.read_certificate(folder)
    except validation.DataError as error:
        return (str(error),)
    return ()


def _claims(
    certificate: Mapping[str, Any], result: verification.Verification
) -> list[str]:
    def at(section: str, key: str) -> Any:
        found = certificate.get(section)
        return found.get(key) if isinstance(found, Mapping) else None

    chosen = certificate.get("selection")
    runs = chosen.get("runs") if isinstance(chosen, Mapping) else None
    steps = f"{at('accounting', 'steps_executed')} of"
    steps += f" {at('accounting', 'steps_planned')} steps"
    if isinstance(runs, Mapping):
        steps = (
            f"the {at('accounting', 'steps_executed')} steps of {len(runs)} runs; "
            f"choosing one of them: epsilon {at('selection', 'epsilon_of_choice')}"
        )
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
    chain = (certificate, *certificates.parents_of(certificate))
    lines = []
    if any(
        each.get("selection", {}).get("epsilon_of_choice") is not None for each in chain
    ):
        lines.append(
            "  rests on    the maker's word: no ledger holds the epsilon of the choice"
        )
    if "continuation" not in certificate or not (
        continuation_of(certificate).total().rests_on_declarations
    ):
        return lines
    shared = {"time": "query", "user": "user"}
    found = [
        shared.get(str(entry["disjoint"]), "unit")
        for each in chain
        if isinstance(entry := each.get("continuation"), Mapping)
        and entry.get("disjoint")
    ]
    units = " and no ".join(dict.fromkeys(found))
    return [
        *lines,
        f"  rests on    what nothing checks: no {units} is in two of the logs that "
        "were declared disjoint",
    ]


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs the command and exits; `argv` is the command line, program first."""
    own = flags.FlagValues()
    flags.DEFINE_multi_string("ledger", [], "The ledger of a run.", flag_values=own)

    def run(words: Sequence[str]) -> tuple[int, str]:
        if len(words) != 1:
            raise app.UsageError("")
        holds, text = verify(words[0], own.ledger)
        return 0 if holds else 1, text

    command.script(run, own, argv, __doc__, _USAGE)


if __name__ == "__main__":
    main()
