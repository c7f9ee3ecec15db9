"""The rows of the paper's tables, and the data that their numbers are made of."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections

from tfdpsq import validation
from tfdpsq.data.pydocs import PACKAGES, build_pydocs
from tfdpsq.run.core import layout, sources

CONTROLS = ("untrained", "public-only")


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
      name: "original", "synthetic-SIZE-EPSILON", "direct-EPSILON", or a control.
      kind: the part before the first "-".
      size: of the generator; "" where there is none.
      epsilon: target ε; ∞ without protection, `None` where nothing private is read.
    """

    name: str
    kind: str
    size: str
    epsilon: float | None


def row_of(name: str) -> Row:
    """Parses a row's name; refuses any other text with an InputError."""
    if name in CONTROLS:
        return Row(name, name, "", None)
    if name == "original":
        return Row(name, name, "", math.inf)
    kind, *rest = name.split("-")
    try:
        size = rest.pop(0) if kind == "synthetic" else ""
        (text,) = rest
        epsilon = float(text.removeprefix("eps"))
        if kind not in ("synthetic", "direct") or not epsilon > 0:
            raise ValueError
        if kind == "direct" and math.isinf(epsilon):  # that is "original"
            raise ValueError
        if kind == "synthetic" and not size:
            raise ValueError
    except (ValueError, IndexError) as error:
        raise validation.InputError(
            f"a table has the row {name!r}; rows are named original, "
            f"synthetic-SIZE-eps8, synthetic-SIZE-inf, direct-eps8, "
            f"{' or '.join(CONTROLS)}."
        ) from error
    # One spelling: outputs are named after it, and are paid for by their names.
    written = "-".join(filter(None, (kind, size, layout.epsilon_name(epsilon))))
    if name != written:
        raise validation.InputError(
            f"a table has the row {name!r}. Write it {written!r}."
        )
    return Row(name, kind, size, epsilon)


# What a table has, and the remedy where it has not.
_ENTRIES = {
    "title": "a text",
    "measure": "a text",
    "columns": "texts",
    "lower": "texts",
    "controls": "names of rows",
    "paper": "{name of a row: finite numbers}, with one row at least",
    "claims": "(row above, row below, column) each",
}
# Of these measures, rows are of generators.
OF_GENERATORS = ("examples", "similarity", "canaries")


def tables_of(
    config: ml_collections.ConfigDict, names: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Returns some of the config's tables.

    Raises:
      InputError: names the table and what is wrong in it.
    """
    found = {}
    for name in names:
        table = config.tables[name]
        if not isinstance(table, ml_collections.ConfigDict):
            raise validation.InputError(
                f"tables.{name} is {validation.shown(table)}; a table has the entries "
                f"{', '.join(_ENTRIES)}."
            )
        found[name] = table.to_dict()
        for entry, remedy in _ENTRIES.items():
            value = found[name].get(entry)
            if not _is_entry(entry, value):
                raise validation.InputError(
                    f"tables.{name}.{entry} is {validation.shown(value)}; give "
                    f"{remedy}, as in configs/paper/tables.py."
                )
        for row in rows_of({name: found[name]})[found[name]["measure"]]:
            if found[name]["measure"] in OF_GENERATORS and row.kind != "synthetic":
                raise validation.InputError(
                    f"tables.{name} has the row {row.name!r}, but its measure, "
                    f"{found[name]['measure']!r}, is of generators: rows are named "
                    "synthetic-SIZE-eps8 or synthetic-SIZE-inf."
                )
    return found


def _is_entry(entry: str, value: Any) -> bool:
    """Returns whether an entry of a table has the type that it must have."""
    if entry in ("title", "measure"):
        return isinstance(value, str)
    if entry == "paper":
        return (
            isinstance(value, Mapping)
            and bool(value)
            and all(isinstance(row, str) for row in value)
            and all(_is_sequence(given, numbers.Real) for given in value.values())
            and all(math.isfinite(n) for given in value.values() for n in given)
        )
    if entry == "claims":
        return _is_sequence(value, (list, tuple)) and all(
            len(claim) == 3 and _is_sequence(claim, str) for claim in value
        )
    return _is_sequence(value, str)


def _is_sequence(value: Any, of: Any) -> bool:
    """Returns whether a value is a tuple or a list of such elements; none is a bool."""
    return isinstance(value, (list, tuple)) and all(
        isinstance(each, of) and not isinstance(each, bool) for each in value
    )


def rows_of(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Row]]:
    """Returns {measure: rows that are measured so}."""
    found: dict[str, list[Row]] = {}
    for table in tables.values():
        rows = [row_of(name) for name in (*table["paper"], *table["controls"])]
        found.setdefault(table["measure"], []).extend(rows)
    return found


def data_of(config: ml_collections.ConfigDict) -> tuple[str, Mapping[str, str]]:
    """Returns the directory of the pairs, and the zero-shot sets that are made here."""
    held = tuple(config.held_out_packages)
    if not held:
        return config.job.data, {}
    if config.job.data != sources.PYDOCS:
        raise validation.InputError(
            f"held_out_packages is {held}, which applies to pydocs, but job.data is "
            f"{config.job.data}. Set held_out_packages to (), and zero_shot to "
            "existing sets."
        )
    home = build_pydocs(packages=[name for name in PACKAGES if name not in held])
    return str(home.path), {
        name: str(build_pydocs(packages=(name,)).path) for name in held
    }
