"""Trains the retriever on private pairs themselves: plan, loss and loop by method.

`tfdpsq.retriever.direct_dp` derives what each method clips and how far one pair can
move its sum. This module turns its numbers into a plan, and its loss into a run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np

from tfdpsq import privacy, retriever, validation
from tfdpsq.data import Tokenizer
from tfdpsq.data.texts import Pair
from tfdpsq.privacy import batches, checkpoint, engines
from tfdpsq.privacy import plan as plans
from tfdpsq.retriever.pairs import encode_rows
from tfdpsq.run.attacks import canary_set
from tfdpsq.run.core import settings, sources, spending
from tfdpsq.run.core.progress import Progress
from tfdpsq.run.devices import strategy
from tfdpsq.run.training import context as contexts
from tfdpsq.run.training import (
    continuing,
    hard_negatives,
    outcomes,
    private_training,
)

# Why each method's sensitivity holds for a `unit`.
ARGUMENTS = {
    "naive": (
        "Each row's gradient is clipped to the clip norm C, but every row's in-batch "
        "softmax reads all rows. Adding or removing one {unit} changes its own row (C) "
        "and can turn every other of at most M - 1 rows around (2C each): (2M - 1)C, "
        "M being the static maximum batch size."
    ),
    "microbatch": (
        "Every row drawn is dealt to a group by a throw of its own, the softmax is "
        "the group's, and the gradient of a group's losses is clipped to C. One {unit} "
        "more changes one group, whose clipped gradient it can turn around: 2C."
    ),
    "public_negatives": (
        "Each row's loss is a softmax over its own document and documents drawn from "
        "the public corpus independently of which rows are drawn, embedded with "
        "weights that earlier steps released, and among hard negatives of its own if "
        "there are any, which follow from its query and public data alone. It reads no "
        "other row, and its gradient is clipped to C: one {unit} moves the sum by at "
        "most C."
    ),
}


def declared() -> dict[str, settings.Setting]:
    """Settings of the methods; each method reads its own.

    `num_microbatches`: groups of a step ("microbatch"). `negatives`, `refresh_every`,
    `most_documents`: public negatives of a step, the steps they are kept for, and the
    number of documents, evenly spread over the corpus, that they are drawn from
    ("public_negatives"). `microbatch_size`: what is in memory at a time, without effect
    on the loss: rows ("public_negatives"), rows of whole groups ("microbatch"), or
    documents and one gradient ("naive").
    """
    return {
        "num_microbatches": settings.Integer(8),
        "negatives": settings.Integer(256),
        "refresh_every": settings.Integer(1, 1, settings.STEPS),
        "most_documents": settings.Integer(100_000),
        "microbatch_size": settings.Integer(32),
    }


def _require_derived(config: ml_collections.ConfigDict) -> None:
    """Refuses settings that the method's sensitivity does not cover."""
    method, mined = config.method, config.hard_negatives.run
    derived_for: dict[str, tuple[Any, ...]] = {
        "unit": ("query", "pair"),
        "sampler": ("poisson",),
    }
    if method != "microbatch":
        derived_for["bidirectional"] = (False,)
    for field, derived in derived_for.items():
        given = config[field]
        if given not in derived:
            raise validation.InputError(
                f"method is {method!r} and {field} is {given!r}, for which its "
                f"sensitivity is not derived. Set {field} to "
                f"{' or '.join(map(repr, derived))}."
            )
    if mined and method != "public_negatives":
        raise validation.InputError(
            f"hard_negatives.run is {mined!r}, but the sensitivity of {method!r} is "
            "derived for in-batch negatives alone. Set it to '', or method to "
            "'public_negatives'."
        )
    hard_negatives.require_unit(mined, config.unit)


def _require_devices(method: str, batch_size: int, devices: strategy.Devices) -> None:
    """Refuses devices that the method cannot use."""
    if method != "naive":  # its rows are dealt one by one, whatever their number
        devices.require_share(batch_size)


