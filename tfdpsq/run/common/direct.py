"""The retriever's training: directly on private pairs, or by Keras's `fit`.

`tfdpsq.retriever.direct_dp` derives what each private method clips and how far one pair
can move its sum. This module turns its numbers into a plan, and its loss into a run.
Method "plain" is ordinary training: an epoch of Keras is `save_every` steps, after
which the state is backed up and held-out pairs are searched for.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpsq import privacy, retriever
from tfdpsq.data import Pair, Tokenizer
from tfdpsq.privacy import batches, checkpoint, engines, optimizers
from tfdpsq.privacy import plan as plans
from tfdpsq.retriever.pairs import encode_rows
from tfdpsq.run.common import hard_negatives, training
from tfdpsq.run.frame import corpus
from tfdpsq.run.frame.places import open_private
from tfdpsq.run.frame.progress import Progress
from tfdpsq.run.frame.runner import Context
from tfdpsq.validation import InputError

PLAIN = "plain"
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


def check(s: Any) -> None:
    """Refuses settings that the method's sensitivity does not cover."""
    derived: dict[str, tuple[Any, ...]] = {
        "unit": ("query", "pair"),
        "sampler": ("poisson",),
    }
    if s.method != "microbatch":
        derived["bidirectional"] = (False,)
    for field, values in derived.items():
        if getattr(s, field) not in values:
            raise InputError(
                f"method is {s.method!r} and {field} is {getattr(s, field)!r}, for "
                f"which its sensitivity is not derived. Set {field} to "
                f"{' or '.join(map(repr, values))}."
            )
    if s.hard_negatives.run and s.method != "public_negatives":
        raise InputError(
            f"hard_negatives.run is {s.hard_negatives.run!r}, but the sensitivity of "
            f"{s.method!r} is derived for in-batch negatives alone. Set it to '', or "
            "method to 'public_negatives'."
        )


# -- With a guarantee ------------------------------------------------------------------


def plan_of(c: Context, s: Any, units: training.Units) -> privacy.PrivacyPlan:
    """Returns the plan of the method: sampler, sensitivity and noise.

    Raises:
      InputError: a batch that replicas cannot share, or what `PrivacySpec` raises.
    """
    assert c.devices is not None
    if s.method != "naive":  # its rows are dealt one by one, whatever their number
        c.devices.require_share(s.batch_size)
    if s.method == "microbatch":
        spec = training.spec_of(
            s,
            units,
            num_microbatches=s.num_microbatches,
            sensitivity_multiplier=retriever.microbatch_sensitivity_multiplier(),
        )
    else:
        spec = training.spec_of(s, units)
        multiplier: float = retriever.public_negatives_sensitivity_multiplier()
        if s.method == "naive":
            # The spec checks its values; the sensitivity depends on the largest batch.
            most = plans.max_batch_size_of(spec)
            spec = dataclasses.replace(spec, max_batch_size=most)
            multiplier = retriever.naive_sensitivity_multiplier(most)
        spec = dataclasses.replace(spec, sensitivity_multiplier=multiplier)
    plan = training.make_plan(c, spec)
    if s.method != "naive":
        rows = _rows_at_a_time(s, plan)
        batches.require_microbatches(plan.max_rows, rows, c.devices.replicas)
    return plan


def _rows_at_a_time(s: Any, plan: privacy.PrivacyPlan) -> int:
    """Returns the rows differentiated at a time; of "microbatch", whole groups."""
    if s.method != "microbatch":
        return s.microbatch_size
    capacity = plan.group_capacity
    rows = min(max(s.microbatch_size, capacity), plan.max_rows)
    return rows // capacity * capacity


