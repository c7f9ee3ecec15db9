"""Parts of a job's config that may still change, since nothing was made with them.

A job pays for some stages before it runs others. What one of the others refuses must
not cost that again: its settings are corrected in the same workdir.
"""

from __future__ import annotations

import contextlib
import copy
import glob
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from tfdpsq import validation
from tfdpsq.privacy.proof import certificate as certificates
from tfdpsq.privacy.proof import ledger
from tfdpsq.run.core import layout, releases

# {part of a config: what the names of outputs made with it, and of what these are used
# in at a cost, have in common}.
Parts = Mapping[str, Sequence[str]]


def with_unused(
    found: Mapping[str, Any],
    wanted: Mapping[str, Any],
    parts: Parts,
    directory: pathlib.Path,
) -> tuple[dict[str, Any], dict[str, list[pathlib.Path]]]:
    """Finds the parts of a config that nothing was made with.

    Returns:
      The config found, with the wanted values of these; {other part: what used it}.
    """
    kept = json.loads(json.dumps(found))
    used = {name: _made_with(names, directory) for name, names in parts.items()}
    for name in sorted(parts, key=lambda name: name.count(".")):  # parts of parts last
        _take_over(name, found if used[name] else wanted, kept)
    return kept, used


def _take_over(part: str, of: Mapping[str, Any], into: dict[str, Any]) -> None:
    """Gives a part of a config the value that it has in another one, or none."""
    *above, last = part.split(".")
    for each in above:
        of, into = of.get(each, {}), into.get(each, {})
        if not isinstance(into, dict) or not isinstance(of, Mapping):  # it was edited
            return
    if last in of:
        into[last] = copy.deepcopy(of[last])
    else:
        into.pop(last, None)


def _made_with(
    outputs_of: Sequence[str], directory: pathlib.Path
) -> list[pathlib.Path]:
    """Returns the outputs, and the runs that took a step, of some names.

    What is hidden is unfinished: its stage goes on with it, or refuses.
    """
    private = directory / "private"
    return [
        path
        for place in (
            directory / releases.RELEASE_FOLDER,
            private,
            private / layout.RUNS,
        )
        for part_of_name in outputs_of
        for path in sorted(place.glob(f"*{glob.escape(part_of_name)}*"))
        if not path.name.startswith(".")
        and (place.name != layout.RUNS or _took_steps(path))
    ]


def holds_paid_runs(private: pathlib.Path) -> bool:
    """Returns whether a run in a private directory took a step."""
    return any(_took_steps(run) for run in (private / layout.RUNS).glob("*"))


def _took_steps(run: pathlib.Path) -> bool:
    """Returns whether a run took a step, or cannot say so."""
    try:
        return ledger.read_ledger(run / ledger.FILE_NAME).steps_paid > 0
    except validation.DataError:
        return (run / ledger.FILE_NAME).exists()


def _cost_budget(made: pathlib.Path, directory: pathlib.Path) -> bool:
    """Returns whether an output, or a run, paid for steps with a finite epsilon.

    Without a ledger of its own, an output with a certificate did, unless another run
    here is the one that the certificate is of: then it was only made of that output.
    """
    runs = directory / "private" / layout.RUNS
    ran, stated = _took_steps(runs / made.name), made / certificates.FILE_NAME
    try:
        if ran:
            written = json.loads(
                (runs / made.name / layout.RUN_FILE).read_text("utf-8")
            )
            return written["config"]["epsilon"] != "inf"
        if not stated.is_file():
            return False
        certificate = json.loads(stated.read_text("utf-8"))
        finite = math.isfinite(float(certificate["guarantee"]["epsilon"]))
        return finite and certificate["run_id"] not in _ids(runs)
    except (OSError, ValueError, LookupError, TypeError):
        return True  # it cannot say so


def _ids(runs: pathlib.Path) -> set[str]:
    """Returns the run ids of all ledgers that can be read."""
    found = set()
    for path in runs.glob(f"*/{ledger.FILE_NAME}"):
        with contextlib.suppress(validation.DataError):
            found.add(ledger.read_ledger(path).run)
    return found


def remedy(
    used: Mapping[str, Sequence[pathlib.Path]],
    changed: Sequence[str],
    directory: pathlib.Path,
) -> str:
    """Returns what to do about parts of a config that changed though they were used."""
    of = {
        words: [part for part in used if words.startswith((f"{part}.", f"{part}:"))]
        for words in changed
    }
    made = {path for parts in of.values() for part in parts for path in used[part]}
    paid = [path for path in made if _cost_budget(path, directory)]
    names = sorted(str(path.relative_to(directory)) for path in paid or made)
    if made and not paid and all(of.values()):
        return (
            f"{', '.join(names)} cost no budget, by the ledgers here: move them away, "
            "and whatever was made of them, or set the config back."
        )
    with_it = f"{', '.join(names)} paid a budget with it. " if paid else ""
    return (
        f"{with_it}Set it back to go on, with a link where a path has changed, or use "
        "another --workdir."
    )
