"""Feature vectors of texts, for MAUVE and distances, by T5's encoder or GPT-2.

A measure of features depends on the model that made them: name it next to the number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfdpsq.data import Tokenizer
from tfdpsq.generator import checkpoints
from tfdpsq.layers import MaskedMeanPooling
from tfdpsq.validation import InputError

# The weights of each featurizer; GPT-2's are those of the published MAUVE.
PRESETS = {"": "", "t5": "t5_tiny_pydocs", "gpt2": "gpt2_large_en"}
# Tokens of a text: more than a query has.
_LENGTH = 128
_Forward = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def features(
    texts: Sequence[str], featurizer: str, init: str = "", batch_size: int = 128
) -> np.ndarray:
    """Embeds texts.

    Args:
      texts: n of them, at least one.
      featurizer: "t5" for the mean of an encoder's states over a text's tokens, EOS
        included; "gpt2" for the last hidden state at a text's last token, as in the
        published MAUVE.
      init: a T5 with its vocabulary, or a keras-nlp preset of GPT-2; "" for `PRESETS`.
      batch_size: texts at a time.

    Returns:
      [n, hidden_dim] float32 in the order of the texts; equal texts have equal
      features, and a text's do not depend on the others, beyond rounding.

    Raises:
      InputError: no such model, or no vocabulary.
    """
    distinct = list(dict.fromkeys(texts))  # so that equal ones are equal to the bit
    made = _of_t5 if featurizer == "t5" else _of_gpt2
    found = made(distinct, init or PRESETS[featurizer], batch_size)
    places = {text: place for place, text in enumerate(distinct)}
    return found[[places[text] for text in texts]]


def _of_t5(texts: Sequence[str], init: str, batch_size: int) -> np.ndarray:
    directory = checkpoints.locate(init)
    vocabulary = checkpoints.vocabulary_in(directory)
    if vocabulary is None:
        raise InputError(f"similarity.init is {init}, which has no vocabulary. Add it.")
    tokenizer = Tokenizer(vocabulary)
    config, encoder = checkpoints.load_encoder(directory)
    tokenizer.require_embeddings(config.vocabulary_size)
    ids, lengths = (np.asarray(each) for each in tokenizer.encode(texts, _LENGTH))
    pool = MaskedMeanPooling()

    def forward(tokens: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
        states = encoder({"encoder_token_ids": tokens, "encoder_padding_mask": mask})
        return pool(states, mask=mask)

    rows = [row[:size] for row, size in zip(ids, lengths)]
    return _in_batches(rows, forward, config.hidden_dim, batch_size)


def _of_gpt2(texts: Sequence[str], init: str, batch_size: int) -> np.ndarray:
    from keras_nlp.models import GPT2Backbone, GPT2Tokenizer

    try:
        backbone = GPT2Backbone.from_preset(init)
        tokenizer = GPT2Tokenizer.from_preset(init)
    except Exception as error:  # each hub's client has errors of its own
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise InputError(
            f"similarity.gpt2 is {init!r}, which cannot be loaded ({reason}). "
            "Give the directory of a keras-nlp preset, or take the features of a T5."
        ) from error
    rows = [
        row[:_LENGTH] if len(row) else np.array([tokenizer.end_token_id], np.int32)
        for row in tokenizer(texts).numpy()
    ]

    def forward(tokens: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
        states = backbone({"token_ids": tokens, "padding_mask": mask})
        return tf.gather(states, tf.reduce_sum(mask, axis=1) - 1, batch_dims=1)

    return _in_batches(rows, forward, backbone.hidden_dim, batch_size)


def _in_batches(
    rows: Sequence[np.ndarray], forward: _Forward, width: int, batch_size: int
) -> np.ndarray:
    """Returns [n, width] features; rows of like length share a batch."""
    matrix = tf.TensorSpec([None, None], tf.int32)
    compiled = tf.function(forward, input_signature=[matrix, matrix], autograph=False)
    found = np.empty([len(rows), width], np.float32)
    order = np.argsort([-len(row) for row in rows], kind="stable")
    for start in range(0, len(rows), batch_size):
        places = order[start : start + batch_size]
        ids = np.zeros([len(places), len(rows[places[0]])], np.int32)
        mask = np.zeros_like(ids)
        for line, place in enumerate(places):
            ids[line, : len(rows[place])] = rows[place]
            mask[line, : len(rows[place])] = 1
        found[places] = compiled(ids, mask).numpy()
    return found
