"""`convert`: each format to each, with what lies beside the weights, or nothing."""

import dataclasses
import json
import shutil
import sys

import pytest
from helpers import framed

from tfdpsq.data import train_vocabulary
from tfdpsq.generator import checkpoints
from tfdpsq.layers import T5Backbone, T5Config
from tfdpsq.privacy import read_certificate
from tfdpsq.run.frame import records
from tfdpsq.run.frame.artefacts import class_stated
from tfdpsq.run.frame.places import Privacy
from tfdpsq.run.stages.convert import STAGE
from tfdpsq.validation import DataError, InputError

PIECES = 290
CONFIG = T5Config(310, 1, 2, 6, 5, 4, "1.1")


def convert(source, out, form="huggingface", **changes):
    return framed.run(STAGE, out, input=str(source), format=form, **changes)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    texts = [f"query {i} reads what every gradient said of it" for i in range(40)]
    place = tmp_path_factory.mktemp("vocabulary") / "some.model"
    return str(train_vocabulary(texts, PIECES, place))


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A T5 1.1 without vocabulary and certificate."""
    directory = tmp_path_factory.mktemp("one")
    checkpoints.save(directory, CONFIG, T5Backbone(CONFIG))
    return directory


@pytest.mark.parametrize(
    "version", ["1.1", pytest.param("1.0", marks=pytest.mark.slow)]
)
def test_there_and_back_everything_comes_back(version, vocabulary, tmp_path):
    first = before = tmp_path / "first"
    first.mkdir()
    config = dataclasses.replace(CONFIG, version=version)
    checkpoints.save(first, config, T5Backbone(config), vocabulary=vocabulary)
    framed.certify(first, 8.0)
    for form in ("keras", "huggingface"):
        after = tmp_path / "release" / form
        record = convert(before, after, form)
        assert checkpoints.open_checkpoint(after).format == form
        assert f"{PIECES} pieces" in record["line"]
        assert record["guarantee"] == "certified"
        before = after

    files = ["model.safetensors", "config.json", "spiece.model", "certificate.json"]
    files += ["tokenizer.json", "tokenizer_config.json"]
    for name in files:
        assert (before / name).read_bytes() == (first / name).read_bytes()
    made = sorted(path.name for path in before.iterdir())
    assert made == sorted([*files, records.STAGE_FILE])


def test_what_is_private_stays_so_and_a_lost_certificate_is_missed(one, tmp_path):
    """A finite epsilon was all that was left of a generator trained on canaries."""
    before = tmp_path / "private" / "audited"
    shutil.copytree(one, before)
    framed.certify(before, 8.0)
    depends = {"stage": "finetune", "settings": {}, "inputs": {}}
    records.write_stage(before, depends, guarantee="private", facts={})
    for form in ("keras", "huggingface"):
        with pytest.raises(InputError, match="no epsilon covers it"):
            convert(before, tmp_path / "release" / form, form)
        after = tmp_path / "private" / form
        convert(before, after, form)
        assert class_stated(str(after)) == Privacy.PRIVATE
        assert after.stat().st_mode & 0o077 == 0
        before = after
    assert not (tmp_path / "release").exists()
    for form in ("keras", "huggingface"):
        lost = shutil.ignore_patterns("certificate.json", records.STAGE_FILE)
        shutil.copytree(tmp_path / "private" / form, tmp_path / form, ignore=lost)
        with pytest.raises(InputError, match="certificate.json: missing"):
            convert(tmp_path / form, tmp_path / "private" / "out", form)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "gguf"}, "format is 'gguf'"),
        ({"dtype": "int8"}, "dtype of huggingface is 'int8'"),
        ({"format": "onnx"}, "format of .* is 'onnx'"),
        ({"input": "absent"}, "absent does not exist"),
    ],
)
def test_settings_that_do_not_fit_are_refused(one, tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        framed.run(STAGE, tmp_path / "out", **{"input": str(one), **changes})
    assert not (tmp_path / "out").exists()


def test_dtype_and_vocabulary_are_those_asked_for(one, vocabulary, tmp_path):
    changes = {"dtype": "bfloat16", "vocabulary": vocabulary}
    record = convert(one, tmp_path / "out", **changes)
    # Embedding and head 2 × 310 × 6; positions 2 × 32 × 2; attention 3 × 4 × 6 × 8;
    # feed-forward 2 × 3 × 6 × 5; norms (2 + 3 + 2) × 6.
    count = 2 * 310 * 6 + 2 * 64 + 3 * 4 * 48 + 2 * 90 + 7 * 6
    assert f"{count:,} parameters in bfloat16" in record["result"]["about"]
    tensor = checkpoints.open_checkpoint(tmp_path / "out").tensors["shared.weight"]
    assert tensor.shape == (310, 6)
    assert '"torch_dtype": "bfloat16"' in (tmp_path / "out/config.json").read_text()
    assert (tmp_path / "out" / "spiece.model").is_file()


def test_a_vocabulary_of_another_model_is_refused(vocabulary, tmp_path):
    config = dataclasses.replace(CONFIG, vocabulary_size=PIECES - 1)
    (tmp_path / "small").mkdir()
    checkpoints.save(tmp_path / "small", config, T5Backbone(config))
    with pytest.raises(InputError, match="290 pieces"):
        convert(tmp_path / "small", tmp_path / "out", vocabulary=vocabulary)


# -- For those who serve without TensorFlow -----------------------------------------


@pytest.mark.slow
def test_a_generator_for_ctranslate2_keeps_its_certificate(vocabulary, tmp_path):
    if pytest.importorskip("transformers").__version__ >= "5":
        pytest.skip("its converter needs transformers 4")
    ctranslate2 = pytest.importorskip("ctranslate2")
    generator, out = tmp_path / "generator", tmp_path / "release" / "out"
    config = T5Config(310, 2, 2, 16, 24, 6, "1.0")
    generator.mkdir()
    checkpoints.save(generator, config, T5Backbone(config), vocabulary=vocabulary)
    framed.certify(generator, 8.0)
    convert(generator, out, "ctranslate2", dtype="int8")
    assert read_certificate(out) == read_certificate(generator)
    # Loads with the mark in its config, by which a lost certificate is missed.
    ctranslate2.Translator(str(out))
    (out / "certificate.json").unlink()
    with pytest.raises(DataError, match="certificate.json: missing"):
        read_certificate(out)


@pytest.mark.parametrize("towers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_retriever_as_onnx_has_lengths_and_certificate(vocabulary, tmp_path, towers):
    pytest.importorskip("tf2onnx")
    trained, out = tmp_path / "trained", tmp_path / "release" / "out"
    framed.write_retriever(trained, vocabulary, shared=towers == 1)
    certificate = framed.certify(trained, 8.0)
    convert(trained, out, "onnx")
    names = ["queries", "documents"] if towers == 2 else ["encoder"]
    assert sorted(p.stem for p in out.glob("*.onnx")) == sorted(names)
    about = json.loads((out / "config.json").read_text())
    assert (about["query_length"], about["document_length"]) == (10, 24)
    assert (out / "spiece.model").is_file() and (out / "tokenizer.json").is_file()
    assert read_certificate(out) == certificate


def test_missing_library_is_named(one, vocabulary, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ctranslate2.converters", None)
    with pytest.raises(InputError, match="(?s)ctranslate2.*pip install"):
        convert(one, tmp_path / "out", "ctranslate2", vocabulary=vocabulary)
    assert not (tmp_path / "out").exists()
