"""A tiny retriever, its tokenizer and pairs, shared by the tests here."""

import zlib

import numpy as np
import pytest
import tensorflow as tf
from helpers.retrieval import tensors

from tfdpsq.data.texts import Pair
from tfdpsq.layers import T5Config
from tfdpsq.retriever import RetrieverConfig, TwoTower, encode_pairs


class WordTokenizer:
    """One id from 2 to 59 a word, then EOS (1), then padding (0)."""

    fingerprint = "words"

    def encode(self, texts, length):
        ids = np.zeros([len(texts), length], np.int32)
        lengths = np.zeros(len(texts), np.int32)
        for row, text in enumerate(texts):
            tokens = [2 + zlib.crc32(word.encode()) % 58 for word in text.split()]
            tokens = tokens[: length - 1] + [1]
            ids[row, : len(tokens)] = tokens
            lengths[row] = len(tokens)
        return tf.constant(ids), tf.constant(lengths)


@pytest.fixture(scope="session")
def tokenizer():
    return WordTokenizer()


@pytest.fixture(scope="session")
def make_config():
    """Builds the tiny config, with changes."""

    def make(**changes):
        t5 = T5Config(60, 1, 2, 16, 24, 8, "1.1", dropout=0.0)
        values = dict(
            t5=t5, embedding_dim=12, scale=20.0, query_length=6, document_length=12
        )
        return RetrieverConfig(**{**values, **changes})

    return make


@pytest.fixture
def make_model(make_config):
    """Builds the tiny model with weights of a seed."""

    def make(seed=0, dtype=None, tokenizer=None, **changes):
        tf.keras.utils.set_random_seed(seed)
        return TwoTower(make_config(**changes), tokenizer, dtype)

    return make


@pytest.fixture(scope="session")
def model(make_config):
    """The tiny model, built once: for tests that do not train it."""
    tf.keras.utils.set_random_seed(0)
    return TwoTower(make_config(), WordTokenizer())


@pytest.fixture(scope="session")
def make_rows():
    """Makes n pairs whose query's words all come from their document."""

    def make(n, seed=0):
        draw = np.random.default_rng(seed)
        rows = []
        for i in range(n):
            words = [f"w{number}" for number in draw.integers(0, 500, 9)]
            query = " ".join(draw.choice(words, 4, replace=False))
            rows.append(Pair(f"q{i}", query, f"d{i}", " ".join(words)))
        return rows

    return make


@pytest.fixture(scope="session")
def make_batch(make_rows, tokenizer):
    """Makes a batch of n rows."""

    def make(n=6, weights=None, seed=0):
        rows = make_rows(n, seed)
        arrays = encode_pairs(rows, tokenizer, query_length=6, document_length=12)
        return tensors(arrays, range(n), weights)

    return make
