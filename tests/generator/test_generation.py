"""Generation: the same query for a document and seed, whatever the batching."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.data import Document, Tokenizer, train_vocabulary
from tfdpsq.data.texts import Pair
from tfdpsq.generator import Greedy, Preprocessor, T5QueryGenerator, TopP
from tfdpsq.generator.decoding import text_mask
from tfdpsq.generator.generation import row_uniforms
from tfdpsq.layers import T5Config, apply_lora
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


def _model(tokenizer):
    tf.keras.utils.set_random_seed(2)
    preprocessor = Preprocessor(tokenizer, document_length=24, query_length=10)
    config = T5Config(320, 1, 2, 16, 24, 8, dropout=0.0)
    return T5QueryGenerator(config, preprocessor=preprocessor)


@pytest.fixture(scope="module")
def model(tokenizer):
    return _model(tokenizer)


def _documents(count):
    return [Document(f"d{i}", "", text) for i, text in enumerate(_texts(count))]


def _written(model, documents, samples=2, seed=3, batch_size=16, **options):
    return list(
        model.write_queries(
            documents, seed=seed, samples=samples, batch_size=batch_size, **options
        )
    )


def _by_key(rows):
    return {(row.document_id, row.sample): row.query for row in rows}


def test_queries_do_not_depend_on_batch_size_order_or_shard(model):
    documents = _documents(9)
    whole = _by_key(_written(model, documents, batch_size=1))
    assert len(whole) == 18
    assert _by_key(_written(model, documents, batch_size=7)) == whole
    assert _by_key(_written(model, documents[::-1], batch_size=7)) == whole
    part = _by_key(_written(model, documents[4:6]))
    assert len(part) == 4 and part == {key: whole[key] for key in part}


def test_numbers_of_queries_may_differ_and_be_many(model):
    """More samples than one request holds; the first ones are the same queries."""
    first, second, third = _documents(3)
    rows = _written(model, [(first, 70), (second, 0), (third, 1)], samples=70)
    assert [row.document_id for row in rows] == ["d0"] * 70 + ["d2"]
    assert [row.sample for row in rows] == [*range(70), 0]
    few = _by_key(_written(model, [first]))
    assert {key: _by_key(rows)[key] for key in few} == few


def _of_many_lengths(count):
    random = np.random.default_rng(1)
    return [
        Document(f"d{i}", "", " ".join(random.choice(_WORDS, random.integers(1, 14))))
        for i in range(count)
    ]


def test_batching_by_length_keeps_order_and_queries(model):
    documents, counts = _of_many_lengths(40), []
    rows = _written(
        model,
        documents,
        samples=1,
        batch_size=4,
        first=7,
        on_batch=lambda *count: counts.append(count),
    )
    assert [row.document_id for row in rows] == [d.id for d in documents]
    assert [row.query_id for row in rows] == [f"genQ{i}" for i in range(7, 47)]
    assert len(counts) == 10 and sum(queries for queries, _ in counts) == 40
    assert all(tokens >= queries for queries, tokens in counts)
    shuffled = _written(model, documents[::-1], samples=1, batch_size=4)
    assert _by_key(shuffled) == _by_key(rows)


def test_only_text_is_written(model, monkeypatch):
    """No sentinel, unknown or id beyond the vocabulary, however probable it is."""
    tokenizer = model.preprocessor.tokenizer
    bad = {0, 2, *range(tokenizer.vocabulary_size, 320)}
    monkeypatch.setattr(tokenizer, "sentinels", (280, 285))
    mask = text_mask(320, tokenizer.vocabulary_size, tokenizer.sentinels)
    assert {*np.flatnonzero(np.isinf(mask))} == bad | {280, 285}
    ids, _ = model.preprocessor.documents(_texts(40))
    drawn = {*np.ravel(model.generate(ids, TopP(1.0), samples=8))}
    assert len(drawn) > 200 and not drawn & (bad - {0} | {280, 285})


def test_seeds_and_samples_give_different_queries(model):
    documents = _documents(6)
    one = _by_key(_written(model, documents))
    other = _by_key(_written(model, documents, seed=4))
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
    preprocessor = Preprocessor(tokenizer, query_length=8, document_length=40)
    arrays = preprocessor.arrays(pairs)
    assert arrays["document_ids"].shape == (1, 40)
    assert arrays["document_ids"][0, 39] == tokenizer.eos_id
    (decoded,) = preprocessor.decode(arrays["document_ids"])
    assert decoded.startswith("generate_query: the mean")
    length = arrays["query_lengths"][0]
    assert arrays["query_ids"][0, length - 1] == tokenizer.eos_id
    ((inputs, labels),) = preprocessor(pairs).as_numpy_iterator()
    for name, values in arrays.items():
        np.testing.assert_array_equal(inputs[name], values[0])
    np.testing.assert_array_equal(labels, arrays["query_ids"][0])


def test_generate_writes_what_write_queries_writes(model):
    texts = _texts(3)
    documents = [Document(str(i), "", text) for i, text in enumerate(texts)]
    expected = [row.query for row in _written(model, documents, sampler=TopP(0.9))]
    assert len(set(expected)) > 3
    assert model.generate(texts, TopP(0.9), seed=3, samples=2) == expected
    # The same tokens by hand, and without padding that a batch may add.
    ids, lengths = model.preprocessor.documents(texts)
    ids = ids[:, : int(max(lengths))]
    written = model.generate(ids, TopP(0.9), seed=3, samples=2)
    assert (written.shape, written.dtype) == ((6, 10), np.int32)
    assert model.preprocessor.decode(written) == expected


def test_generate_compiles_once_and_reads_the_weights_when_called(tokenizer):
    model, ids = _model(tokenizer), np.array([[5, 9, 11, 1]])
    before = model.generate(ids, Greedy(), 6)
    writers = model._writer.cache_info().currsize
    other = T5QueryGenerator(model.config)
    model.set_weights(other.get_weights())
    after = model.generate(ids, Greedy(), 6)
    np.testing.assert_array_equal(after, other.generate(ids, Greedy(), 6))
    assert (before != after).any()
    assert model._writer.cache_info().currsize == writers
    for layer in apply_lora(model, 2, 4.0, ["*/query_projector"]).values():
        layer.up.kernel.assign(tf.fill(layer.up.kernel.shape, 9.0))
    assert (model.generate(ids, Greedy(), 6) != after).any()


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        (["a text"], {}, "no preprocessor"),
        ([[1.5]], {}, "float64"),
        ([[5, 1]], {"max_length": 0}, "max_length is 0"),
        ([[5, 1]], {"samples": 0}, "samples is 0"),
    ],
)
def test_generate_refuses_malformed_documents(model, documents, options, message):
    bare = T5QueryGenerator(model.config)
    with pytest.raises(InputError, match=message):
        bare.generate(documents, **options)
