"""One forward, one backward: exact per-example clipping at nearly no extra cost.

Ordinary backpropagation computes, at every layer, the gradient G_i by the layer's
output for each example i, and only then sums over examples. This engine keeps the
G_i and what they meet (see `factored`), gets every example's gradient norm from
them, and forms the clipped sum Σ_i c_i·g_i directly, c_i = min(1, C/‖g_i‖): the
"book-keeping" of Bu et al. 2023 (arXiv:2210.00038), with the cross terms of
weights that are used more than once. In c_i the norm is replaced by an upper bound on
it that includes rounding (see `gradient_norms`), so that C holds on devices
that multiply in TensorFloat-32 or bfloat16, too.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.keras_choice import keras2 as keras
from tfdpsq.keras_choice import require_own
from tfdpsq.privacy.fast import factored, gradient_norms
from tfdpsq.privacy.fast.recorder import (
    Recorder,
    UncoveredError,
    replaced,
    require_distinct,
    variable_key,
)
from tfdpsq.privacy.fast.rules import Rule, couples_examples, rule_for
from tfdpsq.rematerialization import rematerialized


class ClippedSum(NamedTuple):
    """Result of `clipped_sum`.

    Attributes:
      sums: per variable, Σ_i c_i·g_i, dense and of its shape, float32 (float64
        for float64 models).
      norms: ‖g_i‖ over all variables together, [B / rows_per_unit] float32
        (float64), before clipping; infinite where it is not a finite number. As
        private as the data.
      losses: what `per_example_losses` returned, [B].
    """

    sums: list[tf.Tensor]
    norms: tf.Tensor
    losses: tf.Tensor


def clipped_sum(
    per_example_losses: Callable[[], tf.Tensor],
    layers: Iterable[tf.Module],
    variables: Sequence[tf.Variable],
    clip_norm: float,
    weights: tf.Tensor | None = None,
    rows_per_unit: int = 1,
) -> ClippedSum:
    """The sum over units of each unit's clipped gradient.

    A unit is one example, or the `rows_per_unit` examples of one user; then its
    gradient is the sum of theirs, and clipped as such.

    Works eagerly, in `tf.function`, inside `tf.while_loop`, and under
    `jit_compile=True`.

    | a unit whose | contributes |
    |---|---|
    | gradient has norm at most `clip_norm` | its gradient |
    | norm is larger | its gradient, scaled to `clip_norm` (less what rounding may be) |
    | norm is NaN, infinite, or overflows | exactly zero, and costs nobody else |
    | example i has weight 0 | what it would without example i |

    The last two presume that forward and backward pass keep examples apart, as the
    bound on one example's influence does anyway; `privacy.checks` looks for that.

    Args:
      per_example_losses: runs the model, in training mode, and returns one loss per
        example, [B] float, B static. Loss i must depend on example i alone.
      layers: the model, or all layers, that hold `variables`.
      variables: the trainable variables.
      clip_norm: C, above 0.
      weights: [B]; examples whose weight is not above 0 are padding.
      rows_per_unit: k; examples j·k to (j + 1)·k - 1 are unit j. It divides B.

    Returns:
      Clipped sums, norms and losses. A variable that no loss depends on has sum 0.

    Raises:
      InputError: a variable takes part in the losses in a way that no rule covers (but
        for derivatives through a layer, which `check` finds); losses not [B]; a layer
        run on something else than the examples; batch normalisation; a clip norm that
        is not above 0; rows that make no whole units; a variable listed twice.
    """
    validation.positive("clip_norm", clip_norm)
    validation.positive_integer("rows_per_unit", rows_per_unit)
    variables, layers = list(variables), list(layers)
    require_distinct(variables)
    recorder = Recorder(variables)
    losses, by_row = _differentiated(per_example_losses, layers, recorder)
    rows = recorder.rows
    if rows % rows_per_unit:
        raise validation.InputError(
            f"there are {rows} losses, which do not make units of rows_per_unit = "
            f"{rows_per_unit} rows. Pad them with rows of weight 0."
        )
    for stray, _ in recorder.strays:
        raise UncoveredError(_uncovered(stray, layers))
    if rows_per_unit > 1:
        if weights is not None:
            # Not even a NaN of such a row may enter its unit's norm.
            by_row = factored.cleaned(by_row, weights > 0)
        by_row = [[factored.grouped(u, rows_per_unit) for u in uses] for uses in by_row]
        weights = None  # respected: what is left of a unit without any rows is zero
    merged = [factored.merge(u, v.shape.as_list()) for u, v in zip(by_row, variables)]
    if not any(merged):
        raise validation.InputError("the losses depend on none of the variables.")

    squares = [gradient_norms.squared_norms(uses) for uses in merged if uses]
    norms, bounds = gradient_norms.norm_and_bound(squares)
    finite = tf.math.is_finite(bounds)
    norms = tf.where(finite, norms, bounds)
    scale = tf.minimum(tf.constant(clip_norm, bounds.dtype) / bounds, 1.0)
    factors = tf.where(finite, scale, tf.zeros([], bounds.dtype))
    if weights is not None:
        factors *= tf.cast(weights > 0, bounds.dtype)
    # Copying every factor to clean it costs a few per cent of a step, and is hardly
    # ever needed: a factor that is not finite always makes its norm infinite.
    merged = tf.cond(
        tf.reduce_all(finite),
        lambda: merged,
        lambda: factored.cleaned(merged, finite),
    )
    sums = [
        factored.weighted_sum(uses, factors, v.shape)
        if uses
        else tf.zeros(v.shape, factored.full_dtype(v))
        for v, uses in zip(variables, merged)
    ]
    return ClippedSum(sums, norms, losses)


def check(
    per_example_losses: Callable[..., tf.Tensor],
    layers: Iterable[tf.Module],
    variables: Sequence[tf.Variable],
    tolerance: float = 1e-4,
    inputs: Sequence[Any] = (),
) -> None:
    """Checks rules and model on one batch: run it once before training, eagerly.

    It compares the output of every rule with that of its layer's own `call`, and the
    sum of the examples' gradients with the ordinary gradient of the summed losses,
    weight by weight. The loss is traced. Whether each loss depends on its own example
    alone is looked for by `privacy.train` (see `privacy.checks`).

    Args:
      per_example_losses: as for `clipped_sum`; called with `inputs`.
      layers: as for `clipped_sum`.
      variables: as for `clipped_sum`.
      tolerance: largest relative difference; 1e-4 suits float32, 0.05 bfloat16.
      inputs: arguments of the loss, tensors, nested as it takes them.

    Raises:
      UncoveredError: a weight's gradients differ.
      InputError: outputs differ (the message names the layer), gradients are not
        finite, or what `clipped_sum` raises.
    """
    variables, layers = list(variables), list(layers)
    # Autograph is for the caller's code; ours needs none.
    context = tf.__internal__.autograph.control_status_ctx()
    of_caller = converted(per_example_losses)
    compared: list[str] = []  # by name: the layers, in the last trace

    @tf.function(autograph=False)
    def measured(inputs: Sequence[Any]) -> tuple[list[tf.Tensor], ...]:
        """Differences of outputs; each gradient's difference; each one's norm."""
        recorder = Recorder(variables, comparing=context)
        _, by_row = _differentiated(lambda: of_caller(*inputs), layers, recorder)
        compared[:] = [name for name, _ in recorder.mismatches]
        plain = {variable_key(v): gradient for v, gradient in recorder.strays}
        ones, off, sizes = tf.ones([recorder.rows]), [], []
        for variable, uses in zip(variables, by_row):
            exact = plain.get(variable_key(variable), tf.zeros(variable.shape))
            exact = tf.cast(tf.convert_to_tensor(exact), tf.float64)
            by_rules = tf.zeros(variable.shape)
            if uses:
                by_rules = factored.weighted_sum(uses, ones, variable.shape)
            off.append(tf.norm(tf.cast(by_rules, tf.float64) - exact))
            sizes.append(tf.norm(exact))
        return [difference for _, difference in recorder.mismatches], off, sizes

    with plain_errors():
        differences, off, sizes = measured(tuple(inputs))
    for name, difference in zip(compared, differences):
        if not float(difference) <= tolerance:
            raise validation.InputError(
                f"the rule for layer {name!r} computes another output than the "
                f"layer's own call: relative difference {float(difference):.2g}, "
                f"allowed {tolerance}. Correct the rule."
            )
    overall = float(tf.linalg.global_norm(list(sizes)))
    if not math.isfinite(overall):
        raise validation.InputError(
            "the rows tried have a gradient that is NaN or infinite, though their "
            "losses are finite. Look for such values in inputs, targets and weights."
        )
    for variable, difference, size in zip(variables, off, sizes):
        # Some gradients are zero but for rounding, hence the share of the whole.
        allowed = float(size) + 1e-3 * overall
        if not float(difference) <= tolerance * allowed:
            raise UncoveredError(
                f"{_uncovered(variable, layers)} (Its gradient is off by "
                f"{float(difference) / max(allowed, 1e-30):.2g} of its size, allowed "
                f"{tolerance}.)"
            )


def _differentiated(
    per_example_losses: Callable[[], tf.Tensor],
    layers: Sequence[tf.Module],
    recorder: Recorder,
) -> tuple[tf.Tensor, list[list[factored.Use]]]:
    """One forward and one backward pass: the losses, and each variable's uses."""
    with recorder.tape, capture(layers, recorder):
        losses = require_rows(per_example_losses())
        recorder.rows = losses.shape[0]
        total = tf.reduce_sum(losses)
    return losses, recorder.uses(recorder.tape.gradient(total, recorder.targets()))


