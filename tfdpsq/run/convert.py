"""Convert a T5, a retriever or a synthetic set to formats of several libraries.

    python -m tfdpsq.run.convert --input=DIR --output=DIR --format=huggingface

| input                        | formats                         |
|------------------------------|---------------------------------|
| a T5                         | huggingface, keras, ctranslate2 |
| an output of train_retriever | sentence-transformers, onnx     |
| a synthetic set              | parquet                         |

A T5 is in any format that `checkpoints.open_checkpoint` reads, such as T5X, or the name
or URL of one; --vocabulary is for one that has none, such as T5X's. The output appears
whole or not at all. It gets the input's certificate, if there is one: a generator stays
as private as it was. `ctranslate2` and `onnx` need the extras of these names, and have
an int8 form (--dtype). The towers of a retriever for sentence-transformers must be
shared; texts are cut at the larger of its two lengths.

Exit status: 0 converted, 2 refused, with the reason printed.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import tempfile
from collections.abc import Sequence
from typing import Any, NoReturn

from absl import app, flags

from tfdpsq import retriever, validation
from tfdpsq.data import (
    Tokenizer,
    io,
    read_manifest,
    read_synthetic,
    sets,
    write_synthetic,
)
from tfdpsq.data.tokenization import VOCABULARY_FILE
from tfdpsq.generator import checkpoints, ctranslate2_export
from tfdpsq.generator.checkpoints import fast_tokenizer, sentence_encoder, weights
from tfdpsq.generator.model import PREPROCESSOR_FILE
from tfdpsq.privacy import read_certificate
from tfdpsq.privacy.proof import certificate as certificates
from tfdpsq.retriever import onnx_export
from tfdpsq.run.core import command, layout, records, releases, sources, workdir
from tfdpsq.run.reporting import data_card

RETRIEVERS, ONNX = "sentence-transformers", "onnx"
_T5 = ("huggingface", "keras", "ctranslate2")
FORMATS = (*_T5, RETRIEVERS, ONNX, sets.PARQUET)
_DTYPES = {
    "huggingface": weights.DTYPES,
    "ctranslate2": ctranslate2_export.DTYPES,
    ONNX: onnx_export.DTYPES,
}

_USAGE = (
    "usage: python -m tfdpsq.run.convert --input=DIR --output=DIR "
    f"--format={'|'.join(FORMATS)}\n"
)


def convert(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    form: str,
    vocabulary: str | os.PathLike | None = None,
    dtype: str = "float32",
    encoder_only: bool = False,
) -> str:
    """Converts a T5 checkpoint, a retriever or a synthetic set.

    Args:
      source: see the table above.
      destination: the directory to make. It must not exist, or be empty.
      form: one of `FORMATS`.
      vocabulary: a SentencePiece model, in place of the one of a T5 in `source`.
      dtype: "float32"; also "bfloat16" or "float16" for `huggingface`, and "int8" for
        `ctranslate2` and `onnx`.
      encoder_only: whether to write the encoder alone, for `huggingface`.

    Returns:
      A summary, in lines of text.

    Raises:
      InputError: see `checkpoints.open_checkpoint`, and `save` of the format; or the
        destination is taken, the disk full, the vocabulary another model's, or the
        certificate was changed. Nothing is then written.
    """
    validation.one_of("format", form, FORMATS)
    validation.one_of(f"dtype of {form}", dtype, _DTYPES.get(form, ("float32",)))
    if encoder_only and form != "huggingface":
        raise validation.InputError(
            f"encoder_only is True; {form} has no place for an encoder alone. Use "
            "huggingface."
        )
    if vocabulary and form not in _T5:
        raise validation.InputError(
            f"vocabulary is {vocabulary}, but what {form} is made of has its own. "
            "Leave it out."
        )
    destination = pathlib.Path(validation.local_path("output", destination))
    directory = pathlib.Path(checkpoints.locate(source) if form in _T5 else source)
    certificate = read_certificate(directory)
    guarantee = releases.guarantee_of(certificate, os.fspath(directory))
    holds = "what private queries had an unprotected part in"
    output = releases.Output(destination, guarantee, holds)
    vocabulary = sources.fetched(os.fspath(vocabulary)) if vocabulary else None
    with workdir.new_directory(output) as partial:
        if form in _T5:
            about = _write_t5(directory, partial, form, vocabulary, dtype, encoder_only)
        elif form == sets.PARQUET:
            about = _write_set(directory, partial)
        else:
            about = _write_retriever(directory, partial, form, dtype)
        records.write_certificate(partial, certificate)
        # A finite epsilon alone would pass for a model that may be released, where the
        # source says that it may not; and a format without a config has nothing by
        # which a certificate that is lost would be missed.
        marked = any((partial / name).is_file() for name in certificates.CONFIGS)
        if guarantee == releases.PRIVATE or (certificate and not marked):
            config = {"input": os.path.abspath(directory), "format": form}
            inputs = {"input": workdir.model_fingerprint(directory)}
            workdir.write_stage(partial, output, {"config": config, "inputs": inputs})
    epsilon = (certificate or {}).get("guarantee", {}).get("epsilon", "none")
    return f"{form}: {destination}\n  {about}\n  epsilon {epsilon}"


def _write_t5(
    directory: pathlib.Path,
    partial: pathlib.Path,
    form: str,
    vocabulary: str | os.PathLike | None,
    dtype: str,
    encoder_only: bool,
) -> str:
    config, model = checkpoints.load(directory, encoder_only=encoder_only)
    vocabulary = vocabulary or checkpoints.vocabulary_in(directory)
    if form != "ctranslate2":
        checkpoints.save(partial, config, model, form, dtype, vocabulary, encoder_only)
    elif vocabulary is None or model.soft_prompt is not None:
        raise validation.InputError(
            f"{directory} has no vocabulary, or a soft prompt, which CTranslate2 "
            "cannot run. Give the SentencePiece model with --vocabulary, or use "
            "huggingface."
        )
    else:
        with tempfile.TemporaryDirectory(dir=partial) as folder:
            checkpoints.save(folder, config, model, vocabulary=vocabulary)
            ctranslate2_export.save(partial, folder, dtype)
    if (directory / PREPROCESSOR_FILE).is_file():
        shutil.copyfile(directory / PREPROCESSOR_FILE, partial / PREPROCESSOR_FILE)
    pieces = Tokenizer(vocabulary).vocabulary_size if vocabulary else "no"
    count = f"{model.count_params():,} parameters in {dtype}"
    return f"T5 {config.version}, {count}, {pieces} pieces"


def _write_retriever(
    directory: pathlib.Path,
    partial: pathlib.Path,
    form: str,
    dtype: str,
) -> str:
    if not (directory / layout.RETRIEVER_MODEL).is_dir():
        raise validation.InputError(
            f"{directory} is not a retriever. Give an output of train_retriever; a T5 "
            f"is converted to {', '.join(_T5)}."
        )
    model = retriever.load(directory / layout.RETRIEVER_MODEL)
    vocabulary = sources.vocabulary_file("", str(directory))
    config, tower = model.config, model.query_tower
    if form == ONNX:
        onnx_export.save(partial, model, dtype)
        fast_tokenizer.save(partial, pathlib.Path(vocabulary).read_bytes())
        shutil.copyfile(vocabulary, partial / VOCABULARY_FILE)
        names = ("query_length", "document_length")
        lengths = {name: getattr(config, name) for name in names}
        io.write_json(partial / "config.json", lengths)
    elif config.shared:
        encoder = tower.get_layer("t5_encoder")
        checkpoints.save(
            partial, config.t5, encoder, vocabulary=vocabulary, encoder_only=True
        )
        projection = tower.get_layer("projection").kernel.numpy()
        length = max(config.query_length, config.document_length)
        sentence_encoder.save(partial, config.pooling, projection, length)
    else:
        raise validation.InputError(
            f"{directory} has a tower for queries and one for documents; {form} has "
            f"one encoder for both. Train with shared=True, or convert it to {ONNX}."
        )
    return f"T5 {config.t5.version} encoder, {model.count_params():,} parameters"


def _write_set(directory: pathlib.Path, partial: pathlib.Path) -> str:
    if not sources.is_free(str(directory)):
        raise validation.InputError(
            f"{directory} is not a synthetic or public set. Give the directory of one, "
            f"which has a manifest.json, such as {layout.SET}/ in an output of "
            "synthesize."
        )
    made = read_manifest(directory)
    manifest = write_synthetic(
        partial / layout.SET,
        read_synthetic(directory),
        made["provenance"],
        made["certificate"],
        guarantee=made.get("guarantee"),
        form=sets.PARQUET,
    )
    for path in (partial / layout.SET).iterdir():
        path.rename(partial / path.name)
    (partial / layout.SET).rmdir()
    data_card.write(partial, manifest, sets.READ_PARQUET)
    return f"{manifest['count']:,} queries"


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs the command and exits; `argv` is the command line, program first."""
    own: Any = flags.FlagValues()
    flags.DEFINE_string("input", None, "The checkpoint to read.", flag_values=own)
    flags.DEFINE_string("output", None, "The directory to make.", flag_values=own)
    flags.DEFINE_string("format", None, "What to make.", flag_values=own)
    flags.DEFINE_string("vocabulary", None, "SentencePiece model.", flag_values=own)
    flags.DEFINE_string("dtype", "float32", "Of the weights.", flag_values=own)
    flags.DEFINE_bool("encoder_only", False, "Without decoder.", flag_values=own)

    def run(words: Sequence[str]) -> tuple[int, str]:
        if words or not (own.input and own.output and own.format):
            raise app.UsageError("")
        options = own.vocabulary, own.dtype, own.encoder_only
        return 0, convert(own.input, own.output, own.format, *options) + "\n"

    command.script(run, own, argv, __doc__, _USAGE)


if __name__ == "__main__":
    main()
