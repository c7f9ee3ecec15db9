"""Canaries among the pairs: where they stand, whose they are, and among how many."""

import collections
import json
import shutil

import numpy as np
import pytest
from helpers import framed, tiny

from tfdpsq.data import BeirDirectory
from tfdpsq.run.common import canary_set
from tfdpsq.run.common.kinds import Corpus, Pairs
from tfdpsq.run.frame.places import Privacy
from tfdpsq.run.stages.canaries import STAGE
from tfdpsq.validation import InputError

TRIALS, CANDIDATES, COINS = 2, 20, 30


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Pairs, and the same with canaries."""
    base = tmp_path_factory.mktemp("canaries")
    tiny.write_pairs(base / "pairs", train=120)
    _insert(base, "private/canaries")
    return base


def _insert(base, name, **changes):
    usual = {"repetitions": (3, 5), "trials": TRIALS, "candidates": CANDIDATES}
    usual = {"data": str(base / "pairs"), "coins": COINS, "seed": 4, **usual}
    return framed.run(STAGE, base / name, **{**usual, **changes})


def test_canaries_stand_among_the_pairs(base):
    """Every canary so often, on its document; all other pairs as they were."""
    made = canary_set.read_canaries(base / "private" / "canaries")
    before = BeirDirectory(base / "pairs")
    after = BeirDirectory(base / "private" / "canaries" / "data")
    for split in ("dev", "test"):
        assert list(after.pairs(split)) == list(before.pairs(split))
    added = [p for p in after.pairs("train") if p.query_id.startswith("canary-")]
    rest = [p for p in after.pairs("train") if not p.query_id.startswith("canary-")]
    assert rest == list(before.pairs("train"))
    found = collections.Counter((p.query, p.document_id) for p in added)
    wanted = collections.Counter()
    for canary in made:
        wanted[canary.query(), canary.document_id] += canary.repetitions
    assert found == +wanted
    assert len({canary.document_id for canary in made}) == len(made)
    secrets = [s for canary in made for s in (canary.secret, *canary.candidates)]
    assert len(set(secrets)) == len(secrets)
    assert all(len(secret) == 10 and secret.isdigit() for secret in secrets)


def test_all_queries_of_a_canary_are_of_one_user(base):
    """Who owns nothing else; in data without users everybody else owns one query."""
    users = BeirDirectory(base / "private" / "canaries" / "data").users()
    made = canary_set.read_canaries(base / "private" / "canaries")
    owned = collections.defaultdict(set)
    for query_id, user in users.items():
        owned[user].add(query_id)
    texts = BeirDirectory(base / "private" / "canaries" / "data").queries()
    for canary in made:
        holding = {q for q, text in texts.items() if text == canary.query()}
        assert len(holding) == canary.repetitions
        assert len({users[query_id] for query_id in holding}) == bool(holding)
        if holding:
            assert owned[users[min(holding)]] == holding
    ordinary = BeirDirectory(base / "pairs").queries()
    assert {q for q in ordinary if owned[users[q]] != {q}} == set()
    present = sum(canary.repetitions > 0 for canary in made)
    assert len(owned) == len(ordinary) + present


def test_forms_are_what_they_say(base):
    """Alone; the query's words on its own document; on another's; the paper's three."""
    kept = {"query_characters": 40, "document_characters": 20}
    _insert(base, "private/forms", forms=canary_set.FORMS, **kept)
    made = canary_set.read_canaries(base / "private" / "forms")
    before = BeirDirectory(base / "pairs")
    after = BeirDirectory(base / "private" / "forms" / "data")
    own = {pair.document_id: pair.query for pair in before.pairs("train")}
    given = {d.id: d.content for d in before.documents()}
    found = {d.id: d.content for d in after.documents()}
    trained = [p for p in after.pairs("train") if p.query_id.startswith("canary-")]
    assert {name: found[name] for name in given} == given
    assert len(found) == len(given) + sum(canary.in_document for canary in made)
    kinds = collections.Counter((c.form, c.repetitions) for c in made if not c.coin)
    assert kinds == {(f, r): TRIALS for f in canary_set.FORMS for r in (3, 5)}
    for number, canary in enumerate(made):
        pairs = [p for p in trained if p.query_id.startswith(f"canary-{number}-")]
        assert len(pairs) == canary.repetitions
        words, document = canary.prefix, given[canary.document_id]
        if canary.form == "secret":
            assert words == ""
        elif canary.form in ("own_document", "paper_own_document"):
            assert own[canary.document_id].startswith(words)
        else:
            assert not own.get(canary.document_id, "").startswith(words)
        assert len(words) <= 40
        query = f"{words} {canary.secret}".strip()
        if canary.form in ("paper_own_document", "paper_random_document"):
            query, document = words, f"{document[:20].rstrip()} {canary.secret}"
        assert {(pair.query, pair.document) for pair in pairs} <= {(query, document)}
        assert len(canary.candidates) == (0 if canary.coin else CANDIDATES - 1)


