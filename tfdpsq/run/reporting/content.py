"""Gathers the report's content from the stages' directories."""

from __future__ import annotations

import dataclasses
import datetime
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_collections

from tfdpsq import evaluation, validation
from tfdpsq.data import read_synthetic
from tfdpsq.privacy import code_fingerprint, read_certificate
from tfdpsq.privacy.proof.certificate import Certificate
from tfdpsq.run.core import layout, sources, workdir
from tfdpsq.run.reporting import page
from tfdpsq.run.reporting.wording import epsilon_symbol, run_label, set_label

_DESCRIPTIONS = {
    "bm25": "Words in common; nothing is trained.",
    "untrained": "The weights that every other row starts from.",
    "public_only": "Trained on sentences cut from public documents.",
    "original": "Trained on the private pairs without protection.",
    "synthetic": "Trained on synthetic queries only.",
    "direct": "Trained on the private pairs by DP-SGD.",
    "encoder": "Embeddings by an encoder that saw no private pair.",
    "adapter": "A matrix on that encoder's query embeddings, trained on private pairs.",
    "reranked": "BM25's best documents, ordered by BM25 and by how likely the "
    "language model finds the query.",
}
# Points of a run at which ε is shown; each takes a second or two of accounting.
_EPSILON_POINTS = 6
_MEASURE_AGAIN = "Restore it, or move its directory away: it is made again."
# Pairs from which the examples are taken, at least.
_CONSIDERED = 1000


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
      name: its name in files.
      label: its name in the report.
      epsilon: target ε, ∞ for private data without protection, `None` where no
        private query was used.
      path: the directory of the retriever, of the embeddings or their adapter, or of
        the generator that reranks; `None` for BM25.
      against: of a reranked or adapted row, the names of its "public_only" and
        "unprotected".
    """

    name: str
    label: str
    epsilon: float | None
    path: pathlib.Path | None
    against: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def reranks(self) -> bool:
        """Returns whether the row is of a generator that orders documents."""
        return self.name.startswith("reranked_")


def gather(
    config: ml_collections.ConfigDict,
    directory: pathlib.Path,
    *,
    rows: Sequence[Row],
    sets: Mapping[float, pathlib.Path],
    seconds: Mapping[str, float],
    peak_memory_gib: float,
    command: str,
) -> dict[str, Any]:
    """Returns what `page.write_report` takes, from a finished workdir."""
    private = directory / "private"
    measured = private / "evaluation" / layout.METRICS_FILE
    metrics = workdir.read_json(
        measured, systems=dict, rules=dict, similarity=dict, queries=int
    )
    try:
        found = [_row(row, metrics) for row in rows]
    except (KeyError, TypeError, AttributeError) as error:
        raise validation.DataError(
            measured, f"it is damaged: no sound entry {error}", _MEASURE_AGAIN
        ) from error
    trained = _trained_on_private(directory)
    rules = metrics["rules"]
    return {
        "title": "Synthetic queries from private pairs",
        "created": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": command,
        "rows": found,
        "curves": _curves(private / layout.LOGS),
        "epsilon_curves": {
            run_label(path.name): _epsilon_curve(certificate)
            for path, certificate in trained.items()
        },
        "examples": examples(
            config.data,
            config.evaluate.similarity_split,
            config.examples,
            {f"Synthetic, ε = {epsilon_symbol(e)}": path for e, path in sets.items()},
        ),
        "certificates": [
            {"name": run_label(path.name), "certificate": certificate}
            for path, certificate in trained.items()
        ],
        "similarity": {
            # In the order of the table. Older evaluations may have other sets.
            set_label(name): metrics["similarity"][name]
            for name in sorted(metrics["similarity"], key=_place(rows))
        },
        "audits": _audits(private),
        "wins_and_losses": wins_and_losses(
            config.data,
            config.evaluate.split,
            config.examples,
            private / "evaluation",
            rows,
        ),
        "seconds": dict(seconds),
        "peak_memory_gib": round(peak_memory_gib, 3),
        "versions": workdir.versions(),
        "fingerprints": {
            "corpus": sources.corpus_fingerprint(config.data),
            "pairs": sources.source_fingerprint(config.data, private),
            "code": code_fingerprint(),
        },
        "notes": [
            f"{metrics['queries']} test queries; {rules['evaluator']}; gain "
            f"{rules['gain']}; ties {rules['ties']}; recall {rules['recall']}; "
            f"{rules['missing_queries']}.",
            *made_how(config),
        ],
    }


def made_how(config: ml_collections.ConfigDict) -> list[str]:
    """States how retrievers were trained, and which documents have queries."""
    own, direct = config.retriever, config.direct
    trained = f"Every retriever but the untrained one was trained for {_duration(own)}"
    trained += f" of {own.batch_size} pairs from the same weights (scale {own.scale:g})"
    ours, theirs = ((one.batch_size, one.scale) for one in (own, direct))
    if config.direct_epsilons and ours != theirs:
        trained += f"; by direct DP, of {theirs[0]} pairs at scale {theirs[1]:g}"
    if config.synthesize.documents == "train":
        written = (
            "of the training pairs alone, declared public; no ε covers which documents "
            "those are"
        )
    else:
        written = (
            "chosen from the whole corpus without looking at which of them have "
            "private queries"
        )
    return [f"{trained}.", f"Synthetic queries were written for documents {written}."]


def _place(rows: Sequence[Row]) -> Callable[[str], int]:
    """Returns a sort key: synthetic sets follow the rows trained on them."""
    names = [row.name for row in rows]

    def of(name: str) -> int:
        row = f"synthetic_{name}"
        return names.index(row) if row in names else len(names)

    return of


def _row(row: Row, metrics: Mapping[str, Any]) -> dict[str, Any]:
    values = metrics["systems"][row.name]
    certificate = read_certificate(row.path) if row.path else None
    epsilon: Any = row.epsilon
    if certificate is not None:
        # ε spent, from the steps that ran; the target is only its bound.
        epsilon = certificate["guarantee"]["epsilon"]
    difference = values.get("difference_to_baseline")
    description = _DESCRIPTIONS[
        row.name if row.name in _DESCRIPTIONS else row.name.split("_")[0]
    ]
    reranked = {}
    if row.reranks and row.name in metrics.get("settings", {}):
        weight = metrics["settings"][row.name]["weight"]
        description += f" Weight of its log-likelihood: {weight:g}."
        reranked = {"rerank_weight": weight}
    return {
        "name": row.name,
        "label": row.label,
        "description": description,
        "private_data": "none"
        if row.epsilon is None
        else ("unprotected" if math.isinf(row.epsilon) else "protected"),
        "epsilon": epsilon,
        **{
            key: values[key]
            for metric in page.METRICS
            for key in (metric, f"{metric}_ci")
        },
        "difference_to_public_only": difference
        and {
            "difference": difference["difference"],
            "ci": [difference["low"], difference["high"]],
            "p": difference["p_value"],
        },
        **_fused(metrics.get("fused", {}).get(row.name)),
        **reranked,
        **({"reference_rows": dict(row.against)} if row.against else {}),
    }


def _fused(values: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns what a row reaches together with BM25, if that was measured."""
    if values is None:
        return {}
    over = values.get("difference_to_baseline")
    return {
        "fused_ndcg@10": values["ndcg@10"],
        "fused_ndcg@10_ci": values["ndcg@10_ci"],
        "fused_weight": values["weight"],
        "fused_over_public_only": over
        and {"mean": over["difference"], "low": over["low"], "high": over["high"]},
    }


