"""Stage `index` through its command line: search, adding documents, refusals."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from helpers import tiny as _tiny

from tfdpsq import evaluation, retriever
from tfdpsq.data import Document, Tokenizer, train_vocabulary, write_beir
from tfdpsq.run import encode, evaluate, index
from tfdpsq.run.core import layout
from tfdpsq.run.passes import embedding, passes
from tfdpsq.run.search import retrieval
from tfdpsq.validation import InputError

_TESTS = pathlib.Path(__file__).parents[1]
_ROOT = _TESTS.parent


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Pairs, and two untrained retrievers over them."""
    base = tmp_path_factory.mktemp("index")
    queries = _tiny.write_pairs(base / "pairs")
    train_vocabulary(queries, 320, base / "spiece.model")  # a test's made-up queries
    for name, seed in (("retriever", 1), ("other", 2)):
        _tiny.write_retriever(base / name, base, seed=seed)
    return base


def _config(home, **changes):
    return _tiny.config(
        index,
        changes,
        retriever=str(home / "retriever"),
        vocabulary=str(home / "spiece.model"),
        corpus=str(home / "pairs"),
        shard_documents=32,
    )


def _products(base, texts):
    """Document ids, and [texts, documents] inner products of embeddings."""
    model = retriever.load(base / "retriever" / layout.RETRIEVER_MODEL)
    tokenizer = Tokenizer(base / "spiece.model")
    lines = (base / "pairs" / "corpus.jsonl").read_text().splitlines()
    documents = [json.loads(line) for line in lines]
    queries, vectors = (
        retriever.encode_texts(model, some, tokenizer, side, progress=False)
        for side, some in (
            ("query", texts),
            ("document", [d["text"] for d in documents]),
        )
    )
    return [d["_id"] for d in documents], queries @ vectors.T


