"""Query likelihood: how probable a generator finds a query, given a document.

A generator that writes queries for documents also tells for which documents a query
would have been written (Ponte and Croft 1998; dos Santos et al. 2020, *Beyond [CLS]
through Ranking by Generation*). By post-processing it costs no privacy beyond the
generator's certificate.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from typing import Any

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
    for shape in ([None, None], [None], [None], [None, None], [None])
]


class QueryLikelihood:
    """Log-likelihood of queries under a generator.

    A document is encoded once for its neighbours in a batch, which have documents of
    like length: little padding is computed. One graph serves batches of all shapes; a
    TPU compiles the largest.
    """

    def __init__(
        self,
        model: tf.keras.Model,
        preprocessor: Preprocessor | None = None,
        batch_size: int = 64,
    ):
        """Stores the arguments: a `T5QueryGenerator`, and pairs scored at a time, B.

        In a strategy's scope, which the model was made in, each replica scores batches
        of its own. Without a `preprocessor`, it is the model's.
        """
        self.preprocessor = preprocessor or model.preprocessor
        self.batch_size = validation.positive_integer("batch_size", batch_size)
        self._run = Replicated(
            lambda *given: log_likelihoods(model, *given), _SIGNATURE, overlapped=True
        )

    def scores(self, pairs: Iterable[tuple[str, str]]) -> Iterator[float]:
        """Scores pairs (document, query), read as a stream, 16 batches at a time.

        Those of one document should follow each other.

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
                batches = [self._batch(own[p], documents, p, queries) for p in parts]
                for part, found in zip(parts, self._run(batches)):
                    nats[part] = found.numpy()[: len(part)]
            yield from nats.tolist()

    def _batch(self, own: Any, documents: Any, part: Any, queries: Any) -> list[Any]:
        """Returns the arguments of `log_likelihoods` for the queries `part`.

        `own` has the numbers of their documents; both are given as ids and lengths.
        """
        distinct, which = np.unique(own, return_inverse=True)
        ids, lengths = (values[distinct] for values in documents)
        targets, sizes = (values[part] for values in queries)
        if not self._run.static:
            ids, targets = ids[:, : lengths.max()], targets[:, : sizes.max()]
        found = [ids, lengths, which.astype(np.int32), targets, sizes]
        if self._run.static:
            rows = self.batch_size
            widths = ([(0, rows - len(x)), *[(0, 0)] * (x.ndim - 1)] for x in found)
            found = [np.pad(x, width) for x, width in zip(found, widths)]
        return found


@tf.autograph.experimental.do_not_convert
def log_likelihoods(
    model: tf.keras.Model,
    document_ids: tf.Tensor,
    document_lengths: tf.Tensor,
    which: tf.Tensor,
    query_ids: tf.Tensor,
    query_lengths: tf.Tensor,
) -> tf.Tensor:
    """Computes log-likelihoods of queries, teacher-forced.

    Logits, which are most of the work, are computed at real tokens only, unless shapes
    are static.

    Args:
      model: a `T5QueryGenerator`.
      document_ids: [D, L] int32.
      document_lengths: [D] int32.
      which: [B] int32, the document of each query.
      query_ids: [B, T] int32.
      query_lengths: [B] int32.

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
    count, length = tf.unstack(tf.shape(query_ids))
    real = tf.sequence_mask(query_lengths, length, tf.int32)
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
    x = tf.reshape(x, [-1, x.shape[-1]])
    ids, real = tf.reshape(query_ids, [-1]), tf.reshape(real, [-1])
    places = tf.range(count * length)
    if not query_ids.shape.is_fully_defined():
        places = tf.boolean_mask(places, real > 0)
    x, ids, real = (tf.gather(values, places) for values in (x, ids, real))
    losses = cross_entropy(ids, model.head(backbone.decoder_layer_norm(x)))
    losses *= tf.cast(real, losses.dtype)
    return -tf.math.unsorted_segment_sum(losses, places // length, count)


class Reranker(tf.Module):
    """A generator as a SavedModel that scores the documents that any search has found.

    Its one signature, `score`, takes strings, queries [B] and documents [B], and gives
    nats [B] float32. Loading it needs TensorFlow, and tensorflow-text imported for its
    operations.
    """

    def __init__(self, model: tf.keras.Model, preprocessor: Preprocessor | None = None):
        """Stores the arguments, which are those of `QueryLikelihood`."""
        super().__init__(name="reranker")
        self._preprocessor = preprocessor or model.preprocessor
        self._tokenizer = self._preprocessor.tokenizer
        # A Keras model would be saved with functions of its own.
        self._weights = model.variables
        self._log_likelihoods = lambda *given: log_likelihoods(model, *given)

    @tf.function(
        input_signature=[tf.TensorSpec([None], tf.string)] * 2, autograph=False
    )
    def score(self, queries: tf.Tensor, documents: tf.Tensor) -> dict[str, tf.Tensor]:
        """Scores each query with the document at its place; see the class."""
        own = self._preprocessor
        texts = tf.strings.join([own.prompt, documents])
        ids, lengths = self._tokenizer.encode(texts, own.document_length)
        ids, which = ids[:, : tf.reduce_max(lengths)], tf.range(tf.size(lengths))
        targets = self._tokenizer.encode(queries, own.query_length)
        return {"nats": self._log_likelihoods(ids, lengths, which, *targets)}

    def export(self, directory: str | os.PathLike) -> None:
        """Writes a SavedModel, whole or not at all, where nothing is yet."""
        with atomic_directory(directory) as partial:
            signatures = {"score": self.score}
            tf.saved_model.save(self, os.fspath(partial), signatures=signatures)
