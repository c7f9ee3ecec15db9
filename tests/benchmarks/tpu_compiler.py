"""Compiles one program for a TPU that is not there; run by tpu.py, elsewhere.

    TPU_ENV/bin/python tests/benchmarks/tpu_compiler.py PROGRAM.hlo --chip v5e

Needs jax and libtpu, whose numpy is too new for TensorFlow 2.15: an environment of its
own. Prints one JSON line: what the executable takes of the chip's memory, in bytes, and
what it does, or why the compiler refuses the program.
"""

import argparse
import collections
import json
import os
import re
import time

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# A v4's two cores as one device, as TensorFlow has them; else each has half the memory.
_MEGACORE = {
    "v4": {
        "chip_config_name": "megacore",
        "chips_per_host_bounds": (2, 2, 1),
        "num_slices": 1,
    }
}
# {chip: (topology, GiB of memory of a device)}
CHIPS = {
    "v4": ("v4:2x2x1", 32),
    "v5e": ("v5e:2x2", 16),
    "v5p": ("v5p:2x2x1", 95),
    "v6e": ("v6e:2x2", 32),
}
# TensorFlow's `copy`, an operation that newer compilers do not read.
_COPY = re.compile(
    r'"?mhlo\.copy"?\(?\s*(%[\w#.]+)\)?(?: \{[^}]*\})? : '
    r"\(?(tensor<[^>]*>)\)?(?: -> tensor<[^>]*>)?"
)
_REASON = 1500
# The least effort to make a program fast: a one-layer step compiles in a minute or two,
# not seven or more. Memory and cycles are those of a program that may be worse.
_LEAST_EFFORT = -1.0
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_BODY = re.compile(r" while\(.*, body=%?([\w.\-]+)")
_CONDITIONAL = re.compile(
    r" conditional\(([^()]*)\), (?:branch_computations=\{([^{}]*)\}"
    r"|true_computation=([^,\s]*), false_computation=([^,\s]*))"
)
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_REACHED = re.compile(r"(body|condition|to_apply)=%?([\w.\-]+)")
_NO_ESTIMATE = 10**12  # stands for "unknown" in the compiler's own field


def compiled(program, chip):
    """Returns the executable of serialized HLO for one device of a chip."""
    from jax._src.interpreters import mlir as jax_mlir
    from jax.experimental import topologies
    from jaxlib import _jax, xla_client
    from jaxlib.mlir import ir

    name, _ = CHIPS[chip]
    described = topologies.get_topology_desc(
        platform="tpu", topology_name=name, **_MEGACORE.get(chip, {})
    )
    device = described.devices[0]
    text = _jax.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(program))
    text = text.decode() if isinstance(text, bytes) else text
    # A copy is the identity.
    text = _COPY.sub(r"stablehlo.optimization_barrier \1 : \2", text)
    options = xla_client.CompileOptions()
    options.num_replicas = options.num_partitions = 1
    options.executable_build_options.exec_time_optimization_effort = _LEAST_EFFORT
    with jax_mlir.make_ir_context():
        module = ir.Module.parse(text)
        return device.client.compile(module, _jax.DeviceList((device,)), options)


def described(executable):
    """Returns memory and work of an executable."""
    memory = executable.get_compiled_memory_stats()
    found = {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
    }
    try:
        text = executable.hlo_modules()[0].to_string()
    except Exception as error:  # jaxlib cannot read back all that libtpu writes
        return found | {"work_unknown": " ".join(str(error).split())[:200]}
    text = _usual(text)
    whole, loops = work(text), {"operations": 0.0, "bytes": 0.0}
    for body in _BODY.findall(text[text.index("\nENTRY ") :]):
        for name, value in work(_alone(text, body)).items():
            loops[name] += value
    for name, value in loops.items():
        found[f"{name}_of_loops"] = value
        found[f"{name}_of_rest"] = whole[name] - value
    return found | cycles(text)


def work(text):
    """Counts a module's operations and their bytes, read and written, as XLA does."""
    import jax
    from jaxlib import _hlo, _jax

    client = jax.devices("cpu")[0].client
    costs = _jax.hlo_module_cost_analysis(client, _hlo.hlo_module_from_text(text))
    # Without any, XLA names none.
    return {
        "operations": costs.get("flops", 0.0),
        "bytes": costs.get("bytes accessed", 0.0),
    }


def _usual(text):
    """Returns the module that always takes each conditional's branch of least work.

    XLA counts the one of most. In a step that is the branch where a row has no finite
    gradient and the rows are taken one by one.
    """

    def call(found):
        operands = found[1].split(", ")[1:]
        names = found[2].split(", ") if found[2] else found.groups()[2:]
        alone = [_alone(text, name.removeprefix("%")) for name in names]
        works = [work(one)["operations"] for one in alone]
        least = works.index(min(works))
        return f" call({operands[least]}), to_apply={names[least]}"

    return _CONDITIONAL.sub(call, text)


def _alone(text, body):
    """Returns the module whose entry is one computation of another module."""
    lines = ["HloModule loop"]
    for line in text.splitlines()[1:]:
        line = line.removeprefix("ENTRY ")
        opened = _COMPUTATION.match(line)
        lines.append(f"ENTRY {line}" if opened and opened[2] == body else line)
    return "\n".join(lines)


def cycles(text):
    """Adds up the cycles that the compiler expects of each operation.

    Args:
      text: an executable's HLO, without conditionals.

    Returns:
      `cycles_of_loops`: of one turn of the longest loop, over microbatches;
      `cycles_of_rest`: of all that runs once, noise and its small loops included.
    """
    own, reached, entry, current = {}, {}, None, None
    for line in text.splitlines():
        opened = _COMPUTATION.match(line)
        if opened:
            current = opened[2]
            entry = current if opened[1] else entry
            own[current], reached[current] = 0, []
        elif current and " = " in line:
            estimate = _CYCLES.search(line)
            if estimate and int(estimate[1]) < _NO_ESTIMATE:
                own[current] += int(estimate[1])
            loop = " while(" in line
            if loop or " call(" in line:
                reached[current] += [(n, loop) for _, n in _REACHED.findall(line)]
    found = collections.Counter()  # by the outermost loop, "" for none
    waiting = [(entry, "")]
    while waiting:
        name, within = waiting.pop()
        found[within] += own.get(name, 0)
        waiting += [
            (inner, within or (inner if loop else ""))
            for inner, loop in reached.get(name, [])
        ]
    longest = max((n for name, n in found.items() if name), default=0)
    return {"cycles_of_loops": longest, "cycles_of_rest": found.total() - longest}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program")
    parser.add_argument("--chip", choices=CHIPS, default="v5e")
    options = parser.parse_args()
    with open(options.program, "rb") as file:
        program = file.read()
    start = time.time()
    try:
        found = {"compiles": True, **described(compiled(program, options.chip))}
    except Exception as error:  # of many types; the compiler's words are the answer
        reason = " ".join(str(error).split())[:_REASON]
        # What does not fit is refused, too, but it is no program in need of mending.
        too_large = "RESOURCE_EXHAUSTED" in reason or "Ran out of memory" in reason
        found = {"compiles": False, "too_large": too_large, "reason": reason}
    found["seconds"] = round(time.time() - start, 1)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
