"""Insert secrets into private pairs, for an audit of what is trained on them.

    tfdpsq canaries --workdir=WORKDIR/private/canaries --config.data=BEIR

Writes `data/`, a BEIR directory with the private pairs and *canaries* (Carlini et al.
2019; the paper, section 6.3), and `canaries.jsonl`, which lists them. Train on `data/`
as on any pairs, then run `audit`.

A canary's secret is a number of random digits. By default it is in the **query**:
queries are what is protected, while a model that learnt nothing could copy a secret
from a public document. These forms, each as (query, document):

    secret           the secret alone, a random document
    own_document     words of a random query and the secret, that query's document
    random_document  words of a random query and the secret, another document

The paper's three forms, for comparison with its figures:

    paper_query            a random query and the secret, that query's document
    paper_own_document     a random query, its document and the secret
    paper_random_document  a random query, another document and the secret

In the last two the secret ends a document of its own (id "canary-…"). A guarantee
covers it as it covers the query: without the pair, nothing is trained on that document.
It does not cover what is written *for* such a document, so audits read only queries for
the documents of the given data.

Each is repeated in several queries. Further canaries of the form random_document are
inserted once or not at all, by a fair coin each, for a lower bound on ε.

A guarantee for one query covers each of these queries separately: a secret in r of them
is r units, and its guarantee weakens by more than r times (see `audit`). One for a
**user** covers the secret: all queries of a canary belong to one user, who has no other
query. All other queries keep their users; in data without users, each has its own.

Models trained on canaries, and their outputs, are for auditing only: everything here
stays under `private/`.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets as system_randomness
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tfdpsq.data import BeirDirectory
from tfdpsq.data.beir import BeirWriter, names_user
from tfdpsq.data.texts import Document
from tfdpsq.run.common import canary_set
from tfdpsq.run.common.canary_set import DATA, ID_PREFIX, Canary
from tfdpsq.run.frame import settings
from tfdpsq.run.frame.artefacts import Canaries, Pairs
from tfdpsq.run.frame.runner import Context, Given, Stage
from tfdpsq.run.frame.settings import Rule, path, setting
from tfdpsq.validation import InputError

# Most characters before a secret: no query length cuts the secret off.
_PREFIX = 24
# Of 24 fair coins, fewer than two fall on one side in 3 of a million draws.
_FEWEST_COINS = 24


class InsertCanaries(Stage):
    """Inserts canaries into private pairs."""

    name = "canaries"
    kind = Canaries

    @dataclasses.dataclass(frozen=True)
    class Settings(settings.Settings):
        """Settings of `canaries`."""

        data: str = path(Pairs, "pydocs")
        split: str = setting("train")
        most_pairs: int = setting(
            0,
            ge=0,
            help="pairs of split to keep, at random: among fewer, a secret is "
            "learnt sooner; 0 keeps all",
        )
        user_field: str = setting("user_id")
        trials: int = setting(
            5, ge=0, le=1_000_000, help="canaries of each form and repetition"
        )
        forms: tuple[str, ...] = setting(
            canary_set.OUR_FORMS, of=Rule(choices=canary_set.FORMS), when="trials"
        )
        repetitions: tuple[int, ...] = setting(
            (10, 100), of=Rule(ge=1, le=10**6), when="trials"
        )
        candidates: int = setting(
            100, ge=20, le=10_000, when="trials", help="a secret is ranked among"
        )
        digits: int = setting(10, ge=8, le=18, help="of a secret")
        query_characters: int = setting(
            0,
            ge=0,
            help="kept before the secret in the paper's forms; 0 for all, "
            "though training cuts long queries, and the secret with them",
        )
        document_characters: int = setting(0, ge=0, help="the same of a document")
        coins: int = setting(
            0, ge=_FEWEST_COINS, le=10**6, zero=True, help="canaries with a coin"
        )
        seed: int = setting(
            -1,
            ge=-1,
            le=settings.SEED,
            help="-1 draws one; a known one gives the secrets away",
        )

    def check(self, s: Settings, given: Given) -> None:
        """Refuses pairs that are not private ones as somebody collected them."""
        if not given["data"].raw or given["data"].facts.get("canaries"):
            raise InputError(
                f"data is {s.data}, which is a set of queries, or already holds "
                "canaries. Give the private pairs to train on, a BEIR directory."
            )
        for name, forms in (
            ("query_characters", canary_set.PAPER_FORMS),
            ("document_characters", canary_set.IN_DOCUMENT),
        ):
            if getattr(s, name) and not set(forms) & set(s.forms):
                raise InputError(
                    f"{name} is {getattr(s, name)}, which does nothing where forms "
                    f"names none of {', '.join(forms)}. Leave it at 0."
                )

    def facts(self, s: Settings, given: Given) -> dict[str, Any]:
        """Those of `Pairs`, and what an audit asks."""
        candidates = s.candidates if s.trials else 0
        asked = {"split": s.split, "coins": s.coins, "candidates": candidates}
        return {"raw": True, "canaries": True, **asked}

    def run(self, c: Context) -> dict[str, Any]:
        """Raises InputError for fewer documents than canaries, and see `_write`."""
        s, beir = c.settings, c.given["data"].beir()
        seed = system_randomness.randbits(256) if s.seed < 0 else s.seed
        random = np.random.default_rng(seed)
        made = _draw(beir, s, random)
        (c.out / DATA).mkdir()
        with BeirWriter(c.out / DATA) as writer:
            _write(writer, beir, s, made, _left_out(beir, s, random))
        canary_set.write_canaries(c.out, made)
        return {"canaries": len(made)}


def _draw(beir: BeirDirectory, s: Any, random: np.random.Generator) -> list[Canary]:
    """Draws canaries for the split, each on a document of its own."""
    kinds = [
        (form, repetitions, False)
        for form in s.forms
        for repetitions in s.repetitions
        for _ in range(s.trials)
    ]
    heads = random.random(s.coins) < 0.5
    kinds += [("random_document", int(head), True) for head in heads]
    pairs = beir.pairs(s.split)
    documents = sum(1 for _ in beir.documents())
    # One pair of each document, so that no document has two canaries.
    shuffled = random.permutation(len(pairs))
    of_rows = pairs.document_numbers()[shuffled].tolist()
    last = dict(zip(of_rows, shuffled.tolist()))
    if len(kinds) > min(len(last), documents // 2):
        raise InputError(
            f"the settings give {len(kinds)} canaries, each on a document of its own, "
            f"but split {s.split!r} has queries on {len(last)} documents, and the "
            f"corpus holds {documents}. Lower trials, forms, repetitions or coins."
        )
    own = [pairs[row] for row in itertools.islice(last.values(), len(kinds))]
    taken = {pair.document_id for pair in own}
    # At most half of these are taken.
    free = random.permutation(documents)[: 2 * len(kinds)].tolist()
    wanted = set(free)
    ids = {row: d.id for row, d in enumerate(beir.documents()) if row in wanted}
    others = (ids[row] for row in free if ids[row] not in taken)
    numbers = _numbers(s.digits, random)
    found = []
    for (form, repetitions, coin), pair in zip(kinds, own):
        secret = next(numbers)
        candidates = itertools.islice(numbers, 0 if coin else s.candidates - 1)
        on_own = form in ("own_document", "paper_query", "paper_own_document")
        kept = s.document_characters if form in canary_set.IN_DOCUMENT else 0
        found.append(
            Canary(
                form=form,
                repetitions=repetitions,
                coin=coin,
                prefix=_prefix(form, pair.query, s.query_characters),
                secret=secret,
                candidates=tuple(candidates),
                document_id=pair.document_id if on_own else next(others),
                document_characters=kept,
            )
        )
    return found


def _prefix(form: str, query: str, most: int) -> str:
    """Returns the whole words of a query that a form keeps, or a part of the first."""
    if form == "secret":
        return ""
    if form not in canary_set.PAPER_FORMS:
        most = _PREFIX
    first, *words = query.split()
    found = first[: most or None]
    for word in words:
        if most and len(found) + 1 + len(word) > most:
            break
        found += f" {word}"
    return found


def _numbers(digits: int, random: np.random.Generator) -> Iterator[str]:
    """Yields distinct numbers of some digits, which may start with 0."""
    seen = set()
    while True:
        number = "".join(map(str, random.integers(0, 10, digits)))
        if number not in seen:
            seen.add(number)
            yield number


def _left_out(beir: BeirDirectory, s: Any, random: np.random.Generator) -> set[str]:
    """Draws the split's queries beyond `most_pairs`; those of other splits stay."""
    if not s.most_pairs:
        return set()
    rows = sorted(beir.positives(s.split))
    others = (other for other in beir.splits() if other != s.split)
    elsewhere = {query_id for other in others for query_id in beir.qrels(other)}
    dropped = random.permutation(len(rows))[s.most_pairs :]
    return {rows[place] for place in dropped} - elsewhere


