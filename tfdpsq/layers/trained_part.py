"""Trains a part of a model's weights, such as its norms and biases.

Under differential privacy the noise's norm grows with the square root of the number of
trained weights, so training few of them can beat training all (for "norms and biases"
see BitFit, Zaken et al. 2021, arXiv:2106.10199).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.keras_choice import keras, require_keras_2, require_own


def train_only(model: keras.Model, patterns: Sequence[str]) -> list[str]:
    """Freezes every weight that matches no pattern; apply it before the first trace.

    A weight's path consists of the names of the enclosing layers, without the model's
    own, and the weight's name, such as
    "t5_backbone/transformer_decoder_layer_0/self_attention/query_projector/kernel".

    Args:
      model: a built model; it is changed in place. Frozen weights stay frozen.
      patterns: patterns of whole paths as in `fnmatch`: "*" is any text, "/" included,
        so that "*layer_norm*" matches all weights of all norms, and "*" everything.
        Avoid the number of a norm inside a T5 layer: Keras counts those per process.

    Returns:
      The paths of the weights that are trained. A weight that layers share is listed
      once, at its first path.

    Raises:
      InputError: no patterns, or one that matches no trainable weight; the message
        lists some paths. The model is then unchanged.
    """
    require_keras_2("train_only")
    require_own("model", model)
    first: dict[int, str] = {}
    owners: dict[int, list[keras.layers.Layer]] = {}
    for path, weight, layer in _walk(model):
        first.setdefault(id(weight), path)
        owners.setdefault(id(weight), []).append(layer)
    paths = list(first.values())
    require_matches(
        "trained",
        patterns,
        paths,
        "trainable weight",
        "['*layer_norm*'], or ['*'] for all weights",
    )
    kept = {number for number, path in first.items() if matches(path, patterns)}
    for number in first.keys() - kept:
        for layer in owners[number]:
            _freeze(layer, number)
    return [path for number, path in first.items() if number in kept]


def matches(path: str, patterns: Sequence[str]) -> bool:
    """Returns whether a path matches a pattern, as in `fnmatch`, case-sensitively."""
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def require_matches(
    name: str, patterns: Sequence[str], paths: Sequence[str], what: str, example: str
) -> None:
    """Checks that there are patterns and that each matches a path.

    Args:
      name: name of the setting that holds them, for the message.
      patterns: the setting's value.
      paths: all paths.
      what: what a path leads to, such as "trainable weight", for the message.
      example: a valid value, for the message.

    Raises:
      InputError: no patterns, text instead of a list, or a pattern without a match;
        the message lists some paths.
    """
    if isinstance(patterns, str) or not patterns:
        raise validation.InputError(
            f"{name} is {patterns!r}; give a list of patterns, such as {example}."
        )
    for pattern in patterns:
        if not any(matches(path, [pattern]) for path in paths):
            shown = ", ".join(paths[:8]) + (", …" if len(paths) > 8 else "")
            raise validation.InputError(
                f"{name} holds {pattern!r}, which matches no {what}. There are "
                f"{len(paths)}: {shown or 'none'}."
            )


def _freeze(layer: keras.layers.Layer, number: int) -> None:
    """Makes a layer's own weight non-trainable, by its `id`."""
    trained = layer._trainable_weights
    place = [id(weight) for weight in trained].index(number)
    layer._non_trainable_weights.append(trained.pop(place))


def _walk(
    layer: keras.layers.Layer, path: str = "", seen: set[int] | None = None
) -> Iterator[tuple[str, tf.Variable, keras.layers.Layer]]:
    """Yields (path, weight, layer) for every trainable weight, each layer once."""
    seen = set() if seen is None else seen
    if id(layer) in seen or not layer.trainable:
        return
    seen.add(id(layer))
    for weight in layer._trainable_weights:
        yield f"{path}{weight.name.split('/')[-1].split(':')[0]}", weight, layer
    for child in layer._flatten_layers(recursive=False, include_self=False):
        yield from _walk(child, f"{path}{child.name}/", seen)
