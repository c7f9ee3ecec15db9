"""The points of a grid over a stage's settings."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import ml_collections

from tfdpsq import validation
from tfdpsq.run.core import workdir

# Commands whose settings a grid can vary.
STAGES = ("finetune", "train_retriever")


@dataclasses.dataclass(frozen=True)
class Point:
    """A point of a grid.

    Attributes:
      name: of its files.
      settings: those it varies.
      stage: the config that the stage takes.
    """

    name: str
    settings: Mapping[str, Any]
    stage: ml_collections.ConfigDict


def check_axes(name: str, axes: Any) -> None:
    """Refuses axes that are not (dotted name of a setting, values); names the axis."""
    if not isinstance(axes, (tuple, list)):
        raise validation.InputError(
            f"{name} is {validation.shown(axes)}; it must be a tuple of (setting, "
            'values), such as (("learning_rate", (1e-3, 2e-3)),).'
        )
    for number, axis in enumerate(axes):
        pair = isinstance(axis, (tuple, list)) and len(axis) == 2
        values = pair and isinstance(axis[1], (tuple, list)) and len(axis[1]) > 0
        if not values or not isinstance(axis[0], str):
            raise validation.InputError(
                f"{name}[{number}] is {validation.shown(axis)}; it must be (setting, "
                'values), such as ("learning_rate", (1e-3, 2e-3)).'
            )


def check_variants(name: str, variants: Any) -> None:
    """Refuses variants that are not mappings from names to settings."""
    kinds = (ml_collections.ConfigDict, Mapping)
    whole = isinstance(variants, kinds)
    for key, own in variants.items() if whole else ():
        plain = isinstance(key, str) and key.strip("./") == key and "/" not in key
        if not plain or not key or not isinstance(own, kinds):
            raise validation.InputError(
                f"{name} maps {validation.shown(key)} to {validation.shown(own)}; it "
                'must map names of files to settings, such as {"all": {}}.'
            )
    if not whole:
        raise validation.InputError(
            f"{name} is {validation.shown(variants)}; it must map names to "
            'settings, such as {"all": {}}.'
        )


def points_of(config: ml_collections.ConfigDict, varied: str) -> Iterator[Point]:
    """Yields every point of `config`, whose section `varied` is that of the stage.

    Raises:
      InputError: an unknown stage, or a setting that it does not have.
    """
    validation.one_of("stage", varied, STAGES)
    fields = [field for field, _ in config.axes]
    for variant, own in config.variants.to_dict().items():
        for values in itertools.product(*(values for _, values in config.axes)):
            settings = {**_flat(own), **dict(zip(fields, values))}
            stage = config[varied].copy_and_resolve_references()
            for field, value in settings.items():
                _set(stage, field, value, varied)
            text = json.dumps(workdir.plain(stage), sort_keys=True)
            digest = hashlib.sha256(text.encode()).hexdigest()[:8]
            yield Point(f"{variant}-{digest}", {"variant": variant, **settings}, stage)


def _flat(settings: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Returns nested settings by their dotted names."""
    flat = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{before}{name}."))
        else:
            flat[before + name] = value
    return flat


def _set(config: ml_collections.ConfigDict, field: str, value: Any, stage: str) -> None:
    *path, last = field.split(".")
    node = config
    try:
        for part in path:
            node = node[part]
        if last not in node:  # a ConfigDict that is not locked would add it
            raise KeyError(f"there is no {field!r}")
        if isinstance(node[last], ml_collections.ConfigDict):
            one = next(iter(node[last]))
            raise KeyError(f"set one value of it, such as '{field}.{one}'")
        node[last] = value
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise validation.InputError(
            f"the grid sets {field!r} to {validation.shown(value)}, which {stage} does "
            f"not take ({error}). Its fields: {', '.join(sorted(config))}."
        ) from error
