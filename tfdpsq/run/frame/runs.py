"""A private training run: its directory, from which a killed one goes on.

    private/runs/NAME/run.json       what the run depends on, and its output
    private/runs/NAME/ledger.jsonl   the steps paid for; stays
    private/runs/NAME/state/         seeds, weights; removed once the output is safe

`tfdpsq.privacy.train` and `PrivateModel.fit` resume from ledger and state. Here a run
that has paid is kept from other settings: settings of speed alone may change.
"""

from __future__ import annotations

import os
import pathlib

from tfdpsq import privacy, validation
from tfdpsq.data import io
from tfdpsq.privacy.proof.ledger import FILE_NAME as LEDGER
from tfdpsq.run.frame import records
from tfdpsq.run.frame.places import Place, open_private
from tfdpsq.run.frame.runner import Context

RUN_FILE = "run.json"


def open_run(c: Context) -> pathlib.Path:
    """Makes the directory of a stage's run, or takes up what it left there.

    Raises:
      InputError: steps were paid for with other settings or inputs, or for another
        output of the same name.
      DataError: steps were paid for, and the record of their settings is missing.
    """
    directory = open_private(c.place.run)
    require_same_run(c.place, dict(c.depends))
    if not steps_paid(c.place):
        privacy.discard_state(directory)
        output = os.path.relpath(c.place.path, directory)
        io.write_json(directory / RUN_FILE, {"depends": c.depends, "output": output})
    return directory


def require_same_run(place: Place, depends: dict) -> None:
    """Refuses other settings than those that steps were paid with; see `open_run`."""
    path, paid = place.run / RUN_FILE, steps_paid(place)
    if not paid:
        return
    found = io.read_json(path, f"Restore it: {paid} steps are paid")
    output = os.path.normpath(place.run / found["output"])
    if output != place.path:
        raise validation.InputError(
            f"{place.run} holds the run of {output}, which has paid {paid} steps. Use "
            "another name for this output."
        )
    if records.digest(found["depends"]) != records.digest(depends):
        changed = records.differences(found["depends"], depends)
        raise validation.InputError(
            f"{place.run} has paid {paid} steps with other settings or inputs "
            f"({changed}). Go on with those, or use another --workdir: a new run "
            "spends a budget of its own, and both add up."
        )


def steps_paid(place: Place) -> int:
    """Returns the steps that a run has paid for; 0 where there is none."""
    ledger = place.run / LEDGER
    return privacy.read_ledger(ledger).steps_paid if ledger.is_file() else 0


def run_id(place: Place) -> str:
    """Returns the random name of a run, from its ledger."""
    return privacy.read_ledger(place.run / LEDGER).run
