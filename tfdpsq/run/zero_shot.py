r"""Evaluate retrievers on public test sets that they never saw.

    python -m tfdpsq.run.zero_shot --config=configs/zero_shot.py --workdir=DIR \
        --config.root=BEIR

Takes any list of BEIR directories, by default the paper's eleven. Writes
`runs/SET/SYSTEM.trec` and `runs/SET/qrels.trec` (CQADupStack's forums:
`runs/cqadupstack/FORUM/…`), and from these files `metrics.json`. It does not search a
finished set again; an interrupted run resumes with the next.

The sets count as public, as BEIR's are, and reading them costs no budget. Queries that
are not public need `private = True`; each read is then recorded, and the output belongs
under `private/`. So does the output if a system was trained on private queries without
protection, or two have different guarantees: the numbers derive from the systems, each
of which is protected by its own certificate only, with the ε that they state. Where one
certificate covers all systems, it is written next to the numbers.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np

from tfdpsq import evaluation, validation
from tfdpsq.privacy import read_certificate
from tfdpsq.privacy.proof import certificate as certificates
from tfdpsq.run.core import (
    command,
    layout,
    outputs,
    records,
    releases,
    settings,
    sources,
    workdir,
)
from tfdpsq.run.search import benchmark_sets, retrieval, systems
from tfdpsq.run.search.benchmark_sets import Part
from tfdpsq.run.training import training_settings

RUNS = layout.SETS
COUNTS = ("documents", "empty_documents", "unknown_judgements")


SETTINGS: settings.Declaration = {
    **benchmark_sets.declared(),
    "private": settings.Flag(False),
    "systems": settings.Named({systems.BM25: systems.BM25}, settings.Text("")),
    "metrics": settings.Several(layout.METRICS, settings.Text("", required=True), 1),
    "compared": settings.Text("ndcg@10", required=True),
    "k": settings.Integer(100, 1, 1000000),
    "index": settings.Text("scann_brute_force", systems.INDEXES),
    "batch_size": settings.Integer(128),
    **training_settings.dtype_settings(),
    "resamples": settings.Integer(10000, 1, 10000000),
    "seed": settings.Integer(0, 0, settings.SEED),
    "strict": settings.Flag(False),
    "private_directory": settings.Text(""),
}


def default_config() -> ml_collections.ConfigDict:
    """Returns the stage's settings; of the sets, see `benchmark_sets.declared`.

    `systems` maps a name to "bm25" or to an output of `train_retriever`. `compared` is
    the metric in which every two systems are compared.
    """
    return settings.default_config(SETTINGS)


def run(config: ml_collections.ConfigDict, directory: pathlib.Path) -> dict:
    """Searches all remaining sets, and scores all.

    Returns:
      The content of `metrics.json`.

    Raises:
      InputError: bad settings, missing sets or systems, or private queries in strict
        mode.
      DataError: malformed data, named by file and line, before any set is searched.
    """
    settings.check(config, SETTINGS)
    output, certificate = _output(config, directory)
    check_settings(config)
    parts, missing = located(config)
    searched = systems.Systems.of(config)
    inputs = searched.fingerprints()
    searched.require_retrievers()
    # All data are read and checked before the first search.
    checked = [_checked(config, part, directory) for part in parts]
    outputs.open_directory(output)
    held = {
        part.name: _search(
            config, part, output, certificate, {**data, **inputs}, counts
        )
        for part, (data, counts) in zip(parts, checked)
    }
    sets = {
        name: _set(config, list(of_set), directory, held)
        for name, of_set in itertools.groupby(parts, lambda part: part.of)
    }
    notes = next(iter(held.values()))["settings"]
    metrics = {
        "sets": sets,
        "mean": _mean(config.systems, config.metrics, sets),
        "skipped": missing,
        "systems": {
            name: _system(path, config.index, config.dtype, notes[name])
            for name, path in config.systems.items()
        },
        "tests": _tests(config.compared, config.resamples, config.seed),
        "queries_are": "private: these numbers are covered by no epsilon"
        if config.private
        else "public, as declared: only the systems can hold what is private",
        "versions": workdir.versions(),
    }
    if certificate is not None:
        text = json.dumps(certificate, indent=2, sort_keys=True) + "\n"
        _write(output, certificates.FILE_NAME, text)
    text = json.dumps(metrics, indent=2, sort_keys=True, allow_nan=False) + "\n"
    _write(output, layout.METRICS_FILE, text)
    return metrics


def _output(
    config: ml_collections.ConfigDict, directory: pathlib.Path
) -> tuple[releases.Output, dict[str, Any] | None]:
    """Returns the output of the numbers, and the one certificate of all systems.

    Numbers of two systems with different guarantees have no certificate: both would
    add up.
    """
    paths = [path for path in config.systems.values() if path != systems.BM25]
    guarantee, certificate = releases.PRIVATE, None
    if not config.private:
        found = {}
        for path in paths:
            each = read_certificate(path)
            if each is not None:
                found[each["digest"]] = each
        if len(found) < 2:
            certificate = next(iter(found.values()), None)
            guarantee = releases.guarantee_of(certificate, *paths)
    holds = "what systems trained on private queries find, or what is found for them"
    output = releases.Output(directory, guarantee, holds, config.private_directory)
    return output, certificate if guarantee == releases.CERTIFIED else None


def _write(output: releases.Output, name: str, text: str) -> None:
    path = output.directory / name
    outputs.write_file(path, text, output.guarantee, output.holds)


def values_of(
    config: ml_collections.ConfigDict, directory: pathlib.Path, metric: str
) -> dict[str, dict[str, list[np.ndarray]]]:
    """Reads every query's value of a metric from the TREC files of a run.

    Returns:
      {set: {system: [[queries] values, for each of the set's parts]}}.
    """
    parts, _ = benchmark_sets.locate(config)
    found: dict[str, dict[str, list[np.ndarray]]] = {}
    for part in parts:
        scored = _scored(
            config.systems, config.metrics, part, directory / RUNS / part.name
        )
        of_set = found.setdefault(part.of, {system: [] for system in config.systems})
        for system, result in scored.items():
            of_set[system].append(result.values(metric))
    return found


def check_parts(config: ml_collections.ConfigDict, parts: Sequence[Part]) -> None:
    """Refuses parts of sets that cannot be searched, before others are.

    Raises:
      InputError: a split that is missing, or too few documents for the index.
      DataError: malformed data.
    """
    for part in parts:
        beir = sources.open_beir(part.path, part.as_published)
        validation.one_of(f"split of {part.name}", part.split, beir.splits())
        counts = beir.validate([part.split])
        systems.Systems.of(config).require_documents(counts.documents)


def _checked(
    config: Any, part: Part, directory: pathlib.Path
) -> tuple[dict[str, str], dict[str, int]]:
    """Returns the fingerprint of a part's data, and its counts unless searched."""
    private = releases.private_directory(directory, config.private_directory)
    if config.private:
        records.private_reads(private, config.strict).record(
            f"the queries and judgements of split {part.split!r} of {part.name}",
            f"{layout.METRICS_FILE}, TREC files and whatever is made from them",
        )
    beir = sources.open_beir(part.path, part.as_published)
    fingerprint = beir.fingerprint()
    if config.private:
        fingerprint = sources.keyed_fingerprint(fingerprint, private)
    if (directory / RUNS / part.name / workdir.STAGE_FILE).is_file():
        return {"data": fingerprint}, {}
    counts = dataclasses.asdict(beir.validate([part.split]))
    systems.Systems.of(config).require_documents(counts["documents"])
    return {"data": fingerprint}, {name: counts[name] for name in COUNTS}


def _search(
    config: Any,
    part: Part,
    output: releases.Output,
    certificate: dict[str, Any] | None,
    inputs: Mapping[str, str],
    counts: Mapping[str, int],
) -> dict[str, Any]:
    """Writes a part's TREC files unless they exist; returns what was recorded."""
    # One more, as a self-match is left out.
    k = config.k + part.ignore_identical_ids
    settings = {
        "split": part.split,
        "k": k,
        "systems": sorted(config.systems),
        "index": config.index,
        "batch_size": config.batch_size,
        "dtype": config.dtype,
    }

    def make(out: pathlib.Path) -> dict[str, Any]:
        beir = sources.open_beir(part.path, part.as_published)
        qrels = beir.qrels(part.split)
        queries = {name: text for name, text in beir.read_queries() if name in qrels}
        evaluation.write_trec_qrels(out / layout.QRELS_FILE, qrels)
        notes = {}
        for name, found, note in retrieval.retrieve(
            systems.Systems.of(config), beir, queries, k
        ):
            path = out / f"{name}.trec"
            evaluation.write_trec_run(path, found, name, part.ignore_identical_ids)
            notes[name] = note
        records.write_certificate(out, certificate)
        return {**counts, "settings": notes}

    out = dataclasses.replace(output, place=output.directory / RUNS / part.name)
    return workdir.run_stage(out, settings, inputs, make)["result"]


def located(
    config: ml_collections.ConfigDict,
) -> tuple[list[Part], dict[str, str]]:
    """Returns what `benchmark_sets.locate` does, of sets that may be read as declared.

    Raises:
      InputError: missing sets, or a private one that is not declared.
    """
    parts, missing = benchmark_sets.locate(config)
    for part in parts:
        if not config.private and releases.stated(part.path) == releases.PRIVATE:
            raise validation.InputError(
                f"{part.name} is {part.path}, whose guarantee is 'private', but "
                "private is False. Set private to True, and write to a private "
                "directory."
            )
    return parts, missing


def check_settings(config: ml_collections.ConfigDict) -> None:
    """Refuses settings that are wrong, before any data are read."""
    if config.private and config.strict:
        raise validation.InputError(
            "strict is True and private is True, but searching for private queries is "
            "a read that no epsilon covers. Set one of them to False."
        )
    systems.check_search(config.systems, config.k, tuple(config.metrics))
    validation.one_of("compared", config.compared, tuple(config.metrics))
    if not config.systems:
        raise validation.InputError(
            'systems is empty; give it a retriever, or {"bm25": "bm25"}.'
        )
    for name in config.systems:
        if f"{name}.trec" == layout.QRELS_FILE:
            raise validation.InputError(
                f"a system is called {name!r}, as is the file of judgements; rename it."
            )


def _set(
    config: Any,
    parts: Sequence[Part],
    directory: pathlib.Path,
    held: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Returns a set's numbers, from its TREC files alone."""
    scored = [
        _scored(config.systems, config.metrics, part, directory / RUNS / part.name)
        for part in parts
    ]
    found: dict[str, Any] = {
        "split": parts[0].split,
        "rules": {
            **evaluation.rules(parts[0].ignore_identical_ids),
            "retrieved": f"{config.k} documents of each query"
            + (", not counting itself" if parts[0].ignore_identical_ids else ""),
        },
        "queries": sum(_queries(results) for results in scored),
        **{count: sum(held[p.name][count] for p in parts) for count in COUNTS},
        "systems": {
            system: _row(
                [results[system] for results in scored],
                config.metrics,
                config.resamples,
                config.seed,
            )
            for system in config.systems
        },
        "comparisons": [
            dataclasses.asdict(comparison)
            for comparison in evaluation.compare_systems(
                {
                    s: benchmark_sets.as_one(
                        [results[s].values(config.compared) for results in scored]
                    )
                    for s in config.systems
                },
                config.resamples,
                config.seed,
            )
        ],
    }
    if parts[0].name != parts[0].of:
        found["rules"]["averaged_over"] = f"{len(parts)} forums, each counting the same"
        found["parts"] = {
            part.name: {
                "queries": _queries(results),
                "systems": {s: dict(results[s].means) for s in config.systems},
            }
            for part, results in zip(parts, scored)
        }
    return found


def _scored(
    names: Iterable[str], metrics: Sequence[str], part: Part, out: pathlib.Path
) -> dict[str, evaluation.RankingResult]:
    qrels = evaluation.read_trec_qrels(out / layout.QRELS_FILE)
    return {
        system: evaluation.evaluate_run(
            qrels,
            evaluation.read_trec_run(out / f"{system}.trec"),
            metrics,
            part.ignore_identical_ids,
        )
        for system in names
    }


def _queries(results: Mapping[str, evaluation.RankingResult]) -> int:
    return len(next(iter(results.values())).per_query)


def _row(
    results: Sequence[evaluation.RankingResult],
    metrics: Sequence[str],
    resamples: int,
    seed: int,
) -> dict[str, Any]:
    """Returns a system's numbers on a set of one part or several."""
    row: dict[str, Any] = {
        "missing_queries": sum(len(result.missing) for result in results),
        "queries_without_relevant": sum(len(r.without_relevant) for r in results),
    }
    for metric in metrics:
        interval = evaluation.macro_interval(
            [result.values(metric) for result in results],
            resamples=resamples,
            seed=seed,
        )
        row[metric] = interval.mean
        row[f"{metric}_ci"] = [interval.low, interval.high]
    return row


def _mean(
    names: Iterable[str], metrics: Sequence[str], sets: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns means over sets, each with the same weight."""
    return {
        "sets": len(sets),
        "systems": {
            system: {
                metric: float(
                    np.mean([s["systems"][system][metric] for s in sets.values()])
                )
                for metric in metrics
            }
            for system in names
        },
    }


def _tests(metric: str, resamples: int, seed: int) -> dict[str, str]:
    """Returns the methods for differences and intervals, in words."""
    drawn = f"{resamples} random ones (seed {seed})"
    return {
        "metric": metric,
        "test": "paired randomisation (Fisher, Pitman), two-sided, of the means' "
        "difference: all signs of the per-query differences where at most 20 are not "
        f"0, else {drawn}",
        "correction": "Holm, over all pairs of systems on one set",
        "intervals": "95 %, percentile bootstrap over queries (those of each forum by "
        f"themselves), resamples: {drawn}",
    }


def _system(
    path: str, index: str, dtype: str, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns a system's description and the guarantee of private queries in it."""
    if path == systems.BM25:
        return {"kind": systems.BM25, "settings": settings, "guarantee": None}
    certificate = read_certificate(path)
    return {
        "kind": "retriever",
        "settings": {"index": index, "dtype": dtype},
        "guarantee": None if certificate is None else certificate["guarantee"],
    }


if __name__ == "__main__":
    command.main(run, runs_models=True)
