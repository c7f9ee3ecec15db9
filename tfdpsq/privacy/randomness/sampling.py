"""Rows of a logical step: Poisson and shuffled batches, over users too.

Every draw is a pure function of a secret seed and the step number: a resumed run
repeats it exactly, asking for one step never moves another, and nothing of the
size of the data is held. A *unit* is what the guarantee protects: a row of the
data by itself, or a user who owns several.

| sampler | units of a step | what the accounting rests on |
|---|---|---|
| `PoissonSampler` | each independently with probability q, at most M | amplification |
| `ShuffledSampler` | exactly B, each at most once an epoch | once per epoch, no more |
| `UserSampler` | one of the above; then k rows of each unit | as the sampler of units |
| `DealtSampler` | the first, each dealt to one of G groups | as the first |
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from typing import Any, Union

import numpy as np

from tfdpsq import validation
from tfdpsq.privacy.randomness.secure import KEY_BITS, SecureSource, SecureStream

# Streams of one seed that never meet: see `_generator`.
_UNITS, _ROWS, _EPOCH, _DEALT = 0, 1, 2, 3
# The same of a secure source.
_PURPOSES = ("units", "rows", "epoch", "dealing")
# Rounds of the shuffle. Hoang, Morris & Rogaway 2012 (theorem 2) ask for about
# 6·log2(n), which is 128 for more units than anybody has.
_ROUNDS = 128
_LARGEST_SHUFFLE = 1 << 62  # sums of two positions must fit into an int64


def fresh_seed(secure: bool = False) -> int:
    """Fresh bits from the operating system. As secret as the data: never release.

    Args:
      secure: for a `SecureSource`, 256 bits; else 128.
    """
    return secrets.randbits(KEY_BITS if secure else 128)


@dataclasses.dataclass(frozen=True)
class Draw:
    """The rows of one logical step.

    Attributes:
      indices: [R] int64, rows of the data; where `weights` is 0 the entry is
        padding and points at row 0.
      weights: [R] float32, 1 for a drawn row and 0 for padding.
      count: leading rows in use, 0 ≤ count ≤ R; all further ones are padding.
        Private: never log it.
    """

    indices: np.ndarray
    weights: np.ndarray
    count: int


class PoissonSampler:
    """Draws each of n units independently, truncated at a static maximum.

    A draw of more than M units keeps a uniformly random M of them; the plan that
    makes the sampler accounts for this.

    What is computed is: how many, K ~ Bin(n, q); then min(K, M) distinct units,
    uniformly, in random order. This is the same law. Under independent inclusion
    with probability q a set S of size k has probability q^k·(1-q)^(n-k), which
    depends on k alone. So |S| ~ Bin(n, q), and given |S| = k all C(n, k) sets
    are equally likely, which is what is drawn. In uniformly random order the first
    M of S are a uniformly random subset of it, and all ordered M-tuples of
    distinct units are equally likely, so the rest need not be drawn.
    """

    def __init__(
        self,
        n: int,
        sampling_probability: float,
        max_batch_size: int,
        seed: int | SecureSource | None = None,
    ):
        """Prepares the sampler; nothing is drawn yet.

        Args:
          n: units in the data.
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
        """The units of logical step `step`; the same for the same seed and step."""
        random = _generator(self._seed, step, _UNITS)
        if isinstance(random, SecureStream):
            kept = random.poisson_subset(
                self.n, self.sampling_probability, self.max_batch_size
            )
            return _padded(kept, self.max_batch_size)
        drawn = random.binomial(self.n, self.sampling_probability)
        # Memory is that of the batch: numpy holds all n only where n < 50·size.
        chosen = random.choice(
            self.n, size=min(int(drawn), self.max_batch_size), replace=False
        )
        return _padded(chosen, self.max_batch_size)


