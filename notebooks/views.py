"""Tables and figures of a job for the notebooks, made of `tfdpsq.results`' tables.

Each takes the job that `results.open_job` returned.
"""

import csv
import json

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd


def sets(job):
    """Returns the synthetic sets by stage: queries, words in a query, and ε."""
    found = {}
    for name in job.stages.index:
        if (job.path(name) / "set" / "manifest.json").is_file():
            queries, certificate = job.set(name)["query"], job.certificate(name)
            found[name] = {
                "queries": len(queries),
                "distinct": queries.nunique(),
                "words": queries.str.split().str.len().mean(),
                "epsilon": float(certificate["guarantee"]["epsilon"])
                if certificate
                else 0.0,
            }
    return pd.DataFrame.from_dict(found, orient="index").rename_axis("name")


def _queries(job):
    """Returns the public pseudo-queries' pairs, and those of every synthetic set."""
    return {name: job.set(name) for name in ("public_pairs", *sets(job).index)}


def of_document(job, document):
    """Returns a document's queries: its private ones, and each set's, by source."""
    parts = {"private": job.pairs, **_queries(job)}
    found = pd.concat(parts, names=["source", None]).droplevel(1)
    return found.loc[found.document_id == document, ["query"]]


def _trec(path, *columns):
    """Reads a TREC file as it stands: `NA` and `"a"` are ids."""
    options = {"quoting": csv.QUOTE_NONE, "keep_default_na": False, "dtype": str}
    return pd.read_csv(path, sep=r"\s+", names=columns, **options)


def _judgements(job):
    path = job.path("evaluation") / "qrels.trec"
    return _trec(path, "query", "_", "document", "relevance")


def asked(job):
    """Returns the ids of the test queries."""
    return _judgements(job)["query"].unique()


def compare(job, query, systems, top=5):
    """Returns the first documents of two systems for one test query, by rank.

    Columns: (system, "document"), (system, "text") and (system, "relevant").
    """
    path, parts = job.path("evaluation"), {}
    judged = _judgements(job)
    judged = judged[(judged["query"] == query) & (judged.relevance.astype(int) > 0)]
    for system in systems:
        columns = ("query", "_", "document", "rank", "score", "tag")
        found = _trec(path / "runs" / f"{system}.trec", *columns).astype({"rank": int})
        found = found[found["query"] == query].head(top)
        found = found.set_index("rank")[["document"]]
        parts[system] = found.assign(
            text=found.document.map(job.documents),
            relevant=found.document.isin(judged.document),
        )
    return pd.concat(parts, axis=1)


def _audits(job):
    for name in job.stages.index:
        path = job.path(name) / "audit.json"
        if path.is_file():
            yield name, json.loads(path.read_text("utf-8"))


def canaries(job):
    """Returns planted secrets by audit and form: ranks, p-values, leaks."""
    found = [
        {"name": name, **entry}
        for name, audit in _audits(job)
        for entry in audit["canaries"]
    ]
    return pd.DataFrame(found).set_index("name")


def membership(job):
    """Returns the AUC of every attack on membership, with its interval, by audit."""
    columns = ("auc", "auc_low", "auc_high")
    found = [
        {"name": name, "attack": attack, **dict(zip(columns, of["auc"]))}
        for name, audit in _audits(job)
        for attack, of in audit["membership"].items()
    ]
    return pd.DataFrame(found).set_index("name")


def private_reads(job):
    """Returns the reads of private data that no ε covers: "what" and "where"."""
    path = job.directory / "private" / "private_reads.jsonl"
    return pd.read_json(path, lines=True)[["what", "where"]]


def plot_rows(job, measure="ndcg@10"):
    """Draws a measure of every system with its interval; dotted: public-only."""
    rows = job.rows.iloc[::-1]
    size = (7, 0.4 * len(rows) + 1.2)
    figure, panel = plt.subplots(figsize=size, layout="constrained")
    # Few resamples may give an interval without its value.
    panel.hlines(range(len(rows)), rows[f"{measure}_low"], rows[f"{measure}_high"])
    panel.plot(rows[measure], range(len(rows)), "o")
    if "public_only" in rows.index:
        panel.axvline(rows[measure]["public_only"], color="black", ls=":")
    panel.set_yticks(range(len(rows)), list(rows.index))
    panel.set(xlabel=measure, title="Test queries, 95 %")
    return figure


_CURVES = {
    "loss": {"ylabel": "loss (nats)", "title": "Training loss (private)"},
    "epsilon": {"ylabel": "ε", "title": "ε spent", "ylim": (0, None)},
}


def plot_curves(job, *runs):
    """Draws the loss and the ε spent by step, of these runs."""
    drawn = job.curves[job.curves.run.isin(runs)]
    columns = [c for c in _CURVES if c in drawn and np.isfinite(drawn[c]).any()]
    size = {"figsize": (5 * len(columns), 3.4), "layout": "constrained"}
    figure, axes = plt.subplots(1, len(columns), squeeze=False, **size)
    for axis, column in zip(axes[0], columns):
        for name, own in drawn.dropna(subset=[column]).groupby("run", sort=False):
            axis.plot(own.step, own[column], ".-", label=name)
        axis.set(xlabel="step", **_CURVES[column])
        axis.legend(fontsize="small")
    return figure


def plot_lengths(job):
    """Draws the numbers of words in private, public and synthetic queries."""
    texts = {"private, training": job.pairs[job.pairs.split == "train"]}
    for name, pairs in _queries(job).items():
        texts[name.replace("public_pairs", "public pseudo-queries")] = pairs
    figure, panel = plt.subplots(figsize=(7, 3.4), layout="constrained")
    for name, pairs in texts.items():
        words = pairs["query"].str.split().str.len()
        panel.hist(words, range(31), density=True, histtype="step", label=name)
    panel.set(xlabel="words in a query", ylabel="share", title="Lengths")
    panel.legend(fontsize="small")
    return figure
