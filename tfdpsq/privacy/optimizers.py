"""Plain Keras optimizers in a logical step.

They get the noised mean gradient: what they make of it is post-processing. Any will do,
new or legacy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.keras_choice import keras2 as keras
from tfdpsq.keras_choice import require_own
from tfdpsq.privacy.adafactor import T5XAdafactor

# By the names that stages take.
OPTIMIZERS = {
    "adam": keras.optimizers.Adam,
    "adafactor": keras.optimizers.Adafactor,
    "sgd": keras.optimizers.SGD,
    "t5x_adafactor": T5XAdafactor,
}
_LEGACY = keras.optimizers.legacy.Optimizer


def require_new(optimizer: Any, steps: int) -> None:
    """Raises an InputError for a used or DP optimizer, or one without a finite rate."""
    require_own("optimizer", optimizer)
    if not isinstance(optimizer, (keras.optimizers.Optimizer, _LEGACY)):
        raise validation.InputError(
            f"optimizer is a {type(optimizer).__name__}. Give a Keras optimizer, such "
            "as tf.keras.optimizers.Adam(1e-3)."
        )
    if hasattr(optimizer, "_was_dp_gradients_called"):
        raise validation.InputError(
            f"optimizer is tensorflow-privacy's {type(optimizer).__name__}, which adds "
            "noise once more. Give Keras's own."
        )
    if int(tf.convert_to_tensor(optimizer.iterations)):
        raise validation.InputError("the optimizer has taken steps. Make a new one.")
    rate = _rate_of(optimizer)
    for step in np.linspace(0, steps - 1, min(steps, 200)).astype(int).tolist():
        found = rate(tf.constant(step, tf.int64)) if callable(rate) else rate
        value = np.float32(found)
        if not 0 <= value < np.inf:
            raise validation.InputError(
                f"learning_rate is {value} at step {step}. Give finite rates from 0 on."
            )


def _rate_of(optimizer: Any) -> Any:
    """Returns an optimizer's learning rate, or its schedule."""
    held = getattr(optimizer, "_hyper", None) or vars(optimizer)  # legacy, new
    rate = held.get("learning_rate", held.get("_learning_rate"))
    return rate if not isinstance(rate, tf.Variable) else rate.numpy()


def settings_of(optimizer: Any) -> dict[str, str]:
    """Returns an optimizer's configuration, but for jit_compile, which Keras sets."""
    try:
        config = optimizer.get_config()
    except NotImplementedError:  # of a schedule that somebody wrote
        config = {"learning_rate": repr(_rate_of(optimizer))}
    return {k: repr(v) for k, v in sorted(config.items()) if k != "jit_compile"}


def build(optimizer: Any, variables: Sequence[tf.Variable]) -> list[tf.Variable]:
    """Creates and returns the optimizer's variables, in a fixed order."""
    if isinstance(optimizer, _LEGACY):
        optimizer._create_all_weights(variables)
        return list(optimizer.weights)
    optimizer.build(variables)
    return list(optimizer.variables)


def apply(
    optimizer: Any, gradients: Sequence[tf.Tensor], variables: Sequence[tf.Variable]
) -> None:
    """Applies a gradient that is the same on all replicas; counts one iteration."""
    pairs = [(tf.cast(g, v.dtype), v) for g, v in zip(gradients, variables)]
    if isinstance(optimizer, _LEGACY):
        optimizer.apply_gradients(pairs, experimental_aggregate_gradients=False)
    else:
        optimizer.apply_gradients(pairs, skip_gradients_aggregation=True)
