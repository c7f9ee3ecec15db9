"""The points of a grid over a stage's settings."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import ml_collections

from tfdpsq import validation
from tfdpsq.run.core import workdir

# Commands whose settings a grid varies.
STAGES = ("finetune", "train_retriever")


def points_of(
    config: ml_collections.ConfigDict,
) -> Iterator[tuple[str, dict[str, Any], ml_collections.ConfigDict]]:
    """(name, settings, the stage's config) of every point.

    Raises:
      InputError: an unknown stage, or a setting that it does not have.
    """
    validation.one_of("stage", config.stage, STAGES)
    fields = [field for field, _ in config.axes]
    for variant, own in config.variants.to_dict().items():
        for values in itertools.product(*(values for _, values in config.axes)):
            settings = {**_flat(own), **dict(zip(fields, values))}
            stage = config[config.stage].copy_and_resolve_references()
            for field, value in settings.items():
                _set(stage, field, value, config.stage)
            text = json.dumps(workdir.plain(stage), sort_keys=True)
            digest = hashlib.sha256(text.encode()).hexdigest()[:8]
            yield f"{variant}-{digest}", {"variant": variant, **settings}, stage


def _flat(settings: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names."""
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
        if last not in node:  # it would be added without a word
            raise KeyError(f"there is no {field!r}")
        node[last] = value
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise validation.InputError(
            f"the grid sets {field!r} to {value!r}, which {stage} does not take "
            f"({error}). Its fields: {', '.join(sorted(config))}."
        ) from error
