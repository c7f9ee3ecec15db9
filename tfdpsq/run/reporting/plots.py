"""The report's plots, as SVG text that takes the page's colours.

matplotlib draws with stand-in colours, which become the page's CSS variables, so
that one picture serves the light and the dark page. Text stays text: it can be
selected and takes the page's font.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import markupsafe

MAX_POINTS = 200  # of a curve: more cannot be distinguished at this size
_NAME_IN_TWO_COLUMNS = 30  # characters; longer ones would be cut off at the edge

_TEXT, _FAINT = "#010203", "#040506"
_SERIES = [f"#0a0b{i:02x}" for i in range(8)]
_VARIABLES = {
    _TEXT: "currentColor",
    _FAINT: "var(--line)",
    **{color: f"var(--series-{i})" for i, color in enumerate(_SERIES)},
}
_DASHES = ("-", "--", ":", "-.")


class Plot(NamedTuple):
    """A picture, its title, and sentences for its caption."""

    title: str
    notes: list[str]
    svg: markupsafe.Markup


def thin(
    steps: Sequence[float], values: Sequence[float], average: bool = True
) -> tuple[list[float], list[float], int]:
    """Reduces a curve to at most MAX_POINTS blocks of steps.

    With `average`, a block's value is the mean of its finite values (NaN if there is
    none), as suits a loss; otherwise its last value, as suits what accumulates, whose
    mean would understate it.

    Returns:
      The last step of each block, its value, and the number of points in a block.
    """
    size = max(1, math.ceil(len(values) / MAX_POINTS))
    blocks = [range(i, min(i + size, len(values))) for i in range(0, len(values), size)]
    last_steps = [steps[block[-1]] for block in blocks]
    if not average:
        return last_steps, [values[block[-1]] for block in blocks], size
    means = []
    for block in blocks:
        finite = [values[i] for i in block if math.isfinite(values[i])]
        means.append(sum(finite) / len(finite) if finite else math.nan)
    return last_steps, means, size


def lines(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    title: str,
    y_label: str,
    accumulates: bool = False,
) -> Plot:
    """Plots (steps, values) curves by name; `accumulates` if they sum up from 0."""
    figure, axes = _figure(3.4)
    notes, averaged = [], 1
    for i, (name, (steps, values)) in enumerate(curves.items()):
        if not all(math.isfinite(value) for value in values):
            notes.append(f"{name} has values that are not finite; they are left out.")
        steps, values, size = thin(steps, values, average=not accumulates)
        averaged = max(averaged, size)
        axes.plot(
            steps,
            values,
            _DASHES[i // len(_SERIES) % len(_DASHES)],
            color=_color(i),
            linewidth=1.8,
            marker="o" if len(values) == 1 else None,
            label=_plain(name),
        )
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel(_plain(y_label))
    if accumulates:
        axes.set_ylim(bottom=0)
    if curves:
        _legend(axes)
    if averaged > 1 and not accumulates:
        notes.append(f"Each point is the mean of up to {averaged} recorded values.")
    return _plot(figure, title, notes)


def intervals(
    rows: Sequence[Mapping[str, Any]],
    metric: str,
    title: str,
    reference: float | None = None,
) -> Plot:
    """Plots each row's metric and its interval; a vertical line at `reference`.

    A row has "label", `metric`, `metric`_ci and "series", the number of its colour.
    """
    figure, axes = _figure(0.7 + 0.42 * len(rows))
    for y, row in enumerate(rows):
        color = _color(row["series"])
        axes.plot(
            row[f"{metric}_ci"], [y, y], color=color, linewidth=3, solid_capstyle="butt"
        )
        axes.plot([row[metric]], [y], "o", color=color, markersize=8)
    if reference is not None:
        axes.axvline(reference, color=_TEXT, linewidth=1, linestyle=":")
    _name_lines(axes, [row["label"] for row in rows], top=-0.5)
    axes.set_xlim(left=0)
    axes.set_xlabel(_plain(metric))
    return _plot(figure, title)


def dots(
    groups: Mapping[str, Sequence[float]],
    title: str,
    x_label: str,
    most: float,
    reference: float,
    note: str,
) -> Plot:
    """Plots a line of dots per group, from 0 to `most`; equal values are stacked."""
    figure, axes = _figure(0.9 + 0.55 * len(groups))
    for y, values in enumerate(groups.values()):
        height: dict[float, int] = {}
        for value in sorted(values):
            near = round(value / most * 60)  # dots closer than this would overlap
            height[near] = height.get(near, -1) + 1
            up = min(0.4, 0.07 * height[near])
            axes.plot([value], [y - up], "o", color=_color(y), markersize=6, alpha=0.75)
    axes.axvline(reference, color=_TEXT, linewidth=1, linestyle=":")
    _name_lines(axes, list(groups), top=-0.6)
    axes.set_xlim(-0.02 * most, 1.04 * most)
    axes.set_xlabel(_plain(x_label))
    return _plot(figure, title, [note])


def against_epsilon(
    series: Mapping[str, Sequence[tuple[float, float, float, float]]],
    controls: Mapping[str, float],
    title: str,
    y_label: str,
) -> Plot:
    """Plots a metric against ε, with intervals and horizontal lines for controls.

    The points of `series` are (ε, value, low, high); infinite ε is drawn right of all
    others.
    """
    finite = {e for points in series.values() for e, *_ in points if math.isfinite(e)}
    right = 2 * max(finite, default=1.0)
    infinite = any(math.isinf(e) for points in series.values() for e, *_ in points)
    figure, axes = _figure(3.6)
    for i, (name, points) in enumerate(series.items()):
        points = sorted(points)
        x = [epsilon if math.isfinite(epsilon) else right for epsilon, *_ in points]
        values = [value for _, value, _, _ in points]
        axes.plot(x, values, "-o", color=_color(i), linewidth=1.8, label=_plain(name))
        for at, (_, _, low, high) in zip(x, points):
            axes.plot([at, at], [low, high], color=_color(i), linewidth=1.2)
    for i, (name, value) in enumerate(controls.items()):
        style = (":", "--", "-.")[i % 3]
        axes.axhline(
            value, color=_TEXT, linewidth=1, linestyle=style, label=_plain(name)
        )
    axes.set_xscale("log")
    ticks = sorted(finite)
    labels = [f"{tick:.3g}" for tick in ticks] + ["∞"] * infinite
    axes.set_xticks(ticks + [right] * infinite, labels)
    axes.minorticks_off()
    axes.set_xlabel("ε spent")
    axes.set_ylabel(_plain(y_label))
    _legend(axes)
    return _plot(figure, title)


def _color(number: int) -> str:
    return _SERIES[number % len(_SERIES)]


def _figure(height: float) -> tuple[Any, Any]:
    # Not pyplot: it keeps global state, and picks a backend that may need a screen.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4, height), layout="constrained")
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


def _name_lines(axes: Any, names: Sequence[str], top: float) -> None:
    """Labels one horizontal line per name, the first on top."""
    axes.set_yticks(range(len(names)), [_plain(name) for name in names])
    axes.set_ylim(len(names) - 0.5, top)


def _legend(axes: Any) -> None:
    """Puts the legend above the plot, where it hides no curve."""
    longest = max((len(line.get_label()) for line in axes.lines), default=0)
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=2 if longest <= _NAME_IN_TWO_COLUMNS else 1,
        frameon=False,
        borderaxespad=0.2,
        labelcolor=_TEXT,
    )


def _plain(text: str) -> str:
    """Keeps matplotlib from reading $…$ in a name as a formula."""
    return text.replace("$", r"\$")


def _plot(figure: Any, title: str, notes: Sequence[str] = ()) -> Plot:
    import matplotlib

    out = io.StringIO()
    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": title,
        "font.family": "sans-serif",
    }
    with matplotlib.rc_context(settings):
        figure.savefig(
            out,
            format="svg",
            transparent=True,
            metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")),
        )
    svg = out.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.S)
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, variable)
    label = markupsafe.escape(title)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    return Plot(title, list(notes), markupsafe.Markup(svg))
