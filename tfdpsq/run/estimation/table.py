"""Memory of the published sizes of T5 with every engine, by formula."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterator, Sequence

import ml_collections

from tfdpsq import validation
from tfdpsq.layers import T5Config
from tfdpsq.run.estimation import formula, step

SIZES = ("small", "base", "large", "xl")
ENGINES = ("plain", "fast", "dpkeras", "vectorized")
SHOWN = (1, 8, 32)  # microbatches
LIMITS = (16, 24, 40, 80)  # in GB
_LARGEST = 1024


@dataclasses.dataclass(frozen=True)
class Row:
    """One size with one engine.

    Attributes:
      size: of T5 1.1.
      engine: or "plain", without privacy.
      parameters: numbers in the model.
      peaks: bytes at the peak, by microbatch.
      largest: for each of `LIMITS`, the largest microbatch that fits; 0 for none.
    """

    size: str
    engine: str
    parameters: int
    peaks: dict[int, int]
    largest: dict[int, int]


def rows(
    config: ml_collections.ConfigDict, process: int, engines: Sequence[str] = ENGINES
) -> Iterator[Row]:
    """Yields the table's rows, with the config's other settings.

    Raises:
      InputError: an unknown engine.
    """
    for engine in engines:
        validation.one_of("engine", engine, ENGINES)
    for size in SIZES:
        shape = T5Config.from_size(size, "1.1")
        sizes = step.sizes_of(config, shape)
        for engine in engines:
            settings = config.copy_and_resolve_references()
            settings.epsilon = math.inf if engine == "plain" else 8.0
            settings.engine = "fast" if engine == "plain" else engine

            peaks = _Peaks(settings, shape, sizes, process)
            yield Row(
                size=size,
                engine=engine,
                parameters=sizes.parameters,
                peaks={one: peaks[one - 1] for one in SHOWN},
                largest={
                    limit: bisect.bisect_right(peaks, limit * 10**9) for limit in LIMITS
                },
            )


@dataclasses.dataclass(frozen=True)
class _Peaks:
    """Peaks of microbatches 1 to `_LARGEST`, which grow: computed where looked at."""

    settings: ml_collections.ConfigDict
    shape: T5Config
    sizes: step.Sizes
    process: int

    def __len__(self) -> int:
        return _LARGEST

    def __getitem__(self, index: int) -> int:
        self.settings.microbatch_size = index + 1
        found = formula.memory_of(self.settings, self.shape, self.sizes, self.process)
        return found.peak


def head() -> str:
    """Returns the table's first line."""
    cells = [f"{'T5 1.1':6} {'engine':10} {'parameters':>14}"]
    cells += [f"{f'microbatch {size}':>14}" for size in SHOWN]
    cells += [f"{f'in {limit} GB':>9}" for limit in LIMITS]
    return " ".join(cells) + "\n"


def line(row: Row) -> str:
    """Formats one row."""
    cells = [f"{row.size:6} {row.engine:10} {row.parameters:14,}"]
    cells += [f"{row.peaks[size] / 2**30:10.1f} GiB" for size in SHOWN]
    cells += [f"{row.largest[limit] or '-':>9}" for limit in LIMITS]
    return " ".join(cells) + "\n"
