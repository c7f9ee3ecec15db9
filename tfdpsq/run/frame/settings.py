"""Settings of a stage: a frozen dataclass whose fields say what they accept.

    @dataclasses.dataclass(frozen=True)
    class Settings(settings.Settings):
        generator: str = path(Generator)
        temperature: float = setting(1.0, ge=0)
        top_k: int = setting(0, ge=0, when="temperature")
        batch_size: int = setting(64, ge=1, speed=True)

A default decides the type. The constructor checks every value, so a `Settings` that
exists is sound; it says nothing about files. A setting that is changed where it does
nothing (`when`) is refused: its user would read the result as that of the value.

| given            | default 1 | default 1.0 | default True | default "" | default () |
|------------------|-----------|-------------|--------------|------------|------------|
| True             | refused   | refused     | ok           | refused    | refused    |
| 3                | ok        | 3.0         | refused      | refused    | refused    |
| 3.0              | refused   | ok          | refused      | refused    | refused    |
| inf, "inf"       | refused   | if `inf`    | refused      | "inf" is   | refused    |
| nan              | refused   | refused     | refused      | refused    | refused    |
| [3]              | refused   | refused     | refused      | refused    | (3,)       |
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import operator
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_collections

from tfdpsq.validation import InputError, shown

SEED = 2**32 - 1  # NumPy's largest


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a setting accepts; see `setting` and `path`."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    choices: tuple[Any, ...] = ()
    inf: bool = False
    zero: bool = False
    when: str | Mapping[str, Sequence[Any]] = ""
    speed: bool = False
    of: Rule | None = None
    kind: Any = None
    required: bool = False
    filled: tuple[str, ...] = ()
    help: str = ""


def setting(default: Any, *, of: Any = None, **rule: Any) -> Any:
    """Declares a setting.

    Args:
      default: its value, which decides the type.
      of: `Rule` of each element of a tuple, or each value of a mapping; their type is
        that of its first choice or bound.
      **rule: `ge`, `gt`, `le`, `lt`: bounds; `choices`; `inf`: ∞ is allowed, also as
        the text "inf"; `zero`: so is 0, below the bounds; `when`: the setting acts only
        where another one of the same dataclass is true (its name), or has one of some
        values ({name: values}); `speed`: the result does not depend on it, so that a
        finished output, or a paid run, stays valid when it changes; `help`: a line for
        `--help`.
    """
    metadata = {"rule": Rule(of=of, **rule)}
    if isinstance(default, Mapping):
        return dataclasses.field(
            default_factory=lambda: dict(default), metadata=metadata
        )
    return dataclasses.field(default=default, metadata=metadata)


def path(kind: Any, default: Any = None, **rule: Any) -> Any:
    """Declares the path of an input, which the runner opens before the stage runs.

    The path is not part of what a result depends on; the fingerprint of what it leads
    to is. So inputs and workdirs may move.

    Args:
      kind: the artefact that is expected there, see `artefacts`.
      default: a path; "" for an input that may be left out; () or {} for several;
        without one, the path must be given.
      **rule: `when` and `help`, as for `setting`.
    """
    required = default is None
    default = "" if required else default
    return setting(default, kind=kind, required=required, **rule)


def nested(kind: type, *, filled: Sequence[str] = (), **changes: Any) -> Any:
    """Declares settings inside of settings.

    Args:
      kind: their dataclass.
      filled: names that something else sets: they are refused here, and not shown.
      **changes: defaults that differ, and `when` or `help`.
    """
    rule = {name: changes.pop(name) for name in ("when", "help") if name in changes}
    return dataclasses.field(
        default_factory=lambda: kind(**changes),
        metadata={"rule": Rule(filled=tuple(filled), **rule)},
    )


@dataclasses.dataclass(frozen=True)
class Settings:
    """Base of all settings; the constructor raises InputError for a bad value."""

    def __post_init__(self) -> None:
        """Checks every value; tuples, floats and paths get their own type."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, Settings):
                value = _checked(field.name, value, default_of(field), rule_of(field))
                object.__setattr__(self, field.name, value)
        for field in dataclasses.fields(self):
            self._require_acting(field)

    def _require_acting(self, field: dataclasses.Field) -> None:
        rule, value = rule_of(field), getattr(self, field.name)
        default = default_of(field)
        if not rule.when or value == default or self.acts(field.name):
            return
        other, values = _when(rule)
        remedy = " or ".join(map(repr, values)) or "set"
        raise InputError(
            f"{field.name} is {shown(value)}, which does nothing where {other} is "
            f"{shown(getattr(self, other))}. Leave it at {shown(default)}, or make "
            f"{other} {remedy}."
        )

    def acts(self, name: str) -> bool:
        """Returns whether a setting has an effect, given the others."""
        rule = next(rule_of(f) for f in dataclasses.fields(self) if f.name == name)
        if not rule.when:
            return True
        other, values = _when(rule)
        value = getattr(self, other)
        return value in values if values else bool(value)


