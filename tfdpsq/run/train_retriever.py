"""Stage `train_retriever`: train the two-tower model on pairs.

    python -m tfdpsq.run.train_retriever --config=configs/train_retriever.py \
        --workdir=DIR

`method = "plain"` is ordinary training: free of privacy cost on synthetic and
public pairs, and without any guarantee on private ones. `method = "naive"` trains
directly on private pairs by DP-SGD at the sensitivity of the in-batch softmax.
`steps = 0` writes the untrained model.
"""

from __future__ import annotations

import itertools
import math
import pathlib
from typing import Any

import ml_collections
import numpy as np
import tensorflow as tf

from tfdpsq import privacy, retriever, validation
from tfdpsq.data import Tokenizer
from tfdpsq.layers import T5Config
from tfdpsq.privacy import accounting
from tfdpsq.run import command, sources, workdir
from tfdpsq.run.finetune import (
    LOSS_READ,
    private_directory,
    training_facts,
    write_certificate,
)
from tfdpsq.run.progress import Progress

METHODS = ("plain", "naive")
MODEL = "model"

NAIVE_SENSITIVITY_ARGUMENT = (
    "Each row's gradient is clipped to the clip norm C, but every row's in-batch "
    "softmax reads all rows. Adding or removing one query changes its own row (C) "
    "and can turn every other of at most M - 1 rows around (2C each): (2M - 1)C, "
    "M being the static maximum batch size."
)


def default_config() -> ml_collections.ConfigDict:
    """The stage's settings; the paper's values where a full-size T5 is meant."""
    return ml_collections.ConfigDict(
        {
            "pairs": sources.PYDOCS,
            "split": "train",
            "vocabulary": "",
            "method": "plain",
            "t5": {
                "vocabulary_size": 32128,
                "num_layers": 12,
                "num_heads": 12,
                "hidden_dim": 768,
                "intermediate_dim": 2048,
                "key_value_dim": 64,
                "version": "1.1",
                "dropout": 0.1,
            },
            "embedding_dim": 768,
            "scale": 20.0,
            "shared": True,
            "document_length": 384,
            "query_length": 128,
            "batch_size": 32,
            "steps": 1000,
            "optimizer": "adam",
            "learning_rate": 1e-3,
            "seed": 0,
            "jit_compile": False,
            "epsilon": math.inf,
            "delta": 0.0,
            "clip_norm": 0.1,
            "engine": "vectorized",
            "accountant": "pld",
            "private_directory": "",
        }
    )


def run(config: ml_collections.ConfigDict, directory: pathlib.Path) -> dict:
    """Runs the stage into `directory` unless it is finished there.

    Raises:
      InputError: bad settings or data, before any budget is spent.
    """
    validation.one_of("method", config.method, METHODS)
    if config.method == "plain" and math.isfinite(config.epsilon):
        raise validation.InputError(
            f"epsilon is {config.epsilon} but method 'plain' adds no noise. Set "
            'epsilon to "inf", or method to "naive".'
        )
    tokenizer = Tokenizer(config.vocabulary)
    private = private_directory(config, directory)
    inputs = {
        "pairs": sources.source_fingerprint(config.pairs, private),
        "vocabulary": tokenizer.fingerprint,
    }
    return workdir.run_stage(
        directory, config, inputs, lambda out: _make(config, out, tokenizer, directory)
    )


def _make(
    config, out: pathlib.Path, tokenizer: Tokenizer, directory: pathlib.Path
) -> dict:
    tf.keras.utils.set_random_seed(config.seed)
    model = retriever.TwoTower(
        retriever.RetrieverConfig(
            t5=T5Config(**config.t5),
            embedding_dim=config.embedding_dim,
            scale=config.scale,
            query_length=config.query_length,
            document_length=config.document_length,
            shared=config.shared,
        )
    )
    result: dict = {"pairs": 0, "steps_executed": 0}
    certificate = None
    if config.steps:
        source = sources.load_source(config.pairs, config.split)
        private = private_directory(config, directory)
        progress = Progress(private / "logs", directory.name, config.steps)
        if config.method == "plain":
            _train_plainly(config, model, tokenizer, source, progress)
            # What it is trained on decides its guarantee, by post-processing.
            certificate = source.certificate
            if source.private:
                certificate = _unprotected(config, model, tokenizer, source, private)
        else:
            certificate = _train_naively(
                config, model, tokenizer, source, progress, private
            )
        progress.close()
        result = {"pairs": len(source.pairs), "steps_executed": config.steps}
    if not all(np.isfinite(v.numpy()).all() for v in model.trainable_variables):
        raise validation.InputError(
            "training diverged: the weights hold NaN or infinity. Lower "
            f"learning_rate (now {config.learning_rate})."
        )
    retriever.save(model, out / MODEL)
    write_certificate(out, certificate)
    return result


