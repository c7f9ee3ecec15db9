"""Stages on a made-up corpus of MS MARCO's exact shape: time and memory.

    python tests/benchmarks/msmarco.py --workdir DIR [--documents 88418 8841823]

The stand-in has 8,841,823 passages of 56 words, 502,939 training queries in 532,751
pairs, 6,980 dev queries with 7,437 judgements, and 43 test queries with 9,260, as BEIR
has them; words follow Zipf, with a long tail. A query is words of its passage. A
smaller corpus has the training pairs in proportion, and dev and test whole.

Each part runs in a process of its own:

| part | what runs |
|---|---|
| `make` | the stand-in is written, 3.9 GB |
| `prepare` | the stage: everything is validated, pseudo-queries of every passage |
| `bm25` | `evaluate` on dev: BM25 of all passages, TREC runs, metrics |
| `exact` | given embeddings of 768 numbers to disk, exact search on dev, metrics |

Prints one JSON line per part and size: wall and processor seconds, the largest resident
set, what the part says of itself; and one line with `memory_ratio`, the largest of the
two sizes' peaks over the smaller, of each part. Finished parts are read from DIR.
"""

import argparse
import json
import pathlib
import shutil
import sys
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
PASSAGES, TRAIN_QUERIES, TRAIN_PAIRS = 8_841_823, 502_939, 532_751
JUDGED = {"dev": (6_980, 7_437), "test": (43, 9_260)}
WIDTH = 768
_WORDS, _SENTENCE = 56, 14
_AT_ONCE = 10_000
_STAGES = {
    "prepare": (
        "--config.data={data}",
        "--config.splits=('train','dev')",
        "--config.vocabulary_size=0",
    ),
    "evaluate": (
        f"--config={ROOT / 'tests' / 'benchmarks' / 'msmarco.py'}:bm25",
        "--config.data={data}",
        "--config.split=dev",
    ),
}
_COMMANDS = {"prepare": "prepare", "bm25": "evaluate"}
PARTS = ("make", "prepare", "bm25", "exact")


def get_config(name):
    """Returns `evaluate`'s settings with the system `name` alone."""
    from tfdpsq.run import evaluate

    config = evaluate.default_config()
    with config.unlocked():
        config.systems = {name: name}
    return config


def sizes(documents):
    """Returns {split: (queries, judgements)} of a corpus of this size."""
    share = documents / PASSAGES
    train = (round(TRAIN_QUERIES * share), round(TRAIN_PAIRS * share))
    return {"train": train, **JUDGED}


def passages(count):
    """Yields made-up passages of four sentences."""
    from scaling import VOCABULARY, made_up_words

    draw = np.random.default_rng(0)
    words = np.array(made_up_words(draw), object)
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
    """Writes the stand-in."""
    from tfdpsq.data import Document, write_beir

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
    return {"bytes": (home / "data" / "corpus.jsonl").stat().st_size}


def exact(home, documents):
    """Writes given embeddings, searches them for the dev queries, and measures."""
    from tfdpsq import evaluation, retriever
    from tfdpsq.run.core import sources

    qrels = sources.open_beir(str(home / "data")).qrels("dev")
    shutil.rmtree(home / "index", ignore_errors=True)
    draw = np.random.default_rng(2)
    right = {int(next(iter(of))): name for name, of in qrels.items()}
    queries = {}

    def chunks():
        for start in range(0, documents, 65_536):
            count = min(65_536, documents - start)
            vectors = draw.standard_normal([count, WIDTH], np.float32)
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
            for number in range(start, start + count):
                if number in right:
                    # Twice as far from its passage as that is long.
                    noise = draw.standard_normal(WIDTH).astype(np.float32)
                    noise /= np.linalg.norm(noise)
                    queries[right[number]] = vectors[number - start] + 2 * noise
            yield [str(n) for n in range(start, start + count)], vectors

    index = retriever.VectorStore.write(home / "index", "given", WIDTH, chunks())
    written = time.monotonic()
    names = sorted(queries)
    scores, places = index.search(np.stack([queries[n] for n in names]), 10)
    seconds = time.monotonic() - written
    run = {
        name: {str(p): float(s) for p, s in zip(places[at], scores[at])}
        for at, name in enumerate(names)
    }
    measured = evaluation.evaluate_run(qrels, run, ["recall@10"])
    size = sum(f.stat().st_size for f in (home / "index").iterdir())
    shutil.rmtree(home / "index")
    return {
        "queries": len(names),
        "search_seconds": round(seconds, 1),
        "bytes": size,
        "recall@10": round(measured.means["recall@10"], 4),
    }


def measured(part, home, documents):
    """Runs a part in a process of its own, unless it is finished; returns its row."""
    from scaling import cost_of  # not where this file is read as a config

    done = home / f"{part}.json"
    if done.is_file():
        return json.loads(done.read_text())
    if part in _COMMANDS:
        stage = _COMMANDS[part]
        command = ["-m", f"tfdpsq.run.{stage}", f"--workdir={home / part}"]
        command += [o.format(data=home / "data") for o in _STAGES[stage]]
    else:
        command = [__file__, f"--part={part}", f"--workdir={home}"]
        command += [f"--documents={documents}"]
    home.mkdir(parents=True, exist_ok=True)
    cost = cost_of([sys.executable, *command], ROOT, home / f"{part}.log")
    row = {"benchmark": "msmarco", "part": part, "documents": documents, **cost}
    said = home / f"{part}.said.json"
    if said.is_file():
        row.update(json.loads(said.read_text()))
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
        said = globals()[options.part](home, options.documents[0])
        (home / f"{options.part}.said.json").write_text(json.dumps(said))
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