def train(
    c: Context,
    s: Any,
    model: retriever.TwoTower,
    tokenizer: Tokenizer,
    units: training.Units,
    plan: privacy.PrivacyPlan,
) -> training.Outcome:
    """Trains by the method, in the run that `training.paying` opened."""
    with c.scope():
        documents = None
        if s.method == "public_negatives":
            documents = retriever.encode_documents(
                list(_sampled(c, s.most_documents)), tokenizer, s.document_length
            )
        take = _take(c, s, model, tokenizer, units)
        options: dict[str, Any] = {"microbatch_size": _rows_at_a_time(s, plan)}
        if documents is not None:
            loss: Any = retriever.PublicNegatives(
                model, documents, s.negatives, s.seed, s.refresh_every
            )
            options.update(engine=s.engine, layers=loss.layers)
            options.update(before_step=loss.refresh, state=loss.state)
        elif s.method == "naive":
            texts = min(s.microbatch_size, plan.max_rows)
            losses = retriever.NaiveLosses(model, texts)
            loss = model.per_example_losses
            options.update(engine=naive_engine(losses), layers=losses.layers)
            options["microbatch_size"] = texts
        else:
            loss = retriever.GroupLosses(model, plan.group_capacity)
            options.update(engine="vectorized", layers=loss.layers)
        optimizer = training.make_optimizer(s)
    return training.train(
        c,
        s,
        model,
        plan,
        loss,
        optimizer,
        take,
        units,
        tokens=s.query_length + s.document_length,
        jit_compile=s.jit_compile,
        **options,
    )


def _sampled(c: Context, most: int) -> Iterator[str]:
    """Yields an evenly spread part of the documents.

    The choice depends on the corpus alone, never on which documents have private
    queries: that would be a private read.
    """
    scanned = corpus.scan(str(c.given["pairs"].beir().corpus_file))
    parts = scanned.cut(scanned.count, most)
    yield from (document.content for document in parts.read(0))


def _take(
    c: Context,
    s: Any,
    model: retriever.TwoTower,
    tokenizer: Tokenizer,
    units: training.Units,
) -> Callable[[np.ndarray], Mapping[str, np.ndarray]]:
    """Returns what reads rows by number, from disk."""

    @functools.cache
    def mined() -> Callable[[Sequence[Pair]], Mapping[str, np.ndarray]]:
        return hard_negatives.encoder(c, tokenizer, s.document_length)

    def encode(pairs: Sequence[Pair]) -> dict[str, np.ndarray]:
        own = rows_of(pairs, tokenizer, s.query_length, s.document_length)
        return {**own, **mined()(pairs)}

    rows = training.stored_rows(c, units.rows.read(), encode)
    # "naive" runs the encoder on each text in every step.
    if model.documents_frozen and s.method != "naive":
        beside = c.place.run / checkpoint.STATE / "frozen"
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


def facts(s: Any, model: retriever.TwoTower) -> dict[str, Any]:
    """Returns the method's facts for the certificate, not the mechanism's."""
    names = "method scale learned_scale pooling bidirectional false_negatives".split()
    found = {name: getattr(s, name) for name in names}
    found["documents"] = (
        "embedded by the starting weights, which stay"
        if model.documents_frozen
        else "embedded by weights that are trained"
    )
    if s.method == PLAIN:
        found["engine"] = "none: one gradient of the mean loss"
    if s.method == "naive":
        found["engine"] = "none: each row's gradient is formed and clipped by itself"
    if s.method == "microbatch":
        found["engine"] = "vectorized"
        found["products_of_clipping"] = "as in tensorflow-privacy"
    if s.method == "public_negatives":
        found["negatives"] = s.negatives
        found["negatives_drawn_from"] = (
            f"the public corpus (at most {s.most_documents} documents, evenly spread "
            "over it), uniformly, by a public seed; again every "
            f"{s.refresh_every} steps"
        )
    return found


# -- Without ---------------------------------------------------------------------------


