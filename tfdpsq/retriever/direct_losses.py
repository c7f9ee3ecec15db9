"""The losses of direct DP training, each clipped as `direct_dp` presumes.

`naive` embeds n texts for each of a batch's n rows: it differentiates itself, a row
after the other, some documents at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpsq.layers import Folded, dropout_seed
from tfdpsq.layers.replicated import Replicated
from tfdpsq.retriever.caching import dense, embed_in_parts, pull_back
from tfdpsq.retriever.losses import losses_among, losses_of_scores
from tfdpsq.retriever.model import Batch, TwoTower, embed
from tfdpsq.validation import InputError, positive_integer

# Maps coefficients [B] of losses, and variables, to the gradient of their sum.
Gradient = Callable[[tf.Tensor, Sequence[tf.Variable]], list[tf.Tensor]]


class NaiveLosses:
    """Each row's in-batch softmax loss, which differentiates itself.

    With embeddings q_i and d_j, row i's gradient is

        ∂ℓ_i = Σ_j (∂ℓ_i/∂d_j) ∂d_j + (∂ℓ_i/∂q_i) ∂q_i   (and by a learned scale).

    So all texts are embedded once, a few at a time; then, for each row, documents are
    embedded again, a few at a time, and what the row's loss wants of them is pulled
    back. In memory are the activations of a few texts and one gradient of the weights'
    size, however large the batch. Both passes apply the same dropout.

    Attributes:
      layers: what runs, and what dropout is drawn by.
    """

    def __init__(self, model: TwoTower, rows: int):
        """Takes the model to be trained.

        Args:
          model: the model.
          rows: texts embedded at a time; in a batch that it does not divide, the
            largest number below it that does.

        Raises:
          InputError: a bidirectional model, for which the sensitivity is not derived;
            rows below 1.
        """
        _one_direction(model, "naive")
        self._model, self._rows = model, positive_integer("rows", rows)
        # Draws nothing: private training gives it keys that a resumed run repeats.
        self._draws = tf.keras.layers.Dropout(0.0)
        self.layers = [model, self._draws]

    def __call__(self, batch: Batch) -> tuple[tf.Tensor, Gradient]:
        """The losses of a batch, and how to differentiate them.

        Args:
          batch: B rows, as `TwoTower.per_example_losses` takes, B static.

        Returns:
          [B] losses in nats, and the function that differentiates them. It embeds
          texts up to the last real row's alone.

        Raises:
          InputError: the batch has no static number of rows.
        """
        model, size = self._model, batch["weights"].shape[0]
        if size is None:
            raise InputError(
                "the batch has no static number of rows. Give the step batches of one "
                "size."
            )
        at_a_time = max(n for n in range(1, self._rows + 1) if size % n == 0)
        sides = ["query"]
        fixed = batch.get("document_vectors")  # no gradient goes into these
        if fixed is None:
            sides.append("document")
        seeds = dict(zip(sides, tf.unstack(_seeds_of(self._draws))))
        width = model.config.embedding_dim
        found = {}
        for side, seed in seeds.items():
            encode = _encoder_of_parts(model, batch, side, seed, at_a_time)
            shapes = [[at_a_time, width]]
            (vectors,) = embed_in_parts(encode, size // at_a_time, shapes)
            found[side] = tf.reshape(vectors, [size, width])

        real = batch["weights"] > 0

        def losses_of(vectors: dict[str, tf.Tensor], counted: tf.Tensor) -> tf.Tensor:
            queries, documents = vectors["query"], vectors.get("document", fixed)
            # In the products of the backward pass 0 · NaN would be NaN: another row's
            # query, or padding, would cost a row its gradient.
            queries = tf.where(counted[:, tf.newaxis], queries, 0.0)
            documents = tf.where(real[:, tf.newaxis], documents, 0.0)
            cosines = tf.matmul(queries, documents, transpose_b=True)
            return losses_of_scores(
                model.scaled(cosines),
                batch["document_key"],
                batch["positive_keys"],
                batch["weights"],
            )

        def gradient(coefficients: Any, variables: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(found)
                losses = losses_of(found, coefficients != 0)
                losses = tf.where(coefficients != 0, losses, 0.0)
                total = tf.reduce_sum(coefficients * losses)
            wanted, direct = tape.gradient(total, (found, list(variables)))
            sums = [dense(g, v) for g, v in zip(direct, variables)]
            for side, seed in seeds.items():
                # A row's loss reads every real document, and one query: alone, since
                # in a part of several 0 · NaN would be NaN, again.
                rows, counts = at_a_time, real
                if side == "query":
                    rows, counts = 1, coefficients != 0
                encode = _encoder_of_parts(model, batch, side, seed, rows)
                parts = tf.reshape(wanted[side], [-1, rows, width])
                first, end = _range_of(tf.reshape(counts, [-1, rows]))
                sums = pull_back(encode, [parts], variables, sums, first, end)
            return sums

        return losses_of(found, real), gradient


def _seeds_of(draws: tf.keras.layers.Layer) -> tf.Tensor:
    """[2, 2] int64: of the queries' and of the documents' dropout, by a layer's key."""
    seed = draws._random_generator.make_seed_for_stateless_op()
    if seed is None:  # Keras draws from TensorFlow's global generator
        seed = tf.random.uniform([2], maxval=tf.int64.max, dtype=tf.int64)
    return tf.stack([seed, seed + tf.constant([0, 1], tf.int64)])


