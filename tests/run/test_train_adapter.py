"""A map of query embeddings, trained on private pairs for a foreign encoder."""

import math
import shutil

import numpy as np
import pytest
import tensorflow as tf
from helpers import framed, neighbours, tiny

from tfdpsq.data import BeirDirectory
from tfdpsq.privacy import read_certificate, verify_certificate
from tfdpsq.run.common import hard_negatives
from tfdpsq.run.common.kinds import ADAPTER_FILE
from tfdpsq.run.frame import runner, settings
from tfdpsq.run.frame.places import Place, Privacy
from tfdpsq.run.stages import embed, mine, train_adapter
from tfdpsq.validation import InputError

_WIDTH = 8
_IDS = {letter: [f"{letter}{i}" for i in range(84)] for letter in "dq"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Pairs, and embeddings of their documents and queries by a foreign encoder."""
    base = tmp_path_factory.mktemp("adapter")
    tiny.write_start(base)
    tiny.write_embedded(base / "embedded")
    return base


def _settings(base, **changes):
    embedded = str(base / "embedded")
    return {
        "pairs": str(base / "pairs"),
        "documents": embedded,
        "queries": embedded,
        "encoder_is_public": True,
        "n_is_public": True,
        "accountant": "rdp",
        "microbatch_size": 16,
        **changes,
    }


def _trained(base, out, **changes):
    framed.run(train_adapter.STAGE, out, **_settings(base, **changes))
    return np.load(out / ADAPTER_FILE)


def _oracle(base, negatives, hard=lambda query: ()):
    """The mean gradient of the loss at the identity: float64, one row after another."""
    documents, queries = (v.astype(np.float64) for v in tiny.vectors())
    matrix = tf.Variable(np.eye(_WIDTH))
    rows = []
    with tf.GradientTape() as tape:
        for pair in BeirDirectory(base / "pairs").pairs("train"):
            own = int(pair.document_id[1:])
            others = [n for n in negatives if n != own]
            others += [int(name[1:]) for name in hard(pair.query_id)]
            asked = tf.linalg.matvec(matrix, queries[int(pair.query_id[1:])], True)
            asked /= tf.norm(asked)
            scores = [
                20.0
                * tf.reduce_sum(asked * documents[n] / np.linalg.norm(documents[n]))
                for n in (own, *others)
            ]
            rows.append(tf.reduce_logsumexp(scores) - scores[0])
        loss = tf.reduce_mean(rows)
    return tape.gradient(loss, matrix).numpy()


def test_one_step_equals_a_float64_oracle(base, tmp_path):
    """All pairs, all documents as negatives, each row's hard ones, rate 0.1."""
    run = tmp_path / "private" / "mined"
    framed.run(mine.STAGE, run, pairs=str(base / "pairs"), k=20)
    options = {
        "epsilon": math.inf,
        "sampling_probability": 1.0,
        "steps": 1,
        "learning_rate": 0.1,
        "hard_negatives": {"run": str(run), "count": 3},
    }
    found = _trained(base, tmp_path / "private" / "one", **options)
    own = settings.from_config(train_adapter.STAGE.Settings, _settings(base, **options))
    given, place = runner.open_inputs(own), Place.of(tmp_path / "private" / "two")
    c = runner.Context(own, given, place, Privacy.PRIVATE, {})
    table = hard_negatives.NegativeTable(c)
    for pair in given["pairs"].load().read():
        names = [name for name, _ in table.find(pair.query_id)]
        assert len(names) == 3 and pair.document_id not in names
    hard = {q: [name for name, _ in table.find(q)] for q in _IDS["q"]}
    gradient = _oracle(base, range(84), hard.get)
    np.testing.assert_allclose(found, np.eye(_WIDTH) - 0.1 * gradient, atol=2e-6)
    assert np.abs(gradient - _oracle(base, range(84))).max() > 1e-2


@pytest.mark.parametrize("unit", ["query", "pair", "user"])
def test_one_unit_moves_the_step_by_the_clip_norm(unit, tmp_path):
    """At epsilon 300 and a small clip norm, every row is cut, and noise is little."""
    neighbours.write(tmp_path, unit)
    tiny.write_embedded(tmp_path / "embedded")
    options = {
        "unit": unit,
        "epsilon": 300.0,
        "clip_norm": 1e-3,
        "steps": 1,
        "learning_rate": 1.0,
        "sampling_probability": 1.0,
        "n_is_public": False,
        "n_bound": 64,
        "rows_per_unit": 9 if unit == "user" else 1,
        "microbatch_size": 18,
    }
    whole = _trained(tmp_path, tmp_path / "release" / "whole", **options)
    neighbours.remove(tmp_path, unit)
    less = _trained(tmp_path, tmp_path / "release" / "less", **options)
    stated = [
        read_certificate(tmp_path / "release" / name) for name in ("whole", "less")
    ]
    # What they state of the log is what was declared; the weights have their noise.
    assert len({each["training"].pop("weights") for each in stated}) == 2
    for name in ("spec", "sampler", "mechanism", "accounting", "training"):
        assert stated[0][name] == stated[1][name], name
    moved = 64 * np.linalg.norm(whole - less) / 1e-3  # in clip norms
    noise = stated[0]["mechanism"]["noise_multiplier"] * math.sqrt(2) * _WIDTH
    assert moved == pytest.approx(1.0, abs=2 * noise) and noise < 0.6, (moved, noise)


def test_rotation_is_learnt_and_certified(base, tmp_path):
    """Searched by hand; without an ε, and with one of 8."""
    out = tmp_path / "private" / "inf"
    options = {"epsilon": math.inf, "steps": 30, "learning_rate": 0.5}
    matrix = _trained(base, out, **options)
    documents, queries = (v.astype(np.float64) for v in tiny.vectors())
    documents /= np.linalg.norm(documents, axis=1, keepdims=True)

    def gain(matrix):
        gains = []
        for query in range(72, 84):
            asked = queries[query] @ matrix
            scores = documents @ (asked / np.linalg.norm(asked))
            rank = int((scores > scores[query]).sum())
            gains.append(1 / math.log2(2 + rank) if rank < 10 else 0.0)
        return np.mean(gains)

    assert gain(matrix) > 0.9 > 0.3 > gain(np.eye(_WIDTH))
    assert read_certificate(out)["private"] is False
    _trained(base, tmp_path / "release" / "eps8", steps=3)
    certificate = read_certificate(tmp_path / "release" / "eps8")
    assert verify_certificate(certificate).problems == ()
    assert certificate["guarantee"]["epsilon"] <= 8.0
    assert certificate["training"]["encoder"] == "a public encoder"
    assert certificate["training"]["encoder_is_public"] == "declared"
    assert certificate["fingerprints"]["queries"].startswith("keyed:")


# -- Refused before a step is paid ----------------------------------------------------


def _refused(base, tmp_path, match, **changes):
    """No step is paid for, and nothing is written where it would be released."""
    with pytest.raises(InputError, match=match):
        _trained(base, tmp_path / "release" / "refused", **changes)
    assert not list((tmp_path / "release").glob("*"))
    assert not list((tmp_path / "private").rglob("ledger*"))


def test_inputs_outside_the_guarantee_are_refused(base, tmp_path):
    _refused(base, tmp_path, "Set encoder_is_public", encoder_is_public=False)
    documents, queries = tiny.vectors()

    def wrong(name, texts, vectors, ids, match):
        place = tmp_path / name
        tiny.write_embeddings(place, texts, vectors, ids)
        _refused(base, tmp_path, match, **{texts: str(place)})

    ids, asked = _IDS["d"], _IDS["q"]
    # Only documents that private pairs have: drawn negatives would tell of them.
    wrong("some", "documents", documents[:60], ids[:60], "no embedding of 'd60'")
    wrong("few", "queries", queries[:59], asked[:59], "no embedding of 'q59'")
    wide = np.ones([84, 9], np.float32)
    wrong("wide", "queries", wide, asked, "9 dimensions")
    wrong("zeros", "documents", 0 * documents, ids, "are all zeros")
    shutil.copytree(base / "pairs", tmp_path / "free" / "pairs")
    free = tiny.write_public_pairs(tmp_path / "free")
    _refused(base, tmp_path, "a synthetic or public set", pairs=free)
    place = tmp_path / "loose"
    tiny.write_embeddings(place, "documents", documents, ids)
    (place / "private.json").write_text('{"guarantee": "private"}')
    said = "which private queries had a part in: its class is private"
    _refused(base, tmp_path, said, documents=str(place))


def _encoded(base, tmp_path, name, **changes):
    out = tmp_path / "private" / name
    framed.run(embed.STAGE, out, retriever=str(tmp_path / "retriever"), **changes)
    return str(out)


def test_embeddings_of_our_own_encoder_are_known_by_their_lineage(base, tmp_path):
    """No declaration is needed, and other corpora, logs and encoders are noticed."""
    framed.write_retriever(tmp_path / "retriever", base / "spiece.model")
    pairs = str(base / "pairs")
    asked = {"texts": "queries", "queries": pairs, "split": "train"}
    both = {
        "encoder_is_public": False,
        "documents": _encoded(base, tmp_path, "documents", corpus=pairs),
        "queries": _encoded(base, tmp_path, "queries", **asked),
    }
    _refused(
        base,
        tmp_path,
        "they are not by one encoder",
        **{**both, "documents": str(base / "embedded")},
    )
    # The same ids, other texts.
    for file, old, match in (
        ("corpus.jsonl", "This function", "not made of the documents of"),
        ("queries.jsonl", "who ", "not made of the queries of split 'train'"),
    ):
        pairs = shutil.copytree(base / "pairs", tmp_path / file)
        (pairs / file).write_text((pairs / file).read_text().replace(old, "Another "))
        _refused(base, tmp_path, match, **both, pairs=str(pairs))
    # A copy without its stage.json, of which nothing is known.
    copied = tmp_path / "copied"
    shutil.copytree(f"{both['documents']}/documents", copied / "documents")
    shutil.copytree(f"{both['queries']}/queries", copied / "queries")
    places = dict.fromkeys(("documents", "queries"), str(copied))
    _refused(base, tmp_path, "not by one encoder", **{**both, **places})
    # Made by a retriever of private queries, they are not free.
    framed.certify(tmp_path / "copied", 8.0)
    _refused(base, tmp_path, "its class is certified", **{**both, **places})
    matrix = _trained(base, tmp_path / "release" / "own", steps=2, **both)
    assert matrix.shape == (16, 16) and not np.array_equal(matrix, np.eye(16))
    certificate = read_certificate(tmp_path / "release" / "own")
    assert certificate["training"]["encoder_is_public"] == "by its record"
