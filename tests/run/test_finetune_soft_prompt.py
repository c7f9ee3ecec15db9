"""Prompt tuning by its stage: settings, certificate, what others make of it."""

import json
import math
import shutil

import numpy as np
import pytest
import tensorflow as tf
from helpers import tiny as _tiny

from tfdpsq.data import Tokenizer, read_manifest
from tfdpsq.generator import T5QueryGenerator, checkpoints
from tfdpsq.run import convert, finetune, synthesize, train_retriever
from tfdpsq.run.core import layout, workdir
from tfdpsq.run.estimation import finetuning
from tfdpsq.run.training import starting_model
from tfdpsq.validation import InputError

_P, _HIDDEN = 5, 16
_SIZES = {"document_length": 24, "query_length": 10}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Pairs, and a public T5 with its vocabulary beside its weights."""
    base = tmp_path_factory.mktemp("prompts")
    _tiny.write_start(base, version="1.1")
    return base


def _config(base, **options):
    return _tiny.config(
        finetune,
        options,
        **_SIZES,
        pairs=str(base / "pairs"),
        init=str(base / "public"),
        vocabulary=str(base / "spiece.model"),
        soft_prompt={"length": _P},
        batch_size=8,
        microbatch_size=4,
        steps=3,
        accountant="rdp",
        n_is_public=True,
        learning_rate=0.3,
        optimizer="adafactor",
    )


@pytest.fixture(scope="module")
def tuned(base):
    """Where a soft prompt was tuned at epsilon 8."""
    finetune.run(_config(base), base / "tuned")
    return base / "tuned"


@pytest.fixture(scope="module")
def start(base):
    """The vectors that training starts from, by the default seed."""
    return _start(base)


def test_the_prompt_alone_is_trained_and_certified(base, tuned, start):
    certificate = json.loads((tuned / "certificate.json").read_text())
    assert certificate["guarantee"]["epsilon"] <= 8.0
    assert certificate["training"]["soft_prompt"] == _P
    assert certificate["training"]["lora"] == "none"
    assert certificate["training"]["trained_parameters"] == _P * _HIDDEN
    model, before = map(T5QueryGenerator.from_preset, (tuned, base / "public"))
    theirs = [v for v in model.backbone.weights if "soft_prompt" not in v.name]
    assert len(theirs) == len(before.backbone.weights)
    for one, other in zip(theirs, before.backbone.weights):
        np.testing.assert_array_equal(one, other)
    for name in ("model.safetensors", "spiece.model"):
        assert (tuned / name).read_bytes() == (base / "public" / name).read_bytes()
    configs = [
        json.loads((p / "config.json").read_text()) for p in (base / "public", tuned)
    ]
    assert configs[1] == {**configs[0], "certificate_digest": certificate["digest"]}
    # Three steps from where it started, words of the vocabulary.
    vectors = model.backbone.soft_prompt.vectors.numpy()
    assert (np.abs(vectors - start).max(axis=1) > 1e-3).all()


def _start(base, **options):
    config = _config(base, **options)
    tokenizer = Tokenizer(config.vocabulary)
    model = starting_model.load_generator(config, tokenizer)
    return model.backbone.soft_prompt.vectors.numpy()


def test_it_starts_as_words_by_the_seed(base, start):
    np.testing.assert_array_equal(_start(base), start)
    assert not np.array_equal(_start(base, seed=1), start)
    public = T5QueryGenerator.from_preset(base / "public")
    words = public.backbone.token_embedding.embeddings.numpy()
    ids = [int(np.where((words == vector).all(axis=1))[0][0]) for vector in start]
    assert len(set(ids)) == _P
    # No padding, end, unknown, or one of the 256 bytes; nor what has no piece.
    assert min(ids) >= 3 + 256 and max(ids) < 320


def test_later_stages_use_it_or_refuse(base, tuned, tmp_path):
    config = synthesize.default_config()
    config.update({**_SIZES, "corpus": str(base / "pairs"), "max_documents": 5})
    config.update({"batch_size": 8, "shards": 1, "query_length": 6})
    written = []
    for number, generator in enumerate((tuned, base / "public")):
        config.generator = str(generator)
        out = tmp_path / str(number)
        synthesize.run(config, out)
        manifest = read_manifest(out / layout.SET)
        assert manifest["count"] + manifest["empty_queries_left_out"] == 5
        (queries,) = (out / layout.SET).rglob("queries.jsonl")
        written.append(queries.read_text())
        private = (manifest["certificate"] or {}).get("private", False)
        assert private == (generator == tuned)
    assert written[0] != written[1]
    # The file is part of what identifies the model, here one from elsewhere.
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in tuned.iterdir():
        if path.is_file() and path.name != workdir.STAGE_FILE:
            (copy / path.name).write_bytes(path.read_bytes())
    whole = workdir.model_fingerprint(copy)
    (copy / "soft_prompt.safetensors").unlink()
    assert workdir.model_fingerprint(copy) != whole

    text = convert.convert(tuned, tmp_path / "carried", "huggingface", dtype="bfloat16")
    assert f"{_P} vectors" in text
    vectors = [
        T5QueryGenerator.from_preset(path).backbone.soft_prompt.vectors.numpy()
        for path in (tuned, tmp_path / "carried")
    ]
    np.testing.assert_array_equal(*vectors)
    for form in ("keras", "t5x"):
        with pytest.raises(InputError, match=f"soft prompt of {_P} .*no place for"):
            convert.convert(tuned, tmp_path / "out", form)
    with pytest.raises(InputError, match="an encoder alone has no place for"):
        convert.convert(tuned, tmp_path / "out", "huggingface", encoder_only=True)
    retriever = train_retriever.default_config()
    retriever.update({**_SIZES, "pairs": str(base / "pairs"), "init": str(tuned)})
    retriever.update({"epsilon": math.inf, "n_is_public": True, "steps": 0})
    with pytest.raises(InputError, match="an encoder alone has no place for"):
        train_retriever.run(retriever, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_public_prompt_is_tuned_further(base, tuned):
    """Of another set, say; from one tuned on private queries, a finite ε is refused."""
    options = {"init": str(base / "transferred"), "steps": 1}
    model = T5QueryGenerator.from_preset(base / "public", soft_prompt=_P)
    model.backbone.soft_prompt.vectors.assign(tf.ones([_P, _HIDDEN]))
    (base / "transferred").mkdir()
    model.save_to_preset(base / "transferred", base / "spiece.model")
    np.testing.assert_array_equal(_start(base, **options), np.ones([_P, _HIDDEN]))
    with pytest.raises(InputError, match="was itself trained on private queries"):
        finetune.run(_config(base, init=str(tuned)), base / "again")


@pytest.mark.slow
def test_the_estimate_knows_it(base):
    config = _config(base)
    found = finetuning.estimate(config, process=0)
    assert found.trained == _P * _HIDDEN
    assert found.memory.sums == 4 * found.trained
    plain = _config(base, soft_prompt={"length": 0})
    assert found.parameters == (
        finetuning.estimate(plain, process=0).parameters + found.trained
    )


def test_settings_that_cannot_be_are_refused_before_anything_is_spent(base, tuned):
    prompted = base / "prompted"
    prompted.mkdir()
    for name in ("model.safetensors", "soft_prompt.safetensors"):
        (prompted / name).write_bytes((tuned / name).read_bytes())
    # Of the same shapes, and public.
    shutil.copyfile(base / "public" / "config.json", prompted / "config.json")
    other = {"soft_prompt": {"length": 4}}
    none = {"soft_prompt": {"length": 0}}
    for options, message in (
        (
            {"lora": {"rank": 2}},
            f"lora.rank is 2 and soft_prompt.length {_P}: .*one of them to 0",
        ),
        (
            {"trained": ("*norm*",)},
            rf"soft_prompt.length is {_P} and trained \['\*norm\*'\]: .*length to 0",
        ),
        ({"soft_prompt": {"length": -1}}, "soft_prompt.length is -1; .*at least 0"),
        ({"init": str(prompted), **other}, f"of {_P} vectors, where one of 4 is want"),
        ({"init": str(prompted), **none}, f"of {_P} vectors, where one of 0 is want"),
    ):
        config = _config(base, **options)
        with pytest.raises(InputError, match=message):
            finetune.run(config, base / "bad")
        assert not (base / "bad").exists()
        assert not list((base / "private").glob("runs/bad/ledger.jsonl"))
        if "init" in options:
            with pytest.raises(InputError, match=message):
                finetuning.estimate(config, process=0)
    assert checkpoints.open_checkpoint(prompted).soft_prompt.length == _P
