"""The SavedModel: text in, documents out, in a process that knows nothing of us."""

import inspect
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.data import Tokenizer, train_vocabulary
from tfdpsq.layers import T5Config
from tfdpsq.retriever import (
    RetrieverConfig,
    SearchModel,
    TwoTower,
    encode_texts,
)
from tfdpsq.validation import InputError

_DOCUMENTS = [
    f"The {noun} is {verb} by this function, number {i}."
    for i, (noun, verb) in enumerate(
        (noun, verb)
        for noun in ("array", "string", "file", "tensor", "graph", "table")
        for verb in ("sorted", "read", "written", "merged", "counted")
    )
]
_QUERIES = ["who sorts an array", "reading files", "counted tensors", "the graph"]


def _searched(path, queries):
    """Searches with a SavedModel; a child process runs this source, too."""
    import tensorflow as tf

    model, found = tf.saved_model.load(path), {}
    for k in (1, 3, 1000):
        result = model.signatures["search"](
            texts=tf.constant(queries), k=tf.constant(k)
        )
        ids = [[i.decode() for i in row] for row in result["ids"].numpy()]
        found[f"search {k}"] = [ids, result["scores"].numpy().tolist()]
    documents = model.signatures["encode_documents"](
        texts=tf.constant(["The array is sorted."])
    )
    return {**found, "documents": documents["embeddings"].numpy().tolist()}


_IN_A_NEW_PROCESS = f"""
import json, sys
import tensorflow_text

{inspect.getsource(_searched)}
assert "tfdpsq" not in sys.modules and "scann" not in sys.modules
print(json.dumps(_searched(sys.argv[1], json.loads(sys.argv[2]))))
"""


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """A model, ids and embeddings of documents."""
    path = tmp_path_factory.mktemp("vocabulary") / "spiece.model"
    train_vocabulary(_DOCUMENTS + _QUERIES, 305, path)
    tokenizer = Tokenizer(path)
    tf.keras.utils.set_random_seed(0)
    t5 = T5Config(330, 1, 2, 16, 24, 8, "1.1", dropout=0.1)
    model = TwoTower(RetrieverConfig(t5, 12, 20.0, 10, 24), tokenizer)
    vectors = encode_texts(model, _DOCUMENTS, "document", progress=False)
    return model, [f"d{i}" for i in range(len(_DOCUMENTS))], vectors


def test_saved_model_searches_in_a_process_without_tfdpsq(parts, tmp_path):
    """Whatever the locale."""
    path = str(tmp_path / "exact")
    SearchModel(*parts).export(path)
    environment = {n: v for n, v in os.environ.items() if n != "PYTHONPATH"}
    found = subprocess.run(
        [sys.executable, "-c", _IN_A_NEW_PROCESS, path, json.dumps(_QUERIES)],
        capture_output=True,
        text=True,
        env={**environment, "TF_CPP_MIN_LOG_LEVEL": "2", "LC_ALL": "tr_TR.UTF-8"},
        cwd=tmp_path,
    )
    assert found.returncode == 0, found.stderr
    result = json.loads(found.stdout.splitlines()[-1])
    _assert_found(result, *parts)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["scann", "scann_brute_force"])
def test_saved_scann_index_finds_the_nearest(parts, tmp_path, kind):
    SearchModel(*parts, kind=kind).export(tmp_path / "scann")
    _assert_found(_searched(str(tmp_path / "scann"), _QUERIES), *parts)


def _assert_found(result, model, ids, vectors):
    queries = encode_texts(model, _QUERIES, "query", progress=False)
    product = queries.astype(np.float64) @ vectors.astype(np.float64).T
    for k in (1, 3, 1000):
        rows = np.argsort(-product, axis=1, kind="stable")[:, :k]
        names, scores = result[f"search {k}"]
        # More than there are: all of them (what a tree misses, at 30, is nothing).
        assert names == [[ids[row] for row in some] for some in rows]
        expected = np.take_along_axis(product, rows, axis=1)
        np.testing.assert_allclose(scores, expected, atol=1e-5)
    again = encode_texts(model, ["The array is sorted."], "document", progress=False)
    np.testing.assert_allclose(result["documents"], again, atol=1e-5)


def test_bad_parts_and_taken_places_are_refused(parts, tmp_path):
    model, ids, vectors = parts
    with pytest.raises(ValueError, match="same number of rows"):
        SearchModel(model, ids[1:], vectors)
    with pytest.raises(InputError, match="no tokenizer"):
        SearchModel(TwoTower(model.config), ids, vectors)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    with pytest.raises(InputError, match="taken"):
        SearchModel(*parts).export(tmp_path / "taken")
    assert (tmp_path / "taken" / "file").read_text() == "mine"
