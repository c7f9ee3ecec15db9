"""Query likelihood, against the model's own losses of each pair."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from helpers import attentive

from tfdpsq.data import Tokenizer, train_vocabulary
from tfdpsq.data.texts import Pair
from tfdpsq.generator import (
    QueryLikelihood,
    encode_pairs,
    likelihood,
)
from tfdpsq.validation import InputError

_WORDS = "red fox dogs sleep in the sun all day long rain and snow fall north".split()


def _texts(count, words, seed):
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(_WORDS, words)) for _ in range(count)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "spiece.model"
    train_vocabulary(_texts(300, 6, 0), 290, path)
    return Tokenizer(path)


def _model(tokenizer, version="1.0", soft_prompt=0):
    size = tokenizer.vocabulary_size
    return attentive.generator(version, size, dropout=0.1, soft_prompt=soft_prompt)


def _pairs():
    """Documents with none to nine queries, one of them twice."""
    documents, queries = _texts(9, 7, 1), _texts(30, 4, 2)
    rows = [(d, q) for n, d in enumerate(documents) for q in queries[: n * n % 10]]
    return [*rows, rows[0]]


@pytest.mark.parametrize(
    "version, soft_prompt, batch_size, compiled",
    [("1.0", 0, 7, False), ("1.1", 0, 64, False), ("1.1", 3, 1, False)]
    + [("1.0", 0, 8, True)],
)
def test_scores_are_the_losses_of_each_pair(
    tokenizer, version, soft_prompt, batch_size, compiled
):
    model = _model(tokenizer, version, soft_prompt)
    lengths = {"document_length": 12, "query_length": 6}
    pairs = _pairs()
    batch = encode_pairs(
        [Pair("", query, "", document) for document, query in pairs],
        tokenizer,
        prompt="ask: ",
        **lengths,
    )
    assert (batch["query_lengths"] == 6).any() and (batch["query_lengths"] < 6).any()
    expected = -model.per_example_losses(batch).numpy() * batch["query_lengths"]
    scorer = QueryLikelihood(
        model,
        tokenizer,
        batch_size=batch_size,
        prompt="ask: ",
        jit_compile=compiled,
        **lengths,
    )
    found = list(scorer.scores(iter(pairs)))
    assert np.std(expected) > 1
    np.testing.assert_allclose(found, expected, rtol=2e-5)


def test_one_graph_serves_batches_of_all_shapes(tokenizer, monkeypatch):
    """A graph for each shape took most of an audit's first seconds."""
    traced = []
    inner = likelihood.log_likelihoods

    def counted(model, *given):
        traced.append([tensor.shape for tensor in given])
        return inner(model, *given)

    monkeypatch.setattr(likelihood, "log_likelihoods", counted)
    scorer = QueryLikelihood(
        _model(tokenizer), tokenizer, document_length=12, query_length=8, batch_size=4
    )
    short, long = "fox", " ".join(_WORDS)
    shapes = ([("red", short)] * 4, [(w, short) for w in _WORDS], [("sun", long)] * 3)
    for pairs in shapes:
        assert len(list(scorer.scores(pairs))) == len(pairs)
    assert len(traced) == 1


def test_pairs_are_read_as_a_stream(tokenizer):
    read = []

    def pairs():
        for number in itertools.count():
            read.append(number)
            yield "red fox", "fox"

    scores = QueryLikelihood(
        _model(tokenizer), tokenizer, document_length=8, query_length=4, batch_size=5
    ).scores(pairs())
    assert np.ptp([next(scores) for _ in range(81)]) < 1e-4
    assert len(read) == 2 * 16 * 5


def test_a_batch_has_documents_of_like_length(tokenizer, monkeypatch):
    """Padding was up to half of what was computed."""
    given = []
    inner = likelihood.log_likelihoods

    def noted(model, ids, lengths, *rest):
        spread = tf.reduce_max(lengths) - tf.reduce_min(lengths)
        tf.py_function(
            lambda *sizes: given.append([int(size) for size in sizes]),
            [tf.shape(ids)[0], tf.shape(ids)[1], spread, tf.shape(rest[0])[0]],
            [],
        )
        return inner(model, ids, lengths, *rest)

    monkeypatch.setattr(likelihood, "log_likelihoods", noted)
    scorer = QueryLikelihood(
        _model(tokenizer), tokenizer, 60, query_length=8, batch_size=4, prompt=""
    )
    pairs = [(" ".join(["fox"] * (1 + n % 8)), _WORDS[n % 5]) for n in range(32)]
    assert len(list(scorer.scores(pairs))) == 32
    # Eight documents, each with its four queries: none is padded or read twice.
    assert [row[0] for row in given] == [1] * 8
    assert len({row[1] for row in given}) == 8
    assert [row[2:] for row in given] == [[0, 4]] * 8


def test_no_pairs_have_no_scores(tokenizer):
    assert list(QueryLikelihood(_model(tokenizer), tokenizer).scores([])) == []


@pytest.mark.parametrize("name", ["document_length", "query_length", "batch_size"])
def test_lengths_are_positive(tokenizer, name):
    with pytest.raises(InputError, match=f"{name} is 0"):
        QueryLikelihood(_model(tokenizer), tokenizer, **{name: 0})
