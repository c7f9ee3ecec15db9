"""`convert` for those who serve without TensorFlow."""

import json
import sys

import pytest
import tensorflow as tf
from helpers import framed, tiny

from tfdpsq.data import train_vocabulary
from tfdpsq.generator import T5QueryGenerator
from tfdpsq.layers import T5Config
from tfdpsq.privacy import read_certificate
from tfdpsq.run.stages.convert import STAGE
from tfdpsq.validation import DataError, InputError

TEXTS = ["It sorts a list in place", "reads", "gives back the matrix of a graph " * 5]


def convert(source, out, form, **changes):
    return framed.run(STAGE, out, input=str(source), format=form, **changes)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    base = tmp_path_factory.mktemp("out")
    queries = tiny.write_pairs(base / "pairs")
    return train_vocabulary(queries, 320, base / "spiece.model")


@pytest.fixture(scope="module")
def generator(vocabulary, tmp_path_factory):
    directory = tmp_path_factory.mktemp("generator")
    tf.keras.utils.set_random_seed(3)
    model = T5QueryGenerator(T5Config(330, 2, 2, 16, 24, 6, "1.0", dropout=0.1))
    model.save_to_huggingface(directory, vocabulary)
    framed.certify(directory, 8.0)
    return directory


@pytest.mark.slow
def test_a_generator_for_ctranslate2_keeps_its_certificate(generator, tmp_path):
    if pytest.importorskip("transformers").__version__ >= "5":
        pytest.skip("its converter needs transformers 4")
    ctranslate2 = pytest.importorskip("ctranslate2")
    out = tmp_path / "release" / "out"
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


def test_missing_library_is_named(generator, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ctranslate2.converters", None)
    with pytest.raises(InputError, match="(?s)ctranslate2.*pip install"):
        convert(generator, tmp_path / "out", "ctranslate2")
    assert not (tmp_path / "out").exists()
