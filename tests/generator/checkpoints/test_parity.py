"""The same model here as in Hugging Face: logits, loss, gradients, greedy queries.

What `transformers` computes was recorded by `hf_fixtures.py`, so that these tests
need neither it nor torch; those marked slow run it beside ours (extra `parity`).
"""

import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf
from helpers import hf_fixtures

from tfdpsq.generator import SamplingConfig, T5QueryGenerator
from tfdpsq.generator.checkpoints import huggingface, load_encoder, slots
from tfdpsq.generator.decoding import generate

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
    wanted = slots.slots(model.config)
    variables = [slots.variable_of(model.backbone, slot) for slot in wanted]

    # Runs faster than eagerly, and it is how training runs.
    @tf.function
    def compute(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model.per_example_losses(batch) * share)
        gradients = tape.gradient(loss, variables)
        return model(batch), loss, [tf.convert_to_tensor(g) for g in gradients]

    logits, loss, gradients = compute(batch)
    real = tf.sequence_mask(batch["query_lengths"])
    turned = (slots.KERNEL, slots.HEAD)
    gradients = {
        slot.name: gradient.numpy().T if slot.kind in turned else gradient.numpy()
        for slot, gradient in zip(wanted, gradients)
    }
    return tf.boolean_mask(logits, real).numpy(), float(loss), gradients


def _greedy(model, document_ids, document_lengths, tokens):
    size = model.config.vocabulary_size
    never = tf.one_hot([0, hf_fixtures.UNKNOWN], size, -np.inf, 0.0)
    ids, _ = generate(
        model,
        tf.constant(document_ids, tf.int32),
        tf.constant(document_lengths, tf.int32),
        tf.zeros([len(document_ids), tokens]),
        SamplingConfig(temperature=0.0),
        tf.reduce_sum(never, 0),
        hf_fixtures.EOS,
    )
    return ids.numpy()


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
    ids = _greedy(
        model,
        theirs["greedy_document_ids"],
        theirs["greedy_document_lengths"],
        hf_fixtures.NEW_TOKENS,
    )

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


# -- Live, against transformers and torch ----------------------------------------


def _transformers():
    pytest.importorskip("torch")
    return pytest.importorskip("transformers")


def _smooth_model(version, inputs, **shape):
    """A model whose gradients rounding does not decide; see `is_smooth`."""
    for seed in range(20):
        model = hf_fixtures.make_model(version, seed, **shape)
        if hf_fixtures.is_smooth(model, inputs):
            return model
    pytest.fail("no seed gives a model that can be compared")


def _assert_equal(ours, theirs, inputs, tokens=12):
    logits, loss, gradients = hf_fixtures.teacher_forced(theirs, inputs)
    real = np.arange(logits.shape[1]) < inputs["query_lengths"][:, None]
    our_logits, our_loss, our_gradients = _teacher_forced(ours, inputs)
    assert _error(our_logits, logits[real]) < TOLERANCE
    assert our_loss == pytest.approx(loss, rel=TOLERANCE)
    assert our_gradients.keys() == gradients.keys()
    errors = {name: _error(our_gradients[name], gradients[name]) for name in gradients}
    assert max(errors.values()) < TOLERANCE, errors
    ids, margin = hf_fixtures.greedy(theirs, inputs, tokens)
    assert margin > 1e-4  # else equal models may differ, and the seed is a bad one
    documents = (inputs["document_ids"], inputs["document_lengths"])
    np.testing.assert_array_equal(_greedy(ours, *documents, tokens), ids)


