r"""Noise that is safe in floating point: sums and noise on one grid, exactly drawn.

Noise drawn and added in floating point leaks: which low-order bits a noised sum can
have depends on the sum (Mironov 2012, *On Significance of the Least Significant Bits
for Differential Privacy*; Jin et al. 2022 for Gaussians). With `PrivacySpec.secure` the
sum x of clipped gradients, which has d coordinates, is released as

    γ·(⌊x/γ⌉ + ⌊N/γ⌉),    N ~ N(0, (σΔ')²) on each coordinate,

where ⌊·⌉ rounds to an integer, γ (`grid_step`) is a power of two, and integers of 64
bits are added, which is exact.

*It is the Gaussian mechanism.* ⌊x/γ⌉ is an integer, so ⌊x/γ⌉ + ⌊N/γ⌉ =
⌊(γ⌊x/γ⌉ + N)/γ⌉: what is released is a function of γ⌊x/γ⌉ + N, the Gaussian mechanism
in real numbers on rounded sums. By post-processing all accounting of the Gaussian
mechanism holds as it is, sampling included. (The discrete Gaussian of Canonne, Kamath &
Steinke 2020 has another law, of which only concentrated DP is proven, and that not
for subsampling.) Rounding to a common grid with more noise for it is what Google's
*Secure Noise Generation* (2020) does for other laws.

*Sensitivity.* Rounding moves each coordinate by at most γ/2, so a sum by γ√d/2. Where
one unit moves x by at most Δ, it moves the rounded sum by at most Δ + γ√d. With
γ ≤ Δ·2^-36 and d ≤ 2^40 that is at most Δ' = Δ·(1 + 2^-16), to which the noise is
scaled. Should a coordinate not fit, it is cut at ±2^61 steps, which moves no two sums
further apart.

*The integers have the law of ⌊N/γ⌉ exactly*, up to a total variation of 2^-100: see
`RoundedGaussian`.

What this does not mend: x itself is computed in floating point, and Δ bounds the sum of
clipped gradients in real numbers.
"""

from __future__ import annotations

import bisect
import concurrent.futures
import decimal
import functools
import math
import os
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.privacy.randomness.secure import SecureSource, SecureStream

# Of the grid: γ ≤ Δ·2^-36, d ≤ 2^40, and so γ√d ≤ Δ·2^-16.
_STEP_BITS = 36
MOST_WEIGHTS = 1 << 40
ROUNDING = 2.0**-16
# Sensitivities between which no scaled sum leaves the range of float32.
SMALLEST, LARGEST = 2.0**-60, 2.0**60
_LARGEST_SUM = 2.0**61

# Beyond so many deviations there are 2^-126 of all normal numbers.
_DEVIATIONS = 13
# A piece of the proposal is between 2^-7 and 2^-6 deviations wide.
_PIECE_BITS = 6
_TABLE_BITS = 128
_GUIDE_BITS = 16
# Float64 errs by less than 2^-48 in what is compared.
_MARGIN = 2.0**-40
_DIGITS = 60
_CHUNK = 1 << 15
_LOW = np.uint64((1 << 63) - 1)


def grid_step(sensitivity: float) -> float:
    """γ: the largest power of two that is at most Δ·2^-36.

    Args:
      sensitivity: Δ, without rounding.
    """
    _, exponent = math.frexp(sensitivity)
    return math.ldexp(1.0, exponent - 1 - _STEP_BITS)


def drawn(
    source: SecureSource, deviation: float, step: int, shapes: Sequence[Sequence[int]]
) -> list[np.ndarray]:
    """The noise of one logical step, in steps of the grid.

    Args:
      source: secret.
      deviation: σΔ'/γ.
      step: the logical step.
      shapes: of each variable.

    Returns:
      int64 arrays of these shapes. The same for the same arguments; independent of
      each other and of those of other steps.

    Raises:
      InputError: more than 2^40 coordinates.
    """
    sizes = [math.prod(shape) for shape in shapes]
    if sum(sizes) > MOST_WEIGHTS:
        raise validation.InputError(
            f"{sum(sizes)} weights are trained, but secure noise is derived for at "
            f"most {MOST_WEIGHTS}. Train fewer."
        )
    law = _law(deviation)

    def of(position: int) -> np.ndarray:
        stream = source.stream("noise", step, position)
        return law.draw(stream, sizes[position]).reshape(shapes[position])

    # Largest first, that none is left alone at the end.
    order = sorted(range(len(sizes)), key=lambda position: -sizes[position])
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        found = dict(zip(order, pool.map(of, order)))
    return [found[position] for position in range(len(sizes))]


def noised(
    sums: Sequence[tf.Tensor], noise: Sequence[tf.Tensor], step: float
) -> list[tf.Tensor]:
    """The sums on the grid, plus the noise.

    Args:
      sums: one float32 or float64 tensor per variable.
      noise: shaped as `sums`, int64: see `drawn`.
      step: γ, a power of two, by which float numbers are scaled exactly.

    Returns:
      Tensors like `sums`, all of multiples of γ.
    """
    found = []
    for value, integers in zip(sums, noise):
        scaled = tf.round(value * tf.constant(1 / step, value.dtype))
        scaled = tf.clip_by_value(scaled, -_LARGEST_SUM, _LARGEST_SUM)
        total = tf.cast(scaled, tf.int64) + integers
        # Integers that the type cannot hold are rounded, to integers: γ divides them.
        found.append(tf.cast(total, value.dtype) * tf.constant(step, value.dtype))
    return found


