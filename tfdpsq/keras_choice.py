"""Chooses the Keras that `tfdpsq.layers` and `tfdpsq.privacy` are built on.

`keras` is Keras 2 where there is one: `tf.keras` up to TensorFlow 2.15, else the
package `tf_keras`. Without it, or with TF_USE_LEGACY_KERAS=0, it is Keras 3, on which
some layers work. `keras2` is Keras 2, or cannot be imported.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tfdpsq.validation import InputError

try:
    import tensorflow as tf
except ImportError as error:
    raise ImportError(
        "TensorFlow is missing: pip install 'tfdpsq[layers]' or 'tfdpsq[privacy]'."
    ) from error

_NEEDED = "needs Keras 2: pip install tf_keras, and do not set TF_USE_LEGACY_KERAS=0"


def _choose() -> Any:
    wanted = os.environ.get("TF_USE_LEGACY_KERAS", "").lower() not in ("0", "false")
    try:
        own = tf.keras
    except ImportError:  # TensorFlow looks for Keras only now
        own = None
    if own is None or wanted and not issubclass(own.layers.Layer, tf.Module):
        try:
            import tf_keras

            return tf_keras
        except ModuleNotFoundError as error:
            if own is None or error.name != "tf_keras":
                raise ImportError(f"tfdpsq {_NEEDED} ({error}).") from error
    return own


if TYPE_CHECKING:
    from tensorflow import keras

    keras2 = keras
else:
    keras = _choose()

    def __getattr__(name: str) -> Any:
        """Returns Keras 2 as `keras2`, or raises what to install."""
        if name != "keras2":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if not is_keras_2():
            raise ImportError(f"This part of tfdpsq {_NEEDED}.")
        return keras


def is_keras_2() -> bool:
    """Returns whether `keras` is Keras 2."""
    return issubclass(keras.layers.Layer, tf.Module)


def require_keras_2(what: str, model: Any) -> None:
    """Refuses, for function `what`, Keras 3 and a model of another Keras."""
    if not is_keras_2():
        raise InputError(f"{what} {_NEEDED}.")
    require_own("model", model)


def require_own(name: str, layer: Any) -> None:
    """Refuses a layer or model of another Keras than `keras`; other objects pass."""
    if isinstance(layer, keras.layers.Layer):
        return
    own = keras.layers.Layer.__module__.partition(".")[0]
    for base in type(layer).__mro__:
        package = base.__module__.partition(".")[0]
        if base.__name__ == "Layer" and package in ("keras", "tf_keras"):
            raise InputError(
                f"{name} is a {type(layer).__name__} of another Keras, the package "
                f"{package}; build it with {own}, which tfdpsq works on here."
            )
