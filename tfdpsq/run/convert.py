"""Convert a T5 checkpoint between Hugging Face, keras-nlp and T5X formats.

    python -m tfdpsq.run.convert --input=DIR --output=DIR --format=huggingface

Formats: `huggingface` (also that of our generators), `keras`, `t5x`. The command
detects the input's format; the input may also be the name of a keras-nlp preset, such
as t5_small_multi. Every weight is accounted for: a weight that is missing, unknown, of
another shape or not finite ends the command, and nothing is written. The output appears
whole or not at all. It gets the input's vocabulary (or that of --vocabulary), and its
certificate, if there is one: a generator stays as private as it was. A soft prompt is
copied for `huggingface`, in a file of its own; the other formats refuse it.

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

from tfdpsq import validation  # noqa: E402
from tfdpsq.data import Tokenizer, any_files  # noqa: E402
from tfdpsq.generator import checkpoints  # noqa: E402
from tfdpsq.generator.checkpoints import (  # noqa: E402
    huggingface,
    keras_preset,
    t5x,
    weights,
)
from tfdpsq.privacy import read_certificate  # noqa: E402
from tfdpsq.run.core import command, records, releases, workdir  # noqa: E402

_WRITERS: dict[str, Any] = {
    "huggingface": huggingface,
    "keras": keras_preset,
    "t5x": t5x,
}
FORMATS = tuple(_WRITERS)
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
      source: the checkpoint, of any format, or the name of a keras-nlp preset.
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
    writer = _WRITERS[form]
    if hasattr(writer, "check_options"):  # before the work
        writer.check_options(dtype, encoder_only)
    destination = any_files.without_scheme(destination)
    if not any_files.is_local(destination):
        raise validation.InputError(
            f"output is {destination}; this writes to local paths, or to what is "
            "mounted as one."
        )
    directory = checkpoints.locate(source)
    certificate = read_certificate(directory)
    output = releases.Output(
        pathlib.Path(destination),
        releases.guarantee_of(certificate, os.fspath(directory)),
        "a model that private queries had an unprotected part in",
    )
    checkpoint = checkpoints.open_checkpoint(directory, encoder_only, ignore)
    config = checkpoint.config
    vocabulary = vocabulary or checkpoints.vocabulary_in(directory)
    pieces = "none found; see --vocabulary"
    if vocabulary:
        tokenizer = Tokenizer(vocabulary)
        tokenizer.require_embeddings(config.vocabulary_size)
        pieces = f"{tokenizer.vocabulary_size} pieces"
    with workdir.new_directory(output) as partial:
        # From file to file, one weight at a time: no model is in memory.
        writer.save(partial, config, checkpoint, dtype, vocabulary, encoder_only)
        checkpoint.check_copies()
        records.write_certificate(partial, certificate)
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
