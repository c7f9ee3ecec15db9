"""Stage `grid`: choose how to spend ε on public data, where choosing costs nothing.

    python -m tfdpsq.run.grid --config=configs/grid.py --workdir=DIR

Which weights to train, how fast, clipped where: had these been chosen by results on the
private pairs, every trial would be a private read. So a *proxy* is made of the public
documents alone, keyword queries that play the private part (`data.keyword_pairs`), and
every point of the grid is a run of `finetune` on it at the ε that is meant. What counts
is the loss of held-out proxy queries. Writes `grid.json`; interrupted, it goes on.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import ml_collections
import numpy as np
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.data import (
    BeirDirectory,
    Document,
    Tokenizer,
    atomic_write,
    keyword_pairs,
)
from tfdpsq.data.beir_writer import BeirWriter
from tfdpsq.data.pydocs import split_of
from tfdpsq.generator import T5QueryGenerator, encode_pairs
from tfdpsq.generator.pretraining import Watcher
from tfdpsq.privacy import read_certificate
from tfdpsq.run import command, finetune, sources, workdir

RESULTS_FILE = "grid.json"


def default_config() -> ml_collections.ConfigDict:
    """The settings: a proxy, and what is varied in `finetune`.

    Every variant is run with every combination of the axes' values.
    """
    return ml_collections.ConfigDict(
        {
            "data": sources.PYDOCS,
            "pairs": 0,  # proxy pairs to train on at most; 0 takes all
            "held_out": 512,
            "seed": 0,
            "finetune": finetune.default_config(),
            # A name -> settings of `finetune`, such as {"lora": {"rank": 8}}.
            "variants": {"all": {}},
            # (field of `finetune`, values), such as ("lora.rank", (4, 8)).
            "axes": (("learning_rate", (1e-3,)),),
        }
    )


def run(config: ml_collections.ConfigDict, directory: pathlib.Path) -> list[dict]:
    """Runs all points that are not finished.

    Returns:
      What `grid.json` holds, best first.

    Raises:
      InputError: an unknown field, or bad settings or data.
    """
    points = list(points_of(config))
    directory.mkdir(parents=True, exist_ok=True)
    proxy = _proxy(config, directory / "proxy")
    results = []
    for name, settings, stage_config in points:
        out = directory / "points" / name
        with stage_config.unlocked():
            stage_config.pairs = str(proxy)
            stage_config.private_directory = str(directory / "private")
        stage = finetune.run(stage_config, out)
        result = directory / "results" / f"{name}.json"
        if not result.is_file():
            row = {"name": name, "settings": settings, **_measure(config, proxy, out)}
            row["seconds"] = stage.get("seconds")
            atomic_write(result, json.dumps(row))
        results.append(json.loads(result.read_text("utf-8")))
        results.sort(key=lambda row: row["own_loss"])
        atomic_write(directory / RESULTS_FILE, json.dumps(results, indent=1) + "\n")
        tf.keras.backend.clear_session()
    for row in results:
        sys.stdout.write(
            f"{row['own_loss']:.4f} nats, gap {row['gap']:.4f}: {row['settings']}\n"
        )
    return results


def points_of(
    config: ml_collections.ConfigDict,
) -> Iterator[tuple[str, dict[str, Any], ml_collections.ConfigDict]]:
    """(name, settings, finetune's config) of every point.

    Raises:
      InputError: a setting that `finetune` does not have.
    """
    fields = [field for field, _ in config.axes]
    for variant, own in config.variants.to_dict().items():
        for values in itertools.product(*(values for _, values in config.axes)):
            settings = {**_flat(own), **dict(zip(fields, values))}
            stage = config.finetune.copy_and_resolve_references()
            for field, value in settings.items():
                _set(stage, field, value)
            text = json.dumps(workdir.plain(stage), sort_keys=True)
            digest = hashlib.sha256(text.encode()).hexdigest()[:8]
            yield f"{variant}-{digest}", {"variant": variant, **settings}, stage


def _flat(settings: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names."""
    flat = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{before}{name}."))
        else:
            flat[before + name] = value
    return flat


def _set(config: ml_collections.ConfigDict, field: str, value: Any) -> None:
    *path, last = field.split(".")
    node = config
    try:
        for part in path:
            node = node[part]
        if last not in node:  # it would be added without a word
            raise KeyError(f"there is no {field!r}")
        node[last] = value
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise validation.InputError(
            f"the grid sets {field!r} to {value!r}, which finetune does not take "
            f"({error}). Its fields: {', '.join(sorted(config))}."
        ) from error


def _proxy(config, directory: pathlib.Path) -> pathlib.Path:
    """A BEIR directory of keyword queries, split by document."""
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
                f"{config.data} gives {counts['dev']} keyword queries to hold out of "
                f"{sum(counts.values())}; a grid needs hundreds. Give more documents."
            )
        return counts

    workdir.run_stage(
        directory,
        {name: config[name] for name in ("data", "pairs", "seed")},
        {"corpus": sources.corpus_fingerprint(config.data)},
        make,
    )
    return directory / "pairs"


def _measure(config, proxy: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    """What the model makes of held-out proxy queries."""
    stage = workdir.read_json(out / workdir.STAGE_FILE)["config"]
    vocabulary = sources.vocabulary_file(stage["vocabulary"], str(out))
    pairs = BeirDirectory(proxy).pairs("dev")
    # Spread over the corpus, which may be sorted.
    count = min(len(pairs), config.held_out)
    pairs = [pairs[i] for i in np.linspace(0, len(pairs) - 1, count).astype(int)]
    rows = encode_pairs(
        pairs, Tokenizer(vocabulary), stage["document_length"], stage["query_length"]
    )
    rows["document_key"] = np.arange(len(pairs))
    found = Watcher(T5QueryGenerator.load(out), rows)()
    certificate = read_certificate(out)
    training = {} if certificate is None else certificate["training"]
    return {
        **{name: found[name] for name in ("own_loss", "gap")},
        "trained_parameters": training.get("trained_parameters"),
    }


if __name__ == "__main__":
    command.main(run)
