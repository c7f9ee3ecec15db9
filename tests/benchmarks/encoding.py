"""Documents per second: `retriever.encode_texts` against Hugging Face's T5 encoder.

    python tests/benchmarks/encoding.py [--batch_size 128] [--shape small]

Needs torch and transformers in addition. Both encoders have the same weights and token
ids; both pool by the mean over real tokens and divide by the norm; both use float32,
the same batch size and the same threads. Hugging Face's batches follow the corpus's
order and are padded to their longest text, as its collator does. `throughput_ratio` is
ours over that; `ratio_of_sorted` over Hugging Face's with batches sorted by length as
ours, so that only the encoders differ.

Prints one JSON line. The three alternate; each figure is the median of its rounds.
"""

import argparse
import json
import os
import pathlib
import statistics
import tempfile
import time

import numpy as np
import tensorflow as tf
import torch
import transformers

from tfdpsq import retriever
from tfdpsq.data import Tokenizer
from tfdpsq.generator import checkpoints
from tfdpsq.run.core import sources

# Number of batches that are sorted together, as in `encode_texts`.
WINDOW = 16


class Tokens:
    """A tokenizer of texts that are already tokenised: each text is a number."""

    def __init__(self, ids, lengths):
        """Stores [N, L] ids and [N] lengths."""
        self._ids, self._lengths = ids, lengths

    def encode(self, texts, length):
        """Maps [B] numbers to ids and lengths."""
        rows = [int(text) for text in texts]
        return self._ids[rows], self._lengths[rows]


def of_torch(model, projection, ids, lengths, batch_size, by_length):
    """Returns [N, D] unit vectors by Hugging Face's encoder."""
    found = np.empty([len(ids), projection.shape[1]], np.float32)
    order = np.arange(len(ids))
    if by_length:
        size = WINDOW * batch_size
        order = np.concatenate(
            [
                start + np.argsort(-lengths[start : start + size], kind="stable")
                for start in range(0, len(ids), size)
            ]
        )
    with torch.inference_mode():
        for start in range(0, len(ids), batch_size):
            rows = order[start : start + batch_size]
            width = lengths[rows].max()
            mask = torch.from_numpy(
                (np.arange(width) < lengths[rows][:, None]).astype(np.int64)
            )
            states = model(
                input_ids=torch.from_numpy(ids[rows, :width].astype(np.int64)),
                attention_mask=mask,
            ).last_hidden_state
            weights = mask[..., None].float()
            pooled = (states * weights).sum(1) / weights.sum(1)
            found[rows] = torch.nn.functional.normalize(pooled @ projection).numpy()
    return found


def weights_of(shape, directory):
    """Makes a Hugging Face directory: the preset, or random weights of T5-small."""
    preset = checkpoints.locate("t5_tiny_pydocs")
    if shape == "preset":
        return str(preset)
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=8192)  # its defaults are T5-small's
    transformers.T5EncoderModel(config).save_pretrained(directory)
    full = transformers.T5ForConditionalGeneration(config)
    full.save_pretrained(directory)
    return directory


def main():
    """Times all three in alternation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=4096)
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--length", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", choices=("preset", "small"), default="preset")
    options = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    vocabulary = sources.vocabulary_file("", "t5_tiny_pydocs")
    texts = [d.content for d in sources.sampled_documents("pydocs", options.documents)]
    ids, lengths = (
        np.asarray(a) for a in Tokenizer(vocabulary).encode(texts, options.length)
    )
    with tempfile.TemporaryDirectory() as directory:
        path = weights_of(options.shape, directory)
        theirs = transformers.T5EncoderModel.from_pretrained(
            path, torch_dtype=torch.float32
        ).eval()
        config, encoder = checkpoints.load_encoder(pathlib.Path(path))
    ours = retriever.TwoTower(
        retriever.RetrieverConfig(config, 192, 20.0, 24, options.length)
    )
    ours.load_encoder_weights_from(encoder)
    projection = torch.from_numpy(
        ours.document_tower.get_layer("projection").get_weights()[0]
    )
    numbers = [str(row) for row in range(len(ids))]
    tokens = Tokens(ids, lengths)

    def by_torch(by_length):
        return of_torch(theirs, projection, ids, lengths, options.batch_size, by_length)

    ways = {
        "tfdpsq": lambda: retriever.encode_texts(
            ours, numbers, tokens, "document", options.batch_size, progress=False
        ),
        "huggingface": lambda: by_torch(False),
        "huggingface_sorted": lambda: by_torch(True),
    }
    vectors = {name: way() for name, way in ways.items()}  # and warm
    seconds = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - started)
    rates = {name: len(ids) / statistics.median(s) for name, s in seconds.items()}
    print(
        json.dumps(
            {
                "benchmark": "encoding",
                "shape": options.shape,
                "documents": len(ids),
                "mean_tokens": round(float(lengths.mean()), 1),
                "batch_size": options.batch_size,
                "threads": threads,
                "documents_per_second": {n: round(r, 1) for n, r in rates.items()},
                "throughput_ratio": round(rates["tfdpsq"] / rates["huggingface"], 3),
                "ratio_of_sorted": round(
                    rates["tfdpsq"] / rates["huggingface_sorted"], 3
                ),
                "largest_difference": float(
                    np.abs(vectors["tfdpsq"] - vectors["huggingface"]).max()
                ),
            }
        )
    )


if __name__ == "__main__":
    main()
