"""Checks of a whole job, before its first stage.

A stage refuses its own settings before it spends anything, but the stages before it
have been paid for by then, and a workdir takes no other config: what is corrected is
paid for again. So all that depends on the settings and the data alone is refused here.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import ml_collections

from tfdpsq import privacy, validation
from tfdpsq.data import BeirDirectory, Tokenizer
from tfdpsq.evaluation.ranking.bm25 import words
from tfdpsq.generator import checkpoints
from tfdpsq.privacy.proof import budget
from tfdpsq.run.core import acting, layout, sources
from tfdpsq.run.passes import given_embeddings
from tfdpsq.run.reporting import similarity
from tfdpsq.run.search import adapted, hybrid, reranking, systems
from tfdpsq.run.training import (
    adapter_training,
    direct_training,
    private_training,
    training_settings,
)

# In names of a job's rows.
RERANKED, PUBLIC_ONLY, ENCODER, ADAPTER = (
    "reranked",
    "public_only",
    "encoder",
    "adapter",
)
_MADE = "this job's"


def check_settings(config: ml_collections.ConfigDict) -> None:
    """Refuses settings that a later stage would refuse; the error names the setting."""
    if config.strict:
        raise validation.InputError(
            "strict is True, but this job measures every row of its table on private "
            "queries, which no epsilon covers. Run the stages finetune and synthesize "
            "by themselves with --config.strict=True, or leave strict False."
        )
    for init in (config.init, config.retriever_init):
        sources.require_public(
            init,
            sources.certificate_of_model(init),
            "rows that are called public would start from it",
        )
    for name in ("epsilons", "direct_epsilons", "audit_epsilons", "adapter_epsilons"):
        _check_epsilons(name, config[name])
    if config.histogram_epsilon and config.synthesize.documents != "corpus":
        raise validation.InputError(
            f"histogram_epsilon is {config.histogram_epsilon}, which does nothing "
            f"here: synthesize.documents is {config.synthesize.documents!r}. Set one "
            "to 0, or the other to 'corpus'."
        )
    if config.histogram_epsilon and not any(map(math.isfinite, config.epsilons)):
        raise validation.InputError(
            f"histogram_epsilon is {config.histogram_epsilon}, but no generator of "
            f"epsilons {config.epsilons} would count it. Add a finite epsilon, or set "
            "histogram_epsilon to 0."
        )
    _check_retrievers(config)
    for name in ("finetune", "retriever"):
        with _of_stage(name):
            private_training.check_steps(config[name], trains=name == "finetune")
    if config.audit_epsilons:
        _check_audit(config)
    if config.embeddings:
        _open_embeddings(config)
    if config.adapter_epsilons:
        _check_adapter(config)
    with _of_stage("evaluate"):
        own = _with_rows(config)
        systems.check_search(own.systems, own.k, layout.METRICS)
        hybrid.check(own)
        hybrid.inputs(own.fusion)
        reranking.check(own)
        adapted.check(own)
    if own.rerankers and config.init and not config.pretrain.steps:
        # It orders documents itself, with the prompt that generators are trained with.
        sources.require_prompt(
            "finetune.prompt",
            config.finetune.prompt,
            checkpoints.locate(config.init),
            ", or set rerank to False",
        )
    for name, path in config.evaluate.indexes.items():
        if path:
            raise validation.InputError(
                f"evaluate.indexes.{name} is {path!r}, but this job evaluates "
                "retrievers that it has yet to train. Leave it out."
            )
    reading = {"audit": config.audit_epsilons, "mine": mines(config)}
    for name in ("evaluate", *(name for name, runs in reading.items() if runs)):
        if config[name].strict:
            raise validation.InputError(
                f"{name}.strict is True, but all that the stage does is read private "
                "queries, which no epsilon covers. Set it to False."
            )


def require_acting(
    config: ml_collections.ConfigDict,
    declaration: Any,
    filled: Mapping[str, str],
    rules: Mapping[str, Sequence[acting.Only]],
) -> None:
    """Refuses settings of the stages that would have no effect in a job.

    Args:
      config: of the job.
      declaration: of the same.
      filled: stage -> dotted names of what the job fills in, separated by spaces.
      rules: stage -> its settings that depend on others.

    Raises:
      InputError: names the setting.
    """
    if not sources.is_log(config.data):
        for name, default in acting.defaults(declaration["log"]):
            value = acting.value_at(config.log, name)
            if value != default and name not in filled["log"].split():
                raise validation.InputError(
                    f"log.{name} is {validation.shown(value)}, which does nothing "
                    f"here: data is {config.data}, not a log. Leave it at "
                    f"{validation.shown(default)}."
                )
    rerankers = rerankers_of(config)
    if config.fit_rerank and not rerankers:
        raise validation.InputError(
            "fit_rerank is True, which does nothing here: no generator orders "
            f"documents, as rerank is {config.rerank}, epsilons {config.epsilons} and "
            f"init {config.init!r}. Leave it False, or set one of these."
        )
    for name, own in rules.items():
        stage = config[name].copy_and_resolve_references()
        acting.require_unfilled(
            stage, declaration[name], filled[name].split(), name, "this job"
        )
        with stage.unlocked():  # as the stage will see it
            if "init" in stage:
                pretrained = config.pretrain.steps and name != "pretrain"
                stage.init = config.init or ("pretrained" if pretrained else "")
            if name == "evaluate" and rerankers:
                stage.rerankers = dict.fromkeys(rerankers, "of the job")
                if config.fit_rerank:
                    stage.rerank.fit = "of the job"
            if name == "adapter" and mines(config):
                stage.hard_negatives.run = "of the job"
        acting.require_acting(stage, declaration[name], own, name)
    for name in ("steps", "epochs"):
        default = declaration["direct"][name].default
        given, used = config.direct[name], config.retriever[name]
        if given not in (default, used):
            raise validation.InputError(
                f"direct.{name} is {given}, which does nothing here: all rows are "
                f"trained for retriever.{name}, {used}. Leave it at {default}."
            )


def _with_rows(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """Returns the settings of `evaluate` with the names of all rows that a job makes.

    What is no setting yet, such as the directories of the rows, is "this job's".
    """
    own, name = config.evaluate.copy_and_resolve_references(), layout.epsilon_row
    made = ["untrained", PUBLIC_ONLY, "original"]
    made += [f"synthetic_{name(epsilon)}" for epsilon in config.epsilons]
    made += [f"direct_{name(epsilon)}" for epsilon in config.direct_epsilons]
    with own.unlocked():
        own.systems = {systems.BM25: systems.BM25, **dict.fromkeys(made, _MADE)}
        own.rerankers = dict.fromkeys(rerankers_of(config), _MADE)
        given = adapted_rows(config)
        own.query_embeddings = dict.fromkeys(given, config.embeddings)
        own.systems.update(own.query_embeddings)
    return own


def adapted_rows(config: ml_collections.ConfigDict) -> list[str]:
    """Returns the names of the rows of embeddings that exist, as they are first."""
    if not config.embeddings:
        return []
    return [
        ENCODER,
        *(f"{ADAPTER}_{layout.epsilon_row(each)}" for each in config.adapter_epsilons),
    ]


def mines(config: ml_collections.ConfigDict) -> bool:
    """Returns whether a job mines hard negatives for its adapters.

    Single pairs of a query can have none; see `hard_negatives.require_unit`.
    """
    return bool(config.adapter_epsilons) and config.adapter.unit != "pair"


def rerankers_of(config: ml_collections.ConfigDict) -> list[str]:
    """Returns the names of the rows in which a generator of a job orders documents."""
    if not config.rerank:
        return []
    ordering = [layout.epsilon_row(epsilon) for epsilon in config.epsilons]
    if config.init or config.pretrain.steps:
        ordering.append(PUBLIC_ONLY)
    return [f"{RERANKED}_{each}" for each in ordering]


def reranking_settings(
    config: ml_collections.ConfigDict, public_pairs: str, names: Collection[str]
) -> dict[str, Any]:
    """Returns the settings of reranking: what generators were trained with.

    `public_pairs` is the set that a weight is fitted on, if it is; `names` are the rows
    that are measured.
    """
    own = config.evaluate.rerank.to_dict()
    if not names:
        return own
    for name in ("prompt", "document_length", "query_length"):
        own[name] = config.finetune[name]
    if config.fit_rerank:
        own["fit"] = public_pairs
    baseline = f"{RERANKED}_{PUBLIC_ONLY}"
    return {**own, "baseline": baseline if baseline in names else ""}


def _check_adapter(config: ml_collections.ConfigDict) -> None:
    """Refuses settings of adapters that do not fit those of other stages."""
    skipped, kept = config.adapter.hard_negatives.skip, config.mine.k
    if mines(config) and skipped >= kept - 1:
        raise validation.InputError(
            f"adapter.hard_negatives.skip is {skipped} and mine.k {kept}: of a query's "
            f"{kept} documents, its answer among them, none would be left. Raise "
            "mine.k, or lower the other."
        )
    if config.adapter.split == config.evaluate.split:
        raise validation.InputError(
            f"adapter.split and evaluate.split are both {config.evaluate.split!r}: "
            "adapters would be measured on what they were trained on. Name two splits."
        )


def _open_embeddings(
    config: ml_collections.ConfigDict,
) -> tuple[given_embeddings.Embeddings, given_embeddings.Embeddings]:
    """Opens the embeddings of a job, unread."""
    # Without an adapter all that is made of them is measured, and stays private.
    public = config.adapter.encoder_is_public or not config.adapter_epsilons
    with _of_embeddings(config):
        return given_embeddings.open_both(config.embeddings, config.embeddings, public)


@contextlib.contextmanager
def _of_embeddings(config: ml_collections.ConfigDict) -> Iterator[None]:
    """Names the setting in the errors that the block raises about embeddings."""
    try:
        yield
    except validation.DataError:
        raise
    except validation.InputError as error:
        raise validation.InputError(
            f"in embeddings, of the pairs in {config.data}: {error}"
        ) from error


def _check_epsilons(name: str, values: Sequence[float]) -> None:
    """Refuses an ε that training would refuse, and two that have one directory."""
    taken: dict[str, float] = {}
    declared = training_settings.privacy_settings()["epsilon"]
    for number, epsilon in enumerate(values):
        declared.check(f"{name}[{number}]", epsilon)
        other = taken.setdefault(f"{float(epsilon):g}", epsilon)
        if len(taken) <= number:
            raise validation.InputError(
                f"{name}[{number}] is {epsilon}, whose directory is that of {other}. "
                "Leave one of them out."
            )


def _check_retrievers(config: ml_collections.ConfigDict) -> None:
    """Refuses settings of `retriever` that one of its rows cannot have."""
    own = config.retriever
    fixed = {"method": "plain", "epsilon": math.inf, "n_is_public": True}
    for field, value in fixed.items():
        given = float(own[field]) if field == "epsilon" else own[field]
        if given != value:
            raise validation.InputError(
                f"retriever.{field} is {own[field]!r}, but these rows are trained "
                "without protection, on private pairs too, whose exact number the "
                f"certificate states. Set it to {'inf' if value == math.inf else value}"
                "; the settings of protected rows are those of `direct`."
            )
    run, method = own.hard_negatives.run, config.direct.method
    if run:
        raise validation.InputError(
            f"retriever.hard_negatives.run is {run!r}, but these rows have different "
            "pairs, and a run is for one of them. Leave it out, or train by the stage "
            "train_retriever."
        )
    run = config.direct.hard_negatives.run
    if run and config.direct_epsilons and method != "public_negatives":
        raise validation.InputError(
            f"direct.hard_negatives.run is {run!r}, which needs direct.method "
            f"'public_negatives', but that is {method!r}. Set one of them."
        )


def _check_audit(config: ml_collections.ConfigDict) -> None:
    """Refuses settings of the audit that do not fit those of its training."""
    for path in config.audit.references:
        checkpoints.locate(path)
    if not (config.audit.references or config.init or config.pretrain.steps):
        raise validation.InputError(
            "init is '' and pretrain.steps 0: random weights are no reference for an "
            "audit's scores. Set audit.references to generators that saw no private "
            "query, or audit_epsilons to ()."
        )
    if config.canaries.split != config.finetune.split:
        raise validation.InputError(
            f"canaries.split is {config.canaries.split!r} and finetune.split "
            f"{config.finetune.split!r}: no canary would be trained on. Name one split."
        )


def splits_of(
    config: ml_collections.ConfigDict, beir: BeirDirectory
) -> tuple[str, ...]:
    """Returns the splits that a job reads, each once.

    Raises:
      InputError: the data lack one; names the setting.
    """
    named = {
        f"{stage}.split": config[stage].split
        for stage in ("finetune", "retriever", "direct", "evaluate")
    }
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


def check_data(config: ml_collections.ConfigDict) -> None:
    """Refuses plans that do not fit the pairs, and a featurizer that is not there.

    Raises:
      InputError: names the setting.
    """
    similarity.check_models(config.evaluate.similarity)
    documents = sources.open_beir(config.data).documents()
    if not any(words(document.content) for document in documents):
        raise validation.InputError(
            f"data is {config.data}, no document of which has a word of two letters or "
            "digits, as BM25 counts them, and this job compares its rows with BM25. "
            "Write words apart, with spaces."
        )
    own = config.finetune
    source = sources.load_source(config.data, own.split, own.unit)
    with _of_stage("finetune"):
        units = private_training.units_of(source, own.unit, own.user_field)
        for epsilon in {*config.epsilons, *config.audit_epsilons}:
            private_training.spec_of(own, units, epsilon=float(epsilon))
        if config.histogram_epsilon:
            _with_histogram(config, units)
    if config.audit_epsilons and not config.finetune.n_is_public:
        made = config.canaries
        added = len(made.forms) * sum(made.repetitions) * made.trials + made.coins
        with _of_stage("finetune"):
            private_training.declared_n(
                units.count + added, own.n_is_public, own.n_bound, own.unit
            )
    own = config.direct
    source = sources.load_source(config.data, own.split, own.unit)
    for epsilon in config.direct_epsilons:
        with _of_stage("direct"):
            units = private_training.Units(source.count, None, True)
            direct_training.make_plan(_direct_stage(config, epsilon), units)
    if config.embeddings:
        _check_embeddings(config)


def _check_embeddings(config: ml_collections.ConfigDict) -> None:
    """Refuses embeddings that lack a text, and plans that do not fit the pairs."""
    beir, own = sources.open_beir(config.data), config.adapter
    documents, queries = (each.places() for each in _open_embeddings(config))
    with _of_embeddings(config):
        documents.require_all(beir.documents(), config.data)
        queries.of(beir.qrels(config.evaluate.split))
        if config.adapter_epsilons:
            pairs = sources.load_source(config.data, own.split).read()
            queries.of(pair.query_id for pair in pairs)
    for epsilon in config.adapter_epsilons:
        with _of_stage("adapter"):
            _adapter_plan(config, epsilon)


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


def plans_of(
    config: ml_collections.ConfigDict,
) -> dict[str, privacy.PrivacyPlan]:
    """Returns the plans of all runs that a job releases, by the names of outputs."""
    own, plans = config.finetune, {}
    source = sources.load_source(config.data, own.split, own.unit)
    units = private_training.units_of(source, own.unit, own.user_field)
    if config.histogram_epsilon:
        plans.update(_with_histogram(config, units))
    else:
        for epsilon in filter(math.isfinite, config.epsilons):
            spec = private_training.spec_of(own, units, epsilon=float(epsilon))
            name = f"generator_{layout.epsilon_name(epsilon)}"
            plans[name] = privacy.make_plan(spec)
    own = config.direct
    source = sources.load_source(config.data, own.split, own.unit)
    units = private_training.Units(source.count, None, True)
    for epsilon in filter(math.isfinite, config.direct_epsilons):
        name = f"retriever_direct_{layout.epsilon_row(epsilon)}"
        stage = _direct_stage(config, epsilon)
        plans[name] = direct_training.make_plan(stage, units)
    for epsilon in filter(math.isfinite, config.adapter_epsilons):
        name = f"{ADAPTER}_{layout.epsilon_row(epsilon)}"
        plans[name] = _adapter_plan(config, epsilon)
    return plans


def histogram_stage(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """Returns the settings of a job's histogram, as its stage has them.

    Its pairs and its unit are those of the generators, whose ε counts it.
    """
    stage = config.histogram.copy_and_resolve_references()
    stage.pairs, stage.epsilon = config.data, config.histogram_epsilon
    for name in ("split", "unit", "user_field", "n_is_public", "n_bound"):
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
    with _of_stage("histogram"):
        counting = privacy.make_plan(private_training.counting_spec(stage, units))
    earlier = {"the histogram": budget.planned_release({"histogram": counting}, "")}
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


@contextlib.contextmanager
def _of_stage(name: str) -> Iterator[None]:
    """Names the stage in the errors that the block raises about its settings."""
    try:
        yield
    except validation.DataError:
        raise
    except validation.InputError as error:
        raise validation.InputError(f"in the settings of `{name}`: {error}") from error


def check_sizes(config: ml_collections.ConfigDict, n: int) -> None:
    """Refuses batch sizes and δ that do not fit the number `n` of training pairs."""
    direct = ("direct",) if config.direct_epsilons else ()
    for stage in ("finetune", "retriever", *direct):
        if config[stage].batch_size > n:
            raise validation.InputError(
                f"{stage}.batch_size {config[stage].batch_size} is larger than the "
                f"data: split 'train' of {config.data} has {n} pairs. Lower it."
            )
        delta = config[stage].delta
        if delta and delta >= 1 / n:
            raise validation.InputError(
                f"{stage}.delta is {delta}, but n is {n}: it must be below 1/n = "
                f"{1 / n:.3g}; 1/(2n) = {0.5 / n:.3g} is the default."
            )


def require_one_vocabulary(
    init: str, ours: str, setting: str = "retriever_init"
) -> None:
    """Refuses a T5 with another vocabulary than the other models of a job.

    `ours` is the SentencePiece file of every other model, and `setting` where `init`
    comes from.

    Raises:
      InputError: the two vocabularies differ.
    """
    theirs = checkpoints.vocabulary_in(checkpoints.locate(init)) if init else None
    if theirs is None:
        return
    if Tokenizer(theirs).fingerprint != Tokenizer(ours).fingerprint:
        raise validation.InputError(
            f"{setting} is {init}, whose vocabulary {theirs} differs from that of "
            f"the other models, {ours}. Give T5s of one vocabulary."
        )
