"""The one-pass engine on T5: a weight used three times, and a bias all rows share."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from helpers import fast_oracle as oracle

from tfdpsq.generator.model import T5QueryGenerator
from tfdpsq.layers import lora, t5, t5_layers
from tfdpsq.privacy import fast
from tfdpsq.privacy import replay as randomness
from tfdpsq.privacy.fast import factored, gradient_norms
from tfdpsq.privacy.independence import require_nothing_kept

ROWS, DOCUMENT, QUERY = 5, 9, 4


@dataclasses.dataclass(frozen=True)
class _Crossed(t5.T5Config):
    """1.0 with a head of its own, or 1.1 with a tied one."""

    @property
    def tied(self):
        return not super().tied


def _config(version, dropout=0.0, kind=t5.T5Config):
    return kind(
        vocabulary_size=23,
        num_layers=2,
        num_heads=2,
        # So that norms come from Gram matrices in the decoder, whose texts are
        # short, and from the products themselves in the encoder.
        hidden_dim=16,
        intermediate_dim=32,
        key_value_dim=8,
        version=version,
        dropout=dropout,
    )


def _models(version, kind=t5.T5Config, targets=(), rematerialize=False):
    """A generator and its float64 twin, embeddings scaled so that no unit saturates."""
    tf.keras.utils.set_random_seed(1)
    random = np.random.default_rng(1)

    def make(rematerialize=False):
        config = _config(version, kind=kind)
        made = T5QueryGenerator(config, rematerialize=rematerialize)
        if targets:
            lora.apply_lora(made, rank=3, alpha=6.0, targets=targets)
        return made

    model = make(rematerialize)
    for variable in model.variables:
        variable.assign_add(0.1 * random.normal(size=variable.shape))
    with oracle.floatx("float64"):
        twin = make()
    for variable, other in zip(model.variables, twin.variables):
        other.assign(variable.numpy().astype(np.float64))
    return model, twin


def _batch():
    """Rows of every length, ids repeated within a row and between its two texts."""
    random = np.random.default_rng(2)
    batch = {
        "document_ids": random.integers(1, 9, [ROWS, DOCUMENT]),
        "document_lengths": np.array([9, 3, 7, 1, 5]),
        "query_ids": random.integers(1, 9, [ROWS, QUERY]),
        "query_lengths": np.array([4, 2, 1, 3, 4]),
    }
    for name in ("document", "query"):
        past = np.arange(batch[f"{name}_ids"].shape[1])
        batch[f"{name}_ids"][past >= batch[f"{name}_lengths"][:, None]] = 0
    return {name: values.astype(np.int32) for name, values in batch.items()}


def _tensors(batch, rows=slice(None)):
    return {name: tf.constant(values[rows]) for name, values in batch.items()}


def _naive(losses_of, twin, batch, variables):
    gradients = []
    for row in range(ROWS):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(losses_of(twin, _tensors(batch, slice(row, row + 1))))
        gradients.append(
            [tf.convert_to_tensor(g).numpy() for g in tape.gradient(loss, variables)]
        )
    return [np.stack(per_weight).astype(np.float64) for per_weight in zip(*gradients)]


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


_LOSSES = {"generator": _generator_losses, "towers": _tower_losses}


def _variables(model, task):
    """What is trained; an encoder of T5 1.1 has no use for the head."""
    if task == "generator":
        return model.trainable_variables
    variables = model.encoder.trainable_variables
    return [v for v in variables if "reverse_embeddings" not in v.name]


_VALUES = ("*/value_projector",)
# Task, version, whose head, and where LoRA is; "again" is rematerialised.
_SHAPES = {
    "1.0, tied": ("generator", "1.0", t5.T5Config, ()),
    "1.1, untied": ("generator", "1.1", t5.T5Config, ()),
    "1.0, untied": ("generator", "1.0", _Crossed, ()),
    "1.1, tied": ("generator", "1.1", _Crossed, ()),
    "1.0, LoRA": ("generator", "1.0", t5.T5Config, ("*_projector",)),
    "1.1, LoRA": ("generator", "1.1", t5.T5Config, _VALUES),
    "1.0, towers": ("towers", "1.0", t5.T5Config, ()),
    "1.1, towers": ("towers", "1.1", t5.T5Config, ()),
    "1.0, again": ("generator", "1.0", t5.T5Config, ()),
    "1.1, towers, again": ("towers", "1.1", t5.T5Config, ()),
    "1.1, LoRA, again": ("generator", "1.1", t5.T5Config, ("*_projector",)),
}


_SELDOM = (
    "1.0, untied",
    "1.1, tied",
    "1.1, LoRA",
    "1.1, towers",
    "1.1, towers, again",
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in _SELDOM else [])
        for name in _SHAPES
    ],
)
def test_norms_and_clipped_sums_equal_a_naive_float64_loop(name):
    task, version, kind, targets = _SHAPES[name]
    model, twin = _models(version, kind, targets, "again" in name)
    losses, found, apart = _assert_exact(task, model, twin, fast.clipped_sum)
    for norms, (variable, gradient) in zip(apart, found):
        expected = oracle.norms([gradient])
        # A row whose terms cancel has a norm of the rounding error of these terms.
        np.testing.assert_allclose(
            norms,
            expected,
            rtol=1e-5,
            atol=5e-6 * np.max(expected),
            err_msg=variable.name,
        )
    fast.check(losses, [model], [variable for variable, _ in found])


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", _SHAPES)
def test_the_same_in_a_graph_and_under_xla(name, jit):
    task, version, kind, targets = _SHAPES[name]
    models = _models(version, kind, targets, "again" in name)
    _assert_exact(task, *models, tf.function(fast.clipped_sum, jit_compile=jit))


def _assert_exact(task, model, twin, clipped_sum):
    """Compares norms and sums; returns what else there is to compare.

    That is: the losses as a function, (variable, naive gradients [B, ...]) for every
    variable, and their norms by the engine, one weight at a time.
    """
    batch, variables = _batch(), _variables(model, task)
    gradients = _naive(_LOSSES[task], twin, batch, _variables(twin, task))
    norms = oracle.norms(gradients)
    clip_norm = float(np.median(norms))
    apart, limits = [], []
    original = gradient_norms.squared_norms
    bounded = gradient_norms.norm_and_bound

    def noted_bounds(squares):
        computed, bounds = bounded(squares)
        limits.append(bounds)
        return computed, bounds

    def noted(merged):
        found = original(merged)
        apart.append(found.norm)
        return found

    def losses():
        return _LOSSES[task](model, _tensors(batch))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_norms, "squared_norms", noted)
        patch.setattr(gradient_norms, "norm_and_bound", noted_bounds)
        found = clipped_sum(losses, [model], variables, clip_norm)
    np.testing.assert_allclose(found.norms, norms, rtol=1e-5)
    # Rows are clipped by a bound on their norm, which exceeds it by rounding alone.
    bounds, tolerance = norms, 1e-3
    if hasattr(limits[0], "numpy"):  # not in a graph
        (bounds,), tolerance = (
            (each.numpy().astype(np.float64) for each in limits),
            1e-5,
        )
        assert np.all(bounds >= norms) and np.all(bounds <= 1.001 * norms + 1e-6)
    scale = np.minimum(1, clip_norm / bounds)
    oracle.assert_close(
        found.sums,
        [np.tensordot(scale, gradient, 1) for gradient in gradients],
        clip_norm,
        [variable.name for variable in variables],
        tolerance,
    )
    assert len(apart) == len(variables)
    return losses, list(zip(variables, gradients)), map(tf.sqrt, apart)


def test_the_tied_embedding_is_one_weight_used_three_times():
    """Encoder, decoder and logits: apart, its norm would be more than 1 % off."""
    model, twin = _models("1.0")
    for each in (model, twin):  # so that looking words up matters as much as logits
        table = each.backbone.token_embedding.embeddings
        table.assign(0.5 * table)
    batch = _batch()
    for name in ("document_ids", "query_ids"):  # one word, at which all uses meet
        batch[name] = np.minimum(batch[name], 1)
    (index,) = [
        i
        for i, v in enumerate(model.trainable_variables)
        if "token_embedding" in v.name
    ]
    (gradient,) = _naive(
        _generator_losses, twin, batch, [twin.trainable_variables[index]]
    )
    seen = []
    original = factored.merge

    def apart(uses, shape):
        seen.append(
            [gradient_norms.squared_norms(original([use], shape)).norm for use in uses]
        )
        return original(uses, shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(factored, "merge", apart)
        found = fast.clipped_sum(
            lambda: _generator_losses(model, _tensors(batch)),
            [model],
            [model.trainable_variables[index]],
            1.0,
        )
    truth = oracle.norms([gradient])
    np.testing.assert_allclose(found.norms, truth, rtol=1e-5)
    assert len(seen[0]) == 3
    without = np.sqrt(sum(s.numpy() for s in seen[0]))
    assert np.max(np.abs(without / truth - 1)) > 0.01


def test_lengths_of_other_rows_and_padding_rows_change_nothing():
    model, _ = _models("1.0")
    batch, variables = _batch(), model.trainable_variables
    weights = tf.constant([1.0, 1, 0, 1, 0])
    changed = {name: values.copy() for name, values in batch.items()}
    for row in (2, 4):
        changed["document_ids"][row] = 1
        changed["document_lengths"][row] = 0
        changed["query_lengths"][row] = 0
    found = [
        fast.clipped_sum(
            lambda b=b: _generator_losses(model, _tensors(b)),
            [model],
            variables,
            0.5,
            weights,
        )
        for b in (batch, changed)
    ]
    for one, other in zip(found[0].sums, found[1].sums):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "version", [pytest.param("1.0", marks=pytest.mark.slow), "1.1"]
)
def test_with_dropout_a_released_gradient_obeys_the_clip_norm(version):
    """Whatever the masks: those of the norm are those of the gradient."""
    tf.keras.utils.set_random_seed(3)
    model = T5QueryGenerator(_config(version, dropout=0.5))
    batch = _tensors(_batch(), slice(0, 1))
    call = tf.function(
        lambda: fast.clipped_sum(
            lambda: _generator_losses(model, batch),
            [model],
            model.trainable_variables,
            1e-3,
        )
    )
    norms = set()
    for _ in range(8):
        found = call()
        released = np.sqrt(
            sum(np.sum(np.square(s, dtype=np.float64)) for s in found.sums)
        )
        assert released == pytest.approx(1e-3, rel=1e-5)
        norms.add(float(found.norms[0]))
    assert len(norms) == 8  # dropout was on


@pytest.mark.parametrize("targets", [(), ("*/value_projector",)])
def test_a_rematerialised_layer_repeats_its_dropout(targets):
    """Its second run, recorded or not, drops what the first did."""
    tf.keras.utils.set_random_seed(4)
    model = T5QueryGenerator(_config("1.1", dropout=0.5), rematerialize=True)
    if targets:
        lora.apply_lora(model, rank=3, alpha=6.0, targets=targets)
        for variable in model.trainable_variables:  # its second factor starts at zero
            variable.assign_add(0.1 * tf.random.normal(variable.shape))
    variables, batch = model.trainable_variables, _tensors(_batch())
    kept = [layer for layer in model.submodules if hasattr(layer, "pieces")]
    assert len(kept) == 4 and all(layer.rematerialize for layer in kept)

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
    # What is dropped here comes from the same seeds, but nothing is run twice.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(t5_layers, "rematerialized", lambda run, given: run(*given))
        results.append(drawn(plainly))
    for total, gradients in results[:2]:
        assert float(total) == pytest.approx(float(results[2][0]), rel=1e-6)
        for one, other, variable in zip(gradients, results[2][1], variables):
            np.testing.assert_allclose(
                one, other, rtol=1e-4, atol=1e-5, err_msg=variable.name
            )
    # Dropout was on, and follows from the seed.
    assert float(drawn(plainly, step=1)[0]) != float(results[0][0])


def test_mixed_bfloat16_stays_near_float32():
    model = T5QueryGenerator(_config("1.0"), dtype="mixed_bfloat16")
    plain, _ = _models("1.0")
    for variable, other in zip(model.variables, plain.variables):
        variable.assign(other)
    batch = _tensors(_batch())
    low, high = (
        fast.clipped_sum(
            lambda m=m: _generator_losses(m, batch), [m], m.trainable_variables, 0.5
        )
        for m in (model, plain)
    )
    assert {total.dtype for total in low.sums} == {tf.float32}
    np.testing.assert_allclose(low.norms, high.norms, rtol=0.1)
    losses = lambda: _generator_losses(model, batch)  # noqa: E731
    fast.check(losses, [model], model.trainable_variables, 0.05)


def test_nothing_in_a_generator_draws_what_cannot_be_repeated():
    tf.keras.utils.set_random_seed(4)
    model = T5QueryGenerator(_config("1.1", dropout=0.5), rematerialize=True)
    lora.apply_lora(model, rank=3, alpha=6.0, targets=("*/value_projector",))
    batch = {name: np.asarray(values) for name, values in _batch().items()}

    def losses(tensors):
        return _generator_losses(model, tensors)

    def require(layers):
        given = (losses, batch, layers, model.trainable_variables)
        nodes = randomness.traced(*given).nodes
        randomness.require_repeatable(nodes)
        return nodes

    require_nothing_kept(require([model]))
    with pytest.raises(ValueError, match="cannot repeat"):  # dropout was on
        require([])
