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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.keras_choice import is_keras_2, keras, require_keras_2, require_own
from tfdpsq.layers.trained_part import matches, require_matches


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
      alpha: the update is scaled by alpha / rank.
    """

    _adapts = keras.layers.Dense

    def __init__(
        self, dense: keras.layers.Layer, rank: int, alpha: float, **kwargs: Any
    ) -> None:
        """Wraps a layer.

        Args:
          dense: the layer to adapt. Its weights become non-trainable for good.
          rank: rank of the update, at least 1.
          alpha: scale of the update, above 0; that of A·B itself if equal to `rank`.
          **kwargs: those of `keras.layers.Layer`; name and dtype default to the
            Dense layer's.

        Raises:
          InputError: not a Dense layer, rank below 1, alpha not above 0.
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
        _freeze_weights(dense)

    def _down(self, **options: Any) -> keras.layers.Layer:
        return keras.layers.Dense(self.rank, use_bias=False, **options)

    def _up(self, **options: Any) -> keras.layers.Layer:
        return keras.layers.Dense(self.dense.units, use_bias=False, **options)

    def build(self, input_shape: Any) -> None:
        """Creates A and B, and the Dense layer's weights if it has none yet."""
        if not self.dense.built:
            self.dense.build(input_shape)
            _freeze_weights(self.dense)
        with tf.name_scope(self.down.name):
            self.down.build(input_shape)
        with tf.name_scope(self.up.name):
            self.up.build(self.down.compute_output_shape(input_shape))
        self.built = True

    def build_as_dense(self) -> None:
        """Creates A and B for the inputs that the Dense layer was built for."""
        self.build([None, self.dense.kernel.shape[0]])

    def call(self, inputs: Any) -> Any:
        """Computes the adapted layer.

        Args:
          inputs: floating point, [..., m], or as an EinsumDense layer's equation has
            them.

        Returns:
          [..., n], or what the equation gives, in the layer's compute dtype.
        """
        # Scaled at the narrow point, where it costs least.
        update = self.up(self.down(inputs) * (self.alpha / self.rank))
        output = self._updated(inputs, update)
        activation = self.dense.activation  # comes last
        return output if activation is None else activation(output)

    def _updated(self, inputs: tf.Tensor, update: tf.Tensor) -> tf.Tensor:
        """Returns x·W + update + b, with the frozen layer's weights alone."""
        kernel = tf.convert_to_tensor(self.dense.kernel)  # as the layer would cast it
        output = tf.tensordot(inputs, kernel, 1) + update
        output.set_shape([*inputs.shape[:-1], self.dense.units])
        if self.dense.use_bias:
            output = tf.nn.bias_add(output, self.dense.bias)
        return output

    def merge(self) -> tf.Tensor:
        """Returns the kernel of a Dense layer that computes the same without LoRA.

        Returns:
          W + (alpha / rank)·A·B, float32, shaped as W: [m, n] of a Dense layer.
        """
        update = self._product()
        return self.dense.kernel + (self.alpha / self.rank) * update

    def _product(self) -> tf.Tensor:
        return tf.matmul(self.down.kernel, self.up.kernel)

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        """Returns [..., n] for [..., m]."""
        return (*input_shape[:-1], self.dense.units)

    def get_config(self) -> dict:
        """Returns the constructor's arguments, the Dense layer serialized."""
        config = super().get_config()
        config.update(
            {
                "dense": keras.layers.serialize(self.dense),
                "rank": self.rank,
                "alpha": self.alpha,
            }
        )
        return config

    @classmethod
    def from_config(cls, config: dict) -> LoRADense:
        """Makes the layer that `get_config` described."""
        dense = keras.layers.deserialize(config["dense"])
        return cls(**{**config, "dense": dense})


