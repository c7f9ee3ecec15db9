"""Canaries of an audit: their fields, their file, and where they may be used."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from collections.abc import Sequence

from tfdpsq import validation
from tfdpsq.data import BeirDirectory
from tfdpsq.privacy.proof import certificate as certificates
from tfdpsq.run.core import releases

DATA = "data"
CANARIES_FILE = "canaries.jsonl"
# Content of `releases.MARK_FILE` in `DATA`, by which a copy of the pairs is known.
_HOLDS, _CANARIES = "holds", "canaries"
MARK = {certificates.GUARANTEE: releases.PRIVATE, _HOLDS: _CANARIES}
OUR_FORMS = ("secret", "own_document", "random_document")
# The two of the paper's forms that have the secret in a document of their own.
IN_DOCUMENT = ("paper_own_document", "paper_random_document")
PAPER_FORMS = ("paper_query", *IN_DOCUMENT)
FORMS = (*OUR_FORMS, *PAPER_FORMS)
# Fields of a canary -> their types.
_KINDS = {
    **{"repetitions": int, "document_characters": int, "coin": bool},
    **{"prefix": str, "secret": str, "document_id": str},
}
_DIGITS = re.compile("[0-9]+").fullmatch
# Prefix of the ids of canaries' queries and documents, and of their users.
ID_PREFIX = "canary-"


@dataclasses.dataclass(frozen=True)
class Canary:
    """A secret, its place in the data, and its candidates.

    Attributes:
      form: one of FORMS.
      repetitions: number of training queries that hold the secret; 1 or 0 for a canary
        with a coin.
      coin: whether a coin decided its presence.
      prefix: words before the secret, or the whole query where the secret is in the
        document; "" for form secret.
      secret: digits.
      candidates: digits drawn from the same distribution, in no query or document;
        empty for a canary with a coin.
      document_id: of the document that it is paired with, or that the secret is
        appended to.
      document_characters: most characters of that document before the secret; 0 for
        all of them, and where the secret is in the query.
    """

    form: str
    repetitions: int
    coin: bool
    prefix: str
    secret: str
    candidates: tuple[str, ...]
    document_id: str
    document_characters: int = 0

    @property
    def in_document(self) -> bool:
        """True if the secret is in the document, and not in the query."""
        return self.form in IN_DOCUMENT

    def query(self, secret: str | None = None) -> str:
        """Returns the query, with a candidate in the place of its secret if given."""
        if self.in_document:
            return self.prefix
        return f"{self.prefix} {self.secret if secret is None else secret}".strip()

    def document(self, content: str, secret: str | None = None) -> str:
        """Returns the document that the query is paired with.

        Args:
          content: text of the document `document_id`.
          secret: the candidate in the place of the secret.
        """
        if not self.in_document:
            return content
        kept = (
            content[: self.document_characters] if self.document_characters else content
        )
        return f"{kept.rstrip()} {self.secret if secret is None else secret}"


def read_canaries(directory: pathlib.Path) -> list[Canary]:
    """Reads what the stage `canaries` wrote.

    Raises:
      InputError: the directory is not an output of that stage.
      DataError: a damaged line.
    """
    path = pathlib.Path(directory) / CANARIES_FILE
    if not path.is_file():
        raise validation.InputError(
            f"{directory} holds no {CANARIES_FILE}. Give what the stage canaries "
            "wrote: secrets must be inserted before training."
        )
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            fields = validation.parse_json(line)
            fields["candidates"] = tuple(fields["candidates"])
            validation.one_of("form", fields["form"], FORMS)
            canary = Canary(**fields)
            for field, kind in _KINDS.items():
                if type(value := getattr(canary, field)) is not kind:
                    raise ValueError(f"{field} is {validation.shown(value)}")
            if not all(isinstance(each, str) for each in canary.candidates):
                raise ValueError("a candidate is not a text")
            if not all(map(_DIGITS, (canary.secret, *canary.candidates))):
                raise ValueError("a secret or a candidate is not digits alone")
            for field in ("repetitions", "document_characters"):
                validation.in_range(field, getattr(canary, field), 0, 1e9)
            found.append(canary)
        except (ValueError, TypeError, KeyError) as error:
            raise validation.DataError(
                path, f"not a canary ({error})", "Make the canaries again.", number
            ) from error
    return found


def require_inserted(
    directory: pathlib.Path, made: Sequence[Canary], data: BeirDirectory, split: str
) -> None:
    """Refuses canaries that are not in the pairs of a split as they were put in.

    What was never trained on is not learnt, and would look well protected. `made` is
    what `read_canaries` found in `directory`.

    Raises:
      DataError: names the first canary that is not there, or not as often, or a query
        of a canary that is not in the list.
    """
    pairs = data.pairs(split)
    found: dict[str, list[tuple[str, str]]] = {}
    for row, (name, _) in enumerate(pairs.ids()):
        if name.startswith(ID_PREFIX):
            pair = pairs[row]
            # Where the secret is in the document, it is its last word.
            texts = (pair.query, "".join(pair.document.split()[-1:]))
            found.setdefault(name.rpartition("-")[0], []).append(texts)
    for number, canary in enumerate(made):
        held = found.get(f"{ID_PREFIX}{number}", [])
        as_made = [
            query.split() == canary.query().split()
            and (not canary.in_document or end == canary.secret)
            for query, end in held
        ]
        if len(held) != canary.repetitions or not all(as_made):
            raise validation.DataError(
                pathlib.Path(directory) / CANARIES_FILE,
                f"this canary is in {sum(as_made)} of the {len(held)} queries "
                f"{ID_PREFIX}{number}-... in split {split!r} of {DATA}/, and should "
                f"be in {canary.repetitions}",
                f"Restore this file and {DATA}/ as the stage canaries wrote them, or "
                "make canaries again and train on them.",
                number + 1,
            )
    listed = {f"{ID_PREFIX}{number}" for number in range(len(made))}
    for name in found.keys() - listed:
        raise validation.DataError(
            pathlib.Path(directory) / CANARIES_FILE,
            f"it ends after {len(made)} canaries, and split {split!r} of {DATA}/ holds "
            f"queries {name}-...",
            f"Restore this file and {DATA}/ as the stage canaries wrote them, or make "
            "canaries again and train on them.",
        )


def holds_canaries(pairs: str) -> bool:
    """Returns whether the stage `canaries` wrote these pairs, wherever they are now."""
    return _found_in(pairs) is not None


def _found_in(pairs: str) -> pathlib.Path | None:
    """Returns the file that says that pairs hold canaries; `None` if none does."""
    pairs = os.fspath(pairs)
    if not os.path.isdir(pairs):  # an embedded corpus, or missing
        return None
    for place in releases.places_of(pairs):
        for folder in (place, *place.parents):
            mark = folder / releases.MARK_FILE
            if certificates.stated(mark, _HOLDS) == _CANARIES:
                return mark
            if (folder / CANARIES_FILE).is_file():  # also of a version without marks
                return folder / CANARIES_FILE
    return None


def require_private_output(
    pairs: str, private: pathlib.Path, directory: pathlib.Path
) -> None:
    """Refuses to write results of training on canaries where they would be released."""
    made = _found_in(pairs)
    if made is not None and not releases.is_inside(directory, private):
        raise validation.InputError(
            f"{pairs} holds canaries ({made}): a model trained on it knows secrets to "
            f"be audited, and must not be released. Write it under {private} "
            f"instead of {directory}."
        )
