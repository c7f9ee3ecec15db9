"""Arithmetic of devices that round before they multiply."""

import numpy as np
import tensorflow as tf

from tfdpsq.privacy.fast import factored, gradient_norms

# Explicit bits of the mantissa, and the arithmetic that the engine presumes of it.
DEVICES = {
    "float32": (23, gradient_norms.FLOAT32),
    "tensor_float_32": (10, gradient_norms.TENSOR_FLOAT_32),
    "bfloat16": (7, gradient_norms.BFLOAT16),
}


def rounded(values, bits):
    """float32 values with a mantissa of this many explicit bits, ties to even."""
    drop = 23 - bits
    if drop == 0:
        return values
    words = np.ascontiguousarray(values, np.float32).view(np.uint32)
    odd = (words >> np.uint32(drop)) & np.uint32(1)
    words = words + np.uint32((1 << (drop - 1)) - 1) + odd
    return (words >> np.uint32(drop) << np.uint32(drop)).view(np.float32)


class Device:
    """Multiplies as a device does, and notes what every row adds to the sums.

    Attributes:
      squared: [B] float64, ‖what a row adds‖² over all weights.
    """

    def __init__(self, patch, name):
        bits, arithmetic = DEVICES[name]
        multiply, weighted_sum = factored.product, factored.weighted_sum
        operands = []
        self.squared = 0.0

        def product(one, other, transpose_a=False, transpose_b=False):
            one, other = (rounded(x.numpy(), bits) for x in (one, other))
            operands[:] = [one.astype(np.float64), other.astype(np.float64)]
            return multiply(
                tf.constant(one), tf.constant(other), transpose_a, transpose_b
            )

        def noted(uses, factors, shape):
            rows = len(factors)
            added = np.zeros([rows, *shape])
            for use in uses:
                operands.clear()
                weighted_sum([use], factors, shape)
                if isinstance(use, factored.Direct):
                    added += (operands[0].T * operands[1]).reshape(added.shape)
                elif isinstance(use, factored.Outer):
                    left, right = (x.reshape(rows, -1, x.shape[-1]) for x in operands)
                    outer = np.einsum("btm,btn->bmn", left, right)
                    added += outer.reshape(added.shape)
                else:  # no product takes part
                    scaled = use.right * tf.reshape(factors, [-1, 1, 1])
                    hot = np.eye(shape[0])[use.ids.numpy()]
                    added += np.einsum("btm,btn->bmn", hot, scaled.numpy())
            self.squared += np.sum(added.reshape(rows, -1) ** 2, axis=1)
            return weighted_sum(uses, factors, shape)

        patch.setattr(factored, "product", product)
        patch.setattr(factored, "weighted_sum", noted)
        patch.setattr(gradient_norms, "arithmetic", lambda dtype: arithmetic)
