"""Insert secrets into private pairs, for an audit of what is trained on them.

    python -m tfdpsq.run.canaries --config=configs/canaries.py --workdir=private/DIR

Writes `data/`, a BEIR directory with the private pairs and *canaries* (Carlini et al.
2019; the paper, section 6.3), and `canaries.jsonl`, which lists them. Train on `data/`
as on any pairs, then run `audit`. A copy of `data/` is known by its `private.json`.

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

In the last two the secret ends a document of its own (id "canary-…"), of which
`document_characters` are kept before it. A guarantee covers it as it covers the query:
without the pair, nothing is trained on that document. It does not cover what is written
*for* such a document, so audits read only queries for the documents of the given data.

Each is repeated in several queries. Further canaries of the form random_document are
inserted once or not at all, by a fair coin each, for a lower bound on ε.

A guarantee for one query covers each of these queries separately: a secret in r of them
is r units, and its guarantee weakens by more than r times (see `audit`). One for a
**user** covers the secret: all queries of a canary belong to one user, who has no other
query. All other queries keep their users; in data without users, each has its own.
The output therefore suits `finetune --config.unit=user` whatever it was made from.

Models trained on canaries, and their outputs, are for auditing only: everything here
stays under `private/`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import secrets as system_randomness
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

import ml_collections
import numpy as np

from tfdpsq import validation
from tfdpsq.data import BeirDirectory
from tfdpsq.data.beir import BeirWriter, names_user
from tfdpsq.data.io import atomic_write, write_json
from tfdpsq.data.texts import Document
from tfdpsq.run.attacks import canary_set
from tfdpsq.run.core import acting, command, releases, settings, sources, workdir

# Most characters before a secret: no query length cuts the secret off.
_PREFIX = 24
# Of so many fair coins, fewer than two fall on one side in 3 of a million draws.
_FEWEST_COINS = 24


SETTINGS: settings.Declaration = {
    "data": settings.Text(sources.PYDOCS, required=True),
    "split": settings.Text("train", required=True),
    "most_pairs": settings.Integer(0, 0),
    "user_field": settings.Text("user_id", required=True),
    "forms": settings.Several(
        canary_set.OUR_FORMS, settings.Text("", canary_set.FORMS)
    ),
    "repetitions": settings.Several((10, 100), settings.Integer(1, 1, 10**6)),
    "trials": settings.Integer(5, 0, 1000000),
    "candidates": settings.Integer(100, 20, 10000),
    "digits": settings.Integer(10, 8, 18),
    "query_characters": settings.Integer(0, 0, 10**6),
    "document_characters": settings.Integer(0, 0, 10**6),
    "coins": settings.Integer(0, _FEWEST_COINS, 10**6, zero=True),
    "seed": settings.Integer(-1, -settings.SEED, settings.SEED),
    "private_directory": settings.Text(""),
}


ACTING = (acting.Only("forms repetitions candidates", "trials"),)


def default_config() -> ml_collections.ConfigDict:
    """Returns the stage's settings.

    `trials` canaries are made of each form and number of repetitions, `coins` (24 at
    least, or none) with a coin. `most_pairs` of the split's pairs are kept, drawn at
    random: a secret is learnt sooner among fewer; 0 keeps all. The paper's forms keep
    `query_characters` of a query and `document_characters` of a document before the
    secret, 0 for all: training cuts longer ones, and the secret with them. `user_field`
    names a query's user in queries.jsonl, as in `finetune`. A `seed` below 0 is drawn
    at random; a known seed gives the secrets away.
    """
    return settings.default_config(SETTINGS)


def run(config: ml_collections.ConfigDict, directory: pathlib.Path) -> dict:
    """Runs the stage into `directory` unless it is finished there.

    Raises:
      InputError: bad settings, a directory that is not under `private/`, a data set
        that is not private pairs, fewer pairs than canaries, or queries with users
        beside some without.
      DataError: malformed data.
    """
    acting.check(config, SETTINGS, ACTING)
    private = releases.private_directory(directory, config.private_directory)
    _check(config, private, directory)
    output = releases.Output(
        directory,
        releases.PRIVATE,
        "private pairs with secrets among them",
        config.private_directory,
    )
    beir = sources.open_beir(config.data)
    inputs = {"data": sources.source_fingerprint(config.data, private)}

    def make(out: pathlib.Path) -> dict:
        fresh = config.seed < 0
        random = np.random.default_rng(
            system_randomness.randbits(256) if fresh else config.seed
        )
        made = make_canaries(beir, config, random)
        (out / canary_set.DATA).mkdir()
        left_out = _left_out(beir, config.split, config.most_pairs, random)
        rows = _write_data(
            out / canary_set.DATA, beir, config.split, config.user_field, made, left_out
        )
        write_json(out / canary_set.DATA / releases.MARK_FILE, canary_set.MARK)
        lines = [json.dumps(dataclasses.asdict(canary)) for canary in made]
        atomic_write(
            out / canary_set.CANARIES_FILE, "".join(line + "\n" for line in lines)
        )
        return {"canaries": len(made), "queries_added": rows}

    return workdir.run_stage(output, config, inputs, make)


def make_canaries(
    beir: BeirDirectory, config: ml_collections.ConfigDict, random: np.random.Generator
) -> list[canary_set.Canary]:
    """Draws canaries for a split of private pairs, each on a document of its own.

    `random` gives secrets and coins.

    Raises:
      InputError: fewer documents than canaries.
    """
    kinds = [
        (form, repetitions, False)
        for form in config.forms
        for repetitions in config.repetitions
        for _ in range(config.trials)
    ]
    heads = random.random(config.coins) < 0.5
    kinds += [("random_document", int(head), True) for head in heads]
    pairs = beir.pairs(config.split)
    documents = sum(1 for _ in beir.documents())
    # One pair of each document, so that no document has two canaries.
    shuffled = random.permutation(len(pairs))
    documents_of = [document_id for _, document_id in pairs.ids()]
    last = {documents_of[row]: row for row in shuffled.tolist()}
    if len(kinds) > min(len(last), documents // 2):
        raise validation.InputError(
            f"the settings give {len(kinds)} canaries, each on a document of its own, "
            f"but split {config.split!r} has queries on {len(last)} documents, the "
            f"corpus holds {documents}. Lower trials, forms, repetitions or coins."
        )
    own = [pairs[row] for row in itertools.islice(last.values(), len(kinds))]
    taken = {pair.document_id for pair in own}
    # At most half of these are taken.
    free = random.permutation(documents)[: 2 * len(kinds)].tolist()
    wanted = set(free)
    ids = {row: d.id for row, d in enumerate(beir.documents()) if row in wanted}
    others = (ids[row] for row in free if ids[row] not in taken)
    numbers = _numbers(config.digits, random)
    found = []
    for (form, repetitions, coin), pair in zip(kinds, own):
        in_document = form in canary_set.IN_DOCUMENT
        found.append(
            canary_set.Canary(
                form=form,
                repetitions=repetitions,
                coin=coin,
                prefix=_prefix(form, pair.query, config.query_characters),
                secret=next(numbers),
                candidates=()
                if coin
                else tuple(itertools.islice(numbers, config.candidates - 1)),
                document_id=pair.document_id
                if form in ("own_document", "paper_query", "paper_own_document")
                else next(others),
                document_characters=config.document_characters if in_document else 0,
            )
        )
    return found


def _prefix(form: str, query: str, most: int) -> str:
    """Returns what a canary of a form keeps of a random query.

    `most` characters in the paper's forms, 0 for all of them.
    """
    if form == "secret":
        return ""
    if form not in canary_set.PAPER_FORMS:
        return _first_words(query, _PREFIX)
    return _first_words(query, most or len(query))


def _first_words(query: str, most: int) -> str:
    """Returns the whole words of a query that fit, or a part of the first."""
    words = query.split()
    found = words[0][:most]
    for word in words[1:]:
        if len(found) + 1 + len(word) > most:
            break
        found += f" {word}"
    return found


def _numbers(digits: int, random: np.random.Generator) -> Iterator[str]:
    """Yields distinct numbers with so many digits, which may start with 0."""
    seen = set()
    while True:
        number = "".join(map(str, random.integers(0, 10, digits)))
        if number not in seen:
            seen.add(number)
            yield number


def _write_data(
    directory: pathlib.Path,
    beir: BeirDirectory,
    split: str,
    user_field: str,
    made: Iterable[canary_set.Canary],
    left_out: Set[str],
) -> int:
    """Writes the pairs and the canaries, each query with its user.

    Skips the queries `left_out` of the split.

    Returns:
      The number of queries that were added.
    """
    rows = 0
    made = list(made)
    has_users = _has_users(beir, split, user_field)
    # Names that canaries take: no query, and no user, may have one of them already.
    taken = {f"{canary_set.ID_PREFIX}{number}" for number in range(len(made))}
    found: set[str] = set()
    with BeirWriter(directory) as writer:
        for document in _with_secrets(beir, made):
            writer.add_document(document)
        for query_id, text, given in beir.read_query_lines():
            # In data without users, the only query of a user gives its id.
            named = has_users or names_user(given, user_field)
            fields = given if named else _with_user(given, user_field, query_id)
            found |= taken & {query_id.rpartition("-")[0], *_users(fields, user_field)}
            if query_id not in left_out:
                writer.add_query(query_id, text, fields)
        for each in beir.splits():
            for row in beir.judgements(each):
                if row.query_id not in left_out:
                    values = (row.query_id, row.document_id, row.score)
                    writer.add_judgement(each, *values)
        for number, canary in enumerate(made):
            user = f"{canary_set.ID_PREFIX}{number}"
            for copy in range(canary.repetitions):
                query_id = f"{user}-{copy}"
                if user in found:
                    raise validation.InputError(
                        f"query {query_id!r} or user {user!r} of the data has the name "
                        "of a canary's: these pairs already hold canaries. Start from "
                        "pairs without."
                    )
                whose = {"metadata": {user_field: user}}
                writer.add_query(query_id, canary.query(), whose)
                document_id = user if canary.in_document else canary.document_id
                writer.add_judgement(split, query_id, document_id, 1)
                rows += 1
    return rows


def _with_secrets(
    beir: BeirDirectory, made: Sequence[canary_set.Canary]
) -> Iterator[Document]:
    """Yields all documents, and then those that end with a secret.

    Raises:
      InputError: a document has the name of a canary's.
    """
    of_canaries = {
        f"{canary_set.ID_PREFIX}{number}": canary
        for number, canary in enumerate(made)
        if canary.in_document
    }
    wanted = {canary.document_id for canary in of_canaries.values()}
    contents = {}
    for document in beir.documents():
        if document.id in of_canaries:
            raise validation.InputError(
                f"document {document.id!r} of the data has the name of a canary's: "
                "these pairs already hold canaries. Start from pairs without."
            )
        if document.id in wanted:
            contents[document.id] = document.content
        yield document
    for name, canary in of_canaries.items():
        yield Document(name, "", canary.document(contents[canary.document_id]))


def _left_out(
    beir: BeirDirectory, split: str, most_pairs: int, random: np.random.Generator
) -> set[str]:
    """Draws the split's queries beyond `most_pairs`; returns ids in no other split."""
    if not most_pairs:
        return set()
    rows = sorted({row.query_id for row in beir.positives(split)})
    elsewhere = {
        query_id
        for other in beir.splits()
        if other != split
        for query_id in beir.qrels(other)
    }
    dropped = random.permutation(len(rows))[most_pairs:]
    return {rows[place] for place in dropped} - elsewhere


