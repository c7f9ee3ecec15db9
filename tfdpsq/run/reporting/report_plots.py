"""The plots of `report.html`, as SVG text that takes the page's colours.

matplotlib draws with stand-in colours, which become the page's CSS variables, so
that one picture serves the light and the dark page.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tfdpsq.run.reporting.report_html import SERIES, escape

_NAME_IN_TWO_COLUMNS = 30  # characters; longer ones would be cut off at the edge
MAX_POINTS = 200  # of a curve: more cannot be told apart at this size

_TEXT, _FAINT = "#010203", "#040506"
_SERIES = [f"#0a0b{i:02x}" for i in range(SERIES)]
_VARIABLES = {
    _TEXT: "currentColor",
    _FAINT: "var(--line)",
    **{color: f"var(--series-{i})" for i, color in enumerate(_SERIES)},
}
_DASHES = ("-", "--", ":", "-.")


def thin(
    steps: Sequence[float], values: Sequence[float], average: bool = True
) -> tuple[list[float], list[float], int]:
    """Cuts a curve into blocks of steps, at most MAX_POINTS, a point for each.

    Args:
      steps: of the points.
      values: of the points.
      average: take the mean of a block's finite values (NaN if there is none),
        as suits a loss; otherwise its last value, as suits what accumulates,
        whose mean would understate it.

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
) -> str:
    """Returns a figure of curves over training steps.

    Args:
      curves: (steps, values) by name; values that are not finite are left out
        and the caption says so.
      title: what is shown.
      y_label: the quantity and its unit.
      accumulates: the quantity adds up over steps from 0.
    """
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
            color=_SERIES[i % len(_SERIES)],
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
    return _figure_html(figure, title, notes)


def intervals(
    rows: Sequence[Mapping[str, Any]],
    metric: str,
    title: str,
    reference: float | None = None,
) -> str:
    """Returns a figure with one line per row: the value and its interval.

    Args:
      rows: dicts with "label", `metric`, `metric`_ci and "series", the number of
        the row's colour.
      metric: which metric to show.
      title: what is shown.
      reference: where to draw a vertical line, if anywhere.
    """
    figure, axes = _figure(0.7 + 0.42 * len(rows))
    for y, row in enumerate(rows):
        color = _SERIES[row["series"] % len(_SERIES)]
        low, high = row[f"{metric}_ci"]
        axes.plot([low, high], [y, y], color=color, linewidth=3, solid_capstyle="butt")
        axes.plot([row[metric]], [y], "o", color=color, markersize=8)
    if reference is not None:
        axes.axvline(reference, color=_TEXT, linewidth=1, linestyle=":")
    axes.set_yticks(range(len(rows)), [_plain(row["label"]) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.set_xlabel(_plain(metric))
    return _figure_html(figure, title, [])


def dots(
    groups: Mapping[str, Sequence[float]],
    title: str,
    x_label: str,
    most: float,
    reference: float,
    note: str,
) -> str:
    """Returns a figure with a line of dots for each group of values.

    Args:
      groups: values by name; equal ones are stacked.
      title: what is shown.
      x_label: the quantity and its unit.
      most: where the axis, which starts at 0, ends.
      reference: where to draw a vertical line.
      note: below the title.
    """
    figure, axes = _figure(0.9 + 0.55 * len(groups))
    for y, values in enumerate(groups.values()):
        height: dict[float, int] = {}
        for value in sorted(values):
            near = round(value / most * 60)  # dots closer than this would overlap
            height[near] = height.get(near, -1) + 1
            axes.plot(
                [value],
                [y - min(0.4, 0.07 * height[near])],
                "o",
                color=_SERIES[y % len(_SERIES)],
                markersize=6,
                alpha=0.75,
            )
    axes.axvline(reference, color=_TEXT, linewidth=1, linestyle=":")
    axes.set_yticks(range(len(groups)), [_plain(name) for name in groups])
    axes.set_ylim(len(groups) - 0.5, -0.6)
    axes.set_xlim(-0.02 * most, 1.04 * most)
    axes.set_xlabel(_plain(x_label))
    return _figure_html(figure, title, [note])


def against_epsilon(
    series: Mapping[str, Sequence[tuple[float, float, float, float]]],
    controls: Mapping[str, float],
    title: str,
    y_label: str,
) -> str:
    """Returns a figure of a metric against ε, with intervals.

    Args:
      series: points (ε, value, low, high) by source; ε may be infinite, and is then
        drawn right of all others.
      controls: values that no ε belongs to, by name, as horizontal lines.
      title: what is shown.
      y_label: the metric.
    """
    finite = {e for points in series.values() for e, *_ in points if math.isfinite(e)}
    right = 2 * max(finite, default=1.0)
    figure, axes = _figure(3.6)
    for i, (name, points) in enumerate(series.items()):
        points = sorted(points)
        x = [epsilon if math.isfinite(epsilon) else right for epsilon, *_ in points]
        color = _SERIES[i % len(_SERIES)]
        values = [value for _, value, _, _ in points]
        axes.plot(x, values, "-o", color=color, linewidth=1.8, label=_plain(name))
        for at, (_, _, low, high) in zip(x, points):
            axes.plot([at, at], [low, high], color=color, linewidth=1.2)
    for i, (name, value) in enumerate(controls.items()):
        axes.axhline(
            value,
            color=_TEXT,
            linewidth=1,
            linestyle=(":", "--", "-.")[i % 3],
            label=_plain(name),
        )
    axes.set_xscale("log")
    ticks = sorted(finite)
    infinite = any(math.isinf(e) for points in series.values() for e, *_ in points)
    labels = [f"{tick:.3g}" for tick in ticks] + (["∞"] if infinite else [])
    axes.set_xticks(ticks + ([right] if infinite else []), labels)
    axes.minorticks_off()
    axes.set_xlabel("ε spent")
    axes.set_ylabel(_plain(y_label))
    _legend(axes)
    return _figure_html(figure, title, [])


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


def _figure_html(figure: Any, title: str, notes: Sequence[str]) -> str:
    import matplotlib

    out = io.StringIO()
    # Text stays text: it can be searched, and takes the page's font.
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
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, variable)
    label = escape(title)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    caption = " ".join([f"<strong>{label}</strong>", *map(escape, notes)])
    return f"<figure><figcaption>{caption}</figcaption>{svg}</figure>"
