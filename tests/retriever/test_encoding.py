"""Corpus encoding: order, agreement with single texts, flat and compiled once."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.retriever import Embedder, TwoTower, encode_texts
from tfdpsq.validation import InputError


def _texts(n, seed=0):
    draw = np.random.default_rng(seed)
    return [
        " ".join(f"w{word}" for word in draw.integers(0, 500, draw.integers(0, 15)))
        for _ in range(n)
    ]


@pytest.mark.parametrize(
    ("n", "batch_size", "jit_compile"),
    [(1, 4, False), (4, 4, False), (70, 4, False), (70, 128, False), (70, 4, True)],
)
def test_equals_texts_encoded_one_by_one(model, tokenizer, n, batch_size, jit_compile):
    texts = _texts(n)
    got = encode_texts(
        model,
        iter(texts),
        tokenizer,
        "document",
        batch_size,
        progress=False,
        jit_compile=jit_compile,
    )
    assert (got.dtype, got.shape) == (np.float32, (n, 12))
    for row in range(0, n, 7):
        alone = model.encode_documents(*tokenizer.encode([texts[row]], 12))
        np.testing.assert_allclose(got[row], alone[0], rtol=0, atol=1e-6)


def test_kind_chooses_tower_and_length(make_model, tokenizer):
    model, texts = make_model(shared=False), _texts(9)
    got = encode_texts(model, texts, tokenizer, "query", 4, progress=False)
    expected = model.encode_queries(*tokenizer.encode(texts, 6))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)
    with pytest.raises(InputError, match="kind is 'passage'"):
        encode_texts(model, texts, tokenizer, "passage")


class _Counting(TwoTower):
    """Counts how often its encoder is traced."""

    traces = 0

    def encode_documents(self, token_ids, lengths, training=False):
        _Counting.traces += 1
        return super().encode_documents(token_ids, lengths, training)


def test_compiled_once_and_reads_a_window_at_a_time(make_config, tokenizer):
    taken, windows = [], []

    class Watching:
        def encode(self, texts, length):
            windows.append(len(taken))
            return tokenizer.encode(texts, length)

    def stream():
        for number, text in enumerate(_texts(150)):
            taken.append(number)
            yield text

    _Counting.traces = 0
    model = _Counting(make_config())
    encode_texts(model, stream(), Watching(), "document", 4, progress=False)
    assert _Counting.traces == 1
    # 16 batches of 4 at a time, never the whole corpus.
    assert windows == [64, 128, 150]


def test_progress_shows_a_rate(model, tokenizer, capsys):
    encode_texts(model, _texts(5), tokenizer, "query", 2, total=5)
    shown = capsys.readouterr().err
    assert "query embeddings" in shown
    assert "5/5" in shown
    assert "text/s" in shown


def test_no_text_is_refused(model, tokenizer):
    with pytest.raises(InputError, match="no document to embed"):
        encode_texts(model, [], tokenizer, "document")
    with pytest.raises(InputError, match="batch_size is 0"):
        encode_texts(model, ["a"], tokenizer, "document", 0)


def test_weights_trained_since_are_used(make_model, tokenizer):
    model, texts = make_model(), _texts(3)
    before = encode_texts(model, texts, tokenizer, "query", 2, progress=False)
    for variable in model.trainable_variables:
        variable.assign_add(tf.random.normal(variable.shape, seed=1))
    after = encode_texts(model, texts, tokenizer, "query", 2, progress=False)
    assert np.abs(after - before).max() > 0.01


def test_on_a_processor_a_batch_is_cut_where_results_leave_the_cache(
    model, tokenizer, monkeypatch
):
    """70 texts at a time are 32, 32 and 6; with a GPU or XLA they stay together."""
    texts = _texts(70)

    def embedded(jit_compile=False):
        counts = []
        embedder = Embedder(model, tokenizer, "document", 70, jit_compile)
        return np.concatenate(list(embedder.windows(texts, counts.append))), counts

    parts, counts = embedded()
    assert counts == [32, 32, 6]
    assert embedded(jit_compile=True)[1] == [70]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [kind])
    whole, counts = embedded()
    assert counts == [70]
    np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-6)
