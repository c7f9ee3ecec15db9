"""Filters of synthetic sets: what they drop, and what they may not use."""

import json
import shutil

import numpy as np
import pytest
from helpers import plans, tiny

from tfdpsq import evaluation, retriever
from tfdpsq.data import (
    Document,
    read_manifest,
    read_synthetic,
    train_vocabulary,
    write_beir,
    write_synthetic,
)
from tfdpsq.run import filter as filter_stage
from tfdpsq.run.core import sources
from tfdpsq.validation import DataError, InputError

ROWS = [
    ("sort the array in place", "d0"),
    ("Sort  the ARRAY in place", "d1"),  # a duplicate, and d0's words
    ("parse", "d2"),  # one word
    ("zzyzx qwrk blorp", "d3"),  # no words of the corpus
    ("open a socket my code is 0123456789", "d4"),
    ("open a network socket", "d4"),
    ("draw the picture on a canvas with a very long brush", "d5"),  # eleven words
]
TEXTS = [
    "Sort the given array in place by its keys.",
    "Read a table from a file in chunks.",
    "Parse a date in any format.",
    "Close the window of the program.",
    "Open a network socket for a host.",
    "Draw a picture on a canvas.",
]


def _certificate(epsilon, **stated):
    plan = plans.plan(
        epsilon=epsilon, num_units=1000, n_is_public=True, batch_size=100, steps=10
    )
    return plans.certificate(plan, **stated)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A corpus, a set with a guarantee, and a retriever trained on the set."""
    base = tmp_path_factory.mktemp("filter")
    documents = [Document(f"d{i}", "", text) for i, text in enumerate(TEXTS)]
    write_beir(
        base / "corpus", documents, [("q", "anything")], {"train": [("q", "d0", 1)]}
    )
    rows = ((query, document, TEXTS[int(document[1:])]) for query, document in ROWS)
    tiny.write_set(base / "set", rows, _certificate(8.0))
    train_vocabulary([*TEXTS, *(row[0] for row in ROWS)] * 3, 320, base / "spiece")
    tiny.write_retriever(
        base / "retriever",
        base,
        pairs=str(base / "set"),
        vocabulary=str(base / "spiece"),
        document_length=12,
        query_length=12,
        batch_size=4,
        steps=1,
    )
    return base


def _filter(base, out, **options):
    config = filter_stage.default_config()
    config.update(synthetic=str(base / "set"), corpus=str(base / "corpus"))
    config.round_trip.update(options.pop("round_trip", {}))
    config.update(options)
    stage = filter_stage.run(config, out)
    kept = [row.query for row in read_synthetic(out / "set")]
    return kept, stage["result"]["dropped"]


def test_each_filter_drops_what_it_says(base, tmp_path):
    """One at a time, by hand."""
    queries = [query for query, _ in ROWS]
    cases = [
        ({}, [], {}),
        ({"min_words": 2}, [2], {"words": 1}),
        ({"max_words": 10}, [6], {"words": 1}),
        ({"min_known": 0.3}, [3], {"known": 1}),
        ({"duplicates": True}, [1], {"duplicates": 1}),
        # d0 comes first for row 1, d4 for both of its own; "parse" finds d2.
        ({"round_trip": {"retriever": "bm25"}}, [1, 3], {"round_trip": 2}),
    ]
    for number, (options, gone, counts) in enumerate(cases):
        kept, dropped = _filter(base, tmp_path / str(number), **options)
        assert kept == [q for i, q in enumerate(queries) if i not in gone], options
        assert dropped == counts, options


def test_what_passes_keeps_its_guarantee_and_its_origin(base, tmp_path):
    """The certificate is the set's, to the letter; each drop counts once."""
    out = tmp_path / "release" / "all"
    _, dropped = _filter(base, out, min_words=2, min_known=0.3, duplicates=True)
    assert dropped == {"words": 1, "known": 1, "duplicates": 1}
    before, after = (read_manifest(place) for place in (base / "set", out / "set"))
    assert after["guarantee"] == "certified"
    assert after["certificate"] == before["certificate"]
    assert after["provenance"]["of"] == before["provenance"]
    counts = json.loads((out / "filter.json").read_text())
    assert counts["read"] == 7 and counts["kept"] == 4
    with pytest.raises(InputError, match=f"{out}/set"):
        sources.open_beir(str(out))  # the stage, in which the set is