def fit(
    c: Context,
    s: Any,
    model: retriever.TwoTower,
    tokenizer: Tokenizer,
    units: training.Units,
) -> None:
    """Trains by Keras for `s.steps` steps, from the last backup if there is one.

    Each replica embeds its share of a batch; every row's softmax is over the documents
    of all. Tokenised pairs and backups are in the run's directory, which is as private
    as they are; the runner removes both.

    Raises:
      Preempted: the process, or another worker, received a signal to end.
      InputError: the replicas, or `rows_at_a_time`, do not divide the batch; or too few
        pairs.
    """
    assert c.devices is not None
    c.devices.require_share(s.batch_size)
    share = s.batch_size // c.devices.replicas
    if s.rows_at_a_time and share % s.rows_at_a_time:
        raise InputError(
            f"rows_at_a_time is {s.rows_at_a_time}, which does not divide the {share} "
            f"rows of a replica. Give a divisor of {share}, or 0 for all."
        )
    per_epoch = min(s.save_every, s.steps)
    backup, epochs = training.open_backup(c, per_epoch)
    done = epochs * per_epoch
    rows = _stored(c, s, tokenizer, units)
    held_out = _held_out(s, len(rows), units.private)
    trained = np.setdiff1d(np.arange(len(rows)), held_out)
    callbacks: list[tf.keras.callbacks.Callback] = []
    if len(held_out):
        callbacks.append(retriever.HitRate(rows.take(held_out)))
    if not (units.private and s.strict):
        logs = os.fspath(c.place.logs)
        callbacks.append(tf.keras.callbacks.TensorBoard(logs, write_graph=False))
    progress = Progress(
        c.place.logs,
        s.steps,
        measured=not s.strict,
        batch_size=s.batch_size,
        tokens=s.query_length + s.document_length,
        save_every=per_epoch,
        epsilon=(lambda step: math.inf) if units.private else None,
    )
    with c.scope(), progress, c.devices.notice.training() as asked:
        optimizer = training.make_optimizer(s)
        slots = optimizers.build(optimizer, model.trainable_variables)
        state = [*model.variables, *slots]
        model.compile(
            optimizer,
            rows_at_a_time=s.rows_at_a_time,
            seed=s.seed,
            # In a strategy's scope that is left to the strategy.
            jit_compile=s.jit_compile and not tf.distribute.has_strategy(),
        )
        model.fit(
            _dataset(s, rows, trained, done),
            epochs=math.ceil(s.steps / per_epoch),
            steps_per_epoch=per_epoch,
            initial_epoch=epochs,
            verbose=0,
            callbacks=[
                tf.keras.callbacks.BackupAndRestore(
                    os.fspath(backup), delete_checkpoint=False
                ),
                training.Steps(progress, s.steps, done, asked, state),
                *callbacks,
            ],
        )


def _stored(
    c: Context, s: Any, tokenizer: Tokenizer, units: training.Units
) -> retriever.StoredPairs:
    """Tokenises the pairs to disk, beside the backups; anew in each try."""
    path = c.place.run / "backup" / "rows"
    if path.is_dir():
        shutil.rmtree(path)
    return retriever.store_pairs(
        open_private(path),
        units.rows.read(),
        tokenizer,
        negatives=hard_negatives.encoder(c, tokenizer, s.document_length),
        query_length=s.query_length,
        document_length=s.document_length,
    )


def _held_out(s: Any, count: int, private: bool) -> np.ndarray:
    """Returns the rows to validate on, at most a twentieth; none where nobody may."""
    most = 0 if private and s.strict else min(count // 20, count - s.batch_size)
    return np.linspace(
        0, count - 1, max(0, min(s.validation_pairs, most)), dtype=np.int64
    )


def _dataset(
    s: Any, rows: retriever.StoredPairs, trained: np.ndarray, start: int
) -> Any:
    """Returns the dataset of batches from number `start` on, shared by replicas."""
    strategy = tf.distribute.get_strategy()
    replicas = strategy.num_replicas_in_sync
    share = s.batch_size // replicas
    # Refuses too few pairs at once.
    retriever.shuffled_batches(len(trained), s.batch_size, s.seed)

    def rows_of(indices: np.ndarray) -> dict[str, np.ndarray]:
        return {**rows.take(indices), "weights": np.ones(len(indices), np.float32)}

    def of_worker(context: tf.distribute.InputContext) -> tf.data.Dataset:
        number, of = context.input_pipeline_id, context.num_input_pipelines
        own = range(number * replicas // of, (number + 1) * replicas // of)

        def shares() -> Iterator[dict[str, np.ndarray]]:
            for batch in retriever.shuffled_batches(
                len(trained), s.batch_size, s.seed, start
            ):
                for replica in own:
                    part = batch[replica * share : (replica + 1) * share]
                    yield rows_of(trained[part])

        signature = {
            name: tf.TensorSpec((share, *values.shape[1:]), values.dtype)
            for name, values in rows_of(trained[:1]).items()
        }
        return tf.data.Dataset.from_generator(
            shares, output_signature=signature
        ).prefetch(2)

    return strategy.distribute_datasets_from_function(of_worker)
