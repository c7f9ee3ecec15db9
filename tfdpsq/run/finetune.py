"""Stage `finetune`: train the generator to write queries from documents.

    python -m tfdpsq.run.finetune --config=configs/finetune.py --workdir=DIR

With a finite `epsilon` by DP-SGD, with `epsilon = inf` the same steps without
clipping and noise. Writes the model, and `certificate.json` where private pairs
were read. What must never be released (training curves, the key of the data's
fingerprint) goes to `private_directory`, by default `private` beside the output.
"""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

import ml_collections
import numpy as np
import tensorflow as tf

from tfdpsq import privacy, validation
from tfdpsq.data import Tokenizer, atomic_write
from tfdpsq.generator import T5QueryGenerator, encode_pairs
from tfdpsq.layers import T5Config
from tfdpsq.privacy import certificate as certificates
from tfdpsq.run import command, sources, workdir
from tfdpsq.run.progress import Progress

SENSITIVITY_ARGUMENT = (
    "Each example is one query with its document, each query owns exactly one "
    "example, and an example's loss depends on that example alone. Its gradient is "
    "clipped to the clip norm, so adding or removing one query moves the sum by at "
    "most the clip norm."
)


LOSS_READ = {
    "what": "the training loss of every step, averaged over its batch",
    "where": "the terminal, and logs/ under private/",
}


def default_config() -> ml_collections.ConfigDict:
    """The stage's settings; the paper's values where a full-size T5 is meant."""
    return ml_collections.ConfigDict(
        {
            "pairs": sources.PYDOCS,
            "split": "train",
            "vocabulary": "",
            "init": "",
            "t5": {
                "vocabulary_size": 32128,
                "num_layers": 8,
                "num_heads": 6,
                "hidden_dim": 512,
                "intermediate_dim": 1024,
                "key_value_dim": 64,
                "version": "1.1",
                "dropout": 0.1,
            },
            "document_length": 384,
            "query_length": 128,
            "epsilon": 8.0,
            "delta": 0.0,
            "clip_norm": 0.1,
            "batch_size": 1024,
            "microbatch_size": 16,
            "steps": 1000,
            "optimizer": "adam",
            "learning_rate": 1e-3,
            "engine": "vectorized",
            "accountant": "pld",
            "jit_compile": False,
            "private_directory": "",
            "seed": 0,
        }
    )


def load_generator(
    config: ml_collections.ConfigDict, tokenizer: Tokenizer
) -> T5QueryGenerator:
    """The generator to start from: `config.init`, or random weights by `config.t5`.

    Raises:
      InputError: the vocabulary does not fit the model.
    """
    if config.init:
        model = T5QueryGenerator.load(config.init)
    else:
        tf.keras.utils.set_random_seed(config.seed)
        model = T5QueryGenerator(T5Config(**config.t5))
    if tokenizer.vocabulary_size > model.config.vocabulary_size:
        raise validation.InputError(
            f"the vocabulary has {tokenizer.vocabulary_size} pieces, the model "
            f"{model.config.vocabulary_size} embeddings. Raise t5.vocabulary_size or "
            "use the vocabulary the model was made with."
        )
    return model


def run(config: ml_collections.ConfigDict, directory: pathlib.Path) -> dict:
    """Runs the stage into `directory` unless it is finished there.

    Raises:
      InputError: bad settings or data, before any budget is spent.
    """
    tokenizer = Tokenizer(config.vocabulary)
    private = private_directory(config, directory)
    inputs = {
        "pairs": sources.source_fingerprint(config.pairs, private),
        "vocabulary": tokenizer.fingerprint,
    }
    if config.init:
        inputs["init"] = workdir.stage_fingerprint(config.init)
    return workdir.run_stage(
        directory, config, inputs, lambda out: _make(config, out, tokenizer, directory)
    )