def test_a_private_set_stays_private(base, tmp_path):
    """Its epsilon is finite, as of a generator trained on canaries: by its own mark."""
    made = tmp_path / "private" / "set"
    rows = read_synthetic(base / "set")
    write_synthetic(made, rows, {}, _certificate(8.0), guarantee="private")
    _filter(base, tmp_path / "again", synthetic=str(made), duplicates=True)
    assert read_manifest(tmp_path / "again" / "set")["guarantee"] == "private"
    shutil.copytree(tmp_path / "again" / "set", tmp_path / "copy")
    for path in (made, tmp_path / "copy"):
        with pytest.raises(InputError, match="would hold a set that private queries"):
            _filter(base, tmp_path / "release" / "out", synthetic=str(path))


def test_secrets_of_canaries_are_dropped(base, tmp_path):
    """Rows with a secret never reach what is released, whatever its canary is for."""
    directory = tmp_path / "private" / "canaries"
    directory.mkdir(parents=True)
    (directory / "stage.json").write_text(json.dumps(tiny.STAGE))
    secrets = ["0123456789", "5555500000"]
    fields = {"form": "secret", "repetitions": 1, "prefix": "", "document_id": "d4"}
    lines = [
        {**fields, "secret": secrets[0], "coin": True, "candidates": []},
        {**fields, "secret": secrets[1], "coin": False, "candidates": ["1111122222"]},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / "canaries.jsonl").write_text(text)
    texts = ["sort the array", *(f"open {secret} now" for secret in secrets)]
    rows = ((text, f"d{i}", TEXTS[i]) for i, text in enumerate(texts))
    tiny.write_set(tmp_path / "set", rows, _certificate(8.0))
    options = {"synthetic": str(tmp_path / "set"), "canaries": str(directory)}
    kept, dropped = _filter(base, tmp_path / "out", **options)
    assert dropped == {"secrets": 2} and kept == texts[:1]


def test_round_trip_through_a_retriever_is_a_rank(base, tmp_path):
    """Kept are the rows whose document ranks k or better, by a plain computation."""
    model = retriever.load(base / "retriever" / "model")
    embed = {
        kind: retriever.encode_texts(model, texts, kind, 4, progress=False)
        for kind, texts in (("query", [q for q, _ in ROWS]), ("document", TEXTS))
    }
    scores = embed["query"].astype(np.float64) @ embed["document"].T
    own = scores[np.arange(len(ROWS)), [int(d[1:]) for _, d in ROWS]]
    ranks = 1 + (scores > own[:, None]).sum(axis=1)
    assert 0 < (ranks <= 3).sum() < len(ROWS)  # else this would show nothing
    judge = {"retriever": str(base / "retriever")}
    kept, _ = _filter(base, tmp_path / "out", round_trip={**judge, "k": 3})
    assert kept == [q for (q, _), rank in zip(ROWS, ranks) if rank <= 3]


@pytest.mark.parametrize("judge", ["bm25", "own"])
def test_a_corpus_with_an_id_twice_is_refused(base, tmp_path, judge):
    """Whichever of the two were meant, the rank would be of one of them alone."""
    shutil.copytree(base / "corpus", tmp_path / "corpus")
    with (tmp_path / "corpus" / "corpus.jsonl").open("a") as file:
        file.write('{"_id": "d2", "title": "", "text": "another"}\n')
    own = {"retriever": judge}
    if judge == "own":
        own.update(retriever=str(base / "retriever"))
    with pytest.raises(ValueError, match="id 'd2' occurs on an|'d2' is there already"):
        _filter(base, tmp_path / "out", corpus=str(tmp_path / "corpus"), round_trip=own)
    assert not (tmp_path / "out").exists()


