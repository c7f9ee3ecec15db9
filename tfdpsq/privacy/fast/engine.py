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
from tfdpsq.privacy.fast.capture import capture, flatten, plain_errors
from tfdpsq.privacy.fast.recorder import Recorder, require_distinct, variable_key
from tfdpsq.privacy.fast.rules import rule_for
from tfdpsq.privacy.terms import require_losses

_ALL = -1  # in place of a row's number


class UncoveredError(validation.InputError):
    """A weight is used in a way that no rule covers."""


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
        known = 0 if weights is None else weights.shape[0]
        recorder = Recorder(tape, variables, rows=known or 0)
        with capture(layers, recorder):
            losses = require_losses(per_example_losses())
        rows = recorder.rows = losses.shape[0]
        total = tf.reduce_sum(losses)
    if rows % rows_per_unit:
        raise validation.InputError(
            f"there are {rows} losses, which do not make units of rows_per_unit = "
            f"{rows_per_unit} rows. Pad them with rows of weight 0."
        )
    wanted = {variable_key(v) for v in variables}
    # Every read by a rule is off the tape, so these were read by something else.
    read = [v for v in tape.watched_variables() if variable_key(v) in wanted]
    gradients = tape.gradient(total, [*recorder.outputs, *read])
    count = len(recorder.outputs)
    strays = [v for v, g in zip(read, gradients[count:]) if g is not None]
    for stray in (*strays, *recorder.strays):
        raise UncoveredError(_uncovered(stray, layers))
    by_rows = recorder.uses(gradients[:count])
    if rows_per_unit > 1:
        by_rows = {
            key: [_of_units(use, rows_per_unit, weights) for use in uses]
            for key, uses in by_rows.items()
        }
        weights = None  # respected: what is left of a unit without any rows is zero
    uses = _merged(by_rows, variables)

    squared = {key: gradient_norms.squared_norms(uses[key]) for key in uses}
    units = rows // rows_per_unit
    norms, bounds = tf.zeros([units]), tf.ones([units])
    if squared:
        norms, bounds = gradient_norms.norm_and_bound([*squared.values()])
    finite = tf.math.is_finite(bounds)
    norms = tf.where(finite, norms, bounds)
    scale = tf.minimum(tf.constant(clip_norm, bounds.dtype) / bounds, 1.0)
    factors = tf.where(finite, scale, tf.zeros([], bounds.dtype))
    if weights is not None:
        factors *= tf.cast(weights > 0, bounds.dtype)
    cleaned = _cleaned(uses, finite)
    sums = [
        factored.weighted_sum(cleaned[variable_key(v)], factors, v.shape)
        if variable_key(v) in cleaned
        else tf.zeros(v.shape, factored.full_dtype(v))
        for v in variables
    ]
    return ClippedSum(sums, norms, losses)


