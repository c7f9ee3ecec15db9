"""`finetune` and its settings: LoRA, a part, rates, epochs, prompts, counts."""

import collections
import dataclasses
import json
import math

import numpy as np
import pytest
from helpers import framed, tiny

from tfdpsq.data import Tokenizer, train_vocabulary
from tfdpsq.generator import T5QueryGenerator
from tfdpsq.privacy import read_certificate, verify_certificate
from tfdpsq.run.common import training
from tfdpsq.run.frame import runner, settings
from tfdpsq.run.frame.devices import Devices
from tfdpsq.run.frame.places import Place, Privacy
from tfdpsq.run.stages import finetune
from tfdpsq.validation import InputError

STAGE = finetune.STAGE


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """60 training queries in 63 pairs, and a public T5 with its vocabulary."""
    base = tmp_path_factory.mktemp("finetune")
    tiny.write_start(base, version="1.1")
    tiny.add_answers(base)
    return base


def _settings(base, **options):
    usual = {"microbatch_size": 4, "steps": 3, "learning_rate": 0.1}
    return tiny.training(base, **{**usual, **options})


def _finetune(base, name, folder="release", **options):
    out = base / folder / name
    record = framed.run(STAGE, out, **_settings(base, **options))
    certificate = read_certificate(out)
    assert verify_certificate(certificate).problems == ()
    assert certificate["accounting"]["steps_executed"] == 3
    what, where = training.LOSS_READ
    assert {"what": what, "where": where} in certificate["private_reads"]
    assert record["result"]["steps_executed"] == 3
    return T5QueryGenerator.from_preset(out), certificate


@pytest.fixture(scope="module")
def public(base):
    return T5QueryGenerator.from_preset(base / "public")


def _weights(model, public):
    """(path, weight, weight before) of a model."""
    paths = [
        f"{layer.name}/{weight.name}"
        for layer in public.backbone.layers
        for weight in layer.weights
    ]
    return zip(paths, model.backbone.weights, public.backbone.weights)


def test_lora_is_trained_certified_and_merged(base, public):
    lora = {"rank": 2, "alpha": 4.0, "targets": ("*decoder*/query_projector",)}
    model, certificate = _finetune(base, "tuned", lora=lora, dtype="mixed_bfloat16")
    stated = certificate["training"]
    # A layer with self- and cross-attention; hidden 16, inner 2 * 8, rank 2.
    assert stated["trained_parameters"] == 2 * (16 * 2 + 2 * 16)
    assert stated["lora"]["targets"] == ["*decoder*/query_projector"]
    assert stated["computed_in"] == "mixed_bfloat16"
    changed = {
        path
        for path, one, other in _weights(model, public)
        if not np.array_equal(one, other)
    }
    assert len(changed) == 2
    assert all("decoder" in path and "query_projector" in path for path in changed)
    # The vocabulary beside the starting weights is passed on, and the audit's facts.
    out = base / "release" / "tuned"
    assert (out / "spiece.model").read_bytes() == (base / "spiece.model").read_bytes()
    facts = json.loads((out / "stage.json").read_text())["facts"]
    init = str(base / "public")
    assert facts == {"epsilon": 8.0, "unit": "query", "split": "train", "init": init}


def test_part_is_trained_for_epochs_of_pairs_and_the_rest_stays(base, public):
    patterns = ("*layer_norm*", "*decoder*/self_attention/*")
    # 0.4 * 63 / 8 = 3.15 steps.
    epochs = {"unit": "pair", "epochs": 0.4, "steps": 0}
    options = {"trained": patterns, "epsilon": 8.0, "schedule": "cosine", **epochs}
    model, certificate = _finetune(base, "part", **options)
    stated = certificate["training"]
    assert stated["schedule"] == "cosine" and stated["learning_rate"] == 0.1
    # 2 + 3 + 2 norms of 16; a layer with 4 kernels of 16 * 16, and a bias [32, 2].
    trained = 7 * 16 + 4 * 16 * 16 + 32 * 2
    assert stated["trained"] == list(patterns)
    assert stated["trained_parameters"] == trained
    assert stated["lora"] == "none"
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
    # The same command finds it finished, also with other settings of speed.
    out = base / "release" / "part"
    faster = _settings(base, **options, save_every=7)
    again = framed.run(STAGE, out, **{**faster, "microbatch_size": 2})
    assert again["settings"]["microbatch_size"] == 4


def test_run_without_noise_is_private(base):
    options = {"trained": ("*layer_norm*",), "epsilon": math.inf, "bare": True}
    with pytest.raises(InputError, match="under release/.*no epsilon covers it"):
        _finetune(base, "free", **options)
    model, certificate = _finetune(base, "free", "private", **options)
    assert certificate["private"] is False
    assert model.preprocessor.prompt == "generate_query: "


def test_bare_training_has_documents_without_the_prompt(base, monkeypatch):
    seen = []

    def stop(c, pairs, encode):
        seen.append(encode([next(pairs)]))
        raise NotImplementedError

    monkeypatch.setattr(training, "stored_rows", stop)
    for number, options in enumerate(({"bare": True}, {"prompt": ""}, {})):
        with pytest.raises(NotImplementedError):
            _finetune(base, f"bare{number}", **options)
    same = [all(map(np.array_equal, seen[0].values(), x.values())) for x in seen]
    assert same == [True, True, False]