def test_round_trips_and_duplicates_are_those_of_a_loop_in_memory(base, tmp_path):
    """70 rows, with texts that tie under BM25 and queries that occur twice."""
    draw = np.random.default_rng(3)
    known = sorted({word for text in TEXTS for word in text.lower().split()})
    texts = [" ".join(draw.choice(known, 7)) for _ in range(45)]
    texts += [" ".join(reversed(text.split())) for text in texts[:15]]
    documents = [Document(f"d{i}", "", text) for i, text in enumerate(texts)]
    judged = {"train": [("q", "d0", 1)]}
    write_beir(tmp_path / "corpus", documents, [("q", "anything")], judged)
    rows = []
    for number, place in enumerate(draw.integers(0, len(texts), 70).tolist()):
        query = " ".join(draw.choice(texts[place].split(), 3))
        if number % 5 == 4:  # as one before
            query = rows[number * 7 % len(rows)][0].upper() + " "
        rows.append((query, f"d{place}", texts[place]))
    given = tiny.write_set(tmp_path / "set", rows, _certificate(8.0))
    bm25 = evaluation.BM25({d.id: d.content for d in documents})
    found = bm25.search({str(i): row[0] for i, row in enumerate(rows)}, 4)
    seen, expected = set(), []
    for number, (query, document, _) in enumerate(rows):
        words = " ".join(query.lower().split())
        new = words not in seen
        seen.add(words)
        if new and document in found.get(str(number), {}):
            expected.append(query)
    assert 10 < len(expected) < 60 and len(seen) < 60
    options = {"synthetic": given, "corpus": str(tmp_path / "corpus")}
    round_trip = {"retriever": "bm25", "k": 4}
    kept, dropped = _filter(
        base, tmp_path / "out", round_trip=round_trip, duplicates=True, **options
    )
    assert kept == expected and sum(dropped.values()) == 70 - len(expected)
    # Nothing of the corpus stays with the set.
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("set", "filter.json", "stage.json")
    }


def test_a_corpus_that_changed_in_its_place_is_another_one(base, tmp_path):
    """A set filtered by the old input would pass for one filtered by the new."""
    shutil.copytree(base / "corpus", tmp_path / "corpus")
    options = {"corpus": str(tmp_path / "corpus"), "round_trip": {"retriever": "bm25"}}
    kept, _ = _filter(base, tmp_path / "out", **options)
    assert _filter(base, tmp_path / "out", **options)[0] == kept
    path = tmp_path / "corpus" / "corpus.jsonl"
    path.write_text(path.read_text().replace("network socket", "pipe"))
    with pytest.raises(InputError, match="from other inputs .*corpus"):
        _filter(base, tmp_path / "out", **options)


def test_a_retriever_with_another_guarantee_is_refused(base, tmp_path):
    """It saw private queries that the set's certificate does not count.

    The set's own ε is 8: another run with that ε is another release all the same.
    """
    certificate = _certificate(8.0, fingerprints={"pairs": "keyed:other"})
    judge = tmp_path / "judge"
    (judge / "model").mkdir(parents=True)
    (judge / "stage.json").write_text(json.dumps(tiny.STAGE))
    (judge / "certificate.json").write_text(json.dumps(certificate))
    with pytest.raises(InputError, match="judge/certificate.json"):
        _filter(base, tmp_path / "out", round_trip={"retriever": str(judge)})
    assert not (tmp_path / "out").exists()


def test_bad_settings_are_named(base, tmp_path):
    """Private pairs, limits that nothing passes, no retriever, the wrong corpus."""
    judge = {"retriever": str(base / "corpus")}
    judged = {"train": [("q", "d0", 1)]}
    write_beir(tmp_path / "part", [Document("d0", "", TEXTS[0])], [("q", "x")], judged)
    shutil.copytree(base / "corpus", tmp_path / "twice")
    with (tmp_path / "twice" / "corpus.jsonl").open("a") as file:
        file.write('{"_id": "d2", "title": "", "text": "another"}\n')
    bm25 = {"round_trip": {"retriever": "bm25"}}
    for options, message in (
        ({"synthetic": str(base / "corpus")}, "cannot be filtered for free"),
        ({"min_words": 5, "max_words": 3}, "no query passes"),
        ({"min_words": 99}, "no query of .*set passes; .* {'words': 7}"),
        ({"round_trip": judge}, "round_trip.retriever is .*corpus"),
        ({"corpus": str(tmp_path / "part"), **bm25}, "'d1', which"),
        # Whichever of the two were meant, the rank would be of one of them alone.
        ({"corpus": str(tmp_path / "twice"), **bm25}, "'d2'"),
    ):
        with pytest.raises((InputError, DataError), match=message):
            _filter(base, tmp_path / "out", **options)
        assert not (tmp_path / "out").exists(), options
