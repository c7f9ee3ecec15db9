"""Documents per second: `retriever.encode_texts`, Hugging Face, ONNX Runtime.

    python tests/benchmarks/encoding.py [--batch_size 128]

Needs the extras `parity` and `onnx`, or `--sides` without those. All encoders have the
weights of `t5_tiny_pydocs` and the same token ids, pool by the mean over real tokens
and divide by the norm, with the same batch size and threads, in float32 but for
`*_int8` (see `retriever.onnx_export`) and `*_bfloat16`. Hugging Face's batches follow
the corpus's order and are padded to their longest text, as its collator does;
`throughput_ratio` is ours over that. All others are sorted by length as ours:
`ratio_of_sorted` is ours over Hugging Face's, `ratio_to_onnx` over ONNX Runtime's
fastest side.

Prints one JSON line. The sides alternate; rates are medians of the rounds, and ratios
medians of the rounds' ratios.
"""

import argparse
import functools
import json
import os
import statistics
import tempfile
import time

import numpy as np
import tensorflow as tf

from tfdpsq import retriever
from tfdpsq.data import Tokenizer, build_pydocs
from tfdpsq.generator import checkpoints
from tfdpsq.retriever import onnx_export

DOCUMENTS, LENGTH, ROUNDS = 4096, 96, 3
# Number of batches that are sorted together, as in `encode_texts`.
WINDOW = 16
OWN_BFLOAT16 = "tfdpsq_bfloat16"
SIDES = (
    OWN_BFLOAT16,
    "huggingface",
    "huggingface_sorted",
    "onnx_float32",
    "onnx_int8",
)


class Tokens:
    """A tokenizer of texts that are already tokenised: each text is a number."""

    def __init__(self, ids, lengths):
        """Stores [N, L] ids and [N] lengths."""
        self._ids, self._lengths = ids, lengths

    def encode(self, texts, length):
        """Maps [B] numbers to ids and lengths."""
        rows = [int(text) for text in texts]
        return self._ids[rows], self._lengths[rows]


def own_encoder(model, batch_size, numbers):
    """Returns a function that embeds all texts by `retriever.Embedder`."""
    embedder = retriever.Embedder(model, "document", batch_size)
    texts = [(number, number) for number in numbers]
    return lambda: np.concatenate([part for _, part in embedder.chunks(texts)])


def in_batches(encode, ids, lengths, batch_size, by_length):
    """Returns [N, D] vectors by `encode`, of ids [B, L] and a mask [B, L], int64."""
    found = None
    order = np.arange(len(ids))
    if by_length:
        size = WINDOW * batch_size
        order = np.concatenate(
            [
                start + np.argsort(-lengths[start : start + size], kind="stable")
                for start in range(0, len(ids), size)
            ]
        )
    for start in range(0, len(ids), batch_size):
        rows = order[start : start + batch_size]
        width = lengths[rows].max()
        mask = np.arange(width) < lengths[rows][:, None]
        part = encode(ids[rows, :width].astype(np.int64), mask.astype(np.int64))
        if found is None:
            found = np.empty([len(ids), part.shape[1]], np.float32)
        found[rows] = part
    return found


def torch_encoder(path, projection, threads):
    """Returns an `encode` by Hugging Face's T5."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    model = transformers.T5EncoderModel.from_pretrained(
        path, torch_dtype=torch.float32
    ).eval()
    matrix = torch.from_numpy(projection)

    def encode(ids, mask):
        mask = torch.from_numpy(mask)
        with torch.inference_mode():
            states = model(
                input_ids=torch.from_numpy(ids), attention_mask=mask
            ).last_hidden_state
            weights = mask[..., None].float()
            pooled = (states * weights).sum(1) / weights.sum(1)
            return torch.nn.functional.normalize(pooled @ matrix).numpy()

    return encode


def onnx_encoder(model, dtype, threads):
    """Returns an `encode` by ONNX Runtime."""
    import onnxruntime

    with tempfile.TemporaryDirectory() as directory:
        onnx_export.save(directory, model, dtype)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(
            f"{directory}/encoder.onnx", options, providers=["CPUExecutionProvider"]
        )

    def encode(ids, mask):
        return session.run(None, {"input_ids": ids, "attention_mask": mask})[0]

    return encode


def options_of():
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=SIDES)
    return parser.parse_args()


def main():
    """Times all sides in alternation."""
    options = options_of()
    threads = len(os.sched_getaffinity(0))
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    path = str(checkpoints.locate("t5_tiny_pydocs"))
    tokenizer = Tokenizer(checkpoints.vocabulary_in(path))
    texts = [document.content for document in build_pydocs().documents()]
    texts = texts[:: max(1, len(texts) // DOCUMENTS)][:DOCUMENTS]
    ids, lengths = (np.asarray(a) for a in tokenizer.encode(texts, LENGTH))
    numbers, tokens = [str(row) for row in range(len(ids))], Tokens(ids, lengths)
    size = options.batch_size
    ours = retriever.TwoTower.from_preset(
        path, tokens, embedding_dim=192, document_length=LENGTH
    )
    # Every side is compiled once, before it is timed.
    ways = {"tfdpsq": own_encoder(ours, size, numbers)}
    kernel = ours.document_tower.get_layer("projection").get_weights()[0]
    for side in options.sides:
        if side == OWN_BFLOAT16:
            near = retriever.TwoTower(ours.config, tokens, "mixed_bfloat16")
            near.set_weights(ours.get_weights())
            ways[side] = own_encoder(near, size, numbers)
            continue
        runtime, _, dtype = side.partition("_")
        encode = (
            onnx_encoder(ours, dtype, threads)
            if runtime == "onnx"
            else torch_encoder(path, kernel, threads)
        )
        by_length = side != "huggingface"
        ways[side] = functools.partial(
            in_batches, encode, ids, lengths, size, by_length
        )
    vectors = {name: way() for name, way in ways.items()}  # and warm
    seconds = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - started)
    rates = {name: len(ids) / statistics.median(s) for name, s in seconds.items()}

    def ratio(side):
        pairs = zip(seconds[side], seconds["tfdpsq"])
        return round(statistics.median(theirs / own for theirs, own in pairs), 3)

    def onnx_rate(side):
        return rates.get(side, 0) if side.startswith("onnx") else 0

    result = {
        "benchmark": "encoding",
        "documents": len(ids),
        "mean_tokens": round(float(lengths.mean()), 1),
        "batch_size": size,
        "threads": threads,
        "documents_per_second": {n: round(r, 1) for n, r in rates.items()},
        "seconds": {n: [round(x, 2) for x in s] for n, s in seconds.items()},
    }
    for name, side in (
        ("throughput_ratio", "huggingface"),
        ("ratio_of_sorted", "huggingface_sorted"),
        ("ratio_to_onnx", max(SIDES, key=onnx_rate)),
    ):
        if side in rates:
            result[name] = ratio(side)
    result["least_cosine"] = {
        side: float((vectors["tfdpsq"] * vectors[side]).sum(axis=1).min())
        for side in options.sides
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
