"""Gathers the report's content from the list and the outputs of a job."""

from __future__ import annotations

import datetime
import json
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from tfdpsq import validation
from tfdpsq.data import io, read_synthetic
from tfdpsq.privacy import code_fingerprint, read_certificate
from tfdpsq.run.frame import artefacts, pipeline, places, records
from tfdpsq.run.frame.artefacts import SET
from tfdpsq.run.frame.places import Place
from tfdpsq.run.frame.progress import LOG_FILE

METRICS = ("ndcg@10", "recall@10")
_REMEDY = "Move its directory away: it is made again."
# Pairs from which the examples are taken, at least.
_CONSIDERED = 1000
_UNITS = {"Generator": "nats per token", "Retriever": "nats per query"}


class Made:
    """A job's workdir, read.

    Attributes:
      settings: of the job, as JSON.
      steps: entries of the job's list by name; see `frame.pipeline`.
    """

    def __init__(self, workdir: pathlib.Path):
        """Reads the list."""
        self._workdir = workdir
        found = io.read_json(
            workdir / places.PRIVATE / pipeline.LIST_FILE, "Start the job again"
        )
        self.settings = found["settings"]
        self.steps = {step["name"]: step for step in found["steps"]}

    def place(self, name: str) -> Place:
        """Returns the place of a step's output."""
        return Place.of(self._workdir / self.steps[name]["place"])

    def of_stage(self, stage: str) -> Iterator[tuple[dict[str, Any], pathlib.Path]]:
        """Yields entry and output of each step of a stage."""
        for name, step in self.steps.items():
            if step["stage"] == stage:
                yield step, pathlib.Path(self.place(name).path)

    def inputs(self, name: str) -> dict[str, str]:
        """Returns the fingerprints of a step's inputs."""
        record = records.read_stage(self.place(name).path)
        return record["depends"]["inputs"] if record else {}


def gather(workdir: pathlib.Path) -> dict[str, Any]:
    """Returns what `page.write_report` takes, from a finished job's workdir."""
    made = Made(workdir)
    ((evaluation_step, measured),) = made.of_stage("evaluate")
    path = measured / "metrics.json"
    metrics, rows = io.read_json(path, _REMEDY), evaluation_step["shows"]["rows"]
    try:
        found = [_row(row, metrics, made) for row in rows]
        similarity, rules = metrics["similarity"], metrics["rules"]
    except (KeyError, TypeError) as error:
        problem = f"is damaged: no sound entry {error}"
        raise validation.DataError(path, problem, _REMEDY) from error
    sets = {
        step["label"]: (step["shows"]["set"], path / SET)
        for step, path in made.of_stage("synthesize")
        if "set" in step["shows"]
    }
    s, timed = made.settings, [made.place(name) for name in made.steps]
    peaks = (records.read_private(place).get("peak_gib", 0.0) for place in timed)
    return {
        "title": "Synthetic queries from private pairs",
        "created": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "rows": found,
        **_training(made),
        "examples": examples(
            _pairs(made),
            s["evaluate"]["similarity_split"],
            s["examples"],
            {label: path for label, (_, path) in sets.items()},
        ),
        "similarity": {label: similarity[key] for label, (key, _) in sets.items()},
        "audits": {
            step["label"]: io.read_json(path / "audit.json", _REMEDY)
            for step, path in made.of_stage("audit")
        },
        "seconds": {
            step["label"]: records.seconds(made.place(name))
            for name, step in made.steps.items()
        },
        "peak_memory_gib": max(peaks, default=0.0),
        "versions": records.versions(),
        "fingerprints": {
            "corpus": made.inputs("prepare").get("data"),
            "pairs": made.inputs(evaluation_step["name"]).get("data"),
            "code": code_fingerprint(),
        },
        "notes": [
            f"{metrics['queries']} test queries; {rules['evaluator']}; gain "
            f"{rules['gain']}; ties {rules['ties']}; recall {rules['recall']}; "
            f"{rules['missing_queries']}.",
            *_made_how(s),
        ],
    }


def _pairs(made: Made) -> str:
    """Returns the directory of the pairs: imported, or as the settings say."""
    imported = [str(path) for _, path in made.of_stage("import")]
    return (imported or [made.settings["data"]])[0]


def _made_how(s: Mapping[str, Any]) -> list[str]:
    """States how retrievers were trained, and which documents have queries."""
    own = s["retriever"]
    epochs = f"{own['epochs']:g} epochs of its own set"
    long = epochs if own["epochs"] else f"{own['steps']} steps"
    written = (
        "of the training pairs alone, declared public; no ε covers which those are"
        if s["synthesize"]["documents"] == "train"
        else "chosen from the whole corpus without looking at private queries"
    )
    return [
        f"Every retriever but the untrained one was trained for {long} from the same "
        "weights.",
        f"Synthetic queries were written for documents {written}.",
    ]


