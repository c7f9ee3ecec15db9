"""Canaries among the pairs: where they stand, whose they are, and among how many."""

import collections
import json
import os
import shutil

import pytest
from helpers import tiny as _tiny

from tfdpsq.data import BeirDirectory
from tfdpsq.run import canaries
from tfdpsq.run.attacks import canary_set
from tfdpsq.run.core import releases
from tfdpsq.run.training import context
from tfdpsq.validation import InputError


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Pairs, and the same with canaries."""
    base = tmp_path_factory.mktemp("canaries")
    _tiny.write_pairs(base / "pairs", train=120)
    _insert(base, "private/canaries")
    return base


def _insert(base, name, **settings):
    config = canaries.default_config()
    config.update(
        data=str(base / "pairs"),
        repetitions=(3, 5),
        trials=2,
        candidates=20,
        coins=30,
        seed=4,
    )
    config.update(settings)
    canaries.run(config, base / name)


def test_canaries_stand_among_the_pairs(base):
    """Every canary so often, on its document; all other pairs as they were."""
    made = canary_set.read_canaries(base / "private" / "canaries")
    before = BeirDirectory(base / "pairs")
    after = BeirDirectory(base / "private" / "canaries" / "data")
    for split in ("dev", "test"):
        assert after.pairs(split) == before.pairs(split)
    added = [p for p in after.pairs("train") if p.query_id.startswith("canary-")]
    rest = [p for p in after.pairs("train") if not p.query_id.startswith("canary-")]
    assert rest == before.pairs("train")
    found = collections.Counter((p.query, p.document_id) for p in added)
    wanted = collections.Counter()
    for canary in made:
        wanted[canary.query(), canary.document_id] += canary.repetitions
    assert found == +wanted
    assert len({canary.document_id for canary in made}) == len(made)
    secrets = [s for canary in made for s in (canary.secret, *canary.candidates)]
    assert len(set(secrets)) == len(secrets)
    assert all(len(secret) == 10 and secret.isdigit() for secret in secrets)


def test_the_papers_secrets_are_in_the_query_its_document_or_another(base):
    """As (query, document): in the last two, the document is new and ends with it."""
    options = {"forms": canary_set.PAPER_FORMS, "document_characters": 30}
    _insert(base, "private/paper", **options, coins=0)
    made = canary_set.read_canaries(base / "private" / "paper")
    before = BeirDirectory(base / "pairs")
    after = BeirDirectory(base / "private" / "paper" / "data")
    given = {d.id: d.content for d in before.documents()}
    found = {d.id: d.content for d in after.documents()}
    asked = {pair.query: pair.document_id for pair in before.pairs("train")}
    trained = [p for p in after.pairs("train") if p.query_id.startswith("canary-")]
    assert {name: found[name] for name in given} == given
    assert len(found) == len(given) + sum(c.form != "paper_query" for c in made)
    for number, canary in enumerate(made):
        pairs = [p for p in trained if p.query_id.startswith(f"canary-{number}-")]
        assert len(pairs) == canary.repetitions
        own = asked[canary.prefix]  # a whole query
        for pair in pairs:
            if canary.form == "paper_query":
                assert pair.query == f"{canary.prefix} {canary.secret}"
                assert pair.document_id == own
                continue
            assert pair.query == canary.prefix
            assert (canary.document_id == own) == (canary.form == "paper_own_document")
            kept = given[canary.document_id][:30].rstrip()
            assert pair.document == f"{kept} {canary.secret}"
    assert {canary.form for canary in made} == set(canary_set.PAPER_FORMS)
    with pytest.raises(InputError, match=r"document 'canary-\d' of the data has"):
        data = str(base / "private" / "paper" / "data")
        _insert(base, "private/x", data=data, **options, coins=0)


def test_all_queries_of_a_canary_are_one_users(base):
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

    def in_turn(row):
        if row % 2:
            return {"metadata": {"who": f"u{row % 7}", "city": "Bern"}}
        return {"who": row % 7, "lang": "en"}

    changed, after = insert("in_turn", in_turn)
    users = after.users(field="who")
    for row, line in enumerate(changed):
        assert users[line["_id"]] == (f"u{row % 7}" if row % 2 else str(row % 7))
        kept = {key: line[key] for key in line if key not in ("_id", "text")}
        assert after.other_fields()[line["_id"]] == kept
    added = {users[q] for q in users if q.startswith("canary-")}
    assert added.isdisjoint(users[line["_id"]] for line in changed)
    # Users of training queries only are enough to train on, and so for this.
    changed, after = insert("train", lambda row: {"who": "a"} if row < 120 else {})
    assert set(after.users("train", "who").values()) - {"a"} == {
        f"canary-{number}"
        for number, canary in enumerate(canary_set.read_canaries(after.path.parent))
        if canary.repetitions
    }
    with pytest.raises(InputError, match="some queries .*has no user under 'who'"):
        insert("some", lambda row: {"who": "a"} if row < 60 else {})
    with pytest.raises(InputError, match="user 'canary-0' .* already hold canaries"):
        insert("taken", lambda row: {"who": f"canary-{row}"})
    assert not (tmp_path / "private" / "some").exists()
    assert not (tmp_path / "private" / "taken").exists()


def test_so_many_pairs_are_kept_and_all_canaries(tmp_path):
    _tiny.write_pairs(tmp_path / "pairs", train=120)
    given = BeirDirectory(tmp_path / "pairs")
    options = {"trials": 1, "coins": 0, "repetitions": (1, 10)}
    _insert(tmp_path, "private/fewer", most_pairs=50, **options)
    made = canary_set.read_canaries(tmp_path / "private" / "fewer")
    fewer = BeirDirectory(tmp_path / "private" / "fewer" / canary_set.DATA)
    found = set(fewer.positives("train"))
    added = {name for name in found if name.startswith(canary_set.ID_PREFIX)}
    kept = found - added
    assert len(added) == sum(canary.repetitions for canary in made) == 33
    assert len(kept) == 50 and kept < set(given.positives("train"))
    # Drawn at random, not the first ones.
    assert kept != {f"q{i}" for i in range(50)}
    for split in ("dev", "test"):
        assert fewer.qrels(split) == given.qrels(split)
    # What is left out is nowhere, and documents are all there: they are public.
    left_out = set(given.positives("train")) - kept
    assert left_out.isdisjoint(fewer.queries())
    assert [d.id for d in fewer.documents()] == [d.id for d in given.documents()]
    # Every query has a user, so that a generator can be trained for users.
    assert set(fewer.users("train")) == found


def test_a_number_of_pairs_that_is_none_is_refused(tmp_path):
    _tiny.write_pairs(tmp_path / "pairs", train=20)
    with pytest.raises(InputError, match="most_pairs is -3"):
        _insert(tmp_path, "private/fewer", most_pairs=-3)
    assert not (tmp_path / "private" / "fewer").exists()


def _require_known(pairs, base):
    """Nothing made of these may be released, whatever its ε."""
    assert canary_set.holds_canaries(str(pairs))
    assert canary_set.holds_canaries(f"file://{os.path.abspath(pairs)}")
    assert releases.PRIVATE == context.guarantee_of_training(
        str(pairs), "", None, True, True
    )
    with pytest.raises(InputError, match="holds canaries"):
        canary_set.require_private_output(
            str(pairs), base / "private", base / "release" / "generator"
        )
    for guarantee in (releases.PUBLIC, releases.CERTIFIED):
        output = releases.Output(base / "release" / "set", guarantee, "a set")
        with pytest.raises(InputError, match="corpus is .*, whose guarantee is 'priva"):
            releases.check_lineage(output, {"corpus": str(pairs)})


def test_canaries_are_known_wherever_they_are(base, tmp_path, monkeypatch):
    """A link to them made their generator "certified", and so did a copy."""
    kept = tmp_path / "private" / "canaries"
    shutil.copytree(base / "private" / "canaries", kept)
    data = kept / "data"
    (tmp_path / "link").symlink_to(data)
    (tmp_path / "again").symlink_to(tmp_path / "link")
    (tmp_path / "of_files").mkdir()
    for path in data.iterdir():
        if path.name != releases.MARK_FILE:
            (tmp_path / "of_files" / path.name).symlink_to(path)
    links = [tmp_path / name for name in ("link", "again", "of_files")]
    for pairs in (data, *links):
        _require_known(pairs, tmp_path)
    shutil.copytree(data, tmp_path / "copy")
    _require_known(tmp_path / "copy", tmp_path)
    monkeypatch.chdir(data)
    _require_known(".", tmp_path)
    # Of a version without marks: links lead there.
    (data / releases.MARK_FILE).unlink()
    for pairs in (data, *links):
        _require_known(pairs, tmp_path)
    assert not canary_set.holds_canaries(str(base / "pairs"))
