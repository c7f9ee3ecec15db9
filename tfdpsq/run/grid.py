"""Choose how to spend ε on public stand-ins, where choosing costs nothing.

    python -m tfdpsq.run.grid --config=configs/grid.py --workdir=DIR

Choosing trained weights, learning rate or clip norm by results on the private pairs
would make every trial a private read. So the stage makes a *proxy* from the public
documents alone, with keyword queries in the private role (`data.keyword_pairs`). Every
point of the grid is a run of `finetune` on it at the intended ε, or of
`train_retriever`, to train a retriever on private pairs directly. Points are ranked by
the loss of held-out proxy queries, or by the ranks of their documents. Writes
`grid.json`; resumes when interrupted.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import ml_collections
import numpy as np
import tensorflow as tf

from tfdpsq import evaluation, retriever, validation
from tfdpsq.data import BeirDirectory, Document, Pair, Tokenizer, keyword_pairs
from tfdpsq.data.beir_writer import BeirWriter
from tfdpsq.data.pydocs import split_of
from tfdpsq.generator import T5QueryGenerator, encode_pairs
from tfdpsq.generator.pretraining import Watcher
from tfdpsq.privacy import read_certificate
from tfdpsq.run import finetune, train_retriever
from tfdpsq.run.core import (
    acting,
    command,
    layout,
    outputs,
    releases,
    settings,
    sources,
    streams,
    workdir,
)
from tfdpsq.run.training import grid_points

RESULTS_FILE = "grid.json"


SETTINGS: settings.Declaration = {
    "data": settings.Text(sources.PYDOCS, required=True),
    "pairs": settings.Integer(0, 0),  # most proxy pairs to train on; 0 takes all
    # Most proxy queries to rank by. A loss is compared with that of another document.
    "held_out": settings.Integer(
        512, 2, remedy="Points are compared on queries of 2 documents at least."
    ),
    "seed": settings.Integer(0, 0, settings.SEED),
    # The stage whose settings vary.
    "stage": settings.Text("finetune", grid_points.STAGES),
    "finetune": finetune.SETTINGS,
    "train_retriever": train_retriever.SETTINGS,
    # A name -> settings of the stage, such as {"lora": {"rank": 8}}.
    "variants": settings.Checked({"all": {}}, grid_points.check_variants),
    # (field of the stage, values), such as ("lora.rank", (4, 8)).
    "axes": settings.Checked((("learning_rate", (1e-3,)),), grid_points.check_axes),
}


ACTING = (
    acting.Only("finetune.*", "stage", ("finetune",)),
    acting.Only("train_retriever.*", "stage", ("train_retriever",)),
)


def default_config() -> ml_collections.ConfigDict:
    """Returns the settings: a proxy, and the variations of a stage.

    Every variant is run with every combination of the axes' values.
    """
    return settings.default_config(SETTINGS)


def run(config: ml_collections.ConfigDict, directory: pathlib.Path) -> list[dict]:
    """Runs all points that are not finished.

    Returns:
      The content of `grid.json`, best first.

    Raises:
      InputError: an unknown field, or bad settings or data.
    """
    acting.check(config, SETTINGS, ACTING)
    acting.require_unfilled(
        config[config.stage],
        _STAGES[config.stage].SETTINGS,
        ("pairs", "private_directory"),
        config.stage,
        "the grid",
    )
    # The proxy is public, but training treats it as private.
    holds = "trial models with their ledgers, and how long each took"
    output = releases.Output(directory, releases.PRIVATE, holds)
    points = list(grid_points.points_of(config, config.stage))
    for point in points:
        name, stage, module = point.name, point.stage, _STAGES[config.stage]
        settings.check(stage, module.SETTINGS, f"points.{name}")
        if stage.get("unit") == "user":
            raise validation.InputError(
                f"points.{name}: unit is 'user', but the grid's pairs are made from "
                "documents and have no users. Set it to 'query'."
            )
        acting.require_acting(stage, module.SETTINGS, module.ACTING, f"points.{name}")
    outputs.open_directory(output)
    proxy = _proxy(config, directory / "proxy")
    results = []
    for point in points:
        name, stage_config = point.name, point.stage
        out = directory / "points" / name
        with stage_config.unlocked():
            stage_config.pairs = str(proxy)
            stage_config.private_directory = str(directory / "private")
        stage = _STAGES[config.stage].run(stage_config, out)
        result = directory / "results" / f"{name}.json"
        known = workdir.read_json(result) if result.is_file() else {}
        if known.get("held_out") != config.held_out:  # or no such measurement yet
            measure = _measure if config.stage == "finetune" else _rank
            row = {
                "name": name,
                "settings": point.settings,
                "held_out": config.held_out,
                **measure(proxy, out, config.held_out),
            }
            certificate = read_certificate(out)
            training = {} if certificate is None else certificate["training"]
            row["trained_parameters"] = training.get("trained_parameters")
            row["seconds"] = stage.get("seconds", known.get("seconds"))
            _write(result, json.dumps(row))
        results.append(workdir.read_json(result))
        results.sort(key=_order)
        _write(directory / RESULTS_FILE, json.dumps(results, indent=1) + "\n")
        tf.keras.backend.clear_session()
    for row in results:
        found = (
            f"NDCG@10 {row['ndcg@10']:.4f}"
            if "ndcg@10" in row
            else f"{row['own_loss']:.4f} nats, gap {row['gap']:.4f}"
        )
        streams.say(f"{found}: {row['settings']}\n")
    return results


def _write(path: pathlib.Path, text: str) -> None:
    outputs.write_file(path, text, releases.PRIVATE, "how long training took")


def _order(row: Mapping[str, Any]) -> float:
    """Returns the sort key of a row; smaller is better."""
    return -row["ndcg@10"] if "ndcg@10" in row else row["own_loss"]


def _proxy(config: Any, directory: pathlib.Path) -> pathlib.Path:
    """Makes a BEIR directory of keyword queries, split by document."""
    beir = sources.open_beir(config.data)

    def make(out: pathlib.Path) -> dict:
        counts = {"train": 0, "dev": 0, "test": 0}
        (out / "pairs").mkdir()
        with BeirWriter(out / "pairs") as writer:
            for pair in keyword_pairs(beir.documents, config.seed):
                split = split_of(pair.document_id)
                if split == "train" and counts[split] == (config.pairs or math.inf):
                    continue
                writer.add_document(Document(pair.document_id, "", pair.document))
                writer.add_query(pair.query_id, pair.query)
                writer.add_judgement(split, pair.query_id, pair.document_id, 1)
                counts[split] += 1
        if counts["dev"] < 2:
            raise validation.InputError(
                f"held_out is {config.held_out}, but {config.data} gives "
                f"{counts['dev']} keyword queries to hold out of "
                f"{sum(counts.values())}; a grid needs hundreds, each of a document of "
                "its own. Give more documents in data."
            )
        return counts

    workdir.run_stage(
        releases.Output(directory, releases.PUBLIC, "pairs of public documents"),
        {name: config[name] for name in ("data", "pairs", "seed")},
        {"corpus": sources.corpus_fingerprint(config.data)},
        make,
    )
    return directory / "pairs"


def _held_out(proxy: pathlib.Path, most: int) -> list[Pair]:
    """Returns pairs that no point was trained on, spread over the corpus."""
    pairs = BeirDirectory(proxy).pairs("dev")
    count = min(len(pairs), most)
    return [pairs[i] for i in np.linspace(0, len(pairs) - 1, count).astype(int)]


def _measure(proxy: pathlib.Path, out: pathlib.Path, most: int) -> dict[str, Any]:
    """Returns the losses of held-out proxy queries under the model."""
    stage = workdir.read_json(out / workdir.STAGE_FILE)["config"]
    vocabulary = sources.trained_vocabulary(stage["vocabulary"], out)
    pairs = _held_out(proxy, most)
    rows = encode_pairs(
        pairs,
        Tokenizer(vocabulary),
        query_length=stage["query_length"],
        document_length=stage["document_length"],
        prompt=stage["prompt"],
    )
    # Each pair is of a document of its own, and `_proxy` sees to two of them.
    rows["document_key"] = np.arange(len(pairs))
    found = Watcher(T5QueryGenerator.from_preset(out), rows)()
    return {name: found[name] for name in ("own_loss", "gap")}


def _rank(proxy: pathlib.Path, out: pathlib.Path, most: int) -> dict[str, Any]:
    """Returns the ranks of held-out proxy queries' documents among each other."""
    stage = workdir.read_json(out / workdir.STAGE_FILE)["config"]
    tokenizer = Tokenizer(sources.vocabulary_file(stage["vocabulary"], stage["init"]))
    model = retriever.load(out / layout.RETRIEVER_MODEL)
    pairs = _held_out(proxy, most)
    beir = BeirDirectory(proxy)
    texts = {p.document_id: p.document for s in ("dev", "test") for p in beir.pairs(s)}
    documents = retriever.encode_texts(
        model, texts.values(), tokenizer, "document", progress=False
    )
    queries = retriever.encode_texts(
        model, [pair.query for pair in pairs], tokenizer, "query", progress=False
    )
    scores, found = retriever.search(
        queries, documents, list(texts), min(10, len(texts))
    )
    result = evaluation.evaluate_run(
        {pair.query_id: {pair.document_id: 1} for pair in pairs},
        retriever.as_run([pair.query_id for pair in pairs], scores, found),
        ["ndcg@10"],
    )
    return {"ndcg@10": float(np.mean(result.values("ndcg@10")))}


_STAGES: Mapping[str, Any] = {"finetune": finetune, "train_retriever": train_retriever}


if __name__ == "__main__":
    command.main(run)
