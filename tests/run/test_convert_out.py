"""`convert` for those who serve without TensorFlow: compared with ours, in numbers."""

import glob
import importlib
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
    Tokenizer,
    read_manifest,
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
from tfdpsq.run import synthesize
from tfdpsq.run.convert import COMPARISON_FILE, convert
from tfdpsq.run.core import records, releases, sources, workdir
from tfdpsq.run.reporting import data_card
from tfdpsq.validation import DataError, InputError

import_command = importlib.import_module("tfdpsq.run.import")
TEXTS = ["It sorts a list in place", "reads", "gives back the matrix of a graph " * 5]


@pytest.fixture(scope="module", autouse=True)
def few_texts():
    """A tiny model needs no twenty thousand documents read to compare it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "_public_texts", lambda: TEXTS * 4)
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


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
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


def test_beam_and_cut_off_queries_are_scored_as_ours(base):
    """A query of one token has an end that CTranslate2 adds: it is scored, too."""
    pytest.importorskip("ctranslate2")
    model = T5QueryGenerator.from_preset(base / "1.0")
    out = base / "ct2"
    convert(base / "1.0", out, "ctranslate2")
    found = ctranslate2_export.compare(out, model, "float32", TEXTS, query_length=1)
    assert found["tokens"] == len(TEXTS)
    assert found["log_probability_difference"]["largest"] < 2e-5


@pytest.mark.parametrize("wrong", ["positions", "scale", "gate", "key"])
def test_a_wrong_ctranslate2_model_is_refused(base, tmp_path, wrong, monkeypatch):
    pytest.importorskip("ctranslate2")
    filled = ctranslate2_export._filled

    def spoiled(config, value):
        spec = filled(config, value)
        layer = spec.decoder.layer[1]
        if wrong == "positions":
            bias = spec.decoder.layer[0].self_attention.relative_attention_bias
            for each in spec.decoder.layer:
                each.self_attention.relative_attention_bias = 0 * bias
        elif wrong == "scale":
            spec.decoder.scale_outputs = np.float32(1.0)
        elif wrong == "gate":
            layer.ffn.linear_0.weight = layer.ffn.linear_0_noact.weight
        else:
            matrix = layer.attention.linear[1].weight
            layer.attention.linear[1].weight = np.roll(matrix, 1, axis=1)
        return spec

    monkeypatch.setattr(ctranslate2_export, "_filled", spoiled)
    version = "1.0" if wrong == "scale" else "1.1"
    with pytest.raises(InputError, match="differs from the model by .* nats a token"):
        convert(base / version, tmp_path / "out", "ctranslate2")
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def retrievers(base, made):
    """By the number of their towers."""
    other = {"shared": False, "pooling": "first"}
    return {1: _trained(base, "one", made), 2: _trained(base, "two", made, **other)}


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("towers", [1, 2])
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
        assert stated["texts"] == 24 and stated["cosine"]["least"] > 0.98
    about = json.loads((out / "config.json").read_text())
    assert (about["query_length"], about["document_length"]) == (10, 24)
    assert read_certificate(out) == read_certificate(made)


def test_a_wrong_onnx_file_is_refused(retrievers, tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    monkeypatch.setattr(
        onnx_export._Graph, "_bias", lambda self, layer: self._weight(0.0)
    )
    with pytest.raises(InputError, match="encoder.onnx has cosine .* to ours"):
        convert(retrievers[1], tmp_path / "out", command.ONNX)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", set_export.FORMATS)
def test_a_set_comes_back_row_by_row(made, tmp_path, form, monkeypatch):
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    monkeypatch.setattr(set_export, "_BATCH", 3)
    one, two = tmp_path / "release" / "one", tmp_path / "two"
    convert(made, one, form)
    two.mkdir()
    set_export.export_set(made, two, form, rows_per_file=4)  # 4, 4 and 2 rows
    expected = [vars(row) for row in read_synthetic(made)]
    for place, files in ((one, 1), (two, 3)):
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
    assert releases.stated(one) == releases.CERTIFIED
    (one / "certificate.json").unlink()
    with pytest.raises(DataError, match="private queries had a part in this"):
        read_certificate(one)
    assert sources.why_not_public(str(paths[0]), raw_pairs=False) is not None
    config = import_command.default_config()
    config.logs.train, config.log_documents_are_public = str(one), True
    with pytest.raises(
        InputError, match="its guarantee is 'certified'|is part of a synth"
    ):
        import_command.run(config, tmp_path / "imported")
    text = (one / "README.md").read_text("utf-8")
    assert "ε = 8" in text and set_export.READ[form] in text
    # Nor does a file that is copied without the others.
    alone = tmp_path / "alone"
    alone.mkdir()
    config.logs.train = str(shutil.copy(paths[0], alone))
    assert sources.why_not_public(config.logs.train, raw_pairs=False) is None
    with pytest.raises(InputError, match="is part of a set of queries, as its metada"):
        import_command.run(config, tmp_path / "imported")
    assert not (tmp_path / "imported").exists()


def test_what_is_private_stays_so(base, tmp_path):
    """In the new formats as in the others."""
    rows = [SyntheticQuery("genQ0", "who", "d0", "D.", 0)]
    made = tmp_path / "set"
    manifest = write_synthetic(made, rows, {}, None, guarantee=releases.PRIVATE)
    assert "**Not for release**" in data_card.text(manifest)
    cases = [("parquet", made), ("datasets", made)]
    audited = tmp_path / "audited"
    _tiny.write_private_generator(audited, base / "public1.0", 8.0)
    workdir.write_stage(
        audited,
        releases.Output(audited, releases.PRIVATE, "x"),
        {"config": {}, "inputs": {}},
    )
    cases.append(("ctranslate2", audited))
    for form, source in cases:
        if form == "ctranslate2":
            pytest.importorskip("ctranslate2")
        what = "a model" if form == "ctranslate2" else "a set"
        message = f"would hold {what} that private.* must stay private"
        with pytest.raises(InputError, match=message):
            convert(source, tmp_path / "release" / form, form)
        convert(source, tmp_path / form, form)
        assert releases.stated(tmp_path / form) == releases.PRIVATE
        assert all(p.stat().st_mode & 0o077 == 0 for p in (tmp_path / form).rglob("*"))
    assert not (tmp_path / "release").exists()


def test_the_card_says_what_the_manifest_holds(made):
    text = (made / "README.md").read_text("utf-8")
    for words in (
        "10 queries",
        "(5 documents)",
        "Had any query",
        "e^ε = 2,9",  # e^7.99…
        "Private reads that ε does not cover: none",
        "Generator: 'generator'",
        "Nucleus (top-p): 0.8",
        "tfdpsq verify",
        "## Limits",
    ):
        assert words in text, words
    assert not data_card.text({"count": 1}).startswith("No")  # from the least of a set


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_card_tells_which_private_reads_made_the_set(made, tmp_path, depth):
    """A set of `documents=train`, filtered 0 to 2 times; its card once said none."""
    manifest = read_manifest(made)
    read = synthesize.TRAINING_DOCUMENTS_READ
    told = f"{read['what']}: {read['where']}"
    provenance = {**manifest["provenance"], "private_reads": [read]}
    for _ in range(depth):
        provenance = {"config": {}, "of": provenance}
    manifest["provenance"] = provenance
    for guarantee, certificate in (
        (releases.CERTIFIED, manifest["certificate"]),
        (releases.PUBLIC, None),
        (releases.PRIVATE, None),
    ):
        manifest.update(guarantee=guarantee, certificate=certificate)
        text = data_card.text(manifest)
        assert f"- Private reads that ε does not cover: {told}\n" in text
        for false in ("No private query had", "nothing to protect", "reads.*: none"):
            assert false not in text, (guarantee, false)
        assert "For which documents it wrote was a private read" in text
        assert "asked by a person" not in text and "may equal one that" in text


def test_options_and_inputs_that_do_not_fit_are_refused(base, made, tmp_path):
    out = tmp_path / "out"
    for source, form, options, message in (
        (base / "1.0", "parquet", {}, "1.0 is not a synthetic or public set"),
        (made, "parquet", {"dtype": "int8"}, "dtype is 'int8', which does nothing for"),
        (
            made,
            "datasets",
            {"vocabulary": "x"},
            "vocabulary is 'x', which does nothing",
        ),
        (base / "1.0", "keras", {"dtype": "int8"}, "dtype is 'int8'"),
        (base / "1.0", "onnx", {}, "1.0 is not a retriever"),
        (base / "1.0", "onnx", {"dtype": "bfloat16"}, "dtype is 'bfloat16'"),
        (base / "1.0", "ctranslate2", {"dtype": "bfloat16"}, "dtype is 'bfloat16'"),
        (base / "1.0", "ctranslate2", {"encoder_only": True}, "a whole T5"),
    ):
        if form in ("onnx", "ctranslate2"):  # where the extra is not installed
            message = f"{message}|pip install"
        with pytest.raises(InputError, match=message):
            convert(source, out, form, **options)
    assert not out.exists()
    with pytest.raises(InputError, match="inside the input .*next to it"):
        convert(base / "1.0", base / "1.0" / "sub", "huggingface")
    assert not (base / "1.0" / "sub").exists()


@pytest.mark.parametrize(
    ("form", "module", "extra"),
    [
        ("ctranslate2", "ctranslate2", "tfdpsq.ctranslate2"),
        ("onnx", "onnx", "tfdpsq.onnx"),
        ("parquet", "pyarrow", "tfdpsq.import"),
    ],
)
def test_a_missing_library_is_named_with_its_extra(
    base, tmp_path, form, module, extra, monkeypatch
):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=rf"(?s){module}.*pip install '{extra}"):
        convert(base / "1.0", tmp_path / "out", form)
