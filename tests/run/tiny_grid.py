"""A small grid of generators for tests: its pairs, and the config of `choose`."""

import tiny

from tfdpsq.data import BeirDirectory, train_vocabulary
from tfdpsq.run import choose


def write(directory):
    """Writes pairs and a vocabulary; returns the directory."""
    tiny.write_pairs(directory / "pairs", train=60, dev=9, test=3)
    texts = (d.content for d in BeirDirectory(directory / "pairs").documents())
    train_vocabulary(texts, 320, directory / "spiece.model")
    return directory


def config(base, **changes):
    """Two points of 3 steps; `finetune__strict=False` sets finetune.strict."""
    made = choose.default_config()
    stage = made.finetune
    stage.update(
        {
            "pairs": str(base / "pairs"),
            "vocabulary": str(base / "spiece.model"),
            "document_length": 24,
            "query_length": 10,
            "epsilon": 8.0,
            "n_is_public": True,
            "accountant": "rdp",
            "strict": True,
            "batch_size": 8,
            "steps": 0,
            "microbatch_size": 4,
        }
    )
    stage.t5.update(
        vocabulary_size=320,
        num_layers=1,
        num_heads=2,
        hidden_dim=16,
        intermediate_dim=24,
        key_value_dim=8,
        dropout=0.0,
    )
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
