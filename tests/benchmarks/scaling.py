"""Seconds and peak memory of corpus passes against the size of the corpus.

    python tests/benchmarks/scaling.py --workdir DIR --documents 10000 100000 1000000

Every stage runs by its command line, in its own process, on one untrained retriever of
one layer and made-up documents of a dozen words: `encode` embeds the corpus, `index`
does so for a streamed search, `evaluate` validates, embeds and searches for 300
queries, `evaluate_index` searches the output of `index`, `evaluate_bm25` searches by
words. On sets of queries written for these documents, `filter_bm25` ranks the
documents of 300; `filter_words` searches for duplicates in as many queries as there
are documents; `train_retriever` takes 20 steps on these, and `mine` finds ten documents
for each (so its corpus and its set both grow).

Prints one JSON line per row: wall seconds, processor seconds, and the largest resident
set of that process. Two numbers per stage show its growth. `exponent` is p of processor
seconds = a + b * documents^p through the last three sizes, each the same multiple of
the one before: 1 is linear, whatever the start costs.
`memory_ratio` is the largest peak by the smallest.

Rows of stages that are finished in DIR are read from there.
"""

import argparse
import json
import math
import os
import pathlib
import subprocess
import sys
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORDS = 12
VOCABULARY = 20_000
QUERIES = 300
_ENCODE = {"corpus": "{corpus}", "retriever": "{retriever}"}
_EVALUATE = {"data": "{corpus}"}
_FILTER = {"corpus": "{corpus}", "synthetic": "{asked}"}
STAGES = {
    "encode": ("encode", _ENCODE),
    "index": ("index", {**_ENCODE, "kind": "streamed"}),
    "evaluate": ("evaluate", {**_EVALUATE, "systems.mine": "{retriever}"}),
    "evaluate_index": (
        "evaluate",
        {**_EVALUATE, "systems.mine": "{retriever}", "indexes.mine": "{out}/index"},
    ),
    "evaluate_bm25": ("evaluate", {**_EVALUATE, "systems.bm25": "bm25"}),
    "filter_bm25": ("filter", {**_FILTER, "round_trip": "1"}),
    "filter_words": (
        "filter",
        {**_FILTER, "synthetic": "{set}", "duplicates": "True"},
    ),
    "train_retriever": (
        "train_retriever",
        {"vocabulary": "{vocabulary}", "pairs": "{set}", "steps": "20"},
    ),
    "mine": ("mine", {"pairs": "{set}", "corpus": "{corpus}", "k": "10"}),
}


def made_up_words(draw):
    """Returns distinct words of two to four syllables."""
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    found = {}
    while len(found) < VOCABULARY:
        found["".join(draw.choice(syllables, draw.integers(2, 5)))] = None
    return list(found)


def texts(count, seed=0, at_once=10_000):
    """Yields made-up texts, with a common start for every count; words follow Zipf."""
    draw = np.random.default_rng(seed)
    words = np.array(made_up_words(draw), object)
    share = 1 / np.arange(1, VOCABULARY + 1)
    share /= share.sum()
    for start in range(0, count, at_once):
        chosen = words[draw.choice(VOCABULARY, [at_once, WORDS], p=share)]
        for row in chosen[: count - start]:
            yield " ".join(row)


def write_corpus(path, count):
    """Writes a BEIR directory whose queries are words of documents spread over it."""
    from tfdpsq.data import Document, write_beir

    asked = {number * count // QUERIES: number for number in range(QUERIES)}
    queries = []

    def documents():
        for number, text in enumerate(texts(count)):
            if number in asked:
                words = text.split()
                queries.append((f"q{asked[number]}", " ".join(words[3:9])))
            yield Document(f"document{number}", "", text)

    judged = [(f"q{number}", f"document{at}", 1) for at, number in asked.items()]
    write_beir(path, documents(), _later(queries), {"test": judged})


def write_set(path, count, rows):
    """Writes a set of queries, words of `rows` documents spread over the corpus."""
    from tfdpsq.data import write_synthetic
    from tfdpsq.data.sets import SyntheticQuery

    asked = {number * count // rows for number in range(rows)}
    written = (
        (number, text) for number, text in enumerate(texts(count)) if number in asked
    )
    queries = (
        SyntheticQuery(
            f"genQ{at}", " ".join(text.split()[3:9]), f"document{number}", text, 0
        )
        for at, (number, text) in enumerate(written)
    )
    write_synthetic(path, queries, {"by": "a benchmark"}, None)


def _later(rows):
    """Yields the rows of a list that is filled later."""
    yield from rows


def write_retriever(home):
    """Writes an untrained retriever of one layer, and its vocabulary."""
    from tfdpsq.data import train_vocabulary
    from tfdpsq.run import train_retriever

    train_vocabulary(texts(5000), 2000, home / "spiece.model")
    config = small(train_retriever.default_config())
    config.update(
        {
            "pairs": str(home / f"corpus{QUERIES}"),
            "split": "test",
            "vocabulary": str(home / "spiece.model"),
            "steps": 0,
        }
    )
    train_retriever.run(config, home / "retriever")


def small(config):
    """Sets `train_retriever`'s settings for a model of one layer and short texts."""
    config.t5.update(
        vocabulary_size=2048,
        num_layers=1,
        num_heads=2,
        hidden_dim=32,
        intermediate_dim=64,
        key_value_dim=16,
    )
    config.update(document_length=16, query_length=16, embedding_dim=32)
    return config


def cost_of(command, root, log):
    """Runs a command in the sources `root`; returns its time and largest memory."""
    started = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root)},
            stdout=file,
            stderr=file,
        )
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{' '.join(command)} failed; see {log}")
    return {
        "seconds": round(time.monotonic() - started, 1),
        "processor_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_gib": round(usage.ru_maxrss / 2**20, 3),
    }


