"""Convert a T5, a retriever or a synthetic set to formats of several libraries.

    python -m tfdpsq.run.convert --input=DIR --output=DIR --format=huggingface

Formats: `huggingface` (also that of our generators), `keras`, `t5x`. The command
detects the input's format; the input may also be the name of a keras-nlp preset, such
as t5_small_multi, or a URL, such as gs://bucket/checkpoint_1000000. Every weight is
accounted for: a weight that is missing, unknown, of another shape or not finite ends
the command, and nothing is written. The output appears whole or not at all. It gets the
input's vocabulary (or that of --vocabulary), and its certificate, if there is one: a
generator stays as private as it was. A soft prompt is copied for `huggingface`, in a
file of its own; the other formats refuse it.

`ctranslate2` serves a generator without TensorFlow, with `--dtype=int8` in a quarter of
the memory (extra `ctranslate2`).

A retriever that `train_retriever` wrote is converted to `sentence-transformers`, the
layout of sentence-T5 and GTR, which `train_retriever --config.init=` takes as well (its
towers must be shared; texts are cut at the larger of its two lengths); or to `onnx`,
float32 or int8, which ONNX Runtime runs (extra `onnx`).

What is made for CTranslate2 or ONNX Runtime is run by them, next to ours, on public
documents: `comparison.json` says how near the two are, and what differs by more than
rounding is refused.

A synthetic set is converted to `parquet`, or to `datasets`, which `load_from_disk` of
Hugging Face's library reads (extra `import`), with its certificate and a card,
`README.md`, that says what it is.

Exit status: 0 converted, 2 refused, with the reason printed.
"""

from __future__ import annotations

import math
import os
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any, NoReturn

from absl import app, flags

from tfdpsq import retriever, validation
from tfdpsq.data import Tokenizer, any_files, export, read_manifest, tables
from tfdpsq.data.files import atomic_write, write_json
from tfdpsq.data.tokenization import PROMPT, VOCABULARY_FILE
from tfdpsq.generator import (
    T5QueryGenerator,
    checkpoints,
    ctranslate2_export,
)
from tfdpsq.generator.checkpoints import (
    fast_tokenizer,
    huggingface,
    keras_preset,
    sentence_encoder,
    t5x,
    weights,
)
from tfdpsq.privacy import read_certificate
from tfdpsq.privacy.proof import certificate as certificates
from tfdpsq.retriever import onnx_export
from tfdpsq.run.core import (
    command,
    layout,
    records,
    releases,
    sources,
    workdir,
)
from tfdpsq.run.reporting import data_card

_WRITERS: dict[str, Any] = {
    "huggingface": huggingface,
    "keras": keras_preset,
    "t5x": t5x,
    "ctranslate2": ctranslate2_export,
}
RETRIEVERS, ONNX = "sentence-transformers", "onnx"
FORMATS = (*_WRITERS, RETRIEVERS, ONNX, *export.FORMATS)
# How near the output is to the input, as another library runs it.
COMPARISON_FILE = "comparison.json"
# Public documents that both run on.
_COMPARED = 32
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
    ignore: Sequence[str] = (),
) -> str:
    """Converts a T5 checkpoint, a retriever or a synthetic set.

    Args:
      source: the checkpoint, of any format, or the name of a keras-nlp preset; for
        `RETRIEVERS` and `ONNX` an output of `train_retriever`; for those of `export` a
        set.
      destination: the directory to make. It must not exist, or be empty.
      form: one of `FORMATS`.
      vocabulary: a SentencePiece model, in place of the one in `source`.
      dtype: "float32", or "bfloat16" or "float16", to which weights are rounded; for
        `ctranslate2` and `ONNX` "float32" or "int8".
      encoder_only: whether to convert the encoder alone, for a retriever.
      ignore: patterns of weights in a T5X checkpoint to leave out.

    Returns:
      A summary, in lines of text.

    Raises:
      InputError: see `checkpoints.open_checkpoint`, and `save` of the format; or the
        destination is taken, the disk full, the vocabulary another model's, the
        certificate was changed, a library is missing, or another library makes
        something else of the output. Nothing is then written.
    """
    validation.one_of("format", form, FORMATS)
    given: dict[str, Any] = {"encoder_only": encoder_only, "ignore": [*ignore]}
    if form in export.FORMATS:
        _require_default(form, **given, dtype=dtype, vocabulary=vocabulary)
        return _convert_set(source, destination, form)
    if form not in _WRITERS:
        if form == ONNX:
            onnx_export.check_options(dtype)
        else:
            given["dtype"] = dtype
        _require_default(form, **given)
        return _convert_retriever(source, destination, form, vocabulary, dtype)
    return _convert_t5(
        source, destination, form, vocabulary, dtype, encoder_only, ignore
    )