def check(
    per_example_losses: Callable[..., tf.Tensor],
    layers: Iterable[tf.Module],
    variables: Sequence[tf.Variable],
    tolerance: float = 1e-4,
    rows_per_unit: int = 1,
    inputs: Sequence[Any] = (),
) -> None:
    """Checks rules and model on one batch: run it once before training.

    It compares the output of every rule with that of its layer's own `call`, the sum
    of the examples' gradients with the ordinary gradient of the summed losses, weight
    by weight, and looks for a loss that depends on another example. The loss is traced:
    what a layer keeps in Python attributes holds none of the `inputs`.

    Args:
      per_example_losses: as for `clipped_sum`, with at least two examples; called with
        `inputs`.
      layers: as for `clipped_sum`.
      variables: as for `clipped_sum`.
      tolerance: largest relative difference; 1e-4 suits float32, 0.05 bfloat16.
      rows_per_unit: rows that are clipped together, and may depend on each other.
      inputs: arguments of the loss, tensors, nested as it takes them.

    Raises:
      InputError: one of the three fails (the message names the layer or weight), or
        what `clipped_sum` raises.
    """
    if not tf.executing_eagerly():
        raise validation.InputError(
            "check looks at values, so it cannot run inside tf.function. Call it "
            "outside, on one batch."
        )
    variables, layers = list(variables), list(layers)
    # Autograph is for the caller's code; ours needs none.
    context = tf.__internal__.autograph.control_status_ctx()
    of_caller = tf.__internal__.autograph.tf_convert(per_example_losses, context)
    traced: list[_Differentiated] = []  # again where the first run makes variables

    def differentiated(inputs: Sequence[Any], row: tf.Tensor) -> _Measured:
        with tf.GradientTape() as tape:
            given = [x for x in tf.nest.flatten(inputs) if tf.is_tensor(x)]
            known = given[0].shape[0] if given and given[0].shape.rank else 0
            recorder = Recorder(tape, variables, comparing=context, rows=known or 0)
            with capture(layers, recorder):
                losses = require_losses(of_caller(*inputs))
            rows = recorder.rows = losses.shape[0]
            counted = (row == _ALL) | (tf.range(rows) == row)
            total = tf.reduce_sum(tf.where(counted, losses, tf.zeros_like(losses)))
        made = _differentiated(recorder, variables, total)
        traced.append(made)
        return _measured(made, variables, row, rows_per_unit)

    run = tf.function(differentiated, autograph=False)
    with plain_errors():
        whole = run(tuple(inputs), tf.constant(_ALL))
    made = traced[-1]
    for (name, _), difference in zip(made.recorder.mismatches, whole.mismatches):
        if not float(difference) <= tolerance:
            raise validation.InputError(
                f"the rule for layer {name!r} computes another output than the "
                f"layer's own call: relative difference {float(difference):.2g}, "
                f"allowed {tolerance}. Correct the rule."
            )
    for row in sorted({0, made.recorder.rows - 1}):
        reached = run(tuple(inputs), tf.constant(row)).reached
        for entry, others in zip(made.recorder.entries, reached):
            if bool(others):
                raise validation.InputError(
                    f"the loss of example {row} depends on other rows of what layer "
                    f"{entry.layer!r} returns, so clipping by example bounds "
                    "nothing. Make each loss depend on its own example alone, with "
                    "the examples as the first dimension throughout."
                )
    overall = float(tf.linalg.global_norm(list(whole.sizes)))
    if not math.isfinite(overall):
        raise validation.InputError(
            "the rows tried have a gradient that is NaN or infinite, though their "
            "losses are finite. Such rows would contribute nothing. Look for such "
            "values in inputs, which an activation or a mask can hide from the loss, "
            "in targets and in weights."
        )
    for variable, off, size in zip(variables, whole.off, whole.sizes):
        # Some gradients are zero but for rounding, hence the share of the whole.
        allowed = float(size) + 1e-3 * overall
        if not float(off) <= tolerance * allowed:
            raise UncoveredError(
                f"{_uncovered(variable, layers)} (Its gradient is off by "
                f"{float(off) / max(allowed, 1e-30):.2g} of its size, allowed "
                f"{tolerance}.)"
            )


class _Differentiated(NamedTuple):
    """A forward pass by the rules and what it was differentiated by."""

    recorder: Recorder
    by_outputs: list[tf.Tensor | None]
    plain: list[tf.Tensor]  # the ordinary gradients by the variables


class _Measured(NamedTuple):
    """Measurements that `check` judges.

    Attributes:
      mismatches: of each output that was compared, the relative difference.
      reached: for each use of a weight, whether the loss depends on another unit there.
      off: for each variable, the norm of what its examples' gradients lack.
      sizes: for each variable, the norm of its ordinary gradient.
    """

    mismatches: list[tf.Tensor]
    reached: list[tf.Tensor]
    off: list[tf.Tensor]
    sizes: list[tf.Tensor]


