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

import contextlib
import csv
import functools
import gzip
import os
import pathlib
import zlib
from collections.abc import Iterator
from typing import Any

try:
    import matplotlib.pyplot as plt
    import numpy as np
    import pandas as pd
except ImportError as _missing:
    raise ImportError(
        f"tfdpsq.results needs {_missing.name}: python -m pip install pandas matplotlib"
    ) from _missing

from tfdpsq import validation
from tfdpsq.validation import DataError, InputError, cut, parse_json, shown

_STAGE, _CERTIFICATE = "stage.json", "certificate.json"
_BASELINE, _RERANKED = "public_only", "reranked_"
_RUN_COLUMNS = ("query", "_", "document", "rank", "score", "tag")
# What reading raises where a file is damaged, or not as a stage writes it.
_BAD_FILE = (OSError, EOFError, zlib.error, ValueError, OverflowError)
# Columns of `Job.curves` that are drawn.
_CURVES: dict[str, Any] = {
    "loss": {"ylabel": "loss (nats)", "title": "Training loss (private)"},
    "epsilon": {"ylabel": "ε", "title": "ε spent", "ylim": (0, None)},
}
_EXACT: Any = {"parse_int": validation.parse_integer}
_BAD_ENTRY = (AttributeError, LookupError, TypeError)


def open_job(path: str | os.PathLike) -> Job:
    """Opens a workdir, or the directory that stages' outputs are in.

    Raises:
      InputError: it is empty, does not exist, or holds no stage's output.
    """
    directory = pathlib.Path(validation.given_path("the workdir", path))
    if not os.path.isdir(directory):  # which is also False of a path too long to open
        raise InputError(f"{cut(str(path))} does not exist. Give a job's --workdir.")
    job = Job(directory)
    if job.stages.empty:
        raise InputError(
            f"{directory} holds no finished stage. Give the --workdir of a job; "
            "`tfdpsq status` shows what is running."
        )
    return job


