"""Declares each setting of a stage once: its type, range and remedy.

A stage has a mapping `SETTINGS` from names to `Setting`s, or to further mappings where
its config is nested. `default_config` makes the stage's ConfigDict from it. `check`
validates a config before the stage reads anything, so a bad value never costs budget.
Messages use a setting's dotted name, as on the command line.

| given                       | Integer | Number         | Flag | Text |
|-----------------------------|---------|----------------|------|------|
| True                        | refused | refused        | ok   | -    |
| 3, numpy.int64(3)           | ok      | ok             | -    | -    |
| 3.0, numpy.float32(3)       | refused | ok             | -    | -    |
| nan                         | refused | refused        | -    | -    |
| inf, "inf"                  | refused | if `infinite`  | -    | -    |
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import shlex
from collections.abc import Callable, Collection, Mapping
from typing import Any

import ml_collections
import numpy as np

from tfdpsq import validation

# Upper ends beyond any real job: larger values are mistakes, and some would overflow or
# fail only after hours.
ROWS = 2**31 - 1
STEPS = 10**9
TOKENS = 10**6
WIDTH = 10**6
LAYERS = 10_000
# NumPy's largest seed.
SEED = 2**32 - 1
# Precision of products in a T5; see `layers.T5Backbone`.
FLOAT32 = "float32"
DTYPES = (FLOAT32, "mixed_bfloat16")
# Below it float32 has 0, or few digits: budget would be spent on nothing.
SMALLEST = 1e-18
# Longest path on Linux, in characters.
_TEXT = 4096


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting; subclasses define its type and range.

    Attributes:
      default: its value in the stage's default config.
    """

    default: Any
    # Optional advice, printed after the range.
    remedy = ""

    def check(self, name: str, value: Any) -> None:
        """Refuses a value of the setting with the dotted name `name`.

        Raises:
          InputError: names the setting, its value and its range.
        """
        raise NotImplementedError

    def _refuse(
        self, name: str, value: Any, wanted: str, verb: str = "be"
    ) -> validation.InputError:
        text = f"{name} is {validation.shown(value)}; it must {verb} {wanted}."
        return validation.InputError(f"{text} {self.remedy}".rstrip())


@dataclasses.dataclass(frozen=True)
class Integer(Setting):
    """An integer between `low` and `high`, both included.

    Attributes:
      low: smallest value.
      high: largest value.
      zero: whether 0, which switches something off, is allowed as well.
      remedy: advice for a value that is refused.
    """

    low: int = 1
    high: int = ROWS
    zero: bool = False
    remedy: str = ""

    def check(self, name: str, value: Any) -> None:
        """See `Setting.check`."""
        wanted = f"an integer of at least {self.low}"
        whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if whole and value > self.high:
            wanted = f"an integer of at most {self.high:,}"
        elif whole and (value >= self.low or (self.zero and value == 0)):
            return
        raise self._refuse(name, value, wanted + (", or 0" if self.zero else ""))


@dataclasses.dataclass(frozen=True)
class Number(Setting):
    """A number between `low` and `high`; never NaN.

    Attributes:
      low: lower end.
      high: upper end.
      low_open: whether `low` itself is refused; if it is 0, so is what is smaller than
        `SMALLEST`.
      high_open: whether `high` itself is refused.
      infinite: whether infinity is allowed as well, also as the text "inf".
      zero: whether 0, which is below `low`, is allowed as well.
      remedy: advice for a value that is refused.
    """

    low: float = 0.0
    high: float = 1e9
    low_open: bool = False
    high_open: bool = False
    infinite: bool = False
    zero: bool = False
    remedy: str = ""

    def check(self, name: str, value: Any) -> None:
        """See `Setting.check`."""
        if self.infinite and value == "inf":
            return
        number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if number and self.infinite and value == math.inf:
            return
        if number and self.zero and value == 0:
            return
        above = number and (self.low < value if self.low_open else self.low <= value)
        below = number and (value < self.high if self.high_open else value <= self.high)
        if above and self.low_open and self.low == 0 and value < SMALLEST:
            raise self._refuse(name, value, f"at least {SMALLEST:g}")
        if above and below:
            return
        if self.high <= 1:
            left, right = "(" if self.low_open else "[", ")" if self.high_open else "]"
            # A share: the message gives both ends.
            wanted = f"{left}{self.low:g}, {self.high:g}{right}"
            raise self._refuse(name, value, wanted, "lie in")
        kind = "a number" if self.high == math.inf else "a finite number"
        if above and value != math.inf:
            wanted = f"at most {self.high:g}"
        elif self.low_open:
            wanted = f"{kind} above {self.low:g}"
        else:
            wanted = f"{kind} of at least {self.low:g}"
        also = (", or inf" if self.infinite else "") + (", or 0" if self.zero else "")
        raise self._refuse(name, value, wanted + also)


