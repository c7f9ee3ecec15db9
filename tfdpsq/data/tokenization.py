"""T5 tokenisation: SentencePiece by tensorflow-text, and its vocabulary trainer.

Token id 0 is padding, 1 ends a text, 2 is unknown, as in every T5.
"""

from __future__ import annotations

import collections
import hashlib
import io
import itertools
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import tensorflow as tf
import tensorflow_text

from tfdpsq.data.io import atomic_write
from tfdpsq.validation import DataError, InputError, positive_integer

# What the generator reads before a document (paper, section 4.1).
PROMPT = "generate_query: "
# The name of T5's vocabulary next to its weights.
VOCABULARY_FILE = "spiece.model"
# Published T5s have at most 128 embeddings without a piece.
_MOST_SPARE = 512
_SENTINEL = re.compile("▁?<extra_id_[0-9]+>")
# Texts encoded at a time, and texts that a vocabulary is trained on: the first ones.
CHUNK = 1024
_MOST_TEXTS = 500_000


class Tokenizer(tf.Module):
    """A T5 SentencePiece model as tensors in, tensors out.

    `encode` and `decode` run eagerly, in ``tf.function`` and in ``tf.data``. Being a
    ``tf.Module``, it is carried along in a SavedModel.

    Attributes:
      vocabulary_size: number of pieces. A T5 has more logits than that (32,000
        against 32,128): ids from here on cannot be decoded.
      pad_id, eos_id, unk_id: 0, 1, 2: padding, end, and what the vocabulary lacks.
      sentinels: ids of pieces that stand for masked spans, as mT5's vocabulary has.
      fingerprint: SHA-256 of the model file, in hex.
      file: its path.
    """

    pad_id, eos_id, unk_id = 0, 1, 2

    def __init__(self, model_file: str | os.PathLike):
        """Loads a SentencePiece model; raises DataError if it is not a T5's."""
        super().__init__(name="tokenizer")
        try:
            model = Path(model_file).read_bytes()
            processor = sentencepiece.SentencePieceProcessor()
            processor.LoadFromSerializedProto(model)
            # Raises where a piece of a damaged file is not UTF-8.
            pieces = processor.id_to_piece(list(range(processor.get_piece_size())))
        except (OSError, RuntimeError, UnicodeDecodeError) as error:
            problem = f"cannot be read as a SentencePiece model ({error})"
            remedy = f"Give one, e.g. a T5's {VOCABULARY_FILE}"
            raise DataError(model_file, problem, remedy) from error
        special = processor.pad_id(), processor.eos_id(), processor.unk_id()
        if special != (0, 1, 2):
            problem = f"pad, end and unknown are {special}"
            raise DataError(model_file, problem, "A T5's are 0, 1 and 2")
        self.vocabulary_size = len(pieces)
        self.sentinels = tuple(
            n for n, piece in enumerate(pieces) if _SENTINEL.fullmatch(piece)
        )
        self.fingerprint = hashlib.sha256(model).hexdigest()
        self.file = os.fspath(model_file)
        self.model = model
        self._pieces = self._load()

    def require_embeddings(self, embeddings: int, pretrained: bool = False) -> None:
        """Raises InputError if a model lacks embeddings for some of the pieces.

        A `pretrained` one has few more: 100 sentinels, and what rounding up adds.
        """
        few = embeddings < self.vocabulary_size
        if few or (pretrained and embeddings - self.vocabulary_size > _MOST_SPARE):
            raise InputError(
                f"{self.file} has {self.vocabulary_size} pieces, the model "
                f"{embeddings} embeddings: give the vocabulary that it was made with."
            )

    def _load(self) -> tensorflow_text.SentencepieceTokenizer:
        return tensorflow_text.SentencepieceTokenizer(self.model, out_type=tf.int32)

    def _run(self, method: str, value: Any) -> Any:
        """Calls the op, reloading the model where TF has dropped it.

        `tf.random.set_seed` clears the eager kernels, and with them the model
        that tensorflow-text's kernel owns.
        """
        try:
            return getattr(self._pieces, method)(value)
        except tf.errors.NotFoundError:
            self._pieces = self._load()
            return getattr(self._pieces, method)(value)

    def encode(
        self, texts: tf.Tensor | Sequence[str], length: int
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Turns texts into rows of one length, each ended by EOS.

        A long text loses its tail, never its EOS; an empty one is EOS alone.

        Args:
          texts: [B] strings.
          length: tokens a row, EOS included.

        Returns:
          ids: [B, length] int32, padded with 0.
          lengths: [B] int32, tokens that are not padding, EOS included.
        """
        texts = tf.convert_to_tensor(texts, tf.string)
        pieces = self._run("tokenize", texts)[:, : length - 1]
        ends = tf.fill([tf.shape(texts)[0], 1], tf.constant(self.eos_id, tf.int32))
        rows = tf.concat([pieces, tf.RaggedTensor.from_tensor(ends)], axis=1)
        ids = rows.to_tensor(default_value=0, shape=[None, length])
        return ids, tf.cast(rows.row_lengths(), tf.int32)

    def pieces(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Turns B texts into B arrays [any length] int32 of their tokens, less EOS."""
        rows = self._run("tokenize", tf.convert_to_tensor(texts, tf.string))
        return np.split(rows.values.numpy(), rows.row_splits.numpy()[1:-1])

    def unknown(self, texts: Iterable[str]) -> tuple[collections.Counter[str], float]:
        """Counts the characters that the vocabulary lacks, and returns their share."""
        found = collections.Counter[str]()
        for text in texts:
            found.update(unicodedata.normalize("NFKC", text))
        rows = zip(found, self.pieces(list(found)))
        lacking = {each: found[each] for each, ids in rows if self.unk_id in ids}
        share = sum(lacking.values()) / max(1, sum(found.values()))
        return collections.Counter(lacking), share

    def decode(self, ids: tf.Tensor) -> tf.Tensor:
        """Turns ids back into texts.

        Args:
          ids: [B, L] int32 or int64. What follows a row's first EOS is ignored,
            as are padding and ids the vocabulary does not have.

        Returns:
          [B] strings.
        """
        ids = tf.cast(tf.convert_to_tensor(ids), tf.int32)
        ended = tf.cumsum(tf.cast(ids == self.eos_id, tf.int32), axis=1)
        known = (ids > 0) & (ids < self.vocabulary_size)
        kept = tf.ragged.boolean_mask(ids, known & (ended == 0))
        return self._run("detokenize", kept)


def encode_all(
    encode: Callable[[list[str], int], tuple[Any, Any]],
    texts: Iterable[str],
    length: int,
    dtype: type = np.int32,
) -> tuple[np.ndarray, np.ndarray]:
    """Encodes N texts as they stream by; `encode` is a tokenizer's method.

    Returns:
      [N, length] ids of `dtype`, and [N] int32 lengths.
    """
    stream = iter(texts)
    ids, lengths = [np.zeros([0, length], dtype)], [np.zeros([0], np.int32)]
    while chunk := list(itertools.islice(stream, CHUNK)):
        rows, sizes = encode(chunk, length)
        ids.append(np.asarray(rows, dtype))
        lengths.append(np.asarray(sizes))
    return np.concatenate(ids), np.concatenate(lengths)


def train_vocabulary(
    texts: Iterable[str], size: int, output_file: str | os.PathLike
) -> Path:
    """Trains a T5-style unigram vocabulary. Give it PUBLIC documents only.

    A vocabulary holds words of its texts in plain sight and carries no noise: one
    made from private queries would publish them outside any privacy guarantee.

    Rare characters fall back to bytes, so that every text survives encoding. The same
    texts in the same order give the same file.

    Args:
      texts: public documents, streamed; the first 500,000 are used.
      size: number of pieces, the 256 bytes and 3 special ones included.
      output_file: where the model goes.

    Raises InputError if the texts are empty, or `size` does not fit them.
    """
    positive_integer("size", size)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=itertools.islice(texts, _MOST_TEXTS),
            model_writer=model,
            model_type="unigram",
            vocab_size=size,
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            byte_fallback=True,
            # Longer ones are skipped silently.
            max_sentence_length=2**30,
            # Sums over threads depend on their number: fixed, so that the file
            # does not depend on the machine.
            num_threads=2,
            shuffle_input_sentence=False,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        reason = str(error).rpartition("] ")[2].strip(" .")
        raise InputError(
            f"a vocabulary of size {size} does not fit these texts ({reason}). Choose "
            "another, or give more text."
        ) from error
    atomic_write(output_file, model.getvalue())
    return Path(output_file)
