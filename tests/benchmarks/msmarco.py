"""Stages on a made-up corpus of MS MARCO's shape: time and memory by its size.

    python tests/benchmarks/msmarco.py --workdir DIR [--documents 88418 8841823]

The stand-in has 8,841,823 passages of 56 words, 502,939 training queries in 532,751
pairs, and 6,980 dev queries with 7,437 judgements, as BEIR has them; words follow Zipf,
with a long tail. A query is words of its passage. A smaller corpus has the training
pairs in proportion, and at most as many dev queries.

| part | what runs, in a process of its own |
|---|---|
| `make` | the stand-in is written |
| `prepare` | everything is validated, pseudo-queries of every passage |
| `bm25` | `evaluate` on dev: BM25 of all passages, TREC runs, metrics |
| `embed` | the corpus by an untrained retriever of one layer, 16 tokens a passage |
| `evaluate` | the same retriever on dev, from the texts |
| `indexed` | the same, from the embeddings of `embed` |
| `write` | `synthesize` by the package's T5 for at most 4,096 passages |

Prints one JSON line per part and size: wall and processor seconds, and the largest
resident set; and one line with `memory_ratio`, the largest peak of each part over its
smallest. Finished parts are read from DIR.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
PASSAGES, TRAIN_QUERIES, TRAIN_PAIRS = 8_841_823, 502_939, 532_751
DEV = (6_980, 7_437)
VOCABULARY = 20_000
T5 = "t5_tiny_pydocs"
_WORDS, _SENTENCE = 56, 14
_AT_ONCE = 10_000


# -- The corpus ------------------------------------------------------------------------


def sizes(documents):
    """Returns {split: (queries, judgements)} of a corpus of this size."""
    share = documents / PASSAGES
    train = (round(TRAIN_QUERIES * share), round(TRAIN_PAIRS * share))
    dev = DEV if documents > 2 * DEV[1] else (documents // 4, documents // 4)
    return {"train": train, "dev": dev}


def passages(count):
    """Yields made-up passages of four sentences; smaller counts are prefixes."""
    draw = np.random.default_rng(0)
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    made = {}
    while len(made) < VOCABULARY:
        made["".join(draw.choice(syllables, draw.integers(2, 5)))] = None
    words = np.array(list(made), object)
    share = 1 / np.arange(1, VOCABULARY + 1)
    share /= share.sum()
    for start in range(0, count, _AT_ONCE):
        chosen = words[draw.choice(VOCABULARY, [_AT_ONCE, _WORDS], p=share)]
        for number, row in enumerate(chosen[: count - start], start):
            # Some words come in few passages.
            row[5], row[23] = f"x{number % 2_000_003:x}", f"y{number % 300_007:x}"
            yield ". ".join(
                " ".join(row[at : at + _SENTENCE]).capitalize()
                for at in range(0, _WORDS, _SENTENCE)
            )


def judgements(documents):
    """Returns {passage: [(split, query's number)]}; all but a few have one query."""
    draw = np.random.default_rng(1)
    found = {}
    for split, (queries, judged) in sizes(documents).items():
        # Every query has a passage; those that are left go to the first queries.
        of = np.concatenate([np.arange(queries), np.arange(judged - queries) % queries])
        for query, at in zip(of, draw.choice(documents, judged, replace=False)):
            found.setdefault(int(at), []).append((split, int(query)))
    return found


def make(home, documents):
    """Writes the stand-in, and a retriever."""
    import tensorflow as tf

    from tfdpsq import retriever
    from tfdpsq.data import Document, Tokenizer, write_beir
    from tfdpsq.generator import checkpoints
    from tfdpsq.layers import T5Config

    wanted = judgements(documents)
    texts = {}
    rows = {split: [] for split in sizes(documents)}

    def corpus():
        for number, text in enumerate(passages(documents)):
            for split, query in wanted.get(number, ()):
                name = f"{split}{query}"
                texts.setdefault(name, " ".join(text.split()[3:9]).strip("."))
                rows[split].append((name, str(number), 1))
            yield Document(str(number), "", text)

    def queries():
        yield from texts.items()

    # Both are filled while the corpus is written.
    write_beir(home / "data", corpus(), queries(), rows)
    tokenizer = Tokenizer(checkpoints.vocabulary_in(checkpoints.locate(T5)))
    tf.keras.utils.set_random_seed(0)
    shape = T5Config(8192, 1, 2, 32, 64, 16)
    towers = retriever.RetrieverConfig(
        shape, embedding_dim=32, query_length=16, document_length=16
    )
    (home / "retriever").mkdir(exist_ok=True)
    retriever.save(retriever.TwoTower(towers, tokenizer), home / "retriever" / "model")
    return {"bytes": (home / "data" / "corpus.jsonl").stat().st_size}


# -- What runs on it -------------------------------------------------------------------


def stages(home):
    """Returns {part: (stage, settings)}."""
    data, mine = str(home / "data"), str(home / "retriever")
    on_dev = {"data": data, "split": "dev", "systems": {"mine": mine}}
    indexes = {"mine": str(home / "private" / "embed")}
    write = {"generator": T5, "corpus": data, "max_documents": 4096}
    splits = {"splits": ("train", "dev"), "vocabulary_size": 0}
    return {
        "prepare": ("prepare", {"data": data, **splits}),
        "bm25": ("evaluate", {**on_dev, "systems": {"bm25": "bm25"}}),
        "embed": ("embed", {"retriever": mine, "corpus": data}),
        "evaluate": ("evaluate", on_dev),
        "indexed": ("evaluate", {**on_dev, "indexes": indexes}),
        "write": ("synthesize", {**write, "shard_documents": 512}),
    }


PARTS = ("make", *stages(pathlib.Path()))


def run(part, home, documents):
    """Runs a part in this process; returns what it says of itself."""
    if part == "make":
        return make(home, documents)
    from tfdpsq.run import command
    from tfdpsq.run.frame import runner, settings
    from tfdpsq.run.frame.places import Place

    name, changes = stages(home)[part]
    stage = command.stage(name)
    made = settings.from_config(stage.Settings, changes)
    runner.execute(stage, made, Place.of(home / "private" / part))
    return {}


def measured(part, home, documents):
    """Runs a part in a process of its own, unless it is finished; returns its row."""
    done = home / f"{part}.json"
    if done.is_file():
        return json.loads(done.read_text())
    home.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, f"--part={part}", f"--workdir={home}"]
    command += [f"--documents={documents}"]
    log, started = home / f"{part}.log", time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=file,
        )
        said = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{' '.join(command)} failed; see {log}")
    row = {
        "benchmark": "msmarco",
        "part": part,
        "documents": documents,
        "seconds": round(time.monotonic() - started, 1),
        "processor_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_gib": round(usage.ru_maxrss / 2**20, 3),
        **json.loads(said.splitlines()[-1]),
    }
    done.write_text(json.dumps(row) + "\n")
    return row


def main():
    """Measures missing parts; prints all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--documents", type=int, nargs="+", default=[88_418, PASSAGES])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--part", choices=PARTS, help="run one, in this process")
    options = parser.parse_args()
    home = options.workdir.resolve()
    if options.part:
        print(json.dumps(run(options.part, home, options.documents[0])))
        return
    peaks = {}
    for documents in sorted(options.documents):
        for part in options.parts:
            row = measured(part, home / str(documents), documents)
            peaks.setdefault(part, []).append(row["peak_gib"])
            print(json.dumps(row), flush=True)
    ratios = {part: round(max(own) / min(own), 3) for part, own in peaks.items()}
    print(json.dumps({"benchmark": "msmarco", "memory_ratio": ratios}))


if __name__ == "__main__":
    main()
