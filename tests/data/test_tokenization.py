"""Tokens are those of SentencePiece itself, and every row ends with EOS."""

import hashlib
import pathlib

import numpy as np
import pytest
import sentencepiece
import tensorflow as tf

from tfdpsq.data.tokenization import PROMPT, Tokenizer, train_vocabulary
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


def test_the_prompt_is_the_papers():
    assert PROMPT == "generate_query: "


def test_special_ids_are_t5s(tokenizer, model_file):
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.unk_id) == (0, 1, 2)
    assert tokenizer.vocabulary_size == 300
    assert tokenizer.fingerprint == hashlib.sha256(model_file.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "old, new", [(b"<0x4B>", b"<0x\xffB>"), ("\u2581".encode(), b"\xe2\xff\x81")]
)
def test_a_model_with_a_flipped_byte_is_named(model_file, tmp_path, old, new):
    """SentencePiece's own message repeated the byte, which is not UTF-8."""
    damaged = tmp_path / "spiece.model"
    damaged.write_bytes(pathlib.Path(model_file).read_bytes().replace(old, new, 1))
    with pytest.raises(DataError, match="spiece.model: is no SentencePiece model"):
        Tokenizer(damaged)


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


def test_common_ids_are_words_the_likeliest_first(tokenizer, model_file):
    reference = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
    ids = tokenizer.common_ids(1000)
    # 300 pieces, of which 3 are special and 256 bytes.
    assert len(set(ids)) == 300 - 3 - 256
    assert not any(reference.id_to_piece(i).startswith("<") for i in ids)
    scores = [reference.get_score(i) for i in ids]
    assert scores == sorted(scores, reverse=True) and scores[0] > scores[-1]
    assert tokenizer.common_ids(7) == ids[:7]


@pytest.mark.parametrize("length", [1, 2, 64])
def test_rows_have_the_length_asked_for(tokenizer, length):
    ids, lengths = tokenizer.encode(["privacy", ""], length)
    assert ids.shape == (2, length)
    assert np.array_equal(np.sum(ids.numpy() != 0, axis=1), lengths)


def test_no_texts_give_no_rows(tokenizer):
    ids, lengths = tokenizer.encode(tf.constant([], tf.string), 8)
    assert ids.shape == (0, 8) and lengths.shape == (0,)


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
    ).numpy().tolist() == [
        b"",
        b"",
    ]


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


def test_it_is_carried_along_in_a_saved_model(tokenizer, tmp_path):
    class Served(tf.Module):
        def __init__(self):
            self.tokenizer = tokenizer

        @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
        def ids(self, texts):
            return self.tokenizer.encode(texts, 8)[0]

    tf.saved_model.save(Served(), str(tmp_path / "model"))
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    assert np.array_equal(
        loaded.ids(tf.constant(["privacy"])), tokenizer.encode(["privacy"], 8)[0]
    )


def test_training_is_deterministic_and_sees_only_its_texts(tmp_path, model_file):
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


def test_long_documents_are_cut_not_dropped(tmp_path):
    """SentencePiece skips lines beyond 4,192 bytes without a word."""
    text = " ".join(TEXTS)
    assert len(text) > 3 * 4192
    file = train_vocabulary([text], 300, tmp_path / "long.model")
    ids = sentencepiece.SentencePieceProcessor(model_file=str(file)).encode(text)
    # Pieces 3 to 258 are the bytes: none is needed for a text that was seen.
    assert min(ids) > 258


@pytest.mark.parametrize(
    "texts, size, message",
    [
        (
            [],
            300,
            "size is 300, but these texts hold no text. Give documents with text",
        ),
        (
            TEXTS,
            100_000,
            r"size is 100000, but these texts give at most \d+. Lower it by \d+",
        ),
        (TEXTS, 10, r"size is 10, but these texts need at least \d+ .* Raise it"),
        (TEXTS, 0, "size is 0; it must be an integer of at least 1"),
        ("one string", 300, "texts is one string; give a list"),
    ],
)
def test_impossible_vocabularies_are_refused(tmp_path, texts, size, message):
    with pytest.raises(InputError, match=message):
        train_vocabulary(texts, size, tmp_path / "x.model")
    assert not (tmp_path / "x.model").exists()


def test_files_that_are_no_t5_vocabulary_are_named(tmp_path):
    with pytest.raises(DataError, match=r"a.model: cannot be read \(No such file"):
        Tokenizer(tmp_path / "a.model")
    for content in (b"", b"the\nof\nand\n"):
        (tmp_path / "b.model").write_bytes(content)
        with pytest.raises(DataError, match="b.model: is no SentencePiece model"):
            Tokenizer(tmp_path / "b.model")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_prefix=str(tmp_path / "bert"),
        vocab_size=40,
        minloglevel=2,
    )
    with pytest.raises(DataError, match="A T5 vocabulary has pad 0, end 1, unknown 2"):
        Tokenizer(tmp_path / "bert.model")


@pytest.mark.parametrize("length", [0, -3, 2.5])
def test_lengths_below_one_are_refused(tokenizer, length):
    with pytest.raises(InputError, match=f"length is {length}; it must be an integer"):
        tokenizer.encode(["x"], length)


def test_a_pretrained_models_embeddings_are_few_more_than_its_pieces(tokenizer):
    """100 sentinels and rounding; a model of random weights may have any number."""
    pieces = tokenizer.vocabulary_size
    tokenizer.require_embeddings(pieces + 128, pretrained=True)
    tokenizer.require_embeddings(32_128)
    with pytest.raises(InputError, match="was made with another vocabulary. Give that"):
        tokenizer.require_embeddings(32_128, pretrained=True)
