"""One forward, one backward: exact per-example clipping at nearly no extra cost.

Backpropagation computes, at every layer, the gradient G_i by the layer's output for
each example i, and only then sums over examples. This engine keeps the G_i and what
they meet (see `factored`), gets each example's gradient norm from them, and forms the
clipped sum Σ_i c_i·g_i, c_i = min(1, C/‖g_i‖): the "book-keeping" of Bu et al. 2023
(arXiv:2210.00038), with the cross terms of weights that are used more than once. In c_i
an upper bound that includes rounding stands for the norm (see `gradient_norms`), so
that C also holds where a device multiplies in TensorFloat-32 or bfloat16.
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
    """Result of `clipped_sum`, float32 (float64 for float64 models)."""

    sums: list[tf.Tensor]  # of each variable, Σ_i c_i·g_i, dense
    # [B / rows_per_unit], ‖g_i‖ over all variables, before clipping; infinite where it
    # is not a finite number. As private as the data.
    norms: tf.Tensor
    losses: tf.Tensor  # [B], what `per_example_losses` returned


def clipped_sum(
    per_example_losses: Callable[[], tf.Tensor],
    layers: Iterable[tf.Module],
    variables: Sequence[tf.Variable],
    clip_norm: float,
    weights: tf.Tensor | None = None,
    rows_per_unit: int = 1,
) -> ClippedSum:
    """The sum over units of each unit's clipped gradient.

    A unit is one example, or the `rows_per_unit` examples of one user: the sum of their
    gradients is clipped. Works eagerly and in `tf.function`, compiled by XLA or not.

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
      variables: to differentiate by; one that no loss depends on has sum 0.
      clip_norm: C, above 0.
      weights: [B]; examples whose weight is not above 0 are padding.
      rows_per_unit: k; examples j·k to (j + 1)·k - 1 are unit j. It divides B.

    Raises:
      UncoveredError: no rule covers a use of a variable. (Only `check` finds a loss's
        derivatives through a layer, as in a gradient penalty.)
      InputError: other arguments than the above, or batch normalisation.
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
            f"{rows} losses make no whole units of rows_per_unit = {rows_per_unit} "
            "rows. Pad them with rows of weight 0."
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
        tf.cast(factored.weighted_sum(uses, factors, v.shape), factored.full_dtype(v))
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

    It compares the sum of the examples' gradients with the ordinary gradient of the
    summed losses; an InputError names the weight where they differ. `privacy.checks`
    tells whether losses read other rows. That a rule computes the same output as its
    layer's `call` is for the rule's own test.

    Losses, layers and variables are those of `clipped_sum`; `inputs`, tensors in any
    nesting, are the arguments of the losses, which are traced. The largest relative
    difference, `tolerance`, of 1e-4 suits float32; 0.05 suits bfloat16.
    """
    variables, layers = list(variables), list(layers)
    of_caller = converted(per_example_losses)

    @tf.function(autograph=False)
    def measured(inputs: Sequence[Any]) -> tuple[list[tf.Tensor], ...]:
        """Each gradient's difference; each one's norm."""
        recorder = Recorder(variables, comparing=True)
        _, by_row = _differentiated(lambda: of_caller(*inputs), layers, recorder)
        plain = {variable_key(v): gradient for v, gradient in recorder.strays}
        ones, off, sizes = tf.ones([recorder.rows]), [], []
        for variable, uses in zip(variables, by_row):
            exact = plain.get(variable_key(variable), tf.zeros(variable.shape))
            exact = tf.cast(tf.convert_to_tensor(exact), tf.float64)
            by_rules = factored.weighted_sum(uses, ones, variable.shape)
            off.append(tf.norm(tf.cast(by_rules, tf.float64) - exact))
            sizes.append(tf.norm(exact))
        return off, sizes

    with plain_errors():
        off, sizes = measured(tuple(inputs))
    overall = float(tf.linalg.global_norm(list(sizes)))
    if not math.isfinite(overall):
        raise validation.InputError(
            "rows with finite losses have a gradient that is NaN or infinite. Look for "
            "such values in inputs, targets and weights."
        )
    for variable, difference, size in zip(variables, off, sizes):
        # Some gradients are zero but for rounding, hence the share of the whole.
        allowed = float(size) + 1e-3 * overall
        if not float(difference) <= tolerance * allowed:
            off_by = float(difference) / max(allowed, 1e-30)
            raise UncoveredError(
                f"{_uncovered(variable, layers)} (Its gradient is off by {off_by:.2g} "
                f"of its size, above {tolerance}.)"
            )


def _differentiated(
    per_example_losses: Callable, layers: Sequence[tf.Module], recorder: Recorder
) -> tuple[tf.Tensor, list[list[factored.Use]]]:
    """One forward and one backward pass: the losses, and each variable's uses."""
    with recorder.tape, capture(layers, recorder):
        losses = require_rows(per_example_losses())
        recorder.rows = losses.shape[0]
        total = tf.reduce_sum(losses)
    return losses, recorder.uses(recorder.tape.gradient(total, recorder.targets()))


