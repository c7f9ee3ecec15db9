"""The same model here as in Hugging Face: logits, loss, gradients, greedy queries.

What `transformers` computes was recorded by `hf_fixtures.py`, so that these tests
need neither it nor torch.
"""

import pathlib

import numpy as np
import pytest
import tensorflow as tf
from helpers import hf_fixtures

from tfdpsq.generator import Greedy, T5QueryGenerator
from tfdpsq.generator.checkpoints import load_encoder
from tfdpsq.generator.checkpoints.weights import variable_of, weights_of

FOLDER = pathlib.Path(__file__).parent

# Norm of the difference, relative to that of what Hugging Face computed.
TOLERANCE = 1e-4
VERSIONS = ("1.0", "1.1")


def _error(ours, theirs):
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape
    return np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)


def _teacher_forced(model, inputs):
    """Logits at real tokens, loss over them, and its gradients by weight, as stored.

    `per_example_losses` are means by row; Hugging Face's loss is the mean over all
    tokens.
    """
    names = ("document_ids", "document_lengths", "query_ids", "query_lengths")
    batch = {name: tf.constant(inputs[name], tf.int32) for name in names}
    share = tf.cast(batch["query_lengths"], tf.float32)
    share /= tf.reduce_sum(share)
    wanted = weights_of(model.config)
    variables = [variable_of(model.backbone, weight) for weight in wanted]

    # Runs faster than eagerly, and it is how training runs.
    @tf.function
    def compute(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model.per_example_losses(batch) * share)
        gradients = tape.gradient(loss, variables)
        return model(batch), loss, [tf.convert_to_tensor(g) for g in gradients]

    logits, loss, gradients = compute(batch)
    real = tf.sequence_mask(batch["query_lengths"])
    gradients = {
        weight.huggingface: gradient.numpy().T
        if weight.transposed("huggingface")
        else gradient.numpy()
        for weight, gradient in zip(wanted, gradients)
    }
    return tf.boolean_mask(logits, real).numpy(), float(loss), gradients


@pytest.fixture(scope="module", params=VERSIONS)
def recorded(request):
    name = f"t5_{request.param}"
    model = T5QueryGenerator.from_preset(FOLDER / "fixtures" / name)
    return model, np.load(FOLDER / "fixtures" / f"{name}.npz")


def test_logits_loss_and_gradients_are_those_of_hugging_face(recorded):
    model, theirs = recorded
    logits, loss, gradients = _teacher_forced(model, theirs)

    assert _error(logits, theirs["logits"]) < TOLERANCE
    assert loss == pytest.approx(float(theirs["loss"]), rel=TOLERANCE)
    recorded_gradients = {
        name.removeprefix("gradient/"): theirs[name]
        for name in theirs.files
        if name.startswith("gradient/")
    }
    assert gradients.keys() == recorded_gradients.keys()
    errors = {n: _error(gradients[n], g) for n, g in recorded_gradients.items()}
    assert max(errors.values()) < TOLERANCE, errors


def test_greedy_queries_are_those_of_hugging_face(recorded):
    model, theirs = recorded
    documents = theirs["greedy_document_ids"]
    ids = model.generate(documents, Greedy(), hf_fixtures.NEW_TOKENS)

    np.testing.assert_array_equal(ids, theirs["greedy_ids"])


def test_the_encoder_alone_is_the_one_of_the_whole_model(recorded):
    model, theirs = recorded
    config, encoder = load_encoder(FOLDER / "fixtures" / f"t5_{model.config.version}")
    inputs = {
        "encoder_token_ids": tf.constant(theirs["document_ids"]),
        "encoder_padding_mask": tf.sequence_mask(
            theirs["document_lengths"], dtype=tf.int32
        ),
    }

    assert config == model.config
    np.testing.assert_array_equal(encoder(inputs), model.encoder(inputs))