def measured(name, count, home, root):
    """Returns a row: the cost of one stage on one corpus."""
    done = home / "rows" / f"{name}-{count}.json"
    if done.is_file():
        return json.loads(done.read_text())
    module, settings = STAGES[name]
    out = home / f"out{count}"
    places = {
        "corpus": home / f"corpus{count}",
        "asked": home / f"asked{count}",
        "set": home / f"set{count}",
        "retriever": home / "retriever",
        "vocabulary": home / "spiece.model",
        "out": out,
    }
    for of, rows in (("asked", QUERIES), ("set", count)):
        if f"{{{of}}}" in settings.values() and not places[of].is_dir():
            write_set(places[of], count, rows)
    command = [
        sys.executable,
        "-m",
        f"tfdpsq.run.{module}",
        f"--config={ROOT / 'tests' / 'benchmarks' / 'scaling.py'}:{name}",
        f"--workdir={out / name}",
    ]
    command += [f"--config.{n}={v.format(**places)}" for n, v in settings.items()]
    log = home / "logs" / f"{name}-{count}.txt"
    log.parent.mkdir(exist_ok=True)
    cost = cost_of(command, root, log)
    row = {"benchmark": "scaling", "stage": name, "documents": count, **cost}
    done.parent.mkdir(exist_ok=True)
    done.write_text(json.dumps(row) + "\n")
    return row


def growth(rows):
    """Returns the growth of seconds and memory of one stage; see the module."""
    seconds = [row["processor_seconds"] for row in rows]
    found = {
        "memory_ratio": round(
            max(row["peak_gib"] for row in rows) / min(row["peak_gib"] for row in rows),
            3,
        )
    }
    if len(rows) > 2:
        sizes = [row["documents"] for row in rows[-3:]]
        low, high = (b - a for a, b in zip(seconds[-3:], seconds[-2:]))
        if sizes[1] / sizes[0] == sizes[2] / sizes[1] and min(low, high) > 0:
            found["exponent"] = round(
                math.log(high / low) / math.log(sizes[1] / sizes[0]), 3
            )
    return found


def get_config(name):
    """Returns the settings of a row's stage, with the systems of its flags."""
    import importlib

    module, settings = STAGES[name]
    config = importlib.import_module(f"tfdpsq.run.{module}").default_config()
    with config.unlocked():
        for field in ("systems", "indexes"):
            names = [n.partition(".")[2] for n in settings if n.startswith(field)]
            if names:
                config[field] = dict.fromkeys(names, "")
    return small(config) if name == "train_retriever" else config


def main():
    """Measures missing rows; prints all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument(
        "--documents", type=int, nargs="+", default=[10_000, 100_000, 1_000_000]
    )
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument(
        "--root", type=pathlib.Path, default=ROOT, help="the sources to measure"
    )
    options = parser.parse_args()
    home = options.workdir.resolve()
    home.mkdir(parents=True, exist_ok=True)
    for count in (QUERIES, *options.documents):
        if not (home / f"corpus{count}").is_dir():
            write_corpus(home / f"corpus{count}", count)
    if not (home / "retriever").is_dir():
        write_retriever(home)
    by_stage = {name: [] for name in options.stages}
    for count in sorted(options.documents):
        for name in options.stages:
            row = measured(name, count, home, options.root.resolve())
            by_stage[name].append(row)
            print(json.dumps(row), flush=True)
    for name, rows in by_stage.items():
        print(json.dumps({"benchmark": "scaling", "stage": name, **growth(rows)}))


if __name__ == "__main__":
    main()
