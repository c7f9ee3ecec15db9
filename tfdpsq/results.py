"""Reads any workdir as pandas DataFrames and draws it, on any Python from 3.9 to 3.13.

    from tfdpsq import results

    job = results.open_job("/tmp/tfdpsq-quickstart")
    job.rows          # measures of every system, with intervals
    job.certificates  # what is guaranteed, for every artefact
    job.plot_rows()

Needs numpy, pandas and matplotlib alone, so a notebook explores in its own kernel what
stages made in another environment. It takes no lock and verifies nothing (`verify`
does). Metrics, curves, runs, pairs and audits are private: no certificate covers them.
"""

from __future__ import annotations

import csv
import functools
import gzip
import json
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

try:
    import matplotlib.pyplot as plt
    import numpy as np
    import pandas as pd
except ImportError as _missing:
    raise ImportError(
        f"tfdpsq.results needs {_missing.name}: python -m pip install pandas matplotlib"
    ) from _missing

from tfdpsq.validation import DataError, InputError

# Columns of `Job.certificates`, and where a certificate has them.
_CERTIFIED = {
    "epsilon": "guarantee.epsilon",
    "epsilon_pld": "accounting.epsilon_pld",
    "epsilon_rdp": "accounting.epsilon_rdp",
    "delta": "guarantee.delta",
    "unit": "guarantee.unit",
    "noise_multiplier": "mechanism.noise_multiplier",
    "clip_norm": "mechanism.clip_norm",
    "steps": "accounting.steps_executed",
    "n": "sampler.n",
    "run": "digest",
}
# Columns of `Job.curves` that are drawn.
_CURVES: dict[str, Any] = {
    "loss": {"ylabel": "loss (nats)", "title": "Training loss (private)"},
    "epsilon": {"ylabel": "ε", "title": "ε spent", "ylim": (0, None)},
}


def open_job(path: str | os.PathLike) -> Job:
    """Opens a workdir, or the directory that stages' outputs are in."""
    job = Job(pathlib.Path(path))
    if job.stages.empty:
        raise InputError(
            f"{path} holds no finished stage. Give the --workdir of a job; "
            "`tfdpsq status` shows what is running."
        )
    return job