def make_plan(
    config: ml_collections.ConfigDict, units: private_training.Units
) -> privacy.PrivacyPlan:
    """Returns the plan of the config's method: sampler, sensitivity and noise.

    Raises:
      InputError: a sampler or unit that the sensitivity is not derived for, or what
        `PrivacySpec` raises.
    """
    _require_derived(config)
    if config.method == "microbatch":
        spec = private_training.spec_of(
            config,
            units,
            num_microbatches=config.num_microbatches,
            sensitivity_multiplier=retriever.microbatch_sensitivity_multiplier(),
        )
        return privacy.make_plan(spec)
    spec = private_training.spec_of(config, units)
    if config.method == "public_negatives":
        multiplier: float = retriever.public_negatives_sensitivity_multiplier()
        return privacy.make_plan(
            dataclasses.replace(spec, sensitivity_multiplier=multiplier)
        )
    # The spec checks its values; the sensitivity depends on the largest batch.
    maximum = plans.max_batch_size_of(spec)
    multiplier = retriever.naive_sensitivity_multiplier(maximum)
    return privacy.make_plan(
        dataclasses.replace(
            spec, max_batch_size=maximum, sensitivity_multiplier=multiplier
        )
    )


def plan_on(
    config: ml_collections.ConfigDict,
    units: private_training.Units,
    devices: strategy.Devices,
) -> privacy.PrivacyPlan:
    """Returns the plan of the config's method, which `devices` can run.

    Raises:
      InputError: what `make_plan` raises, or a batch that replicas cannot share.
    """
    _require_devices(config.method, config.batch_size, devices)
    plan = make_plan(config, units)
    if config.method in ("microbatch", "public_negatives"):
        rows = _rows_at_a_time(config, plan)
        batches.require_microbatches(plan.max_rows, rows, devices.replicas)
    return plan


def _rows_at_a_time(
    config: ml_collections.ConfigDict, plan: privacy.PrivacyPlan
) -> int:
    """Returns the rows differentiated at a time; of "microbatch", whole groups."""
    if config.method != "microbatch":
        return config.microbatch_size
    capacity = plan.group_capacity
    rows = min(max(config.microbatch_size, capacity), plan.max_rows)
    return rows // capacity * capacity


def planned(
    config: ml_collections.ConfigDict,
    context: contexts.Context,
    source: sources.Source,
) -> tuple[private_training.Units, privacy.PrivacyPlan]:
    """Plans training by the config's method, before anything private is shown.

    Returns:
      The units, and the plan.

    Raises:
      InputError: pairs that are not private, invalid settings, weights that cannot be
        continued, or a limit that would be exceeded.
    """
    if not source.private:
        raise validation.InputError(
            f"{source.path} holds no private queries: use method 'plain'."
        )
    devices = context.devices
    _require_derived(config)
    units = private_training.units_of(source, config.unit, config.user_field)
    plan = plan_on(config, units, devices)
    runs = continuing.planned_runs(config, context, plan)
    if devices.chief and not canary_set.holds_canaries(config.pairs):
        spending.require_within(runs)
    return units, plan


def train(
    config: ml_collections.ConfigDict,
    context: contexts.Context,
    model: retriever.TwoTower,
    source: sources.Source,
    progress: Progress,
    units: private_training.Units,
    plan: privacy.PrivacyPlan,
) -> outcomes.Outcome:
    """Trains by the config's method.

    `model` was made in the scope of the context's devices; `progress` is called after
    each step; `units` and `plan` are those of `planned`.

    Raises:
      InputError: invalid settings; always before any budget is spent.
    """
    devices = context.devices
    with devices.scope():
        corpus = None
        if config.method == "public_negatives":
            documents = sources.sampled_documents(source.path, config.most_documents)
            corpus = retriever.encode_documents(
                [document.content for document in documents],
                context.tokenizer,
                config.document_length,
            )
        take = _take(config, context, model, source)
        if corpus is None:
            loss, options = _in_batch_loss(config, model, plan)
        else:
            loss = retriever.PublicNegatives(
                model, corpus, config.negatives, config.seed, config.refresh_every
            )
            options = {
                "microbatch_size": _rows_at_a_time(config, plan),
                "layers": loss.layers,
                "engine": config.engine,
                "before_step": loss.refresh,
                "state": loss.state,
            }
        optimizer = private_training.make_optimizer(config)
    progress.epsilon = plan.epsilon_so_far
    return private_training.train(
        devices,
        model,
        plan,
        loss,
        optimizer,
        take,
        units=units,
        directory=context.run_dir,
        data_fingerprint=context.inputs["pairs"],
        save_every=config.save_every,
        on_step=progress,
        jit_compile=config.jit_compile,
        **options,
    )


