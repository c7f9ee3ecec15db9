"""Fine-tuning from a model that lies there already: LoRA, a part, bfloat16."""

import json
import math

import numpy as np
import pytest
from helpers import tiny as _tiny

from tfdpsq.data import read_manifest, train_vocabulary
from tfdpsq.generator import T5QueryGenerator
from tfdpsq.generator.checkpoints import presets
from tfdpsq.run import convert, finetune, synthesize
from tfdpsq.run.core import layout, sources
from tfdpsq.run.training import private_training
from tfdpsq.validation import InputError


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Pairs, and a public T5 with its vocabulary beside its weights."""
    base = tmp_path_factory.mktemp("options")
    _tiny.write_start(base, version="1.1")
    return base


def _finetune(base, name, **options):
    config = finetune.default_config()
    usual = _tiny.training(base, microbatch_size=4, steps=3, learning_rate=0.1)
    config.update({**usual, **options})
    out = base / name
    finetune.run(config, out)
    return T5QueryGenerator.from_preset(out), json.loads(
        (out / "certificate.json").read_text()
    )


@pytest.fixture(scope="module")
def tuned(base):
    lora = {"rank": 2, "alpha": 4.0, "targets": ("*decoder*/query_projector",)}
    return _finetune(
        base, "tuned", lora=lora, dtype="mixed_bfloat16", rematerialize=True
    )


def test_a_low_rank_update_is_trained_certified_and_merged(base, tuned):
    model, certificate = tuned
    # A layer with self- and cross-attention; hidden 16, inner 2 · 8, rank 2.
    assert certificate["training"]["trained_parameters"] == 2 * (16 * 2 + 2 * 16)
    assert certificate["training"]["lora"]["targets"] == ["*decoder*/query_projector"]
    assert certificate["training"]["computed_in"] == "mixed_bfloat16"
    before = T5QueryGenerator.from_preset(base / "public")
    changed = {
        path
        for path, one, other in zip(
            _paths(before), before.backbone.weights, model.backbone.weights
        )
        if not np.array_equal(one, other)
    }
    assert len(changed) == 2
    assert all("decoder" in path and "query_projector" in path for path in changed)
    # What is merged is an update of that rank.
    layer, old = (m.backbone.decoder_transformer_layers[0] for m in (model, before))
    update = (
        layer.cross_attention.query_projector.kernel
        - old.cross_attention.query_projector.kernel
    )
    values = np.linalg.svd(update, compute_uv=False)
    assert values[1] > 1e-4 and values[2] < 1e-5 * values[0]


def _paths(model):
    return [
        f"{layer.name}/{weight.name}"
        for layer in model.backbone.layers
        for weight in layer.weights
    ]


def test_a_part_is_trained_certified_and_the_rest_left_as_it_was(base):
    patterns = ("*layer_norm*", "*decoder*/self_attention/*")
    options = {"trained": patterns, "epsilon": 8.0, "schedule": "cosine"}
    model, certificate = _finetune(base, "part", **options)
    assert certificate["training"]["schedule"] == "cosine"
    # 2 + 3 + 2 norms of 16; a layer with 4 kernels of 16·16, and a bias [32, 2].
    trained = 7 * 16 + 4 * 16 * 16 + 32 * 2
    assert certificate["training"]["trained"] == list(patterns)
    assert certificate["training"]["trained_parameters"] == trained
    assert certificate["training"]["lora"] == "none"
    assert certificate["guarantee"]["epsilon"] <= 8.0
    before = T5QueryGenerator.from_preset(base / "public")
    moved = 0
    for path, one, other in zip(
        _paths(before), before.backbone.weights, model.backbone.weights
    ):
        chosen = "layer_norm" in path or (
            "decoder" in path
            and ("self_attention" in path or one.shape.as_list() == [32, 2])
        )
        assert np.any(one.numpy() != other.numpy()) == chosen, path
        moved += one.shape.num_elements() * chosen
    assert moved == trained


def test_by_default_everything_is_trained_and_the_certificate_says_so(tuned):
    assert "only the lora" in tuned[1]["training"]["trained"]
    assert finetune.default_config().trained == ("*",)


@pytest.mark.slow
def test_the_rate_follows_the_schedule_over_the_steps_that_are_asked_for(base):
    before = T5QueryGenerator.from_preset(base / "public").backbone.weights
    for schedule, share in (("constant", 1.0), ("cosine", 0.25)):
        config = _tiny.config(finetune, steps=40, schedule=schedule, learning_rate=0.1)
        rate = private_training.learning_rate(
            config.learning_rate, config.schedule, config.steps
        )
        first = rate if schedule == "constant" else float(rate(0))
        np.testing.assert_allclose(first, 0.1 * share, rtol=1e-6)
        last = rate if schedule == "constant" else float(rate(39))
        assert (last < 0.007) == (schedule == "cosine")
    # A step of Adam on a gradient that keeps its sign is as long as the rate.
    options = {"schedule": "cosine", "steps": 4, "epsilon": math.inf}
    config.update({"steps": 4})
    rate = private_training.learning_rate(
        config.learning_rate, config.schedule, config.steps
    )
    far = sum(float(rate(step)) for step in range(4))
    assert far < 0.78 * 4 * 0.1
    model, _ = _finetune(base, "by_schedule", **options)
    longest = max(
        np.abs(a.numpy() - b.numpy()).max()
        for a, b in zip(model.backbone.weights, before)
    )
    np.testing.assert_allclose(longest, far, rtol=0.1)


def test_a_run_without_noise_may_have_a_rate_of_its_own(base):
    before = _values(T5QueryGenerator.from_preset(base / "public"))
    options = {"noiseless_learning_rate": 1e-4, "trained": ("*layer_norm*",)}
    moved = {}
    for epsilon, rate in ((math.inf, 1e-4), (8.0, 0.1)):
        name = f"own_rate_{epsilon}"
        model, certificate = _finetune(base, name, **options, epsilon=epsilon)
        assert certificate["training"]["learning_rate"] == rate
        moved[rate] = np.max(np.abs(_values(model) - before))
    # Adam moves a weight by about the rate a step; there are three.
    assert 0 < moved[1e-4] < 5e-4 and moved[0.1] > 0.05


def _values(model):
    return np.concatenate([np.ravel(v) for v in model.backbone.weights])


@pytest.mark.slow
def test_a_preset_is_a_place_to_start_from(base, tuned, monkeypatch):
    monkeypatch.setattr(presets, "_FOLDER", base)
    _, certificate = _finetune(base, "by_name", init="public", steps=1)
    assert certificate["training"]["starting_weights"] == "public"
    # The same weights, whatever they are called.
    assert tuned[1]["training"]["starting_weights"] == str(base / "public")
    prints = [c["fingerprints"]["init"] for c in (certificate, tuned[1])]
    assert prints[0] == prints[1]
    assert (base / "by_name" / "spiece.model").is_file()


def test_the_vocabulary_beside_the_weights_is_used_and_passed_on(base, tuned):
    config = _tiny.config(
        synthesize,
        generator=str(base / "tuned"),
        corpus=str(base / "pairs"),
        max_documents=5,
        document_length=24,
        query_length=6,
        batch_size=4,
        shards=1,
        dtype="mixed_bfloat16",
    )
    synthesize.run(config, base / "written")
    manifest = read_manifest(base / "written" / layout.SET)
    assert manifest["count"] + manifest["empty_queries_left_out"] == 5
    assert (base / "tuned" / "spiece.model").read_bytes() == (
        base / "spiece.model"
    ).read_bytes()


@pytest.mark.slow
def test_the_vocabulary_inside_a_keras_nlp_preset_is_used_and_passed_on(base):
    # `finetune` once knew `spiece.model` alone, and asked for a vocabulary.
    preset = base / "preset"
    convert.convert(base / "public", preset, "keras")
    assert not (preset / "spiece.model").exists()
    _finetune(base, "from_preset", init=str(preset), steps=1)
    vocabulary = (base / "spiece.model").read_bytes()
    assert (base / "from_preset" / "spiece.model").read_bytes() == vocabulary


@pytest.mark.parametrize("form", ["huggingface", "keras", "t5x"])
def test_every_format_has_its_vocabulary_found(base, tmp_path, form):
    convert.convert(base / "public", tmp_path / form, form)
    found = sources.vocabulary_file("", str(tmp_path / form))
    assert tmp_path / form in found.parents
    assert found.read_bytes() == (base / "spiece.model").read_bytes()


def test_settings_that_cannot_be_are_refused(base):
    vocabulary = str(base / "spiece.model")
    # Of fewer pieces than the model has embeddings: all would run, and all be paid.
    other = str(base / "other.model")
    lines = [f"w{i} x{i} y{i} z{i * 7} again and again" for i in range(300)]
    train_vocabulary(lines, 300, other)
    for options, message in (
        ({"vocabulary": other}, "public was trained with another vocabulary"),
        ({"lora": {"targets": ("*/nothing",), "rank": 2}}, "matches no Dense layer"),
        ({"trained": ("*norm*", "*/lstm/*")}, r"trained holds '\*/lstm/\*', which"),
        ({"trained": ()}, r"trained is \(\); it must hold at least 1 value"),
        (
            {"trained": ("*norm*",), "lora": {"rank": 2}},
            r"lora.rank is 2 and trained \['\*norm\*'\]: LoRA freezes all",
        ),
        ({"dtype": "float16"}, "dtype is 'float16'"),
        ({"schedule": "linear"}, "schedule is 'linear'"),
        ({"init": str(base / "pairs")}, "holds no T5 checkpoint"),
        ({"init": "", "vocabulary": ""}, "no vocabulary was given"),
    ):
        with pytest.raises(InputError, match=message):
            _finetune(base, "bad", **{"vocabulary": vocabulary, **options})
        assert not (base / "bad").exists()
        assert not list((base / "private").glob("runs/bad/ledger.jsonl"))
