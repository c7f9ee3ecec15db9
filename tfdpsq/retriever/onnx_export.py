"""A retriever's towers as ONNX, to embed texts without TensorFlow.

    session = onnxruntime.InferenceSession("encoder.onnx")
    session.run(None, {"input_ids": ids, "attention_mask": mask})   # [B, D]

Both inputs are [B, L] int64 for any B and L; every row has at least one real token.
"""

from __future__ import annotations

import os
import pathlib
import tempfile

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.retriever.model import TwoTower

DTYPES = ("float32", "int8")
_INPUTS = ("input_ids", "attention_mask")
_OPSET = 18
_REMEDY = (
    "the format onnx needs tf2onnx and onnxruntime. Run pip install 'tfdpsq[onnx]'."
)


def save(directory: str | os.PathLike, model: TwoTower, dtype: str = "float32") -> None:
    """Writes `encoder.onnx`, or `queries.onnx` and `documents.onnx`.

    Args:
      directory: an existing directory.
      model: the retriever.
      dtype: one of `DTYPES`. In int8, each column of a matrix has a scale of its own,
        and inputs are rounded as they come (dynamic quantisation); 7 bits of weights
        are used, since processors without VNNI overflow at 8.

    Raises:
      InputError: an unknown dtype, a package is not installed, or the weights of a
        tower take 2 GiB, more than such a file holds.
    """
    validation.one_of("dtype", dtype, DTYPES)
    tf2onnx = validation.library("tf2onnx", _REMEDY)
    quantization = validation.library("onnxruntime.quantization", _REMEDY)
    towers = {"queries": model.query_tower, "documents": model.document_tower}
    if model.config.shared:
        towers = {"encoder": model.query_tower}
    for name, tower in towers.items():
        if 4 * tower.count_params() >= 1 << 31:
            raise validation.InputError(
                f"the tower has {4 * tower.count_params():,} bytes of weights, and an "
                "ONNX file holds 2 GiB. Use the format sentence-transformers."
            )
        file = pathlib.Path(directory, f"{name}.onnx")
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            exact = file if dtype == "float32" else pathlib.Path(folder, file.name)
            tf2onnx.convert.from_keras(
                _unit_tower(tower),
                [tf.TensorSpec([None, None], tf.int64, name=name) for name in _INPUTS],
                opset=_OPSET,
                output_path=os.fspath(exact),
            )
            if dtype == "int8":
                quantization.quantize_dynamic(
                    exact,
                    file,
                    op_types_to_quantize=["MatMul", "Gather"],
                    per_channel=True,
                    reduce_range=True,
                    weight_type=quantization.QuantType.QInt8,
                )


def _unit_tower(tower: tf.keras.Model) -> tf.keras.Model:
    """Returns a tower with ONNX's usual inputs, to "embedding" of unit length."""
    ids, mask = (tf.keras.Input([None], dtype=tf.int64, name=n) for n in _INPUTS)
    vectors = tower(
        {
            "encoder_token_ids": tf.cast(ids, tf.int32),
            "encoder_padding_mask": tf.cast(mask, tf.int32),
        }
    )
    unit = tf.keras.layers.UnitNormalization(name="embedding")(vectors)
    return tf.keras.Model([ids, mask], unit)
