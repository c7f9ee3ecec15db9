"""Secure mode: random numbers of a cryptographic generator, and noise on a grid.

**Keystream.** From 256 bits of the operating system's entropy, HKDF (SHA-256, RFC 5869)
derives one subkey for each purpose. The words of one purpose and one step are the
ChaCha20 keystream (RFC 8439; OpenSSL's, by the package `cryptography`) under it. Of
ChaCha20's 16-byte initial state, bytes 0 to 3 count blocks, 4 to 11 hold the step or
epoch, and 12 to 15 an index: the variable's position, else 0 (little-endian). So no two
of (purpose, step, index) share a keystream, and every holder of the key repeats it.

**Grid.** Noise drawn and added in floating point leaks: which low-order bits a noised
sum can have depends on the sum (Mironov 2012, *On Significance of the Least Significant
Bits for Differential Privacy*; Jin et al. 2022 for Gaussians). The sum x of clipped
gradients, which has d coordinates, is released as

    γ·(⌊x/γ⌉ + ⌊N/γ⌉),    N ~ N(0, (σΔ')²) on each coordinate,

where ⌊·⌉ rounds to an integer, γ (`grid_step`) is a power of two, and integers of 64
bits are added, which is exact.

*It is the Gaussian mechanism.* ⌊x/γ⌉ is an integer, so ⌊x/γ⌉ + ⌊N/γ⌉ =
⌊(γ⌊x/γ⌉ + N)/γ⌉: what is released is a function of γ⌊x/γ⌉ + N, the Gaussian mechanism
in real numbers on rounded sums. By post-processing all accounting of the Gaussian
mechanism holds as it is, sampling included. (For the discrete Gaussian of Canonne,
Kamath & Steinke 2020 only concentrated DP is proven, without subsampling.) Google's
*Secure Noise Generation* (2020) rounds to a grid for other laws.

*Sensitivity.* Rounding moves each coordinate by at most γ/2, so a sum by γ√d/2. Where
one unit moves x by at most Δ, it moves the rounded sum by at most Δ + γ√d. With
γ ≤ Δ·2^-36 and d ≤ 2^40 that is at most Δ' = Δ·(1 + 2^-16), to which the noise is
scaled. Coordinates are cut at ±2^61 steps, which moves no two sums further apart.

*The integers have the law of ⌊N/γ⌉*, up to a total variation of 2^-100: see
`RoundedGaussian`. What remains: x is computed in floating point, and Δ bounds the sum
of clipped gradients in real numbers.
"""

from __future__ import annotations

import bisect
import concurrent.futures
import decimal
import fractions
import functools
import hmac
import itertools
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpsq import validation

KEY_BITS = 256
GENERATOR = "ChaCha20"
PURPOSES = ("units", "rows", "epoch", "dealing", "noise")
_LABEL = b"tfdpsq secure/1 "
# The grid: γ ≤ Δ·2^-36, d ≤ 2^40, and so γ√d ≤ Δ·2^-16.
_STEP_BITS, MOST_WEIGHTS, ROUNDING = 36, 1 << 40, 2.0**-16
# Sensitivities whose scaled sums float32 can hold.
SMALLEST, LARGEST = 2.0**-60, 2.0**60
_LARGEST_SUM = 2.0**61
# Beyond 13 deviations there are 2^-126 of all normal numbers. A piece of the proposal
# is between 2^-7 and 2^-6 deviations wide.
_DEVIATIONS, _PIECE_BITS = 13, 6
_TABLE_BITS, _GUIDE_BITS, _DIGITS = 128, 16, 60
# Float64 errs by less than 2^-48 in what is compared.
_MARGIN = 2.0**-40
_CHUNK = 1 << 15
_LOW = np.uint64((1 << 63) - 1)


def subkey(seed: int, purpose: str) -> bytes:
    """32 bytes for one purpose, by HKDF-SHA256 (RFC 5869) without salt.

    They tell nothing about the seed, below 2^256 and secret, or other purposes' bytes.
    """
    extracted = hmac.digest(bytes(32), int(seed).to_bytes(32, "big"), "sha256")
    return hmac.digest(extracted, _LABEL + purpose.encode() + b"\x01", "sha256")


