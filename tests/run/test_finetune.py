"""`finetune` and its settings: LoRA, a part, a soft prompt, rates, epochs."""

import json
import math

import numpy as np
import pytest
import tensorflow as tf
from helpers import tiny
from safetensors.numpy import load_file

from tfdpsq.data import Tokenizer, read_manifest, train_vocabulary
from tfdpsq.generator import T5QueryGenerator
from tfdpsq.privacy import read_certificate, verify_certificate
from tfdpsq.run import convert, finetune, synthesize, train_retriever
from tfdpsq.run.core import layout, sources
from tfdpsq.run.training import private_training, starting_model
from tfdpsq.validation import InputError

_PROMPT, _HIDDEN = 5, 16


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """60 training queries in 63 pairs, and a public T5 with its vocabulary."""
    base = tmp_path_factory.mktemp("finetune")
    tiny.write_start(base, version="1.1")
    tiny.add_answers(base)
    return base


def _config(base, **options):
    usual = {"microbatch_size": 4, "steps": 3, "learning_rate": 0.1}
    return tiny.config(finetune, options, **tiny.training(base, **usual))


def _finetune(base, name, **options):
    stage = finetune.run(_config(base, **options), base / name)
    certificate = read_certificate(base / name)
    assert verify_certificate(certificate).problems == ()
    assert certificate["accounting"]["steps_executed"] == 3
    assert private_training.LOSS_READ in certificate["private_reads"]
    assert stage["result"]["steps_executed"] == 3
    return T5QueryGenerator.from_preset(base / name), certificate


@pytest.fixture(scope="module")
def public(base):
    return T5QueryGenerator.from_preset(base / "public")


@pytest.fixture(scope="module")
def tuned(base):
    lora = {"rank": 2, "alpha": 4.0, "targets": ("*decoder*/query_projector",)}
    return _finetune(base, "tuned", lora=lora, dtype="mixed_bfloat16")


def _weights(model, public):
    """(path, weight, weight before) of a model."""
    paths = [
        f"{layer.name}/{weight.name}"
        for layer in public.backbone.layers
        for weight in layer.weights
    ]
    return zip(paths, model.backbone.weights, public.backbone.weights)


def test_lora_is_trained_certified_and_merged(public, tuned):
    model, certificate = tuned
    training = certificate["training"]
    # A layer with self- and cross-attention; hidden 16, inner 2 * 8, rank 2.
    assert training["trained_parameters"] == 2 * (16 * 2 + 2 * 16)
    assert training["lora"]["targets"] == ["*decoder*/query_projector"]
    assert training["computed_in"] == "mixed_bfloat16"
    changed = {
        path
        for path, one, other in _weights(model, public)
        if not np.array_equal(one, other)
    }
    assert len(changed) == 2
    assert all("decoder" in path and "query_projector" in path for path in changed)
    # What is merged is an update of that rank.
    layer, old = (m.backbone.decoder_transformer_layers[0] for m in (model, public))
    update = (
        layer.cross_attention.query_projector.kernel
        - old.cross_attention.query_projector.kernel
    )
    values = np.linalg.svd(update, compute_uv=False)
    assert values[1] > 1e-4 and values[2] < 1e-5 * values[0]


def test_part_is_trained_for_epochs_of_pairs_and_the_rest_stays(base, public):
    patterns = ("*layer_norm*", "*decoder*/self_attention/*")
    # 0.4 * 63 / 8 = 3.15 steps.
    epochs = {"unit": "pair", "epochs": 0.4, "steps": 0}
    rates = {"schedule": "cosine", "noiseless_learning_rate": 1e-4}
    options = {"trained": patterns, "epsilon": 8.0, **rates, **epochs}
    model, certificate = _finetune(base, "part", **options)
    training = certificate["training"]
    assert training["schedule"] == "cosine" and training["learning_rate"] == 0.1
    # 2 + 3 + 2 norms of 16; a layer with 4 kernels of 16 * 16, and a bias [32, 2].
    trained = 7 * 16 + 4 * 16 * 16 + 32 * 2
    assert training["trained"] == list(patterns)
    assert training["trained_parameters"] == trained
    assert training["lora"] == "none"
    assert certificate["guarantee"]["epsilon"] <= 8.0
    assert certificate["guarantee"]["unit"] == "pair"
    assert certificate["guarantee"]["delta"] == 0.5 / 63
    assert certificate["sampler"]["n"] == 63
    assert "one pair" in certificate["mechanism"]["sensitivity_argument"]
    moved = 0
    for path, one, other in _weights(model, public):
        chosen = "layer_norm" in path or (
            "decoder" in path
            and ("self_attention" in path or one.shape.as_list() == [32, 2])
        )
        assert np.any(one.numpy() != other.numpy()) == chosen, path
        moved += one.shape.num_elements() * chosen
    assert moved == trained
    # The same command finds it finished: the config is kept as it was given.
    again = finetune.run(_config(base, **options), base / "part")
    assert again["config"]["steps"] == 0 and "seconds" not in again


