"""Adafactor with T5X's meaning of its settings.

Keras's Adafactor caps the learning rate at 1/√t, always factors the last two
dimensions, and keeps a slot of the weight's own size. T5X's, which is flax's, takes the
rate as given, and keeps two vectors for the two largest dimensions, if both are large.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfdpsq.keras_choice import keras2 as keras
from tfdpsq.privacy.fast.factored import full_dtype

_OPTIONS = (
    "multiply_by_parameter_scale",
    "decay_rate",
    "clipping_threshold",
    "min_dim_size_to_factor",
    "epsilon1",
    "epsilon2",
)


@keras.utils.register_keras_serializable(package="tfdpsq")
class T5XAdafactor(keras.optimizers.Optimizer):
    """Adafactor (Shazeer & Stern 2018) as `t5x.adafactor` computes it.

    With g the gradient and w the weight, at the t-th update, t = 1 for the first:

    | quantity | value |
    |---|---|
    | β | 1 − t^−`decay_rate` |
    | v | β·v + (1 − β)·(g² + `epsilon1`); if factored, its means r and c over each of the two dimensions, and v = r·c / mean(r) |
    | u | g / √v, divided by max(1, rms(u) / `clipping_threshold`) |
    | s | learning rate · u; with `multiply_by_parameter_scale` times max(rms(w), `epsilon2`) |
    | w | w − s |

    A weight of three or more dimensions is factored over its two largest, as flax does.
    Slots are float32 (float64 for float64 weights).

    Attributes: its arguments.
    """  # noqa: E501

    def __init__(
        self,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule = 1e-3,
        multiply_by_parameter_scale: bool = True,
        decay_rate: float = 0.8,
        clipping_threshold: float | None = 1.0,
        min_dim_size_to_factor: int = 128,
        epsilon1: float = 1e-30,
        epsilon2: float = 1e-3,
        name: str = "T5XAdafactor",
        **options: Any,
    ):
        """Initializes the optimizer.

        Args:
          learning_rate: a number or a schedule.
          multiply_by_parameter_scale: take the rate relative to a weight's size.
          decay_rate: exponent of the second moment's decay, above 0.
          clipping_threshold: largest rms of an update; `None` for no limit.
          min_dim_size_to_factor: smallest size of either dimension that is factored.
          epsilon1: added to squared gradients.
          epsilon2: smallest size that a weight counts as having.
          name: the optimizer's.
          **options: of `keras.optimizers.Optimizer`.
        """
        super().__init__(name=name, **options)
        self._learning_rate = self._build_learning_rate(learning_rate)
        self.multiply_by_parameter_scale = multiply_by_parameter_scale
        self.decay_rate = decay_rate
        self.clipping_threshold = clipping_threshold
        self.min_dim_size_to_factor = min_dim_size_to_factor
        self.epsilon1 = epsilon1
        self.epsilon2 = epsilon2

    def build(self, var_list: list[tf.Variable]) -> None:
        """Creates the slots, which all exist before the first update."""
        super().build(var_list)
        if getattr(self, "_built", False):
            return
        self._built = True
        self._slots = []
        for variable in var_list:
            shape, slots = variable.shape.as_list(), {}
            shapes = {"v": shape}
            if dims := self._factored_dims(shape):
                row, column = dims
                shapes = {
                    "v_row": np.delete(shape, column).tolist(),
                    "v_col": np.delete(shape, row).tolist(),
                }
            for kind, sizes in shapes.items():
                name = f"{kind}/{variable._shared_name}"
                slots[kind] = self.add_variable(
                    tf.TensorShape(sizes), full_dtype(variable), name=name
                )
            self._slots.append(slots)

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable) -> None:
        """Updates one weight and its slots; see the class."""
        dtype = full_dtype(variable)
        slots = self._slots[self._index_dict[self._var_key(variable)]]
        gradient = tf.cast(tf.convert_to_tensor(gradient), dtype)
        value = tf.cast(variable, dtype)
        number = tf.cast(self.iterations + 1, dtype)
        # 1 − β, of which float32 keeps more digits than of β.
        share = tf.pow(number, -self.decay_rate)

        update = gradient * self._inverse_root(tf.square(gradient), share, slots)
        if self.clipping_threshold is not None:
            update /= tf.maximum(_rms(update) / self.clipping_threshold, 1)
        update *= tf.cast(self.learning_rate, dtype)
        if self.multiply_by_parameter_scale:
            update *= tf.maximum(_rms(value), self.epsilon2)
        variable.assign(tf.cast(value - update, variable.dtype))

    def _inverse_root(
        self, squares: tf.Tensor, share: tf.Tensor, slots: dict[str, tf.Variable]
    ) -> tf.Tensor:
        """Moves the second moments on, and returns 1/√v, which broadcasts to g."""
        squares += self.epsilon1

        def moved(slot: Any, values: Any) -> Any:
            return slot.assign((1 - share) * slot + share * values)

        dims = self._factored_dims(squares.shape.as_list())
        if dims is None:
            return tf.math.rsqrt(moved(slots["v"], squares))
        row, column = dims
        rows = moved(slots["v_row"], tf.reduce_mean(squares, column))
        columns = moved(slots["v_col"], tf.reduce_mean(squares, row))
        # Of the row dimension's place once the column's is gone.
        mean = tf.reduce_mean(rows, row - (column < row), keepdims=True)
        # The product of all three may leave float32's range; each factor does not.
        return tf.expand_dims(tf.math.rsqrt(rows / mean), column) * tf.expand_dims(
            tf.math.rsqrt(columns), row
        )

    def _factored_dims(self, shape: list[int]) -> tuple[int, int] | None:
        """Returns the second largest and the largest dimension, if these are factored.

        Of equal ones, the later counts as larger.
        """
        if len(shape) < 2:
            return None
        row, column = np.argsort(shape, kind="stable")[-2:].tolist()
        return None if shape[row] < self.min_dim_size_to_factor else (row, column)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        rate = self._serialize_hyperparameter(self._learning_rate)
        own = {name: getattr(self, name) for name in _OPTIONS}
        return {**super().get_config(), "learning_rate": rate, **own}


def _rms(values: tf.Tensor) -> tf.Tensor:
    return tf.sqrt(tf.reduce_mean(tf.square(values)))
