"""Generators for CTranslate2, which serves a T5 without TensorFlow.

It writes queries for pieces of "generate_query: " and a document, and "</s>", by

    ctranslate2.Translator(directory).translate_batch(
        [pieces], beam_size=1, sampling_topk=0, sampling_topp=0.8
    )
"""

from __future__ import annotations

import os
import pathlib
import tempfile

from tfdpsq import validation
from tfdpsq.data.tokenization import VOCABULARY_FILE

DTYPES = ("float32", "int8")
_REMEDY = (
    "the format ctranslate2 needs ctranslate2, torch, and transformers before 5. Run "
    "pip install 'tfdpsq[ctranslate2]'."
)


def save(
    directory: str | os.PathLike, source: str | os.PathLike, dtype: str = "float32"
) -> None:
    """Writes a model for `ctranslate2.Translator`, by CTranslate2's own converter.

    Args:
      directory: an existing directory; holds the vocabulary as well afterwards.
      source: a generator with its vocabulary in Hugging Face's format.
      dtype: one of `DTYPES`. On processors without VNNI, int8's sums may overflow.

    Raises:
      InputError: an unknown dtype, or a package is not installed, or too new.
    """
    validation.one_of("dtype", dtype, DTYPES)
    validation.library("torch", _REMEDY)
    # transformers 5 says of every T5 that its head is tied, and CTranslate2 4.8 scales
    # the logits of those that are.
    if validation.library("transformers", _REMEDY).__version__ >= "5":
        raise validation.InputError(_REMEDY)
    converters = validation.library("ctranslate2.converters", _REMEDY)
    converter = converters.TransformersConverter(
        os.fspath(source), copy_files=[VOCABULARY_FILE]
    )
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        made = pathlib.Path(folder, "made")  # it deletes a directory that is there
        converter.convert(os.fspath(made), quantization=dtype)
        for file in made.iterdir():
            file.rename(pathlib.Path(directory, file.name))
