"""The weights of a T5: where a model has them, and their names in each format.

Sentence encoders have Hugging Face's names, without the decoder's. T5X folds
attention's 1/sqrt(key/value size) into how it initialises queries, and scales tied
logits by hidden_dim^-0.5, so its weights mean here what they mean there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.layers import T5Config

BUCKETS = 32  # of relative positions, in every T5
DTYPES = ("float32", "float16", "bfloat16")
SOFT_PROMPT = "soft_prompt"  # its name in every format

# Of a layer: path in keras-nlp's, name in a block of Hugging Face's, name in T5X's, and
# shape. `own`, `last` and `wi` depend on the stack and on the version.
_LAYER = """
self_attention/query_projector/kernel   0.SelfAttention.q   {own}/query   hidden inner
self_attention/key_projector/kernel     0.SelfAttention.k   {own}/key     hidden inner
self_attention/value_projector/kernel   0.SelfAttention.v   {own}/value   hidden inner
self_attention/output_projector/kernel  0.SelfAttention.o   {own}/out     inner hidden
self_attention_layer_norm/weight 0.layer_norm pre_{own}_layer_norm hidden
cross_attention/query_projector/kernel  1.EncDecAttention.q {cross}/query hidden inner
cross_attention/key_projector/kernel    1.EncDecAttention.k {cross}/key   hidden inner
cross_attention/value_projector/kernel  1.EncDecAttention.v {cross}/value hidden inner
cross_attention/output_projector/kernel 1.EncDecAttention.o {cross}/out   inner hidden
cross_attention_layer_norm/weight 1.layer_norm pre_cross_attention_layer_norm hidden
input_projector/kernel   {last}.DenseReluDense.{wi} mlp/{wi}      hidden wide
gate_projector/kernel    {last}.DenseReluDense.wi_1 mlp/wi_1      hidden wide
output_projector/kernel  {last}.DenseReluDense.wo mlp/wo        wide hidden
layer_norm/weight {last}.layer_norm pre_mlp_layer_norm hidden
"""
_EMBEDDING = (
    "token_embedding/embeddings shared token_embedder/embedding vocabulary hidden"
)
_HEAD = (
    "token_embedding/reverse_embeddings lm_head decoder/logits_dense/kernel "
    "hidden vocabulary"
)
_POSITIONS = (
    "self_attention/relative_attention_bias 0.SelfAttention.relative_attention_bias "
    "relpos_bias/rel_embedding buckets heads"
)
# The attributes whose values a format holds transposed.
_TRANSPOSED = {
    "huggingface": ("kernel", "reverse_embeddings"),
    "t5x": ("relative_attention_bias",),
    "keras": (),
}


class Weight(NamedTuple):
    """One weight of a T5: its place and shape in the model, and its names in files.

    `path` is what leads from the backbone to the variable: attributes and indices.
    """

    path: str
    shape: tuple[int, ...]
    huggingface: str
    t5x: str
    keras: str

    def transposed(self, form: str) -> bool:
        """Returns whether a format holds the transpose of the model's value."""
        return self.path.endswith(_TRANSPOSED[form])


def weights_of(
    config: T5Config, encoder_only: bool = False, soft_prompt: int = 0
) -> list[Weight]:
    """Lists every weight of a T5, or of its encoder alone.

    No format knows of a soft prompt of a length above 0: other readers pass it over,
    and run the T5 that it was tuned for.
    """
    sizes = {
        "vocabulary": config.vocabulary_size,
        "hidden": config.hidden_dim,
        "inner": config.num_heads * config.key_value_dim,
        "wide": config.intermediate_dim,
        "buckets": BUCKETS,
        "heads": config.num_heads,
    }
    found = []

    def add(row: str, place: str = "", block: str = "", t5x: str = "") -> None:
        path, theirs, name, *shape = row.split()
        path = place + path
        suffix = {"kernel": "/kernel", "weight": "/scale"}.get(path.rpartition("/")[2])
        found.append(
            Weight(
                path,
                tuple(sizes[each] for each in shape),
                f"{block}{theirs}.weight",
                f"target/{t5x}{name}{suffix or ''}",
                _keras_name(path, config.num_layers),
            )
        )

    add(_EMBEDDING)
    for side in ("encoder",) if encoder_only else ("encoder", "decoder"):
        names = {
            "own": "attention" if side == "encoder" else "self_attention",
            "cross": "encoder_decoder_attention",
            "last": 1 if side == "encoder" else 2,
            "wi": "wi" if config.version == "1.0" else "wi_0",
        }
        absent = ["cross"] * (side == "encoder") + ["gate"] * (config.version == "1.0")
        rows = _LAYER.format(**names).strip().splitlines()
        rows = [row for row in rows if not row.startswith(tuple(absent))]
        for layer in range(config.num_layers):
            place = f"{side}_transformer_layers/{layer}/"
            block = f"{side}.block.{layer}.layer."
            if layer == 0:
                add(_POSITIONS, place, block, f"{side}/")
            for row in rows:
                add(row, place, block, f"{side}/layers_{layer}/")
        final = f"{side}_layer_norm/weight {side}.final_layer_norm {side}/{side}_norm"
        add(f"{final} hidden")
    if not (config.tied or encoder_only):
        add(_HEAD)
    if soft_prompt:
        shape = (soft_prompt, config.hidden_dim)
        found.append(Weight("soft_prompt/vectors", shape, *(SOFT_PROMPT,) * 3))
    return found


