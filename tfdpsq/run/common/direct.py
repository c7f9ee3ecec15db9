"""The retriever's training: directly on private pairs, or by Keras's `fit`.

`tfdpsq.retriever.direct_dp` derives what each private method clips and how far one pair
can move its sum. This module turns its numbers into a plan, and its loss into a run.
Method "plain" is ordinary training: an epoch of Keras is `save_every` steps.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpsq import privacy, retriever
from tfdpsq.data import Pair, Tokenizer
from tfdpsq.generator import pretraining
from tfdpsq.privacy import checkpoint, engines
from tfdpsq.privacy import plan as plans
from tfdpsq.retriever.pairs import encode_rows
from tfdpsq.run.common import corpus, hard_negatives, training
from tfdpsq.run.frame.places import open_private
from tfdpsq.run.frame.runner import Context
from tfdpsq.validation import InputError

PLAIN = "plain"
_MOST_DOCUMENTS = 100_000  # that negatives are drawn from
# Why each method's sensitivity holds for a `unit`.
ARGUMENTS = {
    PLAIN: "None: there is no noise, or less than what is proved to be enough.",
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
_ENGINES = {
    PLAIN: "none: one gradient of the mean loss",
    "naive": "none: each row's gradient is formed and clipped by itself",
    "microbatch": "vectorized",
}


def check(s: Any) -> None:
    """Refuses settings that the method's sensitivity is not derived for."""
    for name, value, derived in (
        ("unit", s.unit, ("query", "pair")),
        ("sampler", s.sampler, ("poisson",)),
        ("bidirectional", s.bidirectional, (False, s.method == "microbatch")),
        ("hard_negatives.run", s.hard_negatives.run, ("",)),
    ):
        own = name == "hard_negatives.run" and s.method == "public_negatives"
        if value not in derived and not own:
            raise InputError(
                f"method is {s.method!r}, whose sensitivity is not derived: {name} is "
                f"{value!r}. Set {name} to {' or '.join(map(repr, derived))}."
            )


# -- With a guarantee ------------------------------------------------------------------


def plan_of(c: Context, s: Any, units: training.Units) -> privacy.PrivacyPlan:
    """Returns the plan of the method: sampler, sensitivity and noise."""
    assert c.devices is not None
    if s.method == PLAIN:
        return privacy.make_plan(training.spec_of(s, units, sampler="shuffled"))
    own: dict[str, Any] = {}
    if s.method == "naive":  # the sensitivity depends on the largest batch
        most = plans.max_batch_size_of(training.spec_of(s, units))
        multiplier: float = retriever.naive_sensitivity_multiplier(most)
        own["max_batch_size"] = most
    elif s.method == "microbatch":
        multiplier = retriever.microbatch_sensitivity_multiplier()
        own["num_microbatches"] = s.num_microbatches
    else:
        multiplier = retriever.public_negatives_sensitivity_multiplier()
    spec = training.spec_of(s, units, sensitivity_multiplier=multiplier, **own)
    plan = privacy.make_plan(spec)
    if s.unsound:  # noise as if the sum moved by batch_size · C
        noise = plan.noise_multiplier * s.batch_size / multiplier
        plan = dataclasses.replace(plan, noise_multiplier=noise)
    if s.method != "naive":  # its rows are dealt one by one, whatever their number
        c.devices.require_share(s.batch_size)
    return plan


def _rows_at_a_time(s: Any, plan: privacy.PrivacyPlan) -> int:
    """Returns the rows differentiated at a time; of "microbatch", whole groups."""
    if s.method != "microbatch":
        return s.microbatch_size
    capacity = plan.group_capacity
    rows = min(max(s.microbatch_size, capacity), plan.max_rows)
    return rows // capacity * capacity


def train(c: Context, planned: Any, model: retriever.TwoTower) -> dict[str, Any]:
    """Trains by the method, as `training.train`, whose result it returns."""
    s, units, plan = planned
    size, tokenizer = _rows_at_a_time(s, plan), training.tokenizer_of(c)
    negatives = hard_negatives.encoder(c, tokenizer)

    def encode(pairs: Sequence[Pair]) -> dict[str, np.ndarray]:
        own = rows_of(pairs, tokenizer, s.query_length, s.document_length)
        return {**own, **negatives(pairs)}

    with c.scope():
        rows = training.stored_rows(c, units.rows.read(), encode)
        # "naive" runs the encoder on each text in every step.
        if model.documents_frozen and s.method != "naive":
            folder = c.place.run / checkpoint.STATE / "frozen"
            rows = retriever.frozen_rows(folder, rows, model)
        if s.method == "public_negatives":
            # Never only of documents that have private queries.
            parts = corpus.scan(str(c.given["pairs"].beir().corpus_file))
            read = parts.cut(parts.count, _MOST_DOCUMENTS).read(0)
            texts = [one.content for one in read]
            documents = retriever.encode_documents(texts, tokenizer, s.document_length)
            loss: Any = retriever.PublicNegatives(
                model, documents, s.negatives, s.seed, s.refresh_every
            )
            options = {"engine": s.engine, "layers": loss.layers}
            options.update(before_step=loss.refresh, state=loss.state)
        elif s.method == "naive":
            size = min(size, plan.max_rows)
            losses = retriever.NaiveLosses(model, size)
            loss = model.per_example_losses
            options = {"engine": naive_engine(losses), "layers": losses.layers}
        else:
            loss = retriever.GroupLosses(model, plan.group_capacity)
            options = {"engine": "vectorized", "layers": loss.layers}
        optimizer = training.make_optimizer(s)
    return training.train(
        c, planned, model, loss, optimizer, rows.take, size, **options
    )


