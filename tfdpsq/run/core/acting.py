"""Settings that act in some configs only, and their refusal in the others.

A setting that is changed and does nothing is a mistake that nobody sees: the user reads
the result as that of the value given. So a stage lists, next to its `SETTINGS`, which
of them depend on another one, and refuses a value other than the default where it would
have no effect.

Some stay out by design. With epsilon = inf a run takes the settings of its private twin
and ignores those of clipping, noise and accounting, so that epsilon alone tells the two
apart. Settings of a stage that a job does not run wait for a job that does. Settings of
speed, memory and places never change a result.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import ml_collections

from tfdpsq import validation
from tfdpsq.run.core import settings


@dataclasses.dataclass(frozen=True)
class Only:
    """Settings that act only where another one has certain values.

    Attributes:
      names: their dotted names, separated by spaces; "t5.*" is all that t5 holds.
      setting: dotted name of the other setting.
      values: the values of it with which they act; empty for all but "", 0 and ().
    """

    names: str
    setting: str
    values: Sequence[Any] = ()

    def holds(self, config: Any) -> bool:
        """Returns whether the settings act in a config."""
        value = value_at(config, self.setting)
        return value in self.values if self.values else bool(value)

    def covers(self, name: str) -> bool:
        """Returns whether a dotted name is one of the settings."""
        return any(fnmatch.fnmatchcase(name, each) for each in self.names.split())


def check(
    config: ml_collections.ConfigDict,
    declaration: Any,
    rules: Iterable[Only],
    where: str = "",
) -> None:
    """Refuses a config that breaks its declaration, then what has no effect in it."""
    settings.check(config, declaration, where)
    require_acting(config, declaration, rules, where)


def require_acting(
    config: ml_collections.ConfigDict,
    declaration: Any,
    rules: Iterable[Only],
    where: str = "",
) -> None:
    """Refuses a changed setting that has no effect in this config.

    The config has passed `settings.check`. `where` is its dotted name in a larger one,
    for the error.
    """
    before = f"{where}." if where else ""
    idle = [rule for rule in rules if not rule.holds(config)]
    for name, default in defaults(declaration) if idle else ():
        rule = next((rule for rule in idle if rule.covers(name)), None)
        value = value_at(config, name)
        if rule is None or _plain(value) == _plain(default):
            continue
        acts = " or ".join(map(repr, rule.values)) or "set"
        raise validation.InputError(
            f"{before}{name} is {validation.shown(value)}, which does nothing here: it "
            f"acts only where {before}{rule.setting} is {acts}, and that is "
            f"{validation.shown(value_at(config, rule.setting))}. Leave {name} at "
            f"{validation.shown(default)}, or change {before}{rule.setting}."
        )


def require_unfilled(
    config: ml_collections.ConfigDict,
    declaration: Any,
    filled: Iterable[str],
    where: str,
    by: str,
) -> None:
    """Refuses a value for a setting that a job fills in for its stage.

    `filled` are dotted names of settings; `where` is the name of the stage's config in
    the job's, and `by` what fills them in, for the error.
    """
    initial = dict(defaults(declaration))
    for name in filled:
        default, value = initial[name], value_at(config, name)
        if _plain(value) != _plain(default):
            raise validation.InputError(
                f"{where}.{name} is {validation.shown(value)}, which does nothing "
                f"here: {by} fills it in. Leave it at {validation.shown(default)}."
            )


def require_shape(
    config: ml_collections.ConfigDict, declaration: Any, shape: Any
) -> None:
    """Refuses a T5's shape that the weights in `init` do not have.

    `declaration` is that of `config.t5`, and `shape` the `T5Config` of the model.
    """
    for name, default in defaults(declaration):
        value, found = config.t5[name], getattr(shape, name)
        if value not in (default, found):
            raise validation.InputError(
                f"t5.{name} is {validation.shown(value)}, but the T5 in init "
                f"{config.init!r} has {found}, and its weights decide. Leave t5.{name} "
                f"at {default}, or init at ''."
            )


def defaults(declaration: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yields dotted name and default of every setting, nested ones included."""
    for name, declared in declaration.items():
        if isinstance(declared, settings.Setting):
            yield before + name, declared.default
        else:
            yield from defaults(declared, f"{before}{name}.")


def value_at(config: Any, name: str) -> Any:
    """Returns the value of a dotted name."""
    for part in name.split("."):
        config = config[part]
    return config


def _plain(value: Any) -> Any:
    """Returns a value in which tuples and lists, and all mappings, are one kind."""
    if isinstance(value, ml_collections.ConfigDict):
        value = value.to_dict()
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [*map(_plain, value)] if isinstance(value, (list, tuple)) else value
