"""DPKeras optimizers that add their noise once per logical step.

tensorflow-privacy's optimizers clip and noise inside one call, and so add noise
in every microbatch and on every replica (√k and √replicas too much), and divide
by the number of rows that happened to be drawn. The classes made here *are*
tensorflow-privacy's optimizers, but take the step apart:

1. `clipped_sum`: Σᵢ clip(gᵢ, C) of one physical microbatch, by the chosen engine;
2. `privatize`: sum over replicas, add N(0, (σΔ)²) once, divide by the *expected*
   batch size. Every replica draws the same noise from the same stateless seed, or is
   given the same noise where the plan is secure.

Engine "fast" needs none of tensorflow-privacy's arithmetic. Where that cannot be
imported (it needs TensorFlow 2.15), the classes are Keras's optimizers alone, and the
other engines are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.keras_choice import keras2 as keras
from tfdpsq.privacy import coupled, fast, workers
from tfdpsq.privacy.adafactor import T5XAdafactor
from tfdpsq.privacy.jacobian import FiniteTape
from tfdpsq.privacy.plan import PrivacyPlan
from tfdpsq.privacy.randomness import grid
from tfdpsq.privacy.randomness import tensorflow_privacy_parts as parts
from tfdpsq.privacy.randomness.noise import (
    DRAWS,
    SeededGaussianSumQuery,
    as_words,
    derived_seed,
)
from tfdpsq.privacy.randomness.sampling import fresh_seed
from tfdpsq.privacy.randomness.secure import SecureSource
from tfdpsq.privacy.spec import ENGINES
from tfdpsq.privacy.terms import (
    Coupled,
    Losses,
    require_losses,
    require_rows,
)

OPTIMIZERS = {
    "adam": keras.optimizers.legacy.Adam,
    "adafactor": keras.optimizers.Adafactor,  # Keras has no legacy one
    "sgd": keras.optimizers.legacy.SGD,
    "t5x_adafactor": T5XAdafactor,
}


# Arguments of tensorflow-privacy's optimizers that are not the caller's to set.
_OWN_OPTIONS = (
    "dp_sum_query",
    "gradient_accumulation_steps",
    "l2_norm_clip",
    "noise_multiplier",
    "num_microbatches",
)


# Options of Keras's optimizers and of ours in [0, 1), and those above 0. Of all others
# a number must be finite and not below 0.
_SHARES = ("beta_1", "beta_2", "beta1", "momentum", "ema_momentum", "weight_decay_rate")
_ABOVE_0 = (
    "clip_threshold",
    "clipnorm",
    "clipping_threshold",
    "clipvalue",
    "decay_rate",
    "epsilon1",
    "epsilon_1",
    "global_clipnorm",
)


class Clipped(NamedTuple):
    """Result of `LogicalStep.clipped_sum`.

    Attributes:
      sums: per variable, the sum of clipped gradients, float32 (float64).
      losses: [rows], one per row; not to be trusted where weights are 0.
      complete: `True`, or a scalar bool tensor. Where that is false, some row had
        a gradient without a finite norm; such rows, and possibly rows next to them,
        were left out, and the caller must take the rows one by one so that only
        the guilty ones stay out.
    """

    sums: list[tf.Tensor]
    losses: tf.Tensor
    complete: tf.Tensor | bool


class StepKeys(NamedTuple):
    """Number and seeds of one logical step; see `LogicalStep.step_keys`.

    Given to a compiled step as arguments: constants of a graph are in its dumps, and in
    the profiles of TensorBoard.

    Attributes:
      number: scalar int64, new for every step.
      noise: [DRAWS, 2] int64; [0] where the plan is secure.
      dropout: [2] int64.
    """

    number: tf.Tensor
    noise: tf.Tensor
    dropout: tf.Tensor


class LogicalStep:
    """The optimizer's side of the training loop; mixed into each class below.

    Attributes:
      plan: the plan whose noise scale and expected batch size are applied.
      engine: "fast", "dpkeras" or "vectorized".
      noise_seed_is_given: whether somebody chose the seed of the noise.
    """

    plan: PrivacyPlan
    engine: str
    noise_seed_is_given: bool
    # The name that tensorflow-privacy's own safeguard goes by.
    _was_dp_gradients_called = False
    # Of the Keras optimizer that each class below also is.
    iterations: tf.Variable
    name: str
    _name: str
    weights: Any
    variables: Any
    build: Any
    _create_all_weights: Any

    def _begin(self, plan: PrivacyPlan, engine: str, noise_seed: int | None) -> None:
        self.plan = plan
        self.engine = engine
        self._noise_query = SeededGaussianSumQuery(
            plan.spec.clip_norm, plan.noise_stddev
        )
        self.noise_seed_is_given = noise_seed is not None
        self.reseed(fresh_seed(plan.spec.secure) if noise_seed is None else noise_seed)

    def reseed_for_a_run(self) -> None:
        """Draws seeds afresh, unless one was given when this was made.

        A copy of an optimizer, and one that was set back to its beginning, would repeat
        the noise of another run.
        """
        if not self.noise_seed_is_given:
            self.reseed(fresh_seed(self.plan.spec.secure))

    def require_secret_noise(self) -> None:
        """Refuses to certify noise whose seed somebody chose."""
        if self.noise_seed_is_given:
            raise validation.InputError(
                "noise_seed was given to the optimizer. Anyone who guesses it can "
                "subtract the noise, and a second run with it repeats the noise, so "
                "this run cannot be certified. Make the optimizer without noise_seed, "
                "or train in a directory, which draws and keeps a secret one."
            )

    def reseed(self, noise_seed: int) -> None:
        """Takes the noise seed of the run that this one continues.

        Functions that were traced without `step_keys` keep the old one.

        Args:
          noise_seed: 128 secret bits; 256 where the plan is secure.
        """
        # Kept out of get_config and of every variable: it is as secret as the data.
        if self.plan.spec.secure:
            self._source = SecureSource(noise_seed)
            self._noise_words: tuple[tuple[int, int], ...] = ()
            self._dropout_words = as_words(self._source.seed("dropout"))
            return
        # Derived, so that small seeds, which only tests use, share no keys either.
        self._noise_words = tuple(
            as_words(derived_seed(noise_seed, f"noise {draw}")) for draw in range(DRAWS)
        )
        self._dropout_words = as_words(derived_seed(noise_seed, "dropout"))

    def take_chiefs_seeds(self) -> None:
        """Takes the seeds of the first of several workers; see `workers`."""
        if self.plan.spec.secure:
            own = int.from_bytes(self._source.key, "big")
            self.reseed(workers.chiefs_number(own))
            return
        own = np.array([*self._noise_words, self._dropout_words], np.int64)
        (chiefs,) = workers.from_chief([own])
        *noise, self._dropout_words = map(tuple, chiefs.tolist())
        self._noise_words = tuple(noise)

    @property
    def dropout_seed(self) -> tf.Tensor:
        """[2] int64: the secret seed of random layers; see `randomness`."""
        return tf.constant(self._dropout_words, tf.int64)

    def step_keys(self, number: tf.Tensor | int) -> StepKeys:
        """Returns what the noise and the dropout of a logical step follow from.

        Args:
          number: of the step, new for every one: counted by the loop, as a callback can
            set `iterations` back.
        """
        noise = tf.constant(self._noise_words, tf.int64)
        return StepKeys(tf.cast(number, tf.int64), noise, self.dropout_seed)

    def clipped_sum(
        self,
        per_example_losses: Callable[[], Losses],
        variables: Sequence[tf.Variable],
        layers: Iterable[tf.Module],
        weights: tf.Tensor,
    ) -> Clipped:
        """The sum over units of each unit's clipped gradient.

        Args:
          per_example_losses: runs the model and returns one loss per row, [rows].
          variables: what to differentiate by.
          layers: the model or layers that hold `variables`; used by engine "fast".
          weights: [rows], 0 for padding rows, which contribute nothing.
        """
        raise NotImplementedError  # each class below has its own

    def coupled_sum(
        self, found: Coupled, variables: Sequence[tf.Variable], weights: tf.Tensor
    ) -> Clipped:
        """The same for rows that read each other, whatever the engine; see `coupled`.

        `weights` are those of the whole batch, [rows], 0 for padding.
        """
        if self.plan.spec.private:
            clip_norm = self.plan.spec.clip_norm
            sums = coupled.clipped_sum(found, variables, clip_norm, weights)
        else:
            counted = tf.cast(coupled.own_rows(weights), found.losses.dtype)
            sums = list(found.gradient(counted, variables))
        return Clipped(sums, found.losses, True)

    def secure_noise(
        self, step: int, variables: Sequence[tf.Variable]
    ) -> list[np.ndarray]:
        """The noise of one logical step of a secure plan; see `grid`.

        Drawn on the host: a compiled step has no cryptographic generator.

        Args:
          step: the logical step, new for every one.
          variables: what is trained.

        Returns:
          One int64 array per variable, shaped like it, in steps of the plan's grid;
          none where the plan is not secure, or without noise.
        """
        if self.plan.grid_step is None:
            return []
        deviation = self.plan.noise_stddev / self.plan.grid_step
        shapes = [variable.shape.as_list() for variable in variables]
        return grid.drawn(self._source, deviation, step, shapes)

    def privatize(
        self,
        sums: Sequence[tf.Tensor],
        noise: Sequence[tf.Tensor] = (),
        keys: StepKeys | None = None,
    ) -> list[tf.Tensor]:
        """The gradient estimate of one logical step from its clipped sums.

        Args:
          sums: per variable, this replica's sum over all its microbatches.
          noise: of a secure plan, what `secure_noise` drew for this step.
          keys: from `step_keys`; `None` takes those of step `iterations`.

        Returns:
          (Σ over replicas + noise) / expected batch size, the same on every
          replica.

        Raises:
          InputError: a secure plan without noise for every variable.
        """
        replica = tf.distribute.get_replica_context()
        sums = list(sums)
        if replica is not None and replica.num_replicas_in_sync > 1:
            sums = replica.all_reduce(tf.distribute.ReduceOp.SUM, sums)
        if self.plan.grid_step is not None:
            if len(noise) != len(sums):
                raise validation.InputError(
                    f"secure is True, but there is noise for {len(noise)} of "
                    f"{len(sums)} variables. Give the step what secure_noise(step, "
                    "variables) of the optimizer returns, afresh for every step."
                )
            sums = grid.noised(sums, noise, self.plan.grid_step)
        elif self.plan.spec.private:
            keys = keys or self.step_keys(self.iterations)
            window = self.plan.noise_window
            sums = self._noise_query.noised(sums, keys.noise, keys.number, window)
        return [value / self.plan.spec.batch_size for value in sums]

    def prepare(self, variables: Sequence[tf.Variable]) -> None:
        """Creates all slots, which must exist before a compiled function runs."""
        if isinstance(self, keras.optimizers.legacy.Optimizer):
            self._create_all_weights(variables)
        else:
            self.build(variables)

    def state(self) -> list[tf.Variable]:
        """The optimizer's variables, iterations and slots, in a fixed order."""
        if isinstance(self, keras.optimizers.legacy.Optimizer):
            return list(self.weights)
        return list(self.variables)

    def update(
        self, gradients: Sequence[tf.Tensor], variables: Sequence[tf.Variable]
    ) -> None:
        """Applies `privatize`'s result, and counts one iteration."""
        pairs = [(tf.cast(g, v.dtype), v) for g, v in zip(gradients, variables)]
        self._was_dp_gradients_called = True
        try:
            if isinstance(self, keras.optimizers.legacy.Optimizer):
                self.apply_gradients(pairs, experimental_aggregate_gradients=False)
            else:
                self.apply_gradients(pairs, skip_gradients_aggregation=True)
        finally:  # these gradients alone
            self._was_dp_gradients_called = False

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Applies what `update` gives it.

        Raises:
          InputError: called by anyone else, before or after training.
        """
        if not self._was_dp_gradients_called:
            raise validation.InputError(
                "apply_gradients got gradients that no logical step has clipped and "
                "noised. Use tfdpsq.privacy.PrivateModel, train or make_logical_step."
            )
        return super().apply_gradients(*args, **kwargs)  # type: ignore[misc]

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> None:
        raise validation.InputError(
            "this optimizer does not run in a plain model's fit() or in minimize(): "
            "they know of no logical step, so noise would be added per microbatch "
            "and a row with a NaN gradient would spoil the batch. Wrap the model in "
            "tfdpsq.privacy.PrivateModel and call its fit(), or use "
            "tfdpsq.privacy.train or make_logical_step."
        )

    compute_gradients = _compute_gradients


def make_optimizer(
    plan: PrivacyPlan,
    learning_rate: float | keras.optimizers.schedules.LearningRateSchedule,
    optimizer: str = "adam",
    engine: str = "fast",
    noise_seed: int | None = None,
    **options: Any,
) -> LogicalStep:
    """An optimizer that runs `plan`.

    Args:
      plan: noise scale, clip norm and expected batch size. With ε = ∞ the result
        neither clips nor adds noise, and is otherwise the same.
      learning_rate: a number or a Keras schedule of logical steps.
      optimizer: "adam", "adafactor" (Keras's), "t5x_adafactor" (see `adafactor`) or
        "sgd". Each reads the clipped and noised gradient alone (post-processing).
      engine: how clipped sums are made: "fast" (see `privacy.fast`), or
        tensorflow-privacy's "dpkeras" or "vectorized".
      noise_seed: secret, 128 bits, or 256 where the plan is secure; `None` takes
        fresh entropy. Only tests fix it.
      **options: passed on to the optimizer.

    Returns:
      A Keras optimizer with `LogicalStep`'s methods; a tensorflow-privacy
      optimizer where ε is finite and that package can be imported.

    Raises:
      InputError: unknown optimizer or engine, an option that the plan decides, a rate
        or an option that is not a number to train with, or an engine of
        tensorflow-privacy's where that does not import.
    """
    base = OPTIMIZERS[validation.one_of("optimizer", optimizer, tuple(OPTIMIZERS))]
    validation.one_of("engine", engine, ENGINES)
    spec = plan.spec
    for name in _OWN_OPTIONS:
        if name in options:
            raise validation.InputError(
                f"{name} is {options[name]!r}, but the plan decides how rows are "
                "clipped and noised: with tensorflow-privacy's own options one row "
                "could move the sum by more than the sensitivity. Leave it out; "
                "microbatch_size in train or PrivateModel bounds memory."
            )
    _require_rate(learning_rate, spec.steps)
    _require_options(options)
    options["learning_rate"] = learning_rate
    if not spec.private:
        made = _non_private_class(base)(**options)
    elif parts.MISSING:
        if engine != "fast":
            raise validation.InputError(
                f"engine {engine!r} is tensorflow-privacy's, which this environment "
                f'does not have ({parts.MISSING}). Use engine "fast", which gives the '
                "same sums."
            )
        made = _fast_class(base)(**options)
    elif engine == "vectorized":
        parent = parts.vectorized_class(base)
        made = _jacobian_class(parent)(
            l2_norm_clip=spec.clip_norm, noise_multiplier=0.0, **options
        )
    else:
        parent = parts.generic_class(base)
        build = _fast_class if engine == "fast" else _jacobian_class
        # Deviation 0: the parent clips, `privatize` adds the noise.
        query = parts.GaussianSumQuery(spec.clip_norm, 0.0)
        made = build(parent)(dp_sum_query=query, **options)
    if not hasattr(made, "_name"):  # tensorflow-privacy's word for Keras's `name`
        made._name = made.name
    made._begin(plan, engine, noise_seed)
    return made


def _require_rate(learning_rate: Any, steps: int) -> None:
    """Refuses rates that would make weights NaN, after steps that were paid for."""
    schedule = keras.optimizers.schedules.LearningRateSchedule
    if callable(learning_rate) and not isinstance(learning_rate, schedule):
        raise validation.InputError(
            f"learning_rate is {learning_rate!r}. Give a number, or a "
            "tf.keras.optimizers.schedules.LearningRateSchedule."
        )
    if callable(learning_rate):
        # All steps of a short run: where a schedule breaks, it breaks at some boundary.
        tried = np.unique(np.linspace(0, steps - 1, min(steps, 200)).astype(np.int64))
        for step in tried.tolist():
            try:
                rate = float(learning_rate(tf.constant(step, tf.int64)))
            except ValueError as error:  # a number that float32 does not hold
                raise validation.InputError(
                    f"learning_rate is {learning_rate!r}, which cannot be computed at "
                    f"step {step}: {error} Give a schedule of numbers below 3.4e38."
                ) from error
            if not 0 <= rate < np.inf:
                raise validation.InputError(
                    f"learning_rate is {rate} at step {step}; a schedule must give a "
                    f"finite number, not below 0, at each of the {steps} steps."
                )
            _require_single(f"learning_rate at step {step}", rate)
    else:
        validation.in_range("learning_rate", learning_rate, 0.0, np.inf, high_open=True)
        _require_single("learning_rate", learning_rate)


def _require_single(name: str, value: Any, above_0: bool = False) -> None:
    """Refuses a number that float32, in which steps are computed, does not hold."""
    # 1e39 is infinite in it, and 1e-50 is 0.
    with np.errstate(over="ignore", under="ignore"):
        single = float(np.float32(value))
    if not np.isfinite(single) or (above_0 and single == 0):
        raise validation.InputError(
            f"{name} is {value!r}, which is {single} in float32. Give a number "
            "between 1.2e-38 and 3.4e38."
        )


def _require_options(options: dict[str, Any]) -> None:
    """Refuses options that would make weights NaN, after steps that were paid for."""
    if "lr" in options:
        raise validation.InputError(
            f"lr is {options['lr']!r}, Keras's former name of learning_rate, which it "
            "would replace unchecked. Give learning_rate alone."
        )
    if options.get("step_offset"):
        raise validation.InputError(
            f"step_offset is {options['step_offset']!r}, but a run counts its steps "
            "from 0: before it, each would count as the first. Leave it at 0."
        )
    for name, value in options.items():
        if value is None or name == "name":
            continue
        if isinstance(value, bool) and name not in _SHARES + _ABOVE_0:
            continue
        if callable(value) or isinstance(value, (list, tuple)):
            continue  # functions of gradients that are noised already
        if name in _SHARES:
            validation.in_range(name, value, 0.0, 1.0, high_open=True)
        elif name in _ABOVE_0:
            validation.positive(name, value)
        elif name == "beta_2_decay":  # Keras's Adafactor: beta_2 is 1 - t^beta_2_decay
            validation.in_range(name, value, -np.inf, 0.0, low_open=True)
        else:
            validation.in_range(name, value, 0.0, np.inf, high_open=True)
        _require_single(name, value, name in _ABOVE_0)


def _fast_class(parent: Any) -> Callable[..., LogicalStep]:
    class FastOptimizer(LogicalStep, parent):
        """An optimizer whose sums come from `privacy.fast`."""

        def clipped_sum(
            self, per_example_losses: Any, variables: Any, layers: Any, weights: Any
        ) -> Any:
            layers = list(layers)
            if not layers:
                raise validation.InputError(
                    'engine "fast" must know the layers that hold the weights. Pass '
                    "layers=[model]."
                )
            spec = self.plan.spec
            result = fast.clipped_sum(
                per_example_losses,
                layers,
                variables,
                spec.clip_norm,
                weights=weights,
                rows_per_unit=self.plan.rows_clipped_together,
            )
            return Clipped(result.sums, result.losses, True)

    return FastOptimizer


def _jacobian_class(parent: Any) -> Callable[..., LogicalStep]:
    class JacobianOptimizer(LogicalStep, parent):
        """A tensorflow-privacy optimizer, taken apart into a logical step."""

        def clipped_sum(
            self, per_example_losses: Any, variables: Any, layers: Any, weights: Any
        ) -> Any:
            together = self.plan.rows_clipped_together
            with tf.GradientTape() as tape:
                found = require_rows(per_example_losses())
                # A padding row's loss is exactly zero, and so is its gradient;
                # `where` rather than a product, as 0 · NaN would not be.
                losses = tf.where(weights > 0, found, 0.0)
                by_unit = tf.reduce_sum(tf.reshape(losses, [-1, together]), axis=1)
            finite_tape = FiniteTape(tape)
            averaged = parent._compute_gradients(
                self, by_unit, variables, tape=finite_tape
            )
            # The parent divides by the number of units; undo it exactly once.
            sums = [gradient * float(by_unit.shape[0]) for gradient, _ in averaged]
            return Clipped(sums, losses, finite_tape.all_finite)

    return JacobianOptimizer


def _non_private_class(base: Any) -> Callable[..., LogicalStep]:
    class NonPrivateOptimizer(LogicalStep, base):
        """The same step without clipping and noise: the ε = ∞ baseline."""

        def clipped_sum(
            self, per_example_losses: Any, variables: Any, layers: Any, weights: Any
        ) -> Any:
            with tf.GradientTape() as tape:
                losses = require_losses(per_example_losses())
                losses = tf.where(weights > 0, losses, 0.0)
                total = tf.reduce_sum(losses)
            gradients = tape.gradient(
                total, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO
            )
            return Clipped([tf.convert_to_tensor(g) for g in gradients], losses, True)

    return NonPrivateOptimizer
