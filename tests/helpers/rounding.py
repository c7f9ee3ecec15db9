"""Arithmetic of devices that round before they multiply."""

import numpy as np

from tfdpsq.privacy.fast import products

# Explicit bits of the mantissa, and the arithmetic that the engine presumes.
DEVICES = {
    "float32": (23, products._FLOAT32),
    "tensor_float_32": (10, products._TENSOR_FLOAT_32),
    "bfloat16": (7, products._BFLOAT16),
}


def rounded(values, bits):
    """float32 values with a mantissa of so many explicit bits, ties to even."""
    drop = 23 - bits
    if drop == 0:
        return values
    words = np.ascontiguousarray(values, np.float32).view(np.uint32)
    odd = (words >> np.uint32(drop)) & np.uint32(1)
    words = words + np.uint32((1 << (drop - 1)) - 1) + odd
    return (words >> np.uint32(drop) << np.uint32(drop)).view(np.float32)
