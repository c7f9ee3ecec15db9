"""The card of a synthetic set: what it is, its guarantee in words, and its limits.

A card says only what the set's manifest holds, so it may go where the set goes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tfdpsq.data import SyntheticQuery, write_synthetic
from tfdpsq.data.io import atomic_write
from tfdpsq.run.common.kinds import SET
from tfdpsq.run.frame.places import Privacy
from tfdpsq.run.frame.runner import Context

READ_SET = "from tfdpsq.data import read_synthetic\nrows = read_synthetic('.')"
_LIMITS = (
    "A model or a program wrote the queries; nobody read them. A query may be wrong, "
    "may not be answered by its document, or may equal one that somebody asked.",
    "A pair says that a query was written for a document, not that no other document "
    "answers it.",
    "What the generator learned from public text, its biases included, is in the "
    "queries. Documents are copied into the set as they are.",
    "The set shows how people asked on the whole: that is what it is for, and no "
    "guarantee of this kind hides it.",
)


def write_set(
    c: Context,
    rows: Iterable[SyntheticQuery],
    shards: int = 1,
    **more: Any,
) -> dict[str, Any]:
    """Writes a stage's set with its card; `more` is of its provenance."""
    provenance, word = {**c.provenance, **more}, c.privacy.word
    out = c.out / SET
    manifest = write_synthetic(out, rows, provenance, c.certificate, shards, word)
    atomic_write(out / "README.md", text(manifest))
    return manifest


def text(manifest: Mapping[str, Any]) -> str:
    """Returns the card of a set in Markdown."""
    not_covered = (manifest.get("certificate") or {}).get("not_covered", ())
    parts = [
        "# Synthetic queries for public documents",
        f"{manifest['count']:,} queries, each with the document that it was written "
        f"for ({manifest.get('documents', 0):,} documents), to train and to test "
        "search without the queries that people asked. `sample` numbers the queries of "
        "a document.",
        f"```python\n{READ_SET}\n```",
        "## What is protected",
        *_protection(manifest),
        "## How it was made",
        _listed(_making(manifest)),
        "## Limits",
        _listed([*_LIMITS, *not_covered]),
    ]
    return "\n\n".join(parts) + "\n"


def _protection(manifest: Mapping[str, Any]) -> Iterator[str]:
    certificate, stages = manifest.get("certificate"), [*_stages(manifest)]
    reads = [read for stage in stages for read in stage.get("private_reads", ())]
    if manifest.get("guarantee") == Privacy.PRIVATE.word:
        yield "**Not for release**: no finite ε covers all of it."
    elif certificate is None:
        part = "No private query's text" if reads else "No private query"
        yield f"{part} is known to have had a part in this set."
    else:
        of, steps = certificate["guarantee"], certificate["accounting"]
        epsilon = math.ceil(1000 * of["epsilon"]) / 1000
        reads = [*certificate["private_reads"], *reads]
        yield (
            f"ε = {epsilon:g}, δ = {of['delta']}. Protected is {of['unit_in_words']}; "
            f"neighbouring data: {of['adjacency']}. No outcome is more than e^ε times "
            "as likely with it as without, except for a probability of δ: by the "
            f"{certificate['mechanism']['name']}, in {steps['steps_executed']} steps. "
            "`tfdpsq verify DIRECTORY` computes this again from `certificate.json`."
        )
    for read in reads:
        yield f"A private read that ε does not cover: {': '.join(read.values())}."


def _stages(manifest: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the provenance of a set and of those that it was filtered from."""
    provenance = manifest.get("provenance")
    while provenance:
        yield provenance
        provenance = provenance.get("of")


def _making(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yields the settings of the set's first stage, and what followed."""
    first, *filtered = reversed([*_stages(manifest)] or [{}])
    if "made_from" in first:
        yield f"made from {first['made_from']}"
    for name, value in first.get("config", {}).items():
        # Of a path its last name: where it was kept is nobody's business.
        yield f"`{name}`: {str(value).rstrip('/').rpartition('/')[2]}"
    yield f"empty queries left out: {manifest.get('empty_queries_left_out', 0):,}"
    if filtered:
        yield "queries were left out afterwards (`tfdpsq filter`)"


def _listed(lines: Any) -> str:
    return "\n".join(f"- {line}" for line in lines)
