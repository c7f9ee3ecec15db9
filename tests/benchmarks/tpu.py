"""Compiles the project's steps for TPUs, without one, by the TPUs' own compiler.

    python3.11 -m venv TPU_ENV
    TPU_ENV/bin/pip install "jax[cpu]==0.10.2" libtpu==0.0.52
    python tests/benchmarks/tpu.py --compiler TPU_ENV/bin/python --cache DIR \
        --steps plain fast --sizes small --layers 1 --chips v5e

Each step that a TPU would run is lowered to HLO by TensorFlow, in a process of its own,
and compiled by libtpu in the other environment, one program at a time, at the lowest
priority. Prints one JSON line for each step, size, dtype, optimizer and chip, and one
for each private step beside the plain one. What was compiled is kept in DIR by the hash
of the program: the same command goes on where it was stopped.

| step | is |
|---|---|
| plain, an engine such as fast | a logical step of the generator: two microbatches |
| retriever | a step of the retriever on `--rows` pairs, in-batch softmax |
| naive, microbatch, public_negatives | the direct methods' private steps |
| encode | `--rows` documents to embeddings |
| generate | queries for `--rows` documents, p = 0.8 |

`--layers` counts those of the encoder, and as many of the decoder; 0 is the size's own.
Operations, bytes and cycles are XLA's estimates, of one turn of the loop over
microbatches, and of the rest: noise and update. `..._over_plain` is of a step of the
paper's batch on one chip, of as many microbatches as that takes. `needs` is what the
executable takes of the chip's memory. Programs are of one replica: the sums between
replicas are not in them. TensorFlow lowers as for a CPU; for a TPU it would lower
differently where a random draw names no generator (the retriever's key of dropout).
"""

import argparse
import hashlib
import itertools
import json
import math
import pathlib
import re
import subprocess
import sys

from tpu_compiler import CHIPS

import tfdpsq

_GENERATOR = ("plain", "fast", "rowwise", "dpkeras", "vectorized")
_DIRECT = ("naive", "microbatch", "public_negatives")
_STEPS = (*_GENERATOR, "retriever", *_DIRECT, "encode", "generate")
_DOCUMENT, _QUERY = 384, 128  # the paper's lengths, in tokens
_BATCH = 1024  # the paper's
_DTYPE_BYTES = {"f64": 8, "s64": 8, "u64": 8, "bf16": 2, "f16": 2, "pred": 1, "u8": 1}
_CONSTANT = re.compile(r"= (\w+)\[([\d,]+)\]\S* constant\(")
_MIB = 1 << 20


# -- In a process of its own, with TensorFlow ------------------------------------------


def _lower(given, path):
    """Writes the HLO of a step to `path`; returns facts about it."""
    import tensorflow as tf

    tf.keras.utils.set_random_seed(0)
    make = {"encode": _encode, "generate": _generate}.get(given["step"])
    if make is None:
        make = _logical_step if given["step"] in _GENERATOR else _retriever_step
    function, columns = make(given)
    names = list(columns)

    # The compiler's interface takes a flat list of arguments.
    @tf.function(jit_compile=True, autograph=False)
    def flat(*values):
        return function(dict(zip(names, values)))

    specs = [tf.TensorSpec(*columns[name]) for name in names]
    program = flat.experimental_get_compiler_ir(*specs)
    path.write_bytes(program(stage="hlo_serialized"))
    text = program(stage="hlo")
    constants = [
        math.prod(map(int, dims.split(","))) * _DTYPE_BYTES.get(dtype, 4)
        for dtype, dims in _CONSTANT.findall(text)
    ]
    return {
        "instructions": text.count(" = "),
        "constants_mib": round(sum(constants) / _MIB, 2),
    }


# Layers, heads, hidden, intermediate and key/value size of the checkpoints of T5 1.1.
_SHAPES = {
    "small": (8, 6, 512, 1024, 64),
    "base": (12, 12, 768, 2048, 64),
    "large": (24, 16, 1024, 2816, 64),
    "xl": (24, 32, 2048, 5120, 64),
}


def _shape(given):
    from tfdpsq.layers import T5Config

    layers, *sizes = _SHAPES[given["size"]]
    return T5Config(32128, given["layers"] or layers, *sizes, "1.1")


def _pairs(rows, weights=True):
    """Returns {name: (shape, dtype)} of a batch of pairs."""
    import tensorflow as tf

    columns = {"weights": ([rows], tf.float32)} if weights else {}
    for text, length in (("document", _DOCUMENT), ("query", _QUERY)):
        columns[f"{text}_ids"] = ([rows, length], tf.int32)
        columns[f"{text}_lengths"] = ([rows], tf.int32)
    return columns


