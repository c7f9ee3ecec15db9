"""Packages that load a module when one of its names is first used: imports are slow."""

from __future__ import annotations

import ast
import importlib
import pathlib
import sys
from collections.abc import Callable
from typing import Any


def package(name: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` for the imports below `if TYPE_CHECKING:`."""
    tree = ast.parse(pathlib.Path(str(sys.modules[name].__file__)).read_text("utf-8"))
    origins = {
        alias.asname or alias.name: (str(found.module), alias.name)
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for found in node.body
        if isinstance(found, ast.ImportFrom)
        for alias in found.names
    }

    def load(attribute: str) -> Any:
        if attribute not in origins:
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        module, original = origins[attribute]
        value = getattr(importlib.import_module(module), original)
        setattr(sys.modules[name], attribute, value)
        return value

    return load, lambda: sorted({*vars(sys.modules[name]), *origins})
