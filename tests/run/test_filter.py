"""Filters of synthetic sets: what they drop, and what they may not use."""

import json
import math
import re
import shutil

import numpy as np
import pytest
import tensorflow as tf
from helpers import plans, tiny

from tfdpsq import evaluation, retriever
from tfdpsq.data import (
    Document,
    Tokenizer,
    read_manifest,
    read_synthetic,
    train_vocabulary,
    write_beir,
    write_synthetic,
)
from tfdpsq.data.records import SyntheticQuery
from tfdpsq.run import filter as filter_stage
from tfdpsq.run.core import releases, sources
from tfdpsq.run.search import round_trip
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


def test_what_passes_keeps_its_guarantee_and_its_origin(base, tmp_path, monkeypatch):
    """The certificate is the set's, to the letter; each drop counts once.

    By the stage itself, without what is checked of an output that was made.
    """
    monkeypatch.setattr(releases, "check_made", lambda *_: None)
    _, dropped = _filter(
        base, tmp_path / "all", min_words=2, min_known=0.3, duplicates=True
    )
    assert dropped == {"words": 1, "known": 1, "duplicates": 1}
    before, after = (read_manifest(p) for p in (base / "set", tmp_path / "all" / "set"))
    assert after["certificate"] == before["certificate"]
    assert after["provenance"]["of"] == before["provenance"]
    assert after["provenance"].get("inputs", {}).keys() == {"synthetic", "corpus"}
    counts = json.loads((tmp_path / "all" / "filter.json").read_text())
    assert counts["read"] == 7 and counts["kept"] == 4
    card = tmp_path / "all" / "set" / "README.md"
    spent = before["certificate"]["guarantee"]["epsilon"]
    (said,) = {float(x) for x in re.findall(r"\(ε = ([.\d]+)\)", card.read_text())}
    assert spent <= said < spent * 1.01
    output = str(tmp_path / "all")  # of the stage, in which the set is
    with pytest.raises(InputError, match=f"{output}/set: give that"):
        sources.open_beir(output)


def test_a_private_set_stays_private_wherever_it_is_copied(base, tmp_path):
    """Its epsilon is finite, as of a generator trained on canaries: by its own mark."""
    kept = tmp_path / "private" / "syn"
    shutil.copytree(base / "set", kept / "set")
    stage = {**tiny.STAGE, "guarantee": "private"}
    (kept / "stage.json").write_text(json.dumps(stage))  # of a version without marks
    (tmp_path / "link").symlink_to(kept / "set")
    _filter(base, tmp_path / "again", synthetic=str(kept / "set"), duplicates=True)
    made = tmp_path / "again" / "set"
    assert read_manifest(made).get("guarantee") == "private"
    shutil.copytree(made, tmp_path / "copy")
    for path in (kept / "set", tmp_path / "link", made, tmp_path / "copy"):
        with pytest.raises(InputError, match="would hold a set that private queries"):
            _filter(base, tmp_path / "release" / "out", synthetic=str(path))
    _filter(base, tmp_path / "release" / "out")
    assert read_manifest(tmp_path / "release/out/set")["guarantee"] == "certified"


def _canaries(directory):
    """Writes a canary with a coin, and one to be ranked; returns their secrets."""
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
    return secrets


def test_secrets_of_canaries_are_dropped(base, tmp_path):
    """Rows with a secret never reach what is released, whatever its canary is for."""
    made = tmp_path / "private" / "canaries"
    secrets = _canaries(made)
    texts = ["sort the array", *(f"open {secret} now" for secret in secrets)]
    rows = ((text, f"d{i}", TEXTS[i]) for i, text in enumerate(texts))
    tiny.write_set(tmp_path / "set", rows, _certificate(8.0))
    options = {"synthetic": str(tmp_path / "set"), "canaries": str(made)}
    kept, dropped = _filter(base, tmp_path / "out", **options)
    assert dropped == {"secrets": 2} and kept == texts[:1]


