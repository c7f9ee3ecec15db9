"""DPKeras optimizers that add their noise once per logical step.

tensorflow-privacy's optimizers clip and noise inside one call, and so add noise
in every microbatch and on every replica (√k and √replicas too much), and divide
by the number of rows that happened to be drawn. The classes made here *are*
tensorflow-privacy's optimizers and let it do the clipping, but take the step
apart:

1. `clipped_sum`: Σᵢ clip(gᵢ, C) of one physical microbatch, by the parent class;
2. `privatize`: sum over replicas, add N(0, (σΔ)²) once, divide by the *expected*
   batch size. Every replica draws the same noise from the same stateless seed.

Every variable of every step has a noise seed of its own, 126 secret bits with the
step and the variable's position mixed in: same-shaped variables and successive
steps get independent noise, and a step replayed after an interruption gets the
same.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
from tensorflow_privacy.privacy.dp_query import gaussian_query
from tensorflow_privacy.privacy.optimizers import (
    dp_optimizer_keras,
    dp_optimizer_keras_vectorized,
)

from tfdpsq import validation
from tfdpsq.privacy.plan import PrivacyPlan
from tfdpsq.privacy.sampling import fresh_seed

ENGINES = ("dpkeras", "vectorized")
OPTIMIZERS = {
    "adam": tf.keras.optimizers.legacy.Adam,
    "sgd": tf.keras.optimizers.legacy.SGD,
}


class SeededGaussianSumQuery(gaussian_query.GaussianSumQuery):
    """tensorflow-privacy's Gaussian sum query with noise from a given seed.

    The parent draws from TF's stateful generator, which differs by replica and
    cannot be replayed; everything else is the parent's.
    """

    def noised(
        self, sums: Sequence[tf.Tensor], seed: tf.Tensor, step: tf.Tensor
    ) -> list[tf.Tensor]:
        """The sums plus independent Gaussian noise.

        Args:
          sums: one float tensor per variable.
          seed: [2] int64, secret.
          step: scalar int64, new for every logical step.

        Returns:
          Tensors shaped as `sums`, with noise of deviation `stddev` added.
        """
        return [
            value
            + tf.random.stateless_normal(
                tf.shape(value),
                noise_key(seed, step, position),
                stddev=self._stddev,
                dtype=value.dtype,
            )
            for position, value in enumerate(sums)
        ]


def noise_key(seed: tf.Tensor, step: tf.Tensor, position: int) -> tf.Tensor:
    """The seed of one variable's noise in one step.

    Step and position are added to the two halves by exclusive or: all keys of a run
    differ, and none has fewer secret bits than the seed. (TensorFlow's
    `stateless_fold_in` would not do: with a Python integer it returns 32 bits.)

    Args:
      seed: [2] int64.
      step: scalar int64, at least 0.
      position: which variable, at least 0.

    Returns:
      [2] int64.
    """
    mixed = tf.stack([tf.cast(step, tf.int64), tf.constant(position, tf.int64)])
    return tf.bitwise.bitwise_xor(seed, mixed)


class _FiniteTape:
    """A gradient tape whose Jacobians hold no NaN and no infinity.

    Clipping by norm turns one infinite entry into NaN for the whole sum. A row
    whose gradient has no finite norm contributes zero instead, which is within
    every clip norm.

    Attributes:
      all_finite: scalar bool, whether every row's gradient had a finite norm; set
        by `jacobian`. Where it is false, zeroed rows may be innocent: inside one
        batched product 0 · NaN is NaN, so a bad row spoils its neighbours.
    """

    def __init__(self, tape: tf.GradientTape):
        self._tape = tape
        self.all_finite = tf.constant(True)

    def __enter__(self):
        self._tape.__enter__()
        return self

    def __exit__(self, *exception):
        return self._tape.__exit__(*exception)

    def watch(self, tensors):
        self._tape.watch(tensors)

    def jacobian(self, target, sources, **options):
        options["unconnected_gradients"] = tf.UnconnectedGradients.ZERO
        jacobians = [
            tf.convert_to_tensor(j)
            for j in self._tape.jacobian(target, sources, **options)
        ]
        squared = tf.add_n(
            [
                tf.reduce_sum(tf.square(tf.cast(j, tf.float32)), range(1, j.shape.rank))
                for j in jacobians
            ]
        )
        finite = tf.math.is_finite(squared)
        self.all_finite = tf.reduce_all(finite)
        return [
            tf.where(tf.reshape(finite, [-1] + [1] * (j.shape.rank - 1)), j, 0)
            for j in jacobians
        ]


class LogicalStep(tf.keras.optimizers.legacy.Optimizer):
    """What the training loop asks of an optimizer; mixed into each class below.

    Attributes:
      plan: the plan whose noise scale and expected batch size are applied.
    """

    def _begin(self, plan: PrivacyPlan, noise_seed: int | None):
        self.plan = plan
        if noise_seed is None:
            noise_seed = fresh_seed()
        mask = (1 << 63) - 1
        # Kept out of get_config and of every variable: it is as secret as the data.
        self._noise_seed = (noise_seed & mask, (noise_seed >> 63) & mask)
        self._noise_query = SeededGaussianSumQuery(
            plan.spec.clip_norm, plan.noise_stddev
        )

    def clipped_sum(
        self,
        losses: tf.Tensor,
        variables: Sequence[tf.Variable],
        tape: tf.GradientTape,
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """The sum over rows of each row's clipped gradient.

        Args:
          losses: [rows] float32, one loss per row; a padding row's is 0.
          variables: what to differentiate by.
          tape: the tape that recorded `losses`.

        Returns:
          One float32 tensor per variable, and a scalar bool. Where it is false,
          some row had a gradient without a finite norm; such rows, and possibly
          rows beside them, were left out, and the caller must take the rows one
          by one so that only the guilty ones stay out.
        """
        raise NotImplementedError  # each class below has its own

    def privatize(self, sums: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The gradient estimate of one logical step from its clipped sums.

        Args:
          sums: per variable, this replica's sum over all its microbatches.

        Returns:
          (Σ over replicas + noise) / expected batch size, the same on every
          replica.
        """
        replica = tf.distribute.get_replica_context()
        sums = list(sums)
        if replica is not None and replica.num_replicas_in_sync > 1:
            sums = replica.all_reduce(tf.distribute.ReduceOp.SUM, sums)
        if self.plan.spec.private:
            seed = tf.constant(self._noise_seed, tf.int64)
            step = tf.convert_to_tensor(self.iterations)
            sums = self._noise_query.noised(sums, seed, step)
        return [value / self.plan.spec.batch_size for value in sums]

    def _compute_gradients(self, loss, var_list, grad_loss=None, tape=None):
        raise validation.InputError(
            "this optimizer does not run under fit() or minimize(): they would "
            "leave a row with a NaN gradient to spoil the whole batch, which "
            "breaks the guarantee. Use tfdpsq.privacy.train or make_logical_step."
        )

    def apply_gradients(self, grads_and_vars, name=None, **options):
        """Applies `privatize`'s result, which is already summed over replicas."""
        options["experimental_aggregate_gradients"] = False
        self._was_dp_gradients_called = True  # the parent's own safeguard
        return super().apply_gradients(grads_and_vars, name=name, **options)


