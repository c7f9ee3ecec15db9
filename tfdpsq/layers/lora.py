"""Low-rank adaptation (LoRA): a frozen Dense layer with a small trainable update.

Hu et al. 2021 (arXiv:2106.09685, section 4.1): the kernel W is frozen, and the product
A·B of two thin matrices is trained and added to it,

    y = x·W + b + (alpha / rank) · (x·A)·B,        A: m × rank,  B: rank × n.

B starts at zero, so training starts from the original model. Under differential privacy
the noise's norm grows with the square root of the number of trained weights: fewer
trained weights mean less noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.layers.patterns import matches, require_matches


@tf.keras.utils.register_keras_serializable("tfdpsq")
class LoRADense(tf.keras.layers.Layer):
    """A Dense layer whose kernel and bias are frozen, with a trainable update.

    Inputs and outputs are those of the Dense layer, including its activation. A and B
    are the kernels of two inner Dense layers, `down` and `up`, in float32 also under
    mixed precision.

    Example:
      >>> layer = LoRADense(tf.keras.layers.Dense(8), rank=2, alpha=4.0)
      >>> layer(tf.zeros([3, 5])).shape
      TensorShape([3, 8])
      >>> [weight.shape.as_list() for weight in layer.trainable_weights]
      [[5, 2], [2, 8]]

    Attributes:
      dense: the frozen layer.
      rank: columns of A, rows of B.
      alpha: the update is scaled by alpha / rank.
    """

    def __init__(self, dense: tf.keras.layers.Dense, rank: int, alpha: float, **kwargs):
        """Wraps a layer.

        Args:
          dense: the layer to adapt. Its weights become non-trainable for good.
          rank: rank of the update, at least 1.
          alpha: scale of the update, above 0; that of A·B itself if equal to `rank`.
          **kwargs: those of `tf.keras.layers.Layer`; name and dtype default to the
            Dense layer's.

        Raises:
          InputError: not a Dense layer, rank below 1, alpha not above 0.
        """
        # A subclass may compute anything.
        if type(dense) is not tf.keras.layers.Dense:
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
        random = tf.keras.initializers.VarianceScaling(
            1.0, mode="fan_in", distribution="untruncated_normal"
        )
        dtype = self.dtype_policy
        self.down = tf.keras.layers.Dense(
            rank, use_bias=False, kernel_initializer=random, dtype=dtype, name="down"
        )
        self.up = tf.keras.layers.Dense(
            dense.units,
            use_bias=False,
            kernel_initializer="zeros",
            dtype=dtype,
            name="up",
        )
        self.supports_masking = True
        _freeze_weights(dense)

    def build(self, input_shape):
        """Creates A and B, and the Dense layer's weights if it has none yet."""
        if not self.dense.built:
            self.dense.build(input_shape)
            _freeze_weights(self.dense)
        with tf.name_scope(self.down.name):
            self.down.build(input_shape)
        with tf.name_scope(self.up.name):
            self.up.build([*input_shape[:-1], self.rank])
        self.built = True

    def call(self, inputs):
        """Computes the adapted layer.

        Args:
          inputs: [..., m] floating point.

        Returns:
          [..., n] in the layer's compute dtype.
        """
        # Scaled at the narrow point, where it costs least.
        update = self.up(self.down(inputs) * (self.alpha / self.rank))
        # Uses only the Dense layer's weights: its activation comes last.
        kernel = tf.convert_to_tensor(self.dense.kernel)
        output = tf.tensordot(inputs, kernel, 1) + update
        output.set_shape([*inputs.shape[:-1], self.dense.units])
        if self.dense.use_bias:
            output = tf.nn.bias_add(output, self.dense.bias)
        activation = self.dense.activation
        return output if activation is None else activation(output)

    def merge(self) -> tf.Tensor:
        """Returns the kernel of a Dense layer that computes the same without LoRA.

        Returns:
          W + (alpha / rank)·A·B, [m, n] float32.
        """
        update = tf.matmul(self.down.kernel, self.up.kernel)
        return self.dense.kernel + (self.alpha / self.rank) * update

    def compute_output_shape(self, input_shape) -> tf.TensorShape:
        """Returns [..., n] for [..., m]."""
        return tf.TensorShape([*input_shape[:-1], self.dense.units])

    def get_config(self) -> dict:
        """Returns the constructor's arguments, the Dense layer serialized."""
        config = super().get_config()
        config.update(
            {
                "dense": tf.keras.layers.serialize(self.dense),
                "rank": self.rank,
                "alpha": self.alpha,
            }
        )
        return config

    @classmethod
    def from_config(cls, config: dict) -> LoRADense:
        """Makes the layer that `get_config` described."""
        dense = tf.keras.layers.deserialize(config["dense"])
        return cls(**{**config, "dense": dense})


