"""The weights of a T5: their names, their shapes, and where they are in a model.

Every checkpoint format has the same weights under names and in a layout of its own.
`slots` lists them once, by Hugging Face's names; a format says in `Slot.stored` and
`Slot.transposed` where its files keep each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.layers import T5Config

# Kinds of weights, each with its shape in the model.
EMBEDDING = "embedding"  # [vocabulary, hidden]
HEAD = "head"  # [hidden, vocabulary], of T5 1.1
KERNEL = "kernel"  # [in, out], of a Dense layer
POSITIONS = "positions"  # [buckets, heads], the relative position bias
NORM = "norm"  # [hidden]

BUCKETS = 32  # of relative positions, in every T5


@dataclasses.dataclass(frozen=True)
class Slot:
    """One weight of a T5: what it is in the model, and where a checkpoint has it.

    Attributes:
      name: Hugging Face's name of it.
      kind: one of the constants above.
      shape: its shape in the model.
      path: attributes and indices that lead from the backbone to the Dense layer
        (for kernels) or to the variable.
      stored: its name in the checkpoint.
      transposed: whether the checkpoint holds the transpose of the model's.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    path: tuple[str | int, ...]
    stored: str
    transposed: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Its shape in the checkpoint."""
        return self.shape[::-1] if self.transposed else self.shape


def slots(config: T5Config, encoder_only: bool = False) -> list[Slot]:
    """Every weight of a T5, stored under Hugging Face's names in the model's layout.

    Args:
      config: the shape.
      encoder_only: whether to leave out the decoder and the head.

    Returns:
      One slot per weight. A format replaces `stored` and `transposed` in them.
    """
    hidden, inner = config.hidden_dim, config.num_heads * config.key_value_dim
    wide = config.intermediate_dim
    found = []

    def add(name: str, kind: str, shape: tuple[int, ...], *path: str | int) -> None:
        found.append(Slot(f"{name}.weight", kind, shape, path, f"{name}.weight"))

    vocabulary = config.vocabulary_size
    add("shared", EMBEDDING, (vocabulary, hidden), "token_embedding", "embeddings")
    for side in ("encoder",) if encoder_only else ("encoder", "decoder"):
        for number in range(config.num_layers):
            block = f"{side}.block.{number}.layer"
            path = (f"{side}_transformer_layers", number)
            attentions = [("SelfAttention", "self_attention")]
            if side == "decoder":
                attentions.append(("EncDecAttention", "cross_attention"))
            for place, (title, attribute) in enumerate(attentions):
                for letter, role in (("q", "query"), ("k", "key"), ("v", "value")):
                    add(
                        f"{block}.{place}.{title}.{letter}",
                        KERNEL,
                        (hidden, inner),
                        *path,
                        attribute,
                        f"{role}_projector",
                    )
                add(
                    f"{block}.{place}.{title}.o",
                    KERNEL,
                    (inner, hidden),
                    *path,
                    attribute,
                    "output_projector",
                )
                if number == 0 and place == 0:
                    add(
                        f"{block}.0.SelfAttention.relative_attention_bias",
                        POSITIONS,
                        (BUCKETS, config.num_heads),
                        *path,
                        attribute,
                        "relative_attention_bias",
                    )
                norm = (*path, f"{attribute}_layer_norm", "weight")
                add(f"{block}.{place}.layer_norm", NORM, (hidden,), *norm)
            last = len(attentions)
            feed = f"{block}.{last}.DenseReluDense"
            gated = config.version != "1.0"
            first = f"{feed}.wi_0" if gated else f"{feed}.wi"
            add(first, KERNEL, (hidden, wide), *path, "input_projector")
            if gated:
                add(f"{feed}.wi_1", KERNEL, (hidden, wide), *path, "gate_projector")
            add(f"{feed}.wo", KERNEL, (wide, hidden), *path, "output_projector")
            norm = (*path, "layer_norm", "weight")
            add(f"{block}.{last}.layer_norm", NORM, (hidden,), *norm)
        final = (f"{side}_layer_norm", "weight")
        add(f"{side}.final_layer_norm", NORM, (hidden,), *final)
    if not (config.tied or encoder_only):
        head = ("token_embedding", "reverse_embeddings")
        add("lm_head", HEAD, (hidden, vocabulary), *head)
    return found


def variable_of(model: tf.keras.Model, slot: Slot) -> tf.Variable:
    """Returns the variable that a slot's values are loaded into.

    Raises:
      InputError: a LoRA layer has replaced it.
    """
    found = _at(model, slot.path)
    if slot.kind != KERNEL:
        return found
    if hasattr(found, "merge"):
        raise validation.InputError(
            f"{slot.name} belongs to a LoRA layer. Load the weights first, then "
            "apply LoRA."
        )
    return found.kernel


def value_of(model: tf.keras.Model, slot: Slot) -> tf.Variable | tf.Tensor:
    """Returns a weight in the model's layout, float32, LoRA's update included."""
    found = _at(model, slot.path)
    return kernel_of(found) if slot.kind == KERNEL else found


def kernel_of(dense: tf.keras.layers.Layer) -> tf.Variable | tf.Tensor:
    """Returns the kernel that a Dense or LoRA layer multiplies by.

    Args:
      dense: a `Dense` layer, or one that has `merge()` as `LoRADense` does.

    Returns:
      [in, out] float32.
    """
    return dense.merge() if hasattr(dense, "merge") else dense.kernel


def _at(model: tf.keras.Model, path: Sequence[str | int]) -> Any:
    """Returns the object at a slot's path in a backbone or an encoder."""
    if hasattr(model, "encoder_transformer_layers"):
        found, rest = getattr(model, str(path[0])), path[1:]
    elif path[0] == "encoder_transformer_layers":
        found, rest = model.get_layer(f"transformer_encoder_layer_{path[1]}"), path[2:]
    else:
        # An encoder is a functional model that has its layers by name only.
        names = {"encoder_layer_norm": "encoder_output_layer_norm"}
        found = model.get_layer(names.get(str(path[0]), str(path[0])))
        rest = path[1:]
    for key in rest:
        found = found[key] if isinstance(key, int) else getattr(found, key)
    return found
