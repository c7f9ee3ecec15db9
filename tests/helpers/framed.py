"""Stages of the frame as tests run them, and what they take, made without training."""

import json

import tensorflow as tf

from tfdpsq.run.frame import records, runner, settings
from tfdpsq.run.frame.places import Place


def run(stage, out, **changes):
    """Runs a stage into a directory; returns its record."""
    made = settings.from_config(stage.Settings, changes)
    return runner.execute(stage, made, Place.of(out))


def write_retriever(directory, vocabulary, **config):
    """Writes an untrained retriever as `train_retriever` does; returns it."""
    from tfdpsq import retriever
    from tfdpsq.data import Tokenizer
    from tfdpsq.layers import T5Config

    shape = T5Config(330, 1, 2, 16, 24, 8, "1.0", dropout=0.0)
    usual = {"embedding_dim": 16, "query_length": 10, "document_length": 24}
    tf.keras.utils.set_random_seed(3)
    made = retriever.TwoTower(
        retriever.RetrieverConfig(shape, **{**usual, **config}), Tokenizer(vocabulary)
    )
    directory.mkdir(parents=True)
    retriever.save(made, directory / "model")
    return made


def certificate(epsilon, run_id="one"):
    """Returns the certificate of a run."""
    from helpers import plans

    plan = plans.plan(
        epsilon=epsilon, num_units=400, n_is_public=True, batch_size=8, steps=4
    )
    return plans.certificate(plan, fingerprints={"pairs": "keyed:1"}, run_id=run_id)


def certify(directory, epsilon, run_id="one"):
    """Makes what is in a directory that of private queries, under an epsilon."""
    made = certificate(epsilon, run_id)
    records.write_certificate(directory, made)
    return made


def reads(private):
    """Returns what private reads were recorded."""
    path = private / "private_reads.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return [json.loads(line)["what"] for line in lines]
