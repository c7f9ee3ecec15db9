"""Public test sets: where they lie, and by which rules each is scored.

A set is a BEIR directory, but for CQADupStack: that is twelve, one for each forum, each
searched by itself; its numbers are the means over the forums, however many queries each
has (Thakur et al. 2021).
"""

from __future__ import annotations

import dataclasses
import pathlib

import ml_collections
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
# Their queries are documents of the corpus, under the same ids.
QUERIES_ARE_DOCUMENTS = ("arguana", "quora")
# MS MARCO's test queries have no public judgements.
SPLITS = {"msmarco": "dev"}
# Documents without text (FiQA, TREC-COVID), judgements of documents that are not in the
# corpus (ArguAna, 5 of 1,406). To mend them would change everybody's numbers.
FLAWED = ("arguana", "fiqa", "trec-covid")


@dataclasses.dataclass(frozen=True)
class Part:
    """A corpus and the queries that are put to it: a set, or a forum of CQADupStack.

    Attributes:
      name: such as "scifact" or "cqadupstack/android".
      of: name of the set.
      path: the BEIR directory, or "pydocs".
      split: which qrels.
      ignore_identical_ids: whether a document of the query's own id is left out.
      as_published: whether known flaws are taken as they are; see `BeirDirectory`.
    """

    name: str
    of: str
    path: str
    split: str
    ignore_identical_ids: bool
    as_published: bool


def declared() -> dict[str, settings.Setting]:
    """Settings that say which sets there are."""
    return {
        # Directory that holds sets under their names.
        "root": settings.Text(""),
        "sets": settings.Several(PAPER, settings.Text("", required=True)),
        # Name -> directory, for sets that lie elsewhere, and for further ones.
        "paths": settings.Named({}, settings.Text("")),
        # Name -> split, where not "test" ("dev" for msmarco).
        "splits": settings.Named({}, settings.Text("", required=True)),
        # Name -> whether a document of the query's own id is left out. True for
        # arguana and quora, whose queries are documents; elsewhere False, as there ids
        # are often mere numbers.
        "ignore_identical_ids": settings.Named({}, settings.Flag(False)),
        # Sets that are taken with the flaws they were published with. Of all others, a
        # document without text or a judgement of a missing one is an error.
        "as_published": settings.Several(FLAWED, settings.Text("")),
        # Leave out sets that are not there; the output then lists them.
        "skip_missing": settings.Flag(False),
    }


def locate(config: ml_collections.ConfigDict) -> tuple[list[Part], dict[str, str]]:
    """Finds the sets that a config names.

    Args:
      config: has the fields of `settings`.

    Returns:
      The parts of the sets in their order, and what is not there and was left out:
      name -> where it should be.

    Raises:
      InputError: a name that cannot be a directory's or comes twice, a rule for a set
        that is not evaluated, sets that are not there, or none that is.
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
            f"{len(missing)} of {len(parts)} sets are not there: {listed}. Set root to "
            "the directory that holds BEIR's sets under their names (now "
            f"{config.root!r}), or paths to where each lies; or set skip_missing to "
            "evaluate the others alone."
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
    """Refuses what cannot be a file's name and a word of a TREC file.

    Raises:
      InputError: it cannot.
    """
    if len(name.split()) != 1 or name != pathlib.PurePath(name).name:
        raise validation.InputError(
            f"{what} is called {name!r}. Files are named after it: choose a name "
            "without white space and slashes."
        )


def _parts(config, name: str) -> list[Part]:
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
            whole,
            name=f"{name}/{forum}",
            path=path and str(pathlib.Path(path) / forum),
        )
        for forum in FORUMS
    ]


def _there(part: Part) -> bool:
    return part.path == sources.PYDOCS or (
        bool(part.path) and pathlib.Path(part.path).is_dir()
    )