class Job:
    """A workdir. Tables are read when they are first used, and kept.

    Attributes:
      directory: the workdir.
    """

    def __init__(self, directory: pathlib.Path):
        """Takes a directory that exists; `open_job` checks it."""
        self.directory = directory

    # -- What was made ------------------------------------------------------------

    @functools.cached_property
    def stages(self) -> pd.DataFrame:
        """Finished stages by name: their place, guarantee, and seconds where known."""
        took = self._json(self.directory / "private" / "seconds.json")
        found = [
            {
                "name": path.name,
                "place": path.relative_to(self.directory).as_posix(),
                "guarantee": self._json(path / _STAGE).get("guarantee"),
                "seconds": took.get(path.name, np.nan),
            }
            for path in self._stage_directories()
        ]
        frame = pd.DataFrame(found, columns=["name", "place", "guarantee", "seconds"])
        twice = frame.name.duplicated(keep=False)  # in `release/` and in `private/`
        return frame.set_index(frame.name.where(~twice, frame.place)).drop(
            columns="name"
        )

    def path(self, stage: str) -> pathlib.Path:
        """Returns a stage's output directory.

        Raises:
          InputError: there is no such stage; the message names those there are.
        """
        if stage not in self.stages.index:
            raise InputError(
                f"there is no stage {stage!r} in {self.directory}. There are: "
                f"{', '.join(self.stages.index)}."
            )
        return self.directory / str(self.stages.place[stage])

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The job's config; empty for stages that were run one by one."""
        return self._json(self.directory / "config.json")

    # -- Guarantees -----------------------------------------------------------------

    @functools.cached_property
    def certificates(self) -> pd.DataFrame:
        """One line for each artefact that carries a certificate.

        Columns: "epsilon" as stated, "epsilon_pld", "epsilon_rdp", "delta", "unit",
        "noise_multiplier", "clip_norm", "steps", "n", "place" and "run", which is equal
        for artefacts of one training run: only different runs add up. A run that
        continued another states the ε of both.
        """
        found = []
        for name in self.stages.index:
            path = self._certificate_file(name)
            if path is None:
                continue
            of = self._json(path)
            with _reading(path):
                guarantee, accounting = of["guarantee"], of["accounting"]
                found.append(
                    {
                        "name": name,
                        "epsilon": float(guarantee["epsilon"]),
                        "epsilon_pld": float(accounting["epsilon_pld"]),
                        "epsilon_rdp": float(accounting["epsilon_rdp"]),
                        "delta": guarantee["delta"],
                        "unit": guarantee["unit"],
                        "noise_multiplier": of["mechanism"]["noise_multiplier"],
                        "clip_norm": of["mechanism"]["clip_norm"],
                        "steps": accounting["steps_executed"],
                        "n": of["sampler"]["n"],
                        "place": self.stages.place[name],
                        "run": of["digest"][:8],
                    }
                )
        return _frame(found)

    def certificate(self, stage: str) -> dict[str, Any] | None:
        """Returns the certificate of a stage's output; `None` where it has none."""
        path = self._certificate_file(stage)
        return self._json(path) if path else None

    @functools.cached_property
    def private_reads(self) -> pd.DataFrame:
        """Reads of private data that no ε covers: "what" and "where"."""
        path = self.directory / "private" / "private_reads.jsonl"
        return pd.DataFrame(self._lines(path), columns=["what", "where"])

    # -- Retrieval --------------------------------------------------------------------

    @functools.cached_property
    def rows(self) -> pd.DataFrame:
        """Measures of every system on the test queries, by system.

        Columns: each measure with "_low" and "_high" (95 %); "over_baseline" with
        "_low", "_high" and "_p_value", the difference in NDCG@10 to public-only, paired
        by query; "epsilon" of the certificate, 0 where no private query was used, NaN
        for a system that this job did not make.
        """
        path = self.path("evaluation") / "metrics.json"
        metrics = self._json(path)
        if "systems" not in metrics:
            raise DataError(path, "it lists no systems", "Run the stage evaluate again")
        found = []
        with _reading(path):
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
        folder = self.path("evaluation") / "runs"
        parts = []
        for path in sorted(folder.glob("*.trec")):
            part = _table(path, r"\s+", ("rank", "score"), names=_RUN_COLUMNS)
            parts.append(part.assign(system=path.stem))
        if not parts:
            raise InputError(f"{folder} holds no run. Run the stage evaluate again.")
        columns = ["system", "query", "document", "rank", "score"]
        return pd.concat(parts, ignore_index=True)[columns]

    @functools.cached_property
    def qrels(self) -> pd.DataFrame:
        """Judgements of the test queries: "query", "document", "relevance"."""
        names = ["query", "_", "document", "relevance"]
        path = self.path("evaluation") / "qrels.trec"
        found = _table(path, r"\s+", ("relevance",), names=names)
        return found[["query", "document", "relevance"]]

    def compare(
        self, query: str, systems: tuple[str, str], top: int = 5
    ) -> pd.DataFrame:
        """Shows what two systems retrieve for one test query, side by side.

        Args:
          query: id of the query.
          systems: names of two systems, as in `rows`.
          top: number of documents of each.

        Returns:
          A line for each rank; columns (system, "document"), (system, "text") and
          (system, "relevant").

        Raises:
          InputError: no such query or system.
        """
        known = {"query": set(self.runs["query"]), "system": set(self.runs["system"])}
        for kind, value in (("query", query), *(("system", s) for s in systems)):
            if value not in known[kind]:
                raise InputError(
                    f"there is no {kind} {value!r}. There are "
                    f"{', '.join(sorted(known[kind])[:8])}, …"
                )
        judged = self.qrels[(self.qrels["query"] == query) & (self.qrels.relevance > 0)]
        parts = {}
        for system in systems:
            own = (self.runs.system == system) & (self.runs["query"] == query)
            found = self.runs[own & (self.runs["rank"] <= top)].set_index("rank")
            parts[system] = pd.DataFrame(
                {
                    "document": found.document,
                    "text": found.document.map(self.documents),
                    "relevant": found.document.isin(set(judged.document)),
                }
            )
        return pd.concat(parts, axis=1)

    # -- Texts ------------------------------------------------------------------------

    @functools.cached_property
    def documents(self) -> pd.Series:
        """Texts of the public documents, by id."""
        return pd.Series(dict(self._corpus(self._data)), dtype=object)

    @functools.cached_property
    def pairs(self) -> pd.DataFrame:
        """Private pairs: "query_id", "query", "document_id", "document", "split"."""
        return self._pairs_of(self._data)

    @functools.cached_property
    def sets(self) -> pd.DataFrame:
        """Synthetic sets by stage: number of queries, ε, and words in a query."""
        found = []
        for name in self.stages.index:
            if not (self.path(name) / "set" / "manifest.json").is_file():
                continue
            queries = self.set(name)["query"]
            found.append(
                {
                    "name": name,
                    "queries": len(queries),
                    "distinct": queries.nunique(),
                    "words": queries.str.split().str.len().mean(),
                    "epsilon": self._epsilon_of(name),
                }
            )
        return _frame(found)

    def set(self, stage: str) -> pd.DataFrame:
        """Returns a synthetic set's pairs; columns as `pairs`.

        "public_pairs" are the pseudo-queries that `prepare` cuts from documents.
        """
        if stage == "public_pairs":
            return self._pairs_of(self.path("prepare") / "public_pairs" / "beir")
        return self._pairs_of(self.path(stage) / "set" / "beir")

    def of_document(self, document: str) -> pd.DataFrame:
        """Returns a document's queries: its private ones, and each set's, by source."""
        sources = {"private": self.pairs, "public_pairs": self.set("public_pairs")}
        sources.update({name: self.set(name) for name in self.sets.index})
        found = [
            {"source": name, "query": query}
            for name, pairs in sources.items()
            for query in pairs["query"][pairs.document_id == document]
        ]
        return pd.DataFrame(found, columns=["source", "query"]).set_index("source")

    # -- Training and audits ----------------------------------------------------------

    @functools.cached_property
    def curves(self) -> pd.DataFrame:
        """Training logs: "run", "step", "loss", "epsilon", "seconds" and rates."""
        found = []
        for path in sorted((self.directory / "private" / "logs").glob("*/log.jsonl")):
            for number, point in enumerate(self._lines(path), 1):
                if "step" in point:
                    with _reading(path, number):
                        for name in {"epsilon", "loss"} & point.keys():
                            point[name] = float(point[name])
                        point["step"] = int(point["step"])
                    # Jobs in strict mode measure no loss.
                    found.append({"run": path.parent.name, "loss": np.nan, **point})
        return pd.DataFrame(found, columns=None if found else ["run", "step", "loss"])

    @functools.cached_property
    def canaries(self) -> pd.DataFrame:
        """Planted secrets by audit, form and repetitions: ranks, p-values, leaks."""
        found = []
        for name, path in self._audits():
            audit = self._json(path)
            with _reading(path):
                found += [{"name": name, **entry} for entry in audit["canaries"]]
        return _frame(found)

    @functools.cached_property
    def membership(self) -> pd.DataFrame:
        """AUC of every attack on membership, with its 95 % interval, by audit."""
        found = []
        for name, path in self._audits():
            audit = self._json(path)
            with _reading(path):
                for attack, of in audit["membership"].items():
                    auc, low, high = of["auc"]
                    row = {"name": name, "attack": attack, "auc": auc}
                    found.append({**row, "auc_low": low, "auc_high": high})
        return _frame(found)

    # -- Figures ----------------------------------------------------------------------

    def plot_rows(self, measure: str = "ndcg@10") -> plt.Figure:
        """Draws a measure of every system with its interval; dotted: public-only."""
        rows = self.rows.iloc[::-1]
        if measure not in rows or f"{measure}_low" not in rows:
            raise InputError(
                f"measure is {measure!r}; choose one of "
                f"{', '.join(c[:-4] for c in rows if f'{c[:-4]}_high' in rows)}."
            )
        value = rows[measure]
        figure, panel = plt.subplots(
            figsize=(7, 0.4 * len(rows) + 1.2), layout="constrained"
        )
        # Few resamples may give an interval without its value.
        panel.hlines(range(len(rows)), rows[f"{measure}_low"], rows[f"{measure}_high"])
        panel.plot(value, range(len(rows)), "o")
        if _BASELINE in rows.index:
            panel.axvline(rows[measure][_BASELINE], color="black", ls=":")
        panel.set_yticks(range(len(rows)), list(rows.index))
        panel.set(xlabel=measure, title="Test queries, 95 %")
        return figure

    def plot_curves(self, *runs: str) -> plt.Figure:
        """Draws training losses, and the ε spent, by step, where any run has them.

        Args:
          *runs: names of runs; none draws all.
        """
        curves = self.curves
        names = list(runs) or list(curves.run.unique() if len(curves) else [])
        unknown = [name for name in runs if name not in set(curves.run)]
        if unknown or not names:
            raise InputError(
                f"there is no log of {', '.join(unknown) or 'any run'} in "
                f"{self.directory}; strict mode keeps none."
            )
        drawn = curves[curves.run.isin(names)]
        shown = [c for c in _CURVES if c in drawn and np.isfinite(drawn[c]).any()]
        if not shown:
            raise InputError(
                f"{', '.join(names)} logged neither a loss nor an epsilon."
            )
        size = {"figsize": (5 * len(shown), 3.4), "layout": "constrained"}
        figure, axes = plt.subplots(1, len(shown), squeeze=False, **size)
        for axis, column in zip(axes[0], shown):
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

    # -- Files ----------------------------------------------------------------------

    def _stage_directories(self) -> Iterator[pathlib.Path]:
        for folder in (".", "release", "private", "points"):
            found = (self.directory / folder).glob("[!.]*/" + _STAGE)
            yield from sorted(path.parent for path in found)

    def _certificate_file(self, stage: str) -> pathlib.Path | None:
        for folder in (self.path(stage), self.path(stage) / "set"):
            if (folder / _CERTIFICATE).is_file():
                return folder / _CERTIFICATE
        return None

    @property
    def _data(self) -> pathlib.Path:
        """The BEIR directory of the job's pairs."""
        imported = self.directory / "private" / "pairs"
        if imported.is_dir():  # of a log, by the job itself
            return imported
        given = str(self.config.get("data", ""))
        if given == "pydocs" or not os.path.isdir(given):
            path = self.path("evaluation") / _STAGE
            stage = self._json(path)
            with _reading(path):
                given = str(stage["config"]["data"])
        if not given or not os.path.isdir(given):
            raise InputError(
                f"the pairs of this job, {given!r}, are not a directory of this "
                "machine. Open the workdir where they are, or set config.data to them."
            )
        return pathlib.Path(given)

    def _epsilon(self, system: str) -> float:
        if system in ("bm25", "encoder", f"{_RERANKED}{_BASELINE}"):
            return 0.0
        name = system if system.startswith("adapter_") else f"retriever_{system}"
        if system.startswith(_RERANKED):  # by a generator; names of rows hold no dot
            name = f"generator_{system[len(_RERANKED) :].replace('_', '.')}"
        return self._epsilon_of(name) if name in self.stages.index else np.nan

    def _epsilon_of(self, stage: str) -> float:
        """Returns what the certificate of a stage states; 0 where it has none."""
        path = self._certificate_file(stage)
        if path is None:
            return 0.0
        certificate = self._json(path)
        with _reading(path):
            return float(certificate["guarantee"]["epsilon"])

    def _audits(self) -> Iterator[tuple[str, pathlib.Path]]:
        for name in self.stages.index:
            path = self.path(name) / "audit.json"
            if path.is_file():
                yield name, path

    def _corpus(self, beir: pathlib.Path) -> Iterator[tuple[str, str]]:
        path = beir / "corpus.jsonl"
        for number, record in enumerate(self._lines(path, required=True), 1):
            with _reading(path, number):
                text = f"{record.get('title') or ''} {record['text']}".strip()
                name = str(record["_id"])
            yield name, text

    def _pairs_of(self, beir: pathlib.Path) -> pd.DataFrame:
        judged = sorted((beir / "qrels").glob("*.tsv"))
        if not judged:
            raise InputError(f"{beir} holds no qrels/*.tsv. Give a BEIR directory.")
        queries = {}
        path = beir / "queries.jsonl"
        for number, record in enumerate(self._lines(path, required=True), 1):
            with _reading(path, number):
                queries[str(record["_id"])] = str(record["text"])
        documents = dict(self._corpus(beir))
        parts = []
        for path in judged:
            part = _table(path, "\t", ("score",))
            part = part[part["score"] > 0]
            with _reading(path):
                ids = part["query-id"], part["corpus-id"]
                if lost := set(ids[0]) - queries.keys():
                    raise ValueError(f"{shown(min(lost))} is not in queries.jsonl")
            columns = {
                "query_id": ids[0],
                "query": ids[0].map(queries),
                "document_id": ids[1],
                "document": ids[1].map(documents),
                "split": path.stem,
            }
            parts.append(pd.DataFrame(columns))
        return pd.concat(parts, ignore_index=True)

    def _json(self, path: pathlib.Path) -> dict[str, Any]:
        """Reads an object; empty where there is no file."""
        if not path.is_file():
            return {}
        with _reading(path):
            return {**parse_json(path.read_text("utf-8"), **_EXACT)}

    def _lines(self, path: pathlib.Path, required: bool = False) -> Iterator[dict]:
        """Yields the objects of a JSON Lines file, or of its .gz, one for each line.

        Raises:
          DataError: it is damaged; or `required`, and there is none.
        """
        packed = path.with_name(path.name + ".gz")
        if not path.is_file() and not packed.is_file():
            if required:
                raise DataError(path, "it is missing", "Restore it, or make it again")
            return
        with (
            _reading(path),
            open(path, "rb") if path.is_file() else gzip.open(packed, "rb") as file,
        ):
            for number, line in enumerate(file, 1):
                try:
                    found = parse_json(line.decode("utf-8"), **_EXACT)
                except ValueError as error:
                    if not line.endswith(b"\n"):
                        return  # it is being written
                    raise _damaged(path, error, number) from error
                if not isinstance(found, dict):
                    raise _damaged(path, "it is not an object", number)
                yield found


