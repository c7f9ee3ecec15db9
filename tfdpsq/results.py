"""Reads any workdir as pandas DataFrames, on any Python from 3.9 to 3.13.

    from tfdpsq import results

    job = results.open_job("/tmp/tfdpsq-quickstart")
    job.rows          # measures of every system, with intervals
    job.certificates  # what is guaranteed, for every artefact

Needs pandas alone, so a notebook explores in its own kernel what stages made in another
environment; notebooks/views.py draws. It verifies nothing (`verify` does). Metrics,
curves and pairs are private: no certificate covers them.
"""

from __future__ import annotations

import csv
import functools
import json
import os
import pathlib
from typing import Any

import numpy as np
import pandas as pd

from tfdpsq.validation import InputError

# Where a certificate has the columns of `Job.certificates`.
_CERTIFIED = {
    "guarantee.epsilon": "epsilon",
    "guarantee.delta": "delta",
    "guarantee.unit": "unit",
    "mechanism.noise_multiplier": "noise_multiplier",
    "accounting.steps_executed": "steps",
    "digest": "run",
}


def open_job(path: str | os.PathLike) -> Job:
    """Opens a workdir, or the directory that stages' outputs are in."""
    job = Job(pathlib.Path(path))
    if job.stages.empty:
        raise InputError(f"{path} holds no finished stage. Give a job's --workdir.")
    return job


class Job:
    """A workdir, `directory`. Tables are read when they are first used, and kept."""

    def __init__(self, directory: pathlib.Path):
        """Takes the workdir; see `open_job`."""
        self.directory = directory

    @functools.cached_property
    def stages(self) -> pd.DataFrame:
        """Finished stages by name: "place", "guarantee", "seconds" where known."""
        places = [step["place"] for step in self._listed.get("steps", [])]
        for folder in ("", "release/", "private/"):  # outputs of no job
            paths = self.directory.glob(f"{folder}[!.]*/stage.json")
            places += sorted(folder + path.parent.name for path in paths)
        found: dict[str, dict[str, Any]] = {}
        for place in places:
            name = place.rpartition("/")[2]
            record = _json(self.directory / place / "stage.json")
            tries = _json(self.directory / f"private/records/{name}.json").get("tries")
            took = sum(one["seconds"] or 0.0 for one in tries) if tries else np.nan
            if record:
                one = {"place": place, "guarantee": record.get("guarantee")}
                found[name] = {**one, "seconds": took}
        return pd.DataFrame.from_dict(found, orient="index").rename_axis("name")

    @functools.cached_property
    def _listed(self) -> dict[str, Any]:
        """The job's list of steps; empty where outputs are of no job."""
        return _json(self.directory / "private" / "pipeline.json")

    def path(self, stage: str) -> pathlib.Path:
        """Returns a stage's output directory."""
        if stage not in self.stages.index:
            raise InputError(
                f"there is no stage {stage!r} in {self.directory}. There are: "
                f"{', '.join(self.stages.index)}."
            )
        return self.directory / str(self.stages.place[stage])

    @functools.cached_property
    def certificates(self) -> pd.DataFrame:
        """Guarantees by stage, of those whose output carries a certificate.

        "run" is equal for artefacts of one training run: only different runs add up.
        """
        every = {name: self.certificate(name) for name in self.stages.index}
        found = {name: one for name, one in every.items() if one}
        table = pd.json_normalize(list(found.values())).reindex(columns=_CERTIFIED)
        table = table.rename(columns=_CERTIFIED).set_axis(list(found))
        table["epsilon"] = table["epsilon"].astype(float)  # of texts such as "inf"
        table["run"] = table["run"].str[:8]
        return table.assign(place=self.stages.place)

    def certificate(self, stage: str) -> dict[str, Any] | None:
        """Returns the certificate of a stage's output; `None` where it has none."""
        path = self.path(stage)
        found = (_json(each / "certificate.json") for each in (path, path / "set"))
        return next(filter(None, found), None)

    @functools.cached_property
    def rows(self) -> pd.DataFrame:
        """Measures on the test queries by system, each with "_low" and "_high" (95 %).

        "over_baseline", with "_p_value", too, is the difference in NDCG@10 to
        public-only, paired by query; "epsilon" is the certificate's, 0 where no private
        query was used, NaN for a system that this job did not make.
        """
        found = {}
        metrics = _json(self.path("evaluation") / "metrics.json")
        for name, of in metrics["systems"].items():
            over = of.get("difference_to_baseline") or {}
            row = found[name] = {"epsilon": self._epsilon(name)}
            for measure, value in of.items():
                if measure.endswith("_ci"):
                    base = measure[: -len("_ci")]
                    row[f"{base}_low"], row[f"{base}_high"] = map(float, value)
                elif isinstance(value, (int, float)):
                    row[measure] = value
            row["over_baseline"] = over.get("difference", np.nan)
            for end in ("low", "high", "p_value"):
                row[f"over_baseline_{end}"] = over.get(end, np.nan)
        return pd.DataFrame.from_dict(found, orient="index").rename_axis("name")

    @functools.cached_property
    def documents(self) -> pd.Series:
        """Texts of the public documents, by id."""
        return _documents(self._data)

    @functools.cached_property
    def pairs(self) -> pd.DataFrame:
        """Private pairs: "query_id", "query", "document_id", "document", "split"."""
        return _pairs(self._data)

    def set(self, stage: str) -> pd.DataFrame:
        """Returns the pairs of a set; that of "prepare" is public."""
        return _pairs(self.path(stage) / "set" / "beir")

    @functools.cached_property
    def curves(self) -> pd.DataFrame:
        """Training logs: "run", "step", "loss", "epsilon" and rates."""
        found = [
            {"run": path.parent.name, **json.loads(line)}
            for path in sorted((self.directory / "private/logs").glob("*/log.jsonl"))
            for line in path.read_text("utf-8").split("\n")[:-1]  # whole lines
        ]
        columns = {"run": object, "step": int, "loss": float, "epsilon": float}
        frame = pd.DataFrame([dict.fromkeys(columns), *found])  # all columns
        return frame.dropna(subset=["step"], ignore_index=True).astype(columns)

    @property
    def _data(self) -> pathlib.Path:
        """The BEIR directory of the job's pairs: imported, or where it was given."""
        given = str(self._listed.get("settings", {}).get("data", ""))
        for place in (self.directory / "private" / "pairs", pathlib.Path(given)):
            if (place / "qrels").is_dir():
                return place
        raise InputError(
            f"the pairs of this job, {given!r}, are not a directory of this machine. "
            "Open the workdir where they are."
        )

    def _epsilon(self, system: str) -> float:
        steps = self._listed.get("steps", [])
        rows = [row for step in steps for row in step["shows"].get("rows", ())]
        of = {row["name"]: row["step"] for row in rows}
        if system not in of or of[system] and of[system] not in self.stages.index:
            return np.nan
        certificate = self.certificate(of[system]) if of[system] else None
        return float(certificate["guarantee"]["epsilon"]) if certificate else 0.0


