"""Feature vectors of texts, for MAUVE, by T5's encoder.

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

PRESET = "t5_tiny_pydocs"
# Tokens of a text: more than a query has.
_LENGTH = 128


def load(init: str, batch_size: int = 128) -> Callable[[Sequence[str]], np.ndarray]:
    """Loads an encoder, whose states over a text's tokens, EOS included, are averaged.

    Args:
      init: a T5 with its vocabulary.
      batch_size: texts at a time.

    Returns:
      Takes n texts, and returns [n, hidden_dim] float32 in their order; equal texts
      have equal features, and a text's do not depend on the others, beyond rounding.

    Raises:
      InputError: no such model, or no vocabulary.
    """
    directory = checkpoints.locate(init)
    vocabulary = checkpoints.vocabulary_in(directory)
    if vocabulary is None:
        raise InputError(f"similarity.init is {init}, which has no vocabulary. Add it.")
    tokenizer = Tokenizer(vocabulary)
    config, encoder = checkpoints.load_encoder(directory)
    tokenizer.require_embeddings(config.vocabulary_size)
    pool = MaskedMeanPooling()
    matrix = tf.TensorSpec([None, None], tf.int32)

    @tf.function(input_signature=[matrix, matrix], autograph=False)
    def forward(tokens: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
        states = encoder({"encoder_token_ids": tokens, "encoder_padding_mask": mask})
        return pool(states, mask=mask)

    def features(texts: Sequence[str]) -> np.ndarray:
        numbers: dict[str, int] = {}  # so that equal texts are equal to the bit
        own = [numbers.setdefault(text, len(numbers)) for text in texts]
        ids, lengths = map(np.asarray, tokenizer.encode(list(numbers), _LENGTH))
        found = np.empty([len(ids), config.hidden_dim], np.float32)
        order = np.argsort(-lengths, kind="stable")  # like lengths share a batch
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            widest = lengths[rows[0]]
            mask = np.arange(widest) < lengths[rows][:, np.newaxis]
            found[rows] = forward(ids[rows, :widest], mask.astype(np.int32)).numpy()
        return found[own]

    return features