def _write(
    writer: BeirWriter,
    beir: BeirDirectory,
    s: Any,
    made: Sequence[Canary],
    left_out: set[str],
) -> None:
    """Writes the pairs and the canaries, each query with its user.

    Raises:
      InputError: the data holds canaries, or a query lacks a user that others have.
    """
    contents = {}
    for document in beir.documents():
        _require_new(document.id)
        contents[document.id] = document.content
        writer.add_document(document)
    for number, canary in enumerate(made):
        if canary.in_document:
            text = canary.document(contents[canary.document_id])
            writer.add_document(Document(f"{ID_PREFIX}{number}", "", text))
    lines = beir.read_query_lines()
    has_users = any(names_user(fields, s.user_field) for _, _, fields in lines)
    if has_users:
        beir.owners(beir.pairs(s.split), s.user_field)
    for query_id, text, fields in beir.read_query_lines():
        if not has_users:  # its only query gives a user's id
            fields = _with_user(fields, s.user_field, query_id)
        metadata = fields.get("metadata")
        named = metadata.get(s.user_field) if isinstance(metadata, dict) else None
        for name in (query_id, str(named), str(fields.get(s.user_field))):
            _require_new(name)
        if query_id not in left_out:
            writer.add_query(query_id, text, fields)
    for split in beir.splits():
        for row in beir.judgements(split):
            if row.query_id not in left_out:
                writer.add_judgement(split, row.query_id, row.document_id, row.score)
    for number, canary in enumerate(made):
        user = f"{ID_PREFIX}{number}"
        document_id = user if canary.in_document else canary.document_id
        for copy in range(canary.repetitions):
            fields = _with_user({}, s.user_field, user)
            writer.add_query(f"{user}-{copy}", canary.query(), fields)
            writer.add_judgement(s.split, f"{user}-{copy}", document_id, 1)


def _require_new(name: str) -> None:
    if name.startswith(ID_PREFIX):
        raise InputError(
            f"a query, document or user of the data is called {name!r}: these pairs "
            "already hold canaries. Start from pairs without."
        )


def _with_user(fields: dict[str, Any], field: str, user: str) -> dict[str, Any]:
    """Returns the fields of a query's line with a user."""
    metadata = fields.get("metadata")
    kept = metadata if isinstance(metadata, dict) else {}
    return {**fields, "metadata": {**kept, field: user}}


STAGE = InsertCanaries()
