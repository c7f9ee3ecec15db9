"""Layers that are rematerialised: recorded when they run for the second time.

In the forward pass such a layer keeps nothing, factors included. When its gradient is
asked for it runs again, now by the rules of the layers inside and on a tape of its own,
and what every example's gradient is made of is known as soon as that part's backward
pass is done. What is small, as a LoRA update's gradients are, is formed right then;
large factors must be kept until all norms are known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdpsq.keras_choice import keras2 as keras
from tfdpsq.privacy.fast.recorder import Recorder
from tfdpsq.rematerialization import rematerialized


def recorded_again(
    layer: keras.layers.Layer, record: Recorder, capture: Callable[..., Any]
) -> Callable[..., Any]:
    """Replaces the `call` of a layer that is rematerialised.

    Args:
      layer: with `rematerialize` and `pieces`; see `tfdpsq.rematerialization`.
      record: what the rules of the layers inside write to.
      capture: makes those layers run by their rules, once more.
    """

    def call(*args, **kwargs):
        function, tensors = layer.pieces(*args, **kwargs)
        # `check` compares what is recorded, so it must be recorded the first time.
        if not layer.rematerialize or record.comparing:
            return function(*tensors)

        def silent(*given):
            with record.silent():
                return function(*given)

        return rematerialized(silent, tensors, differentiate(function))

    def differentiate(function):
        def gradients_of(_, given, upstream, variables):
            sources = [tensor for tensor in given if tensor.dtype.is_floating]
            by_source: list[tf.Tensor | None] = []
            tape = tf.GradientTape()
            with record.part(tape):
                with tape, capture(layer.submodules, record):
                    tape.watch(sources)
                    outputs = tf.nest.flatten(function(*given))

                def gradients_by(targets):
                    found = tape.gradient(
                        outputs, [*sources, *targets], output_gradients=list(upstream)
                    )
                    by_source.extend(found[: len(sources)])
                    return found[len(sources) :]

                record.finish_part(gradients_by)
            # The rules have seen to every variable.
            return [*by_source, *(None for _ in variables)]

        return gradients_of

    return call
