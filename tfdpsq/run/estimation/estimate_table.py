"""The published sizes of T5 with every engine: what fits into how much memory.

To trace each size at each microbatch would take hours. But all layers are alike, so two
small numbers of layers tell what each one adds; and memory grows evenly with the
microbatch, or, where tensorflow-privacy takes every row's gradients through every row,
with its square, so three microbatches tell the others.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import ml_collections

from tfdpsq import validation
from tfdpsq.layers import T5Config
from tfdpsq.run.estimation import estimate_step

SIZES = ("small", "base", "large", "xl")
# What is traced for each: microbatches.
ENGINES = {
    "plain": (4, 16, 48),
    "fast": (4, 16, 48),
    "dpkeras": (2, 8, 20),
    "vectorized": (2, 8, 20),
}
SHOWN = (1, 8, 32)  # microbatches
LIMITS = (16, 24, 40, 80)  # in GB
_LAYERS = (4, 6)
_LARGEST = 4096


@dataclasses.dataclass(frozen=True)
class Row:
    """One size with one engine.

    Attributes:
      size: of T5 1.1.
      engine: or "plain", without privacy.
      parameters: how many numbers the model has.
      peaks: for some microbatches, bytes at the peak.
      largest: for each of `LIMITS`, the largest microbatch that fits; 0 for none.
    """

    size: str
    engine: str
    parameters: int
    peaks: dict[int, int]
    largest: dict[int, int]


def rows(
    config: ml_collections.ConfigDict,
    process: int,
    threads: int,
    engines: Sequence[str] = tuple(ENGINES),
) -> Iterator[Row]:
    """The table, with the config's lengths, optimizer, LoRA, dtype and so on.

    Args:
      config: of stage finetune.
      process: see `estimate_step.memory_of`.
      threads: see there.
      engines: those of `ENGINES` that are wanted.

    Yields:
      Its rows, each about a minute after the one before.

    Raises:
      InputError: an unknown engine.
    """
    for engine in engines:
        validation.one_of("engine", engine, tuple(ENGINES))
    for size in SIZES:
        for engine in engines:
            shape = T5Config.from_size(size, "1.1")
            peak, parameters = peaks(config, shape, engine, process, threads)
            yield Row(
                size=size,
                engine=engine,
                parameters=parameters,
                peaks={one: peak(one) for one in SHOWN},
                largest={limit: _largest(peak, limit * 10**9) for limit in LIMITS},
            )


def peaks(
    config: ml_collections.ConfigDict,
    shape: T5Config,
    engine: str,
    process: int,
    threads: int,
    layers: tuple[int, int] = _LAYERS,
) -> tuple[Callable[[int], int], int]:
    """One size with one engine, at any microbatch.

    Args:
      config: of stage finetune; its engine and microbatch do not matter.
      shape: the model's.
      engine: one of `ENGINES`.
      process: see `estimate_step.memory_of`.
      threads: see there.
      layers: two numbers of layers to trace.

    Returns:
      A function from a microbatch to bytes at the peak, the process included; and how
      many numbers the model has.
    """
    few, more = layers

    def deep(one: float, other: float) -> float:
        return one + (other - one) * (shape.num_layers - few) / (more - few)

    alive, processes, shares, parameters = [], [], [], 0.0
    for microbatch in ENGINES[engine]:
        found, counts = [], []
        for depth in layers:
            traced = estimate_step.trace(
                _settings(config, engine, microbatch),
                dataclasses.replace(shape, num_layers=depth),
            )
            found.append(estimate_step.memory_of(traced, process, threads))
            counts.append(traced.parameters[0])
        without = [one.peak - one.process - one.gaps for one in found]
        alive.append(deep(*without))
        processes.append(deep(*(one.process for one in found)))
        shares += [1 + one.gaps / rest for one, rest in zip(found, without)]
        parameters = deep(*counts)
    # What is alive grows evenly, the gaps between do not: their share stays.
    share = sum(shares) / len(shares)
    fit = _line if engine in ("plain", "fast") else _parabola

    def peak(microbatch: int) -> int:
        return round(fit(ENGINES[engine], alive, microbatch) * share + processes[-1])

    return peak, round(parameters)


def head() -> str:
    """The table's first line."""
    cells = [f"{'T5 1.1':6} {'engine':10} {'parameters':>14}"]
    cells += [f"{f'microbatch {size}':>14}" for size in SHOWN]
    cells += [f"{f'in {limit} GB':>9}" for limit in LIMITS]
    return " ".join(cells) + "\n"


def line(row: Row) -> str:
    """One line of it."""
    cells = [f"{row.size:6} {row.engine:10} {row.parameters:14,}"]
    cells += [f"{row.peaks[size] / 2**30:10.1f} GiB" for size in SHOWN]
    cells += [f"{row.largest[limit] or '-':>9}" for limit in LIMITS]
    return " ".join(cells) + "\n"


def _largest(peak: Callable[[int], int], limit: int) -> int:
    """The largest microbatch that fits, or 0."""
    fits = [peak(microbatch) <= limit for microbatch in range(1, _LARGEST + 1)]
    return fits.index(False) if False in fits else _LARGEST


def _settings(config, engine: str, microbatch: int) -> ml_collections.ConfigDict:
    settings = config.copy_and_resolve_references()
    settings.epsilon = math.inf if engine == "plain" else 8.0
    settings.engine = "fast" if engine == "plain" else engine
    settings.microbatch_size, settings.batch_size = microbatch, 2 * microbatch
    return settings


def _line(at: Sequence[int], values: Sequence[float], x: int) -> float:
    """On the nearest of the lines between neighbours."""
    i = min(max(bisect.bisect(at, x) - 1, 0), len(at) - 2)
    slope = (values[i + 1] - values[i]) / (at[i + 1] - at[i])
    return values[i] + slope * (x - at[i])


def _parabola(at: Sequence[int], values: Sequence[float], x: int) -> float:
    """On the parabola through three points (Lagrange)."""
    return sum(
        value * math.prod((x - other) / (one - other) for other in at if other != one)
        for one, value in zip(at, values)
    )
