"""Convert a T5 checkpoint, or a retriever, between formats of several libraries.

    python -m tfdpsq.run.convert --input=DIR --output=DIR --format=huggingface

Formats: `huggingface` (also that of our generators), `keras`, `t5x`. The command
detects the input's format; the input may also be the name of a keras-nlp preset, such
as t5_small_multi, or a URL, such as gs://bucket/checkpoint_1000000. Every weight is
accounted for: a weight that is missing, unknown, of another shape or not finite ends
the command, and nothing is written. The output appears whole or not at all. It gets the
input's vocabulary (or that of --vocabulary), and its certificate, if there is one: a
generator stays as private as it was. A soft prompt is copied for `huggingface`, in a
file of its own; the other formats refuse it.

A retriever that `train_retriever` wrote is converted to `sentence-transformers`, the
layout of sentence-T5 and GTR, which `train_retriever --config.init=` takes as well. Its
towers must be shared; texts are cut at the larger of its two lengths.

Exit status: 0 converted, 2 refused, with the reason printed.
"""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NoReturn

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from absl import app, flags  # noqa: E402

from tfdpsq import retriever, validation  # noqa: E402
from tfdpsq.data import Tokenizer, any_files  # noqa: E402
from tfdpsq.generator import checkpoints  # noqa: E402
from tfdpsq.generator.checkpoints import (  # noqa: E402
    huggingface,
    keras_preset,
    sentence_encoder,
    t5x,
    weights,
)
from tfdpsq.privacy import read_certificate  # noqa: E402
from tfdpsq.privacy.proof import certificate_files  # noqa: E402
from tfdpsq.run.core import (  # noqa: E402
    command,
    layout,
    records,
    releases,
    sources,
    workdir,
)

_WRITERS: dict[str, Any] = {
    "huggingface": huggingface,
    "keras": keras_preset,
    "t5x": t5x,
}
RETRIEVERS = "sentence-transformers"
FORMATS = (*_WRITERS, RETRIEVERS)
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
    """Converts a T5 checkpoint.

    Args:
      source: the checkpoint, of any format, or the name of a keras-nlp preset; for
        `RETRIEVERS` an output of `train_retriever`.
      destination: the directory to make. It must not exist, or be empty.
      form: one of `FORMATS`.
      vocabulary: a SentencePiece model, in place of the one in `source`.
      dtype: "float32", or "bfloat16" or "float16", to which weights are rounded.
      encoder_only: whether to convert the encoder alone, for a retriever.
      ignore: patterns of weights in a T5X checkpoint to leave out.

    Returns:
      A summary, in lines of text.

    Raises:
      InputError: see `checkpoints.open_checkpoint`, and `save` of the format; or the
        destination is taken, the disk full, the vocabulary another model's, or the
        certificate was changed. Nothing is then written.
    """
    validation.one_of("format", form, FORMATS)
    validation.one_of("dtype", dtype, weights.DTYPES)
    if form == RETRIEVERS:
        given = {"dtype": dtype, "encoder_only": encoder_only, "ignore": [*ignore]}
        for name, default in (
            ("dtype", "float32"),
            ("encoder_only", False),
            ("ignore", []),
        ):
            if given[name] != default:
                raise validation.InputError(
                    f"{name} is {given[name]!r}, which does nothing for {RETRIEVERS}: "
                    f"a retriever is written whole. Leave it at {default!r}."
                )
        return _convert_retriever(source, destination, vocabulary)
    writer = _WRITERS[form]
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
        _write_records(partial, certificate, output, directory, form)
    count = sum(math.prod(slot.shape) for slot in checkpoint.slots)
    prompt = checkpoint.soft_prompt_length()
    epsilon = (certificate or {}).get("guarantee", {}).get("epsilon")
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
            "  certificate  "
            + ("none" if certificate is None else f"carried along, epsilon {epsilon}"),
        ]
    )


def _output(
    directory: pathlib.Path, destination: str | os.PathLike
) -> tuple[dict[str, Any] | None, releases.Output]:
    """Returns a model's certificate, and the place of its conversion."""
    destination = any_files.without_scheme(destination)
    if not any_files.is_local(destination):
        raise validation.InputError(
            f"output is {destination}; this writes to local paths, or to what is "
            "mounted as one."
        )
    certificate = read_certificate(directory)
    return certificate, releases.Output(
        pathlib.Path(destination),
        releases.guarantee_of(certificate, os.fspath(directory)),
        "a model that private queries had an unprotected part in",
    )


def _write_records(
    partial: pathlib.Path,
    certificate: dict[str, Any] | None,
    output: releases.Output,
    source: pathlib.Path,
    form: str,
) -> None:
    """Writes the certificate, and a `stage.json` where no other file tells enough.

    A finite epsilon alone would pass for one that may be released, where the source
    says that it may not: a model that was trained on canaries, say. And a format
    without a config has nothing by which a certificate that is lost would be missed.
    """
    records.write_certificate(partial, certificate)
    marked = any((partial / name).is_file() for name in certificate_files.CONFIGS)
    if output.guarantee == releases.PRIVATE or (certificate and not marked):
        config = {"input": os.path.abspath(source), "format": form}
        inputs = {"input": workdir.model_fingerprint(source)}
        workdir.write_stage(
            partial, output.guarantee, {"config": config, "inputs": inputs}
        )


def _convert_retriever(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    vocabulary: str | os.PathLike | None,
) -> str:
    """Writes a retriever as a sentence encoder; returns a summary."""
    directory = pathlib.Path(source)
    if not (directory / layout.RETRIEVER_MODEL).is_dir():
        raise validation.InputError(
            f"{directory} is not a retriever. Give an output of train_retriever; a T5 "
            f"is converted to {', '.join(_WRITERS)}."
        )
    certificate, output = _output(directory, destination)
    stage = workdir.read_json(directory / workdir.STAGE_FILE)
    own = stage["config"]
    path = vocabulary or sources.vocabulary_file(own["vocabulary"], own["init"])
    tokenizer = Tokenizer(path)
    sources.require_vocabulary("vocabulary", path, tokenizer, str(directory))
    model = retriever.load(directory / layout.RETRIEVER_MODEL)
    shape = model.config
    if not shape.shared:
        raise validation.InputError(
            f"{directory} has a tower for queries and one for documents; "
            f"{RETRIEVERS} has one encoder for both. Train with shared=True."
        )
    tower = model.query_tower
    with workdir.new_directory(output) as partial:
        huggingface.save(
            partial,
            shape.t5,
            tower.get_layer("t5_encoder"),
            vocabulary=path,
            encoder_only=True,
        )
        sentence_encoder.save(
            partial,
            shape.pooling,
            tower.get_layer("projection").kernel.numpy(),
            max(shape.query_length, shape.document_length),
        )
        _write_records(partial, certificate, output, directory, RETRIEVERS)
    count = sum(weight.shape.num_elements() for weight in tower.weights)
    epsilon = (certificate or {}).get("guarantee", {}).get("epsilon")
    return "\n".join(
        [
            f"retriever to {RETRIEVERS}: {os.fspath(destination)}",
            f"  model        T5 {shape.t5.version} encoder, {shape.pooling} pooling, "
            f"{shape.embedding_dim} dimensions of unit length",
            f"  parameters   {count:,} in float32",
            f"  vocabulary   {tokenizer.vocabulary_size} pieces",
            "  certificate  "
            + ("none" if certificate is None else f"carried along, epsilon {epsilon}"),
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
