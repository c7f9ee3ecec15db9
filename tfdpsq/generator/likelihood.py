"""Query likelihood: how probable a generator finds a query, given a document.

A generator that writes queries for documents also tells for which documents a query
would have been written (Ponte and Croft 1998; by a language model that is trained on
pairs, dos Santos et al. 2020, *Beyond [CLS] through Ranking by Generation*). By
post-processing it costs no privacy beyond the generator's certificate.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.data.tokenization import PROMPT, Tokenizer
from tfdpsq.layers.replicated import Replicated

# Documents, tokens of the longest query and real tokens of a batch are padded to
# multiples of a part of what they could be at most: one XLA program for each multiple.
_DOCUMENT_PARTS, _LENGTH_PARTS, _TOKEN_PARTS = 4, 4, 8


class QueryLikelihood:
    """Log-likelihood of queries under a generator.

    A document is encoded once for its neighbours in a batch. One graph serves batches
    of all shapes; under XLA, also for a TPU, each shape is compiled.
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
          batch_size: pairs scored at a time, B; the last batch is padded.
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
            None if jit_compile else _signature(self._batch_size, document_length),
            jit_compile,
        )

    def scores(self, pairs: Iterable[tuple[str, str]]) -> Iterator[float]:
        """Scores queries with documents.

        Args:
          pairs: (document, query), read as a stream; those of one document should
            follow each other.

        Yields:
          For each pair, the log-likelihood in nats of the query's tokens and its end;
          of a longer query than T tokens, of the first T.
        """
        stream = iter(pairs)
        while rows := list(
            itertools.islice(stream, self._batch_size * self._run.at_a_time)
        ):
            parts = [
                rows[start : start + self._batch_size]
                for start in range(0, len(rows), self._batch_size)
            ]
            batches = self._batches(parts)
            for part, found in zip(parts, self._run(batches)):
                yield from found.numpy().astype(np.float64)[: len(part)].tolist()

    def _batches(
        self, parts: list[list[tuple[str, str]]]
    ) -> list[Sequence[np.ndarray]]:
        """Returns the arguments of `log_likelihoods`, of one shape for all parts."""
        documents = [list(dict.fromkeys(d for d, _ in part)) for part in parts]
        count = _rounded(max(map(len, documents)), self._batch_size, _DOCUMENT_PARTS)
        queries = [
            self._encoded(
                [query for _, query in part] + [""] * (self._batch_size - len(part)),
                self._lengths[1],
            )
            for part in parts
        ]
        width = _rounded(
            max(int(lengths.max()) for _, lengths in queries),
            self._lengths[1],
            _LENGTH_PARTS,
        )
        real = _rounded(
            max(int(lengths.sum()) for _, lengths in queries),
            self._batch_size * width,
            _TOKEN_PARTS,
        )
        batches: list[Sequence[np.ndarray]] = []
        for part, own, (ids, lengths) in zip(parts, documents, queries):
            place = {document: number for number, document in enumerate(own)}
            which = np.zeros(self._batch_size, np.int32)
            which[: len(part)] = [place[document] for document, _ in part]
            texts = [self._prompt + document for document in own]
            texts += [self._prompt] * (count - len(own))
            tokens = np.flatnonzero(np.arange(width) < lengths[:, np.newaxis])
            batches.append(
                (
                    *self._encoded(texts, self._lengths[0]),
                    which,
                    ids[:, :width],
                    lengths,
                    # The rest repeats a place, and is not counted.
                    np.pad(tokens, (0, real - len(tokens))).astype(np.int32),
                    np.array(len(tokens), np.int32),
                )
            )
        return batches

    def _encoded(self, texts: list[str], length: int) -> tuple[np.ndarray, np.ndarray]:
        ids, lengths = self._tokenizer.encode(texts, length)
        return np.asarray(ids), np.asarray(lengths)


def _signature(batch_size: int, document_length: int) -> list[tf.TensorSpec]:
    """Returns the arguments of `log_likelihoods` after the model, of any batch."""
    shapes: tuple[list[int | None], ...] = (
        [None, document_length],
        [None],
        [batch_size],
        [batch_size, None],
        [batch_size],
        [None],
        [],
    )
    return [tf.TensorSpec(shape, tf.int32) for shape in shapes]


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
    states = tf.gather(model.encode(document_ids, seen), which)
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
            use_causal_mask=True,
            training=False,
        )
    x = tf.gather(tf.reshape(x, [-1, x.shape[-1]]), tokens)
    logits = model.head(backbone.decoder_layer_norm(x))
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.gather(tf.reshape(query_ids, [-1]), tokens), logits
    )
    losses *= tf.sequence_mask(count, tf.shape(tokens)[0], losses.dtype)
    return -tf.math.unsorted_segment_sum(
        losses, tokens // tf.shape(query_ids)[1], tf.shape(query_ids)[0]
    )
