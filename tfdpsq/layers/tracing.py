"""Tracing without autograph, which costs seconds whenever Keras traces a model."""

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
