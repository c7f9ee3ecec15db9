"""Tracing without autograph.

Keras converts the `call` of every subclassed layer, and all that it calls. The models
of this package branch on Python values only, so the conversion changes nothing, and
costs seconds whenever a model is built or traced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

_Function = TypeVar("_Function", bound=Callable[..., Any])


def without_autograph(function: _Function) -> _Function:
    """Decorates a function that branches on no tensor, so that autograph leaves it.

    Unlike `tf.autograph.experimental.do_not_convert` alone it keeps the signature that
    Keras reads to see which arguments a layer's `call` takes.
    """
    return tf.__internal__.decorator.make_decorator(
        function, tf.autograph.experimental.do_not_convert(function)
    )
