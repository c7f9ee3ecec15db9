"""Stage `index` through its command line: search, adding documents, refusals."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq import retriever
from tfdpsq.data import Document, Tokenizer, train_vocabulary, write_beir
from tfdpsq.run import index, train_retriever
from tfdpsq.validation import InputError

_HERE = pathlib.Path(__file__).parent
_ROOT = _HERE.parents[1]
_spec = importlib.util.spec_from_file_location("tiny", _HERE / "tiny.py")
_tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_tiny)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Pairs, and two untrained retrievers over them."""
    base = tmp_path_factory.mktemp("index")
    queries = _tiny.write_pairs(base / "pairs")
    train_vocabulary(queries, 320, base / "spiece.model")  # a test's made-up queries
    for name, seed in (("retriever", 1), ("other", 2)):
        config = train_retriever.default_config()
        config.t5.update(
            vocabulary_size=330,
            num_layers=1,
            num_heads=2,
            hidden_dim=16,
            intermediate_dim=24,
            key_value_dim=8,
        )
        config.update(
            {
                "pairs": str(base / "pairs"),
                "vocabulary": str(base / "spiece.model"),
                "document_length": 24,
                "query_length": 10,
                "embedding_dim": 16,
                "steps": 0,
                "seed": seed,
            }
        )
        train_retriever.run(config, base / name)
    return base


def _config(home, **changes):
    config = index.default_config()
    config.update(
        {
            "retriever": str(home / "retriever"),
            "vocabulary": str(home / "spiece.model"),
            "corpus": str(home / "pairs"),
            "shard_documents": 32,
            **changes,
        }
    )
    return config


def _products(base, texts):
    """Document ids, and [texts, documents] inner products of embeddings."""
    model = retriever.load(base / "retriever" / train_retriever.MODEL)
    tokenizer = Tokenizer(base / "spiece.model")
    lines = (base / "pairs" / "corpus.jsonl").read_text().splitlines()
    documents = [json.loads(line) for line in lines]
    queries, vectors = (
        retriever.encode_texts(model, some, tokenizer, side, progress=False)
        for side, some in (
            ("query", texts),
            ("document", [d["text"] for d in documents]),
        )
    )
    return [d["_id"] for d in documents], queries @ vectors.T


def test_a_corpus_is_indexed_by_command_and_searched(base):
    command = [
        sys.executable,
        "-m",
        "tfdpsq.run.index",
        "--config=configs/index.py",
        f"--workdir={base / 'made'}",
        f"--config.retriever={base / 'retriever'}",
        f"--config.vocabulary={base / 'spiece.model'}",
        f"--config.corpus={base / 'pairs'}",
        "--config.shard_documents=32",
    ]
    done = subprocess.run(
        command,
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    documents = retriever.DocumentIndex(base / "made" / index.DOCUMENTS)
    assert documents.size == 84
    assert len(list((base / "made" / index.DOCUMENTS).glob("*.npy"))) == 3
    texts = ["who sorts a table", "array reads"]
    model = tf.saved_model.load(str(base / "made" / index.SEARCH))
    found = model.search(tf.constant(texts), tf.constant(4))
    ids, products = _products(base, texts)
    best = -np.sort(-products, axis=1)[:, :4]
    np.testing.assert_allclose(found["scores"], best, atol=1e-5)
    for row, names in enumerate(found["ids"].numpy()):
        own = [products[row, ids.index(name.decode())] for name in names]
        np.testing.assert_allclose(own, best[row], atol=1e-5)
        assert len(set(names)) == 4
    again = model.search(tf.constant(texts), tf.constant(1000))["ids"]
    assert again.shape == (2, 84)


def test_documents_are_added_without_retraining(base, tmp_path):
    index.run(_config(base, kind="streamed"), tmp_path / "first")
    assert not (tmp_path / "first" / index.SEARCH).exists()
    whole = [
        Document(d["_id"], d.get("title", ""), d["text"])
        for d in map(
            json.loads, (base / "pairs" / "corpus.jsonl").read_text().splitlines()
        )
    ]
    more = [*whole, Document("new", "", "A word about graphs that is new.")]
    write_beir(tmp_path / "more", more, [("q0", "any")], {"train": [("q0", "d0", 1)]})
    config = _config(
        base,
        kind="streamed",
        base=str(tmp_path / "first"),
        corpus=str(tmp_path / "more"),
    )
    stage = index.run(config, tmp_path / "second")
    assert stage["result"] == {"documents": 85, "taken_over": 84}
    first, second = (
        retriever.DocumentIndex(tmp_path / name / index.DOCUMENTS)
        for name in ("first", "second")
    )
    np.testing.assert_array_equal(second.embeddings()[:84], first.embeddings())
    assert list(second.ids()) == [*first.ids(), "new"]
    with pytest.raises(InputError, match="was made by the encoder"):
        changes = {"retriever": str(base / "other"), "base": str(tmp_path / "first")}
        index.run(_config(base, **changes), tmp_path / "third")
    assert not (tmp_path / "third").exists()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"kind": "best"}, "kind is 'best'"),
        ({"retriever": ""}, "retriever is ''"),
        ({"shard_documents": 0}, "shard_documents is 0"),
    ],
)
def test_bad_settings_are_refused(base, tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        index.run(_config(base, **changes), tmp_path / "bad")
    assert not (tmp_path / "bad").exists()