def _plan(rows, private, **changes):
    from tfdpsq import privacy

    spec = privacy.PrivacySpec(
        epsilon=8.0 if private else math.inf,
        clip_norm=0.1,
        num_units=100 * rows,
        batch_size=rows,
        steps=1,
        **changes,
    )
    # Calibrating the noise is slow, and its value changes no operation.
    return privacy.PrivacyPlan(spec, rows, 1.0 if private else 0.0)


def _step_of(plan, given, losses, variables, microbatch, layers, columns, engine):
    """Returns a logical step that takes all its rows, as a function of batch and keys.

    Keys are arguments of the program, as in training.
    """
    import tensorflow as tf

    from tfdpsq import privacy
    from tfdpsq.privacy.optimizers import OPTIMIZERS

    optimizer = OPTIMIZERS[given["optimizer"]](1e-3)
    options = {"layers": layers, "engine": engine}
    step = privacy.make_logical_step(
        plan, losses, variables, optimizer, microbatch, **options
    )
    keys = privacy.RunKey(plan, 1).step_keys(0)
    of_keys = {f"key_{n}": (v.shape, v.dtype) for n, v in keys._asdict().items()}

    def function(values):
        batch = {name: values[name] for name in columns}
        own = keys._replace(**{n: values[f"key_{n}"] for n in keys._fields})
        return step(batch, tf.constant(columns["weights"][0][0]), [], own)

    return function, {**columns, **of_keys}


def _logical_step(given):
    from tfdpsq.generator.model import T5QueryGenerator
    from tfdpsq.layers import lora

    model = T5QueryGenerator(_shape(given), given["dtype"], given["rematerialize"])
    if given["lora"]:
        lora.apply_lora(model, 8, 16.0, ["*/query_projector", "*/value_projector"])
    rows, private = 2 * given["rows"], given["step"] != "plain"
    engine = given["step"] if private else "fast"
    return _step_of(
        *(_plan(rows, private), given),
        lambda part: model.per_example_losses(part, training=True),
        *(model.trainable_variables, given["rows"], [model], _pairs(rows), engine),
    )


def _towers(given):
    from tfdpsq import retriever

    config = retriever.RetrieverConfig(
        _shape(given), _shape(given).hidden_dim, 20.0, _QUERY, _DOCUMENT
    )
    return retriever.TwoTower(config)


def _retriever_step(given):
    import numpy as np
    import tensorflow as tf

    from tfdpsq import retriever
    from tfdpsq.privacy import optimizers
    from tfdpsq.run.common import direct

    model, rows, method = _towers(given), given["rows"], given["step"]
    engine = "vectorized" if method == "microbatch" else "fast"
    columns = _pairs(rows)
    columns["document_key"] = ([rows], tf.int64)
    columns["positive_keys"] = ([rows, 1], tf.int64)
    if method == "retriever":
        optimizer = optimizers.OPTIMIZERS[given["optimizer"]](1e-3)
        optimizers.build(optimizer, model.trainable_variables)
        model.compile(optimizer)
        return model.train_step, columns
    plan = _plan(rows, True)
    if method == "naive":
        # Rows one by one, and a microbatch of documents at a time.
        plan = _plan(2 * rows, True, sensitivity_multiplier=4.0 * rows - 1)
        losses = retriever.NaiveLosses(model, rows)
        rows = 2 * rows
        columns = {n: ([rows, *s[1:]], d) for n, (s, d) in columns.items()}
        loss, engine = model.per_example_losses, direct.naive_engine(losses)
    elif method == "microbatch":
        # Eight groups, of as many rows as a tenth more than are expected.
        capacity = math.ceil(1.1 * rows / 8)
        plan = _plan(8 * capacity, True, num_microbatches=8, sensitivity_multiplier=2.0)
        rows = 8 * plan.group_capacity
        columns = {n: ([rows, *s[1:]], d) for n, (s, d) in columns.items()}
        loss = losses = retriever.GroupLosses(model, plan.group_capacity)
    else:
        corpus = {
            "document_ids": np.zeros([256, _DOCUMENT], np.int32),
            "document_lengths": np.ones([256], np.int32),
            "document_key": np.arange(256),
        }
        loss = losses = retriever.PublicNegatives(model, corpus, 256, 0)
    return _step_of(
        *(plan, given, loss, model.trainable_variables, rows),
        *(losses.layers, columns, engine),
    )


def _encode(given):
    model = _towers(given)
    return (
        lambda batch: model.encode_documents(
            batch["document_ids"], batch["document_lengths"]
        ),
        {n: c for n, c in _pairs(given["rows"]).items() if n.startswith("document")},
    )


