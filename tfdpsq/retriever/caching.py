"""Gradients of a contrastive batch larger than memory.

A row's loss reads all rows' embeddings, so a batch cannot simply be cut. But given the
gradient with respect to the embeddings, each text's part of it needs that text alone
(Gao et al. 2021, arXiv:2101.06983): embed a few rows at a time and keep nothing but
embeddings, differentiate the loss by those, then embed the same rows again, a few at a
time, and pull their gradients back. One more forward pass, activations of few rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from tfdpsq.layers import dropout_seed
from tfdpsq.retriever.losses import Embeddings
from tfdpsq.validation import InputError


def cached_gradients(
    model: tf.keras.Model,
    batch: Mapping[str, tf.Tensor],
    variables: Sequence[tf.Variable],
    rows: int,
    seed: tf.Tensor,
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Computes the batch's summed loss and its gradient, some rows at a time.

    Both passes apply the dropout that `layers.dropout_seed` gives a single pass. In a
    replica of a `tf.distribute.Strategy` loss and gradient are those of the replica's
    rows among all rows.

    Args:
      model: a `TwoTower`.
      batch: B rows, as `TwoTower.per_example_losses` takes, B static.
      variables: to differentiate by; each gets a dense gradient.
      rows: how many rows are encoded at a time.
      seed: [2] integers, of dropout, the same on all replicas.

    Raises:
      InputError: `rows` does not divide the batch.
    """
    total = batch["weights"].shape[0]
    if total is None or total % rows:
        raise InputError(
            f"{rows} rows at a time do not divide a batch of {total}. Give a divisor."
        )
    # The texts; what else a batch holds concerns the loss.
    parts = {
        name: tf.reshape(values, [total // rows, rows, *values.shape[1:]])
        for name, values in batch.items()
        if name.endswith(("_ids", "_lengths"))
    }

    def encode(number: tf.Tensor) -> list[tf.Tensor]:
        with dropout_seed(seed, number, total // rows):
            part = {name: values[number] for name, values in parts.items()}
            found = model.encode(part, training=True)
        return [values for values in found if values is not None]

    width = model.config.embedding_dim
    shapes = [[rows, width]] * 2
    if "negative_ids" in batch:
        shapes.append([rows, batch["negative_ids"].shape[1], width])
    vectors = embed_in_parts(encode, total // rows, shapes)
    with tf.GradientTape() as tape:
        tape.watch(vectors)
        whole = [tf.reshape(v, [total, *v.shape[2:]]) for v in vectors]
        losses = model.losses_from_embeddings(Embeddings(*whole), batch)
        loss = tf.reduce_sum(losses)
    # Of the variables a learned scale alone has a part in it here.
    cached, direct = tape.gradient(loss, (vectors, list(variables)))
    direct = [dense(g, v) for g, v in zip(direct, variables)]
    return loss, pull_back(encode, cached, variables, direct)


def embed_in_parts(
    encode: Callable[[tf.Tensor], Sequence[tf.Tensor]],
    parts: int,
    shapes: Sequence[Sequence[int]],
) -> list[tf.Tensor]:
    """Embeds parts one after the other: in parallel all would be in memory.

    `encode` maps a part's number to its embeddings, of `shapes`, one for each kind of
    text. Returns [parts, *shape] for each shape.
    """
    return tf.map_fn(
        encode,
        tf.range(parts),
        parallel_iterations=1,
        fn_output_signature=[tf.TensorSpec(shape) for shape in shapes],
    )


def pull_back(
    encode: Callable[[tf.Tensor], Sequence[tf.Tensor]],
    wanted: Sequence[tf.Tensor],
    variables: Sequence[tf.Variable],
    direct: Sequence[tf.Tensor],
    first: tf.Tensor | int = 0,
    end: tf.Tensor | None = None,
) -> list[tf.Tensor]:
    """Adds what comes back through embeddings to `direct`, embedding the parts again.

    `encode` is as for `embed_in_parts`, under the same dropout; `wanted` are the
    gradients by its results, and `direct` a dense one for each variable. Only the parts
    from `first` to before `end` matter.
    """
    parts = wanted[0].shape[0]

    def add(number: tf.Tensor, *sums: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.GradientTape() as tape:
            product = tf.add_n(
                [
                    tf.reduce_sum(values * gradient[number])
                    for values, gradient in zip(encode(number), wanted)
                ]
            )
        found = tape.gradient(product, variables)
        return (
            number + 1,
            *(s + dense(g, v) for s, g, v in zip(sums, found, variables)),
        )

    _, *gradients = tf.while_loop(
        lambda number, *_: number < (parts if end is None else end),
        add,
        (tf.convert_to_tensor(first), *direct),
        parallel_iterations=1,
        maximum_iterations=parts,
    )
    return gradients


def dense(
    gradient: tf.Tensor | tf.IndexedSlices | None, variable: tf.Variable
) -> tf.Tensor:
    """A gradient as a tensor: zeros where there is none, and no slices."""
    if gradient is None:
        return tf.zeros(variable.shape, variable.dtype)
    return tf.convert_to_tensor(gradient)