@dataclasses.dataclass(frozen=True)
class Flag(Setting):
    """True or False."""

    def check(self, name: str, value: Any) -> None:
        """See `Setting.check`."""
        if not isinstance(value, (bool, np.bool_)):
            raise self._refuse(name, value, "True or False")


@dataclasses.dataclass(frozen=True)
class Text(Setting):
    """A string: one of `choices`, or a name or path.

    Attributes:
      choices: the allowed values; empty allows any.
      required: whether "" is refused.
    """

    choices: Collection[str] = ()
    required: bool = False

    def check(self, name: str, value: Any) -> None:
        """See `Setting.check`."""
        if not isinstance(value, str):
            raise self._refuse(name, value, "a string")
        if self.choices and value not in self.choices:
            listed = ", ".join(map(repr, self.choices))
            raise validation.InputError(
                f"{name} is {validation.shown(value)}; choose one of {listed}."
            )
        if "\0" in value or len(value) > _TEXT:
            wanted = f"a string of at most {_TEXT} characters, none of them NUL"
            raise self._refuse(name, value, wanted)
        try:
            value.encode()
        except UnicodeEncodeError as error:
            wanted = "a string of valid Unicode, without halves of surrogate pairs"
            raise self._refuse(name, value, wanted) from error
        if self.required and not value:
            raise self._refuse(name, value, "set")


@dataclasses.dataclass(frozen=True)
class Several(Setting):
    """A tuple or list of values of one kind.

    Attributes:
      element: setting of each value; its default is not used.
      least: smallest number of values.
      length: exact number of values, or `None`.
    """

    element: Setting
    least: int = 0
    length: int | None = None

    def check(self, name: str, value: Any) -> None:
        """See `Setting.check`."""
        if not isinstance(value, (tuple, list)):
            raise self._refuse(name, value, 'a tuple, such as "(1, 2)"')
        if self.length is not None and len(value) != self.length:
            raise self._refuse(name, value, f"{self.length} values")
        if len(value) < self.least:
            values = "value" if self.least == 1 else "values"
            raise self._refuse(name, value, f"at least {self.least} {values}", "hold")
        for number, each in enumerate(value):
            self.element.check(f"{name}[{number}]", each)


@dataclasses.dataclass(frozen=True)
class Named(Setting):
    """A mapping from names that the user chooses to values of one kind.

    Attributes:
      element: setting of each value, or a declaration, whose names a value may omit.
    """

    element: Setting | Declaration

    def check(self, name: str, value: Any) -> None:
        """See `Setting.check`."""
        if not _is_mapping(value):
            raise self._refuse(name, value, "a mapping from names to values")
        for key, each in value.items():
            if not isinstance(key, str) or not key:
                raise self._refuse(name, value, "a mapping whose names are strings")
            place = f"{name}.{key}"
            if isinstance(self.element, Setting):
                self.element.check(place, each)
            else:
                check(each, self.element, place, partial=True)


@dataclasses.dataclass(frozen=True)
class Checked(Setting):
    """A value with a check of its own.

    Attributes:
      by: takes name and value, and raises an InputError.
    """

    by: Callable[[str, Any], None]

    def check(self, name: str, value: Any) -> None:
        """See `Setting.check`."""
        self.by(name, value)


Declaration = Mapping[str, "Setting | Declaration"]


def default_config(declaration: Declaration) -> ml_collections.ConfigDict:
    """Returns the config of a stage, every setting at its default."""
    return ml_collections.ConfigDict(_defaults(declaration))


def with_defaults(declaration: Declaration, **defaults: Any) -> dict[str, Any]:
    """Returns a declaration with other defaults.

    A default may be a whole `Setting`, or a mapping for a nested declaration.
    """
    changed = dict(declaration)
    for name, default in defaults.items():
        before = changed[name]
        if isinstance(default, Setting):
            changed[name] = default
        elif isinstance(before, Setting):
            changed[name] = dataclasses.replace(before, default=default)
        else:
            changed[name] = with_defaults(before, **default)
    return changed


