"""Settings of a stage: a frozen dataclass whose fields say what they accept.

    @dataclasses.dataclass(frozen=True)
    class Settings(settings.Settings):
        generator: str = path(Generator)
        temperature: float = setting(1.0, ge=0)
        top_k: int = setting(0, ge=0, when="temperature")
        batch_size: int = setting(64, ge=1, speed=True)

A default decides the type. The constructor checks every value, so a `Settings` that
exists is sound; it says nothing about files. A setting that is changed where it does
nothing (`when`) is refused: its user would read the result as that of the value. An
integer is also a float, but neither is a boolean, nor the other way round.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import operator
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ml_collections

from tfdpsq.validation import InputError, shown

SEED = 2**32 - 1  # NumPy's largest


@dataclasses.dataclass(frozen=True)
class Rule:
    """The values that a setting accepts; see `setting` and `path`."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    choices: tuple[Any, ...] = ()
    inf: bool = False
    zero: bool = False
    when: tuple[str, Sequence[Any]] | None = None
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
    return _field(lambda: default, of=of, **rule)


def _field(default: Callable[[], Any], when: Any = None, **rule: Any) -> Any:
    when = {when: ()} if isinstance(when, str) else when
    made = Rule(when=next(iter(when.items())) if when else None, **rule)
    return dataclasses.field(default_factory=default, metadata={"rule": made})


def path(kind: Any, default: Any = None, **rule: Any) -> Any:
    """Declares the path of an input, which the runner opens before the stage runs.

    A result depends on the fingerprint of what the path leads to, not on the path, so
    inputs and workdirs may move.

    Args:
      kind: the artefact that is expected there, see `artefacts`.
      default: a path; "" for an input that may be left out; () or {} for several;
        without one, the path must be given.
      **rule: `when` and `help`, as for `setting`.
    """
    missing = default is None
    return setting("" if missing else default, kind=kind, required=missing, **rule)


def nested(kind: type, *, filled: Sequence[str] = (), **changes: Any) -> Any:
    """Declares settings inside of settings.

    Args:
      kind: their dataclass.
      filled: names that something else sets: they are refused here, and not shown.
      **changes: defaults that differ, and `when` or `help`.
    """
    rule = {name: changes.pop(name) for name in ("when", "help") if name in changes}
    return _field(lambda: kind(**changes), filled=tuple(filled), **rule)


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
            value, default = getattr(self, field.name), default_of(field)
            if value != default and not self.acts(field.name):
                other, values = rule_of(field).when
                raise InputError(
                    f"{field.name} is {shown(value)}, which does nothing where {other} "
                    f"is {shown(getattr(self, other))}. Leave it at {shown(default)}, "
                    f"or make {other} {' or '.join(map(repr, values)) or 'set'}."
                )

    def acts(self, name: str) -> bool:
        """Returns whether a setting has an effect, given the others."""
        when = rule_of(self.__dataclass_fields__[name]).when
        if when is None:
            return True
        value = getattr(self, when[0])
        return value in when[1] if when[1] else bool(value)


def rule_of(field: dataclasses.Field) -> Any:
    """Returns the `Rule` of a field."""
    return field.metadata["rule"]


def default_of(field: Any) -> Any:
    """Returns the default of a field."""
    return field.default_factory()


# -- Values ----------------------------------------------------------------------


def _checked(name: str, value: Any, default: Any, rule: Rule) -> Any:
    """Returns a value in the default's type, or raises an InputError that names it."""
    each = rule.of or Rule()
    if isinstance(default, tuple):
        sound, wanted = isinstance(value, (tuple, list)), 'a tuple, as "(1, 2)"'
        _require(sound, name, value, wanted)
        return tuple(_element(f"{name}[{n}]", one, each) for n, one in enumerate(value))
    if isinstance(default, Mapping):
        sound = isinstance(value, (Mapping, ml_collections.ConfigDict))
        _require(sound, name, value, "a mapping from names to values")
        return {key: _element(f"{name}.{key}", one, each) for key, one in value.items()}
    if rule.choices:
        sound = value in rule.choices
        sound = sound and isinstance(value, bool) == isinstance(default, bool)
        wanted = "one of " + ", ".join(map(repr, rule.choices))
    elif isinstance(default, bool):
        sound, wanted = isinstance(value, bool), "True or False"
    elif isinstance(default, numbers.Real):
        return _number(name, value, isinstance(default, float), rule)
    else:
        sound, wanted = isinstance(value, str), "a text"
    _require(sound, name, value, wanted)
    return value


