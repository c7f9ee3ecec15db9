"""Rankings by embeddings in float32 and in `mixed_bfloat16`, on pydocs' test queries.

    python tests/benchmarks/embedding_dtype.py --workdir DIR

The retriever is quickstart's untrained row: the encoder of `t5_tiny_pydocs`, or
`--retriever=DIR`, an output of `train_retriever` with that vocabulary. The stages
`encode` and `evaluate` run in each dtype over the whole corpus, and take one another's
embeddings. Prints one JSON line: cosines of the two embeddings of a document, NDCG@10
in both and its paired interval, how much of the ten best is the same, and the seconds
of `encode`, its start included.
"""

import argparse
import json
import pathlib
import time

import numpy as np

from tfdpsq import evaluation, retriever
from tfdpsq.run import encode, evaluate, train_retriever
from tfdpsq.run.core import layout, settings, sources
from tfdpsq.run.passes import embedding


def untrained(out, vocabulary):
    """Writes quickstart's untrained retriever."""
    config = train_retriever.default_config()
    config.update(
        pairs=sources.PYDOCS,
        vocabulary=vocabulary,
        init="t5_tiny_pydocs",
        document_length=96,
        query_length=24,
        embedding_dim=192,
        scale=20.0,
        steps=0,
    )
    train_retriever.run(config, out)


def evaluated(own, vocabulary, dtype, place):
    """Runs both stages; returns the seconds of `encode`, and what was found."""
    config = encode.default_config()
    config.update(retriever=str(own), vocabulary=vocabulary, dtype=dtype)
    started = time.perf_counter()
    encode.run(config, place / "documents")
    seconds = time.perf_counter() - started
    config = evaluate.default_config()
    config.update(data=sources.PYDOCS, vocabulary=vocabulary, dtype=dtype)
    with config.unlocked():
        config.systems = {"own": str(own)}
        config.indexes = {"own": str(place / "documents")}
    out = place / "private" / "evaluate"
    evaluate.run(config, out)
    found = evaluation.read_trec_run(out / "runs" / "own.trec")
    return seconds, found, evaluation.read_trec_qrels(out / "qrels.trec")


def main():
    """Runs and compares."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--retriever", type=pathlib.Path)
    options = parser.parse_args()
    vocabulary = str(sources.vocabulary_file("", "t5_tiny_pydocs"))
    own = options.retriever or options.workdir / "retriever"
    if options.retriever is None:
        untrained(own, vocabulary)
    runs, values, seconds, vectors = {}, {}, {}, {}
    for dtype in settings.DTYPES:
        place = options.workdir / dtype
        seconds[dtype], runs[dtype], qrels = evaluated(own, vocabulary, dtype, place)
        measured = evaluation.evaluate_run(qrels, runs[dtype], layout.METRICS)
        values[dtype] = measured.values("ndcg@10")
        held = retriever.DocumentIndex(place / "documents" / embedding.DOCUMENTS)
        vectors[dtype] = held.embeddings()
    exact, near = settings.DTYPES
    cosines = np.einsum("nd,nd->n", *(v.astype(np.float64) for v in vectors.values()))
    difference = evaluation.paired_bootstrap(values[near], values[exact])
    tens = {
        dtype: {
            query: sorted(hits, key=hits.get, reverse=True)[:10]
            for query, hits in run.items()
        }
        for dtype, run in runs.items()
    }
    same = [len(set(tens[near][q]) & set(ten)) / 10 for q, ten in tens[exact].items()]
    first = [tens[near][q][0] == ten[0] for q, ten in tens[exact].items()]
    result = {
        "benchmark": "embedding_dtype",
        "documents": len(cosines),
        "queries": len(same),
        "cosine": {"least": cosines.min(), "median": np.median(cosines)},
        "ndcg@10": {dtype: float(np.mean(v)) for dtype, v in values.items()},
        "difference": [difference.difference, difference.low, difference.high],
        "same_of_ten": np.mean(same),
        "same_first": np.mean(first),
        "encode_seconds": {dtype: round(s, 1) for dtype, s in seconds.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
