"""The SavedModel: text in, documents out, in a process that knows nothing of us."""

import inspect
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq import evaluation
from tfdpsq.data import Tokenizer, train_vocabulary
from tfdpsq.layers import T5Config
from tfdpsq.layers.word_search import WordSearch
from tfdpsq.retriever import (
    RetrieverConfig,
    SearchModel,
    TwoTower,
    as_run,
    encode_texts,
    search,
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
    for name in ("search", "search_hybrid"):
        for k in (1, 3, 1000) if name in model.signatures else ():
            result = model.signatures[name](
                texts=tf.constant(queries), k=tf.constant(k)
            )
            ids = [[i.decode() for i in row] for row in result["ids"].numpy()]
            found[f"{name} {k}"] = [ids, result["scores"].numpy().tolist()]
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
    """A model, its tokenizer, ids and embeddings of documents."""
    path = tmp_path_factory.mktemp("vocabulary") / "spiece.model"
    train_vocabulary(_DOCUMENTS + _QUERIES, 305, path)
    tokenizer = Tokenizer(path)
    tf.keras.utils.set_random_seed(0)
    t5 = T5Config(330, 1, 2, 16, 24, 8, "1.1", dropout=0.1)
    model = TwoTower(RetrieverConfig(t5, 12, 20.0, 10, 24))
    vectors = encode_texts(model, _DOCUMENTS, tokenizer, "document", progress=False)
    return model, tokenizer, [f"d{i}" for i in range(len(_DOCUMENTS))], vectors


def test_saved_model_searches_in_a_process_without_tfdpsq(parts, tmp_path):
    """Vectors and words, whatever the locale."""
    postings, fused = _fused(parts, _DOCUMENTS, _QUERIES, 0.3, 30)
    path = str(tmp_path / "exact")
    SearchModel(*parts, kind="exact", postings=postings).export(path)
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
    for ids, scores, expected in zip(*result["search_hybrid 1000"], fused):
        there = sum(name != "" for name in ids)
        assert set(ids[:there]) == set(expected)
        np.testing.assert_allclose(scores[:there], list(expected.values()), atol=1e-5)


@pytest.mark.slow
def test_saved_scann_tree_finds_the_nearest(parts, tmp_path):
    SearchModel(*parts, kind="scann").export(tmp_path / "scann")
    _assert_found(_searched(str(tmp_path / "scann"), _QUERIES), *parts)


def _assert_found(result, model, tokenizer, ids, vectors):
    queries = encode_texts(model, _QUERIES, tokenizer, "query", progress=False)
    product = queries.astype(np.float64) @ vectors.astype(np.float64).T
    for k in (1, 3, 1000):
        rows = np.argsort(-product, axis=1, kind="stable")[:, :k]
        names, scores = result[f"search {k}"]
        # More than there are: all of them (what a tree misses, at 30, is nothing).
        assert names == [[ids[row] for row in some] for some in rows]
        expected = np.take_along_axis(product, rows, axis=1)
        np.testing.assert_allclose(scores, expected, atol=1e-5)
    again = encode_texts(
        model, ["The array is sorted."], tokenizer, "document", progress=False
    )
    np.testing.assert_allclose(result["documents"], again, atol=1e-5)


def _fused(parts, documents, queries, weight, depth):
    """Fuses both runs by `evaluation`: the oracle."""
    model, tokenizer, ids, vectors = parts
    names = [f"q{number}" for number in range(len(queries))]
    words = evaluation.BM25(dict(zip(ids, documents)))
    embedded = encode_texts(model, queries, tokenizer, "query", progress=False)
    scores, found = search(embedded, vectors, ids, depth, kind="brute_force")
    runs = [
        words.search(dict(zip(names, queries)), depth),
        as_run(names, scores, found),
    ]
    fused = evaluation.fuse(runs, [1 - weight, weight], k=1000)
    return words.postings(), [fused[name] for name in names]


@pytest.mark.parametrize(("weight", "depth"), [(0.3, 7), (0.0, 1), (0.6, 99)])
def test_hybrid_search_ranks_as_the_fusion_of_both_runs(parts, weight, depth):
    model, tokenizer, ids, vectors = parts
    # No common word; twice one word; underscores, digits, other scripts, no text.
    queries = [*_QUERIES, "xyzzy", "array ARRAY, number 7", "", "ΑΡΡΑΥ İstanbul_2 été"]
    postings, fused = _fused(parts, _DOCUMENTS, queries, weight, depth)
    made = SearchModel(*parts, postings=postings, weight=weight, depth=depth)
    found = made.search_hybrid(tf.constant(queries), tf.constant(1000))
    for row, expected in enumerate(fused):
        names = [name.decode() for name in found["ids"].numpy()[row]]
        there = names.index("") if "" in names else len(names)
        assert set(names[there:]) <= {""} and len(set(names[:there])) == there
        got = dict(zip(names, found["scores"].numpy()[row]))
        got.pop("", None)
        assert got.keys() == expected.keys()
        np.testing.assert_allclose(
            [got[name] for name in expected], list(expected.values()), atol=1e-5
        )
        # Embeddings of other batches differ by rounding, which may swap near ties.
        values = [expected[name] for name in names[:there]]
        assert (np.diff(values) <= 1e-5).all()
    few = made.search_hybrid(tf.constant(queries), tf.constant(2))
    assert few["ids"].shape[1] == min(2, 2 * depth)


def test_words_in_a_graph_are_scored_as_bm25_scores_them():
    texts = {
        "a": "The Élan of ARRAY_2 sorting; arrays, array",
        "b": "Ελλάς ΕΛΛΆΣ наука НАУКА 数组 १२३ x",
        "c": "of the and",  # stop words alone
        "d": "array ab-cd ab_cd naïve\u0301 ß ẞ İstanbul",
        "e": "array ab-cd ab_cd naïve\u0301 ß ẞ İstanbul",
    }
    words = evaluation.BM25(texts)
    postings = words.postings()
    made = WordSearch.from_postings(postings, list(texts))
    queries = [*texts.values(), "ARRAY array", "unknown", "", "ELAN élan", "\u0130"]
    run = words.search({str(n): text for n, text in enumerate(queries)}, len(texts))
    scores = made.scores(tf.constant(queries)).numpy()
    for number in range(len(queries)):
        expected = [run.get(str(number), {}).get(name, 0.0) for name in texts]
        np.testing.assert_allclose(scores[number], expected, rtol=1e-6)


def test_mismatched_index_is_refused(parts, tmp_path):
    model, tokenizer, ids, vectors = parts
    with pytest.raises(InputError, match="embeddings have shape"):
        SearchModel(model, tokenizer, ids[1:], vectors)
    words = evaluation.BM25({"other": "text"}).postings()
    with pytest.raises(InputError, match="document 'd0' is in the index of words or"):
        SearchModel(*parts, postings=words)
    with pytest.raises(InputError, match="weight is"):
        SearchModel(*parts, weight=1.5)
    with pytest.raises(InputError, match="no words to search by"):
        without = SearchModel(*parts)
        without.search_hybrid(tf.constant(["a"]), tf.constant(1))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    with pytest.raises(InputError, match="taken"):
        SearchModel(*parts).export(tmp_path / "taken")
    assert (tmp_path / "taken" / "file").read_text() == "mine"