def _encoder_of_parts(
    model: TwoTower, batch: Batch, side: str, seed: tf.Tensor, rows: int
) -> Callable[[tf.Tensor], list[tf.Tensor]]:
    """Returns a function that embeds queries or documents, `rows` of them, by number.

    It applies the same dropout to the same rows, in any call and on any replica.
    """
    encode = model.encode_queries if side == "query" else model.encode_documents

    def embedded(number: tf.Tensor) -> list[tf.Tensor]:
        ids, lengths = (batch[f"{side}_{what}"] for what in ("ids", "lengths"))
        # tf.slice, not [a:b]: its size is static, which XLA insists on.
        ids = tf.slice(ids, [number * rows, 0], [rows, ids.shape[1]])
        lengths = tf.slice(lengths, [number * rows], [rows])
        with dropout_seed(seed, number, parts=0):  # replicas have the same rows
            return [encode(ids, lengths, training=True)]

    return embedded


def _range_of(counts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The first row of [parts, rows] bool with a True in it, and one past the last."""
    parts = counts.shape[0]
    some, numbers = tf.reduce_any(counts, axis=1), tf.range(parts)
    first = tf.reduce_min(tf.where(some, numbers, parts))
    return first, tf.reduce_max(tf.where(some, numbers + 1, 0))


class GroupLosses:
    """Each row's softmax loss among the rows of its group, neighbours in the batch.

    Attributes:
      layers: what runs.
    """

    def __init__(self, model: TwoTower, capacity: int):
        """Takes the model to be trained.

        Args:
          model: the model.
          capacity: rows of a group, as the plan's `group_capacity` has it.

        Raises:
          InputError: capacity below 1.
        """
        self._model, self.layers = model, [model]
        self._capacity = positive_integer("capacity", capacity)

    def __call__(self, batch: Batch) -> tf.Tensor:
        """[B] losses in nats; the groups are rows [0, c), [c, 2c), …, c dividing B."""

        def by_group(values: tf.Tensor) -> tf.Tensor:
            return tf.reshape(values, [-1, self._capacity, *values.shape[1:]])

        model = self._model
        queries, documents, _ = model.encode(batch, training=True)
        cosines = tf.matmul(by_group(queries), by_group(documents), transpose_b=True)
        # By row, as the layer's other inputs are.
        scores = model.scaled(tf.reshape(cosines, [-1, self._capacity]))
        losses = losses_of_scores(
            by_group(scores),
            by_group(batch["document_key"]),
            by_group(batch["positive_keys"]),
            by_group(batch["weights"]),
            model.config.bidirectional,
        )
        return tf.reshape(losses, batch["weights"].shape)


class PublicNegatives:
    """Losses among documents of the public corpus, and those documents.

    Call `refresh` before every step. Which documents are drawn follows from `seed`
    and the step's number; neither is secret.

    Attributes:
      layers: what runs.
      state: the variables that hold the negatives, to be kept with the weights.
    """

    def __init__(
        self,
        model: TwoTower,
        corpus: Mapping[str, np.ndarray],
        count: int,
        seed: int,
        refresh_every: int = 1,
    ):
        """Draws nothing yet.

        Args:
          model: the model to be trained.
          corpus: "document_ids" [N, L] int32, "document_lengths" [N] int32 and
            "document_key" [N] int64 of public documents. Never only of those that
            occur in the private pairs. Or, where the document tower trains nothing,
            what `with_vectors` makes of these, and the batches' documents, too.
          count: K, negatives of a step.
          seed: of the draws.
          refresh_every: steps for which the same negatives stay, with the embeddings
            that they had.

        Raises:
          InputError: a number below 1, more negatives than documents, or a
            bidirectional model: the other queries are private.
        """
        _one_direction(model, "public_negatives")
        positive_integer("negatives", count)
        self._every = positive_integer("refresh_every", refresh_every)
        total = len(corpus["document_key"])
        if count > total:
            raise InputError(
                f"negatives is {count}, but there are {total} public documents. Take "
                f"at most {total}."
            )
        self._model, self._corpus, self._seed = model, corpus, seed
        self._folded = Folded(model.document_tower)
        self.layers = [model, self._folded]
        self._embeddings = tf.Variable(
            tf.zeros([count, model.config.embedding_dim]), trainable=False
        )
        self._keys = tf.Variable(tf.fill([count], tf.int64.min), trainable=False)
        self.state = [self._embeddings, self._keys]
        self._embed = Replicated(model.encode_documents)

    def refresh(self, step: int) -> None:
        """Sets the negatives of a step, from the weights as they are before it.

        Args:
          step: steps taken so far.
        """
        draw, stale = divmod(step, self._every)
        if stale:
            return
        random = np.random.default_rng([self._seed, draw])
        chosen = random.choice(
            len(self._corpus["document_key"]), self._keys.shape[0], replace=False
        )
        self._keys.assign(self._corpus["document_key"][chosen])
        if "document_vectors" in self._corpus:
            self._embeddings.assign(self._corpus["document_vectors"][chosen])
            return
        embedded: list[np.ndarray] = []
        parts = iter(_parts(chosen))
        while together := list(itertools.islice(parts, self._embed.at_a_time)):
            batches = [
                [self._corpus[f"document_{what}"][at] for what in ("ids", "lengths")]
                for at in together
            ]
            embedded += [found.numpy() for found in self._embed(batches)]
        self._embeddings.assign(np.concatenate(embedded))

    def __call__(self, batch: Batch) -> tf.Tensor:
        """[B] losses in nats, of a batch as `TwoTower.per_example_losses` takes.

        A row's hard negatives, if there are any, must follow from its own query and
        public data; no other row looks at them.
        """
        model = self._model
        own: tuple[tf.Tensor, ...] = ()
        if "document_vectors" in batch:
            documents = batch["document_vectors"]
            if "negative_vectors" in batch:
                own = (batch["negative_vectors"], batch["negative_keys"])
        elif "negative_ids" not in batch:
            documents = model.encode_documents(
                batch["document_ids"], batch["document_lengths"], training=True
            )
        else:
            # As one example's texts, so that the engine clips them together.
            ids, lengths = (
                tf.concat(
                    [
                        batch[f"document_{what}"][:, tf.newaxis],
                        batch[f"negative_{what}"],
                    ],
                    axis=1,
                )
                for what in ("ids", "lengths")
            )
            folded = embed(self._folded, ids, lengths, training=True)
            documents = folded[:, 0]
            own = (folded[:, 1:], batch["negative_keys"])
        return losses_among(
            model.embed_queries(batch, training=True),
            documents,
            batch["document_key"],
            batch["positive_keys"],
            batch["weights"],
            self._embeddings,
            self._keys,
            model.scaled,
            *own,
        )


# Documents embedded at a time.
_CHUNK = 128


def _parts(rows: np.ndarray) -> Iterable[np.ndarray]:
    return (rows[start : start + _CHUNK] for start in range(0, len(rows), _CHUNK))


def _one_direction(model: TwoTower, method: str) -> None:
    if model.config.bidirectional:
        raise InputError(
            f"bidirectional is True, but {method} is derived for queries that look for "
            "documents. Set bidirectional to False."
        )
