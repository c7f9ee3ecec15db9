"""Names of the T5s that the package contains."""

from __future__ import annotations

import pathlib

_FOLDER = pathlib.Path(__file__).parents[1] / "presets"


def names() -> list[str]:
    """Lists the names that load without a network, such as "t5_tiny_manuals"."""
    return sorted(path.parent.name for path in _FOLDER.glob("*/config.json"))


def directory_of(name: str) -> pathlib.Path | None:
    """Returns the directory of a T5 by its name (Hugging Face's layout and a card)."""
    return _FOLDER / name if name in names() else None
