"""The one-pass engine on T5: a weight used three times, and a bias all rows share."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import fast_oracle as oracle

from tfdpsq.generator.model import T5QueryGenerator
from tfdpsq.layers import lora, t5, train_only
from tfdpsq.privacy import fast
from tfdpsq.privacy import replay as randomness

ROWS, DOCUMENT, QUERY, PROMPT = 5, 9, 4, 3


def _config(version, dropout=0.0, layers=2):
    return t5.T5Config(
        vocabulary_size=23,
        num_layers=layers,
        num_heads=2,
        # So that norms come from Gram matrices in the decoder, whose texts are
        # short, and from the products themselves in the encoder.
        hidden_dim=16,
        intermediate_dim=32,
        key_value_dim=8,
        version=version,
        dropout=dropout,
    )


def _models(version, targets=(), rematerialize=False, prompt=0, layers=2, part=()):
    """A generator and its float64 twin, embeddings scaled so that no unit saturates."""
    tf.keras.utils.set_random_seed(1)
    random = np.random.default_rng(1)

    def make():
        config = _config(version, layers=layers)
        made = T5QueryGenerator(config, None, rematerialize, prompt)
        if targets:
            lora.apply_lora(made, rank=3, alpha=6.0, targets=targets)
        return made

    model = make()
    for variable in model.variables:
        variable.assign_add(0.1 * random.normal(size=variable.shape))
    with oracle.floatx("float64"):
        twin = make()
    for variable, other in zip(model.variables, twin.variables):
        other.assign(variable.numpy().astype(np.float64))
    for each in (model, twin):
        if part:
            train_only(each, part)
    return model, twin


def _batch(rows=ROWS):
    """Rows of every length, ids repeated within a row and between its two texts."""
    random = np.random.default_rng(2)
    batch = {}
    for name, most in (("document", DOCUMENT), ("query", QUERY)):
        lengths = random.integers(1, most + 1, rows)
        ids = random.integers(1, 9, [rows, most])
        ids[np.arange(most) >= lengths[:, None]] = 0
        batch[f"{name}_ids"] = ids.astype(np.int32)
        batch[f"{name}_lengths"] = lengths.astype(np.int32)
    return batch


def _tensors(batch, rows=slice(None)):
    return {name: tf.constant(values[rows]) for name, values in batch.items()}


def _generator_losses(model, batch):
    return model.per_example_losses(batch, training=True)


def _tower_losses(model, batch):
    """Document and query through the same encoder, with different lengths."""
    sides = []
    for name in ("document", "query"):
        ids = batch[f"{name}_ids"]
        mask = tf.sequence_mask(batch[f"{name}_lengths"], ids.shape[1], tf.int32)
        states = model.encoder(
            {"encoder_token_ids": ids, "encoder_padding_mask": mask}, training=True
        )
        weights = tf.cast(mask, states.dtype)[..., None]
        sides.append(tf.reduce_sum(states * weights, 1) / tf.reduce_sum(weights, 1))
    return tf.reduce_sum(sides[0] * sides[1], axis=1)


_VECTORS = ("*soft_prompt/*",)
# Version and what else it is made of; "towers" train the encoder alone.
_SHAPES = {
    "tied": ("1.0", {}),
    "untied": ("1.1", {}),
    "LoRA": ("1.0", {"targets": ("*_projector",)}),
    "towers": ("1.0", {}),
    "1.1, towers": ("1.1", {}),
    "again": ("1.0", {"rematerialize": True}),
    "LoRA, again": ("1.1", {"targets": ("*_projector",), "rematerialize": True}),
    "prompt": ("1.1", {"prompt": PROMPT, "part": _VECTORS, "layers": 1}),
    "prompt and all": ("1.0", {"prompt": PROMPT, "layers": 1}),
    "prompt, again": (
        "1.0",
        {"prompt": PROMPT, "part": _VECTORS, "rematerialize": True},
    ),
    "norms": ("1.0", {"part": ("*layer_norm*", "*self_attention/embeddings")}),
    "decoder": ("1.1", {"part": ("*decoder*",)}),
    "head": ("1.1", {"part": ("*token_embedding*",)}),
}
_QUICK = {
    "eager": ("tied", "towers", "LoRA, again", "prompt and all"),
    "xla": ("prompt",),
    "graph": (),
}


def _cases():
    for mode, quick in _QUICK.items():
        for name in _SHAPES:
            marks = [] if name in quick else [pytest.mark.slow]
            yield pytest.param(name, mode, marks=marks)


@pytest.mark.parametrize(("name", "mode"), _cases())
def test_norms_and_clipped_sums_equal_a_naive_float64_loop(name, mode):
    """The tied embedding is one weight used by encoder, decoder and logits.

    Eagerly the engine runs in float64, where a missing cross term shows at 1e-9.
    """
    version, options = _SHAPES[name]
    model, twin = _models(version, **options)
    losses_of = _tower_losses if "towers" in name else _generator_losses
    batch = _batch()

    def trained(model):
        """The weights; an encoder of T5 1.1 has no use for the head."""
        if "towers" not in name:
            return model.trainable_variables
        variables = model.encoder.trainable_variables
        return [v for v in variables if "reverse_embeddings" not in v.name]

    gradients = oracle.by_row(
        lambda rows: losses_of(twin, _tensors(batch, rows)), trained(twin), ROWS
    )
    assert {gradient.dtype for gradient in gradients} == {np.dtype(np.float64)}
    norms = oracle.norms(gradients)
    clip_norm = float(np.median(norms))
    engine, run, tolerance = model, fast.clipped_sum, 1e-5
    if mode == "eager":
        engine, tolerance = twin, 1e-9
    else:
        run = tf.function(run, jit_compile=mode == "xla")
    found = run(
        lambda: losses_of(engine, _tensors(batch)), [engine], trained(engine), clip_norm
    )
    np.testing.assert_allclose(found.norms, norms, rtol=tolerance)
    oracle.assert_close(
        found.sums,
        oracle.clipped_by_hand(gradients, clip_norm),
        clip_norm,
        [variable.name for variable in trained(engine)],
        # Rows are clipped by a bound on their norm, above it by rounding alone.
        1e-9 if mode == "eager" else 1e-3,
    )
    losses = lambda: losses_of(model, _tensors(batch))  # noqa: E731
    fast.check(losses, [model], trained(model))


def test_a_rematerialised_layer_repeats_its_dropout(monkeypatch):
    """Its second run, recorded or not, drops what the first did.

    So does a layer that is not: the engine runs it once.
    """
    tf.keras.utils.set_random_seed(4)
    model = T5QueryGenerator(_config("1.1", dropout=0.5), rematerialize=True)
    lora.apply_lora(model, rank=3, alpha=6.0, targets=("*/value_projector",))
    for variable in model.trainable_variables:  # its second factor starts at zero
        variable.assign_add(0.1 * tf.random.normal(variable.shape))
    variables, batch = model.trainable_variables, _tensors(_batch())

    def drawn(run, step=0):
        seed = tf.constant([5, 6], tf.int64)
        with randomness.replayable([model], seed, step, 0):
            return run()

    def plainly():
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(_generator_losses(model, batch))
        return total, [tf.convert_to_tensor(g) for g in tape.gradient(total, variables)]

    def by_example():
        found = fast.clipped_sum(
            lambda: _generator_losses(model, batch), [model], variables, 1e6
        )
        return tf.reduce_sum(found.losses), found.sums

    results = [drawn(run) for run in (plainly, by_example)]
    # Dropout was on, and follows from the seed.
    assert float(drawn(plainly, step=1)[0]) != float(results[0][0])
    # Masks come from the same seeds here, but nothing is run twice.
    monkeypatch.setattr(t5, "rematerialized", lambda run, given: run(*given))
    results.append(drawn(by_example))
    total, gradients = drawn(plainly)
    for found, sums in results:
        assert float(found) == pytest.approx(float(total), rel=1e-6)
        for one, other in zip(sums, gradients):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
