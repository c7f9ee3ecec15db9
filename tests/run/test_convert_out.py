"""`convert` for those who serve without TensorFlow."""

import json
import sys

import pyarrow.parquet
import pytest
import tensorflow as tf
from helpers import framed, tiny

from tfdpsq.data import read_synthetic, train_vocabulary, write_synthetic
from tfdpsq.data.sets import SyntheticQuery
from tfdpsq.generator import T5QueryGenerator
from tfdpsq.layers import T5Config
from tfdpsq.privacy import read_certificate
from tfdpsq.run.common import data_card
from tfdpsq.run.frame.artefacts import class_stated
from tfdpsq.run.frame.places import Privacy
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


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A set with certificate; in rows that span several files."""
    rows = [
        SyntheticQuery(
            f"genQ{i}", f"wer sortiert {i} – é", f"d{i // 2}", f"D{i // 2}.", i % 2
        )
        for i in range(10)
    ]
    place = tmp_path_factory.mktemp("made") / "set"
    provenance = {"config": {"top_p": 0.8}}
    certificate = framed.certificate(8.0)
    manifest = write_synthetic(
        place, rows, provenance, certificate, shards=2, guarantee="certified"
    )
    data_card.write(place, manifest)
    return place


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


def test_a_set_comes_back_row_by_row_with_its_certificate(made, tmp_path):
    one = tmp_path / "release" / "one"
    convert(made, one, "parquet")
    expected = [vars(row) for row in read_synthetic(made)]
    (path,) = one.glob("set/records/*.parquet")
    assert pyarrow.parquet.read_table(path).to_pylist() == expected
    assert [vars(row) for row in read_synthetic(one / "set")] == expected
    assert read_certificate(one) == read_certificate(made)
    assert "tfdpsq verify" in (one / "set" / "README.md").read_text("utf-8")
    assert class_stated(str(one)) == Privacy.CERTIFIED
    for place in (one, one / "set"):
        (place / "certificate.json").unlink()
        with pytest.raises(DataError, match="certificate.json: missing"):
            read_certificate(place)


def test_what_is_private_stays_so(tmp_path):
    """In the new formats as in the others."""
    rows = [SyntheticQuery("genQ0", "who", "d0", "D.", 0)]
    write_synthetic(tmp_path / "set", rows, {}, None, guarantee="private")
    with pytest.raises(InputError, match="no epsilon covers it"):
        convert(tmp_path / "set", tmp_path / "release" / "parquet", "parquet")
    out = tmp_path / "private" / "parquet"
    convert(tmp_path / "set", out, "parquet")
    assert class_stated(str(out)) == Privacy.PRIVATE
    assert all(path.stat().st_mode & 0o077 == 0 for path in out.rglob("*"))
    assert not (tmp_path / "release").exists()


def test_missing_libraries_are_named(generator, made, tmp_path, monkeypatch):
    for source, form, module in (
        (generator, "ctranslate2", "ctranslate2"),
        (made, "parquet", "pyarrow"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(InputError, match=rf"(?s){module}.*pip install"):
            convert(source, tmp_path / "out", form)
    assert not (tmp_path / "out").exists()
