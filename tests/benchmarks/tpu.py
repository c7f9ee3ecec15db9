"""Compiles the project's steps for TPUs, without one, by the TPUs' own compiler.

    python3.11 -m venv TPU_ENV
    TPU_ENV/bin/pip install "jax[cpu]==0.10.2" libtpu==0.0.52
    python tests/benchmarks/tpu.py --compiler TPU_ENV/bin/python --cache DIR \
        --steps plain fast --sizes small --layers 1 --chips v5e

A logical step of the generator, two microbatches of `--rows` queries, is lowered to HLO
by TensorFlow, in a process of its own, and compiled by libtpu in the other environment,
one program at a time, at the lowest priority. Prints one JSON line for each step
(plain, or an engine such as fast), size and chip, and one for each private step beside
the plain one. What was compiled is kept in DIR by the hash of the program: the same
command goes on where it was stopped.

`--layers` counts those of the encoder, and as many of the decoder; 0 is the size's own.
Operations, bytes and cycles are XLA's estimates, of one turn of the loop over
microbatches, and of the rest: noise and update. `..._over_plain` is of a step of the
paper's batch on one chip, of as many microbatches as that takes. `needs` is what the
executable takes of the chip's memory. Programs are of one replica: the sums between
replicas are not in them.
"""

import argparse
import hashlib
import itertools
import json
import math
import pathlib
import subprocess
import sys

from tpu_compiler import CHIPS

import tfdpsq

_STEPS = ("plain", "fast", "rowwise", "dpkeras", "vectorized")
_DOCUMENT, _QUERY = 384, 128  # the paper's lengths, in tokens
_BATCH = 1024  # the paper's


# -- In a process of its own, with TensorFlow ------------------------------------------


def _lower(given, path):
    """Writes the HLO of a step to `path`."""
    import tensorflow as tf

    tf.keras.utils.set_random_seed(0)
    function, columns = _logical_step(given)
    names = list(columns)

    # The compiler's interface takes a flat list of arguments.
    @tf.function(jit_compile=True, autograph=False)
    def flat(*values):
        return function(dict(zip(names, values)))

    specs = [tf.TensorSpec(*columns[name]) for name in names]
    program = flat.experimental_get_compiler_ir(*specs)
    path.write_bytes(program(stage="hlo_serialized"))


# Layers, heads, hidden, intermediate and key/value size of the checkpoints of T5 1.1.
_SHAPES = {
    "small": (8, 6, 512, 1024, 64),
    "base": (12, 12, 768, 2048, 64),
    "large": (24, 16, 1024, 2816, 64),
    "xl": (24, 32, 2048, 5120, 64),
}


def _logical_step(given):
    """Returns a step as a function of {name: tensor}, and its (shape, dtype) columns.

    Keys are arguments of the program, as in training.
    """
    import tensorflow as tf

    from tfdpsq import privacy
    from tfdpsq.generator.model import T5QueryGenerator
    from tfdpsq.layers import T5Config, lora

    layers, *sizes = _SHAPES[given["size"]]
    config = T5Config(32128, given["layers"] or layers, *sizes, "1.1")
    model = T5QueryGenerator(config, None, given["rematerialize"])
    if given["lora"]:
        lora.apply_lora(model, 8, 16.0, ["*/query_projector", "*/value_projector"])
    rows, private = 2 * given["rows"], given["step"] != "plain"
    columns = {"weights": ([rows], tf.float32)}
    for text, length in (("document", _DOCUMENT), ("query", _QUERY)):
        columns[f"{text}_ids"] = ([rows, length], tf.int32)
        columns[f"{text}_lengths"] = ([rows], tf.int32)
    spec = privacy.PrivacySpec(
        epsilon=8.0 if private else math.inf,
        clip_norm=0.1,
        num_units=100 * rows,
        batch_size=rows,
        steps=1,
    )
    # Calibrating the noise is slow, and its value changes no operation.
    plan = privacy.PrivacyPlan(spec, rows, 1.0 if private else 0.0)
    step = privacy.make_logical_step(
        plan,
        lambda part: model.per_example_losses(part, training=True),
        model.trainable_variables,
        tf.keras.optimizers.Adam(1e-3),
        given["rows"],
        layers=[model],
        engine=given["step"] if private else "fast",
    )
    keys = privacy.RunKey(plan, 1).step_keys(0)
    of_keys = {f"key_{n}": (v.shape, v.dtype) for n, v in keys._asdict().items()}

    def function(values):
        batch = {name: values[name] for name in columns}
        own = keys._replace(**{n: values[f"key_{n}"] for n in keys._fields})
        return step(batch, tf.constant(rows), [], own)

    return function, {**columns, **of_keys}


