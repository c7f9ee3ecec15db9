"""The SavedModel: text in, documents out, in a process that knows nothing of us."""

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

_IN_A_NEW_PROCESS = """
import json, sys
import tensorflow as tf
import tensorflow_text
assert "tfdpsq" not in sys.modules
kinds = {}
for path in sys.argv[2:]:
    if not path.endswith("exact"):
        import scann
    model = tf.saved_model.load(path)
    search = model.signatures["search"]
    found = kinds[path] = {}
    for k in (1, 3, 1000):
        result = search(texts=tf.constant(json.loads(sys.argv[1])), k=tf.constant(k))
        ids = [[i.decode() for i in row] for row in result["ids"].numpy()]
        found[k] = [ids, result["scores"].numpy().tolist()]
    found["documents"] = model.signatures["encode_documents"](
        texts=tf.constant(["The array is sorted."])
    )["embeddings"].numpy().tolist()
print(json.dumps(kinds))
"""


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """A model, its tokenizer, ids and embeddings of documents."""
    path = tmp_path_factory.mktemp("vocabulary") / "spiece.model"
    train_vocabulary(_DOCUMENTS + _QUERIES, 305, path)
    tokenizer = Tokenizer(path)
    tf.keras.utils.set_random_seed(0)
    t5 = T5Config(330, 1, 2, 16, 24, 8, "1.1", dropout=0.1)
    model = TwoTower(RetrieverConfig(t5, 12, 20.0, 10, 24))
    vectors = encode_texts(model, _DOCUMENTS, tokenizer, "document", progress=False)
    return model, tokenizer, [f"d{i}" for i in range(len(_DOCUMENTS))], vectors


@pytest.mark.parametrize(
    "kinds",
    # What needs no ScaNN comes first, in a process that has not imported it.
    [("exact", "scann"), pytest.param(("scann_brute_force",), marks=pytest.mark.slow)],
)
def test_it_loads_and_searches_in_a_new_process(parts, tmp_path, kinds):
    paths = [str(tmp_path / kind) for kind in kinds]
    for path, kind in zip(paths, kinds):
        SearchModel(*parts, kind=kind).export(path)
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    }
    found = subprocess.run(
        [sys.executable, "-c", _IN_A_NEW_PROCESS, json.dumps(_QUERIES), *paths],
        capture_output=True,
        text=True,
        env={**environment, "TF_CPP_MIN_LOG_LEVEL": "2"},
        cwd=tmp_path,
    )
    assert found.returncode == 0, found.stderr
    results = json.loads(found.stdout.splitlines()[-1])
    assert list(results) == paths
    for result in results.values():
        _assert_found(result, *parts)


def _assert_found(result, model, tokenizer, ids, vectors):
    queries = encode_texts(model, _QUERIES, tokenizer, "query", progress=False)
    product = queries.astype(np.float64) @ vectors.astype(np.float64).T
    for k in (1, 3, 1000):
        rows = np.argsort(-product, axis=1, kind="stable")[:, :k]
        names, scores = result[str(k)]
        # More than there are: all of them (what a tree misses, at 30, is nothing).
        assert names == [[ids[row] for row in some] for some in rows]
        expected = np.take_along_axis(product, rows, axis=1)
        np.testing.assert_allclose(scores, expected, atol=1e-5)
    again = encode_texts(
        model, ["The array is sorted."], tokenizer, "document", progress=False
    )
    np.testing.assert_allclose(result["documents"], again, atol=1e-5)


def test_what_does_not_fit_is_refused(parts, tmp_path):
    model, tokenizer, ids, vectors = parts
    for names, rows in ((ids[1:], vectors), (ids, vectors[:, 1:]), ([], vectors[:0])):
        with pytest.raises(InputError, match="embeddings have shape"):
            SearchModel(model, tokenizer, names, rows)
    with pytest.raises(InputError, match="kind is 'fast'"):
        SearchModel(*parts, kind="fast")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    with pytest.raises(InputError, match="taken"):
        SearchModel(*parts).export(tmp_path / "taken")
    assert (tmp_path / "taken" / "file").read_text() == "mine"
