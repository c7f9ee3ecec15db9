"""The stages that `kills.py` kills, each with tiny inputs and settings."""

import dataclasses
import json
import math
import os
import re
import shutil

from helpers import tiny

PRIVATE = "private"
_LENGTHS = {"document_length": 32, "query_length": 48}
_T5 = {
    "vocabulary_size": 420,
    **tiny.SHAPE,
    "version": "1.0",
    "dropout": 0.0,
}
_TRAINING = {
    **_LENGTHS,
    "batch_size": 8,
    "microbatch_size": 4,
    "steps": 8,
    "save_every": 2,
    "accountant": "rdp",
    "n_is_public": True,
}
CONFIG = """import json
import math

from tfdpsq.run import {module} as stage


def _update(config, settings):
    for name, value in settings.items():
        if isinstance(value, dict) and name in config and len(config[name]):
            _update(config[name], value)
        else:
            config[name] = tuple(value) if isinstance(value, list) else value


def get_config():
    config = stage.default_config()
    with config.unlocked():
        _update(config, json.loads({settings!r}))
    return config
"""
PIPELINE = """import sys

sys.path.insert(0, {here!r})

from helpers import tiny


def get_config():
    config = tiny.tiny_config({data!r}, {embedded!r})
    config.finetune.save_every = 1
    return config
"""


@dataclasses.dataclass(frozen=True)
class Stage:
    """A command to kill.

    Attributes:
      name: in the report, and of its directories.
      module: of `tfdpsq.run`.
      out: its output, relative to its directory.
      settings: of its config; "@NAME" in a value is the output of stage NAME, "@@" the
        directory of all inputs.
      events: events that a kill may wait for, of `EVENTS`.
      seeded: whether it starts from a run directory that holds seeds.
      fresh: whether its bytes depend on entropy that cannot be fixed in advance.
    """

    name: str
    module: str
    out: str
    settings: dict
    events: tuple = ("partial", "finished")
    seeded: bool = False
    fresh: bool = False


_TRAINED = ("ledger", "state", "partial", "finished")
_SHARDED = ("shard", "partial", "finished")
# Events that a kill may wait for: glob patterns below the stage's directory.
EVENTS = {
    "ledger": (f"{PRIVATE}/runs/*/ledger.jsonl",),
    "state": (f"{PRIVATE}/runs/*/state/*", f"{PRIVATE}/runs/*/state/.*"),
    "partial": ("**/.*.partial",),
    "shard": ("**/*shards*/*", "**/*shard*"),
}


