"""Documents in, synthetic queries out, whatever the batching.

Every (document, sample) has random numbers of its own, derived from the seed,
the document's id and the sample's number by a hash. The query written for it is
therefore the same at any batch size, in any shard, in any order.

Synthesis reads the trained model and public documents only: by post-processing
it costs no privacy, however many queries are written.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Iterator

import numpy as np
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.data.records import SyntheticQuery
from tfdpsq.data.texts import Document
from tfdpsq.data.tokenization import PROMPT, Tokenizer
from tfdpsq.generator.decoding import decodable_logits_mask, generate
from tfdpsq.generator.model import T5QueryGenerator
from tfdpsq.generator.sampling import SamplingConfig


@dataclasses.dataclass(frozen=True)
class SynthesisConfig:
    """How queries are written.

    Attributes:
      samples_per_document: queries per document, k.
      document_length: tokens of prompt and document the encoder sees.
      query_length: most tokens of a query, EOS included.
      batch_size: rows decoded at a time; changes speed only.
      seed: any integer; public, as post-processing needs no secret.
      sampling: how tokens are chosen.
      prompt: what precedes the document.

    Raises:
      InputError: a number below one.
    """

    samples_per_document: int = 1
    document_length: int = 384
    query_length: int = 128
    batch_size: int = 64
    seed: int = 0
    sampling: SamplingConfig = SamplingConfig()
    prompt: str = PROMPT

    def __post_init__(self):
        """Checks every value."""
        for field in (
            "samples_per_document",
            "document_length",
            "query_length",
            "batch_size",
        ):
            validation.positive_integer(field, getattr(self, field))


def row_uniforms(seed: int, document_id: str, sample: int, length: int) -> np.ndarray:
    """The random numbers of one (document, sample).

    Args:
      seed: the synthesis seed.
      document_id: the document's id.
      sample: number of the sample for this document, from 0.
      length: how many numbers, one per position.

    Returns:
      [length] float32 in [0, 1).
    """
    digest = hashlib.sha256(f"{seed}\0{sample}\0{document_id}".encode()).digest()
    random = np.random.default_rng(int.from_bytes(digest, "big"))
    return random.random(length, dtype=np.float32)


def synthesize(
    model: T5QueryGenerator,
    tokenizer: Tokenizer,
    documents: Iterable[Document],
    config: SynthesisConfig,
    jit_compile: bool = False,
) -> Iterator[SyntheticQuery]:
    """Writes `samples_per_document` queries for each document.

    Args:
      model: the generator.
      tokenizer: the vocabulary it was trained with.
      documents: public documents; read as a stream.
      config: how to write.
      jit_compile: compile the decoding loop with XLA.

    Yields:
      One `SyntheticQuery` for each document and sample, in order, numbered
      `genQ0`, `genQ1`, … Its text may be empty; `write_synthetic` leaves such
      rows out and counts them.

    Raises:
      InputError: the tokenizer does not fit the model.
    """
    mask = decodable_logits_mask(
        model.config.vocabulary_size,
        tokenizer.vocabulary_size,
        (tokenizer.pad_id, tokenizer.unk_id),
    )

    @tf.function(jit_compile=jit_compile)
    def write(ids, lengths, uniforms):
        return generate(
            model,
            ids,
            lengths,
            uniforms,
            config.sampling,
            mask,
            tokenizer.eos_id,
        )[0]

    numbered = (
        (document, sample)
        for document in documents
        for sample in range(config.samples_per_document)
    )
    number = 0
    while rows := list(itertools.islice(numbered, config.batch_size)):
        # The last batch is filled up, so that one shape is compiled.
        filled = rows + rows[-1:] * (config.batch_size - len(rows))
        ids, lengths = tokenizer.encode(
            [config.prompt + document.content for document, _ in filled],
            config.document_length,
        )
        uniforms = np.stack(
            [
                row_uniforms(config.seed, document.id, sample, config.query_length)
                for document, sample in filled
            ]
        )
        texts = tokenizer.decode(write(ids, lengths, tf.constant(uniforms)))
        for (document, sample), text in zip(rows, texts.numpy()):
            yield SyntheticQuery(
                query_id=f"genQ{number}",
                query=" ".join(text.decode("utf-8", "replace").split()),
                document_id=document.id,
                document=document.content,
                sample=sample,
            )
            number += 1
