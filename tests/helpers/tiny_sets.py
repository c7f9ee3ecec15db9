"""BEIR directories small enough for tests, under the names of the paper's sets."""

import numpy as np

from helpers.tiny import NOUNS, VERBS
from tfdpsq.data import Document, write_beir


def made_up(draw, count):
    """Texts of a few common words each, and one of their own."""
    return [
        " ".join([*draw.choice(NOUNS, 4), *draw.choice(VERBS, 3), f"number{i}"])
        for i in range(count)
    ]


def write(path, seed, documents=30, queries=6):
    """A set whose queries share words with their documents, graded 1 and 2."""
    draw = np.random.default_rng(seed)
    texts = made_up(draw, documents)
    asked, judged = [], []
    for i in range(queries):
        words = texts[i].split()
        asked.append((f"q{i}", " ".join(draw.choice(words[:-1], 3, replace=False))))
        judged.append((f"q{i}", f"d{i}", 2))
        judged += [(f"q{i}", f"d{j}", int(draw.integers(0, 2))) for j in range(20, 25)]
    documents = [Document(f"d{i}", "", text) for i, text in enumerate(texts)]
    write_beir(path, documents, asked, {"test": judged})


def write_arguana(path):
    """Queries that are documents, each with another as its answer."""
    texts = made_up(np.random.default_rng(5), 24)
    write_beir(
        path,
        [Document(f"a{i}", "", text) for i, text in enumerate(texts)],
        [(f"a{i}", texts[i]) for i in range(8)],
        {"test": [(f"a{i}", f"a{i + 8}", 1) for i in range(8)]},
    )


def write_flawed(path):
    """100 judgements, one of a document that is not there; an empty document."""
    texts = made_up(np.random.default_rng(6), 100)
    write_beir(
        path,
        [Document(f"d{i}", "", text) for i, text in enumerate(texts)],
        [(f"q{i}", texts[i]) for i in range(100)],
        {"test": [(f"q{i}", f"d{i}", 1) for i in range(100)]},
    )
    with (path / "corpus.jsonl").open("a") as file:
        file.write('{"_id": "empty", "title": "", "text": ""}\n')
    qrels = path / "qrels" / "test.tsv"
    qrels.write_text(qrels.read_text().replace("\td7\t", "\tgone\t"))


def write_all(root):
    """scifact, nfcorpus, arguana, fiqa with its flaws, and CQADupStack's forums."""
    from tfdpsq.run.common import benchmark_sets

    for seed, name in enumerate(("scifact", "nfcorpus")):
        write(root / name, seed)
    write_arguana(root / "arguana")
    write_flawed(root / "fiqa")
    for seed, forum in enumerate(benchmark_sets.FORUMS, start=10):
        write(root / "cqadupstack" / forum, seed, queries=1 + seed % 3)