def derived_seed(seed: int, purpose: str) -> int:
    """The first 128 bits of a `subkey`, for other generators."""
    return int.from_bytes(subkey(seed, purpose)[:16], "big")


class SecureSource:
    """All streams of one secret seed, below 2^256."""

    def __init__(self, seed: int):
        """Derives a key for each purpose."""
        require()
        self._subkeys = {purpose: subkey(seed, purpose) for purpose in PURPOSES}

    def stream(self, purpose: str, step: int, index: int = 0) -> SecureStream:
        """The words of one of `PURPOSES` in a step, or epoch, from their beginning."""
        nonce = step.to_bytes(8, "little") + index.to_bytes(4, "little")
        return SecureStream(self._subkeys[purpose], nonce)


class SecureStream:
    """Independent uniform 64-bit words, and exact draws, as of NumPy's `Generator`."""

    def __init__(self, key: bytes, nonce: bytes):
        """Begins the keystream of a key of 32 bytes and a nonce of 12."""
        ciphers = require()
        chacha = ciphers.algorithms.ChaCha20(key, bytes(4) + nonce)
        self._cipher = ciphers.Cipher(chacha, mode=None).encryptor()

    def words(self, count: int) -> np.ndarray:
        """The next words, [count] uint64, of the 2^35 (256 GiB) that a stream has."""
        return np.frombuffer(self._cipher.update(bytes(8 * count)), "<u8")

    def integers(self, bound: int, size: Any = 1, dtype: Any = np.int64) -> np.ndarray:
        """Integers, [*size], independent and exactly uniform on [0, bound ≤ 2^64)."""
        count = int(np.prod(size))
        # Words beyond the last whole multiple of `bound` are drawn again.
        most = np.uint64((1 << 64) // bound * bound - 1)
        found = self.words(count).copy()
        while (beyond := np.flatnonzero(found > most)).size:
            found[beyond] = self.words(len(beyond))
        if bound < 1 << 64:
            found %= np.uint64(bound)
        return found.astype(dtype).reshape(size)

    def permutation(self, count: int) -> np.ndarray:
        """A uniformly random permutation of [0, count), int64.

        All orders of independent tags are equally likely, if no two tags are equal.
        """
        while True:
            tags = self.words(count)
            order = np.argsort(tags, kind="stable")
            if (np.diff(tags[order]) > 0).all():
                return order

    def choice(self, count: int, size: int, replace: bool = False) -> np.ndarray:
        """The first `size` of a random order of [0, count); never with replacement."""
        return self.permutation(count)[:size]

    def poisson_subset(self, n: int, probability: float, most: int) -> np.ndarray:
        """Of n units those drawn by independent coins, at most `most`, in random order.

        A unit is drawn where its word is below ⌊q·2^64⌋: with a probability of at most
        q, and less than 2^-64 below it. That loses nothing of the guarantee: to draw
        with q' ≤ q is to draw with q and then leave out each unit drawn with
        probability 1 - q'/q, independently; where x is left out, neighbours are equal,
        and hockey-stick divergence is jointly convex. `probability` is q ≥ 2^-64; of
        too many units a uniformly random subset is kept.
        """
        bound = math.floor(fractions.Fraction(probability) * (1 << 64))
        units = np.flatnonzero(self.words(n) <= np.uint64(bound - 1))
        return units[self.permutation(len(units))][:most]


def require() -> Any:
    """Returns the generator's module; an InputError says how to install it."""
    return validation.library(
        "cryptography.hazmat.primitives.ciphers",
        "secure is True, but the package cryptography is missing: pip install "
        "'tfdpsq[secure]', or set secure to False.",
    )


def grid_step(sensitivity: float) -> float:
    """γ: the largest power of two that is at most Δ·2^-36."""
    _, exponent = math.frexp(sensitivity)
    return math.ldexp(1.0, exponent - 1 - _STEP_BITS)


def drawn(
    source: SecureSource, deviation: float, step: int, shapes: Sequence[Sequence[int]]
) -> list[np.ndarray]:
    """The noise of one logical step, int64 arrays of these shapes in steps of the grid.

    Independent between variables and steps; `deviation` is σΔ'/γ.
    """
    law = _law(deviation)

    def of(position: int, shape: Sequence[int]) -> np.ndarray:
        stream = source.stream("noise", step, position)
        return law.draw(stream, math.prod(shape)).reshape(shape)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(of, range(len(shapes)), shapes))