def test_cosine_rate_falls_over_the_steps_that_are_asked_for():
    rate = training.learning_rate(0.1, "cosine", 40)
    assert float(rate(0)) == pytest.approx(0.1 * 0.25)  # warming up
    assert float(rate(39)) < 0.007
    assert training.learning_rate(0.1, "constant", 40) == 0.1


def _spec(base, **options):
    made = settings.from_config(STAGE.Settings, _settings(base, **options))
    given, place = runner.open_inputs(made), Place.of(base / "out")
    c = runner.Context(made, given, place, Privacy.CERTIFIED, {}, devices=Devices())
    return STAGE.plan(c)[2].spec


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
    spec = _spec(base, unit=unit, **{"steps": 0, "epochs": 0.5, **options})
    assert (spec.num_units, spec.steps, spec.target_delta) == (n, steps, 0.5 / n)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"n_is_public": False}, "n_is_public is False and n_bound 0"),
        ({"n_bound": 100}, "n_is_public is True and n_bound 100"),
        # Without the number that they hold.
        (
            {"n_is_public": False, "n_bound": 59},
            "n_bound is 59, but the data hold more",
        ),
    ],
)
def test_number_of_units_is_declared(base, options, message):
    with pytest.raises(InputError, match=message) as caught:
        _spec(base, **options)
    assert "60" not in str(caught.value)


def test_impossible_settings_are_refused_with_the_ledger_unpaid(base, tmp_path):
    # Of fewer pieces than the model has embeddings: all would run, and all be paid.
    other = tmp_path / "public"
    lines = [f"w{i} x{i} y{i} z{i * 7} again and again" for i in range(300)]
    tiny.write_start(tmp_path, version="1.1")
    train_vocabulary(lines, 400, other / "spiece.model")
    _, (prompt,) = Tokenizer(base / "spiece.model").encode(["generate_query: "], 99)
    free = tiny.write_public_pairs(base)
    for options, message in (
        ({"init": str(other)}, "330 embeddings: give the vocabulary"),
        ({"init": ""}, "Set vocabulary to one that prepare wrote"),
        ({"init": str(base / "pairs")}, "without spiece.model"),
        ({"lora": {"targets": ("*/nothing",), "rank": 2}}, "matches no Dense layer"),
        ({"trained": ("*norm*", "*/lstm/*")}, r"trained holds '\*/lstm/\*'"),
        ({"trained": ("*norm*",), "lora": {"rank": 2}}, "lora.rank is 2 and trained"),
        ({"epochs": 2.0}, "epochs is 2.0 and steps 3"),
        ({"steps": 0}, "epochs is 0.0 and steps 0"),
        ({"unit": "user"}, "user_id"),  # nobody owns these queries
        # The whole ε would be spent on queries of nothing.
        ({"document_length": int(prompt)}, f"document_length is {prompt}.*prompt"),
        ({"pairs": free}, "noise now would certify nothing"),
        ({"t5": {"num_layers": 3}}, "t5 is .*, which does nothing where init is"),
    ):
        with pytest.raises(InputError, match=message):
            framed.run(STAGE, base / "release" / "bad", **_settings(base, **options))
        assert not (base / "release" / "bad").exists()
        assert not list((base / "private").glob("runs/bad/ledger.jsonl"))


def test_characters_that_no_query_can_have_are_named(base, monkeypatch, caplog):
    """Characters of public documents are checked before a step is paid for."""
    counts, out = collections.Counter({"ж": 3, "у": 9}), base / "release" / "lacking"
    monkeypatch.setattr(Tokenizer, "unknown", lambda *_: (counts, 0.1))
    made = settings.from_config(STAGE.Settings, _settings(base))
    given, place = runner.open_inputs(made), Place.of(out)
    c = runner.Context(made, given, place, Privacy.CERTIFIED, {})
    training.require_characters(c, training.tokenizer_of(c))
    assert "lacks 2 characters, 10.0% of the documents' text" in caplog.text
    monkeypatch.setattr(Tokenizer, "unknown", lambda *_: (counts, 0.6))
    with pytest.raises(InputError, match="60.0% .*: у ж. Start from a T5 of this lang"):
        framed.run(STAGE, out, **_settings(base))
    assert not list((base / "private").glob("runs/lacking/ledger.jsonl"))


def test_promised_private_weights_are_refused_before_they_are_made(base):
    """A job checks this before its first step."""
    made = settings.from_config(STAGE.Settings, _settings(base, epsilon=8.0))
    given = runner.open_inputs(made)
    STAGE.check(made, given)
    promise = dataclasses.replace(
        given["init"], privacy=Privacy.CERTIFIED, origin="a step", promised=True
    )
    with pytest.raises(InputError, match="set continues: 'composed' counts all runs"):
        STAGE.check(made, runner.Given({**given, "init": promise}))
    continued = dataclasses.replace(made, continues="composed")
    given = runner.Given({**given, "init": promise})
    STAGE.check(continued, given)
    assert STAGE.privacy(continued, given) == Privacy.CERTIFIED
