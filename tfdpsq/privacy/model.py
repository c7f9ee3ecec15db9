"""Keras's compile and fit for a private model.

    plan = privacy.make_plan(privacy.PrivacySpec(epsilon=8.0, clip_norm=0.1, ...))
    private = privacy.PrivateModel(model, plan, microbatch_size=32)
    private.compile(tf.keras.optimizers.Adam(1e-3), loss=loss)   # reduction=NONE
    private.fit(x, y)
    private.epsilon()

`fit` takes the data themselves, not batches of them, because the guarantee rests
on how batches are drawn. Predicting, evaluating, saving and further layers go on
with the model that was wrapped: its weights are trained in place.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.keras_choice import keras2 as keras
from tfdpsq.keras_choice import require_own
from tfdpsq.privacy import fit_inputs
from tfdpsq.privacy.engines import require_engine
from tfdpsq.privacy.fast.capture import flatten
from tfdpsq.privacy.fast.products import precision_in_words
from tfdpsq.privacy.loop import Watch, digest_of_weights, unquoted_values
from tfdpsq.privacy.optimizers import require_new
from tfdpsq.privacy.plan import PrivacyPlan
from tfdpsq.privacy.proof import reads as private_reads
from tfdpsq.privacy.proof.certificate import make_certificate
from tfdpsq.privacy.proof.certificate_files import code_fingerprint
from tfdpsq.privacy.proof.ledger import ledger_in
from tfdpsq.privacy.randomness.sampling import Groups
from tfdpsq.privacy.step import Batch
from tfdpsq.privacy.terms import require_rows
from tfdpsq.privacy.training import train

_ARGUMENT = (
    "The loss of each row reads no other row. The gradients of all rows that a step "
    "draws of one {unit} are added up and clipped to the clip norm together, so adding "
    "or removing one {unit} moves the sum by at most the clip norm."
)
# By Keras, of metrics, shapes and types.
_NOT_EVALUATED = (AttributeError, IndexError, KeyError, TypeError, ValueError)


class PrivateModel(keras.Model):
    """Any Keras model, trained by a plan.

    Attributes:
      model: the model that was wrapped.
      plan: what `fit` runs.
      steps_executed: logical steps that `fit` has run.
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
          model: functional, sequential or subclassed. Its own `train_step`, if it has
            one, is not called.
          plan: made by `make_plan` for the data that `fit` will get.
          microbatch_size: rows differentiated at a time.
          engine: how clipped sums are computed; see `engines`.
          strict: refuse validation data and withhold training losses, which are
            measurements of private data that ε does not cover.
          adapted_to: "public" or "private": the data that layers of the model, such
            as `Normalization` and `TextVectorization`, were adapted to. Their
            statistics and words are released without noise, so private ones are
            recorded in `reads`. Needed only where there are such layers.

        Raises:
          InputError: no Keras model, or one of another Keras; no plan;
            `microbatch_size` below one; an unknown `adapted_to`.
        """
        require_own("model", model)
        fit_inputs.require_type("model", model, keras.Model)
        fit_inputs.require_type("plan", plan, PrivacyPlan)
        super().__init__(name=f"private_{model.name}")
        self.model = model
        self.plan = plan
        self.microbatch_size = validation.positive_integer(
            "microbatch_size", microbatch_size
        )
        self.engine = require_engine(engine)
        self._adapted_to = validation.one_of(
            "adapted_to", adapted_to, ("", "public", "private")
        )
        self.steps_executed = 0
        self._directory: str | None = None
        self._run_id: str | None = None
        self._is_running = False
        self._ran: _FitRecord | None = None
        self.reads = private_reads.PrivateReads(strict=strict)

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """Calls the wrapped model."""
        masked = {} if mask is None else {"mask": mask}  # not every `call` takes one
        return self.model(inputs, training=training, **masked)

    def save(self, *arguments: Any, **options: Any) -> None:
        """Saves the wrapped model, as `ModelCheckpoint` does; see `keras.Model`."""
        self.model.save(*arguments, **options)

    def save_weights(self, *arguments: Any, **options: Any) -> None:
        """Saves the weights of the wrapped model; see `keras.Model`."""
        self.model.save_weights(*arguments, **options)

    def summary(self, *arguments: Any, **options: Any) -> None:
        """Prints the layers of the wrapped model; see `keras.Model`."""
        self.model.summary(*arguments, **options)

    def export(self, *arguments: Any, **options: Any) -> None:
        """Exports the wrapped model for serving; see `keras.Model`."""
        self.model.export(*arguments, **options)

    def load_weights(self, *arguments: Any, **options: Any) -> Any:
        """Loads weights into the wrapped model; see `keras.Model`."""
        return self.model.load_weights(*arguments, **options)

    def compile(
        self,
        optimizer: Any,
        loss: fit_inputs.Loss | str,
        jit_compile: bool = False,
        steps_per_execution: int = 1,
        **options: Any,
    ) -> None:
        """Sets optimizer and loss.

        Args:
          optimizer: a new Keras optimizer, or the name of one.
          loss: a Keras loss with `reduction=NONE`, the name of one, or a function of
            (targets, predictions) to losses with the rows as first dimension;
            further dimensions are averaged.
          jit_compile: compile the step with XLA.
          steps_per_execution: steps of `fit` in one compiled call, never past the end
            of an epoch; all are paid for before it, and callbacks called after
            it. As in Keras, of `evaluate` and `predict`, too.
          **options: passed on to Keras; metrics are computed by `evaluate` alone.

        Raises:
          InputError: an optimizer that has taken steps or has no finite rate, a loss
            that reduces over rows or that Keras does not know, the policy
            mixed_float16, `loss_weights`, or `run_eagerly`.
        """
        self._require_idle("compile")
        fit_inputs.require_options(options)
        optimizer = keras.optimizers.get(optimizer)
        require_new(optimizer, self.plan.spec.steps)
        policies = {layer.dtype_policy.name for layer in flatten([self])}
        if "mixed_float16" in policies:
            raise validation.InputError(
                "the policy is mixed_float16, for which Keras scales losses: "
                "gradients would be clipped at another norm. Set mixed_bfloat16 before "
                "the model is made."
            )
        self._row_loss = fit_inputs.row_loss(loss)
        self._jit = jit_compile
        self._steps_at_once = validation.positive_integer(
            "steps_per_execution", steps_per_execution
        )
        super().compile(
            optimizer=optimizer,
            loss=self._row_loss,
            steps_per_execution=steps_per_execution,
            **options,
        )

    def _try_validation(self, given: Sequence[Any]) -> None:
        """Evaluates one row: a misspelt metric would end the run after an epoch.

        Raises:
          InputError: it fails; the message does not quote Keras's, which may quote the
            row.
        """
        first = [tf.nest.map_structure(fit_inputs.first_row, part) for part in given]
        with unquoted_values(
            "validation_data could not be evaluated", "Nothing was spent. Mend it."
        ):
            try:
                _evaluated(self, first)
            except validation.InputError:
                raise
            except _NOT_EVALUATED as error:
                raise validation.InputError(
                    "validation_data cannot be evaluated with the metrics that "
                    f"compile() was given ({type(error).__name__}). Nothing was spent. "
                    "Compare shapes, types and the names of metrics; "
                    "evaluate(x[:1], y[:1]) shows Keras's own error."
                ) from None

    def fit(  # noqa: D417  (the arguments of Keras's that have no meaning here)
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
        **of_keras: Any,
    ) -> keras.callbacks.History:
        """Runs the plan: its steps, drawn by its sampler from all rows.

        Args:
          x: inputs, arrays with one row per example, nested as the model takes
            them; a row is a unit unless `groups` says otherwise.
          y: targets, likewise.
          groups: for unit "user", which rows are whose.
          directory: see `train`; with it the run survives being killed, and goes on
            with the same data only. It holds the seeds of the noise: call
            `privacy.discard_state(directory)` once the result is safe; ledger and
            reads stay.
          steps_per_epoch: after how many steps callbacks see the end of an epoch;
            `None` takes n over the batch size.
          callbacks: Keras callbacks; `stop_training` is obeyed. They get losses of
            private rows. So where ε is finite none may change a weight, a learning
            rate or another setting of the optimizer. What one keeps or writes, such as
            weights that were best by a loss, is of no certificate.
          validation_data: (x, y) or (x, y, sample weights), evaluated after every
            epoch: recorded in `reads` as a private read. For public data use
            `evaluate` after `fit`.
          verbose: as in Keras.
          **of_keras: none; `epochs`, `batch_size` and the like are the plan's.

        Returns:
          Keras's history. Its losses are private measurements, recorded in `reads`;
          in strict mode there are none.

        Raises:
          InputError: not compiled; a data set instead of arrays; rows that differ in
            number from each other or from the plan; layers adapted to data that nobody
            declared; callbacks that set learning rates or weights; Keras's other
            arguments; what `train` raises.
        """
        directory = fit_inputs.checked_directory(directory, callbacks, of_keras)
        self._require_one_run(directory, callbacks)
        data = fit_inputs.rows_of(x, y)
        if callbacks:
            # What one does to the caller's arrays may follow from losses, and a killed
            # run would not repeat it.
            data = tf.nest.map_structure(np.array, data)
        flat = tf.nest.flatten(data)
        rows = len(flat[0])
        self._record_reads(directory, validation_data)
        steps = self.plan.spec.steps
        per_epoch = validation.positive_integer(
            "steps_per_epoch",
            max(1, round(1 / self.plan.sampling_probability))
            if steps_per_epoch is None
            else steps_per_epoch,
        )
        epochs = {"epochs": -(-steps // per_epoch), "steps": per_epoch}
        shown = {"add_history": True, "add_progbar": verbose != 0, "verbose": verbose}
        watch = keras.callbacks.CallbackList(callbacks, model=self, **shown, **epochs)
        epoch = _Epochs(self, watch, per_epoch, steps, validation_data)
        # A subclassed model has its weights only once it has been called: on no row of
        # the data, of which it might keep something.
        empty = tf.nest.map_structure(fit_inputs.blank_row, data)
        together, loss = self.plan.rows_clipped_together, self._row_loss
        fit_inputs.try_model(self.model, empty["x"], empty["y"], loss, together)
        ran = _FitRecord(self.plan, self.model, self.optimizer, self._jit)
        if validation_data is not None:
            with ran.weights_kept():
                self._try_validation(validation_data)
        self.stop_training = False
        self._is_running = True
        try:
            watch.on_train_begin()
            self.steps_executed = train(
                ran.plan,
                lambda batch: self._losses_of(ran.model, batch, data),
                ran.model.trainable_variables,
                ran.optimizer,
                lambda at: {f"{i:04d}": values[at] for i, values in enumerate(flat)},
                self.microbatch_size,
                layers=[ran.model],
                engine=self.engine,
                units=None if groups is not None else rows,
                groups=groups,
                directory=directory,
                data_fingerprint=fit_inputs.fingerprint(flat)
                if directory is not None
                else "",
                before_call=epoch.begin,
                also_tried=fit_inputs.extreme_rows(flat, groups),
                on_step=epoch.step,
                jit_compile=self._jit,
                steps_per_loop=self._steps_at_once,
                pause_every=per_epoch,
            )
        finally:  # also of a run that was interrupted, or has diverged
            self._is_running = False
            self._count(directory, epoch)
        with ran.weights_kept():
            watch.on_train_end()
        ran.end()
        self._ran = ran
        return self.history

    def _count(self, directory: str | None, epoch: _Epochs) -> None:
        """Counts the steps of a run, or of a part of one."""
        # Callbacks of a killed run saw weights of steps paid for then,
        # also where this one has taken none. `iterations` is not it: a callback
        # that loads weights sets it back.
        ledger = ledger_in(directory, self.plan.fingerprint)
        paid = ledger.steps_paid if ledger else None
        ran = epoch.executed if paid is None else paid
        self.steps_executed = max(self.steps_executed, ran)
        self._run_id = ledger.run if ledger else None

    def _record_reads(
        self, directory: str | os.PathLike | None, validation_data: Any
    ) -> None:
        """Records what `fit` reads beyond ε; in the directory, if there is one."""
        adapted = fit_inputs.adapted_layers(self.model, self.plan, self._adapted_to)
        if validation_data is not None:
            fit_inputs.require_validation(validation_data)
        if directory is not None:
            before = self.reads.entries
            path = os.path.join(directory, private_reads.FILE_NAME)
            self.reads = private_reads.PrivateReads(path, self.reads.strict)
            for entry in before:
                self.reads.record(**entry)
        if validation_data is not None:
            self.reads.record(
                "the validation data, after every epoch", "the history of fit()"
            )
        if adapted and self._adapted_to == "private":
            self.reads.record(f"the data that {adapted} adapted to", "the weights")
        if not self.reads.strict:
            self.reads.record("the training loss of every step", "the history of fit()")

    def _require_idle(self, what: str) -> None:
        """Refuses what a callback must not call, while `fit` runs."""
        if self._is_running:
            raise validation.InputError(
                f"{what} was called while fit runs, by a callback: its steps would be "
                "in no count. Make another PrivateModel, whose epsilon adds to this "
                "one's."
            )

    def _require_one_run(
        self,
        directory: str | None,
        callbacks: Sequence[keras.callbacks.Callback],
    ) -> None:
        """Refuses a plan's second run, and what a resumed one could not repeat."""
        self._require_idle("fit")
        if not self._is_compiled:
            raise validation.InputError("call compile(optimizer, loss) before fit.")
        ledger = ledger_in(directory, self.plan.fingerprint)
        run_id = ledger.run if ledger else None
        # Another ledger, or none, would not count the steps that were paid before.
        same = directory == self._directory and run_id == self._run_id
        if self.steps_executed and (directory is None or not same):
            raise validation.InputError(
                f"fit has run {self.steps_executed} steps of its plan already; to run "
                "it again would spend the same budget a second time. Make another "
                "PrivateModel, whose epsilon adds to this one's."
            )
        if directory is not None or self.plan.spec.private:
            fit_inputs.require_watching_callbacks(callbacks)
        self._directory = directory

    def _losses_of(
        self, model: keras.Model, batch: Batch, data: dict[str, Any]
    ) -> tf.Tensor:
        """Returns one loss per row of a batch, packed as `data` is."""
        parts = [batch[f"{i:04d}"] for i in range(len(tf.nest.flatten(data)))]
        packed = tf.nest.pack_sequence_as(data, parts)
        predictions = model(packed["x"], training=True)
        if model.losses:
            raise validation.InputError(
                f"the model adds {len(model.losses)} losses of its own "
                "(regularisation), which belong to no row. Remove them."
            )
        losses = self._row_loss(packed["y"], predictions)
        if losses.shape.rank is not None and losses.shape.rank > 1:
            losses = tf.reduce_mean(losses, range(1, losses.shape.rank))
        return require_rows(losses)

    def epsilon(self, accountant: str | None = None) -> float:
        """ε of what `fit` ran; see `PrivacyPlan.epsilon`.

        That of the whole plan where a callback stopped training: when it stopped tells
        of the weights, too. Where it looked at losses or metrics of private rows, no ε
        covers that choice.
        """
        stopped = self.stop_training and self.steps_executed
        steps = self.plan.spec.steps if stopped else self.steps_executed
        return self.plan.epsilon(steps, accountant)

    def certificate(
        self,
        description: str,
        sensitivity_argument: str | None = None,
        fingerprints: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """The certificate of what `fit` ran, which `verify_certificate` recomputes.

        Write it as JSON next to the weights; `tfdpsq verify` reads it. It
        covers `fit` alone: neither what the weights learnt from private data before,
        nor settings chosen by looking at such data, nor the reads that it lists.

        Args:
          description: what was trained, on what, in a sentence.
          sensitivity_argument: why one unit moves the sum of clipped gradients by
            `plan.sensitivity` at most; `None` states it of losses that each read their
            own row, as `fit` tries them.
          fingerprints: ids of data and code, "pairs" for the private data's. A plain
            hash of private data would let guesses at them be tested: use a keyed one.

        Raises:
          InputError: missing steps; no argument for a `sensitivity_multiplier`
            above 1; a value that JSON cannot hold.
        """
        if fingerprints is None or isinstance(fingerprints, Mapping):
            fingerprints = {"code": code_fingerprint(), **(fingerprints or {})}
        spec, multiplier = self.plan.spec, self.plan.spec.sensitivity_multiplier
        if self.steps_executed != spec.steps:
            raise validation.InputError(
                f"fit has run {self.steps_executed} of {spec.steps} steps. Let it run "
                "to the end, in the same directory if it was interrupted; or state "
                "the cost of all by privacy.make_certificate(plan, plan.spec.steps)."
            )
        if (ran := self._ran) is None or not ran.is_of(self.plan, self.model):
            raise validation.InputError(
                f"plan or weights of {self.model.name} are others than fit left, which "
                "is what a certificate covers: they were set or loaded since, or the "
                "last fit did not end. Ask for it before anything is changed."
            )
        if sensitivity_argument is None:
            if multiplier != 1:
                raise validation.InputError(
                    f"sensitivity_multiplier is {multiplier}, and only you know why it "
                    "holds. Give sensitivity_argument."
                )
            sensitivity_argument = _ARGUMENT.format(unit=spec.unit)
        engine = self.engine
        adapted = fit_inputs.adapted_layers(self.model, self.plan, self._adapted_to)
        return make_certificate(
            ran.plan,
            self.steps_executed,
            description=description,
            sensitivity_argument=sensitivity_argument,
            training={
                "optimizer": type(ran.optimizer).__name__,
                "engine": engine,
                "microbatch_size": self.microbatch_size,
                "trained_parameters": ran.trained,
                "weights": ran.digest,
                "products_of_clipping": precision_in_words(ran.jit)
                if engine == "fast"
                else "as in tensorflow-privacy",
                **(
                    {"adapted_layers": f"{adapted}, to {self._adapted_to} data"}
                    if adapted
                    else {}
                ),
            },
            fingerprints=fingerprints,  # refused where they are no mapping
            private_reads=self.reads.entries,
            run_id=self._run_id,
        )


def _evaluated(model: keras.Model, given: Sequence[Any]) -> dict[str, float]:
    """Evaluates (x, y) or (x, y, sample weights)."""
    x, y, *weights = given
    return model.evaluate(
        x,
        y,
        sample_weight=weights[0] if weights else None,
        verbose=0,
        return_dict=True,
    )


class _FitRecord:
    """A record of what `fit` runs and leaves, which no callback can exchange.

    Attributes:
      plan: of the run.
      model: that is trained.
      optimizer: that trains it.
      jit: whether XLA compiles its steps.
      trained: number of parameters that are trained.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        model: keras.Model,
        optimizer: Any,
        jit: bool,
    ):
        self.plan, self.model, self.optimizer, self.jit = plan, model, optimizer, jit
        self.trained = int(sum(np.prod(v.shape) for v in model.trainable_variables))
        self._weights = list(model.weights)
        self.digest = ""  # of the weights of the last step

    def weights_kept(self) -> contextlib.AbstractContextManager[None]:
        """Refuses a block that changes weights; it may see private rows."""
        watch = Watch(self.optimizer, self._weights, self.plan.spec.private)
        return watch.unchanged("before the first step or after the last one")

    def end(self) -> None:
        """Notes the weights as those of the last step."""
        self.digest = digest_of_weights(self._weights)

    def is_of(self, plan: PrivacyPlan, model: keras.Model) -> bool:
        """Returns whether plan, model and weights are those that `fit` left."""
        same = plan is self.plan and model is self.model
        return same and digest_of_weights(self._weights) == self.digest


class _Epochs:
    """Tells Keras's callbacks of steps and epochs."""

    def __init__(
        self, model: Any, watch: Any, per_epoch: Any, steps: Any, validation_data: Any
    ) -> None:
        self._model = model
        self._watch = watch
        self._per_epoch = per_epoch
        self._steps = steps
        self._validation = validation_data
        self._losses: list[float] = []
        self._begun = False
        self.executed = 0  # steps of this process, with those of a call that failed

    def begin(self, now: range) -> None:
        for step in now:
            epoch, batch = divmod(step, self._per_epoch)
            if batch == 0 or not self._begun:  # also where a killed run goes on
                self._watch.on_epoch_begin(epoch)
            self._begun = True
            self._watch.on_train_batch_begin(batch)
        self.executed = now.stop

    def step(self, executed: int, loss: float) -> bool:
        epoch, batch = divmod(executed - 1, self._per_epoch)
        self._losses.append(loss)
        logs: dict[str, Any] = {}
        if not self._model.reads.strict:
            logs["loss"] = np.mean(self._losses)
        self._watch.on_train_batch_end(batch, logs)
        if batch == self._per_epoch - 1 or executed == self._steps:
            if self._validation is not None:
                with unquoted_values(
                    f"validation_data could not be evaluated after step {executed}",
                    f"Mend it. {executed} steps of this run are spent; with a "
                    "directory, fit goes on from those that are saved there.",
                ):
                    found = _evaluated(self._model, self._validation)
                logs = {**logs, **{f"val_{name}": v for name, v in found.items()}}
            self._watch.on_epoch_end(epoch, logs)
            self._losses = []
        return bool(self._model.stop_training)
