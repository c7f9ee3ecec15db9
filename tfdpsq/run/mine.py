"""Mine hard negatives: documents that look like answers, to train against.

    python -m tfdpsq.run.mine --workdir=WORKDIR/private/mined --config.pairs=BEIR

Ranks the public documents for every query of a set of pairs by BM25 and writes
`run.trec`, which `train_retriever` takes as `hard_negatives.run`. Each query is ranked
by itself: its negatives depend on it and the public documents alone.

For private queries the file is a read that no ε covers: it names documents that share
words with each query. The read is recorded, and the output belongs under `private/`.
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import ml_collections

from tfdpsq import evaluation
from tfdpsq.run.core import command, records, releases, settings, sources, workdir
from tfdpsq.run.training import hard_negatives

RUN_FILE = "run.trec"
# Most found documents in memory; the corpus is read twice per chunk of queries.
_HITS = 4_000_000


SETTINGS: settings.Declaration = {
    "pairs": settings.Text(sources.PYDOCS, required=True),
    "split": settings.Text("train", required=True),
    "corpus": settings.Text(""),
    "k": settings.Integer(50, 1, 1000000),
    "strict": settings.Flag(False),
    "private_directory": settings.Text(""),
}


def default_config() -> ml_collections.ConfigDict:
    """Returns the stage's settings.

    `corpus` holds the candidate documents; "" is the pairs' own. The stage keeps `k`
    documents per query, including its answers.
    """
    return settings.default_config(SETTINGS)


def run(config: ml_collections.ConfigDict, directory: pathlib.Path) -> dict:
    """Runs the stage into `directory` unless it is finished there.

    Raises:
      InputError: bad settings, a synthetic set without a corpus, or private pairs in
        strict mode.
      DataError: malformed data.
    """
    settings.check(config, SETTINGS)
    certificate = sources.certificate_of_pairs(config.pairs)
    output = releases.Output(
        directory,
        sources.guarantee_of_pairs(config.pairs),
        "which documents match private queries",
        config.private_directory,
    )
    private = releases.private_directory(directory, config.private_directory)
    corpus = hard_negatives.corpus_of(config.corpus, config.pairs)
    source = sources.load_source(config.pairs, config.split)
    if source.private:
        records.private_reads(private, config.strict).record(
            f"BM25's best documents for each query of split {config.split!r}",
            f"{directory.name}/{RUN_FILE}",
        )
    inputs = {
        "pairs": sources.source_fingerprint(config.pairs, private),
        "corpus": sources.corpus_fingerprint(corpus),
    }

    def make(out: pathlib.Path) -> dict:
        beir = sources.open_beir(corpus)
        by: dict[str, Any] = {"name": "bm25"}

        def found() -> Iterator[tuple[str, dict[str, float]]]:
            pairs = source.read()
            index = evaluation.BM25(
                lambda: ((d.id, d.content) for d in beir.documents())
            )
            by["settings"] = index.settings
            while some := list(itertools.islice(pairs, max(1, _HITS // config.k))):
                queries = {pair.query_id: pair.query for pair in some}
                yield from index.search(queries, config.k, progress=True).items()

        evaluation.write_trec_run(out / RUN_FILE, found(), tag="bm25")
        hard_negatives.write_origin(
            out, out / RUN_FILE, config.split, inputs["pairs"], by
        )
        records.write_certificate(out, certificate)
        return {}

    return workdir.run_stage(output, config, inputs, make)


if __name__ == "__main__":
    command.main(run)
