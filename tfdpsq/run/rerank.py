r"""Export a search by words whose best documents a generator orders.

    python -m tfdpsq.run.rerank --workdir=OUT --config.generator=GENERATOR \
        --config.corpus=BEIR

This is *BM25 + generator* as `evaluate` measures it (`rerankers`), ready to deploy;
`--config.weight` is what was fitted there (`rerank_weight` in a job's `results.json`).
The stage writes `search/`, a SavedModel, text in, ids and scores out, that needs
TensorFlow and tensorflow-text alone (see `generator.RerankedSearch`). Corpus and model
are in memory.

Documents are public, so the search costs no privacy; but it reveals the generator, and
so carries its certificate.
"""

from __future__ import annotations

import os
import pathlib

import ml_collections

from tfdpsq import evaluation, generator, validation
from tfdpsq.data import Tokenizer
from tfdpsq.generator import checkpoints
from tfdpsq.run.core import command, records, releases, settings, sources, workdir
from tfdpsq.run.search import exported, reranking
from tfdpsq.run.training import training_settings

SETTINGS: settings.Declaration = {
    # What finetune wrote, a T5, or a preset's name.
    "generator": settings.Text(""),
    "corpus": settings.Text(sources.PYDOCS, required=True),
    # Documents of each query that the generator orders, and the weight of its
    # likelihood; BM25 has the rest.
    "depth": reranking.SETTINGS["depth"],
    # With 0 the generator would do nothing: `index` has words alone.
    "weight": settings.Number(0.25, 0, 1, low_open=True),
    # As the generator was trained.
    **training_settings.prompt_settings(),
    **training_settings.length_settings(384, 128),
}


def default_config() -> ml_collections.ConfigDict:
    """Returns the stage's settings."""
    return settings.default_config(SETTINGS)


def run(config: ml_collections.ConfigDict, directory: pathlib.Path) -> dict:
    """Runs the stage into `directory` unless it is finished there.

    Raises:
      InputError: bad settings, or a generator that cannot order documents.
      DataError: malformed documents, or a damaged certificate.
    """
    settings.check(config, SETTINGS)
    if not config.generator:
        raise validation.InputError(
            "generator is ''. Give it what finetune wrote, a T5, or a preset's name."
        )
    model, vocabulary = reranking.generator_inputs(
        "generator", config.generator, "prompt", config.prompt
    )
    inputs = {
        "generator": model,
        "vocabulary": vocabulary,
        "corpus": sources.corpus_fingerprint(config.corpus),
    }
    certificate = sources.certificate_of_model(config.generator)
    located = checkpoints.locate(config.generator)
    output = releases.Output(
        directory,
        releases.guarantee_of(certificate, os.fspath(located)),
        "a search by a generator that private queries had an unprotected part in",
    )

    def make(out: pathlib.Path) -> dict:
        exported.start_numbering()
        beir = sources.open_beir(config.corpus)
        documents = list(beir.documents())
        words = evaluation.BM25((each.id, each.content) for each in documents)
        generator.RerankedSearch(
            generator.T5QueryGenerator.from_preset(config.generator),
            Tokenizer(sources.vocabulary_file("", config.generator)),
            [document.id for document in documents],
            (document.content for document in documents),
            words.postings(),
            config.depth,
            config.weight,
            config.document_length,
            config.query_length,
            config.prompt,
        ).export(os.fspath(out / exported.SEARCH))
        exported.add_config(out)
        records.write_certificate(out, certificate)
        return {"documents": len(documents)}

    return workdir.run_stage(output, config, inputs, make)


if __name__ == "__main__":
    command.main(run)