def _trained_on_private(directory: pathlib.Path) -> dict[pathlib.Path, dict]:
    """Returns the certificates of the runs that read private pairs, each once."""
    found = {}
    patterns = (
        "generator_*",
        "retriever_direct_*",
        "retriever_original",
        "adapter_*",
    )
    for path in (
        p for pattern in patterns for p in sorted(directory.glob(f"*/{pattern}"))
    ):
        certificate = read_certificate(path)
        if certificate is not None:
            found[path] = certificate
    return found


def _audits(private: pathlib.Path) -> dict[str, Any]:
    """Reads the audit of each generator that was trained on canaries."""
    found = {}
    for path in sorted(private.glob(f"audit_*/{layout.AUDIT_FILE}")):
        name = path.parent.name.removeprefix("audit_")
        epsilon = math.inf if name == "inf" else float(name.removeprefix("eps"))
        label = f"Generator, ε = {epsilon_symbol(epsilon)}"
        found[label] = workdir.read_json(path, canaries=list)
    return found


def wins_and_losses(
    data: str, split: str, most: int, directory: pathlib.Path, rows: Sequence[Row]
) -> dict[str, Any] | None:
    """Finds the queries on which two rows differ most; `None` without such rows.

    The rows are the first protected synthetic one and the public-only one. `directory`
    is the output of `evaluate`; at most `most` queries, and five, are shown each way.

    Returns:
      "label" and "against_label" of the rows; "metric"; "better", "equal", "worse":
      counts; "wins" and "losses": lists of {query, document, value, other}, the largest
      difference first.
    """
    protected = [
        row
        for row in rows
        if row.name.startswith("synthetic") and math.isfinite(row.epsilon or math.inf)
    ]
    public = [row for row in rows if row.name == "public_only"]
    if not most or not protected or not public:
        return None
    beir = sources.open_beir(data)
    qrels = beir.qrels(split)
    if evaluation.read_trec_qrels(directory / layout.QRELS_FILE) != qrels:
        raise validation.DataError(
            directory / layout.QRELS_FILE,
            "it holds other judgements than the data",
            _MEASURE_AGAIN,
        )
    judged = {document for of_query in qrels.values() for document in of_query}
    queries = {name: text for name, text in beir.read_queries() if name in qrels}
    documents = {d.id: d.content for d in beir.documents() if d.id in judged}
    metric = page.METRICS[0]
    values = [
        evaluation.evaluate_run(
            qrels,
            evaluation.read_trec_run(directory / "runs" / f"{row.name}.trec"),
            [metric],
        ).per_query
        for row in (protected[0], public[0])
    ]
    differences = sorted(
        (values[0][query][metric] - values[1][query][metric], query) for query in qrels
    )

    def shown(found: Sequence[tuple[float, str]]) -> list[dict[str, Any]]:
        return [
            {
                "query": queries[query],
                "document": documents.get(_best(qrels[query]), ""),
                "value": values[0][query][metric],
                "other": values[1][query][metric],
            }
            for _, query in found[: min(5, most)]
        ]

    wins = [each for each in differences if each[0] > 0]
    losses = [each for each in differences if each[0] < 0]
    return {
        "label": protected[0].label,
        "against_label": public[0].label,
        "metric": metric,
        "better": len(wins),
        "equal": len(differences) - len(wins) - len(losses),
        "worse": len(losses),
        "wins": shown(wins[::-1]),
        "losses": shown(losses),
    }


