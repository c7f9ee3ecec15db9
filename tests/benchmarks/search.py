"""ScaNN's tree against its brute force: recall and queries per second, one JSON line.

    python tests/benchmarks/search.py --documents 200000 --width 128

Vectors are clustered random walks of unit length: each is a small step from the one
before, with a jump every few hundred, which makes neighbourhoods of all sizes, as among
texts. Queries are small steps from random documents. Both searches alternate in this
process.
"""

import argparse
import json
import time

import numpy as np
import tensorflow as tf

from tfdpsq.retriever.index import top_k_layer


def random_walk(count, width, seed, jump_every=300, step=0.25):
    """Returns [count, width] float32 of unit length."""
    draw = np.random.default_rng(seed)
    steps = step * draw.normal(size=(count, width)) / np.sqrt(width)
    starts = np.flatnonzero(draw.random(count) < 1 / jump_every)
    starts = np.unique(np.concatenate([[0], starts]))
    walk = np.empty([count, width])
    for start, end in zip(starts, [*starts[1:], count]):
        origin = draw.normal(size=width)
        walk[start:end] = origin / np.linalg.norm(origin)
        walk[start:end] += np.cumsum(steps[start:end], axis=0)
    return (walk / np.linalg.norm(walk, axis=1, keepdims=True)).astype(np.float32)


def main():
    """Builds both indexes, searches, prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=200_000)
    parser.add_argument("--queries", type=int, default=2_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    documents = random_walk(options.documents, options.width, options.seed)
    draw = np.random.default_rng(options.seed + 1)
    near = documents[draw.choice(options.documents, options.queries)]
    queries = near + 0.3 * draw.normal(size=near.shape) / np.sqrt(options.width)
    queries = (queries / np.linalg.norm(queries, axis=1, keepdims=True)).astype("f4")
    layers, seconds, found = {}, {}, {}
    for name, kind in (("brute", "scann_brute_force"), ("tree", "scann")):
        started = time.perf_counter()
        layer = top_k_layer(kind, len(documents), options.k)
        layers[name] = layer.index(tf.constant(documents))
        seconds[f"{name}_build"] = time.perf_counter() - started
        layers[name](tf.constant(queries[: options.batch]))  # warm
    parts = range(0, options.queries, options.batch)
    for start in parts:
        batch = tf.constant(queries[start : start + options.batch])
        for name, layer in layers.items():
            started = time.perf_counter()
            rows = layer(batch)[1].numpy()
            seconds[name] = seconds.get(name, 0) + time.perf_counter() - started
            found.setdefault(name, []).append(rows)
    brute, tree = (np.concatenate(found[name]) for name in ("brute", "tree"))
    recall = np.mean([len(set(a) & set(b)) / options.k for a, b in zip(brute, tree)])
    print(
        json.dumps(
            {
                "benchmark": "search",
                **vars(options),
                f"recall@{options.k}": round(float(recall), 4),
                "queries_per_second": {
                    name: round(options.queries / seconds[name], 1) for name in layers
                },
                "throughput_ratio": round(seconds["brute"] / seconds["tree"], 2),
                "build_seconds": {
                    name: round(seconds[f"{name}_build"], 1) for name in layers
                },
            }
        )
    )


if __name__ == "__main__":
    main()
