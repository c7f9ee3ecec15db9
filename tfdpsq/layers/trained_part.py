"""Trains a part of a model's weights, such as its norms and biases.

Under differential privacy the noise's norm grows with the square root of the number of
trained weights, so training few can beat training all (BitFit, Zaken et al. 2021,
arXiv:2106.10199, trains biases).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfdpsq.keras_choice import is_keras_2, keras, require_keras_2
from tfdpsq.validation import InputError


def train_only(model: keras.Model, patterns: Sequence[str]) -> list[str]:
    """Freezes every weight that matches no pattern; apply it before the first trace.

    A weight's path consists of the names of the enclosing layers, without the model's
    own, and the weight's name, such as
    "t5_backbone/transformer_decoder_layer_0/self_attention/query_projector/kernel".

    Args:
      model: a built model; it is changed in place. Frozen weights stay frozen.
      patterns: patterns of whole paths as in `fnmatch`: "*" is any text, "/" included,
        so that "*layer_norm*" matches all weights of all norms, and "*" everything.
        Avoid numbers in names that Keras gave: it counts per process.

    Returns:
      The paths of the weights that are trained. A weight that layers share is listed
      once, at its first path.

    Raises:
      InputError: Keras 3, or a pattern that matches no trainable weight. The model is
        then unchanged.
    """
    require_keras_2("train_only", model)
    first: dict[int, str] = {}
    found = list(trainable_weights(model))
    for path, weight, _ in found:
        first.setdefault(id(weight), path)
    paths = list(first.values())
    require_matches("trained", patterns, paths, "trainable weight", "['*norm*']")
    kept = {number for number, path in first.items() if matches(path, patterns)}
    for _, weight, layer in found:
        if id(weight) not in kept:
            freeze_weights(layer, weight)
    return [path for number, path in first.items() if number in kept]


def matches(path: str, patterns: Sequence[str]) -> bool:
    """Returns whether a path matches a pattern, as in `fnmatch`, case-sensitively."""
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def require_matches(
    name: str, patterns: Sequence[str], paths: Sequence[str], what: str, example: str
) -> None:
    """Requires a list of patterns each of which matches a path."""
    if isinstance(patterns, str) or not patterns:
        raise InputError(f"{name} is {patterns!r}; give patterns, such as {example}.")
    for pattern in patterns:
        if not any(matches(path, [pattern]) for path in paths):
            some = ", ".join(paths[:8]) + (", …" if len(paths) > 8 else "")
            raise InputError(
                f"{name} holds {pattern!r}, which matches no {what}. There are "
                f"{len(paths)}: {some or 'none'}."
            )


def freeze_weights(layer: keras.layers.Layer, only: tf.Variable | None = None) -> None:
    """Makes a layer's own weights, or one, non-trainable; not its `trainable`."""
    if is_keras_2():
        trained, frozen = layer._trainable_weights, layer._non_trainable_weights
    else:
        trained, frozen = layer._trainable_variables, layer._non_trainable_variables
    for weight in [w for w in trained if only is None or w is only]:
        if not is_keras_2():
            weight.trainable = False
        frozen.append(weight)
        del trained[[id(w) for w in trained].index(id(weight))]


def trainable_weights(
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
        yield from trainable_weights(child, f"{path}{child.name}/", seen)