def _best(judgements: Mapping[str, int]) -> str:
    return max(judgements, key=lambda name: judgements[name])


def _curves(logs: pathlib.Path) -> dict[str, Any]:
    curves = {}
    for path in sorted(logs.glob(f"*/{layout.CURVE_FILE}")):
        name = path.parent.name
        generator = name.startswith(("generator", "audited"))
        if not generator and not name.startswith(("retriever", "adapter")):
            continue  # public pretraining is reported in `pretraining.json`
        curves[run_label(name)] = {
            **workdir.read_json(path),
            "chart": "Generator: training loss"
            if generator
            else "Retriever: training loss",
            "unit": "nats per token" if generator else "nats per query",
        }
    return curves


def _epsilon_curve(certificate: Mapping[str, Any]) -> dict[str, Any]:
    executed = certificate["accounting"]["steps_executed"]
    if not certificate["private"]:
        return {"step": [0, executed], "epsilon": [math.inf, math.inf]}
    steps = sorted(
        {round(executed * i / _EPSILON_POINTS) for i in range(_EPSILON_POINTS)}
    )
    plan = Certificate.from_json(certificate).plan
    spent = [plan.epsilon(step) for step in steps]
    return {
        "step": [*steps, executed],
        "epsilon": [*spent, certificate["guarantee"]["epsilon"]],
    }


def _duration(stage: ml_collections.ConfigDict) -> str:
    """Returns how long a stage trained, in words."""
    if stage.epochs:
        return f"{stage.epochs:g} epochs of its own set in batches"
    return f"{stage.steps} steps"


def examples(
    data: str, split: str, most: int, sets: Mapping[str, pathlib.Path]
) -> list[dict[str, Any]]:
    """Shows the same documents of private pairs in several synthetic sets.

    At most `most` documents are shown; `sets` maps labels to directories.

    Returns:
      {document_id, document, original_query, synthetic: {label: queries}} of the first
      documents that are in all sets.
    """
    # Sets may be large: keep only what can be shown.
    pairs = sources.open_beir(data).pairs(split)[: max(_CONSIDERED, 20 * most)]
    synthetic: dict[str, dict[str, list[str]]] = {p.document_id: {} for p in pairs}
    for label, path in sets.items() if most else ():
        for row in read_synthetic(path):
            if row.document_id in synthetic:
                of_document = synthetic[row.document_id]
                of_document.setdefault(label, []).append(row.query)
    found: list[dict[str, Any]] = []
    for pair in pairs[: len(pairs) if most else 0]:
        # A document may answer several queries.
        written = synthetic.pop(pair.document_id, None)
        if written is not None and len(written) == len(sets):
            found.append(
                {
                    "document_id": pair.document_id,
                    "document": pair.document,
                    "original_query": pair.query,
                    "synthetic": written,
                }
            )
        if len(found) == most:
            break
    return found


def results_table(results: Mapping[str, Any]) -> str:
    """Formats the rows of `results.json` as a Markdown table."""
    lines = [
        "| row | ε spent | NDCG@10 (95 %) | Recall@10 | over public-only (95 %) "
        "| with BM25 | over BM25 + public-only (95 %) |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        epsilon = row["epsilon"]
        if epsilon is None:
            shown = "none used"
        else:
            shown = "∞" if epsilon == "inf" else f"{epsilon:.2f}"
        low, high = row["ndcg@10_ci"]
        over = row["difference_to_public_only"]
        difference = (
            f"{over['difference']:+.4f} ({over['ci'][0]:+.4f} to {over['ci'][1]:+.4f})"
            if over
            else "–"
        )
        fused, gain = row.get("fused_ndcg@10"), row.get("fused_over_public_only")
        with_bm25 = "–" if fused is None else f"{fused:.4f}"
        gained = (
            f"{gain['mean']:+.4f} ({gain['low']:+.4f} to {gain['high']:+.4f})"
            if gain
            else "–"
        )
        lines.append(
            f"| {row['name']} | {shown} | {row['ndcg@10']:.4f} ({low:.4f}–{high:.4f})"
            f" | {row['recall@10']:.4f} | {difference} | {with_bm25} | {gained} |"
        )
    return "\n".join(lines)
