"""A generator for CTranslate2, by its own converter: the same log-probabilities."""

import numpy as np
import pytest
import sentencepiece
import tensorflow as tf

from tfdpsq.data import Tokenizer, train_vocabulary
from tfdpsq.generator import T5QueryGenerator, ctranslate2_export
from tfdpsq.layers import T5Config

TEXTS = ["It sorts a list in place", "reads", "gives back the matrix of a graph " * 5]


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_converted_generator_scores_queries_as_ours(tmp_path, version):
    pytest.importorskip("torch")
    if pytest.importorskip("transformers").__version__ >= "5":
        pytest.skip("its converter needs transformers 4")
    ctranslate2 = pytest.importorskip("ctranslate2")
    texts = [f"query {i} reads what every gradient said of it" for i in range(40)]
    file = train_vocabulary(texts, 290, tmp_path / "spiece.model")
    tf.keras.utils.set_random_seed(3)
    model = T5QueryGenerator(T5Config(310, 2, 2, 16, 24, 6, version))
    (tmp_path / "hf").mkdir()
    model.save_to_huggingface(tmp_path / "hf", file)
    for dtype, most in (("float32", 2e-5), ("int8", 0.2)):
        out = tmp_path / dtype
        out.mkdir()
        ctranslate2_export.save(out, tmp_path / "hf", dtype)
        assert (out / "spiece.model").read_bytes() == file.read_bytes()
        ids, lengths = Tokenizer(file).encode(TEXTS, 200)
        query = np.array([[7, 30, 279, 1]] * len(TEXTS), np.int32)
        logits = model(
            {
                "document_ids": ids,
                "document_lengths": lengths,
                "query_ids": query,
                "query_lengths": np.full(len(TEXTS), 4, np.int32),
            }
        )
        ours = tf.gather(tf.nn.log_softmax(logits), query, batch_dims=2).numpy()
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(file))
        sources = [[*pieces.encode(text, out_type=str), "</s>"] for text in TEXTS]
        target = [[pieces.id_to_piece(int(i)) for i in query[0, :-1]]] * len(TEXTS)
        translator = ctranslate2.Translator(str(out))
        scored = translator.score_batch(sources, target)
        theirs = np.array([each.log_probs for each in scored])
        assert np.abs(theirs - ours).max() < most
