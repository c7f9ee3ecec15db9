"""The T5s that ship with the package: found by name, and what their cards say."""

import numpy as np
import pytest
import sentencepiece
import tensorflow as tf

from tfdpsq.data import Tokenizer, build_pydocs
from tfdpsq.data.pydocs import public_documents
from tfdpsq.generator import T5QueryGenerator, checkpoints, pretraining
from tfdpsq.validation import InputError

OLD = "t5_tiny_pydocs"
NAMES = ("t5_tiny_manuals", OLD)


@pytest.fixture(
    scope="module", params=[NAMES[0], pytest.param(OLD, marks=pytest.mark.slow)]
)
def directory(request):
    return checkpoints.locate(request.param)


def test_shipped_models_are_found_by_name_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = T5QueryGenerator.from_preset(OLD)
    config, encoder = checkpoints.load_encoder(OLD)
    assert config == model.config
    for one, other in zip(encoder.weights, model.encoder.weights):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(InputError, match=f"^t5_tests does not.*{NAMES[0]}, {OLD}"):
        checkpoints.locate("t5_tests")
    (tmp_path / OLD).mkdir()  # a directory of the name comes first
    assert checkpoints.locate(OLD).resolve() == (tmp_path / OLD).resolve()


def test_shipped_model_is_small_and_complete(directory):
    files = {path.name: path.stat().st_size for path in directory.iterdir()}
    assert {"config.json", "model.safetensors", "spiece.model", "README.md"} <= set(
        files
    )
    assert sum(files.values()) <= 20 * 2**20
    # Public weights: a certificate here would say that private queries had a part.
    assert "certificate.json" not in files


@pytest.mark.slow
def test_shipped_encoder_did_not_collapse_and_decoder_reads_the_document(directory):
    corpus = build_pydocs()
    held = [
        document
        for document in public_documents(corpus)
        if pretraining.is_held_out(document.id)
    ]
    tokenizer = Tokenizer(checkpoints.vocabulary_in(directory))
    shares = {"whole": 0.0, "bare": 0.0}
    chunks = list(pretraining.pair_rows(held, tokenizer, (96, 24), 1, 1, **shares))
    rows = {name: np.concatenate([c[name] for c in chunks]) for name in chunks[0]}
    rows = {name: values[:: len(values) // 96][:96] for name, values in rows.items()}
    trainer = pretraining.Pretrainer(T5QueryGenerator.from_preset(directory))
    trainer.compile()
    batch = tf.data.Dataset.from_tensors(rows)
    found = trainer.evaluate(batch, verbose=0, return_dict=True)
    # Where all texts are one point, it is log 96 = 4.56.
    assert found["contrast"] < 3.2
    assert found["gap"] >= 0.5
    if directory.name != OLD:  # the second generation has to be better
        assert found["gap"] >= 1.4


def test_shipped_vocabulary_holds_no_query_of_the_benchmark(directory):
    # A piece that holds a whole query would have been learned from one.
    texts = build_pydocs().queries().values()
    queries = {" ".join(text.casefold().split()) for text in texts}
    pieces = sentencepiece.SentencePieceProcessor(
        model_file=str(checkpoints.vocabulary_in(directory))
    )
    known = {
        pieces.id_to_piece(i).replace("\u2581", " ").strip().casefold()
        for i in range(pieces.get_piece_size())
    }
    assert not queries & known
