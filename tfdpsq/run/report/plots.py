"""The report's plots, as SVG text that takes the page's colours.

matplotlib draws with stand-in colours, which become the page's CSS variables: one
picture serves the light and the dark page. Text stays text.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import markupsafe

MAX_POINTS = 200  # of a curve: more cannot be told apart at this size

_TEXT, _FAINT = "#010203", "#040506"
_SERIES = [f"#0a0b{i:02x}" for i in range(8)]
_VARIABLES = {
    _TEXT: "currentColor",
    _FAINT: "var(--line)",
    **{color: f"var(--series-{i})" for i, color in enumerate(_SERIES)},
}


class Plot(NamedTuple):
    """A picture, its title, and a sentence for its caption."""

    title: str
    note: str
    svg: markupsafe.Markup


def thin(
    steps: Sequence[float], values: Sequence[float], average: bool = True
) -> tuple[list[float], list[float]]:
    """Reduces a curve to at most MAX_POINTS blocks.

    Returns:
      The last step of each block, and with `average` the mean of its finite values, as
      suits a loss; else its last value, as suits a sum, whose mean would understate it.
    """
    size = max(1, math.ceil(len(values) / MAX_POINTS))
    blocks = [slice(i, i + size) for i in range(0, len(values), size)]
    ends = [steps[block][-1] for block in blocks]
    if not average:
        return ends, [values[block][-1] for block in blocks]
    finite = [[v for v in values[block] if math.isfinite(v)] for block in blocks]
    return ends, [sum(each) / len(each) if each else math.nan for each in finite]


def lines(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    title: str,
    y_label: str,
    accumulates: bool = False,
) -> Plot:
    """Plots (steps, values) curves by name; `accumulates` if they sum up from 0."""
    figure, axes = _figure(3.4)
    for number, (name, curve) in enumerate(curves.items()):
        ends, shown = thin(*curve, average=not accumulates)
        marker = "o" if len(shown) == 1 else None
        color = _SERIES[number % len(_SERIES)]
        axes.plot(ends, shown, color=color, marker=marker, label=_plain(name))
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel(_plain(y_label))
    if accumulates:
        axes.set_ylim(bottom=0)
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), frameon=False, labelcolor=_TEXT
    )
    return _plot(figure, title)


def intervals(
    rows: Sequence[tuple[str, float, Sequence[float], int]],
    title: str,
    x_label: str,
    reference: float | None = None,
    note: str = "",
) -> Plot:
    """Plots a value with its interval for each row, and a dotted line.

    Args:
      rows: (label, value, (low, high), number of its colour), the first on top.
      title: of the plot.
      x_label: of its axis.
      reference: where the line stands.
      note: for the caption.
    """
    figure, axes = _figure(0.7 + 0.36 * len(rows))
    for y, (_, value, interval, series) in enumerate(rows):
        color = _SERIES[series]
        axes.plot(interval, [y, y], color=color, linewidth=3, solid_capstyle="butt")
        axes.plot([value], [y], "o", color=color, markersize=7)
    if reference is not None:
        axes.axvline(reference, color=_TEXT, linewidth=1, linestyle=":")
    _name_lines(axes, [label for label, *_ in rows])
    axes.set_xlabel(_plain(x_label))
    return _plot(figure, title, note)


def dots(
    groups: Mapping[str, Sequence[float]],
    title: str,
    x_label: str,
    most: float,
    reference: float,
    note: str,
) -> Plot:
    """Plots a line of dots per group, from 0 to `most`; equal values are stacked."""
    figure, axes = _figure(0.9 + 0.5 * len(groups))
    for y, values in enumerate(groups.values()):
        height: dict[float, int] = {}
        for value in sorted(values):
            near = round(value / most * 60)  # dots closer than this would overlap
            height[near] = height.get(near, -1) + 1
            up = min(0.4, 0.07 * height[near])
            axes.plot([value], [y - up], "o", color=_SERIES[y % 8], alpha=0.75)
    axes.axvline(reference, color=_TEXT, linewidth=1, linestyle=":")
    _name_lines(axes, list(groups))
    axes.set_xlim(-0.02 * most, 1.04 * most)
    axes.set_xlabel(_plain(x_label))
    return _plot(figure, title, note)


def _figure(height: float) -> tuple[Any, Any]:
    # Not pyplot: it keeps global state, and picks a backend that may need a screen.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, height), layout="constrained")
    axes = figure.add_subplot()
    axes.tick_params(colors=_TEXT, labelsize=10)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_FAINT)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_color(_TEXT)
    axes.grid(color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _name_lines(axes: Any, names: Sequence[str]) -> None:
    """Labels one horizontal line per name, the first on top."""
    axes.set_yticks(range(len(names)), [_plain(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.6)


def _plain(text: str) -> str:
    """Keeps matplotlib from reading $…$ in a name as a formula."""
    return text.replace("$", r"\$")


def _plot(figure: Any, title: str, note: str = "") -> Plot:
    import matplotlib

    out = io.StringIO()
    style = {"svg.fonttype": "none", "svg.hashsalt": title, "font.family": "sans-serif"}
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context(style):
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    svg = out.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.S)
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, variable)
    label = markupsafe.escape(title)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    return Plot(title, note, markupsafe.Markup(svg))