def _table(
    path: pathlib.Path, separator: str, numbers: tuple[str, ...], **options: Any
) -> pd.DataFrame:
    """Reads a table as it stands: `NA` and `"a"` are ids like others.

    Args:
      path: the file.
      separator: what is between its columns.
      numbers: columns that must be there and hold a number in every row.
      **options: of `pandas.read_csv`.

    Raises:
      DataError: it is damaged.
    """
    with _reading(path):
        found = pd.read_csv(
            path,
            sep=separator,
            quoting=csv.QUOTE_NONE,
            keep_default_na=False,
            encoding="utf-8",
            dtype=str,
            **options,
        )
        # Of more fields than names pandas makes ids of rows.
        if not isinstance(found.index, pd.RangeIndex):
            raise ValueError("a row has more fields than there are columns")
        for name in numbers:
            found[name] = pd.to_numeric(found[name], errors="coerce")
            if found[name].isna().any():
                row = int(np.argmax(found[name].isna())) + 1
                raise ValueError(f"its row {row} has no number in column {name!r}")
    return found


def _frame(found: list[dict[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame(found, columns=None if found else ["name"]).set_index("name")


@contextlib.contextmanager
def _reading(path: pathlib.Path, line: int | None = None) -> Iterator[None]:
    """Names the file where what is read in the block is not as a stage writes it."""
    try:
        yield
    except InputError:
        raise
    except KeyError as error:
        raise _damaged(path, f"it has no entry {error}", line) from error
    except (*_BAD_FILE, *_BAD_ENTRY) as error:
        raise _damaged(path, error, line) from error


def _damaged(path: pathlib.Path, why: object, line: int | None = None) -> DataError:
    if isinstance(why, OSError) and why.strerror:
        why = why.strerror
    return DataError(
        path, f"it is damaged: {cut(str(why))}", "Restore it, or make it again", line
    )