def _require_default(form: str, **given: Any) -> None:
    """Refuses options that a format has no use for."""
    defaults: dict[str, Any] = {"dtype": "float32", "encoder_only": False, "ignore": []}
    for name, value in given.items():
        if value != defaults.get(name):
            raise validation.InputError(
                f"{name} is {value!r}, which does nothing for {form}, whose input is "
                f"written whole. Leave it at {defaults.get(name)!r}."
            )


def _convert_t5(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    form: str,
    vocabulary: str | os.PathLike | None,
    dtype: str,
    encoder_only: bool,
    ignore: Sequence[str],
) -> str:
    writer = _WRITERS[form]
    validation.one_of("dtype", dtype, getattr(writer, "DTYPES", weights.DTYPES))
    if hasattr(writer, "check_options"):  # before the work
        writer.check_options(dtype, encoder_only)
    directory = checkpoints.locate(source)
    certificate, output = _output(directory, destination)
    checkpoint = checkpoints.open_checkpoint(directory, encoder_only, ignore)
    config = checkpoint.config
    if vocabulary:
        vocabulary = sources.fetched(os.fspath(vocabulary))
    vocabulary = vocabulary or checkpoints.vocabulary_in(directory)
    pieces = "none found; see --vocabulary"
    if vocabulary:
        tokenizer = Tokenizer(vocabulary)
        tokenizer.require_embeddings(config.vocabulary_size, pretrained=True)
        pieces = f"{tokenizer.vocabulary_size} pieces"
    with workdir.new_directory(output) as partial:
        # From file to file, one weight at a time: no model is in memory.
        writer.save(partial, config, checkpoint, dtype, vocabulary, encoder_only)
        checkpoint.check_copies()
        compared = None
        if hasattr(writer, "compare"):
            model = T5QueryGenerator(config)
            checkpoint.load_into(model.backbone)
            texts = [PROMPT + text for text in _public_texts()]
            compared = writer.compare(partial, model, dtype, texts)
        _write_records(partial, certificate, output, directory, form, compared)
    count = sum(math.prod(slot.shape) for slot in checkpoint.slots)
    prompt = checkpoint.soft_prompt_length()
    return "\n".join(
        [
            f"{checkpoint.format} to {form}: {os.fspath(destination)}",
            f"  model        T5 {config.version}"
            + (", the encoder alone" if encoder_only else ""),
            f"  parameters   {count:,} in {dtype}",
            f"  shape        {config.num_layers} layers, hidden {config.hidden_dim}, "
            f"feed-forward {config.intermediate_dim}, {config.num_heads} heads of "
            f"{config.key_value_dim}, {config.vocabulary_size} embeddings",
            f"  soft prompt  {prompt} vectors" if prompt else "  soft prompt  none",
            f"  vocabulary   {pieces}",
            *_compared(compared),
            _carried(certificate),
        ]
    )


def _carried(certificate: dict[str, Any] | None) -> str:
    """Returns the summary's line on the certificate."""
    if certificate is None:
        return "  certificate  none"
    epsilon = certificate.get("guarantee", {}).get("epsilon")
    return f"  certificate  carried along, epsilon {epsilon}"


def _compared(compared: dict[str, Any] | None) -> list[str]:
    """Returns the summary's lines on a comparison."""
    if compared is None:
        return []
    if "same_tokens" in compared:
        nats = compared["log_probability_difference"]["mean"]
        return [
            f"  compared     greedy: {compared['same_tokens']:.1%} of "
            f"{compared['tokens']} tokens the same, {nats:.2g} nats a token apart"
        ]
    return [
        f"  compared     {name}.onnx: cosine to ours at least "
        f"{found['cosine']['least']:.6f} on {found['texts']} texts"
        for name, found in compared.items()
    ]


