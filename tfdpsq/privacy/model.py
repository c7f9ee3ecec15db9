"""Keras's compile and fit for a private model; README has an example.

`fit` takes the data, not batches of them, because the guarantee rests on how batches
are drawn. The wrapped model is trained in place, and is used and saved as before.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.keras_choice import keras2 as keras
from tfdpsq.keras_choice import require_own
from tfdpsq.privacy import checkpoint
from tfdpsq.privacy.batches import as_bytes, digest_of, unquoted_values
from tfdpsq.privacy.fast.engine import require_rows
from tfdpsq.privacy.fast.gradient_norms import precision_in_words
from tfdpsq.privacy.optimizers import require_new
from tfdpsq.privacy.plan import PrivacyPlan
from tfdpsq.privacy.proof.certificate import code_fingerprint, make_certificate
from tfdpsq.privacy.proof.ledger import READS_FILE_NAME, PrivateReads, ledger_in
from tfdpsq.privacy.randomness.sampling import Groups
from tfdpsq.privacy.step import Batch
from tfdpsq.privacy.training import Watch, digest_of_weights, train

Loss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
_ARGUMENT = (
    "The loss of each row reads no other row. The gradients of the rows drawn of one "
    "{unit} are summed and clipped together, so one {unit} moves the sum by at most "
    "the clip norm."
)


class PrivateModel(keras.Model):
    """Any Keras model, trained by a plan.

    Attributes:
      model: the model that was wrapped.
      plan: what `fit` runs.
      steps_executed: logical steps that `fit` has paid for.
      reads: what was read of private data outside the budget.
    """

    def __init__(
        self,
        model: keras.Model,
        plan: PrivacyPlan,
        microbatch_size: int = 32,
        engine: str = "fast",
        strict: bool = False,
        adapted_to: str = "",
    ):
        """Wraps a model.

        Args:
          model: functional, sequential or subclassed; a `train_step` of its own is
            not called.
          plan: made by `make_plan` for the data that `fit` will get.
          microbatch_size: rows differentiated at a time.
          engine: how clipped sums are computed; see `engines`.
          strict: refuse validation data and withhold training losses, which are
            private reads that ε does not cover.
          adapted_to: "public" or "private": the data that layers such as
            `Normalization` were adapted to. Statistics of private ones, released
            without noise, are recorded in `reads`.
        """
        require_own("model", model)
        super().__init__(name=f"private_{model.name}")
        self.model, self.plan = model, plan
        self.microbatch_size, self.engine = microbatch_size, engine
        self._adapted_to = validation.one_of(
            "adapted_to", adapted_to, ("", "public", "private")
        )
        self.steps_executed = 0
        self.reads = PrivateReads(strict=strict)
        self._directory: str | None = None
        self._run_id: str | None = None
        self._fitted = _Fitted([], {})

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Calls the wrapped model."""
        return self.model(inputs, training=training)

    def save(self, *arguments: Any, **options: Any) -> None:
        """Saves the wrapped model, as `ModelCheckpoint` does; see `keras.Model`."""
        self.model.save(*arguments, **options)

    def save_weights(self, *arguments: Any, **options: Any) -> None:
        """Saves the weights of the wrapped model; see `keras.Model`."""
        self.model.save_weights(*arguments, **options)

    def compile(
        self,
        optimizer: Any,
        loss: Loss | str | None = None,
        metrics: Any = None,
        jit_compile: bool = False,
    ) -> None:
        """Sets optimizer and loss.

        Args:
          optimizer: a new Keras optimizer, or the name of one.
          loss: a Keras loss with `reduction=NONE`, the name of one, or a function of
            (targets, predictions) to losses [rows, …], averaged over all but rows.
            Weights of rows or classes belong in it, to be clipped. `None` takes
            `model.per_example_losses(x, training)`, [rows], and no targets.
          metrics: as in Keras; computed by `evaluate` alone.
          jit_compile: compile the step with XLA.

        Raises:
          InputError: a used optimizer, or one without a finite rate; a loss that
            reduces over rows; the policy mixed_float16.
        """
        optimizer = keras.optimizers.get(optimizer)
        require_new(optimizer, self.plan.spec.steps)
        policies = {layer.dtype_policy.name for layer in self._flatten_layers()}
        if "mixed_float16" in policies:
            raise validation.InputError(
                "the policy is mixed_float16, which scales losses. Set mixed_bfloat16 "
                "before the model is made."
            )
        self._jit = jit_compile
        self._row_loss = None if loss is None else _RowLoss(keras.losses.get(loss))
        self._mean_loss = keras.metrics.Mean("loss") if loss is None else None
        super().compile(optimizer=optimizer, loss=self._row_loss, metrics=metrics)

    def test_step(self, data: Any) -> Any:
        """Evaluates a batch, also by the model's own `per_example_losses`."""
        if self._mean_loss is None:
            return super().test_step(data)
        x, _, weights = keras.utils.unpack_x_y_sample_weight(data)
        losses = self.model.per_example_losses(x, training=False)
        self._mean_loss.update_state(losses, weights)
        return {"loss": self._mean_loss.result()}

    def fit(
        self,
        x: Any,
        y: Any = None,
        *,
        groups: Groups | None = None,
        directory: str | os.PathLike | None = None,
        steps_per_epoch: int | None = None,
        callbacks: Sequence[keras.callbacks.Callback] = (),
        validation_data: tuple[Any, ...] | None = None,
        verbose: int = 0,
    ) -> keras.callbacks.History:
        """Runs the plan, which has the steps, the batch size and the sampler.

        Args:
          x: inputs, arrays of one row per example, nested as the model takes them.
          y: targets, an array of one row per example; none where there is no loss.
          groups: for unit "user", which rows are whose.
          directory: see `train`; with it a killed run can be resumed. Call
            `privacy.discard_state(directory)` once the result is safe.
          steps_per_epoch: as in Keras; `None` takes n over the batch size.
          callbacks: Keras callbacks; `stop_training` is obeyed, and pays for the whole
            plan. They get losses of private rows, so where ε is finite none may change
            weights or the optimizer; what one writes has no certificate.
          validation_data: (x, y) or (x, y, sample weights), evaluated after every
            epoch and recorded as a private read. For public data call `evaluate`.
          verbose: as in Keras.

        Returns:
          Keras's history, with losses (private reads) unless `strict`.

        Raises:
          InputError: a second run of the plan; arrays of different lengths; layers
            adapted to undeclared data; callbacks that set rates; what `train` raises.
        """
        self._assert_compile_was_called()
        if directory is not None:
            directory = checkpoint.run_directory(directory)
        # Another ledger, or none, would not count the steps that were paid before.
        ledger = ledger_in(directory, self.plan.fingerprint)
        goes_on = ledger and (directory, ledger.run) == (self._directory, self._run_id)
        if self.steps_executed and not goes_on:
            raise validation.InputError(
                f"fit has run {self.steps_executed} steps of its plan; more would "
                "spend the same budget a second time. Make another PrivateModel."
            )
        self._directory = directory
        private = self.plan.spec.private
        if private or directory is not None:
            _require_watching(callbacks)
        if y is None and self._row_loss is not None:
            raise validation.InputError("fit got no targets. Give arrays: fit(x, y).")
        data = _arrays_of(x, y)
        flat = tf.nest.flatten(data)
        per_epoch = max(1, round(1 / self.plan.sampling_probability))
        if steps_per_epoch is not None:
            per_epoch = validation.positive_integer("steps_per_epoch", steps_per_epoch)
        # Traced, as a subclassed model has its weights only once it was called.
        losses = tf.function(lambda rows: self._losses_of(rows, training=False))
        specs = tf.nest.map_structure(
            lambda a: tf.TensorSpec([1, *a.shape[1:]], a.dtype), data
        )
        losses.get_concrete_function(specs)
        adapted = self._adapted_layers()
        self._record_reads(directory, validation_data, adapted)
        epochs = _Epochs(self, callbacks, per_epoch, verbose, validation_data)
        weights, trained = list(self.model.weights), self.model.trainable_variables
        facts: dict[str, Any] = {}

        def losses_of_batch(batch: Batch) -> tf.Tensor:
            parts = [batch[f"{i:04d}"] for i in range(len(flat))]
            packed = tf.nest.pack_sequence_as(data, parts)
            return require_rows(self._losses_of(packed, training=True))

        self.stop_training = False
        try:
            epochs.watch.on_train_begin()
            self.steps_executed = train(
                self.plan,
                losses_of_batch,
                trained,
                self.optimizer,
                lambda at: {f"{i:04d}": values[at] for i, values in enumerate(flat)},
                self.microbatch_size,
                layers=[self.model],
                engine=self.engine,
                units=len(flat[0]) if groups is None else groups,
                directory=directory,
                data_fingerprint=digest_of(flat if directory is not None else ()),
                before_step=epochs.begin,
                also_tried=_extreme_rows(flat, groups),
                on_step=epochs.step,
                jit_compile=self._jit,
                save_every=per_epoch,
                facts=facts,
            )
        finally:  # also of a run that was interrupted, or has diverged
            # A resumed run has spent what an earlier process paid for.
            if ledger := ledger_in(directory, self.plan.fingerprint):
                self.steps_executed = max(self.steps_executed, ledger.steps_paid)
                self._run_id = ledger.run
        with Watch(self.optimizer, weights, private).unchanged("after the last step"):
            epochs.watch.on_train_end()
        facts |= {
            "optimizer": type(self.optimizer).__name__,
            "microbatch_size": self.microbatch_size,
            "trained_parameters": int(sum(np.prod(v.shape) for v in trained)),
            "weights": digest_of_weights(weights),
        }
        if facts["engine"] == "fast":
            facts["products_of_clipping"] = precision_in_words(self._jit)
        if adapted:
            facts["adapted_layers"] = f"{adapted}, to {self._adapted_to} data"
        self._fitted = _Fitted(weights, facts)
        return self.history

    def _losses_of(self, data: Mapping[str, Any], training: bool) -> tf.Tensor:
        """[rows] losses of inputs "x" and targets "y"."""
        if self._row_loss is None:
            losses = self.model.per_example_losses(data["x"], training=training)
        else:
            predictions = self.model(data["x"], training=training)
            losses = self._row_loss(data["y"], predictions)
        if self.model.losses:
            raise validation.InputError(
                "the model adds losses (regularisation) that belong to no row. Remove "
                "them."
            )
        if losses.shape.rank is not None and losses.shape.rank > 1:
            losses = tf.reduce_mean(losses, range(1, losses.shape.rank))
        return losses

    def _adapted_layers(self) -> str:
        """Names the layers adapted to declared data; "" where ε = ∞."""
        found = ", ".join(
            layer.name
            for layer in self.model._flatten_layers(include_self=False)
            if getattr(layer, "_is_adapted", False)  # of Keras's preprocessing layers
        )
        if not self.plan.spec.private:
            return ""
        if found and not self._adapted_to:
            raise validation.InputError(
                f"adapt() was called on {found}. Set adapted_to to 'public', or to "
                "'private', which no epsilon covers."
            )
        return found

    def _record_reads(
        self, directory: str | None, validation_data: Any, adapted: str
    ) -> None:
        """Records what `fit` reads beyond ε; in the directory, if there is one."""
        if directory is not None:
            earlier = self.reads.entries
            path = os.path.join(directory, READS_FILE_NAME)
            self.reads = PrivateReads(path, self.reads.strict)
            for entry in earlier:
                self.reads.record(**entry)
        if validation_data is not None:
            self.reads.record(
                "the validation data, after every epoch", "the history of fit()"
            )
            with unquoted_values(
                "validation_data could not be evaluated", "Nothing was spent."
            ):
                self._evaluated(validation_data)
        if adapted and self._adapted_to == "private":
            self.reads.record(f"the data that {adapted} adapted to", "the weights")
        if not self.reads.strict:
            self.reads.record("the training loss of every step", "the history of fit()")

    def _evaluated(self, given: Sequence[Any]) -> dict[str, float]:
        """Evaluates (x, y) or (x, y, sample weights)."""
        x, y, weights = [*given, None][:3]
        return self.evaluate(x, y, sample_weight=weights, verbose=0, return_dict=True)

    def epsilon(self, accountant: str | None = None) -> float:
        """ε of the steps that `fit` paid for; see `PrivacyPlan.epsilon`.

        Where a callback stopped training these are all of the plan.
        """
        return self.plan.epsilon(self.steps_executed, accountant)

    def certificate(
        self,
        description: str,
        sensitivity_argument: str | None = None,
        fingerprints: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """The certificate of what `fit` ran, to write as JSON next to the weights.

        It covers `fit` alone: neither what the weights learnt from private data before,
        nor settings chosen by looking at such data, nor the reads that it lists.

        Args:
          description: what was trained, on what, in a sentence.
          sensitivity_argument: why one unit moves the sum of clipped gradients by
            `plan.sensitivity` at most; `None` says that each loss reads its own row.
          fingerprints: ids of data and code; "pairs" is a keyed hash of the private
            data.

        Raises:
          InputError: steps are missing; weights changed since; an argument is needed.
        """
        spec = self.plan.spec
        if self.steps_executed != spec.steps:
            raise validation.InputError(
                f"fit has run {self.steps_executed} of {spec.steps} steps; finish it, "
                "or call privacy.make_certificate."
            )
        weights, facts = self._fitted.weights, self._fitted.facts
        if not facts or digest_of_weights(weights) != facts["weights"]:
            raise validation.InputError(
                f"the weights of {self.model.name} changed since fit. Ask for the "
                "certificate before that."
            )
        if sensitivity_argument is None and spec.sensitivity_multiplier != 1:
            raise validation.InputError(
                f"sensitivity_multiplier is {spec.sensitivity_multiplier}. Give the "
                "sensitivity_argument that derives it."
            )
        return make_certificate(
            self.plan,
            self.steps_executed,
            description=description,
            sensitivity_argument=sensitivity_argument
            or _ARGUMENT.format(unit=spec.unit),
            training=facts,
            fingerprints={"code": code_fingerprint(), **(fingerprints or {})},
            private_reads=self.reads.entries,
            run_id=self._run_id,
        )


@dataclasses.dataclass
class _Fitted:
    """What `fit` left; a class, as Keras would track the weights of a tuple."""

    weights: list[tf.Variable]
    facts: dict[str, Any]


class _Epochs:
    """Tells Keras's callbacks of steps and epochs."""

    def __init__(
        self,
        model: PrivateModel,
        callbacks: Sequence[keras.callbacks.Callback],
        per_epoch: int,
        verbose: int,
        validation_data: Any,
    ):
        self.model, self.per_epoch, self.validation = model, per_epoch, validation_data
        self.steps = model.plan.spec.steps
        self.losses: list[float] = []
        self.begun = False
        self.watch = keras.callbacks.CallbackList(
            callbacks,
            add_history=True,
            add_progbar=verbose != 0,
            model=model,
            verbose=verbose,
            epochs=-(-self.steps // per_epoch),
            steps=per_epoch,
        )

    def begin(self, step: int) -> None:
        epoch, batch = divmod(step, self.per_epoch)
        if batch == 0 or not self.begun:  # also where a killed run goes on
            self.watch.on_epoch_begin(epoch)
        self.begun = True
        self.watch.on_train_batch_begin(batch)
        # Now, as the step counts even if the call fails, or a callback ends it.
        self.model.steps_executed = max(self.model.steps_executed, step + 1)

    def step(self, executed: int, loss: float) -> bool:
        epoch, batch = divmod(executed - 1, self.per_epoch)
        self.losses.append(loss)
        logs: dict[str, Any] = {}
        if not self.model.reads.strict:
            logs["loss"] = np.mean(self.losses)
        self.watch.on_train_batch_end(batch, logs)
        if batch == self.per_epoch - 1 or executed == self.steps:
            if self.validation is not None:
                found = self.model._evaluated(self.validation)
                logs = {**logs, **{f"val_{name}": v for name, v in found.items()}}
            self.watch.on_epoch_end(epoch, logs)
            self.losses = []
        return bool(self.model.stop_training)


class _RowLoss(keras.losses.Loss):
    """A loss's values row by row, with targets and predictions of like shape."""

    def __init__(self, function: Loss):
        super().__init__(reduction=keras.losses.Reduction.NONE)
        if getattr(function, "reduction", self.reduction) != self.reduction:
            raise validation.InputError(
                f"loss {type(function).__name__} reduces over rows. Give it "
                "reduction=tf.keras.losses.Reduction.NONE."
            )
        self._function = function

    def call(self, y_true: Any, y_pred: Any) -> Any:
        if tf.nest.is_nested(y_pred):
            raise validation.InputError(
                "the model has several outputs. Give it per_example_losses, and "
                "compile without a loss."
            )
        y_true, y_pred = tf.convert_to_tensor(y_true), tf.convert_to_tensor(y_pred)
        # [B] against [B, 1] would broadcast to every pair of rows, and [B] against [B]
        # would be averaged over rows.
        if y_pred.shape.rank == 1:
            y_pred = y_pred[:, tf.newaxis]
        if y_true.shape.rank == 1 and y_pred.shape.rank == 2 and y_pred.shape[1] == 1:
            y_true = y_true[:, tf.newaxis]
        return self._function(y_true, y_pred)


def _arrays_of(x: Any, y: Any) -> dict[str, Any]:
    """Returns {"x": nested arrays, "y": an array} of equal lengths; texts as bytes."""

    def as_array(values: Any) -> np.ndarray:
        array = np.asarray(values)
        if array.dtype == object and all(isinstance(each, str) for each in array.flat):
            array = array.astype(str)
        if array.ndim == 0 or 0 in array.shape or array.dtype == object:
            raise validation.InputError(
                f"fit got a {type(values).__name__} of shape {array.shape} and of "
                f"{array.dtype}. Give arrays of numbers or texts, a row per example."
            )
        return as_bytes("a text", array) if array.dtype.kind == "U" else array

    arrays = {"x": tf.nest.map_structure(as_array, x)}
    if y is not None:
        arrays["y"] = as_array(y)
    counts = {len(values) for values in tf.nest.flatten(arrays)}
    if len(counts) > 1:
        raise validation.InputError(
            f"inputs and targets have {sorted(counts)} rows; give as many of each."
        )
    return arrays


def _extreme_rows(arrays: Sequence[np.ndarray], groups: Groups | None) -> list[int]:
    """Returns the rows, of some unit, with the extreme ids or labels of each column."""
    count = len(arrays[0])
    rows = np.sort(groups.rows) if isinstance(groups, Groups) else np.arange(count)
    rows = rows[rows < count]  # others are refused where rows are taken
    found = set()
    for values in arrays:
        if values.dtype.kind not in "iuf":
            continue
        columns = values[rows].reshape(len(rows), -1)
        ends = list(columns.T)
        if len(ends) > 32:  # of all columns together
            ends = [columns.min(axis=1), columns.max(axis=1)]
        for each in map(np.nan_to_num, ends):
            found |= {int(rows[each.argmin()]), int(rows[each.argmax()])}
    return sorted(found)


def _require_watching(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Refuses callbacks that set rates or weights by private losses; see `Watch`."""
    rates = (keras.callbacks.LearningRateScheduler, keras.callbacks.ReduceLROnPlateau)
    for callback in tf.nest.flatten(callbacks):
        restores = getattr(callback, "restore_best_weights", False)
        if restores or isinstance(callback, rates):
            raise validation.InputError(
                f"callbacks has a {type(callback).__name__}, which chooses by private "
                "losses. Give the optimizer a LearningRateSchedule, or set "
                "restore_best_weights to False."
            )