# Name: version, sizes. Vocabularies as of T5 and mT5 exceed those of their pieces and
# are no multiples of each other; heads × key width differs from hidden in some.
_LIVE = {
    "wide 1.0": ("1.0", dict(d_model=128, d_kv=32, d_ff=64, num_heads=4, num_layers=2)),
    "wide heads 1.0": ("1.0", dict(d_model=32, d_kv=24, d_ff=40, num_heads=5)),
    "wide 1.1": ("1.1", dict(d_model=128, d_kv=16, d_ff=320, num_heads=6)),
    "like FLAN": ("1.1", dict(d_model=64, d_kv=64, d_ff=128, num_heads=3)),
    "like mT5": ("1.1", dict(d_model=64, d_kv=16, d_ff=96, num_heads=4)),
    "one layer, one head": ("1.0", dict(d_model=8, d_kv=8, num_heads=1, num_layers=1)),
}
_VOCABULARIES = {"like FLAN": 32128, "like mT5": 2512}


@pytest.mark.slow
@pytest.mark.parametrize("name", _LIVE)
def test_live_models_agree_both_ways_round(name, tmp_path):
    transformers = _transformers()
    version, shape = _LIVE[name]
    size = _VOCABULARIES.get(name, 300)
    shape = {"num_layers": 3, **shape, "vocab_size": size}
    inputs = hf_fixtures.make_inputs(3, size, (20, 7, 129, 3), (5, 12, 3, 130))
    theirs = _smooth_model(version, inputs, **shape)
    theirs.save_pretrained(tmp_path / "theirs")
    if name == "like mT5":
        path = tmp_path / "theirs" / "config.json"
        config = json.loads(path.read_text())
        config.pop("scale_decoder_outputs", None)  # not there for mT5
        config.update(model_type="mt5", architectures=["MT5ForConditionalGeneration"])
        path.write_text(json.dumps(config))

    ours = T5QueryGenerator.from_preset(tmp_path / "theirs")
    _assert_equal(ours, theirs, inputs)

    (tmp_path / "ours").mkdir()
    ours.save_to_preset(tmp_path / "ours")
    again, report = transformers.T5ForConditionalGeneration.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(report.values()), report
    assert (again.lm_head.weight is again.shared.weight) == (version == "1.0")
    # The same weights in the same code: the same numbers, not just nearly.
    np.testing.assert_array_equal(
        hf_fixtures.teacher_forced(again.eval(), inputs)[0],
        hf_fixtures.teacher_forced(theirs, inputs)[0],
    )


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_live_shards_are_read_as_one_file_is(version, tmp_path):
    _transformers()
    inputs = hf_fixtures.make_inputs(3, 60, (40, 7), (5, 30))
    theirs = _smooth_model(version, inputs, d_model=64, d_ff=128)
    theirs.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 3

    _assert_equal(T5QueryGenerator.from_preset(tmp_path), theirs, inputs)


@pytest.mark.slow
def test_live_bfloat16_is_read_and_written_exactly(tmp_path):
    transformers = _transformers()
    import torch

    theirs = hf_fixtures.make_model("1.1", seed=7).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = T5QueryGenerator.from_preset(tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    huggingface.save(tmp_path / "ours", ours.config, ours.backbone, dtype="bfloat16")
    again = transformers.T5ForConditionalGeneration.from_pretrained(
        tmp_path / "ours", torch_dtype="auto"
    )

    assert again.dtype == torch.bfloat16
    for name, weight in theirs.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name


@pytest.mark.slow
def test_live_encoders_alone_are_read(tmp_path):
    transformers = _transformers()
    import torch

    config = transformers.T5Config(**hf_fixtures.SHAPE, feed_forward_proj="relu")
    theirs = transformers.T5EncoderModel(config).eval()
    theirs.save_pretrained(tmp_path)
    inputs = hf_fixtures.make_inputs(3, 60, (40, 7, 19), (1, 1, 1))
    documents = hf_fixtures.torch_documents(inputs)
    with torch.no_grad():
        states = theirs(**documents).last_hidden_state.numpy()

    _, encoder = load_encoder(tmp_path)
    mask = documents["attention_mask"].numpy()
    ours = encoder(
        {
            "encoder_token_ids": tf.constant(inputs["document_ids"]),
            "encoder_padding_mask": tf.constant(mask, tf.int32),
        }
    ).numpy()
    assert _error(ours[mask > 0], states[mask > 0]) < TOLERANCE
