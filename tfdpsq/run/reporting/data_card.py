"""The card of a synthetic set: what it is, its guarantee in words, and its limits.

A card says only what the set's manifest holds, certificate included, and so may go
where the set goes.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import Any

from tfdpsq.data.io import atomic_write
from tfdpsq.data.sets import SCHEMA
from tfdpsq.run.core import releases
from tfdpsq.run.reporting import certificates_in_words

FILE_NAME = "README.md"
READ_SET = "from tfdpsq.data import read_synthetic\nrows = read_synthetic('.')"
_COLUMNS = {
    "query_id": "`genQ0`, `genQ1`, …: unique in the set",
    "query": "the text that the model wrote",
    "document_id": "id of the document it was written for",
    "document": "that document's title and text",
    "sample": "number of the query among those of its document, from 0",
}
_HOW_MADE = {
    "generator": "Generator",
    "corpus": "Corpus",
    "documents": "Documents",
    "samples_per_document": "Queries for each document",
    "max_length": "Tokens of a query, at most (0: as in training)",
    "temperature": "Temperature",
    "top_k": "Top-k",
    "top_p": "Nucleus (top-p)",
    "dtype": "Arithmetic",
    "seed": "Seed, public",
}
_PATHS = ("generator", "corpus")
_READS = "Private reads that ε does not cover"  # as `certificates_in_words` has them
_LIMITS = (
    "A model wrote the queries; nobody read them. A query may be wrong, may not be "
    "answered by its document, or may repeat the document's words.",
    "A pair says that a query was written for a document, not that no other document "
    "answers it.",
    "What the generator learned from public text, its biases included, is in the "
    "queries. The guarantee is about private queries, not about documents, which are "
    "copied into the set as they are.",
    "The set shows how those people asked on the whole: that is what it is for, and "
    "no guarantee of this kind hides it.",
)


def write(
    directory: str | os.PathLike,
    manifest: Mapping[str, Any],
    how_to_read: str = READ_SET,
) -> None:
    """Writes the card of a set into its directory, or into that of an export.

    `how_to_read` is code that reads the set from `directory`.
    """
    atomic_write(pathlib.Path(directory) / FILE_NAME, text(manifest, how_to_read))


def text(manifest: Mapping[str, Any], how_to_read: str = READ_SET) -> str:
    """Returns the card in Markdown; see `write`."""
    count, documents = manifest["count"], manifest.get("documents", 0)
    columns = [
        f"| `{name}` | {kind} | {_COLUMNS[name]} |" for name, kind in SCHEMA.items()
    ]
    parts = [
        "# Synthetic queries for public documents",
        f"{count:,} queries, each with the document that it was written for "
        f"({documents:,} documents). A language model or a program wrote every query; "
        "it may equal one that somebody asked. They are made to train and to test "
        "search without the queries that people asked.",
        "\n".join(["| column | type | content |", "|---|---|---|", *columns]),
        f"```python\n{how_to_read}\n```",
        "## What is protected",
        *_protection(manifest),
        "## How it was made",
        *_making(manifest),
        "## How it was measured",
        "ε is computed from the training steps that were executed. `tfdpsq verify "
        "DIRECTORY` computes it again from `certificate.json`, and `manifest.json` has "
        "a SHA-256 of every file of the data."
        if manifest.get("certificate")
        else "`manifest.json` has a SHA-256 of every file of the data.",
        "Figures that need private queries, such as how well search does that was "
        "trained on this set (`tfdpsq evaluate`), are not stated here: no ε covers "
        "them. `tfdpsq overlap` measures how much of a text the set repeats.",
        "## Limits",
        _listed(
            [*_LIMITS, *((manifest.get("certificate") or {}).get("not_covered", ()))]
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _protection(manifest: Mapping[str, Any]) -> list[str]:
    certificate = manifest.get("certificate")
    private = manifest.get("guarantee") == releases.PRIVATE
    made_by_reading = _private_reads(manifest)
    if certificate is None:
        if private:
            said = "**Not for release**: private queries had a part in this set, and no"
            said += " certificate covers it."
        elif made_by_reading:
            said = "No private query's text is known to have had a part in this set, "
            said += "and no ε covers it. Weights without a certificate count as public."
        else:
            said = "No private query is known to have had a part in this set. Weights "
            said += "without a certificate count as public."
        reads = "; ".join(made_by_reading)
        return [said, *([_listed([f"{_READS}: {reads}"])] if reads else [])]
    card = certificates_in_words.in_words([{"name": "", "certificate": certificate}])
    (own,) = card["cards"]
    shown = ("What is protected", "Neighbouring data", "ε and δ", "Mechanism", "Units")
    facts = [f"{name}: {own['particulars'][name]}" for name in shown]
    found = own["particulars"].get(_READS, [])
    found = [*(found if isinstance(found, list) else [found]), *made_by_reading]
    facts.append(f"{_READS}: {'; '.join(found) or 'none'}")
    mark = ["**Not for release**: the stage that made it says so."] if private else []
    return [*mark, own["promise"], _listed(facts)]


def _private_reads(manifest: Mapping[str, Any]) -> list[str]:
    """Returns what the set's own stages read of private data, all of them."""
    provenance, found = manifest.get("provenance", {}), []
    while isinstance(provenance, Mapping):
        for read in provenance.get("private_reads", ()):
            found.append(": ".join(map(str, read.values())))
        provenance = provenance.get("of")
    return list(dict.fromkeys(found))


def _making(manifest: Mapping[str, Any]) -> list[str]:
    """Describes the settings that the set's provenance holds, of every stage."""
    provenance, found = manifest.get("provenance", {}), []
    if "made_from" in provenance:
        found.append(f"Made from {provenance['made_from']}.")
    while isinstance(provenance.get("of"), Mapping):
        found.append("Queries were left out afterwards (`tfdpsq filter`).")
        provenance = provenance["of"]
    config = provenance.get("config", {})
    lines = [
        # Of a path its last name: where it was kept is nobody's business.
        f"{label}: {str(config[name]).rstrip('/').rpartition('/')[2]!r}"
        if name in _PATHS
        else f"{label}: {config[name]!r}"
        for name, label in _HOW_MADE.items()
        if name in config
    ]
    if lines:
        found.append(
            "A T5 that had been trained to write a query for a document read each "
            "document and wrote (`tfdpsq synthesize`). It read the text of no private "
            "query then, so the number of queries for each document does not weaken "
            "the guarantee."
            + (
                " For which documents it wrote was a private read, which is stated "
                "above."
                if _private_reads(manifest)
                else ""
            )
        )
        found.append(_listed(lines))
    left_out = manifest.get("empty_queries_left_out", 0)
    if left_out:
        found.append(f"{left_out:,} empty queries were left out.")
    return found or ["Its manifest does not say how it was made."]


def _listed(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