def make_optimizer(
    plan: PrivacyPlan,
    learning_rate: float | tf.keras.optimizers.schedules.LearningRateSchedule,
    optimizer: str = "adam",
    engine: str = "dpkeras",
    noise_seed: int | None = None,
    **options,
) -> LogicalStep:
    """An optimizer that runs `plan`.

    Args:
      plan: noise scale, clip norm and expected batch size. With ε = ∞ the result
        neither clips nor adds noise, and is otherwise the same.
      learning_rate: a number or a Keras schedule of logical steps.
      optimizer: "adam" or "sgd".
      engine: "dpkeras" or "vectorized", whose per-example clipping is used.
      noise_seed: 126 secret bits; `None` takes fresh entropy. Only tests fix it.
      **options: passed on to the Keras optimizer.

    Returns:
      A Keras optimizer with `LogicalStep`'s methods; a tensorflow-privacy
      optimizer of the chosen engine where ε is finite.

    Raises:
      InputError: unknown optimizer or engine.
    """
    base = OPTIMIZERS[validation.one_of("optimizer", optimizer, tuple(OPTIMIZERS))]
    validation.one_of("engine", engine, ENGINES)
    options["learning_rate"] = learning_rate
    clip_norm = plan.spec.clip_norm
    if not plan.spec.private:
        made = _non_private_class(base)(**options)
    elif engine == "dpkeras":
        parent = dp_optimizer_keras.make_keras_generic_optimizer_class(base)
        # Deviation 0: the parent clips, `privatize` adds the noise.
        query = gaussian_query.GaussianSumQuery(clip_norm, 0.0)
        made = _private_class(parent)(dp_sum_query=query, **options)
    else:
        parent = dp_optimizer_keras_vectorized.make_vectorized_keras_optimizer_class(
            base
        )
        made = _private_class(parent)(
            l2_norm_clip=clip_norm, noise_multiplier=0.0, **options
        )
    made._begin(plan, noise_seed)
    return made


def _private_class(
    parent: type[tf.keras.optimizers.legacy.Optimizer],
) -> type[LogicalStep]:
    class PrivateOptimizer(LogicalStep, parent):
        """A tensorflow-privacy optimizer, taken apart into a logical step."""

        def clipped_sum(self, losses, variables, tape):
            if losses.shape.rank != 1 or losses.shape[0] is None:
                raise validation.InputError(
                    f"losses have shape {losses.shape}; per-example clipping needs "
                    "a vector of static length, one loss per row. Use "
                    "reduction=NONE and a fixed batch size."
                )
            finite_tape = _FiniteTape(tape)
            averaged = parent._compute_gradients(
                self, losses, variables, tape=finite_tape
            )
            # The parent divides by the number of rows; undo it exactly once.
            sums = [gradient * float(losses.shape[0]) for gradient, _ in averaged]
            return sums, finite_tape.all_finite

    return PrivateOptimizer


def _non_private_class(
    base: type[tf.keras.optimizers.legacy.Optimizer],
) -> type[LogicalStep]:
    class NonPrivateOptimizer(LogicalStep, base):
        """The same step without clipping and noise: the ε = ∞ baseline."""

        def clipped_sum(self, losses, variables, tape):
            with tape:
                total = tf.reduce_sum(losses)
            gradients = tape.gradient(
                total, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO
            )
            return [tf.convert_to_tensor(g) for g in gradients], tf.constant(True)

    return NonPrivateOptimizer
