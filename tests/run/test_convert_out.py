"""`convert` for those who serve without TensorFlow: compared with ours, in numbers."""

import glob
import importlib
import importlib.util
import json
import pathlib
import shutil
import sys

import numpy as np
import pytest
import tensorflow as tf
from helpers import tiny as _tiny

from tfdpsq import retriever
from tfdpsq.data import (
    Document,
    Tokenizer,
    read_synthetic,
    train_vocabulary,
    write_synthetic,
)
from tfdpsq.data import export as set_export
from tfdpsq.data.records import SyntheticQuery
from tfdpsq.generator import T5QueryGenerator, ctranslate2_export
from tfdpsq.layers import T5Config
from tfdpsq.privacy import read_certificate
from tfdpsq.retriever import onnx_export
from tfdpsq.run import convert as command
from tfdpsq.run.convert import COMPARISON_FILE, convert
from tfdpsq.run.core import records, releases, sources
from tfdpsq.run.reporting import data_card
from tfdpsq.validation import DataError, InputError

import_command = importlib.import_module("tfdpsq.run.import")
TEXTS = ["It sorts a list in place", "reads", "gives back the matrix of a graph " * 5]


@pytest.fixture(scope="module", autouse=True)
def few_texts():
    """A tiny model needs no twenty thousand documents read to compare it."""
    few = [Document("d", "", text) for text in TEXTS * 4]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "sampled_documents", lambda *_: few)
        yield


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
        model.save_to_preset(public, base / "spiece.model")
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
    config = {"generator": "release/generator", "top_p": 0.8, "prompt": "q: "}
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


def _adds_int8_exactly():
    """Returns whether sums of int8 products cannot overflow on this processor.

    Without VNNI they may in CTranslate2, which `convert` notices and refuses.
    """
    flags = pathlib.Path("/proc/cpuinfo").read_text("utf-8")
    return "vnni" in flags


@pytest.mark.parametrize(
    ("version", "dtype"), [("1.0", "float32"), ("1.1", "float32"), ("1.1", "int8")]
)
def test_a_generator_for_ctranslate2_writes_the_same(base, tmp_path, version, dtype):
    ctranslate2 = pytest.importorskip("ctranslate2")
    out = tmp_path / "release" / "out"
    try:
        text = convert(base / version, out, "ctranslate2", dtype=dtype)
    except InputError as error:
        assert dtype == "int8" and not _adds_int8_exactly()
        assert "at most 0.1 in int8" in str(error) and not out.exists()
        return
    found = json.loads((out / COMPARISON_FILE).read_text())
    nats = found["log_probability_difference"]
    if dtype == "float32":
        assert found["same_tokens"] == found["same_queries"] == 1
        assert nats["largest"] < 2e-5
    assert nats["mean"] < 0.05 and found["tokens"] >= 12
    assert "carried along, epsilon 7.98" in text
    # As in every format: the certificate, and a mark in the model's own config.
    assert read_certificate(out) == read_certificate(base / version)
    (out / "certificate.json").rename(tmp_path / "certificate.json")
    with pytest.raises(DataError, match="private queries had a part in this"):
        read_certificate(out)
    # Loads with the mark in its config, and holds no float32 matrix in int8.
    translator = ctranslate2.Translator(str(out))
    assert (translator.compute_type == "float32") == (dtype == "float32")


def test_queries_that_are_cut_off_are_scored_and_another_model_is_refused(base):
    """A query of one token has an end that CTranslate2 adds: it is scored, too."""
    pytest.importorskip("ctranslate2")
    model = T5QueryGenerator.from_preset(base / "1.0")
    out = base / "ct2"
    convert(base / "1.0", out, "ctranslate2")
    found = ctranslate2_export.compare(out, model, "float32", TEXTS, query_length=1)
    assert found["tokens"] == len(TEXTS)
    assert found["log_probability_difference"]["largest"] < 2e-5
    model.set_weights([weight[::-1] for weight in model.get_weights()])
    with pytest.raises(InputError, match="nats a token"):
        ctranslate2_export.compare(out, model, "float32", TEXTS)


@pytest.fixture(scope="module")
def retrievers(base, made):
    """By the number of their towers."""
    other = {"shared": False, "pooling": "first"}
    return {1: _trained(base, "one", made), 2: _trained(base, "two", made, **other)}


