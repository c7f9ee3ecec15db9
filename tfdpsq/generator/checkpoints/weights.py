"""The weights of a T5: where a model has them, and their names in each format.

T5X folds attention's 1/sqrt(key/value size) into how it initialises queries, and scales
tied logits by hidden_dim^-0.5, so its weights mean here what they mean there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.layers import T5Config

BUCKETS = 32  # of relative positions, in every T5
DTYPES = ("float32", "float16", "bfloat16")
SOFT_PROMPT = "soft_prompt"  # its name in every format

# Path in the model, name in Hugging Face's format, name in T5X's without "/kernel" or
# "/scale", shape.
_MODEL = (
    "token_embedding/embeddings shared token_embedder/embedding vocabulary hidden",
    "token_embedding/reverse_embeddings lm_head decoder/logits_dense/kernel "
    "hidden vocabulary",
)
_POSITIONS = (
    "self_attention/relative_attention_bias 0.SelfAttention.relative_attention_bias "
    "relpos_bias/rel_embedding buckets heads"
)
# The same within a layer; `own`, `last` and `wi` depend on the side and the version.
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
# The attributes whose values a format holds transposed.
_TRANSPOSED = {
    "huggingface": ("kernel", "reverse_embeddings"),
    "t5x": ("relative_attention_bias",),
    "keras": (),
}


class Weight(NamedTuple):
    """One weight of a T5: its place and shape in the model, and its names in files.

    `path` leads to the variable: the name of the model's layer, then attributes.
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

    No format knows of a soft prompt: other readers pass it over, and run the T5 that it
    was tuned for.
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
        suffix = {"kernel": "/kernel", "weight": "/scale"}.get(path.rpartition("/")[2])
        found.append(
            Weight(
                place + path,
                tuple(sizes[each] for each in shape),
                f"{block}{theirs}.weight",
                f"target/{t5x}{name}{suffix or ''}",
                _keras_name(place + path, config.num_layers),
            )
        )

    for row in _MODEL[: 1 if config.tied or encoder_only else 2]:
        add(row)
    gated = config.version != "1.0"
    for side in ("encoder",) if encoder_only else ("encoder", "decoder"):
        decoder = side == "decoder"
        rows = _LAYER.format(
            own="self_attention" if decoder else "attention",
            cross="encoder_decoder_attention",
            last=2 if decoder else 1,
            wi="wi_0" if gated else "wi",
        ).split("\n")[1:-1]
        rows = [row for row in rows if decoder or "cross" not in row]
        for layer in range(config.num_layers):
            place, block = f"transformer_{side}_layer_{layer}/", f"{side}.block.{layer}"
            if layer == 0:
                add(_POSITIONS, place, f"{block}.layer.", f"{side}/")
            for row in rows:
                if gated or "gate" not in row:
                    add(row, place, f"{block}.layer.", f"{side}/layers_{layer}/")
        final = f"{side}.final_layer_norm {side}/{side}_norm hidden"
        add(f"{side}_output_layer_norm/weight {final}")
    if soft_prompt:
        shape = (soft_prompt, config.hidden_dim)
        found.append(Weight("soft_prompt/vectors", shape, *(SOFT_PROMPT,) * 3))
    return found


def variable_of(model: tf.keras.Model, weight: Weight) -> Any:
    """Returns a weight's variable, or LoRA's kernel with its update, as a tensor.

    `model` is a backbone or an encoder.
    """
    first, *rest, last = weight.path.split("/")
    owner = functools.reduce(getattr, rest, model.get_layer(first))
    return owner.merge() if hasattr(owner, "merge") else getattr(owner, last)


def stored_values(
    model: tf.keras.Model,
    config: T5Config,
    form: str,
    dtype: str = "float32",
    encoder_only: bool = False,
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields names and values of a backbone's weights as a format stores them.

    Raises InputError if a value is NaN or infinite, or becomes so in `dtype`.
    """
    prompt = getattr(model, "soft_prompt", None)
    length = 0 if prompt is None else prompt.length
    for weight in weights_of(config, encoder_only, length):
        value = tf.cast(tf.convert_to_tensor(variable_of(model, weight)), dtype)
        if not tf.reduce_all(tf.math.is_finite(value)):
            raise validation.InputError(
                f"weight {weight.huggingface} is not finite in {dtype}. Use weights "
                "from before training diverged, or a dtype with a larger range."
            )
        array = value.numpy()
        array = array.T if weight.transposed(form) else array
        yield getattr(weight, form), np.ascontiguousarray(array)


def _keras_name(path: str, num_layers: int) -> str:
    """Returns the dataset of the weight at `path`.

    Keras counts layers of one class in the order in which the model calls them.
    """
    first, *rest, last = path.split("/")
    if first == "token_embedding":
        return f"layers/reversible_embedding/vars/{int(last != 'embeddings')}"
    decoder = "decoder" in first
    if not rest and "norm" in first:
        return f"layers/t5_layer_norm{'_1' if decoder else ''}/vars/0"
    number = int(first.rpartition("_")[2]) + (num_layers if decoder else 0)
    layer = f"layers/t5_transformer_layer{f'_{number}' if number else ''}"
    return "/".join([layer, *rest, "vars/0"])
