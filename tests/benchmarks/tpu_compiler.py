"""Compiles one program for a TPU that is not there; run by tpu.py, elsewhere.

    TPU_ENV/bin/python tests/benchmarks/tpu_compiler.py PROGRAM.hlo --chip v5e

Needs jax and libtpu, whose numpy is too new for TensorFlow 2.15: an environment of its
own. Prints one JSON line: what the executable takes of the chip's memory, in bytes, and
what it does, or why the compiler refuses the program.
"""

import argparse
import json
import os
import re
import time

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

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


def compiled(program, chip):
    """Returns the executable of serialized HLO for one device of a chip."""
    from jax._src.interpreters import mlir as jax_mlir
    from jax.experimental import topologies
    from jaxlib import _jax, xla_client
    from jaxlib.mlir import ir

    name, _ = CHIPS[chip]
    described = topologies.get_topology_desc(platform="tpu", topology_name=name)
    device = described.devices[0]
    text = _jax.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(program))
    text = text.decode() if isinstance(text, bytes) else text
    # A copy is the identity.
    text = _COPY.sub(r"stablehlo.optimization_barrier \1 : \2", text)
    options = xla_client.CompileOptions()
    options.num_replicas = options.num_partitions = 1
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
    costs = executable.cost_analysis()
    costs = costs[0] if isinstance(costs, (list, tuple)) else costs
    found["operations"] = costs.get("flops")
    found["bytes_moved"] = costs.get("bytes accessed")
    return found


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