# -- In the process that was started ---------------------------------------------------


def _child(command):
    """Returns the output of a command at the lowest priority."""
    words = ["nice", "-n", "19", *map(str, command)]
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout


def _lowered(given, options):
    """Returns the path of a step's HLO, made before where it was."""
    sources = sorted(pathlib.Path(tfdpsq.__file__).parent.rglob("*.py"))
    code = [source.read_bytes() for source in (*sources, pathlib.Path(__file__))]
    digest = hashlib.sha256(b"".join([json.dumps(given).encode(), *code])).hexdigest()
    path = options.cache / f"{digest[:16]}.hlo"
    if not path.is_file():
        _child(
            [sys.executable, __file__, "--lower", json.dumps(given), "--path", path]
            + ["--cache", options.cache, "--compiler", options.compiler]
        )
    return path


def _compiled(given, chip, options):
    """Returns facts about a program and its executable; kept ones where there are."""
    options.cache.mkdir(parents=True, exist_ok=True)
    path = _lowered(given, options)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    kept = options.cache / f"{digest}-{chip}.json"
    if not kept.is_file():
        script = pathlib.Path(__file__).with_name("tpu_compiler.py")
        said = _child([options.compiler, script, path, "--chip", chip])
        partial = kept.with_suffix(".partial")
        partial.write_text(said.splitlines()[-1])
        partial.replace(kept)
    result = json.loads(kept.read_text())
    memory = CHIPS[chip][1] << 30
    if result["compiles"]:
        # Outputs that take the place of arguments are counted with these.
        parts = ("arguments", "outputs", "temporaries", "code")
        needs = sum(result[part] for part in parts) - result["aliased"]
        result |= {"needs": needs, "fits": needs <= memory}
    else:
        result["fits"] = False if result["too_large"] else None
    return {**given, "chip": chip, "program": digest, **result}


def _ratios(lines):
    """Yields each private step's work over that of the plain one of the same kind."""
    found = {}
    for line in lines:
        if "cycles_of_loops" in line:
            found[json.dumps({**line["of"], "step": ""}), line["of"]["step"]] = line
    for (kind, step), line in found.items():
        plain = found.get((kind, "plain"))
        if step != "plain" and plain:
            yield {
                **line["of"],
                "chip": line["chip"],
                "needs_over_plain": round(line["needs"] / plain["needs"], 3),
                **{
                    f"{name}_over_plain": round(
                        _work(line, name) / _work(plain, name), 3
                    )
                    for name in ("operations", "bytes", "cycles")
                },
            }


def _work(line, name):
    """Returns how many of them a logical step of the paper's batch takes."""
    turns = _BATCH / line["rows"]
    return line[f"{name}_of_rest"] + turns * line[f"{name}_of_loops"]


def _options():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compiler", required=True, help="Python with jax and libtpu")
    parser.add_argument("--cache", type=pathlib.Path, required=True)
    parser.add_argument("--steps", nargs="+", choices=_STEPS, default=["plain", "fast"])
    parser.add_argument("--sizes", nargs="+", choices=_SHAPES, default=["small"])
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=["v5e"])
    parser.add_argument("--layers", type=int, default=1, help="0: the size's own")
    parser.add_argument("--rows", type=int, default=8, help="of a microbatch")
    parser.add_argument("--rematerialize", action="store_true")
    parser.add_argument("--lora", action="store_true", help="train LoRA of rank 8")
    parser.add_argument("--lower", help=argparse.SUPPRESS)
    parser.add_argument("--path", type=pathlib.Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    options = _options()
    if options.lower:
        _lower(json.loads(options.lower), options.path)
        return
    lines = []
    for size, chip, step in itertools.product(
        options.sizes, options.chips, options.steps
    ):
        given = {
            "step": step,
            "size": size,
            "layers": options.layers,
            "rows": options.rows,
            "rematerialize": options.rematerialize,
            "lora": options.lora,
        }
        found = _compiled(given, chip, options)
        print(json.dumps(found), flush=True)
        lines.append({**found, "of": {**given, "chip": chip}})
    for line in _ratios(lines):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
