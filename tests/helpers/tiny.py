"""A BEIR directory and a pipeline config small enough for tests."""

import functools
import math
import pathlib
import shutil
import tempfile

import numpy as np

# The sizes of a T5, but for its vocabulary; as flags of a command, too.
SHAPE = {
    "num_layers": 1,
    "num_heads": 2,
    "hidden_dim": 16,
    "intermediate_dim": 24,
    "key_value_dim": 8,
    "dropout": 0.0,
}
FLAGS = {f"t5.{name}": size for name, size in SHAPE.items()}
NOUNS = "array list matrix tensor string file image graph table index".split()
VERBS = "sorts reads writes splits merges counts scales filters maps joins".split()
_EXTRAS = "quickly safely lazily twice inplace backwards recursively once".split()


def write_pairs(directory, train=60, dev=12, test=12, seed=0):
    """Writes a BEIR directory of templated pairs; returns its private queries."""
    random = np.random.default_rng(seed)
    total = train + dev + test
    documents, queries, splits = [], [], {"train": [], "dev": [], "test": []}
    for i in range(total):
        noun, verb = random.choice(NOUNS), random.choice(VERBS)
        extra, other = random.choice(_EXTRAS), random.choice(NOUNS)
        documents.append(
            f"This function {verb} the {noun} {extra} and gives back number {i}. "
            f"It needs the {other} as its second argument. The {noun} is kept as it "
            f"was, and an error tells what is wrong with the {other} where it is."
        )
        queries.append(f"who {verb} a {noun} {extra} case {i}")
        split = "train" if i < train else ("dev" if i < train + dev else "test")
        splits[split].append((f"q{i}", f"d{i}", 1))
    from tfdpsq.data import Document, write_beir

    write_beir(
        directory,
        [Document(f"d{i}", "", text) for i, text in enumerate(documents)],
        [(f"q{i}", text) for i, text in enumerate(queries)],
        splits,
    )
    return queries


def vectors(width=8):
    """Embeddings of 84 documents, and of queries, a rotation away from them."""
    random = np.random.default_rng(5)
    documents = random.normal(size=[84, width]).astype(np.float32)
    rotation, _ = np.linalg.qr(random.normal(size=[width, width]))
    noise = 0.05 * random.normal(size=documents.shape)
    return documents, (documents @ rotation + noise).astype(np.float32)


def write_embeddings(directory, texts, vectors, ids, encoder="a public encoder"):
    """Writes embeddings of "documents" or "queries"."""
    from tfdpsq.retriever import VectorStore

    VectorStore.write(directory / texts, encoder, vectors.shape[1], [(ids, vectors)])


def write_embedded(directory):
    """Writes embeddings of all that `write_pairs` writes."""
    documents, queries = vectors()
    write_embeddings(directory, "documents", documents, [f"d{i}" for i in range(84)])
    order = np.random.default_rng(6).permutation(84)  # ids decide, not places
    write_embeddings(directory, "queries", queries[order], [f"q{i}" for i in order])


def tiny_config(data, embedded=None):
    """The pipeline at the smallest size that still runs every stage.

    `embedded` is what `write_embedded` wrote, for the stages that need it.
    """
    from tfdpsq.run.stages import pipeline

    config = pipeline.STAGE.config(data=str(data), examples=2, seed=5)
    config.epsilons = (math.inf, 8.0)
    config.direct_epsilons = (8.0,)
    config.histogram_epsilon = 0.4
    config.histogram.clusters = 8
    config.init = ""  # random weights, and a vocabulary of these documents
    lengths = {"document_length": 32, "query_length": 12}
    config.pretrain.t5.update({**SHAPE, "vocabulary_size": 320, "version": "1.0"})
    config.pretrain.update(lengths, steps=3, held_out_one_in=8, batch_size=8)
    config.finetune.update(lengths, batch_size=8, microbatch_size=4, steps=3)
    config.finetune.update(accountant="rdp", n_is_public=True)
    # Long enough for canaries, of a vocabulary that has no words for digits.
    config.audit_epsilons = (8.0,)
    config.finetune.query_length = config.synthesize.max_length = 48
    config.canaries.update(repetitions=(2,), trials=1, candidates=20, digits=8)
    config.canaries.coins = 24
    config.audit.update(members=10, batch_size=16)
    config.synthesize.update(batch_size=16, shards=2)
    for stage in (config.retriever, config.direct):
        stage.update(lengths, embedding_dim=16, batch_size=4, n_is_public=True)
    config.retriever.update(steps=2, validation_pairs=8)
    config.direct.accountant = "rdp"
    config.evaluate.resamples = 200
    if embedded:
        config.embeddings, config.adapter_epsilons = str(embedded), (math.inf, 8.0, 0.5)
        config.adapter.update(encoder_is_public=True, n_is_public=True)
        config.adapter.update(accountant="rdp", steps=3)
    return config