def require_rows(losses: tf.Tensor) -> tf.Tensor:
    """The losses, if they are a vector of static length.

    Raises:
      InputError: they are anything else, such as a loss reduced to a scalar.
    """
    if losses.shape.rank != 1 or losses.shape[0] is None:
        raise validation.InputError(
            f"losses have shape {losses.shape}; clipping needs one loss per row. Use "
            "reduction=NONE and a fixed batch size."
        )
    return losses


def converted(function: Callable, context: Any = None) -> Callable:
    """Converts a caller's function, which may branch on tensors, by autograph.

    This package's own code needs none, and is traced a third faster without. The
    `context` is autograph's, by default that of the calling code.
    """
    context = context or tf.__internal__.autograph.control_status_ctx()
    return tf.__internal__.autograph.tf_convert(function, context)


@contextlib.contextmanager
def capture(layers: Iterable[tf.Module], recorder: Recorder) -> Iterator[None]:
    """While inside, every layer that has a rule and a wanted weight runs by it.

    So do the layers inside them. The others run as ever: frozen layers cost nothing and
    need no rule. A weight that is wanted and escapes all the same, say in a list of
    weights, is found as a read outside every rule.
    """
    with contextlib.ExitStack() as stack:
        for layer in flatten(layers):
            if not (couples_examples(layer) or _has_wanted_weight(layer, recorder)):
                continue
            rule = rule_for(layer)
            if rule is not None:
                call = _by_rule(layer, rule, recorder)
            # A model may pass `rematerialize` on to layers without having pieces.
            elif hasattr(layer, "rematerialize") and hasattr(layer, "pieces"):
                call = _recorded_again(layer, recorder)
            else:
                continue
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
                f"the parts of {root.name!r} cannot be listed. If it is recurrent, use "
                "a Dropout layer in place of its dropout and recurrent_dropout."
            ) from error
        for module in modules:
            if isinstance(module, keras.layers.Layer):
                found.setdefault(id(module), module)
    return list(found.values())


