"""Feature vectors of texts, for MAUVE and distances, by T5's encoder or GPT-2.

Evaluation imports no models, so features are made here. A measure of features depends
on the model that made them: name it next to the number.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfdpsq.data import Tokenizer
from tfdpsq.generator import checkpoints
from tfdpsq.layers import MaskedMeanPooling
from tfdpsq.run.core import sources
from tfdpsq.validation import InputError, positive_integer

PRESET = "t5_tiny_pydocs"
# The model of the published MAUVE.
GPT2 = "gpt2_large_en"
# Files of a preset of keras-nlp, besides its weights and the tokenizer's.
_OF_PRESET = ("metadata.json", "config.json")
_Forward = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def t5_encoder_features(
    texts: Sequence[str],
    init: str = PRESET,
    batch_size: int = 128,
    length: int = 128,
) -> np.ndarray:
    """Returns the mean of the encoder's states over a text's tokens, EOS included.

    An empty text is EOS alone; a longer one than `length` tokens is cut. The vocabulary
    is the one next to the weights of `init`.

    Returns:
      [n, hidden_dim] float32, in the order of the texts. A text's features do not
      depend on the other texts (beyond rounding); equal texts have equal features.

    Raises:
      InputError: no text, a setting below 1, or no such T5 or vocabulary.
      DataError: a damaged checkpoint or vocabulary.
    """
    _require_texts(texts)
    tokenizer = Tokenizer(sources.vocabulary_file("", init))
    config, encoder = checkpoints.load_encoder(init)
    tokenizer.require_embeddings(config.vocabulary_size)
    distinct, which = _distinct(texts)
    ids, lengths = (np.asarray(a) for a in tokenizer.encode(distinct, length))
    pool = MaskedMeanPooling()

    def forward(tokens: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
        states = encoder({"encoder_token_ids": tokens, "encoder_padding_mask": mask})
        return pool(states, mask=mask)

    rows = [row[:size] for row, size in zip(ids, lengths)]
    return _in_batches(rows, forward, config.hidden_dim, batch_size)[which]


def require_gpt2(preset: str) -> None:
    """Refuses a GPT-2 that is neither a preset's directory nor a known name.

    Raises:
      InputError: names the setting.
    """
    from keras_nlp.models import GPT2Backbone

    if not os.path.isdir(preset) and preset not in GPT2Backbone.presets:
        raise InputError(
            f"similarity.init is {preset!r}, which is neither a directory nor a GPT-2 "
            f"that keras-nlp has: {', '.join(sorted(GPT2Backbone.presets))}. Give one."
        )
    for name in _OF_PRESET if os.path.isdir(preset) else ():
        if not os.path.isfile(os.path.join(preset, name)):
            raise InputError(
                f"similarity.init is {preset!r}, which has no {name}: it is no "
                "keras-nlp preset of GPT-2. Give the directory of one."
            )


def gpt2_features(
    texts: Sequence[str],
    preset_dir: str = GPT2,
    batch_size: int = 32,
    length: int = 1024,
) -> np.ndarray:
    """Returns GPT-2's last hidden state at a text's last token (published MAUVE).

    Args:
      texts: n of them; an empty one is the end-of-text token alone.
      preset_dir: a directory with a keras-nlp preset of GPT-2 (config, weights and
        tokenizer), or the name of one to download, such as "gpt2_large_en".
      batch_size: texts at a time.
      length: most tokens of a text, up to the number of the model's positions.

    Returns:
      [n, hidden_dim] float32, after the final layer norm, in the order of the texts;
      equal texts have equal features.

    Raises:
      InputError: no text, a setting below 1, or a preset that is missing, is not a
        GPT-2, or cannot be downloaded.
    """
    _require_texts(texts)
    positive_integer("length", length)
    from keras_nlp.models import GPT2Backbone, GPT2Tokenizer

    preset_dir = os.fspath(preset_dir)
    try:
        backbone = GPT2Backbone.from_preset(preset_dir)
        tokenizer = GPT2Tokenizer.from_preset(preset_dir)
    except Exception as error:  # each hub's client has errors of its own
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise InputError(
            f"GPT-2 preset {preset_dir} cannot be loaded ({reason}). Connect to the "
            "network, give a directory that holds a keras-nlp preset of GPT-2, or "
            "take the features of a T5."
        ) from error
    length = min(length, backbone.max_sequence_length)
    distinct, which = _distinct(texts)
    rows = [
        row[:length] if len(row) else np.array([tokenizer.end_token_id], np.int32)
        for row in tokenizer(distinct).numpy()
    ]

    def forward(tokens: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
        states = backbone({"token_ids": tokens, "padding_mask": mask})
        last = tf.reduce_sum(mask, axis=1) - 1
        return tf.gather(states, last, batch_dims=1)

    return _in_batches(rows, forward, backbone.hidden_dim, batch_size)[which]


def _distinct(texts: Sequence[str]) -> tuple[list[str], list[int]]:
    """Returns the distinct texts, and the place of each text among them.

    So equal texts have bitwise equal features, which two batches would not give them.
    """
    places: dict[str, int] = {}
    which = [places.setdefault(text, len(places)) for text in texts]
    return list(places), which


def _in_batches(
    rows: Sequence[np.ndarray], forward: _Forward, width: int, batch_size: int
) -> np.ndarray:
    """Returns [n, width] features; rows of similar length share a batch."""
    positive_integer("batch_size", batch_size)
    matrix = tf.TensorSpec([None, None], tf.int32)
    compiled = tf.function(forward, input_signature=[matrix, matrix], autograph=False)
    found = np.empty([len(rows), width], np.float32)
    order = np.argsort([-len(row) for row in rows], kind="stable")
    for start in range(0, len(rows), batch_size):
        places = order[start : start + batch_size]
        longest = len(rows[places[0]])
        ids = np.zeros([len(places), longest], np.int32)
        mask = np.zeros_like(ids)
        for line, place in enumerate(places):
            ids[line, : len(rows[place])] = rows[place]
            mask[line, : len(rows[place])] = 1
        found[places] = compiled(ids, mask).numpy()
    return found


def _require_texts(texts: Sequence[str]) -> None:
    if isinstance(texts, str) or not len(texts):
        raise InputError("there is no list of texts to embed; give at least one text.")
