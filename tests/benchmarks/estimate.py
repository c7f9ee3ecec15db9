"""Memory by formula against the peak of a process that runs the step.

    python tests/benchmarks/estimate.py

prints one JSON line per (shape, engine, microbatches): memory in MiB and its ratio,
formula over measured. "measured" is the peak resident memory (VmHWM) of a process that
runs a few logical steps, Python and TensorFlow included.

    --only shape=small-1.0 engine=dpkeras     the cases with these values
    --microbatch 8 --microbatches 4 --document 128 --query 32 --shape base-1.1
                                  one case of your own, for each engine
    --lora --rematerialize --dtype mixed_bfloat16
"""

import argparse
import dataclasses
import json
import math
import os

from tfdpsq.layers import T5Config
from tfdpsq.run import finetune
from tfdpsq.run.estimation import finetuning, step

# Shape, microbatch, microbatches, document and query tokens, engines.
_ALL = ("plain", "fast", "dpkeras", "vectorized")
_CASES = (
    ("tiny", 32, 1, 128, 32, ("plain", "fast")),
    ("tiny", 16, 1, 128, 32, ("dpkeras", "vectorized")),
    ("tiny", 16, 4, 128, 32, _ALL),
    ("tiny", 8, 1, 384, 128, ("plain", "fast")),
    ("tiny", 8, 2, 96, 24, _ALL),
    ("small-1.0", 16, 1, 128, 32, ("plain", "fast")),
    ("small-1.0", 4, 1, 128, 32, ("dpkeras", "vectorized")),
    ("small-1.0", 8, 4, 128, 32, ("plain", "fast")),
    ("small-1.0", 4, 2, 128, 32, ("dpkeras", "vectorized")),
    ("small-1.0", 8, 1, 256, 64, ("plain", "fast")),
    ("small-1.0", 2, 2, 256, 64, ("dpkeras", "vectorized")),
    ("small-1.1", 16, 1, 128, 32, ("plain", "fast")),
    ("small-1.1", 8, 4, 128, 32, ("plain", "fast")),
    ("small-1.1", 2, 1, 128, 32, ("dpkeras", "vectorized")),
    ("small-1.1", 2, 4, 128, 32, ("dpkeras", "vectorized")),
)


def _config(case, options):
    """Returns the settings of stage finetune for a case, and the model's shape."""
    if case["shape"] == "tiny":  # the generator of configs/quickstart.py
        shape = T5Config(4096, 2, 4, 128, 256, 32, "1.1", 0.0)
    else:
        shape = T5Config.from_size(*case["shape"].split("-"))
    config = finetune.default_config()
    config.epsilon = math.inf if case["engine"] == "plain" else 8.0
    config.engine = "fast" if case["engine"] == "plain" else case["engine"]
    config.microbatch_size = case["microbatch"]
    config.batch_size = case["microbatch"] * case["microbatches"]
    config.document_length, config.query_length = case["document"], case["query"]
    config.lora.rank = 8 if options.lora else 0
    config.rematerialize, config.dtype = options.rematerialize, options.dtype
    return config, shape


def _cases(options):
    rows = _CASES
    if options.shape:
        sizes = (options.microbatch, options.microbatches)
        rows = [(options.shape, *sizes, options.document, options.query, _ALL)]
    names = ("shape", "microbatch", "microbatches", "document", "query")
    for *values, engines in rows:
        for engine in engines:
            case = {**dict(zip(names, values)), "engine": engine}
            if set(options.only) <= {f"{name}={case[name]}" for name in case}:
                yield case


def _options():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], help="such as engine=fast")
    parser.add_argument("--shape", help='"tiny", or a T5 such as "base-1.1"')
    parser.add_argument("--microbatch", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--document", type=int, default=128)
    parser.add_argument("--query", type=int, default=32)
    parser.add_argument("--lora", action="store_true", help="train LoRA of rank 8")
    parser.add_argument("--rematerialize", action="store_true")
    parser.add_argument("--dtype", default="float32", help="or mixed_bfloat16")
    return parser.parse_args()


def main():
    options = _options()
    process = step.resident_bytes()
    for case in _cases(options):
        config, shape = _config(case, options)
        found = finetuning.estimate(
            config, shape, process=process, measure=True, time=True, seconds=0.1
        )
        if found.measured is None:
            print(json.dumps({**case, "measured_mib": None}), flush=True)
            continue
        result = {
            **case,
            "ratio": round(found.memory.peak / found.measured.peak, 3),
            "formula_mib": round(found.memory.peak / 2**20),
            "measured_mib": round(found.measured.peak / 2**20),
            "parts_mib": {
                name: round(size / 2**20)
                for name, size in dataclasses.asdict(found.memory).items()
            },
            "seconds": round(found.seconds, 2),
            "lora": options.lora,
            "rematerialize": options.rematerialize,
            "dtype": options.dtype,
            "load": os.getloadavg(),
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