def _public_texts() -> list[str]:
    """Returns documents that everybody has, whatever the model was trained on."""
    return [d.content for d in sources.sampled_documents(sources.PYDOCS, _COMPARED)]


def _output(
    directory: pathlib.Path, destination: str | os.PathLike, what: str = "a model"
) -> tuple[dict[str, Any] | None, releases.Output]:
    """Returns the certificate of a model or a set, and the place of its conversion."""
    destination = any_files.without_scheme(destination)
    if not any_files.is_local(destination):
        raise validation.InputError(
            f"output is {destination}; this writes to local paths, or to what is "
            "mounted as one."
        )
    above = pathlib.Path(destination).resolve().parents
    if directory.resolve() in above:
        raise validation.InputError(
            f"output is {destination}, inside the input {directory}, whose record does "
            "not know of it. Give a directory next to it."
        )
    certificate = read_certificate(directory)
    return certificate, releases.Output(
        pathlib.Path(destination),
        releases.guarantee_of(certificate, os.fspath(directory)),
        f"{what} that private queries had an unprotected part in",
    )


def _write_records(
    partial: pathlib.Path,
    certificate: dict[str, Any] | None,
    output: releases.Output,
    source: pathlib.Path,
    form: str,
    compared: dict[str, Any] | None = None,
) -> None:
    """Writes comparison, certificate, and a `stage.json` where no other file tells.

    A finite epsilon alone would pass for one that may be released, where the source
    says that it may not: a model that was trained on canaries, say. And a format
    without a config has nothing by which a certificate that is lost would be missed.
    """
    if compared is not None:
        write_json(partial / COMPARISON_FILE, compared)
    records.write_certificate(partial, certificate)
    marked = any((partial / name).is_file() for name in certificates.CONFIGS)
    if output.guarantee == releases.PRIVATE or (certificate and not marked):
        config = {"input": os.path.abspath(source), "format": form}
        inputs = {"input": workdir.model_fingerprint(source)}
        workdir.write_stage(partial, output, {"config": config, "inputs": inputs})


def _vocabulary_of(retriever_directory: pathlib.Path) -> pathlib.Path:
    """Returns the vocabulary that a retriever was trained with, by its record.

    Raises:
      DataError: the record does not name it.
    """
    record = retriever_directory / workdir.STAGE_FILE
    trained = workdir.read_json(record)["config"]
    given, init = (trained.get(name) for name in ("vocabulary", "init"))
    if not isinstance(given, str) or not isinstance(init, str):
        raise validation.DataError(
            record,
            f"vocabulary is {validation.shown(given)} and init "
            f"{validation.shown(init)} in its config, which are texts in that of "
            "train_retriever",
            "Restore it, or give the SentencePiece file it was trained with by "
            "--vocabulary=FILE",
        )
    return sources.vocabulary_file(given, init)


def _convert_retriever(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    form: str,
    vocabulary: str | os.PathLike | None,
    dtype: str,
) -> str:
    """Writes a retriever as a sentence encoder or as ONNX; returns a summary."""
    directory = pathlib.Path(source)
    if not (directory / layout.RETRIEVER_MODEL).is_dir():
        raise validation.InputError(
            f"{directory} is not a retriever. Give an output of train_retriever; a T5 "
            f"is converted to {', '.join(_WRITERS)}."
        )
    certificate, output = _output(directory, destination)
    path = vocabulary or _vocabulary_of(directory)
    tokenizer = Tokenizer(path)
    sources.require_vocabulary("vocabulary", path, tokenizer, str(directory))
    model = retriever.load(directory / layout.RETRIEVER_MODEL)
    if form == RETRIEVERS and not model.config.shared:
        raise validation.InputError(
            f"{directory} has a tower for queries and one for documents; "
            f"{RETRIEVERS} has one encoder for both. Train with shared=True, or "
            f"convert it to {ONNX}."
        )
    compared = None
    with workdir.new_directory(output) as partial:
        if form == ONNX:
            compared = _write_onnx(partial, model, path, dtype)
        else:
            _write_sentence_encoder(partial, model, path)
        _write_records(partial, certificate, output, directory, form, compared)
    shape = model.config
    weighed = {
        id(w): w for t in (model.query_tower, model.document_tower) for w in t.weights
    }
    count = sum(weight.shape.num_elements() for weight in weighed.values())
    return "\n".join(
        [
            f"retriever to {form}: {os.fspath(destination)}",
            f"  model        T5 {shape.t5.version} encoder, {shape.pooling} pooling, "
            f"{shape.embedding_dim} dimensions of unit length",
            f"  parameters   {count:,} in {dtype}",
            f"  vocabulary   {tokenizer.vocabulary_size} pieces",
            *_compared(compared),
            _carried(certificate),
        ]
    )