@pytest.mark.parametrize(("towers", "dtype"), [(1, "int8"), (2, "float32")])
def test_a_retriever_as_onnx_has_the_same_embeddings(
    base, made, retrievers, tmp_path, towers, dtype
):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    source = retrievers[towers]
    out = tmp_path / "release" / "out"
    convert(source, out, command.ONNX, dtype=dtype)
    names = ["queries", "documents"] if towers == 2 else ["encoder"]
    assert sorted(p.stem for p in out.glob("*.onnx")) == sorted(names)
    # Beyond 128 tokens, where all positions are in one bucket; and padded otherwise.
    ids, lengths = Tokenizer(base / "spiece.model").encode([*TEXTS, TEXTS[2] * 5], 200)
    assert int(lengths[3]) > 150
    model, exact = retriever.load(source / "model"), dtype == "float32"
    for name, encode in zip(names, (model.encode_queries, model.encode_documents)):
        session = onnx_export.session(out / f"{name}.onnx")
        found = onnx_export.embed(session, ids.numpy(), lengths.numpy())
        cosine = (found * encode(ids, lengths).numpy()).sum(axis=1)
        assert cosine.min() > (1 - 1e-6 if exact else 0.98)
        np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
        short = onnx_export.embed(session, ids.numpy()[:2, :30], lengths.numpy()[:2])
        np.testing.assert_allclose(short, found[:2], atol=1e-6 if exact else 0.1)
        stated = json.loads((out / COMPARISON_FILE).read_text())[name]
        assert stated["cosine"]["least"] > 0.98
    tower = model.query_tower
    tower.set_weights([weight[::-1] for weight in tower.get_weights()])
    with pytest.raises(InputError, match="has cosine .* to ours"):
        onnx_export.compare(out, model, dtype, ids.numpy(), lengths.numpy())
    about = json.loads((out / "config.json").read_text())
    assert (about["query_length"], about["document_length"]) == (10, 24)
    assert read_certificate(out) == read_certificate(made)


@pytest.mark.parametrize("form", set_export.FORMATS)
def test_a_set_comes_back_row_by_row_with_its_certificate(made, tmp_path, form):
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    one, two = tmp_path / "release" / "one", tmp_path / "two"
    convert(made, one, form)
    two.mkdir()
    set_export.export_set(made, two, form, rows_per_file=4)  # 4, 4 and 2 rows
    expected = [vars(row) for row in read_synthetic(made)]
    for place, files in ((two, 3), (one, 1)):
        if form == set_export.PARQUET:
            paths = sorted(glob.glob(f"{place}/*.parquet"))
            parts = [pyarrow.parquet.read_table(path) for path in paths]
        else:
            state = json.loads((place / "state.json").read_text())
            paths = [place / each["filename"] for each in state["_data_files"]]
            parts = [arrow.ipc.open_stream(path).read_all() for path in paths]
        assert len(paths) == files
        assert arrow.concat_tables(parts).to_pylist() == expected
    # The guarantee goes along, and nothing takes it for private pairs or for a set.
    assert read_certificate(one) == read_certificate(made)
    assert "e^ε = 2,9" in (one / "README.md").read_text("utf-8")  # e^7.99…
    assert releases.stated(one) == releases.CERTIFIED
    (one / "certificate.json").unlink()
    with pytest.raises(DataError, match="private queries had a part in this"):
        read_certificate(one)
    config = import_command.default_config()
    config.log_documents_are_public = True
    # Nor a file that is copied without the others.
    (tmp_path / "alone").mkdir()
    for log in (one, shutil.copy(paths[0], tmp_path / "alone")):
        config.logs.train = str(log)
        with pytest.raises(InputError, match="guarantee is 'certified'|is part of a"):
            import_command.run(config, tmp_path / "imported")
    assert not (tmp_path / "imported").exists()


def test_what_is_private_stays_so(tmp_path):
    """In the new formats as in the others."""
    rows = [SyntheticQuery("genQ0", "who", "d0", "D.", 0)]
    write_synthetic(tmp_path / "set", rows, {}, None, guarantee=releases.PRIVATE)
    for form in ("parquet", "datasets"):
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
        (made, "parquet", {"dtype": "int8"}, "dtype is 'int8'"),
        (base / "1.0", "onnx", {}, "1.0 is not a retriever|pip install"),
        (base / "1.0", "ctranslate2", {"encoder_only": True}, "a whole T5|pip install"),
    ):
        with pytest.raises(InputError, match=message):
            convert(source, out, form, **options)
    for form, module in (("ctranslate2", "ctranslate2"), ("parquet", "pyarrow")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(InputError, match=rf"(?s){module}.*pip install 'tfdpsq"):
            convert(base / "1.0", out, form)
    assert not out.exists()
