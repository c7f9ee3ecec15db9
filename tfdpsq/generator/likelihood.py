"""Query likelihood: how probable a generator finds a query, given a document.

A generator that writes queries for documents also tells for which documents a query
would have been written (Ponte and Croft 1998; by a language model that is trained on
pairs, dos Santos et al. 2020, *Beyond [CLS] through Ranking by Generation*). By
post-processing it costs no privacy beyond the generator's certificate.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.data.tokenization import PROMPT, Tokenizer
from tfdpsq.layers.replicated import Replicated
from tfdpsq.layers.softmax import cross_entropy

# For XLA, documents, tokens of the longest query and real tokens of a batch are padded
# to multiples of a part of what they could be at most: one program for each multiple.
_DOCUMENT_PARTS, _LENGTH_PARTS, _TOKEN_PARTS = 4, 4, 8
# Pairs are dealt to batches by length among as many.
_BATCHES_READ = 16


class QueryLikelihood:
    """Log-likelihood of queries under a generator.

    A document is encoded once for its neighbours in a batch, which have documents of
    like length: little padding is computed. One graph serves batches of all shapes;
    under XLA, also for a TPU, each of a few shapes is compiled.
    """

    def __init__(
        self,
        model: tf.keras.Model,
        tokenizer: Tokenizer,
        document_length: int = 384,
        query_length: int = 128,
        batch_size: int = 64,
        prompt: str = PROMPT,
        jit_compile: bool = False,
    ):
        """Stores the arguments; runs nothing.

        In a strategy's scope, which the model was made in, each replica scores batches
        of its own.

        Args:
          model: a `T5QueryGenerator`.
          tokenizer: its vocabulary.
          document_length: tokens kept of prompt and document, L, EOS included.
          query_length: tokens kept of a query, T, EOS included.
          batch_size: pairs scored at a time, B; for XLA, the last batch is padded.
          prompt: text before every document.
          jit_compile: compile with XLA.

        Raises:
          InputError: a length or the batch size is below one.
        """
        self._tokenizer = tokenizer
        self._lengths = (
            validation.positive_integer("document_length", document_length),
            validation.positive_integer("query_length", query_length),
        )
        self._batch_size = validation.positive_integer("batch_size", batch_size)
        self._prompt = prompt
        self._run = Replicated(
            lambda *given: log_likelihoods(model, *given),
            None if jit_compile else _SIGNATURE,
            jit_compile,
        )
        # XLA compiles a program for each shape.
        self._few_shapes = jit_compile or self._run.static

    def scores(self, pairs: Iterable[tuple[str, str]]) -> Iterator[float]:
        """Scores queries with documents.

        Args:
          pairs: (document, query), read as a stream, 16 batches at a time; those of
            one document should follow each other.

        Yields:
          For each pair, the log-likelihood in nats of the query's tokens and its end;
          of a longer query than T tokens, of the first T.
        """
        stream = iter(pairs)
        size, at_once = self._batch_size, self._batch_size * self._run.at_a_time
        while rows := list(itertools.islice(stream, at_once * _BATCHES_READ)):
            number: dict[str, int] = {}
            own = np.array([number.setdefault(text, len(number)) for text, _ in rows])
            documents = self._encoded([self._prompt + t for t in number], 0)
            queries = self._encoded([query for _, query in rows], 1)
            # Documents of like length, and the pairs of each, in one batch.
            order = np.lexsort((own, documents.lengths[own]))
            nats = np.empty(len(rows))
            for start in range(0, len(rows), at_once):
                chunk = order[start : start + at_once]
                parts = [chunk[s : s + size] for s in range(0, len(chunk), size)]
                batches = self._batches(parts, own, documents, queries)
                for part, found in zip(parts, self._run(batches)):
                    nats[part] = found.numpy()[: len(part)]
            yield from nats.tolist()

    def _batches(
        self,
        parts: list[np.ndarray],
        own: np.ndarray,
        documents: _Encoded,
        queries: _Encoded,
    ) -> list[Sequence[np.ndarray]]:
        """Returns the arguments of `log_likelihoods`, of one shape for all parts.

        `parts` has the pairs of each batch, `own` the document of each pair.
        """
        found = [np.unique(own[part], return_inverse=True) for part in parts]
        rows = max(map(len, parts))
        count = max(len(distinct) for distinct, _ in found)
        length = max(int(documents.lengths[own[part]].max()) for part in parts)
        width = max(int(queries.lengths[part].max()) for part in parts)
        real = max(int(queries.lengths[part].sum()) for part in parts)
        if self._few_shapes:
            rows, length = self._batch_size, self._lengths[0]
            count = _rounded(count, rows, _DOCUMENT_PARTS)
            width = _rounded(width, self._lengths[1], _LENGTH_PARTS)
            real = _rounded(real, rows * width, _TOKEN_PARTS)
        batches: list[Sequence[np.ndarray]] = []
        for part, (distinct, which) in zip(parts, found):
            lengths = _padded(queries.lengths[part], rows)
            tokens = np.flatnonzero(np.arange(width) < lengths[:, np.newaxis])
            batches.append(
                (
                    _padded(documents.ids[distinct, :length], count),
                    _padded(documents.lengths[distinct], count),
                    _padded(which.astype(np.int32), rows),
                    _padded(queries.ids[part, :width], rows),
                    lengths,
                    # The rest repeats a place, and is not counted.
                    _padded(tokens.astype(np.int32), real),
                    np.array(len(tokens), np.int32),
                )
            )
        return batches

    def _encoded(self, texts: list[str], which: int) -> _Encoded:
        ids, lengths = self._tokenizer.encode(texts, self._lengths[which])
        return _Encoded(np.asarray(ids), np.asarray(lengths))


class _Encoded(NamedTuple):
    """Texts: token ids [N, L] and lengths [N]."""

    ids: np.ndarray
    lengths: np.ndarray


def _padded(array: np.ndarray, rows: int) -> np.ndarray:
    """Returns an array with rows of zeros at its end."""
    return np.pad(array, [(0, rows - len(array)), *[(0, 0)] * (array.ndim - 1)])


# The arguments of `log_likelihoods` after the model, of any batch.
_SIGNATURE = [
    tf.TensorSpec(shape, tf.int32)
    for shape in ([None, None], [None], [None], [None, None], [None], [None], [])
]


def _rounded(count: int, most: int, parts: int) -> int:
    """Returns `count` rounded up to a multiple of one of the parts of `most`."""
    unit = -(-most // parts)
    return min(most, unit * -(-count // unit))


@tf.autograph.experimental.do_not_convert
def log_likelihoods(
    model: tf.keras.Model,
    document_ids: tf.Tensor,
    document_lengths: tf.Tensor,
    which: tf.Tensor,
    query_ids: tf.Tensor,
    query_lengths: tf.Tensor,
    tokens: tf.Tensor,
    count: tf.Tensor,
) -> tf.Tensor:
    """Computes log-likelihoods of queries, teacher-forced.

    Logits are computed at real tokens only: they are most of the work.

    Args:
      model: a `T5QueryGenerator`.
      document_ids: [D, L] int32.
      document_lengths: [D] int32.
      which: [B] int32, the document of each query.
      query_ids: [B, T] int32.
      query_lengths: [B] int32.
      tokens: [P] int32, places of real tokens among all B·T, in order, then padding.
      count: scalar int32, how many of them are real.

    Returns:
      [B] float32, in nats.
    """
    backbone = model.backbone
    seen = tf.sequence_mask(document_lengths, tf.shape(document_ids)[1], tf.int32)
    states = model.encode(document_ids, seen)
    if backbone.soft_prompt is not None:
        seen = backbone.soft_prompt.extend_mask(seen)
    seen = tf.gather(seen, which)[:, tf.newaxis]
    # The decoder starts with the padding id, as T5 does.
    x = backbone.token_embedding(tf.pad(query_ids[:, :-1], [[0, 0], [1, 0]]))
    real = tf.sequence_mask(query_lengths, tf.shape(query_ids)[1], tf.int32)
    bias = None
    for layer in backbone.decoder_transformer_layers:
        x, bias = layer(
            x,
            attention_mask=real[:, tf.newaxis],
            position_bias=bias,
            encoder_hidden_states=states,
            encoder_attention_mask=seen,
            encoder_rows=which,
            use_causal_mask=True,
            training=False,
        )
    x = tf.gather(tf.reshape(x, [-1, x.shape[-1]]), tokens)
    logits = model.head(backbone.decoder_layer_norm(x))
    losses = cross_entropy(tf.gather(tf.reshape(query_ids, [-1]), tokens), logits)
    losses *= tf.sequence_mask(count, tf.shape(tokens)[0], losses.dtype)
    return -tf.math.unsorted_segment_sum(
        losses, tokens // tf.shape(query_ids)[1], tf.shape(query_ids)[0]
    )
