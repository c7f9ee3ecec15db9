"""The training loop that runs a plan: its sampler, its noise, its step count.

The loop is given the data as a function from row numbers to arrays, so that it
alone decides which rows a step sees, and reports how many steps were executed,
which is what the certificate is computed from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.privacy.optimizers import LogicalStep
from tfdpsq.privacy.plan import PrivacyPlan
from tfdpsq.privacy.sampling import fresh_seed
from tfdpsq.privacy.step import Batch, make_logical_step

# Batches whose rows depend on each other are padded to a multiple of this, which
# keeps the number of compiled shapes small.
_COUPLED_MULTIPLE = 8


def train(
    plan: PrivacyPlan,
    row_losses: Callable[[Batch], tf.Tensor],
    variables: Sequence[tf.Variable],
    optimizer: LogicalStep,
    take: Callable[[np.ndarray], Mapping[str, np.ndarray]],
    microbatch_size: int | None,
    sampler_seed: int | None = None,
    on_step: Callable[[int, float], None] | None = None,
    jit_compile: bool = False,
) -> int:
    """Runs every step of `plan`.

    Args:
      plan: sampler, noise scale, number of steps.
      row_losses: maps a batch to one loss per row; see `make_logical_step`.
      variables: what is trained.
      optimizer: made by `make_optimizer` from the same plan.
      take: maps row numbers [rows] int64 to a dict of arrays with `rows` leading
        rows, in that order.
      microbatch_size: rows differentiated at a time; `None` when rows depend on
        each other (an in-batch softmax) and must stay together. The plan's
        sensitivity must then say so.
      sampler_seed: secret; `None` takes fresh entropy. Only tests fix it.
      on_step: called after each step with the number of steps executed and the
        mean loss, a private measurement wherever the data are private.
      jit_compile: compile the step with XLA.

    Dropout takes part in the mechanism: were its masks known, a row's gradient
    would depend on its place in the batch, and so on who else was drawn. Where ε is
    finite the global TensorFlow seed is therefore set to fresh secret entropy.

    Returns:
      The number of logical steps executed.

    Raises:
      InputError: the optimizer was made for another plan, or has run before (its
        steps would be paid for once and taken twice); `take` returns too few rows.
    """
    if optimizer.plan != plan:
        raise validation.InputError(
            "the optimizer was made for another plan, so its noise is not what "
            "would be accounted for. Make it with make_optimizer(plan, ...)."
        )
    if int(tf.convert_to_tensor(optimizer.iterations)):
        raise validation.InputError(
            "the optimizer has taken steps before, which this plan does not account "
            "for. Make a new one with make_optimizer(plan, ...)."
        )
    sampler = plan.sampler(sampler_seed)
    if plan.spec.private:
        secret = fresh_seed() if sampler_seed is None else sampler_seed
        tf.random.set_seed(secret % (1 << 63))
    steps: dict[int, Callable] = {}
    for number in range(plan.spec.steps):
        draw = sampler.draw(number)
        rows = padded_rows(draw.count, plan.max_batch_size, microbatch_size)
        indices = np.zeros(rows, np.int64)
        weights = np.zeros(rows, np.float32)
        indices[: draw.count] = draw.indices[: draw.count]
        weights[: draw.count] = 1
        batch = _padded(take(indices), draw.count, rows)
        batch["weights"] = weights
        if rows not in steps:
            steps[rows] = tf.function(
                make_logical_step(
                    row_losses,
                    variables,
                    optimizer,
                    microbatch_size or rows,
                    rows_are_independent=microbatch_size is not None,
                ),
                jit_compile=jit_compile,
            )
        loss = steps[rows](
            {name: tf.convert_to_tensor(value) for name, value in batch.items()},
            tf.constant(draw.count, tf.int32),
        )
        if on_step is not None:
            on_step(number + 1, float(loss))
    return plan.spec.steps


def _padded(
    taken: Mapping[str, np.ndarray], count: int, rows: int
) -> dict[str, np.ndarray]:
    """The arrays with zeros in every padding row, where row 0 of the data stood."""
    padded = {}
    for name, values in taken.items():
        if len(values) != rows:
            raise validation.InputError(
                f"take returned {len(values)} rows of {name!r} for {rows} row "
                "numbers; it must return one row for each."
            )
        padded[name] = np.array(values)
        padded[name][count:] = 0
    return padded


def padded_rows(count: int, max_batch_size: int, microbatch_size: int | None) -> int:
    """The static number of rows a batch of `count` is padded to.

    Args:
      count: rows drawn.
      max_batch_size: the most rows a draw can have.
      microbatch_size: rows differentiated at a time, or `None` for coupled rows.

    Returns:
      For independent rows always the same: the maximum, rounded up to a multiple
      of `microbatch_size`. For coupled rows, whose cost grows with the square of
      the batch, the count rounded up to a multiple of 8.
    """
    if microbatch_size is not None:
        return -(-max_batch_size // microbatch_size) * microbatch_size
    return max(1, -(-count // _COUPLED_MULTIPLE)) * _COUPLED_MULTIPLE