def test_run_without_noise_has_a_rate_of_its_own(base, public):
    options = {"noiseless_learning_rate": 1e-4, "trained": ("*layer_norm*",)}
    model, certificate = _finetune(base, "free", **options, epsilon=math.inf)
    assert certificate["training"]["learning_rate"] == 1e-4
    # Adam moves a weight by about the rate a step.
    moved = max(np.abs(a - b).max() for _, a, b in _weights(model, public))
    assert 0 < moved < 5e-4


def test_cosine_rate_falls_over_the_steps_that_are_asked_for():
    rate = private_training.learning_rate(0.1, "cosine", 40)
    assert float(rate(0)) == pytest.approx(0.1 * 0.25)  # warming up
    assert float(rate(39)) < 0.007
    assert private_training.learning_rate(0.1, "constant", 40) == 0.1


@pytest.mark.parametrize(
    "unit, options, n, steps",
    [
        ("query", {}, 60, 4),  # 0.5 * 60 / 8 = 3.75
        # 63 // 8: an eighth step would begin, and cost, a second epoch.
        ("pair", {"epochs": 1.0, "sampler": "shuffled"}, 63, 7),
        # From the bound, which is public; the count is not.
        ("pair", {"n_is_public": False, "n_bound": 100}, 100, 6),  # 6.25
    ],
)
def test_steps_follow_from_epochs_and_public_counts(base, unit, options, n, steps):
    options = {"steps": 0, "epochs": 0.5, "epsilon": 8.0, "unit": unit, **options}
    config = _config(base, **options)
    source = sources.load_source(config.pairs, config.split, unit)
    units = private_training.units_of(source, unit, config.user_field)
    spec = private_training.spec_of(config, units)
    assert (spec.num_units, spec.steps, spec.target_delta) == (n, steps, 0.5 / n)


@pytest.mark.parametrize("stage", [finetune, train_retriever])
def test_steps_and_epochs_together_are_refused(base, tmp_path, stage):
    config = tiny.config(stage, **tiny.training(base, steps=3, epochs=2.0))
    with pytest.raises(InputError, match="epochs is 2.0 and steps 3"):
        stage.run(tiny.acting_only(stage, config), tmp_path / "private" / "out")
    assert not list(tmp_path.rglob("ledger.jsonl"))


def test_vocabulary_beside_the_weights_is_used_and_passed_on(base, tuned):
    config = tiny.config(
        synthesize,
        generator=str(base / "tuned"),
        corpus=str(base / "pairs"),
        max_documents=5,
        max_length=6,
        batch_size=4,
        dtype="mixed_bfloat16",
    )
    synthesize.run(config, base / "written")
    manifest = read_manifest(base / "written" / layout.SET)
    assert manifest["count"] + manifest["empty_queries_left_out"] == 5
    assert manifest["certificate"] == tuned[1]
    assert (base / "tuned" / "spiece.model").read_bytes() == (
        base / "spiece.model"
    ).read_bytes()


@pytest.mark.parametrize("form", ["huggingface", "keras"])
def test_vocabulary_is_found_in_every_format(base, tmp_path, form):
    convert.convert(base / "public", tmp_path / form, form)
    found = sources.vocabulary_file("", str(tmp_path / form))
    assert tmp_path / form in found.parents
    assert found.read_bytes() == (base / "spiece.model").read_bytes()


