"""Stage `synthesize`: let a generator write queries for public documents.

    python -m tfdpsq.run.synthesize --config=configs/synthesize.py --workdir=DIR

Reads the generator and the corpus's documents, never a private query: the set's
guarantee is the generator's, whose certificate it carries, however many queries
are written. Writes TFRecords and a BEIR directory.
"""

from __future__ import annotations

import math
import pathlib

import ml_collections
import tqdm

from tfdpsq.data import Tokenizer, write_synthetic
from tfdpsq.generator import (
    SamplingConfig,
    SynthesisConfig,
    T5QueryGenerator,
    checkpoints,
    synthesize,
)
from tfdpsq.run import command, sources, workdir

SET = "set"


def default_config() -> ml_collections.ConfigDict:
    """The stage's settings."""
    return ml_collections.ConfigDict(
        {
            # A directory in any format that `convert` reads, or a preset's name.
            "generator": "",
            # By default the one that lies beside the generator's weights.
            "vocabulary": "",
            "corpus": sources.PYDOCS,
            "max_documents": 0,
            "samples_per_document": 1,
            "document_length": 384,
            "query_length": 128,
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 0.8,
            "batch_size": 64,
            # "mixed_bfloat16" is faster where the machine has it, and other text.
            "dtype": "float32",
            "shards": 4,
            "seed": 0,
            "jit_compile": False,
        }
    )


def run(config: ml_collections.ConfigDict, directory: pathlib.Path) -> dict:
    """Runs the stage into `directory` unless it is finished there.

    Raises:
      InputError: bad settings, no generator, or a vocabulary that does not fit.
    """
    tokenizer = Tokenizer(sources.vocabulary_file(config.vocabulary, config.generator))
    settings = SynthesisConfig(
        samples_per_document=config.samples_per_document,
        document_length=config.document_length,
        query_length=config.query_length,
        batch_size=config.batch_size,
        seed=config.seed,
        sampling=SamplingConfig(config.temperature, config.top_k or None, config.top_p),
    )
    inputs = {
        "generator": workdir.model_fingerprint(checkpoints.locate(config.generator)),
        "vocabulary": tokenizer.fingerprint,
        "corpus": sources.corpus_fingerprint(config.corpus),
    }

    def make(out: pathlib.Path) -> dict:
        model = T5QueryGenerator.load(config.generator, config.dtype)
        documents = sources.sampled_documents(
            config.corpus, config.max_documents or None
        )
        total = (
            config.max_documents
            or sum(1 for _ in sources.sampled_documents(config.corpus, None))
        ) * config.samples_per_document
        rows = tqdm.tqdm(
            synthesize(model, tokenizer, documents, settings, config.jit_compile),
            total=math.ceil(total),
            desc=directory.name,
            unit="query",
            mininterval=1.0,
        )
        manifest = write_synthetic(
            out / SET,
            rows,
            provenance={"config": workdir.plain(config), "inputs": inputs},
            certificate=sources.certificate_of_model(config.generator),
            shards=config.shards,
        )
        return {
            "queries": manifest["count"],
            "empty_queries_left_out": manifest["empty_queries_left_out"],
        }

    return workdir.run_stage(directory, config, inputs, make)


if __name__ == "__main__":
    command.main(run)
