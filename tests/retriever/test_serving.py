"""The SavedModel: text in, documents out, in a process that knows nothing of us."""

import json
import os
import subprocess
import sys
import unicodedata

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


def test_places_that_a_tree_cannot_fill_are_there_and_empty(parts):
    """It searches a part of its leaves, and has no column for the rest."""
    model, tokenizer, _, vectors = parts
    many = np.concatenate([vectors + 1e-3 * i for i in range(9)])
    ids = [f"d{i}" for i in range(len(many))]
    model = SearchModel(model, tokenizer, ids, many, "scann")
    found = model.search(tf.constant([*_QUERIES, ""]), tf.constant(len(many) + 5))
    names, scores = found["ids"].numpy(), found["scores"].numpy()
    assert names.shape == scores.shape == (len(_QUERIES) + 1, len(many))
    assert ((names == b"") == np.isneginf(scores)).all()
    assert (names != b"").sum(axis=1).min() > 30


_HYBRID = """
import json, sys
import tensorflow as tf
import tensorflow_text
assert "tfdpsq" not in sys.modules
search = tf.saved_model.load(sys.argv[2]).signatures["search_hybrid"]
found = search(texts=tf.constant(json.loads(sys.argv[1])), k=tf.constant(1000))
ids = [[i.decode() for i in row] for row in found["ids"].numpy()]
print(json.dumps([ids, found["scores"].numpy().tolist()]))
"""


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


@pytest.mark.parametrize(
    ("weight", "depth"), [(0.3, 7), (0.0, 1), (1.0, 30), (0.6, 99)]
)
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
    # Every letter that this Python knows and TensorFlow's tables, too.
    letters = [chr(code) for code in range(32, 0x2C00)]
    letters = [c for c in letters if c.lower() not in ("i̇",) and len(c.lower()) == 1]
    letters = [c for c in letters if unicodedata.category(c) != "Cn"]
    found = evaluation.BM25({str(n): 2 * letter for n, letter in enumerate(letters)})
    postings = found.postings()
    made = WordSearch.from_postings(postings, postings.ids)
    run = found.search({letter: 2 * letter for letter in letters}, len(letters))
    for start in range(0, len(letters), 500):
        part = letters[start : start + 500]
        scores = made.scores(tf.constant([2 * letter for letter in part])).numpy()
        for letter, row in zip(part, scores):
            assert {str(n) for n in np.flatnonzero(row)} == set(run.get(letter, {}))


def test_hybrid_search_in_a_new_process_whatever_its_locale(parts, tmp_path):
    postings, fused = _fused(parts, _DOCUMENTS, ["THE STRING IS Written"], 0.3, 30)
    SearchModel(*parts, postings=postings).export(tmp_path / "made")
    environment = {n: v for n, v in os.environ.items() if n != "PYTHONPATH"}
    found = subprocess.run(
        [
            *(sys.executable, "-c", _HYBRID),
            *(json.dumps(["THE STRING IS Written"]), str(tmp_path / "made")),
        ],
        capture_output=True,
        text=True,
        env={**environment, "TF_CPP_MIN_LOG_LEVEL": "2", "LC_ALL": "tr_TR.UTF-8"},
        cwd=tmp_path,
    )
    assert found.returncode == 0, found.stderr
    ids, scores = json.loads(found.stdout.splitlines()[-1])
    assert ids == [list(fused[0])]
    np.testing.assert_allclose(scores, [list(fused[0].values())], atol=1e-5)


def test_what_does_not_fit_is_refused(parts, tmp_path):
    model, tokenizer, ids, vectors = parts
    for names, rows in ((ids[1:], vectors), (ids, vectors[:, 1:]), ([], vectors[:0])):
        with pytest.raises(InputError, match="embeddings have shape"):
            SearchModel(model, tokenizer, names, rows)
    with pytest.raises(InputError, match="kind is 'fast'"):
        SearchModel(*parts, kind="fast")
    words = evaluation.BM25({"other": "text"}).postings()
    with pytest.raises(InputError, match="document 'd0' is in the index of words or"):
        SearchModel(*parts, postings=words)
    for wrong, name in (({"weight": 1.5}, "weight"), ({"depth": 0}, "depth")):
        with pytest.raises(InputError, match=f"{name} is"):
            SearchModel(*parts, **wrong)
    with pytest.raises(InputError, match="no words to search by"):
        without = SearchModel(*parts)
        without.search_hybrid(tf.constant(["a"]), tf.constant(1))
    with pytest.raises(InputError, match="do not make an index"):
        WordSearch(["a"], [0, 2], [0, 5], [1.0, 1.0], 5)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    with pytest.raises(InputError, match="taken"):
        SearchModel(*parts).export(tmp_path / "taken")
    assert (tmp_path / "taken" / "file").read_text() == "mine"
