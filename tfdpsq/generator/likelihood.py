"""Query likelihood: how probable a generator finds a query, given a document.

A generator that writes queries for documents also tells for which documents a query
would have been written (Ponte and Croft 1998; by a language model that is trained on
pairs, dos Santos et al. 2020, *Beyond [CLS] through Ranking by Generation*). By
post-processing it costs no privacy beyond the generator's certificate.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.data.io import atomic_directory
from tfdpsq.generator.preprocessing import Preprocessor
from tfdpsq.layers.replicated import Replicated
from tfdpsq.layers.softmax import cross_entropy

# Pairs are dealt to batches by length among this many.
_BATCHES_READ = 16
# The arguments of `log_likelihoods` after the model, of any batch.
_SIGNATURE = [
    tf.TensorSpec(shape, tf.int32)
    for shape in ([None, None], [None], [None], [None, None], [None], [None], [])
]


class QueryLikelihood:
    """Log-likelihood of queries under a generator.

    A document is encoded once for its neighbours in a batch, which have documents of
    like length: little padding is computed. One graph serves batches of all shapes;
    XLA compiles a single one, for the largest.
    """

    def __init__(
        self,
        model: tf.keras.Model,
        preprocessor: Preprocessor | None = None,
        batch_size: int = 64,
        jit_compile: bool = False,
    ):
        """Stores the arguments; runs nothing.

        In a strategy's scope, which the model was made in, each replica scores batches
        of its own.

        Args:
          model: a `T5QueryGenerator`.
          preprocessor: prompt, vocabulary and lengths; `None` is the model's.
          batch_size: pairs scored at a time, B.
          jit_compile: compile with XLA.

        Raises:
          InputError: the batch size is below one.
        """
        self.preprocessor = preprocessor or model.preprocessor
        self.batch_size = validation.positive_integer("batch_size", batch_size)
        self._run = Replicated(
            lambda *given: log_likelihoods(model, *given),
            None if jit_compile else _SIGNATURE,
            jit_compile,
        )
        self._one_shape = jit_compile or self._run.static

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
        size, at_once = self.batch_size, self.batch_size * self._run.at_a_time
        while rows := list(itertools.islice(stream, at_once * _BATCHES_READ)):
            number: dict[str, int] = {}
            own = np.array([number.setdefault(text, len(number)) for text, _ in rows])
            documents = self.preprocessor.documents(number)
            queries = self.preprocessor.queries(query for _, query in rows)
            # Documents of like length, and the pairs of each, in one batch.
            order = np.lexsort((own, documents[1][own]))
            nats = np.empty(len(rows))
            for start in range(0, len(rows), at_once):
                chunk = order[start : start + at_once]
                parts = [chunk[s : s + size] for s in range(0, len(chunk), size)]
                batches = [self._batch(part, own, documents, queries) for part in parts]
                for part, found in zip(parts, self._run(batches)):
                    nats[part] = found.numpy()[: len(part)]
            yield from nats.tolist()

    def _batch(
        self,
        part: np.ndarray,
        own: np.ndarray,
        documents: Sequence[np.ndarray],
        queries: Sequence[np.ndarray],
    ) -> Sequence[np.ndarray]:
        """Returns the arguments of `log_likelihoods` for some pairs.

        `own` has the document of each pair; documents and queries are ids and lengths.
        """
        distinct, which = np.unique(own[part], return_inverse=True)
        ids, lengths = documents[0][distinct], documents[1][distinct]
        targets, sizes = queries[0][part], queries[1][part]
        if self._one_shape:
            rows = self.batch_size
            ids, lengths, which, targets, sizes = (
                np.pad(x, [(0, rows - len(x)), *[(0, 0)] * (x.ndim - 1)])
                for x in (ids, lengths, which, targets, sizes)
            )
        else:
            ids, targets = ids[:, : lengths.max()], targets[:, : sizes.max()]
        real = np.flatnonzero(np.arange(targets.shape[1]) < sizes[:, np.newaxis])
        places = np.zeros([targets.size if self._one_shape else len(real)], np.int32)
        places[: len(real)] = real
        count = np.array(len(real), np.int32)
        return ids, lengths, which.astype(np.int32), targets, sizes, places, count


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
      count: scalar int32, the number of real ones.

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


class Reranker(tf.Module):
    """A generator as a SavedModel that scores documents for queries: texts in.

    Its one signature serves any search that has found the documents:

    | name | takes | gives |
    |---|---|---|
    | `score` | queries [B] string, documents [B] string | nats [B] float32 |

    Loading it needs TensorFlow, and tensorflow-text imported for its operations.
    """

    def __init__(self, model: tf.keras.Model, preprocessor: Preprocessor | None = None):
        """Stores the arguments, which are those of `QueryLikelihood`."""
        super().__init__(name="reranker")
        preprocessor = preprocessor or model.preprocessor
        self._tokenizer = preprocessor.tokenizer
        self._lengths = preprocessor.document_length, preprocessor.query_length
        self._prompt = preprocessor.prompt
        # A Keras model would be saved with functions of its own.
        self._weights = model.variables
        self._log_likelihoods = lambda *given: log_likelihoods(model, *given)

    @tf.function(
        input_signature=[tf.TensorSpec([None], tf.string)] * 2, autograph=False
    )
    def score(self, queries: tf.Tensor, documents: tf.Tensor) -> dict[str, tf.Tensor]:
        """Scores each query with the document at its place; see the class."""
        longest, most = self._lengths
        texts = tf.strings.join([self._prompt, documents])
        ids, lengths = self._tokenizer.encode(texts, longest)
        targets, sizes = self._tokenizer.encode(queries, most)
        real = tf.reshape(tf.sequence_mask(sizes, most), [-1])
        tokens = tf.cast(tf.where(real)[:, 0], tf.int32)
        nats = self._log_likelihoods(
            ids[:, : tf.reduce_max(lengths)],
            lengths,
            tf.range(tf.size(lengths)),
            targets,
            sizes,
            tokens,
            tf.size(tokens),
        )
        return {"nats": nats}

    def export(self, directory: str | os.PathLike) -> None:
        """Writes a SavedModel, whole or not at all, where nothing is yet.

        Raises:
          InputError: the directory is taken or cannot be written.
        """
        with atomic_directory(directory) as partial:
            signatures = {"score": self.score}
            tf.saved_model.save(self, os.fspath(partial), signatures=signatures)
