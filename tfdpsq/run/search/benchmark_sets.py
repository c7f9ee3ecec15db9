"""Public test sets: their directories, and the rules for scoring each.

A set is one BEIR directory, except CQADupStack: it is twelve, one per forum, each
searched separately; its numbers are means over forums, whatever their numbers of
queries (Thakur et al. 2021).
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import ml_collections
import numpy as np
from absl import logging

from tfdpsq import validation
from tfdpsq.run.core import settings, sources

CQADUPSTACK = "cqadupstack"
# The sets of the paper's zero-shot table, by BEIR's names.
PAPER = (
    "arguana",
    CQADUPSTACK,
    "dbpedia-entity",
    "fiqa",
    "hotpotqa",
    "nfcorpus",
    "quora",
    "scidocs",
    "scifact",
    "trec-covid",
    "webis-touche2020",
)
FORUMS = (
    "android",
    "english",
    "gaming",
    "gis",
    "mathematica",
    "physics",
    "programmers",
    "stats",
    "tex",
    "unix",
    "webmasters",
    "wordpress",
)
# Their queries are documents of the corpus, with the same ids.
QUERIES_ARE_DOCUMENTS = ("arguana", "quora")
# MS MARCO's test queries have no public judgements.
SPLITS = {"msmarco": "dev"}
# Documents without text (FiQA, TREC-COVID), judgements of documents missing from the
# corpus (ArguAna, 5 of 1,406). Corrections would make numbers incomparable.
FLAWED = ("arguana", "fiqa", "trec-covid")


@dataclasses.dataclass(frozen=True)
class Part:
    """A corpus and its queries: a set, or a forum of CQADupStack.

    Attributes:
      name: such as "scifact" or "cqadupstack/android".
      of: name of the set.
      path: the BEIR directory, or "pydocs".
      split: name of the qrels.
      ignore_identical_ids: whether a document with the query's own id is left out.
      as_published: whether known flaws are accepted; see `BeirDirectory`.
    """

    name: str
    of: str
    path: str
    split: str
    ignore_identical_ids: bool
    as_published: bool


def declared() -> dict[str, settings.Setting]:
    """Settings that choose the sets."""
    return {
        # Directory that holds sets under their names.
        "root": settings.Text(""),
        "sets": settings.Several(PAPER, settings.Text("", required=True)),
        # Name -> directory, for sets elsewhere and for additional ones.
        "paths": settings.Named({}, settings.Text("")),
        # Name -> split, where not "test" ("dev" for msmarco).
        "splits": settings.Named({}, settings.Text("", required=True)),
        # Name -> whether a document with the query's own id is left out. True for
        # arguana and quora, whose queries are documents; elsewhere False, since ids are
        # often mere numbers there.
        "ignore_identical_ids": settings.Named({}, settings.Flag(False)),
        # Sets accepted with their published flaws. In all others, a document without
        # text or a judgement of a missing one is an error.
        "as_published": settings.Several(FLAWED, settings.Text("")),
        # Leave out missing sets; the output then lists them.
        "skip_missing": settings.Flag(False),
    }


def locate(config: ml_collections.ConfigDict) -> tuple[list[Part], dict[str, str]]:
    """Finds the sets that a config names.

    Returns:
      The parts of the sets in order, and the missing ones: name -> expected path.

    Raises:
      InputError: a name that is not a directory's or comes twice, a rule for a set that
        is not evaluated, missing sets, or no set at all.
    """
    names = [*config.sets, *(name for name in config.paths if name not in config.sets)]
    for name in names:
        check_file_name("a set", name)
        if names.count(name) > 1:
            raise validation.InputError(f"sets holds {name!r} twice; name it once.")
    for field in ("splits", "ignore_identical_ids"):
        for name in config[field]:
            if name not in names:
                raise validation.InputError(
                    f"{field} names {name!r}, which is none of the sets "
                    f"{', '.join(names)}. Correct the name, or add the set."
                )
    parts = [part for name in names for part in _parts(config, name)]
    missing = {part.name: part.path or "no path" for part in parts if not _there(part)}
    if missing and not config.skip_missing:
        listed = ", ".join(f"{name} ({path})" for name, path in missing.items())
        raise validation.InputError(
            f"{len(missing)} of {len(parts)} sets are missing: {listed}. Set root to "
            "the directory that holds BEIR's sets under their names (now "
            f"{config.root!r}), or paths to the directory of each; or set skip_missing "
            "to evaluate the others alone."
        )
    parts = [part for part in parts if part.name not in missing]
    if not parts:
        raise validation.InputError(
            "no set to evaluate is there. Name sets, and set root or paths."
        )
    for name, path in missing.items():
        logging.warning("%s is left out: not at %s", name, path)
    return parts, missing


def check_file_name(what: str, name: str) -> None:
    """Refuses a name that is unfit for a file and for a word of a TREC file."""
    word = len(name.split()) == 1 and name.isprintable()
    if not word or name != pathlib.PurePath(name).name:
        raise validation.InputError(
            f"{what} is called {name!r}. Files are named after it: choose a name "
            "without white space and slashes."
        )


def _parts(config: Any, name: str) -> list[Part]:
    path = config.paths.get(name, "")
    if not path and config.root:
        path = str(pathlib.Path(config.root) / name)
    whole = Part(
        name=name,
        of=name,
        path=path,
        split=config.splits.get(name, SPLITS.get(name, "test")),
        ignore_identical_ids=config.ignore_identical_ids.get(
            name, name in QUERIES_ARE_DOCUMENTS
        ),
        as_published=name in config.as_published,
    )
    if name != CQADUPSTACK:
        return [whole]
    return [
        dataclasses.replace(
            whole, name=f"{name}/{forum}", path=path and str(pathlib.Path(path) / forum)
        )
        for forum in FORUMS
    ]


def _there(part: Part) -> bool:
    return part.path == sources.PYDOCS or (
        bool(part.path) and pathlib.Path(part.path).is_dir()
    )


def as_one(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Returns [queries] of all parts, scaled so that each part weighs the same."""
    share = sum(map(len, parts)) / len(parts)
    return np.concatenate([part * (share / len(part)) for part in parts])