def write_start(base, version="1.0", dropout=0.0, **options):
    """Writes "pairs", their vocabulary "spiece.model" and a "public" T5.

    Each T5 is made once for all tests of a process, and copied. Options are `layers`;
    `vocabulary`, a size; `further` texts of the vocabulary; and the numbers of pairs,
    as `write_pairs` takes them. Returns the private queries.
    """
    made, queries = _start(version, dropout, **options)
    shutil.copytree(made.name, base, dirs_exist_ok=True)
    return queries


@functools.cache
def _start(version, dropout, layers=1, vocabulary=320, further=(), **counts):
    import tensorflow as tf

    from tfdpsq.data import train_vocabulary
    from tfdpsq.generator import T5QueryGenerator
    from tfdpsq.layers import T5Config

    made = tempfile.TemporaryDirectory(prefix="tiny")  # as long as the process
    base = pathlib.Path(made.name)
    queries = write_pairs(base / "pairs", **counts)
    # Of private queries, but they are made up.
    train_vocabulary([*queries, *further], vocabulary, base / "spiece.model")
    tf.keras.utils.set_random_seed(3)
    (base / "public").mkdir()
    shape = T5Config(vocabulary + 10, layers, 2, 16, 24, 8, version, dropout=dropout)
    T5QueryGenerator(shape).save_to_huggingface(base / "public", base / "spiece.model")
    return made, tuple(queries)


def training(base, **options):
    """Settings of a stage that trains on what `write_start` wrote, and others."""
    return {
        "pairs": str(base / "pairs"),
        "init": str(base / "public"),
        "document_length": 24,
        "query_length": 10,
        "batch_size": 8,
        "accountant": "rdp",
        "n_is_public": True,
        **options,
    }


def add_answers(base):
    """Adds answers to 60 training queries of `write_start`: they have 63 pairs then."""
    with open(base / "pairs" / "qrels" / "train.tsv", "a") as qrels:
        qrels.write("q0\td1\t1\nq0\td2\t1\nq5\td6\t1\n")


def write_private_generator(directory, public, epsilon):
    """Writes a generator as `finetune` does; its weights are those of a public one.

    For tests of what follows from its certificate.
    """
    from helpers import framed

    shutil.copytree(public, directory)
    framed.certify(directory, epsilon, f"run of {epsilon}")


def write_set(path, rows, certificate=None, shards=1):
    """Writes a set of rows (query, document's id, document); returns its path."""
    from tfdpsq.data import SyntheticQuery, write_synthetic

    made = (SyntheticQuery(f"genQ{n}", *row, 0) for n, row in enumerate(rows))
    write_synthetic(path, made, {"by": "a test"}, certificate, shards)
    return str(path)


def write_public_pairs(base, count=40):
    """Writes a set of public queries: the first words of documents. Returns its path.

    `base` holds the pairs of `write_pairs`.
    """
    from tfdpsq.data import BeirDirectory

    documents = list(BeirDirectory(base / "pairs").documents())[:count]
    rows = ((" ".join(d.content.split()[:3]), d.id, d.content) for d in documents)
    return write_set(base / "public_queries", rows)