def _generate(given):
    import numpy as np
    import tensorflow as tf

    from tfdpsq.generator import T5QueryGenerator, TopP
    from tfdpsq.generator.decoding import decode

    shape, rows = _shape(given), given["rows"]
    model = T5QueryGenerator(shape, given["dtype"])
    mask = np.zeros([shape.vocabulary_size], np.float32)
    columns = {n: c for n, c in _pairs(rows).items() if n.startswith("document")}
    columns["uniforms"] = ([rows, _QUERY], tf.float32)

    def function(batch):
        return decode(
            model,
            batch["document_ids"],
            batch["document_lengths"],
            batch["uniforms"],
            TopP(0.8),
            mask,
        )

    return function, columns


# -- In the process that was started ---------------------------------------------------


def _child(command, seconds):
    """Returns the last line of a command at the lowest priority, as JSON."""
    ended = subprocess.run(
        ["nice", "-n", "19", *map(str, command)],
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    lines = ended.stdout.strip().splitlines()
    if ended.returncode or not lines:
        tail = " ".join(ended.stderr.split())[-1500:]
        return {"failed": f"exit status {ended.returncode}: {tail}"}
    return json.loads(lines[-1])


def _lowered(given, options):
    """Returns the path of a step's HLO, and facts; kept ones where there are."""
    sources = sorted(pathlib.Path(tfdpsq.__file__).parent.rglob("*.py"))
    code = [source.read_bytes() for source in (*sources, pathlib.Path(__file__))]
    digest = hashlib.sha256(b"".join([json.dumps(given).encode(), *code])).hexdigest()
    path = options.cache / f"{digest[:16]}.hlo"
    facts = path.with_suffix(".json")
    if not facts.is_file():
        found = _child(
            [sys.executable, __file__, "--lower", json.dumps(given), "--path", path]
            + ["--cache", options.cache, "--compiler", options.compiler],
            options.seconds,
        )
        if "failed" in found:
            return path, found
        facts.write_text(json.dumps(found))
    return path, json.loads(facts.read_text())


def _compiled(given, chip, options):
    """Returns facts about a program and its executable; kept ones where there are."""
    options.cache.mkdir(parents=True, exist_ok=True)
    path, found = _lowered(given, options)
    if "failed" in found:
        return {**given, "chip": chip, "lowered": False, **found}
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    kept = options.cache / f"{digest}-{chip}.json"
    if not kept.is_file():
        script = pathlib.Path(__file__).with_name("tpu_compiler.py")
        command = [options.compiler, script, path, "--chip", chip]
        try:
            result = _child(command, options.seconds)
        except subprocess.TimeoutExpired:
            result = {"failed": f"not compiled within {options.seconds} seconds"}
        if "failed" in result:
            return {**given, "chip": chip, **found, **result}
        partial = kept.with_suffix(".partial")
        partial.write_text(json.dumps(result))
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
    return {**given, "chip": chip, "program": digest, **found, **result}


def _ratios(lines):
    """Yields each private step's work over that of the plain one of the same kind."""
    found = {}
    for line in lines:
        if "cycles_of_loops" in line:
            found[json.dumps({**line["of"], "step": ""}), line["of"]["step"]] = line
    for (kind, step), line in found.items():
        plain = found.get((kind, "plain"))
        if step in _GENERATOR[1:] and plain:
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
    dtypes = ("float32", "mixed_bfloat16")
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=["float32"])
    optimizers = ("adam", "adafactor", "sgd")
    parser.add_argument("--optimizers", nargs="+", choices=optimizers, default=["adam"])
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=["v5e"])
    parser.add_argument("--layers", type=int, default=1, help="0: the size's own")
    parser.add_argument("--rows", type=int, default=8, help="of a microbatch")
    parser.add_argument("--rematerialize", action="store_true")
    parser.add_argument("--lora", action="store_true", help="train LoRA of rank 8")
    parser.add_argument("--seconds", type=int, default=3600, help="for one program")
    parser.add_argument("--lower", help=argparse.SUPPRESS)
    parser.add_argument("--path", type=pathlib.Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    options = _options()
    if options.lower:
        found = _lower(json.loads(options.lower), options.path)
        print(json.dumps(found))
        return
    lines = []
    names = ("sizes", "dtypes", "optimizers", "chips", "steps")
    for size, dtype, optimizer, chip, step in itertools.product(
        *(getattr(options, name) for name in names)
    ):
        given = {
            "step": step,
            "size": size,
            "dtype": dtype,
            "optimizer": optimizer,
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