def stages():
    """Returns all stages, each after those that it reads."""
    vocabulary = {"vocabulary": "@prepare/vocabulary/spiece.model"}
    data, pairs = {"data": "@@/pairs"}, {"pairs": "@@/pairs"}
    start = {**vocabulary, "init": "@pretrain"}
    of_grid = {**_TRAINING, **start}  # which gives its stages pairs of its own
    generator = {**of_grid, **pairs}
    retriever = {**start, **_LENGTHS, "embedding_dim": 16, "batch_size": 4, "steps": 4}
    direct = {**retriever, **_TRAINING, **pairs, "epsilon": 8.0}
    writing = {**vocabulary, **_LENGTHS, "corpus": "@@/pairs", "batch_size": 16}
    writing = {**writing, "shards": 2, "shard_documents": 40}
    embedding = {**vocabulary, "corpus": "@@/pairs", "batch_size": 16}
    embedding = {**embedding, "retriever": "@retriever", "shard_documents": 30}
    search = {**vocabulary, "resamples": 200, "batch_size": 16}
    return [
        Stage("prepare", "prepare", "prepare", {**data, "vocabulary_size": 320}),
        Stage(
            "pretrain",
            "pretrain",
            "public_model",
            {
                **data,
                **vocabulary,
                "t5": _T5,
                "document_length": 32,
                "query_length": 12,
                "steps": 4,
                "held_out_one_in": 8,
                "pair_rows": 4,
                "text_rows": 4,
            },
        ),
        Stage(
            "histogram",
            "histogram",
            "histogram",
            {**pairs, "clusters": 8, "n_is_public": True},
            _TRAINED,
            seeded=True,
        ),
        Stage(
            "adapter",
            "train_adapter",
            "adapter",
            {
                **pairs,
                **dict.fromkeys(("documents", "queries"), "@@/embedded"),
                "encoder_is_public": True,
                "microbatch_size": 16,
                "steps": 8,
                "save_every": 2,
                "accountant": "rdp",
                "n_is_public": True,
            },
            _TRAINED,
            seeded=True,
        ),
        Stage("finetune", "finetune", "generator", generator, _TRAINED, seeded=True),
        Stage(
            "finetune_counted",
            "finetune",
            "generator_counted",
            {**generator, "histogram": "@histogram"},
            _TRAINED,
            seeded=True,
        ),
        Stage(
            "finetune_user",
            "finetune",
            "generator_user",
            {**generator, "unit": "user", "sampler": "poisson"},
            _TRAINED,
            seeded=True,
        ),
        Stage(
            "finetune_unprotected",
            "finetune",
            f"{PRIVATE}/generator_inf",
            {**generator, "epsilon": math.inf},
            _TRAINED,
            seeded=True,
        ),
        Stage(
            "fresh_finetune", "finetune", "generator", generator, _TRAINED, fresh=True
        ),
        Stage(
            "synthesize",
            "synthesize",
            "synthetic",
            {**writing, "generator": "@finetune"},
            _SHARDED,
        ),
        Stage(
            "synthesize_counted",
            "synthesize",
            "synthetic_counted",
            {
                **writing,
                "generator": "@finetune_counted",
                "histogram": "@histogram",
            },
            _SHARDED,
        ),
        Stage(
            "filter",
            "filter",
            "filtered",
            {
                "synthetic": "@synthesize/set",
                "corpus": "@@/pairs",
                "duplicates": True,
                "shards": 2,
            },
        ),
        Stage("mine", "mine", f"{PRIVATE}/mined", {**pairs, "k": 10}),
        Stage(
            "retriever",
            "train_retriever",
            "retriever",
            {**retriever, "pairs": "@synthesize/set"},
        ),
        Stage(
            "retriever_original",
            "train_retriever",
            f"{PRIVATE}/original",
            {**retriever, **pairs, "n_is_public": True},
        ),
        Stage(
            "direct",
            "train_retriever",
            "direct",
            {
                **direct,
                "method": "public_negatives",
                "negatives": 12,
                "refresh_every": 3,
            },
            _TRAINED,
            seeded=True,
        ),
        Stage(
            "fresh_direct",
            "train_retriever",
            "direct",
            {**direct, "method": "microbatch", "clip_groups": 2, "microbatch_size": 32},
            _TRAINED,
            fresh=True,
        ),
        Stage("encode", "encode", "embeddings", embedding, _SHARDED),
        Stage(
            "index",
            "index",
            "index",
            {**embedding, "hybrid": {"weight": 0.3}},
            _SHARDED,
        ),
        Stage(
            "rerank",
            "rerank",
            "reranked",
            {**_LENGTHS, "generator": "@finetune", "corpus": "@@/pairs"},
        ),
        Stage(
            "evaluate",
            "evaluate",
            f"{PRIVATE}/evaluation",
            {
                **data,
                **search,
                "systems": {"bm25": "bm25", "mine": "@retriever"},
                "synthetic": {"eps8": "@synthesize/set"},
                "shard_documents": 30,
            },
            _SHARDED,
        ),
        Stage(
            "zero_shot",
            "zero_shot",
            "zero_shot",
            {
                **search,
                "sets": ("one", "two"),
                "paths": {"one": "@@/public/one", "two": "@@/public/two"},
                "systems": {"bm25": "bm25", "mine": "@retriever"},
            },
        ),
        Stage(
            "overlap",
            "overlap",
            f"{PRIVATE}/overlap",
            {**data, "corpus": ("@@/texts",), "draw_size": 40, "shards": 3},
            _SHARDED,
        ),
        Stage(
            "canaries",
            "canaries",
            f"{PRIVATE}/canaries",
            {
                **data,
                "repetitions": (2,),
                "trials": 1,
                "candidates": 20,
                "digits": 8,
                "coins": 24,
                "seed": 7,
            },
        ),
        Stage(
            "audited",
            "finetune",
            f"{PRIVATE}/audited",
            {**generator, "pairs": "@canaries/data"},
            _TRAINED,
            seeded=True,
        ),
        Stage(
            "audited_synthesize",
            "synthesize",
            f"{PRIVATE}/audited_synthetic",
            {**writing, "generator": "@audited"},
            _SHARDED,
        ),
        Stage(
            "audit",
            "audit",
            f"{PRIVATE}/audit",
            {
                "canaries": "@canaries",
                "generator": "@audited",
                "synthetic": "@audited_synthesize/set",
                "samples_per_document": 1,
                "members": 10,
                "batch_size": 16,
            },
        ),
        Stage(
            "choose",
            "choose",
            "chosen",
            {
                "finetune": {**generator, "strict": True, "steps": 3},
                "axes": (("learning_rate", (1e-3, 3e-2)),),
            },
            _TRAINED,
            fresh=True,
        ),
        Stage(
            "grid",
            "grid",
            "grid",
            {
                **data,
                "pairs": 30,
                "held_out": 20,
                "finetune": {**of_grid, "steps": 3},
                "axes": (("learning_rate", (1e-3, 1e-2)),),
            },
            ("partial", "finished"),
            fresh=True,
        ),
        Stage("convert", "convert", "converted", {"input": "@finetune"}),
        Stage(
            "pipeline",
            "pipeline",
            "work",
            {},
            ("partial",),
            fresh=True,
        ),
    ]


def write_inputs(directory):
    queries = tiny.write_pairs(directory / "pairs")
    tiny.write_embedded(directory / "embedded")
    path = directory / "pairs" / "queries.jsonl"
    records = map(json.loads, path.read_text().splitlines())
    lines = [
        json.dumps({**record, "metadata": {"user_id": f"u{number % 20}"}}) + "\n"
        for number, record in enumerate(records)
    ]
    path.write_text("".join(lines))
    for name in ("one", "two"):
        shutil.copytree(directory / "pairs", directory / "public" / name)
    (directory / "texts").mkdir()
    for part in range(3):
        documents = (directory / "pairs" / "corpus.jsonl").read_text().splitlines()
        texts = [json.loads(line)["text"] for line in documents[part::6]]
        (directory / "texts" / f"{part}.txt").write_text("\n".join(texts) + "\n")
    # The search for private queries needs a list: the public sets are copies of them.
    (directory / "private_queries.json").write_text(json.dumps(queries))
    (directory / "fingerprint.key").write_text(os.urandom(32).hex())


def named(value):
    """Returns the names of the stages that settings refer to."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return sorted({name for held in value for name in named(held)})
    if isinstance(value, str) and re.match("@[^@]", value):
        return [value[1:].partition("/")[0]]
    return []
