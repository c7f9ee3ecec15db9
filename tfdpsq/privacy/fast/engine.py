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

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.privacy.fast import factored, gradient_norms
from tfdpsq.privacy.fast.capture import capture, converted, flatten, plain_errors
from tfdpsq.privacy.fast.recorder import (
    Recorder,
    UncoveredError,
    require_distinct,
    variable_key,
)
from tfdpsq.privacy.fast.rules import rule_for


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
    bound on one example's influence does anyway. `privacy.train` looks for that before
    the first step (see `privacy.checks`).

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
    with tf.GradientTape() as tape:
        recorder = Recorder(tape, variables, _rows(weights))
        with capture(layers, recorder):
            losses = require_rows(per_example_losses())
        rows = recorder.rows = losses.shape[0]
        total = tf.reduce_sum(losses)
    if rows % rows_per_unit:
        raise validation.InputError(
            f"there are {rows} losses, which do not make units of rows_per_unit = "
            f"{rows_per_unit} rows. Pad them with rows of weight 0."
        )
    by_row = recorder.uses(lambda sources: tape.gradient(total, sources))
    for stray, _ in recorder.strays:
        raise UncoveredError(_uncovered(stray, layers))
    if rows_per_unit > 1:
        by_row = [
            [_of_units(use, rows_per_unit, weights) for use in uses] for uses in by_row
        ]
        weights = None  # respected: what is left of a unit without any rows is zero
    merged = _merged(by_row, variables)

    squares = [gradient_norms.squared_norms(uses) for uses in merged if uses]
    units = rows // rows_per_unit
    norms, bounds = tf.zeros([units]), tf.ones([units])
    if squares:
        norms, bounds = gradient_norms.norm_and_bound(squares)
    finite = tf.math.is_finite(bounds)
    norms = tf.where(finite, norms, bounds)
    scale = tf.minimum(tf.constant(clip_norm, bounds.dtype) / bounds, 1.0)
    factors = tf.where(finite, scale, tf.zeros([], bounds.dtype))
    if weights is not None:
        factors *= tf.cast(weights > 0, bounds.dtype)
    if squares:
        # Copying every factor to clean it costs a few per cent of a step, and is hardly
        # ever needed: a factor that is not finite always makes its norm infinite.
        merged = tf.cond(
            tf.reduce_all(finite),
            lambda: merged,
            lambda: [
                [factored.cleaned(use, finite) for use in uses] for uses in merged
            ],
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
    weight by weight. The loss is traced: what a layer keeps in Python attributes holds
    none of the `inputs`. Whether each loss depends on its own example alone is looked
    for by `privacy.train` (see `privacy.checks`).

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
    of_caller = converted(per_example_losses, context)
    compared: list[str] = []  # by name: the layers, in the last trace

    @tf.function(autograph=False)
    def measured(inputs: Sequence[Any]) -> tuple[list[tf.Tensor], ...]:
        """Differences of outputs; each gradient's difference; each one's norm."""
        first = next((x for x in tf.nest.flatten(inputs) if tf.is_tensor(x)), None)
        with tf.GradientTape() as tape:
            recorder = Recorder(tape, variables, _rows(first), comparing=context)
            with capture(layers, recorder):
                losses = require_rows(of_caller(*inputs))
            recorder.rows = losses.shape[0]
            total = tf.reduce_sum(losses)
        compared[:] = [name for name, _ in recorder.mismatches]
        by_row = recorder.uses(lambda sources: tape.gradient(total, sources))
        plain = {variable_key(v): gradient for v, gradient in recorder.strays}
        ones, off, sizes = tf.ones([recorder.rows]), [], []
        for variable, uses in zip(variables, _merged(by_row, variables)):
            by_rules = exact = tf.zeros(variable.shape, tf.float64)
            if variable_key(variable) in plain:
                gradient = tf.convert_to_tensor(plain[variable_key(variable)])
                exact = tf.cast(gradient, tf.float64)
            if uses:
                summed = factored.weighted_sum(uses, ones, variable.shape)
                by_rules = tf.cast(summed, tf.float64)
            off.append(tf.norm(by_rules - exact))
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
            "losses are finite. Look for such values in inputs, which an activation or "
            "a mask can hide from the loss, in targets and in weights."
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


def require_rows(losses: tf.Tensor) -> tf.Tensor:
    """The losses, if they are a vector of static length.

    Raises:
      InputError: they are anything else, such as a loss reduced to a scalar.
    """
    if losses.shape.rank != 1 or losses.shape[0] is None:
        raise validation.InputError(
            f"losses have shape {losses.shape}; per-example clipping needs one loss "
            "per row. Use reduction=NONE and a fixed batch size."
        )
    return losses


def _rows(values: tf.Tensor | None) -> int | None:
    """The first dimension, where it is known before the losses are."""
    return values.shape[0] if values is not None and values.shape.rank else None


def _of_units(use: factored.Use, size: int, weights: tf.Tensor | None) -> factored.Use:
    """The rows made units, after those of weight 0 have become exactly zero.

    A row of weight 0 must not enter its unit's norm, not even as a NaN; by itself,
    the factor 0 that it meets later is enough.
    """
    if weights is not None:
        use = factored.cleaned(use, weights > 0)
    return factored.grouped(use, size)


def _merged(
    by_row: Sequence[list[factored.Use]], variables: Sequence[tf.Variable]
) -> list[list[factored.Use]]:
    return [factored.merge(u, v.shape.as_list()) for u, v in zip(by_row, variables)]


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
