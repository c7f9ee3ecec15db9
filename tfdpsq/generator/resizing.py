"""A T5 of another size, made from one that has been trained.

Growing keeps the function: a new layer is a copy of the one before it whose output
projections are zero, so that its residual blocks add nothing yet, and a new unit of a
feed-forward layer has weights out of zero (Chen et al. 2016, *Net2Net*; Gong et al.
2019 on stacking). Shrinking does not keep it. Either way the model is then to be
trained further on public text, which costs a fraction of training it from nothing.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np

from tfdpsq import validation
from tfdpsq.generator.checkpoints import slots as t5_slots
from tfdpsq.generator.model import T5QueryGenerator

_BLOCK = re.compile(r"(?<=\.block\.)\d+")
# What a residual block adds to the stream, and what a feed-forward layer is made of.
_OUTPUTS = (".o.weight", ".wo.weight")
_INNER = (".wi.weight", ".wi_0.weight", ".wi_1.weight")


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
    for field, number in (
        ("num_layers", num_layers),
        ("intermediate_dim", intermediate_dim),
    ):
        if number:
            validation.positive_integer(field, number)
    if model.backbone.soft_prompt is not None:
        raise validation.InputError(
            "the generator has a soft prompt, which is trained for its size. Resize "
            "the T5 that it started from."
        )
    old = model.config
    config = dataclasses.replace(
        old,
        num_layers=num_layers or old.num_layers,
        intermediate_dim=intermediate_dim or old.intermediate_dim,
    )
    values = {
        slot.name: t5_slots.variable_of(model.backbone, slot).numpy()
        for slot in t5_slots.slots(old)
    }
    origins = _origins(old.num_layers, config.num_layers)
    units = (
        {}
        if config.intermediate_dim >= old.intermediate_dim
        else _kept(values, config.intermediate_dim)
    )
    random = np.random.default_rng(seed)
    made = T5QueryGenerator(config, model.get_config()["dtype"])
    for slot in t5_slots.slots(config):
        source, copied = slot.name, False
        block = _BLOCK.search(slot.name)
        if block:
            layer, copied = origins[int(block.group())]
            source = _BLOCK.sub(str(layer), slot.name)
        value = values[source]
        if source.endswith(_INNER):
            value = _columns(value, units.get(_feed(source)), slot.shape[1], random)
        elif source.endswith(".wo.weight"):
            value = _rows(value, units.get(_feed(source)), slot.shape[0])
        if copied and source.endswith(_OUTPUTS):
            value = np.zeros_like(value)
        t5_slots.variable_of(made.backbone, slot).assign(value)
    return made


def _origins(old: int, new: int) -> list[tuple[int, bool]]:
    """Maps each new layer to its old one, and whether that one was used twice.

    The first layer stays the first: its position bias is all layers'.
    """
    if new <= old:
        steps = max(new - 1, 1)
        return [(round(layer * (old - 1) / steps), False) for layer in range(new)]
    found = [layer * old // new for layer in range(new)]
    return [(layer, layer in found[:place]) for place, layer in enumerate(found)]


def _feed(name: str) -> str:
    """The feed-forward layer that a weight belongs to."""
    return name.rpartition(".DenseReluDense.")[0]


def _kept(values: dict[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    """Layer -> [count] the units that stay, in their order."""
    sizes: dict[str, np.ndarray] = {}
    for name, value in values.items():
        if name.endswith((*_INNER, ".wo.weight")):
            axis = 1 if name.endswith(".wo.weight") else 0
            norm = np.linalg.norm(value, axis=axis)
            sizes[_feed(name)] = sizes.get(_feed(name), 1.0) * norm
    return {name: np.sort(np.argsort(-size)[:count]) for name, size in sizes.items()}


def _columns(
    value: np.ndarray, units: np.ndarray | None, count: int, random: np.random.Generator
) -> np.ndarray:
    """[hidden, count] weights into the units: those that stay, or new random ones."""
    if units is not None:
        return value[:, units]
    new = random.normal(0.0, value.std(), (len(value), count - value.shape[1]))
    return np.concatenate([value, new.astype(value.dtype)], axis=1)


def _rows(value: np.ndarray, units: np.ndarray | None, count: int) -> np.ndarray:
    """[count, hidden] weights out of the units; new ones add nothing yet."""
    if units is not None:
        return value[units]
    return np.pad(value, [(0, count - len(value)), (0, 0)])
