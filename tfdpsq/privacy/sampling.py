"""Which rows a logical step trains on: truncated Poisson sampling.

The draw of a step depends on the secret seed and the step number alone, so a
resumed run repeats it exactly, and asking for one step never moves another.
"""

from __future__ import annotations

import dataclasses
import secrets

import numpy as np

from tfdpsq import validation


def fresh_seed() -> int:
    """128 bits from the operating system. As secret as the data: never release."""
    return secrets.randbits(128)


@dataclasses.dataclass(frozen=True)
class Draw:
    """The rows of one logical step.

    Attributes:
      indices: [M] int64, rows of the data; entries from `count` on are padding
        and point at row 0 with weight 0.
      weights: [M] float32, 1 for a drawn row and 0 for padding.
      count: how many rows were drawn, 0 ≤ count ≤ M. Private: never log it.
    """

    indices: np.ndarray
    weights: np.ndarray
    count: int


class PoissonSampler:
    """Draws each of n rows independently, truncated at a static maximum.

    A draw of more than M rows keeps a uniformly random M of them; the plan that
    makes the sampler accounts for this.
    """

    def __init__(
        self,
        n: int,
        sampling_probability: float,
        max_batch_size: int,
        seed: int | None = None,
    ):
        """Prepares the sampler; nothing is drawn yet.

        Args:
          n: rows of the data.
          sampling_probability: q in (0, 1].
          max_batch_size: M, the static number of rows a draw is padded to.
          seed: secret; `None` takes fresh entropy. Only tests fix it.

        Raises:
          InputError: a value out of range.
        """
        self.n = validation.positive_integer("n", n)
        self.sampling_probability = validation.in_range(
            "sampling_probability", sampling_probability, 0.0, 1.0, low_open=True
        )
        self.max_batch_size = validation.positive_integer(
            "max_batch_size", max_batch_size
        )
        self._seed = fresh_seed() if seed is None else seed

    def draw(self, step: int) -> Draw:
        """The rows of logical step `step`; the same for the same seed and step."""
        random = np.random.default_rng(np.random.SeedSequence([self._seed, step]))
        chosen = np.flatnonzero(random.random(self.n) < self.sampling_probability)
        # In random order, so that the first M are a uniformly random subset.
        chosen = random.permutation(chosen)[: self.max_batch_size]
        indices = np.zeros(self.max_batch_size, np.int64)
        indices[: len(chosen)] = chosen
        weights = np.zeros(self.max_batch_size, np.float32)
        weights[: len(chosen)] = 1
        return Draw(indices, weights, len(chosen))