@pytest.mark.parametrize("changed", ["synthetic", "corpus", "retriever", "canaries"])
def test_an_input_that_changed_in_its_place_is_another_one(
    base, tmp_path, monkeypatch, changed
):
    """A set filtered by the old input would pass for one filtered by the new."""
    monkeypatch.setattr(
        filter_stage.round_trip,
        "comes_back",
        lambda *_: lambda rows: [True] * len(rows),
    )
    for name in ("set", "corpus", "retriever"):
        shutil.copytree(base / name, tmp_path / name)
    _canaries(tmp_path / "private" / "canaries")
    judge = {"retriever": str(tmp_path / "retriever"), "k": 3}
    options = {
        "synthetic": str(tmp_path / "set"),
        "corpus": str(tmp_path / "corpus"),
        "canaries": str(tmp_path / "private" / "canaries"),
        "round_trip": {**judge, "vocabulary": str(base / "spiece")},
    }
    kept, _ = _filter(base, tmp_path / "out", **options)
    assert _filter(base, tmp_path / "out", **options)[0] == kept
    if changed == "synthetic":
        rows = list(read_synthetic(tmp_path / "set"))[1:]
        shutil.rmtree(tmp_path / "set")
        write_synthetic(tmp_path / "set", rows, {"by": "a test"}, _certificate(8.0))
    elif changed == "corpus":
        lines = (tmp_path / "corpus" / "corpus.jsonl").read_text()
        edited = lines.replace("network socket", "pipe")
        (tmp_path / "corpus" / "corpus.jsonl").write_text(edited)
    else:
        folder = {"canaries": "private/canaries"}.get(changed, changed)
        stage = json.loads((tmp_path / folder / "stage.json").read_text())
        stage["run"] = "again"
        (tmp_path / folder / "stage.json").write_text(json.dumps(stage))
    with pytest.raises(InputError, match=f"from other inputs .*{changed}"):
        _filter(base, tmp_path / "out", **options)


def test_round_trip_through_a_retriever_is_a_rank(base, tmp_path):
    """Kept are the rows whose document ranks k or better, by a plain computation."""
    model = retriever.load(base / "retriever" / "model")
    tokenizer = Tokenizer(base / "spiece")
    embed = {
        kind: retriever.encode_texts(model, texts, tokenizer, kind, 4, progress=False)
        for kind, texts in (("query", [q for q, _ in ROWS]), ("document", TEXTS))
    }
    scores = embed["query"].astype(np.float64) @ embed["document"].T
    own = scores[np.arange(len(ROWS)), [int(d[1:]) for _, d in ROWS]]
    ranks = 1 + (scores > own[:, None]).sum(axis=1)
    assert 0 < (ranks <= 3).sum() < len(ROWS)  # else this would show nothing
    judge = {"retriever": str(base / "retriever"), "vocabulary": str(base / "spiece")}
    kept, _ = _filter(base, tmp_path / "out", round_trip={**judge, "k": 3})
    assert kept == [q for (q, _), rank in zip(ROWS, ranks) if rank <= 3]


@pytest.fixture(scope="module")
def larger(base):
    """A corpus and a set of more than a chunk: ties, duplicates across the borders."""
    draw = np.random.default_rng(3)
    known = sorted({word for text in TEXTS for word in text.lower().split()})
    texts = [" ".join(draw.choice(known, 7)) for _ in range(45)]
    # The same words, so the same score by BM25, but not the same embedding: of two that
    # are equal but for rounding, rounding says which is the better.
    texts += [" ".join(reversed(text.split())) for text in texts[:15]]
    documents = [Document(f"d{i}", "", text) for i, text in enumerate(texts)]
    write_beir(
        base / "larger", documents, [("q", "anything")], {"train": [("q", "d0", 1)]}
    )
    rows = []
    for number, place in enumerate(draw.integers(0, len(texts), 70).tolist()):
        words = texts[place].split()
        query = " ".join(draw.choice(words, 3))
        if number % 5 == 4:  # as one before, of this chunk or of another
            query = rows[number * 7 % len(rows)].query.upper() + " "
        rows.append(
            SyntheticQuery(f"genQ{number}", query, f"d{place}", texts[place], 0)
        )
    write_synthetic(base / "larger_set", rows, {"by": "a test"}, _certificate(8.0))
    return documents, rows


