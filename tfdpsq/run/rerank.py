r"""Export a generator as a reranker: a SavedModel that scores documents for queries.

    python -m tfdpsq.run.rerank --workdir=OUT --config.generator=GENERATOR

Its scores are those that `evaluate` mixes with BM25's (`rerankers`), by the weight that
it fits (`rerank_weight` in a job's `results.json`). The stage writes `reranker/`, texts
in, nats out, which needs TensorFlow and tensorflow-text alone: see
`generator.Reranker`. It reveals the generator, and so carries its certificate.
"""

from __future__ import annotations

import os
import pathlib

import ml_collections

from tfdpsq import generator
from tfdpsq.generator import checkpoints
from tfdpsq.run.core import command, records, releases, settings, sources, workdir
from tfdpsq.run.search import exported

RERANKER = "reranker"

SETTINGS: settings.Declaration = {
    # What finetune wrote, a T5, or a preset's name.
    "generator": settings.Text(""),
}


def default_config() -> ml_collections.ConfigDict:
    """Returns the stage's settings."""
    return settings.default_config(SETTINGS)


def run(config: ml_collections.ConfigDict, directory: pathlib.Path) -> dict:
    """Runs the stage into `directory` unless it is finished there.

    Raises:
      InputError: bad settings, or a generator that cannot order documents.
      DataError: a damaged certificate.
    """
    settings.check(config, SETTINGS)
    model = sources.generator_fingerprint("generator", config.generator)
    inputs = {"generator": model}
    certificate = sources.certificate_of_model(config.generator)
    located = checkpoints.locate(config.generator)
    output = releases.Output(
        directory,
        releases.guarantee_of(certificate, os.fspath(located)),
        "a reranker by a generator that private queries had an unprotected part in",
    )

    def make(out: pathlib.Path) -> dict:
        exported.start_numbering()
        own = generator.T5QueryGenerator.from_preset(config.generator)
        generator.Reranker(own).export(out / RERANKER)
        exported.add_config(out / RERANKER)
        records.write_certificate(out, certificate)
        return {}

    return workdir.run_stage(output, config, inputs, make)


if __name__ == "__main__":
    command.main(run)
