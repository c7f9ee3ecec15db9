"""`convert` for those who serve without TensorFlow."""

import importlib
import importlib.util
import json
import shutil
import sys

import pyarrow.parquet
import pytest
import tensorflow as tf
from helpers import tiny as _tiny

from tfdpsq.data import (
    read_synthetic,
    train_vocabulary,
    write_synthetic,
)
from tfdpsq.data.sets import SyntheticQuery
from tfdpsq.generator import T5QueryGenerator
from tfdpsq.layers import T5Config
from tfdpsq.privacy import read_certificate
from tfdpsq.run import convert as command
from tfdpsq.run.convert import convert
from tfdpsq.run.core import records, releases
from tfdpsq.run.reporting import data_card
from tfdpsq.validation import DataError, InputError

import_command = importlib.import_module("tfdpsq.run.import")
TEXTS = ["It sorts a list in place", "reads", "gives back the matrix of a graph " * 5]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    base = tmp_path_factory.mktemp("out")
    queries = _tiny.write_pairs(base / "pairs")
    train_vocabulary(queries, 320, base / "spiece.model")
    for version in ("1.0", "1.1"):
        tf.keras.utils.set_random_seed(3)
        public = base / f"public{version}"
        public.mkdir()
        shape = T5Config(330, 2, 2, 16, 24, 6, version, dropout=0.1)
        model = T5QueryGenerator(shape)
        model.save_to_huggingface(public, base / "spiece.model")
        _tiny.write_private_generator(base / version, public, 8.0)
    return base


@pytest.fixture(scope="module")
def made(base):
    """A set with certificate; in rows that span several batches and files."""
    rows = [
        SyntheticQuery(
            f"genQ{i}", f"wer sortiert {i} – é", f"d{i // 2}", f"D{i // 2}.", i % 2
        )
        for i in range(10)
    ]
    config = {"generator": "release/generator", "top_p": 0.8}
    manifest = write_synthetic(
        base / "set",
        rows,
        provenance={"config": config},
        certificate=read_certificate(base / "1.0"),
        guarantee=releases.CERTIFIED,
    )
    data_card.write(base / "set", manifest)
    return base / "set"


def _trained(base, name, pairs, **options):
    _tiny.train_retriever(
        base / name,
        options,
        pairs=str(pairs),
        init=str(base / "public1.1"),
        document_length=24,
        query_length=10,
        embedding_dim=12,
        batch_size=4,
        steps=0,
    )
    # As if a step had been trained, on pairs with a certificate.
    records.write_certificate(base / name, read_certificate(pairs))
    return base / name


@pytest.mark.slow
def test_a_generator_for_ctranslate2_keeps_its_certificate(base, tmp_path):
    if pytest.importorskip("transformers").__version__ >= "5":
        pytest.skip("its converter needs transformers 4")
    ctranslate2 = pytest.importorskip("ctranslate2")
    out = tmp_path / "release" / "out"
    text = convert(base / "1.0", out, "ctranslate2", dtype="int8")
    assert "epsilon 7.98" in text
    assert read_certificate(out) == read_certificate(base / "1.0")
    # Loads with the mark in its config, by which a lost certificate is missed.
    ctranslate2.Translator(str(out))
    (out / "certificate.json").unlink()
    with pytest.raises(DataError, match="certificate.json: missing"):
        read_certificate(out)


@pytest.fixture(scope="module")
def retrievers(base, made):
    """By the number of their towers."""
    other = {"shared": False, "pooling": "first"}
    return {1: _trained(base, "one", made), 2: _trained(base, "two", made, **other)}


@pytest.mark.parametrize("towers", [1, 2])
def test_a_retriever_as_onnx_has_lengths_and_certificate(
    base, made, retrievers, tmp_path, towers
):
    pytest.importorskip("tf2onnx")
    out = tmp_path / "release" / "out"
    convert(retrievers[towers], out, command.ONNX)
    names = ["queries", "documents"] if towers == 2 else ["encoder"]
    assert sorted(p.stem for p in out.glob("*.onnx")) == sorted(names)
    about = json.loads((out / "config.json").read_text())
    assert (about["query_length"], about["document_length"]) == (10, 24)
    assert (out / "spiece.model").is_file() and (out / "tokenizer.json").is_file()
    assert read_certificate(out) == read_certificate(made)


def test_a_set_comes_back_row_by_row_with_its_certificate(made, tmp_path):
    one = tmp_path / "release" / "one"
    convert(made, one, "parquet")
    expected = [vars(row) for row in read_synthetic(made)]
    (path,) = one.glob("records/*.parquet")
    assert pyarrow.parquet.read_table(path).to_pylist() == expected
    assert [vars(row) for row in read_synthetic(one)] == expected
    # The guarantee goes along, and nothing takes it for private pairs or for a set.
    assert read_certificate(one) == read_certificate(made)
    assert "e^ε = 2,9" in (one / "README.md").read_text("utf-8")  # e^7.99…
    assert releases.stated(one) == releases.CERTIFIED
    (one / "certificate.json").unlink()
    with pytest.raises(DataError, match="certificate.json: missing"):
        read_certificate(one)
    config = import_command.default_config()
    config.log_documents_are_public = True
    # Nor a file that is copied without the others.
    (tmp_path / "alone").mkdir()
    for log in (one, shutil.copy(path, tmp_path / "alone")):
        config.logs.train = str(log)
        with pytest.raises(InputError, match="guarantee is 'certified'|is part of a"):
            import_command.run(config, tmp_path / "imported")
    assert not (tmp_path / "imported").exists()


def test_what_is_private_stays_so(tmp_path):
    """In the new formats as in the others."""
    rows = [SyntheticQuery("genQ0", "who", "d0", "D.", 0)]
    write_synthetic(tmp_path / "set", rows, {}, None, guarantee=releases.PRIVATE)
    for form in ("parquet",):
        with pytest.raises(InputError, match="must stay private"):
            convert(tmp_path / "set", tmp_path / "release" / form, form)
        convert(tmp_path / "set", tmp_path / form, form)
        assert releases.stated(tmp_path / form) == releases.PRIVATE
        assert all(p.stat().st_mode & 0o077 == 0 for p in (tmp_path / form).rglob("*"))
    assert not (tmp_path / "release").exists()


def test_options_inputs_and_missing_libraries_are_named(
    base, made, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    for source, form, options, message in (
        (base / "1.0", "parquet", {}, "1.0 is not a synthetic or public set"),
        (made, "parquet", {"dtype": "int8"}, "dtype of parquet is 'int8'"),
        (base / "1.0", "onnx", {}, "1.0 is not a retriever"),
        (
            base / "1.0",
            "ctranslate2",
            {"encoder_only": True},
            "no place for an encoder",
        ),
    ):
        with pytest.raises(InputError, match=message):
            convert(source, out, form, **options)
    for source, form, module in (
        (base / "1.0", "ctranslate2", "ctranslate2"),
        (made, "parquet", "pyarrow"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(InputError, match=rf"(?s){module}.*pip install"):
            convert(source, out, form)
    assert not out.exists()
