"""Synthesis: the same query for a document and seed, whatever the batching."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.data import Document, Tokenizer, train_vocabulary
from tfdpsq.data.texts import Pair
from tfdpsq.generator import (
    SamplingConfig,
    SynthesisConfig,
    Synthesizer,
    T5QueryGenerator,
    encode_pairs,
    synthesize,
)
from tfdpsq.generator.synthesis import row_uniforms
from tfdpsq.layers import T5Config
from tfdpsq.validation import InputError

_WORDS = (
    "return sum array axis value list of the all each given mean sort index".split()
)


def _texts(count):
    random = np.random.default_rng(0)
    return [" ".join(random.choice(_WORDS, 12)) + "." for _ in range(count)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "spiece.model"
    train_vocabulary(_texts(200), 290, path)
    return Tokenizer(path)


@pytest.fixture(scope="module")
def model():
    tf.keras.utils.set_random_seed(2)
    return T5QueryGenerator(T5Config(320, 1, 2, 16, 24, 8, dropout=0.0))


def _documents(count):
    return [Document(f"d{i}", "", text) for i, text in enumerate(_texts(count))]


def _config(**changes):
    values = dict(
        document_length=24,
        query_length=10,
        samples_per_document=2,
        batch_size=16,
        seed=3,
    )
    return SynthesisConfig(**{**values, **changes})


def _by_key(rows):
    return {(row.document_id, row.sample): row.query for row in rows}


def test_queries_do_not_depend_on_batch_size_order_or_shard(model, tokenizer):
    documents = _documents(9)
    one, many = (
        Synthesizer(model, tokenizer, _config(batch_size=size)) for size in (1, 7)
    )
    whole = _by_key(one.queries(documents))
    assert len(whole) == 18
    assert _by_key(many.queries(documents)) == whole
    assert _by_key(many.queries(documents[::-1])) == whole
    part = _by_key(many.queries(documents[4:6]))
    assert len(part) == 4 and part == {key: whole[key] for key in part}


def _of_many_lengths(count):
    random = np.random.default_rng(1)
    return [
        Document(f"d{i}", "", " ".join(random.choice(_WORDS, random.integers(1, 14))))
        for i in range(count)
    ]


def test_batching_by_length_keeps_order_and_queries(model, tokenizer):
    documents = _of_many_lengths(40)
    config = _config(batch_size=4, samples_per_document=1)
    writer = Synthesizer(model, tokenizer, config)
    bucketed = list(writer.queries(documents))
    assert [row.document_id for row in bucketed] == [d.id for d in documents]
    assert [row.query_id for row in bucketed] == [f"genQ{i}" for i in range(40)]
    shuffled = _by_key(writer.queries(documents[::-1]))
    assert shuffled == _by_key(bucketed)


def test_seeds_and_samples_give_different_queries(model, tokenizer):
    documents = _documents(6)
    one = _by_key(synthesize(model, tokenizer, documents, _config()))
    other = _by_key(synthesize(model, tokenizer, documents, _config(seed=4)))
    assert sum(one[key] != other[key] for key in one) >= 10
    assert sum(one[f"d{i}", 0] != one[f"d{i}", 1] for i in range(6)) >= 5


def test_uniforms_belong_to_seed_document_and_sample():
    base = row_uniforms(1, "d", 0, 5)
    np.testing.assert_array_equal(base, row_uniforms(1, "d", 0, 5))
    for other in ((2, "d", 0), (1, "e", 0), (1, "d", 1), (11, "d", 0)):
        assert not np.array_equal(base, row_uniforms(*other, 5))
    many = np.concatenate([row_uniforms(0, str(i), 0, 8) for i in range(2000)])
    assert abs(many.mean() - 0.5) < 4.5 * np.sqrt(1 / 12 / len(many))
    assert many.min() >= 0 and many.max() < 1


def test_pairs_become_arrays_with_prompt_and_eos(tokenizer):
    pairs = [Pair("q", "return sum", "d", "the mean of all " * 20)]
    arrays = encode_pairs(pairs, tokenizer, query_length=8, document_length=40)
    assert arrays["document_ids"].shape == (1, 40)
    assert arrays["document_ids"][0, 39] == tokenizer.eos_id
    decoded = tokenizer.decode(arrays["document_ids"]).numpy()[0].decode()
    assert decoded.startswith("generate_query: the mean")
    length = arrays["query_lengths"][0]
    assert arrays["query_ids"][0, length - 1] == tokenizer.eos_id


def test_generate_writes_what_synthesis_writes(model, tokenizer):
    texts = _texts(3)
    sampling = SamplingConfig(top_p=0.9)
    options = dict(num_return_sequences=2, seed=3, sampling=sampling)
    settings = _config(sampling=sampling)
    documents = [Document(str(i), "", text) for i, text in enumerate(texts)]
    expected = [row.query for row in synthesize(model, tokenizer, documents, settings)]
    assert len(set(expected)) > 3
    found = model.generate(
        texts, 10, tokenizer=tokenizer, document_length=24, **options
    )
    assert found == expected
    # The same tokens by hand, and without padding that a batch may add.
    ids, lengths = tokenizer.encode([settings.prompt + text for text in texts], 24)
    ids = ids[:, : int(max(lengths))]
    written = model.generate(ids, 10, tokenizer=tokenizer, **options)
    assert (written.shape, written.dtype) == ((6, 10), tf.int32)
    texts_of = [" ".join(t.decode().split()) for t in tokenizer.decode(written).numpy()]
    assert texts_of == expected


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        (["a text"], {}, "tokenizer is None"),
        ([[1.5]], {}, "float64"),
        ([[0, 5, 1]], {}, "pad on the right"),
        ([[5, 1]], {"max_new_tokens": 0}, "query_length is 0"),
    ],
)
def test_generate_refuses_malformed_documents(model, documents, options, message):
    with pytest.raises(InputError, match=message):
        model.generate(documents, **options)
