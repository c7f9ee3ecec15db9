"""Convert a T5 or a retriever to formats of several libraries.

    tfdpsq convert --workdir=OUT --config.input=DIR --config.format=keras

| input                        | formats                         |
|------------------------------|---------------------------------|
| a T5                         | huggingface, keras, ctranslate2 |
| an output of train_retriever | sentence-transformers, onnx     |

A T5 is in any format that `checkpoints.open_checkpoint` reads, such as T5X, or the name
or URL of one. The output has the input's vocabulary and its certificate, if there is
one. `ctranslate2` and `onnx` need the extras of these names, and have an int8 form. The
towers of a retriever for sentence-transformers must be shared; texts are cut at the
larger of its two lengths.
"""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
import tempfile
from typing import Any

from tfdpsq import retriever, validation
from tfdpsq.data import Tokenizer, io
from tfdpsq.data.tokenization import VOCABULARY_FILE
from tfdpsq.generator import checkpoints, ctranslate2_export
from tfdpsq.generator.checkpoints import fast_tokenizer, sentence_encoder, weights
from tfdpsq.generator.model import PREPROCESSOR_FILE
from tfdpsq.retriever import onnx_export
from tfdpsq.run.common.kinds import MODEL, File, Generator, Retriever
from tfdpsq.run.frame import settings
from tfdpsq.run.frame.runner import Context, Given, Stage
from tfdpsq.run.frame.settings import path, setting
from tfdpsq.validation import InputError

_T5 = ("huggingface", "keras", "ctranslate2")
_RETRIEVER = ("sentence-transformers", "onnx")
_DTYPES = {
    "huggingface": weights.DTYPES,
    "ctranslate2": ctranslate2_export.DTYPES,
    "onnx": onnx_export.DTYPES,
}


class Convert(Stage):
    """Writes what it is given in another format."""

    name = "convert"

    @dataclasses.dataclass(frozen=True)
    class Settings(settings.Settings):
        """Settings of `convert`."""

        input: str = path(Generator, help="or what train_retriever wrote")
        format: str = setting("huggingface", choices=(*_T5, *_RETRIEVER))
        vocabulary: str = path(
            File, "", when={"format": _T5}, help="in place of the input's"
        )
        dtype: str = setting(
            "float32",
            choices=("float32", "bfloat16", "float16", "int8"),
            when={"format": tuple(_DTYPES)},
            help="of the weights",
        )

    def check(self, s: Settings, given: Given) -> None:
        """Compares the format with the input and the dtype."""
        formats = _RETRIEVER if Retriever.is_at(given["input"].path) else _T5
        validation.one_of(f"format of {s.input}", s.format, formats)
        dtypes = _DTYPES.get(s.format, ("float32",))
        validation.one_of(f"dtype of {s.format}", s.dtype, dtypes)

    def run(self, c: Context) -> dict[str, Any]:
        """Reads and writes."""
        source = pathlib.Path(c.given["input"].path)
        write = _write_t5 if c.settings.format in _T5 else _write_retriever
        return {"format": c.settings.format, "about": write(c, source)}

    def line(self, result: Any) -> str:
        """The formats and where they are."""
        return "{format}: {about}".format(**result)


def _write_t5(c: Context, source: pathlib.Path) -> str:
    s, given = c.settings, c.given["vocabulary"]
    config, model = checkpoints.load(source)
    vocabulary = given.path if given else checkpoints.vocabulary_in(source)
    if s.format != "ctranslate2":
        checkpoints.save(c.out, config, model, s.format, s.dtype, vocabulary)
    elif vocabulary is None or model.soft_prompt is not None:
        raise InputError(
            f"{source} has no vocabulary, or a soft prompt, which CTranslate2 cannot "
            "run. Give a SentencePiece model as vocabulary, or use huggingface."
        )
    else:
        with tempfile.TemporaryDirectory(dir=c.out) as folder:
            checkpoints.save(folder, config, model, vocabulary=vocabulary)
            ctranslate2_export.save(c.out, folder, s.dtype)
    if (source / PREPROCESSOR_FILE).is_file():
        shutil.copyfile(source / PREPROCESSOR_FILE, c.out / PREPROCESSOR_FILE)
    pieces = Tokenizer(vocabulary).vocabulary_size if vocabulary else "no"
    count = f"{model.count_params():,} parameters in {s.dtype}"
    return f"T5 {config.version}, {count}, {pieces} pieces"


def _write_retriever(c: Context, source: pathlib.Path) -> str:
    model = retriever.load(source / MODEL)
    config, tower, tokenizer = model.config, model.query_tower, model.tokenizer
    if tokenizer is None:
        raise InputError(f"{source} has no vocabulary. Train it with one.")
    if c.settings.format == "onnx":
        onnx_export.save(c.out, model, c.settings.dtype)
        fast_tokenizer.save(c.out, tokenizer.model)
        (c.out / VOCABULARY_FILE).write_bytes(tokenizer.model)
        lengths = {n: getattr(config, n) for n in ("query_length", "document_length")}
        io.write_json(c.out / "config.json", lengths)
    elif config.shared:
        encoder = tower.get_layer("t5_encoder")
        checkpoints.save(
            c.out, config.t5, encoder, vocabulary=tokenizer, encoder_only=True
        )
        projection = tower.get_layer("projection").kernel.numpy()
        length = max(config.query_length, config.document_length)
        sentence_encoder.save(c.out, config.pooling, projection, length)
    else:
        raise InputError(
            f"{source} has two towers; sentence-transformers has one encoder for both. "
            "Train with shared=True, or convert it to onnx."
        )
    return f"T5 {config.t5.version} encoder, {model.count_params():,} parameters"


STAGE = Convert()