def _make(
    config, out: pathlib.Path, tokenizer: Tokenizer, directory: pathlib.Path
) -> dict:
    source = sources.load_source(config.pairs, config.split)
    parent = certificates.read_certificate(config.init) if config.init else None
    epsilon = float(config.epsilon)
    _check_lineage(config, source, parent)
    plan = privacy.make_plan(
        privacy.PrivacySpec(
            epsilon=epsilon,
            delta=config.delta or None,
            clip_norm=config.clip_norm,
            n=len(source.pairs),
            batch_size=config.batch_size,
            steps=config.steps,
            accountant=config.accountant,
        )
    )
    model = load_generator(config, tokenizer)
    data = encode_pairs(
        source.pairs, tokenizer, config.document_length, config.query_length
    )
    optimizer = privacy.make_optimizer(
        plan, config.learning_rate, config.optimizer, config.engine
    )
    private = private_directory(config, directory)
    progress = Progress(private / "logs", directory.name, config.steps)
    executed = privacy.train(
        plan,
        lambda batch: model.row_losses(batch, training=True),
        model.trainable_variables,
        optimizer,
        lambda rows: {name: values[rows] for name, values in data.items()},
        config.microbatch_size,
        on_step=progress,
        jit_compile=config.jit_compile,
    )
    progress.close()
    if not all(np.isfinite(v.numpy()).all() for v in model.trainable_variables):
        raise validation.InputError(
            "training diverged: the weights hold NaN or infinity. Lower "
            f"learning_rate (now {config.learning_rate})."
        )
    model.save(out)
    certificate = certificates.inherited_certificate(source.certificate, parent)
    if source.private:
        certificate = privacy.make_certificate(
            plan,
            executed,
            description="A T5 generator fine-tuned to write queries from documents.",
            sensitivity_argument=SENSITIVITY_ARGUMENT,
            training=training_facts(config, model),
            fingerprints={
                "pairs": sources.source_fingerprint(config.pairs, private),
                "vocabulary": tokenizer.fingerprint,
                "code": workdir.code_fingerprint(),
            },
            private_reads=[LOSS_READ],
        )
    write_certificate(out, certificate)
    return {"pairs": len(source.pairs), "steps_executed": executed}


def _check_lineage(config, source: sources.Source, parent: dict | None) -> None:
    """Refuses what could not be certified for what it is, before any training.

    Raises:
      InputError: finite ε on pairs that are not private themselves, or from
        weights that private queries already had a part in.
    """
    if not math.isfinite(float(config.epsilon)):
        certificates.inherited_certificate(source.certificate, parent)
        return
    if not source.private:
        raise validation.InputError(
            f"{config.pairs} is a synthetic or public set, yet epsilon is "
            f"{config.epsilon}. One private query can have had a part in all of its "
            'rows, so noise now would certify nothing: set epsilon to "inf". The '
            "result has the guarantee of the set."
        )
    if parent is not None:
        raise validation.InputError(
            f"{config.init} was itself trained on private queries (epsilon "
            f"{parent['guarantee']['epsilon']}), so epsilon {config.epsilon} would "
            "not be all that was spent. Start from public weights."
        )


def write_certificate(
    directory: pathlib.Path, certificate: dict[str, Any] | None
) -> None:
    """Writes `certificate.json`, or nothing where no private query had a part."""
    if certificate is not None:
        atomic_write(
            directory / certificates.FILE_NAME,
            json.dumps(certificate, indent=2, sort_keys=True, allow_nan=False) + "\n",
        )


def private_directory(
    config: ml_collections.ConfigDict, directory: pathlib.Path
) -> pathlib.Path:
    """Where a stage keeps what must not be released with its output."""
    return pathlib.Path(config.private_directory or directory.parent / "private")


def training_facts(
    config: ml_collections.ConfigDict, model: tf.keras.Model
) -> dict[str, Any]:
    """What the certificate records of the training, apart from privacy."""
    return {
        "optimizer": config.optimizer,
        "learning_rate": config.learning_rate,
        "engine": config.engine,
        "microbatch_size": config.get("microbatch_size", "the whole batch"),
        "trained_parameters": int(
            sum(np.prod(v.shape) for v in model.trainable_variables)
        ),
        "starting_weights": config.get("init") or "random",
    }


if __name__ == "__main__":
    command.main(run)
