"""Tokens are those of SentencePiece itself, and every row ends with EOS."""

import hashlib

import numpy as np
import pytest
import sentencepiece
import tensorflow as tf

from tfdpsq.data.tokenization import Tokenizer, train_vocabulary
from tfdpsq.validation import DataError, InputError

TEXTS = [
    f"The {noun} of a {kind} is {verb} by the {other}."
    for noun in ("gradient", "document", "privacy", "sampling", "query")
    for kind in ("model", "corpus", "tensor", "mechanism")
    for verb in ("clipped", "returned", "measured", "computed", "given")
    for other in ("caller", "optimizer", "retriever")
]


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    return train_vocabulary(TEXTS, 300, tmp_path_factory.mktemp("spm") / "a.model")


@pytest.fixture(scope="module")
def tokenizer(model_file):
    return Tokenizer(model_file)


def test_special_ids_are_t5s(tokenizer, model_file):
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.unk_id) == (0, 1, 2)
    assert tokenizer.vocabulary_size == 300
    assert tokenizer.fingerprint == hashlib.sha256(model_file.read_bytes()).hexdigest()


def test_ids_are_sentencepieces_own_with_eos_after_truncation(tokenizer, model_file):
    reference = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
    texts = ["The gradient is clipped.", "", "privacy", "unseen Wörter 你好 🙂"]
    length = 9
    ids, lengths = tokenizer.encode(texts, length)
    assert ids.dtype == lengths.dtype == tf.int32
    for row, size, text in zip(ids.numpy(), lengths.numpy(), texts):
        expected = [*reference.encode(text)[: length - 1], 1]
        assert row.tolist() == expected + [0] * (length - len(expected))
        assert size == len(expected)
    # The last text is longer than the row: it lost its tail, not its EOS.
    assert lengths[3] == length and ids[3, -1] == 1


def test_every_text_survives_by_falling_back_to_bytes(tokenizer):
    texts = ["The query is given.", "Ünïcode 你好 🙂 \u0416", "a_b(c)[d] == {e}"]
    ids, _ = tokenizer.encode(texts, 128)
    assert [text.decode() for text in tokenizer.decode(ids).numpy()] == texts
    assert not np.any(ids.numpy() == tokenizer.unk_id)


def test_decoding_stops_at_eos_and_skips_what_is_no_piece(tokenizer):
    """T5 has more logits than pieces: 32,128 against 32,000."""
    ids, lengths = tokenizer.encode(["privacy model"], 16)
    size = int(lengths[0])
    row = ids.numpy()[0]
    row[size:] = row[0]  # Garbage after EOS.
    padded = np.concatenate([[0], row[:1], [tokenizer.vocabulary_size, -1], row[1:]])
    assert tokenizer.decode([padded]).numpy().tolist() == [b"privacy model"]
    assert tokenizer.decode(
        tf.constant([[1, 5], [0, 0]], tf.int64)
    ).numpy().tolist() == [b"", b""]


def test_graph_mode_tf_data_and_eager_agree(tokenizer):
    texts = ["is clipped.", "", "privacy"]
    eager = tokenizer.encode(texts, 24)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
    def graph(batch):
        ids, lengths = tokenizer.encode(batch, 24)
        return ids, lengths, tokenizer.decode(ids)

    ids, lengths, decoded = graph(tf.constant(texts))
    assert np.array_equal(ids, eager[0]) and np.array_equal(lengths, eager[1])
    assert [text.decode() for text in decoded.numpy()] == texts
    data = tf.data.Dataset.from_tensor_slices(texts).batch(2)
    data = data.map(lambda batch: tokenizer.encode(batch, 24))
    rows = np.concatenate([ids.numpy() for ids, _ in data])
    assert np.array_equal(rows, eager[0])
    (spec, _) = data.element_spec
    assert spec.shape[1] == 24  # XLA needs it.


def test_vocabulary_is_deterministic_and_sees_only_its_texts(tmp_path, model_file):
    again = train_vocabulary(iter(TEXTS), 300, tmp_path / "b.model")
    assert again.read_bytes() == model_file.read_bytes()
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(again))
    normal = [
        pieces.id_to_piece(i).replace("▁", " ")
        for i in range(3, len(pieces))
        if not pieces.is_byte(i)
    ]
    source = " " + "  ".join(TEXTS)
    assert normal and all(piece in source for piece in normal)


def test_training_uses_all_of_long_documents(tmp_path):
    """SentencePiece skips lines beyond 4,192 bytes without a word."""
    text = " ".join(TEXTS)
    assert len(text) > 3 * 4192
    file = train_vocabulary([text], 300, tmp_path / "long.model")
    ids = sentencepiece.SentencePieceProcessor(model_file=str(file)).encode(text)
    # Pieces 3 to 258 are the bytes: none is needed for a text that was seen.
    assert min(ids) > 258


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A vocabulary like T5's and mT5's: no bytes, and sentinels among its pieces."""
    path = tmp_path_factory.mktemp("published") / "spiece"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_prefix=str(path),
        vocab_size=48,
        **{"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "minloglevel": 2},
        user_defined_symbols=["<extra_id_1>", "▁<extra_id_0>"],
    )
    return Tokenizer(f"{path}.model")


def test_characters_that_a_vocabulary_lacks_are_counted(published, tokenizer):
    texts = ["The query", "Жук. Э", "ｇiven cafe\u0301"]
    lacking, share = published.unknown(texts)
    # é is one character, however it is written, and a wide g is a g.
    assert lacking == dict.fromkeys("ЖукЭé", 1) and share == 5 / 25
    assert tokenizer.unknown(texts) == ({}, 0.0)  # it falls back to bytes
    assert published.unknown([]) == ({}, 0.0)


def test_sentinels_are_known(published, tokenizer):
    assert published.sentinels == (3, 4) and tokenizer.sentinels == ()


def test_impossible_vocabularies_are_refused(tmp_path):
    for texts, size, message in (
        ([], 300, "does not fit"),
        (TEXTS, 100_000, r"does not fit these texts .*<= \d+"),
    ):
        with pytest.raises(InputError, match=message):
            train_vocabulary(texts, size, tmp_path / "x.model")
        assert not (tmp_path / "x.model").exists()


def test_files_without_a_t5_vocabulary_are_named(tmp_path, model_file):
    with pytest.raises(DataError, match=r"a.model: cannot be read .*No such file"):
        Tokenizer(tmp_path / "a.model")
    damaged = model_file.read_bytes().replace(b"<0x4B>", b"<0x\xffB>", 1)
    for content in (b"", b"the\nof\nand\n", damaged):
        (tmp_path / "b.model").write_bytes(content)
        with pytest.raises(DataError, match="b.model: cannot be read as a Sen"):
            Tokenizer(tmp_path / "b.model")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_prefix=str(tmp_path / "bert"),
        vocab_size=40,
        minloglevel=2,
    )
    with pytest.raises(DataError, match="A T5's are 0, 1 and 2"):
        Tokenizer(tmp_path / "bert.model")


def test_a_pretrained_models_embeddings_are_few_more_than_its_pieces(tokenizer):
    """100 sentinels and rounding; a model of random weights may have any number."""
    pieces = tokenizer.vocabulary_size
    tokenizer.require_embeddings(pieces + 128, pretrained=True)
    tokenizer.require_embeddings(32_128)
    with pytest.raises(InputError, match="give the vocabulary that it was made with"):
        tokenizer.require_embeddings(32_128, pretrained=True)
