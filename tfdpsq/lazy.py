"""Packages that load a module when one of its names is first used.

Importing TensorFlow, tensorflow-privacy and keras-nlp takes seconds, which `verify`,
`status` or a mistyped setting need not wait for.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any


def package(name: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` of a package whose imports are deferred.

    The package's `__init__` lists them once, below `if TYPE_CHECKING:`, where type
    checkers and readers look for them.

    Args:
      name: the package's `__name__`.
    """
    file = sys.modules[name].__file__
    origins: dict[str, tuple[str, str]] = {}
    for node in ast.parse(Path(str(file)).read_text("utf-8")).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for found in node.body:
                if isinstance(found, ast.ImportFrom):
                    for alias in found.names:
                        origin = str(found.module), alias.name
                        origins[alias.asname or alias.name] = origin

    def load(attribute: str) -> Any:
        if attribute not in origins:
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        module, original = origins[attribute]
        value = getattr(importlib.import_module(module), original)
        setattr(sys.modules[name], attribute, value)
        return value

    return load, lambda: sorted({*vars(sys.modules[name]), *origins})


class _Deferred(types.ModuleType):
    """A module that is imported when an attribute of it is read."""

    def __getattr__(self, attribute: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), attribute)


def is_loaded(name: str) -> bool:
    """Returns whether a module was imported, and not only deferred."""
    return name in sys.modules and not isinstance(sys.modules[name], _Deferred)


def defer(name: str) -> None:
    """Makes `import name` load a top-level module when an attribute of it is read.

    `importlib.util.LazyLoader` does not do: the second `import` of a module reads its
    `__spec__`. Does nothing if the module is loaded already, or not installed.
    """
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is not None:
        deferred = _Deferred(name)
        deferred.__spec__, deferred.__file__ = spec, spec.origin
        sys.modules[name] = deferred