def _has_users(beir: BeirDirectory, split: str, field: str) -> bool:
    """Returns whether the queries of a split have users.

    Raises:
      InputError: some have and others have not.
    """
    pairs = beir.pairs(split)
    known = {query_id for query_id, _ in pairs.ids()}
    named = (
        names_user(given, field) and query_id in known
        for query_id, _, given in beir.read_query_lines()
    )
    if not any(named):
        return False
    try:
        beir.owners(pairs, field)
    except validation.DataError as error:
        raise validation.InputError(
            f"user_field is {field!r}, which some queries of {split!r} have and others "
            f"lack: {error} For canaries, either all queries have one, or none."
        ) from error
    return True


def _with_user(given: dict[str, Any], field: str, user: str) -> dict[str, Any]:
    """Returns the fields of a query's line with a user."""
    metadata = given.get("metadata")
    kept = metadata if isinstance(metadata, dict) else {}
    return {**given, "metadata": {**kept, field: user}}


def _users(given: dict[str, Any], field: str) -> set[str]:
    """Returns what a query's line names as its user, be it several."""
    metadata = given.get("metadata")
    inside = metadata.get(field) if isinstance(metadata, dict) else None
    return {str(inside), str(given.get(field))}


def _check(
    config: ml_collections.ConfigDict, private: pathlib.Path, directory: pathlib.Path
) -> None:
    if not releases.is_inside(directory, private):
        raise validation.InputError(
            f"{directory} is not under {private}. It would hold the private pairs: "
            "give a --workdir inside a directory called private."
        )
    for name, forms in (
        ("query_characters", canary_set.PAPER_FORMS),
        ("document_characters", canary_set.IN_DOCUMENT),
    ):
        if config[name] and not set(forms) & set(config.forms):
            raise validation.InputError(
                f"{name} is {config[name]}, which does nothing here: it acts only on "
                f"canaries of the forms {', '.join(forms)}. Leave it at 0, or add one "
                "of these to forms."
            )
    if config.data != sources.PYDOCS and sources.is_free(config.data):
        raise validation.InputError(
            f"{config.data} is a synthetic or public set. Canaries are put among the "
            "private pairs that a generator is trained on: give a BEIR directory."
        )


if __name__ == "__main__":
    command.main(run)
