"""Layers that the engine can run, one rule per class.

A rule computes the output of its layer's `call` and tells the recorder, for every
trainable weight, how each example's gradient follows from the gradient by that
output. `register_rule` adds rules for other layers:

    def scale(record, layer, inputs):
        output = inputs * record.read(layer.factor)           # [B, ..., n]
        record.direct(
            layer.factor, output, lambda g: sum_to(g * inputs, layer.factor.shape)
        )
        return output

    register_rule(Scale, scale)

Rules hold for exactly the class they are registered for: a subclass may compute
anything. Layers made of other layers (Keras's MultiHeadAttention, any model) need
none: the layers inside are run by their own rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfdpsq import validation
from tfdpsq.keras_choice import keras2 as keras
from tfdpsq.privacy.fast import keras_nlp_rules, keras_rules

# (recorder, layer, *what call gets) to what call returns.
Rule = Callable[..., Any]


def register_rule(layer_class: type[keras.layers.Layer], rule: Rule) -> None:
    """Makes the engine run layers of exactly this class by `rule`.

    Layers without a weight whose gradient is wanted are left to themselves.

    Args:
      layer_class: a Keras layer class; a rule it already has is replaced.
      rule: called as rule(recorder, layer, *args, **kwargs) with the arguments of
        the layer's `call`, in its place; returns what `call` would. See `Recorder`
        for what it must record; `check` tells whether it is right.

    Raises:
      InputError: not a layer class, or a rule that cannot be called.
    """
    if not (
        isinstance(layer_class, type) and issubclass(layer_class, keras.layers.Layer)
    ):
        raise validation.InputError(
            f"layer_class is {layer_class!r}; give a class of Keras layers."
        )
    if not callable(rule):
        raise validation.InputError(
            f"rule is {rule!r}; give a function of (recorder, layer, *call's own)."
        )
    _RULES[layer_class] = rule


def rule_for(layer: keras.layers.Layer) -> Rule | None:
    """The rule for a layer's exact class, or `None`."""
    kind = type(layer)
    rule = _RULES.get(kind) or _NAMED.get(f"{kind.__module__}.{kind.__qualname__}")
    if rule is None and couples_examples(layer):
        return keras_rules.batch_normalization
    return rule


def couples_examples(layer: keras.layers.Layer) -> bool:
    """Returns whether a layer may make examples depend on each other."""
    return isinstance(layer, _BATCH_NORMALIZATION)


# The class that all of Keras's batch normalisations share.
_BATCH_NORMALIZATION = keras.layers.BatchNormalization.__mro__[1]

_RULES: dict[type, Rule] = {
    keras.layers.Conv1D: keras_rules.convolution,
    keras.layers.Conv2D: keras_rules.convolution,
    keras.layers.Dense: keras_rules.dense,
    keras.layers.DepthwiseConv2D: keras_rules.depthwise_convolution,
    keras.layers.EinsumDense: keras_rules.einsum_dense,
    keras.layers.Embedding: keras_rules.embedding,
    keras.layers.GroupNormalization: keras_rules.group_normalization,
    keras.layers.LayerNormalization: keras_rules.layer_normalization,
    keras.layers.PReLU: keras_rules.prelu,
    keras.layers.TimeDistributed: keras_rules.time_distributed,
}

# By name, so as not to import their library.
_NLP = "keras_nlp.src"
_NAMED: dict[str, Rule] = {
    f"{_NLP}.layers.modeling.position_embedding.PositionEmbedding": (
        keras_nlp_rules.position_embedding
    ),
    f"{_NLP}.layers.modeling.reversible_embedding.ReversibleEmbedding": (
        keras_nlp_rules.reversible_embedding
    ),
    f"{_NLP}.models.t5.t5_layer_norm.T5LayerNorm": keras_nlp_rules.t5_layer_norm,
    f"{_NLP}.models.t5.t5_multi_head_attention.T5MultiHeadAttention": (
        keras_nlp_rules.t5_attention
    ),
    "tfdpsq.layers.folded.Folded": keras_rules.folded,
    "tfdpsq.layers.scale.Scale": keras_rules.scale,
    "tfdpsq.layers.t5_layers.T5MultiHeadAttention": keras_nlp_rules.t5_attention,
    "tfdpsq.layers.t5_layers.TokenEmbedding": keras_nlp_rules.reversible_embedding,
}
