"""Chooses the Keras that `tfdpsq.layers` and `tfdpsq.privacy` are built on.

`keras` is Keras 2 where there is one: `tf.keras` up to TensorFlow 2.15, and wherever
TF_USE_LEGACY_KERAS=1 makes it so; else the package `tf_keras`, whatever `tf.keras` is.
Without either, or where TF_USE_LEGACY_KERAS=0 asks for it, `keras` is Keras 3, on which
the layers work that need nothing of Keras 2's inside. `keras2` is Keras 2, or cannot be
imported. Nothing is decided by a version number, and nothing global is set.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tfdpsq.validation import InputError

try:
    import tensorflow as tf
except ImportError as error:
    raise ImportError(
        f"tfdpsq.layers and tfdpsq.privacy need TensorFlow, which does not import here "
        f"({error}). Install one of:\n"
        "  pip install 'tfdpsq[layers]'   (the layers)\n"
        "  pip install 'tfdpsq[privacy]'  (the engine, too)"
    ) from error

# The standard switch of TensorFlow 2.16 and later for what `tf.keras` is.
_SWITCH = "TF_USE_LEGACY_KERAS"
_NO_KERAS_2 = (
    "needs Keras 2, and `tf.keras` is Keras 3 here: pip install tf_keras, in the "
    f"version of TensorFlow, build the model with it, and do not set {_SWITCH}=0"
)


def _tf_keras() -> Any:
    try:
        import tf_keras
    except ModuleNotFoundError as error:
        if error.name != "tf_keras":
            raise
        return None
    except Exception as error:
        raise ImportError(
            f"tf_keras is installed and does not import ({error}): pip install the "
            f"version of it that belongs to TensorFlow {tf.__version__}."
        ) from error
    return tf_keras


def _choose() -> Any:
    try:
        own = tf.keras
        is_keras_2 = issubclass(own.layers.Layer, tf.Module)
    except ImportError:  # TensorFlow looks for Keras only now
        own, is_keras_2 = None, False
    if is_keras_2:
        return own
    if own is None or os.environ.get(_SWITCH, "").lower() not in ("0", "false"):
        found = _tf_keras()
        if found is not None:
            return found
    if own is None:
        raise ImportError(
            "TensorFlow finds no Keras here: pip install tf_keras, in the version of "
            f"TensorFlow, {tf.__version__}."
        )
    if own.config.backend() != "tensorflow":
        raise ImportError(
            f"Keras 3 runs on {own.config.backend()} here, and tfdpsq's layers need "
            "its TensorFlow backend: set KERAS_BACKEND=tensorflow before Keras is "
            "imported, or pip install tf_keras."
        )
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
            raise ImportError(f"This part of tfdpsq {_NO_KERAS_2}.")
        return keras


def is_keras_2() -> bool:
    """Returns whether `keras` is Keras 2."""
    return issubclass(keras.layers.Layer, tf.Module)


def require_keras_2(what: str) -> None:
    """Refuses what works by Keras 2's insides where `keras` is Keras 3.

    Args:
      what: the subject of the message.

    Raises:
      InputError: `keras` is Keras 3.
    """
    if not is_keras_2():
        raise InputError(f"{what} {_NO_KERAS_2}.")


def require_own(name: str, layer: Any) -> None:
    """Refuses a layer or model of another Keras than `keras`.

    Args:
      name: of the argument, for the message.
      layer: anything; what comes from no Keras passes.

    Raises:
      InputError: it was built with another Keras.
    """
    if isinstance(layer, keras.layers.Layer):
        return
    for base in type(layer).__mro__:
        package = base.__module__.partition(".")[0]
        if base.__name__ == "Layer" and package in ("keras", "tf_keras"):
            version = 2 if issubclass(base, tf.Module) else 3
            own = keras.layers.Layer.__module__.partition(".")[0]
            own = own if own == "tf_keras" else "tf.keras"
            raise InputError(
                f"{name} is a {type(layer).__name__} of Keras {version}'s package "
                f"{package}, and tfdpsq works on Keras {2 if is_keras_2() else 3} "
                f"here: build it with {own}"
                + f", or set {_SWITCH}=1 before TensorFlow is imported" * (version == 2)
                + "."
            )
