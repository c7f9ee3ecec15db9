"""Rows of a logical step: Poisson and shuffled batches, over users too.

Every draw is a pure function of a secret seed and the step number. A *unit* is what the
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
    """The rows of one logical step."""

    indices: np.ndarray  # [R] int64, rows of the data, 0 for padding
    weights: np.ndarray  # [R] float32, 1 for a drawn row and 0 for padding
    count: int  # leading rows in use, all further ones being padding; private


@dataclasses.dataclass(frozen=True)
class PoissonSampler:
    """Draws each of n units independently, and keeps a uniformly random M of more.

    What is computed is: how many, K ~ Bin(n, q); then min(K, M) distinct units,
    uniformly, in random order. This is the same law: under independent inclusion with
    probability q a set S of size k has probability q^k·(1-q)^(n-k), which depends on k
    alone. So |S| ~ Bin(n, q), and given |S| = k all C(n, k) sets are equally likely. In
    uniformly random order the first M of S are a uniformly random subset of it, and all
    ordered M-tuples of distinct units are equally likely, so the rest need no drawing.
    """

    n: int  # units in the data
    sampling_probability: float  # q in (0, 1]
    max_batch_size: int  # M, the static number of rows that a draw is padded to
    # Secret; only tests fix it.
    seed: int | SecureSource = dataclasses.field(default_factory=fresh_seed, repr=False)

    def draw(self, step: int) -> Draw:
        """Returns the units of a logical step, always the same ones."""
        random = _generator(self.seed, step, "units")
        if isinstance(self.seed, SecureSource):
            q, most = self.sampling_probability, self.max_batch_size
            kept = random.poisson_subset(self.n, q, most)
            return _padded([kept], 1, most, len(kept))
        drawn = random.binomial(self.n, self.sampling_probability)
        chosen = random.choice(
            self.n, size=min(int(drawn), self.max_batch_size), replace=False
        )
        return _padded([chosen], 1, self.max_batch_size, len(chosen))


@dataclasses.dataclass(frozen=True)
class ShuffledSampler:
    """Cuts a fresh permutation of n units into batches of exactly B, every epoch.

    An epoch has n // B steps, and leaves the rest of its permutation unused. So a unit
    is in at most one batch of an epoch, which is all that `accounting` rests on: the
    permutations are independent of the data, and need not be uniform for it.
    """

    n: int  # units in the data, at least B
    max_batch_size: int  # B, units in every batch
    seed: int | SecureSource = dataclasses.field(default_factory=fresh_seed, repr=False)

    def draw(self, step: int) -> Draw:
        """As `PoissonSampler.draw`."""
        epoch, batch = divmod(step, self.n // self.max_batch_size)
        start = batch * self.max_batch_size
        order = _permutation(self.n, self.seed, epoch)
        chosen = order[start : start + self.max_batch_size]
        return _padded([chosen], 1, self.max_batch_size, len(chosen))


@functools.lru_cache(maxsize=1)
def _permutation(n: int, seed: int | SecureSource, epoch: int) -> np.ndarray:
    return _generator(seed, epoch, "epoch").permutation(n)


@dataclasses.dataclass(frozen=True)
class Groups:
    """The rows that each unit owns: u owns rows[offsets[u]:offsets[u + 1]]."""

    rows: np.ndarray  # [total] int64, row numbers, perhaps memory-mapped
    offsets: np.ndarray  # [units + 1] int64, from 0 to total and never falling

    def __post_init__(self) -> None:
        """Checks that the offsets cut the rows into groups, each row into one."""
        for name in ("rows", "offsets"):
            values = np.asanyarray(getattr(self, name))
            # A TypeError for floats, of which two may round to one row.
            integers = values.astype(np.int64, casting="same_kind", copy=False)
            object.__setattr__(self, name, integers)
        rows, offsets = self.rows, self.offsets
        ends = [*offsets[:1], *offsets[1:][-1:]]
        if ends != [0, len(rows)] or (np.diff(offsets) < 0).any():
            raise validation.InputError(
                f"offsets must rise from 0 to the number of rows, {len(rows)}, in one "
                "step for each unit. Use Groups.of."
            )
        # Row -1 is the last one, which another unit owns by its own number.
        if (rows < 0).any() or len(np.unique(rows)) < len(rows):
            raise validation.InputError(
                "a row belongs to two units, or has a negative number. Use Groups.of."
            )

    def __len__(self) -> int:
        """The number of units."""
        return len(self.offsets) - 1

    @classmethod
    def of(cls, labels: Sequence | np.ndarray) -> Groups:
        """The groups of rows that bear the same label.

        Labels, [rows], are integers alone or strings alone. In other types several
        owners can be equal (None, NaN, rounded numbers). Merged into one unit, an owner
        who leaves can turn its clipped gradient around: twice the sensitivity.
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
        uniform = any(all(issubclass(k, c) for k in kinds) for c in comparable)
        if np.ma.is_masked(labels) or not uniform:
            found = " and ".join(sorted(kind.__name__ for kind in kinds))
            raise validation.InputError(
                f"labels are masked or of type {found}. Give only integers or only "
                "strings; leave out rows without a known owner, or label each."
            )
        _, owner, sizes = np.unique(owners, return_inverse=True, return_counts=True)
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        return cls(np.argsort(owner, kind="stable").astype(np.int64), offsets)