def _in_memory(base, judge, documents, rows, k):
    """Which rows come back, with the whole corpus in memory."""
    if judge == "bm25":
        index = evaluation.BM25((d.id, d.content) for d in documents)
        found = index.search({row.query_id: row.query for row in rows}, k)
        return [row.document_id in found.get(row.query_id, {}) for row in rows]
    model = retriever.load(base / "retriever" / "model")
    embed = {
        kind: retriever.encode_texts(
            model, texts, Tokenizer(base / "spiece"), kind, 128, progress=False
        )
        for kind, texts in (
            ("query", [row.query for row in rows]),
            ("document", [d.content for d in documents]),
        )
    }
    scores = embed["query"] @ embed["document"].T
    mine = [int(row.document_id[1:]) for row in rows]
    own = np.take_along_axis(scores, np.array(mine)[:, None], axis=1)
    return ((scores > own).sum(axis=1) < k).tolist()


@pytest.mark.parametrize(
    "judge, k, chunk",
    [("bm25", 1, 8192), ("bm25", 4, 9), ("own", 2, 8192), ("own", 9, 9)],
)
def test_round_trips_are_those_of_a_corpus_in_memory(
    base, larger, tmp_path, monkeypatch, judge, k, chunk
):
    """However set and corpus are cut; ties, here by BM25, go as they did."""
    documents, rows = larger
    monkeypatch.setattr(filter_stage, "_CHUNK", chunk)
    monkeypatch.setattr(round_trip, "ROWS", 20)  # shards: three, of a window each
    monkeypatch.setattr("tfdpsq.retriever.encoding._WINDOW", 1)
    monkeypatch.setattr("tfdpsq.retriever.store._RANKED", 5)
    expected = _in_memory(base, judge, documents, rows, k)
    assert 10 < sum(expected) < 60
    own = {"retriever": judge, "k": k}
    if judge == "own":
        own.update(retriever=str(base / "retriever"), vocabulary=str(base / "spiece"))
    paths = {"synthetic": str(base / "larger_set"), "corpus": str(base / "larger")}
    kept, dropped = _filter(
        base, tmp_path / "out", round_trip=own, batch_size=20, **paths
    )
    assert kept == [row.query for row, keep in zip(rows, expected) if keep]
    assert dropped == {"round_trip": 70 - len(kept)}
    # Nothing of the corpus stays with the set.
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "set",
        "filter.json",
        "stage.json",
    }


@pytest.mark.parametrize("chunk", [8192, 9])
def test_duplicates_and_known_words_are_those_of_python_sets(
    base, larger, tmp_path, monkeypatch, chunk
):
    """Wherever chunks end, and the words that are still in a set."""
    documents, rows = larger
    monkeypatch.setattr(filter_stage, "_CHUNK", chunk)
    monkeypatch.setattr(filter_stage, "BATCH", 5)
    seen, expected = set(), []
    known = {word.strip(".") for d in documents[:9] for word in d.content.split()}
    for row in rows:
        words = row.query.lower().split()
        if np.mean([word.strip(".") in known for word in words]) < 0.7:
            continue
        if " ".join(words) not in seen:
            expected.append(row.query)
        seen.add(" ".join(words))
    assert len(seen) < 60 and len(expected) > 10
    write_beir(
        tmp_path / "part", documents[:9], [("q", "x")], {"train": [("q", "d0", 1)]}
    )
    kept, dropped = _filter(
        base,
        tmp_path / "out",
        synthetic=str(base / "larger_set"),
        corpus=str(tmp_path / "part"),
        duplicates=True,
        min_known=0.7,
    )
    assert kept == expected
    assert sum(dropped.values()) == 70 - len(expected) and min(dropped.values()) > 3


