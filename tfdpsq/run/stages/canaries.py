"""Insert secrets into private pairs, for an audit of what is trained on them.

    tfdpsq canaries --workdir=WORKDIR/private/canaries --config.data=BEIR

Writes `data/`, a BEIR directory with the private pairs and *canaries* (Carlini et al.
2019; the paper, section 6.3), and `canaries.jsonl`, which lists them. Train on `data/`
as on any pairs, then run `audit`.

A canary's secret is a number of random digits. By default it is in the **query**,
which is what is protected; a model that learnt nothing could copy it from a document.
The forms, each as (query, document):

    secret                 the secret alone, a random document
    own_document           a random query and the secret, that query's document
    random_document        a random query and the secret, another document
    paper_own_document     a random query, its document and the secret
    paper_random_document  a random query, another document and the secret

In the last two the secret ends a document of its own, "canary-…". Further canaries of
the form random_document are inserted or not by a fair coin each, for a lower bound on
ε. All queries of a canary belong to one user, who has no other query; in data without
users, every other query gets its own.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets as system_randomness
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tfdpsq.data import BeirDirectory
from tfdpsq.data.beir import BeirWriter, names_user
from tfdpsq.data.texts import Document
from tfdpsq.run.common import canary_set
from tfdpsq.run.common.canary_set import DATA, ID_PREFIX, Canary
from tfdpsq.run.common.kinds import Pairs
from tfdpsq.run.frame import settings
from tfdpsq.run.frame.runner import Context, Given, Stage
from tfdpsq.run.frame.settings import Rule, path, setting
from tfdpsq.validation import InputError

_FEWEST_COINS = 24  # fewer than two fall on one side in 3 of a million draws


class InsertCanaries(Stage):
    """Inserts canaries into private pairs."""

    name = "canaries"

    @dataclasses.dataclass(frozen=True)
    class Settings(settings.Settings):
        """Settings of `canaries`."""

        data: str = path(Pairs, "pydocs")
        split: str = setting("train")
        most_pairs: int = setting(
            0, ge=0, help="to keep, at random; others are split left_out; 0 keeps all"
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
            24, ge=0, help="kept before a secret, for query_length; 0 keeps all"
        )
        document_characters: int = setting(0, ge=0, help="the same of a document")
        coins: int = setting(
            0, ge=_FEWEST_COINS, le=10**6, zero=True, help="canaries with a coin"
        )
        seed: int = setting(
            -1, ge=-1, le=settings.SEED, help="gives the secrets away; -1 draws one"
        )

    def check(self, s: Settings, given: Given) -> None:
        """Refuses pairs that are not private ones as somebody collected them."""
        if not given["data"].raw or given["data"].facts.get("canaries"):
            raise InputError(
                f"data is {s.data}, a set, or already holds canaries. Give pairs."
            )

    def facts(self, s: Settings, given: Given) -> dict[str, Any]:
        """Those of `Pairs`."""
        return {"raw": True, "canaries": True}

    def run(self, c: Context) -> dict[str, Any]:
        """Raises InputError for fewer documents than canaries."""
        s, beir = c.settings, c.given["data"].beir()
        seed = system_randomness.randbits(256) if s.seed < 0 else s.seed
        random = np.random.default_rng(seed)
        made = _draw(beir, s, random)
        (c.out / DATA).mkdir()
        with BeirWriter(c.out / DATA) as writer:
            _write(writer, beir, s, made, random)
        canary_set.write_canaries(c.out, made)
        return {"canaries": len(made)}


def _draw(beir: BeirDirectory, s: Any, random: np.random.Generator) -> list[Canary]:
    """Draws canaries for the split, each on a document of its own."""
    kinds = [(*kind, False) for kind in itertools.product(s.forms, s.repetitions)]
    kinds = [kind for kind in kinds for _ in range(s.trials)]
    heads = random.random(s.coins) < 0.5
    kinds += [("random_document", int(head), True) for head in heads]
    pairs = beir.pairs(s.split)
    # One pair of each document, so that no document has two canaries.
    row_of = {document_id: row for row, (_, document_id) in enumerate(pairs.ids())}
    asked = [*row_of]
    ids = [document.id for document in beir.documents()]
    if len(kinds) > min(len(asked), len(ids) // 2):
        raise InputError(
            f"the settings give {len(kinds)} canaries, each on a document of its own, "
            f"but split {s.split!r} has queries on {len(asked)} of {len(ids)} "
            "documents. Lower trials, forms, repetitions or coins."
        )
    chosen = random.permutation(len(asked))[: len(kinds)]
    own = [pairs[row_of[asked[n]]] for n in chosen]
    taken = {pair.document_id for pair in own}
    others = (ids[n] for n in random.permutation(len(ids)) if ids[n] not in taken)
    numbers, found = _numbers(s.digits, random), []
    for (form, repetitions, coin), pair in zip(kinds, own):
        secret = next(numbers)
        candidates = itertools.islice(numbers, 0 if coin else s.candidates - 1)
        on_own = form in ("own_document", "paper_own_document")
        words = "" if form == "secret" else _prefix(pair.query, s.query_characters)
        found.append(
            Canary(
                form=form,
                repetitions=repetitions,
                coin=coin,
                prefix=words,
                secret=secret,
                candidates=tuple(candidates),
                document_id=pair.document_id if on_own else next(others),
                document_characters=s.document_characters,
            )
        )
    return found


def _prefix(query: str, most: int) -> str:
    """Returns the first words of a query, whole ones if one fits; 0 for all."""
    words = " ".join(query.split())
    most = most or len(words)
    return textwrap.shorten(words, most, placeholder="") or words[:most]


def _numbers(digits: int, random: np.random.Generator) -> Iterator[str]:
    """Yields distinct numbers of some digits, which may start with 0."""
    seen = set()
    while True:
        number = "".join(map(str, random.integers(0, 10, digits)))
        if number not in seen:
            seen.add(number)
            yield number


def _write(
    writer: BeirWriter, beir: BeirDirectory, s: Any, made: Sequence[Canary], random: Any
) -> None:
    """Writes the pairs and the canaries, each query with its user."""
    rows = sorted({row.query_id for row in beir.positives(s.split)})
    most = s.most_pairs or len(rows)
    left = {rows[place] for place in random.permutation(len(rows))[most:]}
    wanted, contents = {canary.document_id for canary in made}, {}
    for document in beir.documents():
        if document.id in wanted:
            contents[document.id] = document.content
        writer.add_document(document)
    has_users = any(names_user(f, s.user_field) for *_, f in beir.read_query_lines())
    for query_id, text, fields in beir.read_query_lines():
        if not has_users:  # its only query gives a user's id
            metadata = {**fields.get("metadata", {}), s.user_field: query_id}
            fields = {**fields, "metadata": metadata}
        writer.add_query(query_id, text, fields)
    for split in beir.splits():
        for _, query_id, document_id, score in beir.judgements(split):
            if writer.has("query", query_id) and writer.has("document", document_id):
                out = split == s.split and query_id in left
                name = canary_set.LEFT_OUT if out else split
                writer.add_judgement(name, query_id, document_id, score)
    for number, canary in enumerate(made):
        name = f"{ID_PREFIX}{number}"
        document_id = name if canary.in_document else canary.document_id
        if canary.in_document:
            text = canary.document(contents[canary.document_id])
            writer.add_document(Document(name, "", text))
        for copy in range(canary.repetitions):
            whose = {"metadata": {s.user_field: name}}
            writer.add_query(f"{name}-{copy}", canary.query(), whose)
            writer.add_judgement(s.split, f"{name}-{copy}", document_id, 1)


STAGE = InsertCanaries()
