"""Low-rank adaptation (LoRA): a frozen Dense layer with a small trainable update.

Hu et al. 2021 (arXiv:2106.09685, section 4.1): the kernel W is frozen, and the product
A·B of two thin matrices is trained and added to it,

    y = x·W + b + (alpha / rank) · (x·A)·B,        A: m × rank,  B: rank × n.

B starts at zero, so training starts from the original model. Few trained weights mean
little noise under differential privacy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.keras_choice import keras, require_keras_2, require_own
from tfdpsq.layers.trained_part import (
    freeze_weights,
    matches,
    require_matches,
    trainable_weights,
)


@keras.utils.register_keras_serializable("tfdpsq")
class LoRADense(keras.layers.Layer):
    """A Dense layer whose kernel and bias are frozen, with a trainable update.

    Inputs and outputs are those of the Dense layer, including its activation. A and B
    are the kernels of two inner Dense layers, `down` and `up`, in float32 also under
    mixed precision.

    Example:
      >>> layer = LoRADense(keras.layers.Dense(8), rank=2, alpha=4.0)
      >>> layer(tf.zeros([3, 5])).shape
      TensorShape([3, 8])
      >>> [weight.shape.as_list() for weight in layer.trainable_weights]
      [[5, 2], [2, 8]]

    Attributes:
      dense: the frozen layer.
      rank: columns of A, rows of B.
      alpha: scale of the update, above 0; that of A·B itself if equal to `rank`.
    """

    def __init__(
        self, dense: keras.layers.Layer, rank: int, alpha: float, **kwargs: Any
    ) -> None:
        """Wraps a layer, whose weights become non-trainable for good.

        Name and dtype default to the Dense layer's.
        """
        require_own("dense", dense)
        # A subclass may compute anything.
        if type(dense) is not keras.layers.Dense:
            raise validation.InputError(
                f"dense is a {type(dense).__name__}; LoRA is for layers of class Dense."
            )
        kwargs.setdefault("name", dense.name)
        kwargs.setdefault("dtype", dense.dtype_policy)
        super().__init__(**kwargs)
        self.dense = dense
        self.rank = validation.positive_integer("rank", rank)
        self.alpha = validation.positive("alpha", alpha)
        # Variance 1 / m: x·A has the scale of x, whatever m.
        random = keras.initializers.VarianceScaling(
            1.0, mode="fan_in", distribution="untruncated_normal"
        )
        options: dict[str, Any] = {"use_bias": False, "dtype": self.dtype_policy}
        self.down = keras.layers.Dense(
            self.rank, kernel_initializer=random, name="down", **options
        )
        self.up = keras.layers.Dense(
            dense.units, kernel_initializer="zeros", name="up", **options
        )
        self.supports_masking = True
        freeze_weights(dense)

    def build(self, input_shape: Any) -> None:
        """Creates A and B, and the Dense layer's weights if it has none yet."""
        if not self.dense.built:
            self.dense.build(input_shape)
            freeze_weights(self.dense)
        with tf.name_scope(self.down.name):
            self.down.build(input_shape)
        with tf.name_scope(self.up.name):
            self.up.build(self.down.compute_output_shape(input_shape))
        self.built = True

    def call(self, inputs: Any) -> Any:
        """Computes the adapted layer; shapes are those of `dense`."""
        # Scaled at the narrow point, where it costs least.
        update = self.up(self.down(inputs) * (self.alpha / self.rank))
        kernel = tf.convert_to_tensor(self.dense.kernel)  # as the layer would cast it
        output = tf.tensordot(inputs, kernel, 1) + update
        if self.dense.bias is not None:
            output += tf.convert_to_tensor(self.dense.bias)
        activation = self.dense.activation
        return output if activation is None else activation(output)

    def merge(self) -> tf.Tensor:
        """Returns the adapted kernel W + (alpha / rank)·A·B, float32."""
        update = tf.matmul(self.down.kernel, self.up.kernel)
        return self.dense.kernel + (self.alpha / self.rank) * update

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        """Returns the output shape of `dense`."""
        return tuple(self.dense.compute_output_shape(input_shape))

    def get_config(self) -> dict:
        """Returns the constructor's arguments, the Dense layer serialized."""
        dense = keras.layers.serialize(self.dense)
        own = {"dense": dense, "rank": self.rank, "alpha": self.alpha}
        return {**super().get_config(), **own}

    @classmethod
    def from_config(cls, config: dict) -> LoRADense:
        """Makes the layer that `get_config` described."""
        return cls(**{**config, "dense": keras.layers.deserialize(config["dense"])})


def apply_lora(
    model: keras.Model, rank: int, alpha: float, targets: Sequence[str]
) -> dict[str, LoRADense]:
    """Replaces Dense layers, and freezes everything else.

    It finds those that a layer inside the model holds as attributes, as keras-nlp's T5
    layers do. A path is the names of the enclosing
    layers without the model's own, and the attribute's name, such as
    "transformer_encoder_layer_0/self_attention/query_projector". Apply it before
    `compile` and before the model is first traced. Keras itself replaces the nodes of a
    functional model, by `clone_model` (the README has an example).

    Args:
      model: a built model; it is changed in place.
      rank: see `LoRADense`.
      alpha: see `LoRADense`.
      targets: patterns of whole paths as in `train_only`.

    Returns:
      {path: replacement} for each path that matched. A layer found at several paths
      has one replacement.

    Raises:
      InputError: Keras 3, or a pattern that matches no path. The model is unchanged.
    """
    require_keras_2("apply_lora", model)
    found = list(_dense_attributes(model, "", set()))
    example = "['*/query_projector', '*/value_projector']"
    paths = [path for path, _, _ in found]
    require_matches("targets", targets, paths, "Dense layer", example)
    wrapped: dict[int, LoRADense] = {}
    replaced = {}
    for path, owner, name in found:
        if not matches(path, targets):
            continue
        dense = getattr(owner, name)
        if id(dense) not in wrapped:
            wrapped[id(dense)] = LoRADense(dense, rank, alpha)
            if dense.built:
                with tf.name_scope(path):  # tells the weights of all of them apart
                    wrapped[id(dense)].build([None, dense.kernel.shape[0]])
        replaced[path] = wrapped[id(dense)]
    for path, owner, name in found:
        if path in replaced:
            setattr(owner, name, replaced[path])
    model.trainable = True
    trained = {id(part) for one in replaced.values() for part in (one.down, one.up)}
    for _, weight, owner in list(trainable_weights(model)):
        if id(owner) not in trained:
            freeze_weights(owner, weight)
    return replaced


def merge_lora(model: keras.Model) -> None:
    """Adds every update to its kernel and sets B to zero: the outputs stay the same."""
    require_keras_2("merge_lora", model)
    for layer in model._flatten_layers():
        if isinstance(layer, LoRADense):
            layer.dense.kernel.assign(layer.merge())
            layer.up.kernel.assign(tf.zeros_like(layer.up.kernel))


def _dense_attributes(
    layer: keras.layers.Layer, path: str, seen: set[int]
) -> Iterator[tuple[str, keras.layers.Layer, str]]:
    """Yields (path, owner, attribute) for every layer that can be replaced."""
    if id(layer) in seen or isinstance(layer, LoRADense):
        return
    seen.add(id(layer))
    # A model made of a graph runs its nodes, whatever its attributes say.
    if not getattr(layer, "_is_graph_network", False):
        for name, value in vars(layer).items():
            if type(value) is keras.layers.Dense:
                yield f"{path}{name}", layer, name
    for child in layer._flatten_layers(recursive=False, include_self=False):
        yield from _dense_attributes(child, f"{path}{child.name}/", seen)
