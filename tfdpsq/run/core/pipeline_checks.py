"""Checks of a whole job's settings, before its first stage.

A stage refuses its own settings before it spends anything, but the stages before it
have been paid for by then. They are kept: a workdir takes another setting for stages
that have not begun (`USED_BY`; see `used_parts`). An error at once is better.
So all that depends on the settings alone is refused here, and all that depends on the
data, too, in `pipeline_data`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import ml_collections

from tfdpsq import validation
from tfdpsq.generator import checkpoints
from tfdpsq.run.core import acting, layout, sources
from tfdpsq.run.passes import corpus_shards, given_embeddings
from tfdpsq.run.search import adapted, hybrid, reranking, systems
from tfdpsq.run.training import private_training, training_settings

# In names of a job's rows.
RERANKED, PUBLIC_ONLY, ENCODER, ADAPTER = (
    "reranked",
    "public_only",
    "encoder",
    "adapter",
)
_MADE = "this job's"
_TRAINED = ("histogram_", "generator_", "audited_", "retriever_", "adapter_")
# Settings of generators that the histogram of their pairs has, too.
OF_HISTOGRAM = ("split", "unit", "user_field", "n_is_public", "n_bound")
# Parts of a job's config, and what the names of outputs made with each have in common.
USED_BY = {
    "log": (layout.IMPORTED, *_TRAINED),
    "prepare": ("prepare", *_TRAINED),
    "pretrain": ("public_model", *_TRAINED),
    "histogram": ("histogram_", "generator_"),
    "finetune": ("generator_", "audited_"),
    **{
        f"finetune.{name}": ("histogram_", "generator_", "audited_")
        for name in OF_HISTOGRAM
    },
    "synthesize": ("synthetic_",),
    "retriever": ("retriever_",),
    "direct": ("retriever_direct_",),
    "mine": ("mined", "adapter_"),
    "adapter": ("adapter_",),
    "canaries": ("canaries", "audited_"),
    "evaluate": ("evaluation",),
    "rerank": ("evaluation",),
    "fit_rerank": ("evaluation",),
    "audit": ("audit_",),
}


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
    if config.epsilons or config.audit_epsilons:
        corpus_shards.require_declared(config.synthesize, "synthesize.")
    _check_retrievers(config)
    for name in ("finetune", "retriever"):
        with of_stage(name):
            private_training.check_steps(config[name], trains=name == "finetune")
    require_whole_users("finetune", config.finetune, config.finetune.unit)
    if config.histogram_epsilon:
        require_whole_users("histogram", config.histogram, config.finetune.unit)
    if config.adapter_epsilons:
        require_whole_users("adapter", config.adapter, config.adapter.unit)
    if config.audit_epsilons:
        _check_audit(config)
    if config.embeddings:
        open_embeddings(config)
    if config.adapter_epsilons:
        _check_adapter(config)
    with of_stage("evaluate"):
        own = _with_rows(config)
        systems.check_search(own.systems, own.k, layout.METRICS)
        hybrid.check(own)
        hybrid.inputs(own.fusion)
        reranking.check(own)
        adapted.check(own)
    if config.fit_rerank and own.rerank.base in own.query_embeddings:
        raise validation.InputError(
            f"fit_rerank is True and evaluate.rerank.base {own.rerank.base!r}: queries "
            "to fit a weight on have no embeddings. Set fit_rerank to False, or the "
            "other to 'bm25'."
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

    `filled` maps a stage to the dotted names of what the job fills in, separated by
    spaces; `rules` maps it to its settings that depend on others.
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
        given = filled[name].split()
        if "private_directory" in declaration[name]:  # all stages share the job's
            given.append("private_directory")
        acting.require_unfilled(stage, declaration[name], given, name, "this job")
        with stage.unlocked():  # as the stage will see it
            if "init" in stage:
                pretrained = config.pretrain.steps and name != "pretrain"
                stage.init = config.init or ("pretrained" if pretrained else "")
            if name == "evaluate" and rerankers:
                stage.rerankers = dict.fromkeys(rerankers, "of the job")
                if config.fit_rerank:
                    stage.rerank.fit = "of the job"
            if name == "histogram":
                stage.unit = config.finetune.unit
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

    What is not a setting yet, such as the directories of the rows, is "this job's".
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
    """Returns the settings of reranking in a job.

    `public_pairs` is the set that a weight is fitted on, if it is; `names` are the rows
    that are measured.
    """
    own = config.evaluate.rerank.to_dict()
    if not names:
        return own
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


def open_embeddings(
    config: ml_collections.ConfigDict,
) -> tuple[given_embeddings.Embeddings, given_embeddings.Embeddings]:
    """Opens the embeddings of a job, unread."""
    public = config.adapter.encoder_is_public
    with of_embeddings(config):
        return given_embeddings.open_both(config.embeddings, config.embeddings, public)


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
    if own.unit == "user":
        raise validation.InputError(
            "retriever.unit is 'user', but these rows are trained without protection. "
            "Set it to 'query' or 'pair'."
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


def require_whole_users(name: str, own: ml_collections.ConfigDict, unit: str) -> None:
    """Refuses microbatches that would part the rows of a user, clipped together.

    `own` are the settings of the stage `name`.
    """
    size, rows = own.microbatch_size, own.rows_per_unit
    if unit == "user" and size % rows:
        raise validation.InputError(
            f"{name}.microbatch_size is {size}, which parts the {rows} rows of a "
            f"user ({name}.rows_per_unit). Make it a multiple of them."
        )


def _check_audit(config: ml_collections.ConfigDict) -> None:
    """Refuses settings of the audit that do not fit those of its training."""
    if not config.canaries.trials and not config.canaries.coins:
        raise validation.InputError(
            "canaries.trials and canaries.coins are 0, so that an audit has no canary "
            "to look for. Raise one, or set audit_epsilons to ()."
        )
    for path in config.audit.references:
        with of_stage("audit"):
            checkpoints.open_checkpoint(path)
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


@contextlib.contextmanager
def of_stage(name: str) -> Iterator[None]:
    """Names the stage in the errors that the block raises about its settings."""
    try:
        yield
    except validation.DataError:
        raise
    except validation.InputError as error:
        raise validation.InputError(f"in the settings of `{name}`: {error}") from error


@contextlib.contextmanager
def of_embeddings(config: ml_collections.ConfigDict) -> Iterator[None]:
    """Names the setting in the errors that the block raises about embeddings."""
    try:
        yield
    except validation.DataError:
        raise
    except validation.InputError as error:
        raise validation.InputError(
            f"in embeddings, of the pairs in {config.data}: {error}"
        ) from error
