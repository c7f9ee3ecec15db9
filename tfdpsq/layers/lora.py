"""Low-rank adaptation (LoRA): a frozen Dense layer with a small trainable update.

Hu et al. 2021 (arXiv:2106.09685, section 4.1): the kernel W is frozen, and the product
A·B of two thin matrices is trained and added to it,

    y = x·W + b + (alpha / rank) · (x·A)·B,        A: m × rank,  B: rank × n.

B starts at zero, so training starts from the original model. Under differential privacy
the noise's norm grows with the square root of the number of trained weights: fewer
trained weights mean less noise.
"""

from __future__ import annotations

import string
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

    _adapts = keras.layers.Dense

    def __init__(
        self, dense: keras.layers.Layer, rank: int, alpha: float, **kwargs: Any
    ) -> None:
        """Wraps a layer, whose weights become non-trainable for good.

        Name and dtype default to the Dense layer's.
        """
        require_own("dense", dense)
        # A subclass may compute anything.
        if type(dense) is not self._adapts:
            raise validation.InputError(
                f"dense is a {type(dense).__name__}; LoRA is for layers of class Dense "
                "(LoRADense) or EinsumDense (LoRAEinsumDense)."
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
        options: dict[str, Any] = {"dtype": self.dtype_policy}
        self.down = self._down(kernel_initializer=random, name="down", **options)
        self.up = self._up(kernel_initializer="zeros", name="up", **options)
        self.supports_masking = True
        freeze_weights(dense)

    def _down(self, **options: Any) -> keras.layers.Layer:
        return keras.layers.Dense(self.rank, use_bias=False, **options)

    def _up(self, **options: Any) -> keras.layers.Layer:
        return keras.layers.Dense(self.dense.units, use_bias=False, **options)

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
        output = self._product_with_kernel(inputs) + update
        if self.dense.bias is not None:
            output += tf.convert_to_tensor(self.dense.bias)
        activation = self.dense.activation
        return output if activation is None else activation(output)

    def _product_with_kernel(self, inputs: tf.Tensor) -> tf.Tensor:
        kernel = tf.convert_to_tensor(self.dense.kernel)  # as the layer would cast it
        return tf.tensordot(inputs, kernel, 1)

    def merge(self) -> tf.Tensor:
        """Returns the adapted kernel W + (alpha / rank)·A·B, float32."""
        return self.dense.kernel + (self.alpha / self.rank) * self._update()

    def _update(self) -> tf.Tensor:
        return tf.matmul(self.down.kernel, self.up.kernel)

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


@keras.utils.register_keras_serializable("tfdpsq")
class LoRAEinsumDense(LoRADense):
    """The same for EinsumDense, of which Keras's MultiHeadAttention is made.

    A has the kernel's input axes and `rank`, B has `rank` and the kernel's output axes.
    """

    _adapts = keras.layers.EinsumDense

    def _product_with_kernel(self, inputs: tf.Tensor) -> tf.Tensor:
        kernel = tf.convert_to_tensor(self.dense.kernel)
        return tf.einsum(self.dense.equation, inputs, kernel)

    def _update(self) -> tf.Tensor:
        _, weight, _ = _subscripts(self.dense)
        _, into, out = self._split()
        return tf.einsum(f"{into},{out}->{weight}", self.down.kernel, self.up.kernel)

    def _down(self, **options: Any) -> keras.layers.Layer:
        source, _, _ = _subscripts(self.dense)
        middle, into, _ = self._split()
        letters = middle if middle.startswith("...") else middle[1:]
        shape = [self.rank if c == into[-1] else None for c in letters if c != "."]
        return keras.layers.EinsumDense(f"{source},{into}->{middle}", shape, **options)

    def _up(self, **options: Any) -> keras.layers.Layer:
        _, _, target = _subscripts(self.dense)
        middle, _, out = self._split()
        shape = self.dense.partial_output_shape
        return keras.layers.EinsumDense(f"{middle},{out}->{target}", shape, **options)

    def _split(self) -> tuple[str, str, str]:
        """The subscripts between A and B, those of A, and those of B."""
        source, weight, target = _subscripts(self.dense)
        into = [letter for letter in weight if letter not in target]
        out = [letter for letter in weight if letter not in source]
        if not into or len(into) + len(out) < len(weight):
            raise validation.InputError(
                f"layer {self.dense.name!r} has the equation {self.dense.equation!r}; "
                "LoRA needs a kernel each axis of which is either summed over or new."
            )
        new = next(c for c in string.ascii_letters if c not in self.dense.equation)
        middle = source.replace(into[0], new)
        middle = "".join(letter for letter in middle if letter not in into)
        return middle, "".join([*into, new]), "".join([new, *out])


def _subscripts(dense: keras.layers.EinsumDense) -> tuple[str, str, str]:
    """Returns the subscripts of an equation's input, kernel and output."""
    inputs, target = dense.equation.replace(" ", "").split("->")
    source, weight = inputs.split(",")
    return source, weight, target


_ADAPTERS = {adapter._adapts: adapter for adapter in (LoRADense, LoRAEinsumDense)}


def apply_lora(
    model: keras.Model, rank: int, alpha: float, targets: Sequence[str]
) -> dict[str, LoRADense]:
    """Replaces Dense and EinsumDense layers, and freezes everything else.

    It finds those that a layer inside the model holds as attributes, as keras-nlp's T5
    layers and Keras's MultiHeadAttention do. A path is the names of the enclosing
    layers without the model's own, and the attribute's name, such as
    "transformer_encoder_layer_0/self_attention/query_projector". Apply it before
    `compile` and before the model is first traced. The nodes of a functional model are
    replaced by Keras itself:

        adapted = keras.models.clone_model(
            model, clone_function=lambda layer: LoRADense(layer, 4, 4.0)
            if layer.name == "hidden" else layer)
        train_only(adapted, ["*/down/kernel", "*/up/kernel"])

    Args:
      model: a built model; it is changed in place.
      rank: see `LoRADense`.
      alpha: see `LoRADense`.
      targets: patterns of whole paths as in `fnmatch`: "*" is any text, "/"
        included, so that "*/query_projector" means all of them.

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
            wrapped[id(dense)] = _ADAPTERS[type(dense)](dense, rank, alpha)
            if dense.built:
                by_kernel = {"input_shape": [None, dense.kernel.shape[0]]}
                with tf.name_scope(path):  # tells the weights of all of them apart
                    wrapped[id(dense)].build(**(dense.get_build_config() or by_kernel))
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
    """Adds every update to the kernel that it belongs to, and sets B to zero.

    The model computes what it did before, and so does a model that shares its kernels.
    """
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
            if type(value) in _ADAPTERS:
                yield f"{path}{name}", layer, name
    for child in layer._flatten_layers(recursive=False, include_self=False):
        yield from _dense_attributes(child, f"{path}{child.name}/", seen)