@pytest.mark.parametrize("judge", ["bm25", "own"])
def test_a_corpus_with_an_id_twice_is_refused(base, tmp_path, judge):
    """Whichever of the two were meant, the rank would be of one of them alone."""
    shutil.copytree(base / "corpus", tmp_path / "corpus")
    with (tmp_path / "corpus" / "corpus.jsonl").open("a") as file:
        file.write('{"_id": "d2", "title": "", "text": "another"}\n')
    own = {"retriever": judge}
    if judge == "own":
        own.update(retriever=str(base / "retriever"), vocabulary=str(base / "spiece"))
    with pytest.raises(ValueError, match="id 'd2' occurs on an|'d2' is there already"):
        _filter(base, tmp_path / "out", corpus=str(tmp_path / "corpus"), round_trip=own)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("epsilon", [3.0, math.inf, 8.0])
def test_a_retriever_with_another_guarantee_is_refused(base, tmp_path, epsilon):
    """It saw private queries that the set's certificate does not count.

    The set's own ε is 8: another run with that ε is another release all the same.
    """
    certificate = _certificate(epsilon, fingerprints={"pairs": "keyed:other"})
    judge = tmp_path / "judge"
    (judge / "model").mkdir(parents=True)
    (judge / "stage.json").write_text(json.dumps(tiny.STAGE))
    (judge / "certificate.json").write_text(json.dumps(certificate))
    with pytest.raises(InputError) as error:
        _filter(base, tmp_path / "out", round_trip={"retriever": str(judge)})
    assert f"{judge}/certificate.json" in str(error.value)
    spent = certificate["guarantee"]["epsilon"]
    assert f"epsilon {spent})" in str(error.value)
    assert not (tmp_path / "out").exists()


def test_bad_settings_are_named(base, tmp_path):
    """Private pairs, limits that nothing passes, the wrong vocabulary or corpus."""
    judge = {"retriever": str(base / "retriever")}
    tf.io.gfile.copy(str(base / "spiece"), str(tmp_path / "same"))
    train_vocabulary([*TEXTS, "wolf"] * 5, 308, tmp_path / "other")
    write_beir(
        tmp_path / "corpus",
        [Document("d0", "", TEXTS[0])],
        [("q", "x")],
        {"train": [("q", "d0", 1)]},
    )
    for options, message in (
        ({"synthetic": str(base / "corpus")}, "cannot be filtered for free"),
        ({"min_words": 5, "max_words": 3}, "no query passes"),
        ({"min_known": 1.5}, "min_known"),
        ({"round_trip": {"k": 0}}, "round_trip.k"),
        ({"round_trip": {"retriever": "bm52"}}, "round_trip.retriever is 'bm52', wh"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"min_words": 99}, "no query of .*set passes; of 7, .* {'words': 7}"),
        ({"round_trip": judge}, "round_trip.vocabulary is not set"),
        (
            {"round_trip": {**judge, "vocabulary": str(tmp_path / "other")}},
            "was trained with",
        ),
        (
            {
                "corpus": str(tmp_path / "corpus"),
                "round_trip": {"retriever": "bm25"},
            },
            "'d1', which .* does not have",
        ),
        (
            {
                "corpus": str(tmp_path / "corpus"),
                "round_trip": {**judge, "vocabulary": str(tmp_path / "same")},
            },
            "'d1', which .* does not have",
        ),
    ):
        with pytest.raises(InputError, match=message):
            _filter(base, tmp_path / "out", **options)
        assert not (tmp_path / "out").exists(), options


def test_a_set_whose_certificate_was_changed_is_refused(base, tmp_path):
    """Even where manifest and certificate agree: the digest tells."""
    shutil.copytree(base / "set", tmp_path / "set")
    certificate = json.loads((tmp_path / "set" / "certificate.json").read_text())
    certificate["guarantee"]["epsilon"] = 0.1
    manifest = json.loads((tmp_path / "set" / "manifest.json").read_text())
    manifest["certificate"] = certificate
    (tmp_path / "set" / "certificate.json").write_text(json.dumps(certificate))
    (tmp_path / "set" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="certificate.json: its digest is not that"):
        _filter(base, tmp_path / "out", synthetic=str(tmp_path / "set"))
    assert not (tmp_path / "out").exists()
