"""The report's plots, as SVG text that takes the page's colours.

matplotlib draws with stand-in colours, which become the page's CSS variables: one
picture serves the light and the dark page. Text stays text.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import markupsafe

MOST_POINTS = 200  # of a curve: more cannot be told apart at this size

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


def lines(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    title: str,
    y_label: str,
    labels: Sequence[str] = (),
) -> Plot:
    """Plots (steps, values) curves by name; of long ones evenly spread points.

    With `labels`, of steps 0, 1, …, every point is marked.
    """
    figure, axes = _figure(3.4)
    for number, (name, curve) in enumerate(curves.items()):
        every = 1 + len(curve[0]) // MOST_POINTS
        steps, values = (part[::-1][::every][::-1] for part in curve)  # with the last
        color = _SERIES[number % len(_SERIES)]
        marker = "o" if labels or len(steps) == 1 else None
        axes.plot(steps, values, color=color, marker=marker, label=_plain(name))
    axes.set_xlabel("" if labels else "step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    if labels:
        axes.set_xticks(range(len(labels)), [_plain(label) for label in labels])
    axes.set_ylabel(_plain(y_label))
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
    """Plots (label, value, (low, high), number of its colour) rows, the first on top.

    A dotted line stands at `reference`; `note` is for the caption.
    """
    figure, axes = _figure(0.7 + 0.36 * len(rows))
    for y, (_, value, interval, series) in enumerate(rows):
        color = _SERIES[series]
        axes.plot(interval, [y, y], color=color, linewidth=3, solid_capstyle="butt")
        axes.plot([value], [y], "o", color=color, markersize=7)
    if reference is not None:
        axes.axvline(reference, color=_TEXT, linewidth=1, linestyle=":")
    axes.set_yticks(range(len(rows)), [_plain(label) for label, *_ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.6)
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