def variable_of(model: tf.keras.Model, weight: Weight) -> tf.Variable:
    """Returns the variable that a weight's values are loaded into.

    Raises:
      InputError: a LoRA layer has replaced it.
    """
    owner, name = _owner(model, weight.path), weight.path.rpartition("/")[2]
    if hasattr(owner, "merge"):
        raise validation.InputError(
            f"{weight.huggingface} belongs to a LoRA layer. Load the weights first, "
            "then apply LoRA."
        )
    return getattr(owner, name)


def value_of(model: tf.keras.Model, weight: Weight) -> tf.Variable | tf.Tensor:
    """Returns a weight in the model's layout, float32, LoRA's update included."""
    owner, name = _owner(model, weight.path), weight.path.rpartition("/")[2]
    return owner.merge() if hasattr(owner, "merge") else getattr(owner, name)


def stored_values(
    model: tf.keras.Model,
    config: T5Config,
    form: str,
    dtype: str = "float32",
    encoder_only: bool = False,
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields names and values of a backbone's weights as a format stores them.

    Raises:
      InputError: a value is NaN or infinite, or becomes so in `dtype`.
    """
    prompt = getattr(model, "soft_prompt", None)
    length = 0 if prompt is None else prompt.length
    for weight in weights_of(config, encoder_only, length):
        value = tf.cast(tf.convert_to_tensor(value_of(model, weight)), dtype)
        if not tf.reduce_all(tf.math.is_finite(value)):
            raise validation.InputError(
                f"weight {weight.huggingface} is not finite in {dtype}. Use weights "
                "from before training diverged, or a dtype with a larger range."
            )
        array = value.numpy()
        array = array.T if weight.transposed(form) else array
        yield getattr(weight, form), np.ascontiguousarray(array)


def _owner(model: tf.keras.Model, path: str) -> Any:
    """Returns the layer that has a weight, in a backbone or an encoder."""
    first, *rest, _ = path.split("/")
    if hasattr(model, "encoder_transformer_layers"):
        found = getattr(model, first)
    elif first == "encoder_transformer_layers":
        found = model.get_layer(f"transformer_encoder_layer_{rest.pop(0)}")
    else:  # an encoder is a functional model that has its layers by name only
        names = {"encoder_layer_norm": "encoder_output_layer_norm"}
        found = model.get_layer(names.get(first, first))
    for key in rest:
        found = found[int(key)] if key.isdigit() else getattr(found, key)
    return found


def _keras_name(path: str, num_layers: int) -> str:
    """Returns the dataset of the weight at `path`.

    Keras counts layers of one class in the order in which the model calls them.
    """
    first, *rest, last = path.split("/")
    if first == "token_embedding":
        return f"layers/reversible_embedding/vars/{int(last != 'embeddings')}"
    decoder = first.startswith("decoder")
    if not rest:
        return f"layers/t5_layer_norm{'_1' if decoder else ''}/vars/0"
    number = int(rest[0]) + (num_layers if decoder else 0)
    layer = f"layers/t5_transformer_layer{f'_{number}' if number else ''}"
    return "/".join([layer, *rest[1:], "vars/0"])