def _uncovered(variable: tf.Variable, layers: Sequence[tf.Module]) -> str:
    """Explains what is wrong with a weight that the loss uses outside every rule."""
    which, why = f"weight {variable.name!r}", "belongs to none of the layers given"
    for layer in flatten(layers):
        if variable_key(variable) in map(variable_key, layer._trainable_weights):
            which = f"{which} of layer {layer.name!r}"
            why = "is used where its layer's rule does not see it"
            if rule_for(layer) is None:
                why = f"is a {type(layer).__name__}'s, which no rule covers"
            break
    return (
        f"{which} {why}. Freeze the weight, register a rule with register_rule, or "
        "choose another engine."
    )


def _has_wanted_weight(layer: keras.layers.Layer, recorder: Recorder) -> bool:
    # Attributes, too: a layer may go by a weight that belongs to another.
    held = [
        value
        for part in flatten([layer])
        for value in (*part._trainable_weights, *vars(part).values())
    ]
    return any(
        isinstance(value, tf.Variable) and recorder.wants(value) for value in held
    )


def _by_rule(layer: keras.layers.Layer, rule: Rule, record: Recorder) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        for part in tf.nest.flatten(args):
            if isinstance(part, (tf.RaggedTensor, tf.SparseTensor)):
                raise UncoveredError(
                    f"layer {layer.name!r} got a {type(part).__name__}; make it dense."
                )
        with replaced(record, layer=layer):
            output = rule(record, layer, *args, **kwargs)
        # A layer made of layers may hold dropout, and its parts are compared.
        if record.comparing and not layer.submodules:
            own = converted(type(layer).call, record.comparing)(layer, *args, **kwargs)
            for a, b in zip(tf.nest.flatten(output), tf.nest.flatten(own)):
                a, b = tf.cast(a, tf.float64), tf.cast(b, tf.float64)
                size = tf.maximum(tf.reduce_max(tf.abs(b)), 1e-30)
                off = tf.reduce_max(tf.abs(a - b)) / size
                record.mismatches.append((layer.name, off))
        return output

    return call


def _recorded_again(layer: keras.layers.Layer, record: Recorder) -> Callable:
    """Replaces the `call` of a layer that is rematerialised.

    In the forward pass such a layer keeps nothing, factors included. When its gradient
    is asked for it runs again, now by the rules of the layers inside and on a tape of
    its own. What is small, as a LoRA update's gradients are, is formed right then;
    large factors must be kept until all norms are known. See `tfdpsq.rematerialization`
    for `rematerialize` and `pieces`.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        function, tensors = layer.pieces(*args, **kwargs)
        # `check` compares what is recorded, so it must be recorded the first time.
        if not layer.rematerialize or record.comparing:
            return function(*tensors)

        def silent(*given: Any) -> Any:
            with replaced(record, silent=True):
                return function(*given)

        def gradients_of(_: Any, given: Any, upstream: Any, variables: Any) -> Any:
            sources = [tensor for tensor in given if tensor.dtype.is_floating]
            part = Recorder(record.variables)
            part.rows = record.rows
            with part.tape, capture(layer.submodules, part):
                part.tape.watch(sources)
                outputs = tf.nest.flatten(function(*given))
            targets = [*sources, *part.targets()]
            found = part.tape.gradient(outputs, targets, list(upstream))
            record.adopt(part, found[len(sources) :])
            # The rules have seen to every variable.
            return [*found[: len(sources)], *(None for _ in variables)]

        return rematerialized(silent, tensors, gradients_of)

    return call