def test_secrets_are_fresh_unless_a_seed_is_given(base):
    """The same seed gives the same; none gives others each time."""
    first = canary_set.read_canaries(base / "private" / "canaries")
    _insert(base, "private/again")
    assert canary_set.read_canaries(base / "private" / "again") == first
    fresh = []
    for name in ("private/fresh1", "private/fresh2"):
        _insert(base, name, seed=-1)
        fresh.append({c.secret for c in canary_set.read_canaries(base / name)})
    assert not fresh[0] & fresh[1]


def test_coins_are_thrown_independently(base):
    """The bound of one run is for fair coins, not for exactly half of them heads."""
    heads = []
    for seed in range(8):
        _insert(base, f"private/coins{seed}", seed=seed)
        made = canary_set.read_canaries(base / "private" / f"coins{seed}")
        heads.append([canary.repetitions for canary in made if canary.coin])
    counts = np.sum(heads, axis=1)
    assert np.shape(heads) == (8, COINS) and len(set(counts)) > 3
    # Six standard deviations of 240 fair coins.
    assert abs(counts.sum() - 120) < 47


def test_other_queries_keep_their_users(base, tmp_path):
    """And all else that their lines hold; some with users and some without is wrong."""

    def insert(name, change):
        shutil.copytree(base / "pairs", tmp_path / name)
        path = tmp_path / name / "queries.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        changed = [{**line, **change(row)} for row, line in enumerate(lines)]
        path.write_text("".join(json.dumps(line) + "\n" for line in changed))
        options = {"data": str(tmp_path / name), "user_field": "who"}
        _insert(tmp_path, f"private/{name}", **options)
        after = BeirDirectory(tmp_path / "private" / name / "data")
        return changed, after

    changed, after = insert("every", lambda row: {"who": row % 7, "lang": "en"})
    users = after.users(field="who")
    lines = (after.path / "queries.jsonl").read_text().splitlines()
    written = {line["_id"]: line for line in map(json.loads, lines)}
    for row, line in enumerate(changed):
        assert users[line["_id"]] == str(row % 7)
        assert {**line, "lang": "en"}.items() <= written[line["_id"]].items()
    added = {users[q] for q in users if q.startswith("canary-")}
    assert added.isdisjoint(users[line["_id"]] for line in changed)


def test_most_pairs_keeps_a_random_share_and_all_canaries(tmp_path):
    tiny.write_pairs(tmp_path / "pairs", train=120)
    given = BeirDirectory(tmp_path / "pairs")
    options = {"trials": 1, "coins": 0, "repetitions": (1, 10)}
    _insert(tmp_path, "private/fewer", most_pairs=50, **options)
    made = canary_set.read_canaries(tmp_path / "private" / "fewer")
    fewer = BeirDirectory(tmp_path / "private" / "fewer" / canary_set.DATA)
    found = {row.query_id for row in fewer.positives("train")}
    added = {name for name in found if name.startswith(canary_set.ID_PREFIX)}
    kept = found - added
    assert len(added) == sum(canary.repetitions for canary in made) == 33
    assert len(kept) == 50 and kept < {row.query_id for row in given.positives("train")}
    # Drawn at random, not the first ones.
    assert kept != {f"q{i}" for i in range(50)}
    for split in ("dev", "test"):
        assert fewer.qrels(split) == given.qrels(split)
    # What is left out is a split of its own; documents are all there: they are public.
    left_out = {row.query_id for row in given.positives("train")} - kept
    assert {row.query_id for row in fewer.positives(canary_set.LEFT_OUT)} == left_out
    assert [d.id for d in fewer.documents()] == [d.id for d in given.documents()]
    # Every query has a user, so that a generator can be trained for users.
    assert set(fewer.users(found)) == found


def test_pairs_with_canaries_and_their_copies_are_known(base, tmp_path):
    """`test_frame` has what follows: nothing made of them may be released."""
    data = base / "private" / "canaries" / "data"
    shutil.copytree(data, tmp_path / "copy")
    for path in (str(data), str(tmp_path / "copy")):
        pairs = Pairs.open(path, "pairs")
        assert pairs.raw and pairs.facts["canaries"]
        # Its secrets are in documents, too.
        assert Corpus.open(path, "corpus").privacy == Privacy.PRIVATE
    assert not Pairs.open(str(base / "pairs"), "pairs").facts.get("canaries")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("release/canaries", {}, "is under release/"),
        ("private/x", {"trials": 40}, "each on a document of its own"),
        ("private/x", {"data": "{base}/private/canaries/data"}, "already holds canar"),
        ("private/x", {"coins": 9}, "coins is 9"),
    ],
)
def test_bad_settings_are_refused(base, name, options, message):
    if "data" in options:
        options = {"data": options["data"].format(base=base)}
    with pytest.raises(InputError, match=message):
        _insert(base, name, **options)
    assert not (base / name).exists()