def _write_sentence_encoder(
    partial: pathlib.Path, model: retriever.TwoTower, vocabulary: str | os.PathLike
) -> None:
    shape, tower = model.config, model.query_tower
    huggingface.save(
        partial,
        shape.t5,
        tower.get_layer("t5_encoder"),
        vocabulary=vocabulary,
        encoder_only=True,
    )
    sentence_encoder.save(
        partial,
        shape.pooling,
        tower.get_layer("projection").kernel.numpy(),
        max(shape.query_length, shape.document_length),
    )


def _write_onnx(
    partial: pathlib.Path,
    model: retriever.TwoTower,
    vocabulary: str | os.PathLike,
    dtype: str,
) -> dict[str, Any]:
    """Writes towers, lengths and tokenizer; returns the comparison."""
    onnx_export.save(partial, model, dtype)
    shape = model.config
    about = {
        "dtype": dtype,
        "embedding_dim": shape.embedding_dim,
        "query_length": shape.query_length,
        "document_length": shape.document_length,
    }
    write_json(partial / "config.json", about)
    shutil.copyfile(vocabulary, partial / VOCABULARY_FILE)
    text = fast_tokenizer.tokenizer_json(vocabulary)
    atomic_write(partial / fast_tokenizer.TOKENIZER_FILE, text)
    documents = _public_texts()
    # As short as queries are, too.
    texts = documents + [" ".join(text.split()[:6]) for text in documents]
    ids, lengths = Tokenizer(vocabulary).encode(texts, shape.document_length)
    return onnx_export.compare(partial, model, dtype, ids.numpy(), lengths.numpy())


def _convert_set(
    source: str | os.PathLike, destination: str | os.PathLike, form: str
) -> str:
    """Writes a set's rows as others read them; returns a summary."""
    tables.library("pyarrow")
    directory = pathlib.Path(source)
    if not sources.is_free(str(directory)):
        raise validation.InputError(
            f"{directory} is not a synthetic or public set. Give the directory of one, "
            f"which has a manifest.json, such as {layout.SET}/ in an output of "
            "synthesize."
        )
    read_manifest(directory)
    certificate, output = _output(directory, destination, "a set")
    with workdir.new_directory(output) as partial:
        manifest = export.export_set(directory, partial, form)
        data_card.write(partial, manifest, export.READ[form])
        _write_records(partial, certificate, output, directory, form)
    return "\n".join(
        [
            f"set to {form}: {os.fspath(destination)}",
            f"  queries      {manifest['count']:,}",
            f"  documents    {manifest['documents']:,}",
            _carried(certificate),
        ]
    )


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs the command and exits; `argv` is the command line, program first."""
    own = flags.FlagValues()
    flags.DEFINE_string("input", None, "The checkpoint to read.", flag_values=own)
    flags.DEFINE_string("output", None, "The directory to make.", flag_values=own)
    flags.DEFINE_string("format", None, "What to make.", flag_values=own)
    flags.DEFINE_string("vocabulary", None, "SentencePiece model.", flag_values=own)
    flags.DEFINE_string("dtype", "float32", "Of the weights.", flag_values=own)
    flags.DEFINE_bool("encoder_only", False, "Without decoder.", flag_values=own)
    flags.DEFINE_multi_string("ignore", [], "Weights to leave out.", flag_values=own)

    def run(words: Sequence[str]) -> tuple[int, str]:
        if words or not (own.input and own.output and own.format):
            raise app.UsageError("")
        if own.vocabulary is not None:
            validation.given_path("--vocabulary", own.vocabulary)
        text = convert(
            own.input,
            own.output,
            own.format,
            own.vocabulary,
            own.dtype,
            own.encoder_only,
            own.ignore,
        )
        return 0, text + "\n"

    command.script(run, own, argv, __doc__, _USAGE)


if __name__ == "__main__":
    main()