def _train_plainly(config, model, tokenizer, source, progress) -> None:
    batches = retriever.make_batches(
        source.pairs,
        tokenizer,
        config.batch_size,
        config.query_length,
        config.document_length,
        config.seed,
    )
    optimizer = tf.keras.optimizers.legacy.Adam(config.learning_rate)
    variables = model.trainable_variables
    optimizer._create_all_weights(variables)

    @tf.function(jit_compile=config.jit_compile)
    def step(batch):
        with tf.GradientTape() as tape:
            loss = model.compute_loss(batch, training=True)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    for number, batch in enumerate(itertools.islice(batches, config.steps)):
        loss = step({name: tf.constant(value) for name, value in batch.items()})
        progress(number + 1, float(loss))


def _train_naively(config, model, tokenizer, source, progress, private) -> dict:
    if not source.private:
        raise validation.InputError(
            f"{config.pairs} holds no private queries: use method 'plain'."
        )
    n = len(source.pairs)
    delta = config.delta or 0.5 / n
    validation.positive_integer("batch_size", config.batch_size)
    maximum = accounting.choose_max_batch_size(
        n, min(config.batch_size, n), config.steps, config.epsilon, delta
    )
    plan = privacy.make_plan(
        privacy.PrivacySpec(
            epsilon=float(config.epsilon),
            delta=delta,
            clip_norm=config.clip_norm,
            n=n,
            batch_size=config.batch_size,
            steps=config.steps,
            accountant=config.accountant,
            max_batch_size=maximum,
            sensitivity_multiplier=retriever.naive_sensitivity_multiplier(maximum),
        )
    )
    arrays = retriever.encode_pairs(
        source.pairs, tokenizer, config.query_length, config.document_length
    )
    optimizer = privacy.make_optimizer(
        plan, config.learning_rate, config.optimizer, config.engine
    )
    executed = privacy.train(
        plan,
        lambda batch: model.row_losses(batch, training=True),
        model.trainable_variables,
        optimizer,
        lambda rows: {name: values[rows] for name, values in arrays.items()},
        microbatch_size=None,
        on_step=progress,
        jit_compile=config.jit_compile,
    )
    return privacy.make_certificate(
        plan,
        executed,
        description="A two-tower retriever trained directly on private pairs.",
        sensitivity_argument=NAIVE_SENSITIVITY_ARGUMENT,
        **_facts(config, model, tokenizer, private),
    )


def _unprotected(config, model, tokenizer, source, private) -> dict:
    """The certificate of ordinary training on private pairs: that there is none."""
    plan = privacy.make_plan(
        privacy.PrivacySpec(
            epsilon=math.inf,
            clip_norm=config.clip_norm,
            n=len(source.pairs),
            batch_size=config.batch_size,
            steps=config.steps,
        )
    )
    certificate = privacy.make_certificate(
        plan,
        config.steps,
        description="A two-tower retriever trained on private pairs, unprotected.",
        sensitivity_argument="None: nothing is clipped and no noise is added.",
        **_facts(config, model, tokenizer, private),
    )
    certificate["sampler"]["name"] = "shuffled epochs of fixed-size batches"
    return certificate


def _facts(config, model, tokenizer, private) -> dict[str, Any]:
    return {
        "training": {**training_facts(config, model), "method": config.method},
        "fingerprints": {
            "pairs": sources.source_fingerprint(config.pairs, private),
            "vocabulary": tokenizer.fingerprint,
            "code": workdir.code_fingerprint(),
        },
        "private_reads": [LOSS_READ],
    }


if __name__ == "__main__":
    command.main(run)