def _take(
    config: ml_collections.ConfigDict,
    context: contexts.Context,
    model: retriever.TwoTower,
    source: sources.Source,
) -> Callable[[np.ndarray], Mapping[str, np.ndarray]]:
    """Returns what reads rows by number, from disk."""
    lengths = {
        "query_length": config.query_length,
        "document_length": config.document_length,
    }

    @functools.cache
    def mined() -> Callable[[Sequence[Pair]], Mapping[str, np.ndarray]]:
        return hard_negatives.encoder(
            config.hard_negatives, source, context.tokenizer, config.document_length
        )

    def encode(pairs: Sequence[Pair]) -> dict[str, np.ndarray]:
        return {**rows_of(pairs, context.tokenizer, **lengths), **mined()(pairs)}

    rows = private_training.stored_rows(context.run_dir, source.read(), encode)
    # "naive" runs the encoder on each text in every step.
    if model.documents_frozen and config.method != "naive":
        beside = context.run_dir / checkpoint.STATE / "frozen"
        rows = retriever.frozen_rows(beside, rows, model)
    return rows.take


def rows_of(
    pairs: Sequence[Pair],
    tokenizer: Tokenizer,
    query_length: int,
    document_length: int,
) -> dict[str, np.ndarray]:
    """Returns the arrays of `retriever.encode_pairs`, every row made of its pair alone.

    Every sensitivity here is derived for rows that read no other pair. A query's known
    answers would be read from its other pairs, which are units of their own under unit
    "pair": a pair would then move its siblings' rows, also in steps that did not draw
    it. So no row has any: a pair's siblings are negatives like other documents.
    """
    arrays = encode_rows(
        pairs, tokenizer, query_length=query_length, document_length=document_length
    )
    arrays["positive_keys"] = np.full([len(pairs), 1], -1, np.int64)
    return arrays


def _in_batch_loss(
    config: ml_collections.ConfigDict,
    model: retriever.TwoTower,
    plan: privacy.PrivacyPlan,
) -> tuple[Any, dict[str, Any]]:
    """Returns the loss of a method whose rows are each other's negatives.

    Returns:
      The loss, and further arguments for `privacy.train`.
    """
    if config.method == "naive":
        texts = min(config.microbatch_size, plan.max_rows)
        losses = retriever.NaiveLosses(model, texts)
        options = {"engine": naive_engine(losses), "microbatch_size": texts}
        return model.per_example_losses, {**options, "layers": losses.layers}
    loss = retriever.GroupLosses(model, plan.group_capacity)
    rows = _rows_at_a_time(config, plan)
    options = {"engine": "vectorized", "microbatch_size": rows}
    return loss, {**options, "layers": loss.layers}


def naive_engine(losses: retriever.NaiveLosses) -> engines.Engine:
    """Returns an engine that clips the gradient of each row's in-batch loss."""

    def clipped(
        plan: privacy.PrivacyPlan,
        batch: Mapping[str, Any],
        variables: Sequence[Any],
    ) -> engines.Clipped:
        of_rows, gradient = losses(batch)
        return engines.clipped_row_by_row(
            plan, of_rows, gradient, variables, batch["weights"]
        )

    return clipped


def facts(
    config: ml_collections.ConfigDict, model: retriever.TwoTower
) -> dict[str, Any]:
    """Returns the method's facts for the certificate, not the mechanism's."""
    found: dict[str, Any] = {
        name: config[name]
        for name in (
            "method",
            "scale",
            "learned_scale",
            "pooling",
            "bidirectional",
            "false_negatives",
        )
    }
    found["documents"] = (
        "embedded by the starting weights, which stay"
        if model.documents_frozen
        else "embedded by weights that are trained"
    )
    if config.method == "naive":
        found["engine"] = "none: each row's gradient is formed and clipped by itself"
    if config.method == "microbatch":
        found["engine"] = "vectorized"
        found["products_of_clipping"] = "as in tensorflow-privacy"
    if config.method != "public_negatives":
        return found
    found["negatives"] = config.negatives
    found["negatives_drawn_from"] = (
        f"the public corpus (at most {config.most_documents} documents, evenly spread "
        "over it), uniformly, by a public seed; again every "
        f"{config.refresh_every} steps"
    )
    return found
