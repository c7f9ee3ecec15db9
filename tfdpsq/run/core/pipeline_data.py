"""Checks of a whole job that read its data, before anything is paid for.

As `pipeline_checks` does for settings alone.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterable

import ml_collections

from tfdpsq import privacy, validation, words
from tfdpsq.data import BeirDirectory, Tokenizer
from tfdpsq.generator import Preprocessor, checkpoints
from tfdpsq.privacy.proof import budget
from tfdpsq.retriever import index
from tfdpsq.run.attacks import audit_subject, canary_set, text_scores
from tfdpsq.run.core import layout, pipeline_checks, sources
from tfdpsq.run.devices import strategy
from tfdpsq.run.reporting import similarity
from tfdpsq.run.search import reranking, systems
from tfdpsq.run.training import (
    adapter_training,
    direct_training,
    hard_negatives,
    private_training,
)


def validated(config: ml_collections.ConfigDict) -> BeirDirectory:
    """Opens the data of a job, reads all that it will read, and checks sizes by it.

    Raises:
      InputError: the data lack a split, or are too small for a setting, which it names.
      DataError: the first problem, with file, line, value and remedy.
    """
    beir = sources.open_beir(config.data)
    found = beir.validate(_splits_of(config, beir))
    documents = found.documents - found.empty_documents
    _check_sizes(config, beir, documents)
    return beir


def _splits_of(
    config: ml_collections.ConfigDict, beir: BeirDirectory
) -> tuple[str, ...]:
    """Returns the splits that a job reads, each once."""
    named = {
        f"{stage}.split": config[stage].split
        for stage in ("finetune", "retriever", "direct", "evaluate")
    }
    if config.adapter_epsilons:
        named["adapter.split"] = config.adapter.split
    if config.epsilons and config.synthesize.documents == "train":
        named["synthesize.split"] = config.synthesize.split
    for number, split in enumerate(config.prepare.splits):
        named[f"prepare.splits[{number}]"] = split
    # Examples of a report are of this split, with and without a generator.
    named["evaluate.similarity_split"] = config.evaluate.similarity_split
    if config.epsilons:
        own = config.evaluate.similarity
        named["evaluate.similarity.training_split"] = own.training_split
    for name, split in named.items():
        validation.one_of(name, split, beir.splits())
    return tuple(dict.fromkeys(named.values()))


def check_data(
    config: ml_collections.ConfigDict, devices: strategy.Devices
) -> dict[str, privacy.PrivacyPlan]:
    """Refuses plans that do not fit the pairs, and a featurizer that is not there.

    `devices` are those of the job; plans must fit them, too.

    Returns:
      The plans of all rows, also of those without privacy, by the names of outputs.
    """
    similarity.check_models(config.evaluate.similarity)
    documents = sources.open_beir(config.data).documents()
    if not any(words.words_of(document.content for document in documents)):
        raise validation.InputError(
            f"data is {config.data}, no document of which has a word, and this job "
            "compares its rows with BM25. Give documents of text."
        )
    with pipeline_checks.of_stage("retriever"):
        devices.require_share(config.retriever.batch_size)
    own, epsilons = config.finetune, config.epsilons
    if config.histogram_epsilon:  # these have plans of their own
        epsilons = [epsilon for epsilon in epsilons if math.isinf(epsilon)]
    units, plans = check_generators(config.data, epsilons, own, "finetune", devices)
    if config.histogram_epsilon:
        with pipeline_checks.of_stage("finetune"):
            plans.update(_with_histogram(config, units))
    own = config.direct
    source = sources.load_source(config.data, own.split, own.unit)
    for epsilon in config.direct_epsilons:
        with pipeline_checks.of_stage("direct"):
            units = private_training.Units(source.count, None, True)
            stage = _direct_stage(config, epsilon)
            name = f"retriever_direct_{layout.epsilon_row(epsilon)}"
            plans[name] = direct_training.plan_on(stage, units, devices)
    if config.embeddings:
        plans.update(_check_embeddings(config))
    return plans


def check_generators(
    pairs: str,
    epsilons: Iterable[float],
    own: ml_collections.ConfigDict,
    name: str,
    devices: strategy.Devices,
) -> tuple[private_training.Units, dict[str, privacy.PrivacyPlan]]:
    """Plans generators, and refuses plans that do not fit the pairs or the devices.

    `name` is where the settings of training, `own`, stand, for the errors.

    Returns:
      The units of the pairs, and the plans by the names of outputs.
    """
    plans = {}
    source = sources.load_source(pairs, own.split, own.unit)
    with pipeline_checks.of_stage(name):
        devices.require_share(own.batch_size)
        units = private_training.units_of(source, own.unit, own.user_field)
        for epsilon in epsilons:
            spec = private_training.spec_of(own, units, epsilon=float(epsilon))
            private_training.require_microbatches(own, spec, devices.replicas)
            output = f"generator_{layout.epsilon_name(epsilon)}"
            plans[output] = privacy.make_plan(spec)
    return units, plans


def check_canaries(
    made: pathlib.Path,
    epsilons: Iterable[float],
    own: ml_collections.ConfigDict,
    name: str,
    audit: ml_collections.ConfigDict,
    vocabulary: str,
    devices: strategy.Devices,
) -> None:
    """Refuses training on canaries as they are: their units, and lengths that cut them.

    `made` is what `canaries` wrote; `name` is where the settings of training, `own`,
    stand, for the errors.
    """
    data = made / canary_set.DATA
    pipeline_checks.require_whole_users(name, own, own.unit)
    check_generators(str(data), epsilons, own, name, devices)
    with pipeline_checks.of_stage("audit"):
        audit_subject.members_of(
            sources.open_beir(str(data)),
            own.split,
            audit.other_splits,
            audit.members,
            audit.seed,
        )
    with pipeline_checks.of_stage(name):
        text_scores.require_whole_canaries(
            canary_set.read_canaries(made),
            sources.open_beir(str(data)).documents(),
            Preprocessor(vocabulary, own.prompt, own.document_length, own.query_length),
        )


def _check_embeddings(
    config: ml_collections.ConfigDict,
) -> dict[str, privacy.PrivacyPlan]:
    """Refuses embeddings that lack a text; returns the plans of their adapters."""
    beir, own = sources.open_beir(config.data), config.adapter
    documents, queries = (
        each.places() for each in pipeline_checks.open_embeddings(config)
    )
    with pipeline_checks.of_embeddings(config):
        documents.require_all(beir.documents(), config.data)
        queries.of(beir.qrels(config.evaluate.split))
        if config.adapter_epsilons:
            pairs = sources.load_source(config.data, own.split).read()
            queries.of(pair.query_id for pair in pairs)
    plans = {}
    for epsilon in config.adapter_epsilons:
        with pipeline_checks.of_stage("adapter"):
            name = f"{pipeline_checks.ADAPTER}_{layout.epsilon_row(epsilon)}"
            plans[name] = _adapter_plan(config, epsilon)
    return plans


def _adapter_plan(
    config: ml_collections.ConfigDict, epsilon: float
) -> privacy.PrivacyPlan:
    """Returns the plan of an adapter, as its stage makes it."""
    own = config.adapter.copy_and_resolve_references()
    own.epsilon = epsilon
    source = sources.load_source(config.data, own.split, own.unit)
    units = private_training.units_of(source, own.unit, own.user_field)
    return privacy.make_plan(
        adapter_training.spec_of(adapter_training.resolved(own), units)
    )


def check_fit(config: ml_collections.ConfigDict, public_pairs: str) -> None:
    """Refuses public pairs that no weight of reranking can be fitted on.

    Raises:
      InputError: for none of them BM25 finds its document.
    """
    if not config.fit_rerank:
        return
    corpus = sources.open_beir(config.data)
    try:
        reranking.require_fits(config.evaluate.rerank, public_pairs, corpus)
    except validation.InputError as error:
        raise validation.InputError(
            f"fit_rerank is True, but {error} For this job: set fit_rerank to False."
        ) from error


def check_prepared(
    config: ml_collections.ConfigDict,
    public_pairs: str,
    vocabulary: str,
    private: pathlib.Path,
) -> None:
    """Refuses what does not fit what was prepared, or the key of private fingerprints.

    `private` is the directory that holds the key.

    Raises:
      InputError: T5s of another vocabulary; a batch larger than the public pairs; or
        hard negatives of `direct` that its stage would refuse.
    """
    check_fit(config, public_pairs)
    require_one_vocabulary(config.retriever_init, vocabulary)
    references = config.audit.references if config.audit_epsilons else ()
    for number, path in enumerate(references):
        require_one_vocabulary(path, vocabulary, f"audit.references[{number}]")
    own, count = config.retriever, sources.load_source(public_pairs, "").count
    if (own.steps or own.epochs) and own.batch_size > count:
        raise validation.InputError(
            f"retriever.batch_size is {own.batch_size}, but {count} public pairs were "
            f"made of the documents of {config.data}. Lower it."
        )
    own = config.direct
    if not config.direct_epsilons or not own.hard_negatives.run:
        return
    with pipeline_checks.of_stage("direct"):
        hard_negatives.inputs(own.hard_negatives, config.data, private)
        source = sources.load_source(config.data, own.split, own.unit)
        pairs = sources.source_fingerprint(config.data, private)
        hard_negatives.origin(own.hard_negatives, source, pairs)
        hard_negatives.NegativeTable(own.hard_negatives, source)


def histogram_stage(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """Returns the settings of a job's histogram, as its stage has them.

    Its pairs and its unit are those of the generators, whose ε counts it.
    """
    stage = config.histogram.copy_and_resolve_references()
    stage.pairs, stage.epsilon = config.data, config.histogram_epsilon
    for name in pipeline_checks.OF_HISTOGRAM:
        stage[name] = config.finetune[name]
    return stage


def _with_histogram(
    config: ml_collections.ConfigDict, units: private_training.Units
) -> dict[str, privacy.PrivacyPlan]:
    """Returns the plans of the histogram and of all generators that count it.

    Raises:
      InputError: it would cost too much of one of their ε.
    """
    stage, own = histogram_stage(config), config.finetune
    with pipeline_checks.of_stage("histogram"):
        counting = privacy.make_plan(private_training.counting_spec(stage, units))
    earlier = [budget.Run("the histogram", counting, counting.spec.steps)]
    plans = {f"histogram_{layout.epsilon_name(stage.epsilon)}": counting}
    for epsilon in filter(math.isfinite, config.epsilons):
        spec = private_training.spec_of(own, units, epsilon=float(epsilon))
        name = f"generator_{layout.epsilon_name(epsilon)}"
        plans[name] = budget.plan_within(spec, earlier)
    return plans


def _direct_stage(
    config: ml_collections.ConfigDict, epsilon: float
) -> ml_collections.ConfigDict:
    """Returns the settings of a retriever trained directly, as its stage has them."""
    stage = config.direct.copy_and_resolve_references()
    stage.epsilon, stage.steps = epsilon, config.retriever.steps
    stage.epochs = config.retriever.epochs
    return stage


def _check_sizes(
    config: ml_collections.ConfigDict, beir: BeirDirectory, documents: int
) -> None:
    """Refuses sizes that do not fit the numbers of training pairs and of documents.

    `documents` are those with a text.
    """
    clusters = config.histogram.clusters
    if config.histogram_epsilon and clusters > documents:
        raise validation.InputError(
            f"histogram.clusters is {clusters}, but {config.data} has {documents} "
            "documents. Lower it."
        )
    if config.evaluate.index == systems.TREE:
        index.require_tree("evaluate.index", documents)
    own = config.direct
    drawn = min(own.most_documents, documents)
    negatives = own.negatives if own.method == "public_negatives" else 0
    if config.direct_epsilons and negatives > drawn:
        raise validation.InputError(
            f"direct.negatives is {negatives}, but they are drawn from {drawn} "
            f"documents of {config.data} (direct.most_documents). Take at most as many."
        )
    direct = ("direct",) if config.direct_epsilons else ()
    for stage in ("finetune", "retriever", *direct):
        split = config[stage].split
        n = len(beir.pairs(split))
        if config[stage].batch_size > n:
            raise validation.InputError(
                f"{stage}.batch_size {config[stage].batch_size} is larger than the "
                f"data: split {split!r} of {config.data} has {n} pairs. Lower it."
            )
        delta = config[stage].delta
        if delta and delta >= 1 / n:
            raise validation.InputError(
                f"{stage}.delta is {delta}, but n is {n}: it must be below 1/n = "
                f"{1 / n:.3g}; 1/(2n) = {0.5 / n:.3g} is the default."
            )
    own, batch = config.synthesize, config.retriever.batch_size
    if own.documents == "train":  # declared public
        documents = len({row.document_id for row in beir.positives(own.split)})
    written = min(own.max_documents or documents, documents) * own.samples_per_document
    trains = config.retriever.steps or config.retriever.epochs
    if config.epsilons and trains and batch > written:
        raise validation.InputError(
            f"retriever.batch_size is {batch}, but a synthetic set has at most "
            f"{written} queries, by synthesize.max_documents {own.max_documents}, "
            f"synthesize.samples_per_document {own.samples_per_document} and the "
            f"{documents} documents of {config.data} that they are written for. Lower "
            "it, or raise one of these."
        )


def require_one_vocabulary(
    init: str, ours: str, setting: str = "retriever_init"
) -> None:
    """Refuses a T5 with another vocabulary than the other models of a job.

    `ours` is the SentencePiece file of every other model, and `setting` where `init`
    comes from.
    """
    theirs = checkpoints.vocabulary_in(checkpoints.locate(init)) if init else None
    if theirs is None:
        return
    if Tokenizer(theirs).fingerprint != Tokenizer(ours).fingerprint:
        raise validation.InputError(
            f"{setting} is {init}, whose vocabulary {theirs} differs from that of "
            f"the other models, {ours}. Give T5s of one vocabulary."
        )