def _documents(beir: pathlib.Path) -> pd.Series:
    found = _records(beir, "corpus").reindex(columns=["title", "text"]).fillna("")
    return (found.title + " " + found.text).str.strip()


def _pairs(beir: pathlib.Path) -> pd.DataFrame:
    # Texts as they stand: `NA` and `"a"` are ids.
    options = {"quoting": csv.QUOTE_NONE, "keep_default_na": False, "dtype": str}
    parts = {
        path.stem: pd.read_csv(path, sep="\t", **options)
        for path in sorted((beir / "qrels").glob("*.tsv"))
    }
    found = pd.concat(parts, names=["split", None]).droplevel(1).reset_index()
    found = found[found.score.astype(float) > 0]
    found = found.rename(columns={"query-id": "query_id", "corpus-id": "document_id"})
    found["query"] = found.query_id.map(_records(beir, "queries").text)
    found["document"] = found.document_id.map(_documents(beir))
    return found[["query_id", "query", "document_id", "document", "split"]]


def _records(beir: pathlib.Path, name: str) -> pd.DataFrame:
    """Reads documents or queries, packed or not, by id."""
    (path,) = beir.glob(f"{name}.jsonl*")
    found = pd.read_json(path, lines=True, dtype=False, convert_dates=False)
    return found.set_index(found["_id"].astype(str))


def _json(path: pathlib.Path) -> dict[str, Any]:
    """Reads an object; empty where there is no file."""
    return json.loads(path.read_bytes()) if path.is_file() else {}
