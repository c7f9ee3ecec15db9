"""Pretrains a T5 on an accelerator by the recipe of `tfdpsq pretrain`, in JAX.

    python tests/benchmarks/pretrain_jax.py prepare --texts TEXT.jsonl --out ROWS
    python tests/benchmarks/pretrain_jax.py train --rows ROWS --out DIR --seconds 500
    python tests/benchmarks/pretrain_jax.py check --rows ROWS --model DIR

`prepare` learns a vocabulary and writes rows of pydocs' documents and of further public
text (`public_text.py`). `train` needs JAX, Optax and safetensors and nothing of this
project: it runs where TensorFlow 2.15 does not. Its losses are those of
`generator.pretraining`. Three things differ: half of a batch's pairs are neighbours,
sections of one manual, as hard negatives; pydocs' share of the pairs is stated; and the
rate falls with the time that is left. `check` compares the held-out loss that `train`
stated with that of this project's T5 of the same weights. Each prints one JSON line.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import itertools
import json
import lzma
import math
import pathlib
import sys
import time

import numpy as np

# Columns of a row: a passage without its pseudo-query, with it, and the query.
LENGTHS = {"document": 112, "whole": 112, "query": 28}
DOCUMENT, WHOLE = LENGTHS["document"], LENGTHS["document"] + LENGTHS["whole"]
SENTINELS = 100
NAMES = ("pydocs", "text", "held_out")
TRAIN = {
    "width": 192,
    "inner": 512,
    "heads": 4,
    "layers": 3,
    "pair_rows": 256,
    "text_rows": 64,
    "scale": 20.0,
    "rate": 0.02,
    "warmup": 300,
    "share": 0.25,
    "last_share": 0.4,
    "seconds": 500.0,
    "at_once": 20,
    "show": 20.0,
    "most": 0,
    "compute": "bfloat16",
}


def prepare(options) -> dict:
    """Writes vocabulary and rows."""
    from tfdpsq.data import PROMPT, Tokenizer, beir_lines, pydocs, train_vocabulary
    from tfdpsq.generator import pretraining

    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    beir = pydocs.build_pydocs()
    for path in options.texts:
        pydocs.refuse_queries(path, beir)

    def texts():
        for path in options.texts:
            yield from beir_lines.read_documents(path, may_be_empty=True)

    def kept(held_out: bool):
        for document in pydocs.public_documents(beir):
            if pretraining.is_held_out(document.id) == held_out:
                yield document

    vocabulary = out / "spiece.model"
    some = itertools.islice(texts(), 0, None, 4)
    documents = itertools.chain(pydocs.public_documents(beir), some)
    contents = (document.content for document in documents)
    train_vocabulary(contents, options.pieces, vocabulary, setting="--pieces")
    tokenizer = Tokenizer(vocabulary)
    prompt, length = tokenizer.encode([PROMPT.strip()], 64)
    meta = {
        "pieces": tokenizer.vocabulary_size,
        "prompt": np.asarray(prompt)[0, : int(length[0]) - 1].tolist(),
        "eos": tokenizer.eos_id,
    }
    documents = (kept(False), texts(), kept(True))
    for name, part, each in zip(NAMES, documents, (6, 2, 2)):
        chunks = pretraining.pair_rows(part, tokenizer, DOCUMENT, 28, each, seed=0)
        rows, who = _joined(chunks)
        if name == "text":  # so that the rows can be sent
            kept_rows = who * 2654435761 % 1000 < 1000 * options.keep
            rows, who = rows[kept_rows], who[kept_rows]
        _save(out, name, rows)
        _save(out, f"{name}_who", who)
        meta[name] = [len(rows), len(np.unique(who))]
        print(name, meta[name], file=sys.stderr)
    stretches = [
        chunk["text_ids"].astype(np.uint16)
        for chunk in pretraining.text_rows(kept(False), tokenizer, DOCUMENT)
    ]
    _save(out, "stretches", np.concatenate(stretches))
    (out / "meta.json").write_text(json.dumps(meta))
    return meta


def _joined(chunks) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows [n, 252] uint16, and the numbers of their documents [n] int64."""
    keys: dict[int, int] = {}
    rows, who = [], []
    for chunk in chunks:
        rows.append(
            np.concatenate([chunk[f"{n}_ids"] for n in LENGTHS], 1).astype(np.uint16)
        )
        own = (keys.setdefault(k, len(keys)) for k in chunk["document_key"].tolist())
        who.append(np.fromiter(own, np.int64))
    return np.concatenate(rows), np.concatenate(who)


def _save(out: pathlib.Path, name: str, array: np.ndarray) -> None:
    with lzma.open(out / f"{name}.xz", "wb") as file:
        np.save(file, array)


def _load(rows: pathlib.Path, name: str) -> np.ndarray:
    with lzma.open(rows / f"{name}.xz") as file:
        return np.load(file)


def _watched(held_out: np.ndarray) -> np.ndarray:
    """Returns 512 held-out rows, spread over all."""
    count = min(512, len(held_out))
    return held_out[np.linspace(0, len(held_out) - 1, count).astype(int)].astype("i4")


# Span corruption, as `generator.span_corruption` makes it.


def _composition(total: int, parts: int, random) -> list[int]:
    if total < parts:
        return [1] * total + [0] * (parts - total)
    cuts = np.sort(random.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [total]])).tolist()


def _corrupted(text: np.ndarray, random, sentinel: int) -> tuple[list, list]:
    source, target, position = [], [], 0
    if len(text) > 1:
        dropped = min(max(1, round(len(text) * 0.15)), len(text) - 1)
        count = min(max(1, round(dropped / 3)), dropped, len(text) - dropped)
        kept = _composition(len(text) - dropped, count + 1, random)
        for keep, drop in zip(kept, _composition(dropped, count, random)):
            source += text[position : position + keep].tolist()
            position += keep
            span = text[position : position + drop].tolist()
            position += drop
            if len(target) + len(span) + 2 <= LENGTHS["query"]:
                source.append(sentinel)
                target += [sentinel, *span]
                sentinel -= 1
            else:
                source += span
    return source + text[position:].tolist(), target


def _corrupted_rows(task) -> np.ndarray:
    rows, seed, sentinel, eos = task
    random = np.random.default_rng(seed)
    made = np.zeros([len(rows), DOCUMENT + LENGTHS["query"]], np.uint16)
    for at, row in enumerate(rows):
        text = row[row > 0]
        if len(text) and text[-1] == eos:
            text = text[:-1]
        source, target = _corrupted(text[: DOCUMENT - 1], random, sentinel)
        made[at, : len(source) + 1] = [*source, eos]
        made[at, DOCUMENT : DOCUMENT + len(target) + 1] = [*target, eos]
    return made


def spans(rows: np.ndarray, times: int, sentinel: int, eos: int) -> np.ndarray:
    """Corrupts rows so many times, on all processors: [n, 112 + 28] uint16."""
    parts = [
        (part, [seed, number], sentinel, eos)
        for seed in range(times)
        for number, part in enumerate(np.array_split(rows, max(1, len(rows) // 4000)))
    ]
    with concurrent.futures.ProcessPoolExecutor() as pool:
        return np.concatenate(list(pool.map(_corrupted_rows, parts)))


# T5 1.0, its weights named and laid out as Hugging Face's.


def weights(config: dict, seed: int) -> dict[str, np.ndarray]:
    """Draws weights as T5 starts."""
    random = np.random.default_rng(seed)
    d, ff, heads, kv = (config[n] for n in ("d_model", "d_ff", "num_heads", "d_kv"))
    made: dict[str, np.ndarray] = {}

    def normal(name: str, shape: tuple, deviation: float) -> None:
        made[name] = deviation * random.standard_normal(shape).astype(np.float32)

    normal("shared.weight", (config["vocab_size"], d), 1.0)
    for side in ("encoder", "decoder"):
        for number in range(config["num_layers"]):
            at = f"{side}.block.{number}.layer"
            kinds = ("SelfAttention", "EncDecAttention")[: 1 + (side == "decoder")]
            for index, kind in enumerate(kinds):
                name = f"{at}.{index}.{kind}"
                normal(f"{name}.q.weight", (heads * kv, d), (d * kv) ** -0.5)
                normal(f"{name}.k.weight", (heads * kv, d), d**-0.5)
                normal(f"{name}.v.weight", (heads * kv, d), d**-0.5)
                normal(f"{name}.o.weight", (d, heads * kv), (heads * kv) ** -0.5)
                made[f"{at}.{index}.layer_norm.weight"] = np.ones([d], np.float32)
            name = f"{at}.{len(kinds)}"
            normal(f"{name}.DenseReluDense.wi.weight", (ff, d), d**-0.5)
            normal(f"{name}.DenseReluDense.wo.weight", (d, ff), ff**-0.5)
            made[f"{name}.layer_norm.weight"] = np.ones([d], np.float32)
        normal(_bias_of(side), (32, heads), d**-0.5)
        made[f"{side}.final_layer_norm.weight"] = np.ones([d], np.float32)
    return made


def _bias_of(side: str) -> str:
    at = f"{side}.block.0.layer.0.SelfAttention"
    return f"{at}.relative_attention_bias.weight"


def _buckets(length: int, both_ways: bool) -> np.ndarray:
    """T5's bucket of each relative position (Raffel et al. 2020, section 2.1)."""
    relative = np.arange(length)[np.newaxis] - np.arange(length)[:, np.newaxis]
    count, far = 32, 128
    start = np.zeros_like(relative)
    distance = -np.minimum(relative, 0)
    if both_ways:
        count //= 2
        start = (relative > 0) * count
        distance = np.abs(relative)
    exact = count // 2
    logs = np.log(np.maximum(distance, 1) / exact) / math.log(far / exact)
    large = np.minimum(exact + (logs * (count - exact)).astype(int), count - 1)
    return start + np.where(distance < exact, distance, large)


class T5:
    """A T5's functions of its weights `w`; ids are 0 where they are padded."""

    def __init__(self, config: dict):
        """Takes sizes, named as Hugging Face's, and "compute", a dtype."""
        import jax
        import jax.numpy as jnp

        self.jax, self.jnp, self.config = jax, jnp, config
        self.low = jnp.dtype(config["compute"])

    def encode(self, w, ids):
        """[B, L] to states [B, L, d_model]."""
        length = ids.shape[1]
        position = w[_bias_of("encoder")][_buckets(length, True)].transpose(2, 0, 1)
        return self._stack(w, "encoder", ids, position[None] + _hidden(ids))

    def losses(self, w, states, source_ids, targets):
        """Nats a token of each row [B], given the encoder's states."""
        jnp = self.jnp
        length = targets.shape[1]
        position = w[_bias_of("decoder")][_buckets(length, False)].transpose(2, 0, 1)
        earlier = np.tril(np.ones([length, length], np.float32))
        shifted = jnp.pad(targets, ((0, 0), (1, 0)))[:, :-1]
        # Padding comes last, so that no real token sees it.
        bias = position[None] + (1 - earlier) * -1e9
        x = self._stack(w, "decoder", shifted, bias, states, _hidden(source_ids))
        x = (x * self.config["d_model"] ** -0.5).astype(self.low)
        head = w["shared.weight"].astype(self.low)
        exact = {"preferred_element_type": jnp.float32}
        logits = jnp.einsum("btd,vd->btv", x, head, **exact)
        own = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
        real = (targets > 0).astype(jnp.float32)
        losses = (self.jax.nn.logsumexp(logits, -1) - own) * real
        return losses.sum(1) / jnp.maximum(real.sum(1), 1)

    def pooled(self, states, ids):
        """Unit vectors [B, d_model]: means over the real tokens."""
        jnp = self.jnp
        real = (ids > 0).astype(jnp.float32)[..., None]
        mean = (states.astype(jnp.float32) * real).sum(1) / jnp.maximum(real.sum(1), 1)
        square = (mean * mean).sum(-1, keepdims=True)
        return mean * self.jax.lax.rsqrt(square + 1e-12)

    def _stack(self, w, side, ids, bias, source=None, hidden=None):
        x = w["shared.weight"][ids].astype(self.low)
        for number in range(self.config["num_layers"]):
            at = f"{side}.block.{number}.layer"
            y = self._norm(x, w[f"{at}.0.layer_norm.weight"])
            x += self._attend(w, f"{at}.0.SelfAttention", y, y, bias)
            last = 1
            if source is not None:
                y = self._norm(x, w[f"{at}.1.layer_norm.weight"])
                x += self._attend(w, f"{at}.1.EncDecAttention", y, source, hidden)
                last = 2
            y = self._norm(x, w[f"{at}.{last}.layer_norm.weight"])
            name = f"{at}.{last}.DenseReluDense"
            y = self.jax.nn.relu(self._linear(y, w[f"{name}.wi.weight"]))
            x += self._linear(y, w[f"{name}.wo.weight"])
        return self._norm(x, w[f"{side}.final_layer_norm.weight"])

    def _norm(self, x, weight):
        x = x.astype(self.jnp.float32)
        square = self.jnp.mean(x * x, -1, keepdims=True)
        return (x * self.jax.lax.rsqrt(square + 1e-6) * weight).astype(self.low)

    def _linear(self, x, weight):
        return self.jnp.einsum("...i,oi->...o", x, weight.astype(self.low))

    def _attend(self, w, name, x, source, bias):
        jnp, heads = self.jnp, self.config["num_heads"]
        queries, keys, values = (
            self._linear(of, w[f"{name}.{part}.weight"]).reshape(
                *of.shape[:2], heads, self.config["d_kv"]
            )
            for part, of in (("q", x), ("k", source), ("v", source))
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", queries, keys).astype(jnp.float32)
        shares = self.jax.nn.softmax(scores + bias).astype(self.low)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", shares, values)
        return self._linear(mixed.reshape(*x.shape[:2], -1), w[f"{name}.o.weight"])


def _hidden(ids):
    return (ids == 0)[:, None, None, :] * -1e9


class Training:
    """Compiled steps on rows that lie on the accelerator."""

    def __init__(self, config: dict, options, data: dict, texts: np.ndarray, meta):
        """Draws weights and sends the rows."""
        import jax
        import jax.numpy as jnp
        import optax

        self.jax, self.jnp, self.options, self.meta = jax, jnp, options, meta
        self.t5 = T5(config)
        self.w = {n: jnp.asarray(v) for n, v in weights(config, 0).items()}
        self.optimizer = optax.chain(  # Adafactor, less its rate
            optax.scale_by_factored_rms(decay_rate=0.8),
            optax.clip_by_block_rms(1.0),
            optax.scale_by_param_block_rms(1e-3),
        )
        self.state = self.optimizer.init(self.w)
        # Documents of the two kinds must not share a number.
        who = [data["pydocs_who"], data["text_who"] + 10_000_000]
        self.store = {
            "rows": jnp.asarray(np.concatenate([data["pydocs"], data["text"]])),
            "who": jnp.asarray(np.concatenate(who).astype(np.int32)),
            "texts": jnp.asarray(texts),
        }
        self.key = jax.random.key(2)
        self._steps = jax.jit(self._many, donate_argnums=(0, 1))
        self._watch = jax.jit(self._watched)
        self._held_out = jnp.asarray(_watched(data["held_out"]))

    def __call__(self, indices, text_indices, rate: float) -> list[float]:
        """Takes a step for each row of the indices; returns the mean losses."""
        self.key, drawn = self.jax.random.split(self.key)
        rate = self.jnp.float32(rate)
        self.w, self.state, parts = self._steps(
            self.w, self.state, self.store, drawn, indices, text_indices, rate
        )
        return parts.tolist()

    def watch(self) -> list[float]:
        """Returns held-out loss, gap, and how many find their document first."""
        return self._watch(self.w, self._held_out).tolist()

    def _losses(self, w, batch, whole, undressed):
        jnp, t5, count = self.jnp, self.t5, self.options.pair_rows
        drawn = batch["rows"].astype(jnp.int32)
        queries = drawn[:, WHOLE:]
        ids = jnp.where(whole[:, None], drawn[:, DOCUMENT:WHOLE], drawn[:, :DOCUMENT])
        prompt = np.asarray(self.meta["prompt"], np.int32)
        dressed = (ids[:, : len(prompt)] == prompt).all(1)
        bare = jnp.pad(ids, ((0, 0), (0, len(prompt))))[:, len(prompt) :]
        ids = jnp.where((undressed & dressed)[:, None], bare, ids)
        texts = batch["texts"].astype(jnp.int32)
        source_ids = jnp.concatenate([ids, texts[:, :DOCUMENT]])
        states = t5.encode(w, source_ids)
        targets = jnp.concatenate([queries, texts[:, DOCUMENT:]])
        each = t5.losses(w, states, source_ids, targets)
        embedded = t5.pooled(t5.encode(w, queries), queries)
        documents = t5.pooled(states[:count], ids)
        scores = self.options.scale * jnp.einsum("id,jd->ij", embedded, documents)
        same = batch["who"][:, None] == batch["who"][None]
        scores = jnp.where(same & ~np.eye(count, dtype=bool), -1e30, scores)
        contrast = self.jax.nn.logsumexp(scores, 1) - jnp.diagonal(scores)
        parts = jnp.stack([each[:count].mean(), each[count:].mean(), contrast.mean()])
        mixed = parts[0] * count + parts[1] * self.options.text_rows
        return mixed / (count + self.options.text_rows) + parts[2], parts

    def _many(self, w, state, store, key, indices, text_indices, rate):
        random, count = self.jax.random, self.options.pair_rows

        def one(carry, given):
            w, state = carry
            key, at, text_at = given
            first, second = random.split(key)
            batch = {
                "rows": store["rows"][at],
                "who": store["who"][at],
                "texts": store["texts"][text_at],
            }
            gradient, parts = self.jax.grad(self._losses, has_aux=True)(
                w,
                batch,
                random.uniform(first, [count]) < 0.3,
                random.uniform(second, [count]) < 0.5,
            )
            update, state = self.optimizer.update(gradient, state, w)
            w = {name: value - rate * update[name] for name, value in w.items()}
            return (w, state), parts

        keys = random.split(key, len(indices))
        (w, state), parts = self.jax.lax.scan(
            one, (w, state), (keys, indices, text_indices)
        )
        return w, state, parts.mean(0)

    def _watched(self, w, held_out):
        jnp, t5 = self.jnp, self.t5
        documents, queries = held_out[:, :DOCUMENT], held_out[:, WHOLE:]
        states = t5.encode(w, documents)
        own = t5.losses(w, states, documents, queries).mean()
        others = (jnp.roll(states, 7, 0), jnp.roll(documents, 7, 0))
        wrong = t5.losses(w, *others, queries).mean()
        embedded = t5.pooled(t5.encode(w, queries), queries)
        nearest = (embedded @ t5.pooled(states, documents).T).argmax(1)
        first = (nearest == np.arange(len(held_out))).mean()
        return jnp.stack([own, wrong - own, first])


def _indices(random, counts, options, share: float) -> np.ndarray:
    """Draws rows, `share` of them of pydocs: [at_once, pair_rows] int32.

    Half of them come in runs of eight, every third row: sections that stand together.
    """
    pydocs, total = counts
    steps, rows = options.at_once, options.pair_rows

    def drawn(shape: list[int], room: int) -> np.ndarray:
        return np.where(
            random.random(shape) < share,
            random.integers(0, pydocs - room, shape),
            random.integers(pydocs, total - room, shape),
        )

    near = drawn([steps, rows // 16, 1], 32) + np.arange(8) * 3
    near = near.reshape([steps, -1])
    far = drawn([steps, rows - near.shape[1]], 0)
    return np.concatenate([near, far], 1).astype(np.int32)


def train(options) -> dict:
    """Trains until the time is over, saving now and then."""
    began = time.monotonic()
    meta = json.loads((options.rows / "meta.json").read_text())
    names = [*NAMES, "stretches", *(f"{name}_who" for name in NAMES)]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        load = functools.partial(_load, options.rows)
        data = dict(zip(names, pool.map(load, names)))
    size = len(meta["prompt"])
    passages = data["text"][::2, DOCUMENT:WHOLE]
    bare = np.zeros_like(passages)
    bare[:, :-size] = passages[:, size:]
    sentinel = meta["pieces"] + SENTINELS - 1
    texts = spans(np.concatenate([bare, data["stretches"]]), 2, sentinel, meta["eos"])
    config = {
        "d_model": options.width,
        "d_ff": options.inner,
        "num_heads": options.heads,
        "d_kv": options.width // options.heads,
        "num_layers": options.layers,
        "vocab_size": meta["pieces"] + SENTINELS,
        "compute": options.compute,
    }
    training = Training(config, options, data, texts, meta)
    counts = len(data["pydocs"]), len(training.store["rows"])
    random = np.random.default_rng(1)
    given = {n: v for n, v in vars(options).items() if isinstance(v, (int, float, str))}
    record: dict = {"curve": [], "config": {**config, **given}}
    done, saved, shown = 0, 0.0, 0.0
    ready = time.monotonic()
    while not (options.most and done >= options.most):
        past = (time.monotonic() - ready) / max(1.0, began + options.seconds - ready)
        if past >= 1:
            break
        falling = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * past))
        rate = options.rate * min((done + 1) / options.warmup, falling)
        share = options.last_share if past > 0.7 else options.share
        text_rows = [options.at_once, options.text_rows]
        parts = training(
            _indices(random, counts, options, share),
            random.integers(0, len(texts), text_rows).astype(np.int32),
            rate,
        )
        done += options.at_once
        if not all(map(math.isfinite, parts)):
            raise SystemExit(f"diverged at step {done}: {parts}")
        now = time.monotonic() - began
        if now - shown > options.show:
            shown = now
            line = [done, round(now, 1)]
            line += [round(value, 4) for value in (*parts, *training.watch())]
            record["curve"].append(line)
            print(options.width, *line, file=sys.stderr, flush=True)
        if now - saved > 150:
            saved = now
            save(options.out, config, training.w, record)
    seconds = round(time.monotonic() - began, 1)
    record |= {"steps": done, "held_out": training.watch(), "seconds": seconds}
    save(options.out, config, training.w, record)
    return record


def save(out: pathlib.Path, config: dict, w: dict, record: dict) -> None:
    """Writes Hugging Face's layout, float16."""
    import safetensors.numpy

    out.mkdir(parents=True, exist_ok=True)
    tensors = {n: np.asarray(v).astype(np.float16) for n, v in w.items()}
    safetensors.numpy.save_file(tensors, out / "model.safetensors", {"format": "pt"})
    kept = {n: v for n, v in config.items() if n != "compute"}
    kept |= {
        "architectures": ["T5ForConditionalGeneration"],
        "decoder_start_token_id": 0,
        "dropout_rate": 0.0,
        "eos_token_id": 1,
        "feed_forward_proj": "relu",
        "is_decoder": False,
        "is_encoder_decoder": True,
        "layer_norm_epsilon": 1e-6,
        "model_type": "t5",
        "num_decoder_layers": config["num_layers"],
        "pad_token_id": 0,
        "relative_attention_max_distance": 128,
        "relative_attention_num_buckets": 32,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
    }
    (out / "config.json").write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")
    (out / "pretraining.json").write_text(json.dumps(record, indent=1) + "\n")


def check(options) -> dict:
    """Compares a stated held-out loss with that of this project's T5."""
    from tfdpsq.generator import T5QueryGenerator

    generator = T5QueryGenerator.from_preset(str(options.model))
    losses = []
    for row in np.array_split(_watched(_load(options.rows, "held_out")), 8):
        document, query = row[:, :DOCUMENT], row[:, WHOLE:]
        batch = {
            "document_ids": document,
            "document_lengths": (document > 0).sum(1).astype(np.int32),
            "query_ids": query,
            "query_lengths": (query > 0).sum(1).astype(np.int32),
        }
        losses.append(generator.per_example_losses(batch).numpy())
    stated = json.loads((options.model / "pretraining.json").read_text())["held_out"][0]
    return {"stated": stated, "here": float(np.concatenate(losses).mean())}


def main() -> None:
    """Runs one of the three."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    kinds = parser.add_subparsers(required=True)
    path = {"type": pathlib.Path, "required": True}
    given = kinds.add_parser("prepare")
    given.set_defaults(function=prepare)
    given.add_argument("--texts", nargs="*", default=[], help="JSON Lines files")
    given.add_argument("--pieces", type=int, default=8092)
    given.add_argument("--keep", type=float, default=1.0, help="share of `texts`")
    given.add_argument("--out", **path)
    given = kinds.add_parser("train")
    given.set_defaults(function=train)
    for name, value in TRAIN.items():
        flag = "--" + name.replace("_", "-")
        given.add_argument(flag, type=type(value), default=value)
    given.add_argument("--rows", **path)
    given.add_argument("--out", **path)
    given = kinds.add_parser("check")
    given.set_defaults(function=check)
    given.add_argument("--rows", **path)
    given.add_argument("--model", **path)
    options = parser.parse_args()
    print(json.dumps(options.function(options)))


if __name__ == "__main__":
    main()
