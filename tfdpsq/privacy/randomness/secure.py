"""Secret random numbers from a cryptographic generator, for `PrivacySpec.secure`.

A `SecureSource` holds a key of 256 bits from the operating system's entropy. HKDF
(SHA-256, RFC 5869) derives one subkey for each purpose. The words of one purpose and
one step are the ChaCha20 keystream (RFC 8439) under that subkey. Both are those of the
package `cryptography` (OpenSSL); this module only lays out the nonces:

| bytes of ChaCha20's 16-byte initial state | what                                   |
|-------------------------------------------|----------------------------------------|
| 0 to 3, little-endian                     | block counter, from 0                  |
| 4 to 11, little-endian                    | step, or epoch                         |
| 12 to 15, little-endian                   | index: the variable's position, else 0 |

So no two of (purpose, step, index) share a keystream, and a resumed run, another
replica or another worker with the same key repeats every word.

| purpose   | what is drawn                                                       |
|-----------|---------------------------------------------------------------------|
| `units`   | a coin for each unit, and the order of those drawn                   |
| `rows`    | a sampled user's rows                                                |
| `epoch`   | the permutation of an epoch of shuffled batches                      |
| `dealing` | the group of each unit drawn                                         |
| `noise`   | the noise of one variable in one step; see `grid`                    |
| `dropout` | a seed for TensorFlow's generator, which draws dropout masks         |
| `global`  | TensorFlow's global seed, for code that `tf.py_function` hides       |
"""

from __future__ import annotations

import fractions
import math
from typing import Any

import numpy as np

from tfdpsq import validation

KEY_BITS = 256
GENERATOR = "ChaCha20"
PURPOSES = ("units", "rows", "epoch", "dealing", "noise", "dropout", "global")
_LABEL = b"tfdpsq secure/1 "
# The block counter has 32 bits, and a block 8 words.
_LARGEST_STREAM = 8 << 32
# Units whose coins are held at a time.
_COINS = 1 << 20


class SecureSource:
    """All streams of one key.

    Attributes:
      key: 32 bytes; as secret as the data.

    Raises:
      ImportError: the package `cryptography` is not installed.
    """

    def __init__(self, seed: int):
        """Takes the key.

        Args:
          seed: at least 0, below 2^256. As secret as the data.
        """
        self.key = int(seed).to_bytes(KEY_BITS // 8, "big")
        self._subkeys = {purpose: self._derived(purpose) for purpose in PURPOSES}

    def stream(self, purpose: str, step: int, index: int = 0) -> SecureStream:
        """The random words of one purpose in one step, from their beginning.

        Args:
          purpose: one of `PURPOSES`.
          step: logical step or epoch, at least 0.
          index: tells streams of the same step apart, at least 0.
        """
        nonce = step.to_bytes(8, "little") + index.to_bytes(4, "little")
        return SecureStream(self._subkeys[purpose], nonce)

    def seed(self, purpose: str) -> int:
        """128 bits for another generator, which tell nothing about the key."""
        return int.from_bytes(self._subkeys[purpose][:16], "big")

    def _derived(self, purpose: str) -> bytes:
        _, hashes, hkdf = _cryptography()
        derivation = hkdf.HKDF(
            hashes.SHA256(), KEY_BITS // 8, salt=None, info=_LABEL + purpose.encode()
        )
        return derivation.derive(self.key)


class SecureStream:
    """A sequence of independent uniform 64-bit words, and exact draws from them.

    `integers` and `choice` take the arguments that samplers give to the methods of
    `numpy.random.Generator` of the same names.
    """

    def __init__(self, key: bytes, nonce: bytes):
        """Begins the keystream of a key of 32 bytes and a nonce of 12."""
        ciphers, _, _ = _cryptography()
        chacha = ciphers.algorithms.ChaCha20(key, bytes(4) + nonce)
        self._cipher = ciphers.Cipher(chacha, mode=None).encryptor()
        self._left = _LARGEST_STREAM

    def words(self, count: int) -> np.ndarray:
        """The next `count` words, [count] uint64.

        Raises:
          InputError: more than 256 GiB from one stream.
        """
        self._left -= count
        if self._left < 0:
            raise validation.InputError(
                "one draw needs more than 256 GiB of random bits, where ChaCha20's "
                "counter would begin again. Train fewer weights."
            )
        return np.frombuffer(self._cipher.update(bytes(8 * count)), "<u8")

    def integers(self, bound: int, size: Any = 1, dtype: Any = np.int64) -> np.ndarray:
        """Independent integers, exactly uniform on [0, bound).

        Args:
          bound: from 1 to 2^64.
          size: number or shape of the result.
          dtype: of the result.
        """
        count = int(np.prod(size))
        # Words beyond the last whole multiple of `bound` are drawn again.
        most = np.uint64((1 << 64) // bound * bound - 1)
        found = self.words(count).copy()
        while (beyond := np.flatnonzero(found > most)).size:
            found[beyond] = self.words(len(beyond))
        if bound < 1 << 64:
            found %= np.uint64(bound)
        return found.astype(dtype).reshape(size)

    def order(self, count: int) -> np.ndarray:
        """A uniformly random permutation of [0, count), int64.

        That which sorts independent tags. Given that no two tags are equal, all orders
        are equally likely; equal tags are drawn again.
        """
        while True:
            tags = self.words(count)
            order = np.argsort(tags, kind="stable")
            if (np.diff(tags[order]) > 0).all():
                return order

    def choice(self, count: int, size: int, replace: bool = False) -> np.ndarray:
        """The first `size` of a random order of [0, count)."""
        if replace:
            raise ValueError("drawn without replacement only")
        return self.order(count)[:size]

    def poisson_subset(self, n: int, probability: float, most: int) -> np.ndarray:
        """Units drawn by independent coins, truncated, in random order.

        A unit is drawn where its word is below ⌊q·2^64⌋: with a probability of at most
        q, and less than 2^-64 below it. That loses nothing of the guarantee: to draw
        with q' ≤ q is to draw with q and then leave out each unit drawn with
        probability 1 - q'/q, independently; where x is left out, neighbours are alike,
        and hockey-stick divergence is jointly convex.

        Args:
          n: number of units.
          probability: q in (0, 1].
          most: M; of more units, a uniformly random M are kept.
        """
        bound = math.floor(fractions.Fraction(probability) * (1 << 64))
        last = np.uint64(max(bound, 1) - 1)
        drawn = [np.zeros(0, np.int64)]
        for start in range(0, n if bound else 0, _COINS):
            coins = self.words(min(_COINS, n - start))
            drawn.append(start + np.flatnonzero(coins <= last))
        units = np.concatenate(drawn)
        return units[self.order(len(units))][:most]


def require() -> None:
    """Refuses secure mode where its generator is not installed."""
    _cryptography()


def _cryptography() -> tuple[Any, Any, Any]:
    """The modules of `cryptography` for ciphers, hashes and HKDF."""
    try:
        from cryptography.hazmat.primitives import ciphers, hashes
        from cryptography.hazmat.primitives.kdf import hkdf
    except ImportError as error:
        raise validation.InputError(
            "secure is True, but its cryptographic generator is not installed: pip "
            "install 'tfdpsq[secure]' (the package cryptography), or set secure to "
            "False."
        ) from error
    return ciphers, hashes, hkdf
