"""Query likelihood, against the model's own losses of each pair."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import attentive

from tfdpsq.data import Tokenizer, train_vocabulary
from tfdpsq.data.texts import Pair
from tfdpsq.generator import Preprocessor, QueryLikelihood, Reranker

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
    "version, soft_prompt, batch_size, static",
    [("1.1", 3, 7, False), pytest.param("1.0", 0, 8, True, marks=pytest.mark.slow)],
)
def test_scores_are_the_models_log_likelihoods_of_each_pair(
    tokenizer, version, soft_prompt, batch_size, static
):
    model = _model(tokenizer, version, soft_prompt)
    lengths = {"document_length": 12, "query_length": 6}
    pairs = _pairs()
    preprocessor = Preprocessor(tokenizer, "ask: ", **lengths)
    batch = preprocessor.arrays(
        Pair("", query, "", document) for document, query in pairs
    )
    assert (batch["query_lengths"] == 6).any() and (batch["query_lengths"] < 6).any()
    expected = -model.per_example_losses(batch).numpy() * batch["query_lengths"]
    scorer = QueryLikelihood(model, preprocessor, batch_size)
    scorer._run.static = static  # as on a TPU
    found = list(scorer.scores(iter(pairs)))
    assert np.std(expected) > 1
    np.testing.assert_allclose(found, expected, rtol=2e-5)


def test_exported_reranker_gives_the_likelihoods(tokenizer, tmp_path):
    model = _model(tokenizer, "1.1", soft_prompt=2)
    model.preprocessor = Preprocessor(tokenizer, "ask: ", 12, 6)
    pairs = _pairs()
    Reranker(model).export(tmp_path / "reranker")
    loaded = tf.saved_model.load(str(tmp_path / "reranker"))
    documents, queries = (tf.constant(texts) for texts in zip(*pairs))
    found = loaded.signatures["score"](queries=queries, documents=documents)
    expected = list(QueryLikelihood(model).scores(pairs))
    np.testing.assert_allclose(found["nats"], expected, rtol=2e-5)