def rule_of(field: dataclasses.Field) -> Rule:
    """Returns the rule of a field."""
    return field.metadata.get("rule", Rule())


def default_of(field: dataclasses.Field) -> Any:
    """Returns the default of a field."""
    if field.default is not dataclasses.MISSING:
        return field.default
    assert field.default_factory is not dataclasses.MISSING
    return field.default_factory()


def _when(rule: Rule) -> tuple[str, Sequence[Any]]:
    if isinstance(rule.when, str):
        return rule.when, ()
    ((other, values),) = rule.when.items()
    return other, values


# -- Values ----------------------------------------------------------------------


def _checked(name: str, value: Any, default: Any, rule: Rule) -> Any:
    """Returns a value in its own type, or raises an InputError that names it."""
    if rule.choices and not isinstance(default, (tuple, dict)):
        if value not in rule.choices or isinstance(value, bool) != isinstance(
            default, bool
        ):
            choices = ", ".join(map(repr, rule.choices))
            raise InputError(f"{name} is {shown(value)}; choose one of {choices}.")
        return value
    if isinstance(default, bool):
        return _typed(name, value, isinstance(value, bool), "True or False")
    if isinstance(default, numbers.Real):
        return _number(name, value, isinstance(default, float), rule)
    if isinstance(default, str):
        return _typed(name, value, isinstance(value, str), "a text")
    each = rule.of or Rule()
    if isinstance(default, tuple):
        _typed(name, value, isinstance(value, (tuple, list)), 'a tuple, as "(1, 2)"')
        return tuple(_element(f"{name}[{n}]", one, each) for n, one in enumerate(value))
    is_mapping = isinstance(value, (Mapping, ml_collections.ConfigDict))
    _typed(name, value, is_mapping, "a mapping from names to values")
    return {key: _element(f"{name}.{key}", one, each) for key, one in value.items()}


def _element(name: str, value: Any, rule: Rule) -> Any:
    """Checks an element; its type is that of the rule's bounds or choices."""
    bounds = [b for b in (rule.ge, rule.gt, rule.le, rule.lt) if b is not None]
    if rule.choices:
        return _checked(name, value, rule.choices[0], rule)
    if bounds:
        return _checked(name, value, bounds[0], rule)
    if isinstance(value, (list, tuple)):
        return tuple(value)
    return value


def _typed(name: str, value: Any, right: bool, wanted: str) -> Any:
    if not right:
        raise InputError(f"{name} is {shown(value)}; it must be {wanted}.")
    return value


def _number(name: str, value: Any, real: bool, rule: Rule) -> Any:
    kind = numbers.Real if real else numbers.Integral
    if real and rule.inf and value == "inf":
        value = math.inf
    sound = isinstance(value, kind) and not isinstance(value, bool)
    sound = sound and not math.isnan(value)
    if sound and (rule.zero and value == 0 or rule.inf and value == math.inf):
        return float(value) if real else int(value)
    sound = sound and not math.isinf(value)
    bounds = (
        (rule.ge, "at least", lambda bound: value >= bound),
        (rule.gt, "above", lambda bound: value > bound),
        (rule.le, "at most", lambda bound: value <= bound),
        (rule.lt, "below", lambda bound: value < bound),
    )
    if sound and all(holds(b) for b, _, holds in bounds if b is not None):
        return float(value) if real else int(value)
    wanted = "a number" if real else "an integer"
    said = [f"{words} {bound:g}" for bound, words, _ in bounds if bound is not None]
    also = (", or inf" if rule.inf else "") + (", or 0" if rule.zero else "")
    wanted = " ".join([wanted, " and ".join(said)]).strip() + also
    raise InputError(f"{name} is {shown(value)}; it must be {wanted}.")


# -- From and to a ConfigDict --------------------------------------------------------


def config_of(settings: Settings | type) -> ml_collections.ConfigDict:
    """Returns the ConfigDict that flags and config files change.

    Args:
      settings: their dataclass, for its defaults, or an instance.
    """
    made = settings() if isinstance(settings, type) else settings

    def plain(value: Any) -> Any:
        if isinstance(value, Settings):
            found = dataclasses.fields(value)
            return {field.name: plain(getattr(value, field.name)) for field in found}
        return value

    return ml_collections.ConfigDict(plain(made))


