"""Defers the imports that take seconds, for every command.

`tfdpsq.run` imports this: what verifies, lists or refuses needs none of them. Before
TensorFlow can be loaded, its warnings are turned off: one that an operation logs when
it refuses a value quotes private rows.
"""

import importlib
import importlib.util
import os
import sys
import types
from typing import Any


class _Deferred(types.ModuleType):
    """A module that is imported when an attribute of it is read.

    `importlib.util.LazyLoader` does not do: the second `import` of a module reads its
    `__spec__`.
    """

    def __getattr__(self, attribute: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), attribute)


os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
for _name in ("tensorflow", "tensorflow_text", "dp_accounting"):
    _spec = None if _name in sys.modules else importlib.util.find_spec(_name)
    if _spec is not None:
        sys.modules[_name] = _Deferred(_name)
        sys.modules[_name].__spec__, sys.modules[_name].__file__ = _spec, _spec.origin
