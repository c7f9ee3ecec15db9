"""Queries per second of `generate` against Hugging Face, CTranslate2, and in bfloat16.

    python tests/benchmarks/generation.py

prints one JSON line; it needs the extras `parity` (torch and transformers) and
`ctranslate2`, or `--sides` without those. All sides have the shape of T5-small (1.0)
with random weights, the same 64 documents of 128 tokens and all cores, and write 32
tokens for every document: by nucleus sampling, p = 0.8, with a cache, without stopping
early.

Each side has its own process, and they alternate. `throughput_ratio` is ours over
Hugging Face's in queries per second of wall time, from the medians.
`ratio_to_ctranslate2` is ours in float32 over the faster one of CTranslate2's float32
and int8, which have our weights: the median of the rounds' ratios.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

_LAYERS, _WIDTH, _HEADS, _INTERMEDIATE, _VOCABULARY = 6, 512, 8, 2048, 32128
_ROWS, _DOCUMENT, _NEW, _TOP_P = 64, 128, 32, 0.8
_EOS = 1


def _documents():
    """Returns [B, document] ids without padding or EOS, the same for all sides."""
    import numpy as np

    shape = [_ROWS, _DOCUMENT]
    return np.random.default_rng(0).integers(3, _VOCABULARY - 128, shape)


def _model(dtype):
    import tensorflow as tf

    from tfdpsq import generator
    from tfdpsq.layers import T5Config

    tf.keras.utils.set_random_seed(0)
    shape = (_VOCABULARY, _LAYERS, _HEADS, _WIDTH, _INTERMEDIATE, _WIDTH // _HEADS)
    return generator.T5QueryGenerator(T5Config(*shape, "1.0"), dtype=dtype)


def _ours(dtype):
    import tensorflow as tf

    from tfdpsq import generator
    from tfdpsq.generator import decoding

    model = _model(dtype)
    # No query ends early: all write the same number of tokens.
    mask = decoding.text_mask(_VOCABULARY, _VOCABULARY - 128)
    mask += tf.one_hot(_EOS, _VOCABULARY, on_value=float("-inf"))
    sampler = generator.TopP(_TOP_P)
    ids = tf.constant(_documents(), tf.int32)
    lengths = tf.fill([_ROWS], _DOCUMENT)

    @tf.function
    def write(uniforms):
        return decoding.decode(model, ids, lengths, uniforms, sampler, mask)

    def run():
        written = write(tf.random.uniform([_ROWS, _NEW])).numpy()
        assert written.shape == (_ROWS, _NEW)

    return run, model.backbone.count_params()


def _huggingface():
    import torch
    import transformers

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    config = transformers.T5Config(
        vocab_size=_VOCABULARY,
        d_model=_WIDTH,
        d_kv=_WIDTH // _HEADS,
        d_ff=_INTERMEDIATE,
        num_layers=_LAYERS,
        num_heads=_HEADS,
        decoder_start_token_id=0,
        eos_token_id=_EOS,
        pad_token_id=0,
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    ids = torch.tensor(_documents())
    mask = torch.ones_like(ids)

    def run():
        with torch.inference_mode():
            written = model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                top_p=_TOP_P,
                top_k=0,
                use_cache=True,
                min_new_tokens=_NEW,
                max_new_tokens=_NEW,
            )
        assert written.shape == (_ROWS, _NEW + 1)

    return run, sum(p.numel() for p in model.parameters())


def _ctranslate2(dtype):
    """CTranslate2 on our weights, which another process writes: it needs TensorFlow."""
    import ctranslate2

    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, __file__, "--write", directory, dtype]
        subprocess.run(command, check=True)
        translator = ctranslate2.Translator(
            directory, intra_threads=len(os.sched_getaffinity(0)), inter_threads=1
        )
        parameters = int(pathlib.Path(directory, "parameters").read_text())
        # CTranslate2 reads and writes pieces of text.
        names = json.loads(
            pathlib.Path(directory, "shared_vocabulary.json").read_text()
        )
    sources = [[names[i] for i in row] for row in _documents()]

    def run():
        found = translator.translate_batch(
            sources,
            beam_size=1,
            sampling_topk=0,
            sampling_topp=_TOP_P,
            min_decoding_length=_NEW,
            max_decoding_length=_NEW,
        )
        assert all(len(each.hypotheses[0]) == _NEW for each in found)

    return run, parameters


def _write(directory, dtype):
    """Writes the weights of `_ours` for CTranslate2."""
    from tfdpsq.generator import checkpoints, ctranslate2_export

    model = _model("float32")
    vocabulary = checkpoints.vocabulary_in(checkpoints.locate("t5_tiny_pydocs"))
    with tempfile.TemporaryDirectory() as folder:
        model.save_to_huggingface(folder, vocabulary)
        ctranslate2_export.save(directory, folder, dtype)
    count = str(model.backbone.count_params())
    pathlib.Path(directory, "parameters").write_text(count)


# Each returns (timed function, number of parameters).
_SIDES = {
    "huggingface": _huggingface,
    "float32": lambda: _ours("float32"),
    "bfloat16": lambda: _ours("mixed_bfloat16"),
    "ctranslate2_float32": lambda: _ctranslate2("float32"),
    "ctranslate2_int8": lambda: _ctranslate2("int8"),
}


def _serve(side):
    """Runs a side once per line of input, and prints its seconds for each."""
    run, parameters = _SIDES[side]()
    run()  # traces, compiles, and touches all memory
    print(json.dumps({"parameters": parameters}), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        run()
        print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)


class _Process:
    """A side in its own process."""

    def __init__(self, side):
        command = [sys.executable, __file__, "--side", side]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.parameters = self._read()["parameters"]
        self.seconds = []

    def _read(self):
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit("a side ended early; its message is above")

    def run(self):
        print("run", file=self._process.stdin, flush=True)
        self.seconds.append(self._read()["seconds"])

    def median(self):
        return statistics.median(self.seconds)

    def stop(self):
        self._process.stdin.close()
        self._process.wait()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5, help="batches of each side")
    parser.add_argument("--sides", nargs="+", choices=[*_SIDES], default=[*_SIDES])
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--write", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        _write(*options.write)
        return
    if options.side:
        _serve(options.side)
        return
    sides = {name: _Process(name) for name in options.sides}
    for _ in range(options.repeats):
        for side in sides.values():
            side.run()
    if len({side.parameters for side in sides.values()}) != 1:
        raise SystemExit("the models differ in size")
    result = {}
    if {"huggingface", "float32"} <= set(sides):
        theirs, ours = sides["huggingface"], sides["float32"]
        result["throughput_ratio"] = theirs.median() / ours.median()
    others = [side for name, side in sides.items() if name.startswith("ctranslate2")]
    if others and "float32" in sides:
        best = min(others, key=_Process.median)
        # Round by round: what else the machine does changes from one to the next.
        rounds = zip(best.seconds, sides["float32"].seconds)
        ratios = [theirs / ours for theirs, ours in rounds]
        result["ratio_to_ctranslate2"] = statistics.median(ratios)
    result["queries_per_second"] = {
        name: round(_ROWS / side.median(), 2) for name, side in sides.items()
    }
    result["seconds"] = {
        name: [round(seconds, 2) for seconds in side.seconds]
        for name, side in sides.items()
    }
    print(json.dumps({**result, "cores": len(os.sched_getaffinity(0))}))
    for side in sides.values():
        side.stop()


if __name__ == "__main__":
    main()