def rows_of(
    pairs: Sequence[Pair], tokenizer: Tokenizer, query_length: int, document_length: int
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


def naive_engine(losses: retriever.NaiveLosses) -> engines.Engine:
    """Returns an engine that clips the gradient of each row's in-batch loss."""

    def clipped(
        plan: privacy.PrivacyPlan, batch: Mapping[str, Any], variables: Sequence[Any]
    ) -> engines.Clipped:
        of_rows, gradient = losses(batch)
        return engines.clipped_row_by_row(
            plan, of_rows, gradient, variables, batch["weights"]
        )

    return clipped


def facts(s: Any, model: retriever.TwoTower) -> dict[str, Any]:
    """Returns the method's facts for the certificate, not the mechanism's."""
    names = "method scale pooling bidirectional false_negatives".split()
    found = {name: getattr(s, name) for name in names}
    found["learned_scale"] = model.config.learned_scale
    frozen = model.documents_frozen
    by = "the starting weights, which stay" if frozen else "weights that are trained"
    found["documents"] = f"embedded by {by}"
    if s.method == "microbatch":
        found["products_of_clipping"] = "as in tensorflow-privacy"
    if s.method != "public_negatives":
        return {**found, "engine": _ENGINES[s.method]}
    drawn = (
        f"the public corpus (at most {_MOST_DOCUMENTS} documents, evenly spread over "
        f"it), uniformly, by a public seed; again every {s.refresh_every} steps"
    )
    return {**found, "negatives": s.negatives, "negatives_drawn_from": drawn}


# -- Without ---------------------------------------------------------------------------


def fit(c: Context, s: Any, model: retriever.TwoTower, units: training.Units) -> None:
    """Trains by Keras for `s.steps` steps, from the last backup if there is one.

    Each replica embeds its share of a batch; every row's softmax is over the documents
    of all. Tokenised pairs and backups are in the run's directory, which is as private
    as they are; the runner removes both. Raises what `training.fit` does.
    """
    assert c.devices is not None
    c.devices.require_share(s.batch_size)
    share = s.batch_size // c.devices.replicas
    if s.rows_at_a_time and share % s.rows_at_a_time:
        raise InputError(
            f"rows_at_a_time is {s.rows_at_a_time}. Give a divisor of the {share} rows "
            "of a replica, or 0 for all."
        )
    backup, tokenizer = training.open_backup(c, s), training.tokenizer_of(c)
    path = c.place.run / "backup" / "rows"
    shutil.rmtree(path, ignore_errors=True)  # made again in each try
    rows = retriever.store_pairs(
        open_private(path),
        units.rows.read(),
        tokenizer,
        negatives=hard_negatives.encoder(c, tokenizer),
        query_length=s.query_length,
        document_length=s.document_length,
    )
    hidden = units.private and s.strict
    most = 0 if hidden else min(len(rows) // 20, len(rows) - s.batch_size)
    count = max(0, min(s.validation_pairs, most))
    held_out = np.linspace(0, len(rows) - 1, count, dtype=np.int64)
    callbacks: list[Any] = [retriever.HitRate(rows.take(held_out))] if count else []
    if not hidden:
        logs = os.fspath(c.place.logs)
        callbacks.append(tf.keras.callbacks.TensorBoard(logs, write_graph=False))
    with c.scope():
        model.compile(
            training.make_optimizer(s),
            rows_at_a_time=s.rows_at_a_time,
            seed=s.seed,
            # In a strategy's scope that is left to the strategy.
            jit_compile=s.jit_compile and not tf.distribute.has_strategy(),
        )
        trained = np.setdiff1d(np.arange(len(rows)), held_out)
        data = _Shuffled(rows, trained, s.batch_size, s.seed)
        dataset = data.dataset(backup.done, s.steps)
        training.fit(c, s, model, dataset, backup, callbacks, not s.strict)


class _Shuffled(pretraining.Batches):
    """Shuffled epochs of the rows to train on."""

    def __init__(self, rows: Any, trained: np.ndarray, size: int, seed: int):
        super().__init__(rows, size, seed)
        self._trained, self._next = trained, -1
        self(0)  # refuses too few pairs at once

    def __call__(self, number: int) -> dict[str, np.ndarray]:
        if number != self._next:
            self._order = retriever.shuffled_batches(
                len(self._trained), self._size, self._seed, number
            )
        self._next = number + 1
        found = self._rows.take(self._trained[next(self._order)])
        return {**found, "weights": np.ones(self._size, np.float32)}
