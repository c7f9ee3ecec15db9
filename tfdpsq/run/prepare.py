"""Prepare public inputs: check the data, learn a vocabulary, cut pseudo-queries.

    python -m tfdpsq.run.prepare --workdir=OUT --config.data=BEIR

Uses the documents only, which are public; checks the queries for errors, but leaves no
trace of them in the output. Writes `vocabulary/spiece.model` and `public_pairs/`, a set
of sentences cut from the documents, each paired with the rest of its document: a
baseline without any private data.
"""

from __future__ import annotations

import pathlib

import ml_collections
from absl import logging

from tfdpsq.data import pseudo_pairs, train_vocabulary, write_synthetic
from tfdpsq.data.pseudo_queries import WORDS
from tfdpsq.data.sets import SyntheticQuery
from tfdpsq.data.tokenization import VOCABULARY_FILE
from tfdpsq.run.core import command, layout, releases, settings, sources, workdir
from tfdpsq.run.reporting import data_card
from tfdpsq.validation import InputError, shown

VOCABULARY = pathlib.Path("vocabulary", VOCABULARY_FILE)


SETTINGS: settings.Declaration = {
    "data": settings.Text(sources.PYDOCS, required=True),
    "splits": settings.Several(("train", "test"), settings.Text("", required=True)),
    # 0 learns none, for a pretrained model with its own.
    "vocabulary_size": settings.Integer(8192, 0, 10**7),
    "pseudo_queries_per_document": settings.Integer(1, 1, 10000),
    "seed": settings.Integer(0, 0, settings.SEED),
}


def default_config() -> ml_collections.ConfigDict:
    """Returns the stage's settings."""
    return settings.default_config(SETTINGS)


def run(config: ml_collections.ConfigDict, directory: pathlib.Path) -> dict:
    """Runs the stage into `directory` unless it is finished there.

    Raises:
      DataError: the data are bad; the first problem is named by file and line.
      InputError: no document has a sentence that can be a query.
    """
    settings.check(config, SETTINGS)
    holds = "a vocabulary and pairs of public documents"
    output = releases.Output(directory, releases.PUBLIC, holds)
    beir = sources.open_beir(config.data)
    # Also if the output is finished: the queries may have changed.
    counts = beir.validate(config.splits)
    logging.info("%s: %s", config.data, counts)
    corpus = sources.corpus_fingerprint(config.data)

    def make(out: pathlib.Path) -> dict:
        # Nothing is learned before it is known that there will be pairs.
        if next(pseudo_pairs(beir.documents(), config.seed), None) is None:
            raise InputError(
                f"data is {shown(config.data)}: none of its {counts.documents} "
                f"documents has a sentence of {WORDS[0]} to {WORDS[-1]} words "
                "to cut a public query from. Give documents of prose."
            )
        if config.vocabulary_size:
            (out / VOCABULARY).parent.mkdir()
            train_vocabulary(
                (document.content for document in beir.documents()),
                config.vocabulary_size,
                out / VOCABULARY,
            )
        rows = (
            SyntheticQuery(
                f"genQ{number}", pair.query, pair.document_id, pair.document, 0
            )
            for number, pair in enumerate(
                pseudo_pairs(
                    beir.documents(), config.seed, config.pseudo_queries_per_document
                )
            )
        )
        manifest = write_synthetic(
            out / layout.PUBLIC_PAIRS,
            rows,
            provenance={"made_from": "public documents only", "corpus": corpus},
            certificate=None,
            guarantee=output.guarantee,
        )
        data_card.write(out / layout.PUBLIC_PAIRS, manifest)
        # Excludes all counts of private queries: this is released.
        return {"documents": counts.documents, "public_pairs": manifest["count"]}

    return workdir.run_stage(output, config, {"corpus": corpus}, make)


if __name__ == "__main__":
    command.main(run)