class ShuffledSampler:
    """Cuts a fresh permutation of n units into batches of exactly B, every epoch.

    An epoch has n // B steps; what is left over of its permutation is unused in
    that epoch. So a unit is in at most one batch of an epoch, which is all that
    its accounting rests on (`accounting`): the permutations are independent of
    the data, and need not be uniform for it.

    They are made place by place by the swap-or-not shuffle (Hoang, Morris &
    Rogaway 2012), so that a batch costs the memory of a batch: a round pairs
    place x with (k - x) mod n, and a pseudorandom bit of the pair says whether
    the two are swapped. Each round is its own inverse, so what results is a
    permutation.
    """

    def __init__(self, n: int, batch_size: int, seed: int | SecureSource | None = None):
        """Prepares the sampler; nothing is drawn yet.

        Args:
          n: units in the data.
          batch_size: B, units in every batch.
          seed: secret; `None` takes fresh entropy. Only tests fix it.

        Raises:
          InputError: a value out of range, or B > n.
        """
        self.n = validation.positive_integer("n", n)
        self.max_batch_size = validation.positive_integer("batch_size", batch_size)
        if n > _LARGEST_SHUFFLE:
            raise validation.InputError(
                f"n is {n}; positions are shuffled as 64-bit integers, which hold "
                "at most 2^62. Use sampler 'poisson'."
            )
        if batch_size > n:
            raise validation.InputError(
                f"batch_size {batch_size} is larger than the data: n is {n}. "
                f"Lower batch_size to at most {n}."
            )
        self.steps_per_epoch = n // batch_size
        self._seed = fresh_seed() if seed is None else seed

    def draw(self, step: int) -> Draw:
        """The units of logical step `step`; the same for the same seed and step."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        places = np.arange(self.max_batch_size, dtype=np.int64)
        places += batch * self.max_batch_size
        random = _generator(self._seed, epoch, _EPOCH)
        turns = random.integers(self.n, size=_ROUNDS)
        keys = random.integers(1 << 64, size=(_ROUNDS, 2), dtype=np.uint64)
        for turn, key in zip(turns, keys):
            partner = (turn - places) % self.n
            swapped = _random_bits(np.maximum(places, partner), key)
            places = np.where(swapped, partner, places)
        return _padded(places, self.max_batch_size)


@dataclasses.dataclass(frozen=True)
class Groups:
    """The rows that each unit owns.

    Attributes:
      rows: [total] int64 (given as any integers), row numbers, those of one unit next
        to each other.
      offsets: [units + 1] int64 (likewise), from 0 to total and never falling: unit u
        owns rows[offsets[u]:offsets[u + 1]]. May be memory-mapped.

    Raises:
      InputError: arrays of other shapes or of no integers, offsets that fall or do not
        end at the number of rows, or a row of two units.
    """

    rows: np.ndarray
    offsets: np.ndarray

    def __post_init__(self) -> None:
        """Checks that the offsets cut the rows into groups, each row into one."""
        for name in ("rows", "offsets"):
            values = np.asanyarray(getattr(self, name))
            if values.dtype.kind not in "iu":
                raise validation.InputError(
                    f"{name} has dtype {values.dtype}, and two of its values may round "
                    "to one row. Give integers; Groups.of(labels) makes them."
                )
            # Differences of unsigned offsets never fall below 0.
            object.__setattr__(self, name, values.astype(np.int64, copy=False))
        if self.rows.ndim != 1 or self.offsets.ndim != 1 or len(self.offsets) < 2:
            raise validation.InputError(
                f"rows and offsets have shapes {self.rows.shape} and "
                f"{self.offsets.shape}; they must be vectors, with one offset more "
                "than there are units. Groups.of(labels) makes them."
            )
        if (
            self.offsets[0] != 0
            or self.offsets[-1] != len(self.rows)
            or (np.diff(self.offsets) < 0).any()
        ):
            raise validation.InputError(
                f"offsets must rise from 0 to the number of rows {len(self.rows)}; "
                f"they go from {self.offsets[0]} to {self.offsets[-1]}. "
                "Groups.of(labels) makes them."
            )
        rows = np.sort(self.rows)
        if len(rows) and rows[0] < 0:
            raise validation.InputError(
                f"rows holds {rows[0]}, which counts from the end: a row that another "
                "unit owns by its own number would have two owners. Number rows from "
                "0; Groups.of(labels) does."
            )
        if (rows[1:] == rows[:-1]).any():
            raise validation.InputError(
                "a row belongs to two units, so leaving one of them out would not "
                "leave out the row. Give every row one owner; Groups.of(labels) does."
            )

    def __len__(self) -> int:
        """The number of units."""
        return len(self.offsets) - 1

    @classmethod
    def of(cls, labels: Sequence | np.ndarray) -> Groups:
        """The groups of rows that bear the same label.

        Args:
          labels: [rows], whose row each is: integers, or strings.

        Raises:
          InputError: no labels, not one for each row, or labels that are neither.
        """
        # A list as it is: numpy would make 64-bit integers, None or NaN among others
        # floats or strings, and so of several owners one.
        given = hasattr(labels, "dtype")
        owners = np.asarray(labels) if given else np.asarray(labels, object)
        if owners.ndim != 1 or not len(owners):
            raise validation.InputError(
                f"labels have shape {owners.shape}; give one label for each row."
            )
        _require_labels(labels, owners)
        _, owner, sizes = np.unique(owners, return_inverse=True, return_counts=True)
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        return cls(np.argsort(owner, kind="stable").astype(np.int64), offsets)


def _require_labels(given: Any, owners: np.ndarray) -> None:
    """Refuses labels of which several could be one, which would merge their owners.

    Of two persons merged into one unit, one that leaves does not take the unit along,
    but can turn its clipped gradient around: twice the sensitivity.
    """
    comparable: tuple[tuple[type, ...], ...] = ((int, np.integer), (str,), (bytes,))
    if np.ma.is_masked(given):
        found = "masked"
    elif owners.dtype.kind in "iuUS":
        return
    elif owners.dtype.kind != "O":
        found = owners.dtype.name
    elif any(all(isinstance(one, kinds) for one in owners) for kinds in comparable):
        return
    else:
        found = " and ".join(sorted({type(one).__name__ for one in owners}))
    raise validation.InputError(
        f"labels are {found}. Give integers alone, or strings alone: others can be "
        "equal for several owners (NaN, rounded numbers), who would then be one unit. "
        "Rows of no known owner need a label of their own each, or to be left out."
    )


class UserSampler:
    """Draws users, then k rows of each.

    Unit j of a draw occupies places [j·k, (j+1)·k). A user with fewer than k rows
    gives all of them, and the places left over have weight 0; of more than k
    rows a uniformly random k are drawn, again in every step.
    """

    def __init__(self, units: UnitSampler, groups: Groups, rows_per_unit: int = 1):
        """Prepares the sampler, k being `rows_per_unit`; nothing is drawn yet.

        Raises:
          InputError: k below 1, or `units` draws from another number of users.
        """
        self.rows_per_unit = validation.positive_integer("rows_per_unit", rows_per_unit)
        if units.n != len(groups):
            raise validation.InputError(
                f"the sampler draws from {units.n} users, but groups has "
                f"{len(groups)}. Give the sampler the number of groups."
            )
        self.units, self.groups = units, groups

    def draw(self, step: int) -> Draw:
        """The rows of logical step `step`; the same for the same seed and step."""
        users = self.units.draw(step)
        shape = (len(users.indices), self.rows_per_unit)
        indices, weights = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
        random = _generator(self.units._seed, step, _ROWS)
        offsets, rows = self.groups.offsets, self.groups.rows
        for place, user in enumerate(users.indices[: users.count]):
            start, size = offsets[user], offsets[user + 1] - offsets[user]
            taken = min(self.rows_per_unit, int(size))
            if taken:
                chosen = random.choice(int(size), size=taken, replace=False)
                indices[place, :taken] = rows[start + chosen]
                weights[place, :taken] = 1
        return Draw(indices.ravel(), weights.ravel(), users.count * self.rows_per_unit)


class DealtSampler:
    """Deals the units of a draw to G groups, each independently and uniformly.

    Group g occupies places [g·c, (g + 1)·c). Of more than c units dealt to a group,
    the first c of the draw's random order are kept.

    *One unit more changes one group.* Which group a unit is dealt to depends on its
    own throw alone, and which of a group's units are kept on those of that group
    alone. So let x be drawn or not, all else being the same: the groups that x is
    not dealt to hold exactly the same units in the same order. (Were a draw cut into
    groups one after the other, x would push a unit out of every later group, and the
    sum of G clipped gradients could move by 2·G·C.) The throws do not depend on the
    data, so given them the step is a function f of the units drawn with
    ‖f(S) − f(S + x)‖ ≤ 2C, and x is drawn with probability q independently of S: the
    Poisson-subsampled Gaussian mechanism at sensitivity 2C. Averaging over the throws
    keeps its guarantee, for hockey-stick divergence is jointly convex.
    """

    def __init__(self, units: PoissonSampler, groups: int, capacity: int):
        """Prepares the sampler of G `groups` of `capacity` c; nothing is drawn yet.

        Raises:
          InputError: a number below 1.
        """
        self.groups = validation.positive_integer("groups", groups)
        self.capacity = validation.positive_integer("capacity", capacity)
        self.units = units

    def draw(self, step: int) -> Draw:
        """The rows of logical step `step`; the same for the same seed and step."""
        drawn = self.units.draw(step)
        random = _generator(self.units._seed, step, _DEALT)
        shape = (self.groups, self.capacity)
        indices, weights = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
        dealt = random.integers(self.groups, size=drawn.count)
        for group in range(self.groups):
            own = drawn.indices[: drawn.count][dealt == group][: self.capacity]
            indices[group, : len(own)] = own
            weights[group, : len(own)] = 1
        return Draw(indices.ravel(), weights.ravel(), indices.size)


UnitSampler = Union[PoissonSampler, ShuffledSampler]
Sampler = Union[PoissonSampler, ShuffledSampler, UserSampler, DealtSampler]


def _padded(chosen: np.ndarray, rows: int) -> Draw:
    """The draw that has `chosen` first and then padding up to `rows`."""
    indices, weights = np.zeros(rows, np.int64), np.zeros(rows, np.float32)
    indices[: len(chosen)] = chosen
    weights[: len(chosen)] = 1
    return Draw(indices, weights, len(chosen))


def _generator(
    seed: int | SecureSource, number: int, stream: int
) -> np.random.Generator | SecureStream:
    """The random numbers of one step or epoch; streams of a seed do not meet."""
    if isinstance(seed, SecureSource):
        return seed.stream(_PURPOSES[stream], number)
    # A spawn key and not a third entry: numpy pads entries with zeros, so that
    # [seed, 3] and [seed, 3, 0] would be the same.
    sequence = np.random.SeedSequence([seed, number], spawn_key=(stream,))
    return np.random.default_rng(sequence)


def _random_bits(values: np.ndarray, key: np.ndarray) -> np.ndarray:
    """One pseudorandom bit for each value: [...] int64 and [2] uint64 to bool."""
    # The finaliser of SplitMix64 (Steele, Lea & Flood 2014), keyed twice.
    mixed = values.astype(np.uint64) + key[0]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= key[1]
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed >> np.uint64(63)).astype(bool)