def _element(name: str, value: Any, rule: Rule) -> Any:
    """Checks an element; its type is that of the rule's first choice or bound."""
    for typical in (*rule.choices, rule.ge, rule.gt, rule.le, rule.lt):
        if typical is not None:
            return _checked(name, value, typical, rule)
    if isinstance(value, ml_collections.ConfigDict):
        return value.to_dict()
    return tuple(value) if isinstance(value, list) else value


def _require(sound: bool, name: str, value: Any, wanted: str) -> None:
    if not sound:
        raise InputError(f"{name} is {shown(value)}; it must be {wanted}.")


def _number(name: str, value: Any, real: bool, rule: Rule) -> Any:
    if real and rule.inf and value == "inf":
        value = math.inf
    bounds = (
        (rule.ge, "at least", operator.ge),
        (rule.gt, "above", operator.gt),
        (rule.le, "at most", operator.le),
        (rule.lt, "below", operator.lt),
    )
    sound = isinstance(value, numbers.Real if real else numbers.Integral)
    sound = sound and not isinstance(value, bool) and not math.isnan(value)
    if sound and not (rule.zero and value == 0 or rule.inf and value == math.inf):
        within = (b is None or holds(value, b) for b, _, holds in bounds)
        sound = all(within) and not math.isinf(value)
    range_ = " and ".join(f"{said} {b:g}" for b, said, _ in bounds if b is not None)
    also = (", or inf" if rule.inf else "") + (", or 0" if rule.zero else "")
    kind = "a number" if real else "an integer"
    _require(sound, name, value, f"{kind} {range_}".strip() + also)
    return float(value) if real else int(value)


# -- From and to a ConfigDict --------------------------------------------------------


def config_of(settings: Settings | type) -> ml_collections.ConfigDict:
    """Returns the ConfigDict of settings, or of their dataclass's defaults."""
    made = settings() if isinstance(settings, type) else settings
    return ml_collections.ConfigDict(dataclasses.asdict(made))


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
    for name in (name for name in config if name not in fields):
        raise unknown(where + name, all_names(kind, where))
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
        raise InputError(f"{where}{error}") from error


def unknown(name: str, names: Sequence[str]) -> InputError:
    """Returns the error for an unknown setting; it suggests the nearest of `names`."""
    known = {each.rpartition(".")[2]: each for each in names}  # without their prefix
    known.update(zip(names, names))
    near = difflib.get_close_matches(name, known, 1)
    hint = f"Did you mean {known[near[0]]}?" if near else "See --help."
    return InputError(f"there is no setting {name}. {hint}")


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


def help_lines(settings: Settings, where: str = "") -> list[str]:
    """Returns "NAME=DEFAULT" of every setting as a shell takes it, with its rule."""
    lines = []
    for field in dataclasses.fields(settings):
        rule, value = rule_of(field), getattr(settings, field.name)
        if isinstance(value, Settings):
            inside = help_lines(value, f"{where}{field.name}.")
            hidden = tuple(f"{where}{field.name}.{name}=" for name in rule.filled)
            lines += [line for line in inside if not line.startswith(hidden)]
            continue
        text = str(tuple(to_json(value)) if isinstance(value, tuple) else value)
        text = text if shlex.quote(text) == text else f'"{text}"'
        notes = [rule.help] if rule.help else []
        if rule.choices:
            notes.append("one of " + ", ".join(str(c) for c in rule.choices if c != ""))
        if rule.kind is not None:
            notes.append(rule.kind.wanted)
        if rule.when:
            other, values = rule.when
            notes.append(f"where {other} is {' or '.join(map(str, values)) or 'set'}")
        if rule.speed:
            notes.append("speed only")
        note = f"  ({'; '.join(notes)})" if notes else ""
        lines.append(f"{where}{field.name}={text}{note}")
    return lines
