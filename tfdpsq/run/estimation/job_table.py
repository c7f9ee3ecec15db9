"""A job's estimate as text and as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdpsq.run.core import workdir
from tfdpsq.run.core.progress import duration
from tfdpsq.run.estimation.costs import Devices, Part, Rates


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The cost of a job.

    Attributes:
      parts: of the job.
      rates: of one device.
      memory: peak bytes of fine-tuning; `None` if not requested.
      assumed: assumptions, in sentences.
    """

    parts: list[Part]
    rates: Rates
    memory: int | None
    assumed: list[str]


def as_text(found: Estimate, devices: Devices) -> str:
    """Formats the estimate as text."""
    head = f"{'part':16} {'time':>10} {'devices':>8} {'device hours':>13} {'disk':>10}"
    lines = [head + (f" {'price':>10}" if devices.price else "") + "  work"]
    hours = seconds = size = 0.0
    for part in found.parts:
        if part.seconds is not None and part.device_hours is not None:
            hours, seconds = hours + part.device_hours, seconds + part.seconds
        size += part.bytes
        lines.append(
            _line(
                part.name,
                part.seconds,
                f"{part.devices}",
                part.device_hours,
                part.bytes,
                devices,
            )
            + f"  {part.work}"
        )
    lines.append(_line("all", seconds, "", hours, size, devices))
    lines.append("")
    if found.memory is not None:
        lines.append(
            f"Fine-tuning takes {found.memory / 2**30:.1f} GiB at its peak; measuring "
            f"everything took {workdir.peak_memory_gib():.1f} GiB here."
        )
    return "\n".join([*lines, *found.assumed]) + "\n"


def _line(name, seconds, count, hours, size, devices) -> str:
    taken = "unknown" if seconds is None else duration(seconds)
    used = "" if hours is None else f"{hours:,.2f}"
    disk = f"{size / 1e9:,.2f} GB" if size else ""
    line = f"{name:16} {taken:>10} {count:>8} {used:>13} {disk:>10}"
    if devices.price:
        line += f" {'' if hours is None else f'{hours * devices.price:,.2f}':>10}"
    return line


def as_json(found: Estimate, devices: Devices) -> dict[str, Any]:
    """Returns the estimate as JSON values."""
    parts = []
    for part in found.parts:
        hours = part.device_hours
        price = None if hours is None else hours * devices.price
        parts.append(
            {**dataclasses.asdict(part), "device_hours": hours, "price": price}
        )
    return {**dataclasses.asdict(found), "parts": parts}
