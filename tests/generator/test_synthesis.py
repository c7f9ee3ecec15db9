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
    synthesis,
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


def test_batching_by_length_keeps_order_and_queries(model, tokenizer, monkeypatch):
    documents = _of_many_lengths(40)
    config = _config(batch_size=4, samples_per_document=1)
    writer = Synthesizer(model, tokenizer, config)
    bucketed = list(writer.queries(documents))
    assert [row.document_id for row in bucketed] == [d.id for d in documents]
    assert [row.query_id for row in bucketed] == [f"genQ{i}" for i in range(40)]
    shuffled = _by_key(writer.queries(documents[::-1]))
    assert shuffled == _by_key(bucketed)
    # All padded to one length: what is padded is masked, but sums take another order.
    monkeypatch.setattr(synthesis, "_WIDTHS", 1)
    assert list(synthesize(model, tokenizer, documents, config)) == bucketed


def test_documents_are_read_a_bounded_number_ahead(model, tokenizer, monkeypatch):
    """One long document among short ones waits for no more than the window."""
    monkeypatch.setattr(synthesis, "_BATCHES_WAITING", 3)
    read = []

    def documents():
        for i in range(200):
            read.append(i)
            yield Document(f"d{i}", "", "return sum " * (6 if i == 0 else 1))

    rows = synthesize(
        model, tokenizer, documents(), _config(batch_size=4, samples_per_document=1)
    )
    assert next(rows).document_id == "d0"
    # A batch of 4 is filled up to 24 rows; one batch is read ahead.
    assert len(read) <= (3 + 1) * 24 < 200
    assert len(list(rows)) == 199


def test_more_samples_than_a_batch_holds(model, tokenizer):
    documents = _documents(2)
    few, many = (
        _by_key(
            synthesize(
                model,
                tokenizer,
                documents,
                _config(samples_per_document=5, batch_size=size),
            )
        )
        for size in (2, 16)
    )
    assert few == many
    assert sorted(few) == [(f"d{i}", j) for i in range(2) for j in range(5)]


@pytest.mark.parametrize(
    "length, document_length, width",
    [(1, 384, 48), (48, 384, 48), (49, 384, 96), (384, 384, 384), (19, 20, 24)],
)
def test_a_documents_width_follows_from_its_own_length(length, document_length, width):
    assert synthesis.bucket_width(length, document_length) == width


def test_seeds_and_samples_give_different_queries(model, tokenizer):
    documents = _documents(6)
    one = _by_key(synthesize(model, tokenizer, documents, _config()))
    other = _by_key(synthesize(model, tokenizer, documents, _config(seed=4)))
    assert sum(one[key] != other[key] for key in one) >= 10
    assert sum(one[f"d{i}", 0] != one[f"d{i}", 1] for i in range(6)) >= 5


def test_ids_count_up_and_documents_come_along(model, tokenizer):
    rows = list(synthesize(model, tokenizer, _documents(3), _config()))
    assert [row.query_id for row in rows] == [f"genQ{i}" for i in range(6)]
    assert rows[5].document == _documents(3)[2].content
    assert [row.sample for row in rows] == [0, 1] * 3


def test_uniforms_belong_to_seed_document_and_sample():
    base = row_uniforms(1, "d", 0, 5)
    np.testing.assert_array_equal(base, row_uniforms(1, "d", 0, 5))
    for other in ((2, "d", 0), (1, "e", 0), (1, "d", 1), (11, "d", 0)):
        assert not np.array_equal(base, row_uniforms(*other, 5))
    many = np.concatenate([row_uniforms(0, str(i), 0, 8) for i in range(2000)])
    assert abs(many.mean() - 0.5) < 4.5 * np.sqrt(1 / 12 / len(many))
    assert many.min() >= 0 and many.max() < 1


def test_greedy_queries_are_the_same_for_every_sample(model, tokenizer):
    config = _config(sampling=SamplingConfig(temperature=0.0))
    rows = _by_key(synthesize(model, tokenizer, _documents(3), config))
    assert all(rows[f"d{i}", 0] == rows[f"d{i}", 1] for i in range(3))


def test_pairs_become_arrays_with_prompt_and_eos(tokenizer):
    pairs = [Pair("q", "return sum", "d", "the mean of all " * 20)]
    arrays = encode_pairs(pairs, tokenizer, query_length=8, document_length=40)
    assert arrays["document_ids"].shape == (1, 40)
    assert arrays["document_ids"][0, 39] == tokenizer.eos_id
    decoded = tokenizer.decode(arrays["document_ids"]).numpy()[0].decode()
    assert decoded.startswith("generate_query: the mean")
    length = arrays["query_lengths"][0]
    assert arrays["query_ids"][0, length - 1] == tokenizer.eos_id


@pytest.mark.parametrize("field", ["document_length", "query_length", "batch_size"])
def test_lengths_of_nothing_are_refused(field):
    with pytest.raises(ValueError, match=f"{field} is 0"):
        _config(**{field: 0})


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
    # Without a tokenizer any id but padding and unknown may come: more than it has.
    free = model.generate(ids, 10, num_return_sequences=40).numpy()
    assert free.shape == (120, 10) and not (free == 2).any()
    assert free.max() >= tokenizer.vocabulary_size
    ended = free == 0
    assert (ended[:, :-1] <= ended[:, 1:]).all()


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        (["a text"], {}, "tokenizer is None.*Pass the model's Tokenizer"),
        ([1, 2, 3], {}, r"shape \[3\] and dtype int64; give a list of texts, or token"),
        ([[1.5]], {}, r"dtype float64; give a list of texts, or token ids"),
        ([], {}, "give a list of texts"),
        ([[0, 5, 1]], {}, r"padding \(0\) before a token; pad on the right"),
        ([[5, 1]], {"max_new_tokens": 0}, "query_length is 0"),
        ([[5, 1]], {"num_return_sequences": 0}, "samples_per_document is 0"),
    ],
)
def test_generate_refuses_what_it_cannot_write_for(model, documents, options, message):
    with pytest.raises(InputError, match=message):
        model.generate(documents, **options)
