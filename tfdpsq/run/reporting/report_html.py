"""The building blocks of `report.html`: escaping, numbers in words, style.

Text reaches the page only through `escape` or a helper that calls it, since
queries and documents may hold markup.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

# Series of the plots, for light and dark; the plots name them `--series-<n>`.
_LIGHT = "#2563c9 #c2570c #15803d #8b3fc4 #be2d47 #0e7c8f #7a5c2e #b0418c".split()
_DARK = "#7aa7f7 #f0954f #5cc98a #c494f0 #f2808f #55c3d6 #cfae77 #e58cc6".split()
SERIES = len(_LIGHT)


def _variables(background, surface, line, text, muted, accent, warn, series) -> str:
    names = (
        f"--background:{background};--surface:{surface};--line:{line};"
        f"--text:{text};--muted:{muted};--accent:{accent};--warn:{warn};"
    )
    return names + "".join(f"--series-{i}:{c};" for i, c in enumerate(series))


STYLE = (
    ":root{color-scheme:light dark;"
    + _variables(
        "#f6f7f9", "#fff", "#dde1e7", "#1b2330", "#5b6675", "#2563c9", "#a8480a", _LIGHT
    )
    + "}@media(prefers-color-scheme:dark){:root{"
    + _variables(
        "#12161c",
        "#1b212a",
        "#343d4a",
        "#e6eaf0",
        "#9aa6b5",
        "#7aa7f7",
        "#f0a35f",
        _DARK,
    )
    + "}}"
    + """
*{box-sizing:border-box}
body{margin:0;background:var(--background);color:var(--text);
 font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1120px;margin:0 auto;padding:2rem 1.25rem 4rem}
h1{font-size:1.75rem;line-height:1.2;margin:0 0 .25rem}
h2{font-size:1.25rem;margin:2.5rem 0 .5rem}
h3{font-size:1rem;margin:1.25rem 0 .25rem}
p{margin:.5rem 0;max-width:75ch}
.muted,figcaption,.row-note{color:var(--muted);font-size:.875rem}
.lead{font-size:1.125rem}
.card>h3:first-child,.example h3:first-child{margin-top:0}
.card,.warning{background:var(--surface);border:1px solid var(--line);
 border-radius:10px;padding:1rem 1.25rem;margin:1rem 0}
.warning{border-left:5px solid var(--warn)}
.warning strong:first-child{color:var(--warn)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;background:var(--surface)}
th,td{padding:.5rem .75rem;text-align:left;vertical-align:top;
 border-bottom:1px solid var(--line)}
thead th{font-size:.8125rem;color:var(--muted);font-weight:600}
tbody th{font-weight:600;min-width:9.5rem}
td.number{font-variant-numeric:tabular-nums;white-space:nowrap}
td.number .row-note,tbody th .row-note{display:block;font-weight:400}
tr.protected th:first-child{box-shadow:inset 4px 0 var(--accent)}
ul{padding-left:1.25rem;max-width:75ch}
li{margin:.25rem 0}
dl{display:grid;grid-template-columns:minmax(9rem,14rem) 1fr;gap:.4rem 1rem;
 margin:.75rem 0}
dt{color:var(--muted)}
dd{margin:0;overflow-wrap:anywhere}
dd ul,li ul{margin:0}
dl.answers{grid-template-columns:minmax(9rem,11rem) 1fr;gap:.75rem 1rem}
dl.answers dt{font-weight:600;color:var(--text)}
dl.answers dd>:first-child{margin-top:0}
code,pre{font:.875em/1.5 ui-monospace,Menlo,Consolas,monospace;overflow-wrap:anywhere}
pre{white-space:pre-wrap;margin:.5rem 0}
figure{margin:1rem 0;min-width:0}
figure svg{display:block;width:100%;height:auto;max-width:640px;
 color:var(--text)}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));
 gap:0 1.5rem}
