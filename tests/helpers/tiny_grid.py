"""A small grid of generators for tests: its pairs, and the config of `choose`."""

from helpers import tiny
from tfdpsq.data import BeirDirectory, train_vocabulary
from tfdpsq.run import choose


def write(directory):
    """Writes pairs and a vocabulary; returns the directory."""
    tiny.write_pairs(directory / "pairs", train=60, dev=9, test=3)
    texts = (d.content for d in BeirDirectory(directory / "pairs").documents())
    train_vocabulary(texts, 320, directory / "spiece.model")
    return directory


def in_common(stage, base, steps):
    """Sets what all points of a grid have in common."""
    stage.update(
        {
            "vocabulary": str(base / "spiece.model"),
            "document_length": 24,
            "query_length": 10,
            "epsilon": 8.0,
            "n_is_public": True,
            "accountant": "rdp",
            "batch_size": 8,
            "steps": steps,
            "microbatch_size": 4,
        }
    )
    stage.t5.update(tiny.SHAPE, vocabulary_size=320)


def config(base, **changes):
    """Two points of 3 steps; `finetune__strict=False` sets finetune.strict."""
    made = choose.default_config()
    made.finetune.update(pairs=str(base / "pairs"), strict=True)
    in_common(made.finetune, base, steps=0)
    # 60 pairs in batches of 10: 0.5 epochs are 3 steps.
    made.axes = (
        ("learning_rate", (1e-3, 3e-2)),
        ("batch_size", (10,)),
        ("epochs", (0.5,)),
    )
    for field, value in changes.items():
        *path, last = field.split("__")
        node = made
        for part in path:
            node = node[part]
        node[last] = value
    return made
