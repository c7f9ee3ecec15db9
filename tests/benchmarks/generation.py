"""Queries per second of `generate` against Hugging Face, CTranslate2, and in bfloat16.

    python tests/benchmarks/generation.py

prints one JSON line; it needs the extras `parity` (torch and transformers) and
`ctranslate2`, or `--sides` without those. All sides have the same T5 shape with random
weights, the same documents and all cores, and write the same number of tokens for every
document: by nucleus sampling, with a cache, without stopping early. Defaults are
T5-small (1.0) in float32, 64 documents of 128 tokens, 32 new tokens, p = 0.8.

Each side has its own process, and they alternate. `throughput_ratio` is ours over
Hugging Face's in queries per second of wall time, from the medians; `cpu_ratio`
compares processor time instead, which other work affects less, but in which torch
counts the busy waiting of its threads. `ratio_to_ctranslate2` is ours in float32 over
the faster one of CTranslate2's float32 and int8, which have our weights: the median of
the rounds' ratios. `peak_mib` is each process's peak resident memory, libraries
included; `idle_mib` the part from before the model was made. `bfloat16_speedup` is
generation by the same model under `mixed_bfloat16` over that in float32.

    --jit                        ours compiled with XLA
    --document 384 --new 128     other shapes
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

_SIZES = {
    "layers": 6,
    "width": 512,
    "heads": 8,
    "intermediate": 2048,
    "vocabulary": 32128,
    "document": 128,
    "new": 32,
    "batch": 64,
}
_EOS = 1


def _documents(options):
    """Returns [B, document] ids without padding or EOS, the same for all sides."""
    import numpy as np

    shape = [options.batch, options.document]
    return np.random.default_rng(0).integers(3, options.vocabulary - 128, shape)


def _model(options, dtype):
    from tfdpsq import generator
    from tfdpsq.layers import T5Config

    config = T5Config(
        vocabulary_size=options.vocabulary,
        num_layers=options.layers,
        num_heads=options.heads,
        hidden_dim=options.width,
        intermediate_dim=options.intermediate,
        key_value_dim=options.width // options.heads,
        version="1.0",
    )
    return generator.T5QueryGenerator(config, dtype=dtype)


def _ours(options, dtype):
    import tensorflow as tf

    from tfdpsq import generator
    from tfdpsq.generator import decoding

    idle = _peak_mib()
    tf.keras.utils.set_random_seed(0)
    model = _model(options, dtype)
    # No query ends early: all write the same number of tokens.
    mask = decoding.text_mask(options.vocabulary, options.vocabulary - 128)
    mask += tf.one_hot(_EOS, options.vocabulary, on_value=float("-inf"))
    sampler = generator.TopP(options.top_p)
    ids = tf.constant(_documents(options), tf.int32)
    lengths = tf.fill([options.batch], options.document)

    @tf.function(jit_compile=options.jit)
    def write(uniforms):
        return decoding.decode(model, ids, lengths, uniforms, sampler, mask)

    def run():
        written = write(tf.random.uniform([options.batch, options.new])).numpy()
        assert written.shape == (options.batch, options.new)

    return run, model.backbone.count_params(), idle


def _huggingface(options):
    import torch
    import transformers

    idle = _peak_mib()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    config = transformers.T5Config(
        vocab_size=options.vocabulary,
        d_model=options.width,
        d_kv=options.width // options.heads,
        d_ff=options.intermediate,
        num_layers=options.layers,
        num_heads=options.heads,
        decoder_start_token_id=0,
        eos_token_id=_EOS,
        pad_token_id=0,
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    ids = torch.tensor(_documents(options))
    mask = torch.ones_like(ids)

    def run():
        with torch.inference_mode():
            written = model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                top_p=options.top_p,
                top_k=0,
                use_cache=True,
                min_new_tokens=options.new,
                max_new_tokens=options.new,
            )
        assert written.shape == (options.batch, options.new + 1)

    return run, sum(p.numel() for p in model.parameters()), idle


def _ctranslate2(options, dtype):
    """CTranslate2 on our weights, which another process writes: it needs TensorFlow."""
    import ctranslate2

    idle = _peak_mib()
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, __file__, *sys.argv[1:]]
        subprocess.run([*command, "--write", directory, dtype], check=True)
        translator = ctranslate2.Translator(
            directory, intra_threads=len(os.sched_getaffinity(0)), inter_threads=1
        )
        parameters = int(pathlib.Path(directory, "parameters").read_text())
        # CTranslate2 reads and writes pieces of text.
        names = json.loads(
            pathlib.Path(directory, "shared_vocabulary.json").read_text()
        )
    sources = [[names[i] for i in row] for row in _documents(options)]

    def run():
        found = translator.translate_batch(
            sources,
            beam_size=1,
            sampling_topk=0,
            sampling_topp=options.top_p,
            min_decoding_length=options.new,
            max_decoding_length=options.new,
        )
        assert all(len(each.hypotheses[0]) == options.new for each in found)

    return run, parameters, idle


def _write(options):
    """Writes the weights of `_ours` for CTranslate2."""
    import tensorflow as tf

    from tfdpsq.generator import checkpoints, ctranslate2_export

    directory, dtype = options.write
    tf.keras.utils.set_random_seed(0)
    model = _model(options, "float32")
    vocabulary = checkpoints.vocabulary_in(checkpoints.locate("t5_tiny_pydocs"))
    with tempfile.TemporaryDirectory() as folder:
        model.save_to_huggingface(folder, vocabulary)
        ctranslate2_export.save(directory, folder, dtype)
    count = str(model.backbone.count_params())
    pathlib.Path(directory, "parameters").write_text(count)


# Each returns (timed function, number of parameters, MiB before the model was made).
_SIDES = {
    "huggingface": _huggingface,
    "float32": lambda options: _ours(options, "float32"),
    "bfloat16": lambda options: _ours(options, "mixed_bfloat16"),
    "ctranslate2_float32": lambda options: _ctranslate2(options, "float32"),
    "ctranslate2_int8": lambda options: _ctranslate2(options, "int8"),
}


def _peak_mib():
    # Not getrusage's ru_maxrss: it starts from the process that started this one.
    status = pathlib.Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def _serve(options):
    """Runs a side once per line of input, and prints a JSON line for each."""
    run, parameters, idle = _SIDES[options.side](options)
    run()  # traces, compiles, and touches all memory
    print(json.dumps({"parameters": parameters, "idle": idle}), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter(), time.process_time()
        run()
        stop = time.perf_counter(), time.process_time()
        measured = {
            "wall": stop[0] - start[0],
            "cpu": stop[1] - start[1],
            "peak": _peak_mib(),
        }
        print(json.dumps(measured), flush=True)


class _Process:
    """A side in its own process."""

    def __init__(self, side):
        command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.about = self._read()
        self.runs = []

    def _read(self):
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit("a side ended early; its message is above")

    def run(self):
        print("run", file=self._process.stdin, flush=True)
        self.runs.append(self._read())

    def median(self, what):
        return statistics.median(run[what] for run in self.runs)

    def stop(self):
        self._process.stdin.close()
        self._process.wait()


def _options():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, size in _SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--top_p", type=float, default=0.8)
    parser.add_argument("--repeats", type=int, default=5, help="batches of each side")
    parser.add_argument("--jit", action="store_true", help="compile with XLA")
    parser.add_argument(
        "--sides", nargs="+", choices=tuple(_SIDES), default=tuple(_SIDES)
    )
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--write", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    options = _options()
    if options.write:
        _write(options)
        return
    if options.side:
        _serve(options)
        return
    sides = {name: _Process(name) for name in options.sides}
    for _ in range(options.repeats):
        for side in sides.values():
            side.run()
    if len({side.about["parameters"] for side in sides.values()}) != 1:
        raise SystemExit("the models differ in size")
    result = {}
    if {"huggingface", "float32"} <= set(sides):
        theirs, ours = sides["huggingface"], sides["float32"]
        result["throughput_ratio"] = theirs.median("wall") / ours.median("wall")
        result["cpu_ratio"] = theirs.median("cpu") / ours.median("cpu")
    others = [side for name, side in sides.items() if name.startswith("ctranslate2")]
    if others and "float32" in sides:
        best = min(others, key=lambda side: side.median("wall"))
        # Round by round: what else the machine does changes from one to the next.
        rounds = zip(best.runs, sides["float32"].runs)
        ratios = [theirs["wall"] / ours["wall"] for theirs, ours in rounds]
        result["ratio_to_ctranslate2"] = statistics.median(ratios)
    if {"bfloat16", "float32"} <= set(sides):
        wall = {name: sides[name].median("wall") for name in ("float32", "bfloat16")}
        result["bfloat16_speedup"] = wall["float32"] / wall["bfloat16"]
    result["queries_per_second"] = {
        name: round(options.batch / side.median("wall"), 2)
        for name, side in sides.items()
    }
    result["peak_mib"] = {
        name: round(side.runs[-1]["peak"]) for name, side in sides.items()
    }
    result["idle_mib"] = {
        name: round(side.about["idle"]) for name, side in sides.items()
    }
    result["seconds"] = {
        name: [round(run["wall"], 2) for run in side.runs]
        for name, side in sides.items()
    }
    result |= {
        **{name: getattr(options, name) for name in (*_SIZES, "top_p", "jit")},
        "parameters": next(iter(sides.values())).about["parameters"],
        "cores": len(os.sched_getaffinity(0)),
    }
    print(json.dumps(result))
    for side in sides.values():
        side.stop()


if __name__ == "__main__":
    main()
