"""Training the retriever itself under DP: how far one pair can move a gradient.

DP-SGD adds noise in proportion to the *sensitivity* of the sum of clipped
gradients: the furthest it can move when one pair is added to, or removed from,
the batch. For a loss that is a sum over pairs this is the clip norm C. The
in-batch softmax is none: every pair is a negative of every other. Three ways out,
for neighbouring data sets of which one is the other plus one pair:

| method | what is clipped to C | sensitivity | the step must draw |
|---|---|---|---|
| `naive` | the gradient of a row's in-batch loss | (2n − 1)·C | Poisson, at most n |
| `microbatch` | that of a group's summed losses | 2·C | Poisson, then dealt to groups |
| `public_negatives` | that of a row's loss among public documents | C | Poisson |

Each function below has the derivation, and the tests search for neighbours that come
near the bound and beyond none. The losses follow; `naive` embeds n texts for each of a
batch's n rows, so it differentiates itself, a row after the other.

Source: Carranza et al. 2024 (`naive`, their direct DP-SGD baseline); `microbatch` and
`public_negatives` are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpsq.layers import Folded, dropout_seed
from tfdpsq.layers.replicated import Replicated
from tfdpsq.retriever.caching import dense, embed_in_parts, pull_back
from tfdpsq.retriever.losses import Embeddings, group_losses, public_losses
from tfdpsq.retriever.model import Batch, TwoTower, embed
from tfdpsq.validation import InputError, positive_integer

# Maps coefficients [B] of losses, and variables, to the gradient of their sum.
Gradient = Callable[[tf.Tensor, Sequence[tf.Variable]], list[tf.Tensor]]

# Public documents embedded at a time.
_CHUNK = 128

METHODS = ("naive", "microbatch", "public_negatives")


def naive_sensitivity_multiplier(max_batch_size: int) -> int:
    """Sensitivity of the clipped sum of in-batch gradients, in units of C: 2n − 1.

    The paper's baseline ("direct DP") keeps the in-batch softmax, clips the
    gradient of each row's loss to norm C, and sums over rows. Two batches are
    neighbours when one is the other plus one pair. Let the larger have the rows
    1..n, n being the new one, with clipped gradients g_i; and let g'_i be those of
    the rows 1..n−1 in the smaller batch.

      ‖Σ_{i≤n} g_i − Σ_{i<n} g'_i‖ = ‖g_n + Σ_{i<n} (g_i − g'_i)‖
                                   ≤ ‖g_n‖ + Σ_{i<n} (‖g_i‖ + ‖g'_i‖)
                                   ≤ C + 2(n − 1)C = (2n − 1)C.

    Row i < n had no say in whether pair n exists, yet its loss has one more
    document in its softmax, so nothing holds g_i near g'_i: they can point in
    opposite directions. The bound is nearly reached (see the tests), so noise for
    C alone, as ordinary DP-SGD would add, protects nothing here.

    With Poisson sampling of the pairs the other rows are drawn independently of
    pair n, and given them the step releases f(S), or, with probability q, f(S + n):
    the subsampled Gaussian mechanism at sensitivity (2n − 1)C, whose amplification
    holds as usual. The bound must cover every batch that can be drawn, so n is the
    static maximum at which draws are truncated, never the realised size. Padding
    rows have loss 0 and are no one's negatives: they move nothing.

    Neighbours that *replace* a pair instead move the sum by up to 2nC: both rows n
    count, 2C, and the others 2(n − 1)C.

    What a row's loss reads besides the batch, its `positive_keys`, must be known from
    the row alone. `encode_pairs` reads the *other* pairs for it: a pair would change
    rows of batches that it is not in.

    Args:
      max_batch_size: n, the most pairs a batch can hold.

    Returns:
      The factor by which C is to be multiplied, 2n − 1.

    Raises:
      InputError: n below 1.

    Source: the direct-DP baseline of Carranza et al. 2024; Kong et al. 2023 (arXiv
      2310.03104) discuss why in-batch losses need more noise than C.
    """
    return 2 * positive_integer("max_batch_size", max_batch_size) - 1


def microbatch_sensitivity_multiplier() -> int:
    """Sensitivity of the sum of clipped group gradients, in units of C: 2.

    Every pair drawn is dealt to one of G groups by a throw of its own; the softmax
    is that of the group, and what is clipped is the gradient h_g of the group's
    summed losses. Let S + x be S and one pair more, dealt to group g. The other
    groups hold the same pairs as before (that dealing leaves them alone is shown by
    `privacy.randomness.sampling.DealtSampler`), and their losses read nothing else. So

      ‖Σ_g clip(h_g(S + x)) − Σ_g clip(h_g(S))‖ = ‖clip(h_g(S + x)) − clip(h_g(S))‖
                                                ≤ 2C,

    which is reached when x turns its group's gradient around. If the group had one
    pair or none before, it is C: one pair among none has loss 0. Replacing a pair
    moves the sum by 2C too, if both are dealt in the same way. Inside a group anything
    may depend on anything: in-group masks, a row that finds no place, even batch
    normalisation.

    What would break it: to cut a shuffled batch into groups one after the other, for
    a pair more shifts all later ones; or a softmax that reads another group.

    Returns:
      2.
    """
    return 2


def public_negatives_sensitivity_multiplier() -> int:
    """Sensitivity of the sum of clipped row gradients among public negatives: 1.

    Documents are public. So row i is scored against its own document d_i and a set N
    of documents from the public corpus, whose embeddings are constants to the
    gradient: ℓ_i = −log softmax(s_ii; N(i)), with N(i) what is left of N without row
    i's own document and its query's known answers. ℓ_i reads pair i, the weights and
    N, and no other pair. The sum of clipped gradients is one over pairs:

      ‖Σ_{i≤n} clip(∇ℓ_i) − Σ_{i<n} clip(∇ℓ_i)‖ = ‖clip(∇ℓ_n)‖ ≤ C,

    at any batch size, scale and size of N: ordinary DP-SGD (replacing a pair: 2C).
    Known answers must come with the row, not be looked up among the other pairs: see
    `naive_sensitivity_multiplier`.

    *Amplification by Poisson sampling holds.* It needs that, all else given, the step
    sees f(S) or, with probability q, f(S + x). What else is there: the weights θ,
    which are the output of earlier steps; and N with its embeddings, made from θ (or
    an earlier one), the public corpus and public random numbers. N is drawn without
    looking at which rows are in the step, or in the data. So (θ, N) has one joint law
    with the past outputs, whether x is in the data or not, except through those
    outputs; given it, S and the throw for x are independent of it. The step is the
    subsampled Gaussian mechanism conditionally on (θ, N), and adaptive composition
    takes care of θ. N may be published.

    What would break it: negatives from the sampled rows' documents (in-batch), or
    from the documents that occur in the training pairs, a set which the private
    queries decide; negatives that are mined for one row and shared with others (for
    its own row alone they may depend on its query); a number of negatives that
    follows the batch; embeddings refreshed by anything but released weights.

    What the guarantee covers: the queries, and which document each is paired with.
    Not the documents, which are public here.

    Returns:
      1.
    """
    return 1


class NaiveLosses:
    """Each row's in-batch softmax loss, which differentiates itself.

    With embeddings q_i and d_j, row i's gradient is

        ∂ℓ_i = Σ_j (∂ℓ_i/∂d_j) ∂d_j + (∂ℓ_i/∂q_i) ∂q_i   (and by a learned scale).

    So all texts are embedded once, a few at a time; then, for each row, documents are
    embedded again, a few at a time, and what the row's loss wants of them is pulled
    back. In memory are the activations of a few texts and one gradient of the weights'
    size, however large the batch. Both passes apply the same dropout, which is drawn by
    `layers`.
    """

    def __init__(self, model: TwoTower, rows: int):
        """Takes the model, and the number of texts to embed at a time.

        Where `rows` does not divide a batch, the largest number below it that does.

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
        """Returns [B] losses in nats, and the function that differentiates them.

        The batch is as `TwoTower.per_example_losses` takes it, B static.
        """
        model, size = self._model, batch["weights"].shape[0]
        at_a_time = max(n for n in range(1, self._rows + 1) if size % n == 0)
        seeds = dict(zip(("query", "document"), tf.unstack(_seeds_of(self._draws))))
        width = model.config.embedding_dim
        found = {}
        for side, seed in seeds.items():
            encode = _encoder_of_parts(model, batch, side, seed, at_a_time)
            shapes = [[at_a_time, width]]
            (vectors,) = embed_in_parts(encode, size // at_a_time, shapes)
            found[side] = tf.reshape(vectors, [size, width])

        real = batch["weights"] > 0

        def losses_of(vectors: dict[str, tf.Tensor], counted: tf.Tensor) -> tf.Tensor:
            queries, documents = vectors["query"], vectors["document"]
            # In the products of the backward pass 0 · NaN would be NaN: another row's
            # query, or padding, would cost a row its gradient.
            queries = tf.where(counted[:, tf.newaxis], queries, 0.0)
            documents = tf.where(real[:, tf.newaxis], documents, 0.0)
            return group_losses(
                tf.matmul(model.scaled(queries), documents, transpose_b=True),
                batch,
                false_negatives=model.config.false_negatives,
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
                if side == "document" and model.documents_frozen:
                    continue
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
    """Returns a function that embeds part n of a side, with the same dropout always."""
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
    """Each row's softmax loss among the rows of its group, neighbours in the batch."""

    def __init__(self, model: TwoTower, capacity: int):
        """Takes the model, and the rows of a group: the plan's `group_capacity`."""
        self._model, self.layers = model, [model]
        self._capacity = positive_integer("capacity", capacity)

    def __call__(self, batch: Batch) -> tf.Tensor:
        """[B] losses in nats; the groups are rows [0, c), [c, 2c), …, c dividing B."""

        def by_group(values: tf.Tensor) -> tf.Tensor:
            return tf.reshape(values, [-1, self._capacity, *values.shape[1:]])

        model = self._model
        queries, documents, _ = model.encode(batch, training=True)
        queries, documents = by_group(model.scaled(queries)), by_group(documents)
        losses = group_losses(
            tf.matmul(queries, documents, transpose_b=True),
            {name: by_group(values) for name, values in batch.items()},
            model.config.bidirectional,
            model.config.false_negatives,
        )
        return tf.reshape(losses, batch["weights"].shape)


class PublicNegatives:
    """Losses among documents of the public corpus, and those documents.

    Call `refresh` before every step. Which documents are drawn follows from `seed` and
    the step's number; neither is secret. `state` are the variables that hold them, to
    be kept with the weights; `layers` are what runs.
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
          corpus: `encode_documents` of public documents. Never only of those that
            occur in the private pairs.
          count: K, negatives of a step.
          seed: of the draws.
          refresh_every: steps for which negatives stay, with the embeddings they had.

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
        self._embed = Replicated(model.encode_documents, overlapped=True)
        # What training leaves as it is is embedded once.
        frozen = model.documents_frozen
        self._vectors = self._embedded(np.arange(total)) if frozen else None

    def refresh(self, step: int) -> None:
        """Sets the negatives of a step, number `step`, from the weights before it."""
        draw, stale = divmod(step, self._every)
        if stale:
            return
        random = np.random.default_rng([self._seed, draw])
        chosen = random.choice(
            len(self._corpus["document_key"]), self._keys.shape[0], replace=False
        )
        self._keys.assign(self._corpus["document_key"][chosen])
        vectors = self._vectors
        self._embeddings.assign(
            self._embedded(chosen) if vectors is None else vectors[chosen]
        )

    def _embedded(self, chosen: np.ndarray) -> np.ndarray:
        batches = [
            [self._corpus[f"document_{what}"][part] for what in ("ids", "lengths")]
            for part in np.split(chosen, list(range(_CHUNK, len(chosen), _CHUNK)))
        ]
        together = self._embed.at_a_time
        return np.concatenate(
            [
                found.numpy()
                for start in range(0, len(batches), together)
                for found in self._embed(batches[start : start + together])
            ]
        )

    def __call__(self, batch: Batch) -> tf.Tensor:
        """[B] losses in nats, of a batch as `TwoTower.per_example_losses` takes.

        A row's hard negatives, if there are any, must follow from its own query and
        public data; no other row looks at them.
        """
        model, negatives = self._model, None
        if "document_vectors" in batch:
            documents = batch["document_vectors"]
            negatives = batch.get("negative_vectors")
        elif "negative_ids" not in batch:
            documents = model.encode_documents(
                batch["document_ids"], batch["document_lengths"], training=True
            )
        else:
            # As one example's texts, so that the engine clips them together.
            ids, lengths = (
                tf.concat(
                    [batch[f"document_{n}"][:, tf.newaxis], batch[f"negative_{n}"]], 1
                )
                for n in ("ids", "lengths")
            )
            training = not model.documents_frozen
            folded = embed(self._folded, ids, lengths, training=training)
            documents, negatives = folded[:, 0], folded[:, 1:]
        return public_losses(
            Embeddings(model.embed_queries(batch, True), documents, negatives),
            batch,
            model.scaled,
            self._embeddings,
            self._keys,
        )


def _one_direction(model: TwoTower, method: str) -> None:
    if model.config.bidirectional:
        raise InputError(
            f"bidirectional is True, but {method} is derived for queries that look for "
            "documents. Set bidirectional to False."
        )
