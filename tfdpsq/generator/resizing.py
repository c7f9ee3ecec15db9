"""A T5 of another size, made from one that has been trained.

Growing keeps the function: a new layer is a copy of the one before it whose output
projections are zero, so that its residual blocks add nothing yet, and a new unit of a
feed-forward layer has weights out of zero (Chen et al. 2016, *Net2Net*; Gong et al.
2019 on stacking). Shrinking does not keep it. Either way the model is then to be
trained further on public text, which costs a fraction of training it from nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.generator.model import T5QueryGenerator


def resized(
    model: T5QueryGenerator,
    num_layers: int = 0,
    intermediate_dim: int = 0,
    seed: int = 0,
) -> T5QueryGenerator:
    """Returns a T5 with other numbers of layers or feed-forward units, and its dtype.

    More of them: the same function as `model`'s, to rounding. Fewer layers: those that
    are spread evenly, first to last. Fewer units: in each layer those with the
    largest product of the norms of their weights in and out.

    Args:
      model: a generator of float32 weights without a soft prompt.
      num_layers: of the encoder, and again of the decoder; 0 keeps them.
      intermediate_dim: feed-forward units of each; 0 keeps them.
      seed: of the weights into new units.

    Raises:
      InputError: a number below 0, or a soft prompt.
    """
    given = {"num_layers": num_layers, "intermediate_dim": intermediate_dim}
    changes: dict[str, Any] = {name: n for name, n in given.items() if n}
    for name, number in changes.items():
        validation.positive_integer(name, number)
    if model.backbone.soft_prompt is not None:
        raise validation.InputError(
            "the generator has a soft prompt, which is trained for its size. Resize "
            "the T5 that it started from."
        )
    config = dataclasses.replace(model.config, **changes)
    made = T5QueryGenerator(config, model.get_config()["dtype"])
    made.preprocessor = model.preprocessor
    random = np.random.default_rng(seed)
    origins = _origins(model.config.num_layers, config.num_layers)
    old, new = model.backbone, made.backbone
    _copy(old.token_embedding, new.token_embedding)
    for side in ("encoder", "decoder"):
        norm = f"{side}_layer_norm"
        _copy(getattr(old, norm), getattr(new, norm))
        layers = (getattr(one, f"{side}_transformer_layers") for one in (old, new))
        sources, targets = layers
        for (origin, again), target in zip(origins, targets):
            _copy_layer(sources[origin], target, again, random)
    return made


def _origins(old: int, new: int) -> list[tuple[int, bool]]:
    """Maps each new layer to its old one, and whether that one was used before.

    The first layer stays the first: its position bias is all layers'.
    """
    if new <= old:
        steps = max(new - 1, 1)
        return [(round(layer * (old - 1) / steps), False) for layer in range(new)]
    found = [layer * old // new for layer in range(new)]
    return [(layer, layer in found[:place]) for place, layer in enumerate(found)]


def _copy(source: Any, target: Any) -> None:
    target.set_weights(source.get_weights())


def _copy_layer(
    source: Any, target: Any, again: bool, random: np.random.Generator
) -> None:
    """Copies a layer; one that is copied again adds nothing to the stream."""
    outputs = [target.output_projector]
    for attention in ("self_attention", "cross_attention")[: 1 + target.is_decoder]:
        ours, theirs = getattr(target, attention), getattr(source, attention)
        norm = f"{attention}_layer_norm"
        _copy(getattr(source, norm), getattr(target, norm))
        for role in ("query", "key", "value", "output"):
            name = f"{role}_projector"
            _copy(getattr(theirs, name), getattr(ours, name))
        if ours.use_relative_attention_bias:
            ours.relative_attention_bias.assign(theirs.relative_attention_bias)
        outputs.append(ours.output_projector)
    _copy(source.layer_norm, target.layer_norm)
    names = ["input_projector", "gate_projector"][: 1 + source.use_gated_activation]
    inner = [getattr(source, name).kernel.numpy() for name in names]
    out = source.output_projector.kernel.numpy()
    # Fewer units: the largest stay, in their order. More: new ones add nothing yet.
    units = target.output_projector.kernel.shape[0]
    sizes = np.prod([np.linalg.norm(kernel, axis=0) for kernel in inner], axis=0)
    sizes *= np.linalg.norm(out, axis=1)
    kept = np.sort(np.argsort(-sizes)[:units])
    missing = max(0, units - len(sizes))
    for name, kernel in zip(names, inner):
        new = random.normal(0.0, kernel.std(), (len(kernel), missing))
        kernel = np.concatenate([kernel[:, kept], new], axis=1)
        getattr(target, name).kernel.assign(tf.cast(kernel, tf.float32))
    target.output_projector.kernel.assign(np.pad(out[kept], [(0, missing), (0, 0)]))
    for dense in outputs if again else ():
        dense.kernel.assign(tf.zeros_like(dense.kernel))
