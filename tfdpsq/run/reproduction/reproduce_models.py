"""The T5s that the paper's sizes start from, checked before the first stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ml_collections

from tfdpsq import validation
from tfdpsq.data import Tokenizer
from tfdpsq.generator import checkpoints
from tfdpsq.run.core import pipeline_data, sources
from tfdpsq.run.reproduction import reproduce_rows
from tfdpsq.run.search import benchmark_sets


def start_of(config: ml_collections.ConfigDict, size: str) -> str:
    """Returns the T5 that a size starts from; "" where none is given."""
    return config.sizes[size].get("init", "") or config.job.init


def check(config: ml_collections.ConfigDict, sizes: Sequence[str]) -> str:
    """Refuses T5s that are missing, private, damaged or of different vocabularies.

    `sizes` are the names of those that the tables need, besides the retriever's.

    Returns:
      The vocabulary of all of them.

    Raises:
      InputError: names the size and the setting.
      DataError: a damaged checkpoint.
    """
    for size in config.sizes:
        benchmark_sets.check_file_name("a size", size)
    vocabulary = ""
    for size in (config.retriever_size, *sizes):
        init = start_of(config, size)
        if not init:
            raise validation.InputError(
                f"sizes.{size}.init and job.init are '': there is no T5 of this size. "
                f"Give a checkpoint's directory as --config.sizes.{size}.init."
            )
        sources.require_public(
            init,
            sources.certificate_of_model(init),
            "rows that are called public would start from it",
        )
        opened = checkpoints.open_checkpoint(init)
        vocabulary = vocabulary or str(sources.vocabulary_file("", init))
        pipeline_data.require_one_vocabulary(init, vocabulary, f"sizes.{size}.init")
        Tokenizer(vocabulary).require_embeddings(opened.config.vocabulary_size, True)
    return vocabulary


def whole_job(
    config: ml_collections.ConfigDict,
    of_measure: Mapping[str, Sequence[reproduce_rows.Row]],
    data: str,
) -> ml_collections.ConfigDict:
    """Returns the job of `pipeline` that has all the rows."""

    def epsilons(rows: Sequence[reproduce_rows.Row], kind: str) -> tuple[float, ...]:
        return tuple(sorted({r.epsilon for r in rows if r.kind == kind and r.epsilon}))

    job = config.job.copy_and_resolve_references()
    rows = [row for rows in of_measure.values() for row in rows]
    job.data = data
    job.init = start_of(config, config.retriever_size)
    job.epsilons = epsilons(rows, "synthetic")
    job.direct_epsilons = epsilons(rows, "direct")
    job.audit_epsilons = epsilons(of_measure.get("canaries", ()), "synthetic")
    return job


def used_by(config: ml_collections.ConfigDict) -> dict[str, tuple[str, ...]]:
    """Returns the config's parts, and the outputs of each, as `used_parts.Parts`."""
    trained = "generator_", "audited_", "retriever_"
    measured = "synthetic", "_retrieval_", "_text_", "zero_shot"
    found: dict[str, tuple[str, ...]] = {
        "audit": ("audited_",),
        "zero_shot": ("zero_shot",),
        "tables": (),
        "resamples": (),
        "job.prepare": ("prepare",),
        "job.pretrain": ("t5_", *trained, *measured),
        "job.finetune": ("generator_", "audited_"),
        "job.synthesize": ("synthetic",),
        "job.retriever": ("retriever_",),
        "job.direct": ("retriever_direct-",),
        "job.evaluate": ("_retrieval_", "_text_"),
        "job.canaries": ("canaries", "audited_"),
        "job.audit": ("_audit",),
    }
    for size in config.sizes:
        made: tuple[str, ...] = f"generator_{size}_", f"audited_{size}_"
        found[f"sizes.{size}.finetune"] = made
        if size == config.retriever_size:  # the vocabulary of all is its own
            made = (*trained, *measured)
        found[f"sizes.{size}"] = (f"t5_{size}", *made)  # one that is new
        found[f"sizes.{size}.init"] = found[f"sizes.{size}"]
    return found


def of_size(config: ml_collections.ConfigDict, size: str) -> ml_collections.ConfigDict:
    """Returns the settings of a size's training."""
    stage = config.job.finetune.copy_and_resolve_references()
    stage.update(config.sizes[size].to_dict().get("finetune", {}))
    return stage


def zero_shot_stage(
    config: ml_collections.ConfigDict,
    sets: Mapping[str, str],
    retrievers: Mapping[str, str],
) -> ml_collections.ConfigDict:
    """Returns the settings of `zero_shot` for some retrievers."""
    stage = config.zero_shot.copy_and_resolve_references()
    with stage.unlocked():
        stage.systems = dict(retrievers)
        if sets:
            stage.sets = tuple(sets)
            stage.paths = dict(sets)
            # No split was trained on; this is the largest.
            stage.splits = {name: "train" for name in sets}
    return stage