@pytest.mark.slow
def test_a_corpus_is_indexed_by_command_and_searched(base):
    command = [
        sys.executable,
        "-m",
        "tfdpsq.run.index",
        f"--workdir={base / 'made'}",
        f"--config.retriever={base / 'retriever'}",
        f"--config.vocabulary={base / 'spiece.model'}",
        f"--config.corpus={base / 'pairs'}",
        "--config.shard_documents=32",
    ]
    done = subprocess.run(
        command,
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    documents = retriever.DocumentIndex(base / "made" / index.DOCUMENTS)
    assert documents.size == 84
    assert len(list((base / "made" / index.DOCUMENTS).glob("*.npy"))) == 3
    texts = ["who sorts a table", "array reads"]
    model = tf.saved_model.load(str(base / "made" / index.SEARCH))
    found = model.search(tf.constant(texts), tf.constant(4))
    ids, products = _products(base, texts)
    best = -np.sort(-products, axis=1)[:, :4]
    np.testing.assert_allclose(found["scores"], best, atol=1e-5)
    for row, names in enumerate(found["ids"].numpy()):
        own = [products[row, ids.index(name.decode())] for name in names]
        np.testing.assert_allclose(own, best[row], atol=1e-5)
        assert len(set(names)) == 4
    again = model.search(tf.constant(texts), tf.constant(1000))["ids"]
    assert again.shape == (2, 84)


def test_an_index_without_words_has_no_search_by_them(base, tmp_path):
    """Saving traced the search by words, which ended every index without BM25."""
    index.run(_config(base), tmp_path / "out")
    model = tf.saved_model.load(str(tmp_path / "out" / index.SEARCH))
    assert "search" in model.signatures and "search_hybrid" not in model.signatures


def test_documents_are_added_without_retraining(base, tmp_path):
    index.run(_config(base, kind="streamed"), tmp_path / "first")
    assert not (tmp_path / "first" / index.SEARCH).exists()
    whole = [
        Document(d["_id"], d.get("title", ""), d["text"])
        for d in map(
            json.loads, (base / "pairs" / "corpus.jsonl").read_text().splitlines()
        )
    ]
    more = [*whole, Document("new", "", "A word about graphs that is new.")]
    write_beir(tmp_path / "more", more, [("q0", "any")], {"train": [("q0", "d0", 1)]})
    config = _config(
        base,
        kind="streamed",
        base=str(tmp_path / "first"),
        corpus=str(tmp_path / "more"),
    )
    stage = index.run(config, tmp_path / "second")
    assert stage["result"] == {"documents": 85, "taken_over": 84}
    first, second = (
        retriever.DocumentIndex(tmp_path / name / index.DOCUMENTS)
        for name in ("first", "second")
    )
    np.testing.assert_array_equal(second.embeddings()[:84], first.embeddings())
    assert list(second.ids()) == [*first.ids(), "new"]
    with pytest.raises(InputError, match="was made by the encoder"):
        changes = {"retriever": str(base / "other"), "base": str(tmp_path / "first")}
        index.run(_config(base, **changes), tmp_path / "third")
    assert not (tmp_path / "third").exists()


def test_an_index_answers_with_words_and_vectors(base, tmp_path):
    """Ranks as the fusion of BM25 and the retriever that `evaluate` measures."""
    index.run(_config(base, hybrid={"weight": 0.3}), tmp_path / "made")
    text = "who sorts a table"
    ids, products = _products(base, [text])
    lines = (base / "pairs" / "corpus.jsonl").read_text().splitlines()
    documents = {d["_id"]: d["text"] for d in map(json.loads, lines)}
    words = evaluation.BM25(documents).search({"q": text}, 100)
    dense = {"q": dict(zip(ids, map(float, products[0])))}
    fused = evaluation.fuse([words, dense], [0.7, 0.3])["q"]
    model = tf.saved_model.load(str(tmp_path / "made" / index.SEARCH))
    found = model.signatures["search_hybrid"](
        texts=tf.constant([text]), k=tf.constant(5)
    )
    names = [name.decode() for name in found["ids"].numpy()[0]]
    expected = [fused[name] for name in names]
    np.testing.assert_allclose(found["scores"].numpy()[0], expected, atol=1e-5)
    np.testing.assert_allclose(expected, sorted(fused.values())[:-6:-1], atol=1e-5)
    # The old documents' words are not in the index that is extended.
    more = [Document("new", "", "A word about graphs that is new.")]
    write_beir(tmp_path / "more", more, [("q0", "any")], {"train": [("q0", "new", 1)]})
    config = _config(
        base,
        hybrid={"weight": 0.3},
        base=str(tmp_path / "made"),
        corpus=str(tmp_path / "more"),
    )
    with pytest.raises(InputError, match=r"whose document \S+ is not in corpus .*more"):
        index.run(config, tmp_path / "second")
    assert not (tmp_path / "second").exists()


def _encode_config(home):
    config = encode.default_config()
    given = _config(home)
    config.update({name: given[name] for name in embedding.declared()})
    return config


def _bytes_of(directory):
    """Every file of an index: name -> content."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted((directory / embedding.DOCUMENTS).rglob("*"))
    }


@pytest.fixture(scope="module")
def encoded(base):
    """What one process makes of the corpus."""
    stage = encode.run(_encode_config(base), base / "encoded")
    assert stage["result"] == {"documents": 84}
    return _bytes_of(base / "encoded")


def test_two_devices_embed_the_corpus_as_one_does(base, encoded, on_two_devices):
    """Each a batch at a time; of the last ones, one device has none."""
    config = _encode_config(base)
    config.batch_size = 16
    encode.run(config, base / "alone")
    with on_two_devices():
        encode.run(config, base / "together")
    assert _bytes_of(base / "together") == _bytes_of(base / "alone")


@pytest.mark.parametrize(
    "kind", [pytest.param("exact", marks=pytest.mark.slow), "streamed"]
)
def test_two_devices_make_the_index_that_one_does(base, tmp_path, on_two_devices, kind):
    """And the search that is saved with it, which runs on one device afterwards."""
    config = _config(base, kind=kind, batch_size=16)
    index.run(config, tmp_path / "alone")
    with on_two_devices():
        index.run(config, tmp_path / "together")
    assert _bytes_of(tmp_path / "together") == _bytes_of(tmp_path / "alone")
    if kind == "exact":
        texts, most = tf.constant(["who sorts a table", "array reads"]), tf.constant(9)
        # A loaded search needs its model to be kept.
        models = [
            tf.saved_model.load(str(tmp_path / name / index.SEARCH))
            for name in ("alone", "together")
        ]
        one, two = (model.search(texts, most) for model in models)
        np.testing.assert_array_equal(one["ids"], two["ids"])
        np.testing.assert_array_equal(one["scores"], two["scores"])


@pytest.mark.slow
def test_commands_that_share_a_corpus_embed_it_as_one_does(base, encoded):
    config = _encode_config(base)
    for shard in (2, 0):
        assert encode.run(config, base / "shared", passes.Launch(3, shard)) is None
        assert not (base / "shared").exists()
    encode.run(config, base / "shared", passes.Launch(3, 1))
    assert _bytes_of(base / "shared") == encoded
    assert not (base / ".shared.shards").exists()
    encode.run(config, base / "beam", passes.Launch(beam=("--runner=DirectRunner",)))
    assert _bytes_of(base / "beam") == encoded
    documents = retriever.DocumentIndex(base / "shared" / embedding.DOCUMENTS)
    documents.verify()
    ids, products = _products(base, ["who sorts a table"])
    assert list(documents.ids()) == ids
    scores, places = documents.search(
        retriever.encode_texts(
            retriever.load(base / "retriever" / layout.RETRIEVER_MODEL),
            ["who sorts a table"],
            Tokenizer(base / "spiece.model"),
            "query",
            progress=False,
        ),
        84,
    )
    np.testing.assert_allclose(scores[0], products[0, places[0]], atol=1e-5)


def test_damaged_shards_of_embeddings_are_named_and_made_again(base, encoded, caplog):
    """One was cut short, of one an id was edited, one has lost its file."""
    config, out = _encode_config(base), base / "mended"
    config.shard_documents = 20  # five shards of 84 documents
    for shard in range(4):
        encode.run(config, out, passes.Launch(5, shard))
    vectors = sorted((base / ".mended.shards").glob("*.npy"))
    vectors[0].write_bytes(vectors[0].read_bytes()[:-4])
    edited = vectors[1].with_suffix(".jsonl")
    edited.write_text(edited.read_text().replace('"d1', '"e1'))
    vectors[3].unlink()
    with caplog.at_level("INFO", logger="absl"):
        encode.run(config, out)
        made = [r.message for r in caplog.records if " rows in " in r.message]
    text = " ".join(caplog.text.split())
    assert f"{vectors[0]}: has " in text and "bytes, its mark says" in text
    assert f"{edited}: SHA-256 is" in text
    assert f"{vectors[3]}: is missing" in text
    assert sorted(message.split()[2] for message in made) == ["0", "1", "3", "4"]
    documents = retriever.DocumentIndex(out / embedding.DOCUMENTS)
    documents.verify()
    (base / "whole").mkdir()
    for name, data in encoded.items():
        path = base / "whole" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    whole = retriever.DocumentIndex(base / "whole" / embedding.DOCUMENTS)
    assert list(documents.ids()) == list(whole.ids())
    np.testing.assert_allclose(
        documents.embeddings(), whole.embeddings(), rtol=0, atol=1e-6
    )


def test_evaluation_takes_embeddings_that_are_there(base, encoded, monkeypatch):
    config = evaluate.default_config()
    config.data = str(base / "pairs")
    config.vocabulary = str(base / "spiece.model")
    config.resamples = 100
    _tiny.write_pairs(base / "fewer", dev=11)
    with config.unlocked():
        config.systems = {"mine": str(base / "retriever")}
    embedded = evaluate.run(config, base / "private" / "embedded")["result"]
    with config.unlocked():
        config.indexes = {"mine": str(base / "encoded")}
    monkeypatch.setattr(retrieval.retriever, "Embedder", None)  # of documents, none
    taken = evaluate.run(config, base / "private" / "taken")["result"]
    assert taken == embedded and 0 < taken["mine"] < 1
    for changes, message in (
        ({"systems": {"mine": str(base / "other")}}, "was made by the encoder"),
        ({"data": str(base / "fewer")}, "made of another corpus"),
        ({"indexes": {"yours": str(base / "encoded")}}, "no retriever called 'yours'"),
        ({"indexes": {"mine": str(base / "pairs")}}, "is not a finished stage"),
    ):
        other = config.copy_and_resolve_references()
        with other.unlocked():
            for name, value in changes.items():
                other[name] = value
        with pytest.raises(InputError, match=message):
            evaluate.run(other, base / "private" / "refused")
        assert not (base / "private" / "refused").exists()


def test_embeddings_in_bfloat16_are_near_and_never_mixed_with_float32(
    base, encoded, tmp_path, monkeypatch
):
    """The unit length is float32's; what would mix the two is refused by name."""
    config = _encode_config(base)
    config.dtype = "mixed_bfloat16"
    encode.run(config, tmp_path / "encoded")
    exact, near = (
        retriever.DocumentIndex(place / "encoded" / embedding.DOCUMENTS)
        for place in (base, tmp_path)
    )
    assert exact.encoder != near.encoder and list(exact.ids()) == list(near.ids())
    one, other = (held.embeddings().astype(np.float64) for held in (exact, near))
    assert 1e-5 < np.abs(one - other).max() and (one * other).sum(axis=1).min() > 0.999
    # Divided in bfloat16, lengths would differ from 1 by up to 4e-3.
    np.testing.assert_allclose(np.linalg.norm(other, axis=1), 1, rtol=0, atol=1e-6)
    # The finished stage in the other dtype is not taken for this one.
    with pytest.raises(InputError, match="dtype"):
        encode.run(_encode_config(base), tmp_path / "encoded")

    taking = evaluate.default_config()
    taking.data = str(base / "pairs")
    taking.vocabulary = str(base / "spiece.model")
    taking.resamples = 100
    with taking.unlocked():
        taking.systems = {"mine": str(base / "retriever")}
    makes = taking.copy_and_resolve_references()
    makes.dtype = "mixed_bfloat16"
    embedded = evaluate.run(makes, base / "private" / "near_embedded")["result"]
    adding = _config(base, kind="streamed", base=str(tmp_path / "encoded"))
    with monkeypatch.context() as patched:
        patched.setattr(embedding.retriever, "load", None)  # refused before anything
        with pytest.raises(InputError, match="base is .*'mixed_bfloat16', but dtype"):
            index.run(adding, tmp_path / "added")
        for dtype, made, message in (
            (
                "float32",
                tmp_path,
                "indexes.mine .*in 'mixed_bfloat16', but dtype is 'f",
            ),
            (
                "mixed_bfloat16",
                base,
                "indexes.mine .*in 'float32', but dtype is 'mixed",
            ),
        ):
            taking.dtype = dtype
            with taking.unlocked():
                taking.indexes = {"mine": str(made / "encoded")}
            with pytest.raises(InputError, match=message):
                evaluate.run(taking, base / "private" / "mixed")
    with taking.unlocked():
        taking.indexes = {"mine": str(tmp_path / "encoded")}
    monkeypatch.setattr(retrieval.retriever, "Embedder", None)  # of documents, none
    taken = evaluate.run(taking, base / "private" / "near_taken")["result"]
    assert taken == embedded and 0 < taken["mine"] < 1


@pytest.mark.slow
def test_a_search_is_saved_in_its_dtype(base, tmp_path):
    """And embeds queries as the index's documents were embedded."""
    index.run(_config(base, dtype="mixed_bfloat16"), tmp_path / "made")
    model = tf.saved_model.load(str(tmp_path / "made" / index.SEARCH))
    text = "who sorts a table"
    found = model.search(tf.constant([text]), tf.constant(84))
    query = retriever.encode_texts(
        retriever.load(base / "retriever" / layout.RETRIEVER_MODEL, "mixed_bfloat16"),
        [text],
        Tokenizer(base / "spiece.model"),
        "query",
        progress=False,
    )
    held = retriever.DocumentIndex(tmp_path / "made" / index.DOCUMENTS)
    products = query @ held.embeddings().T
    np.testing.assert_allclose(
        found["scores"], -np.sort(-products, axis=1), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16'"),
        ({"kind": "best"}, "kind is 'best'"),
        ({"retriever": ""}, "retriever is ''"),
        ({"shard_documents": 0}, "shard_documents is 0"),
        ({"hybrid": {"weight": 1.5}}, "hybrid.weight is 1.5"),
        ({"hybrid": {"depth": 0}}, "hybrid.depth is 0"),
        ({"hybrid": {"depth": 7}}, "hybrid.depth is 7"),
        ({"hybrid": {"weight": 0.3}, "kind": "streamed"}, "hybrid.weight is 0.3"),
    ],
)
def test_bad_settings_are_refused(base, tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        index.run(_config(base, **changes), tmp_path / "bad")
    assert not (tmp_path / "bad").exists()