def from_config(kind: type, config: Any, where: str = "") -> Any:
    """Returns the settings in a ConfigDict or a mapping, checked.

    Args:
      kind: their dataclass.
      config: values by name; what is missing keeps its default.
      where: dotted name of the config in a larger one, ending in ".", or "".

    Raises:
      InputError: an unknown name, with the nearest known one; or a bad value.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name in config:
        if name not in fields:
            near = nearest(where + name, all_names(kind, where))
            raise InputError(
                f"there is no setting {where}{name}. "
                + (f"Did you mean {near}?" if near else "See --help.")
            )
    values = {}
    for name in config:
        value, default = config[name], default_of(fields[name])
        if isinstance(default, Settings) and not isinstance(value, Settings):
            inside = {**config_of(default), **value}
            value = from_config(type(default), inside, f"{where}{name}.")
        for filled in rule_of(fields[name]).filled:
            found = operator.attrgetter(filled)(value)
            if found != operator.attrgetter(filled)(default):
                raise InputError(
                    f"{where}{name}.{filled} is {shown(found)}, which this command "
                    "sets itself. Leave it out."
                )
        values[name] = value
    try:
        return kind(**values)
    except InputError as error:
        first = str(error)
        raise InputError(where + first if where else first) from error


def to_json(settings: Any) -> Any:
    """Returns settings as JSON values; ∞ is "inf"."""
    if isinstance(settings, Settings):
        found = dataclasses.fields(settings)
        return {field.name: to_json(getattr(settings, field.name)) for field in found}
    if isinstance(settings, Mapping):
        return {key: to_json(value) for key, value in sorted(settings.items())}
    if isinstance(settings, (tuple, list)):
        return [to_json(value) for value in settings]
    if isinstance(settings, float) and math.isinf(settings):
        return "inf" if settings > 0 else "-inf"
    return settings


def identity(settings: Settings) -> dict[str, Any]:
    """Returns what a result depends on, as JSON: neither speed nor paths.

    Inputs are compared by what they hold.
    """
    found: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        rule, value = rule_of(field), getattr(settings, field.name)
        if rule.speed or not settings.acts(field.name):
            continue
        if isinstance(value, Settings):
            found[field.name] = identity(value)
        elif rule.kind is None:
            found[field.name] = to_json(value)
        elif isinstance(value, Mapping):
            found[field.name] = sorted(value)  # names, but not where they lead
    return found


def paths_of(settings: Settings, where: str = "") -> Iterator[tuple[str, Any, Rule]]:
    """Yields dotted name, value and rule of every path that acts."""
    for field in dataclasses.fields(settings):
        value, rule = getattr(settings, field.name), rule_of(field)
        if not settings.acts(field.name):
            continue
        if isinstance(value, Settings):
            yield from paths_of(value, f"{where}{field.name}.")
        elif rule.kind is not None:
            yield where + field.name, value, rule


# -- Help --------------------------------------------------------------------------


def all_names(kind: type, where: str = "") -> list[str]:
    """Returns the dotted names of all settings."""
    found = []
    for field in dataclasses.fields(kind):
        found.append(where + field.name)
        default = default_of(field)
        if isinstance(default, Settings):
            found += all_names(type(default), f"{where}{field.name}.")
    return found


def nearest(name: str, names: Sequence[str]) -> str:
    """Returns the name most similar to a mistyped one, or ""."""
    ends = {known.rpartition(".")[2]: known for known in names}
    last = name.rpartition(".")[2]
    if last in ends:  # a nested setting without its prefix
        return ends[last]
    found = difflib.get_close_matches(name, names, 1)
    found += [ends[end] for end in difflib.get_close_matches(last, ends, 1)]
    return found[0] if found else ""


def help_lines(settings: Settings, where: str = "") -> list[str]:
    """Returns "NAME=DEFAULT" of every setting as a shell takes it, with its rule."""
    lines = []
    for field in dataclasses.fields(settings):
        rule, value = rule_of(field), getattr(settings, field.name)
        if isinstance(value, Settings):
            inside = help_lines(value, f"{where}{field.name}.")
            hidden = tuple(f"{where}{field.name}.{name}=" for name in rule.filled)
            lines += [line for line in inside if not line.startswith(hidden or "\0")]
            continue
        text = str(value)
        if shlex.quote(text) != text:  # which writes '"'"' for an apostrophe
            text = f'"{text}"'
        notes = [rule.help] if rule.help else []
        if rule.choices:
            notes.append("one of " + ", ".join(str(c) for c in rule.choices if c != ""))
        if rule.kind is not None:
            notes.append(rule.kind.wanted)
        if rule.when:
            other, values = _when(rule)
            is_in = f" is {' or '.join(map(str, values))}" if values else " is set"
            notes.append(f"where {other}{is_in}")
        if rule.speed:
            notes.append("speed only")
        note = f"  ({'; '.join(notes)})" if notes else ""
        lines.append(f"{where}{field.name}={text}{note}")
    return lines
