"""Rows of a logical step: Poisson and shuffled batches, over users too.

Every draw is a pure function of a secret seed and the step number: a resumed run
repeats it exactly, and asking for one step never moves another. A *unit* is what the
guarantee protects: a row of the data by itself, or a user who owns several.

| sampler | units of a step | what the accounting rests on |
|---|---|---|
| `PoissonSampler` | each independently with probability q, at most M | amplification |
| `ShuffledSampler` | exactly B, each at most once an epoch | once per epoch, no more |
| `UserSampler` | one of the above; then k rows of each unit | as the sampler of units |
| `DealtSampler` | the first, each dealt to one of G microbatches | as the first |
"""

from __future__ import annotations

import dataclasses
import functools
import secrets
from collections.abc import Sequence
from typing import Any, Union

import numpy as np

from tfdpsq import validation
from tfdpsq.privacy.randomness.secure import KEY_BITS, PURPOSES, SecureSource


def fresh_seed(secure: bool = False) -> int:
    """128 fresh bits, or 256 for a `SecureSource`. As secret as the data."""
    return secrets.randbits(KEY_BITS if secure else 128)


@dataclasses.dataclass(frozen=True)
class Draw:
    """The rows of one logical step.

    Attributes:
      indices: [R] int64, rows of the data, 0 for padding.
      weights: [R] float32, 1 for a drawn row and 0 for padding.
      count: leading rows in use, all further ones being padding. Private.
    """

    indices: np.ndarray
    weights: np.ndarray
    count: int


@dataclasses.dataclass(frozen=True)
class PoissonSampler:
    """Draws each of n units independently, and keeps a uniformly random M of more.

    What is computed is: how many, K ~ Bin(n, q); then min(K, M) distinct units,
    uniformly, in random order. This is the same law. Under independent inclusion
    with probability q a set S of size k has probability q^k·(1-q)^(n-k), which
    depends on k alone. So |S| ~ Bin(n, q), and given |S| = k all C(n, k) sets
    are equally likely, which is what is drawn. In uniformly random order the first
    M of S are a uniformly random subset of it, and all ordered M-tuples of
    distinct units are equally likely, so the rest need not be drawn.

    Attributes:
      n: units in the data.
      sampling_probability: q in (0, 1].
      max_batch_size: M, the static number of rows a draw is padded to.
      seed: secret, by default fresh. Only tests fix it.
    """

    n: int
    sampling_probability: float
    max_batch_size: int
    seed: int | SecureSource = dataclasses.field(default_factory=fresh_seed, repr=False)

    def draw(self, step: int) -> Draw:
        """Returns the units of a logical step, always the same ones."""
        random = _generator(self.seed, step, "units")
        if isinstance(self.seed, SecureSource):
            kept = random.poisson_subset(
                self.n, self.sampling_probability, self.max_batch_size
            )
            return _padded(kept, self.max_batch_size)
        drawn = random.binomial(self.n, self.sampling_probability)
        chosen = random.choice(
            self.n, size=min(int(drawn), self.max_batch_size), replace=False
        )
        return _padded(chosen, self.max_batch_size)


@dataclasses.dataclass(frozen=True)
class ShuffledSampler:
    """Cuts a fresh permutation of n units into batches of exactly B, every epoch.

    An epoch has n // B steps; what is left over of its permutation is unused in
    that epoch. So a unit is in at most one batch of an epoch, which is all that
    its accounting rests on (`accounting`): the permutations are independent of
    the data, and need not be uniform for it.

    Attributes:
      n: units in the data, at least B.
      max_batch_size: B, units in every batch.
      seed: secret, by default fresh. Only tests fix it.
    """

    n: int
    max_batch_size: int
    seed: int | SecureSource = dataclasses.field(default_factory=fresh_seed, repr=False)

    def draw(self, step: int) -> Draw:
        """Returns the units of a logical step, always the same ones."""
        epoch, batch = divmod(step, self.n // self.max_batch_size)
        start = batch * self.max_batch_size
        order = _permutation(self.n, self.seed, epoch)
        return _padded(order[start : start + self.max_batch_size], self.max_batch_size)


@functools.lru_cache(maxsize=1)
def _permutation(n: int, seed: int | SecureSource, epoch: int) -> np.ndarray:
    return _generator(seed, epoch, "epoch").permutation(n)


@dataclasses.dataclass(frozen=True)
class Groups:
    """The rows that each unit owns.

    Attributes:
      rows: [total] int64, row numbers, those of one unit next to each other.
      offsets: [units + 1] int64, from 0 to total and never falling: unit u owns
        rows[offsets[u]:offsets[u + 1]]. May be memory-mapped.

    Raises:
      InputError: offsets that are not as above, or a row of two units.
    """

    rows: np.ndarray
    offsets: np.ndarray

    def __post_init__(self) -> None:
        """Checks that the offsets cut the rows into groups, each row into one."""
        rows, offsets = (  # a TypeError for floats, of which two may round to one row
            np.asanyarray(values).astype(np.int64, casting="same_kind", copy=False)
            for values in (self.rows, self.offsets)
        )
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "offsets", offsets)
        ends = [*offsets[:1], *offsets[1:][-1:]]
        if ends != [0, len(rows)] or (np.diff(offsets) < 0).any():
            raise validation.InputError(
                f"offsets must rise from 0 to the number of rows, {len(rows)}, in one "
                "step for each unit; Groups.of(labels) makes them."
            )
        # Row -1 is the last one, which another unit owns by its own number.
        if (rows < 0).any() or len(np.unique(rows)) < len(rows):
            raise validation.InputError(
                "a row belongs to two units, or has a negative number. Number rows "
                "from 0, each with one owner; Groups.of(labels) does."
            )

    def __len__(self) -> int:
        """The number of units."""
        return len(self.offsets) - 1

    @classmethod
    def of(cls, labels: Sequence | np.ndarray) -> Groups:
        """The groups of rows that bear the same label.

        Args:
          labels: [rows], whose row each is: integers alone, or strings alone. In other
            types several owners can be equal (None, NaN, rounded numbers). Merged into
            one unit, an owner who leaves can turn its clipped gradient around, which is
            twice the sensitivity.

        Raises:
          InputError: no labels, not one for each row, or labels of other types.
        """
        # A list as it is: numpy would make floats or strings of None and NaN.
        given = hasattr(labels, "dtype")
        owners = np.asarray(labels) if given else np.asarray(labels, object)
        if owners.ndim != 1 or not len(owners):
            raise validation.InputError(
                f"labels have shape {owners.shape}; give one label for each row."
            )
        kinds = {owners.dtype.type}
        if owners.dtype == object:
            kinds = {type(one) for one in owners}
        comparable: tuple[Any, ...] = ((int, np.integer), str, bytes)
        alike = any(all(issubclass(k, c) for k in kinds) for c in comparable)
        if np.ma.is_masked(labels) or not alike:
            found = " and ".join(sorted(kind.__name__ for kind in kinds))
            raise validation.InputError(
                f"labels are masked or of type {found}. Give integers alone or strings "
                "alone; rows without a known owner need a label each, or are left out."
            )
        _, owner, sizes = np.unique(owners, return_inverse=True, return_counts=True)
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        return cls(np.argsort(owner, kind="stable").astype(np.int64), offsets)