def noised(
    sums: Sequence[tf.Tensor], noise: Sequence[tf.Tensor], step: float
) -> list[tf.Tensor]:
    """The sums, float32 or float64, rounded to the grid, plus what `drawn` returned.

    `step` is γ, a power of two, by which floating-point numbers are scaled exactly.
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
    where that leaves a doubt, again with 128 bits and 60 decimal digits (Ducas & Nguyen
    2012, *Faster Gaussian Lattice Sampling Using Lazy Floating-Point Arithmetic*). What
    remains is less than 2^-100 of total variation a draw: 2^-126 beyond 13 deviations,
    2^-117 of the table of pieces, whose up to 1,664 entries are cut to 128 bits, and
    2^-120 of the second comparison.
    """

    def __init__(self, deviation: float):
        """Computes the table of pieces for a deviation s from 2^6 to 2^57."""
        self._shift = math.frexp(deviation)[1] - 1 - _PIECE_BITS  # W = 2^shift
        pieces = math.ceil(_DEVIATIONS * math.ldexp(deviation, -self._shift))
        with decimal.localcontext() as context:
            context.prec = _DIGITS
            # (W/s)²: s is a float, and so an exact decimal.
            width = decimal.Decimal(2) ** self._shift / decimal.Decimal(deviation)
            self._square = width * width
            weights = [(-self._square * j * j / 2).exp() for j in range(pieces)]
            *sums, whole = itertools.accumulate(weights)
            # Where pieces end, of 128 bits: the j-th is where piece j + 1 begins.
            self._ends = [int(end / whole * (1 << _TABLE_BITS)) for end in sums]
        self._first = np.array([end >> 64 for end in self._ends], np.uint64)
        # The piece by the first 16 bits, or -1 where these do not tell.
        prefixes = np.arange(1 << _GUIDE_BITS, dtype=np.uint64)
        low = np.searchsorted(self._first, prefixes << np.uint64(64 - _GUIDE_BITS))
        above = np.append(low[1:], len(self._first))
        self._guide = np.where(low == above, low, -1).astype(np.int16)

    def draw(self, stream: SecureStream, count: int) -> np.ndarray:
        """Independent integers of this law, [count] int64."""
        found = np.empty(count, np.int64)
        for start in range(0, count, _CHUNK):
            own = found[start : start + _CHUNK]
            own[:], accepted = self._proposed(stream, len(own))
            while (again := np.flatnonzero(~accepted)).size:
                own[again], accepted[again] = self._proposed(stream, len(again))
        return found

    def _proposed(self, stream: SecureStream, count: int) -> Sequence[np.ndarray]:
        """Proposals, [count] int64, and which of them are accepted."""
        pick, place, level = stream.words(3 * count).reshape(3, count)
        piece = self._guide[pick >> np.uint64(64 - _GUIDE_BITS)].astype(np.int64)
        searched = np.flatnonzero(piece < 0)
        piece[searched] = np.searchsorted(self._first, pick[searched], "right")
        # A word equal to the first of an end's two may be below or above that end.
        tied = searched[self._first[piece[searched] - 1] == pick[searched]]
        bits = place & _LOW
        fraction = bits.astype(np.float64)
        fraction *= 2.0**-63
        chance = np.exp(-float(self._square) * fraction * (piece + 0.5 * fraction))
        gap = level.astype(np.float64) * 2.0**-64 - chance
        accepted = gap < 0
        for at in {*tied.tolist(), *np.flatnonzero(np.abs(gap) < _MARGIN).tolist()}:
            own = (int(pick[at]), int(bits[at]), int(level[at]))
            piece[at], accepted[at] = self._decided(*own, stream)
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