def check(
    config: Any, declaration: Declaration, where: str = "", *, partial: bool = False
) -> None:
    """Refuses a config that breaks its declaration. Reads nothing but the config.

    The config is a stage's, or the part of one with the dotted name `where`. `partial`
    says that settings may be missing.
    """
    if not _is_mapping(config):
        raise validation.InputError(
            f"{where or 'config'} is {validation.shown(config)}; it must be a mapping "
            f"of the settings {', '.join(sorted(declaration))}."
        )
    before = f"{where}." if where else ""
    for name in config:
        if name not in declaration:
            raise unknown(f"{before}{name}", declaration, before)
    for name, declared in declaration.items():
        if name not in config:
            if partial:
                continue
            raise validation.InputError(
                f"the config has no setting {before}{name}. Start from the stage's "
                "default_config()."
            )
        value = value_of(config, name, before)
        if isinstance(declared, Setting):
            declared.check(f"{before}{name}", value)
        else:
            check(value, declared, f"{before}{name}", partial=partial)


def require_values(config: ml_collections.ConfigDict, before: str = "") -> None:
    """Refuses a config with a placeholder that was not given its value.

    `before` is the dotted name of the config in a larger one, ending in ".", or "".
    """
    for name, _ in config.items(preserve_field_references=True):
        value = value_of(config, name, before)
        if isinstance(value, ml_collections.ConfigDict):
            require_values(value, f"{before}{name}.")


def value_of(config: Any, name: str, before: str = "") -> Any:
    """Returns a setting's value; `before` as in `require_values`.

    Raises:
      InputError: it is a required placeholder.
    """
    try:
        return config[name]
    except ml_collections.config_dict.RequiredValueError as error:
        raise validation.InputError(
            f"{before}{name} has no value, but a required placeholder. Set it in the "
            "config, or use placeholder(TYPE) there, which "
            f"--config.{before}{name}=VALUE sets."
        ) from error


def unknown(
    name: str, declaration: Declaration, before: str = ""
) -> validation.InputError:
    """Returns the error for an unknown setting, which suggests the nearest name.

    `before` is the dotted name of the mapping that lacks it, ending in ".", or "".
    """
    near = nearest(name, all_names(declaration, before))
    return validation.InputError(
        f"there is no setting {validation.shown(name)}. "
        + (f"Did you mean {near!r}? " if near else "")
        + f"There are {', '.join(sorted(before + known for known in declaration))}."
    )


def nearest(name: str, names: Collection[str]) -> str:
    """Returns the name most similar to a misspelt one, or ""."""
    last = name.rpartition(".")[2]
    # A nested setting may have been given without its prefix: "rank" is "lora.rank".
    whole = [known for known in names if known.rpartition(".")[2] == last]
    found = whole or difflib.get_close_matches(name, names, 1)
    if not found:
        ends = {known.rpartition(".")[2]: known for known in names}
        found = [ends[end] for end in difflib.get_close_matches(last, ends, 1)]
    return found[0] if found else ""


def all_names(
    declaration: Declaration | ml_collections.ConfigDict, before: str = ""
) -> list[str]:
    """Returns the dotted names of all settings, nested ones included."""
    found = []
    for name, declared in declaration.items():
        found.append(before + name)
        if _is_mapping(declared):
            found += all_names(declared, f"{before}{name}.")
    return found


def listed(declaration: Declaration, before: str = "") -> list[str]:
    """Returns "NAME=DEFAULT" of every setting, as a shell takes it, and its choices."""
    lines = []
    for name, declared in declaration.items():
        if not isinstance(declared, Setting):
            lines += listed(declared, f"{before}{name}.")
            continue
        default = str(declared.default)
        if shlex.quote(default) != default:  # which writes '"'"' for an apostrophe
            default = f'"{default}"'
        choices = ", ".join(filter(None, getattr(declared, "choices", ())))
        lines.append(
            f"{before}{name}={default}" + (f"  ({choices})" if choices else "")
        )
    return lines


def _defaults(declaration: Declaration) -> dict[str, Any]:
    return {
        name: declared.default if isinstance(declared, Setting) else _defaults(declared)
        for name, declared in declaration.items()
    }


def _is_mapping(value: Any) -> bool:
    return isinstance(value, (ml_collections.ConfigDict, Mapping))
