"""Towers as ONNX, by tf2onnx: the same embeddings in ONNX Runtime."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq.layers import T5Config
from tfdpsq.retriever import RetrieverConfig, TwoTower, onnx_export


@pytest.mark.parametrize(
    ("version", "shared", "pooling"),
    [
        ("1.0", True, "mean"),
        pytest.param("1.1", False, "first", marks=pytest.mark.slow),
    ],
)
def test_towers_as_onnx_have_the_same_embeddings(tmp_path, version, shared, pooling):
    pytest.importorskip("tf2onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    shape = T5Config(60, 2, 2, 16, 24, 6, version, dropout=0.1)
    config = RetrieverConfig(shape, 12, 20.0, 10, 24, shared=shared, pooling=pooling)
    model = TwoTower(config)
    # Beyond 128 tokens, where all positions are in one bucket; and padded.
    lengths = np.array([200, 150, 9, 1], np.int32)
    ids = np.random.default_rng(0).integers(3, 60, (4, 200)).astype(np.int32)
    ids[np.arange(200) >= lengths[:, None]] = 0
    encoders = (model.encode_queries, model.encode_documents)
    for dtype in onnx_export.DTYPES:
        onnx_export.save(tmp_path, model, dtype)
        names = ["encoder"] if shared else ["queries", "documents"]
        assert {path.stem for path in tmp_path.iterdir()} == set(names)
        for name, encode in zip(names, encoders):
            session = onnxruntime.InferenceSession(
                str(tmp_path / f"{name}.onnx"), providers=["CPUExecutionProvider"]
            )
            for width in (200, 9):
                rows = lengths <= width
                part, real = ids[rows, :width], lengths[rows]
                mask = (np.arange(width) < real[:, None]).astype(np.int64)
                given = {"input_ids": part.astype(np.int64), "attention_mask": mask}
                (found,) = session.run(None, given)
                ours = encode(tf.constant(part), tf.constant(real)).numpy()
                if dtype == "float32":
                    np.testing.assert_allclose(found, ours, atol=1e-4)
                else:
                    assert (found * ours).sum(axis=1).min() > 0.95
