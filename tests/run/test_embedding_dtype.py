"""Embeddings in bfloat16 rank as those of float32, on real text and trained weights."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq import evaluation, retriever
from tfdpsq.data import Tokenizer
from tfdpsq.generator import checkpoints
from tfdpsq.run.core import settings, sources

_QUERIES = 500


@pytest.mark.slow
def test_pydocs_is_ranked_in_bfloat16_as_in_float32(tmp_path):
    """NDCG@10 of 500 test queries among their documents and as many others."""
    beir = sources.open_beir(sources.PYDOCS)
    qrels = dict(list(beir.qrels("test").items())[:_QUERIES])
    wanted = {document for judged in qrels.values() for document in judged}
    documents = {}
    for document in beir.documents():
        if document.id in wanted or len(documents.keys() - wanted) < _QUERIES:
            documents[document.id] = document.content
    queries = {name: text for name, text in beir.read_queries() if name in qrels}

    shape, encoder = checkpoints.load_encoder(checkpoints.locate("t5_tiny_pydocs"))
    tf.keras.utils.set_random_seed(0)  # of the projection, a rotation
    model = retriever.TwoTower(retriever.RetrieverConfig(shape, 192, 20.0, 24, 96))
    model.load_encoder_weights_from(encoder)
    retriever.save(model, tmp_path / "model")
    tokenizer = Tokenizer(sources.vocabulary_file("", "t5_tiny_pydocs"))
    vectors, values = {}, {}
    for dtype in settings.DTYPES:
        model = retriever.load(tmp_path / "model", dtype)
        asked, held = (
            retriever.encode_texts(model, some.values(), tokenizer, kind)
            for kind, some in (("query", queries), ("document", documents))
        )
        vectors[dtype] = np.concatenate([asked, held]).astype(np.float64)
        found = retriever.search(asked, held, list(documents), 10, "brute_force")
        run = retriever.as_run(list(queries), *found)
        values[dtype] = evaluation.evaluate_run(qrels, run, ["ndcg@10"])

    exact, near = settings.DTYPES
    cosines = (vectors[exact] * vectors[near]).sum(axis=1)
    assert 0.999 <= cosines.min() < 1 - 1e-6, cosines.min()
    difference = evaluation.paired_bootstrap(
        *(values[dtype].values("ndcg@10") for dtype in (near, exact))
    )
    assert values[exact].means["ndcg@10"] > 0.3
    assert difference.low <= 0 <= difference.high, difference
    assert abs(difference.difference) < 0.005, difference
