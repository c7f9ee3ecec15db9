"""`convert` for those who serve without TensorFlow."""

import json
import sys

import pytest
from helpers import framed, tiny

from tfdpsq.data import train_vocabulary
from tfdpsq.privacy import read_certificate
from tfdpsq.run.stages.convert import STAGE
from tfdpsq.validation import InputError


def convert(source, out, form, **changes):
    return framed.run(STAGE, out, input=str(source), format=form, **changes)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    base = tmp_path_factory.mktemp("out")
    queries = tiny.write_pairs(base / "pairs")
    return train_vocabulary(queries, 320, base / "spiece.model")


@pytest.mark.parametrize("towers", [1, 2])
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
    if towers == 2:
        with pytest.raises(InputError, match="one encoder for both"):
            convert(trained, tmp_path / "other", "sentence-transformers")


def test_missing_library_is_named(vocabulary, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tf2onnx", None)
    framed.write_retriever(tmp_path / "trained", vocabulary)
    with pytest.raises(InputError, match="(?s)onnx.*pip install"):
        convert(tmp_path / "trained", tmp_path / "out", "onnx")
    assert not (tmp_path / "out").exists()
