"""Train, generation and encoding steps compile for TPU.

A TPU runs XLA programs only, with static shapes, in at most 32 bits and without calls
to its host. Each step is compiled by XLA, and the program is searched for the rest.
"""

import functools
import math
import re

import numpy as np
import pytest
import tensorflow as tf
from helpers import plans

from tfdpsq import privacy, retriever
from tfdpsq.generator import Greedy, T5QueryGenerator, TopK, TopP, pretraining
from tfdpsq.generator.decoding import decode, text_mask
from tfdpsq.layers import T5Config
from tfdpsq.privacy import make_logical_step
from tfdpsq.privacy.accounting import choose_max_batch_size
from tfdpsq.run.common import direct

_T5 = {
    "vocabulary_size": 40,
    "num_layers": 1,
    "num_heads": 2,
    "hidden_dim": 8,
    "intermediate_dim": 12,
    "key_value_dim": 4,
    "version": "1.1",
}
_N = 20
# What is computed on the device under a name of its own.
_ON_DEVICE = {"Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "TopK"}


def refusals(function, *arguments, norms=False):
    """Lists why a TPU would refuse a function of tensors; empty if it would run it.

    `norms` allows 64 bits: norms are added up in them. A TPU has none, but its compiler
    takes them (tests/benchmarks/tpu.py).
    """
    # Types and shapes: XLA would take values for constants of the program.
    specs = [
        tf.TensorSpec(value.shape, value.dtype) for value in tf.nest.flatten(arguments)
    ]

    def of_flat(*given):
        return function(*tf.nest.pack_sequence_as(arguments, given))

    try:
        program = tf.function(
            of_flat, jit_compile=True, autograph=False
        ).experimental_get_compiler_ir(*specs)(stage="hlo")
    # Whatever XLA does not know, and it raises as it pleases.
    except (tf.errors.OpError, ValueError, TypeError) as error:
        return [f"does not compile: {error}"]
    assert program.startswith("HloModule") and "ROOT" in program
    found = []
    for name, pattern in (
        ("64-bit floats", r"\bc128\[" if norms else r"\b(f64|c128)\["),
        # A size that is set to a constant leaves a shape as static as it was.
        ("dynamic shapes", r"\[[^\]]*<=|\bdynamic-reshape\("),
        ("the host", r"\b(infeed|outfeed|send|recv|send-done|recv-done)\("),
    ):
        lines = [line for line in program.splitlines() if re.search(pattern, line)]
        found += [f"{name}: {line.strip()}" for line in lines[:3]]
    targets = set(re.findall(r'custom_call_target="([^"]*)"', program)) - _ON_DEVICE
    return found + [f"the host: custom call {target}" for target in sorted(targets)]


def test_each_kind_of_refusal_is_seen():
    x = tf.constant([1.0, -2.0, 3.0])
    assert refusals(lambda x: tf.reduce_sum(tf.nn.softmax(x)), x) == []

    def planted(function, *arguments):
        return " ".join(refusals(function, *(arguments or (x,))))

    assert "64-bit floats" in planted(lambda x: tf.reduce_sum(tf.cast(x, tf.float64)))
    assert "dynamic shapes" in planted(lambda x: tf.boolean_mask(x, x > 0))
    assert "does not compile" in planted(
        lambda x: tf.py_function(lambda v: v + 1, [x], tf.float32)
    )


def _batch(rows, columns):
    random = np.random.default_rng(0)
    batch = {"weights": tf.ones([rows])}
    for name, length in columns.items():
        batch[f"{name}_ids"] = tf.constant(
            random.integers(3, 40, [rows, length]), tf.int32
        )
        batch[f"{name}_lengths"] = tf.fill([rows], length)
    return batch


_plan = functools.partial(
    plans.plan, epsilon=8.0, clip_norm=0.1, num_units=_N, batch_size=3, steps=2
)


@pytest.mark.parametrize(
    "optimizer, epsilon, engine, dtype",
    [
        ("adam", 8.0, "fast", "float32"),
        pytest.param("sgd", math.inf, "fast", "float32", marks=pytest.mark.slow),
        pytest.param(
            "adafactor", 8.0, "fast", "mixed_bfloat16", marks=pytest.mark.slow
        ),
        pytest.param("t5x_adafactor", 8.0, "fast", "float32", marks=pytest.mark.slow),
        pytest.param("adam", 8.0, "dpkeras", "float32", marks=pytest.mark.slow),
        pytest.param("adam", 8.0, "vectorized", "float32", marks=pytest.mark.slow),
    ],
)
def test_private_step_of_the_generator_compiles(optimizer, epsilon, engine, dtype):
    model = T5QueryGenerator(T5Config(**_T5, dropout=0.1), dtype)
    plan = _plan(epsilon=epsilon)
    step = make_logical_step(
        plan,
        lambda batch: model.per_example_losses(batch, training=True),
        model.trainable_variables,
        plans.optimizer(0.1, optimizer),
        4,
        [model],
        engine,
    )
    batch = _batch(8, {"document": 7, "query": 5})
    keys = privacy.RunKey(plan, 3).step_keys(0)
    assert refusals(step, batch, tf.constant(5), [], keys, norms=True) == []


def _two_tower(dtype="float32"):
    model = retriever.TwoTower(
        retriever.RetrieverConfig(T5Config(**_T5, dropout=0.1), 8, 5.0, 5, 7)
    )
    batch = _batch(8, {"query": 5, "document": 7})
    batch["document_key"] = tf.range(8, dtype=tf.int64)
    batch["positive_keys"] = tf.fill([8, 1], tf.constant(-1, tf.int64))
    return model, batch


@pytest.mark.parametrize("rows_at_a_time", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_plain_step_of_the_retriever_compiles(rows_at_a_time):
    model, batch = _two_tower()
    model.compile(tf.keras.optimizers.Adam(1e-2), rows_at_a_time=rows_at_a_time)
    model.optimizer.build(model.trainable_variables)
    assert refusals(model.train_step, batch) == []


@pytest.mark.slow
@pytest.mark.parametrize("method", ["naive", "microbatch", "public_negatives"])
def test_direct_private_step_of_the_retriever_compiles(method):
    model, batch = _two_tower()
    maximum = choose_max_batch_size(_N, 3, 2, 0.5 / _N)
    changes, rows, engine = {}, 8, "fast"
    if method == "microbatch":
        changes = {"num_microbatches": 2, "sensitivity_multiplier": 2.0}
    elif method != "public_negatives":
        changes = {"sensitivity_multiplier": 2.0 * maximum, "max_batch_size": maximum}
    plan = _plan(**changes)
    if method == "naive":
        losses = retriever.NaiveLosses(model, 4)
        loss, engine = model.per_example_losses, direct.naive_engine(losses)
    elif method == "microbatch":
        loss = losses = retriever.GroupLosses(model, plan.group_capacity)
        rows, engine = plan.max_rows, "vectorized"
        batch = {
            name: tf.repeat(value[:1], rows, axis=0) for name, value in batch.items()
        }
    else:
        corpus = {name: value.numpy() for name, value in batch.items()}
        loss = losses = retriever.PublicNegatives(model, corpus, 6, seed=0)
        losses.refresh(0)
        rows = 4
    step = make_logical_step(
        plan,
        loss,
        model.trainable_variables,
        plans.optimizer(0.1, "adam"),
        rows,
        losses.layers,
        engine,
    )
    rows = tf.constant(len(batch["weights"]))
    keys = privacy.RunKey(plan, 3).step_keys(0)
    assert refusals(step, batch, rows, [], keys, norms=True) == []


def test_pretraining_step_compiles():
    model = T5QueryGenerator(T5Config(**_T5, dropout=0.1))
    trainer = pretraining.Pretrainer(model)
    trainer.compile(tf.keras.optimizers.Adafactor(0.01, relative_step=False))
    trainer.optimizer.build(model.trainable_variables)
    batch = _batch(8, {"document": 7, "query": 5})
    batch["document_key"] = tf.range(8, dtype=tf.int64)
    assert refusals(trainer.train_step, batch) == []


@pytest.mark.parametrize(
    "version", ["1.1", pytest.param("1.0", marks=pytest.mark.slow)]
)
def test_finetuning_step_compiles(version):
    model = T5QueryGenerator(T5Config(**{**_T5, "version": version}, dropout=0.1))
    model.compile(tf.keras.optimizers.Adam(0.01))
    model.optimizer.build(model.trainable_variables)
    batch = _batch(8, {"document": 7, "query": 5})

    def step(batch):
        return model.train_step((batch, batch["query_ids"]))

    assert refusals(step, batch) == []


@pytest.mark.parametrize(
    "sampler",
    [
        TopP(0.8),
        pytest.param(TopK(5), marks=pytest.mark.slow),
        pytest.param(Greedy(), marks=pytest.mark.slow),
    ],
    ids=["nucleus", "top_k", "greedy"],
)
def test_generation_compiles(sampler):
    model = T5QueryGenerator(T5Config(**_T5, dropout=0.0))
    mask = text_mask(40, 30)
    batch = _batch(8, {"document": 16})

    def written(ids, lengths, uniforms):
        return decode(model, ids, lengths, uniforms, sampler, mask)

    uniforms = tf.random.stateless_uniform([16, 6], [1, 2])
    assert (
        refusals(written, batch["document_ids"], batch["document_lengths"], uniforms)
        == []
    )


@pytest.mark.parametrize(
    "kind", ["query", pytest.param("document", marks=pytest.mark.slow)]
)
def test_encoding_compiles(kind):
    model, batch = _two_tower()
    encode = model.encode_queries if kind == "query" else model.encode_documents

    def embed(ids, lengths):
        return encode(ids, lengths)

    assert refusals(embed, batch[f"{kind}_ids"], batch[f"{kind}_lengths"]) == []
