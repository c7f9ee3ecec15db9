"""Recomputes the guarantee of a certificate from its file alone.

    python -m tfdpsq.run.verify certificate.json
    python -m tfdpsq.run.verify certificate.json --ledger=private/runs/NAME/ledger.jsonl

Without the ledger it needs neither data nor model nor configuration, and says
whether the certificate is true of itself: every number follows from the others, ε
from the steps executed by both accountants, and the digest from all of it. It
cannot say whether the run took place: whoever makes up all numbers consistently,
digest included, is not found out. The owner of the private data can pass the ledger
of the run, which must then have paid for exactly these steps of this plan.

Exit status: 0 the certificate holds, 1 it does not, 2 it or the ledger cannot be
read, or the command is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from absl import app, flags  # noqa: E402

from tfdpsq.privacy import certificate as certificates  # noqa: E402
from tfdpsq.privacy import verification  # noqa: E402
from tfdpsq.privacy.ledger import read_ledger  # noqa: E402
from tfdpsq.run import command  # noqa: E402

_USAGE = "usage: python -m tfdpsq.run.verify CERTIFICATE [--ledger=LEDGER]\n"


def verify(path: str, ledger: str | None = None) -> tuple[bool, str]:
    """Verifies a certificate.

    Args:
      path: the certificate.
      ledger: the ledger of the run, which only the data's owner has.

    Returns:
      Whether it holds, and what to tell the reader.

    Raises:
      DataError: the certificate or the ledger cannot be read.
    """
    certificate = certificates.load_certificate(path)
    result = verification.verify_certificate(certificate)
    problems = result.problems
    if ledger is not None:
        problems += verification.ledger_problems(certificate, read_ledger(ledger))
    lines = [path, *_claims(certificate, result)]
    if problems:
        lines += [f"  DOES NOT HOLD, problems: {len(problems)}"]
        lines += [f"  - {problem}" for problem in problems]
    elif certificate["private"]:
        compared = "and with the ledger" if ledger else "(not compared with a ledger)"
        lines += [f"  holds: it agrees with itself {compared}"]
    else:
        lines += ["  agrees with itself, and guarantees nothing"]
    return not problems, "\n".join(lines) + "\n"


def _claims(
    certificate: Mapping[str, Any], result: verification.Verification
) -> list[str]:
    def at(section: str, key: str) -> Any:
        found = certificate.get(section)
        return found.get(key) if isinstance(found, Mapping) else None

    return [
        f"  states      epsilon {at('guarantee', 'epsilon')}, "
        f"delta {at('guarantee', 'delta')} for {at('guarantee', 'unit_in_words')}",
        f"  recomputed  epsilon {result.epsilon_pld:.6g} by PLD, "
        f"{result.epsilon_rdp:.6g} by RDP, for {at('accounting', 'steps_executed')} "
        f"of {at('accounting', 'steps_planned')} steps",
    ]


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs the command and exits.

    Args:
      argv: the command line, program first; `None` takes the process's.
    """
    own = flags.FlagValues()
    flags.DEFINE_string("ledger", None, "The ledger of the run.", flag_values=own)

    def run(words: Sequence[str]) -> tuple[int, str]:
        if len(words) != 1:
            raise app.UsageError("")
        holds, text = verify(words[0], own.ledger)
        return 0 if holds else 1, text

    command.script(run, own, argv, __doc__, _USAGE)


if __name__ == "__main__":
    main()