def require_rows(losses: tf.Tensor) -> tf.Tensor:
    """Returns the losses; an InputError if they are not a vector of static length."""
    if losses.shape.rank != 1 or losses.shape[0] is None:
        raise validation.InputError(
            f"losses have shape {losses.shape}; clipping needs one loss per row. Use "
            "reduction=NONE and a fixed batch size."
        )
    return losses


def converted(function: Callable) -> Callable:
    """Converts a caller's function, which may branch on tensors, by autograph.

    Our own code needs none, and is traced a third faster without.
    """
    autograph = tf.__internal__.autograph
    return autograph.tf_convert(function, autograph.control_status_ctx())


@contextlib.contextmanager
def capture(layers: Iterable[tf.Module], recorder: Recorder) -> Iterator[None]:
    """While inside, layers with a rule and a wanted weight, nested ones too, run by it.

    Frozen layers run as ever, and need no rule. A wanted weight that escapes, say in a
    list of weights, is found as a read outside every rule.
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
            call = tf.autograph.experimental.do_not_convert(call)
            stack.enter_context(replaced(layer, call=call))
        yield


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Raises an `InputError` of traced code as it was: autograph adds a traceback."""
    try:
        yield
    except validation.InputError as error:
        while isinstance(error.__context__, validation.InputError):
            error = error.__context__
        raise error from None


def flatten(layers: Iterable[tf.Module]) -> list[keras.layers.Layer]:
    """The layers given and all that they are made of, each once."""
    found: dict[keras.layers.Layer, None] = {}
    for root in layers:
        require_own("layers", root)
        try:
            modules = (root, *root.submodules)
        except ValueError as error:  # Keras's recurrent cells that drop
            raise validation.InputError(
                f"the parts of {root.name!r} cannot be listed. If it is recurrent, "
                "replace its dropout and recurrent_dropout by a Dropout layer."
            ) from error
        found |= dict.fromkeys(m for m in modules if isinstance(m, keras.layers.Layer))
    return list(found)


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
    return f"{which} {why}. Freeze it, use register_rule, or choose another engine."


def _has_wanted_weight(layer: keras.layers.Layer, recorder: Recorder) -> bool:
    # Attributes, too: a layer may go by a weight that belongs to another.
    for part in flatten([layer]):
        held = (*part._trainable_weights, *vars(part).values())
        if any(isinstance(v, tf.Variable) and recorder.wants(v) for v in held):
            return True
    return False


def _by_rule(layer: keras.layers.Layer, rule: Rule, record: Recorder) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        for part in tf.nest.flatten(args):
            if isinstance(part, (tf.RaggedTensor, tf.SparseTensor)):
                raise UncoveredError(
                    f"layer {layer.name!r} got a {type(part).__name__}; make it dense."
                )
        with replaced(record, layer=layer):
            return rule(record, layer, *args, **kwargs)

    return call


def _recorded_again(layer: keras.layers.Layer, record: Recorder) -> Callable:
    """The `call` of a layer that is rematerialised (`tfdpsq.rematerialization`).

    The forward pass keeps nothing of it. When its gradient is asked for it runs again,
    by the rules of the layers inside and on a tape of its own. Small gradients, such as
    a LoRA update's, are formed then; large factors are kept until all norms are known.
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