class RoundedGaussian:
    """Draws ⌊s·N(0, 1)⌉ from uniform bits, exactly.

    By von Neumann's rejection: the magnitude X of s·N is proposed from a density that
    is constant on pieces [jW, (j + 1)W), where it is φ(jW/s), and accepted with
    probability φ(X/s) / φ(jW/s) = exp(-(W/s)²·f·(j + f/2)) at X = (j + f)·W. W is a
    power of two, so the bits of f are those of X, and rounding X takes its first ones.
    On average 99.5 % are accepted.

    Two comparisons decide a draw: which piece a uniform number falls into, and whether
    another is below that probability. Both are made with 64 bits and in float64, and
    wherever that leaves a doubt, again with 128 bits and 60 decimal digits: lazy
    floating-point arithmetic (Ducas & Nguyen 2012, *Faster Gaussian Lattice Sampling
    Using Lazy Floating-Point Arithmetic*). What remains is less than 2^-100 of total
    variation a draw: 2^-126 beyond 13 deviations, 2^-117 of the table of pieces, whose
    up to 1,664 entries are cut to 128 bits, and 2^-120 of the second comparison.
    """

    def __init__(self, deviation: float):
        """Computes the table of pieces.

        Args:
          deviation: s, from 2^6 to 2^57.

        Raises:
          InputError: s out of range.
        """
        validation.in_range("the noise in steps of the grid", deviation, 64, 2.0**57)
        self._shift = math.frexp(deviation)[1] - 1 - _PIECE_BITS  # W = 2^shift
        pieces = math.ceil(_DEVIATIONS * math.ldexp(deviation, -self._shift))
        with decimal.localcontext() as context:
            context.prec = _DIGITS
            # (W/s)²: s is a float, and so an exact decimal.
            width = decimal.Decimal(2) ** self._shift / decimal.Decimal(deviation)
            self._square = width * width
            weights = [(-self._square * j * j / 2).exp() for j in range(pieces)]
            whole = sum(weights, decimal.Decimal(0))
            below, ends = decimal.Decimal(0), []
            for weight in weights[:-1]:
                below += weight
                ends.append(int(below / whole * (1 << _TABLE_BITS)))
        self._ends = ends  # piece j begins at the j-th, of 128 bits
        self._first = np.array([end >> 64 for end in ends], np.uint64)
        # The piece by the first 16 bits, or -1 where these do not tell.
        rest = 64 - _GUIDE_BITS
        prefixes = np.arange(1 << _GUIDE_BITS, dtype=np.uint64) << np.uint64(rest)
        low = np.searchsorted(self._first, prefixes, "left")
        high = np.searchsorted(
            self._first, prefixes + np.uint64((1 << rest) - 1), "right"
        )
        self._guide = np.where(low == high, low, -1).astype(np.int16)
        self._negative_square = -float(self._square)

    def draw(self, stream: SecureStream, count: int) -> np.ndarray:
        """Independent integers of this law.

        Args:
          stream: random bits, three words a draw and more now and then.
          count: how many.

        Returns:
          [count] int64.
        """
        found = np.empty(count, np.int64)
        for start in range(0, count, _CHUNK):
            own = found[start : start + _CHUNK]
            own[:], accepted = self._proposed(stream, len(own))
            while (again := np.flatnonzero(~accepted)).size:
                own[again], accepted[again] = self._proposed(stream, len(again))
        return found

    def _proposed(
        self, stream: SecureStream, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Proposals, [count] int64, and which of them are accepted."""
        return self._from_words(stream.words(3 * count).reshape(3, count), stream)

    def _from_words(
        self, words: np.ndarray, more: SecureStream
    ) -> tuple[np.ndarray, np.ndarray]:
        """Proposals from [3, count] words; `more` gives bits where 64 do not do."""
        pick, place, level = words
        piece = self._guide[pick >> np.uint64(64 - _GUIDE_BITS)].astype(np.int64)
        searched = np.flatnonzero(piece < 0)
        piece[searched] = np.searchsorted(self._first, pick[searched], "right")
        # A word equal to the first of an end's two may be below or above that end.
        tied = searched[self._first[piece[searched] - 1] == pick[searched]]
        bits = place & _LOW
        fraction = bits.astype(np.float64)
        fraction *= 2.0**-63
        chance = np.exp(self._negative_square * fraction * (piece + 0.5 * fraction))
        gap = level.astype(np.float64) * 2.0**-64 - chance
        accepted = gap < 0
        for at in {*tied.tolist(), *np.flatnonzero(np.abs(gap) < _MARGIN).tolist()}:
            own = (int(pick[at]), int(bits[at]), int(level[at]))
            piece[at], accepted[at] = self._decided(*own, more)
        rounded = ((bits >> np.uint64(62 - self._shift)) + np.uint64(1)) >> np.uint64(1)
        magnitude = (piece << self._shift) + rounded.astype(np.int64)
        return np.where(place > _LOW, -magnitude, magnitude), accepted

    def _decided(
        self, pick: int, bits: int, level: int, more: SecureStream
    ) -> tuple[int, bool]:
        """Piece and acceptance of one proposal, with 64 bits more of each number."""
        extra = [int(word) for word in more.words(3)]
        piece = bisect.bisect_right(self._ends, pick << 64 | extra[0])
        with decimal.localcontext() as context:
            context.prec = _DIGITS
            fraction = decimal.Decimal(bits << 64 | extra[1]) / (1 << 127)
            exponent = -self._square * fraction * (piece + fraction / 2)
            scaled = decimal.Decimal(level << 64 | extra[2]) / (1 << 128)
            return piece, scaled < exponent.exp()


_law = functools.lru_cache(maxsize=8)(RoundedGaussian)
