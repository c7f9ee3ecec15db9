"""Runs the layers of a model by their rules, for as long as a forward pass lasts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.keras_choice import keras2 as keras
from tfdpsq.keras_choice import require_own
from tfdpsq.privacy.fast.recorder import Recorder, UncoveredError, replaced
from tfdpsq.privacy.fast.rules import Rule, couples_examples, rule_for
from tfdpsq.rematerialization import rematerialized


def converted(function: Callable, context: Any = None) -> Callable:
    """Converts a caller's function, which may branch on tensors, by autograph.

    This package's own code needs none, and is traced a third faster without.

    Args:
      function: the caller's.
      context: autograph's; that of the calling code by default.
    """
    context = context or tf.__internal__.autograph.control_status_ctx()
    return tf.__internal__.autograph.tf_convert(function, context)


@contextlib.contextmanager
def capture(layers: Iterable[tf.Module], recorder: Recorder) -> Iterator[None]:
    """While inside, every layer that has a rule and a wanted weight runs by it.

    The others run as ever: frozen layers cost nothing and need no rule. A weight
    that is wanted and escapes all the same, say in a list of weights, is found as
    a read outside every rule.

    Args:
      layers: models and layers; those inside them, however deep, count too.
      recorder: what the rules write to.
    """
    with contextlib.ExitStack() as stack:
        for layer in flatten(layers):
            call = _recorded(layer, recorder)
            if call is not None and (
                couples_examples(layer) or _has_wanted_weight(layer, recorder)
            ):
                # Plain Python about tensors: nothing in it needs converting.
                call = tf.autograph.experimental.do_not_convert(call)
                stack.enter_context(replaced(layer, call=call))
        yield


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """While inside, an `InputError` of what is traced is raised as it was.

    Autograph raises it again, with a whole traceback for a message.
    """
    try:
        yield
    except validation.InputError as error:
        while isinstance(error.__context__, validation.InputError):
            error = error.__context__
        raise error from None


def flatten(layers: Iterable[tf.Module]) -> list[keras.layers.Layer]:
    """The layers given and all that they are made of, each once.

    Raises:
      InputError: a layer of another Keras, or whose parts TensorFlow cannot list.
    """
    found: dict[int, keras.layers.Layer] = {}
    for root in layers:
        require_own("layers", root)
        try:
            modules = (root, *root.submodules)
        except ValueError as error:  # Keras's recurrent cells that drop
            raise validation.InputError(
                f"the parts of {root.name!r} cannot be listed, as of recurrent layers "
                "with dropout. Set their dropout and recurrent_dropout to 0, and use a "
                "Dropout layer."
            ) from error
        for module in modules:
            if isinstance(module, keras.layers.Layer):
                found.setdefault(id(module), module)
    return list(found.values())


def _has_wanted_weight(layer: keras.layers.Layer, recorder: Recorder) -> bool:
    for part in flatten([layer]):
        # Attributes, too: a layer may go by a weight that belongs to another.
        held = [
            value for value in vars(part).values() if isinstance(value, tf.Variable)
        ]
        if any(recorder.wants(weight) for weight in (*part._trainable_weights, *held)):
            return True
    return False


def _recorded(layer: keras.layers.Layer, recorder: Recorder) -> Callable | None:
    """Returns the replacement of the layer's `call`, or None."""
    rule = rule_for(layer)
    if rule is not None:
        return _by_rule(layer, rule, recorder)
    # A model may pass `rematerialize` on to layers without having pieces itself.
    if hasattr(layer, "rematerialize") and hasattr(layer, "pieces"):
        return _recorded_again(layer, recorder)
    return None


def _by_rule(layer: keras.layers.Layer, rule: Rule, record: Recorder) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        for part in tf.nest.flatten(args):
            if isinstance(part, (tf.RaggedTensor, tf.SparseTensor)):
                raise UncoveredError(
                    f"layer {layer.name!r} got a {type(part).__name__}, and rules are "
                    "for dense tensors. Pad ragged rows and make sparse ones dense."
                )
        args = tuple(_of_known_rows(value, record) for value in args)
        with replaced(record, layer=layer):
            output = rule(record, layer, *args, **kwargs)
        # A layer made of layers may hold dropout, and its parts are compared.
        if record.comparing and not layer.submodules:
            own = converted(type(layer).call, record.comparing)
            _compare(record, layer, output, own(layer, *args, **kwargs))
        return output

    return call


def _of_known_rows(value: Any, record: Recorder) -> Any:
    """A layer's input with its number of rows, which `TextVectorization` loses."""
    unknown = tf.is_tensor(value) and value.shape.rank and value.shape[0] is None
    if not unknown or not record.rows:
        return value
    return tf.ensure_shape(value, [record.rows * record.folded, *value.shape[1:]])


def _compare(record: Recorder, layer: keras.layers.Layer, one: Any, other: Any) -> None:
    """Notes how far two outputs of a layer differ, relative to the larger."""
    for a, b in zip(tf.nest.flatten(one), tf.nest.flatten(other)):
        a, b = tf.cast(a, tf.float64), tf.cast(b, tf.float64)
        size = tf.maximum(tf.reduce_max(tf.abs(b)), 1e-30)
        record.mismatches.append((layer.name, tf.reduce_max(tf.abs(a - b)) / size))


def _recorded_again(layer: keras.layers.Layer, record: Recorder) -> Callable:
    """Replaces the `call` of a layer that is rematerialised.

    In the forward pass such a layer keeps nothing, factors included. When its gradient
    is asked for it runs again, now by the rules of the layers inside and on a tape of
    its own, and what every example's gradient is made of is known as soon as that
    part's backward pass is done. What is small, as a LoRA update's gradients are, is
    formed right then; large factors must be kept until all norms are known. See
    `tfdpsq.rematerialization` for `rematerialize` and `pieces`.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        function, tensors = layer.pieces(*args, **kwargs)
        # `check` compares what is recorded, so it must be recorded the first time.
        if not layer.rematerialize or record.comparing:
            return function(*tensors)

        def silent(*given: Any) -> Any:
            with replaced(record, silent=True):
                return function(*given)

        return rematerialized(silent, tensors, differentiate(function))

    def differentiate(function: Any) -> Any:
        def gradients_of(_: Any, given: Any, upstream: Any, variables: Any) -> Any:
            sources = [tensor for tensor in given if tensor.dtype.is_floating]
            by_source: list[tf.Tensor | None] = []
            with tf.GradientTape() as tape:
                part = Recorder(tape, record.variables, record.rows)
                with capture(layer.submodules, part):
                    tape.watch(sources)
                    outputs = tf.nest.flatten(function(*given))

            def gradients_by(targets: Any) -> Any:
                found = tape.gradient(
                    outputs, [*sources, *targets], output_gradients=list(upstream)
                )
                by_source.extend(found[: len(sources)])
                return found[len(sources) :]

            record.adopt(part, gradients_by)
            # The rules have seen to every variable.
            return [*by_source, *(None for _ in variables)]

        return gradients_of

    return call