def _row(
    row: Mapping[str, Any], metrics: Mapping[str, Any], made: Made
) -> dict[str, Any]:
    values, certificate = metrics["systems"][row["name"]], None
    if row["step"]:
        certificate = read_certificate(made.place(row["step"]).path)
    # ε spent, from the steps that ran; the target is only its bound.
    epsilon = certificate["guarantee"]["epsilon"] if certificate else None
    protected = epsilon is not None and math.isfinite(float(epsilon))
    fused = metrics.get("fused", {}).get(row["name"])
    found = {
        "name": row["name"],
        "label": row["label"],
        "private_data": "protected" if protected else "unprotected",
        "epsilon": epsilon,
        "difference_to_public_only": _difference(values),
        **{k: values[k] for m in METRICS for k in (m, f"{m}_ci")},
    }
    if epsilon is None:
        found["private_data"] = "none"
    if fused is not None:
        found["fused_ndcg@10"] = fused["ndcg@10"]
        found["fused_ndcg@10_ci"] = fused["ndcg@10_ci"]
        found["fused_weight"] = fused["weight"]
        found["fused_over_public_only"] = _difference(fused)
    notes = metrics.get("settings", {}).get(row["name"], {})
    if "weight" in notes:
        found["rerank_weight"] = notes["weight"]
    return found


def _difference(values: Mapping[str, Any]) -> dict[str, Any] | None:
    found = values.get("difference_to_baseline")
    if not found:
        return None
    ends = [found["low"], found["high"]]
    return {"difference": found["difference"], "ci": ends, "p": found["p_value"]}


def _training(made: Made) -> dict[str, Any]:
    """Returns curves and certificates of the runs that read private pairs."""
    curves, epsilons, certificates = {}, {}, {}
    for name, step in made.steps.items():
        if "chart" not in step["shows"]:
            continue
        place, label, chart = made.place(name), step["label"], step["shows"]["chart"]
        points = _points(place.logs / LOG_FILE)
        lossy = [point for point in points if "loss" in point]
        if lossy:
            curves[label] = {
                "step": [point["step"] for point in lossy],
                "loss": [float(point["loss"]) for point in lossy],
                "chart": f"{chart}s: training loss",
                "unit": _UNITS[chart],
            }
        certificate = read_certificate(place.path)
        digests = [each["certificate"]["digest"] for each in certificates.values()]
        if certificate is None or certificate["digest"] in digests:
            continue
        certificates[label] = {"name": label, "certificate": certificate}
        spent = [point for point in points if "epsilon" in point]
        if spent:
            epsilons[label] = {
                "step": [point["step"] for point in spent],
                "epsilon": [float(point["epsilon"]) for point in spent],
            }
    return {
        "curves": curves,
        "epsilon_curves": epsilons,
        "certificates": list(certificates.values()),
    }


def _points(log: pathlib.Path) -> list[dict[str, Any]]:
    lines = log.read_text("utf-8").splitlines() if log.is_file() else []
    return [point for point in map(json.loads, lines) if "step" in point]


def examples(
    data: str, split: str, most: int, sets: Mapping[str, pathlib.Path]
) -> list[dict[str, Any]]:
    """Shows the same documents of private pairs in several synthetic sets.

    Args:
      data: the private pairs.
      split: of the pairs.
      most: documents to show.
      sets: directories by label.

    Returns:
      {document_id, document, original_query, synthetic: {label: queries}} of the first
      documents that are in all sets.
    """
    if not most:
        return []
    # Sets may be large: only what can be shown is kept.
    pairs = artefacts.open_beir(data).pairs(split)[: max(_CONSIDERED, 20 * most)]
    written: dict[str, dict[str, list[str]]] = {p.document_id: {} for p in pairs}
    for label, path in sets.items():
        for row in read_synthetic(path):
            if row.document_id in written:
                written[row.document_id].setdefault(label, []).append(row.query)
    found: list[dict[str, Any]] = []
    for pair in pairs:
        # A document may answer several queries.
        own = written.pop(pair.document_id, None)
        if own is not None and len(own) == len(sets) and len(found) < most:
            found.append(
                {
                    "document_id": pair.document_id,
                    "document": pair.document,
                    "original_query": pair.query,
                    "synthetic": own,
                }
            )
    return found