@dataclasses.dataclass(frozen=True)
class UserSampler:
    """Draws users, then k = `rows_per_unit` rows of each.

    Unit j of a draw occupies places [j·k, (j+1)·k). A user with fewer than k rows gives
    all of them, the other places having weight 0; of more, each step draws k uniformly.
    """

    units: UnitSampler
    groups: Groups
    rows_per_unit: int = 1

    def draw(self, step: int) -> Draw:
        """Returns the rows of a logical step, always the same ones."""
        users, k = self.units.draw(step), self.rows_per_unit
        random = _generator(self.units.seed, step, "rows")
        parts = []
        for user in users.indices[: users.count]:
            own = self.groups.rows[slice(*self.groups.offsets[user : user + 2])]
            taken = min(k, len(own))
            parts.append(own[random.choice(len(own), size=taken, replace=False)])
        return _padded(parts, len(users.indices), k, users.count * k)


@dataclasses.dataclass(frozen=True)
class DealtSampler:
    """Deals units to G = `num_microbatches`, independently and uniformly.

    Microbatch g has places [g·c, (g + 1)·c), c being the `capacity`, for the first c
    units dealt to it in the draw's random order.

    *One unit more changes one microbatch.* Which microbatch a unit is dealt to depends
    on its own throw alone, and which of a microbatch's units are kept on those of that
    microbatch alone. So whether x is drawn or not, the microbatches that it is not
    dealt to hold the same units in the same order. (In a draw cut into microbatches one
    after the other, x would push a unit out of every later one, and the sum of G
    clipped gradients could move by 2·G·C.) The throws do not depend on the data, so
    given them the step is a function f of the units drawn with ‖f(S) − f(S + x)‖ ≤ 2C,
    and x is drawn with probability q independently of S: the Poisson-subsampled
    Gaussian mechanism at sensitivity 2C. Averaging over the throws keeps its guarantee,
    for hockey-stick divergence is jointly convex.
    """

    units: PoissonSampler
    num_microbatches: int
    capacity: int

    def draw(self, step: int) -> Draw:
        """Returns the rows of a logical step, always the same ones."""
        drawn = self.units.draw(step)
        random = _generator(self.units.seed, step, "dealing")
        units, groups = drawn.indices[: drawn.count], range(self.num_microbatches)
        dealt = random.integers(self.num_microbatches, size=drawn.count)
        parts = [units[dealt == group][: self.capacity] for group in groups]
        return _padded(parts, len(parts), self.capacity, len(parts) * self.capacity)


UnitSampler = Union[PoissonSampler, ShuffledSampler]
Sampler = Union[PoissonSampler, ShuffledSampler, UserSampler, DealtSampler]


def _padded(parts: Sequence[np.ndarray], number: int, places: int, count: int) -> Draw:
    """The draw of this `number` of parts, each of which has this many places."""
    indices = np.zeros((number, places), np.int64)
    weights = np.zeros((number, places), np.float32)
    for at, part in enumerate(parts):
        indices[at, : len(part)] = part
        weights[at, : len(part)] = 1
    return Draw(indices.ravel(), weights.ravel(), count)


def _generator(seed: int | SecureSource, number: int, stream: str) -> Any:
    """A NumPy `Generator`, or what stands for it, of one step or epoch."""
    if isinstance(seed, SecureSource):
        return seed.stream(stream, number)
    # No third entry: numpy pads entries with zeros, so [seed, 3, 0] is [seed, 3].
    key = (PURPOSES.index(stream),)
    return np.random.default_rng(np.random.SeedSequence([seed, number], spawn_key=key))
