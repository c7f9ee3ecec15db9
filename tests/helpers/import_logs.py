"""A small log of private queries, imported by the stage."""

import importlib

from helpers import framed
from tfdpsq.run.frame import records
from tfdpsq.run.frame.places import Place

STAGE = importlib.import_module("tfdpsq.run.stages.import").STAGE

# The third row repeats the first; the fourth is another user's, with the same text.
ROWS = [
    ("how to knit a sock", "Socks are knitted in the round.", "ann", "2026-01-05"),
    ("boil an egg", "Eggs take six minutes.\nSeven, if cold.", "bob", "2026-02-01"),
    ("how to knit a sock", "Socks are knitted in the round.", "ann", "2026-03-01"),
    ("how to knit a sock", 'Wool "of sheep", spun.', "bob", "2026-04-01"),
    ("  ", "Eggs take six minutes.", "cat", "2026-01-01"),
    ("grüne Erbsen", "Peas are green.", "cat", "2026-05-01"),
]
NAMES = ("asked", "clicked", "who", "when")
TRAIN_ALONE = {"dev_share": 0.0, "test_share": 0.0}


def dicts(rows=ROWS):
    """Returns the log's rows by column."""
    return [dict(zip(NAMES, row)) for row in rows]


def run(out, log, **changes):
    """Imports a log, with `__` for dots in `changes`; returns its counts."""
    settings = {}
    usual = {"columns__query": "asked", "columns__document": "clicked"}
    usual |= {"logs__train": str(log), "log_documents_are_public": True}
    for name, value in {**usual, **changes}.items():
        *path, last = name.split("__")
        node = settings
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    framed.run(STAGE, out, **settings)
    return records.read_private(Place.of(out))["counts"]