.example{display:grid;grid-template-columns:1fr 1fr;gap:.5rem 2rem}
.example>div{min-width:0;overflow-wrap:anywhere}
.example .document{white-space:pre-line;color:var(--muted);font-size:.9375rem;
 max-height:20rem;overflow:auto}
.query{border-left:3px solid var(--line);padding:.1rem .75rem;margin:.25rem 0}
.query.original{border-color:var(--warn)}
.query.synthetic{border-color:var(--accent)}
summary{cursor:pointer;font-weight:600}
a{color:var(--accent)}
@media(max-width:720px){
 main{padding:1.25rem .85rem 3rem}
 .example{grid-template-columns:1fr}
 dl{grid-template-columns:1fr;gap:0}
 dd{margin-bottom:.6rem}
 dl.answers{grid-template-columns:1fr;gap:0}
 table.stacked thead{position:absolute;clip-path:inset(50%)}
 table.stacked tr{display:block;padding:.6rem 0;border-bottom:1px solid var(--line)}
 table.stacked th,table.stacked td{display:block;border:0;padding:.15rem .75rem}
 table.stacked td{display:grid;grid-template-columns:8.5rem 1fr;white-space:normal}
 table.stacked td::before{content:attr(data-label);color:var(--muted);
  font-size:.875rem;font-weight:400;white-space:normal}
}
@media print{body{background:#fff}.card,table{break-inside:avoid}}
"""
)

# Nothing on the page may run or be fetched, whatever a query holds.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def escape(value: Any) -> str:
    """Returns text that HTML shows as it is, in content and in attributes."""
    return html.escape(str(value), quote=True)


def epsilon_text(value: float | str | None) -> str:
    """Returns ε as people read it: three digits, ∞, or a dash for none."""
    if value is None:
        return "–"
    value = float(value)
    return "∞" if math.isinf(value) else f"{value:.3g}"


def number_text(value: Any) -> str:
    """Returns a number with four digits, or any other value as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if math.isfinite(value) else epsilon_text(value)


def duration_text(seconds: float) -> str:
    """Returns a duration in the units a person would choose."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def table(
    header: Sequence[str], rows: Sequence[Sequence[Any]], stacked: bool = False
) -> str:
    """Returns a table whose first column names the rows.

    Args:
      header: column titles.
      rows: cells, as text, or as (text, small print below it).
      stacked: show a row's cells below each other on a narrow screen.
    """
    lines = []
    for row in rows:
        cells = [f'<th scope="row">{_cell(row[0])}</th>']
        cells += [
            f'<td class="number" data-label="{escape(title)}"><span>{_cell(cell)}'
            "</span></td>"
            for title, cell in zip(header[1:], row[1:])
        ]
        lines.append("<tr>" + "".join(cells) + "</tr>")
    titles = "".join(f'<th scope="col">{escape(title)}</th>' for title in header)
    kind = ' class="stacked"' if stacked else ""
    return (
        f'<div class="scroll"><table{kind}><thead><tr>{titles}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _cell(cell: Any) -> str:
    if isinstance(cell, tuple):
        text, note = cell
        return f'{escape(text)} <span class="row-note">{escape(note)}</span>'
    return escape(cell)


def definitions(items: Mapping[str, Any]) -> str:
    """Returns a list of terms; a value that is a list becomes one of points."""
    parts = []
    for term, value in items.items():
        if isinstance(value, (list, tuple)):
            shown = bullets(value) if value else "none"
        else:
            shown = escape(value)
        parts.append(f"<dt>{escape(term)}</dt><dd>{shown}</dd>")
    return "<dl>" + "".join(parts) + "</dl>"


def bullets(items: Sequence[Any]) -> str:
    """Returns a list of points."""
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def section(title: str, *content: str) -> str:
    """Returns a titled part of the page, or nothing when it would be empty."""
    inside = "".join(content)
    return f"<section><h2>{escape(title)}</h2>{inside}</section>" if inside else ""


def page(title: str, body: str) -> str:
    """Returns the whole document; it fetches nothing and runs nothing."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )
