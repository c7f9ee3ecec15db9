"""T5X without T5X: its files made byte by byte, and its network in NumPy.

Nothing here knows the code under test. The files are as flax 0.6 and TensorStore lay
them out, compared by hand with t5x_retrieval's `test_de_t5_tiny.checkpoint_1000`; the
network is that of t5x/examples/t5/network.py.
"""

import gzip
import itertools
import json
import struct

import numpy as np

VOCABULARY, HIDDEN, HEADS, WIDTH, WIDE, LAYERS = 40, 6, 2, 4, 10, 2


# -- Files by hand -----------------------------------------------------------------


def pack(value):
    """msgpack of what flax's train states are made of."""
    if isinstance(value, dict):
        items = b"".join(pack(key) + pack(item) for key, item in value.items())
        return b"\xdf" + struct.pack(">I", len(value)) + items
    if isinstance(value, np.ndarray):  # extension 1: shape, dtype, bytes
        name = "bfloat16" if value.dtype == np.uint16 else value.dtype.name
        data = value.tobytes()
        body = b"\x93" + pack(list(value.shape)) + pack(name)
        body += b"\xc6" + struct.pack(">I", len(data)) + data
        return b"\xc9" + struct.pack(">IB", len(body), 1) + body
    if isinstance(value, list):
        return bytes([0x90 | len(value)]) + b"".join(map(pack, value))
    if isinstance(value, str):
        return bytes([0xD9, len(value)]) + value.encode()
    return b"\xd2" + struct.pack(">i", value)


def write_zarr(directory, array, chunks):
    """zarr version 2; a chunk that sticks out of the array is filled up."""
    directory.mkdir(parents=True)
    dtype = "bfloat16" if array.dtype == np.uint16 else array.dtype.str
    (directory / ".zarray").write_text(
        json.dumps(
            {
                "chunks": chunks,
                "compressor": {"id": "gzip", "level": 1},
                "dtype": dtype,
                "fill_value": None,
                "filters": None,
                "order": "C",
                "shape": array.shape,
                "zarr_format": 2,
            }
        )
    )
    grid = [range(-(-size // chunk)) for size, chunk in zip(array.shape, chunks)]
    for place in itertools.product(*grid):
        block = np.full(chunks, 7, array.dtype)
        part = array[tuple(slice(i * c, i * c + c) for i, c in zip(place, chunks))]
        block[tuple(slice(size) for size in part.shape)] = part
        name = ".".join(map(str, place))
        (directory / name).write_bytes(gzip.compress(block.tobytes(), 1))


def spec(name, array, chunks):
    return {
        "driver": "zarr",
        "kvstore": {"driver": "gfile", "path": name},
        "metadata": {
            "chunks": chunks,
            "compressor": {"id": "gzip", "level": 1},
            "dtype": array.dtype.str,
            "shape": list(array.shape),
        },
    }


def write_checkpoint(directory, arrays, reference=spec):
    """A train state of `arrays` {path: array}; matrices wider than 4 go to zarr."""
    directory.mkdir(parents=True, exist_ok=True)
    tree = {}
    for path, array in arrays.items():
        *parents, last = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        if array.ndim == 2 and array.shape[1] > 4 and "rel_embedding" not in path:
            name, chunks = f"target.{path.replace('/', '.')}", [16, 4]
            write_zarr(directory / name, array, chunks)
            node[last] = reference(name, array, chunks)
        else:
            node[last] = array
    # An optimizer's state lies before the weights, and is no concern of the reader:
    # one array in the file, one in a directory that is not even there.
    moments = {"v": np.ones((300, 3), np.float32), "m": spec("gone", *[np.eye(2)] * 2)}
    moments["m"]["metadata"]["chunks"] = [2, 2]
    state = {"param_states": {"embedding": moments}, "step": 1000}
    content = {"version": 3, "optimizer": {"state": state, "target": tree}}
    (directory / "checkpoint").write_bytes(pack(content))
    return directory


def random_arrays(version, sides=("encoder", "decoder")):
    """The arrays of a small T5X model, under T5X's names."""
    random = np.random.default_rng(0)
    arrays = {}

    def add(name, *shape):
        scale = 0.3 + np.arange(np.prod(shape)).reshape(shape) % 5 / 9
        arrays[name] = (random.normal(size=shape) * scale).astype(np.float32)

    add("token_embedder/embedding", VOCABULARY, HIDDEN)
    inner = HEADS * WIDTH
    for side in sides:
        add(f"{side}/relpos_bias/rel_embedding", HEADS, 32)
        for layer in (f"{side}/layers_{i}" for i in range(LAYERS)):
            parts = ["attention"] if side == "encoder" else ["self_attention"]
            add(f"{layer}/pre_{parts[0]}_layer_norm/scale", HIDDEN)
            if side == "decoder":
                parts.append("encoder_decoder_attention")
                add(f"{layer}/pre_cross_attention_layer_norm/scale", HIDDEN)
            for part in parts:
                for role in ("query", "key", "value"):
                    add(f"{layer}/{part}/{role}/kernel", HIDDEN, inner)
                add(f"{layer}/{part}/out/kernel", inner, HIDDEN)
            add(f"{layer}/pre_mlp_layer_norm/scale", HIDDEN)
            for name in ("wi",) if version == "1.0" else ("wi_0", "wi_1"):
                add(f"{layer}/mlp/{name}/kernel", HIDDEN, WIDE)
            add(f"{layer}/mlp/wo/kernel", WIDE, HIDDEN)
        add(f"{side}/{side}_norm/scale", HIDDEN)
    if version == "1.1" and "decoder" in sides:
        add("decoder/logits_dense/kernel", HIDDEN, VOCABULARY)
    return arrays


# -- T5X's network (t5x/examples/t5/network.py), in NumPy and float64 --------------


def norm(x, scale):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def bias(weights, side, queries, keys):
    distance = np.arange(keys)[None] - np.arange(queries)[:, None]
    buckets, offset, n = 32, 0, np.maximum(-distance, 0)
    if side == "encoder":  # both directions: half of the buckets each
        buckets, offset, n = 16, 16 * (distance > 0), np.abs(distance)
    exact = buckets // 2
    far = np.log(np.maximum(n, 1) / exact + 1e-7) / np.log(128 / exact)
    far = np.minimum(exact + (far * (buckets - exact)).astype(int), buckets - 1)
    index = offset + np.where(n < exact, n, far)
    return weights[f"{side}/relpos_bias/rel_embedding"][:, index]


def attend(weights, name, x, memory, biases):
    def heads(role, of):
        return (of @ weights[f"{name}/{role}/kernel"]).reshape(len(of), HEADS, WIDTH)

    query, key, value = heads("query", x), heads("key", memory), heads("value", memory)
    scores = np.einsum("qhd,khd->hqk", query, key) + biases  # not divided by anything
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    out = np.einsum("hqk,khd->qhd", shares, value).reshape(len(x), -1)
    return out @ weights[f"{name}/out/kernel"]


def feed_forward(weights, name, x):
    if f"{name}/wi/kernel" in weights:
        inside = np.maximum(x @ weights[f"{name}/wi/kernel"], 0)
    else:
        gate = x @ weights[f"{name}/wi_0/kernel"]
        gate *= 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        inside = gate * (x @ weights[f"{name}/wi_1/kernel"])
    return inside @ weights[f"{name}/wo/kernel"]


def network(arrays, document, query=None):
    """Encoder states of a document, or logits of a query's tokens."""
    weights = {name: array.astype(np.float64) for name, array in arrays.items()}
    states = None
    for side, ids in (("encoder", document), ("decoder", query)):
        if ids is None:
            return states
        x, size = weights["token_embedder/embedding"][ids], len(ids)
        biases = bias(weights, side, size, size)
        if side == "decoder":
            biases = np.where(np.tri(size) > 0, biases, -1e10)
        for i in range(LAYERS):
            layer = f"{side}/layers_{i}"
            own = "attention" if side == "encoder" else "self_attention"
            y = norm(x, weights[f"{layer}/pre_{own}_layer_norm/scale"])
            x = x + attend(weights, f"{layer}/{own}", y, y, biases)
            if side == "decoder":
                y = norm(x, weights[f"{layer}/pre_cross_attention_layer_norm/scale"])
                other = f"{layer}/encoder_decoder_attention"
                x = x + attend(weights, other, y, states, 0.0)
            y = norm(x, weights[f"{layer}/pre_mlp_layer_norm/scale"])
            x = x + feed_forward(weights, f"{layer}/mlp", y)
        states = norm(x, weights[f"{side}/{side}_norm/scale"])
    if "decoder/logits_dense/kernel" in weights:
        return states @ weights["decoder/logits_dense/kernel"]
    return states @ weights["token_embedder/embedding"].T / np.sqrt(HIDDEN)


def error_of(actual, expected):
    return np.abs(actual - expected).max() / np.abs(expected).max()
