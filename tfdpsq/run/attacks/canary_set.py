"""Canaries of an audit: what they are, their file, and where they may be used."""

from __future__ import annotations

import dataclasses
import pathlib

from tfdpsq import validation

DATA = "data"
CANARIES_FILE = "canaries.jsonl"
FORMS = ("secret", "own_document", "random_document")
# Of the ids of canaries' queries, and of their users.
ID_PREFIX = "canary-"


@dataclasses.dataclass(frozen=True)
class Canary:
    """A secret, where it stands, and what it is compared with.

    Attributes:
      form: one of FORMS.
      repetitions: how many training queries hold the secret; for a canary with a coin,
        1 or 0.
      coin: whether a coin decided that it is there.
      prefix: words before the secret; "" for form secret.
      secret: digits.
      candidates: digits drawn from the same law, which no query holds; empty for a
        canary with a coin.
      document_id: of the document it is paired with.
    """

    form: str
    repetitions: int
    coin: bool
    prefix: str
    secret: str
    candidates: tuple[str, ...]
    document_id: str

    def query(self, secret: str | None = None) -> str:
        """The query with the secret, or with a candidate in its place."""
        return f"{self.prefix} {self.secret if secret is None else secret}".strip()


def read_canaries(directory: pathlib.Path) -> list[Canary]:
    """What the stage wrote.

    Raises:
      InputError: the directory is not what the stage wrote.
      DataError: a damaged line.
    """
    path = pathlib.Path(directory) / CANARIES_FILE
    if not path.is_file():
        raise validation.InputError(
            f"{directory} holds no {CANARIES_FILE}. Give what the stage canaries "
            "wrote: secrets must be put in before training, not asked for after it."
        )
    found = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            fields = validation.parse_json(line)
            fields["candidates"] = tuple(fields["candidates"])
            validation.one_of("form", fields["form"], FORMS)
            found.append(Canary(**fields))
        except (ValueError, TypeError, KeyError) as error:
            raise validation.DataError(
                path, f"it is no canary ({error})", "Make the canaries again.", number
            ) from error
    return found


def holds_canaries(pairs: str) -> bool:
    """Whether pairs are what the stage `canaries` wrote."""
    return (pathlib.Path(pairs).parent / CANARIES_FILE).is_file()


def require_private_output(
    pairs: str, private: pathlib.Path, directory: pathlib.Path
) -> None:
    """Keeps what is trained on canaries from where it would be released.

    Args:
      pairs: what is trained on.
      private: the run's private directory.
      directory: where the result is to go.

    Raises:
      InputError: the pairs hold canaries, and the directory is not a private one.
    """
    made = pathlib.Path(pairs).parent / CANARIES_FILE
    if holds_canaries(pairs) and private.resolve() not in directory.resolve().parents:
        raise validation.InputError(
            f"{pairs} holds canaries ({made}): what is trained on it knows secrets "
            f"that are to be audited, and is not for release. Write it under {private} "
            f"instead of {directory}."
        )
