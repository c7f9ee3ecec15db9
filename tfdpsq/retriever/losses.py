"""Softmax losses: among a batch's documents, a group's, or public ones.

Every other document is a negative, with exceptions: a batch may hold the row's own
document twice, another document known to answer its query, or padding. Those columns
are left out of the softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import tensorflow as tf

from tfdpsq.layers.softmax import log_sum_exp

# Far below any score (|score| ≤ scale), and finite: with -inf a gradient through
# the softmax could be inf * 0.
NEVER = -1e30
_LOWER = 0xFFFFFFFF  # half of an int64


def in_batch_losses(
    query_embeddings: tf.Tensor,
    document_embeddings: tf.Tensor,
    document_key: tf.Tensor,
    positive_keys: tf.Tensor,
    weights: tf.Tensor,
    scale: float,
) -> tf.Tensor:
    """Cross-entropy of each query's own document among the batch's documents.

    With s_ij = scale · <q_i, d_j>, row i loses

      ℓ_i = log Σ_{j ∈ N(i)} exp(s_ij) − s_ii   (nats),

    where N(i) holds i itself and every j that is a real row, whose document is not
    row i's own by content, and is not a known positive of row i's query. An ℓ_i
    depends on all rows of the batch: see `tfdpsq.retriever.direct_dp` for what that
    costs under differential privacy.

    All arguments may have the same leading dimensions: then each is a batch of its
    own, and its rows depend on no other.

    Args:
      query_embeddings: [..., B, D] float32, unit length for scores that are cosines.
      document_embeddings: [..., B, D] float32.
      document_key: [..., B] int64 ≥ 0, equal for equal document contents.
      positive_keys: [..., B, P] int64, contents known to answer the row's query,
        padded with -1.
      weights: [..., B] float32, 0 for padding rows, whose loss is 0 and which are no
        one's negative; rows above 0 all count the same.
      scale: what the inner product is multiplied by, the inverse of a temperature.

    Returns:
      [..., B] float32 losses in nats, not averaged.
    """
    scores = scale * tf.matmul(query_embeddings, document_embeddings, transpose_b=True)
    return losses_of_scores(scores, document_key, positive_keys, weights)


def losses_of_scores(
    scores: tf.Tensor,
    document_key: tf.Tensor,
    positive_keys: tf.Tensor,
    weights: tf.Tensor,
    bidirectional: bool = False,
) -> tf.Tensor:
    """`in_batch_losses` from scores, [..., B, B]: row i's query with document j.

    Bidirectional: the mean of that and of document i's loss among the queries, those
    left out that are known to be answered by it.
    """
    real = weights > 0
    same = document_key[..., :, tf.newaxis] == document_key[..., tf.newaxis, :]
    known = _known(positive_keys, document_key[..., tf.newaxis, :])
    own = tf.eye(tf.shape(scores)[-1], dtype=tf.bool)
    dropped = (same | known) & ~own
    losses = _softmax_losses(scores, dropped, real)
    if bidirectional:
        backwards = _softmax_losses(
            tf.linalg.matrix_transpose(scores),
            tf.linalg.matrix_transpose(dropped),
            real,
        )
        losses = (losses + backwards) / 2
    return losses


class Embeddings(NamedTuple):
    """Embeddings of a batch's texts.

    Attributes:
      queries: [B, D] float32.
      documents: [B, D] float32.
      negatives: [B, H, D] float32, each row's hard negatives, or `None`.
    """

    queries: tf.Tensor
    documents: tf.Tensor
    negatives: tf.Tensor | None = None


def batch_losses(
    embeddings: Embeddings,
    batch: Mapping[str, tf.Tensor],
    scaled: Callable[[tf.Tensor], tf.Tensor],
    bidirectional: bool = False,
) -> tf.Tensor:
    """`in_batch_losses` of a whole batch, wherever its rows and negatives are.

    A row's columns are the documents of all rows and the hard negatives of all rows
    (Karpukhin et al. 2020, arXiv:2004.04906, section 3.2), each left out where it is
    the row's own document again, a known positive of its query, or padding. Called in
    a replica of a `tf.distribute.Strategy`, they are those of all replicas, and
    gradients go back to where an embedding came from: the sum of the replicas' losses
    is that of one replica with all rows.

    Args:
      embeddings: of the B rows of this replica.
      batch: "document_key" [B] int64, "positive_keys" [B, P] int64, "weights" [B], as
        in `in_batch_losses`; and with hard negatives "negative_keys" [B, H] int64, -1
        for none.
      scaled: cosines [B, M] to scores.
      bidirectional: as in `losses_of_scores`; hard negatives are no one's query and
        look for none.

    Returns:
      [B] float32 losses in nats; 0 for padding.
    """
    keys, known, real = (
        batch["document_key"],
        batch["positive_keys"],
        batch["weights"] > 0,
    )
    all_keys, all_real = everywhere(keys), everywhere(batch["weights"]) > 0
    rows = tf.shape(keys)[0]
    replica = tf.distribute.get_replica_context()
    number = 0 if replica is None else replica.replica_id_in_sync_group
    own = tf.one_hot(
        number * rows + tf.range(rows), tf.shape(all_keys)[0], True, False, -1, tf.bool
    )
    same = keys[:, tf.newaxis] == all_keys[tf.newaxis, :]

    def losses(cosines: tf.Tensor, dropped: tf.Tensor) -> tf.Tensor:
        """Returns losses by row; the first columns are rows, own ones are kept."""
        scores = scaled(cosines)
        more = tf.shape(cosines)[1] - tf.shape(own)[1]
        mine = tf.pad(own, [[0, 0], [0, more]])
        own_scores = tf.reduce_sum(
            tf.where(mine, scores, tf.zeros_like(scores)), axis=1
        )
        return _cross_entropies(scores, own_scores, dropped & ~mine, real)

    columns = everywhere(embeddings.documents)
    dropped = same | _known(known, all_keys[tf.newaxis, :]) | ~all_real
    if embeddings.negatives is not None:
        width = embeddings.negatives.shape[-1]
        columns = tf.concat(
            [columns, tf.reshape(everywhere(embeddings.negatives), [-1, width])], axis=0
        )
        theirs = everywhere(batch["negative_keys"])
        none = (theirs < 0) | ~all_real[:, tf.newaxis]
        theirs = tf.reshape(theirs, [1, -1])
        out = keys[:, tf.newaxis] == theirs
        out |= _known(known, theirs) | tf.reshape(none, [1, -1])
        dropped = tf.concat([dropped, out], axis=1)
    forwards = losses(tf.matmul(embeddings.queries, columns, transpose_b=True), dropped)
    if not bidirectional:
        return forwards
    # Document i's columns are queries; j is dropped where i answers it.
    answered = tf.reduce_any(
        everywhere(known)[tf.newaxis, :, :] == keys[:, tf.newaxis, tf.newaxis], axis=-1
    )
    backwards = losses(
        tf.matmul(
            embeddings.documents, everywhere(embeddings.queries), transpose_b=True
        ),
        same | answered | ~all_real,
    )
    return (forwards + backwards) / 2


def everywhere(values: tf.Tensor) -> tf.Tensor:
    """The values of all replicas one after the other; gradients go back to each.

    Args:
      values: [B, ...], not boolean, of one shape on all replicas.

    Returns:
      [replicas · B, ...], the same everywhere; `values` itself outside of replicas.
    """
    replica = tf.distribute.get_replica_context()
    if replica is None:
        return values
    alone = replica.num_replicas_in_sync == 1
    if alone:
        return values
    if values.dtype == tf.int64:  # not gathered on TPUs
        return _joined(replica.all_gather(_words(values), axis=0))
    # A function's arguments are on no device, where several workers want to know one.
    return replica.all_gather(tf.identity(values), axis=0)


def _words(values: tf.Tensor) -> tf.Tensor:
    """[..., 2] int32 from int64, the upper half first."""
    halves = tf.stack(
        [tf.bitwise.right_shift(values, _half()), values & _LOWER], axis=-1
    )
    return tf.bitcast(tf.cast(halves & _LOWER, tf.uint32), tf.int32)


def _half() -> tf.Tensor:
    return tf.constant(32, tf.int64)


def _joined(words: tf.Tensor) -> tf.Tensor:
    # Workers of several machines gather without a static shape.
    upper, lower = tf.unstack(tf.cast(words, tf.int64), num=2, axis=-1)
    return tf.bitwise.left_shift(upper, _half()) | (lower & _LOWER)


def _softmax_losses(
    scores: tf.Tensor, dropped: tf.Tensor, real: tf.Tensor
) -> tf.Tensor:
    """[..., B]: −log softmax of the diagonal, over real columns that stay."""
    own = tf.eye(tf.shape(scores)[-1], dtype=tf.bool)
    out = dropped | (~real[..., tf.newaxis, :] & ~own)
    return _cross_entropies(scores, tf.linalg.diag_part(scores), out, real)


def _cross_entropies(
    scores: tf.Tensor, own_scores: tf.Tensor, dropped: tf.Tensor, real: tf.Tensor
) -> tf.Tensor:
    """[..., B]: −log softmax of `own_scores` [..., B], over the scores that stay.

    `dropped` [..., B, K] never holds a row's own score; rows that are not real have 0.
    """
    kept = tf.where(dropped, tf.constant(NEVER, scores.dtype), scores)
    losses = log_sum_exp(kept) - own_scores
    return tf.where(real, losses, tf.zeros_like(losses))


def losses_among(
    query_embeddings: tf.Tensor,
    document_embeddings: tf.Tensor,
    document_key: tf.Tensor,
    positive_keys: tf.Tensor,
    weights: tf.Tensor,
    negatives: tf.Tensor,
    negative_keys: tf.Tensor,
    scaled: Callable[[tf.Tensor], tf.Tensor],
    own_negatives: tf.Tensor | None = None,
    own_negative_keys: tf.Tensor | None = None,
) -> tf.Tensor:
    """Cross-entropy of each query's own document among negatives shared by all.

    ℓ_i = log(exp(s_ii) + Σ_{m ∈ N(i)} exp(s_im)) − s_ii, where N(i)
    leaves out negatives whose content is the row's own document or a known positive
    of its query. What N(i) leaves out depends on row i alone, and so does ℓ_i: the
    other rows occur nowhere. The negatives are constants to the gradient; a row's own
    hard negatives, which only that row looks at, are not.

    Args:
      query_embeddings: [B, D] float32.
      document_embeddings: [B, D] float32.
      document_key: [B] int64.
      positive_keys: [B, P] int64, padded with -1.
      weights: [B] float32, 0 for padding.
      negatives: [K, D] float32, embeddings of documents.
      negative_keys: [K] int64, what is in them.
      scaled: inner products [B, K + 1 + H] to scores.
      own_negatives: [B, H, D] float32, hard negatives of each row, or `None`.
      own_negative_keys: [B, H] int64, what is in them; -1 for none.

    Returns:
      [B] float32 losses in nats; 0 for padding.
    """
    own = tf.reduce_sum(query_embeddings * document_embeddings, -1, keepdims=True)
    others = tf.matmul(query_embeddings, tf.stop_gradient(negatives), transpose_b=True)
    keys = negative_keys[tf.newaxis, :]
    dropped = (document_key[:, tf.newaxis] == keys) | _known(positive_keys, keys)
    cosines, out = [own, others], [tf.zeros_like(own, tf.bool), dropped]
    if own_negatives is not None and own_negative_keys is not None:
        cosines.append(tf.einsum("id,ihd->ih", query_embeddings, own_negatives))
        again = document_key[:, tf.newaxis] == own_negative_keys
        out.append(
            again | (own_negative_keys < 0) | _known(positive_keys, own_negative_keys)
        )
    scores = scaled(tf.concat(cosines, axis=1))
    return _cross_entropies(scores, scores[:, 0], tf.concat(out, axis=1), weights > 0)


def _known(positive_keys: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
    """[..., B, K]: whether column k's content is a known positive of row i."""
    return tf.reduce_any(
        positive_keys[..., :, :, tf.newaxis] == keys[..., tf.newaxis, :], axis=-2
    )
