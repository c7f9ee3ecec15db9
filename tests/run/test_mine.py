"""Hard negatives as users come by them: mined or given, used or refused."""

import json
import shutil

import numpy as np
import pytest
from helpers import framed
from helpers import tiny as _tiny

from tfdpsq.data import BeirDirectory
from tfdpsq.evaluation import ranked, read_trec_run, write_trec_run
from tfdpsq.privacy import read_certificate, verify_certificate
from tfdpsq.run.common import hard_negatives
from tfdpsq.run.frame import runner, settings
from tfdpsq.run.frame.places import Place, Privacy
from tfdpsq.run.stages import mine
from tfdpsq.run.stages.train_retriever import STAGE as TRAIN_RETRIEVER
from tfdpsq.validation import DataError, InputError


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Private and public pairs, a public T5, and what is mined for both."""
    base = tmp_path_factory.mktemp("mine")
    _tiny.write_start(base)
    documents = list(BeirDirectory(base / "pairs").documents())
    rows = (("who sorts the array", d.id, d.content) for d in documents[:16])
    _tiny.write_set(base / "public_pairs", rows)
    _mine(base, "private/mined", pairs=str(base / "pairs"), k=5)
    pairs = {"pairs": str(base / "public_pairs"), "corpus": str(base / "pairs")}
    _mine(base, "mined_public", **pairs)
    return base


def _mine(base, name, **changes):
    return framed.run(mine.STAGE, base / name, **changes)


def _settings(base, **changes):
    usual = {"pairs": str(base / "public_pairs"), "init": str(base / "public")}
    usual |= {"document_length": 24, "query_length": 10, "embedding_dim": 16}
    usual |= {"batch_size": 4, "steps": 2, "n_is_public": True, "accountant": "rdp"}
    return {**usual, **changes}


def _context(base, pairs, run, split="train", **own):
    """Returns what a training with hard negatives runs with."""
    negatives = {"run": str(run), **own}
    changes = _settings(base, pairs=str(pairs), split=split, hard_negatives=negatives)
    s = settings.from_config(TRAIN_RETRIEVER.Settings, changes)
    place, given = Place.of(base / "private" / "x"), runner.open_inputs(s)
    inputs = {name: one.fingerprint(place.private) for name, one in given.each()}
    return runner.Context(s, given, place, Privacy.PRIVATE, inputs)


def _by_hand(own, pairs, split="train"):
    """Returns query -> texts of its hard negatives, from everything in memory."""
    beir = BeirDirectory(pairs)
    texts = {document.id: document.content for document in beir.documents()}
    qrels, run = beir.qrels(split), read_trec_run(f"{own.run}/run.trec")
    found = {}
    for query in {pair.query_id for pair in beir.pairs(split)}:
        answers = {d for d, grade in qrels[query].items() if grade > 0}
        known = {texts[d] for d in answers}
        others = [d for d, _ in ranked(run.get(query, {})) if d not in answers]
        kept = [texts[d] for d in others if texts[d] not in known]
        found[query] = kept[own.skip : own.skip + own.count]
    return found


def test_what_is_mined_shares_words_and_depends_on_its_own_query_alone(base, tmp_path):
    found = read_trec_run(base / "private" / "mined" / mine.RUN_FILE)
    queries = BeirDirectory(base / "pairs").queries()
    train = [p.query_id for p in BeirDirectory(base / "pairs").pairs("train")]
    assert found.keys() == set(train) and {len(f) for f in found.values()} == {5}
    texts = {d.id: d.content for d in BeirDirectory(base / "pairs").documents()}
    for query, documents in found.items():
        words = set(queries[query].split())
        assert all(words & set(texts[d].split()) for d in documents)
    # Another private query: the others' documents are as they were.
    other = tmp_path / "pairs"
    _tiny.write_pairs(other)
    lines = (other / "queries.jsonl").read_text().splitlines()
    lines[0] = json.dumps({**json.loads(lines[0]), "text": "graph graph joins"})
    (other / "queries.jsonl").write_text("\n".join(lines) + "\n")
    _mine(tmp_path, "private/mined", pairs=str(other), k=5)
    changed = read_trec_run(tmp_path / "private" / "mined" / mine.RUN_FILE)
    assert changed.pop("q0") != found["q0"]
    assert changed == {q: d for q, d in found.items() if q != "q0"}


def test_mining_for_private_queries_is_a_recorded_read(base, tmp_path):
    entries = (base / "private" / "private_reads.jsonl").read_text().splitlines()
    (entry,) = [e for e in map(json.loads, entries) if "BM25" in e["what"]]
    assert entry["where"] == "run.trec"
    with pytest.raises(InputError, match="strict"):
        _mine(tmp_path, "private/mined", pairs=str(base / "pairs"), strict=True)
    assert not (tmp_path / "private" / "mined").exists()
    with pytest.raises(InputError, match="no epsilon covers it"):
        _mine(tmp_path, "release/mined", pairs=str(base / "pairs"))


def test_the_table_on_disk_finds_what_a_loop_in_memory_does(base, tmp_path):
    """Equal scores, several answers, copies of answers, queries without a hit."""
    draw = np.random.default_rng(7)
    pairs = tmp_path / "pairs"
    _tiny.write_pairs(pairs)
    beir = BeirDirectory(pairs)
    documents = [document.id for document in beir.documents()]
    texts = {document.id: document.content for document in beir.documents()}
    with open(pairs / "corpus.jsonl", "a") as file:
        for like in draw.choice(documents, 30, replace=False):
            row = {"_id": f"copy of {like}".replace(" ", "_"), "text": texts[like]}
            file.write(json.dumps({"title": "", **row}) + "\n")
            documents.append(row["_id"])
    judged = beir.qrels("train")
    with open(pairs / "qrels" / "train.tsv", "a") as file:
        for query in list(judged)[:20]:
            for document in draw.choice(documents, 3, replace=False):
                if document not in judged[query]:
                    file.write(f"{query}\t{document}\t{draw.integers(0, 3)}\n")
    run = {
        query: {
            str(document): float(draw.integers(4)) + draw.choice([0, 1e-9])
            for document in draw.choice(documents, 12, replace=False)
        }
        for query in [*list(judged)[5:], "another"]
    }
    mined = tmp_path / "private" / "mined"
    _mine(tmp_path, "private/mined", pairs=str(pairs), k=1)
    write_trec_run(mined / mine.RUN_FILE, run)
    c = _context(base, pairs, mined, count=3, skip=2)
    table = hard_negatives.NegativeTable(c)
    expected = _by_hand(c.settings.hard_negatives, pairs)
    assert {len(texts) for texts in expected.values()} >= {0, 3}
    assert {q: [text for _, text in table.find(q)] for q in expected} == expected


@pytest.mark.slow  # `retriever/test_direct_methods` has the sensitivity
def test_public_negatives_take_a_rows_own_and_say_so(base):
    changes = _settings(
        base,
        pairs=str(base / "pairs"),
        method="public_negatives",
        epsilon=8.0,
        steps=1,
        negatives=4,
        hard_negatives={"run": str(base / "private" / "mined"), "count": 2},
    )
    framed.run(TRAIN_RETRIEVER, base / "direct", **changes)
    certificate = read_certificate(base / "direct")
    assert certificate["mechanism"]["sensitivity"] == pytest.approx(0.1)
    assert certificate["fingerprints"]["pairs"].startswith("keyed:")
    assert "hard_negatives.run" in certificate["fingerprints"]
    assert verify_certificate(certificate).problems == ()
    assert "BM25" in json.dumps(certificate["private_reads"])


def test_the_origin_of_negatives_is_known(base, tmp_path):
    """Documents that follow from queries which ε does not count are no input."""
    pairs, mined = base / "pairs", base / "private" / "mined"
    c = _context(base, pairs, mined, count=2)
    hard_negatives.check(c.settings, c.given)
    assert "mined by bm25" in hard_negatives.origin(c)
    with pytest.raises(InputError, match="not mined for split 'dev'"):
        hard_negatives.origin(_context(base, pairs, mined, "dev"))
    other = tmp_path / "pairs"
    _tiny.write_pairs(other, seed=3)
    with pytest.raises(InputError, match="was not mined for split 'train' of"):
        hard_negatives.origin(_context(base, other, mined))
    with pytest.raises(InputError, match="Give what mine wrote"):
        _context(base, pairs, base / "pairs")


def test_what_is_mined_for_a_set_with_a_certificate_has_it(base, tmp_path):
    certificate = framed.certificate(8.0)
    rows = [("who sorts the array", "d0", "Sorts it.")]
    pairs = _tiny.write_set(tmp_path / "set", rows, certificate)
    _mine(tmp_path, "mined", pairs=pairs, corpus=str(base / "pairs"))
    assert read_certificate(tmp_path / "mined") == certificate


def test_bad_negatives_are_refused_before_any_training(base, tmp_path):
    absent = shutil.copytree(base / "mined_public", tmp_path / "absent")
    write_trec_run(absent / mine.RUN_FILE, {"genQ0": {"d999": 1.0}})
    corpus = {"corpus": str(base / "pairs")}
    private = {"pairs": str(base / "pairs"), "epsilon": 8.0}
    mined = {"hard_negatives": {"run": str(base / "private" / "mined")}}
    for options, message in (
        ({"hard_negatives": {"run": str(absent), **corpus}}, "Set corpus to mine's"),
        ({"hard_negatives": {"run": "none.trec", **corpus}}, "none.trec"),
        # A set that no query had a part in would be trained on what is private.
        (
            {"hard_negatives": {**mined["hard_negatives"], **corpus}},
            "no epsilon covers it",
        ),
        ({**private, **mined, "method": "naive"}, "sensitivity is not derived"),
    ):
        with pytest.raises((InputError, DataError), match=message):
            changes = _settings(base, **options)
            framed.run(TRAIN_RETRIEVER, base / "refused", **changes)
    assert not (base / "refused").exists()
    with pytest.raises(InputError, match="a set of queries. Give corpus, too"):
        _mine(tmp_path, "mined", pairs=str(base / "public_pairs"))