@keras.utils.register_keras_serializable("tfdpsq")
class LoRAEinsumDense(LoRADense):
    """The same for EinsumDense, of which Keras's MultiHeadAttention is made.

    A has the kernel's input axes and `rank`, B has `rank` and the kernel's output axes.

    Example:
      >>> dense = keras.layers.EinsumDense("abc,cde->abde", [None, 4, 3])
      >>> layer = LoRAEinsumDense(dense, rank=2, alpha=4.0)
      >>> layer(tf.zeros([3, 5, 8])).shape
      TensorShape([3, 5, 4, 3])
      >>> [weight.shape.as_list() for weight in layer.trainable_weights]
      [[8, 2], [2, 4, 3]]
    """

    _adapts = keras.layers.EinsumDense

    def build_as_dense(self) -> None:
        """Creates A and B for the inputs that the EinsumDense layer was built for."""
        source, weight, target = _subscripts(self.dense)
        sizes = dict(zip(weight, self.dense.kernel.shape))
        shape = [sizes.get(letter) for letter in source if letter != "."]
        elided = len(self.dense.full_output_shape) - len(target.replace("...", ""))
        place = 0 if source.startswith("...") else len(shape)
        shape[place:place] = [None] * elided
        self.build(shape)

    def _updated(self, inputs: tf.Tensor, update: tf.Tensor) -> tf.Tensor:
        kernel = tf.convert_to_tensor(self.dense.kernel)
        output = tf.einsum(self.dense.equation, inputs, kernel) + update
        bias = self.dense.bias
        return output if bias is None else output + tf.convert_to_tensor(bias)

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        """Returns the EinsumDense layer's output shape."""
        return tuple(self.dense.compute_output_shape(input_shape))

    def _product(self) -> tf.Tensor:
        _, weight, _ = _subscripts(self.dense)
        _, into, out = self._split()
        return tf.einsum(f"{into},{out}->{weight}", self.down.kernel, self.up.kernel)

    def _down(self, **options: Any) -> keras.layers.Layer:
        source, _, _ = _subscripts(self.dense)
        middle, into, _ = self._split()
        letters = middle if middle.startswith("...") else middle[1:]
        new = into[-1]
        shape = [self.rank if c == new else None for c in letters if c != "."]
        equation = f"{source},{into}->{middle}"
        return keras.layers.EinsumDense(equation, shape, **options)

    def _up(self, **options: Any) -> keras.layers.Layer:
        _, _, target = _subscripts(self.dense)
        middle, _, out = self._split()
        shape = self.dense.partial_output_shape
        equation = f"{middle},{out}->{target}"
        return keras.layers.EinsumDense(equation, shape, **options)

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
        free = (c for c in string.ascii_letters if c not in self.dense.equation)
        new = next(free)
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
    layers and Keras's MultiHeadAttention do. Each has a path: the names of the
    enclosing layers without the model's own, and the attribute's name, such as
    "transformer_encoder_layer_0/self_attention/query_projector". For the nodes of a
    functional or sequential model see `with_lora`.

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
    require_keras_2("apply_lora")
    require_own("model", model)
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
            replacements[id(dense)] = _adapter(dense, rank, alpha, path)
        replaced[path] = replacements[id(dense)]
        setattr(owner, name, replaced[path])
    model.trainable = True
    _freeze(model)
    return replaced


def with_lora(
    model: keras.Model, rank: int, alpha: float, targets: Sequence[str]
) -> keras.Model:
    """Makes a functional or sequential model with LoRA on its Dense layers.

    The new model has the layers of the given one, weights and all, but for the Dense
    and EinsumDense layers that match: those it wraps. Everything but the updates is
    frozen, in both models. A layer's path is its name, after the names of the models
    inside the model that hold it, such as "tower/hidden".

    Example:
      >>> dense = keras.layers.Dense(3, input_shape=(4,), name="hidden")
      >>> model = keras.Sequential([dense, keras.layers.Dense(2, name="logits")])
      >>> adapted = with_lora(model, rank=1, alpha=1.0, targets=["hidden"])
      >>> [weight.shape.as_list() for weight in adapted.trainable_weights]
      [[4, 1], [1, 3]]

    Args:
      model: a built functional or sequential model, of which parts may be such models.
      rank: see `LoRADense`.
      alpha: see `LoRADense`.
      targets: patterns of whole paths as for `apply_lora`.

    Returns:
      The model to train. `merge_lora` adds what it learned to the given model.

    Raises:
      InputError: a subclassed or unbuilt model, no patterns, a pattern without a match,
        or what `LoRADense` raises; or Keras 3. The models are then unchanged.
    """
    require_keras_2("with_lora")
    require_own("model", model)
    if not _is_graph(model):
        raise validation.InputError(
            f"model is a {type(model).__name__} that is subclassed or not built yet; "
            "with_lora is for functional and sequential models that know their input "
            "shape. For a subclassed model use apply_lora."
        )
    found = list(_dense_nodes(model, ""))
    example = "['tower/hidden'], or ['*'] for all of them"
    paths = [path for path, _ in found]
    require_matches("targets", targets, paths, "Dense layer of the graph", example)
    replacements: dict[int, LoRADense] = {}
    for path, dense in found:
        if matches(path, targets) and id(dense) not in replacements:
            replacements[id(dense)] = _adapter(dense, rank, alpha, path)
    made = _rebuilt(model, replacements)
    made.trainable = True
    _freeze(made)
    return made


