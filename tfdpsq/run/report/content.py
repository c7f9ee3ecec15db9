"""Gathers the report's content from the finished steps of a job."""

from __future__ import annotations

import datetime
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from tfdpsq.data import io, read_synthetic
from tfdpsq.privacy import code_fingerprint, read_certificate
from tfdpsq.run.common import kinds
from tfdpsq.run.common.kinds import SET
from tfdpsq.run.common.progress import LOG_FILE, read_points
from tfdpsq.run.frame import records
from tfdpsq.run.jobs import Planned

METRICS = ("ndcg@10", "recall@10")
_REMEDY = "Move its directory away: it is made again."
_CONSIDERED = 1000  # pairs from which examples are taken, at least


def gather(s: Any, planned: Sequence[Planned]) -> dict[str, Any]:
    """Returns what `page.write_report` takes.

    Args:
      s: settings of `pipeline`.
      planned: its finished steps. In `shows`, the evaluation has the "rows", a set its
        name in the measures, "set", and a training run the kind of its "chart".
    """
    steps = {each.step.name: each for each in planned}
    (evaluated,) = (e for e in planned if e.step.stage.name == "evaluate")
    own: Any = evaluated.settings
    out = evaluated.place.path
    metrics = io.read_json(pathlib.Path(out, "metrics.json"), _REMEDY)
    sets = {e.step.label: e for e in planned if "set" in e.step.shows}
    return {
        "created": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "rows": [_row(row, metrics, steps) for row in evaluated.step.shows["rows"]],
        **_training([each for each in planned if "chart" in each.step.shows]),
        "examples": examples(
            own.data,
            own.similarity_split,
            s.examples,
            {label: pathlib.Path(e.place.path) / SET for label, e in sets.items()},
        ),
        "similarity": {
            label: metrics["similarity"][each.step.shows["set"]]
            for label, each in sets.items()
        },
        "audits": {
            e.step.label: io.read_json(
                pathlib.Path(e.place.path, "audit.json"), _REMEDY
            )
            for e in planned
            if e.step.stage.name == "audit"
        },
        "seconds": {each.step.label: records.seconds(each.place) for each in planned},
        "peak_memory_gib": max(
            records.read_private(each.place).get("peak_gib", 0.0) for each in planned
        ),
        "versions": records.versions(),
        "fingerprints": {
            "pairs": (records.read_stage(out) or {})["depends"]["inputs"].get("data"),
            "code": code_fingerprint(),
        },
        "notes": [f"{name}: {rule}" for name, rule in metrics["rules"].items()],
        "queries": metrics["queries"],
    }


def _row(
    row: Mapping[str, str], metrics: Mapping[str, Any], steps: Mapping[str, Planned]
) -> dict[str, Any]:
    """Returns a row's measures, and the ε that was spent: the target is a bound."""
    values, certificate = metrics["systems"][row["name"]], None
    if row["step"]:
        certificate = read_certificate(steps[row["step"]].place.path)
    used = "none"
    if certificate is not None:
        used = "protected" if certificate["private"] else "unprotected"
    found = {
        "name": row["name"],
        "label": row["label"],
        "private_data": used,
        "epsilon": certificate and certificate["guarantee"]["epsilon"],
        "difference_to_public_only": values.get("difference_to_baseline"),
        **{k: values[k] for m in METRICS for k in (m, f"{m}_ci")},
    }
    fused = metrics.get("fused", {}).get(row["name"])
    if fused is not None:
        found["fused_ndcg@10"] = fused["ndcg@10"]
        found["fused_weight"] = fused["weight"]
        found["fused_over_public_only"] = fused.get("difference_to_baseline")
    return found


def _training(runs: Sequence[Planned]) -> dict[str, Any]:
    """Returns curves of training runs, and each certificate once, by label."""
    losses: dict[str, dict[str, Any]] = {}
    spent, certificates = {}, dict[str, Any]()
    for each in runs:
        label, kind = each.step.label, each.step.shows["chart"]
        points = [p for p in read_points(each.place.logs / LOG_FILE) if "step" in p]
        lossy = [(p["step"], float(p["loss"])) for p in points if "loss" in p]
        if lossy:
            losses.setdefault(kind, {})[label] = tuple(zip(*lossy))
        certificate = read_certificate(each.place.path)
        if certificate is None or certificate in certificates.values():
            continue
        certificates[label] = certificate
        paid = [(p["step"], p["epsilon"]) for p in points if "epsilon" in p]
        if paid and certificate["private"]:
            spent[label] = tuple(zip(*paid))
    return {"losses": losses, "spent": spent, "certificates": certificates}


def examples(
    data: str, split: str, most: int, sets: Mapping[str, Any], about: Any = ()
) -> list[dict[str, Any]]:
    """Returns what `sets`, directories by label, hold for documents of private pairs.

    Returns:
      {document, original_query, synthetic: {label: queries}} of the first `most`
      documents that are in all sets; before them one with each of the words `about`.
    """
    if not most:
        return []
    # Sets may be large: only what can be shown is kept.
    table = kinds.open_beir(data).pairs(split)
    first = (next((p for p in table if words in p.document), None) for words in about)
    pairs = [*filter(None, first), *table[: max(_CONSIDERED, 20 * most)]]
    written: dict[str, dict[str, list[str]]] = {p.document_id: {} for p in pairs}
    for label, path in sets.items():
        for row in read_synthetic(path):
            if row.document_id in written:
                written[row.document_id].setdefault(label, []).append(row.query)
    found: list[dict[str, Any]] = []
    for pair in pairs:
        own = written.pop(pair.document_id, None)  # it may answer several queries
        if own is not None and len(own) == len(sets) and len(found) < most:
            texts = {"document": pair.document, "original_query": pair.query}
            found.append({**texts, "synthetic": own})
    return found