@dataclasses.dataclass(frozen=True)
class UserSampler:
    """Draws users, then k = `rows_per_unit` rows of each.

    Unit j of a draw occupies places [j·k, (j+1)·k). A user with fewer than k rows gives
    all of them, the other places having weight 0; of more rows a uniformly random k are
    drawn, again in every step.
    """

    units: UnitSampler
    groups: Groups
    rows_per_unit: int = 1

    def draw(self, step: int) -> Draw:
        """Returns the rows of a logical step, always the same ones."""
        users = self.units.draw(step)
        shape = (len(users.indices), self.rows_per_unit)
        indices, weights = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
        random = _generator(self.units.seed, step, "rows")
        offsets, rows = self.groups.offsets, self.groups.rows
        for place, user in enumerate(users.indices[: users.count]):
            start, size = offsets[user], offsets[user + 1] - offsets[user]
            taken = min(self.rows_per_unit, int(size))
            if taken:
                chosen = random.choice(int(size), size=taken, replace=False)
                indices[place, :taken] = rows[start + chosen]
                weights[place, :taken] = 1
        return Draw(indices.ravel(), weights.ravel(), users.count * self.rows_per_unit)


@dataclasses.dataclass(frozen=True)
class DealtSampler:
    """Deals units to G = `num_microbatches`, independently and uniformly.

    Microbatch g occupies places [g·c, (g + 1)·c), c being the `capacity`. Of more than
    c units dealt to it, the first c of the draw's random order are kept.

    *One unit more changes one microbatch.* Which microbatch a unit is dealt to depends
    on its own throw alone, and which of a microbatch's units are kept on those of that
    microbatch alone. So let x be drawn or not, all else being the same: the
    microbatches that x is not dealt to hold exactly the same units in the same order.
    (Were a draw cut into microbatches one after the other, x would push a unit out of
    every later one, and the sum of G clipped gradients could move by 2·G·C.) The throws
    do not depend on the data, so given them the step is a function f of the units drawn
    with ‖f(S) − f(S + x)‖ ≤ 2C, and x is drawn with probability q independently of S:
    the Poisson-subsampled Gaussian mechanism at sensitivity 2C. Averaging over the
    throws keeps its guarantee, for hockey-stick divergence is jointly convex.
    """

    units: PoissonSampler
    num_microbatches: int
    capacity: int

    def draw(self, step: int) -> Draw:
        """Returns the rows of a logical step, always the same ones."""
        drawn = self.units.draw(step)
        random = _generator(self.units.seed, step, "dealing")
        shape = (self.num_microbatches, self.capacity)
        indices, weights = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
        dealt = random.integers(self.num_microbatches, size=drawn.count)
        for number in range(self.num_microbatches):
            own = drawn.indices[: drawn.count][dealt == number][: self.capacity]
            indices[number, : len(own)] = own
            weights[number, : len(own)] = 1
        return Draw(indices.ravel(), weights.ravel(), indices.size)


UnitSampler = Union[PoissonSampler, ShuffledSampler]
Sampler = Union[PoissonSampler, ShuffledSampler, UserSampler, DealtSampler]


def _padded(chosen: np.ndarray, rows: int) -> Draw:
    """The draw that has `chosen` first and then padding up to `rows`."""
    indices, weights = np.zeros(rows, np.int64), np.zeros(rows, np.float32)
    indices[: len(chosen)] = chosen
    weights[: len(chosen)] = 1
    return Draw(indices, weights, len(chosen))


def _generator(seed: int | SecureSource, number: int, stream: str) -> Any:
    """A NumPy `Generator`, or what stands for it, of one step or epoch."""
    if isinstance(seed, SecureSource):
        return seed.stream(stream, number)
    # A spawn key and not a third entry: numpy pads entries with zeros, so that
    # [seed, 3] and [seed, 3, 0] would be the same.
    key = (PURPOSES.index(stream),)
    return np.random.default_rng(np.random.SeedSequence([seed, number], spawn_key=key))
