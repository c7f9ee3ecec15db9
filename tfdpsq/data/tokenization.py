"""T5 tokenisation: SentencePiece by tensorflow-text, and its vocabulary trainer.

Token id 0 is padding, 1 ends a text, 2 is unknown, as in every T5.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
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

# Texts encoded at a time.
CHUNK = 1024

# The trainer drops longer lines silently, so they are cut before.
_LINE_BYTES = 4000
# It looks at the first ones only.
_MOST_LINES = 500_000


class Tokenizer(tf.Module):
    """A T5 SentencePiece model as tensors in, tensors out.

    Both methods run eagerly, in ``tf.function`` and in ``tf.data``. Being a
    ``tf.Module``, it is carried along in a SavedModel.

    Attributes:
      vocabulary_size: number of pieces. A T5 has more logits than that (32,000
        against 32,128): ids from here on cannot be decoded.
      pad_id: 0.
      eos_id: the id that ends every text.
      unk_id: the id of what the vocabulary lacks.
      fingerprint: SHA-256 of the model file, in hex.
      file: its path.
    """

    def __init__(self, model_file: str | os.PathLike):
        """Loads a SentencePiece model.

        Raises:
          DataError: the file is missing, no SentencePiece model, or its special
            ids are not a T5's.
        """
        super().__init__(name="tokenizer")
        remedy = f"Give a SentencePiece model, e.g. a T5's {VOCABULARY_FILE}"
        try:
            model = Path(model_file).read_bytes()
            if not model:  # SentencePiece takes no bytes for no request.
                raise RuntimeError("the file is empty")
            processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            # Raises where a piece of a damaged file is not UTF-8.
            processor.id_to_piece(list(range(processor.get_piece_size())))
        except OSError as error:
            problem = f"cannot be read ({error.strerror})"
            raise DataError(model_file, problem, remedy) from error
        except (RuntimeError, UnicodeDecodeError) as error:
            problem = f"is no SentencePiece model ({error})"
            raise DataError(model_file, problem, remedy) from error
        self.vocabulary_size = processor.get_piece_size()
        self.pad_id = processor.pad_id()
        self.eos_id = processor.eos_id()
        self.unk_id = processor.unk_id()
        if (self.pad_id, self.eos_id, self.unk_id) != (0, 1, 2):
            raise DataError(
                model_file,
                f"pad, end and unknown have the ids {self.pad_id}, {self.eos_id} and "
                f"{self.unk_id}",
                "A T5 vocabulary has pad 0, end 1, unknown 2",
            )
        self.fingerprint = hashlib.sha256(model).hexdigest()
        self.file = os.fspath(model_file)
        self.model = model
        self._pieces = self._load()

    def require_embeddings(self, embeddings: int, pretrained: bool = False) -> None:
        """Checks that a model has an embedding for every piece.

        A `pretrained` one has few more: 100 sentinels, and what rounding up adds.

        Raises:
          InputError: it has fewer, or many more.
        """
        few = embeddings < self.vocabulary_size
        if few or (pretrained and embeddings - self.vocabulary_size > _MOST_SPARE):
            raise InputError(
                f"{self.file} has {self.vocabulary_size} pieces, the model "
                f"{embeddings} embeddings: it was made with another vocabulary. Give "
                "that one."
            )

    def _load(self) -> tensorflow_text.SentencepieceTokenizer:
        return tensorflow_text.SentencepieceTokenizer(
            model=self.model, out_type=tf.int32
        )

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

    def common_ids(self, most: int) -> list[int]:
        """Returns the ids of the `most` likeliest pieces of text, likeliest first.

        Special pieces and single bytes, which encode rare characters, are none.
        """
        processor = sentencepiece.SentencePieceProcessor(model_proto=self.model)
        special = (
            processor.is_byte,
            processor.is_control,
            processor.is_unknown,
            processor.is_unused,
        )
        ids = [
            i
            for i in range(self.vocabulary_size)
            if not any(test(i) for test in special)
        ]
        return sorted(ids, key=processor.get_score, reverse=True)[:most]

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
        known = (ids != self.pad_id) & (ids >= 0) & (ids < self.vocabulary_size)
        kept = tf.ragged.boolean_mask(ids, known & (ended == 0))
        return self._run("detokenize", kept)


def encode_all(
    encode: Callable[[list[str], int], tuple[Any, Any]],
    texts: Iterable[str],
    length: int,
    dtype: type = np.int32,
) -> tuple[np.ndarray, np.ndarray]:
    """Encodes texts as they stream by, `CHUNK` at a time.

    Args:
      encode: a tokenizer's method of that name.
      texts: N strings.
      length: tokens a row, EOS included.
      dtype: to keep the ids in.

    Returns:
      ids: [N, length] of `dtype`.
      lengths: [N] int32.
    """
    stream = iter(texts)
    parts = [(np.zeros([0, length], dtype), np.zeros([0], np.int32))]
    while chunk := list(itertools.islice(stream, CHUNK)):
        ids, lengths = encode(chunk, length)
        parts.append((np.asarray(ids).astype(dtype, copy=False), np.asarray(lengths)))
    ids, lengths = zip(*parts)
    return np.concatenate(ids), np.concatenate(lengths)


def train_vocabulary(
    texts: Iterable[str],
    size: int,
    output_file: str | os.PathLike,
) -> Path:
    """Trains a T5-style unigram vocabulary. Give it PUBLIC documents only.

    A vocabulary holds words of its texts in plain sight and carries no noise: one
    made from private queries would publish them outside any privacy guarantee.

    Pad is 0, EOS 1, unknown 2; there is no BOS. Rare characters fall back to
    bytes, so that every text survives encoding. The same texts in the same order
    give the same file.

    Args:
      texts: public documents, streamed.
      size: number of pieces, the 256 bytes and 3 special ones included.
      output_file: where the model goes.

    Raises:
      InputError: the texts are empty, or `size` does not fit them.
    """
    positive_integer("size", size)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=itertools.islice(_short_lines(texts), _MOST_LINES),
            model_writer=model,
            model_type="unigram",
            vocab_size=size,
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            byte_fallback=True,
            # Sums over threads depend on their number: fixed, so that the file
            # does not depend on the machine.
            num_threads=2,
            shuffle_input_sentence=False,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        reason = str(error).rpartition("] ")[2].strip(" .")
        raise InputError(
            f"the vocabulary's size is {size}, which does not fit these texts "
            f"({reason}). Choose another, or give more text."
        ) from error
    atomic_write(output_file, model.getvalue())
    return Path(output_file)


def _short_lines(texts: Iterable[str]) -> Iterator[str]:
    """Yields the texts as lines of at most `_LINE_BYTES`, cut at white space."""
    for text in texts:
        words: list[str] = []
        used = 0
        for word in text.split():
            cost = len(word.encode("utf-8")) + 1
            if words and used + cost > _LINE_BYTES:
                yield " ".join(words)
                words, used = [], 0
            if cost <= _LINE_BYTES:
                words.append(word)
                used += cost
        if words:
            yield " ".join(words)