def merge_lora(model: keras.Model) -> None:
    """Adds every update to the kernel that it belongs to, and sets B to zero.

    The model computes what it did before, and so does the plain model that `with_lora`
    was given, which shares the kernels.

    Args:
      model: has `LoRADense` layers, however deep; changed in place.
    """
    require_keras_2("merge_lora")
    for layer in model._flatten_layers():
        if isinstance(layer, LoRADense):
            layer.dense.kernel.assign(layer.merge())
            layer.up.kernel.assign(tf.zeros_like(layer.up.kernel))


def _adapter(
    dense: keras.layers.Layer, rank: int, alpha: float, path: str
) -> LoRADense:
    """Wraps a layer, and builds the wrapper if the layer is built."""
    adapted = _ADAPTERS[type(dense)](dense, rank, alpha)
    if dense.built:
        with tf.name_scope(path):  # tells the weights of all of them apart
            adapted.build_as_dense()
    return adapted


def _is_graph(layer: keras.layers.Layer) -> bool:
    """Returns whether a layer is a model that runs its nodes."""
    return bool(getattr(layer, "_is_graph_network", False))


def _dense_nodes(
    model: keras.Model, path: str
) -> Iterator[tuple[str, keras.layers.Layer]]:
    """Yields (path, layer) for every Dense layer that is a node, however deep."""
    for layer in model.layers:
        if type(layer) in _ADAPTERS:
            yield f"{path}{layer.name}", layer
        elif _is_graph(layer):
            yield from _dense_nodes(layer, f"{path}{layer.name}/")


def _rebuilt(model: keras.Model, replacements: Mapping[int, LoRADense]) -> keras.Model:
    """Returns a model of the same graph and layers, with some of them replaced."""

    def of(layer: keras.layers.Layer) -> keras.layers.Layer:
        inner = _dense_nodes(layer, "") if _is_graph(layer) else ()
        if any(id(dense) in replacements for _, dense in inner):
            return _rebuilt(layer, replacements)
        return replacements.get(id(layer), layer)

    return keras.models.clone_model(model, clone_function=of)


def _dense_attributes(
    layer: keras.layers.Layer, path: str, seen: set[int]
) -> Iterator[tuple[str, keras.layers.Layer, str]]:
    """Yields (path, owner, attribute) for every layer that can be replaced."""
    if id(layer) in seen or isinstance(layer, LoRADense):
        return
    seen.add(id(layer))
    # A model made of a graph runs its nodes, whatever its attributes say.
    if not _is_graph(layer):
        for name, value in vars(layer).items():
            if type(value) in _ADAPTERS:
                yield f"{path}{name}", layer, name
    for child in layer._flatten_layers(recursive=False, include_self=False):
        yield from _dense_attributes(child, f"{path}{child.name}/", seen)


def _freeze(layer: keras.layers.Layer) -> None:
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


def _freeze_weights(layer: keras.layers.Layer) -> None:
    """Makes a layer's own weights non-trainable, and leaves its `trainable` alone."""
    if is_keras_2():
        trained, frozen = layer._trainable_weights, layer._non_trainable_weights
    else:
        trained, frozen = layer._trainable_variables, layer._non_trainable_variables
        for weight in trained:
            weight.trainable = False
    frozen.extend(trained)
    trained.clear()