def _differentiated(
    recorder: Recorder, variables: Sequence[tf.Variable], total: tf.Tensor
) -> _Differentiated:
    """Differentiates by all outputs, and without rules by the variables."""
    # Under a strategy's scope, the copies that were read: those of the first replica.
    strategy = tf.distribute.get_strategy()
    read = [strategy.experimental_local_results(v)[0] for v in variables]
    gradients = recorder.tape.gradient(total, [*recorder.outputs, *read])
    count = len(recorder.outputs)
    plain = [
        tf.zeros(v.shape, v.dtype) if g is None else tf.convert_to_tensor(g)
        for v, g in zip(read, gradients[count:])
    ]
    return _Differentiated(recorder, gradients[:count], plain)


def _measured(
    made: _Differentiated,
    variables: Sequence[tf.Variable],
    row: tf.Tensor,
    rows_per_unit: int,
) -> _Measured:
    recorder, rows = made.recorder, made.recorder.rows
    units = rows // rows_per_unit
    reached = []
    for entry in recorder.entries:
        gradient = made.by_outputs[entry.output]
        reached.append(tf.constant(False))
        if gradient is not None and gradient.shape[0] == rows * entry.folded:
            by_unit = tf.reshape(tf.convert_to_tensor(gradient), [units, -1])
            others = tf.range(units) != row // rows_per_unit
            reached[-1] = tf.reduce_any((by_unit != 0) & others[:, tf.newaxis])
    merged = _merged(recorder.uses(made.by_outputs), variables)
    off, sizes = [], []
    for variable, plain in zip(variables, made.plain):
        key = variable_key(variable)
        summed = tf.zeros(variable.shape)
        if key in merged:
            summed = factored.weighted_sum(merged[key], tf.ones([rows]), variable.shape)
        exact = tf.cast(plain, tf.float64)
        off.append(tf.norm(tf.cast(summed, tf.float64) - exact))
        sizes.append(tf.norm(exact))
    mismatches = [difference for _, difference in recorder.mismatches]
    return _Measured(mismatches, reached, off, sizes)


def _cleaned(
    uses: dict[int, list[factored.Use]], finite: tf.Tensor
) -> dict[int, list[factored.Use]]:
    """The same without units that have no finite norm."""
    # Copying every factor to clean it costs a few per cent of a step, and is hardly
    # ever needed: a factor that is not finite always makes its norm infinite.
    kept = list(uses.values())
    if kept:
        kept = tf.cond(
            tf.reduce_all(finite),
            lambda: kept,
            lambda: [
                [factored.cleaned(use, finite) for use in merged] for merged in kept
            ],
        )
    return dict(zip(uses, kept))


def _of_units(use: factored.Use, size: int, weights: tf.Tensor | None) -> factored.Use:
    """The rows made units, after those of weight 0 have become exactly zero.

    A row of weight 0 must not enter its unit's norm, not even as a NaN; by itself,
    the factor 0 that it meets later is enough.
    """
    if weights is not None:
        use = factored.cleaned(use, weights > 0)
    return factored.grouped(use, size)


def _merged(
    uses: dict[int, list[factored.Use]], variables: Sequence[tf.Variable]
) -> dict[int, list[factored.Use]]:
    return {
        variable_key(v): factored.merge(uses[variable_key(v)], v.shape.as_list())
        for v in variables
        if variable_key(v) in uses
    }


def _uncovered(variable: tf.Variable, layers: Sequence[tf.Module]) -> str:
    """Explains what is wrong with a weight that the loss uses outside every rule."""
    remedy = (
        "Freeze the weight, register a rule with register_rule, or choose another "
        "engine."
    )
    key = variable_key(variable)
    for layer in flatten(layers):
        if key in {variable_key(v) for v in layer._trainable_weights}:
            which = f"weight {variable.name!r} of layer {layer.name!r}"
            if rule_for(layer) is None:
                return (
                    f"{which}: no rule covers layers of class "
                    f"{type(layer).__name__}. {remedy}"
                )
            return f"{which} is used where its layer's rule does not see it. {remedy}"
    return f"weight {variable.name!r} belongs to none of the layers given. {remedy}"
