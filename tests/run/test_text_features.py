"""Features of texts: padding and order change nothing; T5 pooled, GPT-2's last."""

import json

import kagglehub
import numpy as np
import pytest
import tensorflow as tf
from keras_nlp.models import GPT2Backbone, GPT2Tokenizer
from keras_nlp.src.tokenizers.byte_pair_tokenizer import bytes_to_unicode

from tfdpsq.data import Tokenizer, train_vocabulary
from tfdpsq.generator import T5QueryGenerator, checkpoints
from tfdpsq.layers import T5Config
from tfdpsq.run.common.text_features import features
from tfdpsq.validation import InputError

TEXTS = [
    "sorts the list",
    "",
    "a",
    "who reads a table and merges the lists in it twice",
    "a",
]


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    """A T5 of random weights with its vocabulary, as `finetune` writes them."""
    directory = tmp_path_factory.mktemp("t5")
    lines = [f"{text} {i} and more of it" for i in range(80) for text in TEXTS]
    train_vocabulary(lines, 300, directory / "made.model")
    tf.keras.utils.set_random_seed(1)
    T5QueryGenerator(T5Config(310, 1, 2, 16, 24, 8, "1.1")).save_to_huggingface(
        directory, directory / "made.model"
    )
    return str(directory)


def test_t5_features_are_the_mean_state_of_a_texts_own_tokens(t5):
    of_sizes = [features(TEXTS, "t5", t5, size) for size in (3, 128)]
    assert (of_sizes[0].dtype, of_sizes[0].shape) == (np.float32, (5, 16))
    np.testing.assert_array_equal(of_sizes[0][2], of_sizes[0][4])
    _, encoder = checkpoints.load_encoder(t5)
    tokenizer = Tokenizer(f"{t5}/spiece.model")
    for row, text in enumerate(TEXTS):
        # Unpadded and alone.
        ids = [*tokenizer.pieces([text])[0], tokenizer.eos_id]
        ids = tf.constant([ids], tf.int32)
        states = encoder(
            {"encoder_token_ids": ids, "encoder_padding_mask": tf.ones_like(ids)}
        )
        expected = np.mean(states[0].numpy().astype(np.float64), axis=0)
        for got in of_sizes:
            np.testing.assert_allclose(got[row], expected, atol=1e-5)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A tiny GPT-2 of random weights and its directory.

    `save_to_preset` needs Keras 3, so the files are written as it writes them.
    """
    directory = tmp_path_factory.mktemp("gpt2")
    sizes = {
        "vocabulary_size": 258,
        "num_layers": 1,
        "num_heads": 2,
        "hidden_dim": 8,
        "intermediate_dim": 12,
        "max_sequence_length": 64,
    }
    backbone = GPT2Backbone(**sizes)
    random = np.random.default_rng(0)
    backbone.set_weights([random.normal(size=w.shape) for w in backbone.weights])

    def write(file, module, name, config):
        content = {
            "module": f"keras_nlp.src.models.gpt2.{module}",
            "class_name": name,
            "config": config,
            "registered_name": f"keras_nlp>{name}",
        }
        (directory / file).write_text(json.dumps(content))

    write("config.json", "gpt2_backbone", "GPT2Backbone", backbone.get_config())
    write("tokenizer.json", "gpt2_tokenizer", "GPT2Tokenizer", {"dtype": "int32"})
    versions = {"keras_version": "3.3.3", "keras_nlp_version": "0.12.1"}
    (directory / "metadata.json").write_text(json.dumps(versions))
    backbone.save_weights(str(directory / "model.weights.h5"))
    assets = directory / "assets" / "tokenizer"
    assets.mkdir(parents=True)
    pieces = [*map(str, bytes_to_unicode()[1]), "th", "<|endoftext|>"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    (assets / "vocabulary.json").write_text(json.dumps(vocabulary))
    (assets / "merges.txt").write_text("t h\n")
    return backbone, str(directory)


def test_gpt2_features_are_the_last_tokens_state_whatever_the_padding(gpt2):
    backbone, directory = gpt2
    # By length: three share a batch and its padding, the empty one is alone.
    got = features(TEXTS, "gpt2", directory, 3)
    assert (got.dtype, got.shape) == (np.float32, (5, 8))
    tokenizer = GPT2Tokenizer.from_preset(directory)
    for row, text in enumerate(TEXTS):
        # The empty text is the end-of-text token.
        ids = tokenizer(text).numpy() if text else [257]
        ids = tf.constant([ids], tf.int32)
        states = backbone({"token_ids": ids, "padding_mask": tf.ones_like(ids)})
        np.testing.assert_allclose(got[row], states[0, -1], atol=1e-5)
    assert len(np.unique(got.round(3), axis=0)) == 4


def test_missing_weights_are_named(tmp_path, monkeypatch):
    def no_network(*_):
        raise ConnectionError("no route to host\nand more")

    monkeypatch.setattr(kagglehub, "model_download", no_network)
    with pytest.raises(InputError, match="gpt2_large_en.*no route to host"):
        features(["a"], "gpt2")
    with pytest.raises(InputError, match="keras-nlp"):
        features(["a"], "gpt2", str(tmp_path))