class Job:
    """A workdir. Tables are read when they are first used, and kept.

    Attributes:
      directory: the workdir.
    """

    def __init__(self, directory: pathlib.Path):
        """Takes the workdir; see `open_job`."""
        self.directory = directory

    @functools.cached_property
    def stages(self) -> pd.DataFrame:
        """Finished stages by name: their place, guarantee, and seconds where known."""
        took = _json(self.directory / "private" / "seconds.json")
        paths = [
            path
            for folder in (".", "release", "private", "points")
            for path in sorted((self.directory / folder).glob("[!.]*/stage.json"))
        ]
        names = pd.Series([path.parent.name for path in paths], dtype=object)
        places = [path.parent.relative_to(self.directory).as_posix() for path in paths]
        columns = {
            "place": places,
            "guarantee": [_json(path).get("guarantee") for path in paths],
            "seconds": [took.get(name, np.nan) for name in names],
        }
        # A name that is in `release/` and in `private/` is told by its place.
        index = names.mask(
            names.duplicated(keep=False), pd.Series(places, dtype=object)
        )
        return pd.DataFrame(columns, index=pd.Index(index, name="name"))

    def path(self, stage: str) -> pathlib.Path:
        """Returns a stage's output directory."""
        known = self.stages.index
        if stage not in known:
            raise InputError(
                f"there is no stage {stage!r} in {self.directory}. There are: "
                f"{', '.join(known)}."
            )
        return self.directory / str(self.stages.place[stage])

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The job's config; empty for stages that were run one by one."""
        return _json(self.directory / "config.json")

    @functools.cached_property
    def certificates(self) -> pd.DataFrame:
        """Guarantees by stage, of those whose output carries a certificate.

        "run" is equal for artefacts of one training run: only different runs add up. A
        run that continued another states the ε of both.
        """
        found = {name: self.certificate(name) for name in self.stages.index}
        found = {name: one for name, one in found.items() if one}
        table = pd.json_normalize(list(found.values())).reindex(
            columns=list(_CERTIFIED.values())
        )
        table = table.set_axis(list(_CERTIFIED), axis=1)
        table["run"] = table["run"].str[:8]
        table["place"] = [self.stages.place[name] for name in found]
        floats = [name for name in table if name.startswith("epsilon")]
        return table.astype(dict.fromkeys(floats, float)).set_axis(list(found))

    def certificate(self, stage: str) -> dict[str, Any] | None:
        """Returns the certificate of a stage's output; `None` where it has none."""
        path = self.path(stage)
        found = (_json(each / "certificate.json") for each in (path, path / "set"))
        return next(filter(None, found), None)

    @functools.cached_property
    def private_reads(self) -> pd.DataFrame:
        """Reads of private data that no ε covers: "what" and "where"."""
        path = self.directory / "private" / "private_reads.jsonl"
        return pd.DataFrame(_lines(path), columns=["what", "where"])

    @functools.cached_property
    def rows(self) -> pd.DataFrame:
        """Measures of every system on the test queries, by system.

        Columns: each measure with "_low" and "_high" (95 %); "over_baseline" with
        "_low", "_high" and "_p_value", the difference in NDCG@10 to public-only, paired
        by query; "epsilon" of the certificate, 0 where no private query was used, NaN
        for a system that this job did not make.
        """
        found = []
        metrics = _json(self.path("evaluation") / "metrics.json")
        for name, of in metrics["systems"].items():
            row: dict[str, Any] = {"name": name, "epsilon": self._epsilon(name)}
            for measure, value in of.items():
                if measure.endswith("_ci"):
                    base = measure[: -len("_ci")]
                    row[f"{base}_low"], row[f"{base}_high"] = map(float, value)
                elif isinstance(value, (int, float)):
                    row[measure] = value
            over = of.get("difference_to_baseline") or {}
            row["over_baseline"] = over.get("difference", np.nan)
            for end in ("low", "high", "p_value"):
                row[f"over_baseline_{end}"] = over.get(end, np.nan)
            found.append(row)
        return _frame(found)

    @functools.cached_property
    def runs(self) -> pd.DataFrame:
        """Retrieved documents: "system", "query", "document", "rank", "score"."""
        columns = ["query", "_", "document", "rank", "score", "tag"]
        paths = sorted((self.path("evaluation") / "runs").glob("*.trec"))
        parts = [
            _table(path, r"\s+", "rank", "score", names=columns).assign(
                system=path.stem
            )
            for path in paths
        ]
        columns = ["system", "query", "document", "rank", "score"]
        return pd.concat(parts, ignore_index=True)[columns]

    @functools.cached_property
    def qrels(self) -> pd.DataFrame:
        """Judgements of the test queries: "query", "document", "relevance"."""
        path, columns = self.path("evaluation"), ["query", "_", "document", "relevance"]
        found = _table(path / "qrels.trec", r"\s+", "relevance", names=columns)
        return found.drop(columns="_")

    def compare(
        self, query: str, systems: tuple[str, str], top: int = 5
    ) -> pd.DataFrame:
        """Shows the first documents of two systems for one test query, by rank.

        Columns: (system, "document"), (system, "text") and (system, "relevant").
        """
        judged = self.qrels[(self.qrels["query"] == query) & (self.qrels.relevance > 0)]
        runs = self.runs[(self.runs["query"] == query) & (self.runs["rank"] <= top)]
        parts = {}
        for system in systems:
            found = runs[runs.system == system].set_index("rank").document
            if found.empty:
                raise InputError(f"there is no system {system!r} with query {query!r}.")
            parts[system] = pd.DataFrame(
                {
                    "document": found,
                    "text": found.map(self.documents),
                    "relevant": found.isin(judged.document),
                }
            )
        return pd.concat(parts, axis=1)

    @functools.cached_property
    def documents(self) -> pd.Series:
        """Texts of the public documents, by id."""
        return _documents(self._data)

    @functools.cached_property
    def pairs(self) -> pd.DataFrame:
        """Private pairs: "query_id", "query", "document_id", "document", "split"."""
        return _pairs(self._data)

    @functools.cached_property
    def sets(self) -> pd.DataFrame:
        """Synthetic sets by stage: number of queries, ε, and words in a query."""
        found = []
        for name in self.stages.index:
            if (self.path(name) / "set" / "manifest.json").is_file():
                queries = self.set(name)["query"]
                row = {"name": name, "queries": len(queries)}
                row["distinct"] = queries.nunique()
                row["words"] = queries.str.split().str.len().mean()
                found.append({**row, "epsilon": self._epsilon_of(name)})
        return _frame(found)

    def set(self, stage: str) -> pd.DataFrame:
        """Returns a synthetic set's pairs; columns as `pairs`.

        "public_pairs" are the pseudo-queries that `prepare` cuts from documents.
        """
        if stage == "public_pairs":
            return _pairs(self.path("prepare") / "public_pairs" / "beir")
        return _pairs(self.path(stage) / "set" / "beir")

    def of_document(self, document: str) -> pd.DataFrame:
        """Returns a document's queries: its private ones, and each set's, by source."""
        sources = {"private": self.pairs, "public_pairs": self.set("public_pairs")}
        sources.update({name: self.set(name) for name in self.sets.index})
        parts = [pairs.assign(source=name) for name, pairs in sources.items()]
        found = pd.concat(parts).set_index("source")
        return found.loc[found.document_id == document, ["query"]]

    @functools.cached_property
    def curves(self) -> pd.DataFrame:
        """Training logs: "run", "step", "loss", "epsilon", "seconds" and rates."""
        found = [
            # Jobs in strict mode measure no loss.
            {"run": path.parent.name, "loss": np.nan, **point}
            for path in sorted((self.directory / "private/logs").glob("*/log.jsonl"))
            for point in _lines(path)
            if "step" in point
        ]
        frame = pd.DataFrame(found, columns=None if found else ["run", "step", "loss"])
        return frame.astype({name: float for name in _CURVES if name in frame})

    @functools.cached_property
    def canaries(self) -> pd.DataFrame:
        """Planted secrets by audit, form and repetitions: ranks, p-values, leaks."""
        return _frame(
            {"name": name, **entry}
            for name, audit in self._audits()
            for entry in audit["canaries"]
        )

    @functools.cached_property
    def membership(self) -> pd.DataFrame:
        """AUC of every attack on membership, with its 95 % interval, by audit."""
        columns = ("auc", "auc_low", "auc_high")
        return _frame(
            {"name": name, "attack": attack, **dict(zip(columns, of["auc"]))}
            for name, audit in self._audits()
            for attack, of in audit["membership"].items()
        )

    def plot_rows(self, measure: str = "ndcg@10") -> plt.Figure:
        """Draws a measure of every system with its interval; dotted: public-only."""
        rows = self.rows.iloc[::-1]
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

    def plot_curves(self, *runs: str) -> plt.Figure:
        """Draws the loss and the ε spent by step, of these runs or of all."""
        curves = self.curves
        names = list(runs) or list(curves.run.unique())
        unknown = [name for name in names if name not in set(curves.run)]
        if unknown or not names:
            raise InputError(
                f"there is no log of {', '.join(unknown) or 'any run'} in "
                f"{self.directory}; strict mode keeps none."
            )
        drawn = curves[curves.run.isin(names)]
        columns = [c for c in _CURVES if c in drawn and np.isfinite(drawn[c]).any()]
        size = {"figsize": (5 * len(columns), 3.4), "layout": "constrained"}
        figure, axes = plt.subplots(1, len(columns), squeeze=False, **size)
        for axis, column in zip(axes[0], columns):
            for name, own in drawn.dropna(subset=[column]).groupby("run", sort=False):
                axis.plot(own.step, own[column], ".-", label=name)
            axis.set(xlabel="step", **_CURVES[column])
            axis.legend(fontsize="small")
        return figure

    def plot_lengths(self) -> plt.Figure:
        """Draws the numbers of words in private, public and synthetic queries."""
        texts = {
            "private, training": self.pairs["query"][self.pairs.split == "train"],
            "public pseudo-queries": self.set("public_pairs")["query"],
            **{name: self.set(name)["query"] for name in self.sets.index},
        }
        figure, panel = plt.subplots(figsize=(7, 3.4), layout="constrained")
        for name, of in texts.items():
            words = of.str.split().str.len()
            panel.hist(words, range(31), density=True, histtype="step", label=name)
        panel.set(xlabel="words in a query", ylabel="share", title="Lengths")
        panel.legend(fontsize="small")
        return figure

    @property
    def _data(self) -> pathlib.Path:
        """The BEIR directory of the job's pairs."""
        imported = self.directory / "private" / "pairs"
        if imported.is_dir():  # of a log, by the job itself
            return imported
        given = str(self.config.get("data", ""))
        if given == "pydocs" or not os.path.isdir(given):
            given = _json(self.path("evaluation") / "stage.json")["config"]["data"]
        if not os.path.isdir(given):
            raise InputError(
                f"the pairs of this job, {given!r}, are not a directory of this "
                "machine. Open the workdir where they are, or set config.data to them."
            )
        return pathlib.Path(given)

    def _epsilon(self, system: str) -> float:
        if system in ("bm25", "encoder", "reranked_public_only"):
            return 0.0
        name = system if system.startswith("adapter_") else f"retriever_{system}"
        if system.startswith("reranked_"):  # by a generator; names of rows hold no dot
            name = f"generator_{system[len('reranked_') :].replace('_', '.')}"
        return self._epsilon_of(name) if name in self.stages.index else np.nan

    def _epsilon_of(self, stage: str) -> float:
        """Returns what the certificate of a stage states; 0 where it has none."""
        certificate = self.certificate(stage)
        return float(certificate["guarantee"]["epsilon"]) if certificate else 0.0

    def _audits(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for name in self.stages.index:
            if audit := _json(self.path(name) / "audit.json"):
                yield name, audit


def _documents(beir: pathlib.Path) -> pd.Series:
    texts = {
        str(d["_id"]): f"{d.get('title') or ''} {d['text']}".strip()
        for d in _lines(beir / "corpus.jsonl")
    }
    return pd.Series(texts, dtype=object)


def _pairs(beir: pathlib.Path) -> pd.DataFrame:
    queries = {str(q["_id"]): str(q["text"]) for q in _lines(beir / "queries.jsonl")}
    parts = [
        _table(path, "\t", "score").assign(split=path.stem)
        for path in sorted((beir / "qrels").glob("*.tsv"))
    ]
    if not parts:
        raise InputError(f"{beir} holds no qrels/*.tsv. Give a BEIR directory.")
    pairs = pd.concat(parts, ignore_index=True).query("score > 0")
    columns = {"query-id": "query_id", "corpus-id": "document_id"}
    pairs = pairs.rename(columns=columns).drop(columns="score")
    pairs.insert(1, "query", pairs.query_id.map(queries))
    pairs.insert(3, "document", pairs.document_id.map(_documents(beir)))
    return pairs


def _json(path: pathlib.Path) -> dict[str, Any]:
    """Reads an object; empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise _damaged(path, error) from error


def _lines(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a JSON Lines file, or of its .gz; none where it is not."""
    packed = path.with_name(path.name + ".gz")
    if not path.is_file() and not packed.is_file():
        return
    with open(path, "rb") if path.is_file() else gzip.open(packed, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield json.loads(line)
            except ValueError as error:
                if line.endswith(b"\n"):  # else it is being written
                    raise _damaged(path, error, number) from error


def _table(
    path: pathlib.Path, separator: str, *numbers: str, **options: Any
) -> pd.DataFrame:
    """Reads a table as it stands: `NA` and `"a"` are ids, `numbers` are numbers."""
    options.update(quoting=csv.QUOTE_NONE, keep_default_na=False, dtype=str)
    try:
        found = pd.read_csv(path, sep=separator, **options)
        return found.assign(**{name: pd.to_numeric(found[name]) for name in numbers})
    except ValueError as error:
        raise _damaged(path, error) from error


def _frame(found: Iterable[dict[str, Any]]) -> pd.DataFrame:
    found = list(found)
    return pd.DataFrame(found, columns=None if found else ["name"]).set_index("name")


def _damaged(path: pathlib.Path, why: object, line: int | None = None) -> DataError:
    return DataError(path, f"it is damaged: {why}", "Make it again", line)