def test_impossible_settings_are_refused_with_the_ledger_unpaid(base):
    # Of fewer pieces than the model has embeddings: all would run, and all be paid.
    other = str(base / "other.model")
    lines = [f"w{i} x{i} y{i} z{i * 7} again and again" for i in range(300)]
    train_vocabulary(lines, 300, other)
    for options, message in (
        ({"vocabulary": other}, "another vocabulary"),
        ({"init": "", "vocabulary": ""}, "no vocabulary"),
        ({"init": str(base / "pairs")}, "no spiece.model"),
        ({"lora": {"targets": ("*/nothing",), "rank": 2}}, "matches no Dense layer"),
        ({"trained": ("*norm*", "*/lstm/*")}, r"trained holds '\*/lstm/\*'"),
        ({"trained": ("*norm*",), "lora": {"rank": 2}}, "lora.rank is 2 and trained"),
        ({"soft_prompt": {"length": 4}, "lora": {"rank": 2}}, "soft_prompt.length 4"),
        ({"dtype": "float16"}, "dtype is 'float16'"),
    ):
        with pytest.raises(InputError, match=message):
            _finetune(base, "bad", **options)
        assert not (base / "bad").exists()
        assert not list((base / "private").glob("runs/bad/ledger.jsonl"))


# -- Soft prompts ---------------------------------------------------------------------

_SOFT = {
    "soft_prompt": {"length": _PROMPT},
    "learning_rate": 0.3,
    "optimizer": "adafactor",
}


@pytest.fixture(scope="module")
def prompted(base):
    """Where a soft prompt was tuned."""
    _finetune(base, "prompted", **_SOFT)
    return base / "prompted"


def _start(base, **options):
    """The vectors that training starts from."""
    config = _config(base, **{**_SOFT, **options})
    tokenizer = Tokenizer(base / "spiece.model")
    model = starting_model.load_generator(config, tokenizer)
    return model.backbone.soft_prompt.vectors.numpy()


def test_soft_prompt_alone_is_trained_and_certified(base, public, prompted):
    certificate = read_certificate(prompted)
    assert certificate["guarantee"]["epsilon"] <= 8.0
    assert certificate["training"]["soft_prompt"] == _PROMPT
    assert certificate["training"]["trained_parameters"] == _PROMPT * _HIDDEN
    paths = base / "public", prompted
    before, after = (load_file(path / "model.safetensors") for path in paths)
    assert after.pop("soft_prompt").shape == (_PROMPT, _HIDDEN)
    assert all(np.array_equal(before[name], after[name]) for name in after)
    one, other = (
        json.loads((p / "config.json").read_text()) for p in (base / "public", prompted)
    )
    assert other == {**one, "certificate_digest": certificate["digest"]}
    # Three steps from where it started.
    model = T5QueryGenerator.from_preset(prompted)
    vectors = model.backbone.soft_prompt.vectors.numpy()
    assert (np.abs(vectors - _start(base)).max(axis=1) > 1e-3).all()


def test_soft_prompt_starts_as_words_drawn_by_the_seed(base, public):
    start = _start(base)
    np.testing.assert_array_equal(_start(base), start)
    assert not np.array_equal(_start(base, seed=1), start)
    words = public.backbone.token_embedding.embeddings.numpy()
    ids = [int(np.where((words == vector).all(axis=1))[0][0]) for vector in start]
    assert len(set(ids)) == _PROMPT
    # No padding, end, unknown, or one of the 256 bytes; nor what has no piece.
    assert min(ids) >= 3 + 256 and max(ids) < 320


def test_soft_prompt_is_carried_or_refused_by_later_stages(base, prompted, tmp_path):
    convert.convert(prompted, tmp_path / "carried", "keras")
    vectors = [
        T5QueryGenerator.from_preset(path).backbone.soft_prompt.vectors.numpy()
        for path in (prompted, tmp_path / "carried")
    ]
    np.testing.assert_array_equal(*vectors)
    config = tiny.config(train_retriever, **tiny.training(base, epsilon=math.inf))
    config.update({"init": str(prompted), "steps": 0})
    with pytest.raises(InputError, match="no place for"):
        train_retriever.run(tiny.acting_only(train_retriever, config), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_public_soft_prompt_is_tuned_further_and_a_private_one_is_not(base, prompted):
    model = T5QueryGenerator.from_preset(base / "public", soft_prompt=_PROMPT)
    model.backbone.soft_prompt.vectors.assign(tf.ones([_PROMPT, _HIDDEN]))
    (base / "transferred").mkdir()
    model.save_to_huggingface(base / "transferred", base / "spiece.model")
    init = str(base / "transferred")
    np.testing.assert_array_equal(_start(base, init=init), np.ones([_PROMPT, _HIDDEN]))
    with pytest.raises(InputError, match="soft prompt of 5 vectors"):
        _start(base, init=init, soft_prompt={"length": 4})
    with pytest.raises(InputError, match="was itself trained on private queries"):
        finetune.run(_config(base, init=str(prompted), **_SOFT), base / "again")
