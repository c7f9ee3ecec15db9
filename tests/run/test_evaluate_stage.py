"""The evaluation of several retrievers at once."""

import importlib.util
import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq import retriever
from tfdpsq.data import train_vocabulary
from tfdpsq.layers import T5Config
from tfdpsq.run import evaluate
from tfdpsq.run.train_retriever import MODEL

_spec = importlib.util.spec_from_file_location(
    "tiny", pathlib.Path(__file__).parent / "tiny.py"
)
_tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_tiny)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Pairs, and three retrievers: two that differ in their query towers alone."""
    base = tmp_path_factory.mktemp("evaluate")
    queries = _tiny.write_pairs(base / "pairs")
    train_vocabulary(queries, 320, base / "spiece.model")  # a test's made-up queries
    t5 = T5Config(330, 1, 2, 16, 24, 8)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        tf.keras.utils.set_random_seed(seed)
        model = retriever.TwoTower(
            retriever.RetrieverConfig(t5, 8, 20.0, 10, 24, shared=False)
        )
        if name == "b":
            for weight in model.query_tower.weights:
                weight.assign(weight[::-1])
        retriever.save(model, base / name / MODEL)
        (base / name / "stage.json").write_text(json.dumps({"name": name}))
    return base


def _ndcg(base, name, systems):
    config = evaluate.default_config()
    config.data = str(base / "pairs")
    config.vocabulary = str(base / "spiece.model")
    with config.unlocked():
        config.systems = {system: str(base / system) for system in systems}
    evaluate.run(config, base / name)
    metrics = json.loads((base / name / evaluate.METRICS_FILE).read_text())
    return {s: values["ndcg@10"] for s, values in metrics["systems"].items()}


def test_systems_with_one_document_tower_share_its_embeddings(base, monkeypatch):
    monkeypatch.setattr(evaluate.workdir, "stage_fingerprint", str)
    alone = {s: _ndcg(base, f"of_{s}", [s])[s] for s in "abc"}
    kinds = []
    encode = retriever.encode_texts

    def spy(model, texts, tokenizer, kind, *rest):
        kinds.append(kind)
        return encode(model, texts, tokenizer, kind, *rest)

    monkeypatch.setattr(evaluate.retriever, "encode_texts", spy)
    together = _ndcg(base, "of_all", ["a", "b", "c"])
    assert together == pytest.approx(alone) and len(set(alone.values())) > 1
    assert kinds.count("document") == 2 and kinds.count("query") == 3
    assert all(np.isfinite(list(together.values())))