def apply_lora(
    model: tf.keras.Model, rank: int, alpha: float, targets: Sequence[str]
) -> dict[str, LoRADense]:
    """Replaces Dense layers by `LoRADense`, and freezes everything else.

    It finds the Dense layers that a layer inside the model holds as attributes, as
    keras-nlp's T5 layers do. Each has a path: the names of the enclosing layers without
    the model's own, and the attribute's name, such as
    "transformer_encoder_layer_0/self_attention/query_projector". Dense layers that
    are nodes of a functional or sequential model cannot be replaced.

    Apply it before `compile` and before the model is first traced.

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
      InputError: a pattern that matches no path (the message lists some), no
        patterns, or what `LoRADense` raises. The model is then unchanged.
    """
    found = list(_dense_attributes(model, "", set()))
    paths = [path for path, _, _ in found]
    require_matches(
        "targets",
        targets,
        paths,
        "Dense layer that can be replaced",
        "['*/query_projector', '*/value_projector']",
    )
    replacements: dict[int, LoRADense] = {}
    replaced = {}
    for path, owner, name in found:
        if not matches(path, targets):
            continue
        dense = getattr(owner, name)
        if id(dense) not in replacements:
            adapted = LoRADense(dense, rank, alpha)
            if dense.built:
                with tf.name_scope(path):  # tells the weights of all of them apart
                    adapted.build([None, dense.kernel.shape[0]])
            replacements[id(dense)] = adapted
        replaced[path] = replacements[id(dense)]
        setattr(owner, name, replaced[path])
    model.trainable = True
    _freeze(model)
    return replaced


def _dense_attributes(
    layer: tf.keras.layers.Layer, path: str, seen: set[int]
) -> Iterator[tuple[str, tf.keras.layers.Layer, str]]:
    """Yields (path, owner, attribute) for every Dense layer held as an attribute."""
    if id(layer) in seen or isinstance(layer, LoRADense):
        return
    seen.add(id(layer))
    # A model made of a graph runs its nodes, whatever its attributes say.
    if not getattr(layer, "_is_graph_network", False):
        for name, value in vars(layer).items():
            if type(value) is tf.keras.layers.Dense:
                yield f"{path}{name}", layer, name
    for child in layer._flatten_layers(recursive=False, include_self=False):
        yield from _dense_attributes(child, f"{path}{child.name}/", seen)


def _freeze(layer: tf.keras.layers.Layer) -> None:
    """Makes every weight except LoRA's non-trainable."""
    if isinstance(layer, LoRADense):
        return
    if not any(isinstance(part, LoRADense) for part in layer._flatten_layers()):
        layer.trainable = False
        return
    # Keras ignores the children of a frozen layer, so this one must stay trainable.
    _freeze_weights(layer)
    for child in layer._flatten_layers(recursive=False, include_self=False):
        _freeze(child)


def _freeze_weights(layer: tf.keras.layers.Layer) -> None:
    """Makes a layer's own weights non-trainable, and leaves its `trainable` alone."""
    layer._non_trainable_weights.extend(layer._trainable_weights)
    layer._trainable_weights.clear()
