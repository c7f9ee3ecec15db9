"""The T5s that come with the package, by name."""

from __future__ import annotations

import pathlib

_FOLDER = pathlib.Path(__file__).parents[1] / "presets"


def names() -> list[str]:
    """What can be loaded by name and without a network: "t5_tiny_pydocs"."""
    return sorted(path.parent.name for path in _FOLDER.glob("*/config.json"))


def directory_of(name: str) -> pathlib.Path | None:
    """Where the T5 of this name lies (Hugging Face's layout, with its card)."""
    return _FOLDER / name if name in names() else None
